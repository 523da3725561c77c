"""Flower, imported by a process that forks for its programs (warm.py), with shorter waits.

A real federation starts a Python for each message at each site, and each imports Flower and PyTorch: five seconds of a
processor for a few milliseconds of work. Forked processes do without. Everything else is Flower's: its programs and
their arguments, one process for each message, HTTP, TLS, node keys. But idle nodes ask for messages more often, and a
process or a node that died is missed after 16 seconds instead of 60.
"""

import time
from types import SimpleNamespace

from flwr.common import constant

constant.HEARTBEAT_DEFAULT_INTERVAL, constant.HEARTBEAT_MIN_INTERVAL = 8, 1  # seconds; before others import them

import httpcore  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
from flwr.cli import app  # noqa: E402, F401
from flwr.supercore.cli import flower_superexec  # noqa: E402, F401
from flwr.superlink.cli import flower_superlink, flwr_serverapp  # noqa: E402, F401
from flwr.supernode import start_client_internal  # noqa: E402
from flwr.supernode.cli import flower_supernode, flwr_clientapp  # noqa: E402, F401

import fedda.algorithms  # noqa: E402
import fedda.deploy  # noqa: E402, F401

start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 3))
