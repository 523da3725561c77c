"""What `fedda.problem` takes, in a federation: metrics, augmentation, frozen layers, BatchNorm, dropout, dicts.

Everything equals the simulation with the cohorts and batches of the server's secret.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedda
from conftest import example

pytest.importorskip("flwr", reason="needs fedda[flower]")
from flwr.app import ArrayRecord, Message, MetricRecord

from fedda.deploy import InProcessGrid, Relay, Site, Strategy, TooFewReplies, client_app, export, trained
from fedda.deploy.client import EVALUATE, HELLO, STATISTICS
from fedda.deploy.secure_client import REVEAL
from fedda.deploy.server import Plan, serve
from fedda.deploy.status import facts, read_status
from fedda.deploy.wire import packed
from flowers import replayed

CLIENTS = 4
SECRET = bytes(range(32))
LOSS = nn.functional.cross_entropy


def samples(k, n=None):
    """The samples of a site: small images of three classes, unequal in number."""
    g = torch.Generator().manual_seed(k)
    n = n or 13 + 6 * k
    x, y = torch.randn(n, 2, 4, 4, generator=g), torch.randint(0, 3, (n,), generator=g)
    return (x + y[:, None, None, None] * 0.5 + k * 0.3).double(), y


def normed():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5), nn.ReLU(),
        nn.Linear(5, 3),
    )  # fmt: skip


def dropped():
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3))


def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.Linear(5, 3))


def app_of(model, data=samples, **options):
    return client_app(lambda context: Site(model(), LOSS, *data(context.node_config["partition-id"]), **options))


def plan(out, name="fedavg", **changes):
    how = {"clients": CLIENTS, "rounds": 4, "cohort": 3, "batch": 5, "dtype": "float64", "timeout": 5.0, "every": 2}
    how |= {"weights": "samples", "max_samples": 1000, "out": str(out)} | changes
    return Plan(algorithm=name, params=json.dumps(example(name) | {"steps": 2}), **how)


def quiet(line):
    pass


def run(grid, asked, model, test=None, **options):
    return serve(grid, asked, model, LOSS, test, say=quiet, secret=SECRET, **options)


def pooled(model, batch=5, data=samples, clients=CLIENTS, **options):
    """The problem of a simulation with the samples of all sites."""
    parts = [data(k) for k in range(clients)]
    if isinstance(parts[0][0], dict):
        x = {name: torch.cat([part[0][name] for part in parts]) for name in parts[0][0]}
    else:
        x = torch.cat([part[0] for part in parts])
    y = torch.cat([part[1] for part in parts])
    owner = torch.cat([torch.full((len(part[1]),), k) for k, part in enumerate(parts)])
    return fedda.problem(model().double(), LOSS, x=x, y=y, client=owner, batch=batch, **options)


def simulated(problem, asked, x0):
    algorithm = fedda.make(asked.algorithm, **json.loads(asked.params))
    how = {"cohort": asked.cohort or None, "seed": asked.seed, "weights": asked.weights, "x0": x0, "every": asked.every}
    return replayed(SECRET, algorithm, problem, asked.rounds, **how)


def rows_of(asked):
    return [json.loads(line) for line in (Path(asked.out) / "metrics.jsonl").read_text().splitlines()]


def report_of(asked):
    return json.loads((Path(asked.out) / "report.json").read_text())


def compare(run, truth, asked, names, tol=1e-12):
    """The server's vectors, and these columns of all rows."""
    for ours, theirs in zip(run.server, truth.server, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tol, atol=tol)
    rows = rows_of(asked)
    assert [row["round"] for row in rows] == [row["round"] for row in truth.history]
    for ours, theirs in zip(rows, truth.history, strict=True):
        assert {name: ours[name] for name in names} == pytest.approx(
            {name: theirs[name] for name in names}, rel=tol, abs=tol
        )


# -- metrics ----------------------------------------------------------------------------------------------------------
def margin(output, target):  # a number for each sample
    return output.gather(1, target[:, None])[:, 0] - output.mean(dim=1)


def brier(output, target):
    return ((output.softmax(dim=1) - nn.functional.one_hot(target, 3)) ** 2).sum(dim=1)


METRICS = {
    "margin": margin,
    "root": fedda.Metric(brier, higher_is_better=False, of_mean=torch.sqrt, bounds=(0, 2)),
    "f1": fedda.registry.metrics.find("f1").build,
}
OF_SAMPLES = ("train_loss", "train_accuracy", "train_margin", "train_root")
TEST = ("test_loss", "test_accuracy", "test_margin", "test_root", "test_f1")


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_metrics_as_simulated(weights, tmp_path):
    """Means over samples are the simulation's; a metric of a set is the mean of the sites' own values."""
    asked, test = plan(tmp_path / "out", weights=weights), samples(9)
    done = run(InProcessGrid(app_of(plain, metrics=METRICS), CLIENTS), asked, plain, test, metrics=METRICS)
    problem = pooled(plain, metrics=METRICS, test=test)
    truth = simulated(problem, asked, done.problem.start(0))
    compare(done, truth, asked, (*OF_SAMPLES, *TEST))
    row = rows_of(asked)[-1]
    assert "train_f1" not in row
    whole = fedda.Run(fedda.make("fedavg", lr=0.1), problem, x0=done.server.x[0], weights=weights)
    each = torch.tensor([own["train_f1"] for own in whole.client_rows()], dtype=torch.float64)
    share = done.simulation.weights / done.simulation.weights.sum()
    assert row["train_site_mean_f1"] == pytest.approx(float(each @ share), rel=1e-12)
    # The operator's status has them.
    shown = dict(facts(read_status(tmp_path / "out")))
    assert shown["train site mean f1"] == f"{row['train_site_mean_f1']:.4g}" and "test f1" in shown


def test_a_strategy_gives_metrics_to_flower(tmp_path):
    app, how = app_of(plain, metrics=["f1", "top5_accuracy"]), {"clients": CLIENTS, "out": str(tmp_path / "out")}
    strategy = Strategy(plain(), LOSS, "fedavg", {"lr": 0.1}, metrics=["top5_accuracy"], test=samples(9), **how)
    result = strategy.start(InProcessGrid(app, CLIENTS), ArrayRecord(plain().state_dict()), num_rounds=1)
    seen = result.evaluate_metrics_clientapp[1]
    assert seen["train_top5_accuracy"] == seen["test_top5_accuracy"] == 1.0  # of three classes
    assert not any("f1" in name for name in seen)  # a site reports what the server asks for


class Saying(InProcessGrid):
    """Site 1 answers an evaluation with these columns and values."""

    def __init__(self, app, said, clients=CLIENTS):
        super().__init__(app, clients)
        self.said = said

    def answer(self, message):
        reply = super().answer(message)
        if message.content["fields"]["task"] != EVALUATE or message.metadata.dst_node_id != 2:
            return reply
        values = tuple(torch.full((1, 1), value, dtype=torch.float64) for value in self.said.values())
        return Message(packed(values, {"stamp": 0, "names": list(self.said)}), reply_to=message)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"train_loss": 1.0, "train_auc": 0.5}, "'train_auc' is not a metric that the server asked for"),
        ({"train_loss": 1.0, "train_site_mean_f1": 1.5}, "train_site_mean_f1 must be in [0, 1], got 1.5"),
        ({"train_loss": 1.0, "train_root": 2.1}, "train_root must be in [0, 2], got 2.1"),
        ({"train_loss": 1.0, "train_margin": 1e7}, "train_margin is 1e+07; the limit is 1e+06"),
        ({"train_loss": 1.0, "train_margin": math.nan}, "train_margin is not finite"),
        ({"train_accuracy": 1.0}, "the metrics must be a loss and others, each of them once"),
    ],
)
def test_metrics_that_were_not_asked_for_or_are_not_possible_are_rejected(said, why, tmp_path):
    asked = plan(tmp_path / "out", rounds=1, every=1)
    run(Saying(app_of(plain, metrics=METRICS), said), asked, plain, metrics=METRICS)
    assert report_of(asked)["rejected"] == {"malformed": 2}
    assert report_of(asked)["last"]["malformed"] == f"client 1: its metrics: {why}"


def test_one_site_alone_cannot_add_a_column(tmp_path):
    """F1 as a number for each sample would be the simulation's train_f1, which the others cannot give."""
    asked = plan(tmp_path / "out", rounds=1, every=1)
    run(Saying(app_of(plain, metrics=METRICS), {"train_loss": 1.0, "train_f1": 1.0}), asked, plain, metrics=METRICS)
    assert report_of(asked)["rejected"] == {} and "train_f1" not in rows_of(asked)[-1]


def test_a_metric_without_a_value_is_left_out_by_its_site(tmp_path):
    """The AUC of one class is no number: the mean is over the other sites."""

    def two_classes(k):
        x, y = samples(k)
        return x, torch.zeros_like(y) if k == 2 else (y > 0).long()

    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 2))

    asked = plan(tmp_path / "out", rounds=1, every=1, weights="uniform")
    done = run(InProcessGrid(app_of(network, two_classes, metrics=["auc"]), CLIENTS), asked, network, metrics=["auc"])
    auc = fedda.registry.metrics.find("auc").build
    model = trained(asked.out, network().double())
    each = [float(auc(model(x), y)) for k in (0, 1, 3) for x, y in [two_classes(k)]]
    assert rows_of(asked)[-1]["train_site_mean_auc"] == pytest.approx(np.mean(each), rel=1e-12)
    assert report_of(asked)["rejected"] == {} and int(done.dropped) == 0


def test_a_site_without_the_metrics_of_the_server_is_named_at_the_start(tmp_path):
    grid = InProcessGrid(app_of(plain, metrics=["top5_accuracy"]), CLIENTS)
    with pytest.warns(UserWarning, match="it has no metric 'f1'"), pytest.raises(TooFewReplies):
        run(grid, plan(tmp_path / "out", timeout=0.3), plain, metrics=["f1", "top5_accuracy"])
    (first, *_) = report_of(plan(tmp_path / "out"))["refused_nodes"]
    assert first == "node 1: it has no metric 'f1', which the server asks for: give it as Site(metrics=...)"


def test_a_site_of_an_older_version_is_named_at_the_start(tmp_path):
    """It answers that it does not know the version of the message."""

    class Old(InProcessGrid):
        def answer(self, message):
            message.content["fields"]["protocol"] = 3
            return super().answer(message)

    with pytest.warns(UserWarning, match="the message is not of protocol"), pytest.raises(TooFewReplies):
        run(Old(app_of(plain), CLIENTS), plan(tmp_path / "out", timeout=0.3), plain)


# -- BatchNorm --------------------------------------------------------------------------------------------------------
def close_to_rows(model, asked, test):
    """The model scores what the last row says."""
    x, y = test
    with torch.no_grad():
        output = model(x.to(next(model.parameters()).dtype))
        loss, right = float(LOSS(output, y)), float((output.argmax(1) == y).double().mean())
    row = rows_of(asked)[-1]
    assert loss == pytest.approx(row["test_loss"], rel=1e-12) and right == pytest.approx(row["test_accuracy"])


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "mime"])
def test_batch_norm_as_simulated(name, weights, tmp_path):
    """Training, the statistics at every evaluation, the server's test set, and the model that is left at the end."""
    asked, test = plan(tmp_path / "out", name, weights=weights), samples(9)
    grid = InProcessGrid(app_of(normed, metrics=METRICS), CLIENTS)
    done = run(grid, asked, normed, test, metrics=METRICS)
    problem = pooled(normed, test=test, metrics=METRICS)
    truth = simulated(problem, asked, done.problem.start(0))
    compare(done, truth, asked, (*OF_SAMPLES, *TEST), tol=1e-12)
    expected = problem.statistics(truth.x, done.simulation.objective)
    model = trained(tmp_path / "out", normed().double())
    for key, value in expected.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=1e-12)
    close_to_rows(model, asked, test)
    assert set(expected) <= set(export(tmp_path / "out", tmp_path / "model.safetensors"))
    other = normed().double()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    close_to_rows(other.eval(), asked, test)


def test_an_evaluation_of_batch_norm_is_two_messages(tmp_path):
    asked = plan(tmp_path / "out", rounds=4, every=2)
    sent = []

    class Counting(InProcessGrid):
        def answer(self, message):
            sent.append(message.content["fields"]["task"])
            return super().answer(message)

    run(Counting(app_of(normed), CLIENTS), asked, normed)
    assert [sent.count(task) for task in (EVALUATE, STATISTICS, "local")] == [3 * CLIENTS, 3 * CLIENTS, 4 * 3]
    sent.clear()
    run(Counting(app_of(normed), CLIENTS), plan(tmp_path / "never", every=0), normed)
    assert [sent.count(task) for task in (EVALUATE, STATISTICS)] == [0, CLIENTS]  # at the end, for the model
    trained(tmp_path / "never", normed())


def test_a_run_with_batch_norm_resumes_bit_for_bit(tmp_path):
    class Died(Exception):
        pass

    def die(line):
        if line.startswith("round 3"):
            raise Died

    app = app_of(normed)
    whole = run(InProcessGrid(app, CLIENTS), plan(tmp_path / "a", "fedda-mvr"), normed, samples(9))
    with pytest.raises(Died):
        serve(
            InProcessGrid(app, CLIENTS), plan(tmp_path / "b", "fedda-mvr"), normed, LOSS, samples(9), say=die,
            secret=SECRET,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"round 3 has no statistics of BatchNorm yet"):  # evaluated every two rounds
        trained(tmp_path / "b", normed())
    again = run(InProcessGrid(app, CLIENTS), plan(tmp_path / "b", "fedda-mvr", resume=True), normed, samples(9))
    assert all(torch.equal(a, b) for a, b in zip(whole.server, again.server, strict=True))
    rows = [[row | {"seconds": 0} for row in rows_of(plan(tmp_path / x))] for x in "ab"]
    assert rows[0] == rows[1]
    states = [load_file(tmp_path / x / "state.safetensors")["statistics"] for x in "ab"]
    assert torch.equal(*states) and len(states[0]) == 2 * (3 + 5)


def test_a_strategy_returns_the_statistics_of_batch_norm(tmp_path):
    """Also for the judge of every round, though the sites are asked for metrics only after the last."""
    test, seen = samples(9), {}

    def judge(tau, arrays):
        model = normed().double()
        model.load_state_dict(arrays.to_torch_state_dict())
        seen[tau] = LOSS(model.eval()(test[0]), test[1]).item()
        return MetricRecord({"loss": seen[tau]})

    how = {"clients": CLIENTS, "dtype": "float64", "batch": 5, "every": 3, "out": str(tmp_path / "out"), "test": test}
    strategy, first = (
        Strategy(normed().double(), LOSS, "fedavg", {"lr": 0.1}, **how),
        ArrayRecord(normed().double().state_dict()),
    )
    result = strategy.start(InProcessGrid(app_of(normed), CLIENTS), first, num_rounds=3, evaluate_fn=judge)
    assert seen[3] == pytest.approx(result.evaluate_metrics_clientapp[3]["test_loss"], rel=1e-12)
    assert list(seen) == [0, 1, 2, 3]
    last = result.arrays.to_torch_state_dict()
    assert float(last["1.running_mean"].abs().max()) > 0.01
    strategy = Strategy(
        normed().double(), LOSS, "fedavg", {"lr": 0.1}, **how | {"every": 0, "out": str(tmp_path / "b")}
    )
    strategy.start(InProcessGrid(app_of(normed), CLIENTS), first, num_rounds=1, evaluate_fn=judge)
    trained(tmp_path / "b", normed())  # it has them


def test_statistics_of_a_site_that_lies_or_dies_are_left_out(tmp_path):
    """Too few of them end the run, as too few replies of a round do; it resumes."""

    class Faulty(InProcessGrid):
        bad = (2,)

        def answer(self, message):
            reply = super().answer(message)
            if message.content["fields"]["task"] != STATISTICS or message.metadata.dst_node_id not in self.bad:
                return reply
            about = {"stamp": message.content["fields"]["stamp"]}
            return Message(packed((torch.full((1, 16), 1e9).double(),), about), reply_to=message)

    asked = plan(tmp_path / "out", rounds=1, every=1, repeats=0, weights="uniform")
    done = run(Faulty(app_of(normed), CLIENTS), asked, normed)
    text = "client 1: its statistics: a value of size 1e+09; the limit is 1e+06"
    assert report_of(asked)["rejected"] == {"malformed": 2} and report_of(asked)["last"]["malformed"] == text
    problem = pooled(normed)
    expected = problem.statistics(done.server.x[0], torch.tensor([1.0, 0.0, 1.0, 1.0]).double())
    model = trained(tmp_path / "out", normed().double())
    for key, value in expected.items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=1e-12, atol=1e-12)
    Faulty.bad = (1, 2, 3)
    asked = plan(tmp_path / "few", rounds=1, every=1, repeats=1)
    with pytest.raises(
        TooFewReplies, match=r"the statistics of BatchNorm: 1 of 4 replies .* 2 are needed \(2 attempts"
    ):
        run(Faulty(app_of(normed), CLIENTS), asked, normed)
    done = run(
        InProcessGrid(app_of(normed), CLIENTS), plan(tmp_path / "few", rounds=1, every=1, resume=True), normed
    )  # fmt: skip
    assert [row["round"] for row in rows_of(asked)] == [0, 1] and done.round == 1


def test_batch_norm_with_noise_is_refused_in_one_line(tmp_path):
    noise = json.dumps([{"name": "clip", "norm": 1.0}, {"name": "noise", "multiplier": 1.0, "norm": 1.0}])
    with pytest.raises(ValueError, match=r"^deploy: 1 is a BatchNorm, whose statistics noise does not protect: use G"):
        run(InProcessGrid(app_of(normed), CLIENTS), plan(tmp_path, weights="uniform", aggregation=noise), normed)
    assert not list(tmp_path.iterdir())


def test_a_site_with_other_batch_norms_is_left_out(tmp_path):
    def load(context):
        k = context.node_config["partition-id"]
        free = nn.Sequential(nn.Flatten(), nn.Linear(32, 3), *([nn.BatchNorm1d(3, affine=False)] if k else []))
        return Site(free, LOSS, *samples(k))

    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 3), nn.BatchNorm1d(3, affine=False))

    with pytest.warns(UserWarning, match="different BatchNorm layers"):
        done = run(InProcessGrid(client_app(load), 4), plan(tmp_path, clients=3, rounds=1), network)
    assert done.problem.clients == 3


# -- hidden sums and relays -------------------------------------------------------------------------------------------
def test_secure_aggregation_hides_metrics_and_statistics(tmp_path):
    """The rows differ from those of a plain federation by the stated error. Sizes are hidden, so that all sites draw as
    if they had many samples: here they have."""

    def many(k):
        return samples(k, 2600 + 10 * k)

    how = {"rounds": 2, "every": 1, "batch": 50, "cohort": 0, "limit": 1000.0, "max_samples": 5000}
    app, test, seen = app_of(normed, many, metrics=METRICS), samples(9), []

    class Counting(InProcessGrid):
        def answer(self, message):
            reply = super().answer(message)
            about = message.content["fields"]["task"], dict(reply.content["fields"])
            seen.append((*about, [tuple(a.shape) for a in reply.content["tensors"].values()]))
            return reply

    hidden = plan(tmp_path / "a", **how, secure_aggregation=True, timeout=60.0)
    done = run(Counting(app, CLIENTS), hidden, normed, test, metrics=METRICS)
    problem = pooled(normed, 50, many, test=test, metrics=METRICS)
    truth = simulated(problem, plan(tmp_path / "b", **how), done.problem.start(0))
    error = report_of(hidden)["secure_aggregation"]["largest_error"]
    compare(done, truth, hidden, (*OF_SAMPLES, *TEST), tol=1000 * error)
    assert 0 < error < 1e-11 and "train_site_mean_f1" in rows_of(hidden)[-1]
    for task, fields, shapes in seen:
        if task in (EVALUATE, STATISTICS):
            assert set(fields) == {"protocol", "stamp", "draws"} and len(shapes) == 2
    assert {task for task, *_ in seen} == {HELLO, "local", EVALUATE, STATISTICS, REVEAL}
    close_to_rows(trained(tmp_path / "a", normed().double()), hidden, test)


@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr"])
def test_relays_pass_on_metrics_and_statistics(name, tmp_path):
    asked, test = plan(tmp_path / "out", name, cohort=0), samples(9)
    # The frozen first layer must be the same at all sites.
    torch.manual_seed(0)
    first = normed()

    def network():
        made = normed()
        made[0].load_state_dict(first[0].state_dict())
        return made

    app = app_of(network, metrics=METRICS, trainable="[1-7].*")
    how = {"min_replies": 1, "metrics": METRICS, "trainable": "[1-7].*"}
    relays = [Relay(InProcessGrid(app, 2, first=2 * r), network(), 2, **how) for r in range(2)]
    grid = InProcessGrid(client_app(lambda context: relays[context.node_config["partition-id"]]), 2)
    done = run(grid, asked, network, test, metrics=METRICS, trainable="[1-7].*")
    problem = pooled(network, test=test, metrics=METRICS, trainable="[1-7].*")
    truth = simulated(problem, asked, done.problem.start(0))
    compare(done, truth, asked, (*OF_SAMPLES, *TEST))
    model = trained(tmp_path / "out", network().double())
    expected = problem.statistics(truth.x, done.simulation.objective)
    torch.testing.assert_close(model[5].running_var, expected["5.running_var"], rtol=1e-12, atol=1e-12)
    close_to_rows(model, asked, test)


# -- frozen layers, random layers, augmentation, dicts ----------------------------------------------------------------
def test_frozen_layers_never_travel_and_must_be_the_same(tmp_path):
    torch.manual_seed(1)
    first = plain()

    def network():
        made = plain()
        made[1].load_state_dict(first[1].state_dict())
        return made

    asked = plan(tmp_path / "out")
    done = run(InProcessGrid(app_of(network, trainable="3.*"), CLIENTS), asked, network, trainable="3.*")
    truth = simulated(pooled(network, trainable="3.*"), asked, done.problem.start(0))
    compare(done, truth, asked, ("train_loss", "train_accuracy"))
    assert done.server.x.shape == (1, 18)
    model = trained(tmp_path / "out", network().double())
    assert torch.equal(model[1].weight, first[1].weight.double())
    with pytest.raises(ValueError, match="the frozen parameters of the model are not those of the run"):
        trained(tmp_path / "out", plain())
    with pytest.raises(ValueError, match="the frozen parameters of the model are not those of the run"):
        run(
            InProcessGrid(app_of(plain, trainable="3.*"), CLIENTS), plan(tmp_path / "out", resume=True), plain,
            trainable="3.*",
        )  # fmt: skip
    with pytest.warns(UserWarning, match="frozen parameters are not those of the server"), pytest.raises(TooFewReplies):
        run(
            InProcessGrid(app_of(plain, trainable="3.*"), CLIENTS), plan(tmp_path / "b", timeout=0.3), network,
            trainable="3.*",
        )  # fmt: skip


@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "mime"])
def test_dropout_as_simulated(name, tmp_path):
    """Mime takes gradients over all samples of a client, with the random numbers of that client."""
    asked = plan(tmp_path / "out", name)
    done = run(InProcessGrid(app_of(dropped), CLIENTS), asked, dropped)
    truth = simulated(pooled(dropped), asked, done.problem.start(0))
    compare(done, truth, asked, ("train_loss", "train_accuracy"))
    without = simulated(pooled(lambda: dropped().eval()), asked, done.problem.start(0))
    assert float((without.server.x - done.server.x).abs().max()) > 1e-6  # it does something


@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr"])
def test_augmentation_as_simulated(name, tmp_path):
    asked, augment = plan(tmp_path / "out", name), ["flip", {"kind": "crop", "pad": 1}]
    done = run(InProcessGrid(app_of(plain, augment=augment), CLIENTS), asked, plain)
    truth = simulated(pooled(plain, augment=augment), asked, done.problem.start(0))
    compare(done, truth, asked, ("train_loss", "train_accuracy"))
    without = simulated(pooled(plain), asked, done.problem.start(0))
    assert float((without.server.x - done.server.x).abs().max()) > 1e-6


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.number = nn.Linear(32, 3), nn.Embedding(4, 3)

    def forward(self, image, kind):
        return {"logits": self.image(image.flatten(1)) + self.number(kind)}


@pytest.mark.parametrize("secure", [False, True])
def test_dicts_of_inputs_as_simulated(secure, tmp_path):
    def loss(output, target):
        return LOSS(output["logits"], target)

    def data(k):
        x, y = samples(k)
        return {"image": x, "kind": (y + k) % 4}, y

    app = client_app(lambda context: Site(TwoInputs(), loss, *data(context.node_config["partition-id"])))
    asked = plan(tmp_path / "out", secure_aggregation=secure, cohort=0, limit=100.0)
    done = serve(InProcessGrid(app, CLIENTS), asked, TwoInputs, loss, data(9), say=quiet, secret=SECRET)
    parts = [data(k) for k in range(CLIENTS)]
    x = {name: torch.cat([part[0][name] for part in parts]) for name in ("image", "kind")}
    owner = torch.cat([torch.full((len(part[1]),), k) for k, part in enumerate(parts)])
    y = torch.cat([part[1] for part in parts])
    problem = fedda.problem(TwoInputs().double(), loss, x=x, y=y, client=owner, batch=5, test=data(9))
    truth = simulated(problem, asked, done.problem.start(0))
    names = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
    compare(done, truth, asked, names, tol=1e-9 if secure else 1e-12)


def test_sequences_have_their_metrics_without_being_asked(tmp_path):
    class Next(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, x):
            return self.table(x)

    def loss(output, target):
        return LOSS(output.transpose(1, 2), target)

    def data(k):
        g = torch.Generator().manual_seed(k)
        x = torch.randint(0, 5, (9 + k, 6), generator=g)
        return x, (x + 1) % 5

    app = client_app(lambda context: Site(Next(), loss, *data(context.node_config["partition-id"])))
    asked = plan(tmp_path / "out")
    done = serve(InProcessGrid(app, CLIENTS), asked, Next, loss, say=quiet, secret=SECRET)
    x, y = (torch.cat(parts) for parts in zip(*(data(k) for k in range(CLIENTS)), strict=True))
    owner = torch.cat([torch.full((9 + k,), k) for k in range(CLIENTS)])
    problem = fedda.problem(Next().double(), loss, x=x, y=y, client=owner, batch=5)
    truth = simulated(problem, asked, done.problem.start(0))
    compare(done, truth, asked, ("train_loss", "train_token_accuracy", "train_perplexity"))
