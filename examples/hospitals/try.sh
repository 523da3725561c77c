#!/bin/sh
# ./try.sh [RUN-CONFIG]: the whole federation on this machine, encrypted and authenticated: makes keys where there are
# none, starts the SuperLink and 4 nodes on free ports, does a run (2 rounds), stops everything. Logs: try-*.log
set -eu
cd "$(dirname "$0")"
if [ -e federation ]; then echo "try.sh: ./federation holds a run already: move it away first" >&2; exit 2; fi
if [ ! -e keys ]; then fedda deploy keys keys --hosts localhost --nodes 4; fi

free() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
started=""
stop() { for pid in $started; do kill "$pid" 2> /dev/null || true; done; wait; }
trap stop EXIT
trap 'exit 130' INT TERM

LINK_PORT=$(free); export LINK_PORT
. ./env.sh
DATABASE=:flwr-in-memory: ./superlink.sh > try-superlink.log 2>&1 &
started="$started $!"
link=$!
until python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1)' "$LINK_PORT" 2> /dev/null; do
  kill -0 "$link" 2> /dev/null || { cat try-superlink.log >&2; exit 1; }
  sleep 0.5
done
./register.sh
number=0
while [ "$number" -lt 4 ]; do
  NODE_PORT=$(free) ./supernode.sh "$number" > "try-supernode$number.log" 2>&1 &
  started="$started $!"
  number=$((number + 1))
done
flwr run . federation --stream --run-config "${1:-rounds=2}" 2>&1 | tee try-run.log
if ! grep -q 'round \([0-9]*\) of \1:' try-run.log; then
  echo "try.sh: the run did not end well; the logs are try-*.log" >&2
  exit 1
fi
echo "the last row of federation/metrics.jsonl, and federation/report.json:"
tail -n 1 federation/metrics.jsonl
cat federation/report.json
