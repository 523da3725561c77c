"""Checks of values from users. All messages have one form: ``Owner: name must be ..., got ...``.

A hyper-parameter's name means the same in every algorithm, so its bounds are in one table, `BOUNDS`.
"""

import difflib
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch


class Bound(NamedTuple):
    """A condition on a number: its text, and a test that also takes tensors."""

    text: str
    holds: Callable[[Any], Any]


POSITIVE = Bound("> 0", lambda v: v > 0)
AT_LEAST_ZERO = Bound(">= 0", lambda v: v >= 0)
FRACTION = Bound("in [0, 1]", lambda v: (v >= 0) & (v <= 1))
BELOW_ONE = Bound("in [0, 1)", lambda v: (v >= 0) & (v < 1))

BOUNDS: dict[str, Bound] = {
    "lr": POSITIVE,
    "server_lr": POSITIVE,
    "w": POSITIVE,
    "c": AT_LEAST_ZERO,
    "momentum": BELOW_ONE,
    "beta": FRACTION,
    "eps": POSITIVE,
    "kappa": POSITIVE,
    "scale": POSITIVE,
    "gamma": AT_LEAST_ZERO,
    "gamma1": AT_LEAST_ZERO,
    "gamma2": AT_LEAST_ZERO,
    "radius": POSITIVE,
    "noise": AT_LEAST_ZERO,
    "rho": FRACTION,
    "alpha": POSITIVE,
    "mu": AT_LEAST_ZERO,
    "beta1": BELOW_ONE,
    "beta2": FRACTION,
    "v0": AT_LEAST_ZERO,
    "server_eps": POSITIVE,
    "local_momentum": FRACTION,
    "server_beta": FRACTION,
    "epochs": POSITIVE,
    "stragglers": FRACTION,
    "weight_decay": AT_LEAST_ZERO,
    "max_grad_norm": POSITIVE,
}
PER_COORDINATE = frozenset({"gamma", "gamma1", "gamma2"})  # may be a vector: one number for each coordinate
COUNTS = frozenset(
    {"steps", "rounds", "cohort", "clients", "batch", "every", "chunk", "filters", "layers", "shards", "labels"}
)


def check(owner: str, **values: Any) -> None:
    """Refuse a value outside the bounds of its name. Functions (schedules) pass: they check themselves.

    >>> check("FedAvg", lr=0.1, steps=5)
    >>> check("FedAvg", lr=-0.1)
    Traceback (most recent call last):
    ValueError: FedAvg: lr must be > 0, got -0.1
    """
    for name, value in values.items():
        if name in COUNTS:
            count(owner, name, value)
        elif name in BOUNDS and not callable(value):
            number(owner, name, value, BOUNDS[name])
            # A tensor of another shape would broadcast along the model.
            per_replica = isinstance(value, torch.Tensor) and value.dim() > 0 and name not in PER_COORDINATE
            if per_replica and value.shape[1:] != (1, 1):
                shape = list(value.shape)
                raise ValueError(f"{owner}: {name} must be a number or a tensor [replicas, 1, 1], got shape {shape}")


def number(owner: str, name: str, value: Any, bound: Bound) -> None:
    """Refuse a value that is not a finite number (or a tensor of such numbers) within `bound`.

    >>> number("FedAvg", "lr", 2**70, POSITIVE)
    Traceback (most recent call last):
    ValueError: FedAvg: lr must be less than 2^63, got 1180591620717411303424
    """
    if name in PER_COORDINATE and isinstance(value, list) and value:  # from TOML: a weight for each coordinate
        for entry in value:
            number(owner, name, entry, bound)
        return
    if isinstance(value, torch.Tensor):
        good = bool((torch.isfinite(value) & bound.holds(value)).all())
    else:
        if isinstance(value, Integral) and abs(int(value)) >= 2**63:  # PyTorch cannot hold it
            raise ValueError(f"{owner}: {name} must be less than 2^63, got {shown(value)}")
        real = isinstance(value, Real) and not isinstance(value, bool)
        good = real and math.isfinite(value) and bool(bound.holds(value))
    if not good:
        text = " (a text, write the number without quotes)" if is_number_text(value) else ""
        raise ValueError(f"{owner}: {name} must be {bound.text}, got {shown(value)}{text}")


def is_number_text(value: Any) -> bool:
    """Whether a value is a text such as "0.1"."""
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def count(owner: str, name: str, value: Any, at_most: int | None = None) -> None:
    """Refuse a value that is not a whole number from 1 (to `at_most`)."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not 1 <= value <= (10**12 if at_most is None else at_most):
        wanted = "a whole number >= 1" if at_most is None else f"a whole number from 1 to {at_most}"
        raise ValueError(f"{owner}: {name} must be {wanted}, got {shown(value)}")


def one_of(owner: str, name: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse a value that is not among `choices`.

    >>> one_of("FedDA", "mu0", "nu", ("zero", "nu0"))
    Traceback (most recent call last):
    ValueError: FedDA: mu0 must be one of 'zero', 'nu0', got 'nu'
    """
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}")


def refuse_unknown(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a keyword argument that is not known, with the nearest one that is."""
    for name in names:
        if name not in known:
            raise ValueError(f"{owner}: no argument {name!r}; {nearest(name, known)}")


def nearest(unknown: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known name, or all of them."""
    known = sorted(known)
    begins = [name for name in known if len(unknown) > 2 and name.startswith(unknown)]
    close = begins or difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)  # 0.5: 'rl' is near 'lr'
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def one_line(why: object, most: int = 200) -> str:
    """The first line of an error's message, or the error's type if the message is empty.

    >>> one_line(ValueError("first\\nsecond")), one_line(MemoryError())
    ('first', 'MemoryError')
    """
    return (str(why).strip().splitlines() or [type(why).__name__])[0][:most]


def shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.flatten().tolist()}" if value.numel() <= 8 else f"a tensor of shape {tuple(value.shape)}"
    return repr(value)


def warn(text: str) -> None:
    """Warn at the nearest line that is not fedda's: the one that the user wrote."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "fedda":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
