"""Differential privacy of each client's data: the Gaussian mechanism on the mean of replies of bounded length."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import rng
from ..checks import AT_LEAST_ZERO, check, number, one_of
from ..core import Algorithm, ClientTask
from . import gaussian
from .accounting import COHORTS, REPRODUCIBLE, Accountant, Budget, Privacy
from .clip import check_norm, clip, clip_rows, norms
from .dry_run import dry_run
from .means import Reducer, unit_weight
from .wrapper import Exchange, Wrapper, aggregations, post_process

LARGEST = 1e30  # norm and multiplier: so that their products and roots stay finite


@aggregations.register("noise")
@dataclass(frozen=True)
class Noise(Reducer):
    """Clips every client's change to `norm` and adds Gaussian noise to the mean over the r clients of the cohort.

        (1 / r) (sum_k u_k min(1, norm / ||u_k||) + multiplier norm xi),   xi standard normal; u_k = 0 if k is silent

    Changes are clipped on the client, so that nothing longer leaves it, and again on the server, so that the guarantee
    depends on no client. The denominator is fixed and all clients weigh the same, because who replies, and how many
    samples they have, are data too.

    The noise comes from a cryptographic generator with a new key of the operating system, so a run cannot be repeated
    bit for bit. With a `seed` it is a function of (seed, the run's seed, round, exchange, reply). Such a run can be
    repeated, and is NOT private. docs/aggregation.md says what is guaranteed and what is not.

    Args:
        multiplier: the deviation of the noise in units of `norm`; larger is more private.
        norm: the largest length of a change, as `Clip` takes it.
        seed: makes the noise repeatable and NOT private: a function of (seed, the run's seed, round, exchange, reply).

    >>> import fedda
    >>> problem = fedda.Quadratic(A=[[1.0]] * 100, b=[[2.0]] * 100)
    >>> run = fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=30, aggregation=[Noise(1.0, norm=1.0)])
    >>> bool(abs(run.x - 2.0) < 0.1)  # noise of 0.01 per round
    True
    """

    multiplier: float
    norm: Any
    seed: int | None = None

    def __post_init__(self) -> None:
        number("Noise", "multiplier", self.multiplier, AT_LEAST_ZERO)
        if isinstance(self.multiplier, Tensor):
            raise ValueError("Noise: multiplier must be one number, got a tensor")
        check_norm("Noise", self.norm, least=1 / LARGEST, most=LARGEST)
        if self.multiplier > LARGEST:
            raise ValueError(f"Noise: multiplier must be at most {LARGEST:g}, got {self.multiplier}")
        whole = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (whole and 0 <= self.seed < 2**63):
            raise ValueError(f"Noise: seed must be a whole number >= 0, or left out, got {self.seed!r}")

    @property
    def reproducible(self) -> bool:
        return self.seed is not None

    def on_client(self, task: ClientTask) -> ClientTask:
        return post_process(task, lambda replies, *_: tuple(clip("Noise", self.norm, task.__name__, replies)))

    def fits(self, task: str, replies: int) -> None:
        norms("Noise", self.norm, task, replies)

    def combine(self, replies: list[Tensor], weights: Tensor, exchange: Exchange) -> tuple[list[Tensor], Tensor]:
        means, most = [], norms("Noise", self.norm, exchange.task, len(replies))
        for i, (reply, norm) in enumerate(zip(replies, most, strict=True)):
            total = torch.where(weights > 0, clip_rows(reply.double(), norm), 0).sum(dim=-2, keepdim=True)
            if self.multiplier > 0:
                total = self._noisy(total, norm, i, exchange)
            means.append((total / exchange.size).to(reply.dtype))
        return means, unit_weight(weights)

    def _noisy(self, total: Tensor, norm: float, reply: int, exchange: Exchange) -> Tensor:
        """The sum [..., 1, m] of a reply with its noise."""
        if self.seed is None:
            return gaussian.noisy(total, norm, self.multiplier, exchange.new_key())
        coordinates = torch.arange(total.shape[-1], device=total.device)
        key = rng.fold(rng.fold(rng.fold(exchange.key, self.seed), reply)[..., None], coordinates)
        return total + self.multiplier * norm * rng.normal(key)

    def accountant(
        self, algorithm: Algorithm, x: Tensor, clients: int, cohort: int, aggregation: Sequence[Wrapper], secret: bool
    ) -> Accountant:
        """The accountant of a run.

        Args:
            algorithm: what is run.
            x: its first model.
            clients: how many exist.
            cohort: how many take part in a round.
            aggregation: the wrappers of the run.
            secret: whether the cohorts are secret.
        """
        start, round = dry_run(algorithm, x)
        # A client's memory depends on the rounds in which it took part, and its replies show it.
        remembers = bool(algorithm.memory) or any(wrapper.remembers("local", 1) for wrapper in aggregation)
        return Accountant(
            self.multiplier,
            start=sum(len(exchange.up) for exchange in start),
            each=sum(len(exchange.up) for exchange in round),
            clients=clients,
            cohort=cohort,
            sampling=secret and not remembers,
        )

    def epsilon(
        self, algorithm: Algorithm, clients: int, rounds: int, delta: float, cohort: int | None = None,
        aggregation: Sequence[Wrapper] = (), against: str = "outside", cohorts: str = "secret",
    ) -> float:  # fmt: skip
        """The epsilon of (epsilon, delta)-differential privacy: for all replies, in all rounds, of one client whose
        data are replaced. Needs dp-accounting (``pip install "fedda[privacy]"``).

        Args:
            algorithm: what is run.
            clients: how many exist.
            rounds: how many rounds are run.
            delta: the probability with which the guarantee may fail.
            cohort: clients per round; all by default.
            aggregation: the wrappers of the run: with a compression, clients remember residuals, and sampling is not
                credited.
            against: "outside" (sees the final model) or "site" (a client that sees every broadcast).
            cohorts: "secret", as in a federation, or "known".

        >>> import fedda
        >>> round(Noise(8.0, norm=1.0).epsilon(fedda.make("fedavg"), clients=100, rounds=100, delta=1e-5, cohort=5), 1)
        1.1
        """
        if self.reproducible:
            raise ValueError(f"Noise: {REPRODUCIBLE}: leave out the seed")
        check("epsilon", clients=clients, rounds=rounds)
        one_of("epsilon", "cohorts", cohorts, COHORTS)
        # The number of replies does not depend on the penalty, which may name parameters: take the default penalty.
        fields: Any = dataclasses.fields(algorithm)
        prox = [f for f in fields if f.name == "prox"]
        default = {f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory() for f in prox}
        plain: Algorithm = dataclasses.replace(algorithm, **default)
        size = clients if cohort is None else cohort
        accountant = self.accountant(plain, torch.zeros(1, 1), clients, size, aggregation, cohorts == "secret")
        return accountant.epsilon(rounds, delta, against)


def privacy(
    wrappers: Sequence[Wrapper], algorithm: Algorithm, x: Tensor, clients: int, cohort: int,
    budget: Budget | None, secret: bool, charged: tuple[int, int] = (0, 0),
) -> Privacy | None:  # fmt: skip
    """The privacy that a run with these wrappers spends; None without `Noise`.

    `secret` says whether the run draws its cohorts from a secret. `charged` are additional starts and rounds to count.
    """
    noise = [wrapper for wrapper in wrappers if isinstance(wrapper, Noise)]
    if not noise:
        if budget is not None:
            raise ValueError("budget: a privacy budget needs noise: aggregation=[fedda.aggregation.Noise(...)]")
        return None
    limit = budget or Budget()
    secret = secret if limit.cohorts is None else limit.cohorts == "secret"
    accountant = noise[0].accountant(algorithm, x, clients, cohort, wrappers, secret)
    return Privacy(accountant, limit, budget is not None, noise[0].reproducible, *charged)
