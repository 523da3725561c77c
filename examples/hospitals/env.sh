# Settings that all scripts share. Before `flwr`, in this folder: . ./env.sh
export LINK_HOST="${LINK_HOST:-127.0.0.1}"  # where the SuperLink is, as the sites call it
export LINK_PORT="${LINK_PORT:-9092}"

# Flower keeps its files here, tells nobody of its use, asks for no update and installs nothing.
export FLWR_HOME="$PWD/.flwr"
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.5  # seconds between two looks for work on this machine; Flower's own is 1

if ! command -v flower-superlink > /dev/null; then
  echo "env.sh: Flower's commands are not on the PATH: activate the environment that has fedda[flower]" >&2
fi

mkdir -p "$FLWR_HOME"
{
  echo '[superlink]'
  echo 'default = "federation"'
  echo '[superlink.federation]'
  echo "address = '$LINK_HOST:$LINK_PORT'"
  if [ -n "${INSECURE:-}" ]; then
    echo 'insecure = true'
    echo "WARNING: INSECURE is set: no encryption, and whoever reaches the port can take part and read all" >&2
  else
    echo "root-certificates = '$PWD/keys/ca.crt'"
  fi
} > "$FLWR_HOME/config.toml"
