"""Real Flower nodes as processes: the simulation's numbers, a node and a server killed, every sin of a client."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedda

pytest.importorskip("flwr", reason="needs fedda[flower]")
from fedda.deploy.keys import make_keys
from fedda.deploy.status import read_status
from fedda.training import for_rounds
from flowers import PROJECT, Flowers, replayed, secret_of
from ranks import free_port

NODES = 3
SINS = ["well", "raises", "nan", "misshapen", "huge", "stale", "hangs", "exits", "well"]
PACKAGE = "siteapp"
TASK = """
import os, signal, time
from pathlib import Path
import numpy as np
import torch
from torch import nn

loss, metrics = nn.functional.cross_entropy, ["top5_accuracy", "f1"]

def model():
    return nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 10))

def samples(k):
    found = np.load(Path(os.environ["FEDDA_TEST_SAMPLES"]) / f"{k}.npz")
    return torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
"""
CLIENT = """
from flwr.app import Message
from fedda.deploy import Site, client_app
from fedda.deploy.wire import packed
from .task import *

# What client 1 does with one message after the other, where the run asks for it. It is counted, not told by the round: a
# node has one message at a time, and notices late that the process of one has ended, so it misses rounds.
SINS = {sins}
SEEN = Path(os.environ["FEDDA_TEST_SAMPLES"]) / "seen"

def sinful(site, message, context):
    words = message.content["fields"]
    if context.node_config["partition-id"] != 1 or words["task"] != "local":
        return site.answer(message, context)
    number = int(SEEN.read_text()) if SEEN.exists() else 0
    SEEN.write_text(str(number + 1))
    sin = SINS[number] if number < len(SINS) else "well"
    if sin == "raises":
        raise OSError("the disk is full")
    if sin == "exits":
        os._exit(3)
    if sin == "hangs":
        time.sleep(15)  # longer than a round
    reply = site.answer(message, context)
    if sin == "well":
        return reply
    said = {k: v for k, v in reply.content["fields"].items() if k != "protocol"}
    x = torch.from_numpy(reply.content["tensors"]["0"].numpy().copy())
    x = {"nan": x * float("nan"), "misshapen": x[:, 1:], "huge": x + 1e9, "stale": x}[sin]
    said["stamp"] -= sin == "stale"
    return Message(packed((x,), said), reply_to=message)

class Sinner:
    def __init__(self, context):
        self.site = Site(model(), loss, *samples(context.node_config["partition-id"]), metrics=metrics)
        self.sinful = context.run_config["sins"]

    def answer(self, message, context):
        return sinful(self.site, message, context) if self.sinful else self.site.answer(message, context)

app = client_app(Sinner)
"""
SERVER = """
import fedda.deploy.server
from fedda.deploy import server_app
from .task import *

fedda.deploy.server.LINK_TIMEOUT = 5.0  # so that the test of a killed SuperLink is short

app = server_app(model, loss, metrics=metrics)
"""
CONFIG = """
algorithm = "fedavg"
params = "{}"
clients = 3
rounds = 4
cohort = 0
batch = 8
seed = 0
weights = "samples"
max-samples = 1000
dtype = "float64"
every = 0
timeout = 300.0
min-replies = 1
repeats = 0
limit = 1e6
participants = ""
without = ""
out = ""
resume = false
sins = false
"""
# A round more than the first shows what a round hands on to the next. A server that is killed has rounds before and after.
ROUNDS = {"fedda-mvr": 3, "fedda": 3, "fedavg": 2, "scaffold": 4, "mime": 2}
RUNS = {
    "fedda-mvr": {"lr": 0.02, "w": 1000.0, "stragglers": 0.5, "max_grad_norm": 0.5},
    "fedda": {"prox": {"kind": "l1", "gamma": 0.001}, "weight_decay": 0.1},
    "fedavg": {"lr": {"kind": "cosine", "start": 0.1}, "steps": "proportional"},
    "scaffold": {"lr": 0.1, "epochs": 0.5},
    "mime": {"lr": 0.1},
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """What each site has, in files: unequal parts of the digits."""
    place = tmp_path_factory.mktemp("samples")
    whole = fedda.load("digits", clients=NODES, partition="dirichlet", alpha=1.0).to(dtype=torch.float64)
    for k in range(NODES):
        x, y = whole.everything(k)
        np.savez(place / f"{k}.npz", x=x.flatten(1)[: 60 + 20 * k], y=y[: 60 + 20 * k])
    os.environ["FEDDA_TEST_SAMPLES"] = str(place)
    yield place
    del os.environ["FEDDA_TEST_SAMPLES"]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    place = tmp_path_factory.mktemp("app")
    (place / "pyproject.toml").write_text(PROJECT.format(name=PACKAGE, config=CONFIG))
    (place / PACKAGE).mkdir()
    for name, text in {
        "__init__": "",
        "task": TASK,
        "client_app": CLIENT.replace("{sins}", repr(SINS)),
        "server_app": SERVER,
    }.items():
        (place / PACKAGE / f"{name}.py").write_text(text)
    return place


@pytest.fixture(scope="module")
def flowers(tmp_path_factory, samples):
    """TLS, and nodes with registered keys."""
    place, keys = tmp_path_factory.mktemp("flowers"), tmp_path_factory.mktemp("keys")
    make_keys(keys, ["127.0.0.1"], list(range(NODES + 1)))
    made = Flowers(
        place / "here",
        [
            *("--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"),
            *("--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"),
        ],
        lambda k: ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node{k}"],
        f'root-certificates = "{keys / "ca.crt"}"',
    )
    made.environment["FEDDA_TEST_SAMPLES"], made.keys = str(samples), keys
    try:
        made.open(0)
        let_in(made)
        yield made
    finally:
        made.close()


def let_in(flowers, nodes=range(NODES), **claims):
    """Register the nodes' keys, start the nodes and wait for them."""
    before = activated(flowers)
    for k in nodes:
        done = flowers.command("supernode", "register", flowers.keys / f"node{k}.pub", "t")
        assert done.returncode == 0, done.stdout + done.stderr
        flowers.join(k, NODES, **claims)
    wait_until(flowers, lambda: activated(flowers) == before + len(nodes))


def truth(samples, name, rounds, out, **how):
    """The same by the vectorised engine, from the model that the server starts with."""
    from fedda.deploy.server import Plan, Remote

    space = {}
    exec(TASK, space)
    asked = Plan(algorithm=name, params=json.dumps(RUNS[name]), dtype="float64", clients=NODES, max_samples=1000)
    x0 = Remote(space["model"], space["loss"], asked, None).start(0)
    parts = [np.load(samples / f"{k}.npz") for k in range(NODES)]
    x, y = (torch.cat([torch.from_numpy(part[side]) for part in parts]) for side in "xy")
    owner = torch.cat([torch.full((len(part["y"]),), k) for k, part in enumerate(parts)])
    problem = fedda.problem(
        space["model"]().double(), space["loss"], x=x, y=y, client=owner, batch=8, metrics=space["metrics"]
    )  # fmt: skip
    how = {"weights": "samples", "x0": x0, "seed": 0, **how}
    algorithm = for_rounds(fedda.make(name, **RUNS[name]), problem, rounds)
    return replayed(secret_of(out), algorithm, problem, rounds, every=rounds, **how)


def rounds_done(out):
    try:
        return int(load_file(out / "state.safetensors")["round"])
    except (OSError, KeyError, ValueError):
        return -1


def test_five_algorithms_as_simulated_though_a_server_is_killed(flowers, app, samples, tmp_path):
    """All at once on one federation: FedDA, an L1 penalty, client memory (its server is killed and resumed), two
    exchanges a round."""
    outs = {name: tmp_path / name for name in RUNS}
    for name, out in outs.items():
        every = ROUNDS[name] if name == "fedavg" else 0  # an evaluation takes its time
        flowers.submit(app, algorithm=name, params=json.dumps(RUNS[name]), out=out, rounds=ROUNDS[name], every=every)
    out = outs["scaffold"]
    wait_until(flowers, lambda: rounds_done(out) >= 2)
    os.kill(int((out / "server.pid").read_text()), signal.SIGKILL)
    assert rounds_done(out) < ROUNDS["scaffold"]
    assert json.loads((out / "report.json").read_text())["status"] == "running"  # a killed server writes nothing
    how = {"algorithm": "scaffold", "params": json.dumps(RUNS["scaffold"]), "out": out, "rounds": ROUNDS["scaffold"]}
    flowers.submit(app, **how, resume=True)
    for name, out in outs.items():
        assert flowers.ended(out)["rejected"] == {}, flowers.logs()
        state, expected = load_file(out / "state.safetensors"), truth(samples, name, ROUNDS[name], out).server
        for field, value in expected._asdict().items():
            torch.testing.assert_close(state[f"server.{field}"], value, rtol=1e-12, atol=1e-12)
    row = json.loads((outs["fedavg"] / "metrics.jsonl").read_text().splitlines()[-1])
    expected = truth(samples, "fedavg", ROUNDS["fedavg"], outs["fedavg"]).history[-1]
    for name in ("round", "train_loss", "train_accuracy", "train_top5_accuracy"):
        assert row[name] == pytest.approx(expected[name], rel=1e-12)
    assert 0 < row["train_site_mean_f1"] < 1


def seen(samples):
    """How many messages client 1 has begun with."""
    try:
        return int((samples / "seen").read_text())
    except (OSError, ValueError):
        return 0


def test_every_sin_of_a_client_and_a_killed_node_are_survived_and_counted(flowers, app, samples, tmp_path):
    rounds = len(SINS) + 3  # some are missed
    # Time enough for the others on a busy machine.
    how = {"rounds": rounds, "timeout": 12.0, "sins": True, "params": json.dumps(RUNS["fedavg"])}
    out = flowers.submit(app, out=tmp_path / "out", **how)
    wait_until(flowers, lambda: seen(samples) > SINS.index("hangs"))
    flowers.kill(flowers.nodes[2])  # in the round in which client 1 hangs: it takes its time anyway
    report = flowers.ended(out)
    rejected = report["rejected"]
    assert seen(samples) > len(SINS), report  # all of them, and well again
    # The text of an exception stays at its site.
    elsewhere = [out / "report.json", *(flowers.place / f"{name}.log" for name in ("link", "node0", "node2"))]
    assert not any("the disk is full" in file.read_text(errors="replace") for file in elsewhere)
    assert "the disk is full" in (flowers.place / "node1.log").read_text(errors="replace")
    for kind in ("not finite", "malformed", "too large", "stale"):
        assert rejected[kind] == 1, report
    # Raised, exited, hung; and the node that was killed: late until Flower has noticed.
    assert rejected["failed"] >= 1 and sum(rejected.get(kind, 0) for kind in ("failed", "late", "gone")) >= 4
    state = load_file(out / "state.safetensors")
    assert int(state["round"]) == rounds and float(state["server.x"].abs().max()) < 10
    heard = list(json.loads((out / "server.secret").read_text())["base"].values())[-1]
    assert heard[:2] == [rounds - 1] * 2  # client 1 is heard again
    rejoin(flowers, 2)
    how = {"rounds": 1, "min_replies": NODES, "params": json.dumps(RUNS["fedavg"])}
    assert flowers.ended(flowers.submit(app, out=tmp_path / "again", **how))["rejected"] == {}


def rejoin(flowers, k, seconds=900):
    """Start a node until it is let in: its key is taken until Flower has noticed that it was killed."""
    before, deadline = activated(flowers), time.monotonic() + seconds
    while activated(flowers) == before:
        assert time.monotonic() < deadline, flowers.logs()
        if flowers.nodes[k].poll() is not None:
            flowers.join(k, NODES)
        time.sleep(1)


def wait_until(flowers, true, seconds=1200):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, flowers.logs()
        time.sleep(0.1)


def test_strangers_are_kept_out(flowers, tmp_path):
    """An unregistered key, no key, a CA of somebody else's, no TLS at all: none of them becomes a node."""
    make_keys(tmp_path / "other", ["127.0.0.1"], [0])
    ours, trust = flowers.keys, ["--root-certificates", flowers.keys / "ca.crt"]
    words = {
        "unregistered": [*trust, "--auth-supernode-private-key", ours / f"node{NODES}"],
        "keyless": trust,
        "deceived": [
            "--root-certificates",
            tmp_path / "other" / "ca.crt",
            "--auth-supernode-private-key",
            ours / "node0",
        ],
        "plain": ["--insecure"],
    }
    before = activated(flowers)
    link = ["--superlink", f"127.0.0.1:{flowers.port}", "--host", "127.0.0.1"]
    strangers = {
        name: flowers.start("flower-supernode", f"{name}.log", *how, *link, "--port", free_port(), "--max-retries", 1)
        for name, how in words.items()
    }
    try:
        for name, process in strangers.items():
            log = flowers.place / f"{name}.log"
            wait_until(flowers, lambda p=process, log=log: p.poll() is not None or refused(log), 600)
        time.sleep(2)
        assert activated(flowers) == before
    finally:
        for process in strangers.values():
            if process.poll() is None:
                flowers.kill(process)


def activated(flowers):
    """How often a node was let in."""
    return (flowers.place / "link.log").read_text().count("Activated node_id")


def refused(log):
    """What a node's log says when it is not let in."""
    text = log.read_text(errors="replace").lower()
    return any(
        word in text for word in ("unauthenticated", "permission", "certificate_verify_failed", "ssl", "error", "401")
    )


def test_a_killed_superlink_ends_its_server_and_the_run_resumes(flowers, app, samples, tmp_path):
    """The last test of this federation. Before the run resumes, a node with a key of its own claims to be site 1."""
    rounds, out = 4, tmp_path / "out"
    how = {"algorithm": "fedavg", "params": json.dumps(RUNS["fedavg"]), "out": out, "rounds": rounds}
    how["participants"] = flowers.keys
    flowers.submit(app, **how)
    wait_until(flowers, lambda: rounds_done(out) >= 1)
    server = int((out / "server.pid").read_text())
    secrets = [(flowers.keys / name).read_text().split()[1] for name in ("ca.key", "server.key", "node0", "node1")]
    assert not any(secret[:40] in command for command in flowers.processes().values() for secret in secrets)
    os.kill(flowers.link.pid, signal.SIGKILL)
    wait_until(flowers, lambda: not running(server), 120)
    assert read_status(out)["status"] in ("failed", "died") and rounds_done(out) < rounds
    for node in flowers.nodes.values():
        flowers.kill(node)
    flowers.link.wait()
    # Another SuperLink, which knows nothing of the first.
    (flowers.place / "link.log").unlink()
    flowers.open(0)
    let_in(flowers, [0, 2])
    let_in(flowers, [NODES], claims=1)
    flowers.submit(app, **how, resume=True)
    wait_until(flowers, lambda: json.loads((out / "report.json").read_text()).get("refused_nodes"), 300)
    let_in(flowers, [1])
    wait_until(flowers, lambda: json.loads((out / "report.json").read_text())["status"] == "finished", 300)
    report = json.loads((out / "report.json").read_text())
    torch.testing.assert_close(
        load_file(out / "state.safetensors")["server.x"], truth(samples, "fedavg", rounds, out).server.x, rtol=1e-12,
        atol=1e-12,
    )  # fmt: skip
    assert all(site["key"].startswith("SHA256:") for site in report["sites"].values())
    (refused,) = report["refused_nodes"]
    assert f"it has the key of site {NODES} (SHA256:" in refused and refused.endswith(") and claims to be site 1")


def running(pid):
    """Whether a process runs: not one that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
