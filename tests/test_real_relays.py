"""Two relays with two sites each, as real processes: three SuperLinks, six SuperNodes, the numbers of one flat run."""

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedda

pytest.importorskip("flwr", reason="needs fedda[flower]")
from fedda.deploy.init import config
from fedda.deploy.server import Plan, Remote
from flowers import PROJECT, Flowers, replayed, secret_of

RELAYS, SITES, ROUNDS = 2, 2, 2
PARAMS = {"lr": 0.1, "steps": 2}
TASK = """
import torch
from torch import nn

loss = nn.functional.mse_loss

def model():
    return nn.Linear(3, 1)

def samples(k):
    g = torch.Generator().manual_seed(k)
    x = torch.randn(4 + k, 3, generator=g)
    return x, x.sum(dim=1, keepdim=True) + k
"""
CLIENT = """
from fedda.deploy import Site, client_app
from .task import *

app = client_app(lambda context: Site(model(), loss, *samples(context.node_config["partition-id"])))
"""
SERVER = """
from fedda.deploy import server_app
from .task import *

app = server_app(model, loss)
"""


@pytest.fixture
def app(tmp_path):
    place = tmp_path / "app"
    (place / "relayapp").mkdir(parents=True)
    given = {"algorithm": "scaffold", "params": json.dumps(PARAMS), "rounds": ROUNDS, "dtype": "float64", "batch": 3}
    given |= {"weights": "samples", "max_samples": 100, "every": ROUNDS, "timeout": 240.0, "repeats": 0}
    (place / "pyproject.toml").write_text(PROJECT.format(name="relayapp", config=config(given)))
    for name, text in {"__init__": "", "task": TASK, "client_app": CLIENT, "server_app": SERVER}.items():
        (place / "relayapp" / f"{name}.py").write_text(text)
    return place


@pytest.fixture
def federations(tmp_path):
    made = {name: Flowers(tmp_path / name) for name in ("upper", *(f"lower{r}" for r in range(RELAYS)))}
    try:
        for flowers in made.values():
            flowers.open(0)
        yield made
    finally:
        for flowers in made.values():
            flowers.close()
        deadline = time.monotonic() + 60
        while alive := processes_of(tmp_path):  # a relay ends with its SuperLink
            assert time.monotonic() < deadline, alive
            time.sleep(0.2)


def processes_of(place):
    """The processes that were started with a folder of this place in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [file.parent.name] if f"FLWR_HOME={place}".encode() in file.read_bytes() else []
    return found


def test_two_relays_with_two_sites_each(app, federations, tmp_path):
    """With client memory, sample weights and an evaluation."""
    for r in range(RELAYS):
        lower, path = federations[f"lower{r}"], tmp_path / f"relay{r}" / "relay.sock"
        for k in range(r * SITES, (r + 1) * SITES):
            lower.join(k, RELAYS * SITES)
        lower.submit(app, clients=SITES, relay=path, out=tmp_path / "unused")
        federations["upper"].join(r, RELAYS, about=f"relay='{path}'")
    out = federations["upper"].submit(app, clients=RELAYS * SITES, out=tmp_path / "out")
    report = federations["upper"].ended(out)
    assert len(processes_of(tmp_path)) >= 11  # three SuperLinks, six nodes, two relays
    logs = "\n".join(flowers.logs() for flowers in federations.values())
    assert report["status"] == "finished" and report["rejected"] == {}, logs
    assert {site: record["samples"] for site, record in report["sites"].items()} == {"0": 4, "1": 5, "2": 6, "3": 7}
    space = {}
    exec(TASK, space)
    asked = Plan(algorithm="scaffold", params=json.dumps(PARAMS), dtype="float64", clients=RELAYS * SITES)
    x0 = Remote(space["model"], space["loss"], asked, None).start(0)
    data = [space["samples"](k) for k in range(RELAYS * SITES)]
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    owner = torch.cat([torch.full((len(own),), k) for k, (_, own) in enumerate(data)])
    problem = fedda.problem(space["model"]().double(), space["loss"], x=x, y=y, client=owner, batch=3)
    algorithm = fedda.make("scaffold", **PARAMS)
    truth = replayed(secret_of(out), algorithm, problem, ROUNDS, every=ROUNDS, weights="samples", x0=x0)
    state = load_file(out / "state.safetensors")
    for field, value in truth.server._asdict().items():
        torch.testing.assert_close(state[f"server.{field}"], value, rtol=1e-12, atol=1e-12)
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["train_loss"] == pytest.approx(truth.history[-1]["train_loss"], rel=1e-9)
    assert row["gradients"] == truth.history[-1]["gradients"] == ROUNDS * RELAYS * SITES * PARAMS["steps"]
