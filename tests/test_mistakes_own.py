"""Mistakes with models, data and options of one's own: each is one line; on the command line, exit 2 and nothing left."""

import io
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedda
from commands import inside, is_one_line

torch.manual_seed(0)
X, Y = torch.randn(100, 4), torch.arange(100) % 3
LINEAR = nn.Linear(4, 3)


def made(model=LINEAR, loss=F.cross_entropy, **options):
    return fedda.problem(model, loss, **({"x": X, "y": Y} | options))


def changed(y, at, value):
    y = y.clone()
    y[at] = value
    return y


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x), x


SCALAR = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


def rate(**table):
    return fedda.make("fedavg", lr={"start": 0.1} | table)


def trained(lr, **options):
    return fedda.train(fedda.make("fedavg", lr=lr), made(client=torch.arange(100) % 4), rounds=2, **options)


PYTHON = {
    "a label past the 64th sample": (lambda: made(y=changed(Y, 90, 7)), r"Target 7 is out of bounds; the model returns .*, and the targets are int64 \[4\] from 0 to 7"),
    "a label in the test set": (lambda: made(test=(X, changed(Y, 80, 5))), "Target 5 is out of bounds"),
    "a negative label": (lambda: made(y=changed(Y, 99, -1)), "Target -1 is out of bounds"),
    "ignore_index": (lambda: made(y=changed(Y, 70, -100)), "a sample with the target -100 is NaN, because the loss ignores this"),
    "texts": (lambda: made(y=np.array(["cat", "dog"] * 50)), "y must be numbers, got texts; number them"),
    "texts in the test set": (lambda: made(test=(X, ["a"] * 100)), "the y of test must be numbers, got texts"),
    "one array for each client": (lambda: made(x=[X[:60].tolist(), X[60:].tolist()]), "x must be one array with all samples"),
    "objects": (lambda: made(y=[None] * 100), "y must be one array with all samples"),
    "ragged clients": (lambda: made(client=[[0, 1], [2]]), "client must be 100 whole numbers or names, one per sample"),
    "two outputs": (lambda: made(Pair()), "the model returns a tuple, of which the loss must take its part"),
    "a sum": (lambda: made(loss=lambda o, y: F.cross_entropy(o, y, reduction="sum")), "this one is the sum"),
    "a sum of squares": (lambda: made(loss=nn.MSELoss(reduction="sum"), y=torch.randn(100, 3)), "this one is the sum"),
    "no reduction": (lambda: made(loss=nn.CrossEntropyLoss(reduction="none")), "a function to one number"),
    "an empty dict": (lambda: made(x={}), "x must be one array"),
    "nothing to train": (lambda: made(nn.Flatten()), "the model has no parameter to train"),
    "lr as text": (lambda: fedda.make("fedavg", lr="0.1"), r"lr must be > 0, got '0.1' \(a text, write the number"),
    "float targets by class": (lambda: fedda.partition([0.5, 1.5], "dirichlet", clients=2), "give their quantiles"),
    "a file that is not LEAF's": (lambda: fedda.load("none.json"), "there is no such file"),
    "a class for a model": (lambda: made(nn.Linear), r"model must be a torch.nn.Module, got the class Linear; make a module of it: Linear\(...\)"),
    "a function for a model": (lambda: made(torch.relu), "model must be a torch.nn.Module, got a builtin"),
    "a lazy layer": (lambda: made(nn.LazyLinear(3)), "'weight' has no shape yet: call the model once"),
    "two dtypes": (lambda: made(nn.Sequential(LINEAR, nn.Linear(3, 3).double())), "one dtype on one device, got torch.float32 on cpu, torch.float64 on cpu"),
    "a class for a loss": (lambda: made(loss=nn.CrossEntropyLoss), r"got the class CrossEntropyLoss; write CrossEntropyLoss\(\)"),
    "a name for a loss": (lambda: made(loss="mse"), "loss must be a function of outputs and targets, got 'mse'"),
    "other features": (lambda: made(nn.Linear(5, 3)), r"the model gets float32 \[64, 4\]"),
    "labels from 1": (lambda: made(y=Y + 1), r"Target 3 is out of bounds; the model returns float32 \[64, 3\], and the targets are int64 \[64\] from 1 to 3"),
    "unknown tokens": (lambda: made(nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 3)), x=changed(torch.zeros(100, 4).long(), 90, 9)), r"the model gets int64 \[\d+, 4\] from 0 to 9"),
    "images wanted": (lambda: made(augment="crop_flip"), r"crop: samples must be images \[channels, height, width\], got \[4\]"),
    "an augmentation that is not made": (lambda: made(augment=fedda.augment.crop_flip), r"crop_flip\(\) takes from 0 to 1 positional"),
    "metrics without names": (lambda: made(metrics=[F.mse_loss]), 'a function needs a name: metrics={"name": function}'),
    "a metric without a result": (lambda: made(metrics={"m": lambda o, y: None}), "must return one number, or a tensor of 64 numbers .* got None"),
    "a table for a name": (lambda: fedda.load({"a": 1}), "data must be a name or a path, got a dict; arrays are for fedda.problem"),
    "a column for its name": (lambda: fedda.load("a.csv", target=Y), "target must be the name of a column, got a Tensor"),
    "personal_lr": (lambda: made(personal="weight", personal_lr=-1.0), "personal_lr must be > 0, got -1.0"),
    "no loss": (lambda: made(loss=None), "loss must be a function of outputs and targets, got None"),
    "one output for classes": (lambda: made(nn.Linear(4, 1), y=torch.zeros(100, dtype=torch.long)), "does not depend on the model's single output"),
    "targets with one axis more": (lambda: made(SCALAR, F.mse_loss, y=X[:, :1]), r"compares every output with every target: give y\[:, 0\]"),
    "scale of another shape": (lambda: made(scale=(torch.zeros(5), torch.ones(5))), r"scale must fit a sample of shape \[4\], got \[5\]"),
    "images without channels": (lambda: made(nn.Sequential(nn.Flatten(), LINEAR), x=X.view(100, 2, 2), augment="crop_flip"), r"crop: samples must be images \[channels, height, width\], got \[2, 2\]"),
    "a table that is mirrored": (lambda: made(augment="flip"), r"flip: samples must be images .*, got \[4\]"),
    "a table with holes": (lambda: made(augment="cutout"), r"cutout: samples must be images .*, got \[4\]"),
    "an augmentation without numbers": (lambda: made(augment=lambda x: x), "the augmentation cannot take this data: .* takes 1 positional argument"),
    "f1 of numbers": (lambda: made(SCALAR, F.mse_loss, y=X[:, 0].abs(), metrics=["f1"]), "the metric 'f1' cannot take this data: it is for classes"),
    "auc of numbers": (lambda: made(SCALAR, F.mse_loss, y=X[:, 0].abs(), metrics=["auc"]), "the metric 'auc' cannot take this data: it is for classes"),
    "top5 of numbers": (lambda: made(SCALAR, F.mse_loss, y=X[:, 0].abs(), metrics=["top5_accuracy"]), "it is for classes, with a logit for each"),
    "mae of classes": (lambda: made(metrics=["mae"]), r"the metric 'mae' .* got outputs \[64, 3\], targets \[64\]"),
    "a rate below zero": (lambda: rate(kind="cosine", end=-1.0), "cosine: end must be >= 0, got -1.0"),
    "the end as text": (lambda: rate(kind="linear", end="0"), r"linear: end must be >= 0, got '0' \(a text"),
    "rounds for shares": (lambda: rate(kind="steps", at=[30, 60]), r"steps: at must be shares of the run, such as \[0.5, 0.75\], got \[30, 60\]"),
    "one share": (lambda: rate(kind="steps", at=0.5), "steps: at must be shares of the run"),
    "a factor of zero": (lambda: rate(kind="steps", by=0.0), "steps: by must be > 0"),
    "no horizon": (lambda: rate(kind="cosine", horizon=0), "cosine: horizon must be > 0, got 0"),
    "if in a rate": (lambda: trained(lambda t: 0.1 if t < 5 else 0.01, seed=[0, 1]), r"FedAvg: lr must be a function of tensors, .* torch.where\(t < 30"),
    "a rate that returns nothing": (lambda: trained(lambda t: None), "lr must be a function of the step to a number, got None"),
    "a report nowhere": (lambda: fedda.report({"a": trained(0.1)}, out="no/such/page.html"), "the folder no/such does not exist"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PYTHON)
def test_a_mistake_in_python_is_one_line(kind):
    ask, line = PYTHON[kind]
    with pytest.raises(ValueError, match=line) as raised:
        ask()
    assert "\n" not in str(raised.value)


@pytest.fixture
def fedda_inside(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(inside, capsys, monkeypatch)


def everything(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TINY = """
name = "tiny"
rounds = 1
{top}
[problem]
data = "mine.npz"
clients = 2
model = "logistic"
{problem}
[algorithms.fedavg]
lr = {lr}
"""
COMMANDS = {
    "trainable": ({"problem": 'trainable = "head.*"'}, ["trainable = 'head.*' fits no parameter; there are 1.weight"]),
    "trainable as number": ({"problem": "trainable = 3"}, ["problem.trainable"]),
    "personal": ({"problem": 'personal = "bn.*"'}, ["personal = 'bn.*' fits no parameter"]),
    "all personal": ({"problem": 'personal = "*"'}, ["all parameters are personal"]),
    "personal_lr": ({"problem": 'personal = "1.bias"\npersonal_lr = 0.0'}, ["personal_lr must be"]),
    "augment": ({"problem": 'augment = "flp"'}, ["unknown augmentation 'flp'; did you mean 'flip'?"]),
    "augment's option": ({"problem": 'augment = {kind = "crop", px = 2}'}, ["crop: no parameter 'px'"]),
    "augment without a kind": ({"problem": "augment = {pad = 2}"}, ["augment must be a name, a table"]),
    "lr as text": ({"lr": '"0.1"'}, ["lr must be > 0, got '0.1' (a text"]),
    "one class": ({"y": np.zeros(60, int)}, ["y must have two classes or more, all samples have 0"]),
    "one text": ({"y": np.array(["a"] * 60)}, ["y must have two classes or more, all samples have 'a'"]),
    "a negative label": ({"y": np.arange(60) % 3 - 1}, ["y must hold classes from 0", "got -1"]),
    "a label for the model": ({"y": np.arange(60) * 2000}, ["y must hold classes from 0 to 65535, got 118000"]),
    "NaN labels": ({"y": np.full(60, np.nan)}, ["y must be finite numbers, as the targets of a regression are"]),
    "f1 of a regression": ({"y": np.arange(60) / 7, "problem": 'metrics = ["f1"]'}, ["the metric 'f1' cannot take this data: it is for"]),
    "regression by class": ({"y": np.arange(60) / 7, "problem": 'partition = "dirichlet"'}, ["dirichlet divides by class", "quantiles"]),
    "augment a table": ({"problem": 'augment = "flip"'}, ["flip: samples must be images"]),
    "patience for nothing": ({"top": "patience = 3"}, ["patience needs validation samples"]),
    "patience on training": ({"top": 'patience = 1\nmetric = "train_loss"', "problem": "validation = 0.2"}, ["metric must be a validation metric, got 'train_loss'"]),
    "a schedule's shares": ({"lr": '{kind = "steps", start = 0.1, at = [30]}'}, ["at must be shares of the run"]),
    "too few labels": ({"y": np.arange(50) % 2}, ["y must be as long as its samples, 60, got 50"]),
    "NaN": ({"x": np.full((60, 3), np.nan)}, ["x must be finite numbers, sample 0 is not"]),
    "a client for nobody": ({"problem": 'partition = "by_client"'}, ["this data set names no clients"]),
    "validation of all": ({"problem": "validation = 1.0"}, ["validation must be"]),
    "target of no table": ({"problem": 'target = "price"'}, ["missing and task are for tables"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_mistake_on_the_command_line_leaves_nothing(tmp_path, fedda_inside, kind):
    change, fragments = COMMANDS[kind]
    np.savez(
        tmp_path / "mine.npz", x=change.get("x", np.random.default_rng(0).normal(size=(60, 3))),
        y=change.get("y", np.arange(60) % 3),
    )  # fmt: skip
    text = {"problem": "", "lr": 0.1, "top": ""} | {k: v for k, v in change.items() if isinstance(v, str)}
    (tmp_path / "tiny.toml").write_text(TINY.format(**text))
    before = everything(tmp_path)
    code, stdout, stderr = fedda_inside("run", "tiny.toml")
    assert (code, stdout) == (2, "")
    is_one_line(stderr, *fragments)
    assert everything(tmp_path) == before


def test_an_ignored_class_gives_no_nan():
    loss, client = nn.CrossEntropyLoss(ignore_index=2), torch.arange(100) % 2
    row = fedda.train(
        fedda.make("fedavg"), made(loss=loss, client=client, y=changed(Y, slice(40, None), 1)), 1
    ).history[0]
    y = changed(Y, slice(40, None), 1)
    means = [float(loss(LINEAR(X[client == k]), y[client == k])) for k in (0, 1)]
    assert row["train_loss"] == pytest.approx(sum(means) / 2, rel=1e-5)


def test_python_floats_are_not_rounded():
    assert float(fedda.Quadratic(A=[[0.1]], b=[[0.3]]).A) == 0.1


def test_an_algorithm_of_a_plugin_that_fails_is_listed(tmp_path, fedda_inside):
    code = "from fedda import registry\nfrom fedda.algorithms.fedavg import FedAvg\n"
    code += "@registry.algorithms.register('broken')\nclass Broken(FedAvg):\n    '''Fails.'''\n"
    code += "    def init(self, x, clients):\n        raise KeyError('no such\\nthing')\n"
    (tmp_path / "broken.py").write_text(code)
    try:
        status, stdout, _ = fedda_inside("list", "algorithms", "--plugin", "broken.py")
    finally:
        fedda.registry.algorithms.known.pop("broken", None)
    assert status == 0 and "cannot run: KeyError" in " ".join(stdout.split()) and "fedda-mvr" in stdout


# -- what looks right and is not ------------------------------------------------------------------------------------------
def tiny(model=None, **how):
    torch.manual_seed(0)
    x = torch.randn(80, 6)
    how = {"y": (x[:, 0] > 0).long(), "client": np.repeat(["w", "x", "y", "z"], 20)} | how
    loss = how.pop("loss", nn.functional.cross_entropy)
    return fedda.problem(model or nn.Linear(6, 2), loss, x=x, batch=5, **how)


def test_a_client_s_model_goes_by_the_name_that_the_rows_show(tmp_path):
    problem = tiny(personal="weight", client=np.repeat([1, 2, 3, 4], 20), validation=0.2)
    result = fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=4, patience=1)
    row = next(row for row in result.clients if row["client"] == 2)
    model = result.model(client=2)
    x, y = problem.everything(1)  # the second client
    assert float((model(x).argmax(1) == y).double().mean()) == row["train_accuracy"]
    file = fedda.export(result, tmp_path / "model.pt", client=2)
    assert torch.equal(torch.load(file)["state_dict"]["weight"], model.state_dict()["weight"])
    with pytest.warns(UserWarning, match="has the mean of the personal parameters"):
        fedda.export(result, tmp_path / "mean.pt")
    with pytest.raises(ValueError, match=r"model: there is no client 0; there are 1, 2, 3, 4"):
        result.model(client=0)


def test_a_trace_names_clients_as_the_data_does():
    rows = [("w", 0, 1), ("x", 0, 9), ("y", 0, 9), ("z", 1, 9)]
    run = fedda.Run(fedda.make("fedavg"), tiny(), availability=rows)
    assert run.simulation.participation.available(0).tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match=r"availability: row 1: there is no client '0'; known: w, x, y, z"):
        fedda.Run(fedda.make("fedavg"), tiny(), availability=[(0, 0, 1)])


def test_other_states_and_outputs_are_refused(tmp_path):
    problem = tiny()
    state, memory = (fedda.train(fedda.make(name), problem, rounds=1).state for name in ("fedavg", "scaffold"))
    for how, message in (
        (("scaffold", problem, state), r"the state has no 'server.c': it is not of a run of Scaffold"),
        (("fedavg", tiny(nn.Linear(6, 3)), state), r"the state is of another model or of other seeds: x is \[1, 14\]"),
        (
            ("fedavg", tiny(y=torch.zeros(80).long()), state),
            r"the state is of a run on other data; .* give x0=result.x",
        ),
        (("fedavg", problem, "x"), r"state must be result.state of an earlier call, got a str"),
        (("scaffold", tiny(client=None), memory), r"the state is of a run with 4 clients, the problem has 1"),
        (("fedavg", nn.Linear(6, 2), None), r"the problem must be one of fedda.problem or fedda.load, got a Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            fedda.train(fedda.make(how[0]), how[1], rounds=2, state=how[2])
    quadratic = [fedda.Quadratic(A=[[1.0]], b=[[b]]) for b in (1.0, 2.0)]
    state_of_other = fedda.train(fedda.make("fedavg"), quadratic[0], rounds=1).state
    with pytest.raises(ValueError, match="the state is of a run on other data"):
        fedda.rounds(fedda.make("fedavg"), quadratic[1], 2, state=state_of_other)
    for options, message in (
        ({"rounds": 1, "state": state}, "the state is after round 1, .*: give more than 1, got 1"),
        ({"rounds": 2, "state": state, "x0": torch.zeros(14)}, "give x0 or state, not both"),
        ({"rounds": 2, "x0": "model.pt"}, "x0 must be a flat vector or a state_dict, got a str"),
        ({"rounds": 2, "patince": 3}, "no argument 'patince'; did you mean 'patience'?"),
    ):
        with pytest.raises(ValueError, match=message):
            fedda.train(fedda.make("fedavg"), problem, **options)
    result = fedda.train(fedda.make("fedavg"), problem, rounds=1)
    with pytest.raises(ValueError, match=r"report: .*none/page.html: the folder .*none does not exist"):
        fedda.report({"FedAvg": result}, out=tmp_path / "none" / "page.html")
    y = torch.randn(80)
    with pytest.raises(ValueError, match=r"the model gives \[64, 1\] and the targets are \[64\], so the loss compares"):
        tiny(nn.Linear(6, 1), loss=nn.functional.mse_loss, y=y)
    tiny(nn.Linear(6, 1), loss=lambda output, y: nn.functional.mse_loss(output[:, 0], y), y=y)
    with pytest.raises(ValueError, match=r"FedAvg: give epochs or steps='proportional', not both"):
        fedda.make("fedavg", epochs=1, steps="proportional")
    with pytest.raises(ValueError, match=r"personalise: the problem has personal parameters already"):
        fedda.train(fedda.make("fedavg"), tiny(personal="bias"), rounds=1, personalise="fine-tune 2")
    with pytest.raises(ValueError, match=r"export: give the result of fedda.train, or its best, got a Linear"):
        fedda.export(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.warns(
        UserWarning, match=r"patience = 5 has no effect: the run of 4 rounds is evaluated every 1 rounds"
    ):
        fedda.train(fedda.make("fedavg"), tiny(validation=0.2), rounds=4, patience=5)
    table = tmp_path / "table.csv"
    table.write_text("a,y\n" + "".join(f"{i % 7},{50 + 100 * (i % 4)}\n" for i in range(60)))
    with pytest.warns(UserWarning, match=r"y has the whole numbers 50 to 350, which become the classes 0 to 3"):
        fedda.load(str(table), target="y", clients=2)


def test_several_seeds_are_printed_as_means():
    result = fedda.train(fedda.make("fedavg", lr=0.1), tiny(), rounds=2, seed=[0, 1, 2])
    mean = sum(row["train_loss"] for row in result.history[-3:]) / 3
    assert f"means of 3 seeds, train_loss={mean:.4g}" in repr(result)


class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 2)

    def forward(self, x):
        return self.out(x.float().flatten(1) / 255)


def test_images_of_bytes_stay_bytes(tmp_path):
    x = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8)
    how = {"x": x, "y": torch.arange(40) % 2, "client": torch.arange(40) % 4, "batch": 5}
    problem = fedda.problem(Bytes(), F.cross_entropy, **how)
    assert problem.data.x.dtype == torch.uint8
    result = fedda.train(fedda.make("fedavg"), problem, rounds=1)
    file = fedda.export(result, tmp_path / "model.pt")
    program = torch.export.load(io.BytesIO(torch.load(file)["program"])).module()
    assert torch.equal(program(x), result.model()(x))
    with pytest.raises(
        ValueError, match=r"images of bytes need scale=\(mean, std\), or a model that begins with x.float"
    ):
        fedda.problem(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), F.cross_entropy, **how)


def test_more_mistakes_and_a_short_text():
    problem = tiny()
    assert repr(problem) == "Linear problem: clients=4, samples=80, parameters=14"
    with pytest.raises(ValueError, match=r"got a Linear; give its state_dict\(\)"):
        fedda.train(fedda.make("fedavg"), problem, rounds=1, x0=nn.Linear(6, 2))
    with pytest.raises(ValueError, match=r"cannot take this data: .* \(the test samples\)"):
        tiny(test=(torch.randn(5, 7), torch.zeros(5, dtype=torch.long)))
    assert tiny(client=np.repeat(["a", "b"], 40).astype(object)).client_names == ["a", "b"]


def test_a_warning_points_to_the_line_of_the_user(tmp_path):
    owner = torch.tensor([0] * 50 + [1] * 2)
    x = torch.randn(52, 3)
    problem = fedda.problem(torch.nn.Linear(3, 2), F.cross_entropy, x=x, y=owner, client=owner)
    with pytest.warns(UserWarning, match="clients have 2 to 50 samples and the same weight") as caught:
        fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=1)
    (tmp_path / "a.csv").write_text("a,b\n" + "1,2.5\n3,4.5\n" * 10 + "5,\n")
    with pytest.warns(UserWarning, match="1 of 21 rows have a gap") as other:
        fedda.load(str(tmp_path / "a.csv"), target="b", missing="drop", clients=2)
    assert {warning.filename for warning in (*caught, *other)} == {__file__}
