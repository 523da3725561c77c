#!/bin/sh
# ./supernode.sh NUMBER [--insecure]: the node of site NUMBER, with keys/nodeNUMBER. NODE_CONFIG: more for load_data.
set -eu
cd "$(dirname "$0")"
umask 077  # models and messages on disk are for this user alone
case "${1:-}" in '' | *[!0-9]*) echo "usage: ./supernode.sh NUMBER [--insecure]" >&2; exit 2 ;; esac
if [ "${2:-}" = --insecure ]; then export INSECURE=1; fi
. ./env.sh
number=$1
if [ -z "${INSECURE:-}" ] && [ ! -e "keys/node$number" ]; then
  echo "supernode.sh: keys/node$number is missing: make it with: fedda deploy keys keys --only $number" >&2; exit 2
fi
if [ -z "${INSECURE:-}" ] && [ ! -e keys/ca.crt ]; then
  echo "supernode.sh: keys/ca.crt is missing: get it from the server" >&2; exit 2
fi
set -- --superlink "$LINK_HOST:$LINK_PORT" --host 127.0.0.1 --port "${NODE_PORT:-$((9100 + number))}" \
  --node-config "partition-id=$number num-partitions=${SITES:-4} memory='$PWD/memory/$number' ${NODE_CONFIG:-}"
# Flower refuses a node whose clock is off, and does not say so. Status 2: no answer yet; the node will try again.
fedda deploy check "$LINK_HOST:$LINK_PORT" --clock || [ $? -eq 2 ]
if [ -n "${INSECURE:-}" ]; then exec flower-supernode --insecure "$@"; fi
exec flower-supernode --root-certificates keys/ca.crt --auth-supernode-private-key "keys/node$number" "$@"
