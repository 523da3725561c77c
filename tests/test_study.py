"""The study's rules on made-up results, and the whole protocol on the digits at a tiny size."""

import collections
import dataclasses
import doctest
import json
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import fedda
from conftest import quadratic
from fedda.data import open_dataset
from fedda.experiments import find
from fedda.training import for_rounds
from fedda_paper.page import filled
from fedda_paper.results import Results
from fedda_paper.study import (
    choosing,
    methods,
    missing,
    new_tasks,
    picture,
    program,
    protocol,
    records,
    rules,
    setting,
    studied,
    study_page,
    summary,
    untuned,
    variants,
)

ROOT = Path(__file__).parents[1]

LR = methods.StudyAxis("lr", (0.01, 0.0316, 0.1))
ONE = methods.StudyMethod("fedavg", {}, (LR, methods.StudyAxis("schedule", ("constant", "cosine"))))
HOW = program.How("digits-heterogeneous")


def made_up(value, ran=None, breaks_after=math.inf):
    """Instead of training: `value(point, job)` is the best validation accuracy, None for a point that diverged."""

    def run(how, job):
        if len(ran) >= breaks_after:
            raise KeyboardInterrupt
        ran.append((job.method.name, job.stage, job.seed, [methods.key(p) for p in job.points]))
        for point in job.points:
            found = value(point, job)
            columns = ["round", "validation_accuracy", "validation_loss"]
            rows = [[1, 0.05, 1.0], [2, found, 1.0]] if found is not None else []
            if job.stage == "finals":
                columns, rows = [*columns, "test_accuracy"], [[*row, 0.5] for row in rows]
            yield {"method": job.method.name, "stage": job.stage, "point": point, "seed": job.seed,
                   "diverged": found is None, "columns": columns, "rows": rows, "rounds": job.rounds}  # fmt: skip

    ran = [] if ran is None else ran
    return lambda how, job: list(run(how, job))


def of(out, value, method=ONE, **more):
    wanted = protocol.Study(HOW, out, 8, {method.name: method}, run=made_up(value, **more))
    wanted.drive()
    return wanted.states()[method.name], wanted.kept


def near(best):
    """The nearer to the best rate the better."""
    return lambda point, job: 0.9 - 0.1 * abs(math.log10(point["lr"] / best)) + 1e-4 * (point["schedule"] == "cosine")


def test_examples():
    for module in (methods, program, studied):
        assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize(
    "preset", ["cifar10-heterogeneous", "femnist", "digits", "shakespeare", "cifar10-resnet", "shakespeare-small"]
)
def test_every_method_has_the_same_budget(preset):
    found = methods.methods(preset)
    assert len(found) == 12 and {len(m.grid) for m in found.values()} == {18}
    for method in found.values():
        assert len({methods.key(p) for p in method.grid}) == 18
        assert method.paper is None or method.paper[method.rate] in method.axes[0].values
        program.algorithm(method, method.grid, 8)  # every point can be built


def test_other_local_steps_tune_the_rate_alone():
    for method in methods.methods("cifar10-heterogeneous").values():
        chosen = method.grid[7]
        again = methods.with_steps(method, chosen, 20)
        assert len(again.grid) == 6 and chosen in again.grid and again.words["steps"] == 20
        assert all(p | {method.rate: 0} == chosen | {method.rate: 0} for p in again.grid)
        assert program.algorithm(again, again.grid, 8).steps == 20
        rates = [p[method.rate] for p in again.grid]
        edge = max(again.grid, key=lambda p: p[method.rate])
        assert len(set(rates)) == 6 and rules.edges(again, again.grid, edge) == [(method.rate, True)]


def test_the_second_tuning_gives_every_method_six_rates_more():
    """A cosine for those with constant rates, where FedAdam's falls on the server; else rates that were not tried."""
    results = ROOT / "paper" / "results" / "study"
    piece = next(piece for piece in missing.PIECES if piece.folder == "digits-heterogeneous-again")
    found, known = missing.methods_of(piece, results), methods.methods("digits-heterogeneous")
    assert set(found) == set(known)
    before = json.loads((results / "digits-heterogeneous" / "summary.json").read_text())
    for name, method in found.items():
        chosen, rate = before[name]["chosen"], method.rate
        ratios = [math.log10(p[rate] / chosen[rate]) for p in method.grid]
        chosen = chosen | ({"schedule": "cosine"} if name in methods.CONSTANT else {})
        assert all(p | {rate: 0} == chosen | {rate: 0} for p in method.grid)
        steps = [-3, -2, -1, 0, 1, 2] if name in methods.CONSTANT else [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
        assert ratios == pytest.approx([step / 2 for step in steps], abs=2e-3)
        if name in methods.CONSTANT:
            falling = getattr(program.algorithm(method, [chosen], 8), rate)
            assert [float(falling(torch.tensor(t))) for t in (0.0, 20.0, 40.0)] == pytest.approx(
                [chosen[rate], chosen[rate] / 2, 0.0]
            )
    fedadam = program.algorithm(found["fedadam"], [before["fedadam"]["chosen"] | {"schedule": "cosine"}], 8)
    assert float(fedadam.lr) == before["fedadam"]["chosen"]["lr"]  # the clients' rate stays


def test_the_tuning_that_is_better_on_validation_counts_if_the_second_one_is_whole(tmp_path):
    def method(validation, test):
        finals = [{"seed": seed, "test": test} for seed in range(5)]
        return {"chosen": {"lr": test}, "validation of chosen": validation, "finals": finals, "diverged finals": 0}

    def write(folder, **found):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "summary.json").write_text(json.dumps(found))

    lost = {"chosen": None, "finals": []}
    write("task", a=method([0.7, 0.9], 0.6), b=method([0.8, 0.9], 0.7), c=method([0.5, 0.5], 0.4), d=lost)
    assert [m.name for m in studied.read_task(tmp_path / "task")] == ["b", "a", "c", "d"]
    write("task-again", a=method([0.85, 0.85], 0.8), b=method([0.85, 0.85], 0.9))
    assert [m.test for m in studied.read_task(tmp_path / "task") if m.finals] == [0.7, 0.6, 0.4]  # c is missing
    write("task-again", a=method([0.85, 0.85], 0.8), b=method([0.85, 0.85], 0.9), c=method([0.6, 0.6], 0.3))
    found = studied.read_task(tmp_path / "task")
    assert [(m.name, m.finals and m.test) for m in found] == [("a", 0.8), ("b", 0.7), ("c", 0.3), ("d", {})]
    assert [m.first and m.first.test for m in found] == [0.6, None, 0.4, None]


def test_one_setting_for_all_tasks_has_no_stages_and_chooses_nothing():
    found = methods.untuned_methods()
    assert {len(method.grid) for method in found.values()} == {8}
    for method in found.values():
        now = protocol.state(method, {}, 8)
        assert [(job.stage, job.seed, job.rounds) for job in now.jobs] == [("stage2", s, 8) for s in protocol.TUNING]
        assert list(missing.programs_left(method, now, {})) == [("stage2", 8)] * 3 and now.chosen is None
        made = program.algorithm(method, method.grid, 8)
        falling = getattr(made, method.rate)
        assert falling(torch.tensor(40.0)).abs().max() < 1e-9  # at the end of 8 rounds of 5 steps
        each = untuned.Untuned([setting.OneSetting(method, 0.1, {}, 0.0, 0.0)], [])
        call = for_rounds(eval(each.calls[method.name], {"fedda": fedda}), quadratic(), 8)
        point = {method.rate: 0.1, "schedule": "cosine"}
        run = program.algorithm(method, [point], 8)
        assert type(call) is type(made) and float(call.steps) == made.steps
        for t in (1.0, 10.0, 30.0):
            at = (getattr(one, method.rate)(torch.tensor(t)) for one in (call, run))
            assert float(next(at)) == pytest.approx(float(next(at)), rel=1e-5)
    metric = fedda.make("fedda-2-1", **found["fedda-2-1"].words).preconditioner
    assert (metric.eps_mode, metric.kappa) == ("relative", 1.0)


def test_without_tuning_the_rate_of_a_task_is_the_best_one_of_the_others():
    """Two rates. On a and b the small one is better, on c the large one."""
    nothing = dict.fromkeys((0.1, 1.0), 0.5)
    scores = {task: dict.fromkeys(methods.untuned_methods(), nothing) for task in ("a", "b", "c")}
    scores["a"] = scores["a"] | {"fedavg": {0.1: 0.90, 1.0: 0.88}}
    scores["b"] = scores["b"] | {"fedavg": {0.1: 0.80, 1.0: None}}
    scores["c"] = {name: dict.fromkeys((0.1, 1.0), -2.5) for name in scores["c"]} | {"fedavg": {0.1: -2.3, 1.0: -2.2}}
    best, *others = setting.one_setting(scores)
    # In units, a, b and c: 0, 0 and 1 with the small rate; 0.4, 2 and 0 with the large one. The small one is better on
    # all three, and on those but a (1 against 2) and c (0 against 2.4). On those but b the large one is (1 against 0.4).
    assert (best.method.name, best.rate, best.average) == ("fedavg", 0.1, pytest.approx(1 / 3))
    assert best.behind == {"a": 0.0, "b": 0.0, "c": pytest.approx(0.1)}
    assert best.unseen == pytest.approx((0 + 2 + 1) / 3) and others[0].unseen == 2.0
    assert untuned.read(Path("nowhere")) is None and untuned.part(None) == untuned.in_short(None) == ""


def test_on_new_tasks_methods_are_ranked_by_how_far_they_are_behind():
    """An accuracy and a loss. `a` is 2 points behind on the first and best on the second; `b` the other way round, and
    0.05 behind in the loss; `c` is not told apart from the best on the first, and diverged on the second."""
    noise = [-0.01, -0.005, 0.0, 0.005, 0.01]
    scores = {
        "femnist-small": {"a": [0.93 + n for n in noise], "b": [0.95 + n for n in noise],
                          "c": [0.949 + 3 * n for n in noise]},
        "shakespeare-deep": {"a": [-2.0] * 5, "b": [-2.05] * 5, "c": None},
    }  # fmt: skip
    found = new_tasks.compared(scores)
    assert [(each.name, each.average) for each in found] == [
        ("a", pytest.approx((0.4 + 0) / 2)), ("b", pytest.approx((0 + 0.5) / 2)),
        ("c", pytest.approx((0.02 + setting.MOST) / 2)),
    ]  # fmt: skip
    assert [list(each.good.values()) for each in found] == [[False, True], [True, False], [True, False]]
    calls = {name: f"{name}()" for name in "abc"}
    *_, a, b, c = untuned.on_new_tasks(found, calls).splitlines()
    assert a == "| [`a`](algorithms/a.md) | `a()` | 93.00 ± 0.98 % | **2.000 ± 0.000** | 1.0 |"
    assert b == "| [`b`](algorithms/b.md) | `b()` | **95.00 ± 0.98 %** | 2.050 ± 0.000 | 1.2 |"
    assert c == "| [`c`](algorithms/c.md) | `c()` | **94.90 ± 2.94 %** | diverged | 5.0 |"


def test_without_tuning_the_first_two_methods_are_compared_by_pairs():
    """Seeds differ by much more than the methods: only the pairs tell them apart."""
    noise = [-0.1, -0.05, 0.0, 0.05, 0.1]
    scores = {
        "femnist-small": {"a": [0.80 + n for n in noise], "b": [0.78 + n for n in noise]},
        "shakespeare-deep": {"a": [-2.0 + n for n in noise], "b": [-1.99 + n for n in noise]},
        "femnist-linear": {"a": [0.7] * 5, "b": None},
    }
    first, second = new_tasks.compared(scores)
    assert untuned.apart(first, second) == (
        "Between these two, paired by seed: *Handwriting, a small CNN* +2.00 ± 0.00 points; *Text, a transformer of two "
        "layers* +0.010 ± 0.000 in the loss."
    )
    method = {name: setting.OneSetting(methods.untuned_methods()[name], 0.1, {}, 0, 0) for name in ("fedavg", "fedcm")}
    names = {"a": "fedavg", "b": "fedcm"}
    renamed = [dataclasses.replace(each, name=names[each.name]) for each in (first, second)]
    said = untuned.in_short(untuned.Untuned(list(method.values()), renamed))
    assert '`fedda.make("fedavg", lr=fedda.schedules.cosine(0.1))`' in said
    assert "on 1 of them and clearly worse on 1 (" in said


def test_a_new_task_has_the_setting_of_the_others_and_is_run_as_finals():
    method = methods.with_setting(methods.untuned_methods()["fedavgm"], 0.1)
    assert method.grid == [{"lr": 0.1, "schedule": "cosine"}]
    jobs = protocol.state(method, {}, 8).jobs
    assert [(job.stage, job.seed, job.rounds) for job in jobs] == [("finals", s, 8) for s in protocol.FINALS]
    assert set(new_tasks.TASKS) == {piece.folder for piece in missing.PIECES if piece.new}
    assert {piece.task for piece in missing.PIECES if piece.untuned} == set(setting.CHOSEN_ON)


def test_fedadamw_is_adam_with_decoupled_decay_on_the_clients():
    made = program.algorithm(methods.methods("digits")["fedadamw-like"], [{"lr": 0.01, "weight_decay": 0.001}], 8)
    assert (type(made).__name__, made.client, made.server, float(made.server_lr)) == ("LocalAdapt", "adam", "sgd", 1.0)
    assert float(made.weight_decay) == 0.001


def test_the_best_six_go_on_and_the_best_wins(tmp_path):
    now, kept = of(tmp_path, near(0.0316))
    assert now.first == now.second == now.chosen == {"lr": 0.0316, "schedule": "cosine"} and now.interior
    second = {p for (_, stage, p, _) in kept if stage == "stage2"}
    assert second == {methods.key(p) for p in ONE.grid} and len(now.tried) == 6
    seeds = collections.Counter(stage for (_, stage, _, _) in kept)
    assert seeds == {"stage1": 6, "stage2": 18, "finals": 5}
    assert {seed for (_, stage, _, seed) in kept if stage == "finals"} == {0, 1, 2, 3, 4}


def test_halving_keeps_the_best(tmp_path):
    many = methods.StudyMethod("fedavg", {}, (methods.rates("lr", 0.01, 4, 4), ONE.axes[1]))
    now, kept = of(tmp_path, near(0.01), many)
    assert sum(stage == "stage2" for (_, stage, _, _) in kept) == 18
    assert {p["lr"] for p in now.compared} == {0.00316, 0.01, 0.0316}
    assert {r["rounds"] for (_, stage, _, _), r in kept.items() if stage == "stage1"} == {2}  # a quarter


def test_an_edge_is_extended_by_two_up_to_six(tmp_path):
    now, _ = of(tmp_path / "a", near(0.316))
    assert {p["lr"] for p in now.tried} == {0.01, 0.0316, 0.1, 0.316, 1.0}
    assert now.chosen["lr"] == 0.316 and now.interior
    now, _ = of(tmp_path / "b", near(1e5))
    assert len(now.tried) == 6 + 6 and now.chosen["lr"] == 100.0 and not now.interior


def test_an_edge_of_the_second_stage_is_extended_there(tmp_path):
    def value(point, job):  # with more rounds a larger rate is the best
        return near(0.0316 if job.stage == "stage1" else 0.316)(point, job)

    now, kept = of(tmp_path, value)
    assert now.first["lr"] == 0.0316 and now.chosen["lr"] == 0.316 and now.interior
    assert {json.loads(p)["lr"] for (_, stage, p, _) in kept if stage == "stage1"} == {0.01, 0.0316, 0.1}


def test_a_limit_is_not_extended():
    axis = methods.StudyAxis("alpha0", (0.1, 0.3, 0.9), most=0.9)
    method = methods.StudyMethod("stem", {"w": 8.0}, (LR, axis))
    assert rules.edges(method, method.grid, {"lr": 0.0316, "alpha0": 0.9}) == []
    assert rules.edges(method, method.grid, {"lr": 0.0316, "alpha0": 0.1}) == [("alpha0", False)]
    assert rules.edges(method, method.grid, {"lr": 0.1, "alpha0": 0.1}) == [("lr", True), ("alpha0", False)]
    more = rules.extended(method, method.grid, {"lr": 0.1, "alpha0": 0.1}, left=2)
    assert more == [{"lr": 0.316, "alpha0": 0.1}, {"lr": 1.0, "alpha0": 0.1}]  # no more than are left


def test_a_point_with_a_diverged_seed_is_out(tmp_path):
    def value(point, job):
        if point["lr"] == 0.1 and (point["schedule"], job.seed) in (("constant", 100), ("cosine", 102)):
            return None
        return near(0.09)(point, job)

    now, _ = of(tmp_path, value)
    assert {"lr": 0.1, "schedule": "constant"} not in now.compared
    assert {"lr": 0.1, "schedule": "cosine"} in now.compared
    # 0.1 was tried and is out, so that 0.0316 has a neighbour on both sides.
    assert now.chosen == {"lr": 0.0316, "schedule": "cosine"} and now.interior
    of(
        tmp_path / "late",
        lambda point, job: None if (job.stage, job.seed) == ("finals", 3) else near(0.0316)(point, job),
    )
    assert "50.00 ± 0.00 (1 diverged)" in (tmp_path / "late" / "summary.md").read_text()
    gone, _ = of(tmp_path / "none", lambda point, job: None)
    assert gone.first is gone.chosen is None and not gone.jobs


def test_ties_go_to_the_smaller_rate():
    seen = {0.01: [0.80, 0.80, 0.80], 0.0316: [0.84, 0.86, 0.88], 0.1: [0.85, 0.87, 0.89]}
    points = [{"lr": lr, "schedule": "cosine"} for lr in seen]
    assert rules.winner(ONE, points, lambda p: seen[p["lr"]])["lr"] == 0.0316  # 0.0115 is one standard error
    seen[0.1] = [0.869, 0.87, 0.871]
    assert rules.winner(ONE, points, lambda p: seen[p["lr"]])["lr"] == 0.1
    assert rules.ranked(ONE, points, lambda p: [0.5])[0]["lr"] == 0.01  # one seed: equal ones alone


def test_the_papers_values_stay_where_they_are_better(tmp_path):
    method = methods.StudyMethod("fedavg", {}, ONE.axes, paper={"lr": 0.05, "schedule": "constant"})
    now, _ = of(tmp_path / "a", near(0.05), method)
    assert now.second["lr"] == 0.0316 and now.chosen == method.paper
    now, _ = of(tmp_path / "b", near(0.0316), method)
    assert now.chosen["lr"] == 0.0316


def test_a_last_word_is_tried_for_the_winner(tmp_path):
    method = methods.StudyMethod("fedavg", {"server_lr": 1.0}, ONE.axes, last="server_lr")
    now, _ = of(tmp_path, lambda p, job: near(0.0316)(p, job) + 0.05 * (p.get("server_lr") == 3.0), method)
    assert now.chosen == {"lr": 0.0316, "schedule": "cosine", "server_lr": 3.0}


@pytest.mark.parametrize("breaks_after", [0, 1, 3, 6])
def test_an_interrupted_study_goes_on_and_runs_nothing_twice(tmp_path, breaks_after):
    ran = []
    with pytest.raises(KeyboardInterrupt):
        of(tmp_path, near(0.316), ran=ran, breaks_after=breaks_after)
    for path in tmp_path.glob("*-stage2.jsonl"):  # as if it was killed while it wrote
        path.write_text(path.read_text() + '{"method": "fedavg", "sta')
    now, kept = of(tmp_path, near(0.316), ran=ran)
    asked = collections.Counter((name, stage, seed, p) for name, stage, seed, some in ran for p in some)
    assert set(asked.values()) == {1} and len(asked) == len(kept) and not now.jobs
    whole, _ = of(tmp_path / "whole", near(0.316))
    assert now == whole
    of(tmp_path, near(0.316), ran=ran, breaks_after=0)  # nothing is left to run


def test_the_whole_protocol_on_digits(tmp_path, capsys):
    words = ["digits-heterogeneous", "--out", str(tmp_path), "--rounds", "8"]
    protocol.main([*words, "--methods", "fedavg,stem,fedadam"])
    found = json.loads((tmp_path / "summary.json").read_text())
    assert all(len(own["finals"]) == 5 and own["chosen"] for own in found.values())
    assert all(row["test"] > 0.3 for own in found.values() for row in own["finals"])
    for record in protocol.read(tmp_path).values():
        columns = [name for name in record["columns"] if name.startswith("test")]
        assert bool(columns) == (record["stage"] == "finals")  # the test set is opened once
        assert record["partition"] == record["seed"] and record["command"].endswith("fedavg,stem,fedadam")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    protocol.main([*words, "--methods", "fedavg,stem,fedadam"])
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}


def test_replicas_are_the_runs_themselves():
    """A point has the same numbers in a stack and alone, and those of `fedda.train`."""
    method = methods.methods("digits")["fedavg"]
    points = [{"lr": 0.1, "schedule": "constant"}, {"lr": 0.316, "schedule": "cosine"}]
    together = program.run(HOW, program.StudyProgram(method, "stage2", 100, points, 4, 2))
    alone = [program.run(HOW, program.StudyProgram(method, "stage2", 100, [p], 4, 2))[0] for p in points]
    assert [r["rows"] for r in together] == [r["rows"] for r in alone]
    table = find("digits-heterogeneous").problem.model_copy(update={"seed": 100, "validation": 0.1})
    rows = fedda.train(fedda.make("fedavg", lr=0.1), table.build(), 4, every=4, seed=100).history
    assert together[0]["rows"][-1][1] == pytest.approx(rows[-1]["validation_accuracy"], abs=1e-5)
    rate = program.CosineRate(0.316, 1.0, 20)
    rows = fedda.train(fedda.make("fedavg", lr=rate), table.build(), 4, every=4, seed=100).history
    assert together[1]["rows"][-1][1] == pytest.approx(rows[-1]["validation_accuracy"], abs=1e-5)


def test_of_text_the_finals_have_validation_and_test_losses():
    """Without the training samples; the numbers are those of the whole evaluation."""
    how = program.How(next(piece for piece in missing.PIECES if piece.folder == "shakespeare-gru").source)
    point = {"lr": 0.316, "schedule": "constant"}
    method = methods.methods("shakespeare-gru")["fedavg"]
    assert method.axes[0].centre == 0.316  # the grids of the transformer
    (tuned,) = program.run(how, program.StudyProgram(method, "stage2", 0, [point], 1, 1))
    (record,) = program.run(how, program.StudyProgram(method, "finals", 0, [point], 1, 1))
    assert tuned["columns"] == ["round", "validation_loss"]
    assert record["columns"] == ["round", "validation_loss", "test_loss"]
    assert tuned["rows"][0][1] == record["rows"][0][1]
    problem = program.problem(how.task, None, 0, False)
    result = fedda.train(fedda.make("fedavg", lr=0.316), problem, cohort=10, seed=0, rounds=1, weights="uniform")
    assert record["rows"][0][2] == pytest.approx(result.history[-1]["test_loss"], rel=1e-4)


def test_what_text_is_compared_with_is_computed_from_the_data():
    """docs/choosing.md: the test losses of a prediction from frequencies, of characters and after the one before."""
    data = open_dataset("shakespeare")
    y, pairs = torch.tensor(data.y).flatten(), torch.tensor(data.x * 65 + data.y).flatten()
    alone = torch.bincount(y, minlength=65) + 1.0
    after = (torch.bincount(pairs, minlength=65 * 65) + 0.1).view(65, 65)
    losses = [-(p / p.sum(-1, keepdim=True)).log() for p in (alone, after)]
    found = [losses[0][data.y_test].mean(), losses[1][data.x_test, data.y_test].mean()]
    assert [f"{loss:.2f}" for loss in found] == ["3.17", "2.42"]
    text = (ROOT / "docs" / "choosing.md").read_text()
    assert "test loss of 3.17" in text and "2.42. The GRU" in text


def test_a_diverged_replica_is_told_from_the_others():
    method = methods.methods("digits")["fedavg"]
    points = [{"lr": lr, "schedule": "constant"} for lr in (0.1, 1e30)]
    fine, gone = program.run(HOW, program.StudyProgram(method, "stage1", 100, points, 8, 2))
    assert not fine["diverged"] and gone["diverged"] and len(fine["rows"]) == 4
    (gone,) = program.run(HOW, program.StudyProgram(method, "stage1", 100, points[1:], 8, 2))
    assert gone["diverged"]


# -- sparse models -------------------------------------------------------------------------------------------------------
def limited(rows, limit=0.25):
    columns = ["round", "validation_accuracy", "test_accuracy", "nonzero"]
    return {
        "columns": columns,
        "rows": rows,
        "limit": limit,
        "diverged": False,
        "seed": 0,
        "rounds": 40,
        "task": "cifar10",
    }


def test_only_models_within_the_limit_count():
    record = limited([[10, 0.9, 0.85, 1.0], [20, 0.7, 0.72, 0.25], [30, 0.8, 0.75, 0.2], [40, 0.95, 0.9, 0.3]])
    assert summary.best(record) == (30, 0.8) and summary.best(record, "test") == (30, 0.75)
    found = summary.final(record)
    assert (found["test"], found["nonzero"], found["to_target"]) == (0.75, 0.2, 20)  # 70 %, by a model within the limit
    assert (found["end"], found["nonzero_end"]) == (0.9, 0.3)  # the end is as it is
    assert not summary.out(record) and summary.out(limited([[10, 0.9, 0.85, 1.0]]))


def test_sparse_methods_have_the_same_budget_and_all_rounds():
    found = methods.sparse_methods(0.1)
    assert {len({methods.key(p) for p in m.grid}) for m in found.values()} == {90}
    for method in found.values():
        now = protocol.state(method, {}, 8)
        assert [job.rounds for job in now.jobs] == [8]  # weights become 0 late
        program.algorithm(method, method.grid, 8)


def test_a_point_that_misses_the_limit_is_out(tmp_path):
    """The penalty decides the share; the rate the accuracy. The best within the limit wins."""
    gammas = methods.StudyAxis("gamma", (0.001, 0.00316, 0.01))
    method = methods.StudyMethod("fedmid", {}, (LR, gammas), limit=0.25)

    def run(how, job):
        for p in job.points:
            columns = ["round", "validation_accuracy", "validation_loss", "nonzero"]
            row = [
                1,
                0.9 - p["gamma"] - 0.1 * abs(math.log10(p["lr"] / 0.0316)),
                1.0,
                0.5 if p["gamma"] < 0.003 else 0.2,
            ]
            if job.stage == "finals":
                columns, row = [*columns, "test_accuracy"], [*row, 0.5]
            yield {"method": "fedmid", "stage": job.stage, "point": p, "seed": job.seed, "diverged": False,
                   "columns": columns, "rows": [row], "rounds": job.rounds, "limit": 0.25}  # fmt: skip

    wanted = protocol.Study(HOW, tmp_path, 8, {"fedmid": method}, run=lambda how, job: list(run(how, job)))
    wanted.drive()
    assert wanted.states()["fedmid"].chosen == {"lr": 0.0316, "gamma": 0.00316}


def test_the_share_of_a_record_counts_exact_zeros():
    """A penalty larger than every gradient leaves no weight; without one no weight is 0. In tuning and in finals."""
    method = methods.sparse_methods(0.5)["fedmid"]
    points = [{"lr": 0.1, "server_lr": 1.0, "gamma": gamma} for gamma in (1e-12, 1e3)]
    for stage in ("stage2", "finals"):
        dense, empty = program.run(HOW, program.StudyProgram(method, stage, 0, points, 2, 2))
        at = dense["columns"].index("nonzero")
        assert (dense["rows"][-1][at], empty["rows"][-1][at], dense["limit"]) == (1.0, 0.0, 0.5)


def test_constraints_are_not_tuned_and_stand_in_the_call():
    ball = {"kind": "l1-ball", "radius": 2.0}
    for method in methods.constrained_methods(ball).values():
        made = program.algorithm(method, method.grid, 8)
        assert len(method.grid) == 18 and made.prox == fedda.prox.L1Ball(2.0)
        assert [job.rounds for job in protocol.state(method, {}, 8).jobs] == [2]
    call = studied.call("fedmid", {"lr": 0.1, "prox": {"kind": "nonnegative", "on": "*.weight"}})
    assert eval(call, {"fedda": fedda}) == fedda.make("fedmid", lr=0.1, prox=fedda.prox.NonNegative(on="*.weight"))


def test_the_call_of_a_sparse_model_has_its_penalty():
    call = studied.call("fedmid", {"lr": 0.1, "server_lr": 3.16, "gamma": 0.001})
    assert eval(call, {"fedda": fedda}) == fedda.make("fedmid", lr=0.1, server_lr=3.16, prox=fedda.prox.L1(0.001))


# -- what is left --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("piece", missing.PIECES, ids=lambda piece: piece.folder)
def test_every_piece_can_be_run(piece):
    experiment = find(piece.source)
    assert experiment.rounds and experiment.cohort and Path(piece.source).suffix in ("", ".toml")
    assert (ROOT / "paper" / "results" / "study" / piece.like).is_dir()


def test_records_name_the_task_and_not_its_file():
    """A record that names a folder of one machine would be of no use on another."""
    method = methods.methods("digits")["fedavg"]
    how = program.How(next(piece for piece in missing.PIECES if piece.folder == "digits-many").source)
    (record,) = program.run(how, program.StudyProgram(method, "finals", 0, method.grid[-1:], 1, 1))
    assert record["task"] == "digits-many" and summary.target_of(record["task"]) == 0.9


@pytest.mark.parametrize("last", ["", "server_lr"])
def test_the_programs_that_are_left_are_those_that_will_run(tmp_path, last):
    """With a best point in the middle no grid is extended: what was counted before is what ran."""
    many = methods.StudyMethod("fedavg", {"server_lr": 1.0}, (methods.rates("lr", 0.01, 4, 4), ONE.axes[1]), last=last)
    counted, ran = [], []
    for _ in range(3):
        kept = protocol.read(tmp_path)
        todo = list(missing.programs_left(many, protocol.state(many, kept, 8), kept))
        counted.append(len(todo) + len(ran))
        with pytest.raises(KeyboardInterrupt):
            of(tmp_path, near(0.01), many, ran=ran, breaks_after=len(ran) + 2)
    of(tmp_path, near(0.01), many, ran=ran)
    assert set(counted) == {len(ran)} and len(ran) == 1 + 3 + 3 * bool(last) + 5
    kept = protocol.read(tmp_path)
    assert not list(missing.programs_left(many, protocol.state(many, kept, 8), kept))


def test_what_is_left_is_listed(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = {row[0]: row for row in missing.table(ROOT / "paper" / "results" / "study", 7)}
    assert [*rows] == [*(piece.folder for piece in missing.PIECES), missing.L1]
    assert rows["cifar10"][3] == "fedadamw-like" and rows["femnist-all"][3] == "all methods"
    assert "fedda-cv 0.00316" in rows[missing.L1][3] and "fedda-2-1 0.001" not in rows[missing.L1][3].split(", ")
    protocol.main(["--missing"])
    assert "femnist-all" in capsys.readouterr().out
    for wrong, said in ((["cifar10", "--methods", "x"], "unknown method 'x'"), ([], "give a task")):
        with pytest.raises(SystemExit) as stopped:
            protocol.main(wrong)
        assert stopped.value.code == 2 and said in capsys.readouterr().err


# -- which method to take ------------------------------------------------------------------------------------------------
def method_with(name, tests, to_target=100.0, bytes_per_round=10.0, chosen=None, validation=None):
    """A method with these test scores. `validation` gives the score of stage 1 at each rate."""
    finals = [{"seed": i, "test": t, "end": t, "to_target": to_target} for i, t in enumerate(tests)]
    record = {"stage": "finals", "bytes_up": 2 * bytes_per_round, "bytes_down": 2 * bytes_per_round, "rounds": 4}
    record["words"] = {"momentum": 0.9}
    columns = ["round", "validation_loss" if tests[0] < 0 else "validation_accuracy"]
    tuned = [{"stage": "stage1", "point": {"lr": lr}, "columns": columns, "rows": [[1, abs(value)]], "diverged": False}
             for lr, value in (validation or {}).items()]  # fmt: skip
    own = {"finals": finals, "chosen": chosen or {"lr": 0.1}, "interior": True, "diverged finals": 0}
    return studied.StudiedMethod(name, own, [record, *tuned])


BEST = method_with("best", [0.70, 0.72, 0.74, 0.71, 0.73])


def test_of_methods_that_are_as_good_the_one_that_sends_least_is_taken():
    # Differences -.01, .01, -.02, .01, -.01: mean -.004, half a t interval 2.776 * .01342 / sqrt(5) = .0167.
    close = method_with("close", [0.69, 0.73, 0.72, 0.72, 0.72], to_target=60.0)
    # Always .02 less: an interval of no width.
    worse = method_with("worse", [0.68, 0.70, 0.72, 0.69, 0.71], to_target=1.0)
    few = method_with("few", [0.70, 0.75])  # two seeds of five: not finished, whatever they say
    advice = studied.advise([BEST, close, few, worse])
    assert (advice.take.name, [m.name for m in advice.equal], advice.rival.name) == ("close", ["best"], "best")
    mean, half = advice.difference
    assert mean == pytest.approx(-0.004) and half == pytest.approx(2.776445 * 0.0134164 / 5**0.5, rel=1e-5)
    assert not advice.told_apart and studied.advise([BEST, worse]).told_apart
    costly = method_with("close", [0.69, 0.73, 0.72, 0.72, 0.72], to_target=60.0, bytes_per_round=20.0)
    assert studied.advise([BEST, costly, few, worse]).take is BEST


def test_a_wide_interval_alone_does_not_make_a_method_as_good():
    worse = method_with("worse", [0.69, 0.71, 0.73, 0.70, 0.72])  # always .01 less
    # Mean .69, differences .03, -.05, -.10, .02, -.05: -.03 +- .069 contains 0, but it is behind one that is worse.
    noisy = method_with("noisy", [0.73, 0.67, 0.64, 0.73, 0.68], to_target=1.0)
    assert sum(noisy.against(BEST)) > 0 > sum(worse.against(BEST)) and noisy.test < worse.test
    advice = studied.advise([BEST, worse, noisy])
    assert advice.take is BEST and advice.equal == []


def test_the_difference_is_given_in_words_that_cannot_be_misread():
    close = method_with("fedcm", [0.69, 0.73, 0.72, 0.72, 0.72], to_target=60.0, validation={0.1: 0.7, 0.3: 0.68})
    cells = choosing.row("cifar10", studied.advise([BEST, close]))
    assert cells[1:3] == ['[`fedcm`](algorithms/fedcm.md): `fedda.make("fedcm", lr=0.1)`', "71.60 ± 1.88 %"]
    assert cells[3:] == [
        "-0.40 ± 1.67 points against `best`: not told apart",
        "60 rounds, 600 B to 70 %",
    ]
    assert choosing.as_good(studied.advise([BEST, close])) == "Taken: `fedcm`. As good: `best`."
    above = method_with("fedcm", [0.71, 0.73, 0.75, 0.72, 0.74], validation={0.1: 0.7})
    assert choosing.row("cifar10", studied.advise([above, BEST]))[3] == "+1.00 ± 0.00 points against `best`: better"


def test_a_task_without_classes_is_told_by_its_loss():
    """Scores are minus the losses; the page shows losses."""
    one = method_with("fedcm", [-1.6, -1.62, -1.61, -1.6, -1.62], validation={0.1: -1.6})
    two = method_with("fedavg", [-1.7, -1.72, -1.71, -1.7, -1.72], math.inf, validation={0.1: -1.7})
    cells = choosing.row("shakespeare", studied.advise([one, two]))
    assert cells[2:4] == ["1.610 ± 0.012", "-0.100 ± 0.000 against `fedavg`: better"]
    assert cells[4].startswith("100 rounds") and cells[4].endswith("to a loss of 1.75")
    table = choosing.details("shakespeare", [one, two])
    assert "test loss" in table and "| not reached |" in table and "%" not in table


def test_a_task_without_finals_points_to_the_nearest_with_some():
    take = studied.Recommendation(method_with("fedcm", [-2.0] * 5), [], BEST, (0.0, 0.0))
    said = choosing.nearest("shakespeare", {"shakespeare-gru": take})
    assert said.strip() == (
        "The nearest task with finals is *Text, a small GRU*, above: there `fedcm` is taken (lr 0.1)."
    )
    also = studied.Recommendation(take.take, [method_with("stem", [-2.0] * 5)], BEST, (0.0, 0.0))
    assert "(lr 0.1), and `stem` is as good." in choosing.nearest("shakespeare", {"shakespeare-gru": also})
    nearer = {"shakespeare-gru": take, "shakespeare-small": take}
    assert "*Text, a small transformer*" in choosing.nearest("shakespeare", nearer)
    assert choosing.nearest("shakespeare", {}) == choosing.nearest("colon", {"shakespeare-gru": take}) == ""


def test_the_first_sentence_names_the_method_that_is_taken_on_most_tasks():
    a, b = (studied.Recommendation(method_with(name, [0.7] * 5), [], BEST, (0.0, 0.0)) for name in ("fedcm", "fedavg"))
    most = choosing.first_try({"cifar10": a, "digits-many": a, "femnist-all": b}, {})
    assert most.startswith(
        "**If you tune, start with [`fedcm`](algorithms/fedcm.md).** It is the choice on 2 of the 3 finished tasks"
    )
    divided = choosing.first_try({"cifar10": a, "digits-many": b}, {})
    assert divided.startswith("**If you tune, no method") and "on 1 of the 2 finished tasks." in divided
    assert f"{choosing.link(a.take)} and {choosing.link(b.take)}" in divided
    limited, inside = method_with("feddualavg", [0.7] * 5), method_with("feddualavg", [0.7] * 5)
    limited.records[0]["limit"], inside.records[0]["words"] = 0.1, {"prox": {"kind": "nonnegative"}}
    sparse, ball = (studied.Recommendation(own, [], BEST, (0.0, 0.0)) for own in (limited, inside))
    alone = choosing.first_try({"cifar10": a, "digits-sparse-10": sparse, "digits-l1-ball": ball}, {})
    assert "`fedcm`" in alone and "1 of the 1 finished tasks without a penalty or a constraint" in alone


def test_the_first_sentence_else_names_the_method_that_is_as_good_on_most_tasks_and_how_far_it_is_behind():
    close = method_with("fedcm", [0.69, 0.73, 0.72, 0.72, 0.72])
    taken = {"cifar10": method_with("fedavg", [0.7] * 5), "digits-many": method_with("stem", [0.7] * 5)}
    advice = {name: studied.Recommendation(own, [close], BEST, (0.0, 0.0)) for name, own in taken.items()}
    advice["femnist-all"] = studied.Recommendation(BEST, [], close, (0.0, 0.0))
    said = choosing.first_try(advice, {"femnist-all": [BEST, close]})
    assert "tune [`fedcm`](algorithms/fedcm.md).** It is as good as the best on 2 of the 3 finished tasks" in said
    kind = studied.TASKS["femnist-all"].kind
    assert f"It is behind on *{kind}* (-0.40 ± 1.67 points)." in said
    assert f"*{kind}* (no result)" in choosing.first_try(advice, {"femnist-all": [BEST]})


def test_the_overview_says_how_far_each_method_is_behind():
    """Accuracy in points, losses as they are; a method with a lost final has no number, but was tried."""
    close = method_with("close", [0.69, 0.73, 0.72, 0.72, 0.72], to_target=60.0)
    worse = method_with("worse", [0.68, 0.70, 0.72, 0.69, 0.71])
    lost = method_with("lost", [0.7] * 4)
    lost.summary["diverged finals"] = 1
    text = [method_with("worse", [-1.6] * 5), method_with("close", [-1.65] * 5)]
    rows = picture.overview({"cifar10": [BEST, close, lost, worse], "shakespeare-gru": text, "digits-rho95": [BEST]})
    assert list(rows) == ["best", "worse", "close", "lost"]  # three are as good on one task each
    assert [[cell.text for cell in row] for row in rows.values()] == [
        ["best", "not run"], ["2.0", "best"], ["0.4", "0.05"], ["diverged", "not run"],
    ]  # fmt: skip
    assert [[cell.equal for cell in row] for row in rows.values()] == [
        [True, False], [False, True], [True, False], [False, False],
    ]  # fmt: skip
    assert [name for name, row in rows.items() for cell in row if cell.take] == ["worse", "close"]
    assert [cell.shade for cell in rows["worse"]] == [pytest.approx(0.4), 0.0]


def test_tasks_that_vary_another_have_tables_of_their_own():
    tasks = {name: [BEST, method_with("fedavg", [0.68 - less, 0.70, 0.72, 0.69, 0.71])]
             for less, name in enumerate(variants.SHARES["Small data"])}  # fmt: skip
    longer = {"digits-heterogeneous": [BEST], "digits-heterogeneous-i20": [method_with("best", [0.75] * 5, math.inf)]}
    assert variants.part({}) == variants.part(dict(list(tasks.items())[:3])) == ""
    assert list(studied.decided(tasks | longer)) == ["digits-heterogeneous"]
    *_, head, _, first, second = variants.part(tasks).splitlines()
    assert head == "| small data | 10 % | 50 % | 80 % | 95 % | points lost from 10 % to 95 % |"
    assert first.startswith("| [`best`](algorithms/best.md) | **72.00 ± 1.96 %** | **72.00")
    assert first.endswith("| 0.0 |") and second.endswith("| 60.0 |") and "**" not in second.split("|")[2]
    *_, row = variants.part(longer).splitlines()
    assert row == (
        "| [`best`](algorithms/best.md) | 72.00 ± 1.96 % | 75.00 ± 0.00 % | +3.00 ± 1.96 | 100 | not reached |"
    )


def test_every_piece_with_finals_has_a_place_on_the_page():
    tuned = {piece.folder for piece in missing.PIECES if not (piece.again or piece.untuned or piece.new)}
    assert set(studied.TASKS) == tuned


def test_the_pages_of_the_study_are_up_to_date():
    """To write them anew: fedda reproduce --docs"""
    results = Results(ROOT / "paper" / "results")
    tasks = studied.read_tasks(results.folder)
    assert (ROOT / "docs" / "choosing.md").read_text() == choosing.page(tasks, results)
    study = (ROOT / "docs" / "study.md").read_text()
    assert study == filled(study, study_page.BEGIN, study_page.part(tasks, results))
    for name in (picture.OVERVIEW, picture.PICTURE):
        with Image.open(ROOT / "docs" / name) as image:
            assert image.text[picture.DIGEST] == picture.digest(tasks)


def test_records_of_a_complete_piece_can_be_packed(tmp_path):
    """They are read as before, also if more are added later; the same records give the same bytes."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name, text in (("fedavg-stage1", "1\n2\n"), ("fedavg-finals", "0\n"), ("fedavgm-stage1", "9\n")):
            (tmp_path / folder / f"{name}.jsonl").write_text(text)
        records.pack(tmp_path / folder)
    a, b = ([(p.name, p.read_bytes()) for p in sorted((tmp_path / folder).iterdir())] for folder in ("a", "b"))
    assert a == b and [name for name, _ in a] == [
        "fedavg-finals.jsonl.gz", "fedavg-stage1.jsonl.gz", "fedavgm-stage1.jsonl.gz",
    ]  # fmt: skip
    (tmp_path / "a" / "fedavg-stage1.jsonl").write_text("3\n")
    for _ in range(2):
        assert list(records.lines(tmp_path / "a", "fedavg")) == ["0", "1", "2", "3"]
        records.pack(tmp_path / "a")
    assert len(list((tmp_path / "a").iterdir())) == 3 and len(list(records.lines(tmp_path / "a"))) == 5


@pytest.mark.parametrize("task", [path.parent for path in (ROOT / "paper" / "results" / "study").glob("*/summary.json")],
                         ids=lambda path: path.name)  # fmt: skip
def test_the_kept_summaries_follow_from_the_records(task):
    """In plain arithmetic: no chosen point is worse on validation than the paper's, and each winner is interior or was
    extended by six points."""
    own = json.loads((task / "summary.json").read_text())
    for name, found in own.items():
        if found["chosen"] is None:
            continue
        lines = [json.loads(line) for line in records.lines(task, name)]
        top = collections.defaultdict(list)
        for record in lines:
            if record["stage"] == "stage2" and not record["diverged"]:
                text = "validation_accuracy" not in record["columns"]
                column = record["columns"].index("validation_loss" if text else "validation_accuracy")
                share = record["columns"].index("nonzero") if "limit" in record else None
                rows = [row for row in record["rows"] if share is None or row[share] <= record["limit"]]
                scores = [-row[column] if text else row[column] for row in rows]
                top[methods.key(record["point"])] += [max(scores)] if scores else []
        chosen = top[methods.key(found["chosen"])]
        assert len(chosen) == 3 and sorted(chosen) == sorted(found["validation of chosen"])
        piece = next(piece for piece in missing.PIECES if piece.folder == task.name)
        method = missing.methods_of(piece, task.parent)[name]
        paper = None if piece.rate_alone else method.paper
        assert paper is None or len(top[methods.key(paper)]) < 3 or sum(chosen) >= sum(top[methods.key(paper)])
        assert found["interior"] or found["tried"] == len(method.grid) + protocol.EXTRA


def test_the_calls_on_the_page_make_what_was_run():
    """Every call on docs/choosing.md runs, and has all words of the finals, also those that were not tuned."""
    text = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text()
    calls = re.findall(r"`(fedda\.make\(.*?\))`", text)
    made = [eval(call, {"fedda": fedda}) for call in calls]
    assert len(made) >= 8 and {"FedAvgM", "FedOpt"} & {type(algorithm).__name__ for algorithm in made}
    words = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "v0": 0.0, "bias_correction": True, "eps": 1e-8}
    call = studied.call("fedadam", words | {"lr": 0.0003, "server_lr": 0.006})
    assert eval(call, {"fedda": fedda}) == fedda.make("fedadam", **words | {"lr": 0.0003, "server_lr": 0.006})
