"""The algorithms: one paper, one file. Importing this package imports every module in it, and each registers its
algorithms. Their classes are names of the package; `fedda.make` makes them from flat hyper-parameters.

>>> import fedda
>>> type(fedda.make("fedda-mvr")) is fedda.algorithms.FedDA
True
"""

from importlib import import_module
from inspect import isclass
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from ..core import Algorithm as _Algorithm

__all__: list[str] = []

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


for _info in iter_modules(__path__):
    _module = import_module(f"{__name__}.{_info.name}")
    for _name, _value in list(vars(_module).items()):
        if isclass(_value) and issubclass(_value, _Algorithm) and _value.__module__ == _module.__name__:
            globals()[_name] = _value
            __all__ += [_name]


def __dir__() -> list[str]:
    return sorted(__all__)
