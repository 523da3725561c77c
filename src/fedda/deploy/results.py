"""The model that a federation has trained: as a module, or as a file that can be published."""

import copy
import io
import math
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from ..files import write_whole
from ..problems.neural import trainable
from .checkpoint import STATE, read_state


def trained(out: str | Path, model: nn.Module) -> nn.Module:
    """A copy of a model with the parameters of the last checkpoint of a run. The run may still be running.

    Args:
        out: the folder of the run.
        model: the network.
    """
    return with_parameters(model, read_state(Path(out) / STATE)[0]["server.x"])


def export(out: str | Path, file: str | Path) -> list[str]:
    """Write the model of the last checkpoint into a file that can be published. The run's folder holds more: which site
    took part when, and the sites' losses.

    Args:
        out: the folder of the run.
        file: the file: .safetensors, whose metadata include the epsilon against the outside, or .pt for a state_dict
            that `torch.load` reads.

    Returns:
        The names of its parameters.
    """
    file = Path(file)
    if file.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"{file}: the suffix must be .safetensors or .pt")
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent}: is not a folder")
    state, facts = read_state(Path(out) / STATE)
    parts = state["server.x"].flatten().split([math.prod(shape) for _, shape in facts["layout"]])
    tensors = {name: part.reshape(shape).clone() for (name, shape), part in zip(facts["layout"], parts, strict=True)}
    if file.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        write_whole(file, buffer.getvalue())
    else:
        about = {"format": "pt"} | {k: str(v) for k, v in facts.get("privacy", {}).items() if k != "epsilon_site"}
        write_whole(file, save(tensors, metadata=about))
    return list(tensors)


def with_parameters(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy of a model with the values of a flat vector.

    >>> with_parameters(nn.Linear(1, 1), torch.tensor([2.0, 1.0]))(torch.tensor([3.0])).tolist()
    [7.0]
    """
    filled = copy.deepcopy(model)
    parameters = [parameter for _, parameter in trainable(filled)]
    size = sum(parameter.numel() for parameter in parameters)
    if x.numel() != size:
        raise ValueError(f"the model has {size} trainable parameters, the vector has {x.numel()} values")
    vector_to_parameters(x.flatten().to(parameters[0]), parameters)
    return filled
