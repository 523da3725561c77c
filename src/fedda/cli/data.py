"""`fedda data`: list, fetch, check and show data sets."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .app import app, load_plugins
from .commands import OWN, Commands

if TYPE_CHECKING:
    from ..data import Dataset
    from ..data.from_files import Download, FileDataset

data = Commands(rich_markup_mode="rich")
app.add_typer(data, name="data", rich_help_panel=OWN)
Target = Annotated[str | None, typer.Option(help="In a table: the column to predict.", metavar="COLUMN")]
Client = Annotated[str | None, typer.Option(help="In a table: the column that says who owns a row.", metavar="COLUMN")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(help="In a table: a column that is not a feature. May be repeated.", metavar="COLUMN"),
]
Missing = Annotated[Literal["refuse", "drop"], typer.Option(help="In a table: what to do with rows that have gaps.")]
Task = Annotated[
    Literal["regression", "classes"] | None,
    typer.Option(help="In a table: what the target is; by default decimal points mean regression."),
]
# Training samples, test samples and classes of the built-in data sets, so that a list need not load them.
BUILT_IN = {"digits": (1438, 359, 10), "breast-cancer": (455, 114, 2)}


@data.callback(invoke_without_command=True, epilog="Example: fedda data list")
def data_(context: typer.Context) -> None:
    """List, fetch, check and show data sets."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@data.command("list", epilog="Example: fedda data list")
def list_(plugin: options.Plugins = None) -> None:
    """List the data sets and where their files are.

    FEDDA_DATA names the data folder; `fedda data fetch` downloads absent files.
    """
    from .. import registry
    from ..data.from_files import FILE_DATASETS
    from ..progress import print_table

    load_plugins(plugin)
    rows = []
    for entry in registry.datasets:
        known = FILE_DATASETS.get(entry.name)
        sizes = (known.train, known.test, known.classes) if known else BUILT_IN.get(entry.name, (0, 0, 0))
        train, test, classes = sizes
        samples = f"{train:,} + {test:,}" if train else ""
        clients = known.clients if known else ""
        rows.append((entry.name, entry.summary, samples, str(classes or ""), clients, location(known)))
    print_table(("name", "what", "samples", "classes", "clients", "where"), rows)


def location(known: FileDataset | None) -> str:
    """Where the files are, or that they are absent; no file is read."""
    if known is None:
        return "built in"
    paths = known.paths()
    if all(paths):
        return str(paths[0][0] if len(paths) == 1 else paths[0][0].parent)
    return "absent" if not any(paths) else f"{sum(map(bool, paths))} of {len(paths)} files"


@data.command("fetch", epilog="Example: fedda data fetch cifar10")
def fetch_(
    name: Annotated[str, typer.Argument(help="A data set (`fedda data list`).", autocompletion=options.complete_data)],
) -> None:
    """Download a data set from its official source into the data folder.

    Complete files are not downloaded again; a download is checked against the published checksum.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ..data.download import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    live = sys.stderr.isatty()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not live) as progress:

        def bar(download: Download) -> ProgressBar:
            if not live:
                print(f"fetching {download.url}", file=sys.stderr)
            return ProgressBar(progress, os.path.basename(download.file))

        paths = fetch(name, bar)
    folders = sorted({str(path.parent) for path in paths})
    print(f"{name}: {len(paths)} file{'s' if len(paths) > 1 else ''} in {', '.join(folders)}")


class ProgressBar:
    """One download as a task of rich, with the attributes that pooch uses."""

    def __init__(self, progress: Any, name: str):
        self.progress, self.task = progress, progress.add_task(name, total=None)

    @property
    def total(self) -> float | None:
        total: float | None = self.progress.tasks[self.task].total
        return total

    @total.setter
    def total(self, total: float) -> None:
        self.progress.update(self.task, total=total or None, completed=0)  # a download may start again

    def update(self, count: float) -> None:
        self.progress.advance(self.task, count)

    def reset(self) -> None:
        self.progress.update(self.task, completed=0)

    def close(self) -> None:
        self.progress.stop_task(self.task)


@data.command(epilog="Example: fedda data check houses.csv --target price --client city --ignore id")
def check(
    name: options.Dataset,
    target: Target = None,
    client: Client = None,
    ignore: Ignore = None,
    missing: Missing = "refuse",
    task: Task = None,
    plugin: options.Plugins = None,
) -> None:
    """Read all files of a data set and describe its contents."""
    import numpy as np

    from .. import registry
    from ..data import open_dataset
    from ..data.from_files import FILE_DATASETS
    from ..progress import print_table

    load_plugins(plugin)
    content = open_dataset(
        name, fresh=True, target=target, client=client, ignore=ignore or (), missing=missing, task=task
    )
    known = FILE_DATASETS.get(name)
    shape = "x".join(map(str, content.x.shape[1:]))
    if name in registry.datasets.entries:
        print(f"{name}: {location(known)}")
    print(f"samples: {len(content.y):,} for training, {len(content.y_test):,} for testing; {shape} {content.x.dtype}")
    if content.columns is not None:
        print_table(("column", "kind", "features", "values"), describe_columns(content))
    if content.mean is not None and content.x.ndim == 2:
        print("columns: standardised with the mean and the deviation of the training part")
    elif content.mean is not None and content.std is not None:
        pairs = (f"{mean:.2f} +- {std:.2f}" for mean, std in zip(content.mean, content.std, strict=True))
        print(f"channels: {', '.join(pairs)} (of 255, over the training part)")
    for part, owner in (("training", content.client), ("testing", content.client_test)):
        if owner is not None:
            sizes = np.unique(owner, return_counts=True)[1]
            spread = f"{sizes.min():,} to {sizes.max():,} samples, median {np.median(sizes):,.0f}"
            print(f"clients ({part}): {len(sizes)}, each with {spread}")
    regression = content.y.dtype.kind == "f"
    content = content.by_quantiles() if regression else content
    counts = [np.bincount(part, minlength=content.classes) for part in (content.y, content.y_test)]
    names = content.names or tuple(map(str, range(content.classes)))
    print_table(
        ("targets" if regression else "class", "training", "testing"),
        [(n, f"{a:,}", f"{b:,}") for n, a, b in zip(names, *counts, strict=True)],
    )
    if known:
        print(f"the files are complete{compare_published(known, content)}")


def describe_columns(content: Dataset) -> list[tuple[str, str, str, str]]:
    """A row for each column of a table that is a feature."""
    import numpy as np

    rows, first = [], 0
    x = np.concatenate([content.x, content.x_test])
    for name, texts in content.columns or ():
        column = x[:, first]
        if texts is not None:
            shown = ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")
            rows.append((name, "text", str(len(texts)), shown))
        else:
            shown = f"{column.min():.6g} to {column.max():.6g}"
            if len(np.unique(column)) == len(column) and (column % 1 == 0).all():
                shown += "; different in every row: ignore it if it is an identifier"
            rows.append((name, "number", "1", shown))
        first += 1 if texts is None else len(texts)
    return rows


def compare_published(known: FileDataset, content: Dataset) -> str:
    """How the files compare with the published ones, if they can be compared."""
    if known.train and (len(content.y), len(content.y_test)) != (known.train, known.test):
        return f", but not as published: {known.train:,} samples for training and {known.test:,} for testing"
    official = {os.path.basename(d.file): d.md5 for d in known.downloads if not d.members}
    paths = [path for group in known.paths() for path in group if path.name in official]
    if not paths:
        return ""
    same = all(hashlib.md5(path.read_bytes()).hexdigest() == official[path.name] for path in paths)
    return ", with the published checksum" if same else ", but their checksum is not the published one"


@data.command(epilog="Example: fedda data show digits --partition dirichlet --option alpha=0.3 --out digits.png")
def show(
    name: options.Dataset,
    clients: Annotated[int | None, typer.Option(help="Clients; 10, or with by_client all that there are.")] = None,
    partition: Annotated[
        str,
        typer.Option(
            help="How the samples are divided (`fedda list partitions`).",
            metavar="NAME",
            autocompletion=options.complete_partition,
        ),
    ] = "iid",
    option: Annotated[
        list[str] | None,
        typer.Option(help="An option of the partition, such as rho=0.8. May be repeated.", metavar="NAME=VALUE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the partition.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The file of the picture; NAME.png by default.")] = None,
    target: Target = None,
    client: Client = None,
    ignore: Ignore = None,
    missing: Missing = "refuse",
    task: Task = None,
    plugin: options.Plugins = None,
) -> None:
    """Draw samples of each class, and the partition over clients, into a PNG.

    For regression, five ranges of the targets stand for the classes.
    """
    import numpy as np

    from .. import checks, registry
    from ..data import open_dataset, split
    from ..data.picture import draw
    from ..problems.loading import CLIENTS, names_owners, options_of, partition_of

    load_plugins(plugin)
    partition = partition_of(partition, client)
    options = dict(map(parse_option, option or []))
    entry = registry.partitions.find(partition)
    defaults = options_of(entry)
    content = open_dataset(name, target=target, client=client, ignore=ignore or (), missing=missing, task=task)
    for key in options:
        if key not in defaults:
            raise ValueError(f"--option: {partition} has no option {key!r}; {checks.nearest(key, defaults)}")
    if seed < 0:
        raise ValueError(f"--seed must be a whole number >= 0, got {seed}")
    if clients is None:
        if names_owners(partition) and content.client is not None:
            clients = len(np.unique(content.client))
        else:
            clients = min(CLIENTS, len(content.y))
    owner = split(partition, content.y, clients, seed, content.client, **options)
    content = content.by_quantiles() if content.y.dtype.kind == "f" else content
    title = Path(name).stem if name not in registry.datasets.entries else name
    texts = [f"{key} = {value}" for key, value in (defaults | options).items()]
    texts += [f"seed {seed}"] * ("seed" in entry.defaults)
    file = out or Path(f"{title}.png")
    file.write_bytes(draw(title, content, owner, f"{partition} ({', '.join(texts)})" if texts else partition))
    print(f"picture: {file}")


def parse_option(text: str) -> tuple[str, Any]:
    """`key=value` with a number or a text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"--option must be key=value, such as rho=0.8, got {text!r}")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value
