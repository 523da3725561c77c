"""Reports without drawing: three pictures cost more than a small run. For tests that look at other files."""

from markupsafe import Markup

from fedda.report import clients, plots
from fedda.report.sweep.charts import SweepFigure


def prepare(put=setattr):
    put(plots, "draw", lambda *_: b"not drawn")
    put(clients, "histogram", lambda *_: "not drawn")
    put(clients, "partition", lambda *_: "not drawn")
    put(SweepFigure, "png", lambda _: b"not drawn")
    put(SweepFigure, "svg", lambda _: Markup("<svg></svg>"))
