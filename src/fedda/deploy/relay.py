"""Two levels of federations: a relay is a site of the upper one, and the server of the lower one.

Its reply is the weighted mean over its own sites, so that the upper server's mean over relays is the mean over all
sites. Cohorts, keys and weights come from the upper server, and the memory of clients stays at the sites: the numbers
are those of one flat federation.
"""

import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from torch import nn

from ..problems.batchnorm import BatchNorms
from ..problems.neural import flatten
from ..problems.neural import trainable as trained_parameters
from . import relayed
from .client import EVALUATE, HELLO, STATISTICS, evaluated_forms, number
from .client import REQUEST as PLAIN
from .constants import frozen_hash, with_frozen
from .federation import Federation, TooFewReplies
from .memory import RUN
from .relay_socket import receive, refusal, seconds_left, send
from .report import Rejections
from .reported import ReportedMetrics, Wanted, columns_of, refuse_missing
from .traffic import DTYPES, traffic
from .wire import Refused, fields_of, packed, tensors_of

SHARE = 0.8  # of the time that a message has left, for the lower federation
IDLE = 5.0  # seconds between two looks whether the lower SuperLink is still there


class Relay:
    """The server of `sites` sites behind a grid, and one site of an upper federation.

    A round with fewer than `min_replies` usable replies is not passed on: the mean of one reply is that reply. What
    single sites reply stays here.

    Args:
        grid: the connection to its sites.
        model: the network; all sites have the same.
        sites: how many it has.
        timeout: seconds to wait for the replies of a round.
        min_replies: replies that a round needs.
        repeats: how often a round with fewer replies is repeated.
        limit: a reply with a larger value is rejected.
        metrics: more metrics than the loss and the accuracy, as its sites have them and as the upper server asks.
        trainable: the parameters to train, as at its sites and on the upper server.
    """

    def __init__(
        self, grid: Grid, model: nn.Module, sites: int, timeout: float = 600.0, min_replies: int = 2,
        repeats: int = 0, limit: float = 1e6, metrics: Wanted = None, trainable: str | Sequence[str] | None = None,
    ):  # fmt: skip
        self.model = with_frozen(model, trainable)
        self.layout = [(name, tuple(p.shape)) for name, p in trained_parameters(self.model)]
        self.d, self.sites, self.timeout = flatten(self.model).numel(), sites, timeout
        self.federation = Federation(
            grid, "{}", 1, torch.float32, timeout, min_replies, repeats, limit, reported=ReportedMetrics.of(metrics),
            statistics_size=BatchNorms(self.model).size,
        )  # fmt: skip

    def answer(self, message: Message, context: Context) -> Message:
        """The reply to a message of the upper server.

        Args:
            message: what the upper server sent.
            context: Flower's context of the node.
        """
        return Message(self.content(message.content, number(context), seconds_left(message)), reply_to=message)

    def content(self, content: RecordDict, own_number: int, seconds: float) -> RecordDict:
        """The content of the reply to a message.

        Args:
            content: the content of the message.
            own_number: the number of this relay among the sites of the upper server.
            seconds: how many are left for the reply.
        """
        self.federation.timeout = max(1.0, min(self.timeout, SHARE * seconds))
        try:
            return self._content(content, own_number)
        except (Refused, TooFewReplies) as why:
            return refusal(str(why))

    def _content(self, content: RecordDict, own_number: int) -> RecordDict:
        record = content.config_records.get("fields")
        if record is not None and "clients" not in record:
            fields = fields_of(content, PLAIN)
            if fields["task"] != HELLO or fields["secure"]:
                raise Refused("a relay sends means: it cannot take part in secure aggregation")
            if fields["dtype"] not in DTYPES:
                raise Refused("the dtype is not possible")
            refuse_missing(self.federation.reported.own, fields["metrics"], "Relay")
            return self._greeting(own_number, fields)
        fields = fields_of(content, relayed.REQUEST)
        if fields["dtype"] not in DTYPES or not re.fullmatch(RUN, fields["run"]):
            raise Refused("the dtype or the name of the run is not possible")
        lists = [fields[name] for name in ("clients", "keys", "bases", "saved", "weights")]
        if not lists[0] or any(len(values) != len(lists[0]) for values in lists):
            raise Refused("a relay needs a key, two exchanges and a weight for each of its sites")
        federation, dtype = self.federation, DTYPES[fields["dtype"]]
        refuse_missing(federation.reported.own, fields["metrics"], "Relay")
        if not federation.names:
            self._greeting(own_number, fields)
        if unknown := set(fields["clients"]) - set(federation.names):
            raise Refused(f"site {sorted(unknown)[0]} is not behind this relay")
        federation.algorithm, federation.aggregation = fields["algorithm"], fields["aggregation"]
        federation.run, federation.batch, federation.dtype = fields["run"], fields["batch"], dtype
        federation.stamp, federation.rejections = fields["stamp"], Rejections()
        federation.gradients = federation.full_gradients = 0
        cohort = self._cohort(fields)
        if fields["task"] == EVALUATE:
            x, *statistics = tensors_of(content, evaluated_forms(self.d, federation.statistics_size, dtype))
            return self._metrics(x, statistics[0] if statistics else None, cohort, fields)
        if fields["task"] == STATISTICS:
            (x,) = tensors_of(content, [((1, self.d), dtype)])
            return self._moments(x, cohort, fields)
        return self._means(content, cohort, fields)

    def _greeting(self, own_number: int, fields: dict[str, Any]) -> RecordDict:
        """Who is behind this relay; it waits for all of them."""
        federation, dtype = self.federation, DTYPES[fields["dtype"]]
        federation.batch, federation.dtype, federation.frozen = fields["batch"], dtype, frozen_hash(self.model, dtype)
        federation.greet(self.sites, self.layout)
        about = {"d": self.d, "layout": json.dumps(self.layout), "client": own_number}
        about |= {"statistics": federation.statistics_size, "frozen": federation.frozen}
        return packed((), about | {"clients": federation.names, "samples": federation.samples})

    def _cohort(self, fields: dict[str, Any]) -> Any:
        """The sites that were asked for, as an engine knows a cohort."""
        federation = self.federation
        place = {name: k for k, name in enumerate(federation.names)}
        ids = torch.tensor([place[name] for name in fields["clients"]])
        weights = torch.zeros(len(place), dtype=torch.float64)
        weights[ids] = torch.tensor(fields["weights"], dtype=torch.float64)
        if len(set(fields["clients"])) < len(ids) or not bool((weights[ids] > 0).all() & weights.isfinite().all()):
            raise Refused("the sites must differ, and their weights be > 0")
        federation.base[ids], federation.saved[ids] = torch.tensor(fields["bases"]), torch.tensor(fields["saved"])
        simulation = SimpleNamespace(problem=SimpleNamespace(layout=self.layout), weights=weights)
        return SimpleNamespace(
            ids=ids, key=torch.tensor(fields["keys"]), finite=torch.ones(len(ids), dtype=torch.bool), size=len(ids),
            drawn_before=fields["drawn"], drawn_so_far=fields["drawn"], simulation=simulation,
        )  # fmt: skip

    def _means(self, content: RecordDict, cohort: Any, fields: dict[str, Any]) -> RecordDict:
        federation = self.federation
        try:
            exchange = traffic(fields["algorithm"], tuple(self.layout), federation.dtype).get(fields["task"])
        except ValueError as why:
            raise Refused(f"the algorithm is refused: {why}") from None
        except Exception as why:
            raise Refused(f"the algorithm is refused: {type(why).__name__}") from None
        if exchange is None:
            raise Refused(f"{fields['task'][:40]!r} is not a task for clients")
        down = tensors_of(content, [(shape, federation.dtype) for shape in exchange.down])
        try:
            means = federation.means(cohort, fields["task"], down)
            used = [name for name, finite in zip(fields["clients"], cohort.finite.tolist(), strict=True) if finite]
        except TooFewReplies:
            means, used = (), []
        counts = {"gradients": federation.gradients, "full_gradients": federation.full_gradients} if used else {}
        about = {"draws": cohort.drawn_so_far, "gradients": 0, "full_gradients": 0} | counts
        about |= {"stamp": fields["stamp"], "used": used, "rejected": relayed.rejected_by_site(federation)}
        return packed(means, about)

    def _moments(self, x: torch.Tensor, cohort: Any, fields: dict[str, Any]) -> RecordDict:
        """As the means of a task, but no site keeps anything of it."""
        federation, weights = self.federation, cohort.simulation.weights
        mean, used = federation.moments(x, weights, cohort.ids.tolist(), fields["drawn"])
        about = {"stamp": fields["stamp"], "draws": 0, "gradients": 0, "full_gradients": 0}
        about |= {"used": [federation.names[k] for k in used], "rejected": relayed.rejected_by_site(federation)}
        return packed((mean,), about)

    def _metrics(
        self, x: torch.Tensor, statistics: torch.Tensor | None, cohort: Any, fields: dict[str, Any]
    ) -> RecordDict:
        means = self.federation.evaluate(x, cohort.simulation.weights, cohort.ids.tolist(), statistics)
        names = [name for name in columns_of(fields["metrics"]) if name in means]
        about = {"stamp": fields["stamp"], "names": names, "weights": [means[name][1] for name in names]}
        values = tuple(torch.full((1, 1), means[name][0], dtype=torch.float64) for name in names)
        return packed(values, about | {"rejected": relayed.rejected_by_site(self.federation)})

    def listen(self, path: Path) -> None:
        """Answer messages that arrive on a Unix socket, one after the other, until the lower SuperLink is gone.

        Only this user can open the socket.

        Args:
            path: the file of the socket.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            before = os.umask(0o177)
            try:
                door.bind(str(path))
            finally:
                os.umask(before)
            door.listen()
            door.settimeout(IDLE)
            try:
                while True:
                    try:
                        caller, _ = door.accept()
                    except TimeoutError:
                        self.federation.grid.get_node_ids()  # fails if the SuperLink is gone
                        continue
                    with caller:
                        self._serve(caller)
            finally:
                path.unlink(missing_ok=True)

    def _serve(self, caller: socket.socket) -> None:
        caller.settimeout(self.timeout)
        try:
            seconds, content = receive(caller)
            about: Any = content.pop("relay")
            send(caller, self.content(content, int(about["number"]), seconds), 0.0)
        except (OSError, ValueError, KeyError):  # the caller has gone, or has sent something else
            return
