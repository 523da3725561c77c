"""The arguments of `Run`, `rounds` and `train`, and their checks: each error is one line."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import checks, registry
from .core import Layout
from .engines import Engine

VECTORS = ("gamma", "lower", "upper", "h", "centre")  # hyper-parameters that may be vectors
P = ParamSpec("P")
R = TypeVar("R")


def with_hints(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which answers a mistyped keyword with the nearest one.

    >>> with_hints(lambda x, scale=1: x)(2, scales=3)
    Traceback (most recent call last):
    ValueError: <lambda>: no argument 'scales'; did you mean 'scale'?
    """
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        checks.refuse_unknown(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def check_seeds(seed: Any) -> list[int]:
    seeds: list[Any] = [seed] if not isinstance(seed, Sequence) or isinstance(seed, str) else list(seed)
    if not seeds or not all(isinstance(s, Integral) and not isinstance(s, bool) and 0 <= int(s) < 2**63 for s in seeds):
        raise ValueError(f"train: seed must be a whole number >= 0, or a list of several, got {seed!r}")
    return [int(s) for s in seeds]


def check_device(device: Any, name: str = "train: device") -> torch.device:
    """The device, if a tensor can be put on it; `name` is the user's name for it in the error message."""
    try:
        torch.zeros(1, device=device).item()
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as why:
        raise ValueError(f"{name} {device!r} cannot be used here: {str(why).splitlines()[0][:120]}") from None


def check_engine(engine: str | Engine) -> Engine:
    """The engine itself, from an engine or its name."""
    if isinstance(engine, str):
        engine = registry.engines.find("vectorised" if engine == "auto" else engine)()
    if not isinstance(engine, Engine):
        raise ValueError(f"train: engine must be a name or an engine object, got {engine!r}")
    return engine


def check_shapes(thing: Any, replicas: int, d: int) -> None:
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
        check_shapes(value, replicas, d)


def check_rates(algorithm: Any, t: Tensor) -> None:
    """Refuse a user's rate that is not a number, or that several seeds cannot share: `t` is the first step of each."""
    for name in sorted(registry.RATES):
        rate = getattr(algorithm, name, None)
        if not callable(rate):
            continue
        owner = f"{type(algorithm).__name__}: {name}"
        try:
            value = rate(t)
        except RuntimeError as why:
            if "Boolean value of Tensor" not in str(why):
                raise
            raise ValueError(
                f"{owner} must be a function of tensors, because several seeds run together: write torch.where(t < 30, "
                "0.1, 0.01) instead of `if t < 30`"
            ) from None
        if not isinstance(value, Tensor | Real):
            raise ValueError(f"{owner} must be a function of the step to a number, got {value!r} for step 0")


def flat_point(state: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The flat vector of a state_dict: the trained parameters, in the order of the layout. Other entries are ignored.

    >>> flat_point({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, [("weight", (1, 2)), ("bias", (1,))])
    tensor([1., 1., 0.])
    """
    for name, shape in layout:
        if name not in state:
            raise ValueError(f"train: x0 has no parameter {name!r}; {checks.nearest(name, list(state))}")
        if tuple(state[name].shape) != shape:
            raise ValueError(f"train: x0: {name} must have the shape {list(shape)}, got {list(state[name].shape)}")
    return torch.cat([state[name].detach().flatten() for name, _ in layout])


def refuse_other_frozen(state: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> None:
    """Refuse a state_dict with other frozen parameters than the model's: a run starts from the trained ones only."""
    for name, own in frozen.items():
        if name in state and not torch.equal(state[name].to(own), own):
            raise ValueError(
                f"train: x0 has another {name!r} than the model, which is frozen: call model.load_state_dict(x0) "
                "before fedda.problem"
            )
