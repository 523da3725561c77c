"""What is measured of an experiment on one device: enough to say what it would take on many."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from ..experiments.config import Experiment
from .link import Link


@dataclass(frozen=True)
class Method:
    """One algorithm. A reply is as many numbers as a client sends; lists of replies, one list for each exchange."""

    exchanges: list[list[int]]  # of a round
    start: list[list[int]]  # with everyone, before the first round
    memory: int  # vectors that every client keeps
    server: int  # bytes of the server's state, all replicas
    rounds: list[tuple[int, float]]  # clients that took part, seconds of a round
    start_seconds: float  # for each client

    def line(self, clients: int) -> tuple[float, float]:
        """The seconds of a round of about so many clients: fixed, and for each client."""
        return between(self.rounds, clients)


@dataclass(frozen=True)
class Profile:
    """All replicas (seeds) are in every figure: they run as one program."""

    name: str
    problem: dict[str, Any]  # the experiment's table, without the number of clients
    replicas: int
    parameters: int
    number: int  # bytes of a parameter
    device: str
    shared: bool  # whether processes share this device: a CPU's cores
    cores: int
    device_bytes: int  # memory of the device; of the machine, where it is a CPU
    chunk_bytes: int  # what the clients that run at once may take of it
    client_bytes: int  # vectors and activations of a client, one replica
    data_bytes: float  # samples of a client, on average
    test_bytes: int
    samples: float  # of a client, on average
    test_samples: int
    sample_seconds: float  # to evaluate the models on one sample
    link: Link
    machine: dict[str, Any]
    methods: dict[str, Method]
    tables: dict[str, dict[str, Any]]  # the algorithms' hyper-parameters

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: Any, where: str) -> Profile:
        """From what `json` gave; a mistake is said with the file's name."""
        try:
            made: Profile = TypeAdapter(cls).validate_python(found)
            for method in made.methods.values():
                method.line(1)
            return made
        except (ValueError, LookupError, ZeroDivisionError):
            raise ValueError(f"{where}: holds no profile; give a file that `fedda plan --out` wrote") from None

    def refuse_other(self, experiment: Experiment, where: str) -> None:
        """A profile is one of the same task, seeds and algorithms; clients and cohort may be others."""
        wanted = experiment.completed()
        pairs = {
            "problem": (self.problem, problem_of(wanted)),
            "number of seeds": (self.replicas, len(wanted.seeds)),
        }
        for label, words in wanted.algorithms.items():
            if label not in self.methods:
                raise ValueError(
                    f"{where}: has no algorithm {label!r}, only {', '.join(self.methods)}: measure it anew"
                )
            pairs[f"algorithms.{label}"] = self.tables[label], words
        for word, (here, there) in pairs.items():
            if here != there:
                raise ValueError(
                    f"{where}: was measured with another {word} ({here}): measure it anew, or give the same"
                )


def problem_of(experiment: Experiment) -> dict[str, Any]:
    """The table that decides what a client's round takes."""
    return {word: value for word, value in experiment.problem.model_dump().items() if word != "clients"}


def between(points: list[tuple[int, float]], n: int) -> tuple[float, float]:
    """fixed and slope of the line through the two points next to n, or through the last two on its side: caches make
    large cohorts dearer than in proportion, so that no one line is true of all.

    >>> points = [(1, 3.0), (3, 5.0), (5, 11.0)]
    >>> between(points, 2), between(points, 4), between(points, 100)
    ((2.0, 1.0), (-4.0, 3.0), (-4.0, 3.0))
    >>> between([(2, 1.0), (4, 0.5)], 8)  # a busy moment, no gain
    (0.75, 0.0)
    """
    points = sorted((size, seconds) for size, seconds in points)
    at = min(max(1, sum(size < n for size, _ in points)), len(points) - 1)
    (few, fast), (many, slow) = points[at - 1], points[at]
    slope = (slow - fast) / (many - few)
    if slope < 0:
        return (fast + slow) / 2, 0.0
    fixed = fast - slope * few
    return (0.0, fast / few) if fixed < 0 and n < few else (fixed, slope)
