"""What may be wrong with a reply, counted by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

KINDS = ("late", "failed", "refused", "malformed", "stale", "not finite", "too large")


class TooFewReplies(RuntimeError):
    """A round in which too few clients gave a reply that could be used, several times over."""


@dataclass
class Rejections:
    """Replies that were not used: how many of each kind, and the last words of each."""

    counts: Counter[str] = field(default_factory=Counter)
    words: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, client: int, words: str) -> None:
        self.counts[kind] += 1
        self.words[kind] = f"client {client}: {' '.join(words.split())[:200]}"
