"""Shakespeare's plays as a next-character task: every speaking role is a client. The text comes with the package."""

import gzip
from importlib import resources

import numpy as np

from ..registry import datasets
from .datasets import Dataset

LENGTH = 64  # characters in a sample
SHORTEST = 2000  # characters; roles that say less are left out
TEST = 0.1  # of each role's samples: its last ones


def speeches(text: str) -> dict[str, str]:
    r"""What each role says, joined by new lines. A speech is a block whose first line is the role and a colon.

    >>> speeches("KING:\nHow now!\n\nALL:\nHail!\n\nKING:\nPeace.")
    {'KING': 'How now!\nPeace.', 'ALL': 'Hail!'}
    """
    roles: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        head, _, speech = block.strip("\n").partition("\n")
        if head.endswith(":"):
            roles.setdefault(head[:-1], []).append(speech)
    return {role: "\n".join(lines) for role, lines in roles.items()}


@datasets.register("shakespeare")
def shakespeare() -> Dataset:
    """1,115,394 characters of Shakespeare's plays by speaking role: 99 roles, samples of 64 characters, the target is
    the next character (public domain; comes with the package)."""
    packed = (resources.files(__package__) / "shakespeare.txt.gz").read_bytes()
    text = gzip.decompress(packed).decode()
    alphabet = "".join(sorted(set(text)))
    number = {letter: i for i, letter in enumerate(alphabet)}
    roles = {role: said for role, said in sorted(speeches(text).items()) if len(said) >= SHORTEST}
    parts: list[list[np.ndarray]] = [[], []]  # training and test windows of each role
    for said in roles.values():
        tokens = np.array([number[letter] for letter in said], dtype=np.int64)
        starts = np.arange(0, len(tokens) - LENGTH, LENGTH)
        windows = tokens[starts[:, None] + np.arange(LENGTH + 1)]
        for part, own in zip(parts, np.split(windows, [len(windows) - round(TEST * len(windows))]), strict=True):
            part.append(own)
    (x, y), (x_test, y_test) = ((both[:, :-1], both[:, 1:]) for both in map(np.concatenate, parts))
    client, client_test = (np.repeat(np.array(list(roles)), [len(own) for own in part]) for part in parts)
    return Dataset(x, y, x_test, y_test, len(alphabet), client, client_test, names=tuple(alphabet))
