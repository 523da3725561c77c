"""A rank of tests/test_distributed.py: every algorithm on several problems; rank 0 writes what came out."""

import sys

import torch
from safetensors.torch import save_file

import fedda
from conftest import NAMES, quadratic, stable
from fedda.run import Run


def problems():
    yield "quadratic", quadratic(clients=7, noise=0.3), {"cohort": 5}
    yield "few", quadratic(clients=7, noise=0.3), {"cohort": 2}  # fewer than the world
    yield "weights", quadratic(clients=3, noise=0.3), {"weights": "samples"}
    broken = quadratic(clients=7, noise=0.3)
    broken.b[4] = torch.nan  # a client whose replies are not finite, and who is left out
    yield "broken", broken, {"cohort": 5}
    digits = fedda.load("digits", clients=6, partition="dirichlet", alpha=0.5, model="mlp", hidden=4, batch=5)
    # Clients that work unequally, are away, or lose their reply, with noise in the samples and in the network.
    x, y, owner = digits.data.x.flatten(1), digits.data.y, torch.repeat_interleave(torch.arange(6), digits.sizes)
    torch.manual_seed(0)  # the same network in every process
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 4), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(4, 10)
    )
    loss, augment = torch.nn.functional.cross_entropy, fedda.augment.noise(0.1)
    noisy = fedda.problem(network, loss, x=x, y=y, client=owner, batch=5, augment=augment).to(dtype=torch.float64)
    params = {"epochs": 0.1, "stragglers": 0.4, "weight_decay": 0.1, "max_grad_norm": 0.5}
    away = [(k, k % 2, 9) for k in range(6)]  # three clients come after the first round
    how = {"cohort": 4, "sampling": "samples", "drop": 0.2, "availability": away, "seed": [3, 8], "params": params}
    yield "digits", noisy, how | {"force": True}
    yield "float32", digits, {"cohort": 4}
    yield "in turn", quadratic(clients=7, noise=0.3), {"chunk": 1}
    yield "resumed", noisy, how | {"force": True}  # begun in one process


def made(engine, chunk=None):
    """The engine, and the keywords of a run, from those of a problem."""
    return (fedda.engines.Distributed if engine == "distributed" else fedda.engines.Vectorised)(chunk=chunk)


def outcomes(engine, only=(), names=NAMES):
    """Everything that a run has, after rounds enough for the memory of a client to travel."""
    for what, problem, options in problems():
        if only and what not in only:
            continue
        for name in names:
            how = {"seed": 1} | options
            params = how.pop("params", {"steps": 2})
            algorithm = stable(name, **params | ({"work": "equal"} if name == "fednova" and "epochs" in params else {}))
            run = Run(algorithm, problem, engine=made(engine, how.pop("chunk", None)), **how)
            if what == "resumed":
                alone = Run(algorithm, problem, engine="vectorised", **how)
                alone.advance()
                alone.advance()
                run = Run(algorithm, problem, engine=made(engine), state=alone.state(), **how)
            while run.round < 3:
                run.advance()
            rows = run.evaluate(detail=what == "quadratic")
            state = {k: v.clone() for k, v in run.state().items()}
            if algorithm.unequal:  # a stack counts the steps of its slowest client; their difference is in the rows
                state = {k: v for k, v in state.items() if k not in ("counts.gradients", "idle")}
            for i, row in enumerate(rows):
                state |= {f"row.{i}.{k}": torch.tensor(v, dtype=torch.float64) for k, v in row.items()}
            yield f"{what}/{name}", state


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = NAMES if fedda.engines.join().size > 1 else NAMES[::10]  # one rank does what one process does
    cases = outcomes("distributed", sys.argv[2:], names)
    found = {f"{case}/{k}": v.contiguous() for case, state in cases for k, v in state.items()}
    if fedda.engines.join().rank == 0:
        save_file(found, sys.argv[1])
