"""`fedda export` and `fedda predict`: the trained models of a run folder."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .app import app, load_plugins
from .commands import OWN

if TYPE_CHECKING:
    from ..experiments.saved_models import SavedModel

Algorithm = Annotated[
    str | None, typer.Option(help="The label of the algorithm, if the run has several.", metavar="LABEL")
]
Seed = Annotated[int | None, typer.Option(help="The seed; by default the first of the run.")]
Client = Annotated[str | None, typer.Option(help="The client, if the run has personal parameters.", metavar="NAME")]
Best = Annotated[bool, typer.Option("--best", help="The best model on the validation samples, not the last one.")]


@app.command(rich_help_panel=OWN, epilog="Example: fedda export runs/digits --algorithm fedavg --out model.onnx")
def export(
    run: options.RunFolder,
    out: Annotated[Path, typer.Option(help="The model file: model.pt, model.safetensors or model.onnx.")],
    algorithm: Algorithm = None,
    seed: Seed = None,
    best: Best = False,
    client: Client = None,
    plugin: options.Plugins = None,
) -> None:
    """Write a trained model to a file for PyTorch or ONNX Runtime."""
    from ..experiments.saved_models import read_model
    from ..problems.exporting import check_suffix, write_model

    load_plugins(plugin)
    check_suffix(out)
    saved = read_model(run, algorithm, seed, best)
    write_model(out, saved.problem, saved.x, saved.weights, number_of(saved, client))
    print(f"{out}: {saved}")


def number_of(saved: SavedModel, client: str | None) -> int | None:
    """The number of the client whose personal parameters are asked for."""
    return None if client is None else saved.problem.number_of(client)


@app.command(rich_help_panel=OWN, epilog="Example: fedda predict runs/houses --data new.csv --out predictions.csv")
def predict(
    run: options.RunFolder,
    data: Annotated[Path, typer.Option(help="New samples: a .npz, .csv or .parquet file, or a folder of images.")],
    out: Annotated[Path, typer.Option(help="The .csv file of the predictions, one line for each sample.")],
    algorithm: Algorithm = None,
    seed: Seed = None,
    best: Best = False,
    client: Client = None,
    plugin: options.Plugins = None,
) -> None:
    """Predict new samples with a trained model.

    The new samples have the form of the training data; targets are not
    needed, and the columns of a table are found by their names.
    """
    import torch

    from ..data.new_samples import read_new
    from ..experiments.saved_models import read_model
    from ..files import write_whole
    from ..problems.trained import predictions, trained_model

    load_plugins(plugin)
    if out.suffix != ".csv":
        raise ValueError(f"{out}: the file of the predictions must end in .csv")
    saved = read_model(run, algorithm, seed, best)
    stored = saved.problem.data.x
    x, files = read_new(data, tuple(stored.shape[1:]), stored[:0].numpy().dtype, saved.problem.columns)
    model = trained_model(saved.problem, saved.x, saved.weights, number_of(saved, client))
    columns = predictions(saved.problem, model, torch.from_numpy(x))
    columns = ({"file": files} if files else {}) | columns
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    write_whole(out, text.getvalue())
    print(f"{out}: {len(x)} predictions by {saved}")
