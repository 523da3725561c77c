"""`report.html`: one self-contained page a run, with its figures beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedda.files import write_whole
from fedda.report import plots
from fedda.report.claims import claims
from fedda.report.payload import dashes, embed, payload
from fedda.report.picture import Picture, picture
from fedda.report.tables import COSTS, Table, table
from fedda.runs.names import slug
from fedda.runs.reading import RecordedRun, read

WEB = Path(__file__).parent / "web"
SCRIPTS = ("scale.js", "chart.js", "readout.js", "zoom.js", "controls.js")  # in the order of their use


def write_run(folder: str | Path) -> Path:
    r"""Write `report.html` and its PNG files into a run folder, each atomically, and give the page's path.

    >>> import json, tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.toml").write_text("[algorithms.fedavg]\nlr = 0.1\n")
    >>> row = {"algorithm": "fedavg", "seed": 0, "round": 0, "train_loss": 2.5}
    >>> _ = (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    >>> write_run(folder).name
    'report.html'
    """
    run = read(folder)
    page = render(run)  # before any file is written: a malformed claims.json leaves the folder as it was
    shown = picture([run])
    for axis in shown.axes:
        if axis.figure:
            write_whole(run.folder / f"curves-{axis.figure}.png", plots.draw(shown, axis))
    return write_whole(run.folder / "report.html", page)


def render(run: RecordedRun) -> str:
    """Give the page of `run` as text.

    >>> render(RecordedRun(Path("a"), {"title": "1 < 2"}, {}, {}, [], {}, [], [], {})).count("<h1>1 &lt; 2</h1>")
    1
    """
    config = dict(run.config)
    asked = config.pop("algorithms", {})
    algorithms = asked if isinstance(asked, dict) else {}
    shown = picture([run])
    return fill(
        "page.html.j2",
        title=title(run),
        facts=" · ".join(facts(config)),
        figures=[f"curves-{axis.figure}.png" for axis in shown.axes if axis.figure],
        failures=run.failures,
        claims=claims(run.folder),
        algorithms={label: ", ".join(f"{k} = {v}" for k, v in flat(own)) for label, own in algorithms.items()},
        config=list(flat(config)),
        environment=list(flat(run.environment)),
        **curves(shown, table(shown, [run]), slug(run.folder.resolve().name)),
    )


def curves(shown: Picture, found: Table, name: str) -> dict[str, Any]:
    """Give what the templates need for the panels and the tables.

    >>> sorted(curves(Picture([""], [], [], []), Table([], [], [""]), "a"))
    ['axes', 'band', 'costs', 'data', 'js', 'table']
    """
    return {
        "axes": shown.axes,
        "band": plots.band(shown),
        "data": embed(payload(shown, found, name)),
        "table": found,
        "costs": [head for head, _, _ in COSTS],
        "js": Markup("\n".join((WEB / script).read_text(encoding="utf-8") for script in SCRIPTS)),
    }


def fill(template: str, **words: Any) -> str:
    """Fill a template of the folder `web`; what is not marked as safe is escaped.

    >>> "<title>a &amp; b</title>" in fill("base.html.j2", title="a & b", facts="")
    True
    """
    environment = Environment(
        loader=FileSystemLoader(WEB), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["dashes"] = dashes
    return environment.get_template(template).render(
        css=Markup((WEB / "page.css").read_text(encoding="utf-8")), **words
    )


def title(run: RecordedRun) -> str:
    """Give the title of a run, or the name of its folder.

    >>> title(RecordedRun(Path("runs/a"), {}, {}, {}, [], {}, [], [], {}))
    'a'
    """
    return str(run.config.get("title") or run.config.get("name") or run.folder.name)


def facts(config: dict[str, Any]) -> Iterator[str]:
    """Say in a few words what was run.

    >>> list(facts({"problem": {"data": "digits"}, "rounds": 40, "seeds": [0]}))
    ['data digits', '40 rounds', '1 seed (0)']
    """
    problem = config.get("problem") if isinstance(config.get("problem"), dict) else {}
    assert isinstance(problem, dict)
    if "data" in problem:
        yield f"data {problem['data']}"
    if "clients" in problem:
        yield f"{problem['clients']} clients"
    if "cohort" in config:
        yield f"cohort of {config['cohort']}"
    tables = config.get("aggregation")
    if isinstance(tables, list):
        yield f"aggregation {', '.join(str(own.get('name')) for own in tables if isinstance(own, dict))}"
    if "rounds" in config:
        yield f"{config['rounds']} rounds"
    seeds = config.get("seeds")
    if isinstance(seeds, list):
        yield f"{len(seeds)} seed{'s' * (len(seeds) != 1)} ({', '.join(map(str, seeds))})"


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """List a nested table as dotted keys and texts.

    >>> list(flat({"problem": {"data": "digits", "sizes": [1, 2]}}))
    [('problem.data', 'digits'), ('problem.sizes', '1, 2')]
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
