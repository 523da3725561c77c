"""The model that a federation has trained, out of its folder: as a module, or as a file that can be published."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..files import write_whole
from ..problems.neural import trainable
from .checkpoint import STATE


def trained(out: str | Path, model: nn.Module) -> nn.Module:
    """A copy of the model with the parameters of the last checkpoint in a run's folder, which may be still running."""
    return filled(model, saved(out)["server.x"])


def export(out: str | Path, file: str | Path) -> list[str]:
    """Write the model of the last checkpoint into a file that can be published; the names of its parameters.

    The ending decides the format: .safetensors, whose metadata also say the epsilon against the outside, or .pt for a
    state_dict that `torch.load` reads. The run's own folder holds more: who took part when, and losses of sites.
    """
    file = Path(file)
    if file.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{file}: the ending must be .safetensors or .pt")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent}: is no folder")
    x, facts = saved(out)["server.x"].flatten(), facts_of(out)
    shapes = [tuple(shape) for _, shape in facts["layout"]]
    parts = x.split([math.prod(shape) for shape in shapes])
    tensors = {
        name: part.reshape(shape).clone() for (name, _), shape, part in zip(facts["layout"], shapes, parts, strict=True)
    }
    if file.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        write_whole(file, buffer.getvalue())
    else:
        about = {"format": "pt"} | {k: str(v) for k, v in facts.get("privacy", {}).items() if k != "epsilon_site"}
        write_whole(file, save(tensors, metadata=about))
    return list(tensors)


def facts_of(out: str | Path) -> dict[str, Any]:
    """What the last checkpoint says besides its tensors."""
    with safe_open(Path(out) / STATE, "pt") as found:
        facts: dict[str, Any] = json.loads(found.metadata()["facts"])
    return facts


def saved(out: str | Path) -> dict[str, Tensor]:
    """The last state of a run, as it lies on disk: it is replaced as a whole, so that anybody may read it."""
    file = Path(out) / STATE
    try:
        return load_file(file)
    except FileNotFoundError:
        raise ValueError(f"{out}: holds no run") from None
    except SafetensorError as why:
        raise ValueError(f"{file}: is no checkpoint of ours: {why}") from None


def filled(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy of a model with the numbers of a flat vector.

    >>> filled(nn.Linear(1, 1), torch.tensor([2.0, 1.0]))(torch.tensor([3.0])).tolist()
    [7.0]
    """
    made = copy.deepcopy(model)
    own, start = trainable(made), 0
    if x.numel() != sum(p.numel() for _, p in own):
        raise ValueError(
            f"the model has {sum(p.numel() for _, p in own)} parameters to train, and {x.numel()} numbers are given"
        )
    for _, parameter in own:
        end = start + parameter.numel()
        parameter.data = x.flatten()[start:end].view_as(parameter).to(parameter)
        start = end
    return made
