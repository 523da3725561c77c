"""The model that a federation has trained: as a module, or as a file that can be published."""

import copy
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..core import Layout
from ..files import write_whole
from .checkpoint import STATE, STATISTICS, read_state
from .constants import frozen_hash, with_frozen
from .traffic import DTYPES


def trained(out: str | Path, model: nn.Module) -> nn.Module:
    """A copy of a model in eval mode, with the parameters and the BatchNorm statistics of the last checkpoint of a run.
    The run may still be running.

    Args:
        out: the folder of the run.
        model: the network.
    """
    state, facts = read_state(Path(out) / STATE)
    layout, dtype = facts["layout"], DTYPES[facts["plan"]["dtype"]]
    if facts.get("frozen"):
        names = {name for name, _ in model.named_parameters()} & {name for name, _ in layout}
        if frozen_hash(with_frozen(model, sorted(names)), dtype) != facts["frozen"]:
            raise ValueError(f"{out}: the frozen parameters of the model are not those of the run")
    return with_values(model, named_values(Path(out), state, facts)).eval()


def export(out: str | Path, file: str | Path) -> list[str]:
    """Write the model of the last checkpoint into a file that can be published. The run's folder holds more: which site
    took part when, and the sites' losses.

    Args:
        out: the folder of the run.
        file: the file: .safetensors, whose metadata include the epsilon against the outside, or .pt for a state_dict
            that `torch.load` reads.

    Returns:
        The names of its parameters and of BatchNorm's statistics.
    """
    file = Path(file)
    if file.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{file}: the suffix must be .safetensors or .pt")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent}: is not a folder")
    state, facts = read_state(Path(out) / STATE)
    tensors = named_values(Path(out), state, facts)
    if file.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        write_whole(file, buffer.getvalue())
    else:
        about = {"format": "pt"} | {k: str(v) for k, v in facts.get("privacy", {}).items() if k != "epsilon_site"}
        write_whole(file, save(tensors, metadata=about))
    return list(tensors)


def named_values(out: Path, state: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The trained parameters of a checkpoint and, if the model has BatchNorm, its statistics, by name."""
    named, norms = by_name(facts["layout"], state["server.x"]), facts.get("statistics", [])
    if norms and STATISTICS not in state:
        raise ValueError(
            f"{out}: round {int(state['round'])} has no statistics of BatchNorm yet: they come with the next "
            "evaluation and at the end of the run"
        )
    return named | (by_name(norms, state[STATISTICS]) if norms else {})


def by_name(layout: Layout, x: Tensor) -> dict[str, Tensor]:
    """The tensors of a flat vector.

    >>> by_name([("weight", (1, 2)), ("bias", (1,))], torch.tensor([1.0, 2.0, 3.0]))
    {'weight': tensor([[1., 2.]]), 'bias': tensor([3.])}
    """
    parts = x.flatten().split([math.prod(shape) for _, shape in layout])
    return {name: part.reshape(shape).clone() for (name, shape), part in zip(layout, parts, strict=True)}


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model with these parameters and buffers.

    >>> values = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([1.0])}
    >>> with_values(nn.Linear(1, 1), values)(torch.tensor([3.0])).tolist()
    [7.0]
    """
    filled = copy.deepcopy(model)
    own = dict(filled.named_parameters()) | dict(filled.named_buffers())
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            got = f"shape {list(own[name].shape)}" if name in own else "none"
            raise ValueError(f"the model must have {name!r} with the shape {list(value.shape)}, got {got}")
        own[name].data.copy_(value)
    return filled
