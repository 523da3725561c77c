"""What holds the project together: import directions, small algorithms, runnable docstrings, a clean tree."""

import ast
import doctest
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import fedda
import fedda_paper
from commands import ENVIRONMENT

PICTURES = True  # examples in docstrings draw
ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fedda"

BASE = {"checks", "extras", "meanings", "registry", "rng"}
# Who may import whom; `report` and `claims` read run folders and nothing else.
ALLOWED = {
    "checks": set(),
    "best": {"runs"},
    "extras": set(),
    "files": set(),
    "meanings": set(),
    "capturing": set(),
    "compiling": set(),
    "recording": set(),
    "rng": {"recording"},
    "user_code": set(),
    "c_code": {"data", "files"},
    "presets": {"checks", "runs"},
    "plugins": set(),
    "processes": set(),
    "registry": {"checks", "core", "meanings", "plugins", "presets"},
    "core": {"checks", "rng", "user_code"},
    "rules": BASE,
    "algorithms": BASE | {"core", "rules"},
    "aggregation": BASE | {"core"},
    "engines": BASE | {"aggregation", "c_code", "capturing", "compiling", "core", "processes", "recording"},
    "data": BASE | {"files"},
    "problems": BASE | {"c_code", "capturing", "compiling", "core", "data", "files", "recording", "user_code"},
    "arguments": BASE | {"aggregation", "core", "engines"},
    "clients": {"checks", "core", "engines", "rng"},
    "evaluations": {"checks", "core", "runs"},
    "track": {"extras"},
    "run": BASE
    | {
        "aggregation",
        "arguments",
        "best",
        "clients",
        "core",
        "engines",
        "evaluations",
        "recording",
        "rows",
        "rules",
        "user_code",
    },
    "rows": {"core"},
    "training": BASE
    | {
        "aggregation",
        "arguments",
        "best",
        "clients",
        "core",
        "engines",
        "evaluations",
        "problems",
        "progress",
        "rules",
        "run",
        "track",
    },
    "testing": BASE | {"aggregation", "core", "engines", "problems", "rules", "run"},
    "runs": {"files"},
    "report": {"extras", "files", "runs"},
    "claims": {"files", "runs"},
    "progress": set(),
    "experiments": BASE
    | {"aggregation", "core", "algorithms", "engines", "data", "files", "presets", "problems", "rules"}
    | {"best", "clients", "evaluations", "plugins", "processes", "runs", "run", "track", "training", "__init__"},
    "listing": BASE | {"aggregation", "presets", "problems", "experiments", "run", "runs", "training"},
    "bench": BASE | {"runs", "core", "engines", "problems", "run", "report", "__init__"},
    "plan": BASE | {"aggregation", "bench", "core", "engines", "experiments", "problems", "run", "training"},
    "theory": BASE
    | {"claims", "runs"}
    | {"arguments", "core", "algorithms", "engines", "experiments", "problems", "report", "rules", "run", "__init__"},
    "deploy": BASE | {"runs", "aggregation", "core", "engines", "files", "problems", "run", "__init__"},
    "cli": BASE
    | {
        "arguments",
        "claims",
        "runs",
        "bench",
        "c_code",
        "data",
        "files",
        "listing",
        "plugins",
        "problems",
        "experiments",
        "report",
        "progress",
        "__init__",
    }
    | {"deploy", "engines", "plan", "processes", "theory", "training"},
    "__main__": {"cli"},
    "__init__": BASE | {"aggregation", "core", "rules", "algorithms", "engines", "problems", "run", "training", "data"},
}


def imports(path):
    """(module, line) of every import in a file, as a path below the package or a foreign name."""
    tree = ast.parse(path.read_text())
    package = ("fedda", *path.relative_to(SOURCE).parts[:-1])
    typing_only = {
        id(n) for block in ast.walk(tree) if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for n in ast.walk(block)
    }  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.split("."), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            full = base + (node.module.split(".") if node.module else [])
            # `from . import core, rng` names modules; `from .core import x` names a thing in one
            for alias in node.names:
                yield ([*full, alias.name] if full == ["fedda"] else full), node.lineno


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    parts = set(ALLOWED)
    allowed = ALLOWED[part] | (
        {"claims", "report"} if "reproduce" in path.parts else set()
    )  # it writes the paper's page
    for name, line in imports(path):
        if name[0] == "fedda":
            other = name[1] if len(name) > 1 and name[1] in parts else "__init__"
            assert other == part or other in allowed, f"{path.name}:{line}: {part} must not import {'.'.join(name)}"


@pytest.mark.parametrize("path", sorted((SOURCE / "algorithms").glob("*.py")), ids=lambda p: p.name)
def test_algorithms_know_no_device_process_or_network(path):
    for name, line in imports(path):
        foreign = ".".join(name)
        assert not foreign.startswith(("torch.distributed", "torch.cuda", "flwr")), f"{path.name}:{line}: {foreign}"
    assert not re.search(r"\btorch\.(distributed|cuda)\b", path.read_text())


def test_import_direction_test_can_fail(tmp_path):
    """The check above sees relative, absolute and named imports."""
    file = SOURCE / "algorithms" / "fedavg.py"
    names = {".".join(name) for name, _ in imports(file)}
    assert {"fedda.core", "fedda.rules.schedules", "fedda.registry", "torch"} <= names


def code_lines(node_or_text):
    """Lines of code: no blank lines, comments or docstrings."""
    tree = ast.parse(node_or_text)
    lines = set()
    docs = {
        id(n.body[0].value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(n) is not None
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.stmt | ast.expr)
            and id(node) not in docs
            and not (isinstance(node, ast.Expr) and id(node.value) in docs)
        ):
            if isinstance(node, ast.stmt) and hasattr(node, "body"):
                last = node.body[0].lineno - 1
                lines |= set(range(node.lineno, max(node.lineno, last) + 1))
            else:
                lines |= set(range(node.lineno, node.end_lineno + 1))
    text = node_or_text.splitlines()
    return sum(1 for i in lines if text[i - 1].strip() and not text[i - 1].strip().startswith(("#", '"""')))


def test_long_files_of_algorithms_are_listed():
    """An algorithm is one short file. A long one is a question to its author, not a mistake."""
    lines = {path.name: code_lines(path.read_text()) for path in (SOURCE / "algorithms").glob("*.py")}
    assert lines["fedavg.py"] < 60
    long = {name: count for name, count in sorted(lines.items()) if count >= 60}
    if long:
        warnings.warn(f"lines of code, 60 or more: {long}", stacklevel=1)


TRITON = [
    "fedda.problems.gradients.recurrent_kernels",
    *(
        f"fedda.problems.gradients.kernels.{name}"
        for name in (
            "attention",
            "backward",
            "cross_entropy",
            "draws",
            "embedding",
            "forward",
            "implicit_gemm",
            "join",
            "norm",
            "operators",
            "passes",
            "products",
            "row_norm",
            "tiles",
        )
    ),
]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def modules():
    for info in [
        *pkgutil.walk_packages(fedda.__path__, "fedda."),
        *pkgutil.walk_packages(fedda_paper.__path__, "fedda_paper."),
    ]:
        if info.name != "fedda.__main__" and (HAS_TRITON or info.name not in TRITON):
            yield info.name


@pytest.mark.parametrize("name", ["fedda", *modules()])
def test_docstring_examples_run(name):
    import numpy as np
    import torch

    module = importlib.import_module(name)
    results = doctest.testmod(
        module,
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
        extraglobs={"torch": torch, "np": np},
    )
    assert results.failed == 0


def test_every_algorithm_has_a_runnable_example_and_a_reference():
    from fedda import registry

    for entry in registry.algorithms:
        assert entry.reference and entry.summary.endswith("."), entry.name
    for cls in (fedda.algorithms.fedavg.FedAvg, fedda.algorithms.fedda.FedDA):
        assert ">>>" in cls.__doc__


SLOW = ("torch", "numpy", "matplotlib", "sklearn", "pydantic", "flwr")  # each takes a good part of a second to import


@pytest.mark.parametrize(
    "words",
    [("--help",), ("--version",), ("list", "--help"), ("run", "--help"), ("data", "show", "--help")],
    ids=" ".join,
)
def test_the_command_line_helps_before_torch_is_imported(words):
    code = (
        "import sys\n"
        "from fedda.cli import main\n"
        f"sys.argv = ['fedda', *{words!r}]\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {SLOW!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr.strip()) == (0, "[]") and "fedda" in done.stdout


def test_run_folders_are_read_without_torch():
    code = (
        "import sys, fedda.runs.folder, fedda.runs.final_values, fedda.report, fedda.claims\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_a_public_name_is_imported_on_its_first_use():
    """`dir` shows the public names, and a module of the package does not replace one of them."""
    code = (
        "import sys, fedda, fedda.registry\n"
        "public = ['__version__', 'data', 'deploy', 'registry', 'report', 'testing', 'track']\n"
        "assert sorted(dir(fedda)) == sorted([*fedda.__all__, *public])\n"
        "assert fedda.registry.algorithms.known == {}\n"
        "assert 'fedavg' in fedda.registry.algorithms.entries\n"
        "from fedda import *\n"
        "assert make is fedda.make is fedda.registry.make and train is fedda.training.train\n"
        "assert prox is fedda.rules.prox and prox.L1 and engines.Vectorised and algorithms.stem\n"
        "assert not hasattr(fedda, 'nothing') and not hasattr(fedda, '_nothing')\n"
        "print([name for name in ('matplotlib', 'sklearn', 'pydantic', 'typer', 'rich') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
    names = {path.stem for path in SOURCE.glob("*.py")} | {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert names & set(fedda.__all__) == {"aggregation", "algorithms", "engines"}


def test_no_two_public_classes_have_one_name():
    homes = {}
    for path in (*SOURCE.rglob("*.py"), *(ROOT / "paper" / "fedda_paper").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(homes) > 100
    assert {name: own for name, own in homes.items() if len(own) > 1} == {}


POSIX = {"fcntl", "grp", "pty", "pwd", "resource", "termios"}  # modules that Windows does not have


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_windows_can_import_it(path):
    """No import at the level of a module, and no name of os or signal without a look whether it is there."""
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not POSIX & set(names), f"{path.name}:{node.lineno}: {names}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            whole = f"{node.value.id}.{node.attr}"
            assert whole not in ("signal.SIGHUP", "signal.SIGPIPE", "signal.SIGKILL"), f"{path.name}:{node.lineno}"


def test_a_builder_s_signature_shows_its_hyper_parameters():
    from fedda import registry

    for entry in registry.algorithms:
        shown = inspect.signature(entry.build).parameters.values()
        words = {p.name: p.default for p in shown if p.name not in entry.common}
        assert words == entry.defaults and {"lr", "steps"} <= words.keys(), entry.name


def tracked():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split() if (ROOT / name).is_file()]


def test_no_registry_host_and_no_machine_path_is_tracked():
    hosts = [
        "py" + "pi.org",
        "python" + "hosted",
        "index" + "-url",
        "--find" + "-links",
        "npm" + "js",
        "debian" + ".org",
    ]
    paths = ["/" + "root/", "/" + "work/", "/" + "home/", "/" + "opt/", "file:" + "//"]
    for file in tracked():
        if file.suffix in (".png", ".gz", ".npz", ".woff2"):
            continue
        text = file.read_text(encoding="utf-8")
        for word in hosts + paths:
            assert word not in text, f"{file.relative_to(ROOT)}: {word}"
