"""The networks of benchmarks/models.py, tiny ones on a CPU and whole ones on a GPU: equal to the sequential engine, the
same to the bit when a run is repeated, and when it is resumed."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

import fedda
from conftest import last, stable
from fedda.engines import Vectorised

FILE = Path(__file__).parent.parent / "benchmarks" / "models.py"
spec = importlib.util.spec_from_file_location("benchmarks_models", FILE)
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)

CUDA = torch.cuda.is_available()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
NETWORKS = list(benchmark.networks(True))
DEVICES = [
    pytest.param("cpu", "float32", id="cpu"),
    *(pytest.param("cuda", precision, marks=on_gpu, id=precision) for precision in ("float32", "tf32", "bf16")),
]
# How far a step is from the sequential engine's, relative to its length: in a deep network, a rounded number may switch
# a maximum or a ReLU.
BOUNDS = {"float32": 2e-3, "tf32": 0.1, "bf16": 0.5}


def problem_of(name, device):
    torch.manual_seed(0)
    return benchmark.problem_of(*benchmark.networks(device == "cpu")[name], torch.device(device))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(("device", "precision"), DEVICES)
def test_a_step_is_that_of_the_sequential_engine(name, device, precision):
    problem, algorithm = problem_of(name, device), stable("fedavg", steps=1)
    truth = last(algorithm, problem, 1, engine="sequential").x
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a model that falls back to the loop, or a round that cannot be captured
        got = last(algorithm, problem, 1, engine=Vectorised(precision=precision)).x
    assert float((got - truth).norm()) < BOUNDS[precision] * float((truth - problem.point()).norm())


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("algorithm", ["fedavg", "fedda-mvr"])
@pytest.mark.parametrize(("device", "precision"), DEVICES)
def test_a_run_repeats_and_resumes_to_the_bit(name, algorithm, device, precision):
    problem = problem_of(name, device)

    def begun(**state):
        return fedda.Run(
            stable(algorithm, steps=2), problem, engine=Vectorised(precision=precision), force=True, **state
        )

    one, two = begun(), begun()
    for _ in range(2):
        one.advance()
        two.advance()
    resumed = begun(state={key: value.cpu() for key, value in two.state().items()})
    for run in (one, two, resumed):
        run.advance()
    assert (device == "cuda") == (one.graph is not None)
    rows = [run.evaluate() for run in (one, two, resumed)]
    for other in (two, resumed):
        assert all(torch.equal(a, b) for a, b in zip(one.server, other.server, strict=True))
    assert rows[0] == rows[1] == rows[2]
