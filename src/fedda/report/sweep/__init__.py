"""The report of a sweep: how the metric depends on the hyper-parameters, and where its best lies."""

from fedda.report.sweep.page import chosen, write_sweep
from fedda.runs.sweeps import SweepResults, is_sweep, read_sweep

__all__ = ["SweepResults", "chosen", "is_sweep", "read_sweep", "write_sweep"]
