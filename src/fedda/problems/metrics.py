"""Metrics besides the loss: functions of outputs and targets. `fedda.problem(metrics=...)` takes a user's own."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..checks import one_line
from ..registry import metrics as registered
from .trees import at, first_tensor

Function = Callable[[Tensor, Tensor], Any]
ANY, SHARE, POSITIVE = (-math.inf, math.inf), (0.0, 1.0), (0.0, math.inf)  # bounds of metrics


class Metric:
    """A metric of your own.

    Args:
        function: f(output, target) to one number for a whole set of samples, or to a tensor with a number for each
            sample, which is averaged as the loss is.
        higher_is_better: whether a larger value is better, for `best`, sweeps and reports.
        of_mean: applied to the mean over samples, such as torch.sqrt.
        bounds: the smallest and the largest number that the function can give; the server of a federation rejects other
            values of a site.

    >>> import fedda
    >>> mae = fedda.Metric(lambda output, target: (output - target).abs(), higher_is_better=False)
    >>> mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor([0., 2.])
    """

    def __init__(
        self, function: Function, higher_is_better: bool = True, of_mean: Callable[[Tensor], Tensor] | None = None,
        bounds: tuple[float, float] = ANY,
    ):  # fmt: skip
        if not callable(function):
            raise ValueError(f"Metric: it must be a function of outputs and targets, got {function!r}")
        try:
            low, high = map(float, bounds)
        except (TypeError, ValueError):
            low = high = math.nan
        if not low < high:
            raise ValueError(f"Metric: bounds must be two numbers, the smaller one first, got {bounds!r}")
        self.function, self.higher_is_better, self.of_mean = function, higher_is_better, of_mean
        self.bounds = low, high
        update_wrapper(self, function)

    def __call__(self, output: Tensor, target: Tensor) -> Any:
        return self.function(output, target)

    def __repr__(self) -> str:
        return f"Metric({getattr(self, '__name__', 'function')}, higher_is_better={self.higher_is_better})"

    @property
    def better(self) -> str:
        return "higher" if self.higher_is_better else "lower"

    def each(self, outputs: Any, targets: Any) -> Tensor:
        """The numbers of each sample, [replicas, samples].

        Args:
            outputs: of the model, [replicas, samples, ...].
            targets: of the samples.
        """
        replicas = len(first_tensor(outputs))
        return torch.stack([self(at(outputs, i), targets) for i in range(replicas)]).double()

    def whole(self, outputs: Any, targets: Any) -> Tensor:
        """The number of a set of samples, [replicas].

        Args:
            outputs: of the model, [replicas, samples, ...].
            targets: of the samples.
        """
        first = first_tensor(outputs)
        values = [self(at(outputs, i), targets) for i in range(len(first))]
        return torch.stack([torch.as_tensor(v, dtype=torch.float64).reshape(()) for v in values]).to(first.device)


def find_metrics(metrics: Mapping[str, Function] | Sequence[str] | None) -> dict[str, Metric]:
    """The metrics by name, from a user's functions by name or from registered names."""
    if metrics is None:
        return {}
    if isinstance(metrics, str) or not isinstance(metrics, Mapping | Sequence):
        raise ValueError(f'problem: metrics must be {{"name": function}} or a list of names, got {metrics!r}')
    if isinstance(metrics, Mapping):
        named: dict[str, Any] = dict(metrics)
    else:
        for name in metrics:
            if callable(name):
                raise ValueError(f'problem: a function needs a name: metrics={{"name": function}}, got {metrics!r}')
        named = {name: registered.find(name).build for name in metrics}
    for name, function in named.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name) or name in TAKEN:
            raise ValueError(
                f"problem: the name of a metric must be a word other than {', '.join(TAKEN)}, got {name!r}"
            )
        if not callable(function):
            raise ValueError(f"problem: the metric {name!r} must be a function f(output, target), got {function!r}")
    return {name: f if isinstance(f, Metric) else Metric(f) for name, f in named.items()}


TAKEN = ("loss", "accuracy", "samples")


def gives_each(name: str, metric: Metric, output: Any, targets: Any, samples: int) -> bool:
    """Whether a metric gives a number for each sample, and not one for the set; other results are refused."""
    try:
        result = metric(output, targets)
    except Exception as why:  # a user's function may raise anything
        raise ValueError(f"problem: the metric {name!r} cannot take this data: {one_line(why)}") from why
    wanted = (
        f"problem: the metric {name!r} must return one number, or a tensor of {samples} numbers for {samples} samples"
    )
    try:
        value = torch.as_tensor(result)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}, got {result!r:.60}") from None
    if value.dtype.is_complex or (value.dim() > 0 and value.shape != (samples,)):
        raise ValueError(f"{wanted}, got shape {list(value.shape)}")
    if metric.of_mean is not None and value.dim() == 0:
        raise ValueError(f"problem: the metric {name!r} has of_mean, so it must return a number for each sample")
    return value.dim() > 0


# -- built-in metrics ---------------------------------------------------------------------------------------------
def predicted(output: Tensor, target: Tensor) -> Tensor:
    """The predicted classes: the largest logit, or the sign of a single one."""
    if output.dim() == target.dim() + 1 and output.shape[-1] > 1:
        return output.argmax(dim=-1)
    refuse_numbers(target)
    return (output.reshape(target.shape) > 0).long()


def refuse_numbers(target: Tensor) -> None:
    """Refuse the targets of a regression, where a model with a single output has the classes 0 and 1."""
    if not bool(((target == 0) | (target == 1)).all()):
        raise ValueError("it is for classes: with a single output the targets must be 0 and 1")


def numbers(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets of a regression, [samples, numbers]."""
    if output.numel() != target.numel():
        shapes = f"outputs {list(output.shape)}, targets {list(target.shape)}"
        raise ValueError(f"it is for regression, with one output for each target, got {shapes}")
    return output.reshape(len(target), -1).double(), target.reshape(len(target), -1).double()


def tokens(target: Tensor) -> Tensor:
    """1 for the positions that count: those of a negative target, such as ignore_index, do not."""
    return (target >= 0).double().flatten(1)


def _hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class: samples that are predicted correctly, predictions, and samples."""
    if target.is_floating_point() and bool((target != target.round()).any()):
        raise ValueError("it is for classes, and the targets are numbers with decimals; take mae, rmse or r2")
    guess = predicted(output, target).flatten()
    target = target.flatten().long()
    classes = int(torch.maximum(guess.max(), target.max())) + 1
    right = torch.bincount(target[guess == target], minlength=classes)
    return right.double(), torch.bincount(guess, minlength=classes), torch.bincount(target, minlength=classes)


@registered.register("f1")
@partial(Metric, bounds=SHARE)
def f1(output: Tensor, target: Tensor) -> Tensor:
    """The F1 score of each class, averaged over the classes that occur (macro)."""
    right, guessed, real = _hits(output, target)
    present = (guessed + real) > 0
    return (2 * right / (guessed + real).clamp(min=1))[present].mean()


@registered.register("balanced_accuracy")
@partial(Metric, bounds=SHARE)
def balanced_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The accuracy of each class, averaged over the classes that occur."""
    right, _, real = _hits(output, target)
    return (right / real.clamp(min=1))[real > 0].mean()


@registered.register("auc")
@partial(Metric, bounds=SHARE)
def auc(output: Tensor, target: Tensor) -> Tensor:
    """The area under the ROC curve of two classes: how often a positive sample has the larger score, ties as half."""
    score = (output[:, 1] - output[:, 0] if output.dim() == 2 and output.shape[1] == 2 else output.flatten()).double()
    if score.shape != target.shape:
        raise ValueError("it is for two classes")
    refuse_numbers(target)
    # The mean rank of equal scores.
    _, group, sizes = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (sizes.cumsum(0) - (sizes - 1) / 2)[group]
    positive = target > 0
    n = positive.sum().double()
    pairs = n * (len(target) - n)
    area: Tensor = (rank[positive].sum() - n * (n + 1) / 2) / pairs  # NaN if there is one class only
    return area


@registered.register("top5_accuracy")
@partial(Metric, bounds=SHARE)
def top5_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """Whether the class is among the five largest logits."""
    if output.dim() != 2 or target.dim() != 1:
        raise ValueError("it is for classes, with a logit for each of them")
    best = output.topk(min(5, output.shape[-1]), dim=-1).indices
    return (best == target[:, None]).any(dim=-1).double()


def _absolute(output: Tensor, target: Tensor) -> Tensor:
    """The mean absolute error."""
    a, b = numbers(output, target)
    return (a - b).abs().mean(dim=-1)


def _squared(output: Tensor, target: Tensor) -> Tensor:
    """The root of the mean squared error."""
    a, b = numbers(output, target)
    return ((a - b) ** 2).mean(dim=-1)


@registered.register("r2")
@partial(Metric, bounds=(-math.inf, 1.0))
def r2(output: Tensor, target: Tensor) -> Tensor:
    """The share of the targets' variance that the outputs explain."""
    a, b = numbers(output, target)
    return 1 - ((a - b) ** 2).sum() / ((b - b.mean(dim=0)) ** 2).sum()


@registered.register("token_accuracy")
@partial(Metric, bounds=SHARE)
def token_accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of the tokens of each sequence that are predicted correctly."""
    counted = tokens(target)
    return ((output.argmax(dim=-1) == target).flatten(1) * counted).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The exponential of the mean cross-entropy of a token."""
    counted = tokens(target)
    flat, wanted = output.reshape(-1, output.shape[-1]), target.reshape(-1).clamp(min=0)
    losses = F.cross_entropy(flat, wanted, reduction="none").view(len(target), -1)
    return (losses.double() * counted).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)


mae = registered.register("mae")(Metric(_absolute, higher_is_better=False, bounds=POSITIVE))
rmse = registered.register("rmse")(Metric(_squared, higher_is_better=False, of_mean=torch.sqrt, bounds=POSITIVE))
perplexity = registered.register("perplexity")(
    Metric(_token_loss, higher_is_better=False, of_mean=torch.exp, bounds=POSITIVE)
)
OF_SEQUENCES = {"token_accuracy": token_accuracy, "perplexity": perplexity}


def of_sequences(output: Any, targets: Any) -> dict[str, Metric]:
    """The metrics that sequences of tokens have without being named."""
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)):
        return {}
    if targets.is_floating_point() or targets.dim() != 2 or output.shape[:-1] != targets.shape:
        return {}
    return dict(OF_SEQUENCES)
