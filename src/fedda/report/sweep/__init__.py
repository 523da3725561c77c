"""The report of a sweep: how the metric depends on the hyper-parameters, and where its best value lies."""

from .page import chosen, write_sweep

__all__ = ["chosen", "write_sweep"]
