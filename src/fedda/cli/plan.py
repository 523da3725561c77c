"""`fedda plan`: what an experiment needs on several processes."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .app import app, load_plugins
from .bench import facts, refuse_unwritable, short, show_table
from .commands import THIS_MACHINE


@app.command(
    rich_help_panel=THIS_MACHINE,
    epilog="Example: fedda plan digits --gpus 8 --clients 1e6 --cohort 1000 --algorithms fedda-mvr,scaffold",
)
def plan(
    experiment: options.Experiment,
    gpus: Annotated[int, typer.Option(help="Plan for 1, 2, 4, ... up to this many processes, one per device.")] = 8,
    clients: Annotated[float | None, typer.Option(help="Clients, such as 1e6; the experiment's if left out.")] = None,
    cohort: Annotated[float | None, typer.Option(help="Clients per round; the experiment's if left out.")] = None,
    device: Annotated[
        str, typer.Option(help="Where rounds are measured: cpu, cuda, cuda:1, ...", metavar="DEVICE")
    ] = "cpu",
    algorithms: options.Algorithms = None,
    seconds: Annotated[float, typer.Option(help="How long rounds of each size are timed.")] = 0.5,
    settings: options.Settings = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
    plugin: options.Plugins = None,
) -> None:
    """Show memory and bytes per round of an experiment on several processes, and the seconds of rounds measured here.

    A client has as many samples as the
    experiment's clients have on average. The seeds run together.
    """
    from .. import plan as planning
    from ..arguments import check_device
    from ..bench.machine import machine
    from ..checks import POSITIVE, count, number
    from ..engines.participation import cohort_size
    from ..experiments import find
    from ..experiments.overrides import override
    from ..progress import status_line

    load_plugins(plugin)
    count("plan", "--gpus", gpus, at_most=65536)
    number("plan", "--seconds", seconds, POSITIVE)
    wanted = override(find(experiment), algorithms=algorithms, settings=settings or ())
    chosen = wanted.completed()
    population = chosen.problem.clients if clients is None else whole("--clients", clients, 2**31 - 1)
    if population is None:
        raise ValueError(f"plan: {chosen.name} takes its clients from the data: give --clients")
    taking = int(wanted.cohort or population) if cohort is None else whole("--cohort", cohort, population)
    if cohort is None and isinstance(wanted.cohort, float):
        taking = cohort_size(wanted.cohort, population)
    if taking > population:
        raise ValueError(f"plan: --clients {population} is less than the cohort, {taking}: give --cohort as well")
    where = check_device(device, "--device")
    if out is not None:
        refuse_unwritable(out, out.parent)
    with status_line() as say:
        rows = planning.plan(chosen, population, taking, gpus, where, seconds, say)
    about = machine(where) | ({"threads": 1} if where.type == "cpu" else {})
    title = f"{chosen.name}: {taking:,} of {population:,} clients per round, {chosen.rounds:,} rounds"
    show_table((cells(row, chosen.rounds) for row in rows), f"{title}, {len(chosen.seeds)} seeds")
    print(f"rounds measured on: {facts(about)}; one process, without the exchange between processes")
    if chosen.aggregation:
        print("not included: the work, messages and client memory of aggregation")
    if out is not None:
        inputs = {"clients": population, "cohort": taking, "rounds": chosen.rounds, "gpus": gpus}
        out.write_text(json.dumps({"asked": inputs, "machine": about, "plan": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"figures: {out}")


def whole(option: str, value: float, most: int) -> int:
    from ..checks import count

    number = int(value) if value.is_integer() else value
    count("plan", option, number, at_most=most)
    return int(number)


def cells(row: dict[str, Any], rounds: int) -> dict[str, str]:
    from ..runs.formats import count, duration, size

    memory, took = row["memory_bytes"], row["seconds_per_round"]
    away = f"{count(row['rows_away'])} ({row['rows_share']:.1%})"
    return {
        "algorithm": row["algorithm"],
        "processes": str(row["processes"]),
        "clients each": count(row["clients_per_process"]),
        "memory each": size(memory["total"]),
        "client memory each": size(memory["client_memory"]),
        "message": size(row["message_bytes"]),
        "rows away": away if memory["client_memory"] else "–",
        "sent each": size(sum(row["wire_bytes"].values())),
        "compute per round": "–" if took is None else f"{short(1e3 * took)} ms",
        "all rounds": "–" if took is None else duration(rounds * took),
    }
