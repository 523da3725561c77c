"""The part of docs/choosing.md on tasks that vary another one: how much clients differ, and how long a round is."""

from ..tables import markdown
from .studied import StudiedMethod, Tasks, difference, equally_good, link, rounds, score

# Tasks that differ only in the share of a client's samples that are of one class, in percent.
SHARES = {
    "Small data": {"digits-alike": 10, "digits-rho50": 50, "digits-heterogeneous": 80, "digits-rho95": 95},
    "Images": {"cifar10": 10, "cifar10-rho50": 50, "cifar10-heterogeneous": 80, "cifar10-rho95": 95},
}
LONGER = {"Small data": "digits-heterogeneous", "Images": "cifar10-heterogeneous"}  # with 5 steps; "-i20" has 20

DIFFER = """\
## When clients differ more or less

The share of a client's samples that are of one class, from 10 % (all clients are alike) to 95 %. Every column is a
study of its own: all methods were tuned anew. Test accuracy; **bold**: as good as the best of its column."""
LONG = """\
## Longer rounds

20 local steps per round instead of 5. Of each method only the rate was tuned again. Both columns are of the first
tuning, so that they can be compared."""


def part(tasks: Tasks) -> str:
    """Both sections, as far as the tasks are finished."""
    shares = [by_share(kind, tasks, series) for kind, series in SHARES.items() if all(t in tasks for t in series)]
    longer = [by_steps(kind, tasks[name], tasks[f"{name}-i20"]) for kind, name in LONGER.items()
              if name in tasks and f"{name}-i20" in tasks]  # fmt: skip
    return "\n\n".join([*([DIFFER, *shares] if shares else []), *([LONG, *longer] if longer else [])])


def whole(methods: list[StudiedMethod]) -> dict[str, StudiedMethod]:
    """The methods with all their finals, the best first."""
    return {m.name: m for m in methods if m.finished}


def by_share(kind: str, tasks: Tasks, series: dict[str, int]) -> str:
    """A row for each method, a column for each share; the best where clients differ most come first."""
    columns = [whole(tasks[name]) for name in series]
    good = [{m.name for m in equally_good(list(column.values()))} for column in columns]
    order = sorted(columns[-1], key=lambda name: -columns[-1][name].test)
    rows = []
    for name in (name for name in order if all(name in column for column in columns)):
        cells = [score(*column[name].interval()) for column in columns]
        bold = [f"**{cell}**" if name in equal else cell for cell, equal in zip(cells, good, strict=True)]
        loss = columns[0][name].test - columns[-1][name].test
        rows.append([link(columns[0][name]), *bold, f"{100 * loss:.1f}"])
    shares = [f"{share} %" for share in series.values()]
    heads = [kind.lower(), *shares, f"points lost from {shares[0]} to {shares[-1]}"]
    return markdown(heads, rows)


def by_steps(kind: str, short: list[StudiedMethod], long: list[StudiedMethod]) -> str:
    """Both lengths of a round side by side, the best of the long ones first. Only the first tuning had both."""
    five, twenty = whole([m.first or m for m in short]), whole(long)
    rows = [
        [link(m), score(*five[name].interval()), score(*m.interval()), difference(*m.against(five[name]), loss=False),
         rounds(five[name]), rounds(m)]
        for name, m in twenty.items() if name in five
    ]  # fmt: skip
    heads = [kind.lower(), "5 steps", "20 steps", "difference", "rounds to the target, 5 steps", "20 steps"]
    return markdown(heads, rows)
