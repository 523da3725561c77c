"""On a CUDA device: the same random bits, the same numbers as the sequential engine on the CPU, nothing left behind."""

import math
import warnings

import pytest
import torch

import fedda
from conftest import close, digits, example, last, quadratic, stable
from fedda import rng
from fedda.capturing import captured
from fedda.engines import Vectorised
from fedda.experiments import find, run
from fedda.experiments.overrides import override
from fedda.problems import models
from fedda.problems.gradients.tuning import replayed
from fedda.progress import Silence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_integers_cohorts_and_permutations_have_the_same_bits():
    for device in ("cpu", "cuda"):
        key = rng.fold(rng.key(7, rng.BATCH).to(device), torch.arange(100_000, device=device))
        got = rng.integers(key, 12345).cpu()
        cohort = rng.choose(rng.fold(rng.key(torch.tensor([[3], [4]], device=device), rng.COHORT), 5), 1000, 50).cpu()
        order = rng.permutation(rng.key(1, rng.SPLIT).to(device), 1000).cpu()
        normal = rng.normal(key).cpu()
        if device == "cpu":
            expected = got, cohort, order, normal
    assert all(torch.equal(a, b) for a, b in zip((got, cohort, order), expected[:3], strict=True))
    torch.testing.assert_close(normal, expected[3], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("problem", [quadratic, digits, lambda: digits(model="cnn", filters=4)])
def test_equals_the_sequential_engine_on_the_cpu(name, problem):
    problem = problem()
    truth = last(stable(name), problem, 4, cohort=3, seed=2, engine="sequential")
    for engine in ("sequential", "vectorised", Vectorised(chunk=2)):
        fast = last(stable(name), problem, 4, cohort=3, seed=2, engine=engine, device="cuda")
        for a, b in zip(fast, truth, strict=True):
            assert a.device.type == "cuda"
            close(a.cpu(), b, 1e-11)


def test_replicas_constraints_and_resume(name):
    problem = digits(dtype=torch.float32).to("cuda")
    more = {"prox": fedda.prox.Box(-0.2, torch.full((problem.d,), 0.3))} if name.startswith("fedda") else {}
    one = fedda.Run(stable(name, **more), problem, cohort=4, seed=[0, 1])
    two = fedda.Run(stable(name, **more), problem, cohort=4, seed=[0, 1])
    for _ in range(2):
        one.step()
        two.step()
    resumed = fedda.Run(
        stable(name, **more),
        problem,
        cohort=4,
        seed=[0, 1],
        state={k: v.cpu() for k, v in two.state().items()},
    )
    one.step()
    resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(one.server, resumed.server, strict=True))
    assert one.evaluate() == resumed.evaluate()


def test_proximal_maps_never_wait_for_the_device_and_equal_the_cpu():
    """Each map is captured in a CUDA graph, which no host synchronisation survives, and replayed."""
    p = fedda.prox
    ids = torch.arange(300) % 7
    maps = [p.L1(0.1), p.ElasticNet(0.1, 0.2), p.Box(-0.1, 0.2), p.L2Ball(1.0), p.L1Ball(1.0), p.Simplex(1.0)]
    maps += [p.HalfSpace(1.0, 0.5), p.GroupLasso(0.1, ids), p.Sum(p.L1(0.1), p.NonNegative())]
    u = torch.randn(2, 5, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = 0.1 + torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for prox in maps:
        expected = prox(u, q, 0.7)
        device = fedda.core.bind_to_problem(prox, u.cuda()[0, 0, 0], [("x", (300,))])
        points, metric = u.cuda(), q.cuda()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            device(points, metric, 0.7)  # warm up, as capture wants it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = device(points, metric, 0.7)
        graph.replay()
        close(got.cpu(), expected, 1e-12)


# -- a round as one graph ------------------------------------------------------------------------------------------------
WAITS = ("mime", "mimelite")  # full gradients client by client: the host asks for ids


def test_graph_equals_eager_to_the_bit_and_counts_alike(name):
    problem = digits(dtype=torch.float32).to("cuda")
    runs = [fedda.Run(stable(name), problem, cohort=4, seed=[0, 1], engine=Vectorised(graph=g)) for g in (False, True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            states = [run.step() for run in runs]
            assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert runs[0].graph is None and (runs[1].graph is None) == (name in WAITS)
    assert runs[0].evaluate() == runs[1].evaluate()


@pytest.mark.parametrize(
    "name", ["fedavg", "fedcm", "fedadam", "scaffold", "stem", "mime-mvr", "fedda-mvr", "fedda-2-1"]
)
def test_a_grid_of_rates_is_captured(name):
    """The points of a sweep are replicas, and their rates a tensor: a round must not look at it."""
    problem = digits(dtype=torch.float32).to("cuda")
    rates = torch.tensor([0.01, 0.02]).view(-1, 1, 1)
    words = {word: value for word, value in example(name).items() if word != "lr"}
    run = fedda.Run(fedda.make(name, lr=rates, **words), problem, cohort=4, seed=[0, 1])
    alone = fedda.Run(fedda.make(name, lr=0.02, **words), problem, cohort=4, seed=1)
    for _ in range(3):
        run.advance()
        alone.advance()
    assert run.graph is not None
    close(run.server.x[1], alone.server.x, 1e-5)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr"])
def test_batchnorm_is_captured(name, precision, monkeypatch):
    """By the general path; statistics for evaluation are estimated on the device, for all replicas at once."""
    # Else cuDNN's sums differ in the last bit from one run to the next, which five rounds may grow to 0.1.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    problem = fedda.load("digits", clients=6, model="cnn", filters=16, layers=2, norm="batch", device="cuda")
    how = {"path": "traced", "precision": precision}
    runs = [
        fedda.Run(stable(name), problem, cohort=4, seed=[0, 1], engine=Vectorised(graph=g, **how))
        for g in (False, True)
    ]
    for _ in range(5):
        states = [run.step() for run in runs]
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert runs[0].graph is None and runs[1].graph is not None
    assert all(math.isfinite(row["test_loss"]) for row in runs[1].evaluate())


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_batchnorm_by_vmap_and_by_the_kernels_follows_the_sequential_engine(precision):
    """After one step: a pixel that another one overtakes in a pool makes paths part. Nothing falls back to one client
    after the other."""
    problem = fedda.load("digits", clients=6, model="cnn", filters=16, layers=2, norm="batch", device="cuda")
    algorithm, weights = stable("fedavg", steps=1), torch.ones(6, dtype=torch.float64, device="cuda")
    truth = last(algorithm, problem, 1, cohort=4, engine="sequential").x
    moved = float((truth - problem.point()).norm())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in ("auto", "traced"):
            run = fedda.Run(algorithm, problem, cohort=4, engine=Vectorised(path=path, precision=precision))
            got = run.step().x
            assert run.problem.gradient_paths.chosen == {"auto": "kernels"}.get(path, path)
            assert float((got - truth).norm()) < {"tf32": 0.1, "bf16": 0.3}[precision] * moved
            here = run.evaluate()[0]
    assert abs(here["test_loss"] - float(problem.evaluate(got, weights)["test_loss"])) < 0.1


def test_batchnorm_on_the_device_is_that_on_the_host():
    here = fedda.load("digits", clients=6, model="cnn", filters=16, layers=2, norm="batch", dtype=torch.float64)
    there = here.to("cuda")
    x = here.start(0) + 0.1 * torch.randn(3, here.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.ones(6, dtype=torch.float64)
    for key, value in there.statistics(x.cuda()).items():
        close(value.cpu(), here.statistics(x)[key], 1e-10)
    for key, value in there.evaluate(x.cuda(), weights.cuda()).items():
        close(value.cpu(), here.evaluate(x, weights)[key], 1e-10)
    for name, rounds in (("fedavg", 3), ("fedda-mvr", 2)):  # 1e-13 after a round; MVR makes it 100 times more in each
        host = last(stable(name), here, rounds, cohort=4, engine="sequential")
        device = last(stable(name), there, rounds, cohort=4, engine="vectorised")
        close(device.x.cpu(), host.x, 1e-10)


def test_what_cannot_be_captured_runs_eagerly_and_says_so():
    problem = digits(dtype=torch.float32).to("cuda")
    run = fedda.Run(stable("mime"), problem, cohort=4)
    with pytest.warns(UserWarning, match="rounds run eagerly, which is slower"):
        run.step()
    assert run.graph is None and run.round == 1


def test_states_of_a_graph_are_not_overwritten():
    problem = quadratic().to("cuda")
    states = list(fedda.rounds(stable("fedavg"), problem, 4, seed=3))
    truth = list(fedda.rounds(stable("fedavg"), quadratic(), 4, seed=3, engine="sequential"))
    for a, b in zip(states, truth, strict=True):
        close(a.x.cpu(), b.x, 1e-12)


def test_a_divergence_is_told_when_somebody_looks():
    problem = quadratic().to("cuda")
    run = fedda.Run(fedda.make("fedavg", lr=1e200), problem)
    for _ in range(8):
        run.advance()
    with pytest.raises(fedda.Diverged):
        run.evaluate()
    assert bool(run.server.x.isfinite().all())


# -- our kernels ---------------------------------------------------------------------------------------------------------
def images(clients=6, **more):
    """A small convolutional network on bytes."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (240, 3, 16, 16), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 10, (240,), generator=g)
    torch.manual_seed(0)
    model, loss = models.cnn((3, 16, 16), 10, filters=16, layers=3)
    scale = (torch.tensor([120.0, 110.0, 130.0])[:, None, None], torch.tensor([60.0, 70.0, 50.0])[:, None, None])
    return fedda.problem(model, loss, x=x, y=y, client=torch.arange(240) % clients, batch=8, scale=scale, **more)


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-3), ("tf32", 0.1), ("bf16", 0.5)])
@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "fedda-2-1", "fedda-cv", "scaffold", "stem"])
def test_every_precision_follows_the_sequential_engine(name, precision, bound):
    """Within a share of how far the model has moved: a switched maximum in a pool, more than the rounding itself, makes
    paths part (tests/test_kernels.py holds the gradients themselves)."""
    problem = images().to("cuda")
    truth = last(stable(name), problem, 2, cohort=4, engine="sequential").x
    moved = float((truth - problem.point()).norm())
    run = fedda.Run(stable(name), problem, cohort=4, engine=Vectorised(precision=precision))
    for _ in range(2):
        got = run.step().x
    assert run.graph is not None and run.problem.gradient_paths.precision == precision
    assert float((got - truth).norm()) < bound * moved


def test_kernels_are_taken_by_default_and_repeat_to_the_bit():
    problem = images().to("cuda")
    runs = [fedda.Run(stable("fedda-mvr"), problem, cohort=4, seed=[0, 1], engine=e) for e in ("auto", "auto")]
    runs.append(fedda.Run(stable("fedda-mvr"), problem, cohort=4, seed=[0, 1], engine=Vectorised(graph=False)))
    assert {run.problem.gradient_paths.chosen for run in runs} == {"kernels"}
    for _ in range(4):
        states = [run.step() for run in runs]
        for other in states[1:]:
            assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


@pytest.mark.parametrize("path", ["kernels", "chain", "traced", "loop"])
def test_every_path_takes_the_same_step(path):
    """PyTorch's own in full precision: in TF32 its convolutions may switch a maximum in a pool, as above."""
    precision, bound = ("tf32", 0.05) if path == "kernels" else ("float32", 1e-3)
    problem = images().to("cuda")
    truth = last(stable("fedavg"), problem, 1, cohort=4, engine="sequential").x
    got = last(stable("fedavg"), problem, 1, cohort=4, engine=Vectorised(path=path, precision=precision)).x
    assert float((got - truth).norm()) < bound * float((truth - problem.point()).norm())


def residual():
    """A network with GroupNorm and strides: no path but vmap and the loop takes it."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 3, 16, 16, generator=g), torch.randint(0, 10, (240,), generator=g)
    torch.manual_seed(0)
    model, loss = models.resnet8((3, 16, 16), 10, width=8, groups=2)
    return fedda.problem(model, loss, x=x, y=y, client=torch.arange(240) % 6, batch=8)


@pytest.mark.parametrize("path", ["layers", "layers-last"])
@pytest.mark.parametrize("make", [images, residual])
@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-3), ("tf32", 0.1), ("bf16", 0.5)])
def test_layers_take_the_steps_of_the_loop_and_repeat_to_the_bit(make, precision, bound, path):
    problem = make().to("cuda")
    truth = last(stable("fedavg"), problem, 1, cohort=4, engine="sequential").x
    runs = [
        fedda.Run(stable("fedavg"), problem, cohort=4, engine=Vectorised(path=path, precision=precision, graph=g))
        for g in (True, False)
    ]
    first, second = (run.step().x for run in runs)
    assert runs[0].graph is not None and torch.equal(first, second)
    assert runs[0].graph.reads  # element-wise operations are fused
    assert float((first - truth).norm()) < bound * float((truth - problem.point()).norm())


def test_a_measured_way_is_replayed_as_a_graph_or_runs_as_it_is():
    x, calls = torch.zeros(3, device="cuda"), []
    way = replayed(lambda: (calls.append("graph"), x.add_(1)), x.device)
    waiting = replayed(lambda: calls.append(float(x.sum())), x.device)
    for _ in range(3):
        way()
    assert (
        calls == ["graph"] * 3 and x.tolist() == [5.0] * 3
    )  # the first call runs it twice, captures it and replays it
    calls.clear()
    waiting()
    waiting()
    assert set(calls) == {15.0}


def test_after_a_failed_capture_everything_works_as_before():
    x, stream = torch.ones(3, device="cuda"), torch.cuda.current_stream()
    with pytest.raises(RuntimeError), captured(torch.cuda.CUDAGraph(), x.device):
        float(x.sum())
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with captured(graph, x.device):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [2.0] * 3 and torch.cuda.current_stream() == stream
    assert torch.rand(3, device="cuda").isfinite().all()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_layers_take_part_in_the_measurement(precision):
    """No warning: their gradients are right, and nothing falls back to one client after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fedda.Run(stable("fedavg"), residual().to("cuda"), cohort=4, engine=Vectorised(precision=precision))
        run.step()
    assert {"layers", "layers-last"} <= set(run.problem.gradient_paths.candidates(4))


def test_chunks_and_replicas_of_the_kernels_agree():
    problem = images().to("cuda")
    whole = last(stable("fedda-mvr"), problem, 2, seed=[3, 4], engine=Vectorised()).x
    parts = last(stable("fedda-mvr"), problem, 2, seed=[3, 4], engine=Vectorised(chunk=2)).x
    alone = last(stable("fedda-mvr"), problem, 2, seed=4).x
    close(parts, whole, 1e-5)
    close(alone, whole[1], 1e-5)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_same_seed_gives_the_same_curve_twice(model, tmp_path):
    """A whole figure through run folders, the kernels' CNN included: rows equal to the byte."""
    words = ["problem.model=mlp"] if model == "mlp" else ["problem.model=cnn", "problem.filters=16", "problem.layers=3"]
    wanted = override(find("digits-heterogeneous"), rounds=6, seeds="0,1", settings=[*words, "every=2"])
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        run(wanted, folder, Silence(), device="cuda", force=True)
    first, second = ((folder / "metrics.jsonl").read_bytes() for folder in folders)
    assert first == second and first.count(b"\n") == 8 * 4 * 2  # methods, evaluations, seeds
