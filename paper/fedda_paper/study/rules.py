"""The rules of the study: who goes on, who wins, and when a grid is extended."""

import math
import statistics
from collections.abc import Sequence

from .methods import Point, StudyMethod, Values, key

FAR = {"accuracy": 0.05, "loss": 0.1}  # how far behind the best is far: a unit in which tasks are compared


def mean(values: Sequence[float] | None) -> float:
    """A point with a diverged seed is out."""
    return statistics.fmean(values) if values else -math.inf


def error(values: Sequence[float]) -> float:
    """The standard error; 0 for one seed."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def ranked(method: StudyMethod, points: Sequence[Point], values: Values) -> list[Point]:
    """The points that did not diverge, the best first; of equal ones the smaller rate."""
    alive = [point for point in points if values(point)]
    return sorted(alive, key=lambda point: (-mean(values(point)), point[method.rate]))


def winner(method: StudyMethod, points: Sequence[Point], values: Values) -> Point | None:
    """The best point; of those within one standard error of it, the one with the smallest rate."""
    order = ranked(method, points, values)
    if not order:
        return None
    least = mean(values(order[0])) - error(values(order[0]) or [])
    ties = [point for point in order if mean(values(point)) >= least]
    return min(ties, key=lambda point: (point[method.rate], -mean(values(point))))


def edges(method: StudyMethod, tried: Sequence[Point], best: Point) -> list[tuple[str, bool]]:
    """The words in which the best point is the last of those tried beside it, and whether it is the largest."""
    found = []
    for axis in method.axes:
        if not axis.is_number or axis.word not in best:
            continue
        others = {word: value for word, value in best.items() if word != axis.word}
        line = [p[axis.word] for p in tried if {w: v for w, v in p.items() if w != axis.word} == others]
        for up, end in ((False, min(line, default=None)), (True, max(line, default=None))):
            if best[axis.word] == end and axis.beyond(end, up):
                found.append((axis.word, up))
    return found


def extended(method: StudyMethod, tried: Sequence[Point], best: Point | None, left: int) -> list[Point]:
    """Two more points beyond each edge that the best point is at, as long as some are left."""
    more: list[Point] = []
    axes = {axis.word: axis for axis in method.axes}
    for word, up in edges(method, tried, best) if best else ():
        new = [best | {word: value} for value in axes[word].beyond(best[word], up)]  # type: ignore[operator, index]
        if len(more) + len(new) <= left:
            more += new
    known = {key(point) for point in tried}
    return [point for point in more if key(point) not in known]
