"""Two levels of federations in one process: the numbers of a flat one, faults passed up, single replies kept below."""

import functools
import json
import math
import socket
import threading
import time

import pytest
import torch
from torch import nn

import fedda
from conftest import example

pytest.importorskip("flwr", reason="needs fedda[flower]")
from flwr.app import Context, Error, Message, RecordDict

from fedda.deploy import InProcessGrid, Relay, Site, client_app
from fedda.deploy.client import EVALUATE, HELLO
from fedda.deploy.server import Plan, serve
from fedda.deploy.wire import packed
from flowers import replayed

SECRET = bytes(range(32))
LOSS = nn.functional.mse_loss


def model():
    return nn.Linear(3, 1)


KINDS = 30  # of sites: 10,000 would take too long to make


def samples(k):
    """The few samples of a site, unequal in number."""
    k %= KINDS
    g = torch.Generator().manual_seed(k)
    x = torch.randn(2 + k % 3, 3, generator=g)
    return x, x.sum(dim=1, keepdim=True) + k % 7


@functools.cache
def site(k):
    """A site that makes its problem once."""
    made = Site(model(), LOSS, *samples(k))
    made.problem = functools.cache(made.problem)
    return made


class Lower(InProcessGrid):
    """The sites `first` to `first + sites`."""

    def __init__(self, first, sites):
        app = client_app(lambda context: site(context.node_config["partition-id"] % KINDS))
        super().__init__(app, sites, first=first)


def upper(relays, sites, lower=Lower, **how):
    """A grid whose nodes are relays, each with sites of its own."""
    made = {r: Relay(lower(r * sites, sites), model(), sites, **how) for r in range(relays)}
    return InProcessGrid(client_app(lambda context: made[context.node_config["partition-id"]]), relays)


def plan(tmp_path, name, clients, **changes):
    how = {"clients": clients, "rounds": 3, "batch": 2, "dtype": "float64", "every": 3, "timeout": 300.0}
    how |= {"out": str(tmp_path / "out")} | changes
    return Plan(algorithm=name, params=json.dumps(example(name) | {"steps": 2}), **how)


def flat(asked, x0):
    """The same run by the vectorised engine, over all sites at once."""
    data = [samples(k) for k in range(asked.clients)]
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    owner = torch.cat([torch.full((len(own),), k) for k, (_, own) in enumerate(data)])
    problem = fedda.problem(model().double(), LOSS, x=x, y=y, client=owner, batch=asked.batch)
    how = {"cohort": asked.cohort or None, "weights": asked.weights, "x0": x0, "every": asked.every or 1000}
    return replayed(SECRET, fedda.make(asked.algorithm, **json.loads(asked.params)), problem, asked.rounds, **how)


def quiet(line):
    pass


def compare(grid, asked):
    """The run through relays equals the flat one; its report."""
    run = serve(grid, asked, model, LOSS, say=quiet, secret=SECRET)
    truth = flat(asked, run.problem.start(asked.seed))
    for ours, theirs in zip(run.server, truth.server, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    if asked.every:
        ours = run.evaluate()[0]
        shared = set(ours) & set(truth.history[-1]) - {"seconds"}
        assert {"gradients", "bytes_up", "train_loss", "dropped"} <= shared
        assert {k: ours[k] for k in shared} == pytest.approx({k: truth.history[-1][k] for k in shared}, rel=1e-9)
    return run


@pytest.mark.parametrize("cohort", [0, 9])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "scaffold", "fedda-cv", "mime"])
def test_relays_give_the_numbers_of_a_flat_federation(name, weights, cohort, tmp_path):
    """The upper server draws the cohorts over all sites; a relay gets those of its sites that take part."""
    asked = plan(tmp_path, name, 12, weights=weights, max_samples=100, cohort=cohort)
    compare(upper(3, 4, min_replies=1), asked)


def test_ten_thousand_sites_behind_a_hundred_relays(tmp_path):
    compare(upper(100, 100), plan(tmp_path, "fedavg", 10_000, rounds=1, every=0))


class Faulty(Lower):
    """Site 1 replies NaN, and site 5 fails."""

    def answer(self, message):
        reply = super().answer(message)
        site, task = (
            self.contexts[message.metadata.dst_node_id].node_config["partition-id"],
            message.content["fields"]["task"],
        )
        if task in (HELLO, EVALUATE) or site not in (1, 5):
            return reply
        if site == 5:
            return Message(Error(code=2, reason="no"), reply_to=message)
        fields = {k: v for k, v in reply.content["fields"].items() if k != "protocol"}
        arrays = [torch.from_numpy(v.numpy() * math.nan) for v in reply.content["tensors"].values()]
        return Message(packed(tuple(arrays), fields), reply_to=message)


def test_faults_of_sites_are_passed_up(tmp_path):
    """They are counted by site at the top, and the mean is over the others, as in a flat federation."""
    asked = plan(tmp_path, "scaffold", 8, every=0)
    through = serve(upper(2, 4, lower=Faulty), asked, model, LOSS, say=quiet, secret=SECRET)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    direct = serve(Faulty(0, 8), plan(tmp_path / "flat", "scaffold", 8, every=0), model, LOSS, say=quiet, secret=SECRET)
    other = json.loads((tmp_path / "flat" / "out" / "report.json").read_text())
    torch.testing.assert_close(through.server.x, direct.server.x, rtol=1e-12, atol=1e-12)
    assert report["rejected"] == other["rejected"] == {"not finite": 3, "failed": 3}
    assert report["sites"]["1"]["rejected"] == {"not finite": 3} and report["sites"]["5"]["rejected"] == {"failed": 3}
    assert int(through.dropped) == int(direct.dropped) == 6 and through.counts == direct.counts


def test_a_relay_with_too_few_replies_passes_none_on(tmp_path):
    """A mean of one reply would be that reply."""
    asked = plan(tmp_path, "fedavg", 8, every=0, rounds=1)
    with pytest.raises(Exception, match="0 of 8 replies could be used"):
        serve(upper(2, 4, lower=Faulty, min_replies=4), asked, model, LOSS, say=quiet, secret=SECRET)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["sites"]["0"]["last"]["refused"] == "its relay had too few replies"


def test_what_relays_cannot_do_is_refused(tmp_path):
    asked = plan(tmp_path, "fedavg", 4, aggregation='[{"name": "median"}]')
    with pytest.raises(ValueError, match="Median needs single replies, and relays send means"):
        serve(upper(2, 2), asked, model, LOSS, say=quiet, secret=SECRET)


class Lying(InProcessGrid):
    """Relays that say something else than they should."""

    change = staticmethod(lambda fields: fields)

    def answer(self, message):
        reply = super().answer(message)
        if message.content["fields"]["task"] != "local":
            return reply
        fields = {k: v for k, v in reply.content["fields"].items() if k != "protocol"}
        reply.content["fields"] = packed((), self.change(fields))["fields"]
        return reply


LIES = {
    "of others": lambda fields: fields | {"used": [77]},
    "twice": lambda fields: fields | {"used": fields["used"] * 2},
    "an old one": lambda fields: fields | {"stamp": 99},
    "a count": lambda fields: fields | {"gradients": -1},
    "no counts": lambda fields: fields | {"rejected": '{"0": {"pickled": [1, "x"]}}'},
    "not JSON": lambda fields: fields | {"rejected": "("},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_relay_that_lies_is_left_out_and_counted(lie, tmp_path):
    grid = upper(2, 2)
    grid.__class__ = type("Liars", (Lying,), {"change": staticmethod(LIES[lie])})
    with pytest.raises(Exception, match="0 of 4 replies could be used"):
        serve(grid, plan(tmp_path, "fedavg", 4, every=0, repeats=0), model, LOSS, say=quiet, secret=SECRET)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["rejected"] == {"malformed": 4}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clients": [7]}, "site 7 is not behind this relay"),
        ({"keys": [1, 2]}, "for each of its sites"),
        ({"weights": [-1.0]}, "weights be > 0"),
        ({"task": "round"}, "is not a task for clients"),
        ({"algorithm": '{"name": "os.system"}'}, "the algorithm is refused"),
        ({"run": "../x"}, "name of the run"),
        ({"more": 1}, "is not expected"),
        ({"metrics": ["f1"]}, "it has no metric 'f1', which the server asks for: give it as Relay(metrics=...)"),
    ],
)
def test_a_relay_refuses(changes, why):
    fields = {
        "task": "local", "algorithm": '{"name": "fedavg"}', "aggregation": "[]", "run": "0" * 32, "dtype": "float64",
        "secure": "", "stamp": 0, "drawn": 0, "batch": 2, "clients": [0], "keys": [3], "bases": [-1], "saved": [-1],
        "weights": [1.0], "metrics": [],
    }  # fmt: skip
    x, t = torch.zeros(1, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    relay = Relay(Lower(0, 2), model(), 2, min_replies=1)
    context = Context(run_id=0, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    grid = InProcessGrid(None, 1)
    replies = [
        relay.answer(grid.create_message(packed((x, t), fields | more), "query", 1, "", 60.0), context)
        for more in (changes, {})
    ]
    assert why in replies[0].content["refused"]["why"]
    assert list(replies[1].content["fields"]["used"]) == [0]


def test_a_relay_behind_its_socket(tmp_path):
    """As the node of the upper federation reaches it, in another process: the socket is open to this user alone."""
    path = tmp_path / "doors" / "relay.sock"
    relay = Relay(Lower(0, 2), model(), 2)
    threading.Thread(target=relay.listen, args=(path,), daemon=True).start()
    while not path.exists():
        time.sleep(0.01)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    grid = InProcessGrid(client_app(lambda context: None), 1)
    grid.contexts[1].node_config["relay"] = str(path)
    run = serve(grid, plan(tmp_path, "fedda-mvr", 2), model, LOSS, say=quiet, secret=SECRET)
    truth = flat(plan(tmp_path, "fedda-mvr", 2), run.problem.start(0))
    torch.testing.assert_close(run.server.x, truth.server.x, rtol=1e-12, atol=1e-12)
    with socket.socket(socket.AF_UNIX) as stranger:  # what is no message does not end the relay
        stranger.connect(str(path))
        stranger.sendall(b"\xff" * 40)
    grid.contexts[1].node_config["relay"] = str(tmp_path / "nobody.sock")
    message = grid.create_message(packed((), {}), "query", 1, "", 5.0)
    (reply,) = grid.send_and_receive([message])
    assert reply.content["refused"]["why"] == "the relay's own federation does not answer: FileNotFoundError"
