"""A frozen backbone with a new last layer: only the layer is trained, sent and kept for each client.

The backbone is trained on the even digits, by plain PyTorch. Clients then learn the odd digits with a
new last layer. With `--personal` every client has a layer of its own.

    python examples/fine_tuning.py --personal
"""

import argparse

import numpy as np
import torch
from torch import nn

import fedda
from fedda.data.datasets import embedded


def network(classes):
    body = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(body, nn.Linear(128, classes))  # parameters 0.* and 1.*


def parts():
    """Images and labels of the even and of the odd digits, with labels from 0 to 4."""
    x, y = embedded("digits")
    x = torch.tensor(x / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
    return [(x[y % 2 == odd], torch.tensor(y[y % 2 == odd] // 2)) for odd in (0, 1)]


def pretrained(x, y, epochs):
    torch.manual_seed(0)
    model = network(5)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(y)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimiser.step()
    return model[0]


def train(personal=False, rounds=60, epochs=10):
    (even, even_y), (x, y) = parts()
    model = network(5)
    model[0].load_state_dict(pretrained(even, even_y, epochs).state_dict())
    owner = fedda.partition(y, "dirichlet", clients=8, alpha=0.5)
    test = torch.tensor(np.random.default_rng(0).random(len(y)) < 0.2)
    which = {"trainable": "1.*"} if not personal else {"trainable": "1.*", "personal": "1.bias"}
    problem = fedda.problem(
        model, nn.functional.cross_entropy, x=x[~test], y=y[~test], client=owner[~test.numpy()], batch=16,
        test=(x[test], y[test], owner[test.numpy()]), **which,
    )  # fmt: skip
    return fedda.train(fedda.make("fedavg", lr=0.2, epochs=1), problem, rounds=rounds, weights="samples")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--personal", action="store_true", help="clients keep the bias of the last layer")
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    result = train(given.personal, given.rounds)
    row = result.history[-1]
    print(f"{result.x.numel()} shared parameters; {row['bytes_up']:,} bytes up; accuracy {row['test_accuracy']:.3f}")


if __name__ == "__main__":
    main()
