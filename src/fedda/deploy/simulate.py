"""A Flower app in one process, for debugging: the same ServerApp and ClientApp, no Ray, no network."""

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.config import fuse_dicts, get_project_config, parse_config_args
from flwr.serverapp import ServerApp

from .checkpoint import LEDGER, REPORT, ROWS, SECRETS, STATE
from .client import SiteError
from .federation import TooFewReplies
from .grid import InProcessGrid
from .server import Plan

FILES = (STATE, ROWS, LEDGER, SECRETS, REPORT)  # in a run's folder


class LoudGrid(InProcessGrid):
    """An error on a client ends the run with its message."""

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            reply: Message = self.app(message, self.contexts[node])
        except Exception as why:
            cause = (isinstance(why, SiteError) and why.__cause__) or why
            raise ValueError(f"client {node - 1}: {one_line_with_place(cause)}") from why
        refused = reply.content.config_records.get("refused") if reply.has_content() else None
        if refused is not None:
            raise ValueError(f"client {node - 1} refuses: {refused['why']!s}")
        return reply


def simulate(place: Path, overrides: list[str], out: Path | None = None, overwrite: bool = False) -> Path:
    """Run the app of a folder to its end. Returns the folder of the results."""
    config, changed, components = configuration(place, overrides)
    config["out"] = str(out or (config["out"] if "out" in changed else "simulation"))
    config["participants"] = ""  # nodes in this process have no keys
    if "timeout" not in changed:
        config["timeout"] = 5.0  # clients in this process answer at once
    plan = Plan.of(config)
    results = Path(plan.out)
    if overwrite and not plan.resume:
        for name in FILES:
            (results / name).unlink(missing_ok=True)
    with importable(place):
        server, client = (load(components[key], kind) for key, kind in KINDS.items())
        grid = LoudGrid(client, plan.clients, config)
        context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config=config)
        try:
            server(grid, context)
        except TooFewReplies as why:
            raise ValueError(str(why)) from why
        except ValueError:
            raise
        except Exception as why:
            raise ValueError(f"server: {one_line_with_place(why)}") from why
    return results


KINDS = {"serverapp": ServerApp, "clientapp": ClientApp}


def configuration(place: Path, overrides: list[str]) -> tuple[dict[str, Any], set[str], dict[str, str]]:
    """The app's configuration with the overrides, the keys that they name, and where its two halves are."""
    try:
        app = get_project_config(place)["tool"]["flwr"]["app"]
    except FileNotFoundError:
        raise ValueError(f"{place}: is not a Flower app: it has no pyproject.toml") from None
    except (ValueError, KeyError) as why:
        raise ValueError(f"{place}: is not a Flower app: {why}") from None
    config: dict[str, Any] = dict(app.get("config", {}))
    changed: set[str] = set()
    for text in overrides:
        try:
            values = parse_config_args([text])  # keys and values, or a .toml file of them
        except OSError as why:
            raise ValueError(f"--run-config: {text}: {why.strerror}") from None
        if not values:
            raise ValueError(f"--run-config must be keys and values, such as 'rounds=2 seed=1', got {text!r}")
        for name in values:
            if name not in config:
                raise ValueError(f"--run-config: the app has no key {name!r}; it has {', '.join(config)}")
        config, changed = fuse_dicts(config, values), changed | set(values)
    return config, changed, app["components"]


@contextmanager
def importable(place: Path) -> Iterator[None]:
    """Import the app's own package first, and forget it afterwards: another app may have one of the same name."""
    before = set(sys.modules)
    sys.path.insert(0, str(place.resolve()))
    try:
        yield
    finally:
        sys.path.remove(str(place.resolve()))
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).resolve().is_relative_to(place.resolve()):
                del sys.modules[name]


def load(reference: str, kind: type) -> Any:
    """The object that `package.module:name` names."""
    module, _, name = reference.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), name)
    except Exception as why:
        raise ValueError(f"{reference}: cannot be loaded: {one_line_with_place(why)}") from why
    if not isinstance(loaded, kind):
        raise ValueError(f"{reference}: must be a {kind.__name__}, got {type(loaded).__name__}")
    return loaded


def one_line_with_place(why: BaseException) -> str:
    """The error and its place, in one line. The text of a syntax error has its own place."""
    if isinstance(why, SyntaxError):
        return f"{type(why).__name__}: {why}"
    at = traceback.extract_tb(why.__traceback__)[-1]
    return f"{type(why).__name__}: {' '.join(str(why).split())} ({Path(at.filename).name}:{at.lineno})"
