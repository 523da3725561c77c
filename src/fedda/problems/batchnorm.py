"""BatchNorm without running statistics: those of the mini-batch in training, estimated ones in evaluation.

The objective is then a function of the parameters alone, as all methods here assume. When a model is evaluated, each
client passes mini-batches of its training samples through it, normalised by the statistics of the batch, and reports
the mean and the second moment of each BatchNorm's input. Their weighted mean over clients gives mean and variance.
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
from ..checks import count
from ..core import Layout
from .gradients.stackable import stackable
from .trees import at, first_tensor

if TYPE_CHECKING:
    from .evaluation import Evaluation, Shard, Sum
    from .neural import Neural

SAMPLES = 10_000  # for an estimate, approximately, over all clients
GROUPS = 32  # of a GroupNorm, at most
AT_ONCE = 2_000  # samples that the model takes at once, over all replicas: more is not faster and takes memory


class BatchNorms:
    """The BatchNorm layers of a model whose running statistics would change in training.

    `training` is a copy of the model that uses batch statistics, `evaluation` one that uses given statistics. Both are
    the model itself if it has no such layer: layers in eval mode are constants, and layers that were made with
    `track_running_stats=False` always use batch statistics.
    """

    def __init__(self, model: nn.Module, random: bool = False):
        self.layers = tracking_layers(model)
        self.widths = [layer.num_features for layer in self.layers.values()]
        self.size = 2 * sum(self.widths)  # of all means and variances
        self.training = self.evaluation = model
        if self.layers or random:
            self.evaluation = _copy(model).eval()
        if self.layers:
            self.training = _copy(model)
            for layer in tracking_layers(self.training).values():
                layer.track_running_stats = False
                layer.running_mean = layer.running_var = layer.num_batches_tracked = None
                layer.register_forward_pre_hook(in_float32)

    def split(self, statistics: Tensor) -> tuple[Tensor, ...]:
        """The parts of statistics [..., size]: two for each layer, one layer after the other."""
        return torch.split(statistics, [width for width in self.widths for _ in range(2)], dim=-1)

    def named(self, statistics: Tensor) -> dict[str, Tensor]:
        """The buffers by name, from means and variances [..., size]."""
        return dict(zip((name for name, _ in self.layout), self.split(statistics), strict=True))

    @property
    def layout(self) -> Layout:
        """The names and shapes of the buffers, in the order of the statistics."""
        kinds = ("running_mean", "running_var")
        layers = zip(self.layers, self.widths, strict=True)
        return [(f"{name}.{kind}", (width,)) for name, width in layers for kind in kinds]

    def default_statistics(self, like: Tensor) -> Tensor:
        """Mean 0 and variance 1 for all layers, [size]."""
        return torch.cat([like.new_full((w,), value) for w in self.widths for value in (0.0, 1.0)])

    # -- estimation ---------------------------------------------------------------------------------------------
    def estimate(self, evaluation: Evaluation, x: Tensor, weights: Tensor, mine: Shard, add: Sum) -> Tensor:
        """Means and variances at x [replicas, d]: [replicas, size] in float64."""
        (total,) = add([self.total_moments(evaluation, x, weights, mine)])
        return self.from_moments(total.view(len(x), -1))

    def total_moments(
        self, evaluation: Evaluation, x: Tensor, weights: Tensor, mine: Shard, draws: int | None = None
    ) -> Tensor:
        """The weighted sum of the moments of a shard of the clients, [replicas, size] in float64. Each client draws
        `draws` mini-batches, by default as many as the samples of all clients ask for."""
        total = torch.zeros(len(x), self.size, dtype=torch.float64, device=x.device)
        stacks = torch.split(x, len(x) if evaluation.stacks_replicas else 1)
        for inputs, share in self.batches(evaluation.problem, weights, mine, len(stacks[0]), draws):
            moments = torch.cat([self.moments(evaluation, stack, inputs) for stack in stacks])
            total += (share[:, None] * moments).sum(dim=1)
        return total

    def from_moments(self, moments: Tensor) -> Tensor:
        """Means and variances from means and second moments, [..., size]."""
        parts = self.split(moments)
        pairs = [(mean, (square - mean**2).clamp(min=0)) for mean, square in zip(parts[::2], parts[1::2], strict=True)]
        return torch.cat([part for pair in pairs for part in pair], dim=-1)

    def client_moments(self, evaluation: Evaluation, x: Tensor, client: int) -> Tensor:
        """The moments of one client's samples at x [replicas, d]: [replicas, size] in float64."""
        alone = torch.zeros_like(evaluation.problem.sizes, dtype=torch.float64)
        alone[client] = 1
        return self.total_moments(evaluation, x, alone, lambda _: slice(client, client + 1))

    def batches(
        self, problem: Neural, weights: Tensor, mine: Shard, replicas: int, draws: int | None = None
    ) -> Iterator[tuple[Any, Tensor]]:
        """Mini-batches [n, batch, ...] of the samples of a shard of the clients, and their weights [n] in the mean.
        They are drawn as in training, but from a separate random stream, and are always the same."""
        part = mine(problem.clients)
        if part.stop <= part.start:
            return
        ids = torch.arange(part.start, part.stop, device=problem.device)
        draws = draws or mini_batches(int(problem.sizes.sum()), problem.clients, problem.batch_size)
        key = rng.fold(rng.key(0, rng.STATISTICS).to(problem.device), problem.first_client + ids)
        keys = rng.fold(key, torch.arange(draws, device=problem.device)[:, None])
        index = problem.draw(ids, keys).flatten(0, 1)
        share = (weights[part] / (weights.sum() * draws)).repeat(draws)
        size = max(1, AT_ONCE // (replicas * problem.batch_size))
        for first in range(0, len(index), size):
            part = slice(first, first + size)
            yield problem.standardised(problem.pick(problem.data, index[part])).x, share[part]

    def moments(self, evaluation: Evaluation, x: Tensor, inputs: Any) -> Tensor:
        """The moments [replicas, n, size] of the layers' inputs for batches [n, batch, ...] at x [replicas, d]."""

        def one(x: Tensor, inputs: Any) -> Tensor:
            return self.batch_moments(evaluation.problem.forward, x, inputs)

        paths = evaluation.problem.gradient_paths
        if paths.kernels is not None and paths.chosen == "kernels":
            by_kernels: Tensor = paths.kernels.moments(x, inputs)
            return by_kernels
        if evaluation.stacks_batches:
            of_batches = vmap(stackable(one), (None, 0))
            moments: Tensor = vmap(of_batches, (0, None))(x, inputs) if len(x) > 1 else of_batches(x[0], inputs)[None]
            return moments
        batches = [at(inputs, i) for i in range(len(first_tensor(inputs)))]
        return torch.stack([torch.stack([one(point, batch) for batch in batches]) for point in x])

    def batch_moments(self, forward: Callable[[Tensor, Any], Any], x: Tensor, inputs: Any) -> Tensor:
        """Mean and second moment of the input of each layer in one batch, [size], over all calls of the layer."""
        seen: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self.layers}

        def observe(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
                v = args[0] if args else kwargs["input"]
                dims = [0, *range(2, v.dim())]
                var, mean = (part.double() for part in torch.var_mean(v, dim=dims, correction=0))
                seen[name].append((v.numel() // v.shape[1], torch.cat([mean, var + mean**2])))

            return hook

        layers = {name: self.training.get_submodule(name) for name in self.layers}
        hooks = [layer.register_forward_pre_hook(observe(name), with_kwargs=True) for name, layer in layers.items()]
        try:
            forward(x, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        parts = []
        for name, width in zip(self.layers, self.widths, strict=True):
            if not seen[name]:  # an unused layer
                seen[name].append((1, torch.cat([x.new_zeros(width), x.new_ones(width)]).double()))
            total = sum(n for n, _ in seen[name])
            parts.append(torch.stack([n / total * v for n, v in seen[name]]).sum(dim=0))
        return torch.cat(parts)


def mini_batches(samples: int, clients: int, batch: int) -> int:
    """How many mini-batches each client draws for an estimate, if all clients together have so many samples."""
    return -(-min(SAMPLES, samples) // (clients * batch))


def tracking_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers, by name, whose running statistics a forward pass would change."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.training
        and layer.track_running_stats
        and layer.running_mean is not None
    }


def in_float32(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The input of a BatchNorm under autocast, as float32. Autocast does this for the other norms, but not for this
    one, and vmap has no rule for a BatchNorm whose input and weight differ in precision."""
    return tuple(v.float() for v in args) if torch.is_autocast_enabled("cuda") else args


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


def to_group_norm(module: nn.Module, groups: int = GROUPS) -> nn.Module:
    """A copy of a module with a GroupNorm (Wu, He 2018) in place of each BatchNorm, with the same scale and offset.

    Args:
        module: the network; it is not changed.
        groups: the largest number of groups: a layer gets the largest one up to this that divides its channels.

    >>> to_group_norm(nn.Sequential(nn.Conv2d(1, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    24
    """
    count("to_group_norm", "groups", groups)
    if isinstance(module, _BatchNorm):
        return _group_norm(module, groups)
    converted = copy.deepcopy(module)
    for parent in list(converted.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm):
                setattr(parent, name, _group_norm(child, groups))
    return converted


def _group_norm(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    most = max(n for n in range(1, min(groups, channels) + 1) if channels % n == 0)
    norm = nn.GroupNorm(most, channels, layer.eps, layer.affine).train(layer.training)
    if layer.affine:
        norm.weight, norm.bias = (nn.Parameter(p.detach().clone(), p.requires_grad) for p in (layer.weight, layer.bias))
    return norm
