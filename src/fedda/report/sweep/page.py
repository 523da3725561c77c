"""`report.html` of a sweep folder, with a figure for each algorithm beside it."""

import math
from pathlib import Path
from typing import Any

from fedda.files import write_whole
from fedda.report.html import fill
from fedda.report.style import metric
from fedda.report.sweep import plots
from fedda.report.sweep.grid import Map, best, edges, maps, text
from fedda.report.sweep.shades import shades
from fedda.report.sweep.svg import chart, words
from fedda.runs import formats
from fedda.runs.names import slugs
from fedda.runs.reading import toml
from fedda.runs.sweeps import Point, SweepResults, Swept, read_sweep

TOP = 10  # points in the table of an algorithm


def write_sweep(folder: str | Path) -> Path:
    """Write `report.html` and a `sweep-LABEL.png` for each algorithm into a sweep folder, and give the page's path.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> found = {"words": ["lr"], "points": [{"values": {"lr": 0.1}, "value": 0.9, "best": True}]}
    >>> data = {"metric": "validation_accuracy", "better": "higher", "algorithms": {"fedavg": found}}
    >>> _ = (folder / "sweep.json").write_text(json.dumps(data))
    >>> write_sweep(folder).name, sorted(path.name for path in folder.glob("*.png"))
    ('report.html', ['sweep-fedavg.png'])
    """
    sweep = read_sweep(folder)
    files = [f"sweep-{name}.png" for name in slugs([own.label for own in sweep.algorithms])]
    page = render(sweep, files)
    for own, file in zip(sweep.algorithms, files, strict=True):
        write_whole(sweep.folder / file, plots.draw(own, sweep.metric))
    return write_whole(sweep.folder / "report.html", page)


def render(sweep: SweepResults, files: list[str]) -> str:
    """Give the page of a sweep as text.

    >>> "<h1>a</h1>" in render(SweepResults(Path("a"), "validation_loss", "lower", 10, [0], 4, []), [])
    True
    """
    path = sweep.folder / "config.toml"
    found = toml(path) if path.is_file() else {}
    best_toml = sweep.folder / "best.toml"
    return fill(
        "sweep.html.j2",
        title=str(found.get("title") or found.get("name") or sweep.folder.resolve().name),
        facts=describe(sweep),
        metric=metric(sweep.metric).name,
        algorithms=[_algorithm(own, sweep.metric, file) for own, file in zip(sweep.algorithms, files, strict=True)],
        chosen=best_toml.read_text(encoding="utf-8", errors="replace") if best_toml.is_file() else "",
    )


def describe(sweep: SweepResults) -> str:
    """Say in a line what was measured, on which split, with which budget.

    >>> print(describe(SweepResults(Path("a"), "validation_loss", "lower", 60, [0], 24, [])).replace(" · ", "\\n"))
    Validation loss (lower is better) on the validation split, not the test set
    budget 24 points an algorithm
    60 rounds
    seed 0
    """
    split = {
        "validation": "on the validation split, not the test set",
        "train": "on the training set, not the test set",
        "test": "on the TEST set: what was chosen by it must not be judged by it",
    }.get(sweep.metric.split("_")[0], "")
    line = [f"{metric(sweep.metric).name} ({sweep.better} is better) {split}".strip()]
    if sweep.budget is not None:
        line.append(f"budget {sweep.budget} points an algorithm")
    if sweep.rounds is not None:
        line.append(f"{sweep.rounds} rounds")
    if sweep.seeds:
        line.append(f"seed{'s' * (len(sweep.seeds) > 1)} {', '.join(map(str, sweep.seeds))}")
    return " · ".join(line)


def chosen(own: Swept, name: str) -> tuple[str, str]:
    """Say in two texts which values were chosen, and what they reached.

    >>> chosen(Swept("a", ["lr"], [Point({"lr": 0.1}, 0.9, 0.01, 2, "", True, 5)], "higher"), "validation_accuracy")
    ('lr = 0.1', '90.0 ± 1.0 %')
    """
    top = best(own)
    return (words(top), _reached(top, name)) if top else ("–", "no point has a value")


def _algorithm(own: Swept, name: str, file: str) -> dict[str, Any]:
    top, shown = best(own), own.ranked[:TOP]
    picked, value = chosen(own, name)
    return {
        "label": own.label,
        "file": file,
        "words": own.words,
        "best": picked,
        "value": value,
        "points": len(own.points),
        "diverged": sum(not point.ok for point in own.points),
        "edges": edges(own),
        "charts": [chart(own, word, name, len(own.words) == 1) for word in plots.charted(own)] if own.points else [],
        "maps": [_map(one, own, name) for one in maps(own)],
        "top": [_row(point, own, name, point is top) for point in shown],
    }


def _map(shown: Map, own: Swept, name: str) -> dict[str, Any]:
    tones, top = shades((point.value for point in own.points), name, own.better), best(own)
    rows = []
    for i, row in reversed(list(enumerate(shown.cells))):  # upwards, as an axis goes
        cells: list[dict[str, Any]] = []
        for cell in row:
            if cell.point is None:
                note = "without a value" if cell.tried else "not tried"
                cells.append({"kind": "lost" if cell.tried else "none", "text": "", "hint": note, "style": ""})
                continue
            shade, ink = tones.colours(cell.point.value)
            kind = "chosen" if cell.point is top else "value"
            hint = f"{words(cell.point)}: {_reached(cell.point, name)}"
            style = f"background:{shade};color:{ink}"
            cells.append({"kind": kind, "text": tones.text(cell.point.value), "hint": hint, "style": style})
        rows.append((text(shown.down.levels[i]), cells))
    ends = [tones.low, tones.high] if own.better == "higher" else [tones.high, tones.low]
    unit = " %" if tones.percent else ""
    return {
        "across": shown.across.word,
        "down": shown.down.word,
        "heads": [text(level) for level in shown.across.levels],
        "rows": rows,
        "rest": shown.rest,
        "unit": unit,
        "ends": [f"{tones.text(end)}{unit}" for end in ends],
        "bar": [tones.colours(ends[0] + (ends[1] - ends[0]) * i / 8)[0] for i in range(9)],
    }


def _row(point: Point, own: Swept, name: str, first: bool) -> dict[str, Any]:
    return {
        "values": [text(point.values[word]) for word in own.words],
        "value": _reached(point, name) if point.ok else "–",
        "seeds": point.seeds or "–",
        "gradients": formats.count(None if math.isnan(point.gradients) else point.gradients),
        "note": point.note or ("" if point.ok else "no value"),
        "chosen": first,
    }


def _reached(point: Point, name: str) -> str:
    return formats.spread(point.value, None if math.isnan(point.std) else point.std, metric(name).percent)
