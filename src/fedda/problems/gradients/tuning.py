"""The fastest of several ways to do the same thing, measured once on this machine and kept in the data folder."""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from ...capturing import captured, no_synchronisation
from ...data.files import data_folder
from ...files import write_whole

MARGIN = 1.1  # a later way must be faster by this factor: a choice that flickers would change the last bits of a run
PASSES, PATIENCE = 7, 0.5  # passes over all ways, and the seconds after which no further pass begins
STACK = 2_000_000  # numbers in the stack on which threads are measured; a larger stack gives the same answer
# All threads must be faster than one by this factor: on a busy machine they wait for each other and can be much slower.
THREADS_MARGIN = 1.3
Ways = Mapping[str, Callable[[], object]]


def autotune(ways: Ways, device: torch.device, *about: object, margin: float = MARGIN) -> str:
    """The name of the fastest way. A way that fails is ignored; of two that are close, the first is taken. The choice
    is kept for this device, number of threads, version of PyTorch, and `about`, which describes the measurement."""
    if len(ways) == 1:
        return next(iter(ways))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {os.cpu_count()}"
    text = repr((machine, torch.get_num_threads(), torch.__version__, *ways, *about))
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    chosen = load_choices().get(key, "")
    if chosen in ways:
        return chosen
    name = measure(ways, device, margin)
    choices = load_choices()  # again: another program may have measured meanwhile, and both should choose the same
    if choices.get(key) not in ways:
        choices[key] = name
        save_choices(choices)
    return choices[key]


def measure(ways: Ways, device: torch.device, margin: float = MARGIN) -> str:
    """The fastest by its shortest time over several passes. The ways take turns, so that all of them suffer if other
    programs use the machine for a while."""
    times: dict[str, float] = {}
    for name, way in ways.items():
        with suppress(Exception):  # a kernel that this device cannot run, or a module that fails under vmap
            seconds(way, device)  # compiles and fills caches
            times[name] = math.inf
    if not times:
        return list(ways)[-1]  # its error will be raised when it is used
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


def replayed(way: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same as rounds run it: its first call captures it as a CUDA graph, and later calls replay that. Kernels that
    are launched one by one wait for the host, which says nothing about a round. What cannot be captured runs as it is.
    """
    if device.type != "cuda":
        return way
    later: list[Callable[[], object]] = []

    def run() -> object:
        if not later:
            way()  # compiles
            try:
                with no_synchronisation():
                    way()
                graph = torch.cuda.CUDAGraph()
                with captured(graph, device):
                    way()
                later.append(graph.replay)
            except Exception:  # it waits for the device, or an operation refuses
                torch.cuda.synchronize(device)
                later.append(way)
        return later[0]()

    return run


def seconds(way: Callable[[], object], device: torch.device) -> float:
    """The time of one call, including the work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use this number of threads in PyTorch inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measured_threads(problem: Any, stack: int) -> int:
    """One thread or all, whichever computes the gradients of a stack of models faster."""
    most = torch.get_num_threads()
    paths = problem.gradient_paths
    if most == 1 or problem.device.type != "cpu" or paths is None:
        return most
    n = max(1, min(stack, STACK // problem.d))
    x, batch = problem.example(n)

    def gradients(number: int) -> None:
        with threads(number):
            problem.gradients(x[None], batch)

    ways = {str(number): lambda number=number: gradients(number) for number in (1, most)}
    about = (problem.model, n, problem.data.x.shape[1:], problem.batch_size, problem.dtype, paths.chosen)
    return int(autotune(ways, problem.device, "threads", *about, margin=THREADS_MARGIN))


def load_choices() -> dict[str, str]:
    try:
        choices = json.loads(choices_file().read_text(encoding="utf-8"))
        return {str(k): str(v) for k, v in choices.items()}
    except (OSError, ValueError, AttributeError):  # absent, damaged, or no data folder: measure again
        return {}


def save_choices(choices: Mapping[str, str]) -> None:
    with suppress(OSError, ValueError):  # read-only, or no data folder: the next program measures again
        file = choices_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(choices, indent=0))


def choices_file() -> Path:
    return data_folder() / "measured.json"
