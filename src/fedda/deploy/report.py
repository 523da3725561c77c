"""What an operator sees of a run: report.json, written atomically, while the run waits too, and kept over a resume.

| key | content |
|---|---|
| status, why | running, finished, stopped (by the privacy budget) or failed, and the reason |
| round, rounds | the last complete round, and the last of the run |
| started, updated | when the run began, and when this was written (UTC) |
| sites | by number: connected or not, samples, replies used, rejected replies by kind, the last message of each kind |
| rejected, last | the same over all sites |
| waiting | sites whose reply is awaited now |
| left_out, refused_nodes | sites that the plan leaves out; nodes that were not let in, and why |
| metrics | of the last evaluation |
| seconds, last_round | of the whole run and of the last round, by part |
| privacy | with noise: epsilon so far |
| secure_aggregation | where it is used: bits, limit, and the largest error of a mean |
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

PARTS = {
    "nodes": "waiting for nodes",
    "sending": "packing and sending",
    "replies": "waiting for replies",
    "averaging": "checking and averaging",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}
MESSAGE = 200  # characters of a message that are kept
REFUSED_NODES = 20  # that are kept


@dataclass
class SiteRecord:
    """What one site has sent so far."""

    replies: int = 0  # that were used
    rejected: Counter[str] = field(default_factory=Counter)
    last: dict[str, str] = field(default_factory=dict)  # the last message of each kind


@dataclass
class Rejections:
    """Replies that were not used: how many of each kind ("late", "malformed", ...), and the last message of each."""

    counts: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    sites: dict[str, SiteRecord] = field(default_factory=dict)

    def site(self, number: int) -> SiteRecord:
        return self.sites.setdefault(str(number), SiteRecord())

    def add(self, kind: str, site: int, message: str) -> None:
        text, record = printable(message), self.site(site)
        self.counts[kind] += 1
        self.messages[kind] = f"client {site}: {text}"
        record.rejected[kind] += 1
        record.last[kind] = text

    def state(self) -> dict[str, Any]:
        """As JSON has it. A checkpoint has only the counts: the rest tells which site took part when."""
        sites = {
            number: {"replies": record.replies, "rejected": dict(record.rejected), "last": record.last}
            for number, record in self.sites.items()
        }
        return {"rejected": dict(self.counts), "last": self.messages, "sites": sites}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Rejections":
        """The inverse of `state`."""
        sites = {
            number: SiteRecord(record["replies"], Counter(record["rejected"]), dict(record["last"]))
            for number, record in state.get("sites", {}).items()
        }
        return cls(Counter(state["rejected"]), dict(state.get("last", {})), sites)


class Stopwatch:
    """Seconds by part. Of nested parts the inner one counts, except in a part that counts as a whole.

    >>> watch = Stopwatch()
    >>> with watch.part("evaluation", whole=True), watch.part("sending"):
    ...     pass
    >>> list(watch.seconds)
    ['evaluation']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[tuple[str, bool]] = []
        self._since = time.monotonic()

    def _book(self) -> None:
        now = time.monotonic()
        if self._open:
            name = self._open[-1][0]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str, whole: bool = False) -> Iterator[None]:
        if self._open and self._open[-1][1]:
            yield
            return
        self._book()
        self._open.append((name, whole))
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def total(self) -> dict[str, float]:
        self._book()
        return {name: self.seconds[name] for name in PARTS if name in self.seconds}


def printable(message: str) -> str:
    """One line without control characters: messages come from the sites, and end in a terminal.

    >>> printable("no\\n disk" + chr(27) + "[2J")
    'no disk?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))[:MESSAGE]


def difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """The seconds between two totals, by part."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
