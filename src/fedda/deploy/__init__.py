"""Real federations over Flower: the same algorithms as in simulation, on remote clients (docs/deployment.md).

Needs the extra `fedda[flower]`.
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("fedda.deploy needs Flower: pip install 'fedda[flower]'")

from .client import Site, client_app, join
from .federation import Federation, Rejections, TooFewReplies
from .grid import InProcessGrid
from .results import export, trained
from .server import Plan, server_app
from .strategy import Strategy

__all__ = [
    "Federation", "InProcessGrid", "Plan", "Rejections", "Site", "Strategy", "TooFewReplies", "client_app", "export",
    "join", "server_app", "trained",
]  # fmt: skip
