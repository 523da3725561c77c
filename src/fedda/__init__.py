"""fedda: federated optimisation on PyTorch. FedDA (restarted dual averaging) and the methods it is compared with.

>>> import fedda
>>> problem = fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", batch=16)
>>> algorithm = fedda.make("fedda-mvr", lr=0.1, w=1e3, beta=0.999, eps=0.01, steps=5)
>>> result = fedda.train(algorithm, problem, rounds=50, cohort=10, seed=0)
>>> result.history[-1]["test_accuracy"] > 0.8
True
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Algorithm", "Client", "Cohort", "Diverged", "History", "Metric", "Problem", "Quadratic", "Result", "Run",
    "aggregation", "algorithms", "augment", "engines", "estimators", "export", "load", "make", "on_client",
    "partition", "preconditioners", "problem", "prox", "rounds", "schedules", "step_counter", "to_group_norm", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from . import aggregation, algorithms, engines
    from .core import Algorithm, Client, Cohort, Problem, on_client, step_counter
    from .data.partition import partition
    from .problems import Metric, Quadratic, augment, load, problem, to_group_norm
    from .registry import make
    from .rules import estimators, preconditioners, prox, schedules
    from .run import Diverged, Run
    from .training import History, Result, export, rounds, train
else:
    # Torch takes seconds to import, so each name is imported on its first use. A public name must not be the name of a
    # module of the package: importing that module would replace it.
    _HOMES = {
        "core": ("Algorithm", "Client", "Cohort", "Problem", "on_client", "step_counter"),
        "data.partition": ("partition",),
        "problems": ("Metric", "Quadratic", "load", "problem", "to_group_norm"),
        "registry": ("make",),
        "run": ("Diverged", "Run"),
        "training": ("History", "Result", "export", "rounds", "train"),
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
    _MODULES = {name: f"rules.{name}" for name in ("estimators", "preconditioners", "prox", "schedules")}
    _MODULES["augment"] = "problems.augment"

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, on its first use."""
        from importlib import import_module

        if name in _HOME_OF:
            return getattr(import_module(f"fedda.{_HOME_OF[name]}"), name)
        path = f"fedda.{_MODULES.get(name, name)}"
        try:
            if not name.startswith("_"):
                return import_module(path)
        except ModuleNotFoundError as why:
            if why.name != path:
                raise
        raise AttributeError(f"module 'fedda' has no attribute {name!r}")

    # Public modules that `from fedda import *` leaves out: some of them need other packages.
    _ON_REQUEST = ("data", "deploy", "registry", "report", "testing", "track")

    def __dir__() -> list[str]:
        return sorted([*__all__, *_ON_REQUEST, "__version__"])
