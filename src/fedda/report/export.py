"""Curves as CSV, final values as LaTeX."""

import base64
import csv
import gzip
import io
import math
import re

from .picture import Picture
from .tables import Cell, Table

HEADS = ("algorithm", "metric", "round", "gradients", "bytes", "seconds", "mean", "std", "seeds")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "±": r"$\pm$",
    "–": "--",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "[": "{[}",  # after \\ a bracket would be read as a length
    "]": "{]}",
    **{character: f"\\{character}" for character in "{}$&#_%"},
}


def csv_text(shown: Picture) -> str:
    """Every point of every curve, one per line; a missing value is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADS)
    for series in shown.series:
        for metric in shown.metrics:
            curve = series.curves.get(metric)
            if curve is not None:
                columns = [getattr(curve, head).tolist() for head in HEADS[2:]]
                writer.writerows([series.label, metric, *map(_number, point)] for point in zip(*columns, strict=True))
    return file.getvalue()


def latex_text(table: Table) -> str:
    """The final values as a booktabs table: a clear best of a column is bold, tied ones are underlined."""
    columns = len(table.heads)
    lines = [r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}", rf"\begin{{tabular}}{{l{'r' * columns}}}"]
    lines += [r"\toprule", " & ".join(escape(head) for head in ("Algorithm", *table.heads)) + r" \\"]
    for title, group in table.groups:
        lines.append(r"\midrule")
        if title:
            lines.append(rf"\multicolumn{{{1 + columns}}}{{l}}{{\emph{{{escape(title)}}}}} \\")
        for line in group:
            cells = [_marked(cell) for cell in line.cells]
            lines.append(" & ".join([escape(line.series.label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escape(text: str) -> str:
    return "".join(_LATEX.get(c, c if c.isprintable() else " ") for c in text)


def packed(text: str) -> str:
    """A text as gzip in base64, for a page that unpacks it: a fifth of the size of a large CSV.

    >>> gzip.decompress(base64.b64decode(packed("a,b"))).decode()
    'a,b'
    """
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _marked(cell: Cell) -> str:
    command = {"best": "textbf", "tie": "underline"}.get(cell.mark)
    return rf"\{command}{{{_cell(cell.text)}}}" if command else _cell(cell.text)


def _cell(text: str) -> str:
    return re.sub(r"e(-?\d+)\b", r"$\\cdot 10^{\1}$", escape(text))


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.10g}"
