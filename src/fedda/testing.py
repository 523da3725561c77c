"""Checks for your own algorithm or proximal map: each failure is an AssertionError of one line.

>>> import fedda
>>> from fedda.testing import check_algorithm, check_prox
>>> check_algorithm(fedda.make("fedavg", lr=0.1))
>>> check_prox(fedda.prox.L1(0.3))
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .aggregation.cohort import model_replies
from .aggregation.dry_run import ZeroGradientClient, ZeroGradientCohort, dry_run, takes_client_steps
from .core import Algorithm, ClientTask, bind_to_problem
from .engines import Vectorised
from .engines.counting import message_bytes
from .problems import Quadratic
from .rules.prox import Prox
from .rules.schedules import schedule
from .run import Run

__all__ = ["check_algorithm", "check_prox"]

CLIENTS, COHORT, D, ROUNDS = 7, 4, 5, 3


def check_algorithm(algorithm: Any, **hyper: Any) -> None:
    """Check what every algorithm must do.

    Engines agree, also where clients stop early, several seeds at once equal single runs, a resumed run equals an
    uninterrupted one, the dtype is kept, bytes and gradients are counted, a client whose reply is not finite is left
    out, the rate of every local step is used, and the replies that are models are marked. The problem is a small noisy
    quadratic whose clients differ.

    Args:
        algorithm: an instance, or a class.
        hyper: the hyper-parameters of a class, with which the method is stable on that problem.

    >>> from fedda.algorithms.fedavg import FedAvg
    >>> check_algorithm(FedAvg, lr=0.1, steps=3)
    """
    instance: Algorithm = algorithm(**hyper) if isinstance(algorithm, type) else algorithm
    if not isinstance(instance, Algorithm):
        raise ValueError(f"check_algorithm: give an algorithm (an instance or a class), got {instance!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in ALGORITHM_CHECKS:
            check(instance)


def engines_agree(algorithm: Algorithm) -> None:
    """All engines, in every chunking, equal the sequential one."""
    for cohort in (CLIENTS, COHORT):
        expected = _after(algorithm, cohort=cohort, seed=3, engine="sequential")
        for chunk in (None, 1, 3):
            other = _after(algorithm, cohort=cohort, seed=3, engine=Vectorised(chunk=chunk))
            name = "vectorised" if chunk is None else f"vectorised, {chunk} at a time"
            _same(algorithm, other, expected, f"the engines differ ({name}, {cohort} clients)", MIXES)


def early_stops_agree(algorithm: Algorithm) -> None:
    """Clients that stop early end where they would end alone, in a loop that is as long as their work."""
    if not takes_client_steps(algorithm, torch.zeros(1, D, dtype=torch.float64)):
        return
    late = dataclasses.replace(algorithm, stragglers=0.7)
    for cohort in (CLIENTS, COHORT):
        alone, together = (_after(late, cohort=cohort, seed=3, engine=e) for e in ("sequential", "vectorised"))
        advice = "change everything that a reply or the memory depends on by `x = move(x, new)`"
        _same(algorithm, together, alone, "a client that stopped early was changed by later steps", advice)


def replicas_agree(algorithm: Algorithm) -> None:
    """Several seeds in one program equal single runs."""
    seeds = [5, 0, 5]
    together = _after(algorithm, cohort=COHORT, seed=seeds)
    for i, seed in enumerate(seeds):
        one = type(together)(*(v[i] for v in together))
        _same(algorithm, one, _after(algorithm, cohort=COHORT, seed=seed), "several seeds at once differ", MIXES)


def resumes(algorithm: Algorithm) -> None:
    """A run that is resumed from a state gives the same bits."""
    options: dict[str, Any] = {"cohort": COHORT, "seed": [2, 9]}
    whole = Run(algorithm, _problem(), **options)
    for _ in range(2):
        whole.step()
    resumed = Run(algorithm, _problem(), **options, state=whole.state())
    for _ in range(2):
        whole.step()
        resumed.step()
    for name, a, b in zip(type(whole.server)._fields, whole.server, resumed.server, strict=True):
        _require(
            torch.equal(a, b), algorithm, f"a resumed run differs in {name}",
            "keep everything in Server or in client.memory, and nothing on self",
        )  # fmt: skip


def dtypes_are_kept(algorithm: Algorithm) -> None:
    """The server's state keeps its dtypes and shapes, and float32 is near float64."""
    ends = []
    for dtype in (torch.float32, torch.float64):
        run = Run(algorithm, _problem().to(dtype=dtype), seed=1)
        start = run.server
        for _ in range(ROUNDS):
            run.step()
        for name, a, b in zip(type(start)._fields, start, run.server, strict=True):
            _require(
                a.shape == b.shape and a.dtype == b.dtype and (name != "x" or b.dtype == dtype), algorithm,
                f"{name} was {list(a.shape)} {a.dtype} and becomes {list(b.shape)} {b.dtype} in a {dtype} run",
                "make tensors like others, such as torch.zeros_like(x)",
            )  # fmt: skip
        ends.append(run.server.x.double())
    _close(algorithm, ends[0], ends[1], 1e-3, "float32 is far from float64 in x", "name no dtype in a task")
    usual, default = _after(algorithm, seed=1), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        wide = _after(algorithm, seed=1)
    finally:
        torch.set_default_dtype(default)
    advice = "a number times a mask is float32: mask with torch.where(active, value, 0.0), and make tensors like x"
    _same(algorithm, usual, wide, "a float64 run is rounded to float32", advice)


def traffic_is_counted(algorithm: Algorithm) -> None:
    """Every round counts the bytes of the tensors that pass, and the gradients that are taken."""
    run = Run(algorithm, _problem(), cohort=COHORT)
    sent: list[int] = []

    def look(task: ClientTask, down: Sequence[Tensor], replies: Sequence[Tensor]) -> None:
        sent.append(sum(map(message_bytes, replies)))

    start, _ = dry_run(run.algorithm, run.server.x, look)
    expected = COHORT * sum(sent[len(start) :])
    for _ in range(2):
        before = dataclasses.replace(run.counts)
        run.step()
        up = run.counts.bytes_up - before.bytes_up
        _require(
            up == expected, algorithm, f"a round sends {up} bytes up, but its replies have {expected}",
            "every round must send the same tensors, and only through cohort.average",
        )  # fmt: skip
        gradients = run.counts.gradients + run.counts.full_gradients - before.gradients - before.full_gradients
        _require(gradients > 0, algorithm, "a round takes no gradient", "take gradients by client.gradients in a task")


def failed_clients_are_left_out(algorithm: Algorithm) -> None:
    """A client whose gradients are not finite has no effect, as if its weight were zero."""
    for engine in ("sequential", "vectorised"):
        broken = Run(algorithm, _problem(), engine=engine)
        weightless = Run(algorithm, _problem(), engine=engine, state=broken.state())
        weightless.simulation.weights = weightless.simulation.weights.clone()
        weightless.simulation.weights[2] = 0.0
        broken.problem.b[2] = torch.nan  # type: ignore[attr-defined]
        for _ in range(2):
            broken.step()
            weightless.step()
        advice = "take means over clients only by cohort.average"
        _require(bool((broken.dropped == 2).all()), algorithm, "a failed client is not noticed", advice)
        _same(algorithm, broken.server, weightless.server, "a failed client changes the mean of the others", advice)


def every_rate_is_used(algorithm: Algorithm) -> None:
    """A different rate at any step of a round changes the result: a decaying rate is followed step by step."""
    if algorithm.one_rate_per_round or not hasattr(algorithm, "lr"):
        return
    rate, steps = schedule(algorithm.lr), algorithm.steps

    def state(step: int) -> Any:
        """The state if this step has half the rate in every round but the first, which may only measure."""

        def changed(t: Tensor) -> Tensor:
            half: Tensor = torch.where((t >= steps) & (t % steps == step), 0.5, 1.0).to(t.dtype)
            return rate(t) * half

        run = Run(dataclasses.replace(algorithm, lr=changed), _problem())  # type: ignore[call-arg]
        for _ in range(3):
            run.step()
        return run.step()

    usual = state(-1)
    for step in range(steps):
        _require(
            any(not torch.equal(a, b) for a, b in zip(usual, state(step), strict=True)), algorithm,
            f"the rate of step {step} of {steps} in a round is not used",
            "step i of a round takes lr(t + i), and t grows by steps in a round",
        )  # fmt: skip


def model_replies_are_marked(algorithm: Algorithm) -> None:
    """With zero gradients, the replies that move as the model moves are those that the task marks."""
    for task, moved, marked in moved_replies(algorithm):
        _require(
            moved == marked, algorithm,
            f"{task.__name__} replies an updated model at {moved}, but marks {marked}",
            f"mark it with @on_client(model_replies={moved})",
        )  # fmt: skip


def moved_replies(algorithm: Algorithm) -> Iterator[tuple[ClientTask, tuple[int, ...], tuple[int, ...]]]:
    """For each task, the replies that move with the model if all gradients are zero, and the replies that are marked.
    Every other tensor that is sent is positive noise."""
    d = 6
    x = torch.linspace(4.0, 5.0, d, dtype=torch.float64)[None]
    shift = torch.linspace(0.3, 0.7, d, dtype=torch.float64)
    algorithm = bind_to_problem(algorithm, x, [("x", (d,))])
    calls: list[tuple[ClientTask, tuple[Tensor, ...]]] = []
    cohort = ZeroGradientCohort(
        ZeroGradientClient(x, algorithm.memory), lambda task, down, replies: calls.append((task, down))
    )
    server = algorithm.round(algorithm.init(x, cohort), cohort)
    algorithm.round(server, cohort)  # with t > 0
    for task, down in calls:
        g = torch.Generator().manual_seed(0)
        sent = [x] + [
            v.clamp(min=1) if v.shape[-1] == 1 else 0.5 + torch.rand(v.shape, generator=g, dtype=v.dtype)
            for v in down[1:]  # a number is the step counter or a scalar H
        ]

        def ask(x: Tensor, sent: list[Tensor] = sent, task: ClientTask = task) -> tuple[Tensor, ...]:
            return task(ZeroGradientClient(x, algorithm.memory), x, *sent[1:])

        here, there = ask(x), ask(x + shift)
        moved = tuple(
            i for i, (a, b) in enumerate(zip(there, here, strict=True))
            if a.shape[-1] == d and torch.allclose(a - b, shift.expand_as(a), rtol=0, atol=1e-12)
        )  # fmt: skip
        yield task, moved, tuple(i for i in model_replies(task) if i < len(here))


ALGORITHM_CHECKS: tuple[Callable[[Algorithm], None], ...] = (
    resumes, dtypes_are_kept, engines_agree, early_stops_agree, replicas_agree, traffic_is_counted,
    failed_clients_are_left_out, every_rate_is_used, model_replies_are_marked,
)  # fmt: skip
MIXES = "a task must not mix clients or seeds: name the axis of every reduction, such as g.norm(dim=-1, keepdim=True)"


def check_prox(prox: Any, d: int = 6, diagonal: bool = True, **hyper: Any) -> None:
    """Check that a map solves argmin_x s psi(x) + sum q (x - u)^2 / 2 over its set.

    Args:
        prox: an instance, or a class.
        d: the length of the vectors.
        diagonal: whether metrics with a weight per coordinate are checked too.
        hyper: the parameters of a class.

    >>> import fedda
    >>> check_prox(fedda.prox.Box, lower=-1.0, upper=0.5)
    """
    p: Prox = prox(**hyper) if isinstance(prox, type) else prox
    if not isinstance(p, Prox):
        raise ValueError(f"check_prox: give a fedda.prox map (an instance or a class), got {p!r}")
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    metrics = [torch.tensor(1.0, dtype=torch.float64), normal(3, 1).exp()]
    metrics += [normal(d).exp(), normal(3, d).exp()] if diagonal else []
    for q in metrics:
        for s in (0.0, 0.3, 2.0):
            for scale in (0.1, 1.0, 10.0):
                _check_point(p, scale * normal(3, d), scale * normal(3, d), q, s, normal)


def _check_point(p: Prox, u: Tensor, v: Tensor, q: Tensor, s: float, normal: Callable[..., Tensor]) -> None:
    x, y = p(u, q, s), p(v, q, s)
    _require(
        x.shape == u.shape and x.dtype == u.dtype,
        p,
        "the shape or the dtype of u is lost",
        "return [..., d] for [..., d]",
    )
    _require(
        p.value(u).shape == p.feasible(u).shape == u.shape[:-1], p, "value or feasible has another shape than [...]",
        "reduce the last axis: .sum(dim=-1)",
    )  # fmt: skip
    _require(bool(p.feasible(x).all()), p, "the result is not feasible", "end with a point of the set")
    others = p.project(torch.cat([x + 0.1 * normal(25, *u.shape), 3 * normal(25, *u.shape)]))
    _require(bool(p.feasible(others).all()), p, "project leaves the set", "project is the map with s = 0")
    left = (q * (u - x) * (others - x)).sum(-1)
    size = 1 + (q * (u - x).abs() * (others - x).abs()).sum(-1)
    _require(
        bool((left <= s * (p.value(others) - p.value(x)) + 1e-9 * size).all()), p,
        f"another point is better than the result (s = {s}, metric {list(q.shape)})",
        "the map must use q as the weight of (x - u)^2 / 2 and s as that of psi",
    )  # fmt: skip
    near, far = ((q * (a - b) ** 2).sum(-1) for a, b in ((x, y), (u, v)))
    _require(
        bool((near <= far * (1 + 1e-9) + 1e-12).all()),
        p,
        "two results are further apart than their inputs",
        "a proximal map never moves two points apart",
    )
    inside = p.project(u)
    _close(p, p(inside, q, 0.0), inside, 1e-12, "with s = 0 a point of the set is moved", "psi must have the weight s")
    rows = torch.stack([p(u[i], q if q.dim() < 2 else q[i], s) for i in range(len(u))])
    _close(p, rows, x, 1e-12, "rows together differ from rows alone", "name the axis of every reduction (dim=-1)")
    single = p(u.float(), q.float(), s)
    _require(single.dtype == torch.float32, p, "float32 becomes another dtype", "make tensors like u")
    _close(p, single.double(), x, 1e-4, "float32 is far from float64", "sum in float64 where numbers are many")


def _problem() -> Quadratic:
    """Seven clients with different data."""
    g = torch.Generator().manual_seed(0)
    A = 0.2 + torch.rand(CLIENTS, D, generator=g, dtype=torch.float64)
    b = torch.randn(CLIENTS, D, generator=g, dtype=torch.float64)
    return Quadratic(A, b, noise=0.3, sizes=[3, 8, 5, 8, 2, 7, 4])


def _after(algorithm: Algorithm, **options: Any) -> Any:
    """The server state after some rounds."""
    run = Run(algorithm, _problem(), **options)
    for _ in range(ROUNDS):
        run.step()
    return run.server


def _same(owner: Any, a: Any, b: Any, what: str, advice: str) -> None:
    """Require that two server states are equal up to rounding."""
    for name, one, two in zip(type(b)._fields, a, b, strict=True):
        _close(owner, one, two, 1e-9, f"{what} in {name}", advice)


def _close(owner: Any, a: Tensor, b: Tensor, tol: float, what: str, advice: str) -> None:
    _require(a.shape == b.shape, owner, f"{what}: shape {list(a.shape)} for {list(b.shape)}", advice)
    error = float((a - b).abs().max() / (1 + b.abs().max()))
    _require(error <= tol, owner, f"{what} by {error:.2g}", advice)


def _require(holds: bool, owner: Any, what: str, advice: str) -> None:
    if not holds:
        raise AssertionError(f"{type(owner).__name__}: {what}: {advice}")


def __dir__() -> list[str]:
    return sorted(__all__)
