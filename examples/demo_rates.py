"""How the rates of the two built-in experiments were chosen: the same budget for every method.

Eight rates, each twice the one before, two seeds that the experiments do not use, the experiments' own rounds;
the winner has the smallest loss on a fifth of the training samples, held out (never on the test set). All sixteen runs
of a method are replicas of one program.

    python examples/demo_rates.py > docs/demo-rates.md
"""

import torch

import fedda
from fedda.experiments import find

# The smallest of the eight rates, set so that no winner stands at an end of its row.
FIRST = {
    "digits": {"fedda-mvr": 0.0025, "fedda-2-1": 0.0005, "fedavg": 0.01},
    "breast-cancer": {"fedda-mvr": 0.00125, "fedda-mvr-l1": 0.00125, "fedavg": 0.00125},
}
SEEDS = [100, 101]


def losses(experiment, label, rates):
    """The validation loss of each rate, mean over the seeds; NaN where a run diverged."""
    words = {k: v for k, v in experiment.algorithms[label].items() if k not in ("name", "lr")}
    lr = torch.tensor(rates, dtype=torch.float64).repeat_interleave(len(SEEDS)).view(-1, 1, 1)
    algorithm = fedda.make(experiment.algorithms[label].get("name", label), lr=lr, **words)
    table = experiment.problem.model_dump()
    problem = fedda.load(table.pop("data"), validation=True, **table)
    rounds, cohort = experiment.rounds, experiment.cohort
    # The guard against an absurd first step is off: a rate that diverges is a result here.
    how = {"every": rounds, "cohort": cohort, "force": True}
    try:
        rows = fedda.train(algorithm, problem, rounds, seed=SEEDS * len(rates), **how).history
    except fedda.Diverged:
        return [float("nan")] * len(rates)
    final = torch.tensor([row["test_loss"] for row in rows if row["round"] == rounds])
    return final.view(len(rates), len(SEEDS)).mean(dim=1).tolist()


def main():
    print("# How the demo's rates were chosen\n")
    print("Written by `python examples/demo_rates.py`: validation loss after the experiment's rounds, mean of seeds")
    print(f"{', '.join(map(str, SEEDS))}; eight rates a method, each twice the one before. The smallest loss wins.\n")
    for name in ("digits", "breast-cancer"):
        experiment = find(name)
        print(f"## {name} ({experiment.rounds} rounds)\n")
        print("| method | " + " | ".join(f"rate {i + 1}" for i in range(8)) + " | chosen lr |")
        print("|---|" + "---|" * 9)
        for label in experiment.algorithms:
            rates = [FIRST[name][label] * 2**i for i in range(8)]
            found = losses(experiment, label, rates)
            best = min((loss, rate) for loss, rate in zip(found, rates, strict=True) if loss == loss)[1]
            cells = [f"{rate:g}: {loss:.4f}" for rate, loss in zip(rates, found, strict=True)]
            print(f"| {label} | " + " | ".join(cells) + f" | **{best:g}** |")
        print()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
