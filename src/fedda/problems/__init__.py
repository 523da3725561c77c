"""Problems: what a gradient is."""

from .loading import load, options_of
from .neural import Neural
from .own import problem
from .quadratic import Quadratic

__all__ = ["Neural", "Quadratic", "load", "options_of", "problem"]
