"""What runs at a hospital."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Context

from fedda.deploy import Site, client_app

from . import data
from .task import loss, metrics, model


def load_data(partition: int, node: Mapping[str, Any]) -> tuple[Any, Any]:
    """The patients of this hospital: standardised measurements, and whether the tumour is benign."""
    return data.of(partition, int(node["num-partitions"]))


def site(context: Context) -> Site:
    own = load_data(int(context.node_config["partition-id"]), context.node_config)
    # Whatever the server asks for, no other algorithm is run.
    return Site(model(), loss, *own, allowed=("fedda-mvr",), metrics=metrics)


app = client_app(site)
