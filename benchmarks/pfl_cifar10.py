"""The CIFAR-10 workload that pfl-research is benchmarked with, in fedda: FedAvg, 1000 IID clients of 50 images, 50 a
round, 5 local steps of 10 images (one epoch), rate 0.1, server rate 1, uniform weights, 1500 rounds, all 10,000 test
images after every 10 of them (its benchmarks/image_classification/configs/baseline.yaml, without privacy).

    python benchmarks/pfl_cifar10.py --device cuda --rounds 1500

It differs in two things. The model has no dropout (0.25 after the pool, 0.5 before the last layer): gradients in fedda
are a function of parameters and samples alone. And a client's batches are drawn with replacement, where pfl goes
through the 50 images once, always in the same order.
"""

import argparse
import time

import numpy as np
import torch
from torch import nn

import fedda
from fedda.data import open_dataset
from fedda.problems.models import cross_entropy

CLIENTS, COHORT, STEPS, BATCH, LR, EVERY = 1000, 50, 5, 10, 0.1, 10


def simple_cnn():
    """1,626,442 parameters; Glorot's weights and PyTorch's own biases, as there."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def problem(model, data, seed):
    """Images standardised by channel, no augmentation; clients are IID."""
    owner = np.random.default_rng(seed).permutation(len(data.y)) % CLIENTS
    scale = tuple(np.array(v)[:, None, None] for v in (data.mean, data.std))
    x, y = np.array(data.x), np.array(data.y)
    return fedda.problem(model, cross_entropy, x=x, y=y, client=owner, batch=BATCH, scale=scale)


class Test:
    """The accuracy on all test images; it waits for the device."""

    def __init__(self, model, data, device):
        mean, std = (torch.tensor(v)[:, None, None] for v in (data.mean, data.std))
        self.x = ((torch.tensor(data.x_test) - mean) / std).to(device).split(2000)
        self.y = torch.tensor(data.y_test).to(device)
        self.model = model.to(device)

    @torch.no_grad()
    def __call__(self, server):
        torch.nn.utils.vector_to_parameters(server.x[0].clone(), self.model.parameters())
        found = torch.cat([self.model(x).argmax(dim=1) for x in self.x])
        return float((found == self.y).double().mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.perf_counter()
    torch.manual_seed(options.seed)
    model, data = simple_cnn(), open_dataset("cifar10")
    algorithm = fedda.make("fedavg", lr=LR, steps=STEPS)
    how = {"cohort": COHORT, "seed": options.seed, "device": options.device, "engine": "vectorised"}
    run = fedda.Run(algorithm, problem(model, data, options.seed), **how)
    test = Test(model, data, options.device)
    last = test(run.server)
    ready = time.perf_counter()
    for number in range(1, options.rounds + 1):
        run.advance()
        if number % EVERY == 0 or number == options.rounds:
            last = test(run.server)
            if number % (10 * EVERY) == 0:
                print(f"round {number}: {last:.2%} after {time.perf_counter() - ready:.1f} s", flush=True)
    seconds = time.perf_counter() - ready
    print(
        f"fedda {fedda.__version__}, torch {torch.__version__}, {options.device}: {options.rounds} rounds in "
        f"{seconds:.1f} s with evaluations, {seconds / options.rounds:.4f} s a round, after {ready - began:.1f} s of "
        f"start-up; test accuracy {last:.2%}"
    )


if __name__ == "__main__":
    main()
