"""Names of the report's files that every system takes."""

import re


def slug(text: str) -> str:
    """Give a name for a file: letters, digits, dot, dash, not too long.

    >>> slug("fedda-mvr (I = 5)/../x"), slug("§")
    ('fedda-mvr-I-5-..-x', 'unnamed')
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:60] or "unnamed"


def slugs(texts: list[str]) -> list[str]:
    """Give names for several files, no two alike, also where a system ignores case.

    >>> slugs(["a b", "A-b", "c"])
    ['a-b', 'A-b-2', 'c']
    """
    found: list[str] = []
    for text in texts:
        name, n = slug(text), 2
        while name.lower() in {other.lower() for other in found}:
            name, n = f"{slug(text)}-{n}", n + 1
        found.append(name)
    return found
