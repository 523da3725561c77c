"""The arithmetic of a plan: memory, bytes on the wire and seconds for so many processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from .profile import Method, Profile
from .rows import travels

DOUBLE, KEPT = 8, 3  # bytes of a number in a sum; copies of the rows that a process reads and sends back
BOOKS = 24  # bytes for each client on every device: samples, where they begin, weight
ASKED = (
    25  # and for each replica while everyone is asked: key, who is fine, and that again in the message and beside it
)


@dataclass(frozen=True)
class Size:
    """How large the experiment shall be."""

    clients: int
    cohort: int
    rounds: int
    evaluations: int

    @property
    def everyone(self) -> bool:
        return self.cohort == self.clients


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device."""

    data: float
    chunk: float  # vectors and activations of the clients that run at once
    client_memory: int  # its shard
    rows: int  # of other devices' clients, while they are here
    server: int
    bookkeeping: int

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def worlds(most: int) -> list[int]:
    """1, 2, 4, ... and the most.

    >>> worlds(8), worlds(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return sorted({2**i for i in range(most.bit_length())} | {most})


def messages(profile: Profile, exchanges: list[list[int]], places: int) -> list[int]:
    """Bytes of each all-reduce: sums of the replies, their weight, and who of the cohort was heard."""
    return [DOUBLE * profile.replicas * (sum(replies) + 1 + places) for replies in exchanges]


def memory(profile: Profile, method: Method, size: Size, world: int) -> Memory:
    share, replicas = -(-size.cohort // world), profile.replicas
    row = method.memory * replicas * profile.parameters * profile.number
    one = profile.client_bytes * replicas
    held = -(-size.clients // world) if size.everyone else size.clients  # a rank loads what its clients need
    drawn = 0 if size.everyone or size.cohort <= size.clients // 4 else DOUBLE * replicas * size.clients
    asked = ASKED * replicas * size.clients if method.start else 0
    sums = max(messages(profile, method.exchanges, size.cohort))
    return Memory(
        data=held * profile.data_bytes + profile.test_bytes,
        chunk=one * max(1, min(share, profile.chunk_bytes // one)),
        client_memory=-(-size.clients // world) * row,
        rows=KEPT * share * row if world > 1 else 0,
        server=2 * method.server + 2 * sums,
        bookkeeping=BOOKS * size.clients + max(drawn, asked),
    )


def predict(profile: Profile, label: str, size: Size, world: int, drawn: list[Tensor]) -> dict[str, Any]:
    """One line of the plan, with units in its names. `drawn` are the cohorts of some rounds."""
    method, link = profile.methods[label], profile.link
    share = -(-size.cohort // world)
    fixed, slope = method.line(share)
    # Processes that share a CPU wait for its cores; a local message is work of theirs, too.
    slots = min(world, profile.cores) if profile.shared else world
    wait = world / slots
    steps = messages(profile, method.exchanges, size.cohort)
    row = method.memory * profile.parameters * profile.number
    matrix = travels(drawn, size.clients, world).double()
    away = matrix - matrix.diagonal(dim1=-2, dim2=-1).diag_embed()
    # What a rank owns goes out and what it reads goes back; and so again in every exchange.
    sent = row * len(steps) * (away.sum(dim=-1) + away.sum(dim=-2))
    busiest = float(sent.amax(dim=-1).mean()) / len(steps)  # bytes in one exchange
    swaps = 2 * link.swap(busiest / 2, world) if row and world > 1 else 0.0
    compute = wait * (fixed + slope * share)
    exchange = (wait if link.local else 1.0) * (sum(link.all_reduce(b, world) for b in steps) + len(steps) * swaps)
    begin = wait * method.start_seconds * -(-size.clients // world)
    begin += sum(link.all_reduce(b, world) for b in messages(profile, method.start, size.clients))
    samples = size.clients * profile.samples + profile.test_samples
    looks = wait * size.evaluations * samples * profile.sample_seconds / world
    held = memory(profile, method, size, world)
    ring = 2 * (world - 1) / world
    return {
        "algorithm": label,
        "processes": world,
        "slots": slots,
        "clients_per_process": share,
        "fixed_seconds": fixed,
        "client_seconds": slope,
        "memory_bytes": {**asdict(held), "total": held.total},
        "fits": held.total * (world if profile.shared else 1) <= profile.device_bytes,
        "message_bytes": sum(steps),  # handed to the all-reduce by every process
        # rows of a round whose owner is not their reader, and the share they are of all
        "rows_away": float(away.sum(dim=(-2, -1)).mean()) if row else 0.0,
        "rows_share": float(away.sum() / matrix.sum()) if row else 0.0,
        "wire_bytes": {"all_reduce": ring * sum(steps), "rows": float(sent.mean()), "rows_most": len(steps) * busiest},
        "seconds_per_round": {"compute": compute, "exchange": exchange, "total": compute + exchange},
        "start_seconds": begin,
        "evaluation_seconds": looks,
        "hours": (size.rounds * (compute + exchange) + begin + looks) / 3600,
    }  # fmt: skip
