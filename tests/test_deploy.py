"""A federation in one process: the numbers of the simulation, faults counted, strangers' messages refused."""

import errno
import fcntl
import json
import math
import os
import pickle
import random
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedda
from conftest import NAMES, example

flwr = pytest.importorskip("flwr", reason="needs fedda[flower]")
import httpx  # noqa: E402
from cryptography.hazmat.primitives import serialization  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict  # noqa: E402
from flwr.proto.node_pb2 import NodeInfo  # noqa: E402

from fedda.aggregation.dry_run import dry_run  # noqa: E402
from fedda.deploy import InProcessGrid, Site, SuperLinkGone, TooFewReplies, client_app, federation, participants  # noqa: E402
from fedda.deploy.client import HELLO, SiteError  # noqa: E402
from fedda.deploy.federation import Federation  # noqa: E402
from fedda.deploy.keys import make_keys  # noqa: E402
from fedda.deploy.report import PARTS  # noqa: E402
from fedda.deploy.secret import SecretDraws  # noqa: E402
from fedda.deploy.server import Plan  # noqa: E402
from fedda.deploy.server import serve as serve_with  # noqa: E402
from fedda.deploy.sums import ExactSum  # noqa: E402
from fedda.deploy.wire import packed  # noqa: E402
from flowers import model, replayed, site_samples  # noqa: E402

CLIENTS = 4
SECRET = bytes(range(32))  # of the server: from it come cohorts and batches
LOSS = nn.functional.cross_entropy


@pytest.fixture(scope="module")
def data():
    return site_samples(CLIENTS)


@pytest.fixture
def app(data):
    return client_app(lambda context: Site(model(), LOSS, *data[context.node_config["partition-id"]]))


def params(name):
    """The stable hyper-parameters of a test, as JSON has them."""
    return example(name) | {"steps": 2}


def plan(tmp_path, name="fedavg", given=None, **changes):
    how = {"clients": CLIENTS, "rounds": 4, "cohort": 3, "batch": 5, "dtype": "float64", "timeout": 5.0, "every": 2}
    how |= {"weights": "samples", "max_samples": 1000, "out": str(tmp_path / "out")} | changes
    return Plan(algorithm=name, params=json.dumps(params(name) if given is None else given), **how)


def simulated(data, asked, x0, **more):
    """The same run by the vectorised engine."""
    parts = [torch.cat([getattr(own, side) for own in data]) for side in "xy"]
    owner = torch.cat([torch.full((len(own.y),), k) for k, own in enumerate(data)])
    problem = fedda.problem(model().double(), LOSS, x=parts[0], y=parts[1], client=owner, batch=asked.batch)
    table = json.loads(asked.params)
    how = {"cohort": asked.cohort, "seed": asked.seed, "weights": asked.weights, "x0": x0, "every": asked.every}
    return replayed(SECRET, fedda.make(asked.algorithm, **table), problem, rounds=asked.rounds, **how, **more)


def serve(*given, secret=SECRET, **more):
    return serve_with(*given, secret=secret, **more)


def quiet(line):
    pass


# -- the same numbers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_as_simulated(name, app, data, tmp_path):
    asked = plan(tmp_path, name)
    run = serve(InProcessGrid(app, CLIENTS), asked, model, LOSS, say=quiet)
    truth = simulated(data, asked, run.problem.start(asked.seed))
    for ours, theirs in zip(run.server, truth.server, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 2, 4]
    for ours, theirs in zip(rows, truth.history, strict=True):
        shared = set(ours) & set(theirs) - {"seconds"}
        assert {"gradients", "full_gradients", "bytes_up", "bytes_down", "train_loss", "dropped"} <= shared
        assert {k: ours[k] for k in shared} == pytest.approx({k: theirs[k] for k in shared}, rel=1e-9, nan_ok=True)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {k: site["samples"] for k, site in report["sites"].items()} == {
        str(k): len(own.y) for k, own in enumerate(data)
    }
    used = sum(site["replies"] for site in report["sites"].values())
    assert all(site["connected"] and not site["rejected"] for site in report["sites"].values())
    start, round = dry_run(fedda.make(name, **json.loads(asked.params)), torch.zeros(1, 5))
    assert used == asked.cohort * asked.rounds * len(round) + CLIENTS * len(start)
    assert {
        "status": "finished",
        "round": 4,
        "rounds": 4,
        "rejected": {},
        "last": {},
        "waiting": [],
    }.items() <= report.items()
    assert set(report["seconds"]) == set(report["last_round"]) == set(PARTS)


def again(grid, app):
    """The nodes as a run finds them that is submitted again: a fresh state, and what lies on their disks."""
    fresh = InProcessGrid(app, CLIENTS)
    for node, context in fresh.contexts.items():
        context.node_config |= {k: v for k, v in grid.contexts[node].node_config.items() if k == "memory"}
    return fresh


@pytest.mark.parametrize(("name", "around"), [("scaffold", []), ("fedda-mvr", []), ("mime", [{"name": "topk"}])])
def test_a_server_that_died_goes_on_to_the_same_numbers(name, around, app, data, tmp_path):
    """It dies after the clients have answered, before the round is saved: they are asked again, as of the round before."""
    whole = serve(
        InProcessGrid(app, CLIENTS),
        plan(tmp_path / "a", name, rounds=6, aggregation=json.dumps(around)),
        model,
        LOSS,
        say=quiet,
    )
    grid = InProcessGrid(app, CLIENTS)
    for node, context in grid.contexts.items():
        context.node_config["memory"] = str(tmp_path / f"node{node}")

    class Died(Exception):
        pass

    def die(line):
        if line.startswith("round 3"):
            raise Died

    with pytest.raises(Died):
        serve(grid, plan(tmp_path / "b", name, rounds=6, aggregation=json.dumps(around)), model, LOSS, say=die)
    for after in (2, 3, 4, 5) if around else (2, 3, 4):  # exchanges, after one that asks who is there
        with pytest.raises(KeyboardInterrupt):
            grid = again(grid, app)
            serve(
                Dying(grid, after),
                plan(tmp_path / "b", name, rounds=6, aggregation=json.dumps(around), resume=True),
                model,
                LOSS,
                say=quiet,
            )
    run = serve(
        again(grid, app),
        plan(tmp_path / "b", name, rounds=6, aggregation=json.dumps(around), resume=True),
        model,
        LOSS,
        say=quiet,
    )
    assert all(torch.equal(a, b) for a, b in zip(run.server, whole.server, strict=True))
    files = [(tmp_path / x / "out" / "metrics.jsonl").read_text().splitlines() for x in "ab"]
    rows = [[{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines] for lines in files]
    assert rows[0] == rows[1]


class Dying:
    """A grid whose server is killed in the middle of an exchange, when the replies are on their way."""

    def __init__(self, grid, after):
        self.grid, self.left = grid, after

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def pull_messages(self, ids):
        found = self.grid.pull_messages(ids)
        self.left -= bool(found)
        if self.left <= 0:
            raise KeyboardInterrupt
        return found


def test_without_a_folder_a_client_forgets_with_its_server(app, tmp_path):
    """Flower's state is of one run; such a client says so, is counted, and is not asked to guess."""
    asked = {"name": "scaffold", "cohort": CLIENTS, "repeats": 0}
    serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=2, **asked), model, LOSS, say=quiet)
    with pytest.raises(TooFewReplies, match="refused"):
        serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=3, resume=True, **asked), model, LOSS, say=quiet)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert "has no memory" in report["last"]["refused"]


def test_another_plan_is_not_resumed(app, tmp_path):
    serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=1), model, LOSS, say=quiet)
    with pytest.raises(ValueError, match="holds a run"):
        serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=1), model, LOSS, say=quiet)
    with open(tmp_path / "out" / "server.pid") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another server is writing"):
            serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=1, resume=True), model, LOSS, say=quiet)
    with pytest.raises(ValueError, match=r"cannot change these settings: seed was 0 and is 1$"):
        serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=3, seed=1, resume=True), model, LOSS, say=quiet)
    (tmp_path / "out" / "state.safetensors").write_bytes(pickle.dumps({"round": 3}))
    with pytest.raises(ValueError, match="not a checkpoint of fedda"):
        serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=3, resume=True), model, LOSS, say=quiet)


WRAPPED = {
    "clip": [{"name": "clip", "norm": 0.01, "where": "client"}],
    "robust": [{"name": "clip", "norm": 0.5}, {"name": "median"}],
    "trimmed": [{"name": "trimmed", "share": 0.3}],
    "no noise": [{"name": "clip", "norm": 0.1, "where": "client"}, {"name": "noise", "multiplier": 0.0, "norm": 0.1}],
    "packed": [{"name": "topk", "share": 0.25}, {"name": "float16"}],
}


@pytest.mark.parametrize("name", ["fedda-mvr", "scaffold"])
@pytest.mark.parametrize("around", WRAPPED)
def test_wrappers_as_simulated(around, name, app, data, tmp_path):
    """Clipping and packing on the clients, robust means on the server; residuals stay with the clients."""
    asked = plan(tmp_path, name, aggregation=json.dumps(WRAPPED[around]))
    run = serve(InProcessGrid(app, CLIENTS), asked, model, LOSS, say=quiet)
    made = [fedda.aggregation.make(**table) for table in WRAPPED[around]]
    truth = simulated(data, asked, run.problem.start(asked.seed), aggregation=made)
    for ours, theirs in zip(run.server, truth.server, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["bytes_up"] == truth.history[-1]["bytes_up"]


def test_a_mean_has_the_same_bits_in_every_order_of_arrival():
    """In units in which the terms differ by up to 60 powers of 2, and beside the exact sum of fractions."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-40, 20, (50, 7), generator=generator)
    rows = torch.randn(50, 7, generator=generator, dtype=torch.float64) * 2.0**powers
    weights = torch.randint(1, 1000, (50,), generator=generator).tolist()
    values = []
    for order in (range(50), reversed(range(50)), torch.randperm(50, generator=generator).tolist()):
        total = ExactSum(7, largest=1e9 * 1000, terms=50)
        for i in order:
            total.add(rows[i : i + 1], weights[i])
        values.append(total.value())
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    terms = [[Fraction(float(weight * v)) for v in row] for weight, row in zip(weights, rows, strict=True)]
    exact = torch.tensor([[float(sum(column)) for column in zip(*terms, strict=True)]], dtype=torch.float64)
    torch.testing.assert_close(values[0], exact, rtol=1e-15, atol=0)


def test_a_server_holds_few_replies_at_a_time(app, tmp_path, monkeypatch):
    """It pulls as many as it may hold, adds them up and forgets them, and gets the same model as with all at once."""
    held = []

    class Watched(InProcessGrid):
        def pull_messages(self, ids):
            pulled = super().pull_messages(ids)
            held.append(len(pulled))
            return pulled

    models = []
    for size in (1e9, 1.0):
        monkeypatch.setattr(federation, "PULLED", size)
        asked = plan(tmp_path / str(size), "scaffold", cohort=CLIENTS, every=0, rounds=2)
        models.append(serve(Watched(app, CLIENTS), asked, model, LOSS, say=quiet).server.x)
    assert torch.equal(*models) and held == [CLIENTS] * 3 + [CLIENTS, *[1] * 2 * CLIENTS]
    state = load_file(tmp_path / "1.0" / "out" / "state.safetensors")
    assert not any(name.startswith("memory.") for name in state)  # it stays with the clients


# -- faults -----------------------------------------------------------------------------------------------------------
class Faulty(InProcessGrid):
    """Node 2 (client 1) does something wrong in every exchange of a round: what, `fault` says."""

    def __init__(self, app, fault, **how):
        super().__init__(app, CLIENTS, **how)
        self.fault, self.last = fault, None

    def answer(self, message):
        reply = super().answer(message)
        task = message.content["fields"]["task"] if "fields" in message.content else ""
        if message.metadata.dst_node_id != 2 or task in (HELLO, "evaluate"):
            return reply
        return getattr(self, self.fault)(message, reply)

    def raises(self, message, reply):
        return Message(Error(code=2, reason="ValueError: no disk"), reply_to=message)

    def vanishes(self, message, reply):
        return Message(Error(code=5, reason="the node is away"), reply_to=message)

    def hangs(self, message, reply):
        return Message(Error(code=3, reason="time is over"), reply_to=message)

    def _with(self, message, reply, change, **more):
        tensors = [
            torch.from_numpy(reply.content["tensors"][str(i)].numpy().copy())
            for i in range(len(reply.content["tensors"]))
        ]
        said = {k: v for k, v in reply.content["fields"].items() if k != "protocol"} | more
        return Message(packed(tuple(change(v) for v in tensors), said), reply_to=message)

    def nan(self, message, reply):
        return self._with(message, reply, lambda v: v * math.nan)

    def last_nan(self, message, reply):
        """In the last of its replies alone."""
        own = iter(range(len(reply.content["tensors"])))
        last = len(reply.content["tensors"]) - 1
        return self._with(message, reply, lambda v: v * math.nan if next(own) == last else v)

    def huge(self, message, reply):
        return self._with(message, reply, lambda v: v + 1e9)

    def misshapen(self, message, reply):
        return self._with(message, reply, lambda v: v[:, :-1] if v.shape[-1] > 1 else v)

    def wrong_type(self, message, reply):
        return self._with(message, reply, lambda v: v.float())

    def stale(self, message, reply):
        copy = self._with(message, reply, lambda v: v)
        old, self.last = self.last or copy, copy
        return self._with(message, old, lambda v: v, stamp=old.content["fields"]["stamp"] - 1)

    def extra(self, message, reply):
        return Message(RecordDict({**reply.content, "more": ConfigRecord({"x": 1})}), reply_to=message)

    def silent(self, message, reply):
        return Message(RecordDict(), reply_to=message)

    def pickled(self, message, reply):
        data = pickle.dumps(np.zeros((1, 3)))
        arrays = {
            str(i): Array("float64", (1, 235), "numpy.ndarray", data) for i in range(len(reply.content["tensors"]))
        }
        content = RecordDict({"tensors": ArrayRecord(arrays), "fields": reply.content["fields"]})
        return Message(content, reply_to=message)


FAULTS = {
    "raises": "failed", "hangs": "late", "vanishes": "gone", "extra": "malformed", "nan": "not finite", "last_nan": "not finite", "huge": "too large", "misshapen": "malformed",
    "wrong_type": "malformed", "stale": "stale", "silent": "malformed", "pickled": "malformed",
}  # fmt: skip


@pytest.mark.parametrize("name", ["fedda-mvr", "scaffold"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_client_is_left_out_and_counted(fault, name, app, data, tmp_path):
    """The run is the one in which that client's replies do not count: a simulation with a NaN in its place."""
    asked = plan(tmp_path, name, cohort=CLIENTS)
    run = serve(Faulty(app, fault), asked, model, LOSS, say=quiet)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    exchanges = asked.rounds + (name == "fedda-mvr")  # the start is one, too
    assert report["rejected"] == {FAULTS[fault]: exchanges} and "client 1" in report["last"][FAULTS[fault]]
    assert int(run.dropped) == asked.rounds
    expected = left_out(data, asked, run.problem.start(asked.seed))
    torch.testing.assert_close(run.server.x, expected, rtol=1e-12, atol=1e-12)


def left_out(data, asked, x0):
    """The simulation in which client 1 gives no finite gradient."""
    owner = torch.cat([torch.full((len(own.y),), k) for k, own in enumerate(data)])
    problem = fedda.problem(
        model().double(),
        LOSS,
        x=torch.cat([own.x for own in data]),
        y=torch.cat([own.y for own in data]),
        client=owner,
        batch=asked.batch,
    )
    plain = problem.gradients

    def gradients(x, batch):
        found = plain(x, batch)
        found[..., 1, :] = math.nan
        return found

    problem.gradients = gradients
    how = {"cohort": asked.cohort, "seed": asked.seed, "weights": asked.weights, "x0": x0, "engine": "vectorised"}
    algorithm = fedda.make(asked.algorithm, **json.loads(asked.params))
    return replayed(SECRET, algorithm, Plain(problem), rounds=asked.rounds, every=1000, **how).server.x


class Plain:
    """A problem without paths: gradients are what it says."""

    def __init__(self, problem):
        self.problem = problem

    def __getattr__(self, name):
        if name == "by":
            raise AttributeError(name)
        return getattr(self.problem, name)


def test_a_reply_that_arrives_twice_counts_once(app, tmp_path):
    class Twice(InProcessGrid):
        def pull_messages(self, ids):
            return [reply for reply in super().pull_messages(ids) for _ in range(2)]

    run = serve(Twice(app, CLIENTS), plan(tmp_path), model, LOSS, say=quiet)
    whole = serve(InProcessGrid(app, CLIENTS), plan(tmp_path / "b"), model, LOSS, say=quiet)
    assert torch.equal(run.server.x, whole.server.x)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert sum(site["replies"] for site in report["sites"].values()) == 3 * 4 and report["rejected"] == {}


def test_a_client_that_comes_back_with_another_number_takes_part_again(app, tmp_path):
    """A SuperNode that was started again has a new id; it says that it is client 1."""
    grid, rounds = InProcessGrid(app, CLIENTS), []

    def restart(run):
        rounds.append(run.round)
        if len(rounds) == 2:
            grid.contexts[77] = grid.contexts.pop(2)

    run = serve(grid, plan(tmp_path, "scaffold", cohort=CLIENTS), model, LOSS, say=quiet, after_round=restart)
    assert int(run.dropped) == 0
    whole = serve(InProcessGrid(app, CLIENTS), plan(tmp_path / "b", "scaffold", cohort=CLIENTS), model, LOSS, say=quiet)
    assert torch.equal(run.server.x, whole.server.x)


def test_too_few_replies_end_the_run_and_it_can_go_on(app, data, tmp_path):
    asked = plan(tmp_path, min_replies=CLIENTS, cohort=CLIENTS, repeats=1)
    with pytest.raises(TooFewReplies, match="3 of 4 replies could be used, 4 are needed"):
        serve(Faulty(app, "nan"), asked, model, LOSS, say=quiet)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rejected"] == {"not finite": 2}  # asked twice
    again = plan(tmp_path, min_replies=CLIENTS, cohort=CLIENTS, resume=True)
    run = serve(InProcessGrid(app, CLIENTS), again, model, LOSS, say=quiet)
    truth = simulated(data, again, run.problem.start(0))
    torch.testing.assert_close(run.server.x, truth.server.x, rtol=1e-12, atol=1e-12)


def test_a_run_goes_on_with_its_own_clients_alone(app, data, tmp_path):
    """Others who have come do not join, and those who are missing are waited for."""
    three, four = InProcessGrid(app, 3), InProcessGrid(app, CLIENTS)
    asked = {"clients": 3, "cohort": 3}
    serve(three, plan(tmp_path, rounds=2, **asked), model, LOSS, say=quiet)
    four.contexts[9] = four.contexts.pop(1)  # in another order
    run = serve(four, plan(tmp_path, rounds=4, resume=True, **asked), model, LOSS, say=quiet)
    truth = simulated(data[:3], plan(tmp_path, rounds=4, **asked), run.problem.start(0))
    torch.testing.assert_close(run.server.x, truth.server.x, rtol=1e-12, atol=1e-12)
    del four.contexts[2]
    with pytest.raises(TooFewReplies, match=r"clients \[0, 1, 2\] are needed, \[0, 2, 3\] arrived"):
        serve(four, plan(tmp_path, rounds=5, resume=True, timeout=0.5, **asked), model, LOSS, say=quiet)


@pytest.mark.parametrize(
    "said", [{"samples": 0}, {"samples": -5}, {"samples": 2**62}, {"layout": "[" * 200_000}, {"d": "9"}]
)
def test_a_greeting_that_lies_leaves_the_others_alone(said, app, tmp_path):
    class Lying(InProcessGrid):
        def answer(self, message):
            reply = super().answer(message)
            if message.metadata.dst_node_id != 2 or message.content["fields"]["task"] != HELLO:
                return reply
            fields = {k: v for k, v in reply.content["fields"].items() if k != "protocol"} | said
            return Message(packed((), fields), reply_to=message)

    with pytest.warns(UserWarning, match="left out"):
        run = serve(Lying(app, CLIENTS), plan(tmp_path, clients=3, rounds=1), model, LOSS, say=quiet)
    assert run.problem.clients == 3


class Claiming(InProcessGrid):
    """Client 1 claims this many samples, and sends something else than it was asked for, of size 1."""

    def __init__(self, app, samples):
        super().__init__(app, CLIENTS)
        self.samples = samples

    def answer(self, message):
        reply, task = super().answer(message), message.content["fields"]["task"]
        if message.metadata.dst_node_id != 2 or task == "evaluate":
            return reply
        fields = {k: v for k, v in reply.content["fields"].items() if k != "protocol"}
        if task == HELLO:
            return Message(packed((), fields | {"samples": self.samples}), reply_to=message)
        return Message(packed((torch.ones_like(tensors()[0]),), fields), reply_to=message)


@pytest.mark.parametrize(("how", "share"), [({"weights": "uniform"}, 1 / 4), ({"max_samples": 50}, 50 / 155)])
def test_a_mean_cannot_be_bought(how, share, app, data, tmp_path):
    """A site that claims 2^31 samples has the weight of one site, or that of the cap."""
    how = {"cohort": CLIENTS, "rounds": 1, "every": 0, **how}
    run = serve(Claiming(app, 2**31), plan(tmp_path, **how), model, LOSS, say=quiet)
    others = serve(Faulty(app, "raises"), plan(tmp_path / "b", **how), model, LOSS, say=quiet).server.x
    torch.testing.assert_close(run.server.x, share + (1 - share) * others, rtol=1e-12, atol=1e-12)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    sizes = {k: site["samples"] for k, site in report["sites"].items()}
    assert sizes == {"0": 20, "1": 2**31, "2": 38, "3": 47}  # as it claims


def test_a_size_that_changed_before_a_resume_is_said(app, tmp_path):
    lines = []
    serve(Claiming(app, 29), plan(tmp_path, rounds=1), model, LOSS, say=lines.append)
    assert lines[0] == "samples that the sites claim: 0: 20, 1: 29, 2: 38, 3: 47; weights: samples, at most 1000 each"
    for samples, warnings in ((290, 1), (290, 0)):
        lines.clear()
        again = plan(tmp_path, rounds=len(lines) + 3, resume=True)
        run = serve(Claiming(app, samples), again, model, LOSS, say=lines.append)
        said = [line for line in lines if line.startswith("WARNING")]
        assert said == ["WARNING: site 1 claims 290 samples; before the resume it claimed 29"] * warnings
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert report["changed_samples"] == {"1": [29, 290]}  # the second resume keeps it
        assert run.simulation.weights.tolist() == [20, 290, 38, 47]


@pytest.mark.parametrize(("stays", "kind"), [(True, "late"), (False, "gone")])
def test_a_client_that_does_not_answer_is_late_or_gone(stays, kind, app, tmp_path):
    class Silent(InProcessGrid):
        def pull_messages(self, ids):
            away = [i for i in ids if i in self.posted and self.posted[i].metadata.dst_node_id == 2 and self.silent]
            if away and not stays:
                self.contexts.pop(2, None)
            return super().pull_messages([i for i in ids if i not in away])

        silent = False

    grid = Silent(app, CLIENTS)

    def begin(run):
        grid.silent = True

    how = {"cohort": CLIENTS, "rounds": 2, "every": 0, "timeout": 0.5}
    serve(grid, plan(tmp_path, **how), model, LOSS, say=quiet, after_round=begin)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rejected"] == {kind: 1} and "client 1: no reply in 0.5 s" in report["last"][kind]


def test_the_report_is_there_all_along_and_kept_over_a_resume(app, tmp_path):
    file, seen = tmp_path / "out" / "report.json", []

    def look(run):
        report = json.loads(file.read_text())
        seen.append((report["status"], report["round"], report["rejected"].get("failed")))
        assert [path.name for path in file.parent.glob("report*")] == ["report.json"]  # no temporary files

    how = {"cohort": CLIENTS, "rounds": 2}
    serve(Faulty(app, "raises"), plan(tmp_path, **how), model, LOSS, say=quiet, after_round=look)
    assert seen == [("running", 1, 1), ("running", 2, 2)]
    before = json.loads(file.read_text())
    assert before["status"] == "finished"
    # The clients do not come: the report of the run is kept, and says why.
    with pytest.raises(TooFewReplies):
        serve(
            InProcessGrid(app, 1),
            plan(tmp_path, **how | {"rounds": 3}, resume=True, timeout=0.2),
            model,
            LOSS,
            say=quiet,
        )
    report = json.loads(file.read_text())
    assert report.pop("why").startswith("TooFewReplies: clients [0, 1, 2, 3] are needed, [0] arrived")
    assert [site["connected"] for site in report["sites"].values()] == [True, False, False, False]
    assert lasting(report) == lasting(before) | {"status": "failed", "rounds": 3}
    assert report["seconds"]["nodes"] >= before["seconds"]["nodes"] + 0.2
    # They come: what was counted stays, and the last words of each kind too. A report that is torn is not needed.
    for rounds, torn in ((3, False), (4, True)):
        serve(
            InProcessGrid(app, CLIENTS), plan(tmp_path, **how | {"rounds": rounds}, resume=True), model, LOSS, say=quiet
        )
        report = json.loads(file.read_text())
        assert report["rejected"] == before["rejected"] and report["round"] == report["rounds"] == rounds
        if not torn:
            assert lasting(report, replies=False) == lasting(before, replies=False) | {"round": 3, "rounds": 3}
            assert report["sites"]["1"]["replies"] == 1 and report["sites"]["1"]["rejected"] == {"failed": 2}
            assert report["sites"]["1"]["last"]["failed"] == "ValueError: no disk"
        file.write_text('{"status": "fin')


def lasting(report, replies=True):
    """What is the same before and after a resume."""
    keys = ("replies", "rejected", "last", "samples") if replies else ("rejected", "last", "samples")
    sites = {name: {key: site[key] for key in keys} for name, site in report["sites"].items()}
    away = ("started", "updated", "seconds", "last_round", "metrics")
    return {key: value for key, value in report.items() if key not in away} | {"sites": sites}


def test_nobody_takes_the_place_of_one_who_is_there(app, tmp_path):
    """Client 1 has gone, and a newcomer says it is client 0, who is there."""
    grid, rounds = InProcessGrid(app, CLIENTS), []

    def intrude(run):
        rounds.append(run.round)
        if len(rounds) == 1:
            grid.contexts[77] = grid.contexts.pop(2)
            grid.contexts[77].node_config["partition-id"] = 0

    run = serve(grid, plan(tmp_path, cohort=CLIENTS, timeout=1.0), model, LOSS, say=quiet, after_round=intrude)
    assert run.simulation.engine.nodes[0] == 1 and int(run.dropped) == 3


@pytest.mark.parametrize(
    ("loss", "accuracy", "why"),
    [
        (math.nan, 0.5, "train_loss is not finite"),
        (math.inf, 0.5, "train_loss is not finite"),
        (1e300, 0.5, "train_loss is 1e+300; the limit is 1e+06"),
        (0.5, 13.6, "train_accuracy must be in [0, 1], got 13.6"),
        (0.5, -0.1, "train_accuracy must be in [0, 1], got -0.1"),
    ],
)
def test_metrics_are_bounded(loss, accuracy, why, app, tmp_path):
    """The metrics of a client that lies are left out of the mean over the clients."""

    class Lying(InProcessGrid):
        def answer(self, message):
            reply = super().answer(message)
            if message.content["fields"]["task"] != "evaluate" or message.metadata.dst_node_id != 2:
                return reply
            values = tuple(torch.full((1, 1), value, dtype=torch.float64) for value in (loss, accuracy))
            fields = {k: v for k, v in reply.content["fields"].items() if k != "protocol"}
            return Message(packed(values, fields), reply_to=message)

    serve(Lying(app, CLIENTS), plan(tmp_path, rounds=1, every=1), model, LOSS, say=quiet)
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < row["train_loss"] < 10 and 0 <= row["train_accuracy"] <= 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rejected"] == {"malformed": 2} and report["last"]["malformed"] == f"client 1: its metrics: {why}"


def test_only_the_type_of_an_exception_leaves_a_site(data, tmp_path):
    """Its text may quote a patient. Flower logs the cause at the site."""

    def load(context):
        k = context.node_config["partition-id"]
        if k == 1 and (tmp_path / "begun").exists():
            raise KeyError("patient 4711")
        return Site(model(), LOSS, *data[k])

    def begin(line):
        (tmp_path / "begun").touch()

    serve(InProcessGrid(client_app(load), CLIENTS), plan(tmp_path, rounds=2), model, LOSS, say=begin)
    text = (tmp_path / "out" / "report.json").read_text()
    assert "4711" not in text and set(json.loads(text)["rejected"]) == {"failed"}
    said = json.loads(text)["last"]["failed"]
    assert said == "client 1: its code raised KeyError; the text is in the site's own log"
    with pytest.raises(SiteError, match=r"^KeyError$") as raised:
        client_app(load)(*asked_of(1))
    assert raised.value.__cause__.args == ("patient 4711",)  # what Flower writes into the site's log


def asked_of(client):
    """A question and the state of the client that gets it."""
    grid = InProcessGrid(None, CLIENTS)
    return grid.create_message(packed((), question(task=HELLO)), "query", client + 1, "", 10.0), grid.contexts[
        client + 1
    ]


@pytest.mark.parametrize("said", [{"names": ["round"]}, {"names": ["train_loss", "seed"]}, None])
def test_metrics_that_lie_or_fail_do_not_end_a_run(said, app, tmp_path):
    class Lying(InProcessGrid):
        def answer(self, message):
            reply = super().answer(message)
            if message.content["fields"]["task"] != "evaluate":
                return reply
            if said is None:
                return Message(Error(code=2, reason="no"), reply_to=message)
            tensors = tuple(torch.full((1, 1), math.nan, dtype=torch.float64) for _ in said["names"])
            return Message(packed(tensors, {"stamp": 0, **said}), reply_to=message)

    given = {"lr": 0.1, "prox": {"kind": "l1", "gamma": 0.01}, "w": 1000.0}
    run = serve(Lying(app, CLIENTS), plan(tmp_path, "fedda-mvr", given), model, LOSS, say=quiet)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["round"] == 4 and rows[-1]["seed"] == 0 and rows[-1]["train_loss"] is None
    assert bool(run.server.x.isfinite().all())


# -- strangers --------------------------------------------------------------------------------------------------------
def refusal(grid, content, node=1):
    """What a client says to a message."""
    (reply,) = grid.send_and_receive([grid.create_message(content, "query", node, "", 10.0)])
    assert not reply.has_error(), reply.error
    assert set(reply.content) == {"refused"}
    return reply.content["refused"]["why"]


def question(**changes):
    given = {
        "task": "local",
        "algorithm": '{"name": "fedavg"}',
        "aggregation": "[]",
        "secure": "",
        "run": "0" * 32,
        "saved": -1,
        "dtype": "float64",
        "stamp": 0,
        "base": -1,
        "key": 3,
        "drawn": 0,
        "batch": 5,
        "metrics": [],
    }
    return given | changes


def tensors():
    d = fedda.problems.neural.flatten(model()).numel()
    return torch.zeros(1, d, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"task": "init"}, "not a task for clients"),
        ({"task": "round"}, "not a task for clients"),
        ({"task": "__class__"}, "not a task for clients"),
        ({"task": "__init__.__globals__"}, "not a task for clients"),
        ({"algorithm": '{"name": "os.system"}'}, "algorithm is refused"),
        ({"algorithm": '{"name": "fedavg", "step": 3}'}, "no parameter 'step'"),
        ({"algorithm": '{"name": "fedavg", "lr": -1}'}, "lr must be > 0"),
        ({"algorithm": "import os"}, "JSON table"),
        ({"algorithm": '{"name": "fedavg", "preset": "/etc/secret.toml"}'}, "not a preset"),
        ({"algorithm": '{"name": "fedavg", "lr": {"kind": "pickle"}}'}, "refused"),
        ({"dtype": "float16"}, "dtype must be"),
        ({"run": "../../etc/passwd"}, "32 hexadecimal digits"),
        ({"aggregation": "{}"}, "aggregation is refused"),
        ({"aggregation": '[{"name": "exec"}]'}, "aggregation is refused"),
        ({"aggregation": '[{"name": "clip", "norm": -1}]'}, "norm must be"),
        ({"batch": 10**9}, "out of range"),
        ({"stamp": -1}, "out of range"),
        ({"stamp": True}, "must be int"),
        ({"key": 1.5}, "must be int"),
        ({"more": 1}, "is not expected"),
        ({"metrics": ["f1"]}, "it has no metric 'f1', which the server asks for: give it as Site(metrics=...)"),
        ({"task": "batch-norm"}, "tensors are expected"),
    ],
)
def test_a_client_refuses(changes, why, app):
    assert why in refusal(InProcessGrid(app, CLIENTS), packed(tensors(), question(**changes)))


def test_a_client_refuses_tensors_that_are_not_what_was_agreed(app):
    grid, (x, t) = InProcessGrid(app, CLIENTS), tensors()
    for given in ((x,), (x, t, t), (t, t), (x.float(), t), (x[:, 1:], t), (torch.cat([x, x]), t)):
        assert "tensor" in refusal(grid, packed(given, question()))
    for data in (pickle.dumps([1]), b"", Array(x.numpy()).data[:-8], Array(x.numpy()).data.replace(b"<f8", b"|O8")):
        content = packed((x, t), question())
        content["tensors"]["0"] = Array("float64", (1, x.shape[1]), "numpy.ndarray", data)
        assert "tensor 0" in refusal(grid, content)
    bomb = packed((x, t), question())
    bomb["tensors"]["0"] = Array("float64", (1, 10**12), "numpy.ndarray", Array(x.numpy()).data)
    assert "tensor 0" in refusal(grid, bomb)


def test_a_site_may_run_some_algorithms_alone(data):
    app = client_app(lambda context: Site(model(), LOSS, *data[0], allowed=("fedda-mvr",)))
    assert "runs only fedda-mvr" in refusal(InProcessGrid(app, 1), packed(tensors(), question()))


def test_a_client_that_remembers_nothing_says_so(app):
    asked = question(algorithm='{"name": "scaffold"}', base=7)
    x, t = tensors()
    assert "has no memory" in refusal(InProcessGrid(app, CLIENTS), packed((x, x, t), asked))


def test_a_model_of_another_shape_is_left_out(data, tmp_path):
    def load(context):
        k = context.node_config["partition-id"]
        other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        return Site(model() if k else other, LOSS, *data[k])

    with pytest.warns(UserWarning, match="different parameters"):
        run = serve(
            InProcessGrid(client_app(load), CLIENTS), plan(tmp_path, clients=3, cohort=3), model, LOSS, say=quiet
        )
    assert run.problem.clients == 3


# -- fuzz -------------------------------------------------------------------------------------------------------------
def scribbled(content, drawn):
    """A message with something in it changed at random."""
    content = RecordDict(dict(content.items()))
    kind = drawn.randrange(7)
    if kind == 0 and len(content):
        del content[drawn.choice(list(content))]
    elif kind == 1:
        content[drawn.choice(["tensors", "fields", "refused", "x", ""])] = ConfigRecord(
            {drawn.choice("ab"): drawn.choice([1, "x", 0.5, b"", [1]])}
        )
    elif kind == 2 and content.get("fields"):
        said = dict(content["fields"])
        word = drawn.choice([*said, "new"])
        said[word] = drawn.choice(
            [0, -1, 2**62, True, 0.0, math.nan, "", "local", "\0" * 50, b"\x80\x04", [1, 2], ["a"]]
        )
        content["fields"] = ConfigRecord(said)
    elif kind == 3 and content.get("fields"):
        said = dict(content["fields"])
        said.pop(drawn.choice(list(said)))
        content["fields"] = ConfigRecord(said)
    elif isinstance(content.get("tensors"), ArrayRecord) and len(content["tensors"]):
        arrays = dict(content["tensors"])
        name = drawn.choice(list(arrays))
        old = arrays[name]
        data = bytearray(old.data) or bytearray(8)
        for _ in range(drawn.randrange(1, 20)):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        data = bytes(data[: drawn.randrange(len(data) + 1)]) if drawn.random() < 0.3 else bytes(data)
        shape = drawn.choice([old.shape, (1,), (0,), (2**40,), (1, 10**9), (-1, 3)])
        arrays[drawn.choice([name, "7", "x"])] = Array(
            drawn.choice([old.dtype, "object", "float32", ""]), shape, drawn.choice([old.stype, "pickle"]), data
        )
        content["tensors"] = ArrayRecord(arrays)
    return content


def test_two_thousand_scribbled_messages_crash_neither_side(app, data):
    """Half of them to a client, half to the server: an answer or a refusal, never an exception."""
    drawn, grid, (x, t) = random.Random(3), InProcessGrid(app, CLIENTS), tensors()
    refused = 0
    for _ in range(1000):
        task = drawn.choice(["local", HELLO, "evaluate"])
        down = {"local": (x, t), HELLO: (), "evaluate": (x,)}[task]
        content = packed(down, question(task=task))
        for _ in range(drawn.randrange(1, 4)):
            content = scribbled(content, drawn)
        (reply,) = grid.send_and_receive([grid.create_message(content, "query", 1, "", 10.0)])
        assert not reply.has_error(), reply.error
        refused += "refused" in reply.content
    assert refused > 500
    server = Federation(grid, '{"name": "fedavg"}', 5, torch.float64)
    shapes, used = ((1, x.shape[1]),), 0
    message = grid.create_message(packed((x, t), question()), "query", 1, "", 10.0)
    reply = grid.answer(message)
    for _ in range(1000):
        content = reply.content
        for _ in range(drawn.randrange(1, 4)):
            content = scribbled(content, drawn)
        found = server._checked(Message(content, reply_to=message), 0, 0, shapes)
        assert found is None or (found[0][0].shape == x.shape and bool(found[0][0].isfinite().all()))
        used += found is not None
    assert sum(server.rejections.counts.values()) + used == 1000 and 0 < used < 500


# -- plans ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"rounds": 0}, "rounds"),
        ({"params": "lr=0.1"}, "JSON table"),
        ({"params": "[1]"}, "JSON table"),
        ({"params": '{"lrr": 1}'}, "lrr"),
        ({"algorithm": "fedavgg"}, "fedavg"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"cohort": 9, "clients": 3}, "cohort"),
        ({"timeout": 0.0}, "timeout"),
        ({"rounds": "5"}, "rounds must be a whole number, got '5'"),
        ({"secure-aggregation": 1}, "secure-aggregation must be true or false, got 1"),
        ({"min-replies": -1}, "min-replies must be a whole number >= 0"),
        ({"min-replies": 5, "clients": 2}, "min-replies must be at most the cohort, 2, got 5"),
        ({"clients": 1}, "a mean of one reply is that reply; min-replies=1 allows it"),
        ({"clients": 5, "cohort": 1}, "a mean of one reply is that reply; min-replies=1 allows it"),
        ({"weights": "samples"}, "weights='samples' needs max-samples"),
        ({"params": '{"epochs": 1}'}, "epochs or steps='proportional' needs max-samples"),
        ({"params": '{"steps": "proportional"}'}, "epochs or steps='proportional' needs max-samples"),
        ({"weights": "samples", "max-samples": -3}, "max-samples must be a whole number >= 0"),
        ({"params": '{"name": "scaffold"}'}, "without a name"),
        ({"without": "three"}, "without must be numbers of sites, such as '3' or '3,5', got 'three'"),
        ({"without": "0,1", "clients": 2}, "without leaves out 0,1, and 2 sites are all there are"),
        ({"without": "1", "clients": 2}, "a round with one site is refused"),
    ],
)
def test_a_bad_plan_is_refused(config, why):
    with pytest.raises(ValueError, match=why):
        Plan.of(config)


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({}, 2),
        ({"clients": 3}, 2),
        ({"clients": 9}, 5),
        ({"clients": 9, "cohort": 4}, 2),
        ({"clients": 1, "min-replies": 1}, 1),
    ],
)
def test_how_many_replies_a_round_needs(config, needed):
    assert Plan.of(config).needed_replies == needed


def test_a_plan_from_a_configuration():
    assert Plan.of({"min-replies": 2, "timeout": 30, "somebody-else": 1}) == Plan(min_replies=2, timeout=30.0)


# -- participants -----------------------------------------------------------------------------------------------------
class Keyed(InProcessGrid):
    """Nodes that Flower has authenticated by the keys of a folder: node k + 1 has the key of `owner[k]`."""

    def __init__(self, app, folder, owner):
        super().__init__(app, CLIENTS)
        self.folder, self.owner = folder, owner

    def get_nodes(self):
        keys = [(self.folder / f"node{k}.pub").read_bytes() for k in self.owner]
        pem = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        public = [serialization.load_ssh_public_key(key).public_bytes(*pem) for key in keys]
        return [NodeInfo(node_id=node, public_key=public[node - 1]) for node in self.contexts]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, [], list(range(CLIENTS + 1)))
    return folder


def test_a_key_counts_for_its_own_number_alone(app, keys, tmp_path):
    """Node 2 says that it is client 1 and has the key of client 3; node 4 says it is client 3, with a key unknown here."""
    listed = tmp_path / "listed"
    listed.mkdir()
    for k in range(CLIENTS):
        (listed / f"node{k}.pub").write_bytes((keys / f"node{k}.pub").read_bytes())
    how = {"participants": str(listed), "rounds": 1, "clients": 2, "cohort": 2}
    with pytest.warns(UserWarning, match="left out"):
        run = serve(Keyed(app, keys, [0, 3, 2, CLIENTS]), plan(tmp_path, **how), model, LOSS, say=quiet)
    assert run.simulation.engine.names == [0, 2]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    shown = {k: participants.fingerprint(pem) for pem, k in participants.Participants(keys).numbers().items()}
    assert report["refused_nodes"] == [
        f"node 2: it has the key of site 3 ({shown[3]}) and claims to be site 1",
        f"node 4: its key ({shown[CLIENTS]}) is not one of {listed}/node*.pub; it claims to be site 3",
    ]
    assert {k: site["key"] for k, site in report["sites"].items()} == {"0": shown[0], "2": shown[2]}
    if shutil.which("ssh-keygen"):
        said = subprocess.run(["ssh-keygen", "-lf", keys / "node0.pub"], capture_output=True, text=True, check=True)
        assert said.stdout.split()[1] == shown[0]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, r"holds no node\*.pub: put the sites' public keys there"),
        ({"node0.pub": 0, "node1.pub": 0}, r"node1.pub: is the key of site 0 too"),
        ({"node0.pub": None}, r"node0.pub: is not a public key"),
    ],
)
def test_participants_that_cannot_be_used_are_refused(files, why, app, keys, tmp_path):
    for name, k in files.items():
        (tmp_path / name).write_bytes(b"no key" if k is None else (keys / f"node{k}.pub").read_bytes())
    with pytest.raises(ValueError, match=why):
        serve(InProcessGrid(app, CLIENTS), plan(tmp_path, participants=str(tmp_path)), model, LOSS, say=quiet)
    assert not (tmp_path / "out").exists()


def test_a_doubtful_site_is_left_out(app, data, tmp_path):
    """It is there, and it is not asked. The others' run is the one that three sites would have without it."""
    with pytest.warns(UserWarning, match="the plan leaves out site 3"):
        run = serve(InProcessGrid(app, CLIENTS), plan(tmp_path, without="3"), model, LOSS, say=quiet)
    truth = simulated(data[:3], plan(tmp_path), run.problem.start(0))
    torch.testing.assert_close(run.server.x, truth.server.x, rtol=1e-12, atol=1e-12)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["left_out"] == [3] and set(report["sites"]) == {"0", "1", "2"}


# -- resume -----------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:a client is left out")
def test_a_left_out_site_that_nobody_has_seen_is_said(app, tmp_path):
    """A mistyped number leaves out whichever site arrives last."""
    for number, said in (
        ("9", ["WARNING: without names site 9, which was not seen; the run has the sites [0, 1, 2, 3]"]),
        ("3", []),
    ):
        lines, asked = [], plan(tmp_path / number, clients=5 if said else 4, without=number, rounds=1)
        serve(InProcessGrid(app, CLIENTS), asked, model, LOSS, say=lines.append)
        assert [line for line in lines if line.startswith("WARNING")] == said


def test_a_folder_that_cannot_be_written_is_one_line(app, tmp_path):
    (tmp_path / "out").touch()
    for place, why in ((tmp_path, "File exists"), (tmp_path / "out", "Not a directory")):
        with pytest.raises(ValueError, match=f"{place / 'out'}: results cannot be written here: {why}"):
            serve(InProcessGrid(app, CLIENTS), plan(place), model, LOSS, say=quiet)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_a_run_goes_on_without_a_site_that_is_gone_for_good(name, app, data, tmp_path):
    """From the checkpoint on the run is one of the remaining sites, and stays so without being told again."""
    how = {"cohort": CLIENTS, "weights": "uniform"}
    all_sites = InProcessGrid(app, CLIENTS)
    for node, context in all_sites.contexts.items():
        context.node_config["memory"] = str(tmp_path / f"node{node}")
    begun = serve(all_sites, plan(tmp_path, name, rounds=2, **how), model, LOSS, say=quiet)
    grid = again(all_sites, app)
    del grid.contexts[2]  # client 1
    with pytest.raises(TooFewReplies, match=r"clients \[0, 1, 2, 3\] are needed, \[0, 2, 3\] arrived"):
        serve(grid, plan(tmp_path, name, rounds=4, resume=True, timeout=0.3, **how), model, LOSS, say=quiet)
    lines = []
    run = serve(grid, plan(tmp_path, name, rounds=3, resume=True, without="1", **how), model, LOSS, say=lines.append)
    assert lines[0] == "from now on the run leaves out: site 1"
    back = again(all_sites, app)  # too late: it stays out
    run = serve(back, plan(tmp_path, name, rounds=4, resume=True, **how), model, LOSS, say=quiet)
    assert run.simulation.engine.names == [0, 2, 3] and int(run.dropped) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["left_out"] == [1] and report["sites"]["1"]["replies"] == 2 and report["sites"]["3"]["replies"] == 4
    if name == "fedavg":  # its state is the model, so two runs of the simulation, one after the other, are the truth
        three = [data[k] for k in (0, 2, 3)]
        asked = plan(tmp_path, name, rounds=4, every=1, cohort=3, weights="uniform")
        truth = continued(three, asked, begun.server, 2)
        torch.testing.assert_close(run.server.x, truth, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"without names site 7, but the run has the sites \[0, 2, 3\]"):
        serve(grid, plan(tmp_path, name, rounds=5, resume=True, without="1,7", **how), model, LOSS, say=quiet)


def continued(data, asked, server, done):
    """The vectorised engine on these clients, from a server's state after `done` rounds."""
    owner = torch.cat([torch.full((len(own.y),), k) for k, own in enumerate(data)])
    x, y = (torch.cat([getattr(own, side) for own in data]) for side in "xy")
    problem = fedda.problem(model().double(), LOSS, x=x, y=y, client=owner, batch=asked.batch)
    run = fedda.Run(fedda.make(asked.algorithm, **json.loads(asked.params)), problem, draws=SecretDraws(SECRET))
    run.server, run.round = server, done
    while run.round < asked.rounds:
        run.advance()
    return run.server.x


def test_some_settings_may_change_before_a_resume(app, tmp_path):
    whole = serve(InProcessGrid(app, CLIENTS), plan(tmp_path / "a", rounds=3), model, LOSS, say=quiet)
    serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=1), model, LOSS, say=quiet)
    changed = plan(tmp_path, rounds=3, resume=True, every=1, limit=1e5, timeout=7.0, repeats=1)
    run = serve(InProcessGrid(app, CLIENTS), changed, model, LOSS, say=quiet)
    assert torch.equal(run.server.x, whole.server.x)
    rows = [json.loads(line)["round"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"settings: batch was 5 and is 6, max-samples was 1000 and is 9$"):
        serve(
            InProcessGrid(app, CLIENTS), plan(tmp_path, resume=True, batch=6, max_samples=9), model, LOSS, say=quiet
        )  # fmt: skip


@pytest.mark.parametrize(
    ("tear", "said", "rounds"),
    [
        (lambda rows: rows[:-30], "dropped rows: 1 damaged", [0, 1, 2, 3, 4]),  # a line that was being written
        (lambda rows: b"".join(rows.splitlines(True)[:2]), None, [0, 1, 3, 4]),  # a tail that is lost
        (lambda rows: rows + b'{"round": 9}\n', "dropped rows: 1 after round 3, the last checkpoint", [0, 1, 2, 3, 4]),
        (lambda rows: b"\x00\xff\n" + rows + b"[]\n", "dropped rows: 2 damaged", [0, 1, 2, 3, 4]),
        (lambda rows: b"", None, [3, 4]),
    ],
)
def test_metrics_that_are_torn_do_not_stop_a_resume(tear, said, rounds, app, tmp_path):
    whole = serve(InProcessGrid(app, CLIENTS), plan(tmp_path / "a", rounds=4), model, LOSS, say=quiet)
    serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=3, every=1), model, LOSS, say=quiet)
    file, lines = tmp_path / "out" / "metrics.jsonl", []
    file.write_bytes(tear(file.read_bytes()))
    asked = plan(tmp_path, rounds=4, every=1, resume=True)
    run = serve(InProcessGrid(app, CLIENTS), asked, model, LOSS, say=lines.append)
    assert [line for line in lines if line.startswith("metrics.jsonl")] == ([f"metrics.jsonl: {said}"] if said else [])
    assert [json.loads(line)["round"] for line in file.read_text().splitlines()] == rounds
    assert torch.equal(run.server.x, whole.server.x)


# -- a full disk, a SuperLink that is gone ----------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["report.json", "state.safetensors", "server.secret"])
def test_a_full_disk_leaves_every_file_whole(which, app, tmp_path, monkeypatch):
    whole = serve(InProcessGrid(app, CLIENTS), plan(tmp_path / "a", rounds=3), model, LOSS, say=quiet)
    real, full = os.fsync, []

    def fsync(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))
        if full and name.startswith(which):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=3), model, LOSS, say=quiet, after_round=full.append)
    out = tmp_path / "out"
    assert not list(out.glob("*.tmp"))
    report = json.loads((out / "report.json").read_text())
    assert report["round"] == 1 and report["status"] == ("running" if which == "report.json" else "failed")
    if which != "report.json":
        assert report["why"].startswith("OSError: ") and "No space left" in report["why"]
    full.clear()  # somebody has made room
    run = serve(InProcessGrid(app, CLIENTS), plan(tmp_path, rounds=3, resume=True), model, LOSS, say=quiet)
    assert torch.equal(run.server.x, whole.server.x)


def test_a_server_whose_superlink_is_gone_says_so(app, tmp_path):
    class Gone(InProcessGrid):
        def pull_messages(self, ids):
            raise httpx.ConnectError("refused")

    with pytest.raises(SuperLinkGone, match=r"the SuperLink has not answered for 120 s \(ConnectError\)"):
        serve(Gone(app, CLIENTS), plan(tmp_path), model, LOSS, say=quiet)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["status"] == "failed" and "submit the run with resume=true" in report["why"]
