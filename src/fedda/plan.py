"""What an experiment needs on several processes: memory, bytes on the wire, and the seconds of a round.

Bytes and shards follow from the algorithm's messages and from the cohorts that its seeds draw. Seconds are those of
rounds that run here, in one process, with as many clients as a process would have. The exchange takes extra time.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .aggregation.dry_run import dry_run
from .bench.timing import race, started
from .core import Algorithm, Number, bind_to_problem
from .engines import Vectorised
from .engines.participation import CounterDraws
from .engines.world import SingleProcess
from .experiments.config import Experiment, errors_named
from .experiments.runner import build_problem
from .problems.gradients.tuning import threads
from .run import Diverged, Run
from .training import for_rounds

Row = dict[str, Any]
DOUBLE = 8  # bytes per number of a sum
ROW_COPIES = 3  # of the memory rows that a process reads, updates and sends back
PER_CLIENT = 24  # bytes on every device: number of samples, offset, weight
AT_START = 25  # bytes per client and seed while an algorithm asks all clients at its start
ROUNDS, DRAWS = 20, 10**7  # rounds whose cohorts are drawn; fewer rounds if that would be more clients than DRAWS
LONGEST = 60.0  # seconds: a round that is expected to take longer is not measured


def worlds(most: int) -> list[int]:
    """The numbers of processes to plan for: 1, 2, 4, ... and `most`.

    >>> worlds(8), worlds(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return sorted({2**i for i in range(most.bit_length())} | {most})


def plan(
    experiment: Experiment, clients: int, cohort: int, most: int, device: torch.device, seconds: float,
    say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    """One row per algorithm and number of processes, with units in its keys; all seeds run together."""
    problem = build_problem(experiment, str(device))
    cohorts = drawn_cohorts(clients, cohort, experiment.seeds)
    rows = []
    for label in experiment.algorithms:
        with errors_named(experiment.name):
            algorithm = for_rounds(experiment.build(label), problem, experiment.rounds)
        shares = {world: -(-cohort // world) for world in worlds(most)}
        try:
            times, server = measure_rounds(algorithm, problem, experiment, set(shares.values()), seconds, label, say)
        except Diverged as why:
            raise ValueError(f"{experiment.name}: {label}: {why}") from None
        for world, share in shares.items():
            row = {"algorithm": label, "processes": world, "seconds_per_round": times.get(share)}
            rows.append(row | requirements(algorithm, problem, server, clients, cohorts, world))
    return rows


def requirements(
    algorithm: Algorithm, problem: Any, server: int, clients: int, cohorts: list[Tensor], world: int
) -> Row:
    """Memory, and bytes per round, of one of `world` processes; `server` is the size of the server's state in bytes."""
    replicas, cohort = cohorts[0].shape
    share = -(-cohort // world)
    like = torch.zeros(1, problem.d, dtype=problem.dtype, device=problem.device)
    start, exchanges = dry_run(bind_to_problem(algorithm, like, problem.layout), like)
    # Every all-reduce holds the sums of the replies, their weight, and which clients of the cohort replied.
    messages = [DOUBLE * replicas * (sum(shape[-1] for shape in exchange.up) + 1 + cohort) for exchange in exchanges]
    row = problem.dtype.itemsize * sum(1 if isinstance(name, Number) else problem.d for name in algorithm.memory)
    row += problem.dtype.itemsize * problem.d_personal
    matrix = rows_between(cohorts, clients, world).double()
    away = matrix - matrix.diagonal(dim1=-2, dim2=-1).diag_embed()
    # In every exchange a row travels from its owner to its reader and back.
    sent = row * len(exchanges) * (away.sum(dim=-1) + away.sum(dim=-2))
    samples = sum(v[0].nbytes for v in problem.data.leaves()) * float(problem.sizes.double().mean())
    tested = sum(v.nbytes for part in problem.held_out.values() for v in part.leaves())
    computed = problem.bytes_per_client() * replicas
    chunk = torch.cuda.mem_get_info(problem.device)[0] // 4 if like.is_cuda else int(2e9)  # as in Vectorised
    for_draws = max(DOUBLE if clients // 4 < cohort < clients else 0, AT_START if start else 0)
    memory = {
        # A process holds the samples of its own clients if all clients take part in every round, else of all clients.
        "data": (-(-clients // world) if cohort == clients else clients) * samples + tested,
        "chunk": computed * max(1, min(share, chunk // computed)),
        "client_memory": -(-clients // world) * replicas * row,
        "rows": ROW_COPIES * share * replicas * row if world > 1 else 0,
        "server": 2 * server + 2 * max(messages),
        "bookkeeping": clients * (PER_CLIENT + replicas * for_draws),
    }
    return {
        "clients_per_process": share,
        "memory_bytes": memory | {"total": sum(memory.values())},
        "message_bytes": sum(messages),  # that every process gives to the all-reduces of a round
        "rows_away": float(away.sum(dim=(-2, -1)).mean()) if row else 0.0,
        "rows_share": float(away.sum() / matrix.sum()) if row else 0.0,
        # A ring sends 2 (W - 1) / W of a message.
        "wire_bytes": {"all_reduce": 2 * (world - 1) / world * sum(messages), "rows": float(sent.mean())},
    }


def measure_rounds(
    algorithm: Algorithm, problem: Any, experiment: Experiment, shares: set[int], seconds: float, label: str,
    say: Callable[[str], None],
) -> tuple[dict[int, float], int]:  # fmt: skip
    """The seconds of a round in one process for each number of clients, and the bytes of the server's state."""
    times: dict[int, float] = {}
    for share in sorted(shares):
        if times and share * max(times.values()) / max(times) > LONGEST:
            break
        say(f"{label}: rounds of {share:,} clients")
        engine = Vectorised(graph=not algorithm.memory)  # memory that travels goes through the host
        some = problem if share <= problem.clients else repeat_clients(problem, share)
        with threads(1 if problem.device.type == "cpu" else torch.get_num_threads()):  # as torchrun sets it
            run = Run(algorithm, some, share, experiment.seeds, engine=engine, weights=experiment.weights, force=True)
            timed = started(label, lambda run=run: run.advance, problem.device)  # type: ignore[misc]
            race([timed], seconds, problem.device)
        times[share] = min(timed.blocks)
    return times, sum(v.nbytes for v in run.server)


def repeat_clients(problem: Any, clients: int) -> Any:
    """The problem with more clients than it has: the same ones again."""
    more, index = copy.copy(problem), torch.arange(clients, device=problem.device) % problem.clients
    more.sizes, more.offsets, more.clients = problem.sizes[index], problem.offsets[index], clients
    return more


def drawn_cohorts(clients: int, cohort: int, seeds: list[int], rounds: int = ROUNDS) -> list[Tensor]:
    """The clients of the first rounds, [replicas, cohort] each, as a run of these seeds draws them."""
    draws = CounterDraws(torch.tensor(seeds)[:, None])
    affordable = max(1, DRAWS // (len(seeds) * max(cohort, clients if cohort > clients // 4 else 0)))
    return [draws.cohort(tau, clients, cohort)[0] for tau in range(min(rounds, affordable))]


def rows_between(cohorts: list[Tensor], clients: int, world: int) -> Tensor:
    """How many memory rows each process owns that each process reads, [rounds, owners, readers].

    >>> rows_between([torch.tensor([[0, 1, 2, 9]])], clients=10, world=2)[0]  # process 0 owns 2, process 1 reads it
    tensor([[2, 1],
            [0, 1]])
    """
    processes = SingleProcess()
    processes.size = world
    starts = torch.tensor([part.start for part in processes.parts(clients)])
    matrices = []
    for ids in cohorts:
        owner = torch.searchsorted(starts, ids.contiguous(), right=True) - 1
        sizes = torch.tensor([part.stop - part.start for part in processes.parts(ids.shape[-1])])
        pairs = owner * world + torch.arange(world).repeat_interleave(sizes)
        matrices.append(torch.bincount(pairs.flatten(), minlength=world * world).view(world, world))
    return torch.stack(matrices)
