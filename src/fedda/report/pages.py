"""The pages: `report.html` of one run, `comparison.html` of several, each self-contained with its figures beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_whole
from ..runs.curves import Array, Curve
from ..runs.names import REPORT, slug
from ..runs.reading import RecordedRun, read_run
from . import plots, style
from .claims import read_verdicts
from .clients import client_section
from .export import csv_text, latex_text, packed
from .picture import Dash, Picture, picture
from .tables import COSTS, Table, table

WEB = Path(__file__).parent / "web"
SCRIPTS = ("scale.js", "chart.js", "readout.js", "zoom.js", "controls.js")  # in the order of their use
POINTS = 500  # of a curve on the page: more than a panel has pixels

Place = str | Path | RecordedRun


def as_run(place: Place) -> RecordedRun:
    return place if isinstance(place, RecordedRun) else read_run(place)


@dataclass(frozen=True, eq=False)
class Report:
    """The report of one run or of several; its parts are made once, on first use."""

    runs: list[RecordedRun]

    @classmethod
    def of(cls, places: Sequence[Place]) -> Report:
        """The report of run folders, or of runs that were read already; each folder counts once."""
        distinct = {(p.folder if isinstance(p, RecordedRun) else Path(p)).resolve(): p for p in places}
        return cls([as_run(place) for place in distinct.values()])

    @cached_property
    def names(self) -> list[str]:
        return short_names([run.folder.resolve() for run in self.runs])

    @cached_property
    def picture(self) -> Picture:
        return picture(self.runs, self.names)

    @cached_property
    def table(self) -> Table:
        return table(self.picture, self.runs, self.names)

    @cached_property
    def csv(self) -> str:
        return csv_text(self.picture)

    @cached_property
    def latex(self) -> str:
        return latex_text(self.table)

    def write(self) -> Path:
        """Write `report.html` and its PNG files into the folder of the only run, and return the path of the page."""
        (run,) = self.runs
        page = self.page()  # before any file is written: a malformed claims.json leaves the folder unchanged
        for axis in self.picture.axes:
            if axis.figure:
                write_whole(run.folder / f"curves-{axis.figure}.png", plots.draw(self.picture, axis))
        return write_whole(run.folder / REPORT, page)

    def page(self, figures: bool = True) -> str:
        """The page of the only run as text; `figures`: whether PNG files are beside it."""
        (run,) = self.runs
        config = {key: value for key, value in run.config.items() if key != "algorithms"}
        return fill(
            "page.html.j2",
            title=run.title,
            facts=" · ".join(facts(config)),
            figures=[f"curves-{axis.figure}.png" for axis in self.picture.axes if axis.figure and figures],
            clients=client_section(run, self.picture),
            failures=run.failures,
            claims=read_verdicts(run.folder),
            algorithms={
                label: ", ".join(f"{k} = {v}" for k, v in flat(params))
                for label, params in run.table("algorithms").items()
            },
            config=[(name, value) for name, value in flat(config) if value != ""],
            environment=list(flat(run.environment)),
            **self._panels(slug(run.folder.resolve().name)),
        )

    def write_comparison(self, out: str | Path | None = None) -> Path:
        """Write `comparison.html` and `comparison.png` into `out`, by default the common parent of the folders."""
        if len(self.runs) < 2:
            raise ValueError("compare: give two run folders or more")
        target = common_parent([run.folder.resolve() for run in self.runs]) if out is None else Path(out)
        named = list(zip(self.names, self.runs, strict=True))
        names = self.names
        page = fill(
            "comparison.html.j2",
            title=f"Comparison of {', '.join(names)}" if len(names) < 6 else f"Comparison of {len(names)} runs",
            facts="",
            runs=[(name, run.title, os.path.relpath(run.folder.resolve(), target)) for name, run in named],
            figures=["comparison.png"],
            failures={f"{label} · {name}": why for name, run in named for label, why in run.failures.items()},
            claims=read_verdicts(target),
            differences=differences(self.runs),
            names=names,
            **self._panels("comparison"),
        )
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / "comparison.png", plots.draw(self.picture, self.picture.axes[0]))
        return write_whole(target / "comparison.html", page)

    def _panels(self, name: str) -> dict[str, Any]:
        """What the templates need for panels and tables; `name` begins the names of the files that the page saves."""
        files = {"csv": packed(self.csv), "tex": packed(self.latex)}
        return {
            "axes": self.picture.axes,
            "band": plots.band(self.picture),
            "data": embed({"name": name, **curve_data(self.picture), "files": files}),
            "table": self.table,
            "costs": [head for head, _, _ in COSTS],
            "js": Markup("\n".join((WEB / script).read_text(encoding="utf-8") for script in SCRIPTS)),
        }


def fill(template: str, **values: Any) -> str:
    """Fill a template of the folder `web`; values are escaped unless they are marked as safe."""
    environment = Environment(
        loader=FileSystemLoader(WEB), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["dashes"] = dashes
    css = Markup((WEB / "page.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(css=css, **values)


def curve_data(shown: Picture) -> dict[str, Any]:
    """The data of the page's script: every curve, thinned to what a panel can show."""
    axes, metrics = shown.axes, [m for line in shown.lines for m in line]
    series = [
        {
            "label": one.label,
            "row": one.row,
            "colour": one.colour,
            "dash": dashes(one.dash),
            "entries": one.entries,
            "curves": [_points(one.curves[m], axes) if m in one.curves else None for m in metrics],
        }
        for one in shown.series
        if one.curves
    ]
    return {
        "axes": [vars(axis) for axis in axes],
        "metrics": [vars(shown.metric(m)) for m in metrics],
        "lines": [len(line) for line in shown.lines],
        "rows": shown.rows,
        "series": series,
        "entries": [vars(entry) | {"dash": dashes(entry.dash)} for entry in shown.entries],
    }


def _points(curve: Curve, axes: list[style.Axis]) -> dict[str, list[float | None]]:
    size = len(curve.round)
    keep = np.unique(np.linspace(0, size - 1, min(size, POINTS)).round().astype(int))

    def short(values: Array) -> list[float | None]:
        # Beyond 1e300 the arithmetic of the page's script would overflow.
        return [float(f"{v:.6g}") if abs(v) < 1e300 else None for v in values[keep].tolist()]

    columns = {axis.key: short(getattr(curve, axis.key) / axis.scale) for axis in axes}
    return columns | {"mean": short(curve.mean), "std": short(curve.std), "seeds": short(curve.seeds)}


def embed(value: object) -> Markup:
    """A value as JSON that may stand in a script element.

    >>> print(embed({"a": "</script>"}))
    {"a":"\\u003c/script\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # Inside <script> only `<` can end the element or open a comment; JSON may write it as an escape.
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def dashes(dash: Dash) -> str:
    """A dash pattern as SVG writes it."""
    return " ".join(map(str, dash))


def facts(config: dict[str, Any]) -> Iterator[str]:
    """The experiment in short.

    >>> list(facts({"problem": {"data": "digits"}, "rounds": 40, "seeds": [0]}))
    ['data digits', '40 rounds', '1 seed (0)']
    """
    problem, wrappers, seeds = config.get("problem"), config.get("aggregation"), config.get("seeds")
    problem = problem if isinstance(problem, dict) else {}
    if "data" in problem:
        yield f"data {problem['data']}"
    if "clients" in problem:
        yield f"{problem['clients']} clients"
    if "cohort" in config:
        yield f"cohort of {config['cohort']}"
    if isinstance(wrappers, list):
        yield f"aggregation {', '.join(str(one.get('name')) for one in wrappers if isinstance(one, dict))}"
    if "rounds" in config:
        yield f"{config['rounds']} rounds"
    if isinstance(seeds, list):
        yield f"{len(seeds)} seed{'s' * (len(seeds) != 1)} ({', '.join(map(str, seeds))})"


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A nested table as dotted keys and texts.

    >>> list(flat({"problem": {"data": "digits", "sizes": [1, 2]}}))
    [('problem.data', 'digits'), ('problem.sizes', '1, 2')]
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def differences(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str]]]:
    """The keys whose values differ, with the value in every run; `–` if a run does not have the key."""
    tables = [run.table("algorithms") for run in runs]
    common = {label for label in tables[0] if all(label in algorithms for algorithms in tables)}
    columns = []
    for run, algorithms in zip(runs, tables, strict=True):
        values = dict(flat({key: value for key, value in run.config.items() if key != "algorithms"}))
        # The hyper-parameters of an algorithm that one run does not have would hide the other differences.
        values |= {f"algorithms.{label}": "yes" for label in algorithms if label not in common}
        values |= flat({label: params for label, params in algorithms.items() if label in common}, "algorithms")
        columns.append(values)
    rows = [(key, [values.get(key, "–") for values in columns]) for key in dict.fromkeys(k for c in columns for k in c)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or more of it if these are equal.

    >>> short_names([Path("/runs/a"), Path("/runs/b")]), short_names([Path("/x/a"), Path("/y/a")])
    (['a', 'b'], ['x/a', 'y/a'])
    """
    names = [folder.name for folder in folders]
    if len(set(names)) == len(names):
        return names
    top = os.path.commonpath([folder.parent for folder in folders])
    return [folder.relative_to(top).as_posix() for folder in folders]


def common_parent(folders: Sequence[Path]) -> Path:
    top = Path(os.path.commonpath([folder.parent for folder in folders]))
    if top == top.parent:
        raise ValueError(f"the folders have only {top} in common; give the folder of the comparison with --out")
    return top
