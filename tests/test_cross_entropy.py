"""The cross-entropy of stacks of models against autograd in float64: on a GPU where there is one, else in Triton's
interpreter."""

import os

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: before they are imported
pytest.importorskip("triton", reason="needs Triton")

from fedda.problems import models  # noqa: E402
from fedda.problems.gradients import cross_entropy  # noqa: E402
from fedda.problems.gradients.stackable import stackable  # noqa: E402
from fedda.problems.gradients.vmap import StackedGradient  # noqa: E402
from test_layers import error, operators, stack_of  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


def both(loss, shape, classes, n=2, ignored=(), dtype=torch.float32):
    """Losses and gradients by our kernel for a stack, and by PyTorch in float64 for one model after the other."""
    torch.manual_seed(0)
    x = (3 * torch.randn(n, *shape)).to(dtype)
    axis = -1 if loss is models.cross_entropy or len(shape) == 1 else 2
    targets = torch.randint(0, classes, x.select(axis, 0).shape)
    for place in ignored:
        targets.view(n, -1)[:, place] = -100

    def results(function, x):
        x = x.detach().requires_grad_()
        out = function(x)
        return out, torch.autograd.grad((out * torch.arange(1.0, n + 1).to(out)).sum(), x)[0]

    expected = results(lambda x: torch.stack([loss(v, t) for v, t in zip(x, targets, strict=True)]), x.double())
    stacked = vmap(stackable(loss, "float32"))
    return results(lambda x: stacked(x, targets.to(DEVICE)), x.to(DEVICE)), expected


def smoothed(x, t):
    return F.cross_entropy(x, t, label_smoothing=0.1)


CASES = {
    "images": (F.cross_entropy, (16, 10), 10),
    "a module": (nn.CrossEntropyLoss(), (5, 3), 3),
    "ours": (models.cross_entropy, (7, 62), 62),
    "one class": (F.cross_entropy, (4, 1), 1),
    "one sample": (F.cross_entropy, (6,), 6),
    "pixels": (F.cross_entropy, (2, 5, 3, 4), 5),
    "tokens": (models.cross_entropy, (3, 17, 80), 80),
    "many rows": (F.cross_entropy, (1030, 3), 3),
    "many classes": (F.cross_entropy, (2, 5000), 5000),
    "smoothed": (smoothed, (9, 4), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_autograd_in_float64(case):
    got, expected = both(*CASES[case])
    assert all(a.shape == b.shape and error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["images", "smoothed", "pixels"])
def test_ignored_targets(case):
    got, expected = both(*CASES[case], ignored=(0, 3))
    assert all(error(a, b) < 1e-6 for a, b in zip(got, expected, strict=True))
    nothing = range(9)
    got, _ = both(F.cross_entropy, (9, 4), 4, ignored=nothing)
    assert got[0].isnan().all() and not got[1].any()  # as in PyTorch


def test_logits_in_bfloat16():
    got, expected = both(*CASES["images"], dtype=torch.bfloat16)
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16
    assert all(error(a, b) < 1e-2 for a, b in zip(got, expected, strict=True))


def test_classes_that_are_impossible():
    """Their logits are minus infinity."""
    x, targets = torch.randn(1, 4, 3), torch.tensor([[0, 1, 1, 0]])
    x[..., 2] = -torch.inf
    got = vmap(stackable(F.cross_entropy, "float32"))(x.to(DEVICE), targets.to(DEVICE))
    assert error(got, F.cross_entropy(x[0].double(), targets[0])[None]) < 1e-6


def test_a_target_that_is_no_class_is_seen():
    x, targets = torch.randn(1, 4, 3, device=DEVICE), torch.tensor([[0, 3, -1, 2]], device=DEVICE)
    gradient = torch.ops.fedda.class_gradient(torch.ones(1, device=DEVICE), x, targets, -100, 0.0)
    assert gradient.isnan().all(-1).tolist() == [[False, True, True, False]]


def test_losses_that_do_not_fit_stay_pytorch_s():
    x, targets = torch.randn(1, 4, 3), torch.tensor([[0, 1, 2, 2]])
    losses = {
        "sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
        "weights": lambda x, t: F.cross_entropy(x, t, torch.tensor([1.0, 2.0, 3.0])),
        "shares": lambda x, t: F.cross_entropy(x, F.one_hot(t, 3).float()),
        "double": lambda x, t: F.cross_entropy(x.double(), t),
        "no stack": lambda x, t: F.cross_entropy(torch.ones(4, 3), t),
    }
    for name, loss in losses.items():
        assert torch.equal(vmap(stackable(loss, "float32"))(x, targets), vmap(loss)(x, targets)), name
    assert cross_entropy.cross_entropy(x[0], targets[0]) is None


@pytest.mark.parametrize("loss", [F.cross_entropy, models.cross_entropy])
def test_one_operation_is_left_in_a_recording(loss):
    """The value of the loss is not needed, and the gradient is the kernel's."""
    objective, x, inputs, targets = stack_of(lambda: nn.Linear(5, 3), (5,))

    def of(x, inputs, targets):
        w, b = x.split([15, 3])
        return loss(inputs @ w.view(3, 5).T + b, targets)

    stacked = StackedGradient(of, kernels="float32")
    graph = stacked.record(x, inputs, targets)
    assert error(graph(x, inputs, targets), stacked.loop(x.double(), inputs.double(), targets).cpu()) < 1e-5
    assert operators(graph) == ["class_gradient", "join"]
    assert not any("softmax" in str(node.target) or "gather" in str(node.target) for node in graph.graph.nodes)
    assert (
        error(graph(x, inputs, targets), StackedGradient(objective).loop(x.double(), inputs.double(), targets).cpu())
        < 1e-5
    )
