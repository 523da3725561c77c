"""The report: aggregation, errors, the page in a real browser."""

import ast
import doctest
import importlib
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, needs_browser
from fedda import report

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


def folder(path: Path, rows: list[dict[str, Any]], **files: str) -> Path:
    path.mkdir(exist_ok=True)
    labels = list(dict.fromkeys(row["algorithm"] for row in rows))
    seeds = sorted({row["seed"] for row in rows})
    config = f'title = "Heterogeneous digits"\nrounds = 100\nevery = 5\ncohort = 4\nseeds = {seeds}\n'
    config += '[problem]\ndata = "digits"\nclients = 10\npartition = "dominant_class"\nrho = 0.8\n'
    for label in labels:
        name = json.dumps(label)
        config += f'[algorithms.{name}]\nname = "fedda-mvr"\nlr = 0.02\nprox = {{kind = "l1", gamma = 0.001}}\n'
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
    run = report.read(folder(tmp_path / "run", random.Random(0).sample(rows, len(rows))))
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
    curve = report.read(folder(tmp_path / "one", rows)).curves["fedavg"]["train_loss"]
    assert [math.isnan(v) for v in curve.std] == [True] * 21
    assert report.summary(tmp_path / "one")[0]["train_loss_std"] is None

    rows = synthetic(["fedavg"], [0, 1, 2])
    for row in rows:
        if row["seed"] == 1 and row["round"] > 50:
            row["train_loss"] = None
    run = report.read(folder(tmp_path / "gap", rows))
    gap = [math.isnan(v) for v in run.curves["fedavg"]["train_loss"].mean]
    assert gap == [r > 50 for r in range(0, 101, 5)]
    final = report.summary(run)[0]
    assert (final["train_loss"], final["diverged"]) == (None, 1)
    assert final["test_loss"] is not None


def test_a_resumed_run_repeats_rounds_and_the_later_row_counts(tmp_path):
    rows = synthetic(["fedavg"], [0])
    again = [row | {"train_loss": 7.0} for row in rows if row["round"] == 50]
    curve = report.read(folder(tmp_path / "run", rows + again)).curves["fedavg"]["train_loss"]
    assert curve.mean[10] == 7.0 and len(curve.mean) == 21


def test_a_cut_last_line_is_ignored(tmp_path):
    rows = synthetic(["fedavg"], [0])
    path = folder(tmp_path / "run", rows) / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + '{"algorithm": "é'.encode()[:-1])
    assert len(report.read(tmp_path / "run").rows) == len(rows)


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
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
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


def test_a_long_curve_is_thinned_on_the_page_with_both_ends_kept(tmp_path):
    rows = [{"algorithm": "a", "seed": 0, "round": r, "train_loss": 1 / (r + 1)} for r in range(3000)]
    page = report.write(folder(tmp_path / "run", rows)).read_text()
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    rounds = data["algorithms"][0]["curves"][0]["round"]
    assert len(rounds) <= 500 and (rounds[0], rounds[-1]) == (0, 2999)
    assert len(report.read(tmp_path / "run").curves["a"]["train_loss"].mean) == 3000


def test_report_imports_neither_torch_nor_other_parts():
    for file in SOURCE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in ("torch", "fedda") and "fedda.report" not in n], file


@pytest.mark.parametrize("name", sorted(file.stem for file in SOURCE.glob("*.py")))
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"fedda.report.{name}")).failed == 0


PATHS = "return [...document.querySelectorAll('path.curve, path.band')].map(p => p.getAttribute('d'))"
CURVES = "return document.querySelectorAll('path.curve[data-algorithm=\"1\"]').length"
LABELS = "return [...document.querySelectorAll('text.label')].map(t => t.textContent)"


@pytest.mark.browser
@needs_browser
def test_the_page_works_in_a_browser(tmp_path):
    rows = synthetic(["fedavg", EVIL, "fedda-mvr"], [0, 1, 2])
    page = report.write(folder(tmp_path / "run", rows))
    with Browser() as browser:
        browser.open(page.as_uri())
        paths = browser.script(PATHS)
        assert len(paths) == 4 * 3 * 2  # panels x algorithms x (line, band)
        assert all(d and "NaN" not in d and "Infinity" not in d and "undefined" not in d for d in paths)
        assert browser.script("return document.title") == "Heterogeneous digits"
        assert browser.script("return document.getElementById('evil')") is None
        assert browser.script("return document.querySelectorAll('#legend button')[1].textContent") == EVIL

        assert browser.script(LABELS) == ["round"] * 4
        browser.click("button[data-axis=gradients]")
        assert browser.script(LABELS) == ["gradient evaluations (thousands)"] * 4
        assert browser.script(PATHS) != paths
        browser.click("button[data-axis=bytes]")
        assert browser.script(LABELS) == ["sent up and down (MB)"] * 4
        browser.click("button[data-axis=seconds]")
        assert browser.script(LABELS) == ["time (seconds)"] * 4
        browser.click("button[data-axis=round]")
        assert browser.script(PATHS) == paths

        assert browser.script(CURVES) == 4
        browser.click("#legend button:nth-child(2)")
        assert browser.script(CURVES) == 0
        browser.press("#legend button:nth-child(2)", " ")  # the keyboard does the same
        assert browser.script(CURVES) == 4

        browser.point("figure svg")
        readout = browser.script("return document.querySelector('.readout').innerText")
        width = browser.script("return document.querySelector('figure svg').clientWidth")
        nearest = 5 * round(20 * (width / 2 - 50) / (width - 62))  # 50 pixels left and 12 right of the plot
        loss = statistics.fmean(r["train_loss"] for r in rows if (r["algorithm"], r["round"]) == ("fedavg", nearest))
        assert f"round: {nearest}" in readout and f"{loss:.4g} ± " in readout
        for width in (360, 800, 1440):
            browser.size(width, 900)
            browser.point("figure:last-child svg")
            assert browser.script("return document.querySelectorAll('.readout:not([hidden])').length") == 1
            assert browser.script("return document.documentElement.scrollWidth") <= width
        assert browser.errors() == []


@pytest.mark.browser
@needs_browser
def test_strange_runs_work_in_a_browser(tmp_path):
    with Browser() as browser:
        for name, rows in STRANGE.items():
            browser.open(report.write(folder(tmp_path / name, rows)).as_uri())
            marks = browser.script("return document.querySelectorAll('path.curve, circle.dot').length")
            shapes = "return document.getElementById('panels').innerHTML"
            drawn = browser.script(shapes)
            assert not [bad for bad in ("NaN", "Infinity", "undefined") if bad in drawn], name
            assert marks > 0 or name in ("all null", "beyond"), name
            assert browser.errors() == [], name


@needs_browser
@pytest.mark.browser
def test_the_report_of_a_real_run_opens(tmp_path):
    """Not made-up rows: what `fedda run` writes, with a penalty, so that every panel is there."""
    place = tmp_path / "run"
    command = ["-m", "fedda", "run", "breast-cancer", "--rounds", "6", "--seeds", "0,1", "--out", str(place)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Browser() as browser:
        browser.open((place / "report.html").as_uri())
        paths = browser.script("return [...document.querySelectorAll('svg path')].map(p => p.getAttribute('d'))")
        assert sum(bool(d) for d in paths) >= 3 * 5 and not any("NaN" in (d or "") for d in paths)
        assert browser.errors() == []
