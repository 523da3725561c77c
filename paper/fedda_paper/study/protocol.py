"""A fair comparison: every method is tuned with the same budget on validation data, then run on fresh partitions.

    python -m fedda_paper.study cifar10-heterogeneous --device cuda --precision bf16 --workers 6

docs/study.md says what the rules are and what is kept. What exists is not run again, so a study may be stopped
at any time; the same command resumes it.
"""

import argparse
import json
import multiprocessing
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedda.experiments import find

from .methods import FINALS, TUNING, Point, StudyMethod, key, rounded
from .program import How, StudyProgram, run
from .records import lines, pack
from .rules import edges, extended, mean, ranked, winner
from .summary import best, out, summary

STAGES = ("stage1", "stage2", "finals")
KEPT = 6  # points that go on to the second stage
EXTRA = 6  # points by which a grid may be extended
EVALUATIONS = 40  # of a whole run

Records = dict[tuple[str, str, str, int], dict[str, Any]]  # by method, stage, point and seed


@dataclass
class State:
    """How far a method is: what was decided so far, and what is to be run next."""

    tried: list[Point]
    jobs: list[StudyProgram] = field(default_factory=list)
    first: Point | None = None  # the best of the first stage
    second: Point | None = None  # the best of the second stage
    compared: list[Point] = field(default_factory=list)  # in the second stage
    chosen: Point | None = None
    interior: bool | None = None  # whether the best of the second stage is at no edge of what was tried


def state(method: StudyMethod, kept: Records, rounds: int) -> State:
    """What the records say of a method. It is worked out anew from them each time: they are all there is."""
    every = max(1, rounds // EVALUATIONS)

    def missing(stage: str, points: Sequence[Point], seeds: Sequence[int]) -> list[StudyProgram]:
        last = stage_rounds(method, stage, rounds)
        left = {s: [p for p in points if (method.name, stage, key(p), s) not in kept] for s in seeds}
        return [StudyProgram(method, stage, s, some, last, every) for s, some in left.items() if some]

    def values(stage: str, seeds: Sequence[int]) -> Callable[[Point], list[float] | None]:
        def of(point: Point) -> list[float] | None:
            found = [kept[method.name, stage, key(point), seed] for seed in seeds]
            return None if any(map(out, found)) else [best(r)[1] for r in found]

        return of

    now = State(list(method.grid))
    if method.once:
        stage, seeds = method.once
        now.jobs = missing(stage, method.grid, seeds)
        return now
    of_one, of_three = values("stage1", TUNING[:1]), values("stage2", TUNING)
    while not now.jobs:
        now.jobs = missing("stage1", now.tried, TUNING[:1])
        if now.jobs:
            return now
        now.first = winner(method, now.tried, of_one)
        more = extended(method, now.tried, now.first, EXTRA - len(now.tried) + len(method.grid))
        if not more:
            break
        now.tried += more
    now.compared = ranked(method, now.tried, of_one)[:KEPT]
    reference = [p for p in (method.paper,) if p is not None and p not in now.compared]
    while now.compared:
        now.jobs = missing("stage2", now.compared + reference, TUNING)
        if now.jobs:
            return now
        now.second = winner(method, now.compared, of_three)
        more = extended(method, now.tried, now.second, EXTRA - len(now.tried) + len(method.grid))
        if not more:
            break
        now.tried += more
        now.compared += more
    if now.second is None:
        return now
    now.interior, now.chosen = not edges(method, now.tried, now.second), now.second
    if method.last:
        centre = method.words[method.last]
        others = [now.second | {method.last: rounded(centre * factor)} for factor in (3.0, 1 / 3)]
        now.jobs = missing("stage2", others, TUNING)
        if now.jobs:
            return now
        now.chosen = winner(method, [now.second, *others], of_three)
    if (
        method.paper is not None
        and now.chosen is not None
        and mean(of_three(method.paper)) > mean(of_three(now.chosen))
    ):
        now.chosen = method.paper
    now.jobs = missing("finals", [p for p in (now.chosen,) if p is not None], FINALS)
    return now


def stage_rounds(method: StudyMethod, stage: str, rounds: int) -> int:
    """The first stage has a quarter of the rounds. If the weights are limited it has all: they become 0 late."""
    return rounds // 4 if stage == "stage1" and method.limit == 1 else rounds


# -- files ---------------------------------------------------------------------------------------------------------
def read(out: Path) -> Records:
    """All records of a folder. A line that was cut off when it was written is not one."""
    kept: Records = {}
    for line in lines(out):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        kept[record["method"], record["stage"], key(record["point"]), record["seed"]] = record
    return kept


def keep(out: Path, kept: Records, records: Sequence[dict[str, Any]]) -> None:
    for record in records:
        path = out / f"{record['method']}-{record['stage']}.jsonl"
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(record) + "\n")
        kept[record["method"], record["stage"], key(record["point"]), record["seed"]] = record


# -- the work ------------------------------------------------------------------------------------------------------
@dataclass
class Study:
    """All methods on one task, into a folder."""

    how: How
    out: Path
    rounds: int
    methods: dict[str, StudyMethod]
    stages: Sequence[str] = STAGES
    run: Callable[[How, StudyProgram], list[dict[str, Any]]] = run

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.kept = read(self.out)

    def states(self) -> dict[str, State]:
        return {name: state(method, self.kept, self.rounds) for name, method in self.methods.items()}

    def jobs(self) -> list[StudyProgram]:
        """What can be run now, the first stages first."""
        found = [job for now in self.states().values() for job in now.jobs if job.stage in self.stages]
        return sorted(found, key=lambda job: (STAGES.index(job.stage), job.seed))

    def drive(self, workers: int = 0, seconds: float = 1e9) -> None:
        """Run until all is done or no time is left to begin anything."""
        last = time.monotonic() + seconds
        with pool(workers) as submit:
            running: dict[Future[Any], StudyProgram] = {}
            while True:
                busy = {identity(job) for job in running.values()}
                for job in self.jobs() if time.monotonic() < last else ():
                    if len(running) < max(1, workers) and identity(job) not in busy:
                        running[submit(self.run, self.how, job)] = job
                if not running:
                    break
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    job = running.pop(future)
                    keep(self.out, self.kept, future.result())
                    print(f"{job.method.name} {job.stage} seed {job.seed}: {len(job.points)} points", flush=True)
        self.write()

    def write(self) -> None:
        """The summary: what was decided, and what the finals came to; nothing if the methods are not tuned."""
        if all(method.once for method in self.methods.values()):
            return
        found = summary(self.states(), self.kept, self.rounds)
        for name, text in found.items():
            (self.out / name).write_text(text, encoding="utf-8")


def identity(job: StudyProgram) -> tuple[str, str, int]:
    """A method is at one job of a stage and a seed at a time."""
    return job.method.name, job.stage, job.seed


@contextmanager
def pool(workers: int) -> Iterator[Callable[..., Future[Any]]]:
    """Submit programs to processes, or run them in this process if `workers` is 0."""
    if not workers:
        yield here
        return
    processes = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield processes.submit
    finally:
        processes.shutdown(cancel_futures=True)


def here(function: Callable[..., Any], *given: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(function(*given))
    return future


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fedda_paper.study", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", nargs="?", help="a piece of --missing, a built-in experiment or a TOML file")
    parser.add_argument("--missing", action="store_true", help="list what is left of the study, and its device time")
    parser.add_argument("--results", type=Path, default=Path("paper/results/study"), help="the folder of all studies")
    parser.add_argument("--out", type=Path, help="the folder of the records; RESULTS/TASK by default")
    parser.add_argument("--methods", default="", help="some of them, by comma")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of them, by comma")
    parser.add_argument("--rounds", type=int, help="of a whole run; the task's by default")
    parser.add_argument("--device")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 runs all in this one")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin nothing after so many")
    parser.add_argument("--commit", default="", help="of the source, for the records")
    parser.add_argument("--pack", action="store_true", help="compress the records of the pieces that are complete")
    given = parser.parse_args(words)
    if given.missing:
        return print_missing(given.results, given.workers or 7)
    if given.pack:
        return pack_complete(given.results)
    if given.task is None:
        parser.error("give a task, --missing or --pack")
    from .missing import PIECES, Piece, methods_of

    piece = next((piece for piece in PIECES if piece.folder == given.task), None) or Piece("", given.task, "")
    experiment = find(piece.source)
    command = "python -m fedda_paper.study " + shlex.join(words)
    known = methods_of(piece, given.results)
    if piece.new and not known:
        parser.error("the settings for new tasks are not known before the pieces that end in -untuned are complete")
    if unknown := [name for name in given.methods.split(",") if given.methods and name not in known]:
        parser.error(f"unknown method {unknown[0]!r}; the methods are {', '.join(known)}")
    chosen = {name: known[name] for name in given.methods.split(",")} if given.methods else known
    study = Study(
        How(piece.source, given.device, given.precision, command, given.commit),
        given.out or given.results / (piece.folder or experiment.name),
        given.rounds or experiment.rounds,
        chosen,
        given.stages.split(","),
    )
    study.drive(given.workers, 60 * given.minutes)
    if (text := study.out / "summary.md").is_file():
        print(text.read_text(encoding="utf-8"))


def pack_complete(results: Path) -> None:
    from .missing import PIECES, left

    for piece in PIECES:
        if not left(piece, results).programs:
            pack(results / piece.folder)


def print_missing(results: Path, workers: int) -> None:
    from fedda.progress import print_table

    from .missing import HEADS, table

    print_table(
        HEADS, list(table(results, workers)), f"What is left of the study; device time with {workers} processes"
    )
