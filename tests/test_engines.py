"""Every registered algorithm: engines, chunks, replicas and resumed runs agree; types and devices are kept."""

import os
import platform
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import fedda
from conftest import close, digits, last, quadratic, stable, variants
from fedda import registry
from fedda.core import Algorithm, on_client
from fedda.engines import Vectorised
from fedda.testing import check_algorithm

PROBLEMS = {
    "quadratic": lambda: quadratic(clients=7),
    "digits": lambda: digits(clients=7),
}


@dataclass(frozen=True)
class Remembering(Algorithm):
    """Two exchanges and client memory in one, as no registered algorithm has them: the clients' running mean."""

    class Server(NamedTuple):
        x: torch.Tensor
        seen: torch.Tensor

    memory = ("c",)
    steps = 1

    def init(self, x, clients):
        return self.Server(x, torch.zeros_like(x))

    def round(self, server, cohort):
        (full,) = cohort.average(self.full, server.x)
        x, seen = cohort.average(self.local, server.x, full)
        return self.Server(x, seen)

    @on_client
    def full(self, client, x):
        return (client.full_gradient(x),)

    @on_client
    def local(self, client, x, full):
        (g,) = client.gradients(x)
        client.memory["c"] = 0.5 * client.memory["c"] + g
        return x - 0.1 * (client.memory["c"] + full), client.memory["c"]


def algorithms():
    return {n: lambda n=n: stable(n) for n in registry.algorithms.entries} | {"memory": Remembering}


# On quadratics `check_algorithm` does the same with every registered algorithm, below.
@pytest.mark.parametrize("which,problem", [("memory", "quadratic"), *((a, "digits") for a in algorithms())])
def test_sequential_equals_vectorised_in_every_chunking(which, problem):
    """All clients or a cohort; chunks of all, of one, of the whole cohort, and with a rest."""
    algorithm, problem = algorithms()[which](), PROBLEMS[problem]()
    for cohort, chunks in ((7, (None, 3)), (4, (1, 3, 4))):
        truth = last(algorithm, problem, 3, cohort=cohort, seed=3, engine="sequential")
        for chunk in chunks:
            fast = last(algorithm, problem, 3, cohort=cohort, seed=3, engine=Vectorised(chunk=chunk))
            for a, b in zip(fast, truth, strict=True):
                close(a, b, 1e-12)


@pytest.mark.parametrize("name,words", list(variants()))
def test_options_agree_between_engines_replicas_and_after_a_resume(name, words):
    problem = quadratic(clients=7)
    algorithm = stable(name, **words)
    truth = last(algorithm, problem, 4, cohort=4, seed=3, engine="sequential")
    half = fedda.Run(algorithm, problem, cohort=4, seed=[3, 8], engine=Vectorised(chunk=3))
    half.step()
    half.step()
    run = fedda.Run(algorithm, problem, cohort=4, seed=[3, 8], state=half.state())
    run.step()
    together = run.step()
    for a, b in zip(together, truth, strict=True):
        close(a[0] if a.dim() else a, b, 1e-12)


@pytest.mark.parametrize("engine,problem", [("sequential", "quadratic"), ("vectorised", "digits")])
@pytest.mark.parametrize("which", algorithms())
def test_replicas_equal_separate_runs(which, problem, engine):
    algorithm, problem, seeds = algorithms()[which](), PROBLEMS[problem](), [5, 0, 5]
    together = last(algorithm, problem, 3, cohort=4, seed=seeds, engine=engine)
    alone = {seed: last(algorithm, problem, 3, cohort=4, seed=seed, engine=engine) for seed in set(seeds)}
    for i, seed in enumerate(seeds):
        for a, b in zip(together, alone[seed], strict=True):
            close(a[i] if a.dim() else a, b, 1e-12)


def test_a_grid_of_hyper_parameters_equals_separate_runs(name):
    grid = [0.01, 0.02, 0.04]
    words = {"prox": fedda.prox.L1(0.01)} if "fedda" in name else {}
    words |= {"eps": 0.5} if "fedda-" in name else {}
    words |= {"c": 3.0} if name in ("fedda-mvr", "fedda-1-2", "fedda-cv-mvr") else {}
    together = last(
        fedda.make(name, **words, lr=torch.tensor(grid).double().view(3, 1, 1)),
        quadratic(),
        4,
        seed=[1, 1, 1],
    )
    for i, lr in enumerate(grid):
        alone = last(fedda.make(name, **words, lr=torch.tensor(lr).item()), quadratic(), 4, seed=1)
        close(together.x[i], alone.x, 1e-12)


@pytest.mark.parametrize("which", algorithms())
def test_same_seed_same_bits_and_a_resumed_run_goes_on_the_same(which):
    problem = digits(clients=7, dtype=torch.float32)
    how = {"cohort": 4, "seed": [2, 9]}
    one, two = (fedda.Run(algorithms()[which](), problem, **how) for _ in range(2))
    for _ in range(3):
        one.step()
        two.step()
    resumed = fedda.Run(algorithms()[which](), problem, **how, state=two.state())
    for _ in range(3):
        one.step()
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(one.server, resumed.server, strict=True))
    assert one.evaluate() == resumed.evaluate()


def test_what_a_user_may_check_of_an_algorithm(name):
    check_algorithm(stable(name))


def test_float32_stays_near_float64(name):
    """With a seed on whose path no rounding switches a ReLU: that parts the paths of any two precisions (seed 1 does so
    for FedGLOMO, seed 2 for STEM)."""
    problem, single = digits(), digits(dtype=torch.float32)
    exact = last(stable(name), problem, 25, seed=5).x
    close(last(stable(name), single, 25, seed=5, x0=problem.start(5)).x.double(), exact, 2e-5)


def test_loss_falls(name):
    problem = quadratic(noise=0.01)
    lowest = problem.evaluate(problem.minimum, torch.ones(5, dtype=torch.float64))["train_loss"].item()
    history = fedda.train(stable(name), problem, rounds=60, cohort=5, every=60).history
    assert history[-1]["train_loss"] - lowest < 0.1 * (history[0]["train_loss"] - lowest)
    history = fedda.train(stable(name), digits(dtype=torch.float32), rounds=120, cohort=5, every=120).history
    assert history[-1]["train_loss"] < 0.7 * history[0]["train_loss"]


def test_one_step_on_one_client(name):
    problem = quadratic(clients=1)
    a = last(stable(name, steps=1), problem, 3, engine="sequential")
    b = last(stable(name, steps=1), problem, 3, engine="vectorised")
    close(a.x, b.x, 1e-12)


def test_a_task_must_be_marked():
    class Sly(Remembering):
        def full(self, client, x):
            return (x,)

    with pytest.raises(ValueError, match=r"Sly\.full is not a task for clients: mark it with @on_client"):
        last(Sly(), quadratic(), 1)


PAGES = """
import resource, torch, fedda
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))
x, y = torch.randn(200, 300), torch.arange(200) % 3
problem = fedda.problem(model, torch.nn.functional.cross_entropy, x=x, y=y, client=torch.arange(200) % 10, batch=4)
run = fedda.Run(fedda.make("fedda-mvr", lr=0.01, w=1e4), problem, cohort=10, engine="vectorised")
for _ in range(5):
    run.step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    run.step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_rounds_on_a_cpu_take_few_new_pages():
    """A vector of all clients has 900 pages. Freed memory is kept, unless the user has set malloc up."""
    import subprocess
    import sys

    others = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # with them, this process has another malloc
    plain = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    faults = {}
    for name, environment in {
        "kept": {},
        "by MALLOC_": {"MALLOC_MMAP_THRESHOLD_": "131072"},
        "by tunables": {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"},
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", PAGES], env=plain | environment, capture_output=True, text=True, check=True
        )
        faults[name] = int(done.stdout)
    # Kept: a few thousand. By default, glibc adapts to what it sees: ten times as many. As set here: 600,000.
    assert 40 * faults["kept"] < min(faults["by MALLOC_"], faults["by tunables"]), faults


@pytest.mark.parametrize("accepted", [1 << 30, 1 << 25, 0])  # by glibc 2.35, by older ones, by none
def test_an_old_glibc_is_never_left_with_one_of_two_settings(monkeypatch, accepted):
    from fedda.engines import vectorised

    settings = {}

    class Libc:
        @staticmethod
        def mallopt(parameter, value):
            if parameter == vectorised.MMAP_THRESHOLD and value > accepted:
                return 0
            settings[parameter] = value
            return 1

    for name in ("GLIBC_TUNABLES", *os.environ):
        if name.startswith(("GLIBC_TUNABLES", "MALLOC_")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(vectorised.ctypes, "CDLL", lambda _: Libc)
    monkeypatch.setattr(vectorised.platform, "libc_ver", lambda: ("glibc", "2.34"))
    monkeypatch.setattr(vectorised, "OLD_LIMIT", 1 << 25)
    vectorised.keep_freed_memory.__wrapped__()
    assert settings == ({vectorised.MMAP_THRESHOLD: accepted, vectorised.TRIM_THRESHOLD: 1 << 30} if accepted else {})
