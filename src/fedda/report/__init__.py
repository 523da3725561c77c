"""The report of a run folder: files in, `report.html` and figures out; nothing here imports torch."""

from fedda.report.html import write
from fedda.report.read import Run, read
from fedda.report.summary import summary

__all__ = ["Run", "read", "summary", "write"]
