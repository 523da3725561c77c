"""A small reproduction on digits: run in parts, stopped, resumed, packed, restored, judged and written up."""

import gzip
import itertools
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commands import inside, is_one_line, warm
from fedda import claims
from fedda.claims.runs import source
from fedda.claims.values import MethodValues, Value
from fedda.experiments import run
from fedda.experiments.config import find
from fedda.experiments.grid import points
from fedda.files import locked
from fedda.progress import Silence
from fedda.runs.reading import read_run
from fedda_paper import reproduction as runner
from fedda_paper.chapters import better_readings, edges, findings
from fedda_paper.estimate import estimate
from fedda_paper.figures import DRAWN, digests, draw_changed
from fedda_paper.layout import compress, pack, restore
from fedda_paper.page import BEGIN, END, fill_readme, filled, pages
from fedda_paper.parts import read_plan
from fedda_paper.pool import TIMES, pool_runs
from fedda_paper.reproduction import Clock, Reproduction
from fedda_paper.results import Results
from fedda_paper.study import choosing
from fedda_paper.study.studied import read_tasks
from fedda_paper.tables import as_good, best_of, cell, fallen, recommend, recommended, survivors, worse

PICTURES = True
ROOT = Path(__file__).parent.parent
MINI = """
rounds = 8
every = 2
seeds = [0, 1, 2]
overrides = ["problem.data=digits", "problem.model=mlp", "problem.hidden=8"]

[[parts]]
name = "main"
setting = "paper"
figures = ["cifar10", "cifar10-variants"]

[[parts]]
name = "pilots"
pilots = ["alpha", "start"]

[[parts]]
name = "sweep"
sweeps = ["cifar10"]

[[parts]]
name = "tuned"
setting = "tuned"
figures = ["cifar10"]
sweep = "cifar10"

[[parts]]
name = "later"
setting = "paper"
figures = ["cifar10-momentum", "femnist"]

[sweeps.cifar10]
figures = ["cifar10"]
rounds = 4
every = 2
seeds = [100]
rates = [1.0, 10.0]
server = ["fedadam", "local-adapt"]

[pilots.alpha]
question = "alpha: the history's weight or the new gradient's?"
experiment = "cifar10"
rounds = 6
every = 2
seeds = [0, 1, 2]
ours = ["history"]

[pilots.alpha.runs]
"fedda-2-1: history" = {name = "fedda-2-1", preset = "cifar10"}
"fedda-2-1: weight" = {name = "fedda-2-1", preset = "cifar10", alpha_mode = "weight"}

[pilots.start]
question = "mu_0: zero or not?"
experiment = "cifar10"
rounds = 6
every = 2
seeds = [0, 1, 2]
ours = ["nu0"]

[pilots.start.runs]
"fedda-1-2: nu0" = {name = "fedda-1-2", preset = "cifar10"}
"fedda-1-2: zero" = {name = "fedda-1-2", preset = "cifar10", mu0 = "zero"}
"""


def mini(folder):
    file = folder / "mini.toml"
    file.write_text(MINI)
    return read_plan(file)


def page(folder):
    """All pages as one text."""
    return "\n".join(pages(Results(folder)).values())


def doing(plan, folder, **how):
    return Reproduction(plan, folder, Silence(), commit="0123abc", say=lambda words: None, **how)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """All parts but the last: the plan, the working folder, the results."""
    folder = tmp_path_factory.mktemp("reproduction")
    plan = mini(folder)
    assert doing(plan, folder / "work").go(plan.select(["main", "pilots", "sweep", "tuned"]))
    pack(folder / "work", folder / "results")
    return plan, folder / "work", folder / "results"


# -- the plan of the paper -----------------------------------------------------------------------------------------------
def test_the_plan_is_the_whole_paper_at_its_length_in_both_settings():
    plan = read_plan()
    assert (plan.rounds, plan.seeds) == (4000, (0, 1, 2, 3, 4))
    for setting in ("paper", "tuned"):
        figures = {plan.figure(part, name).figure for part, name in plan.figures() if part.setting == setting}
        assert figures == set().union(*(claim.named for claim in claims.claims()))
    for part, name in plan.figures():
        experiment = plan.figure(part, name)
        assert experiment.setting == part.setting and experiment.problem.data != "pathmnist"
        assert 30 <= experiment.rounds // experiment.every <= 100  # evaluations
        assert 20 * 2 * experiment.every <= experiment.rounds  # two of them at least in the last 5 %
        if name.startswith("femnist"):
            assert (experiment.problem.clients, experiment.cohort) == (500, 50)


def test_every_sweep_gives_every_method_as_much_and_touches_no_seed_of_the_figures():
    plan = read_plan()
    (paper,) = plan.select(["cifar10"])
    budgets = {(s["rounds"], len(s["seeds"])) for s in plan.sweeps.values()}
    assert len(budgets) == 1
    for name, asked in plan.sweeps.items():
        search = plan.search(name)
        found = points(search.experiment, search.grids, None)  # refuses unequal numbers
        assert {len(own) for own in found.values()} == {len(asked["rates"])}
        assert search.metric.startswith("validation") and not set(asked["seeds"]) & set(plan.seeds)
        labels = {label for f in asked["figures"] for label in plan.figure(paper, f).algorithms}
        assert set(found) | {"fedda-1-1"} >= labels  # FedDA-1-1 is FedDA-MVR


def test_pilots_try_every_reading_and_mark_ours():
    plan = read_plan()
    assert {"beta", "mu0", "alpha", "epsilon", "epsilon-femnist", "l1"} <= set(plan.pilots)
    for name, asked in plan.pilots.items():
        experiment = plan.pilot(name)
        methods = {label.split(": ")[0] for label in experiment.algorithms}
        for method in methods:
            own = [label.split(": ")[1] for label in experiment.algorithms if label.startswith(f"{method}: ")]
            assert len(own) > 1 and len(set(own) & set(asked["ours"])) == 1, (name, method)


def test_what_figures_share_is_one_run(tmp_path):
    plan = read_plan()
    of = {
        (part.name, name): {e.label: e.folder for e in pool_runs(plan.figure(part, name), tmp_path)}
        for part, name in plan.figures()
        if part.setting == "paper"
    }
    main, variants = of["cifar10", "cifar10"], of["variants", "cifar10-variants"]
    ablation, het = of["local-steps", "cifar10-ablation"], of["heterogeneous", "cifar10-heterogeneous"]
    assert main["fedda-mvr"] == variants["fedda-1-1"] == ablation["fedda-1-1 (5)"]
    assert main["fedcm"] == of["local-steps", "cifar10-momentum"]["fedcm (5)"]
    assert len({ablation[f"fedda-1-1 ({steps})"] for steps in (5, 10, 20)}) == 3
    assert not set(main.values()) & set(het.values())
    found = {line.part: line for line in estimate(plan, list(plan.parts), tmp_path, [])}
    assert found["cifar10"].runs == 8 and found["variants"].runs == 3
    assert found["local-steps"].runs == 2 * 8 and found["local-steps"].steps == 8 * 4000 * (10 + 20)


def test_the_time_that_is_left_is_taken_from_kept_times(tmp_path):
    """Two processes side by side for 10 s, 8 and 12 s of runs: half a second of the clock per second of a run."""
    kept = {"kind": "run", "data": "cifar10", "steps": 1000, "seeds": 5, "done": True}
    times = [
        kept | {"algorithm": "fedavg", "spans": [[0.0, 8.0]]},
        kept | {"algorithm": "fedcm", "spans": [[0.0, 2.0], [0.0, 10.0]]},
        kept | {"algorithm": "stem", "spans": [], "done": False},
    ]
    (row,) = estimate(read_plan(), read_plan().select(["cifar10"]), tmp_path, times)
    steps = 4000 * 5  # of each method, with 5 seeds
    assert row.untimed == 6 and row.seconds == pytest.approx(0.5 * (8 + 12) / 5000 * steps * 5)


# -- the miniature -------------------------------------------------------------------------------------------------------
def rows_of(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_each_run_is_run_once_and_keeps_no_checkpoint(made):
    _, folder, _ = made
    runs = [
        row["name"]
        for row in map(json.loads, (folder / "times.jsonl").read_text().splitlines())
        if row["kind"] == "run"
    ]
    assert len(runs) == len(set(runs)) == len(list((folder / "runs").iterdir()))
    # 8 of the comparison, 3 variants more, 2 readings that are not the presets' own; the tuned ones that moved
    best = Results(made[2]).sweeps["cifar10"]["algorithms"].values()
    moved = sum(own["points"][1]["best"] for own in best)
    assert moved > 0 and len(runs) == 8 + 3 + 2 + moved
    assert not list(folder.glob("runs/*/checkpoint"))


def test_a_figure_put_together_is_the_figure_run_by_itself(made, tmp_path):
    plan, _, results = made
    run(plan.figure(plan.parts[0], "cifar10-variants"), tmp_path / "run", Silence(), threads=1)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    alone = list(map(json.loads, text.splitlines()))
    kept = rows_of(results / "paper" / "cifar10-variants" / "metrics.jsonl.gz")
    assert [(r["algorithm"], r["round"], r["seed"]) for r in kept] == [
        (r["algorithm"], r["round"], r["seed"]) for r in alone
    ]
    for a, b in zip(kept, alone, strict=True):
        assert a == {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in b.items()}
    config, own = (read_run(p).config for p in (results / "paper" / "cifar10-variants", tmp_path / "run"))
    assert config == own


def test_a_shorter_pilot_is_the_beginning_of_a_longer_run(made):
    _, _, results = made
    kept = rows_of(results / "pilots" / "alpha" / "metrics.jsonl.gz")
    longer = rows_of(results / "paper" / "cifar10-variants" / "metrics.jsonl.gz")
    mine = [r | {"algorithm": ""} for r in kept if r["algorithm"] == "fedda-2-1: history"]
    assert mine == [r | {"algorithm": ""} for r in longer if r["algorithm"] == "fedda-2-1" and r["round"] <= 6]


def test_tuned_figures_have_the_winners_of_their_sweep(made):
    _, _, results = made
    sweep = Results(results).sweeps["cifar10"]
    config = read_run(results / "tuned" / "cifar10").config
    assert config["setting"] == "tuned"
    for label, own in sweep["algorithms"].items():
        (best,) = (p["values"] for p in own["points"] if p["best"])
        assert best and all(config["algorithms"][label][word] == value for word, value in best.items())
    assert [w for w in sweep["algorithms"]["fedadam"]["words"]] == ["server_lr"]


def test_what_a_figure_was_made_with_is_kept(made):
    _, _, results = made
    about = json.loads((results / "paper" / "cifar10" / "environment.json").read_text())
    assert about["commits"] == ["0123abc"] and about["commands"] and about["torch"] and about["precision"]
    assert sum(p.stat().st_size for p in results.rglob("*") if p.is_file()) < 2_000_000
    assert not list(results.rglob("*.safetensors"))


def test_packing_again_gives_the_same_bytes_and_leaves_what_is_not_ours(made):
    _, folder, results = made
    (results / "theory").mkdir(exist_ok=True)
    (results / "theory" / "theory.json").write_text('{"C29": {"verdict": "SUPPORTED", "reason": "slope -0.67"}}')
    try:
        before = {p: p.read_bytes() for p in results.rglob("*") if p.is_file()}
        pack(folder, results)
        assert {p: p.read_bytes() for p in results.rglob("*") if p.is_file()} == before
        assert Results(results).verdict("paper", "C29").verdict == "SUPPORTED"
        assert "slope -0.67" in page(results)
    finally:
        shutil.rmtree(results / "theory")


def test_what_is_kept_is_not_replaced_by_less(made, tmp_path):
    plan, folder, results = made
    shutil.copytree(results / "pilots", tmp_path / "results" / "pilots")
    shutil.copytree(folder, tmp_path / "work")
    (gone,) = (e for e in pool_runs(plan.pilot("alpha"), tmp_path / "work") if e.label.endswith("weight"))
    shutil.rmtree(gone.folder)
    with pytest.raises(ValueError, match=r"alpha: holds fedda-2-1: weight, which .*work has not run"):
        pack(tmp_path / "work", tmp_path / "results")
    (bare := tmp_path / "bare").mkdir()
    shutil.copy(folder / "parts.toml", bare)
    assert pack(bare, tmp_path / "results") == [] and len(list((tmp_path / "results" / "pilots").iterdir())) == 2


def test_stopped_when_the_time_is_over_and_resumed_to_the_same_bytes(made, tmp_path, monkeypatch):
    """The same seeds twice give the same curves, however often the second was stopped."""
    plan, _, results = made
    rounds = itertools.count(1)
    monkeypatch.setattr(Clock, "over", property(lambda clock: next(rounds) % 13 == 0))
    parts, calls = plan.select(["main"]), 1
    while not doing(plan, tmp_path / "work").go(parts):
        calls += 1
    assert calls > 5
    pack(tmp_path / "work", tmp_path / "results")
    for name in ("cifar10", "cifar10-variants"):
        file = Path("paper") / name / "metrics.jsonl.gz"
        assert (tmp_path / "results" / file).read_bytes() == (results / file).read_bytes()


def test_time_is_over_where_signals_are_ignored_too(tmp_path, monkeypatch):
    plan, rounds = mini(tmp_path), itertools.count(1)
    monkeypatch.setattr(Clock, "over", property(lambda clock: next(rounds) > 4))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert not doing(plan, tmp_path / "work").go(plan.select(["main"]))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_tuned_part_waits_for_its_sweep(tmp_path):
    plan, said = mini(tmp_path), []
    reproduction = doing(plan, tmp_path / "work")
    reproduction.say = said.append
    assert reproduction.go(plan.select(["tuned"])) and not (tmp_path / "work" / "runs").exists()
    assert said == ["tuned: waits for the sweep 'cifar10'"]


def test_processes_share_a_folder_and_do_each_thing_once(made, tmp_path):
    """Three of the same command at a time; who has nothing to do waits for a sweep that another is at."""
    _, _, results = made
    mini(tmp_path)
    words = ["reproduce", "main", "sweep", "tuned", "--no-pack", "--parts", "mini.toml", "--work", "work"]
    each = [warm().start(["fedda", *words], cwd=tmp_path) for _ in range(3)]
    said = [process.communicate() for process in each]
    assert [process.returncode for process in each] == [0, 0, 0], said
    rows = [json.loads(line) for line in (tmp_path / "work" / "times.jsonl").read_text().splitlines()]
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names)) > 15
    pack(tmp_path / "work", tmp_path / "results")
    for file in ("paper/cifar10", "paper/cifar10-variants", "tuned/cifar10"):
        one, three = (folder / file / "metrics.jsonl.gz" for folder in (results, tmp_path / "results"))
        assert one.read_bytes() == three.read_bytes()


def test_the_time_of_a_killed_process_is_kept_by_the_next(tmp_path):
    file = tmp_path / "mini.toml"
    file.write_text(MINI.replace("rounds = 8\nevery = 2", "rounds = 1000000\nevery = 500", 1))
    words = ["reproduce", "main", "--no-pack", "--parts", "mini.toml", "--work", "work"]
    with subprocess.Popen([sys.executable, "-m", "fedda", *words], cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        while not (notes := [p for p in (tmp_path / "work" / "begun").glob("run-*") if p.suffix != ".tmp"]):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    left = json.loads(notes[0].read_text())
    assert left["wall"] >= runner.BEAT and not (tmp_path / "work" / TIMES).exists()
    plan = read_plan(file)
    assert not doing(plan, tmp_path / "work", seconds=0.1).go(plan.select(["main"]))
    rows = [json.loads(line) for line in (tmp_path / "work" / TIMES).read_text().splitlines()]
    assert rows[0] == left and rows[1]["name"] == left["name"] and rows[1]["began"] > left["began"] + left["wall"]
    assert not notes[0].exists()


def test_what_another_process_has_is_left_to_it(tmp_path):
    plan = mini(tmp_path)
    first = pool_runs(plan.figure(plan.parts[0], "cifar10"), tmp_path / "work")[0]
    reproduction = doing(plan, tmp_path / "work")
    with locked(reproduction.lock("run", first.name)):
        assert not reproduction.go([plan.parts[0]])
    assert reproduction.why == "other processes run the rest" and not first.folder.exists()
    assert reproduction.go([plan.parts[0]]) and first.done


def test_what_ended_before_it_had_a_folder_is_packed_around(made, tmp_path):
    """Stopped while its kernels were compiled: there is its time, and nothing else."""
    plan, folder, _ = made
    shutil.copytree(folder, tmp_path / "work")
    (gone,) = (e for e in pool_runs(plan.pilot("alpha"), tmp_path / "work") if e.label.endswith("weight"))
    shutil.rmtree(gone.folder)
    pack(tmp_path / "work", tmp_path / "results")
    times = {row["name"]: row for row in json.loads((tmp_path / "results" / "times.json").read_text())}
    assert times[gone.name]["rounds_seconds"] == 0.0 and not times[gone.name]["done"]


def test_a_sweep_that_ran_out_of_memory_is_not_over(tmp_path, monkeypatch):
    plan = mini(tmp_path)
    full, short = runner.search, {"done": False}

    def search(*args, **how):
        found = full(*args, **how)
        if not short["done"]:
            found["algorithms"]["fedavg"]["points"][0]["note"] = "out of memory"
        return found

    monkeypatch.setattr(runner, "search", search)
    reproduction = doing(plan, tmp_path / "work")
    assert not reproduction.go(plan.select(["sweep", "tuned"])) and not (tmp_path / "work" / "runs").exists()
    assert reproduction.why == "some ran out of memory"
    short["done"] = True
    assert doing(plan, tmp_path / "work").go(plan.select(["sweep"]))


def test_a_part_may_have_rounds_and_a_precision_of_its_own(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(MINI.replace('name = "main"', 'name = "main"\nrounds = 4\nprecision = "half"', 1))
    plan = read_plan(file)
    (part, *_) = plan.parts
    assert plan.figure(part, "cifar10").rounds == 4
    with pytest.raises(ValueError, match="half"):  # handed on to the run, which knows which there are
        doing(plan, tmp_path / "work").go([part])


def test_what_cannot_be_resumed_is_run_again_when_more_rounds_are_wanted(tmp_path):
    plan = mini(tmp_path)
    short = tmp_path / "short.toml"
    short.write_text(
        MINI.replace("rounds = 8", "rounds = 4", 1).replace('"cifar10", "cifar10-variants"', '"cifar10-variants"')
    )
    assert doing(read_plan(short), tmp_path / "work").go(read_plan(short).select(["main"]))
    assert doing(plan, tmp_path / "work").go([plan.parts[0]])
    assert {e.rounds for e in pool_runs(plan.figure(plan.parts[0], "cifar10-variants"), tmp_path / "work")} == {8}


def test_a_damaged_file_is_said(made, tmp_path):
    shutil.copytree(made[2] / "pilots" / "alpha", tmp_path / "alpha")
    file = tmp_path / "alpha" / "metrics.jsonl.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"metrics.jsonl.gz: not a whole gzip file"):
        read_run(tmp_path / "alpha")


# -- the page ------------------------------------------------------------------------------------------------------------
def test_the_page_is_a_function_of_the_results_alone(made, tmp_path):
    _, _, results = made
    shutil.copytree(results, tmp_path / "copy")
    assert page(tmp_path / "copy") == page(results)
    rows = rows_of(results / "paper" / "cifar10" / "metrics.jsonl.gz")
    for row in rows:
        if row["algorithm"] == "fedavg" and row["round"] == 8:
            row["test_accuracy"] = 0.5
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "copy" / "paper" / "cifar10" / "metrics.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert "| fedavg |" in page(results) and page(tmp_path / "copy") != page(results)


def test_the_page_s_numbers_are_those_of_the_rows(made):
    """The last 5 % of 8 rounds is round 8 alone: mean and deviation over seeds, taken here from the rows."""
    _, _, results = made
    text = page(results)
    rows = rows_of(results / "paper" / "cifar10" / "metrics.jsonl.gz")
    for label in ("fedda-mvr", "local-adapt"):
        last = [r["test_accuracy"] for r in rows if r["algorithm"] == label and r["round"] == 8]
        assert f"{100 * statistics.fmean(last):.1f} ± {100 * statistics.stdev(last):.1f} %" in text
    assert "](cifar10-paper.png)" in text
    group = {g.setting: g for g in claims.verdicts([results])}["paper"]
    for verdict in group.verdicts:
        if verdict.verdict != "NOT TESTED":
            section = text[text.index(f"### {verdict.claim.id}\n") :].split("\n### ")[0]
            outcomes = [d.verdict for d in verdict.deciding]
            number = {o: outcomes.count(o) for o in ("SUPPORTED", "NOT SUPPORTED", "INCONCLUSIVE")}
            lost, undecided = number["NOT SUPPORTED"], number["INCONCLUSIVE"]
            counts = f"{number['SUPPORTED']} of {len(outcomes)} comparisons won, {lost} lost, {undecided} undecided"
            short = len(outcomes) == 1 or number["SUPPORTED"] == len(outcomes)
            assert counts in section or (short and ("The one comparison" in section or "were won" in section))
            assert section.count("| won |") >= number["SUPPORTED"]  # each of them is in the table
    times = json.loads((results / "times.json").read_text())
    steps = sum(row["steps"] * row["seeds"] for row in times)
    assert f"| **all** | {len(times)} | {steps:,} |" in text
    assert "\n- `" in text[text.index("What is kept was run by these commands") :]  # by which command


def test_a_picture_is_drawn_again_only_if_its_run_changed(made, tmp_path):
    shutil.copytree(made[2], tmp_path / "r")
    draw_changed(Results(tmp_path / "r"), tmp_path)
    drawn = sorted(tmp_path.glob("*.png"))
    assert [p.name for p in drawn] == sorted(digests(Results(made[2]))) and len(drawn) > 2
    for path in drawn:
        path.write_bytes(b"old")
    rows = rows_of(tmp_path / "r" / "tuned" / "cifar10" / "metrics.jsonl.gz")
    (tmp_path / "r" / "tuned" / "cifar10" / "metrics.jsonl.gz").write_bytes(compress(rows[:-1]))
    draw_changed(Results(tmp_path / "r"), tmp_path)
    assert [p.name for p in drawn if p.read_bytes() != b"old"] == ["cifar10-tuned.png"]


def test_what_was_not_run_is_said(made, tmp_path):
    _, _, results = made
    text = page(results)
    femnist = pages(Results(results))["reproduction/femnist.md"]
    assert "- At the paper's values: **not run**." in femnist
    missing = "**not run: fedcm (10), fedda-2-1 (10), fedda-2-2 (10), fedcm (20)"  # the others are there
    assert f"data digits, precision float32; {missing}" in text
    found = Results(results)
    whole = [name for (_, name), run in found.figures.items() if set(run.run.labels) == set(find(name).algorithms)]
    part = len(found.figures) - len(whole)
    assert part and f"\n{len(whole)} of {len(list(found.plan.figures()))} figures were run, and {part} in part" in text
    nothing = page(tmp_path / "nowhere")
    assert (
        "None of the 22 figures has been run yet" in nothing
        and "fedda theory --out paper/results/theory" in nothing
        and nothing.count("not run") > 22
    )
    assert "SUPPORTED |" not in nothing.replace("✓ SUPPORTED | 0 |", "").replace("✗ NOT SUPPORTED | 0 |", "")


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_checkout_is_enough_to_go_on(made, tmp_path):
    """What is kept counts as done in a new working folder, which packs to the same bytes, times and all."""
    plan, work, results = made
    taken = restore(plan, results, tmp_path / "work")
    ran = {p.name for p in (work / "runs").iterdir()} | {p.name for p in (work / "sweeps").iterdir()}
    assert set(taken) == ran and len(taken) == len(ran)
    assert restore(plan, results, tmp_path / "work") == []
    before, now = (
        {line.part: line for line in estimate(plan, list(plan.parts), w, [])} for w in (work, tmp_path / "work")
    )
    assert {k: (v.runs, v.done) for k, v in now.items()} == {k: (v.runs, v.done) for k, v in before.items()}
    pack(tmp_path / "work", tmp_path / "results")
    assert files(tmp_path / "results") == files(results)


def test_a_run_with_other_values_is_not_taken_and_what_is_begun_gives_way(made, tmp_path):
    plan, _, results = made
    other = mini(tmp_path).__class__(**(vars(mini(tmp_path)) | {"seeds": (0, 1)}))
    taken = restore(other, results, tmp_path / "other")
    assert taken and not any(e.done for e in pool_runs(other.figure(other.parts[0], "cifar10"), tmp_path / "other"))
    first, *_ = pool_runs(plan.figure(plan.parts[0], "cifar10"), tmp_path / "work")
    first.folder.mkdir(parents=True)
    (first.folder / "metrics.jsonl").write_text("half a li")
    with locked(tmp_path / "work" / "locks" / f"run-{first.name}"):  # somebody is at it
        assert first.name not in restore(plan, results, tmp_path / "work") and not first.done
    assert restore(plan, results, tmp_path / "work") == [first.name] and first.done


def test_pilots_say_what_was_found(made):
    _, _, results = made
    found = Results(results)
    ((name, against, line),) = findings(found.pilots["alpha"], ["history"], "train_loss")
    last = {
        label: [r["train_loss"] for r in found.pilots["alpha"].run.rows if r["algorithm"] == label and r["round"] == 6]
        for label in ("fedda-2-1: history", "fedda-2-1: weight")
    }
    differences = [a - b for a, b in zip(*last.values(), strict=True)]
    bar = 4.302653 * statistics.stdev(differences) / math.sqrt(3)  # Student's t for three seeds
    better, worse = statistics.fmean(differences) < -bar, statistics.fmean(differences) > bar
    words = (
        "ours, history, has the best" if better else "weight has a better" if worse else "ours, history, cannot be told"
    )
    assert words in line and (name, against) == ("fedda-2-1", worse)
    ((_, _, start),) = findings(found.pilots["start"], ["nu0"], "train_loss")
    assert start.startswith("fedda-1-2: ours, nu0")


def test_a_pilot_that_speaks_against_a_reading_is_named_beside_the_figure(made):
    """Whatever the pilot says of our reading, the figures on its data that hold the method are told when it is worse."""
    found = Results(made[2])
    figure = next(run for (setting, name), run in found.figures.items() if name == "cifar10-variants")
    start, told = found.pilots["start"], {}
    rows = [
        row | {"train_loss": (1.0 if row["algorithm"].endswith("nu0") else 1.5) + 0.01 * row["seed"]}
        for row in start.run.rows
    ]
    found.pilots["start"] = replace(start, run=replace(start.run, rows=rows))
    for ours in ("nu0", "zero"):
        found.plan.pilots["start"]["ours"] = [ours]
        ((name, against, line),) = findings(found.pilots["start"], [ours], "train_loss")
        told[ours] = against
        assert len([said for said in better_readings(found, figure) if line in said]) == against and name == "fedda-1-2"
    assert told == {"nu0": False, "zero": True}


def test_a_table_marks_all_that_cannot_be_told_from_the_best_and_says_when_a_method_diverged():
    def over(values):
        return Value(dict(enumerate(values)))

    found = {"a": [0.90, 0.91, 0.92], "b": [0.89, 0.90, 0.93], "c": [0.5, 0.5, 0.51]}
    table = {k: MethodValues(k, {"test_accuracy": over(v)}, 3) for k, v in found.items()}
    assert [k for k, m in table.items() if as_good(m, table["a"], "test_accuracy")] == ["a", "b"]
    found = {"empty": [0.0, 0.0, 0.0], "dense": [0.85, 0.86, 0.87], "sparse": [0.08, 0.09, 0.08]}
    table = {k: MethodValues(k, {"density": over(v), "nonzero": over(v)}, 3) for k, v in found.items()}
    best = best_of(list(table.values()), "density")
    assert [k for k, m in table.items() if as_good(m, best, "density")] == ["sparse"]
    whole = {
        k: MethodValues(k, {"density": over(v), "nonzero": over([1.0, 1.0, 1.0])}, 3)
        for k, v in found.items()
        if k != "empty"
    }
    assert best_of(list(whole.values()), "density") is None  # small weights, but none that is zero
    rows = [
        {"round": r, "seed": s, "test_accuracy": None if r + s > 5 else 0.5} for r in (0, 2, 4, 6) for s in (0, 1, 2)
    ]
    assert cell(MethodValues("d", {}, 3, "diverged in 2 of 3 seeds", rows=tuple(rows)), "test_accuracy") == (
        "diverged in 2 of 3 seeds, the first after round 2"
    )


def test_who_falls_back_or_survives_is_named(made, tmp_path):
    """A run whose rows are made: 80 % at round 4 and 60 % at the end is a fall, 80 % and 79 % is none."""
    folder = tmp_path / "run"
    shutil.copytree(made[2] / "paper" / "cifar10", folder)
    ends = {"fedavg": 0.6, "fedcm": 0.79}
    rows = [
        row | {"test_accuracy": {0: 0.1, 4: 0.8, 8: ends[row["algorithm"]]}.get(row["round"], 0.5), "train_loss": 1.0}
        for row in rows_of(folder / "metrics.jsonl.gz")
        if row["algorithm"] in ends
    ]
    (folder / "metrics.jsonl.gz").write_bytes(compress(rows))
    assert list(fallen(source(folder))) == [
        "- fedavg falls back: its test accuracy was 80.0 % at round 4, and ends at 60.0 %."
    ]
    assert list(survivors(source(folder))) == []
    for row in rows:
        if row["algorithm"] == "fedcm" and row["seed"] == 1 and row["round"] > 3:
            row["test_accuracy"] = None
    (folder / "metrics.jsonl.gz").write_bytes(compress(rows))
    assert list(survivors(source(folder))) == [
        "- fedcm: 2 of its seeds did not diverge, with test accuracy 79.0 ± 0.0 %, train loss 1 ± 0."
    ]


def test_a_tuned_value_on_an_edge_is_named_beside_the_figure(made):
    """Of two rates that were tried every winner is on an edge; of three, the middle one is not."""
    found = Results(made[2])
    part = next(part for part in found.plan.parts if part.name == "tuned")
    own = found.sweeps["cifar10"]["algorithms"]
    chosen = [label for label in own if any(point["best"] for point in own[label]["points"])]
    assert list(edges(found, part, "cifar10")) == chosen and len(chosen) > 4
    assert f"beyond it: {', '.join(chosen)}." in page(made[2])
    for label in own:
        own[label]["points"] += [{"values": {w: v}, "best": False} for w in own[label]["words"] for v in (0.0, 1e9)]
    assert list(edges(found, part, "cifar10")) == []


def test_theory_has_one_verdict(made, tmp_path):
    shutil.copytree(made[2], tmp_path / "results")
    shutil.copytree(ROOT / "paper" / "results" / "theory", tmp_path / "results" / "theory")
    rows = [line for line in page(tmp_path / "results").splitlines() if line.startswith("| [C")]
    assert [line[3:6] for line in rows if line.endswith("| theory | theory |")] == ["C26", "C27", "C28", "C29", "C30"]


def test_a_run_that_is_no_longer_asked_for_has_no_place_in_the_times(made, tmp_path):
    _, work, results = made
    shutil.copytree(work, tmp_path / "work")
    with open(tmp_path / "work" / TIMES, "a", encoding="utf-8") as file:
        file.write(json.dumps(json.loads((work / TIMES).read_text().splitlines()[0]) | {"name": "of-old"}) + "\n")
    pack(tmp_path / "work", tmp_path / "results")
    assert (tmp_path / "results" / "times.json").read_bytes() == (results / "times.json").read_bytes()


def test_the_advice_follows_its_rule(made):
    """Recomputed from the rows: the fewest bytes among those that a t test over the seeds does not tell from the best."""
    results = made[2]
    last = {}
    for row in rows_of(results / "tuned" / "cifar10" / "metrics.jsonl.gz"):
        if row["round"] == 8:
            last.setdefault(row["algorithm"], []).append(row)
    mean = {k: statistics.fmean(r["test_accuracy"] for r in v) for k, v in last.items()}
    best = max(mean, key=mean.get)
    by_seed = {k: {r["seed"]: r["test_accuracy"] for r in v} for k, v in last.items()}
    behind = {k: [v - by_seed[k][seed] for seed, v in by_seed[best].items()] for k in mean}
    bar = 4.302653 / 3**0.5  # Student's t for three seeds
    equal = {k for k, d in behind.items() if statistics.fmean(d) <= bar * statistics.stdev(d) + 1e-12}
    first = {r["algorithm"]: r for r in rows_of(results / "tuned" / "cifar10" / "metrics.jsonl.gz") if r["round"] == 0}
    sent = {k: sum(v[0][w] - first[k][w] for w in ("bytes_up", "bytes_down")) for k, v in last.items()}
    least = min(sent[k] for k in equal)
    near = [k for k in equal if sent[k] <= least * 1.001]
    found, others, take, why = recommended([Results(results).figures["tuned", "cifar10"]])
    label = re.compile(r" \(alpha = 1: [^)]*\)")
    assert found.startswith(best) and set(label.sub("", others).split(", ")) - {"no other"} == equal - {best}
    assert label.sub("", take) == min(near, key=lambda k: (last[k][0]["gradients"], -mean[k]))
    assert (why == "is alone") == (len(equal) == 1)


def test_bytes_that_a_start_adds_decide_nothing():
    """As many bytes a round, one method with a start: the fewer gradients decide."""

    def over(values):
        return Value(dict(enumerate(values)))

    def method(label, start, gradients):
        rows = [
            {"round": r, "seed": 0, "bytes_up": start + 1000 * r, "bytes_down": 500 * r, "gradients": gradients * r}
            for r in (0, 100)
        ]
        return MethodValues(label, {"test_accuracy": over([0.8, 0.81, 0.82])}, 3, rows=tuple(rows), rounds=100)

    chosen, why = recommend([method("many", 0, 12), method("few", 900, 5)])
    assert chosen.label == "few" and "takes the fewest gradients, 500" in why
    assert recommend([method("many", 0, 12)])[1] == "is alone"


def test_who_is_no_better_than_a_constant_learns_nothing(made):
    """A pilot of two readings: one predicts a constant in every seed, ours wavers about the same loss."""
    pilot = Results(made[2]).pilots["start"]
    rows = []
    for row in pilot.run.rows:
        ours = row["algorithm"].endswith("nu0")
        accuracy = 0.1 + (0.001 * row["seed"] if ours else 0.0)
        rows.append(
            row | {"train_loss": 2.31 + 0.01 * row["seed"], "train_accuracy": accuracy, "test_accuracy": accuracy}
        )
    for m in list(rows[0]):
        if m in ("density", "nonzero"):
            rows = [row | {m: 1.0} for row in rows]
    changed = replace(pilot, run=replace(pilot.run, rows=rows))
    ((_, against, line),) = findings(changed, ["nu0"], "train_loss")
    assert (against, line) == (False, "fedda-1-2: no reading learns anything.")


def test_tuned_values_that_are_the_paper_s_are_said_to_be_the_same_runs(made, tmp_path):
    same = "the sweep chose the paper's values, so these are the same runs."
    assert same not in page(made[2])
    shutil.copytree(made[2], tmp_path / "results")
    shutil.rmtree(tmp_path / "results" / "tuned" / "cifar10")
    shutil.copytree(made[2] / "paper" / "cifar10", tmp_path / "results" / "tuned" / "cifar10")
    text = page(tmp_path / "results")
    assert same in text and "](cifar10-tuned.png)" not in text


def test_who_ends_worse_tuned_is_named(made, tmp_path):
    """The paper's run with fedavg's test accuracy raised in one copy and lowered in the other."""
    for name, accuracy in (("before", 0.9), ("now", 0.8)):
        shutil.copytree(made[2] / "paper" / "cifar10", tmp_path / name)
        rows = [row for row in rows_of(tmp_path / name / "metrics.jsonl.gz") if row["algorithm"] in ("fedavg", "fedcm")]
        rows = [row | ({"test_accuracy": accuracy} if row["algorithm"] == "fedavg" else {}) for row in rows]
        (tmp_path / name / "metrics.jsonl.gz").write_bytes(compress(rows))
    assert list(worse(source(tmp_path / "now"), source(tmp_path / "before"))) == [
        "- fedavg ends worse than at the paper's values: test accuracy 90.0 ± 0.0 %, tuned 80.0 ± 0.0 %."
    ]
    assert list(worse(source(tmp_path / "before"), source(tmp_path / "now"))) == []


def test_the_readme_gets_the_counts_once(made):
    _, _, results = made
    text = (ROOT / "README.md").read_text()
    once = fill_readme(text, Results(results))
    assert fill_readme(once, Results(results)) == once
    assert once.count("| verdict |") == 1
    with pytest.raises(ValueError, match="has no generated part"):
        fill_readme("# A", Results(results))


def test_the_pages_of_this_checkout_are_up_to_date():
    """To write them anew: fedda reproduce --docs"""
    results = ROOT / "paper" / "results"
    for path, text in pages(Results(results)).items():
        assert (ROOT / "docs" / path).read_text() == text, path
        assert "['" not in text  # a list of Python's, where words belong
    folder = ROOT / "docs" / "reproduction"
    assert json.loads((folder / DRAWN).read_text()) == digests(Results(results))
    assert {p.name for p in folder.glob("*.png")} == set(digests(Results(results)))
    text = (ROOT / "README.md").read_text()
    assert text == fill_readme(text, Results(results))
    assert text == filled(text, choosing.BEGIN, choosing.readme_part(read_tasks(results), Results(results)))
    assert text[: text.index(choosing.OVERVIEW)].count("![") == 1  # the first picture
    assert sum(p.stat().st_size for p in results.rglob("*") if p.is_file()) < 15 * 2**20


# -- the command ---------------------------------------------------------------------------------------------------------
def test_the_command_runs_packs_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mini.toml").write_text(
        MINI.replace('"cifar10", "cifar10-variants"', '"cifar10-variants"').replace("rounds = 8", "rounds = 2", 1)
    )
    how = ("--parts", "mini.toml", "--work", "w", "--out", "r")
    code, out, _ = inside(capsys, monkeypatch, "reproduce", *how, "--plan")
    assert code == 0 and "main" in out and not Path("w").exists()
    code, out, _ = inside(capsys, monkeypatch, "reproduce", "main", *how, "--minutes", "1e-9")
    assert code == 0 and "the same command resumes" in out and not Path("r").exists()
    code, out, _ = inside(capsys, monkeypatch, "reproduce", "main", *how, "--minutes", "5", "--commit", "abc")
    assert code == 0 and "kept: r/paper/cifar10-variants" in out
    assert json.loads(Path("r/paper/cifar10-variants/environment.json").read_text())["commits"] == ["abc"]
    code, out, _ = inside(capsys, monkeypatch, "claims", "r")
    assert code == 0 and "C16" in out
    code, out, _ = inside(capsys, monkeypatch, "report", "r/paper/cifar10-variants")
    assert code == 0 and "fedda-2-2" in out
    is_one_line(inside(capsys, monkeypatch, "reproduce", "--docs", "--out", "r")[2], "run it in a checkout")
    Path("docs").mkdir()
    Path("README.md").write_text(f"# A\n\n{BEGIN}\n{END}\n")
    assert inside(capsys, monkeypatch, "reproduce", "--docs", "--out", "r")[0] == 0
    for path, text in pages(Results(Path("r"))).items():
        assert Path("docs", path).read_text() == text
    assert Path("docs/reproduction/cifar10-variants-paper.png").read_bytes()[:4] == b"\x89PNG"


def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("parts = 3")
    PARTS = ", ".join(part.name for part in read_plan().parts)
    for words, said in (
        (["cifar"], "unknown part 'cifar'; the parts are " + PARTS),
        (["digits"], "unknown part 'digits'; the parts are " + PARTS),
        (["--parts", "none.toml"], "none.toml: cannot be read"),
        (["--parts", "broken.toml"], "is not a plan of a reproduction"),
        (["--minutes", "0"], "--minutes must be a number > 0"),
        (["--docs", "--smoke"], "exclude each other"),
        (["--smoke"], "--smoke needs a figure: cifar10"),
        (["digits", "--smoke"], "--smoke takes a figure, got 'digits'"),
        (["--precision", "half"], "precision"),
    ):
        code, _, err = inside(capsys, monkeypatch, "reproduce", *words)
        assert code == 2
        is_one_line(err, said)


def test_commit_here_is_that_of_the_checkout():
    assert re.fullmatch(r"[0-9a-f]{40}( with changes)?|unknown", runner.current_commit())
