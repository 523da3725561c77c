"""`docs/reproduction/NAME.md`: one page for each figure, with its picture, a small table and its claims."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fedda.claims import Claim, claims
from fedda.claims.compare import SPARSE
from fedda.claims.runs import Source
from fedda.experiments.config import read
from fedda.files import write_whole
from fedda.report.picture import picture
from fedda.report.plots import draw
from fedda.runs.reading import kept, read_run

from .chapters import NOT_RUN, SETTINGS, better_readings, edges
from .findings import comparisons, told, upper, with_marks
from .pool import pool_runs
from .results import Results, builtin, missing
from .tables import (
    as_good,
    best_of,
    cell,
    fallen,
    final_values,
    folded,
    has_penalty,
    markdown,
    name_with_notes,
    rounds_to_target,
    survivors,
    worse,
)

DPI = 100
DRAWN = "pictures.json"
HOW_TO_READ = """The table has the test accuracy at the end: the mean over the last 5 % of the rounds, then over the \
seeds, ± the standard deviation over the seeds. Bold: the best, and those that a t test over the seeds does not tell \
from it."""


def names(results: Results) -> list[str]:
    """The figures of the plan, each once."""
    return list(dict.fromkeys(name for _, name in results.plan.figures()))


def settings_of(results: Results, name: str) -> dict[str, Source]:
    """The settings in which a figure was run."""
    runs = {setting: results.runs.get(Path(setting) / name) for setting in SETTINGS}
    return {setting: run for setting, run in runs.items() if run is not None}


def claims_about(name: str) -> list[Claim]:
    figure = builtin(name).figure
    return [claim for claim in claims() if any(figure in case for case in claim.own_figures)]


def home_of(results: Results, claim: Claim) -> str:
    """The figure whose page has the numbers of a claim: the first that it is about; none for a claim on theory."""
    return next((name for name in names(results) if claim in claims_about(name)), "")


def figure_page(results: Results, name: str) -> str:
    """The page of one figure."""
    runs = settings_of(results, name)
    lines = [f"# {builtin(name).title}", "", f"[All figures and verdicts](../reproduction.md) · `fedda run {name}`", ""]
    lines += [f"- {text}" for text in sizes(results, name)]
    for setting in distinct(runs):
        lines += ["", f"![{builtin(name).title}, {SETTINGS[setting]}]({name}-{setting}.png)"]
        lines += ["", f"*{upper(SETTINGS[setting])}: mean over the seeds, ± one standard deviation.*"]
    if runs:
        lines += ["", "## Results", "", HOW_TO_READ, "", small_table(runs)]
    lines += ["", "## What the paper says, and what we found"]
    for claim in claims_about(name):
        lines += ["", *claim_lines(results, claim, name)]
    if runs:
        lines += ["", "## All values", "", "\n\n".join(all_values(results, name, runs))]
    return "\n".join(lines) + "\n"


def distinct(runs: dict[str, Source]) -> list[str]:
    """The settings with a picture of their own: the tuned values may be the paper's."""
    return [s for s in runs if s == "paper" or not same_values(runs.get("paper"), runs[s])]


def same_values(one: Source | None, other: Source) -> bool:
    return one is not None and all(
        one.run.config[key] == other.run.config[key] for key in ("algorithms", "problem", "rounds")
    )


def sizes(results: Results, name: str) -> Iterator[str]:
    """What was run in each setting: rounds, seeds, precision and what is missing."""
    runs = settings_of(results, name)
    for setting, title in SETTINGS.items():
        run = runs.get(setting)
        if run is None:
            yield f"{upper(title)}: **{NOT_RUN}**."
            continue
        seeds = f"{run.seeds} seed{'s' * (run.seeds != 1)}"
        text = f"{upper(title)}: {run.rounds} rounds, {seeds}, data {run.data}, {precisions(results, run)}"
        absent = ", ".join(missing(name, run))
        text += f"; **{NOT_RUN}: {absent}**" if absent else ""
        same = setting != "paper" and same_values(runs.get("paper"), run)
        yield text + ("; the sweep chose the paper's values, so these are the same runs." if same else ".")


def small_table(runs: dict[str, Source]) -> str:
    """Test accuracy and rounds to the target of every method, a column for each setting."""
    labels = list(dict.fromkeys(label for run in runs.values() for label in run.by_label))
    target = next((m.target for run in runs.values() for m in run.methods if m.target is not None), None)
    short = {"paper": "paper's values", "paper-batchnorm": "with BatchNorm", "tuned": "tuned"}
    heads = [f"test accuracy, {short[s]}" for s in runs]
    heads += [f"rounds to {100 * target:g} %, {short[s]}" for s in runs] if target is not None else []
    best = {s: best_of(run.methods, "test_accuracy") for s, run in runs.items()}
    rows = []
    for label in labels:
        own = {s: run.by_label.get(label) for s, run in runs.items()}
        cells = []
        for setting, method in own.items():
            text = "–" if method is None else "constant" if method.constant else cell(method, "test_accuracy")
            good = method is not None and as_good(method, best[setting], "test_accuracy")
            cells.append(f"**{text}**" if good else text)
        if target is not None:
            cells += ["–" if method is None else rounds_to_target(method) for method in own.values()]
        rows.append([label, *cells])
    return markdown(["method", *heads], rows)


def claim_lines(results: Results, claim: Claim, name: str) -> Iterator[str]:
    """A claim with its verdict in each setting, in sentences; its comparisons are folded."""
    home = home_of(results, claim)
    yield from (f"### {claim.id}", "", f"*{claim.text}* ({claim.where})", "")
    tables = []
    for setting, title in SETTINGS.items():
        v = results.verdict(setting, claim.id)
        if v is None:
            yield f"- {upper(title)}: {NOT_RUN}."
        elif home == name:
            stand_in = f" On {v.stand_in}." if v.stand_in else ""
            yield f"- {upper(title)}: **{with_marks(v)}**. {told(v)}{stand_in}"
            tables += [f"**{upper(title)}**", comparisons(v)] if v.details else []
        else:
            yield f"- {upper(title)}: **{with_marks(v)}**."
    if claim.remark and home == name:
        yield f"- Note: {claim.remark}."
    if home != name:
        yield from ("", f"The numbers are [on the page of {builtin(home).title}]({home}.md#{claim.id.lower()}).")
    elif tables:
        yield from ("", folded(f"All comparisons of {claim.id}", *tables))


def all_values(results: Results, name: str, runs: dict[str, Source]) -> Iterator[str]:
    """For each setting the final values of every method in every metric, folded, with notes."""
    parts = {part.setting: part for part, figure in results.plan.figures() if figure == name}
    for setting, run in runs.items():
        notes = [*survivors(run), *fallen(run)]
        if setting == "paper":
            notes += better_readings(results, run)
        elif setting == "tuned" and "paper" in runs:
            notes += worse(run, runs["paper"])
        if setting == "tuned" and setting in parts and (on_edge := ", ".join(edges(results, parts[setting], name))):
            notes.append(f"- On an edge of what was [tried](tuning.md), and perhaps better beyond it: {on_edge}.")
        marked = [name_with_notes(m) for m in run.methods if m.unreduced]
        notes += [f"- {text}." for text in marked]
        yield folded(upper(SETTINGS[setting]), final_values(run), *(["\n".join(notes)] if notes else []))


def precisions(results: Results, run: Source) -> str:
    """The precision of a figure's runs, with the methods of each if they differ."""
    rows = {row["name"]: row for row in results.times}
    labels: dict[str, list[str]] = {}
    for one in pool_runs(read(run.run.folder / "config.toml").completed(), Path()):
        environment = rows.get(one.name, {}).get("environment", {})
        found = environment.get("precision") or run.run.environment.get("precision") or "not recorded"
        text = " and ".join(found) if isinstance(found, list) else str(found)  # a run that resumed in another one
        labels.setdefault(text, []).append(one.label)
    if len(labels) == 1:
        return f"precision {next(iter(labels))}"
    return "precision " + ", ".join(f"{precision} ({', '.join(own)})" for precision, own in labels.items())


# -- pictures ----------------------------------------
def pictures(results: Results) -> dict[str, Path]:
    """The run folder behind each picture."""
    found: dict[str, Path] = {}
    for name in names(results):
        runs = settings_of(results, name)
        found |= {f"{name}-{setting}.png": runs[setting].run.folder for setting in distinct(runs)}
    return found


def digests(results: Results) -> dict[str, str]:
    """What each picture was drawn from, in short."""
    rows = {name: kept(folder, "metrics.jsonl").read_bytes() for name, folder in pictures(results).items()}
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in rows.items()}


def draw_changed(results: Results, folder: Path) -> None:
    """Draw the pictures that are not there, or whose runs have changed; `pictures.json` remembers the runs."""
    file, new = folder / DRAWN, digests(results)
    old = json.loads(file.read_bytes()) if file.is_file() else {}
    for name, run in pictures(results).items():
        if old.get(name) != new[name] or not (folder / name).is_file():
            own = read_run(run)
            curves = picture([own])
            if not has_penalty(own):
                curves = replace(curves, metrics=[m for m in curves.metrics if m not in SPARSE])
            write_whole(folder / name, draw(curves, curves.axes[0], "png", DPI))
    write_whole(file, json.dumps(new, indent=1) + "\n")
