"""`fedda data`: which data sets there are, fetching them, checking them, looking at them."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Plugins, app, load_plugins

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..data import Dataset
    from ..data.ondisk import Download, OnDisk

data = typer.Typer(rich_markup_mode="rich")
app.add_typer(data, name="data")
# What is built in, so that listing loads nothing: training, testing, classes.
BUILT_IN = {"digits": (1438, 359, 10), "breast-cancer": (455, 114, 2)}


@data.callback(invoke_without_command=True, epilog="Example: fedda data list")
def data_(context: typer.Context) -> None:
    """List, fetch, check and show data sets."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@data.command("list", epilog="Example: fedda data list")
def list_(plugin: Plugins = None) -> None:
    """List the data sets and where their files are.

    FEDDA_DATA names the folder of the files; `fedda data fetch` brings what is absent.
    """
    from .. import registry
    from ..data.ondisk import ON_DISK
    from ..progress import table

    load_plugins(plugin)
    rows = []
    for entry in registry.datasets:
        kept = ON_DISK.get(entry.name)
        train, test, classes = (kept.train, kept.test, kept.classes) if kept else BUILT_IN.get(entry.name, (0, 0, 0))
        shown = (
            f"{train:,} + {test:,}" if train else "",
            str(classes or ""),
            kept.clients if kept else "",
            place(kept),
        )
        rows.append((entry.name, entry.summary, *shown))
    table(("name", "what", "samples", "classes", "clients", "where"), rows)


def place(kept: OnDisk | None) -> str:
    """Where the files are, or that they are not; nothing is read."""
    if kept is None:
        return "built in"
    found = kept.found()
    if all(found):
        return str(found[0][0] if len(found) == 1 else found[0][0].parent)
    return "absent" if not any(found) else f"{sum(map(bool, found))} of {len(found)} files"


@data.command("fetch", epilog="Example: fedda data fetch cifar10")
def fetch_(name: str) -> None:
    """Fetch a data set from its official place into the folder of the data.

    What is there and whole is not fetched again; what comes is checked against the published checksum.
    """
    from ..data.download import fetch

    bars = DownloadBars()
    try:
        paths = fetch(name, bars.watch)
    finally:
        bars.stop()
    folders = sorted({str(path.parent) for path in paths})
    print(f"{name}: {len(paths)} file{'s' if len(paths) > 1 else ''} in {', '.join(folders)}")


class DownloadBars:
    """A bar for each download on a terminal, a line elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        parts = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.progress = Progress(*parts, TimeRemainingColumn(), console=Console(stderr=True))
        self.live = sys.stderr.isatty()
        if self.live:
            self.progress.start()

    def stop(self) -> None:
        if self.live:
            self.progress.stop()

    def watch(self, download: Download) -> Bar:
        if not self.live:
            print(f"fetching {download.url}", file=sys.stderr)
        return Bar(self.progress, os.path.basename(download.file))


class Bar:
    """What pooch tells: the total once it is known, then the bytes as they come."""

    def __init__(self, progress: Progress, name: str):
        self.progress, self.task = progress, progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        return self.progress.tasks[self.task].total

    @total.setter
    def total(self, total: float) -> None:
        self.progress.update(self.task, total=total or None, completed=0)  # a download may begin again

    def update(self, count: float) -> None:
        self.progress.advance(self.task, count)

    def reset(self) -> None:
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        self.progress.stop_task(self.task)


@data.command(epilog="Example: fedda data check digits")
def check(name: str, plugin: Plugins = None) -> None:
    """Read a data set from end to end and say what is in it.

    NAME is a data set (`fedda data list`), a .npz file or a folder of images by class.
    """
    import numpy as np

    from .. import registry
    from ..data import open_dataset
    from ..data.ondisk import ON_DISK
    from ..progress import table

    load_plugins(plugin)
    found = open_dataset(name, fresh=True)
    kept = ON_DISK.get(name)
    shape = "x".join(map(str, found.x.shape[1:]))
    print(f"{name}: {place(kept) if name in registry.datasets.entries else name}")
    print(f"samples: {len(found.y):,} for training, {len(found.y_test):,} for testing; {shape} {found.x.dtype}")
    if found.mean is not None and found.std is not None:
        pairs = (f"{mean:.2f} +- {std:.2f}" for mean, std in zip(found.mean, found.std, strict=True))
        print(f"channels: {', '.join(pairs)} (of 255, over the training part)")
    for who, part in (("training", found.client), ("testing", found.client_test)):
        if part is not None:
            sizes = np.unique(part, return_counts=True)[1]
            spread = f"{sizes.min():,} to {sizes.max():,} samples, median {np.median(sizes):,.0f}"
            print(f"clients ({who}): {len(sizes)}, each with {spread}")
    counts = [np.bincount(part, minlength=found.classes) for part in (found.y, found.y_test)]
    names = found.names or tuple(map(str, range(found.classes)))
    table(("class", "training", "testing"), [(n, f"{a:,}", f"{b:,}") for n, a, b in zip(names, *counts, strict=True)])
    print(f"the files are whole{published(kept, found) if kept else ''}")


def published(kept: OnDisk, found: Dataset) -> str:
    """How the files compare with those at the official place, where they can be compared."""
    if kept.train and (len(found.y), len(found.y_test)) != (kept.train, kept.test):
        return f", but not as published: {kept.train:,} samples for training and {kept.test:,} for testing"
    paths = [path for group in kept.found() for path in group]
    official = {os.path.basename(d.file): d.md5 for d in kept.downloads if not d.members}
    known = [path for path in paths if path.name in official]
    if known and all(hashlib.md5(path.read_bytes()).hexdigest() == official[path.name] for path in known):
        return ", with the published checksum"
    return ", but their checksum is not the published one" if known else ""


@data.command(epilog="Example: fedda data show digits --partition dirichlet --option alpha=0.3 --out digits.png")
def show(
    name: str,
    clients: Annotated[int | None, typer.Option(help="Clients; 10, or with by_client all that there are.")] = None,
    partition: Annotated[str, typer.Option(help="How the samples are divided (`fedda list partitions`).")] = "iid",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the partition, such as rho=0.8; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the partition.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The picture, NAME.png if left out.")] = None,
    plugin: Plugins = None,
) -> None:
    """Draw samples of each class, and how a partition divides them over clients, into a PNG.

    NAME is a data set (`fedda data list`), a .npz file or a folder of images by class.
    """
    import numpy as np

    from .. import checks, registry
    from ..data import open_dataset, split
    from ..data.picture import draw
    from ..problems.loading import CLIENTS, names_owners, options_of

    load_plugins(plugin)
    options = dict(map(word_and_value, option or []))
    entry = registry.partitions.find(partition)
    found = open_dataset(name)
    for word in options:
        if word not in options_of(entry):
            raise ValueError(f"--option: {partition} has no word {word!r}; {checks.nearest(word, options_of(entry))}")
    if seed < 0:
        raise ValueError(f"--seed must be a whole number >= 0, got {seed}")
    if clients is None:
        own = names_owners(partition) and found.client is not None
        clients = len(np.unique(found.client)) if own else min(CLIENTS, len(found.y))  # type: ignore[arg-type]
    owner = split(partition, found.y, clients, seed, found.client, **options)
    title = Path(name).stem if name not in registry.datasets.entries else name
    used = options_of(entry) | options
    words = [f"{word} = {value}" for word, value in used.items()] + [f"seed {seed}"] * ("seed" in entry.defaults)
    file = out or Path(f"{title}.png")
    file.write_bytes(draw(title, found, owner, f"{partition} ({', '.join(words)})" if words else partition))
    print(f"picture: {file}")


def word_and_value(text: str) -> tuple[str, Any]:
    word, equals, value = text.partition("=")
    if not word or not equals:
        raise ValueError(f"--option must be word=value, such as rho=0.8, got {text!r}")
    for kind in (int, float):
        try:
            return word, kind(value)
        except ValueError:
            continue
    return word, value
