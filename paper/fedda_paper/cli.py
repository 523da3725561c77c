"""`fedda reproduce`: run, keep and judge the paper's experiments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli import options
from fedda.cli.app import load_plugins, say
from fedda.cli.commands import Commands
from fedda.cli.run import check_run_options
from fedda.processes import Stopped

if TYPE_CHECKING:
    from .estimate import Estimate
    from .parts import Part, PartList

app = Commands(add_completion=False, rich_markup_mode="rich")


@app.command(epilog="Example: fedda reproduce cifar10 variants --device cuda --minutes 9.5")
def reproduce(
    parts: Annotated[
        list[str] | None,
        typer.Argument(help="Names of parts (--plan lists them), by default all in order; with --smoke of figures."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The results folder.")] = Path("paper/results"),
    work: Annotated[Path, typer.Option(help="The working folder: runs and checkpoints.")] = Path("runs/reproduce"),
    device: options.Device = None,
    precision: options.Precision = "auto",
    minutes: Annotated[float | None, typer.Option(help="Stop after this time; the same command resumes.")] = None,
    shows_plan: Annotated[bool, typer.Option("--plan", help="List the parts and what is left of each.")] = False,
    runs: Annotated[bool, typer.Option("--run/--no-run", help="Run what is left of the parts.")] = True,
    packs: Annotated[bool, typer.Option("--pack/--no-pack", help="Write finished runs into the results.")] = True,
    file: Annotated[Path | None, typer.Option("--parts", help="Another plan than the paper's.")] = None,
    docs: Annotated[
        bool,
        typer.Option(
            "--docs", help="Write docs/reproduction*, docs/choosing.md and parts of docs/study.md and README.md."
        ),
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run small forms of figures and compare their curves with the kept ones.")
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="With --smoke: write the curves into this folder instead.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit to record; default: that of the checkout.")] = None,
    plugin: options.Plugins = None,
) -> None:
    """Run the paper's figures, at its values and tuned, in parts that can be stopped and resumed.

    --smoke alone lists its figures. Several processes with the same command share the work.
    """
    from .estimate import estimate
    from .layout import pack, restore
    from .parts import read_plan
    from .results import Results

    load_plugins(plugin)
    check_run_options("auto", device, precision, None, False, False, 5.0)
    if sum((shows_plan, docs, smoke)) > 1 or (keep is not None and not smoke):
        raise ValueError("--plan, --docs and --smoke exclude each other, and --keep needs --smoke")
    if docs:
        return write_docs(out)
    if smoke:
        return run_smoke(parts or [], keep)
    plan = read_plan(file)
    selected = plan.select(parts or [])
    if restored := restore(plan, out, work):
        say(f"{len(restored)} runs and sweeps restored from {out}")
    if shows_plan:
        return print_plan(estimate(plan, selected, work, Results(out).times))
    left = go(plan, selected, work, device, precision, minutes, commit) if runs else ""
    for folder in pack(work, out) if packs else ():
        print(f"kept: {folder}")
    if left:
        print(f"{left}: the same command resumes")


def go(
    plan: PartList, parts: list[Part], work: Path, device: str | None, precision: str, minutes: float | None,
    commit: str | None,
) -> str:  # fmt: skip
    """Run until all is finished or the time is over; return why something is left, if it is."""
    from fedda.progress import watcher

    from .reproduction import Reproduction, current_commit

    if minutes is not None and not minutes > 0:
        raise ValueError(f"--minutes must be a number > 0, got {minutes}")
    seconds = math.inf if minutes is None else 60 * minutes
    with (display := watcher([])):
        reproduction = Reproduction(plan, work, display, device, precision, seconds, commit or current_commit(), say)
        try:
            reproduction.go(parts)
        except Stopped as why:
            say(f"fedda: {why}; the same command resumes")
            raise typer.Exit(128 + why.signal) from None
    return reproduction.why


def print_plan(estimates: list[Estimate]) -> None:
    """One row per part. The time that is left is known for methods that have kept times."""
    from fedda.progress import print_table
    from fedda.runs.formats import count, duration

    def row(name: str, rows: list[Estimate]) -> list[str]:
        runs, done, steps = (sum(getattr(e, key) for e in rows) for key in ("runs", "done", "steps"))
        seconds, untimed = sum(e.seconds for e in rows), sum(e.untimed for e in rows)
        left = [duration(seconds)] if seconds or not untimed else []
        left += [f"{untimed} runs without a kept time"] if untimed else []
        return [name, str(runs), str(done), count(steps), " + ".join(left)]

    rows = [*(row(e.part, [e]) for e in estimates), row("all", estimates)]
    print_table(["part", "runs", "done", "local steps", "left, by kept times"], rows)


def write_docs(out: Path) -> None:
    """Write the pages and the README's part in this checkout."""
    from fedda.files import write_whole

    from .figures import draw_changed
    from .page import fill_readme, filled, pages
    from .results import Results
    from .study import choosing, picture, study_page
    from .study.studied import read_tasks

    docs, readme, results = Path("docs"), Path("README.md"), Results(out)
    if not docs.is_dir() or not readme.is_file():
        raise ValueError("reproduce: --docs writes docs/reproduction.md and README.md: run it in a checkout")
    front = fill_readme(readme.read_text(encoding="utf-8"), results)
    texts = pages(results)
    (docs / "reproduction").mkdir(exist_ok=True)
    draw_changed(results, docs / "reproduction")
    if (out / "study").is_dir():
        tasks = read_tasks(out)
        front = filled(front, choosing.BEGIN, choosing.readme_part(tasks, results))
        texts["choosing.md"] = choosing.page(tasks, results)
        study = (docs / "study.md").read_text(encoding="utf-8")
        texts["study.md"] = filled(study, study_page.BEGIN, study_page.part(tasks, results))
        picture.draw_overview(tasks, docs / picture.OVERVIEW)
        picture.draw(tasks, docs / picture.PICTURE)
    for path, text in ({docs / name: text for name, text in texts.items()} | {readme: front}).items():
        print(f"written: {write_whole(path, text)}")


def run_smoke(figures: list[str], keep: Path | None) -> None:
    """Run small forms of figures; exit 1 if a method's curves are outside the tolerance."""
    from fedda.progress import print_table, watcher
    from fedda.runs.formats import plain

    from . import smoke

    if not figures:
        raise ValueError(f"reproduce: --smoke needs a figure: {', '.join(smoke.names())}")
    agree = True
    for name in figures:
        with (display := watcher([])):
            record = smoke.run_small(name, display)
        if keep is not None:
            print(f"kept: {smoke.keep(record, keep)}")
            continue
        deviations = smoke.deviations(smoke.kept_curves(name), record)
        rows = [
            [d.label, "yes" if d.agrees else "NO", plain(d.times, 2), d.metric.replace("_", " "), str(d.round),
             plain(d.kept), plain(d.now), plain(d.tolerance, 2)]
            for d in deviations
        ]  # fmt: skip
        heads = ["method", "agrees", "tolerances away", "at its farthest in", "round", "kept", "now", "tolerance"]
        print_table(heads, rows, f"{name}, {record['rounds']} rounds, seeds {', '.join(map(str, record['seeds']))}")
        agree = agree and all(d.agrees for d in deviations)
    if keep is None:
        print("tolerance: two standard errors of a difference of means over the seeds, at least 0.2 % of the value")
    if not agree:
        raise typer.Exit(1)
