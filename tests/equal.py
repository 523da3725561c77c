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
    yield "digits", digits.to(dtype=torch.float64), {"cohort": 4, "weights": "samples", "seed": [3, 8]}
    yield "float32", digits, {"cohort": 4}
    yield "in turn", quadratic(clients=7, noise=0.3), {"chunk": 1}
    yield "resumed", quadratic(clients=7, noise=0.3), {"cohort": 5}  # begun in one process


def made(engine, chunk=None):
    """The engine, and the keywords of a run, from those of a problem."""
    return (fedda.engines.Distributed if engine == "distributed" else fedda.engines.Vectorised)(chunk=chunk)


def outcomes(engine, only=()):
    """Everything that a run has, after rounds enough for the memory of a client to travel."""
    for what, problem, how in problems():
        if only and what not in only:
            continue
        for name in NAMES:
            how = {"seed": 1} | how
            run = Run(stable(name, steps=2), problem, engine=made(engine, how.pop("chunk", None)), **how)
            if what == "resumed":
                alone = Run(stable(name, steps=2), problem, engine="vectorised", **how)
                alone.advance()
                alone.advance()
                run = Run(stable(name, steps=2), problem, engine=made(engine), state=alone.state(), **how)
            while run.round < 3:
                run.advance()
            rows = run.evaluate(detail=what == "quadratic")
            state = {k: v.clone() for k, v in run.state().items()}
            for i, row in enumerate(rows):
                state |= {f"row.{i}.{k}": torch.tensor(v, dtype=torch.float64) for k, v in row.items()}
            yield f"{what}/{name}", state


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        f"{case}/{k}": v.contiguous() for case, state in outcomes("distributed", sys.argv[2:]) for k, v in state.items()
    }
    if fedda.engines.join().rank == 0:
        save_file(found, sys.argv[1])
