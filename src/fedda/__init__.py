"""fedda: federated optimisation on PyTorch. FedDA (restarted dual averaging) and the methods it is compared with.

>>> import fedda
>>> problem = fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", batch=16)
>>> algorithm = fedda.make("fedda-mvr", lr=0.1, w=1e3, beta=0.999, eps=0.01, steps=5)
>>> result = fedda.train(algorithm, problem, rounds=50, cohort=10, seed=0)
>>> result.history[-1]["test_accuracy"] > 0.8
True
"""

from . import aggregation, algorithms, engines
from .core import Algorithm, Client, Cohort, Problem, on_client, step_counter
from .problems import Quadratic, load, problem
from .registry import make
from .rules import estimators, preconditioners, prox, schedules
from .running import Diverged, Run
from .training import History, Result, rounds, train

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Client",
    "Cohort",
    "Diverged",
    "History",
    "Problem",
    "Quadratic",
    "Result",
    "Run",
    "aggregation",
    "algorithms",
    "engines",
    "estimators",
    "load",
    "make",
    "on_client",
    "preconditioners",
    "problem",
    "prox",
    "rounds",
    "schedules",
    "step_counter",
    "train",
]
