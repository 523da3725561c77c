"""The report: aggregation, errors, the page in a real browser."""

import base64
import csv
import doctest
import gzip
import importlib
import io
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib import image

import fedda
from browser import Browser, needs_browser
from commands import inside
from fedda import report
from fedda.report import export, pages, plots, style
from fedda.report.clients import client_sizes, partition
from fedda.report.limits import band, limits
from fedda.report.live import LivePage
from fedda.report.pages import Report, differences
from fedda.report.picture import picture
from fedda.report.ranking import difference, sentences
from fedda.report.sweep import grid
from fedda.runs.curves import Curve
from fedda.runs.metrics import metric as describe_metric
from fedda.runs.reading import RecordedRun, read_run
from fedda.runs.sweeps import read_sweep

PICTURES = True
SOURCE = Path(report.__file__).parent
EVIL = """</script><script>document.title="owned"</script><b id="evil">'"&"""


def synthetic(labels: list[str], seeds: list[int], rounds: int = 100, every: int = 5) -> list[dict[str, Any]]:
    """Rows as a run writes them: losses that decay to a floor, with noise of their own for every seed."""
    rows = []
    for k, label in enumerate(labels):
        for seed in seeds:
            noise = random.Random(f"{label} {seed}")
            for r in range(0, rounds + 1, every):
                loss = 0.05 * (k + 1) + 2.2 * math.exp(-r / (12 + 6 * k)) * math.exp(noise.gauss(0, 0.08))
                accuracy = max(0.1, 1 - 0.4 * loss)
                rows.append(
                    {
                        "algorithm": label,
                        "seed": seed,
                        "round": r,
                        "steps": 5 * r,
                        "gradients": (1 + k % 2) * 50 * r,
                    }
                    | {"bytes_up": 40_000 * r + seed, "bytes_down": 60_000 * r, "dropped": r // 10}
                    | {"train_loss": loss, "train_accuracy": accuracy, "test_loss": 1.1 * loss + 0.05}
                    | {"test_accuracy": max(0.1, accuracy - 0.02 - 0.01 * abs(noise.gauss(0, 1)))}
                )
    return rows


def folder(
    path: Path, rows: list[dict[str, Any]], tables: dict[str, dict[str, Any]] | None = None, **files: str
) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    labels = list(dict.fromkeys(row["algorithm"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    config = f'title = "Heterogeneous digits"\nrounds = 100\nevery = 5\ncohort = 4\nseeds = {seeds}\n'
    config += '[problem]\ndata = "digits"\nclients = 10\npartition = "dominant_class"\nrho = 0.8\n'
    for label in labels:
        config += f"[algorithms.{json.dumps(label)}]\n"
        config += "".join(f"{k} = {json.dumps(v)}\n" for k, v in (tables or {}).get(label, {"lr": 0.02}).items())
        config += 'prox = {kind = "l1", gamma = 0.001}\n'
    clock = [{"algorithm": lb, "round": r, "seconds": r / 40} for lb in labels for r in range(0, 101, 5)]
    (path / "config.toml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clock))
    (path / "environment.json").write_text(json.dumps({"python": "3.11", "torch": "2.9", "device": "cpu"}))
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def test_curves_are_mean_and_deviation_over_seeds(tmp_path):
    rows = synthetic(["fedavg", "fedda-mvr"], [0, 1, 2])
    run = read_run(folder(tmp_path / "run", random.Random(0).sample(rows, len(rows))))
    curve = run.curves["fedda-mvr"]["test_loss"]
    assert curve.round.tolist() == list(range(0, 101, 5))
    for i, r in enumerate(range(0, 101, 5)):
        own = [row for row in rows if row["algorithm"] == "fedda-mvr" and row["round"] == r]
        assert curve.mean[i] == pytest.approx(statistics.fmean(row["test_loss"] for row in own), rel=1e-12)
        assert curve.std[i] == pytest.approx(statistics.stdev(row["test_loss"] for row in own), rel=1e-9)
        assert curve.seeds[i] == 3
        assert curve.gradients[i] == 100 * r
        assert curve.bytes[i] == pytest.approx(100_000 * r + 1)  # the seeds add 0, 1, 2 bytes
        assert curve.seconds[i] == pytest.approx(r / 40)
    assert run.metrics == ["train_loss", "train_accuracy", "test_loss", "test_accuracy"]


def test_summary_holds_final_values(tmp_path):
    rows = synthetic(["fedavg", "fedda-mvr"], [0, 1, 2])
    first, second = report.summary(folder(tmp_path / "run", rows, failures_json='{"stem": "lr must be > 0"}'))[:2]
    last = [row for row in rows if row["algorithm"] == "fedda-mvr" and row["round"] == 100]
    best = [max(r["test_accuracy"] for r in rows if (r["algorithm"], r["seed"]) == ("fedda-mvr", s)) for s in range(3)]
    assert (first["label"], second["label"]) == ("fedavg", "fedda-mvr")
    assert (second["rounds"], second["seeds"], second["diverged"], second["dropped"]) == (100, 3, 0, 10)
    assert second["train_loss"] == pytest.approx(statistics.fmean(row["train_loss"] for row in last))
    assert second["train_loss_std"] == pytest.approx(statistics.stdev(row["train_loss"] for row in last))
    assert second["best_test_accuracy"] == pytest.approx(statistics.fmean(best))
    assert (second["gradients"], second["bytes_up"], second["bytes"]) == (10_000, 4_000_001, 10_000_001)
    assert second["seconds"] == pytest.approx(2.5)
    failed = report.summary(tmp_path / "run")[2]
    assert failed.keys() == first.keys()
    assert (failed["label"], failed["rounds"], failed["train_loss"], failed["seeds"]) == (
        "stem",
        None,
        None,
        0,
    )
    assert failed["failure"] == "lr must be > 0"


def test_one_seed_has_no_band_and_divergence_leaves_a_gap(tmp_path):
    rows = synthetic(["fedavg"], [0])
    curve = read_run(folder(tmp_path / "one", rows)).curves["fedavg"]["train_loss"]
    assert [math.isnan(v) for v in curve.std] == [True] * 21
    assert report.summary(tmp_path / "one")[0]["train_loss_std"] is None

    rows = synthetic(["fedavg"], [0, 1, 2])
    for row in rows:
        if row["seed"] == 1 and row["round"] > 50:
            row["train_loss"] = None
    run = read_run(folder(tmp_path / "gap", rows))
    gap = [math.isnan(v) for v in run.curves["fedavg"]["train_loss"].mean]
    assert gap == [r > 50 for r in range(0, 101, 5)]
    final = report.summary(run)[0]
    assert (final["train_loss"], final["diverged"]) == (None, 1)
    assert final["test_loss"] is not None


def test_a_resumed_run_repeats_rounds_and_the_later_row_counts(tmp_path):
    rows = synthetic(["fedavg"], [0])
    again = [row | {"train_loss": 7.0} for row in rows if row["round"] == 50]
    curve = read_run(folder(tmp_path / "run", rows + again)).curves["fedavg"]["train_loss"]
    assert curve.mean[10] == 7.0 and len(curve.mean) == 21


def test_a_cut_last_line_is_ignored(tmp_path):
    rows = synthetic(["fedavg"], [0])
    path = folder(tmp_path / "run", rows) / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + '{"algorithm": "é'.encode()[:-1])
    assert len(read_run(tmp_path / "run").rows) == len(rows)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f: f / "absent", "absent: no such folder; give the folder that `fedda run` wrote"),
        (lambda f: (f / "metrics.jsonl").unlink(), "metrics.jsonl: not there; give a run folder"),
        (lambda f: (f / "metrics.jsonl").write_text(""), "metrics.jsonl: has no complete row yet"),
        (
            lambda f: (f / "metrics.jsonl").write_text('{}x\n{"a": 1}\n'),
            "metrics.jsonl, line 1: not a JSON object",
        ),
        (
            lambda f: (f / "metrics.jsonl").write_text('{"algorithm": "a"}\n'),
            "line 1: a row needs algorithm (text)",
        ),
        (lambda f: (f / "config.toml").write_text("a = "), "config.toml: not valid TOML"),
        (lambda f: (f / "config.toml").unlink(), "config.toml: not there; give a run folder"),
        (lambda f: (f / "failures.json").write_text("[1]"), "failures.json: not a JSON object"),
    ],
)
def test_bad_folders_are_named_in_one_line(tmp_path, change, line):
    run = folder(tmp_path / "run", synthetic(["fedavg"], [0]))
    changed = change(run)
    with pytest.raises(ValueError) as error:
        report.write(changed if isinstance(changed, Path) else run)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_write_leaves_the_page_and_figures_and_nothing_else(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", synthetic(["fedavg"], [0, 1]))
    before = {p.name for p in run.iterdir()}
    assert report.write(run) == run / "report.html"
    figures = {f"curves-{axis}.png" for axis in ("rounds", "gradients", "bytes")}
    assert {p.name for p in run.iterdir()} - before == {"report.html"} | figures
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in figures)

    old = (run / "report.html").read_bytes()

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        report.write(run)
    assert (run / "report.html").read_bytes() == old
    assert {p.name for p in run.iterdir()} - before == {"report.html"} | figures


def test_the_page_is_self_contained_and_escapes(tmp_path):
    rows = synthetic(["fedavg", EVIL], [0, 1])
    page = report.write(folder(tmp_path / "run", rows, failures_json=json.dumps({EVIL: EVIL}))).read_text()
    assert EVIL not in page and '<b id="evil">' not in page
    assert "&lt;/script&gt;&lt;script&gt;" in page
    assert page.count("<script") == page.count("</script>") == 2
    loads = re.findall(
        r"(?:src|href)=\"([^\"]*)\"|url\(([^)]*)\)|@import", re.sub(r"<script.*?</script>", "", page, flags=re.S)
    )
    assert {a or b for a, b in loads} <= {
        "data:,",
        *(f"curves-{axis}.png" for axis in ("rounds", "gradients", "bytes")),
    }
    assert "The MIT License" in page and "Leon Sorokin" in page  # uPlot's licence goes with it
    assert len(page) < 300_000
    assert "digits · 10 clients · cohort of 4 · 100 rounds · 2 seeds (0, 1)" in page


STRANGE = {
    "one row": [{"algorithm": "a", "seed": 0, "round": 0, "train_loss": 2.0}],
    "constant": [{"algorithm": "a", "seed": 0, "round": r, "train_loss": 1.5} for r in range(5)],
    "zero": [{"algorithm": "a", "seed": 0, "round": r, "train_loss": 0.0} for r in range(5)],
    "negative": [{"algorithm": "a", "seed": s, "round": r, "train_loss": -(10.0**r)} for r in range(5) for s in (0, 1)],
    "huge": [{"algorithm": "a", "seed": s, "round": r, "train_loss": 1e30**r} for r in range(2) for s in (0, 1)],
    "beyond": [{"algorithm": "a", "seed": s, "round": r, "train_loss": 1.7e308} for r in range(3) for s in (0, 1)],
    "tiny": [{"algorithm": "a", "seed": 0, "round": r, "train_loss": 10.0 ** (-30 * r)} for r in range(9)],
    "null": [{"algorithm": "a", "seed": 0, "round": r, "train_loss": None if r % 2 else 1 / (r + 1)} for r in range(9)],
    "dollar": [{"algorithm": lb, "seed": 0, "round": 1, "train_loss": 1.0} for lb in ("$x_{", "_hidden", "")],
    "all null": [{"algorithm": "a", "seed": 0, "round": 0, "train_loss": None}],
    "other metrics": [{"algorithm": "a", "seed": 0, "round": r, "gap": 3.0 - r, "note": "x"} for r in range(3)],
    "twelve": synthetic([f"algorithm {i}" for i in range(12)], [0, 1, 2]),
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("error")
def test_strange_runs_are_drawn_without_a_warning(tmp_path, name):
    assert report.write(folder(tmp_path / "run", STRANGE[name])).exists()


def data_of(page: str) -> dict[str, Any]:
    """What the page's script unpacks."""
    return json.loads(gzip.decompress(base64.b64decode(page.split('id="data">')[1].split("</script>")[0])))


def test_results_of_python_are_compared_with_their_clients(tmp_path):
    """A method without a penalty is compared with one that cannot have any, on a page with the split."""
    x, y = torch.randn(60, 3), torch.arange(60) % 2
    problem = fedda.problem(
        torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, x=x, y=y, client=["Ulm", "Bonn", "Kiel"] * 20
    )
    algorithms = {
        "FedDA": fedda.make("fedda-mvr", lr=0.01, eps=0.1),
        "FedAvg": fedda.make("fedavg", lr=0.1),
        "sparse": fedda.make("fedda-mvr", lr=0.01, eps=0.1, prox=fedda.prox.L1(0.001)),
    }
    results = {name: fedda.train(algorithm, problem, rounds=3, seed=[0, 1]) for name, algorithm in algorithms.items()}
    page = fedda.report(results, out=tmp_path / "page.html").read_text()
    assert "<h1>3 methods over 3 clients</h1>" in page and "3 clients · 3 rounds · 2 seeds (0, 1)" in page
    groups = re.findall(r'<th scope="rowgroup"[^>]*>([^<]*)</th>', page.split('id="values"')[1].split("</table>")[0])
    assert groups == ["no prox", "prox = L1(gamma=0.001)"]
    split = page.split('id="clients"')[1].split("<table")[0]
    assert "3 clients with 20 samples each of 2 classes" in split
    assert all(f">{name}<" in split for name in ("Ulm", "Bonn", "Kiel"))
    assert "<h1>Ours</h1>" in fedda.report(results, out=tmp_path / "page.html", title="Ours").read_text()


def test_clients_without_classes_and_classes_with_names_are_drawn(tmp_path):
    rows = [{"client": name, "samples": n} for name, n in (("Ulm", 12), ("Bonn", 30))]
    run = RecordedRun(clients=rows, environment={})
    assert client_sizes(run) == {"Ulm": 12, "Bonn": 30}
    drawn = partition(np.array([[12], [30]]), ["Ulm", "Bonn"])
    assert ">Ulm<" in drawn and ">class<" not in drawn
    drawn = partition(np.array([[12, 3], [30, 4]]), ["Ulm", "Bonn"], ["no", "yes"])
    assert all(f">{word}<" in drawn for word in ("Ulm", "Bonn", "class", "no", "yes"))
    many = partition(np.ones((40, 2), dtype=int), [f"c{i}" for i in range(40)], ["no", "yes"])
    assert ">c1<" not in many


def test_a_long_curve_is_thinned_on_the_page_with_both_ends_kept(tmp_path):
    rows = [{"algorithm": "a", "seed": 0, "round": r, "train_loss": 1 / (r + 1)} for r in range(3000)]
    page = report.write(folder(tmp_path / "run", rows)).read_text()
    data = data_of(page)
    rounds = data["series"][0]["x"][0]["round"]
    assert len(rounds) <= 500 and (rounds[0], rounds[-1]) == (0, 2999)
    assert len(read_run(tmp_path / "run").curves["a"]["train_loss"].mean) == 3000


def test_a_run_is_read_judged_and_drawn_once(tmp_path, capsys, monkeypatch):
    """`fedda run` hands the folder it has read, its verdicts and its picture on; so does `fedda report`."""
    from fedda.claims import groups
    from fedda.runs import reading

    counts = {}

    def counted(module, name):
        function = getattr(module, name)

        def count(*given, **more):
            counts[name] = counts.get(name, 0) + 1
            return function(*given, **more)

        monkeypatch.setattr(module, name, count)

    for module, name in (
        (reading, "read_rows"), (reading, "aggregate"), (groups, "judge_one_run"), (pages, "picture"), (pages, "table"),
    ):  # fmt: skip
        counted(module, name)
    run = ["digits-heterogeneous", "--rounds", "2", "--algorithms", "fedavg,stem", "--threads", "1", "--overwrite"]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        counts.clear()
        code, stdout, stderr = inside(capsys, monkeypatch, "run", *run, "--out", folder, "--serve", "--port", "0")
        assert code == 0 and "page: http://127.0.0.1:" in stdout, stderr
        recorded = json.loads((folder / "environment.json").read_text())
        assert sum(int(n) for line in recorded["partition"] for n in line.split()) == recorded["samples"]
        assert "algorithms.stem.lr" in recorded["changed"] and "algorithms.stem.steps" not in recorded["changed"]
        assert counts == {"read_rows": 1, "aggregate": 1, "judge_one_run": 1, "picture": 1, "table": 1}
    counts.clear()
    code, _, stderr = inside(
        capsys, monkeypatch, "report", *folders, "--csv", tmp_path / "c", "--latex", tmp_path / "t"
    )
    assert code == 0, stderr
    # each run once, and the comparison, which is also exported
    assert counts == {"read_rows": 2, "aggregate": 2, "judge_one_run": 2, "picture": 3, "table": 3}


@pytest.mark.parametrize("name", sorted(str(file.relative_to(SOURCE)) for file in SOURCE.rglob("*.py")))
def test_examples_run(name):
    module = ".".join(["fedda", "report", *name.removesuffix(".py").split("/")]).removesuffix(".__init__")
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def grouped(path: Path) -> Path:
    """Eight methods in three rows, each a label of its own."""
    methods = ["fedda-1-1", "fedda-1-2", "fedda-2-1", "fedavg", "fedcm", "stem", "fedadam", "mimelite"]
    tables = {f"{m} ({i})": {"name": m, "group": f"I = {i}"} for i in (5, 10, 20) for m in methods}
    rows = [row for i in (5, 10, 20) for row in synthetic([f"{m} ({i})" for m in methods], [0, 1], every=10)]
    return folder(path, rows, tables)


def test_groups_are_rows_and_a_method_keeps_its_pen(tmp_path):
    shown = picture([read_run(grouped(tmp_path / "run"))])
    assert shown.rows == ["I = 5", "I = 10", "I = 20"] and shown.lines == [shown.metrics]
    pens = {(s.label.split(" (")[0], s.colour, s.dash) for s in shown.series}
    assert len(pens) == 8 and len({(colour, dash) for _, colour, dash in pens}) == 8
    assert [entry.text for entry in shown.entries] == [s.label.split(" (")[0] for s in shown.series[:8]]

    tables = {
        "plain": {},
        "a": {"name": "x", "group": "G"},
        "b": {"name": "x", "group": "G"},
        "c": {"name": "x", "group": "H"},
    }
    shown = picture([read_run(folder(tmp_path / "mixed", synthetic(list(tables), [0]), tables))])
    assert shown.rows == ["", "G", "H"] and [s.row for s in shown.series] == [0, 1, 1, 2]
    pens = [(s.colour, s.dash) for s in shown.series]
    assert pens[1] == pens[3] and len(set(pens)) == 3  # the same method twice in a row needs two pens


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (3, 3)])
def test_the_figure_is_in_the_layout_of_the_paper(tmp_path, groups, rows):
    """Four panels a row: the eight curves of a row are painted in that row of the PNG."""
    run = grouped(tmp_path / "run")
    if groups == 1:
        (run / "config.toml").write_text(re.sub(r"group = .*\n", "", (run / "config.toml").read_text()))
        (run / "metrics.jsonl").write_text(
            "".join(l + "\n" for l in (run / "metrics.jsonl").read_text().splitlines() if "(5)" in l)
        )
    shown = picture([read_run(run)])
    pixels = image.imread(io.BytesIO(plots.draw(shown, shown.axes[0])))[..., :3]
    height, width = pixels.shape[:2]
    assert width == 4 * 3.2 * 300 and height > rows * 2.4 * 300  # 300 dots per inch
    inked = int(rows * 2.3 * 300)  # the legend is below
    for row, column in itertools.product(range(rows), range(4)):
        cell = pixels[row * inked // rows : (row + 1) * inked // rows, column * width // 4 : (column + 1) * width // 4]
        for colour in {series.colour for series in shown.series if series.curves}:
            assert painted(cell, colour) > 20, (row, column, colour)


def painted(pixels: Any, colour: str) -> int:
    """How many pixels have this colour."""
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((abs(pixels - wanted).max(axis=-1) < 0.02).sum())


@pytest.mark.filterwarnings("error")
def test_an_algorithm_without_counts_does_not_spoil_the_others(tmp_path):
    """As rows of somebody else's: no gradients, no bytes."""
    bare = [{"algorithm": "bare", "seed": 0, "round": r, "train_loss": 1.0} for r in range(0, 101, 10)]
    shown = picture([read_run(folder(tmp_path / "run", [*synthetic(["a"], [0]), *bare]))])
    assert [axis.key for axis in shown.axes] == ["round", "gradients", "bytes", "seconds"]
    assert all(plots.draw(shown, axis).startswith(b"\x89PNG") for axis in shown.axes)


def test_further_metrics_come_in_a_line_of_their_own(tmp_path):
    rows = [row | {"density": 0.5, "nonzero": 0.4, "objective": 1.0} for row in synthetic(["a"], [0])]
    shown = picture([read_run(folder(tmp_path / "run", rows))])
    assert shown.lines == [
        ["train_loss", "train_accuracy", "test_loss", "test_accuracy"],
        ["objective", "density", "nonzero"],
    ]


def curve(mean: Any, std: Any = 0.0) -> Curve:
    mean = np.asarray(mean, dtype=float)
    x = np.arange(float(mean.size))
    return Curve(x, x, x, x, mean=mean, std=std + 0 * x, seeds=x)


def test_neither_the_start_nor_a_collapsed_method_sets_an_axis():
    x = np.arange(41.0)
    accuracy, loss = describe_metric("test_accuracy"), describe_metric("train_loss")

    def rising(top):
        return curve(top - (top - 0.1) * 0.5**x)

    found = limits([rising(0.7), rising(0.75)], accuracy)
    assert 0.6 < found.linear[0] < 0.7 and 0.75 < found.linear[1] < 0.8 and found.log is None
    assert limits([rising(0.7), rising(0.1)], accuracy).linear[0] < 0.1  # of two it is not known which is wrong
    found = limits([rising(0.95), rising(0.93), rising(0.94), curve(0.1 + 0 * x)], accuracy)
    assert found.linear[0] > 0.8 and found.outside == (3,)
    over = curve(np.where(x < 2, 0.3, np.nan))  # one that ends before is seen
    assert limits([over, rising(0.7)], accuracy).linear[0] < 0.3

    falling = [curve(2.3 * 0.5**x + end) for end in (0.10, 0.11, 0.12)]
    found = limits([*falling, curve(2.3 + x**3)], loss)
    assert 0.25 > found.linear[1] > 0.12 and found.outside == (3,) and not found.prefer_log
    assert limits([curve(10.0 ** (-x / 8))], loss).prefer_log  # five decades
    wide = limits([curve(2.3 * 0.5**x + 0.1, std=50.0)], loss)  # a band wider than the curve may leave the panel
    assert wide.linear[0] > -0.1 and wide.linear[1] < 1
    assert limits([curve([math.nan])], loss).linear == (0, 1)


def test_a_band_does_not_fall_off_a_log_axis():
    mean, std = np.array([1.0, 0.1]), np.array([5.0, 0.05])
    bottom, top = band(mean, std, log=True)
    assert (bottom > 0).all() and top == pytest.approx(mean + std) and np.sqrt(bottom * top) == pytest.approx(mean)
    assert band(mean, std, log=False)[0] == pytest.approx(mean - std)


def final_rows(values: dict[str, list[float]], **more: Any) -> list[dict[str, Any]]:
    """One row per algorithm and seed with its final test accuracy."""
    return [
        {"algorithm": label, "seed": seed, "round": r, "test_accuracy": value if r else 0.1} | more
        for label, own in values.items()
        for seed, value in enumerate(own)
        for r in (0, 100)
    ]


@pytest.mark.parametrize(
    ("values", "marks", "words"),
    [
        # paired differences of 0.010 +- 0.001: t(0.95, 2) * 0.001 / sqrt(3) = 0.0025
        (
            {"a": [0.91, 0.92, 0.93], "b": [0.90, 0.909, 0.921]},
            ["best", ""],
            "a leads at round 100 with a test accuracy of",
        ),
        # the same means, yet differences of 0.03, -0.01 and 0.01
        ({"a": [0.91, 0.92, 0.93], "b": [0.88, 0.93, 0.92]}, ["tie", "tie"], "cannot be told apart from b"),
        ({"a": [0.95, 0.95], "b": [0.90, 0.93]}, ["tie", "tie"], "cannot be told apart from b"),  # two seeds
        ({"a": [0.9], "b": [0.8]}, ["", ""], "with one seed this may be chance"),
        ({"a": [0.9, 0.8]}, [""], "a reaches a test accuracy of 85.0 ± 7.1 %"),
        ({"a": [0.9, 0.9], "b": [math.nan, 0.9]}, ["", ""], "1 of 2 methods diverged"),
        ({"a": [0.9, 0.9, 0.9], "b": [0.9, 0.9, 0.9]}, ["tie", "tie"], "cannot be told apart from b"),
    ],
)
def test_the_best_is_marked_only_if_chance_does_not_explain_it(tmp_path, values, marks, words):
    rows = [
        row | ({"test_accuracy": None} if row["test_accuracy"] != row["test_accuracy"] else {})
        for row in final_rows(values)
    ]
    shown = Report.of([folder(tmp_path / "run", rows)])
    assert [line.cells[0].mark for line in shown.table.groups[0][1]] == marks
    ((_, text),) = sentences(shown.picture, shown.runs)
    assert words in text
    assert words.replace("±", "±") in shown.page()


def test_differences_are_paired_and_student_s():
    a, b = {0: 0.5, 1: 0.6, 2: 0.9, 7: 9.0}, {0: 0.4, 1: 0.55, 2: 0.7}
    found, pairs = difference(a, b), [0.1, 0.05, 0.2]
    assert (found.seeds, found.mean) == (3, pytest.approx(statistics.fmean(pairs)))
    assert found.half == pytest.approx(4.302653 * statistics.stdev(pairs) / math.sqrt(3), rel=1e-6)


def test_values_are_compared_only_on_one_problem(tmp_path):
    """Another data set has its own panels and scales; another penalty or split its own group of the table."""
    first = folder(tmp_path / "first", synthetic(["fedavg", "stem"], [0, 1]))
    other = folder(
        tmp_path / "other",
        [row | {"train_loss": row["train_loss"] / 50} for row in synthetic(["fedavg", "stem"], [0, 1])],
    )
    (other / "config.toml").write_text(
        (other / "config.toml").read_text().replace('data = "digits"', 'data = "cancer"')
    )
    found = Report.of([first, other])
    assert found.picture.rows == ["digits", "cancer"] and [title for title, _ in found.table.groups] == [
        "digits",
        "cancer",
    ]
    colours = {s.label: s.colour for s in found.picture.series}
    assert colours["fedavg · first"] == colours["fedavg · other"] == style.pen_of("fedavg")[0]
    assert [entry.text for entry in found.picture.entries] == [
        "fedavg",
        "stem",
    ]  # never in one panel: no dashes for runs
    ends = [found.picture.limits(data, "train_loss").linear for data in (0, 1)]
    assert ends[0][1] > 20 * ends[1][1]
    for _, lines in found.table.groups:
        assert sum(line.cells[0].mark in ("best", "tie") for line in lines) >= 1
    leads = sentences(found.picture, found.runs)
    assert [title for title, _ in leads] == ["digits", "cancer"]
    assert not any("first" in text or "other" in text for _, text in leads)  # the title says which run it is

    config = (first / "config.toml").read_text()
    cut = config.index(
        "prox =", config.index('[algorithms."stem"]') if '[algorithms."stem"]' in config else config.index("stem")
    )
    (first / "config.toml").write_text(config[:cut])  # the second algorithm solves the problem without the penalty
    found = Report.of([first])
    assert found.picture.rows == [""] and [title for title, _ in found.table.groups] == [
        "prox = l1(gamma=0.001)",
        "no prox",
    ]
    assert all(cell.mark == "" for _, lines in found.table.groups for line in lines for cell in line.cells)


def test_rows_of_one_method_each_have_a_pen_for_each_number_of_local_steps(tmp_path):
    labels = [f"{name} ({steps})" for name in ("a", "b") for steps in (5, 10)]
    own = {label: {"name": label[0], "group": label[0].upper(), "steps": int(label[3:-1])} for label in labels}
    run = replace(read_run(folder(tmp_path / "run", synthetic(labels, [0]))), config={"algorithms": own})
    found = picture([run])
    assert [entry.text for entry in found.entries] == ["I = 5", "I = 10"] and found.rows == ["A", "B"]
    assert [s.colour for s in found.series[:2]] == [s.colour for s in found.series[2:]]
    del own["b (10)"]["steps"]
    assert len(picture([run]).entries) == 4


def test_a_run_that_diverged_misses_no_constraint(tmp_path):
    rows = [row | {"infeasible": 0.0} for row in synthetic(["a"], [0])]
    rows[-1] |= {"infeasible": None}
    assert "infeasible" not in read_run(folder(tmp_path / "run", rows)).metrics
    rows[0]["infeasible"] = 1e-9
    assert "infeasible" in read_run(folder(tmp_path / "missed", rows)).metrics


def test_a_run_that_diverged_does_not_make_sparsity_a_metric(tmp_path):
    rows = [row | {"density": 0.5, "nonzero": 1.0} for row in synthetic(["a"], [0])]
    rows[-1] |= {"density": None, "nonzero": None}
    assert not {"density", "nonzero"} & set(read_run(folder(tmp_path / "run", rows)).metrics)
    rows[0]["nonzero"] = 0.999
    assert {"density", "nonzero"} <= set(read_run(folder(tmp_path / "zeros", rows)).metrics)


def test_a_curve_that_ends_in_a_divergence_has_a_cross(tmp_path):
    whole = synthetic(["a"], [0, 1])
    broken = [row | ({"train_loss": None} if row["seed"] == 1 and row["round"] > 50 else {}) for row in whole]
    drawn = []
    for name, rows in (("whole", whole), ("broken", broken)):
        shown = picture([read_run(folder(tmp_path / name, rows))])
        drawn.append(plots.draw(shown, shown.axes[0], "svg").decode())
    assert ["a seed diverged" in svg for svg in drawn] == [False, True]
    assert [plots.lost(series.curves["train_loss"]) for series in shown.series] == [10]  # round 50


def test_colours_can_be_seen_on_light_and_on_dark_and_methods_keep_them(tmp_path):
    """A contrast of 3:1 or more (WCAG 2.1, graphical objects) on the page's backgrounds, as its style sheet has them."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    css = (SOURCE / "web" / "page.css").read_text()
    papers = {f"#{h * 2 if len(h) == 3 else h}" for h in re.findall(r"--(?:page|panel): #(\w+)", css)}
    assert "#ffffff" in papers and len(papers) >= 3
    for colour, paper in itertools.product(style.COLOURS, papers):
        dark, light = sorted((luminance(colour), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= 3, (colour, paper)
    assert len({style.pen_of(method) for method in style.METHODS}) == len(style.METHODS)
    from fedda import registry

    assert {entry.name for entry in registry.algorithms} <= {*style.METHODS, *style.SAME}
    alone, among = (
        picture([read_run(folder(tmp_path / name, synthetic(labels, [0])))])
        for name, labels in (("alone", ["fedavg"]), ("among", ["stem", "fedcm", "fedavg"]))
    )
    assert alone.series[0].colour == among.series[2].colour == style.pen_of("fedavg")[0]


def test_mathematics_in_a_legend(tmp_path):
    labels = [r"FedDA, $\beta_2 = 0.9$", "5 $ and 6 $_{"]
    shown = picture([read_run(folder(tmp_path / "run", synthetic(labels, [0])))])
    svg = plots.draw(shown, shown.axes[0], "svg").decode()
    assert "β" in svg and r"\beta" not in re.sub("<!--.*?-->", "", svg, flags=re.S) and "5 $ and 6 $_{" in svg


def test_csv_holds_every_point(tmp_path):
    label = 'a, "b"\n=1+1'
    rows = synthetic(["fedavg", label], [0, 1, 2])
    rows[3]["train_loss"] = None
    run = read_run(folder(tmp_path / "run", rows))
    found = list(csv.DictReader(io.StringIO(report.csv([tmp_path / "run"]))))
    assert list(found[0]) == ["algorithm", "metric", "round", "gradients", "bytes", "seconds", "mean", "std", "seeds"]
    assert len(found) == 2 * 4 * 21 and {row["algorithm"] for row in found} == {"fedavg", label}
    for (name, metric), points in itertools.groupby(found, key=lambda row: (row["algorithm"], row["metric"])):
        curve = run.curves[name][metric]
        for i, point in enumerate(points):
            for key in ("round", "gradients", "bytes", "seconds", "mean", "std", "seeds"):
                value = float(point[key] or "nan")
                assert value == pytest.approx(getattr(curve, key)[i], rel=1e-9, nan_ok=True)


def test_latex_escapes_and_the_best_is_bold(tmp_path):
    label = r"a_b & 50% #1 {x} \cmd ~ ^2 $5 <c> [d]"
    text = report.latex([folder(tmp_path / "run", synthetic(["fedavg", label], [0, 1]))])
    (line,) = [line for line in text.splitlines() if line.startswith("a")]
    name = line.split(" & ", 1)[0] + " & " + line.split(" & ")[1]
    assert name.startswith(r"a\_b \& 50\% \#1 \{x\} \textbackslash{}cmd \textasciitilde{} \textasciicircum{}2 \$5 ")
    assert len(re.findall(r"(?<!\\)&", line)) == 5  # four metrics and the best test accuracy
    assert (
        text.count(r"\textbf{") + text.count(r"\underline{") // 2 == 5
        and r"\toprule" in text
        and r"\bottomrule" in text
    )
    best = report.summary(tmp_path / "run")[0]
    assert rf"{{{100 * best['test_accuracy']:.1f} $\pm$ " in text
    for unescaped in ("%", "&", "#", "_", "$"):
        assert export.escape(unescaped) == "\\" + unescaped
    assert r"\multicolumn{6}{l}{\emph{I = 10}}" in report.latex([grouped(tmp_path / "groups")])


def two_settings(place: Path) -> tuple[Path, Path]:
    first = folder(place / "first", synthetic(["fedavg", "stem"], [0, 1]))
    second = folder(place / "second", synthetic(["fedavg", "stem", "only here"], [0, 1], rounds=60))
    text = (second / "config.toml").read_text().replace("rho = 0.8", "rho = 0.2").replace("lr = 0.02", "lr = 0.05", 1)
    (second / "config.toml").write_text(text)
    return first, second


def test_a_comparison_tells_methods_by_colour_and_runs_by_dashes(tmp_path):
    first, second = two_settings(tmp_path)
    assert report.compare([first, second, first]) == tmp_path / "comparison.html"
    assert image.imread(tmp_path / "comparison.png").shape[1] == 3840
    shown = picture([read_run(first), read_run(second)], ["first", "second"])
    pens = {s.label: (s.colour, s.dash) for s in shown.series}
    assert list(pens) == ["fedavg · first", "fedavg · second", "stem · first", "stem · second", "only here"]
    assert pens["fedavg · first"][0] == pens["fedavg · second"][0] != pens["stem · first"][0]
    assert pens["fedavg · first"][1] == pens["stem · first"][1] != pens["stem · second"][1] == pens["only here"][1]
    differ = dict(differences([read_run(first), read_run(second)]))
    assert differ == {
        "problem.rho": ["0.8", "0.2"],
        "algorithms.fedavg.lr": ["0.02", "0.05"],
        "algorithms.only here": ["–", "yes"],
    }

    apart = folder(tmp_path / "apart", synthetic(["x", "y"], [0]))  # no label in common: no folder in the labels
    shown = picture([read_run(first), read_run(apart)], ["first", "apart"])
    assert [s.label for s in shown.series] == ["fedavg", "stem", "x", "y"] and len(
        {s.colour for s in shown.series}
    ) == 4

    many = [folder(tmp_path / f"m{i}", synthetic([f"l{k}" for k in range(5)], [0])) for i in range(7)]
    shown = picture([read_run(m) for m in many], [m.name for m in many])
    assert len({(s.colour, s.dash) for s in shown.series}) == 35  # more runs than dashes: a pen for each curve


def test_the_command_line_exports_and_compares(tmp_path, capsys, monkeypatch):
    first, second = two_settings(tmp_path)
    sweep = swept(tmp_path / "tuning")
    out = tmp_path / "out"
    files = ["--csv", tmp_path / "c.csv", "--latex", tmp_path / "t.tex"]
    code, stdout, stderr = inside(capsys, monkeypatch, "report", first, second, sweep, "--out", out, *files)
    assert code == 0, stderr
    assert stdout.count("report: ") == 3 and f"comparison: {out / 'comparison.html'}" in stdout
    assert "only here" in stdout and "lr = 0.01, c = 100" in stdout
    assert (tmp_path / "c.csv").read_text() == report.csv([first, second])
    assert r"fedavg $\cdot$ second" in (tmp_path / "t.tex").read_text()
    code, _, stderr = inside(capsys, monkeypatch, "report", first, "--figures", "svg,pdf")
    assert code == 0 and (first / "curves-bytes.pdf").read_bytes().startswith(b"%PDF"), stderr
    assert ElementTree.parse(first / "curves-rounds.svg").getroot().tag.endswith("svg")
    for words, line in (
        ([first, "--figures", "gif"], "--figures: give png, svg or pdf, separated by commas, got 'gif'"),
        ([first, second, "--serve"], "--serve shows the page of one run folder"),
        ([first, "--port", "0"], "--port is for --serve: give both"),
        ([first, "--out", out], "--out is the folder of a comparison"),
        ([sweep, "--csv", "x.csv"], "--csv and --latex need a run folder"),
        ([first, tmp_path / "none"], "none: no such folder"),
    ):
        code, _, stderr = inside(capsys, monkeypatch, "report", *words)
        assert code == 2 and stderr.count("\n") == 1 and line in stderr


CLAIM = {
    "id": "C8",
    "text": "FedDA wins <b>",
    "where": "Figure 1",
    "verdict": "PARTIAL",
    "reason": "one of two",
    "stand_in": "digits",
} | {
    "details": [
        {
            "comparison": "fedda-mvr vs fedavg",
            "metric": "test_accuracy",
            "a": 0.91,
            "b": 0.9,
            "difference": 0.012,
            "interval": 0.004,
        }
        | {"way": "checkpoint", "p": 0.0123, "seeds": 5, "verdict": "SUPPORTED"}
    ]
}


def claims_of(**changes: Any) -> str:
    return json.dumps({"settings": [{"setting": "paper", "runs": ["run"], "claims": [CLAIM | changes]}]})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "claims.json: not valid JSON"),
        ("[]", "claims.json: it must be an object, got []"),
        ('{"settings": [3]}', "settings[0] must be an object, got 3"),
        (claims_of(verdict="MAYBE"), "claims[0]: verdict must be one of SUPPORTED, PARTIAL"),
        (claims_of(text=None), "claims[0]: text must be a text, got None"),
        (claims_of(details=[{"comparison": "x", "metric": "m", "a": "1"}]), "details[0]: a must be a number or null"),
    ],
)
def test_malformed_claims_are_named_in_one_line(tmp_path, text, line):
    run = folder(tmp_path / "run", synthetic(["fedavg"], [0]), claims_json=text)
    with pytest.raises(ValueError) as error:
        report.write(run)
    assert line in str(error.value) and "\n" not in str(error.value)
    assert not (run / "report.html").exists()


def swept(path: Path, **changes: Any) -> Path:
    """One word, two words, three words on a grid with a text, random search, all diverged."""

    def points(words: list[str], choices: Any) -> dict[str, Any]:
        found = []
        for choice in choices:
            values = dict(zip(words, choice, strict=True))
            lost = values["lr"] > 0.2
            value = (
                0.95 - 0.05 * (math.log10(values["lr"]) + 2) ** 2 - 0.01 * (math.log10(values.get("c", 100)) - 2) ** 2
            )
            value -= 0.02 * (values.get("mu0") == "zero")
            found.append(
                {"values": values, "value": None if lost else value, "std": 0.01, "seeds": 2, "gradients": 12345}
            )
            found[-1] |= {"note": "diverged" if lost else None, "best": False}
        max(found, key=lambda p: p["value"] or 0)["best"] = any(p["value"] for p in found)
        return {"words": words, "points": found}

    rates, scales, noise = [0.001, 0.01, 0.1, 1.0], [1.0, 10.0, 100.0], random.Random(0)
    algorithms = {
        "fedavg": points(["lr"], [(r,) for r in rates]),
        "edge": points(["lr"], [(r,) for r in (0.0001, 0.001)]),
        "fedda-mvr": points(["lr", "c"], itertools.product(rates, scales)),
        "three": points(["lr", "c", "mu0"], itertools.product(rates, scales, ["zero", "nu0"])),
        "random": points(["lr", "c"], [(10 ** noise.uniform(-3, 0), 10 ** noise.uniform(0, 3)) for _ in range(20)]),
        "lost": points(["lr"], [(0.5,), (1.0,)]),
        EVIL: points(["lr", "mu0"], itertools.product(rates, ["zero", EVIL])),
    }
    data = {"metric": "validation_accuracy", "better": "higher", "rounds": 60, "seeds": [0, 1], "budget": 24} | changes
    path.mkdir()
    (path / "config.toml").write_text('title = "Tuning"\n')
    (path / "best.toml").write_text("[algorithms.fedavg]\nlr = 0.01\n")
    (path / "sweep.json").write_text(json.dumps({"algorithms": algorithms} | data))
    return path


@pytest.mark.filterwarnings("error")
def test_a_sweep_is_drawn_by_what_its_points_allow(tmp_path):
    found = {own.label: own for own in read_sweep(swept(tmp_path / "sweep")).algorithms}
    maps = {label: [(m.across.name, m.down.name, m.rest) for m in grid.maps(own)] for label, own in found.items()}
    assert maps["fedavg"] == maps["random"] == [] and maps["fedda-mvr"] == [("lr", "c", [])]
    assert maps["three"] == [("lr", "c", ["mu0"]), ("lr", "mu0", ["c"]), ("c", "mu0", ["lr"])]
    (heat,) = grid.maps(found["fedda-mvr"])
    assert {pair for pair, best in heat.best.items() if best is None} == {(c, 1.0) for c in (1.0, 10.0, 100.0)}
    assert grid.edges(found["fedavg"]) == [] and grid.edges(found["edge"]) == ["lr = 0.001 (the largest)"]
    assert grid.edges(found["fedda-mvr"]) == ["c = 100 (the largest)"]
    assert grid.scale(found["fedavg"], "lr").kind == "log" and grid.scale(found["three"], "mu0").kind == "ordinal"
    assert report.write(tmp_path / "sweep") == tmp_path / "sweep" / "report.html"  # by its sweep.json
    figures = {path.name for path in (tmp_path / "sweep").glob("sweep-*.png")}
    assert {"sweep-fedavg.png", "sweep-three.png", "sweep-random.png"} < figures and len(figures) == 7


STRANGE_SWEEPS: dict[str, Any] = {
    "nothing": {},
    "no points": {"a": {"words": ["lr"], "points": []}},
    "no words": {"a": {"words": [], "points": [{"values": {}, "value": 0.5}]}},
    "one point": {"a": {"words": ["lr", "c"], "points": [{"values": {"lr": 1, "c": 0}, "value": 1e300}]}},
    "a schedule": {"a": {"words": ["lr"], "points": [{"values": {"lr": [1, 2]}, "value": 0.5, "std": None}]}},
    "bools": {"a": {"words": ["x"], "points": [{"values": {"x": v}, "value": -1.0} for v in (True, 1, "1", None)]}},
    "losses": {
        "a": {
            "words": ["x"],
            "points": [{"values": {"x": 10.0**-i}, "value": 10.0**i, "std": 10.0**i} for i in range(9)],
        }
    },
}


@pytest.mark.parametrize("name", STRANGE_SWEEPS)
@pytest.mark.filterwarnings("error")
def test_strange_sweeps_are_drawn_without_a_warning(tmp_path, name):
    place = swept(tmp_path / "s", algorithms=STRANGE_SWEEPS[name], metric="validation_loss", better="lower")
    page = report.write_sweep(place).read_text()
    assert "nan" not in page.split("<h2", 1)[1]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"better": "more"}, "sweep.json: better must be 'higher' or 'lower', got 'more'"),
        ({"metric": 3}, "sweep.json: metric must be a text, got 3"),
        ({"algorithms": []}, "sweep.json: algorithms must be an object, got []"),
        ({"algorithms": {"a": {"words": ["lr"], "points": [{"values": {}}]}}}, "points[0]: values has no 'lr'"),
        (
            {"algorithms": {"a": {"words": [], "points": [{"values": {}, "value": "x"}]}}},
            "value must be a number or null",
        ),
    ],
)
def test_malformed_sweeps_are_named_in_one_line(tmp_path, changes, line):
    with pytest.raises(ValueError) as error:
        report.write(swept(tmp_path / "sweep", **changes))
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def chromium():
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """One browser for all tests, in the same state for each; a page may not leave an error in its console."""
    chromium.colours("light")
    chromium.size(1440, 1000)
    yield chromium
    assert chromium.errors() == []


def page_of(run: Path) -> str:
    """The page alone, for tests that do not look at the figures beside it."""
    (run / "report.html").write_text(Report.of([run]).page())
    return (run / "report.html").as_uri()


CHARTS = "return [...document.querySelectorAll('figure')].length"
TEXT = "return document.querySelector(arguments[0]).innerText"
COUNT = "return document.querySelectorAll(arguments[0]).length"
HASH = "return location.hash"
COLUMN = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr:not(.group)`)].map(r => r.cells[arguments[1]].textContent.trim())"
# Saves what a button makes, without a download: its name, its type, and its content as base64.
SAVED = """
const make = URL.createObjectURL; let blob = null, name = null;
URL.createObjectURL = (given) => (blob = given, make(given));
HTMLAnchorElement.prototype.click = function () { name = this.download; };
arguments[0] instanceof Element ? arguments[0].click() : document.querySelector(arguments[0]).click();
return new Promise((done) => {
  const wait = async () => {
    if (!name) return setTimeout(wait, 20);
    const bytes = new Uint8Array(await blob.arrayBuffer());
    delete HTMLAnchorElement.prototype.click; URL.createObjectURL = make;
    done([name, blob.type, btoa(bytes.reduce((s, b) => s + String.fromCharCode(b), ""))]);
  };
  wait();
});
"""


def saved(browser: Browser, selector: str) -> tuple[str, bytes]:
    name, _, content = browser.script(SAVED, selector)
    return name, base64.b64decode(content)


def tool(panel: str, kind: str) -> str:
    return f"figure[data-panel='{panel}'] .tools button:nth-child({('png', 'svg', 'csv', 'large').index(kind) + 1})"


def drawn(browser: Browser, panel: str = "train_loss") -> str:
    """The panel as the page saves it: what is drawn, as text."""
    return saved(browser, tool(panel, "svg"))[1].decode()


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """Three methods, one of them with a label that would break a page that does not escape it."""
    rows = synthetic(["fedavg", EVIL, "fedda-mvr"], [0, 1, 2])
    return rows, report.write(folder(tmp_path_factory.mktemp("usual") / "run one", rows))


@pytest.mark.browser
@needs_browser
def test_the_controls_of_the_page(usual, browser):
    _, page = usual
    browser.open(page.as_uri())
    assert browser.script("return document.title") == "Heterogeneous digits"
    assert browser.script("return document.getElementById('evil')") is None
    assert browser.script("return document.querySelectorAll('#legend button')[1].textContent") == EVIL
    assert browser.script(CHARTS) == 4 and browser.script(COUNT, "figure canvas") == 4
    assert "fedavg leads at round 100" in browser.script(TEXT, ".lead")
    first = drawn(browser)
    assert first.count('class="curve"') == 3 and not [bad for bad in ("NaN", "Infinity", "undefined") if bad in first]

    for axis, label in (
        ("gradients", "gradient evaluations (thousands)"), ("bytes", "sent up and down (MB)"),
        ("seconds", "time (seconds)"), ("round", "round"),
    ):  # fmt: skip
        browser.click(f"button[data-axis={axis}]")
        assert f">{label}</text>" in drawn(browser)
        assert browser.script(HASH) == ("" if axis == "round" else f"#x={axis}")
    assert drawn(browser) == first

    browser.script("smooth.value = 0.8; smooth.dispatchEvent(new Event('input'))")
    assert drawn(browser) != first and browser.script(TEXT, "#smooth-value") == "0.80"
    browser.script("smooth.value = 0; smooth.dispatchEvent(new Event('input'))")
    assert drawn(browser) == first

    browser.click("#seeds")  # three lines for each method, and no band
    every = drawn(browser)
    assert (
        every.count('stroke-opacity="0.45"') == 9 and "fill-opacity" not in every and first.count("fill-opacity") == 3
    )
    browser.click("#seeds")

    browser.click("#legend button:nth-child(2)")
    assert drawn(browser).count('class="curve"') == 2
    browser.press("#legend button:nth-child(2)", " ")  # the keyboard does the same
    assert drawn(browser) == first


@pytest.mark.browser
@needs_browser
def test_hover_shows_full_names_and_a_cross_hair_in_all_panels(usual, browser):
    rows, page = usual
    browser.open(page.as_uri())
    browser.point("figure:nth-of-type(2) .u-over")
    width = browser.script("return document.querySelector('.u-over').clientWidth")
    at = browser.script("return document.querySelectorAll('.u-cursor-x').length")
    assert at == 4
    places = browser.script(
        "return [...document.querySelectorAll('.u-cursor-x')].map(c => new DOMMatrix(getComputedStyle(c).transform).e)"
    )
    assert len(places) == 4 and all(abs(place - width / 2) < 12 for place in places)
    readout = browser.script(TEXT, ".readout:not([hidden])")
    accuracy = [r["train_accuracy"] for r in rows if (r["algorithm"], r["round"]) == ("fedavg", 50)]
    assert "round: 50" in readout and f"{100 * statistics.fmean(accuracy):.1f} ± " in readout and EVIL in readout
    assert browser.script(COUNT, ".readout:not([hidden])") == 1
    for width in (360, 800, 1440):
        browser.size(width, 900)
        browser.point("figure:last-of-type .u-over")
        assert browser.script(COUNT, ".readout:not([hidden])") == 1
        assert browser.script("return document.documentElement.scrollWidth") <= width


def ticks(svg: str, side: str) -> list[float]:
    """The numbers on an axis of a saved panel."""
    anchor = {"x": 'text-anchor="middle"', "y": 'text-anchor="end"'}[side]
    texts = re.findall(rf'<text x="[^"]*" y="[^"]*" fill="#5b636d" {anchor}>([^<]*)</text>', svg)
    return [float(text.removesuffix(" %")) for text in texts if re.fullmatch(r"[-+0-9.e]+( %)?", text)]


@pytest.mark.browser
@needs_browser
def test_zoom_and_enlarging(usual, browser):
    _, page = usual
    browser.open(page.as_uri())
    whole = {panel: drawn(browser, panel) for panel in ("train_loss", "test_accuracy")}
    window = "return ['from', 'to'].map(id => document.getElementById(id).valueAsNumber)"
    assert browser.script(window) == [0, 100] and browser.script("return reset.disabled")
    browser.drag("figure .u-over", 20, 120)
    wide = browser.script("return document.querySelector('.u-over').clientWidth")
    low, high = ((wide / 2 + d) * 100 / wide for d in (20, 120))
    assert browser.script(window) == pytest.approx([low, high], abs=1)
    for panel in whole:  # all panels
        shown = ticks(drawn(browser, panel), "x")
        assert min(shown) >= low - 1 and max(shown) <= high + 1 and len(shown) > 1
    assert browser.script(HASH).startswith("#zoom=")
    for undo in (
        lambda: browser.double_click("figure .u-over"),
        lambda: browser.click("#reset"),
        lambda: browser.press("#to", "\ue00c"),  # Escape
        lambda: (browser.click("button[data-axis=bytes]"), browser.click("button[data-axis=round]")),
    ):
        undo()
        assert browser.script("return document.querySelector('figure.large')") is None
        assert {panel: drawn(browser, panel) for panel in whole} == whole and browser.script("return reset.disabled")
        browser.press("#from", "\ue009a\ue00950\ue007")  # Control-a, 50, Enter: zoom by keyboard alone
        assert browser.script(window) == [50, 100] and min(ticks(drawn(browser), "x")) >= 50
    browser.press("#from", "\ue009a\ue009900\ue007")  # beyond the end: taken back
    assert browser.script(window) == [50, 100]
    browser.click("#reset")

    browser.click("figure[data-panel=test_loss] .u-over")  # a click enlarges
    browser.script("return new Promise((done) => setTimeout(done, 400))")  # after the time of a double click
    size = "const b = document.querySelector('figure[data-panel=test_loss] canvas').getBoundingClientRect(); return [b.width, b.height]"
    assert browser.script(size)[0] > 1200 and browser.script(size)[1] > 600
    assert browser.script(HASH) == "#panel=test_loss"
    names = browser.script("return [...document.querySelectorAll('figure.large .names span')].map(s => s.textContent)")
    assert names == ["fedavg", EVIL, "fedda-mvr"]  # the large panel has a legend of its own
    browser.press("body", "\ue00c")
    assert browser.script(size)[0] < 900 and browser.script(HASH) == ""


@pytest.mark.browser
@needs_browser
def test_log_and_linear_and_the_state_in_the_url(usual, browser):
    _, page = usual
    browser.open(page.as_uri())
    browser.click("button[data-scale=linear]")
    steps = np.diff(ticks(drawn(browser), "y"))
    assert len(steps) > 1 and steps == pytest.approx(steps[0])
    browser.click("button[data-scale=log]")
    log = ticks(drawn(browser), "y")
    assert len(log) > 1 and np.ptp(np.diff(log)) > 1e-6 and min(log) > 0
    assert "NaN" not in drawn(browser)
    assert "NaN" not in drawn(browser, "test_accuracy")  # an accuracy stays linear
    browser.click("button[data-axis=bytes]")
    browser.click("#legend button:nth-child(1)")
    browser.press("#from", "\ue009a\ue0094\ue007")
    link, shown = browser.script("return location.href"), drawn(browser)
    assert {"x=bytes", "y=log", "hide=fedavg"} < set(browser.script(HASH)[1:].split("&"))
    browser.open("about:blank")
    browser.open(link)  # somebody else follows the link
    assert drawn(browser) == shown
    assert browser.script("return [...document.querySelectorAll('[aria-pressed=true]')].map(b => b.textContent)")[
        :2
    ] == ["Bytes", "Log"]
    browser.script("location.hash = '#x=nonsense&zoom=9,1&target=x&goal=77&smooth=7&sort=a'")  # nothing breaks
    assert browser.script(COUNT, "figure canvas") == 4


@pytest.mark.browser
@needs_browser
def test_tables_sort_and_a_target_moves(usual, browser):
    rows, page = usual
    browser.open(page.as_uri())
    order = browser.script(COLUMN, "values", 0)
    browser.click("#values th:nth-child(4) button")  # train loss, upwards
    losses = [float(text.split()[0]) for text in browser.script(COLUMN, "values", 3)]
    assert (
        losses == sorted(losses)
        and browser.script("return document.querySelector('#values [aria-sort=ascending]').cellIndex") == 3
    )
    browser.click("#values th:nth-child(4) button")
    assert [float(text.split()[0]) for text in browser.script(COLUMN, "values", 3)] == losses[::-1]
    assert "sort=values%3A3%3Adown" in browser.script(HASH)
    browser.script("location.reload()")
    assert [float(text.split()[0]) for text in browser.script(COLUMN, "values", 3)] == losses[::-1]
    browser.click("#values th:first-child button")
    assert (
        sorted(browser.script(COLUMN, "values", 0), key=str.lower) == browser.script(COLUMN, "values", 0)
        and len(order) == 3
    )

    def expected(target):
        found = []
        for label in ("fedavg", EVIL, "fedda-mvr"):
            means = {
                r: statistics.fmean(x["test_accuracy"] for x in rows if (x["algorithm"], x["round"]) == (label, r))
                for r in range(0, 101, 5)
            }
            found.append(next((f"{r}" for r, mean in means.items() if mean >= target), "not reached"))
        return sorted(found, key=lambda text: int(text) if text.isdecimal() else math.inf)

    for percent in (80, 93.5):
        browser.script(
            "const n = document.getElementById('target-number'); n.value = arguments[0]; n.dispatchEvent(new Event('input'))",
            percent,
        )
        assert browser.script(COLUMN, "targets", 1) == expected(percent / 100)
    assert "target=0.935" in browser.script(HASH) and "not reached" in browser.script(TEXT, "#targets")
    browser.script("goal.selectedIndex = 1; goal.dispatchEvent(new Event('change'))")
    assert "at most" in browser.script(TEXT, "#targets th")


@pytest.mark.browser
@needs_browser
def test_downloads(usual, browser):
    rows, page = usual
    browser.open(page.as_uri())
    assert saved(browser, "[data-file=csv]") == ("run-one.csv", report.csv([page.parent]).encode())
    assert saved(browser, "[data-file=tex]") == ("run-one.tex", report.latex([page.parent]).encode())
    name, png = saved(browser, tool("test_loss", "png"))
    pixels = image.imread(io.BytesIO(png))[..., :3]
    width = browser.script("return document.querySelector('figure canvas').clientWidth")
    assert name == "run-one-test_loss.png" and abs(pixels.shape[1] - 3 * width) <= 3
    assert painted(pixels, style.pen_of("fedavg")[0]) > 100 and pixels[0, 0].min() == 1.0
    name, text = saved(browser, tool("test_loss", "csv"))
    points = list(csv.DictReader(io.StringIO(text.decode())))
    assert name == "run-one-test_loss.csv" and len(points) == 3 * 21
    last = next(p for p in points if (p["algorithm"], p["round"]) == (EVIL, "100"))
    own = [r["test_loss"] for r in rows if (r["algorithm"], r["round"]) == (EVIL, 100)]
    assert float(last["mean"]) == pytest.approx(statistics.fmean(own), rel=1e-5)
    assert [float(v) for v in last["by_seed"].split()] == pytest.approx(own, rel=1e-3)
    ElementTree.fromstring(drawn(browser))  # a whole XML document, with a label that needs escapes


@pytest.mark.browser
@needs_browser
def test_groups_in_a_browser(tmp_path, browser):
    browser.open(page_of(grouped(tmp_path / "run")))
    rows = "return [...document.querySelectorAll('#panels section')].map(s => [s.querySelector('h3').textContent, s.querySelectorAll('figure').length])"
    assert browser.script(rows) == [[f"I = {i}", 4] for i in (5, 10, 20)]
    assert ticks(drawn(browser, "train_loss-1"), "y") == ticks(drawn(browser, "train_loss-3"), "y")  # one scale
    assert browser.script(COUNT, "#legend button") == 8
    browser.click("#legend button:nth-child(5)")  # a method leaves every row
    assert [drawn(browser, f"test_loss-{i}").count('class="curve"') for i in (1, 2, 3)] == [7, 7, 7]
    groups = "return [...document.querySelectorAll('#values .group')].map(r => r.textContent.trim())"
    assert browser.script(groups) == ["I = 5", "I = 10", "I = 20"]


@pytest.mark.browser
@needs_browser
def test_a_comparison_in_a_browser(tmp_path, browser):
    first, second = two_settings(tmp_path)
    report.write(first)
    browser.open(report.compare([first, second]).as_uri())
    assert browser.script("return document.title") == "Comparison of first, second"
    names = ["fedavg", "stem", "only here", "first", "second"]
    assert browser.script("return [...document.querySelectorAll('#legend button')].map(b => b.textContent)") == names
    assert drawn(browser).count('class="curve"') == 5
    browser.click("#legend button:last-child")  # the second run
    browser.click("#legend button:first-child")  # fedavg, of both
    assert drawn(browser).count('class="curve"') == 1
    table = browser.script(TEXT, ".differences")
    assert "problem.rho\t0.8\t0.2" in table and "algorithms.only here\t–\tyes" in table and "cohort" not in table
    assert saved(browser, "[data-file=csv]") == ("comparison.csv", report.csv([first, second]).encode())
    browser.click(".runs a")
    assert browser.script("return document.title") == "Heterogeneous digits"  # the run's own page


def test_a_live_page_is_for_this_machine_alone(tmp_path):
    run = folder(tmp_path / "run", synthetic(["fedavg"], [0]))
    with LivePage(run, port=0) as live:
        assert live.server.server_address[0] == "127.0.0.1"

        def ask(path, **heads):
            return urllib.request.urlopen(urllib.request.Request(f"{live.url}{path}", headers=heads), timeout=20)

        with ask("") as page, ask("version") as news:
            assert page.read().decode() == Report.of([run]).page(figures=False, live=live.version())
            assert json.load(news) == {"version": live.version(), "state": "finished"}
        for path, heads, code in (
            ("../config.toml", {}, 404),
            ("config.toml", {}, 404),
            ("", {"Host": "evil.example"}, 403),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                ask(path, **heads)
            assert error.value.code == code
        live._asked = -math.inf  # no page is open any more
        with pytest.raises(ValueError, match=f"--port {live.port}: Address already in use"):
            LivePage(run, live.port)


@pytest.mark.browser
@needs_browser
def test_a_live_page_follows_its_run_and_outlives_it(tmp_path, browser):
    rows = synthetic(["fedavg", "stem"], [0, 1])
    run = folder(tmp_path / "run", rows)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").unlink()
    wait = "const [test, end] = [new Function('return ' + arguments[0]), Date.now() + 20000]; return new Promise((done) => { const ask = () => test() || Date.now() > end ? done(test()) : setTimeout(ask, 50); ask(); })"
    with LivePage(run, port=0) as live:
        browser.open(live.url)
        assert "Waiting" in browser.script(TEXT, "body")
        (run / "metrics.jsonl").write_text("".join(lines[:30]))
        assert browser.script(
            wait, "document.title === 'Heterogeneous digits' && document.querySelectorAll('canvas').length === 4"
        )
        browser.click("button[data-axis=gradients]")
        assert browser.script(wait, "document.getElementById('live').textContent.includes('round ')")
        assert browser.script(COLUMN, "values", 2) == ["1 of 2", "0 of 2"]
        (run / "metrics.jsonl").write_text("".join(lines))
        assert browser.script(
            wait, "document.querySelector('#values tbody tr:last-child').cells[2].textContent === '2'"
        )
        assert browser.script(TEXT, "#live") == "finished"
        assert browser.script(HASH) == "#x=gradients" and "gradient evaluations" in drawn(
            browser
        )  # the reader's choice stays
        port = live.port
    assert browser.script(wait, "document.getElementById('live').className === 'live off'")
    browser.errors()  # the browser reports that nobody answers
    with LivePage(run, port=port):  # the run is started again, and the open page finds it
        assert browser.script(wait, "document.getElementById('live').className === 'live on'")
        browser.open("about:blank")
    browser.errors()


def test_the_comparisons_of_a_claim_are_in_the_page(tmp_path):
    run = folder(tmp_path / "run", synthetic(["a"], [0]), claims_json=claims_of())
    text = report.write(run).read_text(encoding="utf-8")
    (row,) = re.findall(r"<tr><th scope=\"row\">fedda-mvr vs fedavg</th>.*?</tr>", text, re.S)
    cells = re.findall(r"<td>(.*?)</td>", row, re.S)
    assert cells[:-1] == [
        "checkpoint",
        "Test accuracy",
        "91.00 %",
        "90.00 %",
        "+1.20 points",
        "0.40 points",
        "0.0123",
        "5",
    ]
    (head,) = re.findall(r"<thead><tr>(<th scope=\"col\">Comparison</th>.*?)</tr>", text)
    assert head.count("<th ") == 1 + len(cells)


@pytest.mark.browser
@needs_browser
def test_claims_in_a_browser(tmp_path, browser):
    browser.open(page_of(folder(tmp_path / "run", synthetic(["a"], [0]), claims_json=claims_of())))
    section = browser.script(TEXT, ".claims")
    assert (
        "◐ PARTIAL" in section
        and "FedDA wins <b>" in section
        and "one of two" in section
        and "Stand-in: digits" in section
    )
    assert "fedda-mvr vs fedavg" not in section  # folded
    assert browser.script(TEXT, "#claims + h3 + p") == "1 partial; runs: run"
    browser.click(".claims summary")
    details = browser.script(TEXT, ".claims details")
    assert all(
        text in details
        for text in (
            "fedda-mvr vs fedavg",
            "91.00 %",
            "+1.20 points",
            "0.40 points",
            "0.0123",
            "checkpoint",
            "✓ SUPPORTED",
        )
    )


@pytest.mark.browser
@needs_browser
def test_a_sweep_in_a_browser(tmp_path, browser):
    browser.open(report.write(swept(tmp_path / "sweep")).as_uri())
    head = browser.script(TEXT, "header p")
    assert "Validation accuracy (higher is better) on the validation split, not the test set · budget 24 points" in head
    assert (
        browser.script(COUNT, "section.swept") == 7 and browser.script("return document.getElementById('evil')") is None
    )
    section = "section.swept:nth-of-type({})"  # before it: the table of the best, and the overview
    browser.script("document.querySelectorAll('details').forEach(d => d.open = true)")
    count = lambda i, what: browser.script(COUNT, f"{section.format(i + 3)} {what}")  # noqa: E731
    assert all(count(i, "svg.drawing") == 1 for i in range(7))
    marks = [(count(i, "g.point"), count(i, "g.lost"), count(i, "g.cell"), count(i, "g.chosen")) for i in range(6)]
    assert marks[0] == (3, 1, 0, 0) and count(0, ".edge") == 0
    assert count(1, ".edge") == 1 and "widen the grid" in browser.script(TEXT, section.format(4))
    assert marks[2] == (0, 0, 8, 1)  # one heat map; hatched cells have no value to point at
    assert marks[3] == (3 * 18, 3 * 6, 3 * 3 + 3 * 2 + 2 * 3 - 3, 3)  # three charts and three heat maps
    assert marks[4][0] + marks[4][1] == 2 * 20 and marks[4][2:] == (0, 0)
    chosen = f"return document.querySelector('{section.format(5)} g.chosen title').textContent"
    assert browser.script(chosen) == "lr = 0.01, c = 100: 95.0 ± 1.0 %"
    assert "★ 95.0" in browser.script("return document.querySelector(arguments[0]).textContent", section.format(5))
    assert "no point has a value" in browser.script(TEXT, "section table")


@pytest.mark.browser
@needs_browser
def test_strange_runs_work_in_a_browser(tmp_path, browser):
    for name, rows in STRANGE.items():
        browser.open(page_of(folder(tmp_path / name, rows)))
        panel = "gap" if name == "other metrics" else "train_loss"
        if browser.script(COUNT, f"figure[data-panel={panel}]") == 0:
            assert name == "all null"
            continue
        for scale in ("auto", "linear", "log"):
            browser.script("document.querySelector(`[data-scale=${arguments[0]}]`).click()", scale)
            svg = drawn(browser, panel)
            assert not [bad for bad in ("NaN", "Infinity", "undefined") if bad in svg], (name, scale)
            assert re.search(r'class="curve" d="M', svg) or name == "beyond" or scale == "log", name
        browser.press("#from", "\ue009a\ue0090.5\ue007")
        assert "NaN" not in drawn(browser, panel), name
        assert browser.errors() == [], name


@pytest.mark.browser
@needs_browser
def test_hundreds_of_labels(tmp_path, browser):
    run = folder(tmp_path / "run", synthetic([f"algorithm {i}" for i in range(200)], [0], every=50))
    browser.open(report.write(run).as_uri())
    browser.point("figure .u-over")
    assert "and 184 more" in browser.script(TEXT, ".readout:not([hidden])")


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("kind", ["groups", "comparison", "sweep"])
def test_screenshots_in_both_themes(tmp_path, browser, kind):
    """What a reader sees: paper and ink change with the theme, every pen is painted, nothing is wider than the window."""
    if kind == "groups":
        run = grouped(tmp_path / "run")
        (run / "claims.json").write_text(claims_of())
        page, pens = page_of(run), [style.pen_of(m)[0] for m in ("fedda-1-1", "fedavg", "fedcm", "stem")]
    elif kind == "comparison":
        page, pens = report.compare(two_settings(tmp_path)).as_uri(), [style.pen_of(m)[0] for m in ("fedavg", "stem")]
    else:
        page, pens = report.write(swept(tmp_path / "sweep")).as_uri(), [style.pen_of("fedavg")[0]]
    papers = {}
    for scheme, width in itertools.product(("light", "dark"), (1280, 390)):
        browser.colours(scheme)
        browser.size(width, 900)
        browser.open(page)
        assert browser.script("return document.documentElement.scrollWidth") <= width
        outside = "return [...document.querySelectorAll('button, input, figure, h1, h2, h3, p')].filter(e => e.checkVisibility() && !e.closest('.hidden, .scroll') && (e.getBoundingClientRect().right > innerWidth || e.getBoundingClientRect().left < 0)).map(e => e.outerHTML)"
        assert browser.script(outside) == []
        browser.size(width, 2000)
        shot = tmp_path / f"{scheme}-{width}.png"
        browser.screenshot(shot)
        pixels = image.imread(shot)[..., :3]
        assert pixels.shape[1] == width
        papers[scheme] = pixels[2, 2].mean()
        for colour in pens:
            assert painted(pixels, colour) > 5, (scheme, width, colour)
    assert papers["light"] > 0.9 and papers["dark"] < 0.2


@needs_browser
@pytest.mark.browser
def test_the_report_of_a_real_run_opens(tmp_path, browser):
    """Not made-up rows: what `fedda run` writes, with a penalty, so that every panel is there."""
    place = tmp_path / "run"
    command = ["-m", "fedda", "run", "breast-cancer", "--rounds", "6", "--seeds", "0,1", "--out", str(place)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    browser.open((place / "report.html").as_uri())
    assert drawn(browser, "objective").count('class="curve"') >= 1 and "NaN" not in drawn(browser, "density")
    assert "clients with" in browser.script(TEXT, "#clients ~ .note")  # the split is in the folder
    assert browser.script(TEXT, "#repeat").startswith("fedda run ")
