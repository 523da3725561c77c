"""The reproduction of the paper's experimental section: every figure run, kept and judged (docs/reproduction.md)."""

from .parts import Part, Plan, plan

__all__ = ["Part", "Plan", "plan"]
