"""Small forms of figures: their curves agree with the kept ones, and a changed rule is detected."""

import math
import shutil

import numpy as np
import pytest
import torch

import realdata
from commands import inside, is_one_line
from fedda.algorithms.fedda import FedDA
from fedda.algorithms.fedopt import FedAdam
from fedda.data import open_dataset
from fedda.progress import Silence
from fedda.rules.estimators import Mvr
from fedda.rules.preconditioners import Diagonal
from fedda_paper import smoke
from fedda_paper.parts import read_plan

KEPT = smoke.resources.files("fedda_paper") / "smoke_curves"


def test_every_figure_has_kept_curves_of_a_tenth_of_its_length_or_less():
    assert {p.name.removesuffix(".json.gz") for p in KEPT.iterdir()} == set(smoke.names())
    for name in smoke.names():
        kept = smoke.kept_curves(name)
        (part, *_) = (part for part, figure in read_plan().figures() if figure == name)
        full = read_plan().figure(part, name)
        assert list(kept["curves"]) == list(full.algorithms) and 10 * kept["rounds"] <= full.rounds
        assert kept["seeds"] == [0, 1, 2] and kept["rounds"] >= 100
        trained = [own["train_loss"] for own in kept["curves"].values()]
        assert all(len(curve) == smoke.POINTS + 1 for curve in trained)
        assert sum(curve[-1][0] < curve[0][0] for curve in trained) >= len(trained) / 2  # they learn something


@pytest.fixture
def digits(monkeypatch):
    """Figures on digits, where the real data may not be there, and shorter still."""
    monkeypatch.setattr(smoke, "open_dataset", lambda name: open_dataset("digits"))
    monkeypatch.setattr(smoke, "ROUNDS", 24)


def small(name):
    return smoke.run_small(name, Silence())


def far(before, after):
    return {d.label: d.times for d in smoke.deviations(before, after)}


def test_the_same_seed_gives_the_same_curve_twice(digits):
    assert small("cifar10-variants") == small("cifar10-variants")


def minus_z(self, z, x0, H, total):
    return self.prox(x0 - self.scale * z / H, H / self.scale, total)


def no_eps(self, mu, n):
    return self.root(mu).clamp(min=1e-12)


def no_correction(self, nu, x, x_prev, eta, client):
    g, g_prev = client.gradients(x, x_prev)
    return g + (1 - self.weight(eta)) * (nu + g_prev)


BROKEN = [
    (FedDA, "primal", minus_z, {"fedda-1-1", "fedda-1-2", "fedda-2-1", "fedda-2-2"}),
    (Diagonal, "diagonal", no_eps, {"fedda-1-1", "fedda-2-1"}),
    (Mvr, "__call__", no_correction, {"fedda-1-1", "fedda-1-2"}),
]


@pytest.mark.parametrize(("owner", "name", "rule", "labels"), BROKEN, ids=["sign of z", "no eps", "sign of a gradient"])
def test_a_broken_rule_is_outside_the_tolerance(owner, name, rule, labels, digits, monkeypatch):
    sound = small("cifar10-variants")
    monkeypatch.setattr(owner, name, rule)
    found = far(sound, small("cifar10-variants"))
    assert all(found[label] > 1 for label in labels), found
    if owner is Mvr:
        assert all(found[label] == 0 for label in set(found) - labels)


def test_a_changed_baseline_is_seen_and_the_others_are_not_blamed(digits, monkeypatch):
    monkeypatch.setattr(smoke, "ROUNDS", 8)
    sound = small("cifar10-heterogeneous")
    before = FedAdam.round

    def forgetful(self, server, cohort):
        return before(self, server._replace(m=torch.zeros_like(server.m)), cohort)

    monkeypatch.setattr(FedAdam, "round", forgetful)
    found = far(sound, small("cifar10-heterogeneous"))
    assert found.pop("fedadam") > 1 and set(found.values()) == {0.0}


def test_rounding_is_far_inside_the_tolerance(digits, monkeypatch):
    """The same draws in another order of sums: one client after the other, by autograd."""
    monkeypatch.setattr(smoke, "ROUNDS", 8)
    vectorised, run = small("cifar10-variants"), smoke.run
    monkeypatch.setattr(smoke, "run", lambda *given, **how: run(*given, **how | {"engine": "sequential"}))
    found = far(vectorised, small("cifar10-variants"))
    assert max(found.values()) < 0.2, found


def test_the_tolerance_is_the_standard_error_or_a_share_of_the_value():
    values = [0.4, 0.5, 0.63], [0.7, 0.71, 0.75]
    curve = [[0.1, 9.0], *(smoke.mean_and_std(v) for v in values)]
    pooled = np.sqrt(np.mean([np.var(v, ddof=1) for v in values]))
    assert smoke.tolerance(curve, 0.5) == pytest.approx(2 * math.sqrt(2 / 3) * pooled, rel=1e-6)
    assert (
        smoke.tolerance([[2.3, 0.0]] * 3, 2.3) == pytest.approx(0.0046) and smoke.tolerance([[0, 0.0]] * 3, 0) == 1e-3
    )
    about = {"figure": "f", "data": 1, "rounds": 2, "every": 1, "seeds": [0, 1, 2]}

    def with_curve(*points):
        return about | {"curves": {"a": {"train_loss": [list(p) for p in points]}}}

    kept = with_curve((2.0, 0.0), (1.0, 0.3), (None, None))
    (same,) = smoke.deviations(kept, with_curve((2.0, 0.1), (1.1, 0.2)))  # it ended before the last point, as it should
    assert same.agrees and same.times == pytest.approx(0.1 / 0.3 / (2 * math.sqrt(2 / 3))) and same.round == 1
    (lives,) = smoke.deviations(kept, with_curve((2.0, 0.0), (1.0, 0.3), (0.9, 0.1)))
    assert not lives.agrees and lives.times == math.inf
    with pytest.raises(ValueError, match="another copy"):
        smoke.deviations(kept, kept | {"data": 2})
    with pytest.raises(ValueError, match="write its curves with --keep"):
        smoke.deviations(kept, kept | {"rounds": 4})


def test_images_are_averaged_over_squares():
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 27, 27), dtype=np.uint8)
    got = smoke.average_squares(x)
    assert got.shape == (2, 3, 9, 9) and got.dtype == np.uint8
    assert got[1, 2, 4, 5] == round(float(x[1, 2, 12:15, 15:18].mean()))


def test_the_command_meets_the_kept_curves_again(capsys, monkeypatch):
    monkeypatch.setenv("FEDDA_DATA", str(realdata.folder("cifar10")))
    code, out, err = inside(capsys, monkeypatch, "reproduce", "cifar10-variants", "--smoke")
    assert code == 0, out + err
    assert out.count("yes") == 4 and "two standard errors of a difference" in out


def test_the_command_fails_where_curves_differ_and_says_how_to_get_data(capsys, monkeypatch, tmp_path, digits):
    monkeypatch.setattr(smoke, "kept_curves", lambda name: kept)
    kept = small("cifar10-variants")
    for own in kept["curves"]["fedda-2-1"].values():
        own[-1][0] = 0.0
    code, out, _ = inside(capsys, monkeypatch, "reproduce", "cifar10-variants", "--smoke")
    assert code == 1 and out.count("NO") == 1
    code, out, _ = inside(capsys, monkeypatch, "reproduce", "cifar10-variants", "--smoke", "--keep", tmp_path / "k")
    assert code == 0 and (tmp_path / "k" / "cifar10-variants.json.gz").exists()
    shutil.rmtree(tmp_path / "k")
    monkeypatch.setattr(smoke, "open_dataset", open_dataset)
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path))
    code, _, err = inside(capsys, monkeypatch, "reproduce", "cifar10", "--smoke")
    assert code == 2
    is_one_line(err, "fedda data fetch cifar10")
