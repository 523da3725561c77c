"""The reproduction of the paper's experimental section: every figure run, kept and judged (docs/reproduction.md)."""

from .parts import Part, PartList, plan

__all__ = ["Part", "PartList", "plan"]
