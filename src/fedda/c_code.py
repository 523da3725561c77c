"""Compiles C code on its first use. The result is kept in the data folder."""

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from .data.files import data_folder
from .files import write_whole

FLAGS = ("-O3", "-shared", "-fPIC")
FASTER = ("-march=native",)  # some compilers do not know it
SECONDS = 60.0  # for one compilation, which takes about one
# For an operator that is C code: a function of a tensor for the result and of the arguments, which returns a call that
# computes the result from what these tensors hold then; None if it cannot take them as they are.
WRITERS: dict[Any, Callable[..., Callable[[], None] | None]] = {}
LOCK = threading.Lock()  # two threads would write the same file
COMPILERS: set[subprocess.Popen[bytes]] = set()  # that are at work
ENDING = threading.Event()  # the process ends


@cache
def library(source: str, *options: str) -> ctypes.CDLL | None:
    """The functions of C code, compiled for this processor; None without a C compiler (`cc`, or the variable CC).

    Args:
        source: the code.
        options: for the compiler, such as "-DT=float".
    """
    compiler = compiler_command()
    if not compiler:
        return None
    about = (source, options, compiler, FLAGS, processor())
    name = f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.so"
    with LOCK:
        kept = load_kept(name)
        if kept is not None:
            return kept
        # On some systems a library that is loaded cannot be deleted.
        with suppress(OSError), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            temporary = Path(folder) / name
            if not compiled(temporary, source, options, compiler):
                return None
            with suppress(OSError, ValueError):  # without a folder to keep it in, the next process compiles it again
                (data_folder() / "compiled").mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(data_folder() / "compiled" / name, temporary.read_bytes(), mode=0o700)
            return load_kept(name) or ctypes.CDLL(str(temporary))
    return None


def load_kept(name: str) -> ctypes.CDLL | None:
    """A library from the data folder; None if it is not there, is damaged, or could be someone else's."""
    with suppress(OSError, ValueError):  # ValueError: there is no data folder
        file = (data_folder() / "compiled" / name).resolve(strict=True)
        if trusted(file):
            return ctypes.CDLL(str(file))
    return None


def compiler_command() -> list[str]:
    """The C compiler and its first arguments; empty if there is none."""
    command = shlex.split(os.environ.get("CC", "cc"))
    return command if command and shutil.which(command[0]) else []


def trusted(file: Path) -> bool:
    """Whether only this user and root can change the file or replace it: this depends on all folders above it."""
    if not hasattr(os, "getuid"):
        return True
    for path in (file, *file.parents):
        about = path.stat()
        # Many systems give every user a group of the same number, whose only member is the user.
        others = stat.S_IWOTH if about.st_gid == about.st_uid != 0 else stat.S_IWOTH | stat.S_IWGRP
        sticky = path != file and about.st_mode & stat.S_ISVTX  # as /tmp: nobody can replace the folders of others
        if about.st_uid not in (0, os.getuid()) or (about.st_mode & others and not sticky):
            return False
    return True


def compiled(file: Path, source: str, options: tuple[str, ...], compiler: list[str]) -> bool:
    """Compile C code, and return whether it worked."""
    text = file.with_suffix(".c")
    text.write_text(source, encoding="utf-8")
    for flags in ((*FLAGS, *FASTER), FLAGS):
        code = exit_code([*compiler, *flags, *options, str(text), "-o", str(file), "-lm"])
        if code <= 0:  # done, or killed
            return code == 0
    return False


def exit_code(command: list[str]) -> int:
    """What a compiler returns; below 0 if it was stopped because it took too long or because the process ends."""
    if ENDING.is_set():
        return -1
    none = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=none, stdout=none, stderr=none) as compiler:
        COMPILERS.add(compiler)
        try:
            return compiler.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            compiler.kill()
            COMPILERS.discard(compiler)


@atexit.register
def stop_compilers() -> None:
    """A process that ends waits for no compiler."""
    ENDING.set()
    for compiler in list(COMPILERS):
        compiler.kill()
    LOCK.acquire(timeout=1)  # until its thread has deleted the temporary files


def processor() -> str:
    """The kind of processor: a folder may be shared by machines of several kinds."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()} {platform.processor()}"


def in_background(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread for which a process that ends does not wait."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as why:
            future.set_exception(why)

    threading.Thread(target=call, name="fedda-compiler", daemon=True).start()
    return future


@cache
def pool() -> ThreadPoolExecutor:
    """The threads that run C functions."""
    return ThreadPoolExecutor(thread_name_prefix="fedda-native")


def forget_threads() -> None:
    """A forked process has none of its parent's threads."""
    global LOCK
    LOCK = threading.Lock()
    COMPILERS.clear()
    pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_threads)
