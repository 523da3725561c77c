"""The server's side: clients over a Grid as an engine, so a run over a network is a run like any other."""

import json
import math
import re
import time
import uuid
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ..aggregation import unpack_reply
from ..core import ClientTask
from ..engines.simulated import Engine, SimulatedCohort
from .client import EVALUATE, HELLO, METRICS
from .traffic import traffic, travelling, wrappers
from .wire import Refused, fields_of, packed, tensors_of

POLL = 0.1  # seconds between two polls for replies; Flower's own loop waits three
REPLY = {"stamp": int, "draws": int, "gradients": int, "full_gradients": int}
MOST_SAMPLES = 2**31  # of one client
FIND = 30.0  # seconds that new nodes have to answer
MOST_GRADIENTS = 1_000_000  # of one client in one exchange
LATE, GONE = (3, 4), (5,)  # Flower's codes: a message or its reply has expired; the node is not connected
RAISED = re.compile(r"<class '[\w.]+\.SiteError'>:<'(\w{1,100})'>")  # as Flower reports an exception at a site
GREETING = {"samples": int, "d": int, "layout": str, "client": int}


class TooFewReplies(RuntimeError):
    """Too few usable replies in a round, several times in a row."""


@dataclass
class Rejections:
    """Replies that were not used: how many of each kind ("late", "malformed", ...), and the last message of each."""

    counts: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, client: int, message: str) -> None:
        self.counts[kind] += 1
        self.messages[kind] = f"client {client}: {' '.join(message.split())[:200]}"


@dataclass
class Federation(Engine):
    """The clients behind a Grid. It is an engine (`average`, `replies`): cohorts, keys and means are the simulation's.

    A reply that is late, gone, failed, refused, stale, malformed, not finite or larger than `limit` is counted and not
    used. With fewer than `min_replies` an exchange is repeated up to `repeats` times; then `TooFewReplies` ends the
    run.
    """

    grid: Grid
    algorithm: str  # a JSON table, as the clients get it
    batch: int
    dtype: torch.dtype
    timeout: float = 600.0
    min_replies: int = 2
    repeats: int = 2
    limit: float = 1e6
    run: str = field(default_factory=lambda: uuid.uuid4().hex)  # the run's name, kept after a restart
    aggregation: str = "[]"  # a JSON list of wrappers; their client parts run on the clients
    nodes: list[int] = field(default_factory=list)  # in the order of the clients
    names: list[int] = field(default_factory=list)  # the clients' own numbers: partition-id
    samples: list[int] = field(default_factory=list)  # that they claim to have
    rejections: Rejections = field(default_factory=Rejections)
    gradients: int = 0  # of clients whose replies were used, as reported by them
    full_gradients: int = 0
    stamp: int = 0  # of the next exchange
    longest: int = 0  # the longest tensor that was last sent down
    base: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # last exchange used of each client
    saved: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # the same, in the checkpoint
    connected: set[int] = field(default_factory=set)  # nodes at the end of the last exchange that missed a reply
    left_out: set[tuple[int, str]] = field(default_factory=set)  # nodes that were refused, and why

    # -- the clients ----------------------------------------------------------------------------------------------
    def greet(self, clients: int, layout: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Wait for this many clients (a resumed run waits for its own clients). Returns their numbers of samples."""
        deadline, own = time.monotonic() + self.timeout, list(self.names)
        known: dict[int, tuple[int, int]] = {}  # client: node and samples
        pending: dict[str, int] = {}  # message: node
        while not (set(own) <= set(known) if own else len(known) >= clients):
            if time.monotonic() > deadline:
                wanted = f"clients {own}" if own else f"{clients} clients"
                raise TooFewReplies(f"{wanted} are needed, {sorted(known)} arrived in {self.timeout:.0f} s")
            busy = {*pending.values(), *(node for node, _ in known.values())}
            fresh = [node for node in self.grid.get_node_ids() if node not in busy]
            pending |= self._post({node: self._request(HELLO, (), 0, -1, 0, 0) for node in fresh}, deadline)
            for message_id, message in self._pulled(pending).items():
                self._register(pending.pop(message_id), message, layout, known)
            time.sleep(POLL)
        self.names = own or sorted(known)
        self.nodes = [known[name][0] for name in self.names]
        self.samples = [known[name][1] for name in self.names]
        if not len(self.base):
            self.base, self.saved = (torch.full((len(self.nodes),), -1) for _ in range(2))
        return torch.tensor(self.samples)

    def claims(self) -> dict[str, int]:
        """The number of samples that each site claims, as JSON has it."""
        return {str(name): samples for name, samples in zip(self.names, self.samples, strict=True)}

    def _register(
        self, node: int, message: Message | None, layout: list[tuple[str, tuple[int, ...]]],
        known: dict[int, tuple[int, int]],
    ) -> None:  # fmt: skip
        """Add the client that a node reports. A node whose model or fields do not fit is left out and tried again."""
        try:
            about = fields_of(_content(message), GREETING)
            if about["layout"] != json.dumps(layout):
                raise Refused("its model has different parameters from the server's")
            if not 1 <= about["samples"] <= MOST_SAMPLES:
                raise Refused(f"its number of samples, {about['samples']}, is not possible")
            name = about["client"] if about["client"] >= 0 else node  # without a partition-id
            if name in known:
                raise Refused(f"client {name} exists already: two nodes have the same partition-id")
            known[name] = node, about["samples"]
        except Refused as why:
            if (node, str(why)) not in self.left_out:
                self.left_out.add((node, str(why)))
                warnings.warn(f"a client is left out: {why}", stacklevel=3)

    # -- the engine -----------------------------------------------------------------------------------------------
    def replies(
        self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], Tensor]:
        layout = tuple(cohort.simulation.problem.layout)
        shapes = traffic(self.algorithm, layout, self.dtype)[task.__name__].up
        self.longest = max(v.shape[-1] for v in down)
        stamp, self.stamp = self.stamp, self.stamp + 1
        ids, keys = cohort.ids.tolist(), cohort.key.tolist()
        received: dict[int, tuple[Tensor, ...]] = {}
        for _ in range(self.repeats + 1):
            self._find(cohort)
            wanted = [i for i, finite in enumerate(cohort.finite.tolist()) if finite and i not in received]
            received |= self._round(cohort, wanted, ids, keys, task.__name__, down, stamp, shapes)
            if len(received) >= self.min_replies:
                break
        else:
            usable = f"{len(received)} of {len(ids)} replies could be used, {self.min_replies} are needed"
            raise TooFewReplies(f"{usable} ({self.repeats + 1} attempts); rejected: {dict(self.rejections.counts)}")
        for i, k in enumerate(ids):
            if i in received:
                self.base[k] = stamp
            else:
                cohort.finite[i] = False
        zeros = tuple(torch.zeros(shape, dtype=self.dtype) for shape in shapes)
        rows = [torch.cat(column) for column in zip(*(received.get(i, zeros) for i in range(len(ids))), strict=True)]
        return rows, (cohort.simulation.weights[cohort.ids] * cohort.finite)[..., None]

    def _round(
        self, cohort: SimulatedCohort, wanted: list[int], ids: list[int], keys: list[int], task: str,
        down: tuple[Tensor, ...], stamp: int, shapes: tuple[tuple[int, ...], ...],
    ) -> dict[int, tuple[Tensor, ...]]:  # fmt: skip
        """Ask these members of the cohort once. Returns the usable replies."""
        requests = {
            self.nodes[ids[i]]: self._request(task, down, stamp, ids[i], keys[i], cohort.drawn_before) for i in wanted
        }
        answers = self._exchange(requests, time.monotonic() + self.timeout)
        usable = {}
        for i in wanted:
            checked = self._checked(answers.get(self.nodes[ids[i]]), ids[i], stamp, shapes)
            if checked is not None:
                usable[i], draws = checked
                cohort.drawn_so_far = max(cohort.drawn_so_far, draws)
        return usable

    def _checked(
        self, message: Message | None, client: int, stamp: int, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[Tensor, ...], int] | None:
        reject = self.rejections.add
        if message is None or message.has_error():
            return reject(*self._fault(message, client))
        try:
            content = _content(message)
            fields = fields_of(content, REPLY)
            if fields["stamp"] != stamp:
                return reject("stale", client, f"a reply to exchange {fields['stamp']} in exchange {stamp}")
            up = self._unpacked(content, shapes)
        except Refused as why:
            refusal = message.content.config_records.get("refused") if message.has_content() else None
            if refusal is None:
                return reject("malformed", client, str(why))
            return reject("refused", client, str(refusal.get("why", "")))
        if not all(bool(v.isfinite().all()) for v in up):
            return reject("not finite", client, "a value is not finite")
        most = max(float(v.abs().max()) for v in up)
        if most > self.limit:
            return reject("too large", client, f"a value of size {most:.3g}; the limit is {self.limit:.3g}")
        if not all(0 <= fields[name] <= MOST_GRADIENTS for name in ("draws", "gradients", "full_gradients")):
            return reject("malformed", client, "a count is out of range")
        self.gradients += fields["gradients"]
        self.full_gradients += fields["full_gradients"]
        return up, fields["draws"]

    def _fault(self, message: Message | None, client: int) -> tuple[str, int, str]:
        """What has happened if there is no reply: the kind, the client, and what is known."""
        if message is None:
            connected = self.nodes[client] in self.connected
            why = "" if connected else "; its node is not connected"
            return "late" if connected else "gone", client, f"no reply in {self.timeout:g} s{why}"
        code, reason = message.error.code, str(message.error.reason or message.error.code)
        if raised := RAISED.fullmatch(reason):
            reason = f"its code raised {raised[1]}; the text is in the site's own log"
        return "late" if code in LATE else "gone" if code in GONE else "failed", client, reason

    def _unpacked(self, content: RecordDict, shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
        """The replies, unpacked from the tensors in which they travelled."""
        around = wrappers(self.aggregation)
        expected = travelling(around, shapes, self.dtype, self.longest)
        parts = iter(tensors_of(content, [form for own in expected for form in own]))
        try:
            return tuple(
                unpack_reply(around, [next(parts) for _ in own], shape, self.dtype, self.longest)
                for own, shape in zip(expected, shapes, strict=True)
            )
        except ValueError as why:
            raise Refused(str(why)) from None

    def evaluate(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The metrics of a model on the clients' own samples: {name: (values, clients)}."""
        requests = {node: self._request(EVALUATE, (x.view(1, -1),), self.stamp, -1, 0, 0) for node in self.nodes}
        answers = self._exchange(requests, time.monotonic() + self.timeout)
        metrics: dict[str, dict[int, float]] = {}
        for client, node in enumerate(self.nodes):
            message = answers.get(node)
            if message is None or message.has_error():
                self.rejections.add(*self._fault(message, client))
                continue
            try:
                content = _content(message)
                names = fields_of(content, {"stamp": int, "names": list})["names"]
                if tuple(names) not in (METRICS, METRICS[:1]):
                    raise Refused("the metrics must be a loss and an accuracy")
                values = tensors_of(content, [((1, 1), torch.float64)] * len(names))
                for name, value in zip(names, values, strict=True):
                    self._check_metric(name, float(value))
            except Refused as why:
                self.rejections.add("malformed", client, f"its metrics: {why}")
                continue
            for name, value in zip(names, values, strict=True):
                metrics.setdefault(name, {})[client] = float(value)
        return {
            name: (torch.tensor(list(values.values()), dtype=torch.float64), torch.tensor(list(values)))
            for name, values in metrics.items()
        }

    def _check_metric(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise Refused(f"{name} is not finite")
        if name == "train_accuracy" and not 0 <= value <= 1:
            raise Refused(f"{name} must be in [0, 1], got {value:.3g}")
        if abs(value) > self.limit:
            raise Refused(f"{name} is {value:.3g}; the limit is {self.limit:.3g}")

    # -- messages -------------------------------------------------------------------------------------------------
    def _request(self, task: str, down: tuple[Tensor, ...], stamp: int, client: int, key: int, drawn: int) -> Any:
        base, saved = (int(self.base[client]), int(self.saved[client])) if client >= 0 else (-1, -1)
        fields = {"task": task, "algorithm": self.algorithm, "aggregation": self.aggregation, "run": self.run}
        numbers = {"stamp": stamp, "base": base, "saved": saved, "key": key, "drawn": drawn, "batch": self.batch}
        return packed(down, fields | {"dtype": str(self.dtype).removeprefix("torch.")} | numbers)

    def _post(self, contents: dict[int, Any], deadline: float) -> dict[str, int]:
        """Send to nodes. Returns the ids of the messages, with their nodes."""
        if not contents:
            return {}
        ttl = max(1.0, deadline - time.monotonic())
        messages = [self.grid.create_message(content, "query", node, "", ttl) for node, content in contents.items()]
        sent = zip(self.grid.push_messages(messages), contents, strict=True)
        return {message_id: node for message_id, node in sent if message_id}

    def _pulled(self, pending: dict[str, int]) -> dict[str, Message]:
        """The replies that have arrived, by the message they answer: an error comes from another source."""
        pulled = self.grid.pull_messages(sorted(pending)) if pending else ()
        return {m.metadata.reply_to_message_id: m for m in pulled if m.metadata.reply_to_message_id in pending}

    def _exchange(self, contents: dict[int, Any], deadline: float) -> dict[int, Message]:
        """Send to nodes, and wait for their replies until the deadline."""
        pending, answers = self._post(contents, deadline), {}
        while pending and time.monotonic() < deadline:
            for message_id, message in self._pulled(pending).items():
                answers[pending.pop(message_id)] = message
            if pending:
                time.sleep(POLL)
        if len(answers) < len(contents):
            self.connected = set(self.grid.get_node_ids())
        return answers

    def _find(self, cohort: SimulatedCohort) -> None:
        """A restarted node has a new number: if a client of the cohort is missing, ask the new nodes who they are."""
        there = set(self.grid.get_node_ids())
        missing = {self.names[k]: k for k in cohort.ids.tolist() if self.nodes[k] not in there}
        strangers = [node for node in there if node not in self.nodes] if missing else []
        known: dict[int, tuple[int, int]] = {}
        requests = {node: self._request(HELLO, (), 0, -1, 0, 0) for node in strangers}
        for node, message in self._exchange(requests, time.monotonic() + min(FIND, self.timeout)).items():
            self._register(node, message, cohort.simulation.problem.layout, known)
        for name, (node, _) in known.items():
            if name in missing:  # a client that is present is not replaced
                self.nodes[missing[name]] = node


def _content(message: Message | None) -> Any:
    if message is None or not message.has_content():
        raise Refused("the message has no content")
    return message.content
