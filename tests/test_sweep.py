"""Sweeps: what is tried, as replicas of one program, what is best, and where it goes."""

import json
import math
import signal
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import fedda
from commands import begin, is_one_line, tiny, write
from commands import fedda as run_fedda
from conftest import NAMES, example, quadratic
from fedda import checks, registry
from fedda.experiments.config import checked, find
from fedda.experiments.grid import apply_point, points
from fedda.experiments.overrides import override
from fedda.experiments.sweep import Stack, Sweep, judge_points, search, stack_points
from fedda.progress import Silence


def experiment(**changes):
    return checked(tiny(**changes), "tiny")


# -- what is tried -----------------------------------------------------------------------------------------------------
def test_a_grid_is_a_product_and_stars_take_every_algorithm():
    found = points(experiment(), ["*.lr=x0.5,x2", "fedavg.server_lr=1,0.5", "fedda-mvr.beta=0.9,0.99"], None)
    assert found["fedavg"] == [
        {"lr": lr, "server_lr": s} for lr in (0.05, 0.2) for s in (1.0, 0.5)
    ]  # fmt: skip
    assert found["fedda-mvr"][3] == {"lr": 0.2, "beta": 0.99}


def test_a_label_with_a_dot_and_a_word_with_one():
    tables = {"a.b": {"name": "fedda-mvr", "prox": {"kind": "l1", "gamma": 0.1}}}
    found = points(experiment(algorithms=tables), ["a.b.prox.gamma=0.1,0.2"], None)
    assert found == {"a.b": [{"prox.gamma": 0.1}, {"prox.gamma": 0.2}]}
    assert apply_point({"prox": {"kind": "l1", "gamma": 0.1}}, found["a.b"][1])["prox"] == {"kind": "l1", "gamma": 0.2}


def test_multiples_of_a_whole_number_are_whole():
    assert points(experiment(), ["fedavg.steps=x1,x2"], None)["fedavg"] == [{"steps": 5}, {"steps": 10}]


def test_multiples_of_a_schedule_are_those_of_its_start():
    rate = {"kind": "cosine", "start": 0.2, "end": 0.01}
    found = points(experiment(algorithms={"fedavg": {"lr": rate}, "fedda": {}}), ["*.lr=x1,x2"], None)
    assert found == {
        "fedavg": [{"lr.start": 0.2}, {"lr.start": 0.4}], "fedda": [{"lr.start": 0.3}, {"lr.start": 0.6}],
    }  # fmt: skip
    assert apply_point({"lr": rate}, found["fedavg"][1])["lr"] == rate | {"start": 0.4}


@pytest.mark.parametrize(
    "grid,said",
    [
        (["fedda.lr=0.1,0.2", "fedda.lr=x1,x2"], "--grid: fedda.lr.start is given twice"),
        (["fedda.lr=x1,x2", "fedda.lr=0.1,0.2"], "--grid: fedda.lr is given twice"),
        (["fedda.lr=x2,0.1"], "fedda.lr is a schedule: give multiples of its start or values, not both"),
        (["fedda.lr=0.1,x2"], "fedda.lr is a schedule: give multiples of its start or values, not both"),
    ],
)
def test_a_schedule_is_swept_in_one_way(grid, said):
    with pytest.raises(ValueError, match=said):
        points(experiment(algorithms={"fedda": {}}), grid, None)


def test_parts_of_a_schedule():
    """Warm-ups are numbers, so each needs a program of its own; starts need not, also if some are whole."""
    tried = points(experiment(algorithms={"fedda": {}}), ["fedda.lr.warmup=0.05,0.1", "fedda.lr.start=0.1,1"], None)
    assert sorted(len(stack.points) for stack in stack_points(tried)) == [2, 2]
    for point in tried["fedda"]:
        fedda.make("fedda", **apply_point({"lr": {"kind": "cosine", "start": 0.3}}, point))


def test_a_budget_thins_a_grid_and_draws_from_a_range():
    grid = ["*.lr=" + ",".join(f"{0.01 * i:.2f}" for i in range(1, 21))]
    thin = points(experiment(), grid, 6)
    assert all(len(some) == 6 and len({p["lr"] for p in some}) == 6 for some in thin.values())
    assert thin == points(experiment(), grid, 6) != points(experiment(), grid, 6, draw=1)
    drawn = points(experiment(), ["*.lr=x0.1..x10", "*.steps=1,5"], 200)["fedavg"]
    logs = sorted(math.log10(p["lr"] / 0.1) for p in drawn)
    assert -1 <= logs[0] < -0.9 and 0.9 < logs[-1] <= 1 and abs(logs[100]) < 0.2
    assert {p["steps"] for p in drawn} == {1, 5}


@pytest.mark.parametrize("grids,budget,line", [
    (["fedavg.lr"], None, "--grid must be LABEL.NAME=VALUES"),
    (["problem.batch=8,16"], None, "problem.batch belongs to the problem, .* such as --set problem.batch=8, each with"),
    (["nobody.lr=1"], None, "with LABEL \\* or one of fedavg, fedda-mvr, got 'nobody.lr=1'"),
    (["fedavg.rl=1"], None, "fedavg has no hyper-parameter 'rl'; did you mean 'lr'\\?"),
    (["*.rl=1"], None, "\\* has no hyper-parameter 'rl'"),
    (["fedavg.lr=1,1.0"], None, "must be distinct values, separated by commas"),
    (["fedavg.lr=xa"], None, "must be numbers, got 'xa'"),
    (["fedavg.lr=xnan"], None, "must be finite"),
    (["fedda-mvr.mu0=x2"], None, "is a multiple, but the experiment gives no number: 'zero'"),
    (["fedavg.lr=1", "*.lr=2"], None, "fedavg.lr is given twice"),
    (["fedavg.lr=1,2", "fedda-mvr.lr=1"], None, "fedda-mvr has 1 points but fedavg has 2: every algorithm needs the same number"),
    (["fedavg.lr=1,2", "fedda-mvr.lr=1,2,3"], 3, "fedavg has 2 points but the budget is 3"),
    (["fedavg.steps=x0.5"], None, "'x0.5' of 5 is not a whole number"),
    (["*.lr=1,2"], 3, "fedavg has 2 points but the budget is 3"),
    (["fedavg.lr=0.1..1"], None, "is a range to draw from: give the number of points with --budget"),
    (["fedavg.lr=1..0.1"], 3, "a range must be LOW..HIGH with 0 < LOW < HIGH"),
    ([], None, "--grid must be given"),
])  # fmt: skip
def test_bad_grids_are_refused(grids, budget, line):
    with pytest.raises(ValueError, match=line):
        points(experiment(), grids, budget)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_every_algorithm_may_be_a_replica(name):
    """A grid over any word gives what separate runs give."""
    problem, words = quadratic(), example(name)
    for word, default in registry.algorithms.find(name).defaults.items():
        value = 50.0 if word == "c" else words.get(word, default)
        if word not in checks.BOUNDS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        values = [value * 0.9 + 1e-3, value * 0.5 + 1e-3]
        how = {"rounds": 3, "every": 3, "cohort": 3, "force": True}
        grid = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
        both = fedda.train(fedda.make(name, **words | {word: grid}), problem, seed=[3, 3], **how)
        for i, one in enumerate(values):
            alone = fedda.train(fedda.make(name, **words | {word: one}), problem, seed=3, **how)
            torch.testing.assert_close(both.x[i], alone.x, rtol=1e-12, atol=1e-12, msg=f"{name}.{word}")


# -- what comes of it --------------------------------------------------------------------------------------------------
def swept(tmp_path, grids, **changes):
    return search(Sweep(experiment(**changes), grids), tmp_path / "sweep", Silence())


def test_24_points_as_replicas_are_24_runs(tmp_path):
    """On digits with an MLP; each of the 24 also alone, by the same code with one point."""
    wanted = override(find("digits"), 10, "fedcm", "0")
    rates, shares = (0.08, 0.16, 0.32, 0.64), (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
    texts = [f"fedcm.{word}={','.join(map(str, v))}" for word, v in (("lr", rates), ("momentum", shares))]
    found = search(Sweep(wanted, texts, metric="validation_loss"), tmp_path / "all", Silence())["algorithms"]["fedcm"]
    assert len(found["points"]) == 24 and found["words"] == ["lr", "momentum"]
    for i in (0, 7, 23):
        own = [f"fedcm.{word}={value}" for word, value in found["points"][i]["values"].items()]
        alone = search(Sweep(wanted, own, metric="validation_loss"), tmp_path / str(i), Silence())
        assert alone["algorithms"]["fedcm"]["points"][0]["value"] == pytest.approx(found["points"][i]["value"], 1e-5)


def test_the_value_is_the_tail_s_mean_over_seeds_of_the_validation_split(tmp_path):
    found = swept(tmp_path, ["fedavg.lr=0.01,0.1"], rounds=40, every=1)
    rows = [json.loads(line) for line in (tmp_path / "sweep" / "metrics.jsonl").read_text().splitlines()]
    for number, point in enumerate(found["algorithms"]["fedavg"]["points"]):
        mine = [r["validation_accuracy"] for r in rows if r["point"] == number and r["round"] > 38]
        assert len(mine) == 4 and point["value"] == pytest.approx(sum(mine) / 4)
    # the split: a fifth of the training samples, in nobody's hands
    held = fedda.load("breast-cancer", clients=4, model="logistic", validation=True)
    samples = json.loads((tmp_path / "sweep" / "environment.json").read_text())["samples"]
    assert samples == int(held.sizes.sum()) < 0.81 * int(fedda.load("breast-cancer", clients=4).sizes.sum())
    assert not any("test" in key for row in rows for key in row)


def test_points_of_other_shapes_are_programs_of_their_own(tmp_path):
    found = swept(tmp_path, ["fedda-mvr.lr=0.05,0.1", "fedda-mvr.steps=1,2", "fedda-mvr.mu0=zero,nu0"])
    table = found["algorithms"]["fedda-mvr"]
    assert len({json.dumps(point["values"]) for point in table["points"]}) == 8
    assert all(point["value"] is not None for point in table["points"])
    ran = {json.loads(line)["algorithm"] for line in (tmp_path / "sweep" / "timings.jsonl").read_text().splitlines()}
    assert ran == {f"fedda-mvr #{i}" for i in (1, 2, 3, 4)}


def test_a_point_that_diverges_loses_and_the_others_are_judged(tmp_path):
    network = {"data": "breast-cancer", "clients": 4, "model": "mlp", "hidden": 4, "batch": 4}
    found = swept(tmp_path, ["fedavg.lr=1e30,0.1", "fedda-mvr.lr=1e30,1e35"], problem=network)
    bad, good = found["algorithms"]["fedavg"]["points"]
    assert (bad["value"], bad["note"], bad["best"]) == (None, "diverged", False) and good["best"]
    assert not any(point["best"] for point in found["algorithms"]["fedda-mvr"]["points"])
    assert tomllib.loads((tmp_path / "sweep" / "best.toml").read_text()) == {"fedavg": {"lr": 0.1}}


def test_points_without_all_their_rows_have_no_value(tmp_path):
    """A seed is missing, another ended early, a third is whole, a fourth ran out of memory, a fifth was refused."""
    wanted = experiment(rounds=20, every=1, seeds=[0, 1]).completed()
    lr = [{"lr": 0.1 * i} for i in range(1, 6)]
    parts = [Stack("fedavg", "a", lr[:3] + lr[4:], [0, 1, 2, 4]), Stack("fedavg", "b", lr[3:4], [3])]
    rows = [
        ("a", 0, 0, 20),
        ("a", 1, 0, 20),
        ("a", 1, 1, 12),
        ("a", 2, 0, 20),
        ("a", 2, 1, 20),
        ("a", 4, 0, 20),
        ("a", 4, 1, 20),
    ]
    lines = [
        json.dumps({"algorithm": key, "point": n, "seed": s, "round": r, "gradients": r, "validation_accuracy": 0.5})
        for key, n, s, end in rows
        for r in range(end + 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n\n\n")
    found = judge_points(Sweep(wanted, []), wanted, parts, tmp_path, {"a": {4}}, {"b": "out of memory (8 bytes)"})
    table = {json.dumps(p["values"]): (p["value"], p["note"]) for p in found["algorithms"]["fedavg"]["points"]}
    assert list(table.values()) == [
        (None, "diverged"), (None, "diverged"), (0.5, None), (None, "refused: its first rate is absurd"), (None, "out of memory"),
    ]  # fmt: skip


def test_a_metric_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="fedavg has no 'objective' on this problem"):
        search(Sweep(experiment(), ["fedavg.lr=0.1"], metric="objective"), tmp_path / "s", Silence())
    assert not list(tmp_path.iterdir())


def test_owners_of_few_samples_do_not_vanish_from_the_validation_split(tmp_path):
    client = np.repeat(np.arange(20), [1, 2, 3, 4, 5] * 4)
    x = np.random.default_rng(0).normal(size=(len(client), 3))
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(len(client)) % 2, client=client, x_test=x[:4], y_test=[0, 1, 0, 1])
    own = {"data": str(tmp_path / "own.npz"), "partition": "by_client", "clients": 20, "model": "logistic", "batch": 4}
    found = search(Sweep(experiment(problem=own, cohort=5), ["fedavg.lr=0.1"]), tmp_path / "s", Silence())
    assert found["algorithms"]["fedavg"]["points"][0]["value"] is not None
    held = fedda.load(own["data"], partition="by_client", model="logistic", validation=True)
    assert held.clients == 20 and len(held.test.y) == 4  # one of each five


def test_the_winner_is_a_preset_that_runs(tmp_path):
    file = write(tmp_path / "tiny.toml")
    done = run_fedda("sweep", file, "--grid", "*.lr=x0.01,x1", "--out", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert "best.toml" in done.stdout and "validation accuracy" in done.stdout
    best = tomllib.loads((tmp_path / "s" / "best.toml").read_text())
    done = run_fedda("run", file, "--preset", tmp_path / "s" / "best.toml", "--out", tmp_path / "r")
    assert done.returncode == 0, done.stderr
    config = tomllib.loads((tmp_path / "r" / "config.toml").read_text())
    assert config["setting"] == "tuned"
    assert {label: config["algorithms"][label]["lr"] for label in best} == {k: v["lr"] for k, v in best.items()}
    assert fedda.make("fedavg", preset=str(tmp_path / "s" / "best.toml")).lr == best["fedavg"]["lr"]


def test_a_point_that_a_run_would_refuse_does_not_win(tmp_path):
    """FedDA-2-1's first rate is lr / eps: 0.02 gives 2."""
    wanted = override(find("digits"), 6, "fedda-2-1", "0")
    texts = ["fedda-2-1.lr=1e-6,0.02"]
    for force, best in ((False, 0), (True, 1)):
        found = search(Sweep(wanted, texts, force=force), tmp_path / str(force), Silence())
        points = found["algorithms"]["fedda-2-1"]["points"]
        assert points[best]["best"] and (points[1]["note"] is None) == force


def test_lower_is_better_for_a_loss(tmp_path):
    wanted = experiment(rounds=30)
    found = search(Sweep(wanted, ["fedavg.lr=1e-6,0.1"], metric="validation_loss"), tmp_path / "s", Silence())
    assert found["better"] == "lower" and found["algorithms"]["fedavg"]["points"][1]["best"]


# -- stopping, going on, mistakes --------------------------------------------------------------------------------------
def test_a_killed_sweep_goes_on_to_the_same_rows(tmp_path):
    file = write(tmp_path / "tiny.toml", rounds=200, every=20)
    words = ("sweep", file, "--grid", "*.lr=x0.1,x0.5,x1", "--save-seconds", "0")
    whole = run_fedda(*words, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    process = begin(*words, "--out", tmp_path / "cut")
    while "\nfedda-mvr: round 0" not in Path(process.files[1]).read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut" / "sweep.json").exists()
    again = run_fedda(*words, "--out", tmp_path / "cut", "--resume")
    assert again.returncode == 0, again.stderr
    for name in ("metrics.jsonl", "sweep.json", "best.toml"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    other = run_fedda(*words[:3], "*.lr=x0.1", "--out", tmp_path / "cut", "--resume")
    assert other.returncode == 2
    is_one_line(other.stderr, "was started with another")


@pytest.mark.parametrize("words,line", [
    (("--grid", "fedavg.lr=-1"), "FedAvg: lr must be > 0, got -1.0"),
    (("--grid", "*.lr=1", "--metric", "test_accuracy"), "must be one of 'validation_accuracy'"),
    (("--grid", "*.lr=1", "--budget", "0"), "budget must be a whole number from 1 to 10000"),
    (("--grid", "*.lr=1", "--draw", "-1"), "--draw must be a whole number >= 0, got -1"),
    (("--grid", "*.lr=1", "--save-seconds", "nan"), "--save-seconds must be >= 0"),
    (("--grid", "fedavg.steps=2.5"), "steps must be a whole number >= 1, got 2.5"),
    (("--grid", "fedda-mvr.mu0=three"), "mu0 must be one of"),
    (("--grid", "*.lr=1", "--resume"), "holds no sweep to resume"),
    ((), "grid"),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, words, line):
    done = run_fedda("sweep", write(tmp_path / "tiny.toml"), *words, "--out", tmp_path / "s")
    assert done.returncode == 2, done.stderr
    is_one_line(done.stderr, line)
    assert not (tmp_path / "s").exists()
