"""Processes that begin with everything imported: one process imports PyTorch and fedda once, and forks for each command.

A forked process has its own number, working directory, environment, streams and exit status, as a new one has. What it
has not is four seconds of imports. The process that forks has one thread and never runs anything itself, so that forking
is safe and no command sees what another has left.

    python warm.py    reads requests from stdin, a line of JSON each, and answers each with a line on stdout
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from pathlib import Path

HERE = Path(__file__).parent


class Warm:
    """The one who asks. `run` is like subprocess.run with captured text."""

    def __init__(self, environment: dict[str, str]):
        self.environment, self.process = environment, None

    def run(self, words, code=None, cwd=None, env=None, timeout=600):
        """`fedda WORDS`, or the program `code`, to its end."""
        if self.process is None or self.process.poll() is not None:
            pipe = subprocess.PIPE
            command = [sys.executable, str(HERE / "warm.py")]
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self.environment)
            atexit.register(self.process.kill)
        with tempfile.TemporaryDirectory() as place:
            asked = {"words": list(map(str, words)), "code": code, "cwd": str(cwd or os.getcwd()), "place": place}
            asked |= {"env": dict(env or self.environment), "timeout": timeout}
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            status = json.loads(self.process.stdout.readline())
            out, err = ((Path(place) / name).read_text() for name in ("out", "err"))
        if status is None:
            raise subprocess.TimeoutExpired(["fedda", *words], timeout, out, err)
        return subprocess.CompletedProcess(["fedda", *words], status, out, err)


def child(asked) -> int:
    """Run the command in this process, which was forked for it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.path[0] = ""  # where `python -m` and `python -c` look first
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(f"{asked['place']}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if asked["code"] is None:
            from fedda.cli import main as fedda

            sys.argv = ["fedda", *asked["words"]]
            fedda()
        else:
            sys.argv = ["-c"]
            exec(compile(asked["code"], "<string>", "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def ended(pid: int, seconds: float) -> int | None:
    """The exit status of a child; None for one that has not ended in time."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def serve() -> None:
    import matplotlib.pyplot  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch

    import fedda.cli  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else is to be read as an answer
    # Nothing of this process runs at the end of a child.
    atexit._clear()
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = child(asked)
            finally:
                os._exit(code)
        answers.write(json.dumps(ended(pid, asked["timeout"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
