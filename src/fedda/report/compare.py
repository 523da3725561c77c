"""Several run folders on one page: `comparison.html`, with what differs between their configurations."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedda.files import write_whole
from fedda.report import plots
from fedda.report.claims import claims
from fedda.report.export import csv_text, latex_text
from fedda.report.html import curves, fill, flat, title
from fedda.report.picture import picture
from fedda.report.tables import table
from fedda.runs.reading import RecordedRun, read


def compare(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    r"""Write `comparison.html` and `comparison.png` into `out`, the folders' common parent if left out.

    >>> import json, tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> for name in ("a", "b"):
    ...     (place / name).mkdir()
    ...     _ = (place / name / "config.toml").write_text("[algorithms.fedavg]\nlr = 0.1\n")
    ...     row = {"algorithm": "fedavg", "seed": 0, "round": 0, "train_loss": 2.5}
    ...     _ = (place / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    >>> compare([place / "a", place / "b"]) == place.resolve() / "comparison.html"
    True
    """
    places = distinct(folders)
    if len(places) < 2:
        raise ValueError("compare: give two run folders or more")
    runs, names = [read(folder) for folder in places], short_names(places)
    target = _target(places) if out is None else Path(out)
    shown = picture(runs, names)
    page = fill(
        "comparison.html.j2",
        title=f"Comparison of {', '.join(names)}" if len(names) < 6 else f"Comparison of {len(names)} runs",
        facts="",
        runs=[(name, title(run), os.path.relpath(run.folder, target)) for name, run in zip(names, runs, strict=True)],
        figures=["comparison.png"],
        failures={
            f"{label} · {name}": why
            for name, run in zip(names, runs, strict=True)
            for label, why in run.failures.items()
        },
        claims=claims(target),
        differences=differences(runs),
        names=names,
        **curves(shown, table(shown, runs, names), "comparison"),
    )
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / "comparison.png", plots.draw(shown, shown.axes[0]))
    return write_whole(target / "comparison.html", page)


def csv(folders: Sequence[str | Path]) -> str:
    """Give the points of all curves of these run folders as CSV, labelled as on the page."""
    places = distinct(folders)
    return csv_text(picture([read(folder) for folder in places], short_names(places)))


def latex(folders: Sequence[str | Path]) -> str:
    """Give the final values of these run folders as a LaTeX table, labelled as on the page."""
    places = distinct(folders)
    runs, names = [read(folder) for folder in places], short_names(places)
    return latex_text(table(picture(runs, names), runs, names))


def differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """List the keys whose values differ, with the value in every run; `–` where a run does not have the key.

    >>> runs = [RecordedRun(Path("a"), {"rounds": n, "cohort": 4}, {}, {}, [], {}, [], [], {}) for n in (10, 20)]
    >>> differences(runs)
    [('rounds', ['10', '20'])]
    """
    configs = [dict(run.config) for run in runs]
    tables: list[dict[str, Any]] = []
    for config in configs:
        own = config.pop("algorithms", {})
        tables.append(own if isinstance(own, dict) else {})
    common = {label for label in tables[0] if all(label in own for own in tables)}
    found = [dict(flat(config)) for config in configs]
    for values, own in zip(found, tables, strict=True):
        # All the words of an algorithm that one run does not have would hide what differs elsewhere.
        values |= {f"algorithms.{label}": "yes" for label in own if label not in common}
        values |= flat({label: words for label, words in own.items() if label in common}, "algorithms")
    keys = dict.fromkeys(key for values in found for key in values)
    rows = [(key, [values.get(key, "–") for values in found]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def distinct(folders: Sequence[str | Path]) -> list[Path]:
    """Give the folders in their order, each once.

    >>> [folder.name for folder in distinct(["a", "b", "./a"])]
    ['a', 'b']
    """
    return list({Path(folder).resolve(): Path(folder) for folder in folders})


def short_names(folders: Sequence[Path]) -> list[str]:
    """Name each folder by its last part, by more of its path where these are the same.

    >>> short_names([Path("/runs/a"), Path("/runs/b")]), short_names([Path("/x/a"), Path("/y/a")])
    (['a', 'b'], ['x/a', 'y/a'])
    """
    names = [folder.name for folder in folders]
    if len(set(names)) == len(names):
        return names
    top = os.path.commonpath([folder.parent for folder in folders])
    return [folder.relative_to(top).as_posix() for folder in folders]


def _target(folders: Sequence[Path]) -> Path:
    top = Path(os.path.commonpath([folder.parent for folder in folders]))
    if top == top.parent:
        raise ValueError(f"the folders have nothing but {top} in common; say with --out where to write the comparison")
    return top
