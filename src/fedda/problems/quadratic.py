"""Diagonal quadratics with known minima: f_k(x) = sum_j A_kj (x_j - b_kj)^2 / 2."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor

from .. import rng
from ..checks import check
from ..core import Problem
from .evaluation import Shard, Sum, Totals, means, unchanged, whole_range

Sample = tuple[Tensor, Tensor, Tensor | float]  # A, b and the noise


class Quadratic(Problem):
    """f_k(x) = sum A_k (x - b_k)^2 / 2 on client k: a problem with a known minimum, for tests and examples.

    A gradient is A_k (x - b_k) + noise xi, xi standard normal in each coordinate, the same at every point of one call.
    It computes in float64; `.to(dtype=...)` changes that.

    Args:
        A: the diagonal Hessians, [clients, d].
        b: the minima of the clients, [clients, d].
        noise: the deviation of the noise of a gradient.
        sizes: samples of each client, 1 by default: for ``weights="samples"`` and for methods whose clients do unequal
            work.

    >>> Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]]).minimum
    tensor([3.], dtype=torch.float64)
    """

    def __init__(self, A: Any, b: Any, noise: float = 0.0, sizes: Any = None):
        check("Quadratic", noise=noise)
        self.noise = noise
        self.A, self.b = (torch.as_tensor(v, dtype=torch.float64) for v in (A, b))
        if self.A.shape != self.b.shape or self.A.dim() != 2:
            shapes = f"{list(self.A.shape)} and {list(self.b.shape)}"
            raise ValueError(f"Quadratic: A and b must be of one shape [clients, d], got {shapes}")
        self.clients, self.d = self.A.shape
        counts = torch.ones(self.clients, dtype=torch.int64) if sizes is None else torch.as_tensor(sizes)
        if counts.shape != (self.clients,) or counts.is_floating_point() or bool((counts < 1).any()):
            wanted = f"{self.clients} whole numbers >= 1, one for each client"
            raise ValueError(f"Quadratic: sizes must be {wanted}, got {sizes!r}")
        self.sizes = counts.to(self.A.device, torch.int64)

    @property
    def device(self) -> torch.device:
        return self.A.device

    @property
    def dtype(self) -> torch.dtype:
        return self.A.dtype

    @property
    def layout(self) -> list[tuple[str, tuple[int, ...]]]:
        return [("x", (self.d,))]

    @property
    def fingerprint(self) -> str:
        parts = (self.A, self.b, self.sizes, torch.tensor(self.noise))
        return hashlib.sha256(b"".join(v.cpu().contiguous().numpy().tobytes() for v in parts)).hexdigest()

    @property
    def noiseless(self) -> bool:
        return self.noise == 0

    @property
    def minimum(self) -> Tensor:
        """The minimiser of the mean of all f_k."""
        return (self.A * self.b).sum(dim=0) / self.A.sum(dim=0)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Quadratic:
        moved = copy.copy(self)
        moved.A, moved.b = (v.to(device=device, dtype=dtype) for v in (self.A, self.b))
        moved.sizes = self.sizes.to(moved.device)
        return moved

    def start(self, seed: int) -> Tensor:
        return torch.zeros(self.d, dtype=self.dtype, device=self.device)

    def batch(self, ids: Tensor, key: Tensor) -> Sample:
        xi: Tensor | float = 0.0
        if self.noise:
            coordinates = torch.arange(self.d, device=key.device)
            xi = (self.noise * rng.normal(rng.fold(key[..., None], coordinates))).to(self.dtype)
        return self.A[ids], self.b[ids], xi

    def everything(self, client: int) -> Sample:
        return self.A[client], self.b[client], 0.0

    def gradients(self, x: Tensor, batch: Sample) -> Tensor:
        A, b, xi = batch
        return A * (x - b) + xi

    gradient = gradients

    def pick(self, batch: Sample, index: tuple[int, ...]) -> Sample:
        A, b, xi = batch
        return A[index], b[index], xi[index] if isinstance(xi, Tensor) else xi

    def bytes_per_client(self) -> int:
        return 16 * self.d * self.A.element_size()

    def evaluate(self, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return means(self.totals(x, weights))

    def totals(self, x: Tensor, weights: Tensor, mine: Shard = whole_range, add: Sum = unchanged) -> Totals:
        shard = mine(self.clients)
        losses = (self.A[shard] * (x[..., None, :] - self.b[shard]) ** 2).sum(dim=-1, dtype=torch.float64) / 2
        return {"train_loss": ((losses * weights[shard]).sum(dim=-1), weights[shard].sum())}
