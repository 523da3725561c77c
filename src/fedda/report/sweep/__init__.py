"""The report of a sweep: how the metric depends on the hyper-parameters, and where its best lies."""

from fedda.report.sweep.page import chosen, write_sweep
from fedda.report.sweep.read import Sweep, is_sweep, read_sweep

__all__ = ["Sweep", "chosen", "is_sweep", "read_sweep", "write_sweep"]
