"""Mistakes with models, data and options of one's own: each is one line; on the command line, exit 2 and nothing left."""

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


PYTHON = {
    "a label past the 64th sample": (lambda: made(y=changed(Y, 90, 7)), r"Target 7 is out of bounds. \(the targets are from 0 to 7\)"),
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
    "nothing to train": (lambda: made(nn.Flatten()), "must have parameters to train"),
    "lr as text": (lambda: fedda.make("fedavg", lr="0.1"), r"lr must be > 0, got '0.1' \(a text, write the number"),
    "float targets by class": (lambda: fedda.partition([0.5, 1.5], "dirichlet", clients=2), "give their quantiles"),
    "a file that is not LEAF's": (lambda: fedda.load("none.json"), "there is no such file"),
    "personal_lr": (lambda: made(personal="weight", personal_lr=-1.0), "personal_lr must be > 0, got -1.0"),
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
    "float labels": ({"y": np.arange(60) / 7}, ["y must be whole numbers from 0 or texts, got float64"]),
    "too few labels": ({"y": np.arange(50) % 2}, ["y must be as long as its samples, 60, got 50"]),
    "NaN": ({"x": np.full((60, 3), np.nan)}, ["x must be finite numbers, sample 0 is not"]),
    "a client for nobody": ({"problem": 'partition = "by_client"'}, ["this data set names no clients"]),
    "validation of all": ({"problem": "validation = 1.0"}, ["validation must be"]),
    "target of no table": ({"problem": 'target = "price"'}, ["target and client name columns of a table"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_mistake_on_the_command_line_leaves_nothing(tmp_path, fedda_inside, kind):
    change, fragments = COMMANDS[kind]
    np.savez(
        tmp_path / "mine.npz", x=change.get("x", np.random.default_rng(0).normal(size=(60, 3))),
        y=change.get("y", np.arange(60) % 3),
    )  # fmt: skip
    (tmp_path / "tiny.toml").write_text(TINY.format(problem=change.get("problem", ""), lr=change.get("lr", 0.1)))
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
