"""Algorithms outside the package: the contributor's walk to the letter, entry points, plugins that cannot be loaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedda
from commands import ENVIRONMENT, warm
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
    assert re.search(r"\b(1[0-9]|[2-9][0-9]) passed|\.{10,}", done.stdout)
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


def test_an_installed_package_registers_by_its_entry_point(plugin, tmp_path):
    """A real distribution on the path, as pip leaves it."""
    package = tmp_path / "site"
    (package / "mypackage").mkdir(parents=True)
    (package / "mypackage" / "__init__.py").write_text("")
    (package / "mypackage" / "clipped.py").write_text(plugin.read_text())
    info = package / "mypackage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mypackage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedda.plugins]\nclipped = mypackage.clipped\n")
    code = "import fedda; print(fedda.make('clipped', lr=0.3).lr)"
    path = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout == "0.3\n", done.stderr


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
@pytest.mark.parametrize("which", presets.PRESETS)
def test_presets_build(which):
    for name, words in presets.PRESETS[which].items():
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
