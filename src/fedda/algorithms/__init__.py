"""One paper, one file. Importing this package imports every module in it, and each registers its algorithms."""

from importlib import import_module
from pkgutil import iter_modules

__all__ = sorted(module.name for module in iter_modules(__path__))

for name in __all__:
    import_module(f"{__name__}.{name}")
