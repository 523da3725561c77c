"""The command line as a user meets it: what it prints and writes, and one line for every mistake."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import time
from functools import partial
from itertools import product

import click
import numpy as np
import pytest
import torch
import typer

import fedda_paper.cli
from commands import ENVIRONMENT, begin, command, fedda, inside, is_one_line, write
from fedda import __version__, registry, report
from fedda.cli import options
from fedda.cli.app import app
from fedda.experiments import builtin
from fedda.listing import KINDS, REGISTRIES
from fedda.problems.gradients.choose import PRECISIONS
from fedda.track import TRACKERS


@pytest.fixture
def fedda_inside(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(inside, capsys, monkeypatch)


def everything(place):
    """All files below a place, and what is in them."""
    return {p: p.read_bytes() if p.is_file() else None for p in place.rglob("*")}


def test_a_run_writes_its_folder_and_can_be_repeated(tmp_path, fedda_inside):
    file = write(tmp_path / "tiny.toml", title="A title", every=50, algorithms={"fedda-mvr": {"c": 1.0}})
    code, stdout, stderr = fedda_inside("run", file)
    run = tmp_path / "runs" / "tiny"
    assert code == 0, stderr
    assert stderr.splitlines()[0] == "fedda-mvr: round 0 of 6"
    assert re.fullmatch(r"fedda-mvr: done in \S+ s  loss \S+  accuracy \S+%", stderr.splitlines()[1])
    assert "fedda-mvr" in stdout and "report: runs/tiny/report.html" in stdout
    names = {p.name for p in run.iterdir()}
    assert {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "timings.jsonl",
        "report.html",
        "checkpoint",
    } <= names
    assert not {n for n in names if n.endswith(".tmp")} and "failures.json" not in names
    environment = json.loads((run / "environment.json").read_text())
    assert environment["command"] == f"fedda run {file}" and environment["torch"] == torch.__version__
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # `every` beyond the last round: the first and the last are there
    assert [(row["round"], row["seed"]) for row in rows] == [(0, 0), (0, 1), (6, 0), (6, 1)]
    code, *_ = fedda_inside("run", run / "config.toml", "--out", "again", "--no-summary")
    assert code == 0
    for name in ("config.toml", "metrics.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()
    code, stdout, _ = fedda_inside("report", run, "again")
    assert code == 0 and stdout.count("report: ") == 2 and "again" in stdout


def test_labels_of_all_kinds(tmp_path, fedda_inside):
    """Labels that are no file names, that look alike as one, that look like markup; the sequential engine."""
    labels = ["a/b", "a b", "../a", "[bold]x[/]", "日本 :smile:", "quo\"te's", "l" * 300]
    algorithms = {label: {"name": "fedavg", "lr": 0.1 + i / 100} for i, label in enumerate(labels)}
    file = write(tmp_path / "tiny.toml", rounds=1, seeds=[0], algorithms=algorithms)
    code, stdout, stderr = fedda_inside("run", file, "--engine", "sequential", "--save-seconds", 0)
    assert code == 0, stderr
    rows = (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["algorithm"] for row in rows[::2]] == labels
    assert all(label in stdout for label in labels[:4])
    assert len(list((tmp_path / "runs/tiny/checkpoint").glob("*.safetensors"))) == len(labels)
    assert fedda_inside("run", file, "--resume", "--no-summary")[0] == 0


def test_a_failed_algorithm_does_not_stop_the_others(tmp_path, fedda_inside):
    wild = {"name": "fedavg", "lr": 1e39}  # beyond float32: the first step is infinite
    file = write(tmp_path / "tiny.toml", algorithms={"wild": wild, "fedavg": {"lr": 0.1}})
    code, stdout, stderr = fedda_inside("run", file)
    assert code == 0, stderr
    run = tmp_path / "runs/tiny"
    failures = json.loads((run / "failures.json").read_text())
    assert list(failures) == ["wild"] and "diverged" in failures["wild"]
    assert "wild: failed: " in stderr and f"wild: failed: {failures['wild']}" in stdout
    assert "1 of 2 algorithms failed: wild; the others have finished" in stdout
    assert report.summary(run)[0]["failure"] and report.summary(run)[1]["rounds"] == 6
    assert "diverged" in (run / "report.html").read_text()
    (run / "failures.json").unlink()  # as after a kill just before it was written
    before = (run / "metrics.jsonl").read_bytes()
    assert fedda_inside("run", file, "--resume")[0] == 0
    assert json.loads((run / "failures.json").read_text()) == failures
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_warning_is_one_note(tmp_path, fedda_inside):
    words = {"lr": 0.1, "w": 1000.0, "c": 1e9}
    file = write(tmp_path / "tiny.toml", rounds=1, algorithms={"fedda-mvr": words})
    code, _, stderr = fedda_inside("run", file, "--no-summary")
    assert code == 0
    assert [line for line in stderr.splitlines() if "clipped" in line] == [stderr.splitlines()[0]]
    assert stderr.startswith("note: Mvr: ")


def test_the_live_display(tmp_path):
    """On a real pseudo-terminal of 100 columns."""
    words = {"name": "fedavg", "lr": 0.1}
    algorithms = {"fedavg": words, "a [bold] label that is far too long to be shown whole": words}
    file = write(tmp_path / "tiny.toml", rounds=60, algorithms=algorithms)
    mine, theirs = pty.openpty()
    process = begin("run", file, "--out", tmp_path / "run", stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(mine, 65536):
            shown += part
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(mine)
    assert process.wait() == 0
    process.communicate()
    # Each refresh draws both bars again: the last one is how the screen ends.
    frames = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode().replace("\r", "\n").split("\n")
    last = [line.rstrip() for line in frames if line.strip()][-2:]
    assert all(len(line) <= 100 for line in last)
    for line, label in zip(last, ("fedavg", "a [bold] label that is "), strict=True):
        assert line.startswith(label)
        assert re.search(r"━+ +60/60 +loss \S+ +accuracy \S+% +\S+ rounds/s done$", line), line
    assert any(re.search(r"\d:\d\d:\d\d left$", line.rstrip()) for line in frames)


@pytest.mark.parametrize("words", [[], ["run"], ["list"], ["report"]])
def test_help_shows_an_example(fedda_inside, words):
    code, stdout, _ = fedda_inside(*words, "--help")
    assert code == 0 and f"Example: fedda {' '.join(words)}".rstrip() in stdout


def test_list_and_version(fedda_inside):
    code, stdout, _ = fedda_inside("list")
    assert code == 0
    for entry in (entry for entries in REGISTRIES.values() for entry in entries):
        assert re.search(rf"\b{re.escape(entry.name)}\b", stdout), entry.name
    assert all(name in stdout for name in builtin())
    code, one, _ = fedda_inside("list", "algorithms")
    assert code == 0 and "fedavg" in one and "dirichlet" not in one
    assert fedda_inside("--version")[:2] == (0, f"fedda {__version__}\n")
    code, stdout, _ = fedda_inside()
    assert code == 0 and "Usage: fedda" in stdout


NEAR = "did you mean"
MISTAKES = {
    "unknown experiment": (["run", "digit"], ["'digit'", NEAR, "'digits'"]),
    "no experiment": (["run"], ["EXPERIMENT"]),
    "unknown command": (["runn"], ["runn"]),
    "unknown option": (["run", "tiny.toml", "--round", "3"], ["--round"]),
    "rounds": (["run", "tiny.toml", "--rounds", "0"], ["rounds must be", "got 0"]),
    "rounds as text": (["run", "tiny.toml", "--rounds", "x"], ["--rounds", "'x'"]),
    "seeds": (["run", "tiny.toml", "--seeds", "1,b"], ["--seeds", "'1,b'"]),
    "seeds repeated": (["run", "tiny.toml", "--seeds", "1,1"], ["seeds must be distinct"]),
    "algorithms": (["run", "tiny.toml", "--algorithms", "fedavgg"], [NEAR, "'fedavg'"]),
    "no algorithms": (["run", "tiny.toml", "--algorithms", ","], ["--algorithms"]),
    "engine": (["run", "tiny.toml", "--engine", "vectorized"], ["'--engine'", "'vectorised'"]),
    "device": (["run", "tiny.toml", "--device", "gpu"], ["--device 'gpu' cannot be used here"]),
    "device of no memory": (["run", "tiny.toml", "--device", "meta"], ["--device 'meta'"]),
    "save seconds": (["run", "tiny.toml", "--save-seconds", "nan"], ["--save-seconds"]),
    "resume and overwrite": (["run", "tiny.toml", "--resume", "--overwrite"], ["exclude each other"]),
    "resume nothing": (["run", "tiny.toml", "--resume"], ["holds no run to resume"]),
    "below a file": (["run", "tiny.toml", "--out", "tiny.toml/a/b"], ["tiny.toml/a/b", "Not a directory"]),
    "a file": (["run", "tiny.toml", "--out", "tiny.toml"], ["cannot write: tiny.toml"]),
    "a name too long": (["run", "tiny.toml", "--out", "new/" + "x" * 300], ["File name too long"]),
    "somebody's files": (["run", "tiny.toml", "--out", "taken"], ["'report.html'", "--overwrite"]),
    "absurd rate": (["run", "absurd.toml"], ["absurd: fedda-mvr: ", "rate", "lower lr"]),
    "no file": (["run", "none.toml"], ["none.toml: cannot be read"]),
    "no TOML": (["run", "syntax.toml"], ["syntax.toml: not valid TOML", "line 1"]),
    "list": (["list", "model"], [NEAR, "'models'"]),
    "report": (["report", "none"], ["none"]),
    "report nothing": (["report"], ["FOLDERS"]),
    "report a file": (["report", "tiny.toml"], ["tiny.toml"]),
}  # fmt: skip
if not torch.cuda.is_available():
    MISTAKES["no cuda"] = (["run", "tiny.toml", "--device", "cuda"], ["--device 'cuda' cannot be used here"])


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, fedda_inside, kind):
    words, fragments = MISTAKES[kind]
    write(tmp_path / "tiny.toml")
    write(tmp_path / "absurd.toml", name="absurd", algorithms={"fedda-mvr": {"lr": 1e5}})
    (tmp_path / "syntax.toml").write_text("rounds =\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "report.html").write_text("mine")
    before = everything(tmp_path)
    code, stdout, stderr = fedda_inside(*words)
    assert (code, stdout) == (2, "")
    is_one_line(stderr, *fragments)
    assert everything(tmp_path) == before


def test_a_run_is_not_overwritten_unasked(tmp_path, fedda_inside):
    file = write(tmp_path / "tiny.toml", rounds=1)
    assert fedda_inside("run", file, "--no-summary")[0] == 0
    (tmp_path / "runs/tiny/notes.txt").write_text("mine")
    before = everything(tmp_path)
    code, _, stderr = fedda_inside("run", file)
    assert code == 2
    is_one_line(stderr, "runs/tiny: holds a run", "--resume", "--overwrite")
    for words in (["--algorithms", "fedavg"], ["--seeds", "3"]):
        code, _, stderr = fedda_inside("run", file, "--resume", *words)
        assert code == 2
        is_one_line(stderr, "was run with another")
    assert everything(tmp_path) == before
    code, *_ = fedda_inside("run", file, "--overwrite", "--seeds", "3", "--no-summary")
    assert code == 0 and '"seed": 3' in (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    assert (tmp_path / "runs/tiny/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_a_disk_that_cannot_be_written(tmp_path, fedda_inside, options):
    file, disk = write(tmp_path / "tiny.toml"), tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        code, _, stderr = fedda_inside("run", file, "--out", disk / "new" / "run")
        assert code == 2
        reason = "Read-only file system" if options == "ro" else "No space left on device"
        is_one_line(stderr, "cannot write", reason)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_stopped_while_it_starts(tmp_path):
    """Ctrl-C before there is anything to save: a line, not a traceback, and no folder."""
    file, slow = write(tmp_path / "tiny.toml"), tmp_path / "slow.py"
    # Not just anywhere: a signal that meets Python as it imports something may end in a traceback of Python's own.
    slow.write_text("import time\nopen('here', 'w').close()\ntime.sleep(600)\n")
    process = begin("run", file, "--out", tmp_path / "run", "--plugin", slow, cwd=tmp_path)
    while not (tmp_path / "here").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    is_one_line(stderr, "stopped by SIGINT")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["here", "slow.py", "tiny.toml"]
    assert not (tmp_path / "run").exists()


def test_a_closed_or_full_output(tmp_path):
    line = f"{subprocess.list2cmdline(command('list'))} | head -1"
    done = subprocess.run(line, shell=True, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.strip() == "experiments" and not done.stderr
    with open("/dev/full", "w") as full:
        done = fedda("list", "engines", stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 2
    is_one_line(done.stderr, "No space left on device")


def test_a_failure_of_ours_is_a_traceback(tmp_path, fedda_inside, monkeypatch):
    """Not dressed up as a mistake of the user's: the exception leaves `main`, Python prints it and exits with 1."""

    def broken(**words):
        raise AssertionError("ours")

    entry = registry.engines.find("sequential")
    monkeypatch.setitem(registry.engines.entries, "sequential", type(entry)(**vars(entry) | {"build": broken}))
    file = write(tmp_path / "tiny.toml")
    with pytest.raises(AssertionError, match="ours"):
        fedda_inside("run", file, "--engine", "sequential")
    assert not (tmp_path / "runs").exists()


# -- data of one's own, TensorBoard ------------------------------------------------------------------------------------
def test_a_run_on_a_file_of_one_s_own(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 5)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=(x[:, 0] > 0).astype(int), client=np.arange(80) % 8)
    words = ("--data", tmp_path / "mine.npz", "--set", "problem.partition=by_client", "--set", "problem.clients=")
    done = fedda("run", write(tmp_path / "tiny.toml"), *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["clients"] == 8 and facts["samples"] == 64
    again = fedda("run", tmp_path / "run" / "config.toml", "--out", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "again" / "metrics.jsonl").read_bytes() == (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    bad = fedda("run", write(tmp_path / "tiny.toml"), "--data", tmp_path / "bad.npz", "--out", tmp_path / "b")
    assert bad.returncode == 2 and not (tmp_path / "b").exists()
    is_one_line(bad.stderr, "bad.npz")


def test_tensorboard_gets_every_metric(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ("run", write(tmp_path / "tiny.toml"), "--tensorboard", "--out", tmp_path / "run")
    done = fedda(*words)
    assert done.returncode == 0, done.stderr
    longer = fedda(*words, "--rounds", "8", "--resume")
    assert longer.returncode == 0, longer.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for label, seed in product(("fedavg", "fedda-mvr"), (0, 1)):
        events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard" / f"{label}, seed {seed}"))
        events.Reload()
        got = [(e.step, e.value) for e in events.Scalars("test_loss")]
        mine = [(r["round"], r["test_loss"]) for r in rows if (r["algorithm"], r["seed"]) == (label, seed)]
        assert [s for s, _ in got] == [s for s, _ in mine] and np.allclose([v for _, v in got], [v for _, v in mine])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--precision", "fast"], "'--precision': 'fast' is not one of 'auto', 'float32', 'tf32', 'bf16'"),
        (["--precision", "tf32"], "needs a float32 problem on a CUDA device"),
        (["--precision", "bf16", "--engine", "sequential"], "--precision is for the vectorised engine"),
        (["--precision", "float32", "--resume"], "for a new run"),
    ],
)
def test_a_precision_that_cannot_be_is_refused(fedda_inside, tmp_path, options, words):
    code, _, stderr = fedda_inside("run", "digits", "--rounds", "2", "--out", tmp_path / "run", *options)
    assert code == 2 and not (tmp_path / "run").exists()
    is_one_line(stderr, words)


def leaves(command, path):
    """(path, command) of every command that does something."""
    for name, own in getattr(command, "commands", {}).items():
        yield from leaves(own, f"{path} {name}")
    if not getattr(command, "commands", {}):
        yield path, command


PROGRAM = typer.main.get_command(app)
LEAVES = dict([*leaves(PROGRAM, "fedda"), ("fedda reproduce", typer.main.get_command(fedda_paper.cli.app))])


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_explains_itself(path):
    own = LEAVES[path]
    assert own.help and "\n" not in own.help.replace("\n\n", "")
    for param in own.params:
        assert getattr(param, "hidden", False) or param.help, f"{path}: {param.name} has no help"
    example = own.epilog.removeprefix("Example: ")
    assert example.startswith(f"{path} ") or example == path
    # The example has options and arguments that the command takes.
    context = click.Context(own, info_name=path)
    own.make_parser(context).parse_args(shlex.split(example)[len(path.split()) :])


def test_commands_are_listed_in_groups(fedda_inside):
    code, stdout, _ = fedda_inside("--help")
    heads = re.findall(r"^╭─ (.*?) ─", stdout, re.M)
    assert code == 0 and heads == ["Options", "Your own work", "Federations", "This machine", "The paper"]
    assert [name for name in re.findall(r"^│ (\w+)", stdout, re.M) if name in dict(PROGRAM.commands)][:2] == [
        "run",
        "sweep",
    ]
    code, stdout, _ = fedda_inside("run", "--help")
    heads = re.findall(r"^╭─ (.*?) ─", stdout, re.M)
    assert heads == ["Arguments", "Options", "Experiment", "Folder and output", "Machine"]


def test_the_choices_of_options_are_those_of_the_program():
    choices = {
        param.name: param.type.choices for param in LEAVES["fedda run"].params if isinstance(param.type, click.Choice)
    }
    assert set(choices["engine"]) == {"auto", *registry.engines.entries}
    assert set(choices["precision"]) == {"auto", *PRECISIONS} and tuple(choices["track"]) == TRACKERS
    assert set(choices["shard"]) == {"clients", "replicas"}
    assert options.KINDS == KINDS


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("swe", ["sweep"]),
        ("run digits-", ["digits-heterogeneous"]),
        ("run digits --algorithms fedavg,fedda-c", ["fedavg,fedda-cv", "fedavg,fedda-cv-mvr"]),
        ("run digits --engine s", ["sequential"]),
        ("list prox l1", ["l1", "l1-ball"]),
        ("data show breast-", ["breast-cancer"]),
    ],
)
def test_completion(fedda_inside, monkeypatch, typed, shown):
    words = ["fedda", *typed.split()]
    monkeypatch.setenv("_FEDDA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    code, stdout, _ = fedda_inside()
    assert (code, stdout.split()) == (0, shown)


def test_completion_knows_files_of_one_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.toml").touch()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.toml").touch()
    assert options.complete_experiment("digits") == ["digits", "digits-heterogeneous", "digits.toml"]
    assert options.complete_experiment("more/") == ["more/mine.toml"]


def test_list_shows_what_the_parameters_of_one_mean(fedda_inside):
    code, stdout, _ = fedda_inside("list", "algorithms", "fedyogi")
    assert code == 0 and stdout.startswith("fedyogi: FedAdam with Yogi")
    assert "server_lr" in stdout and "max_grad_norm" in stdout and "Adam" in stdout
    assert "radius" in fedda_inside("list", "prox", "l1-ball")[1]
    for wrong, fragment in ((("algorithms", "fedyoga"), "'fedyogi'"), (("presets", "x"), "have no parameters")):
        code, _, stderr = fedda_inside("list", *wrong)
        assert code == 2
        is_one_line(stderr, fragment)


def test_a_run_of_one_s_own_says_nothing_about_the_paper(tmp_path, fedda_inside):
    file = write(tmp_path / "tiny.toml", rounds=1, seeds=[0], algorithms={"fedavg": {"lr": 0.1}})
    assert fedda_inside("run", file, "--no-summary")[0] == 0
    code, stdout, _ = fedda_inside("claims", "runs/tiny")
    assert code == 0 and stdout == "runs/tiny: no run of a figure of the paper, so none of its claims is tested\n"
