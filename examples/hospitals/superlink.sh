#!/bin/sh
# ./superlink.sh: the server behind the door (nginx.conf, Caddyfile), which alone should reach it.
# --insecure: without encryption and without node keys, for a closed test network.
set -eu
cd "$(dirname "$0")"
umask 077  # models and messages on disk are for this user alone
if [ "${1:-}" = --insecure ]; then export INSECURE=1; fi
. ./env.sh
case "${LISTEN:-127.0.0.1}" in
  127.0.0.1 | localhost | ::1) ;;
  *) echo "WARNING: LISTEN=$LISTEN: whoever reaches port $LINK_PORT can run code here and at the sites: use nginx.conf" >&2 ;;
esac
if [ -e keys/ca.key ]; then
  echo "WARNING: keys/ca.key is here: move it to a place offline: its holder can pose as the server to every site" >&2
fi
for file in ca.crt server.crt server.key; do
  if [ -z "${INSECURE:-}" ] && [ ! -e "keys/$file" ]; then
    echo "superlink.sh: keys/$file is missing: make it with: fedda deploy keys keys --hosts NAME" >&2; exit 2
  fi
done
set -- --host "${LISTEN:-127.0.0.1}" --port "$LINK_PORT" --database "${DATABASE:-.flwr/state.db}"
if [ -n "${INSECURE:-}" ]; then exec flower-superlink --insecure "$@"; fi
exec flower-superlink --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \
  --enable-supernode-auth "$@"
