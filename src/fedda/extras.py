"""Optional packages, and the one message about a missing one."""

from collections.abc import Iterator
from contextlib import contextmanager

# The modules that fedda imports only for a part of its work: their package, and the extra that installs it.
OPTIONAL = {
    "matplotlib": ("matplotlib", "report"),
    "jinja2": ("jinja2", "report"),
    "markupsafe": ("markupsafe", "report"),
    "pooch": ("pooch", "data"),
    "requests": ("requests", "data"),
    "PIL": ("pillow", "data"),
    "pyarrow": ("pyarrow", "tables"),
    "pandas": ("pandas", "tables"),
    "dp_accounting": ("dp-accounting", "privacy"),
    "cryptography": ("cryptography", "privacy"),
    "onnx": ("onnx", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
    "onnxruntime": ("onnxruntime", "onnx"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "mlflow"),
    "wandb": ("wandb", "wandb"),
    "Crypto": ("pycryptodome", "flower"),
    "httpx": ("httpx", "flower"),
    "flwr": ("Flower", "flower"),
}


class MissingPackage(ImportError, ValueError):
    """An optional package is not installed; the message names the extra that installs it."""


@contextmanager
def needed_for(what: str, extra: str = "", more: str = "") -> Iterator[None]:
    """Explain a failed import of the block in one line, and end it with `more`. `extra` names the extra of a package
    that is in several.

    >>> with needed_for("fedda.deploy"):
    ...     raise ModuleNotFoundError(name="flwr.app")
    Traceback (most recent call last):
    fedda.extras.MissingPackage: fedda.deploy needs Flower: pip install 'fedda[flower]'
    """
    try:
        yield
    except ModuleNotFoundError as why:
        module = (why.name or "").partition(".")[0]
        if module not in OPTIONAL:
            raise
        package, usual = OPTIONAL[module]
        message = f"{what} needs {package}: pip install 'fedda[{extra or usual}]'{more}"
        raise MissingPackage(message, name=why.name) from None
