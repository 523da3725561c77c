"""One paper, one file. Importing this package registers every algorithm."""

from . import (
    fafed,
    fedavg,
    fedavgm,
    fedcm,
    fedda,
    feddyn,
    fedexp,
    fedglomo,
    fedopt,
    fedprox,
    local_adapt,
    local_amsgrad,
    mime,
    mime_mvr,
    scaffold,
    stem,
)

__all__ = [
    "fafed",
    "fedavg",
    "fedavgm",
    "fedcm",
    "fedda",
    "feddyn",
    "fedexp",
    "fedglomo",
    "fedopt",
    "fedprox",
    "local_adapt",
    "local_amsgrad",
    "mime",
    "mime_mvr",
    "scaffold",
    "stem",
]
