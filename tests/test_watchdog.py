"""A test run that is stopped or killed leaves no process and no network behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import watchdog

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

SLEEPERS = """
import os, subprocess, time
from pathlib import Path
from namespaces import Namespace

def test_that_starts_processes_and_waits():
    network = Namespace()
    # A session of its own, and a grandchild whose parent has ended: what nobody finds by its parents.
    words = ["sh", "-c", "sleep 1000 & sleep 1000 & wait"]
    child = subprocess.Popen([*network.prefix, *words], start_new_session=True)
    orphan = subprocess.Popen(["sh", "-c", "sleep 1000 &"], start_new_session=True)
    orphan.wait()
    Path("begun.new").write_text(f"{os.getpid()} {os.environ['FEDDA_TEST_RUN']} {network.name}")
    os.rename("begun.new", "begun")
    time.sleep(1000)
"""
FEDERATION = """
import os, time
from pathlib import Path
from flowers import Flowers

def test_that_opens_a_federation_and_waits(tmp_path):
    flowers = Flowers(tmp_path / "here")
    flowers.open(1)
    flowers.wait_for(tmp_path / "here" / "link.log", "Activated node_id")
    Path("begun.new").write_text(f"{os.getpid()} {os.environ['FEDDA_TEST_RUN']} {flowers.network.name}")
    os.rename("begun.new", "begun")
    time.sleep(1000)
"""


@pytest.fixture
def begun(tmp_path):
    """Start pytest on a file of tests, as the user does; wait until the test in it has started its processes."""
    processes = []

    def begin(text, *words):
        (tmp_path / "conftest.py").write_text("import watchdog\nwatchdog.watch()\n")
        (tmp_path / "test_inner.py").write_text(text)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "--basetemp=t", "."]
        out = open(tmp_path / "log", "w")  # noqa: SIM115
        how = {"stdout": out, "stderr": out, "env": environment, "cwd": tmp_path, "start_new_session": True}
        processes.append(subprocess.Popen(command, **how))
        wait(lambda: (tmp_path / "begun").exists(), lambda: (tmp_path / "log").read_text())
        worker, mark, network = (tmp_path / "begun").read_text().split()
        # Else the test of their end says nothing. A process that has just been started may not have its mark yet.
        wait(lambda: len(watchdog.marked(mark)) >= 3, lambda: (tmp_path / "log").read_text())
        return processes[-1], int(worker), mark, network

    yield begin
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(true, why, seconds=120):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def networks():
    if shutil.which("ip") is None:
        return []
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    return [line.split()[0] for line in found if line]


def nothing_is_left(mark, network):
    wait(lambda: not watchdog.marked(mark), lambda: f"still there: {watchdog.marked(mark)}")
    wait(lambda: network not in networks(), lambda: f"still there: {network}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_run_that_is_ended(begun, number):
    process, _, mark, network = begun(SLEEPERS)
    process.send_signal(number)
    process.wait(60)
    nothing_is_left(mark, network)


@pytest.mark.parametrize("whom", ["worker", "controller", "everybody, by Ctrl-C"])
def test_nothing_is_left_of_workers(begun, whom):
    process, worker, mark, network = begun(SLEEPERS, "-n", "1", "--max-worker-restart=0")
    assert worker != process.pid
    if whom == "worker":
        os.kill(worker, signal.SIGKILL)
    elif whom == "controller":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    nothing_is_left(mark, network)
    wait(lambda: not Path(f"/proc/{worker}").exists(), lambda: f"the worker {worker} is still there")


def test_nothing_is_left_of_a_federation(begun):
    pytest.importorskip("flwr", reason="needs fedda[flower]")
    process, _, mark, network = begun(FEDERATION)
    process.kill()
    nothing_is_left(mark, network)
