"""Names of files: those of a run folder, for its writer and its readers, and names made of labels."""

import re

CONFIG = "config.toml"  # the complete experiment: `fedda run config.toml` repeats the run
ENVIRONMENT = "environment.json"  # versions, device, threads, the command
METRICS = "metrics.jsonl"  # one row per algorithm, seed and evaluated round
TIMINGS = "timings.jsonl"  # seconds spent in rounds, per algorithm and evaluated round
CLIENTS = "clients.jsonl"  # one row per algorithm, seed and client, at the end of the run
FAILURES = "failures.json"  # why an algorithm ended early; absent if none did
CLAIMS = "claims.json"  # verdicts on the paper's claims; absent if the run belongs to no figure of the paper
REPORT = "report.html"
CHECKPOINTS = "checkpoint"
STATE = f"{CHECKPOINTS}/state.json"  # which checkpoint and which rows are valid: a checkpoint counts from this write on

SWEEP_CONFIG = "sweep.toml"  # the grid, the budget and the metric of a sweep
SWEEP = "sweep.json"  # the value of every point of a sweep
BEST = "best.toml"  # the best points of a sweep, as a preset file

ROWS = (METRICS, TIMINGS)
FILES = (CONFIG, ENVIRONMENT, CLIENTS, FAILURES, CLAIMS, REPORT, SWEEP_CONFIG, SWEEP, BEST, *ROWS, STATE)
PATTERNS = (
    "curves-*.png",
    "curves-*.svg",
    "curves-*.pdf",
    "sweep-*.png",
    "tensorboard/*/events.out.tfevents.*",
    f"{CHECKPOINTS}/*.safetensors",
)

OUT_OF_MEMORY = "out of memory"  # a failure that begins so is the machine's: `--resume` tries the algorithm again


def slug(text: str) -> str:
    """A file name made of a text: letters, digits, dot, dash, at most 60 characters.

    >>> slug("fedda-mvr (I = 5)/../x"), slug("§")
    ('fedda-mvr-I-5-..-x', 'unnamed')
    """
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:60] or "unnamed"


def slugs(texts: list[str]) -> list[str]:
    """File names for several texts; no two are equal, even if upper and lower case are.

    >>> slugs(["a b", "A-b", "c"])
    ['a-b', 'A-b-2', 'c']
    """
    names: list[str] = []
    for text in texts:
        name, n = slug(text), 2
        while name.lower() in {other.lower() for other in names}:
            name, n = f"{slug(text)}-{n}", n + 1
        names.append(name)
    return names
