"""Which measurements of a tumour matter? Sparse logistic regression over ten hospitals that share no patient.

FedDA with an L1 penalty follows the regularisation path, all penalties as replicas of one program, and is compared with
scikit-learn on the pooled data: the same objective, the same optimum. Then a group lasso keeps or drops each of the ten
measurements with its three statistics (mean, error, worst) as a whole.

    pip install scikit-learn 'fedda[report]'
    python examples/biomarkers.py        # prints a table, writes biomarkers.png
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F

import fedda

GAMMAS = [0.005, 0.01, 0.03, 0.1]
NAMES = [str(name) for name in load_breast_cancer().feature_names]
MEASUREMENTS = [name.removeprefix("mean ") for name in NAMES[:10]]


def hospitals():
    """569 patients less a fifth for testing, over ten hospitals of unequal size and case mix."""
    return fedda.load(
        "breast-cancer", clients=10, partition="dirichlet", alpha=1.0, model="logistic", batch=64, dtype=torch.float64
    )


def federated(problem, prox, replicas, rounds):
    """Models [replicas, 31]: each patient counts the same, as in the pooled objective; the intercept is free."""
    algorithm = fedda.make("fedda-mvr", lr=1.5, w=100.0, c=3.0, eps=0.1, steps=1, prox=prox)
    # The guard is for networks: this loss is convex and its curvature known.
    how = {"weights": "samples", "x0": torch.zeros(problem.d, dtype=torch.float64), "force": True}
    return fedda.train(algorithm, problem, rounds, every=rounds, seed=[0] * replicas, **how).x


def central(problem, gamma):
    """scikit-learn on the pooled data, same objective: mean loss + gamma |w|_1."""
    n = len(problem.data.y)
    model = LogisticRegression(l1_ratio=1.0, C=1 / (n * gamma), solver="saga", tol=1e-7, max_iter=20_000)
    model.fit(problem.data.x.numpy(), problem.data.y.numpy())
    return torch.cat([torch.tensor(model.coef_[0]), torch.tensor(model.intercept_)])


def objective(problem, x, gamma):
    loss = F.binary_cross_entropy_with_logits(problem.data.x @ x[:30] + x[30], problem.data.y.double())
    return float(loss + gamma * x[:30].abs().sum())


def compare(problem, gammas, rounds):
    """For each penalty: FedDA's model, scikit-learn's, and how much larger FedDA's objective is."""
    weight = torch.tensor(gammas, dtype=torch.float64).view(-1, 1, 1)
    ours = federated(problem, fedda.prox.L1(weight, on="weights"), len(gammas), rounds)
    theirs = torch.stack([central(problem, gamma) for gamma in gammas])
    gaps = [objective(problem, a, g) - objective(problem, b, g) for a, b, g in zip(ours, theirs, gammas, strict=True)]
    return ours, theirs, gaps


def main(rounds=8000, picture="biomarkers.png"):
    problem = hospitals()
    ours, theirs, gaps = compare(problem, GAMMAS, rounds)
    print(f"{'gamma':>6} {'FedDA keeps':>12} {'scikit-learn':>13} {'objective above scikit-learn':>29}")
    for gamma, a, b, gap in zip(GAMMAS, ours, theirs, gaps, strict=True):
        print(f"{gamma:6} {int((a[:30] != 0).sum()):12} {int((b[:30].abs() > 1e-6).sum()):13} {gap:29.1e}")
    print("at gamma 0.03:", ", ".join(NAMES[j] for j in torch.nonzero(ours[2, :30]).flatten()))
    groups = torch.cat([torch.arange(30) % 10, torch.tensor([-1])])
    grouped = federated(problem, fedda.prox.GroupLasso(0.02, groups), 1, rounds)[0]
    kept = [MEASUREMENTS[g] for g in range(10) if bool((grouped[:30][groups[:30] == g] != 0).any())]
    print(f"group lasso keeps {len(kept)} of 10 measurements: {', '.join(kept)}")
    draw(ours, theirs, grouped, Path(picture))


def draw(ours, theirs, grouped, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for j in range(30):
        (line,) = left.plot(GAMMAS, ours[:, j], lw=1.2)
        left.plot(GAMMAS, theirs[:, j], "o", ms=4, mfc="none", color=line.get_color())
    left.set(
        xscale="log",
        xlabel="gamma",
        ylabel="weight",
        title="L1 path: FedDA over 10 hospitals (lines), pooled (circles)",
    )
    norms = [float(grouped[:30][torch.arange(30) % 10 == g].norm()) for g in range(10)]
    right.barh(MEASUREMENTS, norms, color="#0072b2")
    right.set(xlabel="norm of the group", title="Group lasso, gamma = 0.02")
    right.invert_yaxis()
    figure.savefig(path, dpi=110)
    print(f"picture: {path}", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
