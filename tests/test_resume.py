"""A run that was stopped, killed or ran out of disk goes on to the same bytes."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from safetensors.torch import load_file

from commands import ENVIRONMENT, begin, command, fedda, inside, is_one_line, write

ROUNDS = 168


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happened to: its file and its folder."""
    place = tmp_path_factory.mktemp("whole")
    file = write(place / "tiny.toml", rounds=ROUNDS, every=7)
    done = fedda("run", file, "--out", place / "run")
    assert done.returncode == 0, done.stderr
    return file, place / "run"


@pytest.fixture
def fedda_inside(capsys, monkeypatch):
    return partial(inside, capsys, monkeypatch)


def same(folder, other):
    """Byte for byte the same metrics and configuration, bit for bit the same final tensors."""
    for name in ("metrics.jsonl", "config.toml"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    states = [json.loads((f / "checkpoint/state.json").read_text())["algorithms"] for f in (folder, other)]
    assert list(states[0]) == list(states[1])
    for label in states[0]:
        assert states[0][label]["crc32"] == states[1][label]["crc32"]
        ours, theirs = (
            load_file(f / "checkpoint" / s[label]["file"]) for f, s in zip((folder, other), states, strict=True)
        )
        assert ours.keys() == theirs.keys() and all(ours[k].equal(theirs[k]) for k in ours)
    assert len(os.listdir(folder / "checkpoint")) == len(states[0]) + 1  # nothing is left lying about


def reached(folder):
    """Rows so far; -1 before there is a run."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return -1


def wait(process, condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.002)


def test_killed_at_random_moments(whole, tmp_path):
    file, reference = whole
    total = reached(reference)
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    out = tmp_path / "run"
    targets = sorted(rng.uniform(0, 0.8) * total for _ in range(3))
    # Saving after every round, a process spends most of its time in the writing of checkpoints.
    pauses = ["0", "0.2", "0"]
    print("seed", seed, "rows", targets)
    for target, pause in zip(targets, pauses, strict=True):
        go_on = ["--resume"] if out.exists() else []
        process = begin("run", file, "--out", out, "--save-seconds", pause, *go_on)
        wait(process, lambda target=target: reached(out) >= target)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert 0 <= reached(out) < total
    done = fedda("run", file, "--out", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert "(resumed)" in done.stderr
    same(out, reference)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("engine", ["vectorised", "sequential"])
def test_killed_with_wrappers(engine, tmp_path, fedda_inside):
    """What clients have not sent yet is in the checkpoint, and noise with a seed repeats."""
    noise = {"name": "noise", "multiplier": 0.1, "norm": 0.5, "seed": 0}
    around = [noise, {"name": "topk", "share": 0.2}, {"name": "float16"}]
    file = write(tmp_path / "tiny.toml", rounds=42, every=7, cohort=3, aggregation=around)
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert fedda_inside("run", file, "--out", whole, "--engine", engine)[0] == 0
    process = begin("run", file, "--out", out, "--engine", engine, "--save-seconds", 0)
    wait(process, lambda: reached(out) >= reached(whole) * 0.7)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and reached(out) < reached(whole)
    assert fedda_inside("run", file, "--out", out, "--engine", engine, "--resume")[0] == 0
    same(out, whole)
    kept = load_file(next((out / "checkpoint").glob("01-*.safetensors")))
    assert kept["memory.residual.local.1"].shape[:2] == (2, 4)  # two seeds, four clients
    assert kept["memory.residual.local.1"].abs().amax(dim=-1).min() > 0


def test_stopped_and_told_how_to_go_on(whole, tmp_path):
    """The line that is printed is pasted into a shell; the place has a space and a quote in its name."""
    file, reference = whole
    shutil.copy(file, tmp_path / "my tiny.toml")
    words = ["run", "my tiny.toml", "--out", "it's a run", "--rounds", ROUNDS, "--overwrite"]
    process = begin(*words, cwd=tmp_path)
    out = tmp_path / "it's a run"
    wait(process, lambda: reached(out) >= 8)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130
    line = stderr.splitlines()[-1]
    assert line.startswith("fedda: stopped by SIGINT, saved; resume with: fedda run "), stderr
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "fedda"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedda "$@"\n')
    script.chmod(0o755)
    environment = ENVIRONMENT | {"PATH": f"{script.parent}:{os.environ['PATH']}"}
    pasted = line.partition("resume with: ")[2]
    done = subprocess.run(
        pasted, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    same(out, reference)


def test_run_longer(whole, tmp_path, fedda_inside):
    """Stopped on the way to 100 rounds (no multiple of 7), finished, then asked for more: the bytes of a run that
    was asked for all of them at once."""
    file, reference = whole
    out = tmp_path / "run"
    process = begin("run", file, "--out", out, "--rounds", 100, "--save-seconds", 0)
    wait(process, lambda: reached(out) >= 4)
    process.terminate()
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 143 and "stopped by SIGTERM, saved" in stderr
    assert fedda_inside("run", file, "--out", out, "--rounds", 100, "--resume")[0] == 0
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["round"] == 100
    code, _, stderr = fedda_inside("run", file, "--out", out, "--rounds", 50, "--resume")
    assert code == 2
    is_one_line(stderr, "started with 100 rounds", "not lower")
    assert fedda_inside("run", file, "--out", out, "--rounds", ROUNDS, "--resume")[0] == 0
    same(out, reference)


def test_a_disk_that_fills_up(whole, tmp_path, fedda_inside):
    """A real small disk where one may be mounted, else the kernel's limit on the size of a file."""
    file, reference = whole
    disk = tmp_path / "disk"
    disk.mkdir()
    out = disk / "run"
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", disk]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    limit = (reference / "metrics.jsonl").stat().st_size // 2

    def limited():
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    try:
        (disk / "ballast").write_bytes(bytes(262_000))
        stopped = fedda("run", file, "--out", out, "--save-seconds", 0, preexec_fn=limited)
        assert stopped.returncode == 2, stopped.stderr
        line = stopped.stderr.splitlines()[-1]
        assert line.startswith(f"fedda: cannot write: {out}") and "resume with: fedda run" in line
        assert ("No space left on device" if mounted else "File too large") in line
        assert "Traceback" not in stopped.stderr
        assert 0 < reached(out) < reached(reference) and not list(out.rglob("*.tmp"))
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
        assert fedda_inside("run", file, "--out", out, "--resume")[0] == 0
        same(out, reference)
    finally:
        if mounted:
            subprocess.run(["umount", disk], check=True)


def test_two_at_once(whole, tmp_path, fedda_inside):
    file, _ = whole
    out = tmp_path / "run"
    process = begin("run", file, "--out", out, "--rounds", 100_000)
    wait(process, lambda: reached(out) >= 0)
    try:
        for words in (["--resume", "--rounds", 100_000], ["--overwrite"]):
            code, _, stderr = fedda_inside("run", file, "--out", out, *words)
            assert code == 2
            is_one_line(stderr, "another run is writing into it")
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_the_reader_went_away(tmp_path):
    """`fedda run ... 2>&1 | head -1` does not end the run."""
    file = write(tmp_path / "tiny.toml")
    line = subprocess.list2cmdline(command("run", file, "--out", tmp_path / "run"))
    done = subprocess.run(f"{line} 2>&1 | head -1", shell=True, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and not done.stderr
    assert (tmp_path / "run" / "report.html").exists()


DAMAGE = {
    "state.json cut short": lambda c: os.truncate(c / "state.json", 100),
    "state.json empty": lambda c: os.truncate(c / "state.json", 0),
    "state.json of something else": lambda c: (c / "state.json").write_text('["rows"]'),
    "state.json without its rows": lambda c: (c / "state.json").write_text('{"algorithms": {}}'),
    "state.json as bytes": lambda c: (c / "state.json").write_bytes(bytes(range(256))),
    "state.json gone": lambda c: (c / "state.json").unlink(),
    "checkpoint gone": lambda c: shutil.rmtree(c),
    "tensors gone": lambda c: next(c.glob("01-*.safetensors")).unlink(),
    "tensors cut short": lambda c: os.truncate(next(c.glob("01-*.safetensors")), 200),
    "tensors garbage": lambda c: next(c.glob("00-*.safetensors")).write_bytes(os.urandom(500)),
    "rows gone": lambda c: (c.parent / "metrics.jsonl").unlink(),
    "rows cut short": lambda c: os.truncate(c.parent / "metrics.jsonl", 1000),
    "config.toml garbage": lambda c: (c.parent / "config.toml").write_text("name ="),
    "config.toml of another": lambda c: write(c.parent / "config.toml", seeds=[5]),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint(whole, tmp_path, fedda_inside, kind):
    file, reference = whole
    out = tmp_path / "run"
    shutil.copytree(reference, out)
    DAMAGE[kind](out / "checkpoint")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    code, _, stderr = fedda_inside("run", file, "--out", out, "--resume")
    assert code == 2
    is_one_line(stderr, str(out))
    assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}  # nothing more is lost
    code, _, stderr = fedda_inside("run", file, "--out", out)
    assert code == 2
    is_one_line(stderr, "--overwrite")


# -- one algorithm fails, the others go on -----------------------------------------------------------------------------
WIDE = {"data": "breast-cancer", "clients": 300, "model": "mlp", "hidden": 25_000, "batch": 4}


def test_out_of_memory_is_recorded_and_the_others_go_on(tmp_path):
    """SCAFFOLD keeps a vector for each of 300 clients, 1 GB here; FedAvg none."""
    tables = {"scaffold": {"lr": 0.001}, "fedavg": {"lr": 0.001}}
    file = write(tmp_path / "wide.toml", rounds=1, every=1, seeds=[0], cohort=2, problem=WIDE, algorithms=tables)
    limit = (1 << 30, 1 << 30)
    done = fedda(
        "run", file, "--out", tmp_path / "run", preexec_fn=partial(resource.setrlimit, resource.RLIMIT_DATA, limit)
    )
    assert done.returncode == 0, done.stderr
    failures = json.loads((tmp_path / "run" / "failures.json").read_text())
    assert list(failures) == ["scaffold"] and failures["scaffold"].startswith("out of memory")
    assert "scaffold: failed: out of memory" in done.stdout
    again = fedda("run", file, "--out", tmp_path / "run", "--resume")  # with all the memory there is
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / "run" / "failures.json").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(r["algorithm"], r["round"]) for r in rows] == [(a, r) for a in tables for r in (0, 1)]


def test_out_of_memory_in_the_middle_goes_on_from_the_checkpoint(tmp_path, monkeypatch):
    """The error comes from a patched step: real memory does not run out at a chosen round."""
    from commands import tiny
    from fedda.experiments import config, run
    from fedda.progress import Silence
    from fedda.run import Run

    table = config.checked(tiny(rounds=12, every=3), "tiny")
    run(table, tmp_path / "whole", Silence())
    advance = Run.advance

    def short(self):
        if self.round == 8 and type(self.algorithm).__name__ == "FedAvg":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        advance(self)

    monkeypatch.setattr(Run, "advance", short)
    run(table, tmp_path / "cut", Silence(), save_seconds=0.0)
    assert "fedavg" in json.loads((tmp_path / "cut" / "failures.json").read_text())
    monkeypatch.undo()
    run(table, tmp_path / "cut", Silence(), resume=True)
    same(tmp_path / "cut", tmp_path / "whole")
    assert not (tmp_path / "cut" / "failures.json").exists()


def test_killed_while_the_rows_are_put_in_order(tmp_path, monkeypatch):
    """Between the new rows and the checkpoint that knows their length: the next resume ends the same."""
    from commands import tiny
    from fedda.experiments import config, run
    from fedda.progress import Silence
    from fedda.runs.folder import Folder

    short, long = (config.checked(tiny(rounds=n, every=4), "tiny") for n in (6, 12))
    run(long, tmp_path / "whole", Silence())
    run(short, tmp_path / "cut", Silence())
    commit = Folder.commit

    def killed(self, lengths=None):
        if lengths:
            raise KeyboardInterrupt
        commit(self)

    monkeypatch.setattr(Folder, "commit", killed)
    with pytest.raises(BaseException, match="stopped by SIGINT"):
        run(long, tmp_path / "cut", Silence(), resume=True)
    monkeypatch.undo()
    run(long, tmp_path / "cut", Silence(), resume=True)
    same(tmp_path / "cut", tmp_path / "whole")


# -- what the last bits depend on ---------------------------------------------------------------------------------------
IMAGES = {"data": "digits", "clients": 4, "model": "cnn", "filters": 2, "batch": 4}


@pytest.fixture
def taken(monkeypatch, tmp_path):
    """The path and the threads of every round that is run."""
    import torch

    from fedda.run import Run

    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    seen, advance = [], Run.advance

    def noted(self):
        seen.append((self.problem.gradient_paths.chosen, torch.get_num_threads()))
        advance(self)

    monkeypatch.setattr(Run, "advance", noted)
    return seen


def measured_as(monkeypatch, path, threads):
    """The machine, as it is now."""
    monkeypatch.setattr("fedda.problems.gradients.choose.autotune", lambda *_: path)
    monkeypatch.setattr("fedda.experiments.execution.measured_threads", lambda *_: threads)
    monkeypatch.setattr("fedda.experiments.execution.processors", lambda: 2)


def test_a_run_goes_on_with_the_path_and_the_threads_it_began_with(tmp_path, monkeypatch, taken):
    import torch

    from commands import tiny
    from fedda.experiments import config, run
    from fedda.progress import Silence

    short, long = (config.checked(tiny(rounds=n, every=1, seeds=[0], problem=IMAGES), "tiny") for n in (1, 2))
    measured_as(monkeypatch, "loop", 2)
    run(long, tmp_path / "whole", Silence())
    run(short, tmp_path / "cut", Silence())
    facts = json.loads((tmp_path / "cut" / "environment.json").read_text())
    assert (facts["path"], facts["precision"], facts["threads"]) == ("loop", "float32", 2)
    measured_as(monkeypatch, "chain", 1)
    run(long, tmp_path / "cut", Silence(), resume=True)
    same(tmp_path / "cut", tmp_path / "whole")
    assert set(taken) == {("loop", 2)} and torch.get_num_threads() == 1
    run(short, tmp_path / "new", Silence())
    assert taken[-1] == ("chain", 1)


def test_what_no_longer_fits_is_said_and_the_run_goes_on(tmp_path, monkeypatch, taken, fedda_inside):
    file, out = write(tmp_path / "tiny.toml", rounds=2, problem=IMAGES), tmp_path / "run"
    measured_as(monkeypatch, "chain", 1)
    assert fedda_inside("run", file, "--out", out)[0] == 0
    facts = json.loads((out / "environment.json").read_text())
    for changes, words in (
        ({"path": "kernels", "precision": "tf32"}, ["begun on the path kernels in tf32", "chain in float32"]),
        ({"threads": 999}, ["begun with 999 threads, but there are 2 processors here"]),
        ({"path": 7, "precision": None, "threads": "two"}, ["begun on the path 7 in None"]),
        ({}, []),
    ):
        (out / "environment.json").write_text(json.dumps(facts | changes))
        rounds = len(taken) // 2 + 1
        code, _, stderr = fedda_inside("run", file, "--out", out, "--resume", "--rounds", rounds)
        assert code == 0 and stderr.count("note: ") == bool(words), stderr
        assert all(word in stderr for word in words), stderr
        assert taken[-1] == ("chain", 1)
    (out / "environment.json").write_text("{}")  # of an older version
    code, _, stderr = fedda_inside("run", file, "--out", out, "--resume", "--rounds", len(taken) // 2 + 1)
    assert code == 0 and "note: " not in stderr


def test_threads_that_are_asked_for_win(tmp_path, monkeypatch, taken, fedda_inside):
    file, out = write(tmp_path / "tiny.toml", rounds=2, problem=IMAGES), tmp_path / "run"
    measured_as(monkeypatch, "chain", 1)
    assert fedda_inside("run", file, "--out", out, "--threads", 2)[0] == 0
    assert json.loads((out / "environment.json").read_text())["threads"] == 2
    assert fedda_inside("run", file, "--out", out, "--resume", "--rounds", 3)[0] == 0
    assert set(taken) == {("chain", 2)}
    assert fedda_inside("run", file, "--out", out, "--resume", "--rounds", 4, "--threads", 1)[0] == 0
    assert taken[-1] == ("chain", 1)
    grid = ("--grid", "fedavg.lr=0.1,0.2", "--algorithms", "fedavg", "--threads", 2)
    assert fedda_inside("sweep", file, *grid, "--out", tmp_path / "sweep")[0] == 0
    assert taken[-1] == ("chain", 2)
    assert json.loads((tmp_path / "sweep" / "environment.json").read_text())["path"] == "chain"
    for words in (("run", file), ("sweep", file, "--grid", "fedavg.lr=0.1")):
        code, _, stderr = fedda_inside(*words, "--threads", 0)
        assert code == 2
        is_one_line(stderr, "threads must be a whole number from 1 to 1024, got 0")


def test_threads_are_measured_on_the_stack_of_the_run(tmp_path, monkeypatch, taken):
    from conftest import digits
    from fedda.experiments import execution
    from fedda.problems.gradients import tuning
    from fedda.problems.gradients.tuning import threads

    problem, asked = digits(), []

    def fastest(ways, device, *about, margin):
        for way in ways.values():
            way()
        asked.append((list(ways), about[2], margin))
        return list(ways)[-1]

    monkeypatch.setattr(tuning, "autotune", fastest)
    assert (
        execution.choose_execution(problem, "auto", 5, 3, None, "auto", None).threads == 1 and not asked
    )  # there is but one
    with threads(2):
        assert execution.choose_execution(problem, "auto", 5, 3, None, "auto", None).threads == 2
        assert execution.choose_execution(problem, "auto", 5, 10**6, None, "auto", None).threads == 2
        assert execution.choose_execution(problem, "sequential", 5, 3, None, "auto", None) == execution.Execution(
            None, None, 2
        )
    assert asked == [(["1", "2"], n, 1.3) for n in (15, tuning.STACK // problem.d, 1)]
