"""The model that a federation has trained, out of its folder."""

from __future__ import annotations

import copy
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..problems.neural import trainable


def trained(out: str | Path, model: nn.Module) -> nn.Module:
    """A copy of the model with the parameters of the last checkpoint in a run's folder, which may be still running."""
    return filled(model, saved(out)["server.x"])


def saved(out: str | Path) -> dict[str, Tensor]:
    """The last state of a run, as it lies on disk: it is replaced as a whole, so that anybody may read it."""
    file = Path(out) / "state.safetensors"
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
