"""`fedda bench`: the cost of a round on this machine, and how it grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .app import app, load_plugins
from .commands import THIS_MACHINE

if TYPE_CHECKING:
    from ..bench.workloads import Workload
    from ..core import Algorithm


@app.command(
    rich_help_panel=THIS_MACHINE, epilog="Example: fedda bench --workload small --algorithms fedavg --out bench.json"
)
def bench(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Measure your own .toml file, or a built-in experiment; by default the workloads of --workload.",
            autocompletion=options.complete_experiment,
        ),
    ] = None,
    workload: Annotated[
        Literal["small", "cnn", "all"] | None,
        typer.Option(help="small (digits, MLP), cnn (the paper's CNN) or all, the default.", show_default=False),
    ] = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas; by default fedavg,fedda-mvr, or those of the experiment.",
            metavar="NAMES",
            autocompletion=options.complete_algorithms,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each contender is timed.")] = 1.0,
    scaling: Annotated[bool, typer.Option("--scaling", help="Measure how the cost grows, and draw it.")] = False,
    plugin: options.Plugins = None,
    out: Annotated[Path, typer.Option(help="Write all figures as JSON.", rich_help_panel=options.OUTPUT)] = Path(
        "bench.json"
    ),
    plot: Annotated[
        Path | None,
        typer.Option(help="Folder of --scaling's pictures; by default that of --out.", rich_help_panel=options.OUTPUT),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...", metavar="DEVICE", rich_help_panel=options.MACHINE)
    ] = "cpu",
    precision: options.Precision = "auto",
    threads: Annotated[
        int,
        typer.Option(help="Threads on a CPU; several are slow on a busy machine.", rich_help_panel=options.MACHINE),
    ] = 1,
) -> None:
    """Measure rounds on this machine: each path that fits, beside a plain PyTorch loop over clients in the same run.

    A step is one local step of all clients that take part; an image counts once per gradient. With --scaling, the cost
    of a round is measured against clients, steps, parameters, seeds and the size of the population instead.
    """
    from ..arguments import check_device
    from ..bench.machine import machine, process_peak_mb
    from ..bench.measure import measure
    from ..bench.scaling import scaling as measure_scaling
    from ..bench.workloads import WORKLOADS
    from ..checks import POSITIVE, count, number
    from ..problems.gradients.tuning import threads as with_threads
    from ..progress import status_line
    from ..registry import make

    load_plugins(plugin)
    number("bench", "--seconds", seconds, POSITIVE)
    count("bench", "--threads", threads, at_most=1024)
    if plot is not None and not scaling:
        raise ValueError("bench: --plot is the folder of --scaling's pictures: give --scaling as well")
    if experiment is not None and (scaling or workload is not None):
        raise ValueError("bench: --workload and --scaling are for the built-in workloads: leave out EXPERIMENT")
    where = check_device(device, "--device")
    if precision in ("tf32", "bf16") and where.type != "cuda":
        raise ValueError(f"bench: --precision {precision} needs a CUDA device, got --device {device}")
    if experiment is not None:
        own, built = workload_of(experiment, algorithms)
        tasks = [(own, built)]
    else:
        names = chosen("fedavg,fedda-mvr" if algorithms is None else algorithms)
        some = [task for name, task in WORKLOADS.items() if workload in (None, "all", name)]
        tasks = [(task, {name: make(name, steps=task.steps) for name in names}) for task in some]
    if scaling:
        from ..bench.plot import draw
    folder = out.parent if plot is None else plot
    refuse_unwritable(out, folder if scaling else out.parent)
    with status_line() as say, with_threads(threads):
        results: dict[str, Any] = {"machine": machine(where), "seconds": seconds}
        if scaling:
            results["scaling"] = {
                task.name: measure_scaling(task.name, list(built), where, precision, seconds, say)
                for task, built in tasks
            }
        else:
            results["workloads"] = {
                task.name: measure(task, built, where, precision, seconds, say) for task, built in tasks
            }
    results["process_peak_mb"] = process_peak_mb()
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)
    for name, algorithm_rows in results.get("scaling", {}).items():
        picture = folder / f"scaling-{name}.png"
        picture.write_bytes(draw(algorithm_rows, f"{name}: {facts(results['machine'])}"))
        print(f"picture: {picture}")
    print(f"figures: {out}")


def workload_of(experiment: str, algorithms: str | None) -> tuple[Workload, dict[str, Algorithm]]:
    """The problem and the algorithms of an experiment, to be measured."""
    from ..bench.workloads import Workload
    from ..engines.participation import cohort_size
    from ..experiments import find
    from ..experiments.overrides import override
    from ..training import for_rounds

    wanted = override(find(experiment), algorithms=algorithms).completed()
    problem = wanted.problem.build()
    built = {
        label: for_rounds(wanted.build(label).with_steps_of(problem), problem, wanted.rounds)
        for label in wanted.algorithms
    }
    steps, cohort = next(iter(built.values())).steps, cohort_size(wanted.cohort, problem.clients)
    name, about = wanted.name, wanted.title or "an experiment"
    return Workload(name, about, problem.clients, cohort, steps, problem.batch_size, build=lambda: problem), built


def chosen(text: str) -> list[str]:
    """The algorithms of a list with commas."""
    from .. import registry

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"bench: --algorithms must be different names, separated by commas, got {text!r}")
    for name in names:
        registry.algorithms.find(name)  # refuses an unknown one
    return names


def refuse_unwritable(out: Path, pictures: Path) -> None:
    """Fail before the work if the results cannot be written."""
    for folder in (out.parent, pictures):
        folder.mkdir(parents=True, exist_ok=True)
    with out.open("a"):
        pass
    if not out.stat().st_size:
        out.unlink()


def facts(machine: dict[str, Any]) -> str:
    threads = f", {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    where = machine["processor"] + threads if machine["device"] == "cpu" else machine["device"]
    return f"{where}, torch {machine['torch']}"


def show(results: dict[str, Any]) -> None:
    from ..runs.formats import size

    print(facts(results["machine"]))
    for name, own in results.get("workloads", {}).items():
        about = f"{name}: {own['about']} ({own['parameters']:,} parameters)"
        clients = f"{own['cohort']} of {own['clients']} clients per round, {own['steps']} steps, batch {own['batch']}"
        noise = "; images are random, which changes no time" if own["random_images"] else ""
        show_table(path_rows(own["algorithms"]), f"{about}, {clients}{noise}")
    for name, own in results.get("scaling", {}).items():
        show_table(scaling_rows(own), f"{name}: how the cost grows")
    if results["process_peak_mb"] is not None:
        print(f"most memory this process held: {size(1e6 * results['process_peak_mb'])}")


def show_table(rows: Iterable[dict[str, str]], title: str) -> None:
    """A table whose heads are the keys of its rows."""
    from ..progress import print_table

    lines = list(rows)
    print_table(list(lines[0]), [list(line.values()) for line in lines], title)


def path_rows(algorithms: dict[str, Any]) -> Iterator[dict[str, str]]:
    from ..runs.formats import size

    for name, own in algorithms.items():
        for path, row in own["paths"].items():
            auto = path == own["chosen"]
            yield {
                "algorithm": name,
                "path": path + (" (auto)" if auto else ""),
                "ms a step": short(row["ms_per_step"]),
                "least to most": f"{short(row['ms_per_step_min'])} to {short(row['ms_per_step_max'])}",
                "rounds/s": short(row["rounds_per_second"]),
                "images/s": f"{row['images_per_second']:,.0f}",
                "memory": "–" if row["peak_memory_mb"] is None else size(1e6 * row["peak_memory_mb"]),
                "start-up": f"{row['startup_seconds']:.2g} s",
                "to plain": f"{short(row['ratio_to_reference'])} x",
                "seeds": f"{own['seeds']} in {short(own['seeds_relative_time'])} x" if auto else "",
            }


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def scaling_rows(algorithms: dict[str, Any]) -> Iterator[dict[str, str]]:
    for name, own in algorithms.items():
        for quantity, points in own.items():
            for point in points:
                ours, plain = point["fedda"], point.get("plain loop")
                yield {
                    "algorithm": name,
                    "quantity": quantity,
                    "value": f"{point['value']:,}",
                    "ms a round": short(ours["ms_per_round"]),
                    "ms a step": short(ours["ms_per_step"]),
                    "µs a client and step": short(ours["us_per_client_step"]),
                    "to plain": f"{short(plain['ms_per_round'] / ours['ms_per_round'])} x" if plain else "",
                }
