"""`fedda plan`: what an experiment would take on more devices, and with more clients, than are here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Plugins, Settings, app, load_plugins
from .bench import progress, refuse_places, short

if TYPE_CHECKING:
    from .. import plan as planning
    from ..experiments.config import Experiment

MOST = 2**31 - 1  # clients: they are drawn with 31 bits


@app.command(epilog="Example: fedda plan digits --gpus 8 --clients 1e6 --cohort 1000 --algorithms fedda-mvr,scaffold")
def plan(
    experiment: str,  # the docstring tells of it, as in `run`
    gpus: Annotated[
        int, typer.Option(help="The most processes, a device each; 1, 2, 4, ... up to it are planned.")
    ] = 8,
    clients: Annotated[
        str | None, typer.Option(help="How many clients, such as 1e6; the experiment's if left out.")
    ] = None,
    cohort: Annotated[
        str | None, typer.Option(help="How many take part in a round; the experiment's if left out.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where rounds are measured: cpu, cuda, cuda:1, ...")] = "cpu",
    algorithms: Annotated[str | None, typer.Option(help="Which, by comma: labels, or any algorithm.")] = None,
    link: Annotated[
        float | None, typer.Option(help="Gbit/s between devices; that of local processes is measured.")
    ] = None,
    latency: Annotated[
        float | None, typer.Option(help="Microseconds for a step of a message; measured as well.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A file that --out wrote, maybe elsewhere: nothing is measured.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long rounds of each size are timed.")] = 0.5,
    words: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The plan and its profile, as JSON.")] = None,
    plugin: Plugins = None,
) -> None:
    """Predict memory, bytes on the wire and time of an experiment on several devices, from rounds measured here.

    EXPERIMENT is a built-in one (`fedda list experiments`) or a .toml file. A client keeps as many samples, on average,
    as it has there; the seeds run together.
    """
    from .. import plan as planning
    from ..arguments import usable_device
    from ..checks import count
    from ..experiments import find
    from ..experiments.overrides import choose
    from ..plan.rows import rounds_of

    load_plugins(plugin)
    count("plan", "--gpus", gpus, at_most=65536)
    for word, value in (("--link", link), ("--latency", latency), ("--seconds", seconds)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"plan: {word} must be > 0, got {value}")
    wanted = choose(find(experiment), algorithms=algorithms, settings=words or ())
    asked = sized(wanted, clients, cohort)
    where = usable_device(device, "--device")
    if out is not None:
        refuse_places(out, out.parent)
    with progress() as say:
        if profile is not None:
            known = replace(saved(profile, wanted), name=wanted.name)
            joined = given(known.link, link, latency)
        else:
            say("all-reduces between two processes")
            joined = given(None, link, latency)
            shares = [-(-asked.cohort // world) for world in planning.worlds(gpus)]
            known = planning.measured(wanted, shares, asked.everyone, where, joined, seconds, say)
        known = replace(known, link=joined)
        say("cohorts")
        drawn = rounds_of(asked.clients, asked.cohort, wanted.seeds)
        lines = [
            planning.predict(known, label, asked, world, drawn)
            for label in wanted.algorithms
            for world in planning.worlds(gpus)
        ]
    show(wanted, known, asked, lines)
    if out is not None:
        found = {"asked": {**asdict(asked), "gpus": gpus}, "plan": lines, "profile": known.json()}
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"figures: {out}")


def sized(wanted: Experiment, clients: str | None, cohort: str | None) -> planning.Size:
    from ..plan import Size

    full = wanted.completed()
    there = full.problem.clients
    if clients is None and there is None:
        raise ValueError(f"plan: {wanted.name} takes its clients from the data: give --clients")
    population = whole("--clients", clients, MOST) if clients is not None else int(there or 0)
    usual = wanted.cohort or population  # everyone, where the experiment says nothing
    taking = whole("--cohort", cohort, population) if cohort is not None else usual
    if taking > population:
        raise ValueError(f"plan: --clients {population} is less than the cohort, {taking}: give --cohort, too")
    every = full.every or 1
    return Size(population, taking, full.rounds, 1 + -(-full.rounds // every))


def whole(word: str, text: str, most: int) -> int:
    """A whole number, also as 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value == int(value) and 1 <= value <= most):
        raise ValueError(f"plan: {word} must be a whole number from 1 to {most}, such as 1e3, got {text!r}")
    return int(value)


def saved(path: Path, wanted: Experiment) -> planning.Profile:
    from ..plan import Profile

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as why:
        raise ValueError(f"{path}: cannot be read: {why.strerror}") from None
    except ValueError:
        found = None
    known = Profile.of(found.get("profile") if isinstance(found, dict) else None, str(path))
    known.refuse_other(wanted, str(path))
    return known


def given(known: planning.Link | None, gbit: float | None, microseconds: float | None) -> planning.Link:
    """The user's network, where it is told; else what was measured."""
    from .. import plan as planning

    if gbit is not None and microseconds is not None:
        return planning.Link(microseconds / 1e6, gbit * 1e9 / 8)
    known = planning.measured_link() if known is None else known
    if gbit is not None:
        return replace(known, bandwidth=gbit * 1e9 / 8, local=False)
    return known if microseconds is None else replace(known, latency=microseconds / 1e6, local=False)


HEADS = (
    "algorithm", "processes", "clients each", "memory each", "of it client memory", "message", "rows away",
    "sent each", "compute", "exchange", "a round", "rounds", "in all",
)  # fmt: skip


def show(wanted: Experiment, known: planning.Profile, asked: planning.Size, lines: list[dict[str, Any]]) -> None:
    from ..progress import table
    from ..runs.formats import size

    about = f"{wanted.name}: {asked.cohort:,} of {asked.clients:,} clients a round, {asked.rounds:,} rounds"
    about += f", {known.replicas} seeds, {known.parameters:,} parameters"
    table(HEADS, rows(asked, lines), about)
    where = known.machine["processor"] + ", one thread" if known.shared else known.device
    print(f"rounds measured on: {where}, torch {known.machine['torch']}")
    source = "measured between two local processes" if known.link.local else "as given"
    wire = f"{1e6 * known.link.latency:.3g} µs a step, {8 * known.link.bandwidth / 1e9:.3g} Gbit/s"
    print(f"between processes: {wire}, {source}")
    if wanted.aggregation:
        print("not in these figures: aggregation, its work, its messages and what clients keep for it")
    if known.shared and max(line["processes"] for line in lines) > known.cores:
        print(f"processes share the {known.cores} cores of this CPU: more of them take turns")
    if not all(line["fits"] for line in lines):
        room = "this machine, which its processes share" if known.shared else "a device"
        print(f"(!) does not fit: {size(known.device_bytes)} is the memory of {room}")


def rows(asked: planning.Size, lines: list[dict[str, Any]]) -> Iterator[list[str]]:
    from ..runs.formats import count, duration, size

    for line in lines:
        took = line["seconds_per_round"]
        yield [
            line["algorithm"],
            str(line["processes"]),
            count(line["clients_per_process"]),
            size(line["memory_bytes"]["total"]) + ("" if line["fits"] else " (!)"),
            size(line["memory_bytes"]["client_memory"]),
            size(line["message_bytes"]),
            f"{count(line['rows_away'])} ({line['rows_share']:.1%})" if line["memory_bytes"]["client_memory"] else "–",
            size(line["wire_bytes"]["all_reduce"] + line["wire_bytes"]["rows"]),
            *(f"{short(1e3 * took[part])} ms" for part in ("compute", "exchange", "total")),
            duration(asked.rounds * took["total"]),
            duration(3600 * line["hours"]),
        ]
