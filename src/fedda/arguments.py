"""What `Run`, `rounds` and `train` are given: one clear line for whatever does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

import torch
from torch import Tensor

from . import checks, registry
from .aggregation import Budget, Wrapper
from .engines import Engine


class RunOptions(TypedDict, total=False):
    """How a run is made: the keywords of `Run`, `rounds` and `train`."""

    cohort: int | None  # clients a round; all of them by default
    seed: int | Sequence[int]  # several seeds run as replicas of one program
    x0: Tensor | None  # a start of one's own, a flat vector
    engine: str | Engine  # "auto", "sequential", "vectorised", or an engine object
    device: Any  # where the problem is moved first
    weights: str  # "uniform" or "samples": how clients are averaged
    force: bool  # run in spite of an absurd first rate
    aggregation: Sequence[Wrapper]  # what is done to replies on their way to the mean, in this order
    budget: Mapping[str, Any] | Budget | None  # {"epsilon": 8.0, "delta": 1e-5}: the run ends before it is exceeded


def refuse_words(how: Mapping[str, Any]) -> None:
    for word in how:
        if word not in RunOptions.__annotations__:
            raise ValueError(f"train: no argument {word!r}; {checks.nearest(word, RunOptions.__annotations__)}")


def checked_seeds(seed: Any) -> list[int]:
    seeds: list[Any] = [seed] if not isinstance(seed, Sequence) or isinstance(seed, str) else list(seed)
    if not seeds or not all(isinstance(s, Integral) and not isinstance(s, bool) and 0 <= int(s) < 2**63 for s in seeds):
        raise ValueError(f"train: seed must be a whole number >= 0, or a list of several, got {seed!r}")
    return [int(s) for s in seeds]


def usable_device(device: Any, word: str = "train: device") -> torch.device:
    """The device, tried; `word` is what the user called it."""
    try:
        torch.zeros(1, device=device).item()
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as why:
        raise ValueError(f"{word} {device!r} cannot be used here: {str(why).splitlines()[0][:120]}") from None


def made_engine(engine: str | Engine) -> Engine:
    if isinstance(engine, str):
        made: Engine = registry.engines.find("vectorised" if engine == "auto" else engine)()
        return made
    if isinstance(engine, type) or not hasattr(engine, "average"):
        raise ValueError(f"train: engine must be a name or an engine object, got {engine!r}")
    return engine


def refuse_shapes(thing: Any, replicas: int, d: int) -> None:
    """Refuse tensors among the hyper-parameters that fit neither the replicas nor the model."""
    for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        value = getattr(thing, field.name)
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[0] not in (1, replicas):
            raise ValueError(
                f"{type(thing).__name__}: {field.name} has {value.shape[0]} values but there are {replicas} seeds; "
                f"give as many, such as seed=[0] * {value.shape[0]}"
            )
        if isinstance(value, Tensor) and value.dim() == 1 and field.name in VECTORS and len(value) not in (1, d):
            raise ValueError(
                f"{type(thing).__name__}: {field.name} must have {d} entries, as the model, got {len(value)}"
            )
        refuse_shapes(value, replicas, d)


VECTORS = ("gamma", "lower", "upper", "h", "centre")  # words that may be given for each coordinate
