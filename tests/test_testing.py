"""The checks that users run on their own work: what is right passes, and each mistake is named in one line."""

from dataclasses import dataclass
from typing import Any

import pytest

import fedda
from fedda.algorithms.fedavg import FedAvg
from fedda.core import on_client
from fedda.rules.prox import L1, Prox
from fedda.rules.schedules import schedule
from fedda.testing import check_algorithm, check_prox


def variant(step, mark=(0,), **more):
    """FedAvg with another local step: step(self, client, x, t, i, lr, g)."""

    @on_client(model_replies=mark)
    def local(self, client, x, t):
        lr = schedule(self.lr)
        for i in range(self.steps):
            (g,) = client.gradients(x)
            x = step(self, client, x, t, i, lr, g)
        return (x,)

    return type("Mine", (FedAvg,), {"local": local, **more})


def stale(self, server, cohort):
    """Keeps the last model on self, where no checkpoint sees it."""
    old = getattr(self, "old", server.x)
    (mean,) = cohort.average(self.local, server.x, server.t)
    object.__setattr__(self, "old", mean)
    return self.Server(0.5 * (mean + old), server.t + self.steps)


def still(self, server, cohort):
    return self.Server(cohort.average(self.local, server.x, server.t)[0], server.t)


def peek(self, server, cohort):
    """The plain mean of the replies, with no look at the weights."""
    (X,), _ = cohort.replies(self.local, server.x, server.t)
    return self.Server(X.mean(dim=-2, keepdim=True), server.t + self.steps)


def sgd(self, client, x, t, i, lr, g):
    return x - lr(t + i) * g


MISTAKES = {
    "norm of all clients": (variant(lambda s, c, x, t, i, lr, g: x - lr(t + i) * g / g.norm()), "the engines differ"),
    "mean over clients": (variant(lambda s, c, x, t, i, lr, g: x - lr(t + i) * g.mean(dim=-2, keepdim=True)), "the engines differ"),
    "one rate for all steps": (variant(lambda s, c, x, t, i, lr, g: x - lr(t) * g), "the rate of step 1 of 5 in a round is not used"),
    "time stands still": (variant(sgd, round=still), "the rate of step 0 of 5 in a round is not used"),
    "a product with a mask": (variant(lambda s, c, x, t, i, lr, g: x - (c.samples > i) * 0.1 * lr(t + i) * g), "a float64 run is rounded to float32"),
    "a dtype by name": (variant(lambda s, c, x, t, i, lr, g: (x - lr(t + i) * g).double()), "in a torch.float32 run"),
    "state on self": (variant(sgd, round=stale), "a resumed run differs"),
    "weights ignored": (variant(sgd, round=peek), "a failed client"),
    "no mark": (variant(sgd, mark=()), r"local replies an updated model at \(0,\), but marks \(\)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_each_mistake_is_named_in_one_line(kind):
    algorithm, line = MISTAKES[kind]
    with pytest.raises(AssertionError, match=rf"^Mine: .*({line})") as why:
        check_algorithm(algorithm, lr=0.1)
    assert "\n" not in str(why.value)


def test_what_is_right_passes():
    check_algorithm(variant(sgd), lr=0.1)
    check_algorithm(variant(sgd)(lr=0.1, steps=1))
    with pytest.raises(ValueError, match="check_algorithm: give an algorithm"):
        check_algorithm("fedavg")


@dataclass(frozen=True)
class Soft(Prox):
    """L1 with room for a mistake."""

    kind: str = ""
    gamma: Any = 0.3

    def __call__(self, u, q, s):
        threshold = self.gamma * s / (1.0 if self.kind == "no metric" else q)
        threshold = self.gamma if self.kind == "no s" else threshold
        x = u.sign() * (u.abs() - threshold).clamp(min=0)
        if self.kind == "mixes rows":
            x = x * (u.norm() > 0.5)
        return x.double() if self.kind == "float64" else x

    def value(self, x):
        total = self.gamma * x.abs().sum(dim=-1)
        return total.sum() if self.kind == "one value" else total


@pytest.mark.parametrize(
    "kind,line",
    [
        ("no metric", "another point is better than the result"),
        ("no s", "another point is better|is moved"),
        ("float64", "float32 becomes another dtype"),
        ("one value", "value or feasible has another shape"),
    ],
)
def test_mistakes_of_a_map_are_named_in_one_line(kind, line):
    with pytest.raises(AssertionError, match=rf"^Soft: .*({line})") as why:
        check_prox(Soft, kind=kind)
    assert "\n" not in str(why.value)


def test_maps_that_are_right_pass():
    check_prox(Soft)
    check_prox(L1(0.3))
    for p in (fedda.prox.L1Ball(0.8), fedda.prox.L2Ball(0.9), fedda.prox.Simplex(), fedda.prox.Box(-0.5, 0.8)):
        check_prox(p)
    with pytest.raises(ValueError, match=r"check_prox: give a fedda\.prox map"):
        check_prox(3)
