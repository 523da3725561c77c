"""Metrics of one's own and built-in ones, in every engine, and how much of the data an evaluation takes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import fedda
from conftest import digits
from fedda import registry
from fedda.evaluations import SMALL, plan_evaluations
from fedda.experiments import run as run_experiment
from fedda.experiments.config import parse
from fedda.experiments.sweep import Sweep, search
from fedda.problems.evaluation import chosen_samples
from fedda.progress import Silence
from fedda.run import Run
from fedda.runs.metrics import metric
from fedda.runs.reading import read_run
from ranks import fine, spawn


def share(output, target):
    """One number for a set."""
    return float((output.argmax(-1) == target).double().mean())


def wrong(output, target):
    """A number for each sample."""
    return (output.argmax(-1) != target).double()


def close(a, b, tol=1e-12):
    assert abs(float(a) - float(b)) <= tol * (1 + abs(float(b))), (a, b)


OWN = {"share": share, "wrong": fedda.Metric(wrong, higher_is_better=False)}


def test_built_in_metrics_equal_a_second_implementation():
    g = torch.Generator().manual_seed(1)
    logits, classes = torch.randn(200, 7, generator=g).double(), torch.randint(0, 7, (200,), generator=g)
    classes[classes == 3] = 2  # a class that never occurs but is predicted
    known = registry.metrics
    guess = logits.argmax(-1)
    close(known.find("f1").build(logits, classes), reference.f1_score(classes, guess, average="macro"))
    with pytest.warns(UserWarning, match="y_pred"):
        balanced = reference.balanced_accuracy_score(classes, guess)
    close(known.find("balanced_accuracy").build(logits, classes), balanced)
    ranked = logits.argsort(-1, descending=True)[:, :5]
    close(
        known.find("top5_accuracy").build(logits, classes).mean(), (ranked == classes[:, None]).any(-1).double().mean()
    )
    score, two = (
        torch.randint(0, 9, (200,), generator=g).double(),
        torch.randint(0, 2, (200,), generator=g),
    )  # with ties
    close(known.find("auc").build(score, two), reference.roc_auc_score(two, score))
    close(known.find("auc").build(torch.stack([-score / 2, score / 2], -1), two), reference.roc_auc_score(two, score))
    a, b = torch.randn(50, generator=g).double(), torch.randn(50, generator=g).double()
    close(known.find("mae").build(a[:, None], b).mean(), (a - b).abs().mean())
    rmse = known.find("rmse").build
    close(rmse.of_mean(rmse(a, b).mean()), reference.mean_squared_error(b, a) ** 0.5)
    close(known.find("r2").build(a, b), reference.r2_score(b, a))


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_own_metrics_are_in_every_row(engine):
    problem = digits(metrics=OWN, validation=0.2)
    result = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=3, seed=[0, 1], engine=engine)
    for row in result.history:
        for part in ("train", "validation", "test"):
            close(row[f"{part}_wrong"], 1 - row[f"{part}_accuracy"], 1e-12)
        for part in ("validation", "test"):  # the accuracy of the training samples is a mean over clients
            close(row[f"{part}_share"], row[f"{part}_accuracy"], 1e-12)
    model = result.model(seed=1)
    data = problem.data
    expected = share(model(data.x), data.y)
    close(result.history[-1]["train_share"], expected, 1e-12)


def test_a_loss_that_is_not_a_mean_over_samples_has_metrics_as_well():
    weight = torch.arange(1.0, 11.0, dtype=torch.float64)
    plain = digits(metrics=OWN)
    weighted = fedda.problem(
        plain.model, lambda output, y: torch.nn.functional.cross_entropy(output, y, weight), x=plain.data.x,
        y=plain.data.y, client=torch.repeat_interleave(torch.arange(10), plain.sizes), metrics=OWN, scale=plain.scale,
    )  # fmt: skip
    x, ones = plain.start(3)[None], torch.ones(10, dtype=torch.float64)
    assert not weighted._evaluation.loss_is_mean
    for samples in (None, 300):
        a, b = plain.evaluate(x, ones, samples=samples), weighted.evaluate(x, ones, samples=samples)
        close(a["train_share"], b["train_share"], 1e-12)
        close(a["train_wrong"], b["train_wrong"], 1e-12)


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.classes, self.number = torch.nn.Linear(5, 3), torch.nn.Linear(5, 1)

    def forward(self, x):
        return self.classes(x), self.number(x).squeeze(-1)


def correlation(output, target):
    return torch.corrcoef(torch.stack([output[1], target["number"]]))[0, 1]


def share_of_first(output, target):
    return share(output[0], target["class"])


def two_outputs():
    """A model that returns a tuple, targets that are a dict, and metrics of a whole set of them."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(120, 5, generator=g, dtype=torch.float64)
    y = {"class": x.argmax(1) % 3, "number": x.sum(1)}
    torch.manual_seed(3)
    return fedda.problem(
        TwoOutputs().double(),
        lambda o, t: torch.nn.functional.cross_entropy(o[0], t["class"]) + (o[1] - t["number"]).pow(2).mean(),
        x=x, y=y, client=torch.arange(120) % 4, batch=8, validation=0.25,
        metrics={"correlation": correlation, "share": share_of_first},
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_metrics_of_a_whole_set_take_tuples_and_dicts(engine):
    problem = two_outputs()
    result = fedda.train(fedda.make("fedavg", lr=0.05), problem, rounds=3, seed=[0, 1], engine=engine)
    with torch.no_grad():
        output = result.model(seed=1)(problem.data.x)
    close(result.history[-1]["train_correlation"], correlation(output, problem.data.y), 1e-12)
    close(result.history[-1]["train_share"], share_of_first(output, problem.data.y), 1e-12)
    [row] = [row for row in result.clients if row["seed"] == 1 and row["client"] == 2]
    own = slice(int(problem.offsets[2]), int(problem.offsets[2] + problem.sizes[2]))
    y = {name: value[own] for name, value in problem.data.y.items()}
    close(row["train_correlation"], correlation((output[0][own], output[1][own]), y), 1e-12)


RANKS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, fedda
from conftest import digits
from test_metrics import OWN, two_outputs
torch.set_num_threads(1)
problem = digits(metrics=OWN, validation=0.2)
only = problem.only(fedda.engines.join().mine(problem.clients))  # with the samples of its own clients alone
for one in (problem, only):
    result = fedda.train(
        fedda.make("fedavg", lr=0.1), one, rounds=4, every=1, seed=[0, 1], engine="distributed", evaluate=200,
        patience=2, metric="validation_share", personalise="fine-tune 2 lr 0.1",
    )
    print(json.dumps([list(result.history), list(result.clients), result.stopped]))
result = fedda.train(fedda.make("fedavg", lr=0.05), two_outputs(), rounds=2, seed=[0, 1], engine="distributed")
print(json.dumps([list(result.history), list(result.clients), result.stopped]))
"""


def test_two_processes_give_the_same_rows(tmp_path):
    (tmp_path / "program.py").write_text(RANKS)
    outputs = fine(spawn(2, tmp_path / "program.py", Path(__file__).parent))
    problem = digits(metrics=OWN, validation=0.2)
    alone = fedda.train(
        fedda.make("fedavg", lr=0.1), problem, rounds=4, every=1, seed=[0, 1], evaluate=200,
        patience=2, metric="validation_share", personalise="fine-tune 2 lr 0.1",
    )  # fmt: skip
    tuples = fedda.train(fedda.make("fedavg", lr=0.05), two_outputs(), rounds=2, seed=[0, 1])
    for output in outputs:
        for line, one in zip(output.splitlines(), (alone, alone, tuples), strict=True):
            history, clients, stopped = json.loads(line)
            assert stopped == one.stopped
            for rows, expected in ((history, one.history), (clients, one.clients)):
                assert len(rows) == len(expected)
                for row, other in zip(rows, expected, strict=True):
                    assert row.keys() == other.keys()
                    for key in row.keys() - {"seconds"}:
                        close(row[key], other[key], 1e-12)


def test_sequences_have_token_accuracy_and_perplexity():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 5, (40, 6), generator=g), torch.randint(0, 5, (40, 6), generator=g)
    network = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5)).double()
    loss = lambda output, target: torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())  # noqa: E731
    problem = fedda.problem(network, loss, x=x, y=y, client=torch.arange(40) % 4, test=(x[:9], y[:9]))
    row = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=2).history[-1]
    for part in ("train", "test"):
        close(row[f"{part}_perplexity"], math.exp(row[f"{part}_loss"]), 1e-12)
    model = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=2).model()
    close(row["test_token_accuracy"], (model(x[:9]).argmax(-1) == y[:9]).double().mean(), 1e-12)


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ("f1", "metrics must be"),
        (["f11"], "unknown metric 'f11'; did you mean 'f1'"),
        ({"loss": share}, "other than loss, accuracy, samples"),
        ({"my metric": share}, "must be a word"),
        ({"mine": 3}, "must be a function"),
        ({"mine": lambda o, t: o}, "must return one number, or a tensor of 64 numbers"),
        ({"mine": lambda o, t: o.nothing}, "'mine' cannot take this data"),
        ({"mine": fedda.Metric(share, of_mean=torch.sqrt)}, "must return a number for each sample"),
    ],
)
def test_a_bad_metric_is_refused_in_one_line(metrics, line):
    with pytest.raises(ValueError, match=line) as why:
        digits(metrics=metrics)
    assert "\n" not in str(why.value)


TOML = """
name = "houses"
rounds = 3
[problem]
data = "{data}"
target = "price"
clients = 2
metrics = ["mae", "cost"]
validation = 0.2
[algorithms.fedavg]
lr = 0.01
[algorithms.scaffold]
lr = 0.01
"""


@pytest.fixture
def houses(tmp_path):
    pytest.importorskip("pyarrow")

    if "cost" not in registry.metrics.entries:
        registry.metrics.register("cost")(fedda.Metric(lambda o, t: (o - t) ** 2, higher_is_better=False))
    rows = [f"{i % 7},{i % 3},{0.5 * (i % 7) + 0.1}" for i in range(60)]
    (tmp_path / "houses.csv").write_text("\n".join(["area,rooms,price", *rows]))
    yield parse(TOML.format(data=tmp_path / "houses.csv"), "houses")
    registry.metrics.known.pop("cost", None)


def test_metrics_of_a_file_reach_the_folder_the_report_and_the_sweep(houses, tmp_path):
    run_experiment(houses, tmp_path / "run", Silence())
    recorded = read_run(tmp_path / "run")
    assert recorded.directions == {"mae": "lower", "cost": "lower"}
    assert {"test_mae", "validation_cost"} <= set(recorded.metrics)
    from fedda.report import Report

    report = Report.of([recorded])
    assert report.picture.metric("test_cost").better == "lower" and "test_mae" in report.csv
    group = report.table.groups[0][1]
    at = report.table.heads.index("Test cost")
    assert all(float(line.cells[at].text) == pytest.approx(line.cells[at].value, rel=1e-3) for line in group)
    found = search(Sweep(houses, ["fedavg.lr=0.0001,0.01"], metric="cost"), tmp_path / "sweep", Silence())
    assert (found["metric"], found["better"]) == ("validation_cost", "lower")
    points = found["algorithms"]["fedavg"]["points"]
    assert [p["best"] for p in points] == [p["value"] == min(q["value"] for q in points) for p in points]


def test_a_sweep_of_a_regression_needs_no_metric(houses, tmp_path):
    found = search(Sweep(houses, ["fedavg.lr=0.0001,0.01"]), tmp_path / "sweep", Silence())
    assert (found["metric"], found["better"]) == ("validation_loss", "lower")


def test_directions_of_known_names():
    names = {"test_accuracy": "higher", "validation_loss": "lower", "train_f1": "higher", "test_mae": "lower"}
    names |= {"train_perplexity": "lower", "objective": "lower", "density": "", "best_test_accuracy": "higher"}
    assert {name: metric(name).better for name in names} == names
    for entry in registry.metrics:
        own = "lower" if getattr(entry.build, "higher_is_better", True) is False else "higher"
        assert metric(f"test_{entry.name}").better == own, entry.name


# -- how many samples an evaluation takes ---------------------------------------------------------------------------
def test_a_subset_is_fixed_and_the_same_for_every_client():
    sizes = torch.tensor([3, 50, 20, 7])
    index, give = chosen_samples(sizes, 40)
    assert give.tolist() == [3, 10, 10, 7] and len(index) == 30 and len(set(index.tolist())) == 30
    owner = torch.repeat_interleave(torch.arange(4), sizes)
    assert torch.bincount(owner[index]).tolist() == give.tolist()
    assert torch.equal(index, chosen_samples(sizes, 40)[0])
    index, give = chosen_samples(torch.full((30,), 5), 8)  # more clients than samples
    assert give.sum() == 8 and give.max() == 1 and len(index) == 8


def test_a_subset_estimates_the_whole():
    problem = digits(clients=4)
    x, ones = problem.start(0)[None], torch.ones(4, dtype=torch.float64)
    index, give = chosen_samples(problem.sizes, 200)
    found = problem.evaluate(x, ones, samples=200)
    part = fedda.problem(
        problem.model, problem.loss, x=problem.data.x[index], y=problem.data.y[index], scale=problem.scale,
        client=torch.repeat_interleave(torch.arange(4), give),
    )  # fmt: skip
    close(found["train_loss"], part.evaluate(x, ones)["train_loss"], 1e-12)
    assert abs(float(found["train_loss"] - problem.evaluate(x, ones)["train_loss"])) < 0.05
    assert problem.evaluated_samples(200) == 200


class Counted(fedda.Quadratic):
    """A problem that says how many samples it has."""

    def __init__(self, train, others, batch=16):
        super().__init__([[1.0]], [[0.0]])
        self.counted = fedda.core.Evaluated(train, others, batch)

    def evaluated(self):
        return self.counted


@pytest.mark.parametrize("rounds", [50, 100, 1000, 4000])
@pytest.mark.parametrize(("train", "others"), [(60_000, 10_000), (4_000, 1), (50_000, 0), (10**6, 0), (5_000, 50_000)])
def test_evaluation_takes_a_fifth_of_the_work(rounds, train, others):
    """Counted in forward passes, with two for a gradient; the last evaluation takes everything."""
    every, samples = plan_evaluations(Counted(train, others), rounds, 10, 5, None, None)
    count = -(-rounds // every)
    cost = count * ((samples or train) + others) + train + others
    trained = 2 * rounds * 10 * 5 * 16
    least = 2 * others + train + min(train, 2_000)  # an evaluation at the start and one at the end
    assert cost <= max(trained / 4, least) and count <= 200
    assert every >= max(1, rounds // 100)


def test_small_problems_are_evaluated_whole():
    for given in (None, 7):
        assert plan_evaluations(Counted(SMALL - 10, 10), 300, 1, 1, given, None) == (given or 3, None)
        assert plan_evaluations(Counted(10**6, 10), 300, 1, 1, given, "all") == (given or 3, None)
        assert plan_evaluations(Counted(10**6, 10), 300, 1, 1, given, 50) == (given or 3, 50)
    rows = fedda.train(fedda.make("fedavg"), digits(), rounds=3).history
    assert len(rows) == 4 and "train_samples" not in rows[0]
    for bad in ("some", 0, True, 1.5):
        with pytest.raises(ValueError, match="evaluate must be"):
            fedda.train(fedda.make("fedavg"), digits(), rounds=1, evaluate=bad)
    with pytest.raises(ValueError, match="needs samples"):
        fedda.train(fedda.make("fedavg"), fedda.Quadratic([[1.0]], [[0.0]]), rounds=1, evaluate=5)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_last_evaluation_takes_all_samples(engine):
    problem = digits()
    result = fedda.train(fedda.make("fedavg"), problem, rounds=4, every=2, evaluate=200, engine=engine)
    whole = fedda.train(fedda.make("fedavg"), problem, rounds=4, every=2, engine=engine).history
    assert [row["train_samples"] for row in result.history] == [200, 200, int(problem.sizes.sum())]
    assert {k: v for k, v in result.history[-1].items() if k not in ("train_samples", "seconds")} == {
        k: v for k, v in whole[-1].items() if k != "seconds"
    }
    assert (
        result.history[1]["test_loss"] == whole[1]["test_loss"]
        and result.history[1]["train_loss"] != whole[1]["train_loss"]
    )


FILE = """
name = "part"
rounds = {rounds}
every = 2
evaluate = 200
seeds = [0, 1]
[problem]
data = "digits"
[algorithms.fedavg]
[algorithms.scaffold]
"""


def test_a_longer_run_has_the_rows_of_one_that_was_not_interrupted(tmp_path):
    first, whole = (parse(FILE.format(rounds=rounds), "part") for rounds in (4, 8))
    run_experiment(first, tmp_path / "a", Silence())
    rows = read_run(tmp_path / "a").rows
    assert {row["train_samples"] for row in rows if row["round"] == 4} == {1438}
    run_experiment(whole, tmp_path / "a", Silence(), resume=True)
    run_experiment(whole, tmp_path / "b", Silence())
    for name in ("metrics.jsonl", "config.toml", "clients.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert {row["train_samples"] for row in read_run(tmp_path / "a").rows if row["round"] == 4} == {200}


def test_a_large_data_set_of_a_file_gets_a_plan(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", x=rng.random((6000, 4), dtype=np.float32), y=rng.integers(0, 3, 6000))
    text = f'name = "large"\nrounds = 40\n[problem]\ndata = "{tmp_path / "data.npz"}"\n[algorithms.fedavg]\n'
    run_experiment(parse(text, "large"), tmp_path / "run", Silence())
    config = read_run(tmp_path / "run").config
    problem = parse(text, "large").problem.build()
    plan = plan_evaluations(problem, 40, 10, 5, None, None)
    assert (config["every"], config.get("evaluate")) == plan and plan.samples is not None


def test_pytorch_does_not_speak_of_vmap(recwarn):
    """An operation without a batching rule: PyTorch would ask the user to file an issue."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) + torch.nn.functional.unfold(x[:, None, None, :], (1, 1)).flatten(1)[:, :4].renorm(
                2, 0, 1.0
            )

    problem = fedda.problem(
        Odd(),
        torch.nn.functional.cross_entropy,
        x=torch.randn(40, 4),
        y=torch.arange(40) % 4,
        client=torch.arange(40) % 4,
    )
    Run(fedda.make("fedavg"), problem, seed=[0, 1]).evaluate()
    fedda.train(fedda.make("fedavg"), problem, rounds=1)
    assert not [str(w.message) for w in recwarn if "batching rule" in str(w.message)]
