"""Validation samples: a share of each client's, in proportion to its classes, that no run trains on."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fedda
from commands import tiny
from conftest import stable
from fedda.data import open_dataset
from fedda.data.datasets import moments
from fedda.data.holdout import validation_mask
from fedda.experiments import Experiment, config, run
from fedda.experiments.overrides import override
from fedda.experiments.sweep import Sweep, search
from fedda.progress import Silence

X = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
OWNER = torch.tensor([7] * 50 + [3] * 30 + [11] * 19 + [5])


def make(**more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
    return fedda.problem(model, F.cross_entropy, **({"x": X, "y": Y, "client": OWNER, "batch": 4} | more))


@given(
    st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 3)), min_size=1, max_size=80),
    st.floats(0.01, 0.99),
)
def test_each_client_gives_its_share_in_proportion_to_its_classes(samples, share):
    owner, y = (np.array(column) for column in zip(*samples, strict=True))
    held = validation_mask(owner, y, share)
    assert np.array_equal(held, validation_mask(owner, y, share))
    assert not held[owner < 0].any()
    for client in np.unique(owner[owner >= 0]):
        own = owner == client
        given = held[own].sum()
        assert given == min(np.floor(share * own.sum() + 1e-9), own.sum() - 1)
        for label in np.unique(y[own]):
            part = own & (y == label)
            assert abs(held[part].sum() - part.sum() * given / own.sum()) < 1


def test_which_of_a_class_are_held_out_is_random():
    held = validation_mask(np.zeros(4000, int), np.arange(4000) % 2, 0.25)
    assert abs(np.flatnonzero(held).mean() - 2000) < 100  # neither the first nor the last ones
    gaps = np.diff(np.flatnonzero(held))
    assert len(np.unique(gaps)) > 8  # nor every fourth


def test_numbers_to_predict_are_no_classes():
    assert validation_mask(np.zeros(20, int), np.linspace(0, 1, 20), 0.25).sum() == 5
    assert validation_mask(np.zeros(20, int), np.zeros((20, 3), int), 0.25).sum() == 5


def test_held_out_samples_are_not_trained_on_and_are_evaluated():
    problem = make(validation=0.2, test=(X[:7], Y[:7]))
    assert problem.sizes.tolist() == [24, 1, 40, 16] and len(problem.validation.y) == 10 + 6 + 3
    train, held = ({tuple(row.tolist()) for row in part.x} for part in (problem.data, problem.validation))
    assert not train & held and train | held == {tuple(row.tolist()) for row in X}
    result = fedda.train(stable("fedavg"), problem, rounds=2)
    row = result.history[-1]
    output = F.linear(problem.validation.x, result.x[:15].view(3, 5), result.x[15:])
    assert row["validation_loss"] == pytest.approx(float(F.cross_entropy(output, problem.validation.y)), rel=1e-6)
    hits = float((output.argmax(1) == problem.validation.y).double().mean())
    assert row["validation_accuracy"] == pytest.approx(hits)
    keys = [k for k in row if k.startswith(("train_", "validation_", "test_"))]
    assert keys == [f"{part}_{what}" for part in ("train", "validation", "test") for what in ("loss", "accuracy")]


def test_it_is_the_same_for_every_run():
    one, other = make(validation=0.2), make(validation=0.2)
    assert torch.equal(one.validation.x, other.validation.x) and torch.equal(one.data.x, other.data.x)
    by_name = make(validation=0.2, client=np.array(["b", "a", "c", "d"])[np.unique(OWNER, return_inverse=True)[1]])
    assert len(by_name.validation.y) == 19


def test_training_without_is_as_it_was():
    plain, none = make(), make(validation=None)
    assert torch.equal(plain.data.x, none.data.x) and plain.validation is None
    assert "validation_loss" not in fedda.train(stable("fedavg"), plain, rounds=1).history[-1]


def test_a_pair_of_one_s_own():
    problem = make(validation=(X[:9], Y[:9]))
    assert len(problem.data.y) == 100 and len(problem.validation.y) == 9
    moved = problem.to(dtype=torch.float64)
    assert moved.validation.x.dtype == torch.float64
    row = moved.evaluate(moved.point(), torch.ones(4, dtype=torch.float64))
    assert set(row) == {f"{part}_{what}" for part in ("train", "validation") for what in ("loss", "accuracy")}


@pytest.mark.parametrize("bad,line", [
    (0, r"validation must be in \(0, 1\), got 0"), (1.0, r"validation must be in \(0, 1\)"), (-0.1, "validation"),
    (True, "validation must be"), ("a", "validation must be"), (0.01, "holds out no sample"),
    ((X[:3],), "validation must be a pair"), ((X[:3, :2], Y[:3]), "cannot take this data"),
])  # fmt: skip
def test_mistakes_are_said_in_one_line(bad, line):
    with pytest.raises(ValueError, match=f"problem: .*{line}") as why:
        make(validation=bad)
    assert "\n" not in str(why.value)


def test_several_processes_share_it_out():
    problem = make(validation=0.2, test=(X[:8], Y[:8]))
    x, weights = problem.point() + 0.1, torch.ones(4, dtype=torch.float64)
    cut = {4: 2, 8: 3, 19: 12}
    found = [
        problem.only([slice(0, 2), slice(2, 4)][i]).totals(x, weights, lambda n, i=i: [slice(0, cut[n]), slice(cut[n], n)][i])
        for i in range(2)
    ]  # fmt: skip
    for name, value in problem.evaluate(x, weights).items():
        total, weight = (sum(f[name][i] for f in found) for i in range(2))
        assert float(total / weight) == pytest.approx(float(value), rel=1e-6)


def test_a_mapped_file_gives_the_same_parts(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    problems = [
        make(validation=0.2, x=x) for x in (X, np.load(tmp_path / "x.npy", mmap_mode="r"))
    ]  # fmt: skip
    assert problems[1].rows is not None
    assert torch.equal(problems[0].validation.x, problems[1].validation.x)
    ends = [fedda.train(stable("fedavg"), p, rounds=2, cohort=2) for p in problems]
    assert (
        torch.equal(ends[0].x, ends[1].x)
        and ends[0].history[-1]["validation_loss"] == ends[1].history[-1]["validation_loss"]
    )


def test_a_loaded_data_set():
    how = {"clients": 10, "partition": "dominant_class", "model": "logistic"}
    whole, part = fedda.load("digits", **how), fedda.load("digits", validation=0.1, **how)
    assert len(part.validation.y) == sum(int(n * 0.1) for n in whole.sizes.tolist())
    assert torch.equal(part.sizes, whole.sizes - (whole.sizes * 0.1).floor().long())
    assert torch.equal(part.test.x, whole.test.x)
    both = torch.cat([part.data.x, part.validation.x]).flatten(1)
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, whole.data.x.flatten(1).tolist()))
    row = fedda.train(stable("fedavg"), part, rounds=3).history[-1]
    assert 0 < row["validation_accuracy"] <= 1
    for bad in (0.0, 1, "a"):
        with pytest.raises(ValueError, match="load: validation must be"):
            fedda.load("digits", validation=bad, **how)


def test_what_is_held_out_does_not_set_the_scale(tmp_path):
    random = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", x=random.integers(0, 255, (60, 4, 4), dtype=np.uint8), y=np.arange(60) % 2)
    name = str(tmp_path / "images.npz")
    problem, data = fedda.load(name, clients=4, validation=0.25), open_dataset(name)
    held = {v.tobytes() for v in problem.validation.x.numpy()}
    kept = np.array([v.tobytes() not in held for v in data.x])
    mean, std = moments(data.x[kept])
    assert (
        problem.scale.mean.flatten().tolist() == mean.tolist() and problem.scale.std.flatten().tolist() == std.tolist()
    )
    assert mean.tolist() != data.mean.tolist()


def test_it_is_a_word_of_the_file(tmp_path):
    table = tiny()
    table["problem"] |= {"validation": 0.2}
    experiment = Experiment.model_validate(table)
    full = experiment.completed()
    assert "validation = 0.2" in full.toml() and config.parse(full.toml(), "x") == full == full.completed()
    assert override(Experiment.model_validate(tiny()), settings=["problem.validation=0.2"]).problem.validation == 0.2
    assert "validation" not in Experiment.model_validate(tiny()).completed().problem.model_dump()
    folder = run(experiment, tmp_path / "run", Silence())
    rows = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert all('"validation_loss"' in row and '"test_loss"' in row for row in rows)
    for bad in (0, 1.0, "a", True):
        with pytest.raises(ValueError, match=r"problem\.validation must be"):
            config.checked(table | {"problem": table["problem"] | {"validation": bad}}, "x")


def test_a_sweep_looks_at_it_and_not_at_the_test_set(tmp_path):
    table = tiny(rounds=2, seeds=[0], algorithms={"fedavg": {"lr": 0.1}})
    table["problem"] |= {"validation": 0.2}
    experiment = Experiment.model_validate(table)
    assert experiment.problem.build(tuning=True).test is None and experiment.problem.build().test is not None
    found = search(Sweep(experiment, ["fedavg.lr=0.01,0.1"]), tmp_path / "sweep", Silence())
    assert all(point["value"] is not None for point in found["algorithms"]["fedavg"]["points"])
    row = (tmp_path / "sweep" / "metrics.jsonl").read_text().splitlines()[0]
    assert '"validation_accuracy"' in row and "test_" not in row
