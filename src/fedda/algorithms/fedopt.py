"""FedAdam, FedYogi, FedAdagrad (Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated
Optimization, ICLR 2021) and FedAMS (Wang, Lin, Chen: Communication-Efficient Adaptive Federated Learning,
ICML 2022)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core import Cohort, step_counter
from ..registry import algorithms
from ..rules.moments import debiased, second_moment
from ..rules.schedules import schedule
from .fedavg import FedAvg


@algorithms.register("fedadam", reference="Reddi et al. 2021", example={"lr": 0.05, "server_lr": 0.05})
@dataclass(frozen=True)
class FedAdam(FedAvg):
    """FedAvg on the clients, Adam on the server, fed with the mean change of the model.

        D = mean_k X - x;     m <- beta1 m + (1 - beta1) D;     v <- beta2 v + (1 - beta2) D^2
        x <- x + server_lr m / (sqrt(v) + eps)

    Deviations: none. Papers and libraries differ in three values, so they are explicit: `eps` (1e-3 here, 1e-9
    elsewhere), the start `v0` (None is eps^2, the least value in the paper; 0 with a bias correction) and
    `bias_correction` (off in the paper's pseudo-code, on in its experiments). True is Adam's own correction; "keras",
    that of the authors' code, leaves eps out of it: eps then acts as if it were eps / sqrt(1 - beta2^n) in round n.

    Choose it where coordinates of the model change at very different scales and clients must stay plain SGD.

    Args:
        server_lr: the server's rate; the length of its step in each coordinate is about this number.
        eps: limits the server's step where the model changes little.
        v0: the start of v; None for eps^2.
        bias_correction: False, True as in Adam, or "keras", which leaves `eps` out of it.

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0], [1.0]], b=[[0.0], [2.0]])
    >>> fedda.train(fedda.make("fedadam", lr=0.1, server_lr=0.1, eps=0.1), problem, rounds=200).x
    tensor([1.0000], dtype=torch.float64)
    """

    class Server(NamedTuple):
        x: Tensor
        m: Tensor
        v: Tensor
        v_max: Tensor  # the largest v so far: FedAMS steps by it
        t: Tensor

    choices: ClassVar = {"bias_correction": (True, False, "keras")}
    variants: ClassVar = ({"bias_correction": True, "v0": 0.0}, {"bias_correction": "keras", "v0": 0.0})
    kind: ClassVar[str] = "adam"
    largest: ClassVar[bool] = False
    server_lr: Any = 0.01
    beta1: Any = 0.9
    beta2: Any = 0.99
    eps: Any = 1e-3
    v0: Any = 1e-6
    bias_correction: Any = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bias_correction and (self.v0 is None or torch.as_tensor(self.v0).any()):
            raise ValueError(f"{type(self).__name__}: v0 must be 0 with bias_correction, got {self.v0}")

    def init(self, x: Tensor, clients: Cohort) -> Any:
        v = torch.zeros_like(x) + (self.eps**2 if self.v0 is None else self.v0)
        return self.Server(x, torch.zeros_like(x), v, v, step_counter(x))

    def round(self, server: Any, cohort: Cohort) -> Any:
        x, m, v, v_max, t = server
        (mean,) = cohort.average(self.local, x, t)
        m = self.beta1 * m + (1 - self.beta1) * (mean - x)
        v, n = second_moment(self.kind, v, mean - x, self.beta2), t / self.steps + 1
        v_max = torch.maximum(v_max, v)
        first, second = m, v_max if self.largest else v
        eps = self.eps
        if self.bias_correction:
            first = debiased(m, self.beta1, n)
            if self.kind != "adagrad":
                second = debiased(second, self.beta2, n)
                eps = eps / (1 - self.beta2**n).sqrt() if self.bias_correction == "keras" else eps
        x = x + schedule(self.server_lr)(t) * first / self.divisor(second, eps)
        return self.Server(x, m, v, v_max, t + self.steps)

    def divisor(self, second: Tensor, eps: Any) -> Tensor:
        divisor: Tensor = second.sqrt() + eps
        return divisor


@algorithms.register("fedyogi", reference="Reddi et al. 2021", example={"lr": 0.05, "server_lr": 0.05})
@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam with Yogi's second moment, which changes additively.

        v <- v - (1 - beta2) D^2 sign(v - D^2)

    Choose it instead of FedAdam where sudden large changes must not shrink the step at once.
    """

    kind: ClassVar[str] = "yogi"


@algorithms.register("fedadagrad", reference="Reddi et al. 2021", example={"lr": 0.05, "server_lr": 0.1})
@dataclass(frozen=True)
class FedAdagrad(FedAdam):
    """FedAdam with a second moment that only grows, and no momentum by default.

        v <- v + D^2

    Choose it if the step should decrease by itself; its rate needs more tuning than FedAdam's.
    """

    kind: ClassVar[str] = "adagrad"
    beta1: Any = 0.0


@algorithms.register("fedams", reference="Wang et al. 2022", example={"lr": 0.05, "server_lr": 0.05})
@dataclass(frozen=True)
class FedAMS(FedAdam):
    """FedAdam stepping by the largest second moment so far (AMSGrad on the server).

        v_max <- max(v_max, v);     x <- x + server_lr m / sqrt(max(v_max, eps))     (option 1, max stabilisation)
                                    x <- x + server_lr m / (sqrt(v_max) + eps)       (option 2)

    Deviations: none; v begins at 0. With a bias correction, v_max is corrected before it is compared with eps.

    Choose it where FedAdam's step grows back too fast; one bad round slows it for good.

    Args:
        option: 1 takes the larger of v and eps under the root; 2 adds eps to the root.
        bias_correction: False, or True as in Adam.
    """

    choices: ClassVar = {"option": (1, 2), "bias_correction": (True, False)}
    variants: ClassVar = ({"option": 2}, {"bias_correction": True})
    largest: ClassVar[bool] = True
    v0: Any = 0.0
    option: int = 1

    def divisor(self, second: Tensor, eps: Any) -> Tensor:
        if self.option == 2:
            return super().divisor(second, eps)
        return torch.maximum(second, torch.zeros_like(second) + eps).sqrt()
