"""What is installed, built and locked: dependencies, extras, wheel and sdist."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

import fedda
from commands import ENVIRONMENT
from fedda.extras import OPTIONAL

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGE_OF = {module: package.lower() for module, (package, _) in OPTIONAL.items()} | {"flwr": "flwr"}


def packages(requirements):
    return {re.match(r"[\w.-]+", line)[0].lower() for line in requirements}


# -- imports and dependencies -----------------------------------------------------------------------------------------
def third_party(path):
    """(module, line) of each import of a package that is neither fedda nor in the standard library."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    typing_only = {id(node) for block in blocks for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("fedda", "fedda_paper"):
                yield top, node.lineno


def test_every_package_that_is_imported_is_declared_in_the_base_or_in_its_extra():
    base = packages(PROJECT["dependencies"])
    for path in sorted((ROOT / "src").rglob("*.py")):
        for module, line in third_party(path):
            if module == "triton":  # comes with torch where there is a GPU
                continue
            if module in OPTIONAL:
                assert PACKAGE_OF[module] in packages(EXTRAS[OPTIONAL[module][1]]), f"{path.name}:{line}: {module}"
            else:
                assert module in base, f"{path.name}:{line}: {module} is no dependency"


def test_no_dependency_is_declared_in_vain():
    used = {module for path in (ROOT / "src").rglob("*.py") for module, _ in third_party(path)}
    assert packages(PROJECT["dependencies"]) <= used
    # The second of each is imported by the first: torch's writer, ONNX's exporter.
    indirect = {"tensorboard", "onnxruntime"}
    for extra in {extra for _, extra in OPTIONAL.values()}:
        assert packages(EXTRAS[extra]) <= {PACKAGE_OF.get(module) for module in used} | indirect, extra


def test_the_extra_all_has_every_extra_but_two_trackers():
    assert set(EXTRAS) - {"dev", "docs", "mlflow", "wandb", "all"} == set(
        re.match(r"fedda\[(.+)\]", EXTRAS["all"][0])[1].split(",")
    )


def test_the_paper_declares_what_it_imports():
    project = tomllib.loads((ROOT / "paper" / "pyproject.toml").read_text())["project"]
    used = {module for path in (ROOT / "paper" / "fedda_paper").rglob("*.py") for module, _ in third_party(path)}
    assert used <= packages(project["dependencies"])


# -- without the optional packages ------------------------------------------------------------------------------------
ALONE = """
import sys
HIDDEN = {hidden}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
sys.dont_write_bytecode = True
"""
COMMANDS = """
from fedda.cli import main
for line in sys.stdin:
    sys.argv = ["fedda", *line.split()]
    try:
        main()
    except SystemExit as end:
        print("code", end.code or 0, flush=True)
"""
MISTAKES = {  # command: the package that it lacks, and the extra
    "report runs/digits": ("matplotlib", "report"),
    "data show digits": ("matplotlib", "report"),
    "bench --scaling": ("matplotlib", "report"),
    "theory --quick": ("matplotlib", "report"),
    "data fetch pathmnist": ("pooch", "data"),
    "data show images": ("matplotlib", "report"),
    "run digits --data images --out x": ("pillow", "data"),
    "run digits --data mine.parquet --out x": ("pyarrow", "tables"),
    "export runs/digits --out model.onnx": ("onnx", "onnx"),
    "run digits --track tensorboard --out x": ("tensorboard", "tensorboard"),
    "run digits --track mlflow --out x": ("mlflow", "mlflow"),
    "run digits --track wandb --out x": ("wandb", "wandb"),
    "deploy init new": ("Flower", "flower"),
    "deploy keys new --nodes 1": ("Flower", "flower"),
}


HIDDEN = {*OPTIONAL, "sklearn", "scipy"} - {"jinja2", "markupsafe"}  # torch brings the last two


def alone(script, folder, **more):
    code = ALONE.format(hidden=HIDDEN) + script
    environment = ENVIRONMENT | {"FEDDA_DATA": str(folder / "data")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False, **more
    )


def test_the_base_alone_runs_an_experiment_and_names_what_else_is_missing(tmp_path):
    for label in ("cats", "dogs"):
        (tmp_path / "images" / label).mkdir(parents=True)
        (tmp_path / "images" / label / "1.png").touch()
    (tmp_path / "mine.parquet").touch()
    first = "run digits --algorithms fedavg --rounds 2 --seeds 0"
    done = alone(COMMANDS, tmp_path, input="\n".join([first, *MISTAKES]))
    after = f"pip install 'fedda[report]'; then: fedda report {Path('runs') / 'digits'}\n"
    assert f"no report: a report needs matplotlib: {after}" in done.stdout, done.stderr
    assert re.findall(r"^code (.*)$", done.stdout, re.M) == ["0"] + ["2"] * len(MISTAKES), done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fedda: ")]
    assert len(lines) == len(MISTAKES) and "Traceback" not in done.stderr
    for line, (command, (package, extra)) in zip(lines, MISTAKES.items(), strict=True):
        assert line.endswith(f" needs {package}: pip install 'fedda[{extra}]'"), (command, line)
    assert not (tmp_path / "x").exists() and not (tmp_path / "new").exists()


def test_in_python_a_missing_package_is_an_import_error_and_a_value_error(tmp_path):
    code = """
import fedda
problem = fedda.load("digits", clients=4, model="mlp", batch=4)
result = fedda.train(fedda.make("fedavg"), problem, rounds=1)
for ask in (lambda: fedda.report({"FedAvg": result}), result.history.to_pandas, lambda: fedda.deploy):
    try:
        ask()
    except ImportError as why:
        print(isinstance(why, ValueError), why)
"""
    done = alone(code, tmp_path)
    assert done.stdout.splitlines() == [
        "True a report needs matplotlib: pip install 'fedda[report]'",
        "True to_pandas needs pandas: pip install 'fedda[tables]'",
        "True fedda.deploy needs Flower: pip install 'fedda[flower]'",
    ], done.stderr


def test_a_broken_package_is_no_missing_one(monkeypatch):
    from fedda.extras import needed_for

    with pytest.raises(ModuleNotFoundError, match="of its own"), needed_for("a report"):
        raise ModuleNotFoundError("a module of its own", name="matplotlib_part")
    with pytest.raises(ImportError, match="cannot import name"), needed_for("a report"):
        from matplotlib import nothing_of_that_name  # noqa: F401


def test_other_systems_can_import_it(tmp_path):
    """Without the modules of the standard library that only Unix has; tests of the workflow run on such systems."""
    pytest.importorskip("flwr", reason="needs fedda[flower]")
    modules = [
        "fedda." + ".".join(path.relative_to(ROOT / "src" / "fedda").with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "src" / "fedda").rglob("*.py"))
        if path.name != "__main__.py" and "kernels" not in path.parts
    ]
    unix = ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty", "syslog")
    code = "import torch\n" + "".join(f"import {module.removesuffix('.__init__')}\n" for module in modules)
    code = code.replace("import fedda.__init__\n", "import fedda\n") + "from fedda.cli import main\nprint('all')\n"
    # Other packages import some of these where they find them, so only fedda is told that there are none.
    guard = f"""
import sys
import torch, numpy, matplotlib.figure, flwr.serverapp, flwr.clientapp, cryptography, filelock, rich.progress, typer
UNIX = {unix!r}
real = __import__
def hiding(name, globals=None, *more, **named):
    if name in UNIX and (globals or {{}}).get("__name__", "").startswith("fedda"):
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return real(name, globals, *more, **named)
import builtins
builtins.__import__ = hiding
"""
    done = subprocess.run(
        [sys.executable, "-c", guard + code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "all\n", done.stderr


# -- the embedded data ------------------------------------------------------------------------------------------------
def test_embedded_data_equal_scikit_learn_s():
    from sklearn import datasets

    from fedda.data.datasets import embedded

    for name, raw, shape in (
        ("digits", datasets.load_digits(), (1797, 8, 8)),
        ("breast_cancer", datasets.load_breast_cancer(), (569, 30)),
    ):
        x, y = embedded(name)
        assert np.array_equal(x, raw.data.reshape(shape)) and np.array_equal(y, raw.target)
    assert x.dtype == raw.data.dtype  # breast cancer: the same numbers, to the bit


# -- what is built and locked -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_holds_the_library_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    source = ROOT / "src"
    held = {name for name in names if name.startswith("fedda/")}
    tracked = {
        str(path.relative_to(source).as_posix())
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == tracked and {"fedda/py.typed", "fedda/data/embedded/digits.npz"} <= held
    about = f"fedda-{fedda.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(("fedda/", about))} == set()
    assert {f"{about}entry_points.txt", f"{about}licenses/LICENSE"} <= set(names) and wheel.stat().st_size < 4e6


def test_the_sdist_is_small_and_has_no_results(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
    assert {name.partition("/")[0] for name in names} <= {
        "src", "examples", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "pyproject.toml", "PKG-INFO", "hatch_build.py",
        ".gitignore",
    }  # fmt: skip
    assert sdist.stat().st_size < 4e6


def test_the_metadata_has_no_address_that_does_not_exist():
    assert PROJECT["authors"] == [{"name": "The fedda developers"}]
    assert PROJECT["urls"] == {"Paper": "https://arxiv.org/abs/2302.06103"}  # the repository has none yet


def test_the_lock_pins_every_package_but_torch_by_its_hash():
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pinned = [re.match(r"([a-z0-9.-]+)==[^ ]+( ; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+$", line) for line in lines]
    assert all(pinned), lines[pinned.index(None)][:100]
    names = {match[1] for match in pinned}
    wanted = packages(line for group in (PROJECT["dependencies"], *EXTRAS.values()) for line in group)
    assert wanted - names == {"torch", "fedda", "mlflow"}  # of MLflow the client is enough
    assert "torch==2.13.0\n" in (ROOT / "requirements-torch.txt").read_text()


def test_the_version_stands_once():
    assert fedda.__version__ not in (ROOT / "pyproject.toml").read_text()
