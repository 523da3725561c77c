"""`fedda deploy status`: how a run stands, as a table, as JSON and as a live page, read from its folder alone.

Messages in a report come from the sites. Everything is escaped, and the page has no scripts and loads nothing.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from ..files import try_lock
from .checkpoint import PID, REPORT
from .report import PARTS

EVERY = 5  # seconds after which the page loads itself again
HOST = "127.0.0.1"  # nobody else may look: the report is about single sites
BAD = ("failed", "died")  # of a run
ADVERSARIES = {"outside": "the outside", "site": "a site"}


def read_status(folder: Path) -> dict[str, Any]:
    """The report in a run's folder. A run that says "running" and has no server has died."""
    try:
        report = json.loads((folder / REPORT).read_text())
        age = (datetime.now(UTC) - datetime.fromisoformat(report["updated"])).total_seconds()
        status = {"folder": str(folder), **report, "age": max(0, round(age))}
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder}: holds no report of a run") from None
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ValueError(f"{folder / REPORT}: cannot be read: {why}") from None
    if status["status"] == "running" and not _has_server(folder):
        status |= {"status": "died", "why": "the server has ended without a word: submit the run with resume=true"}
    return status


def _has_server(folder: Path) -> bool:
    """Whether a server holds the lock of the folder."""
    try:
        with open(folder / PID, "r+") as file:
            return not try_lock(file.fileno())
    except OSError:
        return False


# -- what is shown, in the terminal and on the page -------------------------------------------------------------------
def headline(status: dict[str, Any]) -> str:
    return f"{status['status']}, round {status['round']} of {status['rounds']}, {status['algorithm']}"


def facts(status: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Short facts about a run: what, and how much."""
    sites = status["sites"].values()
    present = [
        bool(site.get("connected")) for name, site in status["sites"].items() if int(name) not in status["left_out"]
    ]
    yield "sites connected", f"{sum(present)} of {len(present)}"
    yield "replies used", str(sum(site["replies"] for site in sites))
    yield "replies rejected", str(sum(status["rejected"].values()))
    for name, value in status.get("metrics", {}).items():
        yield name.replace("_", " "), f"{value:.4g}"
    if last := status.get("last_round"):
        seconds = sum(last.values())
        yield "last round", duration(seconds)
        if status["status"] == "running":
            yield "time left", f"about {duration(seconds * (status['rounds'] - status['round']))}"
    privacy = status.get("privacy", {})
    for key, name in ADVERSARIES.items():
        if f"epsilon_{key}" in privacy:
            yield f"epsilon against {name}", f"{privacy[f'epsilon_{key}']:.3g}"
    yield "updated", f"{duration(status['age'])} ago"


def notes(status: dict[str, Any]) -> Iterator[str]:
    """Sentences about what an operator may have to act on."""
    if status.get("why"):
        yield str(status["why"])
    if status["status"] == "running" and status["waiting"]:
        yield f"waiting for site {', '.join(map(str, status['waiting']))}"
    if status["left_out"]:
        yield f"left out by the plan: site {', '.join(map(str, status['left_out']))}"
    for site, (old, new) in status.get("changed_samples", {}).items():
        yield f"site {site} claims {new} samples; before a resume it claimed {old}"
    for node in status["refused_nodes"]:
        yield f"not let in: {node}"


def site_rows(status: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Site, state, samples, replies used, replies rejected, key."""
    for name, site in status["sites"].items():
        out = int(name) in status["left_out"]
        state = "left out" if out else "connected" if site.get("connected") else "not connected"
        samples = "" if site.get("samples") is None else str(site["samples"])
        rejected = str(sum(site["rejected"].values()))
        yield name, state, samples, str(site["replies"]), rejected, site.get("key", "not checked")


def fault_rows(status: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Site, kind of fault, how often, its last message."""
    for name, site in status["sites"].items():
        for kind, count in site["rejected"].items():
            yield name, kind, str(count), site["last"].get(kind, "")


def second_rows(status: dict[str, Any]) -> Iterator[tuple[str, float | None, float]]:
    """Part of a round, its seconds in the last round, if one is complete, and in the whole run."""
    last = status.get("last_round")
    for part, name in PARTS.items():
        if part in status["seconds"]:
            yield name, None if last is None else last.get(part, 0.0), status["seconds"][part]


SITES = ("site", "state", "samples", "replies", "rejected", "key")
FAULTS = ("site", "fault", "times", "last message")
SECONDS = ("seconds", "last round", "whole run")


def in_seconds(last: float | None) -> str:
    return "" if last is None else f"{last:.2f}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.25), duration(75), duration(7500)
    ('0.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


# -- the page ---------------------------------------------------------------------------------------------------------
STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #59636e; --line: #d8dee4; --back: #f6f8fa; --card: #fff;
  --bar: #2f6fdb; --good: #1a7f37; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ed; --soft: #9aa4af; --line: #353c45; --back: #14181d;
  --card: #1d232a; --bar: #6aa2ff; --good: #57c26d; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: .2rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .5rem; }
p { margin: .3rem 0; overflow-wrap: anywhere; }
.soft, th { color: var(--soft); font-weight: 400; }
.good { color: var(--good); } .bad { color: var(--bad); } .status { font-weight: 600; }
.track { height: .5rem; border-radius: .25rem; background: var(--line); overflow: hidden; margin: .6rem 0 1rem; }
.bar { display: block; height: 100%; background: var(--bar); border-radius: .25rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 0 0 1rem; }
.facts div, section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .7rem .9rem; }
.facts dt { color: var(--soft); font-size: .85rem; } .facts dd { margin: 0; font-size: 1.05rem; }
section { margin: 0 0 1rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-top: 1px solid var(--line); vertical-align: top; }
tr:first-child > * { border-top: 0; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.text { overflow-wrap: anywhere; min-width: 11rem; } .share { width: 35%; min-width: 5rem; vertical-align: middle; }
.share .bar { height: .6rem; min-width: 1px; }
code { font-size: .85em; overflow-wrap: anywhere; }
.key { font-size: .85em; white-space: nowrap; }
@media (max-width: 40rem) { .key { display: none; } th, td { padding-right: .6rem; } }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="{every}">
<style>{style}</style></head><body><main>
{body}
</main></body></html>
"""


def page(folder: Path) -> str:
    """The page of a run. Before it has a report, the page says so and tries again."""
    try:
        status = read_status(folder)
        body, title = _body(status), f"{headline(status)} - {folder.resolve().name}"
    except ValueError as why:
        title, body = "no run", f"<h1>No run to show</h1><p>{escape(str(why))}</p>"
    return PAGE.format(title=escape(title), every=EVERY, style=STYLE, body=body)


def _body(status: dict[str, Any]) -> str:
    tone = "bad" if status["status"] in BAD else "good"
    done = 100 * status["round"] / max(1, status["rounds"])
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(status))
    lines = "".join(f"<p>{escape(line)}</p>" for line in notes(status))
    parts = list(second_rows(status))
    most = max([last or 0.0 for _, last, _ in parts] or [0.0]) or 1.0
    seconds = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{in_seconds(last)}</td><td class="number">{total:.1f}</td>'
        f'<td class="share"><span class="bar" style="width:{100 * (last or 0.0) / most:.1f}%"></span></td></tr>'
        for name, last, total in parts
    )
    by_part = f"<table>{_head((*SECONDS, ''), (1, 2))}{seconds}</table>"
    return "\n".join([
        f'<p class="soft"><code>{escape(status["out"])}</code></p>',
        f'<h1>{escape(status["algorithm"])}: <span class="status {tone}">{escape(status["status"])}</span>, '
        f"round {status['round']} of {status['rounds']}</h1>",
        f'<div class="track"><span class="bar" style="width:{done:.1f}%"></span></div>',
        f'<dl class="facts">{cards}</dl>',
        f"<section><h2>Notes</h2>{lines}</section>" if lines else "",
        f"<section><h2>Sites</h2>{_table(SITES, site_rows(status), (2, 3, 4), 'key')}</section>",
        f"<section><h2>Replies that were not used</h2>{_table(FAULTS, fault_rows(status), (2,), 'text')}</section>",
        f"<section><h2>Seconds of a round, by part</h2>{by_part}</section>",
    ])  # fmt: skip


def _head(names: tuple[str, ...], numbers: tuple[int, ...], last: str = "") -> str:
    kinds = ["number" if i in numbers else "" for i in range(len(names) - 1)] + [last]
    cells = (f'<th class="{kind}">{name}</th>' for kind, name in zip(kinds, names, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _table(names: tuple[str, ...], rows: Iterator[tuple[str, ...]], numbers: tuple[int, ...], last: str) -> str:
    def cell(i: int, value: str) -> str:
        kind = "number" if i in numbers else last if i == len(names) - 1 else "bad" if value == "not connected" else ""
        return f'<td class="{kind}">{escape(value)}</td>'

    lines = ["".join(cell(i, value) for i, value in enumerate(row)) for row in rows]
    if not lines:
        return '<p class="soft">none</p>'
    return f"<table>{_head(names, numbers, last)}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class LocalServer(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the name service, which the base class asks for the name of this machine."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])


def live_page(folder: Path, port: int) -> LocalServer:
    """A server of the page, on this machine alone. It reads the folder anew for every request."""

    class Page(BaseHTTPRequestHandler):
        server_version = sys_version = ""

        def do_GET(self) -> None:
            allowed = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}  # type: ignore[attr-defined]
            if (
                self.headers.get("host") not in allowed
            ):  # a page elsewhere must not read this one through a name of its own
                self._send(403, "text/plain", "")
            elif self.path == "/":
                self._send(200, "text/html; charset=utf-8", page(folder))
            elif self.path == "/status.json":
                try:
                    self._send(200, "application/json", json.dumps(read_status(folder)))
                except ValueError as why:
                    self._send(404, "application/json", json.dumps({"error": str(why)}))
            else:
                self._send(404, "text/plain", "")

        def _send(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            for name, value in {
                "content-type": kind, "content-length": str(len(content)), "cache-control": "no-store",
                "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
                "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
            }.items():  # fmt: skip
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    try:
        return LocalServer((HOST, port), Page)
    except OSError as why:
        raise ValueError(f"--port {port}: {why.strerror}") from None
