"""The constants of the theory, L, sigma and zeta, estimated at a point of a real problem."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import rng

SAMPLES, CLIENTS = 512, 20  # the most samples per client, and clients, that are used by default
TOLERANCE = 1e-3  # relative, of an eigenvalue
Operator = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Constants:
    """The constants of Theorem 1's assumptions at one point. All except `L` are those of the worst client."""

    L: float  # the largest curvature of f, in absolute value
    L_batch: float  # assumption 5, for a mini-batch: E |grad f(x; B) - grad f(y; B)|^2 <= L^2 |x - y|^2
    sigma: float  # the root of E |g_k(x; B) - grad f_k(x)|^2, for the problem's own batches
    zeta: float  # the largest |grad f_k(x) - grad f_l(x)|
    loss: float  # f(x), which bounds f(x) - f* if losses are not negative
    gradient: float  # |grad f(x)|


def constants(
    problem: Any, x: Tensor | None = None, seed: int = 0, batches: int = 16, samples: int = SAMPLES
) -> Constants:
    """Estimate the constants of a problem at x (default: its first point).

    Curvatures by power iteration on Hessian-vector products, sigma as the variance of mini-batch gradients, zeta from
    pairwise differences of the clients' gradients. Of a large problem only a part is used: `samples` of each of 20
    clients, and `batches` of their mini-batches.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0, 2.0], [3.0, 4.0]], b=[[0.0, 0.0], [0.0, 0.0]])
    >>> at = constants(problem, x=torch.ones(2, dtype=torch.float64))
    >>> round(at.L, 3), round(at.L_batch, 3), round(at.zeta, 3), at.sigma
    (3.0, 4.0, 2.828, 0.0)
    """
    x = problem.start(seed) if x is None else x
    clients = some_clients(problem, seed)
    parts = [some_samples(problem, k, seed, samples) for k in clients]
    g = torch.stack([problem.gradient(x, samples) for samples in parts])
    weights = torch.ones(problem.clients, dtype=torch.float64, device=x.device)
    drawn = [draw(problem, clients, seed, j) for j in range(batches)]
    return Constants(
        curvature(mean_hessian(problem, x, parts), x, seed),
        # Half of the batches: a curvature costs forty times as much as a gradient, and it varies less.
        max(batch_curvature(problem, x, drawn[: (batches + 1) // 2], i, seed) for i in range(len(clients))),
        sigma(problem, x, drawn, len(clients)),
        float(torch.cdist(g[None], g[None], compute_mode="donot_use_mm_for_euclid_dist").max()),
        float(problem.evaluate(x, weights)["train_loss"]),
        float(g.mean(dim=0).double().norm()),
    )


def some_clients(problem: Any, seed: int) -> list[int]:
    """The clients that are used."""
    return [int(k) for k in rng.choose(rng.key(seed, rng.COHORT)[None], problem.clients, min(CLIENTS, problem.clients))]


def some_samples(problem: Any, client: int, seed: int, samples: int = SAMPLES) -> Any:
    """A client's data, at most `samples` of them."""
    size = int(problem.sizes[client])
    if size <= samples:
        return problem.everything(client)
    return problem.subset(client, rng.permutation(rng.fold(rng.key(seed, rng.SPLIT), client), size)[:samples])


def draw(problem: Any, clients: list[int], seed: int, j: int) -> Any:
    """The j-th mini-batch of each of these clients."""
    ids = torch.tensor(clients, device=problem.device)
    key = rng.fold(rng.fold(rng.key(seed, rng.BATCH).to(problem.device), ids), j)
    return problem.batch(ids, key)


def hessian_vector(problem: Any, x: Tensor, batch: Any, v: Tensor) -> Tensor:
    """The Hessian of a batch's loss at x [d] times v [d].

    By two backward passes if the problem has a differentiable objective or gradient, else by a central difference of
    gradients.
    """
    with torch.enable_grad():
        at = x.detach().clone().requires_grad_()
        loss = problem.batch_loss(at, batch)
        if loss is None:
            g = problem.gradient(at, batch)
        else:
            (g,) = torch.autograd.grad(loss, at, create_graph=True)
        if g.requires_grad:
            (product,) = torch.autograd.grad(g, at, v, materialize_grads=True)
            return product.detach()
    step = float(torch.finfo(x.dtype).eps) ** (1 / 3) * (1 + float(x.norm())) / float(v.norm())
    ahead, back = (problem.gradient(x + s * step * v, batch) for s in (1, -1))
    return (ahead - back) / (2 * step)


def mean_hessian(problem: Any, x: Tensor, parts: list[Any], h: Tensor | None = None) -> Operator:
    """v -> Hess f(x) v, the mean over clients; with h, H^(-1/2) Hess H^(-1/2) v: the curvature in the metric H."""
    root = None if h is None else h.to(x.dtype).reshape(-1).rsqrt()

    def product(v: Tensor) -> Tensor:
        u = v if root is None else root * v
        mean = torch.stack([hessian_vector(problem, x, part, u) for part in parts]).mean(dim=0)
        return mean if root is None else root * mean

    return product


def curvature(product: Operator, x: Tensor, seed: int = 0, most: int = 100) -> float:
    """The largest absolute eigenvalue of a symmetric operator, by power iteration.

    >>> A = torch.diag(torch.tensor([1.0, -3.0, 2.0], dtype=torch.float64))
    >>> round(curvature(lambda v: A @ v, torch.zeros(3, dtype=torch.float64)), 2)
    3.0
    """
    v = rng.normal(rng.fold(rng.key(seed, rng.NOISE), torch.arange(x.numel()))).to(device=x.device, dtype=x.dtype)
    v, size = v / v.norm(), 0.0
    for _ in range(most):
        u = product(v)
        new = float(u.norm())  # |A v| with |v| = 1 rises to the largest absolute eigenvalue
        if new == 0 or abs(new - size) <= TOLERANCE * new / 10:
            return new
        v, size = u / new, new
    return size


def batch_curvature(problem: Any, x: Tensor, drawn: list[Any], i: int, seed: int = 0) -> float:
    """Assumption 5 near x for the i-th client: the root of the largest eigenvalue of E[Hess(x; B)^2]."""
    batches = [problem.pick(batch, (i,)) for batch in drawn]

    def product(v: Tensor) -> Tensor:
        twice = [hessian_vector(problem, x, batch, hessian_vector(problem, x, batch, v)) for batch in batches]
        return torch.stack(twice).mean(dim=0)

    return curvature(product, x, seed, most=20) ** 0.5


def sigma(problem: Any, x: Tensor, drawn: list[Any], clients: int) -> float:
    """The noise of the worst client, from the spread of its mini-batch gradients (unbiased)."""
    points = x.expand(1, clients, x.numel())
    g = torch.stack([problem.gradients(points, batch)[0] for batch in drawn]).double()
    return float(((g - g.mean(dim=0)) ** 2).sum(dim=(0, -1)).div(len(drawn) - 1).max().sqrt())


def curvature_in(problem: Any, x: Tensor, h: Tensor, seed: int = 0, samples: int = SAMPLES) -> float:
    """The largest curvature of f at x in the metric H. A stable eta is at most 2 / (lambda times it)."""
    parts = [some_samples(problem, k, seed, samples) for k in some_clients(problem, seed)]
    return curvature(mean_hessian(problem, x, parts, h), x, seed)
