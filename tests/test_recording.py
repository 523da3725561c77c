"""A recorded function does on other numbers what the function itself does."""

import subprocess
import sys

import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional

import fedda
from conftest import NAMES, digits, quadratic, stable
from fedda import rng
from fedda import run as run_module
from fedda.engines import Vectorised
from fedda.problems.gradients.vmap import StackedGradient
from fedda.recording import record


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_what_comes_in_and_what_is_held():
    held = some(4)

    def function(x, y):
        a, b = torch.split(x * held, 2)
        return [torch.cat([b, a]) + y, torch.where(y > 0, y, held), held]

    module = record(function, some(4, seed=1), some(4, seed=2))
    for seed in range(3):
        held.copy_(some(4, seed=10 + seed))  # in place: the recording reads what is there now
        new = some(4, seed=20 + seed), some(4, seed=30 + seed)
        assert same(module(*new), function(*new))
    assert module(*new)[2] is held


def test_tensors_that_are_gone_are_not_taken_for_new_ones():
    """A tensor made in the loop is freed in it, and the next one has its place and its id."""

    def function(x):
        for i in range(200):
            x = x + (x * float(i)).sin() / 100 + torch.tensor(float(i), dtype=torch.float64)
        return x

    module = record(function, some(3))
    assert torch.equal(module(some(3, seed=1)), function(some(3, seed=1)))


def test_what_is_changed_in_place_and_seen_through_views():
    def function(x):
        y = x.clone()
        top = y[:2]
        top.mul_(3)
        y[1:, 0] += 1
        rows = torch.zeros(4, 3, dtype=x.dtype)
        rows[torch.tensor([3, 1, 0, 2])] = y
        torch._foreach_add_([y, rows], 2.0)
        return [y, top, rows]

    x = some(4, 3)
    module = record(function, some(4, 3, seed=1))
    assert same(module(x), function(x)) and torch.equal(x, some(4, 3))
    assert same(module(x), function(x))  # nothing of the first time is left


def test_gradients_of_a_stack():
    net = torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 3), torch.nn.BatchNorm1d(3, track_running_stats=False), torch.nn.ReLU()
    )
    net = net.double()

    def loss(w, x):
        return torch.func.functional_call(net, {"0.weight": w}, (x,)).square().mean()

    each = vmap(grad(loss))
    module = record(each, some(5, 3, 2, 3), some(5, 4, 2, 8))
    new = some(5, 3, 2, 3, seed=1), some(5, 4, 2, 8, seed=2)
    assert torch.equal(module(*new), each(*new))


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: bool((x > 0).all()), lambda x: torch.equal(x, x)])
def test_a_number_that_is_looked_at_is_refused(look):
    with pytest.raises(ValueError, match="reads a number"):
        record(lambda x: x * look(x), some(3))


def test_what_processes_send_is_recorded():
    """An all-reduce gives back what it has changed and something to wait for, and says neither."""
    text = """
import gc, torch, torch.distributed as dist
from fedda.recording import record
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
def step(x):
    y = x * 2
    dist.all_reduce(y)
    return [y + 1]
module = record(step, torch.ones(3))
module.graph.eliminate_dead_code()
module.recompile()
print(module(torch.full((3,), 5.0))[0].tolist(), "allreduce_" in module.code)
del module, step
gc.collect()  # a module is part of a cycle; it holds the group, whose threads must end before the process does
dist.destroy_process_group()
"""
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[11.0, 11.0, 11.0] True"


class Replayed:
    """What a CUDA graph of a step does, on a CPU."""

    def __init__(self, step, state, kept):
        before = [v.clone() for v in (*state, *kept)]
        self.module, self.state = record(lambda: list(step())), state
        for v, old in zip((*state, *kept), before, strict=True):
            v.copy_(old)

    def replay(self):
        for v, new in zip(self.state, [v.clone() for v in self.module()], strict=True):
            v.copy_(new)


# Full gradients are taken client by client, and the host asks for ids.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mime", "mimelite")])
@pytest.mark.parametrize("kind", ["quadratic", "digits"])
def test_rounds_replayed_as_a_gpu_replays_them(name, kind, monkeypatch):
    """Recorded once at the second round, with nothing looked at, and replayed on what comes after: to the bit."""
    problem = quadratic(noise=0.3) if kind == "quadratic" else digits()
    engine = Vectorised(path="chain" if kind == "digits" else "auto")  # on a GPU there is no C code
    plain, other = (fedda.Run(stable(name), problem, cohort=3, seed=[0, 1], engine=engine) for _ in range(2))
    states = [[plain.step() for _ in range(4)]]
    monkeypatch.setattr(run_module, "capture", Replayed)
    monkeypatch.setattr(rng, "on_cpu", lambda v: False)
    states.append([other.step()])
    other.wants_graph = True
    states[1] += [other.step() for _ in range(3)]
    assert isinstance(other.graph, Replayed)
    for a, b in zip(*states, strict=True):
        assert same(a, b)
    assert plain.evaluate() == other.evaluate()
    assert all(torch.equal(v, other.simulation.memory[k]) for k, v in plain.simulation.memory.items())


def test_no_compiler_is_imported():
    text = "import sys, torch; from fedda.recording import record; record(lambda x: [x + 1], torch.ones(2)); "
    text += "print('torch._dynamo' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_recording_takes_points_of_another_layout():
    """The path is measured on points in a stack of their own; in the first step all clients share one row."""

    def objective(x, tokens, targets):
        return functional.cross_entropy(functional.embedding(tokens, x.view(5, 5)).flatten(0, 1), targets.flatten())

    tokens = torch.arange(3 * 2 * 6).view(3, 2, 6) % 5
    stacked, shared = StackedGradient(objective), torch.linspace(-1, 1, 25).expand(3, -1)
    measured = stacked(shared.contiguous(), tokens, (tokens + 1) % 5)
    assert torch.equal(stacked(shared, tokens, (tokens + 1) % 5), measured)
