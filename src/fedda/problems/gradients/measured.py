"""The fastest of several ways to do one thing, measured on this machine once and remembered."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ...data.files import data_folder
from ...files import write_whole

MARGIN = 1.1  # how much faster a later way must be: a choice that flickers would change the last bits of a run
PASSES, PATIENCE = 7, 0.5  # over all ways, and the seconds after which no further pass begins


def autotune(
    ways: Mapping[str, Callable[[], object]], device: torch.device, *about: object, margin: float = MARGIN
) -> str:
    """The name of the fastest; ways that fail are out, and of two that are close the first is taken. `about` says what
    the measurement depends on besides the device, its threads and PyTorch: with it the answer is remembered."""
    if len(ways) == 1:
        return next(iter(ways))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {os.cpu_count()}"
    text = repr((machine, torch.get_num_threads(), torch.__version__, *ways, *about))
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    known = remembered()
    if known.get(key) not in ways:
        known[key] = measured(ways, device, margin)
        remember(known)
    return known[key]


def measured(ways: Mapping[str, Callable[[], object]], device: torch.device, margin: float = MARGIN) -> str:
    """Warm ways in turn, several times, and the least time of each: what another program takes of the machine for a
    while is taken from all of them."""
    times: dict[str, float] = {}
    for name, way in ways.items():
        with suppress(Exception):  # a kernel that this device cannot run, a module that vmap cannot take
            seconds(way, device)  # compiles, fills caches
            times[name] = math.inf
    if not times:
        return list(ways)[-1]  # the plainest, which shows its own error
    began = time.perf_counter()
    for number in range(PASSES):
        if number >= 2 and time.perf_counter() - began > PATIENCE:
            break
        for name in times:
            times[name] = min(times[name], seconds(ways[name], device))
    best, *others = times
    for name in others:
        if times[name] * margin < times[best]:
            best = name
    return best


def seconds(way: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def remembered() -> dict[str, str]:
    try:
        found = json.loads(place().read_text(encoding="utf-8"))
        return {str(k): str(v) for k, v in found.items()}
    except (OSError, ValueError, AttributeError):  # absent, damaged, or no home: measure again
        return {}


def remember(known: Mapping[str, str]) -> None:
    with suppress(OSError, ValueError):  # read-only, or no home: the next program measures again
        file = place()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(known, indent=0))


def place() -> Path:
    return data_folder() / "measured.json"
