"""`fedda bench`: what a round costs on this machine, and how that grows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Plugins, app, load_plugins

if TYPE_CHECKING:
    import torch


@app.command(epilog="Example: fedda bench --workload small --algorithms fedavg --out bench.json")
def bench(
    workload: Annotated[str, typer.Option(help="small (digits, MLP), cnn (the paper's CNN) or all.")] = "all",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    algorithms: Annotated[str, typer.Option(help="Which, by comma.")] = "fedavg,fedda-mvr",
    precision: Annotated[str, typer.Option(help="auto, float32, or on a GPU tf32 or bf16.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads on a CPU; more are far slower on a busy machine.")] = 1,
    seconds: Annotated[float, typer.Option(help="How long each contender is timed.")] = 1.0,
    scaling: Annotated[bool, typer.Option("--scaling", help="Measure how the cost grows, and draw it.")] = False,
    out: Annotated[Path, typer.Option(help="Every figure, as JSON.")] = Path("bench.json"),
    plot: Annotated[
        Path | None, typer.Option(help="The folder of --scaling's pictures, that of --out if left out.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Measure rounds on this machine: each path that fits, beside a plain PyTorch loop over clients in the same run.

    A step is one local step of all clients that take part; images count once for every gradient. With --scaling, the
    cost of a round is measured against clients, steps, parameters, seeds and the size of the population instead.
    """
    from .. import bench as benchmark
    from ..arguments import usable_device
    from ..checks import count, one_of
    from ..problems.gradients.choose import PRECISIONS
    from ..problems.gradients.measured import threads as so_many

    load_plugins(plugin)
    one_of("bench", "--workload", workload, ("all", *benchmark.WORKLOADS))
    one_of("bench", "--precision", precision, ("auto", *PRECISIONS))
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"bench: --seconds must be > 0, got {seconds}")
    count("bench", "--threads", threads, at_most=1024)
    if plot is not None and not scaling:
        raise ValueError("bench: --plot is where --scaling's pictures go: give that, too")
    names = chosen(algorithms)
    where = usable_device(device, "--device")
    if precision in ("tf32", "bf16") and where.type != "cuda":
        raise ValueError(f"bench: --precision {precision} needs a CUDA device, got --device {device}")
    place = out.parent if plot is None else plot
    refuse_unwritable(out, place if scaling else out.parent)
    workloads = list(benchmark.WORKLOADS) if workload == "all" else [workload]
    with progress() as say, so_many(threads):
        found: dict[str, Any] = {"machine": benchmark.machine(where), "seconds": seconds}
        if scaling:
            found["scaling"] = {w: grown(w, names, where, precision, seconds, say) for w in workloads}
        else:
            found["workloads"] = {w: measured(w, names, where, precision, seconds, say) for w in workloads}
    found["process_peak_mb"] = benchmark.process_peak_mb()
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    show(found)
    for name, own in found.get("scaling", {}).items():
        picture = place / f"scaling-{name}.png"
        picture.write_bytes(benchmark.draw(own, f"{name}: {facts(found['machine'])}"))
        print(f"picture: {picture}")
    print(f"figures: {out}")


def chosen(words: str) -> list[str]:
    from .. import registry
    from ..checks import nearest

    names = [word.strip() for word in words.split(",") if word.strip()]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"bench: --algorithms must be different names by comma, got {words!r}")
    known = registry.algorithms.entries
    for name in names:
        if name not in known:
            raise ValueError(f"bench: unknown algorithm {name!r}; {nearest(name, known)}")
    return names


def refuse_unwritable(out: Path, pictures: Path) -> None:
    """What cannot be written is said before the work."""
    for folder in (out.parent, pictures):
        folder.mkdir(parents=True, exist_ok=True)
    with out.open("a"):
        pass
    if not out.stat().st_size:
        out.unlink()


def measured(
    name: str, names: list[str], device: torch.device, precision: str, seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """One workload, and what was found of each algorithm."""
    from .. import bench as benchmark

    workload = benchmark.WORKLOADS[name]
    problem = workload.problem().to(device)
    found = {
        algorithm: benchmark.measure(algorithm, workload, problem, precision, seconds, of(say, name, algorithm))
        for algorithm in names
    }
    about = {word: getattr(workload, word) for word in ("about", "clients", "cohort", "steps", "batch")}
    return about | {"parameters": problem.d, "random_images": workload.random, "algorithms": found}


def grown(
    name: str, names: list[str], device: torch.device, precision: str, seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    from .. import bench as benchmark

    return {
        algorithm: benchmark.scaling(name, algorithm, device, precision, seconds, of(say, name, algorithm))
        for algorithm in names
    }


def of(say: Callable[[str], None], workload: str, algorithm: str) -> Callable[[str], None]:
    return lambda words: say(f"{workload}: {algorithm}: {words}")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done: one line that changes on a terminal, lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if sys.stderr.isatty() and not console.is_dumb_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield line


def line(words: str) -> None:
    with suppress(OSError):  # a reader that went away does not end the work
        print(words, file=sys.stderr, flush=True)


def facts(machine: dict[str, Any]) -> str:
    threads = f", {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    where = machine["processor"] + threads if machine["device"] == "cpu" else machine["device"]
    return f"{where}, torch {machine['torch']}"


def show(found: dict[str, Any]) -> None:
    from ..progress import table
    from ..runs.formats import size

    print(facts(found["machine"]))
    for name, own in found.get("workloads", {}).items():
        about = f"{name}: {own['about']} ({own['parameters']:,} parameters)"
        many = f"{own['cohort']} of {own['clients']} clients a round, {own['steps']} steps, batch {own['batch']}"
        noise = "; images are random, which changes no time" if own["random_images"] else ""
        table(HEADS, rows(own["algorithms"]), f"{about}, {many}{noise}")
    for name, own in found.get("scaling", {}).items():
        table(["algorithm", "quantity", "value", *GROWTH, "to plain"], growth(own), f"{name}: how the cost grows")
    if found["process_peak_mb"] is not None:
        print(f"most memory this process held: {size(1e6 * found['process_peak_mb'])}")


HEADS = (
    "algorithm",
    "path",
    "ms a step",
    "least to most",
    "rounds/s",
    "images/s",
    "memory",
    "start-up",
    "to plain",
    "seeds",
)


def rows(algorithms: dict[str, Any]) -> Iterator[list[str]]:
    from ..runs.formats import size

    for name, own in algorithms.items():
        for path, row in own["paths"].items():
            taken = path == own["chosen"]
            yield [
                name,
                path + (" (auto)" if taken else ""),
                short(row["ms_per_step"]),
                f"{short(row['ms_per_step_min'])} to {short(row['ms_per_step_max'])}",
                short(row["rounds_per_second"]),
                f"{row['images_per_second']:,.0f}",
                "–" if row["peak_memory_mb"] is None else size(1e6 * row["peak_memory_mb"]),
                f"{row['startup_seconds']:.2g} s",
                f"{short(row['ratio_to_reference'])} x",
                f"{own['seeds']} in {short(own['seeds_relative_time'])} x" if taken else "",
            ]


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


GROWTH = {"ms a round": "ms_per_round", "ms a step": "ms_per_step", "µs a client and step": "us_per_client_step"}


def growth(algorithms: dict[str, Any]) -> Iterator[list[str]]:
    for name, own in algorithms.items():
        for quantity, points in own.items():
            for point in points:
                own_row, plain = point["fedda"], point.get("plain loop")
                ratio = f"{short(plain['ms_per_round'] / own_row['ms_per_round'])} x" if plain else ""
                yield [name, quantity, f"{point['value']:,}", *(short(own_row[key]) for key in GROWTH.values()), ratio]
