"""Proximal maps in the diagonal metric q, on any leading axes:

    prox(u, q, s) = argmin_x  s psi(x) + 1/2 sum_j q_j (x_j - u_j)^2   subject to x in C.

`u` is [..., d], `q` a number for each row (a float, 0-d, or [..., 1]) or a diagonal that broadcasts with u (q = h /
lambda), `s` the weight of psi: the sum of the step sizes in the dual state. With any other weight the fixed point is
not that of f + psi.

Sums over the model are taken in float64 and the result has u's dtype. On CUDA nothing waits for the device: iterations
have a fixed count and rows that are done stay where they are (the singular values of `NuclearNorm` excepted).
"""

from .balls import L1Ball, L2Ball, Simplex
from .base import Prox, feasible_start, prox
from .combine import Shifted, Sum
from .groups import GroupLasso, SparseGroupLasso
from .intervals import Box, LInfBall, NonNegative
from .layout import Layout
from .linear import HalfSpace, Hyperplane
from .matrix import NuclearNorm
from .separable import L1, ElasticNet, Separable, SquaredL2, Unconstrained

__all__ = [
    "L1", "Box", "ElasticNet", "GroupLasso", "HalfSpace", "Hyperplane", "L1Ball", "L2Ball", "LInfBall", "Layout",
    "NonNegative", "NuclearNorm", "Prox", "Separable", "Shifted", "Simplex", "SparseGroupLasso", "SquaredL2", "Sum",
    "Unconstrained", "feasible_start", "prox",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
