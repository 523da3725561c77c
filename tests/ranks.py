"""Real processes joined by gloo, for tests: `spawn` starts a program on so many ranks and waits for all of them."""

import os
import random
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

from commands import FORKS, warm

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}


def free_port():
    """A port for a process that binds it in some seconds: below those that the kernel deals out, which others have by then."""
    drawn = random.SystemRandom()
    while True:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", drawn.randrange(15_000, 32_000)))
            except OSError:  # taken
                continue
            return s.getsockname()[1]


def spawn(world, *command, seconds=600, forked=True, **environment):
    """Exit codes and outputs of all ranks. They are forked from a process that has imported everything, or new."""
    port, command = str(free_port()), [sys.executable, *map(str, command)]
    pipe, processes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}, []
    for rank in range(world):
        env = ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} | environment
        env |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        start = warm().start if forked and FORKS else partial(subprocess.Popen, **pipe)
        processes.append(start(command, env=env))
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def fine(results):
    """The outputs, of ranks that have all ended well."""
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, f"rank {rank} ended with {code}:\n{out}\n{err}"
    return [out for _, out, _ in results]
