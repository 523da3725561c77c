"""The problem on which the theory is tested. All of its constants are known."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import rng
from ..checks import AT_LEAST_ZERO, number
from ..problems import Quadratic


class Synthetic(Quadratic):
    """f_k(x) = sum A_k (x - b_k)^2 / 2 + slope_k x + bend x^2 / (1 + x^2), with noise as in `fedda.Quadratic`.

    `bend` > 0 makes it non-convex: that term's curvature lies in [-bend / 2, 2 bend]. `b` may be [replicas, K, d].
    With `distinct`, one number per replica, client k is a copy of client k mod distinct, batches included. The mean
    over all clients is then the mean over the distinct ones, so different numbers of clients run as one program.

    >>> problem = Synthetic(A=[[1.0], [0.0]], b=[[10.0], [0.0]], slope=[[0.0], [9.0]])
    >>> problem.full_gradients(torch.zeros(1, 1, dtype=torch.float64)).tolist(), problem.L
    ([[-10.0], [9.0]], 1.0)
    """

    def __init__(
        self, A: Any, b: Any, noise: float = 0.0, slope: Any = 0.0, bend: float = 0.0, distinct: Sequence[int] = ()
    ):
        number("Synthetic", "bend", bend, AT_LEAST_ZERO)
        b = torch.as_tensor(b, dtype=torch.float64)
        self.curves, self.centres = torch.as_tensor(A, dtype=torch.float64).expand(b.shape), b
        self.slope, self.bend = torch.as_tensor(slope, dtype=torch.float64).expand(b.shape), bend
        first, second = (v if v.dim() == 2 else v[0] for v in (self.curves, self.centres))
        super().__init__(first, second, noise)
        self.source: Tensor | None = None  # the client that each client copies, [replicas, K]
        if distinct:
            if any(not 0 < n <= self.clients or self.clients % n for n in distinct):
                raise ValueError(f"Synthetic: distinct must divide the {self.clients} clients, got {list(distinct)}")
            everyone = torch.arange(self.clients)
            self.source = torch.stack([everyone % n for n in distinct])
            place = self.source[..., None].expand(-1, -1, self.d)
            lead = (len(distinct), self.clients, self.d)
            values = (self.curves, self.centres, self.slope)
            self.curves, self.centres, self.slope = (v.expand(lead).gather(-2, place) for v in values)

    @property
    def L(self) -> float:
        """The smoothness constant. It holds in the mean square as well, because additive noise cancels."""
        return float(self.curves.max()) + 2 * self.bend

    @property
    def lowest(self) -> Tensor:
        """f* on the whole space, [...]; if f is not convex, coordinate by coordinate on a fine grid."""
        A = self.curves.mean(dim=-2)
        pull = (self.curves * self.centres - self.slope).mean(dim=-2)
        if self.bend == 0:
            return self.value((pull / A)[..., None, :])[..., 0]
        reach = float((self.centres.abs() + self.slope.abs() / A).max()) + 1.0
        grid = torch.linspace(-reach, reach, 40001, dtype=torch.float64)[:, None]
        both = zip(A.reshape(-1, self.d), pull.reshape(-1, self.d), strict=True)
        bend = self.bend * grid**2 / (1 + grid**2)
        best = [(a * grid**2 / 2 + bend - p * grid).amin(dim=0).sum() for a, p in both]
        return torch.stack(best).view(pull.shape[:-1]) + (self.curves * self.centres**2 / 2).sum(dim=-1).mean(dim=-1)

    def value(self, x: Tensor) -> Tensor:
        """f(x), the mean over the clients: [..., 1] from [..., 1, d]."""
        own = self.curves * (x - self.centres) ** 2 / 2 + self.slope * x
        bend = self.bend * (x**2 / (1 + x**2)).sum(dim=-1)
        return own.sum(dim=-1).mean(dim=-1, keepdim=True) + bend

    def full_gradients(self, x: Tensor) -> Tensor:
        """The gradient of every f_k at x: [..., K, d] from [..., 1, d]."""
        return self._gradient(x, self.curves, self.centres, self.slope)

    def _gradient(self, x: Tensor, A: Tensor, b: Tensor, slope: Any) -> Tensor:
        g = A * (x - b) + slope
        return g + self.bend * 2 * x / (1 + x**2) ** 2 if self.bend else g

    def batches(self, ids: Tensor, keys: Tensor) -> Iterator[Any]:
        """A batch for each of keys [draws, ..., K]; the noise of all is drawn at once."""
        A, b, slope = (self._of(v, ids) for v in (self.curves, self.centres, self.slope))
        if not self.noise:
            return ((A, b, slope, 0.0) for _ in keys)
        if self.source is not None:
            keys = keys.gather(-1, self.source.expand(keys.shape))
        xi = self.noise * rng.normal(rng.fold(keys[..., None], torch.arange(self.d)))
        return ((A, b, slope, one) for one in xi)

    def batch(self, ids: Tensor, key: Tensor) -> Any:
        return next(iter(self.batches(ids, key[None])))

    def _of(self, values: Tensor, ids: Tensor) -> Tensor:
        if values.dim() == 2:
            return values[ids]
        if ids.shape[-1] < self.clients:
            raise ValueError("Synthetic: with values per replica all clients must take part, in one chunk")
        return values

    def everything(self, client: int) -> Any:
        return self.curves[..., client, :], self.centres[..., client, :], self.slope[..., client, :], 0.0

    def gradients(self, x: Tensor, batch: Any) -> Tensor:
        A, b, slope, xi = batch
        return self._gradient(x, A, b, slope) + xi

    gradient = gradients

    def pick(self, batch: Any, index: tuple[int, ...]) -> Any:
        A, b, slope, xi = batch
        return A[index], b[index], slope[index], xi[index] if isinstance(xi, Tensor) else xi

    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return {"train_loss": self.value(x[..., None, :])[..., 0]}


def centred(clients: int, d: int, seed: int) -> Tensor:
    """Minima b_k ~ N(0, I) with mean zero, [K, d]. The minimum of a single client is the origin."""
    generator = torch.Generator().manual_seed(seed)
    b = torch.randn(clients, d, generator=generator, dtype=torch.float64)
    return b - b.mean(dim=-2, keepdim=True)


def spectrum(d: int) -> Tensor:
    """The eigenvalues of a Hessian that all clients share, evenly spaced in [0.1, 1]: [1, d]."""
    return torch.linspace(0.1, 1.0, d, dtype=torch.float64)[None]
