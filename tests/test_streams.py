"""The two streams of a captured round without a GPU: who waits for whom, in streams that only count."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedda
from conftest import digits, quadratic, stable
from fedda.engines import Vectorised, graphs


class Stream:
    """Knows how far it, and what it has waited for, have come."""

    now: "Stream"

    def __init__(self, *_):
        self.seen = {self: 0}

    def wait_stream(self, other):
        for stream, count in other.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)


@contextmanager
def on(stream):
    before, Stream.now = Stream.now, stream
    yield
    Stream.now = before


def storages(values):
    return {graphs._storage(v) for v in tree_leaves(values) if isinstance(v, torch.Tensor)}


class Watch(TorchDispatchMode):
    """Below `SideStream`: every operation with its stream. What two of them touch, and one writes, must be in order."""

    def __init__(self):
        super().__init__()
        self.written, self.read, self.held = {}, {}, []
        self.races, self.streams = [], set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **kwargs or {})
        self.held.append((args, kwargs, out))  # nothing is freed: a place is one array
        inputs, made, mutates = storages((args, kwargs)), storages(out), op._schema.is_mutable
        if made and made <= inputs and not mutates:
            return out  # a view
        stream = Stream.now
        stream.seen[stream] += 1
        self.streams.add(stream)
        writes = made - inputs
        if mutates:
            writes |= storages([v for a, v in zip(op._schema.arguments, args, strict=False) if a.is_write] + [out])
        earlier = [self.written[p] for p in inputs | writes if p in self.written]
        earlier += [one for p in writes for one in self.read.get(p, ())]
        if any(stream.seen.get(other, 0) < count for other, count in earlier):
            self.races.append(str(op))
        now = stream, stream.seen[stream]
        for p in inputs:
            self.read.setdefault(p, []).append(now)
        for p in writes:
            self.written[p], self.read[p] = now, []
        return out


@pytest.fixture
def main(monkeypatch):
    Stream.now = main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    return main


def watched(step):
    with torch.no_grad(), Watch() as watch, graphs.SideStream(torch.device("cpu")):
        step()
    return watch


def a_round(name, problem):
    run = fedda.Run(stable(name), problem, cohort=3, seed=[0, 1], engine=Vectorised(chunk=2))
    run.step()
    tau = torch.tensor(run.round)

    def step():
        server, *_ = run._round(tau)
        for old, new in zip((*run.server, tau), (*server, tau + 1), strict=True):
            old.copy_(new)

    run.server = type(run.server)(*(v.clone() for v in run.server))
    return step


@pytest.mark.parametrize("small", [1, 40, 4096])
def test_nothing_is_read_or_overwritten_too_early(name, small, main, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", small)
    for problem in (quadratic(d=30), digits(dtype=torch.float32)):
        watch = watched(a_round(name, problem))
        assert not watch.races and len(watch.streams) == 2


def test_what_writes_and_returns_nothing(main, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 10)
    counter, large = torch.zeros(3), torch.ones(100)

    def step():
        torch._foreach_add_([counter], [large[:3] * 2])
        return counter * 2  # must not go to the side, which does not wait

    assert not watched(step).races


def test_what_the_side_reads_is_not_overwritten_before(main, monkeypatch):
    monkeypatch.setattr(graphs, "SMALL", 10)
    counter, large = torch.zeros(3), torch.ones(100)

    def step():
        double = counter * 2
        counter.add_(large[:3] * 2)
        return double

    watch = watched(step)
    assert not watch.races and len(watch.streams) == 2


def test_the_test_of_streams_can_fail(main, monkeypatch):
    monkeypatch.setattr(graphs.SideStream, "independent", lambda self, v: v.numel() <= graphs.SMALL)
    assert watched(a_round("scaffold", digits(dtype=torch.float32))).races
