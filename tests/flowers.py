"""A real federation for tests: SuperLink and SuperNodes as processes of their own, on loopback, where possible in a
network namespace that has nothing else. They are forked from a process that has imported everything (warm.py)."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import fedda
from commands import ENVIRONMENT
from fedda.deploy.secret import SecretDraws
from namespaces import Namespace
from ranks import free_port
from warm import Warm

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds; Flower's own is 1
}
TOOLS = Path(sys.executable).parent
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "1.0.0"
dependencies = []
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "tests"
[tool.flwr.app.components]
serverapp = "{name}.server_app:app"
clientapp = "{name}.client_app:app"
[tool.flwr.app.config]
{config}
"""


def model():
    """A small network for digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))


def site_samples(clients):
    """The samples of each site, few and unequal."""
    whole = fedda.load("digits", clients=clients, partition="dirichlet", alpha=1.0).to(dtype=torch.float64)
    return [type(own)(own.x[: 20 + 9 * k], own.y[: 20 + 9 * k]) for k in range(clients) if (own := whole.everything(k))]


def secret_of(out):
    """The secret of the server that has written into this folder."""
    return bytes.fromhex(json.loads((Path(out) / "server.secret").read_text())["secret"])


def replayed(secret, algorithm, problem, rounds, every=1, **how):
    """The simulation of a federation, with the cohorts and batches of its server's secret."""
    run = fedda.Run(algorithm, problem, draws=SecretDraws(secret), **how)
    history = run.evaluate()
    while run.round < rounds:
        run.advance()
        history += run.evaluate() if run.round % every == 0 else []
    return SimpleNamespace(x=run.server.x[0], server=run.server, history=history)


class Flowers:
    """A SuperLink and nodes; `link` and `node(k)` are the words that secure them, `connection` those of the command line."""

    def __init__(self, place, link=("--insecure",), node=lambda k: ("--insecure",), connection="insecure = true"):
        self.place, self.link_words, self.node_words = place, link, node
        self.network, self.port, self.nodes, self.link = Namespace(), free_port(), {}, None
        self.doors = {}  # the ports of proxies by which nodes reach the link; without one they use its own
        self.environment = (
            ENVIRONMENT | QUIET | {"FLWR_HOME": str(place / "home"), "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
        )
        self.warm = Warm(self.environment, "quick_flower", prefix=self.network.prefix)
        (place / "home").mkdir(parents=True)
        text = f'[superlink]\ndefault = "t"\n[superlink.t]\naddress = "127.0.0.1:{self.port}"\n{connection}\n'
        (place / "home" / "config.toml").write_text(text)

    def start(self, program, log, *words):
        """A process in a session of its own, so that all it starts can be ended with it."""
        file = str(self.place / log)
        return self.warm.start([program, *words], out=file, err=file, start_new_session=True)

    def open(self, nodes):
        self.link = self.start(
            "flower-superlink", "link.log", *self.link_words, "--host", "127.0.0.1", "--port", self.port
        )
        self.wait_for(self.place / "link.log", "Uvicorn running", "SuperLinkLifespan: start")
        for k in range(nodes):
            self.join(k, nodes)

    def join(self, k, nodes, *more, about="", claims=None):
        """Start the node with the key of site k; it says that it is that site, or the one that it claims to be."""
        number, memory = k if claims is None else claims, self.place / f"memory{k}"
        about = f"partition-id={number} num-partitions={nodes} memory='{memory}' {about}"
        link = f"127.0.0.1:{self.doors.get(k, self.port)}"
        words = [*self.node_words(k), "--superlink", link, "--host", "127.0.0.1"]
        words += ["--port", free_port(), "--node-config", about, *more]
        self.nodes[k] = self.start("flower-supernode", f"node{k}.log", *words)

    def wait_for(self, log, *fragments, seconds=300):
        deadline = time.monotonic() + seconds
        while not any(fragment in log.read_text(errors="replace") for fragment in fragments):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def command(self, *words, seconds=300):
        """Flower's command line, to its end."""
        return self.warm.run(["flwr", *words], timeout=seconds)

    def submit(self, app, **config):
        """Start a run; where its results will be."""
        words = self.place / f"{time.monotonic_ns()}.toml"
        words.write_text("".join(f"{k.replace('_', '-')} = {_toml(v)}\n" for k, v in config.items()))
        done = self.command("run", app, "t", "--run-config", words, "--format", "json")
        assert done.returncode == 0 and json.loads(done.stdout)["success"], done.stdout + done.stderr
        return Path(config["out"])

    def ended(self, out, seconds=1200):
        """Wait until a run has ended, by its report."""
        deadline, file = time.monotonic() + seconds, out / "report.json"
        while not file.exists() or json.loads(file.read_text())["status"] == "running":
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)
        return json.loads(file.read_text())

    def logs(self):
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self.place.glob("*.log"))
        )

    def kill(self, process):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self):
        for process in (*self.nodes.values(), *([self.link] if self.link else [])):
            if process.poll() is None:
                self.kill(process)
        self.warm.close()
        self.network.close()
        self.no_orphans()

    def no_orphans(self, seconds=60):
        """What Flower has started in sessions of its own ends by itself, soon after its parent."""
        deadline = time.monotonic() + seconds
        while orphans := self.processes():
            if time.monotonic() > deadline:
                for pid in orphans:
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"orphans: {orphans}")
            time.sleep(0.2)

    def processes(self):
        """The processes of this federation that still run, by their environment: {pid: command}."""
        mark, found = f"FLWR_HOME={self.environment['FLWR_HOME']}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            except OSError:  # it has ended, or is another user's
                continue
        return found


def _toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(str(value)) if isinstance(value, str | Path) else str(value)
