"""The page of a run while it goes on: a server, for this machine alone, that reads the folder again when it changes."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..runs.names import CLAIMS, CLIENTS, CONFIG, FAILURES, METRICS, TIMINGS
from ..runs.reading import RecordedRun, read_run
from .pages import Report

HOST = "127.0.0.1"
PORT = 8321  # the same after a restart, so that an open page finds the run again
WATCHED = (CONFIG, METRICS, TIMINGS, CLIENTS, FAILURES, CLAIMS)
ASKING = 5.0  # seconds in which an open page has asked at least once


class LivePage:
    """The server of one run folder, in a thread of its own.

    >>> with LivePage("nowhere", port=0) as page:
    ...     page.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, folder: str | Path, port: int = PORT):
        self.folder = Path(folder)
        self._made: tuple[str, str, str] | None = None  # version, page, state
        self._lock = threading.Lock()
        self._asked, self._seen = -ASKING, ""  # when a page asked last, and which version it then had
        self.server = _bind(port, self._handler())
        self.port: int = self.server.server_address[1]
        self.url = f"http://{HOST}:{self.port}/"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True)

    def __enter__(self) -> LivePage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # An open page gets the last rows before its server ends.
        end = time.monotonic() + ASKING
        while time.monotonic() < end and time.monotonic() - self._asked < ASKING and self._seen != self.version():
            time.sleep(0.1)
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Serve until the thread ends."""
        self._thread.join()

    def version(self) -> str:
        """Changes when a file of the run does."""
        facts = []
        for name in WATCHED:
            try:
                stat = (self.folder / name).stat()
                facts.append((name, stat.st_mtime_ns, stat.st_size))
            except OSError:
                continue
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def content(self) -> tuple[str, str, str]:
        """The version, the page and one line on the state of the run."""
        with self._lock:
            version = self.version()
            if self._made is None or self._made[0] != version:
                try:
                    run = read_run(self.folder)
                    self._made = version, Report([run]).page(figures=False, live=version), progress(run)
                except (ValueError, OSError) as why:  # not begun, or just being written
                    self._made = version, _waiting(str(why)), "waiting for the first evaluation"
            return self._made

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        live = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                # A page of another site could otherwise read this one under a name that it made point here.
                if self.headers.get("Host") not in (f"{HOST}:{live.port}", f"localhost:{live.port}"):
                    return self.send_error(403, f"ask for {live.url}")
                version, page, state = live.content()
                if self.path == "/version":
                    live._asked = time.monotonic()
                    return self._send(json.dumps({"version": version, "state": state}), "application/json")
                if self.path == "/":
                    self._send(page, "text/html")
                    live._seen = version
                    return None
                return self.send_error(404)

            def _send(self, text: str, kind: str) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def progress(run: RecordedRun) -> str:
    """How far a run is, in one line."""
    planned = run.config.get("rounds")
    ends = {label: max((row["round"] for row in run.rows_of(label)), default=None) for label in run.labels}
    open_ = [label for label in run.labels if label not in run.failures and ends[label] != planned]
    if not open_:
        return "finished"
    begun = [label for label in open_ if ends[label] is not None]
    label = begun[-1] if begun else open_[0]
    done = len(run.labels) - len(open_)
    return f"{label}: round {ends[label] or 0} of {planned}; {done} of {len(run.labels)} methods done"


def _waiting(why: str) -> str:
    head = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>fedda</title>'
    return f'{head}<body style="font: 16px system-ui; margin: 3em"><p>Waiting for the first evaluation.<p>{escape(why)}'


def _bind(port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A page that was closed while it was sent is not an error."""

    try:
        return Server((HOST, port), handler)
    except OSError as why:
        if port != PORT:
            raise ValueError(f"--port {port}: {why.strerror}; give another one, or 0 for any free one") from None
        return Server((HOST, 0), handler)  # another run has the usual port
