"""Real federations over Flower: the same algorithms as in simulation, on remote clients (docs/deployment.md).

Needs the extra `fedda[flower]`.
"""

from ..extras import needed_for

with needed_for("fedda.deploy"):
    import flwr  # noqa: F401

from .client import Site, client_app, join
from .federation import TooFewReplies
from .grid import InProcessGrid, SuperLinkGone
from .relay import Relay
from .results import export, trained
from .server import server_app
from .strategy import Strategy

__all__ = [
    "InProcessGrid", "Relay", "Site", "Strategy", "SuperLinkGone", "TooFewReplies", "client_app", "export", "join",
    "server_app", "trained",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
