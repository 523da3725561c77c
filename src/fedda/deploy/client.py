"""The client's side: a site with its own samples, which runs marked tasks of known algorithms and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from ..aggregation import Wrapper, client_side, residuals
from ..aggregation import pack_reply as travels
from ..aggregation.dry_run import model_length
from ..core import Algorithm, bind_to_problem, check_replies
from ..engines import Counts, Sequential, Simulation
from ..engines.simulated import ClientStack, SimulatedCohort
from ..engines.wrappers import CountedClient
from ..problems import Neural, problem
from ..problems.neural import Loss
from .memory import RUN, MemoryStore
from .traffic import DTYPES, algorithm, traffic, wrappers
from .wire import Refused, packed, tensors_of, words_of

HELLO, EVALUATE = "hello", "evaluate"
ASKED = {
    "task": str,
    "algorithm": str,
    "aggregation": str,
    "run": str,
    "dtype": str,
    "stamp": int,
    "base": int,
    "saved": int,
    "key": int,
    "drawn": int,
    "batch": int,
}


class Site:
    """One client: a model, a loss and its samples. `allowed` names the algorithms that it is willing to run, all by
    default."""

    def __init__(self, model: nn.Module, loss: Loss, x: Any, y: Any, allowed: tuple[str, ...] | None = None):
        self.model, self.loss, self.x, self.y, self.allowed = model, loss, x, y, allowed

    def problem(self, batch: int, dtype: torch.dtype) -> Neural:
        return problem(self.model, self.loss, x=self.x, y=self.y, batch=batch).to(dtype=dtype)

    def answer(self, message: Message, context: Context) -> Message:
        """The reply to a message of the server's; what is refused is said, and nothing is run."""
        try:
            content = self._answer(message.content, context)
        except Refused as why:
            content = RecordDict({"refused": ConfigRecord({"why": str(why)[:200]})})
        return Message(content, reply_to=message)

    def _answer(self, content: RecordDict, context: Context) -> RecordDict:
        words = words_of(content, ASKED)
        if words["dtype"] not in DTYPES:
            raise Refused(f"the dtype must be one of {', '.join(DTYPES)}, got {words['dtype'][:20]!r}")
        if (
            not 1 <= words["batch"] <= 1_000_000
            or min(words["stamp"], words["drawn"]) < 0
            or min(words["base"], words["saved"]) < -1
        ):
            raise Refused("batch, stamp, drawn or base is out of range")
        if not re.fullmatch(RUN, words["run"]):
            raise Refused("the name of the run is no name of ours")
        dtype = DTYPES[words["dtype"]]
        own = self.problem(words["batch"], dtype)
        layout = tuple(own.layout)
        if words["task"] == HELLO:
            tensors_of(content, ())
            about = {"samples": len(self.y), "d": own.d, "layout": json.dumps(layout), "client": number(context)}
            return packed((), about)
        if words["task"] == EVALUATE:
            (x,) = tensors_of(content, [((1, own.d), dtype)])
            found = own.evaluate(x[0], torch.ones(1, dtype=torch.float64))
            return packed(tuple(v.view(1, 1) for v in found.values()), {"stamp": words["stamp"], "names": list(found)})
        task = self.task(words["algorithm"], words["task"], own)
        exchange = traffic(words["algorithm"], layout, dtype)[words["task"]]
        down = tensors_of(content, [(shape, dtype) for shape in exchange.down])
        try:
            around = wrappers(words["aggregation"])
        except ValueError as why:
            raise Refused(f"the aggregation is refused: {why}") from None
        except Exception as why:
            raise Refused(f"the aggregation is refused: {type(why).__name__}") from None
        up, counts = run(task, around, own, down, words, context)
        return packed(up, {"stamp": words["stamp"], **counts})

    def task(self, words: str, name: str, own: Neural) -> Any:
        """A marked task of a known algorithm, and no other attribute of anything."""
        try:
            table = algorithm(words)  # checked, nothing is run
            if self.allowed is not None and json.loads(words)["name"] not in self.allowed:
                raise ValueError(f"this site runs {', '.join(self.allowed)} alone")
            made, known = (
                bind_to_problem(table, own.point()[:1], own.layout),
                traffic(words, tuple(own.layout), own.dtype),
            )
        except ValueError as why:
            raise Refused(f"the algorithm is refused: {why}") from None
        except Exception as why:  # a hyper-parameter of a kind that no check foresees
            raise Refused(f"the algorithm is refused: {type(why).__name__}") from None
        task = getattr(made, name, None) if name in known else None
        if not getattr(task, "on_client", False):
            raise Refused(f"{name[:40]!r} is no task for clients")
        return task


def number(context: Context) -> int:
    """Which client this node is: its `partition-id`, or -1 where it has none."""
    found = context.node_config.get("partition-id", -1)
    return found if isinstance(found, int) else -1


def run(
    task: Any,
    around: tuple[Wrapper, ...],
    own: Neural,
    down: tuple[Tensor, ...],
    words: dict[str, Any],
    context: Context,
) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """The task on this client's samples, and what wrappers do to its replies before they travel; the batches are those
    of the simulation, given the key."""
    made: Algorithm = task.__self__
    memory = (*made.memory, *residuals(around, made, own.point()[None].to(own.dtype)))
    simulation = Simulation(own, Sequential(), torch.tensor([0]), "uniform", memory)
    shelf = MemoryStore(context, words["run"])
    simulation.memory |= shelf.taken(words["base"], memory, own.d, own.dtype)
    cohort = SimulatedCohort(simulation, torch.tensor([0]), torch.tensor([words["key"]]))
    cohort.drawn = words["drawn"]
    with torch.no_grad():
        client, counts = ClientStack(cohort, slice(0, 1), stacked=False), Counts()
        counted = CountedClient(client, counts)
        replies = client_side(around, task)(counted, *down)
        client.remember(torch.ones(1, 1, dtype=torch.bool))
    shelf.put((words["saved"], words["base"]), words["stamp"], simulation.memory)
    computed = counts.gradients - int(counted.idle)
    spent = {"draws": client.draws, "gradients": computed, "full_gradients": counts.full_gradients}
    check_replies(task, replies, (1,))
    whole = [v.expand(1, v.shape[-1]) for v in replies]
    return tuple(part for v in whole for part in travels(around, v, model_length(down))), spent


def client_app(load: Callable[[Context], Site]) -> ClientApp:
    """The ClientApp of a site that `load` makes, from the node's configuration."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return load(context).answer(message, context)

    return app
