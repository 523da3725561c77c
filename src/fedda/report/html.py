"""`report.html`: one self-contained page a run, with its figures beside it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedda.report import format, plots, style
from fedda.report.curves import Array, Curve
from fedda.report.read import Run, read
from fedda.report.summary import summary

HERE = Path(__file__).parent
POINTS = 500  # a curve on the page: more than its panel has pixels


def write(folder: str | Path) -> Path:
    r"""Write `report.html` and its PNG files into a run folder, each atomically, and give the page's path.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.toml").write_text("[algorithms.fedavg]\nlr = 0.1\n")
    >>> row = {"algorithm": "fedavg", "seed": 0, "round": 0, "train_loss": 2.5}
    >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    >>> write(folder).name
    'report.html'
    """
    run = read(folder)
    for axis in style.axes(run):
        if axis.file:
            _replace(run.folder / axis.file, plots.draw(run, axis))
    page = run.folder / "report.html"
    _replace(page, render(run).encode())
    return page


def render(run: Run) -> str:
    """Give the page of `run` as text.

    >>> render(Run(Path("a"), {"title": "1 < 2"}, {}, {}, [], {}, [], [], {})).count("<h1>1 &lt; 2</h1>")
    1
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    config = dict(run.config)
    algorithms = config.pop("algorithms", {})
    axes = style.axes(run)
    return environment.get_template("page.html.j2").render(
        title=str(config.get("title") or config.get("name") or run.folder.name),
        facts=" · ".join(_facts(config)),
        band=plots.band(run),
        data=_embed(_payload(run, axes)),
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        js=Markup("\n".join((HERE / name).read_text(encoding="utf-8") for name in ("scale.js", "page.js"))),
        axes=axes,
        files=[axis.file for axis in axes if axis.file],
        columns=_columns(run),
        table=_table(run),
        failures=run.failures,
        algorithms={label: ", ".join(f"{k} = {v}" for k, v in _flat(own)) for label, own in algorithms.items()},
        config=list(_flat(config)),
        environment=list(_flat(run.environment)),
    )


def _facts(config: dict[str, Any]) -> Iterator[str]:
    problem = config.get("problem") if isinstance(config.get("problem"), dict) else {}
    assert isinstance(problem, dict)
    if "data" in problem:
        yield f"data {problem['data']}"
    if "clients" in problem:
        yield f"{problem['clients']} clients"
    if "cohort" in config:
        yield f"cohort of {config['cohort']}"
    if "rounds" in config:
        yield f"{config['rounds']} rounds"
    seeds = config.get("seeds")
    if isinstance(seeds, list):
        yield f"{len(seeds)} seed{'s' * (len(seeds) != 1)} ({', '.join(map(str, seeds))})"


def _columns(run: Run) -> list[str]:
    best = ["Best test accuracy"] if "test_accuracy" in run.metrics else []
    return [*(style.metric(m).name for m in run.metrics), *best, "Gradients", "Up", "Down", "Dropped", "Time"]


def _table(run: Run) -> list[dict[str, Any]]:
    finals = summary(run)
    asked, seeds = run.config.get("rounds"), run.config.get("seeds")
    measured = [*run.metrics, *(["best_test_accuracy"] if "test_accuracy" in run.metrics else [])]
    best: dict[str, float | None] = {}
    for key in measured:
        values = [final[key] for final in finals if final[key] is not None]
        better = style.metric(key).better
        # One algorithm alone is not the best of anything.
        best[key] = {"lower": min, "higher": max}[better](values) if better and len(values) > 1 else None
    table = []
    for i, final in enumerate(finals):
        cells = []
        for key in measured:
            text = format.spread(final[key], final[f"{key}_std"], style.metric(key).percent)
            cells.append((text, best[key] is not None and final[key] == best[key]))
        for key, write_count in (
            ("gradients", format.count),
            ("bytes_up", format.size),
            ("bytes_down", format.size),
            ("dropped", format.count),
            ("seconds", format.duration),
        ):
            cells.append((write_count(final[key]), False))
        colour, dash = style.pen(i)
        done, n, lost = final["rounds"], final["seeds"], final["diverged"]
        table.append(
            {
                "label": final["label"],
                "colour": colour,
                "dash": " ".join(map(str, dash)),
                "rounds": "–" if done is None else f"{done} of {asked}" if asked not in (None, done) else f"{done}",
                "seeds": f"{n} of {len(seeds)}" if isinstance(seeds, list) and len(seeds) != n else f"{n}",
                "note": "failed" if final["failure"] else f"{lost} of {n} seeds diverged" if lost else "",
                "cells": cells,
            }
        )
    return table


def _payload(run: Run, axes: list[style.Axis]) -> dict[str, Any]:
    algorithms = []
    for i, label in enumerate(run.labels):
        own = run.curves.get(label)
        if own:
            colour, dash = style.pen(i)
            curves = [_points(own[m], axes) if m in own else None for m in run.metrics]
            algorithms.append({"label": label, "colour": colour, "dash": " ".join(map(str, dash)), "curves": curves})
    metrics = [vars(style.metric(m)) for m in run.metrics]
    return {"axes": [vars(axis) for axis in axes], "metrics": metrics, "algorithms": algorithms}


def _points(curve: Curve, axes: list[style.Axis]) -> dict[str, list[float | None]]:
    size = len(curve.round)
    keep = np.unique(np.linspace(0, size - 1, min(size, POINTS)).round().astype(int))

    def short(values: Array) -> list[float | None]:
        # Beyond 1e300 the page's own arithmetic would overflow.
        return [float(f"{v:.6g}") if abs(v) < 1e300 else None for v in values[keep].tolist()]

    columns = {axis.key: short(getattr(curve, axis.key) / axis.scale) for axis in axes}
    return columns | {"mean": short(curve.mean), "std": short(curve.std), "seeds": short(curve.seeds)}


def _embed(value: object) -> Markup:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # Inside <script> only `<` can end the element or open a comment; JSON may write it as an escape.
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
