"""Arguments and options that several commands share, and the completion of their values (`--install-completion`).

Whatever is imported at the top of the modules of the command line is imported by `fedda --help`: nothing heavy.
"""

from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

# The groups of options in the help of a command.
EXPERIMENT, OUTPUT, MACHINE = "Experiment", "Folder and output", "Machine"

KINDS = (
    "experiments", "algorithms", "params", "presets", "data", "partitions", "models", "augmentations", "metrics",
    "prox", "engines", "aggregation",
)  # fmt: skip


# -- completion -------------------------------------------------------------------------------------------------------
def beginning(names: Iterable[str], incomplete: str) -> list[str]:
    """The names that begin like this. In a list with commas, only the last name is completed."""
    done, comma, last = incomplete.rpartition(",")
    return [done + comma + name for name in sorted(names) if name.startswith(last)]


def experiment_names() -> Iterator[str]:
    """The built-in experiments, from the names of their files."""
    for file in (resources.files("fedda") / "experiments" / "figures").iterdir():
        if file.name.endswith(".toml"):
            yield file.name.removesuffix(".toml")


def complete_experiment(incomplete: str) -> list[str]:
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    files = [str(path) for path in folder.glob("*.toml")]
    return beginning([*experiment_names(), *files], incomplete)


def complete_algorithms(incomplete: str) -> list[str]:
    from ..registry import algorithms

    return beginning(algorithms.entries, incomplete)


def complete_data(incomplete: str) -> list[str]:
    from ..registry import datasets

    return beginning(datasets.entries, incomplete)


def complete_partition(incomplete: str) -> list[str]:
    from ..registry import partitions

    return beginning(partitions.entries, incomplete)


def complete_listed(context: typer.Context, incomplete: str) -> list[str]:
    from ..listing import REGISTRIES

    kind = context.params.get("what")
    kind = "algorithms" if kind == "params" else kind
    return beginning(REGISTRIES[kind].entries, incomplete) if kind in REGISTRIES else []


# -- arguments and options --------------------------------------------------------------------------------------------
Experiment = Annotated[
    str,
    typer.Argument(
        help="A built-in experiment (`fedda list experiments`), or a .toml file of your own.",
        autocompletion=complete_experiment,
    ),
]
Dataset = Annotated[
    str,
    typer.Argument(
        help="A data set (`fedda data list`), a .npz, .csv or .parquet file, or a folder of images by class.",
        autocompletion=complete_data,
    ),
]
RunFolder = Annotated[Path, typer.Argument(help="A run folder, as `fedda run` writes it.")]
Rounds = Annotated[int | None, typer.Option(help="Rounds, instead of the experiment's.", rich_help_panel=EXPERIMENT)]
Algorithms = Annotated[
    str | None,
    typer.Option(
        help="Which to run, separated by commas: labels of the experiment, or any algorithm; all labels by default.",
        rich_help_panel=EXPERIMENT,
        metavar="NAMES",
        autocompletion=complete_algorithms,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        help="Seeds, separated by commas; they run together as one program.",
        rich_help_panel=EXPERIMENT,
        metavar="NUMBERS",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Other data: a name, a .npz, .csv or .parquet file, or a folder of images.",
        rich_help_panel=EXPERIMENT,
        metavar="NAME",
        autocompletion=complete_data,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace a value of the file: problem.batch=32, fedavg.lr=0.1; problem.rho= removes it. May be repeated.",
        rich_help_panel=EXPERIMENT,
        metavar="NAME=VALUE",
    ),
]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="A .py file or module with your own algorithms, models or data; it is executed. May be repeated.",
        metavar="FILE",
    ),
]
Engine = Annotated[
    Literal["auto", "vectorised", "sequential", "distributed"],
    typer.Option(
        help="How clients are run: all at once, one after the other, or over the processes of torchrun.",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ...; by default cpu.", rich_help_panel=MACHINE, metavar="DEVICE"),
]
Precision = Annotated[
    Literal["auto", "float32", "tf32", "bf16"],
    typer.Option(help="The arithmetic of gradients on a GPU (docs/performance.md).", rich_help_panel=MACHINE),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads on a CPU; by default one or all, as measured.", rich_help_panel=MACHINE),
]
Shard = Annotated[
    Literal["clients", "replicas"],
    typer.Option(
        help="What the processes of torchrun divide: clients, or replicas (seeds, points of a grid).",
        rich_help_panel=MACHINE,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume what was interrupted in the folder.", rich_help_panel=OUTPUT)
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Delete what is in the folder, and start again.", rich_help_panel=OUTPUT)
]
SaveSeconds = Annotated[float, typer.Option(help="Seconds between checkpoints.", rich_help_panel=OUTPUT)]
Serve = Annotated[
    bool,
    typer.Option("--serve", help="Show the page while the run goes on, to this machine alone.", rich_help_panel=OUTPUT),
]
Port = Annotated[
    int | None,
    typer.Option(
        help="The port of --serve; by default 8321, or a free one if it is taken.",
        min=0, max=65535, rich_help_panel=OUTPUT,
    ),
]  # fmt: skip
Summary = Annotated[bool, typer.Option(help="Print the table of final values.", rich_help_panel=OUTPUT)]
