#!/bin/sh
# ./register.sh [KEY.pub ...]: let nodes in by their public keys, all of keys/node*.pub if none is named.
set -eu
cd "$(dirname "$0")"
. ./env.sh
if [ $# -eq 0 ]; then set -- keys/node*.pub; fi
for key in "$@"; do flwr supernode register "$key" federation; done
