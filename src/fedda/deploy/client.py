"""The client's side: a site with its own samples. It runs marked tasks of known algorithms and nothing else."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ..aggregation import Wrapper
from ..aggregation.cohort import client_side, residuals
from ..aggregation.compression import compressions
from ..aggregation.compression import pack_reply as travels
from ..aggregation.dry_run import model_length
from ..core import Algorithm, bind_to_problem, check_replies
from ..engines.counting import CountedClient, Counts
from ..engines.sequential import single_client
from ..problems import Neural, problem
from ..problems.batchnorm import SAMPLES
from ..problems.neural import Loss
from .constants import frozen_hash
from .identity import signature
from .memory import RUN, MemoryStore
from .relay_socket import RelaySocket
from .reported import Wanted, columns_of, refuse_missing, site_columns
from .secure_client import REVEAL, Keyring, revealed, terms_of, uploaded
from .traffic import DTYPES, algorithm, traffic, wrappers
from .wire import Refused, fields_of, packed, tensors_of

HELLO, EVALUATE = "hello", "evaluate"
STATISTICS = "batch-norm"  # no task of an algorithm has such a name
COUNTS = ("draws", "gradients", "full_gradients")  # that a client reports
REQUEST: dict[str, type] = dict.fromkeys(("task", "algorithm", "aggregation", "run", "dtype", "secure"), str)
REQUEST |= dict.fromkeys(("stamp", "base", "saved", "key", "drawn", "batch"), int)
REQUEST["metrics"] = list  # the names that the server asks for


class SiteError(RuntimeError):
    """The code of a site raised an exception. Only its type leaves the site: the text may quote samples or paths.

    Flower sends the text of this error to the server, and writes its cause, with the traceback, into the site's log.
    """


class Site:
    """One client: a model, a loss and its samples.

    Args:
        model: the network; all sites have the same.
        loss: a function of its output and the targets, a mean over the batch.
        x: the samples of the site: an array, or a tuple or dict of arrays, as in `fedda.problem`.
        y: their targets.
        allowed: the algorithms that it runs; all by default.
        secure: take part in secure aggregation only, whatever the server asks for.
        metrics: more metrics than the loss and the accuracy, as in `fedda.problem`. The site reports those that the
            server asks for.
        augment: changes training samples at random, as in `fedda.problem`.
        trainable: the parameters to train, by a pattern such as "head.*"; the same as on the server.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, x: Any, y: Any, allowed: tuple[str, ...] | None = None,
        secure: bool = False, metrics: Wanted = None, augment: Any = None, trainable: str | Sequence[str] | None = None,
    ):  # fmt: skip
        self.model, self.loss, self.x, self.y, self.allowed, self.secure = model, loss, x, y, allowed, secure
        self.metrics, self.augment, self.trainable = metrics, augment, trainable

    def problem(self, batch: int, dtype: torch.dtype) -> Neural:
        """The problem of this site alone.

        Args:
            batch: samples in a mini-batch.
            dtype: the dtype of the model.
        """
        own = problem(
            self.model, self.loss, x=self.x, y=self.y, batch=batch, metrics=self.metrics, augment=self.augment,
            trainable=self.trainable,
        )  # fmt: skip
        return own.to(dtype=dtype)

    def answer(self, message: Message, context: Context) -> Message:
        """The reply to a message of the server. If it is refused, the reply says why, and nothing is run.

        Args:
            message: what the server sent.
            context: Flower's context of the node.
        """
        try:
            content = self._answer(message.content, context)
        except Refused as why:
            content = RecordDict({"refused": ConfigRecord({"why": str(why)[:200]})})
        return Message(content, reply_to=message)

    def _answer(self, content: RecordDict, context: Context) -> RecordDict:
        fields = fields_of(content, REQUEST)
        if fields["dtype"] not in DTYPES:
            raise Refused(f"the dtype must be one of {', '.join(DTYPES)}, got {fields['dtype'][:20]!r}")
        if (
            not 1 <= fields["batch"] <= 1_000_000
            or min(fields["stamp"], fields["drawn"]) < 0
            or min(fields["base"], fields["saved"]) < -1
        ):
            raise Refused("batch, stamp, drawn or base is out of range")
        if not re.fullmatch(RUN, fields["run"]):
            raise Refused("the name of the run must be 32 hexadecimal digits")
        hidden = bool(fields["secure"])
        if self.secure and not hidden:
            raise Refused("this site takes part in secure aggregation only")
        if fields["task"] == REVEAL:
            return revealed(content, fields, context)
        dtype = DTYPES[fields["dtype"]]
        own = self.problem(fields["batch"], dtype)
        own.first_client = max(0, number(context))  # with the random numbers of this client in a simulation
        layout, samples, norms = tuple(own.layout), int(own.sizes.sum()), own.batch_norms
        refuse_missing(own.metrics, fields["metrics"], "Site")
        if fields["task"] == HELLO:
            tensors_of(content, ())
            about = {"samples": 1 if hidden else samples, "d": own.d, "layout": json.dumps(layout)}
            about |= {"statistics": norms.size, "frozen": frozen_hash(own.model, dtype)}
            public = Keyring(context).renew() if hidden else ""
            signed = signature(context, fields["run"], number(context), public) if hidden else ""
            return packed((), about | {"client": number(context), "public": public, "signature": signed})
        terms = terms_of(fields) if hidden else None
        if fields["task"] == STATISTICS:
            (x,) = tensors_of(content, [((1, own.d), dtype)])
            if not norms.layers or not 1 <= fields["drawn"] <= SAMPLES:
                raise Refused("the model has no BatchNorm, or the number of mini-batches is out of range")
            moments = own.moments(x, fields["drawn"])
            if terms is not None:
                return uploaded(terms, context, samples, (moments,), dict.fromkeys(COUNTS, 0))
            return packed((moments,), {"stamp": fields["stamp"]})
        if fields["task"] == EVALUATE:
            x, *statistics = tensors_of(content, evaluated_forms(own.d, norms.size, dtype))
            metrics = site_columns(own, x[0], statistics[0][0] if statistics else None, fields["metrics"])
            values = tuple(v.view(1, 1) for v in metrics.values())
            if terms is not None:  # the second half says which metrics this site has
                whole = [metrics.get(name) for name in columns_of(fields["metrics"])]
                sums = [0.0 if v is None else float(v) for v in whole] + [float(v is not None) for v in whole]
                flat = torch.tensor(sums, dtype=torch.float64)
                return uploaded(terms, context, samples, (flat,), dict.fromkeys(COUNTS, 0))
            return packed(values, {"stamp": fields["stamp"], "names": list(metrics)})
        task = self.task(fields["algorithm"], fields["task"], own)
        exchange = traffic(fields["algorithm"], layout, dtype)[fields["task"]]
        down = tensors_of(content, [(shape, dtype) for shape in exchange.down])
        try:
            around = wrappers(fields["aggregation"])
        except ValueError as why:
            raise Refused(f"the aggregation is refused: {why}") from None
        except Exception as why:
            raise Refused(f"the aggregation is refused: {type(why).__name__}") from None
        if terms is not None and compressions(around):
            raise Refused("the aggregation is refused: compressed replies cannot be added")
        up, counts = run(task, around, own, down, fields, context)
        if terms is not None:
            return uploaded(terms, context, samples, up, counts)
        return packed(up, {"stamp": fields["stamp"], **counts})

    def task(self, text: str, name: str, own: Neural) -> Any:
        """A marked task of a known algorithm, and no other attribute of anything.

        Args:
            text: the algorithm and its hyper-parameters, as the server sent them.
            name: the name of the task.
            own: the problem of the site.
        """
        try:
            unbound = algorithm(text)  # checked; nothing is run
            if self.allowed is not None and json.loads(text)["name"] not in self.allowed:
                raise ValueError(f"this site runs only {', '.join(self.allowed)}")
            bound = bind_to_problem(unbound, own.point()[:1], own.layout)
            known = traffic(text, tuple(own.layout), own.dtype)
        except ValueError as why:
            raise Refused(f"the algorithm is refused: {why}") from None
        except Exception as why:  # a hyper-parameter of a type that no check expects
            raise Refused(f"the algorithm is refused: {type(why).__name__}") from None
        task = getattr(bound, name, None) if name in known else None
        if not getattr(task, "on_client", False):
            raise Refused(f"{name[:40]!r} is not a task for clients")
        return task


def evaluated_forms(d: int, statistics: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """What is sent for an evaluation: the model and, if it has BatchNorm, its means and variances."""
    return [((1, size), dtype) for size in (d, statistics) if size]


def number(context: Context) -> int:
    """The number of this client: its `partition-id`, or -1 without one."""
    partition = context.node_config.get("partition-id", -1)
    return partition if isinstance(partition, int) else -1


def run(
    task: Any, around: tuple[Wrapper, ...], own: Neural, down: tuple[Tensor, ...], fields: dict[str, Any],
    context: Context,
) -> tuple[tuple[Tensor, ...], dict[str, int]]:  # fmt: skip
    """The task on this client's samples, and the wrappers' client parts. The key gives the simulation's batches."""
    bound: Algorithm = task.__self__
    names = (*bound.memory, *residuals(around, bound, own.point()[None].to(own.dtype)))
    store = MemoryStore(context, fields["run"])
    memory = store.load(fields["base"], names, own.d, own.dtype)
    with torch.no_grad():
        client, counts = single_client(own, memory, fields["key"], fields["drawn"], bound), Counts()
        counted = CountedClient(client, counts)
        replies = client_side(around, task)(counted, *down)
        client.remember(torch.ones(1, 1, dtype=torch.bool))
    store.save((fields["saved"], fields["base"]), fields["stamp"], memory)
    computed = counts.gradients - int(counted.idle)
    spent = {"draws": client.drawn_so_far, "gradients": computed, "full_gradients": counts.full_gradients}
    check_replies(task, replies, (1,))
    whole = [v.expand(1, v.shape[-1]) for v in replies]
    return tuple(part for v in whole for part in travels(around, v, model_length(down))), spent


def join(app: ClientApp, load: Callable[[Context], Site]) -> ClientApp:
    """Let a ClientApp take part in a run of ours; its own `train` and `evaluate` stay as they are.

    Args:
        app: your ClientApp.
        load: a function of the node's context to its `Site`.
    """

    @app.query()
    def query(message: Message, context: Context) -> Message:
        try:
            if isinstance(path := context.node_config.get("relay"), str):
                return RelaySocket(path).answer(message, number(context))
            return load(context).answer(message, context)
        except Exception as why:
            raise SiteError(type(why).__name__) from why

    return app


def client_app(load: Callable[[Context], Site]) -> ClientApp:
    """The ClientApp of a site.

    Args:
        load: a function of the node's context to its `Site`.
    """
    return join(ClientApp(), load)
