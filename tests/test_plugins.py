"""Algorithms outside the package: the contributor's walk to the letter, entry points, plugins that cannot be loaded."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fedda
from commands import ENVIRONMENT, inside, is_one_line, warm
from fedda import plugins, presets, registry
from test_docs import BLOCK

ROOT = Path(__file__).parent.parent
WALK = (ROOT / "docs" / "adding-an-algorithm.md").read_text()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    path = tmp_path_factory.mktemp("walk") / "clipped.py"
    path.write_text(next(text for language, text in BLOCK.findall(WALK) if language == "python"))
    return path


def run(*words, **environment):
    """`python -m WORDS` in a forked process."""
    env = ENVIRONMENT | {k: str(v) for k, v in environment.items()}
    return warm().run([sys.executable, "-m", *words], cwd=ROOT, env=env)


def test_the_walk_s_algorithm_passes_the_shared_table(plugin):
    """Also in the traffic and error tables that need no row of their own."""
    command = re.search(r"python -m (pytest tests/test_engines.py -k clipped)", WALK)[1].split()
    done = run(*command, "-p", "no:cacheprovider", FEDDA_TEST_PLUGIN=plugin)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\.{9,}", done.stdout)  # so many has the table, and none failed
    more = ["tests/test_training.py", "-k", "clipped and (refused or silent)", "-p", "no:cacheprovider"]
    done = run("pytest", *more, FEDDA_TEST_PLUGIN=plugin)
    assert done.returncode == 0, done.stdout


def test_the_walk_s_commands_and_costs(plugin, tmp_path):
    (tmp_path / "mine.toml").write_text(dict(BLOCK.findall(WALK))["toml"])
    place = tmp_path / "run"
    done = run("fedda", "run", str(tmp_path / "mine.toml"), "--plugin", str(plugin), "--out", str(place))
    assert done.returncode == 0, done.stderr
    assert '"algorithm": "clipped"' in (place / "metrics.jsonl").read_text()
    listed = run("fedda", "list", "algorithms", "--plugin", str(plugin))
    assert re.search(r"clipped .*1 \+ 1 number .* 1 .* I ", listed.stdout)
    without = run("fedda", "run", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "other"))
    assert without.returncode == 2 and "unknown algorithm 'clipped'" in without.stderr


def test_the_walk_s_file_is_under_60_lines_of_code(plugin):
    from test_structure import code_lines

    assert code_lines(plugin.read_text().split("if __name__")[0]) < 60


def install(folder, modules, entry_points, name="mypackage"):
    """A distribution in a folder, as pip leaves it; the environment with that folder on the path."""
    package = folder / name
    package.mkdir(parents=True)
    for module, text in {"__init__": "", **modules}.items():
        (package / f"{module}.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: What {name} does.\n")
    (info / "entry_points.txt").write_text(f"[fedda.plugins]\n{entry_points}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_an_installed_package_registers_by_its_entry_point(plugin, tmp_path):
    environment = install(tmp_path, {"clipped": plugin.read_text()}, "clipped = mypackage.clipped")
    code = "import fedda; print(fedda.make('clipped', lr=0.3).lr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    assert done.stdout == "0.3\n", done.stderr


COMMANDS = """
import typer

app = typer.Typer(add_completion=False)
print("imported")


@app.command(epilog="Example: fedda study --times 2")
def study(times: int = 1):
    \"\"\"Study something.\"\"\"
    if times < 0:
        raise ValueError(f"--times must be >= 0, got {times}")
    print("studied", times)
"""


def test_an_installed_package_adds_a_command(tmp_path):
    """Listed without being imported, run as any other command, its mistakes in one line."""
    environment = install(tmp_path, {"commands": COMMANDS}, "study = mypackage.commands:app")
    listed = run("fedda", "--help", **environment)
    assert listed.returncode == 0 and re.search(r"study +What mypackage does\.", listed.stdout)
    assert "imported" not in listed.stdout
    assert run("fedda", "study", "--times", "2", **environment).stdout == "imported\nstudied 2\n"
    helped = run("fedda", "study", "--help", **environment)
    assert "Usage: fedda study" in helped.stdout and "Study something." in helped.stdout
    wrong = run("fedda", "study", "--times", "-1", **environment)
    assert (wrong.returncode, wrong.stderr) == (2, "fedda: --times must be >= 0, got -1\n")
    assert run("fedda", "list", "engines", **environment).returncode == 0  # discovery skips commands


def test_a_plugin_cannot_replace_a_command_or_break_the_others(tmp_path):
    modules = {"commands": COMMANDS, "broken": "1 +", "other": "app = 3"}
    points = "list = mypackage.commands:app\nbroken = mypackage.broken:app\nother = mypackage.other:app"
    environment = install(tmp_path, modules, points)
    assert "sequential" in run("fedda", "list", "engines", **environment).stdout
    assert run("fedda", "--help", **environment).stdout.count("What mypackage does.") == 2
    for name, said in (
        ("broken", "plugin 'mypackage.broken' cannot be loaded: SyntaxError"),
        ("other", "plugin 'mypackage.other:app': app must be a typer.Typer, got int"),
    ):
        done = run("fedda", name, **environment)
        assert done.returncode == 2 and done.stderr.startswith(f"fedda: {said}") and done.stderr.count("\n") == 1


def test_reproduce_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    code, _, err = inside(capsys, monkeypatch, "reproduce", "--plan")
    assert code == 2
    is_one_line(err, "fedda-paper, which is not installed", "pip install -e paper")


def test_the_wheel_holds_the_presets_and_not_the_reproduction(tmp_path):
    done = run("hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"fedda/presets.toml", "fedda/experiments/figures/cifar10.toml"} <= set(names)
    assert all(name.startswith("fedda") for name in names) and not any("paper" in name for name in names)


@pytest.mark.parametrize(
    "text,reason", [(None, "FileNotFoundError"), ("1 +", "SyntaxError"), ("import nothing_such", "")]
)
def test_a_plugin_that_cannot_be_loaded_is_said_in_one_line(text, reason, tmp_path):
    path = tmp_path / "broken.py"
    if text:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"plugin '.*broken.py' cannot be loaded: .*{reason}"):
        plugins.load(str(path))
    done = run("fedda", "list", "engines", "--plugin", str(path))
    assert done.returncode == 2 and done.stderr.startswith("fedda: plugin") and "Traceback" not in done.stderr


def test_a_name_cannot_be_taken_twice():
    with pytest.raises(ValueError, match="algorithm 'fedavg' is registered twice"):
        registry.algorithms.register("fedavg")(type("Mine", (), {}))


# -- presets ---------------------------------------------------------
@pytest.mark.parametrize("which", presets.builtin())
def test_presets_build(which):
    for name, words in presets.builtin()[which].items():
        algorithm = fedda.make(name, preset=which)
        assert algorithm == fedda.make(name, **words)
        assert fedda.make(name, preset=which, steps=20).steps == 20  # what is given outranks the preset


def test_presets_are_the_paper_s_values():
    """Hyper-parameters as the paper lists them: spot checks against its text for each data set."""
    stem = fedda.make("stem", preset="cifar10")
    assert (stem.lr, stem.w, stem.c) == (0.1, 100.0, 2000.0)
    assert fedda.make("fedavg", preset="cifar10").lr == 0.005
    assert fedda.make("fedavg", preset="cifar10-heterogeneous").lr == 0.01
    assert fedda.make("fedavg", preset="femnist").lr == 0.1
    mvr = fedda.make("fedda-1-1", preset="cifar10")
    assert (mvr.lr.lr, mvr.lr.w, mvr.estimator.c, mvr.preconditioner.eps) == (0.02, 1e4, 1e6, 0.01)
    assert fedda.make("fedda-1-2", preset="pathmnist").prox.gamma == 0.01
    assert fedda.make("fedda-1-2", preset="literal").preconditioner.beta_mode == "weight"
    assert not fedda.make("local-amsgrad", preset="femnist").memory


def test_unknown_presets_are_refused():
    with pytest.raises(ValueError, match="unknown preset 'cifar'; did you mean 'cifar10'"):
        fedda.make("stem", preset="cifar")
    with pytest.raises(ValueError, match="the preset 'cifar10' has no values for 'scaffold'; it has"):
        fedda.make("scaffold", preset="cifar10")


def test_a_preset_in_a_file_is_written_out():
    from fedda.experiments import config

    text = 'name = "a"\nrounds = 1\n[problem]\ndata = "digits"\n[algorithms.stem]\npreset = "cifar10"\nsteps = 2\n'
    full = config.parse(text, "a.toml").completed()
    words = full.algorithms["stem"]
    assert (words["c"], words["steps"]) == (2000.0, 2) and "preset" not in words
    assert full.build("stem") == fedda.make("stem", preset="cifar10", steps=2)
