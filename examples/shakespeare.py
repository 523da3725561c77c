"""The next character of Shakespeare, with an LSTM or a transformer; each speaking role is a client.

python examples/shakespeare.py --model transformer
"""

import argparse

import torch

import fedda


def train(model="lstm", rounds=200, clients=99, width=64, seed=0):
    problem = fedda.load(
        "shakespeare", clients=clients, partition="by_client", model=model, width=width, layers=1, dropout=0.1,
        batch=16, validation=0.1,
    )  # fmt: skip
    algorithm = fedda.make("fedadam", lr=0.5, server_lr=0.01, eps=1e-3, steps=10, max_grad_norm=1.0)
    return fedda.train(algorithm, problem, rounds=rounds, cohort=0.1, seed=seed, weights="samples", progress=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("lstm", "transformer"), default="lstm")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    result = train(given.model, given.rounds)
    last = result.history[-1]
    print(f"token accuracy {last['validation_token_accuracy']:.3f}, perplexity {last['validation_perplexity']:.2f}")
    worst = sorted(row["train_loss"] for row in result.clients)[-10:]
    print(f"loss of the ten roles that are hardest: {sum(worst) / len(worst):.3f}; of all {last['train_loss']:.3f}")
    torch.save(result.state_dict(), f"{given.model}.pt")


if __name__ == "__main__":
    main()
