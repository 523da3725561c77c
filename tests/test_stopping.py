"""Early stopping, functions that watch a run, trackers, and rows of clients."""

import io
import json
import math
import statistics
import sys
from contextlib import redirect_stderr
from functools import partial

import pytest
import torch

import fedda
from commands import inside
from conftest import digits
from fedda.evaluations import Patience
from fedda.experiments import run as run_experiment
from fedda.experiments.config import parse
from fedda.experiments.overrides import override, saved_experiment
from fedda.experiments.sweep import Sweep, search
from fedda.progress import Silence
from fedda.runs.names import METRICS
from fedda.runs.reading import read_rows, read_run

LR = {"lr": 0.3}


def same(rows, others):
    """Equal rows, without times."""
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in rows] == [
        {k: v for k, v in row.items() if k != "seconds"} for row in others
    ]


def test_on_evaluation_sees_every_row_and_can_stop():
    seen = []

    def watch(rows):
        seen.extend(rows)
        return rows[0]["round"] == 4

    result = fedda.train(fedda.make("fedavg"), digits(), rounds=10, every=2, seed=[0, 1], on_evaluation=watch)
    assert [row["round"] for row in seen] == [0, 0, 2, 2, 4, 4] and seen == list(result.history)
    assert result.stopped == "stopped after round 4 by on_evaluation"
    longer = fedda.train(fedda.make("fedavg"), digits(), rounds=10, every=2, seed=[0, 1], state=result.state)
    whole = fedda.train(fedda.make("fedavg"), digits(), rounds=10, every=2, seed=[0, 1])
    assert torch.equal(longer.x, whole.x) and not whole.stopped
    with pytest.raises(ValueError, match="on_evaluation must be a function"):
        fedda.train(fedda.make("fedavg"), digits(), rounds=1, on_evaluation=3)


def test_patience_counts_by_seed_and_knows_the_direction():
    up, down = Patience(2, "validation_f1", "higher", 2), Patience(2, "validation_loss", "lower", 1)
    values = [(0.1, 0.5), (0.2, 0.4), (0.3, 0.5), (0.2, 0.9), (0.3, 0.9), (0.4, 0.9)]
    # The second seed stops at the third row and stays stopped; the first one at the fifth.
    found = [up([{"validation_f1": a}, {"validation_f1": b}]) for a, b in values]
    assert found == [False, False, False, False, True, True]
    assert [down([{"validation_loss": v}]) for v in (1.0, None, 0.5, math.nan, 0.5)] == [
        False,
        False,
        False,
        False,
        True,
    ]


def stopped_at(history, name, patience, sign):
    """The round at which a run of one seed stops, found by hand."""
    best, waited = -math.inf, 0
    for row in history:
        best, waited = (sign * row[name], 0) if sign * row[name] > best else (best, waited + 1)
        if waited == patience:
            return row["round"]
    return history[-1]["round"]


@pytest.mark.parametrize(("name", "sign"), [(None, 1), ("validation_loss", -1), ("validation_f1", 1)])
def test_patience_stops_where_it_should(name, sign):
    problem = digits(validation=0.2, metrics=["f1"])
    whole = fedda.train(fedda.make("fedavg", **LR), problem, rounds=40, every=1)
    expected = stopped_at(whole.history, name or "validation_accuracy", 2, sign)
    result = fedda.train(fedda.make("fedavg", **LR), problem, rounds=40, every=1, patience=2, metric=name)
    assert 2 <= expected < 40 and result.history[-1]["round"] == expected
    same(result.history, whole.history[: len(result.history)])
    assert (name or "validation_accuracy") in result.stopped


def test_a_resumed_run_has_the_patience_of_one_that_was_not_interrupted():
    problem = digits(validation=0.2)
    arguments = {"every": 1, "patience": 2, "seed": [0, 1], "metric": "validation_accuracy"}
    whole = fedda.train(fedda.make("fedavg", **LR), problem, rounds=60, **arguments)
    end = whole.history[-1]["round"]
    assert 4 < end < 60
    for cut in (1, end - 1):
        first = fedda.train(fedda.make("fedavg", **LR), problem, rounds=cut, **arguments)
        second = fedda.train(fedda.make("fedavg", **LR), problem, rounds=60, state=first.state, **arguments)
        same([*first.history, *second.history[2:]], whole.history)
    after = fedda.train(fedda.make("fedavg", **LR), problem, rounds=60, state=whole.state, **arguments)
    assert after.history[-1]["round"] == end and after.stopped == whole.stopped


@pytest.mark.parametrize(
    ("problem", "options", "line"),
    [
        ({}, {"patience": 2}, "patience needs validation samples"),
        ({"validation": 0.2}, {"patience": 0}, "patience must be a whole number"),
        (
            {"validation": 0.2},
            {"patience": 2, "metric": "test_loss"},
            "metric must be a validation metric, got 'test_loss'",
        ),
        ({"validation": 0.2}, {"metric": "validation_loss"}, "metric is for patience"),
        ({}, {"personalise": "tune"}, "personalise must be text such as"),
        ({}, {"personalise": "fine-tune 0"}, "personalise must be text such as"),
        ({}, {"track": "tensorboard"}, "track must be a tracker"),
    ],
)
def test_mistakes_are_one_line(problem, options, line):
    with pytest.raises(ValueError, match=line) as why:
        fedda.train(fedda.make("fedavg"), digits(**problem), rounds=1, **options)
    assert "\n" not in str(why.value)


TOML = """
name = "mine"
rounds = 40
seeds = [0, 1]
patience = 2
personalise = "fine-tune 2 lr 0.1"
[problem]
data = "digits"
hidden = 8
clients = 5
validation = 0.2
[algorithms.fedavg]
lr = 0.3
[algorithms.scaffold]
lr = 0.3
"""


class Killed(Silence):
    """Ends the program in the middle of a run."""

    def __init__(self, label, round):
        self.at = label, round

    def advance(self, label, done, rows):
        if (label, done) == self.at:
            raise KeyboardInterrupt


def test_a_file_with_patience_and_personalise(tmp_path):
    wanted = parse(TOML, "mine")
    run_experiment(wanted, tmp_path / "whole", Silence())
    recorded = read_run(tmp_path / "whole")
    result = fedda.train(
        fedda.make("scaffold", **LR), wanted.problem.build(), rounds=40, cohort=5, seed=[0, 1], patience=2,
        personalise="fine-tune 2 lr 0.1",
    )  # fmt: skip
    rows = [row | {"seconds": 0} for row in recorded.rows_of("scaffold")]
    same([{k: v for k, v in row.items() if k != "algorithm"} for row in rows], result.history)
    clients = [row for row in recorded.clients if row["algorithm"] == "scaffold"]
    assert [row | {"algorithm": "scaffold"} for row in result.clients] == clients and len(clients) == 10
    last = max(row["round"] for row in recorded.rows_of("fedavg"))
    assert last < 40
    for label, cut in (("fedavg", last - 1), ("fedavg", last), ("scaffold", 3)):
        folder = tmp_path / f"{label}{cut}"
        with pytest.raises(BaseException):  # noqa: B017  the signal of the run, or the interrupt itself
            run_experiment(wanted, folder, Killed(label, cut), save_seconds=0.0)
        run_experiment(saved_experiment(wanted, folder, None), folder, Silence(), resume=True, save_seconds=0.0)
        for name in ("metrics.jsonl", "clients.jsonl", "config.toml"):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (name, cut)
    from fedda.runs.final_values import client_lines, spread_over_clients

    assert {line[1] for line in client_lines(recorded)} == {"Validation accuracy", "Tuned validation accuracy"}
    over = spread_over_clients(recorded, "fedavg", "train_loss")  # lower is better: the worst is the highest
    assert over["worst"] > over["mean"] > 0 and over["spread"] > 0
    from fedda.report import Report

    assert "Worst tenth" in Report.of([recorded]).page()


def test_keys_of_the_file_and_of_the_command_line():
    base = parse(TOML, "mine")
    assert override(base, more={"patience": 7, "evaluate": "all"}).evaluate == "all"
    assert override(base, settings=["patience=9", "evaluate=300"]).patience == 9
    plain = parse(TOML.replace("patience = 2\n", "").replace('personalise = "fine-tune 2 lr 0.1"\n', ""), "mine")
    assert not {"patience", "evaluate", "metric", "personalise"} & plain.model_dump().keys()
    for line, message in (
        ("patience = 0", "patience must be"),
        ('evaluate = "some"', "evaluate must be 'all' or a whole number"),
        ('personalise = "tune"', "personalise must be text such as 'fine-tune 5'"),
        ('metric = "validation_f1"', "metric is for patience"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(plain.toml().replace("rounds = 40\n", f"rounds = 40\n{line}\n"), "mine")


# -- clients ----------------------------------------------------------------------------------------------------------
def mean_net(norm=None):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 6), *([norm] if norm else []), torch.nn.ReLU(), torch.nn.Linear(6, 3)]
    return torch.nn.Sequential(*layers).double()


def small(**options):
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(60, 4, generator=g).double(), torch.randint(0, 3, (60,), generator=g)
    owner = ["a", "b", "c"] * 20
    return (
        fedda.problem(mean_net(), torch.nn.functional.cross_entropy, x=x, y=y, client=owner, batch=4, **options),
        x,
        y,
    )


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_rows_of_clients_equal_the_model_on_their_samples(engine):
    problem, x, y = small(metrics=["f1"])
    result = fedda.train(fedda.make("fedavg"), problem, rounds=2, engine=engine, personalise="fine-tune 3 lr 0.5")
    assert [row["client"] for row in result.clients] == ["a", "b", "c"]
    model = result.model()
    for k, row in enumerate(result.clients):
        own = torch.arange(60) % 3 == k
        output = model(x[own])
        assert row["samples"] == 20
        assert row["train_loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(output, y[own])), abs=1e-12)
        assert row["train_accuracy"] == float((output.argmax(1) == y[own]).double().mean())
    mean = sum(row["train_loss"] for row in result.clients) / 3
    assert mean == pytest.approx(result.history[-1]["train_loss"], abs=1e-12)
    # Three steps by hand, on the batches that the counter gives.
    from fedda import rng

    key = rng.fold(rng.key(torch.tensor([0]), rng.PERSONAL), torch.arange(3))
    for k, row in enumerate(result.clients):
        point = result.x
        for step in range(3):
            batch = problem.batch(torch.tensor([k]), rng.fold(key[k : k + 1], step))
            point = point - 0.5 * problem.gradient(point, problem.pick(batch, (0,)))
        output = fedda.problems.trained.trained_model(problem, point)(x[torch.arange(60) % 3 == k])
        loss = torch.nn.functional.cross_entropy(output, y[torch.arange(60) % 3 == k])
        assert row["tuned_train_loss"] == pytest.approx(float(loss), abs=1e-12)


def test_clients_are_evaluated_on_their_own_held_out_samples():
    problem, x, y = small(test=(torch.randn(5, 4).double(), torch.tensor([0, 1, 2, 0, 1]), ["a", "c", "c", "a", "a"]))
    result = fedda.train(fedda.make("fedavg"), problem, rounds=1, personalise="fine-tune 1")
    model, test = result.model(), problem.test
    loss = torch.nn.functional.cross_entropy(model(test.x[[1, 2]]), test.y[[1, 2]])
    assert result.clients[2]["test_loss"] == pytest.approx(float(loss), abs=1e-12)
    assert math.isnan(result.clients[1]["test_loss"]) and "tuned_test_loss" in result.clients[0]
    with pytest.raises(ValueError, match="the client 'd' has no training samples"):
        small(test=(x[:1], y[:1], ["d"]))
    held = digits(validation=0.2)
    rows = fedda.train(fedda.make("fedavg"), held, rounds=1).clients
    n = torch.bincount(held.owners["validation"], minlength=10)
    mean = sum(row["validation_loss"] * int(k) for row, k in zip(rows, n, strict=True) if k) / int(n.sum())
    row = fedda.train(fedda.make("fedavg"), held, rounds=1).history[-1]
    assert mean == pytest.approx(row["validation_loss"], abs=1e-12)


def test_clients_of_other_problems_and_batch_norm():
    quadratic = fedda.Quadratic([[1.0], [2.0]], [[0.0], [1.0]])
    rows = fedda.train(fedda.make("fedavg"), quadratic, rounds=1, personalise="fine-tune 50 lr 0.2").clients
    assert rows[1]["tuned_train_loss"] < 1e-6 < rows[1]["train_loss"]
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(60, 4, generator=g).double(), torch.randint(0, 3, (60,), generator=g)
    norm = fedda.problem(
        mean_net(torch.nn.BatchNorm1d(6)), torch.nn.functional.cross_entropy, x=x, y=y, client=torch.arange(60) % 3
    )
    results = [
        fedda.train(fedda.make("fedavg"), norm, rounds=1, personalise="fine-tune 2", engine=e)
        for e in ("sequential", "vectorised")
    ]
    for row, other in zip(*(result.clients for result in results), strict=True):
        assert row["tuned_train_loss"] == pytest.approx(other["tuned_train_loss"], abs=1e-12)
    mean = sum(row["train_loss"] for row in results[0].clients) / 3
    assert mean == pytest.approx(results[0].history[-1]["train_loss"], abs=1e-12)


# -- progress, trackers, threads, report --------------------------------------------------------------------------------
def test_progress_is_on_stderr_and_off_by_default():
    for progress in (False, True):
        with redirect_stderr(io.StringIO()) as text:
            fedda.train(fedda.make("fedavg"), digits(), rounds=2, progress=progress)
        assert ("FedAvg: done" in text.getvalue()) == progress


class Kept:
    def __init__(self):
        self.events = []

    def begin(self, config):
        self.events.append(("begin", dict(config)))

    def log(self, row):
        self.events.append(("log", row["round"], row["seed"]))

    def end(self):
        self.events.append(("end",))


def test_a_tracker_of_one_s_own():
    kept = Kept()
    fedda.train(fedda.make("fedavg", lr=0.2), digits(), rounds=1, seed=[3, 4], track=kept)
    assert kept.events[0][1]["lr"] == 0.2 and kept.events[0][1]["rounds"] == 1
    assert kept.events[1:] == [("log", 0, 3), ("log", 0, 4), ("log", 1, 3), ("log", 1, 4), ("end",)]


def test_tensorboard_from_python(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = fedda.train(fedda.make("fedavg"), digits(), rounds=3, track=fedda.track.tensorboard(tmp_path)).history
    events = accumulator.EventAccumulator(str(tmp_path / "FedAvg, seed 0"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("test_loss")]
    assert found == [(row["round"], pytest.approx(row["test_loss"], rel=1e-6)) for row in history]


def test_mlflow_from_python(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow.tracking")
    history = fedda.train(
        fedda.make("fedavg", lr=0.2), digits(), rounds=2, track=fedda.track.mlflow(str(tmp_path / "m"), "x")
    ).history
    client = mlflow.MlflowClient(tracking_uri=str(tmp_path / "m"))
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    assert run.info.run_name == "FedAvg, seed 0" and run.data.params["lr"] == "0.2" and run.info.status == "FINISHED"
    found = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "test_loss")]
    assert sorted(found) == [(row["round"], row["test_loss"]) for row in history]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    fedda.train(fedda.make("fedavg"), digits(), rounds=2, seed=[0, 1], track=fedda.track.wandb("x", tmp_path))
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)  # it imports tensorboard
    for name, module in (("tensorboard", "tensorboard"), ("mlflow", "mlflow.tracking"), ("wandb", "wandb")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=rf"pip install 'fedda\[{name}\]'"):
            getattr(fedda.track, name)()


def test_train_leaves_the_threads_of_the_user_alone(monkeypatch):
    from fedda import training

    seen = []
    monkeypatch.setattr(training, "measured_threads", lambda *_: 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fedda.train(
            fedda.make("fedavg"), digits(), rounds=1, on_evaluation=lambda _: seen.append(torch.get_num_threads())
        )
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_report_of_results(tmp_path):
    problem = digits(metrics=["f1"])
    results = {name: fedda.train(fedda.make(name), problem, rounds=2, seed=[0, 1]) for name in ("fedavg", "scaffold")}
    page = fedda.report(results, out=tmp_path / "page.html", title="Two methods")
    text = page.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "Two methods" in text and "Test f1" in text and "Worst tenth" in text and "scaffold" in text
    for bad in ([], {"a": 3}, 5):
        with pytest.raises(ValueError, match="report: "):
            fedda.report(bad)


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedda_inside = partial(inside, capsys, monkeypatch)
    (tmp_path / "mine.toml").write_text(TOML.replace("patience = 2\n", ""))
    code, out, err = fedda_inside(
        "run", tmp_path / "mine.toml", "--patience", "2", "--out", tmp_path / "run", "--algorithms", "fedavg"
    )
    assert code == 0, err
    assert "worst tenth" in out and "has not improved in 2 evaluations" in err
    assert json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[0])["algorithm"] == "fedavg"
    code, _, err = fedda_inside("run", tmp_path / "mine.toml", "--track", "nothing", "--out", tmp_path / "other")
    assert code == 2 and "'--track': " in err and "is not one of" in err and not (tmp_path / "other").exists()


def test_a_sweep_stops_when_no_point_improves(tmp_path):
    wanted = parse(TOML.replace("[algorithms.scaffold]\nlr = 0.3\n", ""), "mine")
    wanted = wanted.model_copy(update={"personalise": None, "patience": 2, "rounds": 60, "every": 1})
    sweep = Sweep(wanted, ["fedavg.lr=0.03,0.3"])
    found = search(sweep, tmp_path / "sweep", Silence())
    rows = read_rows(tmp_path / "sweep" / METRICS)
    last = max(row["round"] for row in rows)
    assert last < 60
    stops = []
    for number, point in enumerate(found["algorithms"]["fedavg"]["points"]):
        by_seed = [[row for row in rows if (row["point"], row["seed"]) == (number, seed)] for seed in wanted.seeds]
        best = [max(row["validation_accuracy"] for row in own) for own in by_seed]
        assert point["value"] == statistics.fmean(best) and point["note"] is None
        stops += [stopped_at(own, "validation_accuracy", 2, 1) for own in by_seed]
    assert len(stops) == 4 and max(stops) == last  # the program ends with the last of them
