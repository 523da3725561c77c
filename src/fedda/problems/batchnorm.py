"""BatchNorm without a state of its own: the statistics of the mini-batch in training, estimated ones in evaluation.

The objective is then a function of the parameters alone, as every method here assumes. When a model is evaluated, each
client sends mini-batches of its training samples through it, normalised by their own statistics, and reports the mean
and the second moment of each BatchNorm's input. The weighted mean over clients gives the mean and the pooled variance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from .. import rng
from .totals import Add, Mine

if TYPE_CHECKING:
    from .evaluation import Evaluation
    from .neural import Neural

SAMPLES = 10_000  # of all clients together, about, that statistics are estimated from
AT_ONCE = 2_000  # samples that go through the model at once, over all replicas: more is no faster, and takes memory


class BatchNorms:
    """The BatchNorm layers of a model whose running statistics would change in training.

    `training` is the model with batch statistics alone, `evaluation` the one that takes statistics from outside. Both
    are the model itself where it has no such layer: those in eval mode are constants already, and those made with
    `track_running_stats=False` want batch statistics at all times.
    """

    def __init__(self, model: nn.Module):
        self.layers = learning(model)
        self.widths = [layer.num_features for layer in self.layers.values()]
        self.size = 2 * sum(self.widths)  # numbers that follow the parameters of a point to evaluate
        self.training = self.evaluation = model
        if self.layers:
            self.training, self.evaluation = _copy(model), _copy(model)
            for layer in learning(self.training).values():
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            for layer in learning(self.evaluation).values():
                layer.eval()

    def named(self, numbers: Tensor) -> dict[str, Tensor]:
        """The buffers by name, from numbers [..., size]: mean and variance of one layer after the other."""
        parts = numbers.split([width for width in self.widths for _ in range(2)], dim=-1)
        names = [f"{name}.{kind}" for name in self.layers for kind in ("running_mean", "running_var")]
        return dict(zip(names, parts, strict=True))

    def plain(self, like: Tensor) -> Tensor:
        """Mean 0 and variance 1, [size]: where it does not matter which."""
        return torch.cat([like.new_full((w,), value) for w in self.widths for value in (0.0, 1.0)])

    # -- estimation ---------------------------------------------------------------------------------------------
    def estimated(self, evaluation: Evaluation, x: Tensor, weights: Tensor, mine: Mine, add: Add) -> Tensor:
        """Means and variances at x [replicas, d]: [replicas, size] in float64."""
        total = torch.zeros(len(x), self.size, dtype=torch.float64, device=x.device)
        stacks = x.split(len(x) if evaluation.together else 1)
        for inputs, share in self.batches(evaluation.problem, weights, mine, len(stacks[0])):
            found = torch.cat([self.moments(evaluation, stack, inputs) for stack in stacks])
            total += (share[:, None] * found).sum(dim=1)
        (total,) = add([total])
        parts = total.view(len(x), -1).split([w for w in self.widths for _ in range(2)], dim=-1)
        pairs = [(mean, (square - mean**2).clamp(min=0)) for mean, square in zip(parts[::2], parts[1::2], strict=True)]
        return torch.cat([part for pair in pairs for part in pair], dim=-1)

    def batches(self, problem: Neural, weights: Tensor, mine: Mine, replicas: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches [n, batch, ...] of these clients' samples and their shares [n] of the mean: always the same,
        drawn as in training from a stream of their own."""
        part = mine(problem.clients)
        if part.stop <= part.start:
            return
        ids = torch.arange(part.start, part.stop, device=problem.device)
        wanted = min(SAMPLES, int(problem.sizes.sum()))
        draws = -(-wanted // (problem.clients * problem.batch_size))
        key = rng.fold(rng.key(0, rng.STATISTICS).to(problem.device), ids)
        keys = rng.fold(key, torch.arange(draws, device=problem.device)[:, None])
        index = problem.draw(ids, keys).flatten(0, 1)
        share = (weights[part] / (weights.sum() * draws)).repeat(draws)
        size = max(1, AT_ONCE // (replicas * problem.batch_size))
        for first in range(0, len(index), size):
            few = slice(first, first + size)
            yield problem.ready(problem.pick(problem.data, index[few])).x, share[few]

    def moments(self, evaluation: Evaluation, x: Tensor, inputs: Tensor) -> Tensor:
        """What the layers see of batches [n, batch, ...] at points [replicas, d]: [replicas, n, size]."""

        def one(x: Tensor, inputs: Tensor) -> Tensor:
            return self.observed(evaluation.problem.forward, x, inputs)

        if evaluation.batched:
            of_batches = vmap(one, (None, 0))
            found: Tensor = vmap(of_batches, (0, None))(x, inputs) if len(x) > 1 else of_batches(x[0], inputs)[None]
            return found
        return torch.stack([torch.stack([one(point, few) for few in inputs]) for point in x])

    def observed(self, forward: Callable[[Tensor, Tensor], Tensor], x: Tensor, inputs: Tensor) -> Tensor:
        """Mean and second moment of every layer's input in one batch, [size]; over all its calls, if it has several."""
        seen: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self.layers}

        def look(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
                v = args[0] if args else kwargs["input"]
                dims = [0, *range(2, v.dim())]
                var, mean = (part.double() for part in torch.var_mean(v, dim=dims, correction=0))
                seen[name].append((v.numel() // v.shape[1], torch.cat([mean, var + mean**2])))

            return hook

        ours = {name: self.training.get_submodule(name) for name in self.layers}
        hooks = [layer.register_forward_pre_hook(look(name), with_kwargs=True) for name, layer in ours.items()]
        try:
            forward(x, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        parts = []
        for name, width in zip(self.layers, self.widths, strict=True):
            if not seen[name]:  # a layer that is not used
                seen[name].append((1, torch.cat([x.new_zeros(width), x.new_ones(width)]).double()))
            total = sum(n for n, _ in seen[name])
            parts.append(torch.stack([n / total * v for n, v in seen[name]]).sum(dim=0))
        return torch.cat(parts)


def learning(model: nn.Module) -> dict[str, Any]:
    """The BatchNorm layers by name whose running statistics a forward pass would change."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.training
        and layer.track_running_stats
        and layer.running_mean is not None
    }


def refuse_synchronised(model: nn.Module) -> None:
    """Refuse a BatchNorm that would average over the processes of a distributed run."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and layer.training:
            raise ValueError(
                f"problem: {name or 'the model'} is a SyncBatchNorm, which would mix the batches of several clients; "
                "use BatchNorm1d, BatchNorm2d or BatchNorm3d"
            )


def _copy(model: nn.Module) -> nn.Module:
    """A copy of the module that shares its parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})
