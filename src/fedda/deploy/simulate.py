"""A Flower app in one process, to look at in a debugger: the same ServerApp and ClientApp, no Ray, no network."""

from __future__ import annotations

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

from .checkpoint import LEDGER, ROWS, SECRETS, STATE
from .faults import TooFewReplies
from .grid import InProcessGrid
from .server import Plan

FILES = (STATE, ROWS, LEDGER, SECRETS, "report.json")  # of a run's folder


class LoudGrid(InProcessGrid):
    """What goes wrong on a client ends the run with its words: in one process that is what one wants to know."""

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            reply: Message = self.app(message, self.contexts[node])
        except Exception as why:
            raise ValueError(f"client {node - 1}: {told(why)}") from why
        refused = reply.content.config_records.get("refused") if reply.has_content() else None
        if refused is not None:
            raise ValueError(f"client {node - 1} refuses: {refused['why']!s}")
        return reply


def simulate(place: Path, words: list[str], out: Path | None = None, overwrite: bool = False) -> Path:
    """Run the app of a folder to its end; the folder of the results."""
    given, components = configuration(place, words)
    given["out"] = str(out or ("simulation" if not any("out" in asked(word) for word in words) else given["out"]))
    if not any("timeout" in asked(word) for word in words):
        given["timeout"] = 5.0  # clients answer when they are asked: there is nobody to wait for
    plan = Plan.of(given)
    results = Path(plan.out)
    if overwrite and not plan.resume:
        for name in FILES:
            (results / name).unlink(missing_ok=True)
    with importable(place):
        server, client = (load(components[word], kind) for word, kind in KINDS.items())
        grid = LoudGrid(client, plan.clients, given)
        context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config=given)
        try:
            server(grid, context)
        except TooFewReplies as why:
            raise ValueError(str(why)) from why
        except ValueError:
            raise
        except Exception as why:
            raise ValueError(f"server: {told(why)}") from why
    return results


KINDS = {"serverapp": ServerApp, "clientapp": ClientApp}


def configuration(place: Path, words: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The app's configuration with the run's own words, and where its two halves are."""
    try:
        found = get_project_config(place)["tool"]["flwr"]["app"]
    except FileNotFoundError:
        raise ValueError(f"{place}: is no Flower app: it has no pyproject.toml") from None
    except (ValueError, KeyError) as why:
        raise ValueError(f"{place}: is no Flower app: {why}") from None
    given = dict(found.get("config", {}))
    for word in words:
        given = fuse_dicts(given, checked(asked(word), given, word))
    return given, found["components"]


def asked(word: str) -> dict[str, Any]:
    try:
        return parse_config_args([word])  # words and values, or a .toml file of them
    except OSError as why:
        raise ValueError(f"--run-config: {word}: {why.strerror}") from None


def checked(own: dict[str, Any], given: dict[str, Any], word: str) -> dict[str, Any]:
    if not own:
        raise ValueError(f"--run-config must be words and values, such as 'rounds=2 seed=1', got {word!r}")
    for name in own:
        if name not in given:
            raise ValueError(f"--run-config: the app has no word {name!r}; it has {', '.join(given)}")
    return own


@contextmanager
def importable(place: Path) -> Iterator[None]:
    """The app's own package first, and forgotten afterwards: another app may have one of the same name."""
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
        found = getattr(importlib.import_module(module), name)
    except Exception as why:
        raise ValueError(f"{reference}: cannot be loaded: {told(why)}") from why
    if not isinstance(found, kind):
        raise ValueError(f"{reference}: must be a {kind.__name__}, got {type(found).__name__}")
    return found


def told(why: BaseException) -> str:
    """What happened and where, in one line."""
    at = traceback.extract_tb(why.__traceback__)[-1]
    return f"{type(why).__name__}: {' '.join(str(why).split())} ({Path(at.filename).name}:{at.lineno})"
