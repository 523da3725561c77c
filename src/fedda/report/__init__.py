"""The report of run folders: files in, `report.html` and figures out; nothing here imports torch.

The module itself can be called, `fedda.report({"FedDA": result}, out="page.html")`, for results of `fedda.train`.

Every function takes the path of a folder, or a run that was read already. `Report` holds the picture and the tables of
some runs, made once, for a page, a comparison, CSV and LaTeX.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..extras import needed_for
from ..files import write_whole
from ..runs import final_values
from ..runs.reading import RecordedRun, from_histories
from ..runs.sweeps import is_sweep

with needed_for("a report"):
    from .pages import Place, Report, as_run
    from .sweep import write_sweep

__all__ = [
    "RecordedRun",
    "Report",
    "compare",
    "csv",
    "is_sweep",
    "latex",
    "summary",
    "write",
    "write_results",
    "write_sweep",
]


def write(run: Place) -> Path:
    """Write `report.html` and its figures into the folder of a run or of a sweep, and return the path of the page.

    Args:
        run: the path of a folder that `fedda run` or `fedda sweep` wrote, or a run that was read already.
    """
    if not isinstance(run, RecordedRun) and is_sweep(run):
        return write_sweep(run)
    return Report.of([run]).write()


def compare(runs: Sequence[Place], out: str | Path | None = None) -> Path:
    """Write `comparison.html` and `comparison.png`, and return the path of the page.

    Args:
        runs: paths of run folders, or runs that were read already.
        out: the folder of the page; by default the common parent of the folders.
    """
    return Report.of(runs).write_comparison(out)


def csv(runs: Sequence[Place]) -> str:
    """Every point of every curve of these runs as CSV, labelled as on the page.

    Args:
        runs: paths of run folders, or runs that were read already.
    """
    return Report.of(runs).csv


def latex(runs: Sequence[Place]) -> str:
    """The final values of these runs as a LaTeX table, labelled as on the page.

    Args:
        runs: paths of run folders, or runs that were read already.
    """
    return Report.of(runs).latex


def summary(run: Place) -> list[dict[str, Any]]:
    """One dict per algorithm with its final values, as `runs.final_values.summary` makes it.

    Args:
        run: the path of a run folder, or a run that was read already.
    """
    return final_values.summary(as_run(run))


def write_results(results: Mapping[str, Any], out: str | Path = "report.html", title: str = "") -> Path:
    """Write the report of results of `fedda.train`, by label, as one page without other files; return its path.

    Args:
        results: results of `fedda.train` by label.
        out: the file of the page.
        title: its title; by default the number of methods and of clients.
    """
    if not isinstance(results, Mapping) or not results:
        raise ValueError(f"report: give results by name, such as {{'FedDA': result}}, got {type(results).__name__}")
    for label, result in results.items():
        if not isinstance(label, str) or not hasattr(result, "history"):
            raise ValueError(f"report: {label!r} must be a name with a result of fedda.train, got {result!r:.60}")
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"report: out must be the file of the page, such as 'page.html', got the folder {path}")
    if not path.parent.is_dir():
        raise ValueError(f"report: {path}: the folder {path.parent} does not exist")
    histories = {label: list(result.history) for label, result in results.items()}
    clients = {label: list(result.clients) for label, result in results.items()}
    problems = [result.run.problem for result in results.values()]
    params = {label: _params(result.run) for label, result in results.items()}
    config: dict[str, Any] = {"name": title or _title(list(results), problems), "algorithms": params}
    for key, values in {
        "rounds": [max(row["round"] for row in rows) for rows in histories.values()],
        "seeds": [sorted({row["seed"] for row in rows}) for rows in histories.values()],
    }.items():
        if all(value == values[0] for value in values):
            config[key] = values[0]
    run = from_histories(histories, clients, _facts(problems), config, path.parent)
    return write_whole(path, Report([run]).page(figures=False))


def _params(run: Any) -> dict[str, Any]:
    """The hyper-parameters of a run that a page can show, its penalty, and its problem."""
    params = {key: value for key, value in vars(run.algorithm).items() if isinstance(value, int | float | str)}
    penalty = vars(run.algorithm).get("prox")
    if penalty is not None and not penalty.identity:
        params["prox"] = _short(penalty)
    return params | {"problem": _describe(run.problem)}


def _short(penalty: Any) -> str:
    """A penalty with the fields that differ from their defaults."""
    if not is_dataclass(penalty):
        return str(penalty)
    changed = [f for f in fields(penalty) if f.repr and not _same(getattr(penalty, f.name), f.default)]
    return f"{type(penalty).__name__}({', '.join(f'{f.name}={getattr(penalty, f.name)}' for f in changed)})"


def _same(value: Any, default: Any) -> bool:
    """Whether a field has its default; a tensor has not."""
    return isinstance(value, int | float | str | None) and value == default


def _describe(problem: Any) -> str:
    """The data of a problem: results on other data are not drawn into one panel."""
    return f"{problem.clients} clients, {int(problem.sizes.sum()):,} samples"


def _title(labels: Sequence[str], problems: Sequence[Any]) -> str:
    same = len({problem.clients for problem in problems}) == 1
    where = f" over {problems[0].clients:,} clients" if same else ""
    return f"{labels[0] if len(labels) == 1 else f'{len(labels)} methods'}{where}"


def _facts(problems: Sequence[Any]) -> dict[str, Any]:
    """What environment.json says about the problem of a run: metrics, clients and classes."""
    facts: dict[str, Any] = {}
    if directions := {name: better for problem in problems for name, better in problem.directions.items()}:
        facts["metrics"] = directions
    first = problems[0]
    if len({(_describe(problem), problem.fingerprint) for problem in problems}) == 1:
        facts |= {"clients": first.clients, "samples": int(first.sizes.sum())}
        if counts := first.class_counts():
            facts["partition"] = [" ".join(map(str, row)) for row in counts]
            facts |= {"classes": list(first.class_names)} if first.class_names else {}
    return facts


class _Callable(ModuleType):
    __call__ = staticmethod(write_results)

    def __dir__(self) -> list[str]:
        return sorted(__all__)


sys.modules[__name__].__class__ = _Callable
