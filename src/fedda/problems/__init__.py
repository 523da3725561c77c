"""Problems: what a gradient is."""

from .loading import load
from .neural import Neural
from .own import problem
from .quadratic import Quadratic

__all__ = ["Neural", "Quadratic", "load", "problem"]
