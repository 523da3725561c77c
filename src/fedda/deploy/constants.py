"""What every copy of a model must have in common besides the parameters that are trained."""

import copy
import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from ..problems.neural import freeze_others


def frozen_hash(model: nn.Module, dtype: torch.dtype) -> str:
    """A hash of the frozen parameters, which never travel, as numbers of this type; empty if there are none.

    >>> frozen_hash(nn.Linear(1, 1), torch.float32)
    ''
    """
    frozen = [(name, p.detach().to("cpu", dtype)) for name, p in model.named_parameters() if not p.requires_grad]
    if not frozen:
        return ""
    digest = hashlib.sha256()
    for name, value in frozen:
        digest.update(f"{name} {list(value.shape)} ".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def with_frozen(model: nn.Module, trainable: str | Sequence[str] | None) -> nn.Module:
    """A copy of a model in which only the parameters that fit the patterns are trained."""
    made = copy.deepcopy(model)
    freeze_others("deploy", made, trainable)
    return made
