"""`fedda doctor`: versions, devices, folders and optional packages."""

import platform
import re
from importlib import metadata

from .app import app


@app.command(epilog="Example: fedda doctor")
def doctor() -> None:
    """Show what is installed: versions, devices, threads, the data folder, and the optional packages."""
    import numpy as np
    import torch

    from .. import __version__
    from ..data.files import data_folder
    from ..experiments.execution import processors

    print(f"fedda    {__version__}, Python {platform.python_version()}")
    print(f"torch    {torch.__version__}, numpy {np.__version__}")
    print(f"system   {platform.platform()}")
    print(f"cpu      {processors()} processors, {torch.get_num_threads()} threads")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"gpu      {', '.join(names) or 'none that torch can use'}")
    folder = data_folder()
    print(f"data     {folder}{'' if folder.is_dir() else ' (not there yet)'}; FEDDA_DATA names another folder")
    for extra, packages in extras().items():
        absent = [name for name in packages if not is_installed(name)]
        state = f"needs {', '.join(absent)}: pip install 'fedda[{extra}]'" if absent else "installed"
        print(f"extra    {extra}: {state}")


def extras() -> dict[str, list[str]]:
    """The optional packages of fedda by the name of their group; none if fedda runs from its source, not installed."""
    found: dict[str, list[str]] = {}
    for line in (metadata.requires("fedda") or ()) if is_installed("fedda") else ():
        match = re.match(r"([\w.-]+).*;.*extra == [\"']([\w-]+)[\"']", line)
        if match and match[2] != "dev":
            found.setdefault(match[2], []).append(match[1])
    return found


def is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
