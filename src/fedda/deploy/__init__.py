"""Real federations over Flower: the algorithm that was simulated, on clients that are elsewhere (docs/deployment.md).

Needs the extra `fedda[flower]`.
"""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ImportError("fedda.deploy needs Flower: pip install 'fedda[flower]'")

from .client import Site, client_app
from .faults import Rejections, TooFewReplies
from .federation import Federation
from .grid import InProcessGrid
from .server import Plan, server_app
from .strategy import Strategy, join
from .trained import export, trained

__all__ = [
    "Federation", "InProcessGrid", "Plan", "Rejections", "Site", "Strategy", "TooFewReplies", "client_app", "export",
    "join", "server_app", "trained",
]  # fmt: skip
