"""Secure aggregation over Flower: two messages per exchange, an upload and the removal of masks (docs/deployment.md).

The public keys travel with the greeting. A key serves until the next one, and every mask is derived for one exchange.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from ..aggregation import Clip, Compression, Wrapper
from ..aggregation.dry_run import ZeroGradientClient, ZeroGradientCohort
from ..core import Algorithm, ClientTask
from ..engines.simulated import SimulatedCohort
from .federation import PULLED, Federation, TooFewReplies
from .masking import BITS, MOST_COUNT, MOST_SIGNATURE, Terms, Unfit, Unmasking, check_uploads, two_thirds
from .secure_client import GREETED, REVEAL, rows_of
from .sharing import SECRET
from .wire import Refused, arrays_of, fields_of, forget, tensors_of

UPLOAD = {"stamp": int, "draws": int}
COUNTS = 2  # gradients and full gradients travel in the sum too
INTEGERS = {32: torch.int32, 64: torch.int64}


@dataclass
class SecureSums:
    """The server's part: it learns sums over the sites, and no vector, weight, count or metric of a single one."""

    greeting: ClassVar[str] = GREETED

    bits: int
    most: int  # the largest weight of a site; 1 if all weigh the same
    number: int = 0  # of the next exchange
    public: dict[int, tuple[str, str]] = field(default_factory=dict)  # by node: its public key, and the signature
    extra_up: int = 0  # bytes beyond those of the replies, since they were last taken
    extra_down: int = 0

    def admit(self, node: int, public: str, signature: str) -> None:
        """Take the public key of a node. Refuses one that is malformed, or that another node has sent."""
        others = (key for other, (key, _) in self.public.items() if other != node)
        if not re.fullmatch("[0-9a-f]{64}", public) or public in others:
            raise Refused("its public key must be 64 hexadecimal digits of its own")
        if not re.fullmatch(f"[0-9a-f]{{0,{MOST_SIGNATURE}}}", signature):
            raise Refused("the signature of its public key is malformed")
        self.public[node] = public, signature

    def average(
        self, federation: Federation, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The means of the replies, as an engine gives them."""
        shapes, arrays = federation._shapes(cohort, task.__name__), arrays_of(down)
        stamp, federation.stamp = federation.stamp, federation.stamp + 1
        ids, keys = cohort.ids.tolist(), cohort.key.tolist()
        place = {k: i for i, k in enumerate(ids)}

        def request(client: int, secure: str) -> RecordDict:
            key = keys[place[client]]
            return federation._request(task.__name__, arrays, stamp, client, key, cohort.drawn_before, secure)

        for _ in range(federation.repeats + 1):
            federation._find(cohort)
            wanted = [k for k in ids if bool(cohort.finite[place[k]])]
            attempt = self._attempt(federation, wanted, task.__name__, stamp, request, sum(map(math.prod, shapes)))
            if attempt is not None:
                break
        else:
            rejected = dict(federation.rejections.counts)
            why = f"no sum of enough sites ({federation.repeats + 1} attempts)"
            raise TooFewReplies(f"{why}; rejected: {rejected}")
        self.extra_up -= len(ids) * sum(map(math.prod, shapes)) * federation.dtype.itemsize
        cohort.drawn_so_far = max(cohort.drawn_so_far, attempt.draws)
        federation.gradients += attempt.counts[0]
        federation.full_gradients += attempt.counts[1]
        for i, k in enumerate(ids):
            if k in attempt.clients:
                federation.base[k] = stamp
                federation.rejections.site(federation.names[k]).replies += 1
            else:
                cohort.finite[i] = False
        parts = torch.from_numpy(attempt.mean).split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape).to(federation.dtype) for part, shape in zip(parts, shapes, strict=True))

    def evaluate(
        self, federation: Federation, task: str, down: tuple[Tensor, ...], names: tuple[str, ...]
    ) -> dict[str, float]:
        """The means of the sites' metrics, of those that all sites have: the second half of an upload says which."""
        attempt = self._ask(federation, task, down, 2 * len(names))
        if attempt is None:
            return {}
        values, complete = attempt.mean.reshape(2, -1).tolist()
        triples = zip(names, values, complete, strict=True)
        return {name: value for name, value, share in triples if share > 1 - 1e-3}

    def moments(self, federation: Federation, task: str, x: Tensor, size: int, draws: int) -> Tensor:
        """The means of the sites' moments of BatchNorm, [1, size]."""
        for _ in range(federation.repeats + 1):
            if (attempt := self._ask(federation, task, (x,), size, draws)) is not None:
                return torch.from_numpy(attempt.mean).view(1, size)
        rejected = dict(federation.rejections.counts)
        why = f"the statistics of BatchNorm: no sum of enough sites ({federation.repeats + 1} attempts)"
        raise TooFewReplies(f"{why}; rejected: {rejected}")

    def _ask(
        self, federation: Federation, task: str, down: tuple[Tensor, ...], length: int, drawn: int = 0
    ) -> Attempt | None:
        """One exchange with all sites, for an evaluation; its bytes are not counted."""
        arrays = arrays_of(down)

        def request(client: int, secure: str) -> RecordDict:
            return federation._request(task, arrays, federation.stamp, -1, 0, drawn, secure)

        before = self.extra_up, self.extra_down
        everyone = list(range(len(federation.nodes)))
        attempt = self._attempt(federation, everyone, task, federation.stamp, request, length)
        self.extra_up, self.extra_down = before
        return attempt

    def _attempt(
        self, federation: Federation, wanted: list[int], task: str, stamp: int,
        request: Callable[[int, str], RecordDict], length: int,
    ) -> Attempt | None:  # fmt: skip
        """One exchange with these clients; None if too few of them took part."""
        self._renew(federation, wanted)
        clients = [k for k in wanted if federation.nodes[k] in self.public]
        needed = max(federation.min_replies, two_thirds(len(clients)))
        if len(clients) < max(needed, 2):
            return None
        keys, signatures = zip(*(self.public[federation.nodes[k]] for k in clients), strict=True)
        terms = Terms(
            federation.run, self.number, task, stamp, tuple(federation.names[k] for k in clients), keys, signatures,
            needed, self.bits, federation.limit, self.most,
        )  # fmt: skip
        self.number += 1
        unmasking, draws = Unmasking(terms, length + 1 + COUNTS), 0
        requests = {k: request(k, terms.text) for k in clients}
        self.extra_down += len(clients) * len(terms.text)
        for k, message in self._replies(federation, requests, unmasking.total.nbytes):
            name = federation.names[k]
            forms = [((1, len(unmasking.total)), INTEGERS[self.bits])]
            forms += [((len(terms.holders(name)), terms.bundle_bytes(name)), torch.uint8)]
            if (reply := self._checked(federation, message, k, UPLOAD, stamp, forms)) is not None:
                fields, (vector, bundles) = reply
                if not 0 <= fields["draws"] <= MOST_COUNT:
                    federation._reject("malformed", k, "a count is out of range")
                    continue
                unmasking.add(name, vector.numpy()[0].view(terms.unsigned), [row.numpy().tobytes() for row in bundles])
                draws = max(draws, fields["draws"])
        names = unmasking.uploaded
        try:
            check_uploads(terms, names, names)
        except Unfit:
            return None
        there = [k for k in clients if federation.names[k] in unmasking.bundles]
        text = json.dumps({"terms": terms.text, "uploaded": names})
        requests = {}
        for k in there:
            rows = tuple(rows_of([bundle]) for bundle in unmasking.bundles_for(federation.names[k]))
            self.extra_down += len(text) + sum(row.numel() for row in rows)
            requests[k] = federation._request(REVEAL, arrays_of(rows), stamp, -1, 0, 0, text)
        for k, message in self._replies(federation, requests, 1, lambda: unmasking.complete):
            form = [((unmasking.shares_from(federation.names[k]), SECRET), torch.uint8)]
            if (reply := self._checked(federation, message, k, {"stamp": int}, stamp, form)) is not None:
                unmasking.reveal(federation.names[k], [row.numpy().tobytes() for row in reply[1][0]])
        if not unmasking.complete:
            return None
        mean, weight, counts = terms.decode(unmasking.sum(), COUNTS)
        whole = len(names) <= weight <= len(names) * self.most and all(
            0 <= n <= len(names) * MOST_COUNT for n in counts
        )
        if not whole or float(np.abs(mean).max()) > terms.limit + terms.error:  # no single site can be named
            federation.rejections.counts["malformed"] += 1
            federation.rejections.messages["malformed"] = (
                f"one of the clients {names}: the masks do not cancel, so an upload or a share is wrong"
            )
            return None
        return Attempt(mean, counts, set(there), draws)

    def _renew(self, federation: Federation, wanted: list[int]) -> None:
        """Ask the sites that have no key, or have lost it, for a new one."""
        lacking = {federation.nodes[k]: k for k in wanted if federation.nodes[k] not in self.public}
        federation.greet_again(lacking)

    def _replies(
        self,
        federation: Federation,
        requests: dict[int, RecordDict],
        size: int,
        enough: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Message | None]]:
        """The replies, of about `size` bytes, as they arrive; at the deadline, None for each client without one."""
        client_of = {federation.nodes[k]: k for k in requests}
        contents = {federation.nodes[k]: content for k, content in requests.items()}
        at_a_time = max(1, int(PULLED / size))
        for node, message in federation._exchange(contents, time.monotonic() + federation.timeout, at_a_time):
            yield client_of.pop(node), message
            if enough():
                federation.waiting = set()
                return
        for k in client_of.values():
            yield k, None

    def _checked(
        self, federation: Federation, message: Message | None, client: int, expected: Mapping[str, type], stamp: int,
        forms: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]] | None:  # fmt: skip
        """The fields and tensors of a reply, or None if it cannot be used."""
        reject = federation._reject
        if message is None or message.has_error():
            return reject(*federation._fault(message, client))
        refusal = message.content.config_records.get("refused") if message.has_content() else None
        if refusal is not None:
            self.public.pop(federation.nodes[client], None)  # it may have lost its key
            return reject("refused", client, str(refusal.get("why", "")))
        try:
            if not message.has_content():
                raise Refused("the message has no content")
            fields = fields_of(message.content, expected)
            if fields["stamp"] != stamp:
                return reject("stale", client, f"a reply to exchange {fields['stamp']} in exchange {stamp}")
            tensors = tensors_of(message.content, forms)
            forget(message.content)
        except Refused as why:
            return reject("malformed", client, str(why))
        self.extra_up += sum(v.numel() * v.element_size() for v in tensors)
        return fields, tensors

    def take_bytes(self) -> tuple[int, int]:
        """The additional bytes, up and down, since the last call."""
        taken, self.extra_up, self.extra_down = (self.extra_up, self.extra_down), 0, 0
        return taken


@dataclass
class Attempt:
    """A sum that was unmasked."""

    mean: np.ndarray
    counts: list[int]  # gradients and full gradients
    clients: set[int]  # those who uploaded
    draws: int


# -- what cannot work -------------------------------------------------------------------------------------------------
def refuse_settings(
    bits: int, sites: int, most: int, limit: float, known: Algorithm, around: tuple[Wrapper, ...]
) -> None:
    """Refuse settings of a run that need more than sums."""
    owner = "Plan: secure_aggregation"
    if bits not in BITS:
        raise ValueError(f"Plan: secure_bits must be 32 or 64, got {bits!r}")
    if sites < 2:
        raise ValueError(f"{owner} needs at least 2 sites per round")
    if known.epochs is not None or known.proportional:
        raise ValueError(f"{owner} hides the sites' sizes, which epochs and steps='proportional' need: use steps")
    for wrapper in around:
        name = type(wrapper).__name__
        if isinstance(wrapper, Clip) and wrapper.combines:
            raise ValueError(f"{owner} hides single replies, which Clip on the server needs: use where='client'")
        if wrapper.combines:
            raise ValueError(f"{owner} gives the server a sum, and {name} needs single replies")
        if isinstance(wrapper, Compression):
            raise ValueError(f"{owner} adds whole vectors, which {name} does not send")
    try:
        terms_for(sites, bits, limit, most)
    except Unfit as why:
        raise ValueError(f"{owner}: {why}") from None


def terms_for(sites: int, bits: int, limit: float, most: int) -> Terms:
    """The terms of an exchange of so many sites, for what they say about numbers."""
    keys = tuple(f"{k:064x}" for k in range(sites))
    return Terms("", 0, "", 0, tuple(range(sites)), keys, ("",) * sites, sites, bits, float(limit), most)


def refuse_algorithm(algorithm: Algorithm, x: Tensor, weights: str) -> None:
    """Refuse an algorithm whose server asks for more than means. `algorithm` is bound to its problem."""
    probe = _Probe(ZeroGradientClient(x, algorithm.memory))
    with torch.no_grad():
        algorithm.round(algorithm.init(x, probe), probe)
    owner = f"secure_aggregation: {type(algorithm).__name__}"
    if probe.single:
        raise ValueError(f"{owner} needs single replies, and the server gets only sums")
    if probe.shares and weights != "uniform":
        raise ValueError(f"{owner} needs the total of all sites' sizes, which are hidden: use weights='uniform'")


class _Probe(ZeroGradientCohort):
    """Notes whether an algorithm asks for single replies, or for the cohort's share."""

    single = shares = False

    @property
    def share(self) -> Tensor:
        self.shares = True
        return super().share

    def replies(self, task: ClientTask, *down: Tensor) -> tuple[list[Tensor], Tensor]:
        self.single = True
        return super().replies(task, *down)
