"""What runs on the server: the rounds, as [tool.flwr.app.config] of pyproject.toml says."""

from fedda.deploy import server_app

from . import data
from .task import loss, metrics, model

app = server_app(model, loss, lambda: data.samples(data.TEST), metrics=metrics)
