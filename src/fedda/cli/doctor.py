"""`fedda doctor`: what is installed, what this machine has, and what is missing."""

from __future__ import annotations

import platform
import re
import shutil
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .app import app
from .commands import THIS_MACHINE

if TYPE_CHECKING:
    from pathlib import Path

# What the optional packages are for, by the name of their extra.
USES = {
    "report": "report pages and pictures",
    "data": "downloads and folders of images",
    "flower": "federations",
    "docs": "the documentation site, in a checkout",
    "privacy": "noise and its accounting",
    "tables": "Parquet files and pandas",
    "onnx": "models for ONNX Runtime",
    "tensorboard": "--track tensorboard",
    "mlflow": "--track mlflow",
    "wandb": "--track wandb",
}


@app.command(rich_help_panel=THIS_MACHINE, epilog="Example: fedda doctor")
def doctor() -> None:
    """Show versions, devices, the data folder and the optional packages, and how to get what is missing."""
    import numpy as np
    import torch

    from .. import __version__
    from ..data.files import data_folder
    from ..experiments.execution import processors

    print(f"fedda    {__version__}, Python {platform.python_version()}")
    print(f"torch    {torch.__version__}, numpy {np.__version__}")
    print(f"system   {platform.platform()}")
    print(f"cpu      {processors()} processors, {torch.get_num_threads()} threads")
    for line in gpus() or ["none that torch can use"]:
        print(f"gpu      {line}")
    print(f"triton   {triton()}")
    print(f"compiler {compiler()}")
    print(f"flower   {version('flwr') or 'not installed'}")
    print(f"data     {data_state(data_folder())}; FEDDA_DATA names another folder")
    for extra, packages in extras().items():
        absent = [name for name in packages if version(name) is None]
        state = f"needs {', '.join(absent)}: pip install 'fedda[{extra}]'" if absent else "installed"
        print(f"extra    {extra}{f' ({USES[extra]})' if extra in USES else ''}: {state}")


def gpus() -> list[str]:
    """A line for each GPU that torch can use."""
    import torch

    lines = []
    for i in range(torch.cuda.device_count()):
        own = torch.cuda.get_device_properties(i)
        lines.append(f"cuda:{i} {own.name}, {own.total_memory / 2**30:.0f} GB, capability {own.major}.{own.minor}")
    if torch.backends.mps.is_available():
        lines.append("mps, which fedda is not tested on")
    return lines


def triton() -> str:
    """Whether the kernels for GPUs can be compiled."""
    if find_spec("triton") is not None:
        return f"{version('triton') or 'installed'}, for the kernels on a GPU"
    return "not installed: on a GPU, gradients take a slower path; pip install triton (Linux)"


def compiler() -> str:
    """The C compiler, which the fastest path on a CPU needs, and Triton on a GPU."""
    from ..c_code import compiler_command

    command = compiler_command()
    if command:
        return shutil.which(command[0]) or command[0]
    return "no C compiler: gradients take slower paths; install gcc or clang as `cc`, or set CC"


def data_state(folder: Path) -> str:
    """The data folder, and whether files can be written there."""
    if folder.is_dir():
        return str(folder)
    return f"{folder} (not there yet: `fedda data fetch` makes it)"


def extras() -> dict[str, list[str]]:
    """The optional packages of fedda by the name of their group; none if fedda runs from its source, not installed."""
    groups: dict[str, list[str]] = {}
    for line in (metadata.requires("fedda") or ()) if version("fedda") else ():
        match = re.match(r"([\w.-]+).*;.*extra == [\"']([\w-]+)[\"']", line)
        if match and match[1] != "fedda" and match[2] not in ("dev", "all"):
            groups.setdefault(match[2], []).append(match[1])
    return groups


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
