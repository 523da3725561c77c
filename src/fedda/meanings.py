"""What hyper-parameters mean. A name means the same in every algorithm, so each shared one is explained here, once.

A parameter of one algorithm alone is explained in the ``Args:`` of its class, which also replaces a line of this table
where an algorithm reads it differently. `help`, `fedda list algorithms NAME` and the pages of the documentation show
both.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

B = TypeVar("B", bound=Callable[..., Any])

MEANINGS = {
    "lr": "the clients' rate: a number, or a schedule of `fedda.schedules`.",
    "lr_mode": '"absolute", or "relative": the rate is in units of the size that each parameter has at the start.',
    "server_lr": "the server's rate; 1 takes the mean of the clients as it is.",
    "steps": 'local steps of a client per round; "proportional" for as many as one pass over its data has batches.',
    "w": "the offset of the decay, eta_t = lr / (w + t)^(1/3): the rate stays about constant for w steps.",
    "c": "the weight of a new gradient is min(1, c eta_t^2); by default c = 0.5 / eta_0^2, so it starts at a half.",
    "momentum": "the weight of the history: 0 for none, 0.9 for a memory of about ten gradients.",
    "alpha_mode": '"history", or "weight": `momentum` is then the weight of the new gradient, as the paper prints it.',
    "beta": "the decay of the second moment mu: nearer to 1 remembers longer.",
    "beta1": "the decay of the first moment, the weight of its history.",
    "beta2": "the decay of the second moment, the weight of its history.",
    "beta_mode": '"decay", or "weight": `beta` is then the weight of the new term, as the paper prints it.',
    "eps": "added to the root of the second moment: it limits the step where gradients are small.",
    "eps_mode": '"absolute" adds `eps`; "relative" adds `kappa` times the mean of the root, which needs no tuning.',
    "kappa": 'the factor of `eps_mode="relative"`; larger is nearer to a step without adaptation.',
    "scale": "lambda, the length of every step in the metric H.",
    "mu0": 'the start of the second moment: "zero" as in the paper, or "nu0" for the first gradient estimate.',
    "mu_update": 'the second moment is updated "after" a round, or "before" it, from the nu that it begins with.',
    "h0": 'the first metric: "from_mu", or "one" for a first round without adaptation.',
    "mu_scale": '"sum" builds H from the sum of a round\'s gradients, "mean" from their mean.',
    "v_input": 'what H is built from: "z" (the dual state), "nu" (the last estimate) or "gradients" (their squares).',
    "v0": "the start of the second moment.",
    "bias_correction": "divide moments by 1 - beta^n in round n, as Adam does, because they start at zero.",
    "averaging": 'what the server averages: "dual" as in the paper, or "primal", an ablation.',
    "old_point": 'where the first old gradient of a round is taken: at the client\'s "own" last point, or at the x of '
    'the "server".',
    "prox": "a penalty or a constraint set of `fedda.prox`; none by default.",
    "osp": "apply `prox` on the server only.",
    "mu": "the weight of the penalty (mu / 2) ||X - x||^2, which pulls clients back to the server's model.",
    "gamma": "the weight of the penalty.",
    "estimator": "the rule for the gradient estimate, of `fedda.estimators`; `fedda.make` makes it from "
    "`momentum`, or from `w` and `c`.",
    "preconditioner": "the rule for the metric H, of `fedda.preconditioners`; `fedda.make` makes it from "
    "`beta`, `eps`, `mu0` and so on.",
    "units": "the rule for the units of the rate, of `fedda.preconditioners`; `fedda.make` makes it from `lr_mode`.",
    "epochs": "instead of `steps`: passes of a client over its own data per round, in a new random order each.",
    "proportional": 'set by `steps="proportional"`.',
    "stragglers": "the share of clients, drawn anew in each round, that stop after 1 to all of their steps.",
    "weight_decay": "each step also multiplies the model by 1 - eta_t weight_decay.",
    "max_grad_norm": "mini-batch gradients that are longer are scaled to this norm; no limit by default.",
}


def args_of(doc: str | None) -> dict[str, str]:
    """The parameters that the ``Args:`` of a docstring explains, with their meanings.

    >>> args_of("Shrink.\\n\\nArgs:\\n    x: a vector,\\n        long.\\n    *more: others.\\n\\nReturns:\\n    x")
    {'x': 'a vector, long.', 'more': 'others.'}
    """
    section = re.search(r"^Args:\n((?:[ ]+\S.*\n?)+)", inspect.cleandoc(doc or ""), re.M)
    entries = re.findall(r"^    \*{0,2}(\w+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def meanings(build: Callable[..., Any], names: Iterable[str]) -> dict[str, str]:
    """The meanings of hyper-parameters, as the docstring of a class explains them, else those of its bases, else the
    table; empty if none of them does."""
    known = dict(MEANINGS)
    for part in reversed(inspect.getmro(build)) if inspect.isclass(build) else (build,):
        known |= args_of(part.__doc__)
    return {name: known.get(name, "") for name in names}


def without_args(doc: str) -> str:
    """A docstring without its ``Args:``."""
    return re.sub(r"^Args:\n(?:[ ]+\S.*\n?)+\n*", "", inspect.cleandoc(doc), flags=re.M)


def explained(build: B) -> B:
    """Complete the ``Args:`` in the docstring of an algorithm by the hyper-parameters that it does not explain itself.

    >>> @explained
    ... def shrink(x, *, gamma=0.1):
    ...     '''Shrink.
    ...
    ...     Args:
    ...         x: a vector.
    ...     '''
    >>> print(shrink.__doc__)
    Shrink.
    <BLANKLINE>
    Args:
        x: a vector.
        gamma: the weight of the penalty.
    """
    texts = meanings(build, inspect.signature(build).parameters)
    lines = [
        textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, text in texts.items()
        if text
    ]
    body, mark, example = without_args(build.__doc__ or "").partition("\n>>> ")
    build.__doc__ = "\n".join([body.rstrip(), "", "Args:", *lines, *(["", mark[1:] + example] if mark else [])])
    return build
