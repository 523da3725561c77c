"""Which clients take part in a round: how a cohort is drawn, who is available, and whose reply gets lost."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import checks, rng

LOST = -3  # folded into a client's key to decide whether its reply gets lost
COLUMNS = ("client", "on", "off")


class Draws(Protocol):
    """Which clients take part in a round, and the random key from which each of them draws its batches."""

    secret: bool  # whether only the server can compute them

    def everyone(self, clients: int) -> tuple[Tensor, Tensor]:
        """All clients, for the start of a run: ids [..., clients] and keys of the same shape."""

    def cohort(self, tau: int | Tensor, clients: int, size: int) -> tuple[Tensor, Tensor]:
        """The clients of round tau, drawn without replacement, in ascending order."""


@dataclass(frozen=True)
class Participation:
    """How clients take part.

    `sampling="samples"` draws a client with a probability in proportion to its samples, and then gives all replies the
    same weight. `drop` is the probability that a reply gets lost. `trace` says in which rounds clients are available.
    """

    sampling: str = "uniform"
    drop: float = 0.0
    trace: Tensor | None = None  # [clients, intervals, 2]: from the first number, before the second

    @classmethod
    def of(cls, sampling: str, drop: float, availability: Any, names: Sequence[Any], weights: str) -> Participation:
        """Checked, from the arguments of a run."""
        checks.one_of("train", "sampling", sampling, ("uniform", "samples"))
        checks.number("train", "drop", drop, checks.BELOW_ONE)
        if sampling == "samples" and weights == "samples":
            raise ValueError("train: a client's samples would count twice: sampling or weights must be 'uniform'")
        return cls(sampling, drop, None if availability is None else read_trace(availability, names))

    @property
    def uniform(self) -> bool:
        """Whether every client is as likely to take part as any other."""
        return self.sampling == "uniform" and self.trace is None

    def to(self, device: torch.device) -> Participation:
        return self if self.trace is None else Participation(self.sampling, self.drop, self.trace.to(device))

    def available(self, tau: int | Tensor) -> Tensor | None:
        """The clients that can take part in round tau, [clients]; None if all can."""
        return None if self.trace is None else ((self.trace[..., 0] <= tau) & (tau < self.trace[..., 1])).any(dim=-1)

    def arrives(self, key: Tensor) -> Tensor | None:
        """Whether the replies of clients with these keys arrive; None if all do."""
        return rng.uniform(rng.fold(key, LOST)) >= self.drop if self.drop else None


class CounterDraws:
    """Draws from the seeds, [1] or [replicas, 1], and counters: the same in every run of a comparison."""

    secret = False

    def __init__(self, seeds: Tensor, participation: Participation | None = None, sizes: Tensor | None = None):
        # START, COHORT and BATCH are 0, 1 and 2: they are also the indices of their keys.
        self.keys = torch.stack([rng.key(seeds, purpose) for purpose in (rng.START, rng.COHORT, rng.BATCH)])
        self.participation, self.sizes = participation or Participation(), sizes

    def everyone(self, clients: int) -> tuple[Tensor, Tensor]:
        ids = rng.choose(self.keys[rng.START], clients, clients)
        return ids, rng.fold(self.keys[rng.START], ids)

    def cohort(self, tau: int | Tensor, clients: int, size: int) -> tuple[Tensor, Tensor]:
        cohort_key, batch_key = rng.fold(self.keys[rng.COHORT :], tau)
        if self.participation.uniform:
            ids = rng.choose(cohort_key, clients, size)
        else:
            ids = self._weighted(cohort_key, clients, size, self.participation.available(tau))
        return ids, rng.fold(batch_key, ids)

    def _weighted(self, key: Tensor, clients: int, size: int, available: Tensor | None) -> Tensor:
        """A draw without replacement, one client after the other, each in proportion to its weight (Efraimidis,
        Spirakis 2006). Clients that are not available come last: they fill the cohort if too few are."""
        score = rng.uniform(rng.fold(key, torch.arange(clients, device=key.device))).log()
        if self.participation.sampling == "samples":
            assert self.sizes is not None
            score = score / self.sizes
        if available is not None:
            score = torch.where(available, score, -torch.inf)
        return score.topk(size, dim=-1).indices.sort(dim=-1).values


def cohort_size(cohort: float | None, clients: int) -> int:
    """The number of clients in a cohort: a whole number, or a share of the clients such as 0.1; None is all.

    >>> cohort_size(0.1, 50), cohort_size(7, 50), cohort_size(None, 50)
    (5, 7, 50)
    """
    if isinstance(cohort, float) and 0 < cohort <= 1:
        return max(1, round(cohort * clients))
    size: Any = clients if cohort is None else cohort
    if isinstance(size, float):
        raise ValueError(f"train: cohort must be a whole number or a share of the clients, up to 1.0, got {cohort!r}")
    checks.count("train", "cohort", size, at_most=clients)
    return int(size)


def read_trace(source: Any, names: Sequence[Any]) -> Tensor:
    """The intervals of rounds in which clients are available, [clients, intervals, 2], from rows (client, on, off) or
    from a CSV file with these columns. A client is there from round `on`, counted from 0, and before round `off`.
    `names` are those of the clients, as the rows of clients show them."""
    name, known = "availability", [str(name) for name in names]
    rows: Iterable[Any] = source
    if isinstance(source, str | PathLike):
        name = str(source)
        try:
            with Path(source).open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != COLUMNS:
                    raise ValueError(f"{name}: the columns must be {', '.join(COLUMNS)}, got {reader.fieldnames}")
                rows = [tuple(row[column] for column in COLUMNS) for row in reader]
        except OSError as why:
            raise ValueError(f"{name}: cannot be read: {why.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{name}: must be a CSV file in UTF-8") from None
    spans: dict[str, list[tuple[int, int]]] = {client: [] for client in known}
    for number, row in enumerate(rows, start=1):
        try:
            client, (on, off) = str(row[0]).strip(), (int(value) for value in row[1:])
        except (LookupError, TypeError, ValueError):
            raise ValueError(
                f"{name}: row {number} must be (client, on, off), a client and two whole numbers, got {row!r}"
            ) from None
        if client not in spans:
            raise ValueError(f"{name}: row {number}: there is no client {client!r}; {checks.nearest(client, known)}")
        if not 0 <= on < off:
            raise ValueError(f"{name}: row {number} must have 0 <= on < off, got {row!r}")
        spans[client].append((on, off))
    without = [client for client, own in spans.items() if not own]
    if without:
        share = f"{len(without)} of {len(known)}"
        raise ValueError(f"{name}: every client needs a row; client {without[0]} has none ({share})")
    most = max(map(len, spans.values()))
    return torch.tensor([own + [(0, 0)] * (most - len(own)) for own in spans.values()])
