"""C code of the package: compiled once, kept, trusted only if nobody else can write it, and not needed."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedda
from conftest import stable
from fedda import c_code
from fedda.engines import Vectorised
from fedda.problems.gradients.chain import native
from fedda.problems.gradients.chain.native import SOURCE, TYPES

library = c_code.library.__wrapped__  # without its memory of this process
FLOAT = TYPES[torch.float32]


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "compiled"


@pytest.fixture
def compilations(monkeypatch):
    """The commands that were run."""
    start, commands = subprocess.Popen, []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: commands.append(command) or start(command, **how))
    return commands


def test_the_code_is_compiled_once_and_kept(folder, compilations):
    assert library(SOURCE, *FLOAT).lanes() == 2 * library(SOURCE, *TYPES[torch.float64]).lanes()
    assert len(compilations) == 2 and library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 2
    assert sorted(path.suffix for path in folder.iterdir()) == [".so", ".so"]  # nothing else is left
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.iterdir()))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_a_library_that_others_can_write_is_compiled_anew(folder, compilations):
    library(SOURCE, *FLOAT)
    (file,) = folder.iterdir()
    file.unlink()  # this process has the old one in its memory
    file.write_bytes(b"something else")
    file.chmod(0o722)
    assert library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 2
    assert file.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_library_in_a_folder_that_others_can_write_is_compiled_anew(folder, compilations, level):
    library(SOURCE, *FLOAT)
    (folder / "file").parents[level].chmod(0o777)
    assert library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 2


def test_in_a_folder_like_tmp_nobody_can_replace_it(folder, compilations):
    library(SOURCE, *FLOAT)
    folder.parent.chmod(0o1777)
    assert library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 1


def test_a_damaged_library_is_compiled_anew(folder, monkeypatch, tmp_path, compilations):
    library(SOURCE, *FLOAT)
    (file,) = folder.iterdir()
    damaged = tmp_path / "other" / "compiled" / file.name  # this process has the first one in its memory
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(file.read_bytes()[:100])
    damaged.chmod(0o700)
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "other"))
    assert library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 2
    assert damaged.read_bytes() == file.read_bytes()


def test_other_code_options_and_processors_have_other_files(folder, monkeypatch):
    for number in (1, 2):
        assert library(f"int answer(void) {{ return {number}; }}").answer() == number
        assert library("int answer(void) { return N; }", f"-DN={number}").answer() == number
    monkeypatch.setattr(c_code, "processor", lambda: "another")
    library("int answer(void) { return 1; }")
    assert len(list(folder.iterdir())) == 5


def test_without_a_folder_it_is_compiled_for_this_process(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "file"))  # not a folder
    assert library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 1


def test_a_compiler_that_does_not_know_this_processor_is_asked_again(monkeypatch, tmp_path, compilations):
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$*" in *-march=native*) exit 1;; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    monkeypatch.setenv("CC", str(old))
    assert library(SOURCE, *FLOAT).lanes() >= 4 and len(compilations) == 2


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler", ""])
def test_without_a_compiler_there_is_no_library(monkeypatch, folder, compiler):
    monkeypatch.setenv("CC", compiler)
    assert library(SOURCE, *FLOAT) is None
    assert not folder.exists() or not list(folder.iterdir())


def test_a_compiler_that_hangs_is_given_up(monkeypatch, tmp_path, compilations):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(c_code, "SECONDS", 0.2)
    assert library(SOURCE, *FLOAT) is None and len(compilations) == 1


SLOW = """
from fedda import c_code
future = c_code.in_background(lambda: c_code.library("int f(void) { return 1; }"))
while not c_code.COMPILERS:
    pass
print(future.done(), flush=True)
"""


def test_a_process_that_ends_waits_for_no_compiler_and_leaves_nothing(tmp_path):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 50\n")
    slow.chmod(0o755)
    (scratch := tmp_path / "scratch").mkdir()
    variables = os.environ | {"CC": str(slow), "TMPDIR": str(scratch)}
    done = subprocess.run([sys.executable, "-c", SLOW], env=variables, capture_output=True, timeout=40, check=True)
    assert done.stdout == b"False\n" and not done.stderr and not list(scratch.iterdir())


def test_a_process_forked_in_a_compilation_can_compile():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with c_code.LOCK:  # another thread is at it
        child = context.Process(target=lambda: queue.put(library(SOURCE, *FLOAT) is not None))
        child.start()
        assert queue.get(timeout=60)
    child.join()


@pytest.mark.parametrize("script", ["exit 0", 'shift $(($# - 2)); touch "$1"', 'exec cc -fvisibility=hidden "$@"'])
def test_a_compiler_that_makes_no_library_is_none(monkeypatch, tmp_path, script):
    """It writes nothing, an empty file, or a library without functions."""
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setattr(native, "library", library)
    assert convolution().chain.native(torch.float64) is None


def convolution():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(80, 1, 6, 6, generator=g, dtype=torch.float64)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)
    ).double()
    return fedda.problem(model, F.cross_entropy, x=x, y=torch.arange(80) % 3, client=torch.arange(80) % 4, batch=5)


@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "scaffold"])
def test_rounds_by_c_code_equal_the_loop_over_clients(name):
    problem, algorithm = convolution(), stable(name)
    runs = [
        fedda.train(algorithm, problem, rounds=3, cohort=3, seed=[0, 1], engine=engine)
        for engine in ("sequential", Vectorised(path="native"), Vectorised(path="native", chunk=2))
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.x, runs[0].x, rtol=1e-12, atol=1e-12)


def test_a_problem_without_a_compiler_has_its_other_paths(monkeypatch):
    monkeypatch.setattr(native, "library", lambda *_: None)
    problem = convolution()
    assert list(problem.with_path("auto", "auto", 4).gradient_paths.paths) == ["chain", "traced", "loop"]
    with pytest.raises(ValueError, match=r"^Vectorised: path 'native' does not fit.*these do: chain, traced, loop$"):
        problem.with_path("native", "auto", 4)


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    problem = convolution()
    way, (x, batch) = problem.chain.native(torch.float64), problem.example(4)
    before = way.gradients(x, batch.x, batch.y)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(way.gradients(x, batch.x, batch.y).numpy()))
    child.start()
    assert torch.from_numpy(queue.get(timeout=60)).equal(before)
    child.join()


def test_an_interrupted_call_leaves_threads_with_memory_of_their_own(monkeypatch):
    """Ctrl-C ends the wait for the threads, not the threads."""
    monkeypatch.setattr(native, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    problem = convolution()
    way, (x, batch) = problem.chain.native(torch.float64), problem.example(4)
    before = way.gradients(x, batch.x, batch.y)
    way.free.clear()
    go_on, at_work, done = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def part(memory, first, end):
        at_work.release()
        go_on.wait(60)
        done.release()

    class Interrupted:
        def map(self, run, *arguments):
            for each in zip(*arguments, strict=True):
                threading.Thread(target=run, args=each).start()
            at_work.acquire()
            at_work.acquire()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native, "pool", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            way.divide(part, 2, 1, 2)
    assert not way.free  # both are in use
    assert way.gradients(x, batch.x, batch.y).equal(before)
    go_on.set()
    assert done.acquire(timeout=60) and done.acquire(timeout=60)


def test_several_callers_at_once():
    problem = convolution()
    way, (x, batch) = problem.chain.native(torch.float64), problem.example(4)
    before = way.gradients(x, batch.x, batch.y)
    with ThreadPoolExecutor(8) as callers:
        for got in callers.map(lambda _: way.gradients(x, batch.x, batch.y), range(200)):
            assert got.equal(before)
    assert len({memory.data_ptr() for memory in way.free}) == len(way.free) <= 8


def test_there_is_a_compiler_here():
    """Otherwise the tests above would say little."""
    assert shutil.which("cc")
