"""The command line as a user starts it, and experiments small enough to run in a second."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import fedda as package
from fedda.cli import app as cli
from fedda.runs.toml import dumps
from warm import PREPARE, Warm

SOURCE = Path(package.__file__).parents[1]  # the source that is tested: a mutant too
UNHURRIED = Path(__file__).parent / "unhurried.py"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": "1",
    "TERM": "xterm",
    "COLUMNS": "100",
}
FORKS = hasattr(os, "fork")
# What is read when it is needed, and not at the start of a process.
LATE = ("FEDDA_DATA", "HTTPS_PROXY", "PATH", PREPARE)
WARM = []
# What commands import when they need it, PyTorch's compiler among it: once, and not in each of the forked processes.
IMPORTED = [
    "fedda.cli", "fedda.algorithms", "fedda.claims", "fedda.experiments", "fedda.report", "fedda.theory.advice",
    "matplotlib.pyplot", "safetensors.torch", "sklearn.datasets", "torch._dynamo", "torch.distributed",
]  # fmt: skip


def tiny(**changes):
    """A valid experiment as a table: two algorithms, two seeds, logistic regression."""
    table = {
        "name": "tiny",
        "rounds": 6,
        "every": 2,
        "seeds": [0, 1],
        "problem": {"data": "breast-cancer", "clients": 4, "model": "logistic", "batch": 4},
        "algorithms": {"fedavg": {"lr": 0.1}, "fedda-mvr": {"lr": 0.1, "w": 1000.0}},
    }
    return table | changes


def write(path, **changes):
    path.write_text(dumps(tiny(**changes)), encoding="utf-8")
    return path


def command(*words):
    return [sys.executable, "-m", "fedda", *map(str, words)]


def warm():
    """The process that is forked for commands, one for all tests of this process."""
    if not WARM:
        WARM.append(Warm(ENVIRONMENT, *IMPORTED))
    return WARM[0]


def fedda(*words, **how):
    """Run to the end in a process of its own: a forked one, unless it is asked for what only a new one has."""
    same = ENVIRONMENT | {k: v for k, v in how.get("env", {}).items() if k in LATE}
    if FORKS and set(how) <= {"cwd", "env", "timeout"} and how.get("env", same) == same:
        return warm().run(["fedda", *words], **how)
    return started(*words, **how)


def started(*words, **how):
    """The same in a new process, from the first line of Python on."""
    how = {"capture_output": True, "text": True, "timeout": 600, "env": ENVIRONMENT} | how
    return subprocess.run(command(*words), **how)


def begin(*words, **how):
    """Start a process of its own, one that can be met in a round: a forked one, unless it has streams of its own."""
    words = [sys.executable, str(UNHURRIED), *map(str, words)]
    if FORKS and set(how) <= {"cwd"}:
        return warm().start(words, **how)
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT} | how
    return subprocess.Popen(words, **how)


def is_one_line(stderr, *fragments):
    """One clear line, with these words in it."""
    assert stderr.startswith("fedda: ") and stderr.endswith("\n") and stderr.count("\n") == 1, stderr
    for fragment in fragments:
        assert fragment in stderr, stderr


def inside(capsys, monkeypatch, *words):
    """The same in this process, for what needs none of its own: exit status, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["fedda", *map(str, words)])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main sets its own
    monkeypatch.setattr(cli, "PRINTED", set())
    capsys.readouterr()
    with warnings.catch_warnings(), pytest.raises(SystemExit) as end:
        warnings.simplefilter("always")
        cli.main()
    return end.value.code or 0, *capsys.readouterr()
