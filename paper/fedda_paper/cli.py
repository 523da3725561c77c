"""`fedda reproduce`: the paper's experimental section, run, kept and judged."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.app import Plugins, load_plugins, say
from fedda.cli.run import refuse_how
from fedda.processes import Stopped

if TYPE_CHECKING:
    from . import Part, PartList, estimate


app = typer.Typer(add_completion=False)


@app.command(epilog="Example: fedda reproduce cifar10 variants --device cuda --minutes 9.5")
def reproduce(
    parts: Annotated[list[str] | None, typer.Argument()] = None,
    out: Annotated[Path, typer.Option(help="Where results are kept.")] = Path("paper/results"),
    work: Annotated[Path, typer.Option(help="Where runs go on, with their checkpoints.")] = Path("runs/reproduce"),
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    precision: Annotated[str, typer.Option(help="auto, float32, tf32 or bf16 (docs/performance.md).")] = "auto",
    minutes: Annotated[
        float | None, typer.Option(help="Stop before so many are over; the same command goes on.")
    ] = None,
    shows_plan: Annotated[bool, typer.Option("--plan", help="Print parts, steps and estimated seconds.")] = False,
    runs: Annotated[bool, typer.Option("--run/--no-run", help="Run what is left of the parts.")] = True,
    packs: Annotated[bool, typer.Option("--pack/--no-pack", help="Write what has been run into the results.")] = True,
    file: Annotated[
        Path | None, typer.Option("--parts", help="Another plan than the one that comes with fedda.")
    ] = None,
    docs: Annotated[
        bool, typer.Option("--docs", help="Write docs/reproduction.md and its part of README.md from the results.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Repeat figures in small, and compare their curves with the kept ones.")
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="With --smoke: write the curves into this folder instead.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="What the results call the commit; asked of git if left out.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Run the paper's figures, at its values and tuned, in parts that can be stopped and gone on with.

    PARTS are names of parts (--plan lists them), all of them in their order if left out. With --smoke they are names
    of figures, not the same ones (--smoke alone lists them). The same command in several processes at a time shares
    what is left between them.
    """
    from . import estimate, plan
    from .pack import pack
    from .restore import restore

    load_plugins(plugin)
    refuse_how("auto", device, precision, None, False, False, 5.0)
    if sum((shows_plan, docs, smoke)) > 1 or (keep is not None and not smoke):
        raise ValueError("--plan, --docs and --smoke exclude each other, and --keep needs --smoke")
    if docs:
        return write_docs(out)
    if smoke:
        return repeat(parts or [], keep)
    wanted = plan(file)
    chosen = wanted.chosen(parts or [])
    if there := restore(wanted, out, work):
        say(f"{len(there)} runs and sweeps taken from {out}")
    if shows_plan:
        return print_plan(estimate.lines(wanted, chosen, work, precision))
    left = go(wanted, chosen, work, device, precision, minutes, commit) if runs else ""
    if packs:
        for place in pack(work, out):
            print(f"kept: {place}")
    if left:
        print(f"{left}: the same command goes on")


def go(
    wanted: PartList, chosen: list[Part], work: Path, device: str | None, precision: str, minutes: float | None,
    commit: str | None,
) -> str:  # fmt: skip
    """Run until all is done or the time is over, and say what stood in the way, if something did; a signal leaves a
    checkpoint and the command that goes on."""
    from fedda.progress import watcher

    from .work import Reproduction, commit_here

    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be a number > 0, got {minutes}")
    watch = watcher([])
    seconds = math.inf if minutes is None else 60 * minutes
    with watch:
        doing = Reproduction(wanted, work, watch, device, precision, seconds, commit or commit_here(), say)
        try:
            doing.go(chosen)
        except Stopped as why:
            say(f"fedda: {why}; the same command goes on")
            raise typer.Exit(128 + why.signal) from None
    return doing.why


def print_plan(lines: list[estimate.Estimate]) -> None:
    """One row a part; seconds are of what is left, on the device that the figures in estimate.py were measured on."""
    from fedda.progress import table
    from fedda.runs.formats import count, duration

    rows = [[line.part, str(line.runs), str(line.done), count(line.steps), duration(line.seconds)] for line in lines]
    total = [sum(getattr(line, word) for line in lines) for word in ("runs", "done", "steps", "seconds")]
    rows.append(["all", f"{total[0]}", f"{total[1]}", count(total[2]), duration(total[3])])
    table(["part", "runs", "done", "local steps", "left, on one H200"], rows)


def write_docs(out: Path) -> None:
    """The page and the README's part, in the checkout that the command is given in."""
    from fedda.files import write_whole

    from . import readme
    from .page import page

    if not Path("docs").is_dir() or not Path("README.md").is_file():
        raise ValueError("reproduce: --docs writes docs/reproduction.md and README.md: run it in a checkout")
    text = readme.filled(Path("README.md").read_text(encoding="utf-8"), out, os.path.relpath(out))
    for path, new in (
        (Path("docs/reproduction.md"), page(out, os.path.relpath(out, "docs"))),
        (Path("README.md"), text),
    ):
        write_whole(path, new)
        print(f"written: {path}")


def repeat(figures: list[str], keep: Path | None) -> None:
    """Figures in small; exit 1 where a method's curves are farther from the kept ones than the tolerance."""
    from fedda.progress import table, watcher
    from fedda.runs.formats import plain

    from . import smoke as small

    if not figures:
        raise ValueError(f"reproduce: --smoke needs a figure: {', '.join(small.names())}")
    wrong = False
    for name in figures:
        with (watch := watcher([])):
            found = small.smoke(name, watch)
        if keep is not None:
            print(f"kept: {small.keep(found, keep)}")
            continue
        compared = small.deviations(small.kept_curves(name), found)
        rows = [
            [d.label, "yes" if d.agrees else "NO", plain(d.times, 2), d.metric.replace("_", " "), str(d.round),
             plain(d.kept), plain(d.found), plain(d.tolerance, 2)]
            for d in compared
        ]  # fmt: skip
        heads = ["method", "agrees", "tolerances away", "at its farthest in", "round", "kept", "now", "tolerance"]
        table(heads, rows, f"{name}, {found['rounds']} rounds, seeds {', '.join(map(str, found['seeds']))}")
        wrong = wrong or not all(d.agrees for d in compared)
    if keep is None:
        print("tolerance: two standard errors of a difference of means over the seeds, at least 0.2 % of the value")
    if wrong:
        raise typer.Exit(1)
