"""Processes that begin with everything imported: one process imports PyTorch and fedda once, and forks for each command.

A forked process has its own number, working directory, environment, streams and exit status, as a new one has. What it
has not is four seconds of imports. The process that forks has one thread and never runs anything itself, so that forking
is safe and no command sees what another has left.

A program that starts others itself (torchrun, Flower's) gets a forking process of its own before it begins, since it has
threads later. What it starts is forked there.

    python warm.py MODULE ...                      imports them, reads requests from stdin, answers each with a line
    python warm.py MODULE ... --at PLACE           the same for shell scripts: they ask at a socket
    python warm.py --ask PLACE PROGRAM WORD ...    what a script then calls in place of the program
"""

import atexit
import ctypes
import importlib
import json
import os
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
PREPARE = "FEDDA_TEST_PREPARE"  # a variable that names a module whose `prepare` forked commands call first
STARTERS = {"torch.distributed.run", "flower-superlink", "flower-supernode", "flower-superexec"}
FORKED = {"fedda", "flwr", "flwr-clientapp", "flwr-serverapp", *STARTERS}
STANDS_IN = Path("/proc/self/ns/net").exists()  # whether a program can stand in for another: see `ask`


class Forker:
    """The side that asks; `reader` and `writer` lead to the process that forks."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def ask(self, **request):
        self.writer.write(json.dumps(request) + "\n")
        self.writer.flush()
        return json.loads(self.reader.readline())

    def fork(self, command, env=None, cwd=None, out=None, err=None, start_new_session=False):
        """Start a command: `fedda`, one of Flower's programs, or Python's path with `-c`, `-m` or a file."""
        how = {"env": dict(os.environ if env is None else env), "cwd": str(cwd or os.getcwd()), "out": out, "err": err}
        pid = self.ask(command=list(map(str, command)), session=start_new_session, **how)
        return Forked(self, command, pid, out, err)


class Warm(Forker):
    """A process of its own that has imported `modules`; `prefix` is what starts it, in another network for example."""

    def __init__(self, environment: dict[str, str], *modules: str, prefix=()):
        self.environment, self.process = environment, None
        self.command = [*prefix, sys.executable, str(HERE / "warm.py"), *modules]

    def ask(self, **request):
        if self.process is None or self.process.poll() is not None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, env=self.environment)
            self.reader, self.writer = self.process.stdout, self.process.stdin
            atexit.register(self.process.kill)
        return super().ask(**request)

    def start(self, command, env=None, **how):
        """Like subprocess.Popen with captured text."""
        folder = tempfile.mkdtemp()
        out, err = (f"{folder}/{name}" for name in ("out", "err"))
        how = {"out": out, "err": err} | how
        for file in (how["out"], how["err"]):
            Path(file).touch()
        process = self.fork(command, env or self.environment, **how)
        weakref.finalize(process, shutil.rmtree, folder, ignore_errors=True)
        return process

    def run(self, command, timeout=600, **how):
        """Like subprocess.run with captured text."""
        process = self.start(command, **how)
        try:
            out, err = process.communicate(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


class Forked:
    """What subprocess.Popen has, for a process that another process has forked."""

    def __init__(self, forker: Forker, command, pid: int, out, err):
        self.forker, self.args, self.pid, self.files, self.returncode = forker, command, pid, (out, err), None

    def poll(self):
        if self.returncode is None:
            self.returncode = self.forker.ask(pid=self.pid)
        return self.returncode

    def wait(self, timeout=float("inf")):
        deadline, pause = time.monotonic() + timeout, 0.005
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(pause)
            pause = min(0.05, pause * 1.5)
        return self.returncode

    def communicate(self, timeout=float("inf")):
        self.wait(timeout)
        return tuple(Path(file).read_text() for file in self.files)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@contextmanager
def standing_in(folder: Path, programs: dict[str, list[str]], environment: dict[str, str], *modules: str):
    """Programs for shell scripts, in a folder: each is a name and the words it stands for. One process that has imported
    `modules` forks for all of them."""
    ask = shlex.join([sys.executable, "-S", __file__, "--ask", str(folder / "door")])
    for name, words in programs.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {ask} {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o755)
    listening = [sys.executable, __file__, *modules, "--at", str(folder / "door")]
    with subprocess.Popen(listening, env=environment) as process:
        try:
            yield
        finally:
            process.kill()


# -- the side that forks ------------------------------------------------------------------------------------------------
def serve(reader, writer) -> None:
    """Fork for each request, until nobody can ask any more."""
    ended: dict[int, int] = {}
    for line in reader:
        request = json.loads(line)
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])
        if "pid" in request:
            answer = ended.get(request["pid"])
        elif not (answer := os.fork()):
            code = 70
            try:
                reader.close()
                writer.close()
                code = child(request)
            finally:
                os._exit(code)
        writer.write(json.dumps(answer) + "\n")
        writer.flush()


def within(place: str, call) -> None:
    """Call with a short name, from its folder: the path of a socket has at most 107 characters."""
    here = os.getcwd()
    os.chdir(Path(place).parent)
    try:
        call(Path(place).name)
    finally:
        os.chdir(here)


def listen(place: str) -> None:
    """Fork for each connection, until this process is killed."""
    with socket.socket(socket.AF_UNIX) as door:
        within(place, door.bind)
        door.listen()
        while True:
            line, _ = door.accept()
            with line, suppress(ChildProcessError):
                if not os.fork():
                    door.close()
                    keep(line)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def keep(line: socket.socket) -> None:
    """Run what the other side asks for in a process of its own, say its number, wait for its end and say how it was."""
    code = 70
    try:
        with line.makefile("rw") as words:
            request = json.loads(words.readline())
            if not (pid := os.fork()):
                try:
                    line.close()
                    code = child(request)
                finally:
                    os._exit(code)
            words.write(f"{pid}\n")
            words.flush()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            words.write(f"{code}\n")
    finally:
        os._exit(0)


def ask(place: str, *command: str, seconds: float = 300.0) -> int:
    """Have a program run by the process that listens, as if it ran here: its streams, network, signals and exit
    status."""
    deadline = time.monotonic() + seconds
    line = socket.socket(socket.AF_UNIX)
    while True:
        try:
            within(place, line.connect)
            break
        except OSError:  # it is still importing
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    umask = os.umask(0)  # there is no other way to read it
    request = {"command": command, "session": False, "env": dict(os.environ), "cwd": os.getcwd(), "umask": umask}
    here = f"/proc/{os.getpid()}"
    request |= {"out": f"{here}/fd/1", "err": f"{here}/fd/2", "network": f"{here}/ns/net"}
    with line.makefile("rw") as words:
        words.write(json.dumps(request) + "\n")
        words.flush()
        pid = int(words.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(words.readline())
    return code if code >= 0 else 128 - code


def move(network: str) -> None:
    """Into this network, where this process is not in it already."""
    if os.stat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        with open(network) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)


def child(request) -> int:
    """Run the command in this process, which was forked for it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request.get("network"):
        move(request["network"])
    if "umask" in request:
        os.umask(request["umask"])
    sys.path[1:1] = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    sys.stdin = open(os.devnull)  # noqa: SIM115
    for name, number in (("out", 1), ("err", 2)):
        if request[name]:
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
    sys.modules["__main__"] = types.ModuleType("__main__")
    if STARTERS & set(request["command"][:3]):
        nested()
    elif os.environ.get(PREPARE):
        importlib.import_module(os.environ[PREPARE]).prepare()
    try:
        execute(*request["command"])
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


def execute(program, *words) -> None:
    """What Python does with these words."""
    if program != sys.executable:
        sys.argv = [program, *words]
        if program == "fedda":
            from fedda.cli import main
        else:
            (entry,) = metadata.entry_points(group="console_scripts", name=program)
            main = entry.load()
        main()
        return
    words = [word for word in words if word != "-u"]
    sys.path[0] = ""  # where `python -m` and `python -c` look first
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def nested() -> None:
    """Fork what this program starts too, from a process that is as this one is now."""
    here, there = socket.socketpair()
    if os.fork() == 0:
        here.close()
        try:
            with there.makefile("r") as reader, there.makefile("w") as writer:
                serve(reader, writer)
        finally:
            os._exit(0)
    there.close()
    forker, popen = Forker(here.makefile("r"), here.makefile("w")), subprocess.Popen

    def started(args, *, env=None, start_new_session=False, stdout=None, stderr=None, **how):
        if how or args[0] not in FORKED | {sys.executable}:
            how |= {"env": env, "start_new_session": start_new_session, "stdout": stdout, "stderr": stderr}
            return popen(args, **how)
        out, err = (os.devnull if stream == subprocess.DEVNULL else None for stream in (stdout, stderr))
        return forker.fork(args, env, None, out, err, start_new_session)

    for module in list(sys.modules.values()):
        if vars(module).get("Popen") is popen:
            module.Popen = started


def main(words: list[str]) -> None:
    if words[0] == "--ask":
        sys.exit(ask(*words[1:]))
    import torch

    cut = words.index("--at") if "--at" in words else len(words)
    for module in words[:cut]:
        importlib.import_module(module)
    torch.set_num_threads(1)
    # Nothing of this process runs at the end of a child.
    atexit._clear()
    if cut < len(words):
        listen(words[cut + 1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else is to be read as an answer
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
