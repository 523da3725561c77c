"""Problems: what a gradient is."""

from .batchnorm import to_group_norm
from .from_arrays import problem
from .loading import load, options_of
from .metrics import Metric
from .neural import Neural
from .quadratic import Quadratic

__all__ = ["Metric", "Neural", "Quadratic", "load", "options_of", "problem", "to_group_norm"]
