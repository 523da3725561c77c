"""The messages between a server and a relay, which stands for all sites of a federation of its own (`relay.py`).

The server draws its cohorts over all sites. It sends a relay one message for those of its sites that take part, with
the number, the key, the weight and the exchanges of each, and gets their weighted mean.
"""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor

from ..aggregation.dry_run import Shapes
from .wire import Refused, fields_of, packed, tensors_of

if TYPE_CHECKING:
    from .federation import Federation

KINDS = ("late", "gone", "failed", "refused", "stale", "malformed", "not finite", "too large")  # of rejected replies
REQUEST: dict[str, type] = dict.fromkeys(("task", "algorithm", "aggregation", "run", "dtype", "secure"), str)
REQUEST |= dict.fromkeys(("stamp", "drawn", "batch"), int)
REQUEST |= dict.fromkeys(("clients", "keys", "bases", "saved", "weights"), list)  # by site
REQUEST["metrics"] = list
ABOUT_MODEL: dict[str, type] = {"d": int, "layout": str, "statistics": int, "frozen": str}  # in a greeting
GREETING: dict[str, type] = {"samples": list, "client": int, "clients": list, **ABOUT_MODEL}
REPLY = {"stamp": int, "draws": int, "gradients": int, "full_gradients": int, "used": list, "rejected": str}
METRICS_REPLY = {"stamp": int, "names": list, "weights": list, "rejected": str}


def request(
    federation: "Federation", task: str, arrays: ArrayRecord, stamp: int, clients: list[int], keys: list[int],
    weights: list[float], drawn: int = 0,
) -> RecordDict:  # fmt: skip
    """A request to a relay for these clients, which are all behind it."""
    fields: dict[str, Any] = {"task": task, "algorithm": federation.algorithm, "aggregation": federation.aggregation}
    fields |= {"run": federation.run, "dtype": str(federation.dtype).removeprefix("torch."), "secure": ""}
    fields |= {"stamp": stamp, "drawn": drawn, "batch": federation.batch, "keys": keys, "weights": weights}
    fields["metrics"] = federation.reported.names
    fields["clients"] = [federation.names[k] for k in clients]
    fields["bases"] = [int(federation.base[k]) for k in clients]
    fields["saved"] = [int(federation.saved[k]) for k in clients]
    return packed(arrays, fields)


def read_reply(
    federation: "Federation", message: Message, clients: list[int], stamp: int, shapes: Shapes, most_gradients: int
) -> tuple[list[int], tuple[Tensor, ...], int]:
    """Which of the clients were used, the means of their replies in float64, and the number of draws.

    What the relay has rejected is counted here too. If it had too few replies, none of them was used.
    """
    content = message.content if message.has_content() else RecordDict()
    fields = fields_of(content, REPLY)
    if fields["stamp"] != stamp:
        raise Refused(f"a reply of exchange {fields['stamp']} in exchange {stamp}")
    position = {federation.names[k]: k for k in clients}
    used = fields["used"]
    if len(set(used)) != len(used) or not set(used) <= set(position):
        raise Refused("a relay must use sites that it was asked for, each of them once")
    counts = [fields[name] for name in ("draws", "gradients", "full_gradients")]
    if not all(0 <= count <= most_gradients * max(1, len(used)) for count in counts):
        raise Refused("a count is out of range")
    up = tensors_of(content, [(shape, torch.float64) for shape in shapes] if used else [])
    for tensor in up:
        if not math.isfinite(most := float(tensor.abs().max())) or most > federation.limit:
            raise Refused(f"a mean of size {most:.3g}; the limit is {federation.limit:.3g}")
    rejected = _count_rejected(federation, fields["rejected"], position)
    for name in set(position) - set(used) - rejected:
        federation._reject("refused", position[name], "its relay had too few replies")
    federation.gradients += fields["gradients"]
    federation.full_gradients += fields["full_gradients"]
    return [position[name] for name in used], up, fields["draws"]


def read_metrics(
    federation: "Federation", message: Message, clients: list[int], most: float
) -> dict[str, tuple[float, float]]:
    """For each metric the mean over the clients of a relay, and their weight, at most `most`."""
    content = message.content if message.has_content() else RecordDict()
    fields = fields_of(content, METRICS_REPLY)
    names, weights = fields["names"], fields["weights"]
    federation.reported.check_columns(names)
    if len(weights) != len(names):
        raise Refused("each metric must have a weight")
    values = [float(v) for v in tensors_of(content, [((1, 1), torch.float64)] * len(names))]
    for name, value, weight in zip(names, values, weights, strict=True):
        federation.reported.check(name, value, federation.limit)
        if not 0 < weight <= most:
            raise Refused(f"the weight of {name} is not possible")
    _count_rejected(federation, fields["rejected"], {federation.names[k]: k for k in clients})
    return {n: (value, weight) for n, value, weight in zip(names, values, weights, strict=True)}


def rejected_by_site(federation: "Federation") -> str:
    """What a relay has rejected in one exchange: {site: {kind: [how often, the last message]}}, as JSON."""
    return json.dumps({
        site: {kind: [count, record.last[kind]] for kind, count in record.rejected.items()}
        for site, record in federation.rejections.sites.items() if record.rejected
    })  # fmt: skip


def _count_rejected(federation: "Federation", text: str, position: dict[int, int]) -> set[int]:
    """Count what a relay has rejected. Returns the numbers of the sites."""
    try:
        table = {int(site): dict(kinds) for site, kinds in json.loads(text).items()}
        rejected = [(position[n], kind, *about) for n, kinds in table.items() for kind, about in kinds.items()]
        for _, kind, count, last in rejected:
            if kind not in KINDS or not 1 <= count <= 100 or not isinstance(last, str):
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Refused("the rejected replies of a relay must be counted by site and kind") from None
    for client, kind, count, last in rejected:
        for _ in range(count):
            federation._reject(kind, client, last)
    return set(table)


def total_weight(weights: Tensor, members: Sequence[int]) -> float:
    """The weight of some members of a cohort."""
    return float(weights[list(members)].sum())
