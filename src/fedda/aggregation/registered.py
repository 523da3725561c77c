"""The wrappers by name: what a federation's settings may ask of its clients."""

from __future__ import annotations

from ..registry import Registry

aggregations = Registry("aggregation")
