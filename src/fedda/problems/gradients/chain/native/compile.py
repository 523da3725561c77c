"""Compiles C code of this package on its first use. The result is kept in the data folder."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from .....data.files import data_folder
from .....files import write_whole

FLAGS = ("-O3", "-shared", "-fPIC")
FASTER = ("-march=native",)  # some compilers do not know it
SECONDS = 120.0  # for one compilation, which takes about one


@cache
def library(source: Path, *definitions: str) -> ctypes.CDLL | None:
    """The functions of a C file, compiled for this processor; None without a C compiler (`cc`, or the variable CC).

    Args:
        source: the file.
        definitions: values of its macros, such as "T=float".
    """
    compiler = compiler_command()
    if not compiler:
        return None
    about = (source.read_text(encoding="utf-8"), definitions, compiler, FLAGS, processor())
    name = f"{source.stem}-{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}.so"
    with suppress(OSError, ValueError):  # ValueError: there is no data folder
        file = data_folder() / "compiled" / name
        if trusted(file):
            return ctypes.CDLL(str(file))
    with suppress(OSError), tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / name
        if not compiled(temporary, source, definitions, compiler):
            return None
        with suppress(OSError, ValueError):  # without a folder to keep it in, the next process compiles it again
            (data_folder() / "compiled").mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(data_folder() / "compiled" / name, temporary.read_bytes(), mode=0o700)
        return ctypes.CDLL(str(temporary))
    return None


def compiler_command() -> list[str]:
    """The C compiler and its first arguments; empty if there is none."""
    command = shlex.split(os.environ.get("CC", "cc"))
    return command if command and shutil.which(command[0]) else []


def trusted(file: Path) -> bool:
    """Whether the file is there, and only this user can write it."""
    if not file.exists():
        return False
    about = file.stat()
    return not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)


def compiled(file: Path, source: Path, definitions: tuple[str, ...], compiler: list[str]) -> bool:
    """Compile a C file, and return whether it worked."""
    for flags in ((*FLAGS, *FASTER), FLAGS):
        command = [*compiler, *flags, *(f"-D{text}" for text in definitions), str(source), "-o", str(file), "-lm"]
        with suppress(subprocess.TimeoutExpired):
            if subprocess.run(command, capture_output=True, timeout=SECONDS, check=False).returncode == 0:
                return True
    return False


def processor() -> str:
    """The kind of processor: a folder may be shared by machines of several kinds."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"
