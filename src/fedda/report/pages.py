"""The pages: `report.html` of one run, `comparison.html` of several, each self-contained with its figures beside it."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_whole
from ..runs.curves import Array, Row, number
from ..runs.names import CONFIG, REPORT, slug
from ..runs.reading import RecordedRun, read_run
from . import plots, style
from .claims import read_verdicts
from .clients import client_section
from .export import csv_text, latex_text, packed
from .picture import Dash, Picture, Series, file_name, flat, picture
from .ranking import HEADLINE, problem_groups, sentences
from .tables import COSTS, Table, table

WEB = Path(__file__).parent / "web"
SCRIPTS = ("vendor/uPlot.iife.min.js", "data.js", "chart.js", "files.js", "tables.js", "page.js")  # in this order
LICENCE = "vendor/uPlot.LICENSE"  # it must go with every copy
STYLES = ("vendor/uPlot.min.css", "page.css")
POINTS = 500  # of a curve on the page: about as many as a panel has pixels

NOT_SHOWN = ("changed", "partition", "classes", "metrics")  # keys of environment.json that other parts of the page show

Place = str | Path | RecordedRun


def as_run(place: Place) -> RecordedRun:
    return place if isinstance(place, RecordedRun) else read_run(place)


@dataclass(frozen=True, eq=False)
class Report:
    """The report of one run or of several; its parts are made once, on first use.

    Args:
        runs: the runs, as `fedda.runs.reading.read_run` reads them.
    """

    runs: list[RecordedRun]

    @classmethod
    def of(cls, places: Sequence[Place]) -> Report:
        """The report of run folders, or of runs that were read already; each folder counts once.

        Args:
            places: paths of run folders, or runs that were read already.
        """
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
        return table(self.picture, self.runs)

    @cached_property
    def csv(self) -> str:
        return csv_text(self.picture)

    @cached_property
    def latex(self) -> str:
        return latex_text(self.table)

    def write(self, figures: Sequence[str] = ()) -> Path:
        """Write `report.html` and its figures into the folder of the only run, and return the path of the page.

        Args:
            figures: other kinds of figures beside PNG: "svg", "pdf".
        """
        (run,) = self.runs
        page = self.page()  # before any file is written: a malformed claims.json leaves the folder unchanged
        for axis in self.picture.axes:
            if axis.figure:
                self._draw(run.folder / f"curves-{axis.figure}", axis, figures)
        return write_whole(run.folder / REPORT, page)

    def _draw(self, path: Path, axis: style.Axis, kinds: Sequence[str]) -> None:
        for kind in dict.fromkeys(("png", *kinds)):
            write_whole(path.with_name(f"{path.name}.{kind}"), plots.draw(self.picture, axis, kind))

    def page(self, figures: bool = True, live: str | None = None) -> str:
        """The page of the only run as text.

        Args:
            figures: whether the page links to pictures beside it.
            live: the version of the folder, on the page of a server that shows a run while it goes on.
        """
        (run,) = self.runs
        config = {key: value for key, value in run.config.items() if key != "algorithms"}
        return fill(
            "page.html.j2",
            title=run.title,
            facts=" · ".join(facts(config, run.environment)),
            live=live,
            figures=[f"curves-{axis.figure}.png" for axis in self.picture.axes if axis.figure and figures],
            clients=client_section(run, self.picture),
            failures=run.failures,
            claims=read_verdicts(run.folder),
            algorithms=[(label, *_changed_first(run, label)) for label in run.table("algorithms")],
            config=_settings(run, config),
            environment=[(key, value) for key, value in flat(run.environment) if key.split(".")[0] not in NOT_SHOWN],
            repeat=repeat_command(run) if run.config.get("problem") else "",
            **self._panels(slug(run.folder.resolve().name)),
        )

    def write_comparison(self, out: str | Path | None = None, figures: Sequence[str] = ()) -> Path:
        """Write `comparison.html` and `comparison.png` into `out`, by default the common parent of the folders.

        Args:
            out: the folder of the page; by default the common parent of the folders.
            figures: other kinds of figures beside PNG: "svg", "pdf".
        """
        if len(self.runs) < 2:
            raise ValueError("compare: give two run folders or more")
        target = common_parent([run.folder.resolve() for run in self.runs]) if out is None else Path(out)
        named = list(zip(self.names, self.runs, strict=True))
        names = self.names
        page = fill(
            "comparison.html.j2",
            title=f"Comparison of {', '.join(names)}" if len(names) < 6 else f"Comparison of {len(names)} runs",
            facts="",
            live=None,
            runs=[(name, run.title, os.path.relpath(run.folder.resolve(), target)) for name, run in named],
            figures=["comparison.png"],
            failures={f"{label} · {name}": why for name, run in named for label, why in run.failures.items()},
            claims=read_verdicts(target),
            differences=differences(self.runs),
            names=names,
            **self._panels("comparison"),
        )
        target.mkdir(parents=True, exist_ok=True)
        self._draw(target / "comparison", self.picture.axes[0], figures)
        return write_whole(target / "comparison.html", page)

    def _panels(self, name: str) -> dict[str, Any]:
        """What the templates need for panels and tables; `name` begins the names of the files that the page saves."""
        files = {"csv": packed(self.csv), "tex": packed(self.latex)}
        data = curve_data(self.picture, [self.runs[s.run].rows_of(s.own) for s in self.picture.series])
        return {
            "axes": self.picture.axes,
            "band": plots.band(self.picture),
            "lead": sentences(self.picture, self.runs),
            "goals": [data["metrics"][goal["metric"]]["name"] for goal in data["goals"]],
            "data": embed({"name": name, **data, "files": files}),
            "table": self.table,
            "costs": [head for head, _, _ in COSTS],
            "logs": any(panel["log"] for panel in data["panels"]),
        }


def _changed_first(run: RecordedRun, label: str) -> tuple[str, str]:
    """The hyper-parameters of an algorithm as two texts: those that differ from the defaults, and the rest."""
    changed = run.changed
    texts: tuple[list[str], list[str]] = ([], [])
    for key, value in flat(run.params(label)):
        texts[f"algorithms.{label}.{key.split('.')[0]}" not in changed].append(f"{key} = {value}")
    return ", ".join(texts[0]), ", ".join(texts[1])


def _settings(run: RecordedRun, config: dict[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The other settings, those that differ from the defaults and the rest; empty ones are left out."""
    rows: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for key, value in flat(config):
        if value not in ("", "None") and key not in ("name", "title"):
            rows[key not in run.changed].append((key, value))
    return rows


def repeat_command(run: RecordedRun) -> str:
    """The command that repeats a run from its folder into another one."""
    folder = run.folder
    return shlex.join(["fedda", "run", str(folder / CONFIG), "--out", f"{folder}-again"])


def fill(template: str, **values: Any) -> str:
    """Fill a template of the folder `web`; values are escaped unless they are marked as safe."""
    environment = Environment(
        loader=FileSystemLoader(WEB), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["dashes"] = dashes
    css, js = (Markup("\n".join((WEB / f).read_text(encoding="utf-8") for f in files)) for files in (STYLES, SCRIPTS))
    js = Markup(f"/*\n{(WEB / LICENCE).read_text(encoding='utf-8')}*/\n") + js
    return environment.get_template(template).render(css=css, js=js, **values)


def curve_data(shown: Picture, rows: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """The data of the page's script: every curve, thinned to what a panel can show; `rows` are those of each series."""
    axes, metrics = shown.axes, [m for line in shown.lines for m in line]
    drawn = [(s, own) for s, own in zip(shown.series, rows, strict=True) if s.curves]
    labels = [s.label for s, _ in drawn]
    described = [shown.metric(m) for m in metrics]
    return {
        "axes": [vars(axis) | {"end": _end(axis, shown)} for axis in axes],
        "metrics": [vars(one) for one in described],
        "rows": shown.rows,
        "panels": [
            panel_data(shown, row, metric, i, len(shown.rows) > 1)
            for row in range(len(shown.rows))
            for i, metric in enumerate(metrics)
            if any(metric in s.curves for s in shown.series if s.row == row)
        ],
        "series": [_series(s, own, metrics, axes) for s, own in drawn],
        "entries": [vars(entry) for entry in shown.entries],
        "groups": [
            (title, [labels.index(s.label) for s in group if s.label in labels])
            for title, group in problem_groups(shown)
        ],
        "goals": list(_goals(shown, metrics)),
    }


def panel_data(shown: Picture, row: int, metric: str, index: int, several: bool) -> dict[str, Any]:
    """One panel: its place, its title, the limits of its y axis and the names of the curves that end outside."""
    data, name = shown.data[row], shown.metric(metric).name
    ends, series = shown.limits(data, metric), shown.on(data, metric)
    return {
        "key": f"{metric}-{row + 1}" if several else metric,
        "row": row,
        "metric": index,
        "title": f"{name}, {shown.rows[row]}" if shown.rows[row] else name,
        "linear": ends.linear,
        "log": ends.log,
        "preferLog": ends.prefer_log,
        "outside": [series[i].label for i in ends.outside],
    }


def _end(axis: style.Axis, shown: Picture) -> float:
    tops = [float(np.nanmax(getattr(c, axis.key), initial=0.0)) for s in shown.series for c in s.curves.values()]
    return max(tops, default=0.0) / axis.scale or 1.0


def _goals(shown: Picture, metrics: list[str]) -> Iterator[dict[str, Any]]:
    """The metrics for "how long until ...": each with a first target, which most methods reach, and its range."""
    order = sorted(metrics, key=lambda key: HEADLINE.index(key) if key in HEADLINE else len(HEADLINE))
    for key in order:
        i, metric = metrics.index(key), shown.metric(key)
        if not metric.better or not key.startswith(("train", "test", "validation", "objective")):
            continue
        higher = metric.better == "higher"
        means = [s.curves[key].mean for s in shown.series if key in s.curves]
        means = [mean[np.isfinite(mean)] for mean in means if np.isfinite(mean).any()]
        if not means:
            continue
        best = sorted(float(mean.max() if higher else mean.min()) for mean in means)
        reached = best[len(best) // 4] if higher else best[-1 - len(best) // 4]  # by three quarters of the methods
        whole = np.concatenate([mean[1:] if mean.size > 1 else mean for mean in means])
        step = 0.01 if metric.percent else 10 ** math.floor(math.log10(abs(reached) or 1.0)) / 10
        value = (math.floor(reached / step) if higher else math.ceil(reached / step)) * step
        low, high = float(whole.min()), float(whole.max())
        yield {"metric": i, "value": float(f"{value:.6g}"), "low": min(low, value), "high": max(high, value)}


def _series(series: Series, rows: Sequence[Row], metrics: list[str], axes: list[style.Axis]) -> dict[str, Any]:
    tables: dict[tuple[float, ...], int] = {}
    xs: list[dict[str, list[float | None]]] = []
    by_seed: dict[int, dict[int, Row]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], {})[row["round"]] = row
    curves: list[dict[str, Any] | None] = []
    for metric in metrics:
        curve = series.curves.get(metric)
        if curve is None:
            curves.append(None)
            continue
        size = len(curve.round)
        keep = np.unique(np.linspace(0, size - 1, min(size, POINTS)).round().astype(int))
        rounds = tuple(curve.round[keep].tolist())
        if rounds not in tables:
            tables[rounds] = len(xs)
            xs.append({axis.key: _short(getattr(curve, axis.key)[keep] / axis.scale) for axis in axes})
        seeds = [np.array([number(own.get(int(r), {}).get(metric)) for r in rounds]) for own in by_seed.values()]
        curves.append(
            {
                "x": tables[rounds],
                "mean": _short(curve.mean[keep]),
                "std": _short(curve.std[keep]),
                "seeds": [_short(values, 4) for values in seeds] if len(seeds) > 1 else [],
            }
        )
    return {
        "label": series.label,
        "name": series.name,
        "row": series.row,
        "colour": series.colour,
        "dash": series.dash,
        "entries": series.entries,
        "x": xs,
        "curves": curves,
    }


def _short(values: Array, digits: int = 6) -> list[float | None]:
    # Beyond 1e300 the arithmetic of the page's script would overflow.
    return [float(f"{v:.{digits}g}") if abs(v) < 1e300 else None for v in values.tolist()]


def embed(value: object) -> Markup:
    """A value as packed JSON that may stand in a script element."""
    return Markup(packed(json.dumps(value, allow_nan=False, separators=(",", ":"))))


def dashes(dash: Dash) -> str:
    """A dash pattern as SVG writes it."""
    return " ".join(map(str, dash))


def facts(config: dict[str, Any], environment: dict[str, Any]) -> Iterator[str]:
    """The experiment in short.

    >>> list(facts({"problem": {"data": "/data/houses.csv"}, "rounds": 40, "seeds": [0]}, {"clients": 8}))
    ['data houses.csv', '8 clients', '40 rounds', '1 seed (0)']
    """
    problem, wrappers, seeds = config.get("problem"), config.get("aggregation"), config.get("seeds")
    problem = problem if isinstance(problem, dict) else {}
    if "data" in problem:
        yield f"data {file_name(str(problem['data']))}"
    if clients := problem.get("clients") or environment.get("clients"):
        yield f"{clients} clients"
    if "cohort" in config:
        yield f"cohort of {config['cohort']}"
    if isinstance(wrappers, list):
        yield f"aggregation {', '.join(str(one.get('name')) for one in wrappers if isinstance(one, dict))}"
    if "rounds" in config:
        yield f"{config['rounds']} rounds"
    if isinstance(seeds, list):
        yield f"{len(seeds)} seed{'s' * (len(seeds) != 1)} ({', '.join(map(str, seeds))})"


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
