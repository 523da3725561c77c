"""Trackers write the rows of a run elsewhere: TensorBoard, MLflow, Weights & Biases, or an object of your own.

A tracker has three methods: `begin(config)`, `log(row)` for every evaluation and seed, and `end()`. The packages are
imported when a tracker is made.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .extras import needed_for

__all__ = ["Tracker", "mlflow", "tensorboard", "wandb"]

Row = Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    """What `train(track=...)` and `fedda run --track` write to; an object of your own needs these three methods."""

    def begin(self, config: Row) -> None:
        """The run begins.

        Args:
            config: its settings.
        """

    def log(self, row: Row) -> None:
        """One evaluation of one seed.

        Args:
            row: counts and metrics; `row["algorithm"]` and `row["seed"]` say whose they are.
        """

    def end(self) -> None:
        """The run has ended, or was interrupted."""


class _Streams:
    """A tracker with one stream of metrics for each algorithm and seed."""

    def __init__(self) -> None:
        self.config: Row = {}
        self.streams: dict[str, Any] = {}

    def begin(self, config: Row) -> None:
        self.config = dict(config)

    def log(self, row: Row) -> None:
        name = f"{row.get('algorithm', 'run')}, seed {row['seed']}".replace("/", "-")
        if name not in self.streams:
            self.streams[name] = self.open(name, row["round"])
        numbers = {k: v for k, v in row.items() if isinstance(v, float) and math.isfinite(v)}
        self.write(self.streams[name], numbers, row["round"])

    def end(self) -> None:
        for stream in self.streams.values():
            self.close(stream)
        self.streams = {}

    def open(self, name: str, round: int) -> Any:
        """A new stream; `round` is the first round that it gets, which is not 0 if the run resumes."""
        raise NotImplementedError

    def write(self, stream: Any, numbers: dict[str, float], round: int) -> None:
        raise NotImplementedError

    def close(self, stream: Any) -> None:
        raise NotImplementedError


class _TensorBoard(_Streams):
    def __init__(self, folder: Path):
        super().__init__()
        with needed_for("track.tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self.folder, self.make = folder, SummaryWriter

    def open(self, name: str, round: int) -> Any:
        # Rows after the checkpoint of an interrupted run are written again; drop the old ones.
        return self.make(str(self.folder / name), purge_step=round or None)

    def write(self, stream: Any, numbers: dict[str, float], round: int) -> None:
        for key, value in numbers.items():
            stream.add_scalar(key, value, round)

    def close(self, stream: Any) -> None:
        stream.close()


class _MLflow(_Streams):
    def __init__(self, store: str | None, experiment: str):
        super().__init__()
        with needed_for("track.mlflow"):
            from mlflow.tracking import MlflowClient
        self.store, self.title, self.make = store, experiment, MlflowClient

    def begin(self, config: Row) -> None:
        super().begin(config)
        try:
            self.client = self.make(tracking_uri=self.store)
            known = self.client.get_experiment_by_name(self.title)
            self.experiment = self.client.create_experiment(self.title) if known is None else known.experiment_id
        except Exception as why:  # no server, no database
            raise ValueError(f"mlflow: {(str(why).splitlines() or [type(why).__name__])[0][:200]}") from why

    def open(self, name: str, round: int) -> Any:
        if round:  # a resumed run continues the stream that it began
            query = f"attributes.run_name = '{name}'"
            if runs := self.client.search_runs([self.experiment], query, max_results=1):
                self.client.set_terminated(runs[0].info.run_id, "RUNNING")
                return runs[0].info.run_id
        stream = self.client.create_run(self.experiment, run_name=name).info.run_id
        for key, value in self.config.items():
            self.client.log_param(stream, key, str(value)[:500])
        return stream

    def write(self, stream: Any, numbers: dict[str, float], round: int) -> None:
        for key, value in numbers.items():
            self.client.log_metric(stream, key.replace(":", "/"), value, step=round)

    def close(self, stream: Any) -> None:
        self.client.set_terminated(stream)


class _Wandb(_Streams):
    def __init__(self, project: str, folder: Path):
        super().__init__()
        with needed_for("track.wandb"):
            import wandb
        self.project, self.folder, self.wandb = project, folder, wandb

    def open(self, name: str, round: int) -> Any:
        # The same folder and name give the same id: a resumed run continues the stream that it began.
        number = hashlib.sha256(f"{self.folder.resolve()} {name}".encode()).hexdigest()[:16]
        kept: dict[str, Any] = {"id": number, "resume": "allow"} if round else {}
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.wandb.init(
            project=self.project, name=name, config=dict(self.config), dir=str(self.folder), reinit="create_new", **kept
        )

    def write(self, stream: Any, numbers: dict[str, float], round: int) -> None:
        stream.log(numbers, step=round)

    def close(self, stream: Any) -> None:
        stream.finish()


def tensorboard(folder: str | Path = "tensorboard") -> Tracker:
    """Writes for TensorBoard (`tensorboard --logdir FOLDER`): one stream for each algorithm and seed.

    Args:
        folder: where the files go.
    """
    return _TensorBoard(Path(folder))


def mlflow(store: str | None = None, experiment: str = "fedda") -> Tracker:
    """Writes to MLflow, one MLflow run for each algorithm and seed.

    Args:
        store: an address such as "sqlite:///mlflow.db"; by default as MLflow's own settings say (MLFLOW_TRACKING_URI).
        experiment: the name of the MLflow experiment.
    """
    return _MLflow(store, experiment)


def wandb(project: str = "fedda", folder: str | Path = "wandb") -> Tracker:
    """Writes to Weights & Biases, as its own settings say (WANDB_MODE=offline writes to `folder` only).

    Args:
        project: the name of the project.
        folder: where its files go.
    """
    return _Wandb(project, Path(folder))


TRACKERS = ("tensorboard", "mlflow", "wandb")


def in_folder(name: str, folder: Path, title: str) -> Tracker:
    """The tracker of this name for a run folder."""
    if name == "tensorboard":
        return tensorboard(folder / "tensorboard")
    if name == "mlflow":
        return mlflow(experiment=title)
    if name == "wandb":
        return wandb(title, folder)
    raise ValueError(f"--track must be one of {', '.join(TRACKERS)}, got {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
