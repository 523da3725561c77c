"""Every snippet and command in the documentation is run; generated parts are up to date."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import ENVIRONMENT, fedda, warm
from fedda import Diverged, Quadratic, load, make, problem, registry, train
from fedda.experiments import find
from fedda.experiments.overrides import override
from fedda.experiments.sweep import Sweep, search
from fedda.progress import Silence
from fedda.runs.folder import CONFIG, STATE, Folder
from ranks import free_port
from warm import PREPARE, STANDS_IN, standing_in

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
# What a test cannot run from within itself: the tests, which CI runs, and an install, which other tests do in an
# environment of their own.
NOT_HERE = {"make test", "pip install '.[report]'"}
# On several pages: run once.
WRITES_NOTHING = {"fedda theory digits", "fedda reproduce --plan"}
# The figures that the README quotes come of the whole run. Here it is the same command with fewer rounds and seeds.
SHORTER = {"fedda run digits-heterogeneous --out runs/heterogeneous": "--rounds 10 --seeds 0,1"}


def blocks(*languages):
    """The blocks of all pages, each once."""
    seen = set()
    for page in PAGES:
        for i, (language, text) in enumerate(BLOCK.findall(page.read_text())):
            if language in languages and text not in seen:
                seen.add(text)
                yield pytest.param(page, text, id=f"{page.name}-{i}")


@pytest.mark.parametrize("page,text", list(blocks("python")))
def test_python_snippets_run(page, text, tmp_path):
    done = warm().run([sys.executable, "-c", text], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the experiments that the pages show, and `fedda` on the path."""
    folder = tmp_path_factory.mktemp("docs")
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            if language == "toml":
                name = re.search(r'^name = "(.+)"', text, re.M)[1]
                (folder / f"{name}.toml").write_text(text)
    walk = (ROOT / "docs" / "adding-an-algorithm.md").read_text()
    (folder / "clipped.py").write_text(next(text for language, text in BLOCK.findall(walk) if language == "python"))
    rows = [
        f"{20 + i % 90},{('flat', 'house')[i % 2]},{('Ulm', 'Bonn', 'Kiel')[i % 3]},{1 + i / 100}" for i in range(240)
    ]
    (folder / "houses.csv").write_text("\n".join(["area,kind,city,price", *rows]))
    tools = folder / "bin"
    tools.mkdir()
    command = tools / "fedda"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedda "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A folder with `fedda` and Flower's programs for shell scripts. A federation starts some of them once, and one for
    each message."""
    from flowers import QUIET

    programs = {name: [name] for name in ("fedda", "flwr", "flower-superlink", "flower-supernode")}
    folder = tmp_path_factory.mktemp("federation")
    with standing_in(folder, programs, ENVIRONMENT | QUIET, "fedda.cli", "quick_flower"):
        yield folder


def commands_of(text):
    return [command for line in text.splitlines() if (command := line.split("#")[0].strip())]


def seen_before(page, command):
    earlier = PAGES[: PAGES.index(page)]
    return any(command in commands_of(text) for p in earlier for _, text in BLOCK.findall(p.read_text()))


def plain(command):
    """The words of a command that needs no shell; None for another."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    return None if "$" in command or any(set(word) <= set("();<>|&") for word in words) else words


def fresh():
    """Whether `make` would install nothing. A test must not: .venv may be in use, and it is cleared first."""
    venv = ROOT / ".venv"
    asked = ["make", "--question", "--no-print-directory", str(Path(".venv") / ".ready")]
    return not venv.is_symlink() and subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("page,text", list(blocks("sh")))
def test_commands_run(page, text, place, request):
    """Commands of fedda and torchrun in forked processes, what else there is in a shell."""
    deployed = page.name == "deployment.md" and STANDS_IN  # all in a shell
    tools = (request.getfixturevalue("federation") if deployed else place / "bin", Path(sys.executable).parent)
    environment = ENVIRONMENT | {"PATH": os.pathsep.join([*map(str, tools), os.environ["PATH"]])}
    if page.name == "report.md":
        environment[PREPARE] = ""  # with its pictures
    for command in commands_of(text):
        if command in NOT_HERE:
            continue
        if command in WRITES_NOTHING and seen_before(page, command):
            continue
        command = f"{command} {SHORTER.get(command, '')}".strip()
        where, words = place, None if deployed else plain(command)
        if command.startswith("make "):  # in the checkout, its run folders elsewhere
            if not fresh():
                pytest.skip(f"{command}: no .venv here that is up to date, and a test must not install one")
            command, where = f"{command} OUT={place / 'demo'}", ROOT
        if words is not None and words[0] == "fedda":
            done = fedda(*words[1:], cwd=where, env=environment)
        elif words is not None and words[0] == "torchrun":
            port = f"--master-port={free_port()}"
            launch = [sys.executable, "-m", "torch.distributed.run", port, *words[1:]]
            done = warm().run(launch, cwd=where, env=environment, start_new_session=True)
        else:
            how = {"cwd": where, "env": environment, "capture_output": True, "text": True, "check": False}
            done = subprocess.run(command, shell=True, **how)
        assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout}{done.stderr}"


def test_languages_are_known():
    """A block in a language that no test runs would rot."""
    for page in PAGES:
        for language, _ in BLOCK.findall(page.read_text()):
            # "bash" is a launch on several hosts: test_hosts.py runs it on two
            # and "text" is a message: test_messages_are_those_of_the_program provokes it
            also = {"scaling.md": ["bash"], "faq.md": ["text"]}.get(page.name, [])
            assert language in ("python", "sh", "toml", *also), f"{page.name}: {language}"


def mistakes(folder):
    """Calls that end in the messages of faq.md."""
    x, y, client = torch.randn(60, 4), torch.arange(60) % 3, torch.arange(60) % 3
    digits, entropy = load("digits", clients=10), torch.nn.functional.cross_entropy
    (folder / "houses.parquet").touch()
    for name in (CONFIG, STATE):  # a run, for `--out`
        (folder / "runs" / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "runs" / "mine" / name).touch()
    return [
        lambda: train(make("fedavg", lr=1e200), Quadratic([[1.0]], [[1.0]]), rounds=5),
        lambda: train(make("fedda-mvr", lr=0.5), digits, rounds=2),
        lambda: problem(torch.nn.Linear(4, 3), lambda o, y: entropy(o, y, reduction="sum"), x=x, y=y, client=client),
        lambda: problem(torch.nn.Linear(4, 2), entropy, x=x, y=y, client=client),
        lambda: make("fedavg", lr="0.1"),
        lambda: make("fedavg", step=5),
        lambda: train(make("fedavg"), digits, rounds=2, patience=3),
        lambda: load("houses.parquet", target="price", client="city"),
        lambda: importlib.import_module("fedda.report"),
        Folder(Path("runs/mine")).refuse_if_taken,
    ]


def test_messages_are_those_of_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [*filter(lambda name: name.startswith("fedda.report"), sys.modules)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("pyarrow", "pyarrow.parquet", "matplotlib"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, name, None)

    def numberless(text):
        return re.sub(r"\d+(\.\d+)?", "N", text)

    found = []
    for mistake in mistakes(tmp_path):
        with pytest.raises((ValueError, ImportError, Diverged)) as why:
            mistake()
        found.append(numberless(str(why.value)))
    page = (ROOT / "docs" / "faq.md").read_text()
    for language, text in BLOCK.findall(page):
        if language == "text":
            for line in text.splitlines():
                assert numberless(line) in found, f"faq.md: {line}"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generate):
    """To write them anew: python docs/generate.py"""
    wanted = dict(generate.pages())
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)}: run python docs/generate.py"
    assert set((ROOT / "docs" / "algorithms").glob("*.md")) <= set(wanted)
    for entry in registry.algorithms:
        text = wanted.get(ROOT / "docs" / "algorithms" / f"{entry.name}.md", "")
        assert entry.alias_of or all(part in text for part in ("**Reference.**", "**Cost**", "Choose it")), entry.name


RECORDS = sorted((ROOT / "docs" / "sweeps").glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_the_small_experiments_have_the_rates_of_their_recorded_sweep(record):
    found = json.loads(record.read_text())
    experiment = find(record.stem)
    assert found["rounds"] == experiment.rounds and not set(found["seeds"]) & set(experiment.seeds)
    assert set(found["algorithms"]) == set(experiment.algorithms)
    for label, own in found["algorithms"].items():
        points = own["points"]
        (best,) = (i for i, point in enumerate(points) if point["best"])
        assert experiment.algorithms[label]["lr"] == pytest.approx(points[best]["values"]["lr"])
        assert 0 < best < len(points) - 1, f"{label}: best at the edge"


def test_a_recorded_rate_measured_again(tmp_path):
    found = json.loads((ROOT / "docs" / "sweeps" / "breast-cancer.json").read_text())
    (recorded,) = (p for p in found["algorithms"]["fedavg"]["points"] if p["best"])
    wanted = override(find("breast-cancer"), seeds=",".join(map(str, found["seeds"])))
    asked = Sweep(wanted, [f"fedavg.lr={recorded['values']['lr']}"], metric=found["metric"])
    (again,) = search(asked, tmp_path / "sweep", Silence())["algorithms"]["fedavg"]["points"]
    assert again["value"] == pytest.approx(recorded["value"], rel=1e-3)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
