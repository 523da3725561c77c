"""What a round costs on this machine, and how that grows; `fedda bench` prints it."""

from .machine import machine, process_peak_mb
from .measure import measure
from .plot import draw
from .scaling import scaling
from .workloads import CNN, SMALL, WORKLOADS, Workload

__all__ = ["CNN", "SMALL", "WORKLOADS", "Workload", "draw", "machine", "measure", "process_peak_mb", "scaling"]
