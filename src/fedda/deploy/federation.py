"""The server's side: clients over a Grid as an engine, so a run over a network is a run like any other."""

import json
import math
import re
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ..aggregation.compression import unpack_reply
from ..aggregation.dry_run import Shapes
from ..core import ClientTask
from ..engines.simulated import Engine, Replies, SimulatedCohort
from ..problems.batchnorm import SAMPLES, mini_batches
from . import relayed
from .client import EVALUATE, HELLO, STATISTICS
from .participants import Participants
from .report import REFUSED_NODES, Rejections, Stopwatch, printable
from .reported import ReportedMetrics
from .sums import ExactSum
from .traffic import traffic, travelling, wrappers
from .wire import Refused, arrays_of, fields_of, forget, packed, tensors_of

if TYPE_CHECKING:
    from .secure import SecureSums

POLL = 0.1  # seconds between two polls for replies; Flower's own loop waits three
REFRESH = 5.0  # seconds between two reports while replies are awaited
REPLY = {"stamp": int, "draws": int, "gradients": int, "full_gradients": int}
MOST_SAMPLES = 2**31  # of one client
FIND = 30.0  # seconds that new nodes have to answer
ASK_AGAIN = 10.0  # seconds until a node that was refused is asked again who it is
PULLED = 32e6  # bytes of replies that are pulled at a time
MOST_GRADIENTS = 1_000_000  # of one client in one exchange
LATE, GONE = (3, 4), (5,)  # Flower's codes: a message or its reply has expired; the node is not connected
RAISED = re.compile(r"<class '[\w.]+\.SiteError'>:<'(\w{1,100})'>")  # as Flower reports an exception at a site
GREETING: dict[str, type] = {"samples": int, "client": int, "public": str, "signature": str, **relayed.ABOUT_MODEL}


class TooFewReplies(RuntimeError):
    """Too few usable replies in a round, several times in a row."""


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
    without: frozenset[int] = frozenset()  # numbers of sites that are left out
    participants: Participants = field(default_factory=Participants)  # which key belongs to which site
    connected: set[int] = field(default_factory=set)  # nodes, when this was last asked
    keys: dict[int, str] = field(default_factory=dict)  # fingerprints by site, where the participants are known
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)  # at the start: client: node and samples
    waiting: set[int] = field(default_factory=set)  # nodes whose reply is awaited
    refused_nodes: dict[tuple[int, str], str] = field(default_factory=dict)  # nodes that were not let in, and why
    watch: Stopwatch = field(default_factory=Stopwatch)
    refresh: Callable[[], None] = lambda: None  # called now and then while replies are awaited
    refreshed: float = field(default_factory=time.monotonic)
    relays: set[int] = field(default_factory=set)  # nodes that stand for several clients
    secure: "SecureSums | None" = None  # secure aggregation: the server sees sums instead of replies
    reported: ReportedMetrics = field(default_factory=ReportedMetrics)  # the metrics that sites are asked for
    statistics_size: int = 0  # of all means and variances of BatchNorm
    frozen: str = ""  # the hash of the frozen parameters

    # -- the clients ----------------------------------------------------------------------------------------------
    def greet(self, clients: int, layout: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        """Wait for this many clients (a resumed run waits for its own clients). Returns their numbers of samples."""
        with self.watch.part("nodes", whole=True):
            return self._greet(clients, layout)

    def _greet(self, clients: int, layout: list[tuple[str, tuple[int, ...]]]) -> Tensor:
        deadline, own, known = time.monotonic() + self.timeout, list(self.names), self.arrived
        pending: dict[str, int] = {}  # message: node
        again: dict[int, float] = {}  # node: when it may be asked again
        while not (set(own) <= set(known) if own else len(known) >= clients):
            if time.monotonic() > deadline:
                wanted = f"clients {own}" if own else f"{clients} clients"
                raise TooFewReplies(f"{wanted} are needed, {sorted(known)} arrived in {self.timeout:.0f} s")
            busy = {*pending.values(), *(node for node, _ in known.values())}
            self.connected = set(self.grid.get_node_ids())
            now = time.monotonic()
            fresh = [node for node in sorted(self.connected) if node not in busy and now >= again.get(node, now)]
            again |= dict.fromkeys(fresh, now + ASK_AGAIN)
            pending |= self._post({node: self._request(HELLO, arrays_of(()), 0, -1, 0, 0) for node in fresh}, deadline)
            pulled = self._pulled(pending)
            for message_id, message in pulled.items():
                self._register(pending.pop(message_id), message, layout, known)
            if time.monotonic() > self.refreshed + REFRESH:
                self.refresh()
                self.refreshed = time.monotonic()
            if not pulled:
                time.sleep(POLL)
        if self.relays and (combining := [type(w).__name__ for w in wrappers(self.aggregation) if w.combines]):
            raise ValueError(
                f"deploy: {combining[0]} needs single replies, and relays send means: leave one of them out"
            )
        self.names = own or sorted(known)
        self.nodes = [known[name][0] for name in self.names]
        self.samples = [known[name][1] for name in self.names]
        if not len(self.base):
            self.base, self.saved = (torch.full((len(self.nodes),), -1) for _ in range(2))
        return torch.tensor(self.samples)

    def claims(self) -> dict[str, int]:
        """The number of samples that each site claims, as JSON has it; nothing if sizes are hidden."""
        if self.secure is not None:
            return {}
        return {str(name): samples for name, samples in zip(self.names, self.samples, strict=True)}

    def _register(
        self, node: int, message: Message | None, layout: list[tuple[str, tuple[int, ...]]],
        known: dict[int, tuple[int, int]],
    ) -> None:  # fmt: skip
        """Add the client that a node reports. A node whose model or fields do not fit is left out and tried again."""
        try:
            content = _content(message)
            relay = "clients" in content.config_records.get("fields", {})
            about = fields_of(content, relayed.GREETING if relay else GREETING)
            if about["layout"] != json.dumps(layout):
                size = sum(math.prod(shape) for _, shape in layout)
                raise Refused(
                    f"the model of site {about['client']}, with {about['d']} numbers, has different parameters from "
                    f"the server's, with {size}"
                )
            if about["statistics"] != self.statistics_size:
                raise Refused("its model has different BatchNorm layers from the server's")
            if about["frozen"] != self.frozen:
                raise Refused(
                    "its frozen parameters are not those of the server: load the same values everywhere, for example "
                    "from a file"
                )
            if relay:
                return self._register_relay(node, about, known)
            if not 1 <= about["samples"] <= MOST_SAMPLES:
                raise Refused(f"its number of samples, {about['samples']}, is not possible")
            name = about["client"] if about["client"] >= 0 else node  # without a partition-id
            self.keys[name] = self.participants.check(self._key_of(node), name)
            if name in self.without:
                raise Refused(f"the plan leaves out site {name}")
            if name in known:
                raise Refused(f"client {name} exists already: two nodes have the same partition-id")
            if self.secure is not None:
                self.secure.admit(node, about["public"], about["signature"])
            known[name] = node, about["samples"]
        except Refused as why:
            text = printable(str(why) if message is None else _refusal(message, str(why))[1])
            if (node, text) not in self.refused_nodes and len(self.refused_nodes) < REFUSED_NODES:
                self.refused_nodes[node, text] = f"node {node}: {text}"
                warnings.warn(f"a client is left out: {text}", stacklevel=3)

    def _register_relay(self, node: int, about: dict[str, Any], known: dict[int, tuple[int, int]]) -> None:
        """Add the clients behind a relay, whose numbers differ from all others."""
        names, samples = about["clients"], about["samples"]
        if not names or len(samples) != len(names) or len(set(names)) < len(names):
            raise Refused("a relay must have a number of samples for each of its clients")
        if not all(isinstance(n, int) and 1 <= n <= MOST_SAMPLES for n in samples):
            raise Refused("a number of samples is not possible")
        if taken := set(names) & set(known):
            raise Refused(f"client {sorted(taken)[0]} exists already: it is behind two relays")
        if self.secure is not None:
            raise Refused("a relay cannot take part in secure aggregation")
        key = self.participants.check(self._key_of(node), about["client"])
        for name, size in zip(names, samples, strict=True):
            if name not in self.without:
                known[name], self.keys[name] = (node, size), key
        self.relays.add(node)

    def _key_of(self, node: int) -> bytes:
        """The public key with which Flower has authenticated a node, if participants are listed."""
        if not self.participants.listed:
            return b""
        return next((bytes(info.public_key) for info in self.grid.get_nodes() if info.node_id == node), b"")

    def greet_again(self, nodes: Iterable[int]) -> None:
        """Ask known nodes for new public keys."""
        requests = {node: self._request(HELLO, arrays_of(()), 0, -1, 0, 0) for node in nodes}
        for node, message in self._exchange(requests, time.monotonic() + min(FIND, self.timeout)):
            assert self.secure is not None
            with suppress(Refused):  # it stays without a key
                about = fields_of(_content(message), GREETING)
                self.secure.admit(node, about["public"], about["signature"])

    # -- the engine -----------------------------------------------------------------------------------------------
    remote = True

    def average(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The means of the replies. Each reply is added to the sums when it arrives, and then forgotten."""
        if self.secure is not None:
            return self.secure.average(self, cohort, task, down)
        return tuple(mean.to(self.dtype) for mean in self.means(cohort, task.__name__, down))

    def means(self, cohort: SimulatedCohort, task: str, down: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The means of the replies to a task, in float64."""
        weights = cohort.simulation.weights[cohort.ids]
        largest = self.limit * float(weights.sum() if self.relays else weights.max())
        shapes = self._shapes(cohort, task)
        sums = [ExactSum(shape[-1], largest, len(weights)) for shape in shapes]

        def use(members: list[int], up: tuple[Tensor, ...]) -> None:
            for total, reply in zip(sums, up, strict=True):
                total.add(reply, relayed.total_weight(weights, members))

        self._collect(cohort, task, down, shapes, use)
        weight = (weights * cohort.finite).sum()
        return tuple(total.value() / weight for total in sums)

    def replies(self, cohort: SimulatedCohort, task: ClientTask, down: tuple[Tensor, ...]) -> Replies:
        """All replies, for wrappers that need them one by one: a median, clipping on the server."""
        shapes = self._shapes(cohort, task.__name__)
        rows = [torch.zeros(cohort.size, shape[-1], dtype=self.dtype) for shape in shapes]

        def use(members: list[int], up: tuple[Tensor, ...]) -> None:
            for row, reply in zip(rows, up, strict=True):
                row[members[0]] = reply[0]

        self._collect(cohort, task.__name__, down, shapes, use)
        return rows, (cohort.simulation.weights[cohort.ids] * cohort.finite)[..., None]

    def _shapes(self, cohort: SimulatedCohort, task: str) -> Shapes:
        """The shapes of a task's replies."""
        layout = tuple(cohort.simulation.problem.layout)
        return traffic(self.algorithm, layout, self.dtype)[task].up

    def _collect(
        self, cohort: SimulatedCohort, task: str, down: tuple[Tensor, ...], shapes: Shapes,
        use: Callable[[list[int], tuple[Tensor, ...]], None],
    ) -> None:  # fmt: skip
        """One exchange: `use([i], replies)` is called once for each member of the cohort whose replies are usable, in
        the order of their arrival; for a relay `use(members, means)`, with the members whose replies it has used."""
        self.longest = max(v.shape[-1] for v in down)
        stamp, self.stamp = self.stamp, self.stamp + 1
        ids, used = cohort.ids.tolist(), set[int]()
        for _ in range(self.repeats + 1):
            self._find(cohort)
            wanted = [i for i, finite in enumerate(cohort.finite.tolist()) if finite and i not in used]
            for members, up in self._round(cohort, wanted, task, down, stamp, shapes):
                use(members, up)
                used.update(members)
            if len(used) >= self.min_replies:
                break
        else:
            usable = f"{len(used)} of {len(ids)} replies could be used, {self.min_replies} are needed"
            raise TooFewReplies(f"{usable} ({self.repeats + 1} attempts); rejected: {dict(self.rejections.counts)}")
        for i, k in enumerate(ids):
            if i in used:
                self.base[k] = stamp
                self.rejections.site(self.names[k]).replies += 1
            else:
                cohort.finite[i] = False

    def _round(
        self, cohort: SimulatedCohort, wanted: list[int], task: str, down: tuple[Tensor, ...], stamp: int,
        shapes: Shapes,
    ) -> Iterator[tuple[list[int], tuple[Tensor, ...]]]:  # fmt: skip
        """Ask these members of the cohort once. Returns the usable replies as they arrive, each with its members."""
        ids, keys, weights = cohort.ids.tolist(), cohort.key.tolist(), cohort.simulation.weights.tolist()
        asked: dict[int, list[int]] = {}  # node: members
        for i in wanted:
            asked.setdefault(self.nodes[ids[i]], []).append(i)
        with self.watch.part("sending"):
            arrays, requests = arrays_of(down), {}
            for node, members in asked.items():
                clients, own_keys = [ids[i] for i in members], [keys[i] for i in members]
                if node in self.relays:
                    requests[node] = relayed.request(
                        self, task, arrays, stamp, clients, own_keys, [weights[k] for k in clients],
                        cohort.drawn_before,
                    )  # fmt: skip
                else:
                    requests[node] = self._request(task, arrays, stamp, clients[0], own_keys[0], cohort.drawn_before)
        size = self.dtype.itemsize * sum(shape[-1] for shape in shapes)
        for node, message in self._exchange(requests, time.monotonic() + self.timeout, max(1, int(PULLED / size))):
            members = asked.pop(node)
            used, up, draws = self._used(message, node, [ids[i] for i in members], stamp, shapes)
            if message.has_content():
                forget(message.content)
            if used:
                cohort.drawn_so_far = max(cohort.drawn_so_far, draws)
                yield [i for i in members if ids[i] in used], up
        for i in (i for members in asked.values() for i in members):
            self._reject(*self._fault(None, ids[i]))

    def _used(
        self, message: Message, node: int, clients: list[int], stamp: int, shapes: Shapes
    ) -> tuple[list[int], tuple[Tensor, ...], int]:
        """Which of a node's clients can be used, their reply or the mean of their replies, and the draws."""
        if node not in self.relays:
            checked = self._checked(message, clients[0], stamp, shapes)
            return ([], (), 0) if checked is None else (clients, *checked)
        if message.has_error():
            for client in clients:
                self._reject(*self._fault(message, client))
            return [], (), 0
        try:
            return relayed.read_reply(self, message, clients, stamp, shapes, MOST_GRADIENTS)
        except Refused as why:
            kind, text = _refusal(message, str(why))
            for client in clients:
                self._reject(kind, client, f"its relay: {text}")
            return [], (), 0

    def _checked(
        self, message: Message, client: int, stamp: int, shapes: Shapes
    ) -> tuple[tuple[Tensor, ...], int] | None:
        reject = self._reject
        if message.has_error():
            return reject(*self._fault(message, client))
        try:
            content = _content(message)
            fields = fields_of(content, REPLY)
            if fields["stamp"] != stamp:
                return reject("stale", client, f"a reply to exchange {fields['stamp']} in exchange {stamp}")
            up = self._unpacked(content, shapes)
        except Refused as why:
            kind, text = _refusal(message, str(why))
            return reject(kind, client, text)
        sizes = [float(v.abs().max()) for v in up]  # NaN if any value is NaN
        if not all(map(math.isfinite, sizes)):
            return reject("not finite", client, "a value is not finite")
        if (most := max(sizes)) > self.limit:
            return reject("too large", client, f"a value of size {most:.3g}; the limit is {self.limit:.3g}")
        if not all(0 <= fields[name] <= MOST_GRADIENTS for name in ("draws", "gradients", "full_gradients")):
            return reject("malformed", client, "a count is out of range")
        self.gradients += fields["gradients"]
        self.full_gradients += fields["full_gradients"]
        return up, fields["draws"]

    def _reject(self, kind: str, client: int, message: str) -> None:
        self.rejections.add(kind, self.names[client] if self.names else client, message)

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

    def _unpacked(self, content: RecordDict, shapes: Shapes) -> tuple[Tensor, ...]:
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

    # -- evaluation -----------------------------------------------------------------------------------------------
    def evaluate(
        self, x: Tensor, weights: Tensor, clients: Sequence[int] | None = None, statistics: Tensor | None = None
    ) -> dict[str, tuple[float, float]]:
        """The metrics of a model on the clients' own samples: {name: (weighted mean, weight)}. The statistics are those
        of BatchNorm, if the model has it."""
        sent = tuple(v.view(1, -1) for v in (x, statistics) if v is not None)
        if self.secure is not None:  # one value, the mean over all clients
            means = self.secure.evaluate(self, EVALUATE, sent, self.reported.columns)
            return {name: (mean, 1.0) for name, mean in means.items()}
        metrics: dict[str, list[tuple[float, float]]] = {}
        everyone = range(len(self.nodes)) if clients is None else clients
        for node, own, message in self._ask(EVALUATE, sent, weights, everyone):
            weight = float(weights[own].sum())
            try:
                if node in self.relays:
                    values = relayed.read_metrics(self, message, own, weight)
                else:
                    values = {name: (value, weight) for name, value in self._metrics(message).items()}
            except Refused as why:
                kind, text = _refusal(message, f"its metrics: {why}")
                for client in own:
                    self._reject(kind, client, text)
                continue
            for name, pair in values.items():
                metrics.setdefault(name, []).append(pair)
        table = {name: torch.tensor(pairs, dtype=torch.float64).unbind(-1) for name, pairs in metrics.items()}
        return {n: (float((value * w).sum() / w.sum()), float(w.sum())) for n, (value, w) in table.items()}

    def moments(
        self, x: Tensor, weights: Tensor, clients: Sequence[int] | None = None, draws: int = 0
    ) -> tuple[Tensor, list[int]]:
        """The weighted mean over the clients of the moments of every BatchNorm at x [1, d], in float64, and the clients
        that were used. As in a round, too few usable replies are asked for again, and then end the run."""
        everyone = list(range(len(self.nodes)) if clients is None else clients)
        samples = SAMPLES if self.secure is not None else sum(self.samples)  # hidden sizes: as of large clients
        draws = draws or mini_batches(samples, len(self.nodes), self.batch)
        if self.secure is not None:
            return self.secure.moments(self, STATISTICS, x, self.statistics_size, draws), everyone
        total = ExactSum(self.statistics_size, self.limit * float(weights.sum()), len(weights))
        used: list[int] = []
        for _ in range(self.repeats + 1):
            for node, own, message in self._ask(
                STATISTICS, (x,), weights, [k for k in everyone if k not in used], draws
            ):
                try:
                    ids, mean = self._moments(node, own, message)
                except Refused as why:
                    kind, text = _refusal(message, f"its statistics: {why}")
                    for client in own:
                        self._reject(kind, client, text)
                    continue
                if ids:
                    total.add(mean, relayed.total_weight(weights, ids))
                    used += ids
            if len(used) >= self.min_replies:
                return total.value() / relayed.total_weight(weights, used), used
        usable = f"the statistics of BatchNorm: {len(used)} of {len(everyone)} replies could be used"
        rejected = f"rejected: {dict(self.rejections.counts)}"
        raise TooFewReplies(f"{usable}, {self.min_replies} are needed ({self.repeats + 1} attempts); {rejected}")

    def _moments(self, node: int, own: list[int], message: Message) -> tuple[list[int], Tensor]:
        """The clients of a node that can be used, and their mean."""
        shapes = ((1, self.statistics_size),)
        if node in self.relays:
            ids, up, _ = relayed.read_reply(self, message, own, self.stamp, shapes, MOST_GRADIENTS)
            return ids, up[0] if ids else torch.empty(0)
        content = _content(message)
        if fields_of(content, {"stamp": int})["stamp"] != self.stamp:
            raise Refused("they are of another exchange")
        (moments,) = tensors_of(content, [(shapes[0], torch.float64)])
        if not math.isfinite(most := float(moments.abs().max())) or most > self.limit:
            raise Refused(f"a value of size {most:.3g}; the limit is {self.limit:.3g}")
        return own, moments

    def _ask(
        self, task: str, down: tuple[Tensor, ...], weights: Tensor, clients: Sequence[int], drawn: int = 0
    ) -> Iterator[tuple[int, list[int], Message]]:
        """Send the same to some clients. Returns node, clients and answer, in the order of the clients; a node without
        an answer is counted."""
        arrays, asked = arrays_of(down), dict[int, list[int]]()  # node: clients
        for client in clients:
            asked.setdefault(self.nodes[client], []).append(client)
        requests = {
            node: relayed.request(self, task, arrays, self.stamp, own, [0] * len(own), weights[own].tolist(), drawn)
            if node in self.relays
            else self._request(task, arrays, self.stamp, -1, 0, drawn)
            for node, own in asked.items()
        }
        answers = dict(self._exchange(requests, time.monotonic() + self.timeout))
        for node, own in asked.items():
            message = answers.get(node)
            if message is None or message.has_error():
                for client in own:
                    self._reject(*self._fault(message, client))
            else:
                yield node, own, message

    def _metrics(self, message: Message) -> dict[str, float]:
        """The metrics of one client."""
        content = _content(message)
        names = fields_of(content, {"stamp": int, "names": list})["names"]
        self.reported.check_columns(names)
        values = [float(v) for v in tensors_of(content, [((1, 1), torch.float64)] * len(names))]
        for name, value in zip(names, values, strict=True):
            self.reported.check(name, value, self.limit)
        return dict(zip(names, values, strict=True))

    # -- messages -------------------------------------------------------------------------------------------------
    def _request(
        self, task: str, arrays: ArrayRecord, stamp: int, client: int, key: int, drawn: int, secure: str = ""
    ) -> Any:
        if self.secure is not None and task == HELLO:
            secure = self.secure.greeting
        base, saved = (int(self.base[client]), int(self.saved[client])) if client >= 0 else (-1, -1)
        fields: dict[str, Any] = {"task": task, "algorithm": self.algorithm, "aggregation": self.aggregation}
        fields |= {"run": self.run, "secure": secure, "metrics": self.reported.names}
        numbers = {"stamp": stamp, "base": base, "saved": saved, "key": key, "drawn": drawn, "batch": self.batch}
        return packed(arrays, fields | {"dtype": str(self.dtype).removeprefix("torch.")} | numbers)

    def _post(self, contents: dict[int, Any], deadline: float) -> dict[str, int]:
        """Send to nodes. Returns the ids of the messages, with their nodes."""
        if not contents:
            return {}
        ttl = max(1.0, deadline - time.monotonic())
        messages = [self.grid.create_message(content, "query", node, "", ttl) for node, content in contents.items()]
        sent = zip(self.grid.push_messages(messages), contents, strict=True)
        return {message_id: node for message_id, node in sent if message_id}

    def _pulled(self, pending: Collection[str]) -> dict[str, Message]:
        """The replies that have arrived, by the message they answer: an error comes from another source."""
        pulled = self.grid.pull_messages(list(pending)) if pending else ()
        return {m.metadata.reply_to_message_id: m for m in pulled if m.metadata.reply_to_message_id in pending}

    def _exchange(
        self, contents: dict[int, Any], deadline: float, at_a_time: int = 1000
    ) -> Iterator[tuple[int, Message]]:
        """Send to nodes. Returns the nodes and their replies, as they arrive until the deadline; replies that are not
        yet asked for wait in the SuperLink."""
        with self.watch.part("sending"):
            pending = self._post(contents, deadline)
        missing = set(contents)
        while pending and time.monotonic() < deadline:
            ids = list(pending)
            for first in range(0, len(ids), at_a_time):
                with self.watch.part("replies"):
                    pulled = self._pulled(ids[first : first + at_a_time])
                for message_id, message in pulled.items():
                    missing.remove(node := pending.pop(message_id))
                    yield node, message
                if not pulled:
                    with self.watch.part("replies"):
                        self._wait(pending)
        self.waiting = set(pending.values())
        if missing:
            self.connected = set(self.grid.get_node_ids())

    def _wait(self, pending: dict[str, int]) -> None:
        """Wait for more replies, and let the operator know now and then."""
        self.waiting = set(pending.values())
        if pending:
            time.sleep(POLL)
            if time.monotonic() > self.refreshed + REFRESH:
                self.connected = set(self.grid.get_node_ids())
                self.refresh()
                self.refreshed = time.monotonic()

    def _find(self, cohort: SimulatedCohort) -> None:
        """A restarted node has a new number: if a client of the cohort is missing, ask the new nodes who they are."""
        with self.watch.part("nodes", whole=True):
            self._find_missing(cohort)

    def _find_missing(self, cohort: SimulatedCohort) -> None:
        there = self.connected = set(self.grid.get_node_ids())
        missing = {self.names[k]: k for k in cohort.ids.tolist() if self.nodes[k] not in there}
        strangers = [node for node in there if node not in self.nodes] if missing else []
        known: dict[int, tuple[int, int]] = {}
        requests = {node: self._request(HELLO, arrays_of(()), 0, -1, 0, 0) for node in strangers}
        for node, message in self._exchange(requests, time.monotonic() + min(FIND, self.timeout)):
            self._register(node, message, cohort.simulation.problem.layout, known)
        for name, (node, _) in known.items():
            if name in missing:  # a client that is present is not replaced
                self.nodes[missing[name]] = node

    def about_sites(self) -> dict[str, Any]:
        """What is known about the sites now: for report.json."""
        state = self.rejections.state()
        nodes = {name: node for name, (node, _) in self.arrived.items()} | dict(
            zip(self.names, self.nodes, strict=False)
        )
        sizes = self.claims() | {str(name): size for name, (_, size) in self.arrived.items() if self.secure is None}
        for name in sorted({*self.names, *nodes}):
            record = state["sites"].setdefault(str(name), {"replies": 0, "rejected": {}, "last": {}})
            record |= {"connected": nodes.get(name) in self.connected, "samples": sizes.get(str(name))}
            record |= {"key": self.keys[name]} if self.keys.get(name) else {}
        state["sites"] = {name: state["sites"][name] for name in sorted(state["sites"], key=int)}
        return state | {
            "waiting": sorted(name for name, node in nodes.items() if node in self.waiting),
            "refused_nodes": list(self.refused_nodes.values()),
        }


def _refusal(message: Message, why: str) -> tuple[str, str]:
    """Whether a message without a usable reply is a client's own refusal, and what it says."""
    refusal = message.content.config_records.get("refused") if message.has_content() else None
    return ("malformed", why) if refusal is None else ("refused", str(refusal.get("why", "")))


def _content(message: Message | None) -> Any:
    if message is None or not message.has_content():
        raise Refused("the message has no content")
    return message.content
