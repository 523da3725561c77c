"""Draw the pictures of docs/concepts.md. Everything that looks like a run is one.

python docs/pictures.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import fedda

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREEN, PINK, GREY = "#0072b2", "#d55e00", "#009e73", "#b0478f", "#555555"
plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 150})


def save(figure, name):
    figure.savefig(IMAGES / name, bbox_inches="tight")
    plt.close(figure)


def one_round():
    """The three parts of a round, from left to right."""
    figure, axes = plt.subplots(figsize=(10, 4.2))
    axes.set(xlim=(0, 10), ylim=(0, 4.2))
    axes.axis("off")

    def box(x, y, width, height, text, colour):
        shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.08", facecolor=colour, edgecolor="none")
        axes.add_patch(shape)
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white")

    def arrow(start, end, colour=GREY):
        axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=colour, lw=1.6))

    heights = (3.1, 1.8, 0.5)
    box(0.2, 1.75, 1.6, 0.8, "server\nmodel x", BLUE)
    for i, y in enumerate(heights):
        box(4.0, y, 2.2, 0.7, f"client {i + 1}\nlocal steps, own data", ORANGE)
        arrow((1.95, 2.15), (3.85, y + 0.35))
        arrow((6.35, y + 0.35), (8.05, 2.15))
    box(8.2, 1.75, 1.6, 0.8, "server\nmean of replies", BLUE)
    axes.text(2.1, 3.35, "1  the model goes down", ha="center", color=GREY)
    axes.text(5.1, 4.05, "2  clients work on their own", ha="center", color=GREY)
    axes.text(8.0, 3.35, "3  changes come up", ha="center", color=GREY)
    axes.text(5, 0.1, "The next round starts from the new model. Data stays with its client.", ha="center", color=GREY)
    save(figure, "concept-round.png")


def path(problem, algorithm, rounds, start):
    """The models of a run, [rounds + 1, d]."""
    models = [s.x.view(-1) for s in fedda.rounds(algorithm, problem, rounds=rounds, x0=start)]
    return torch.stack([start, *models])


def mean_loss(problem_a, problem_b, x):
    return (problem_a * (x[..., None, :] - problem_b) ** 2 / 2).sum(-1).mean(-1)


def contours(axes, a, b, xlim, ylim, levels=12):
    grid = torch.tensor(np.stack(np.meshgrid(np.linspace(*xlim, 200), np.linspace(*ylim, 200)), -1))
    loss = mean_loss(a, b, grid)
    axes.contour(grid[..., 0], grid[..., 1], loss, levels=levels, colors="#cccccc", linewidths=0.8)
    axes.set(xlim=xlim, ylim=ylim, xticks=[], yticks=[])
    axes.set_aspect("equal")


def drift():
    """FedAvg with few and many local steps, and SCAFFOLD with many."""
    figure, panels = plt.subplots(1, 3, figsize=(12, 4.0))
    # Each client has its own minimum, and its curvature is in another direction.
    a = torch.tensor([[1.0, 0.1], [0.1, 1.0]], dtype=torch.float64)
    b = torch.tensor([[2.0, 1.0], [-1.0, 2.0]], dtype=torch.float64)
    best = (a * b).sum(0) / a.sum(0)
    start = torch.tensor([-1.6, -0.6], dtype=torch.float64)
    problem = fedda.Quadratic(a, b)
    cases = [
        ("FedAvg, 1 local step", fedda.make("fedavg", lr=0.3, steps=1), 40, 1, 0.3),
        ("FedAvg, 30 local steps", fedda.make("fedavg", lr=0.3, steps=30), 40, 30, 0.3),
        ("SCAFFOLD, 30 local steps", fedda.make("scaffold", lr=0.3, steps=30), 40, 30, 0.3),
    ]
    for axes, (title, algorithm, rounds, steps, lr) in zip(panels, cases, strict=True):
        contours(axes, a, b, (-2.2, 2.6), (-1.2, 2.7))
        models = path(problem, algorithm, rounds, start)
        if "FedAvg" in title:  # what each client does in the first round
            for k, colour in enumerate((ORANGE, PINK)):
                x = [start]
                for _ in range(steps):
                    x.append(x[-1] - lr * a[k] * (x[-1] - b[k]))
                x = torch.stack(x)
                axes.plot(
                    *x.T, "-", color=colour, lw=1.4, marker=".", ms=4, alpha=0.9, label=f"client {k + 1}, round 1"
                )
        axes.plot(*models.T, "o-", color=BLUE, ms=4, lw=1.4, label="server")
        axes.plot(*b.T, "s", color=GREY, ms=6, label="minimum of a client")
        axes.plot(*best, "*", color=GREEN, ms=17, label="minimum of the mean")
        away = float((models[-1] - best).norm())
        axes.set_title(f"{title}\nends {away:.2f} from the minimum")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncol=5, frameon=False, bbox_to_anchor=(0.5, -0.02))
    save(figure, "concept-drift.png")


def adaptivity():
    """A long narrow valley: one rate for all directions, and a rate for each."""
    a = torch.tensor([[1.0, 0.002], [1.0, 0.002]], dtype=torch.float64)
    b = torch.tensor([[0.3, 5.5], [-0.3, 6.5]], dtype=torch.float64)
    problem, start = fedda.Quadratic(a, b), torch.tensor([1.5, 0.0], dtype=torch.float64)
    runs = {
        "FedAvg, lr 1.5 (it diverges at 2)": (fedda.make("fedavg", lr=1.5, steps=5), ORANGE),
        "FedDA-2-1": (fedda.make("fedda-2-1", lr=0.3, eps=0.001, mu0="nu0", beta=0.9), BLUE),
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), gridspec_kw={"width_ratios": [1, 1.3]})
    grid = torch.tensor(np.stack(np.meshgrid(np.linspace(-1.6, 2.0, 200), np.linspace(-0.8, 8, 200)), -1))
    left.contour(grid[..., 0], grid[..., 1], mean_loss(a, b, grid), levels=14, colors="#cccccc", linewidths=0.8)
    best = (a * b).sum(0) / a.sum(0)
    floor = mean_loss(a, b, best)
    for name, (algorithm, colour) in runs.items():
        models = path(problem, algorithm, 60, start)
        left.plot(*models.T, "o-", ms=3, lw=1.2, color=colour, label=name)
        right.semilogy((mean_loss(a, b, models) - floor).clamp(min=1e-12), color=colour, lw=2, label=name)
    left.plot(*best, "*", color=GREEN, ms=15, label="minimum")
    left.set(xlabel="a steep direction", ylabel="a flat direction", xticks=[], yticks=[])
    right.set(xlabel="round", ylabel="loss above its minimum", title="FedAvg waits for the flat direction")
    right.grid(alpha=0.3)
    right.legend(frameon=False)
    save(figure, "concept-adaptivity.png")


def dual_averaging():
    """The mean of sparse models is dense. A mean in the dual space, and then the penalty, is sparse."""
    random = np.random.default_rng(3)
    d, threshold = 16, 0.6
    common = np.zeros(d)
    common[[3, 10]] = (1.8, -1.6)
    dual = common + random.normal(scale=0.6, size=(3, d))
    shrink = lambda z: np.sign(z) * np.maximum(np.abs(z) - threshold, 0)  # noqa: E731
    figure, panels = plt.subplots(2, 3, figsize=(12, 5.4), sharey="row", sharex=True)
    for i, axes in enumerate(panels[0]):
        model = shrink(dual[i])
        axes.bar(range(d), model, color=(ORANGE, PINK, GREY)[i])
        axes.set_title(f"model of client {i + 1}: {np.count_nonzero(model)} of {d} weights")
    primal, better = shrink(dual).mean(0), shrink(dual.mean(0))
    mean = dual.mean(0)
    panels[1, 0].bar(range(d), primal, color=ORANGE)
    panels[1, 0].set_title(f"mean of the models: {np.count_nonzero(primal)} of {d}")
    panels[1, 1].bar(range(d), mean, color="#9bc4e2")
    panels[1, 1].set_title("mean of the dual states: dense")
    for y in (threshold, -threshold):
        panels[1, 1].axhline(y, color=GREY, ls="--", lw=1)
    panels[1, 2].bar(range(d), better, color=BLUE)
    panels[1, 2].set_title(f"then the penalty, once: {np.count_nonzero(better)} of {d}")
    for axes in panels.flat:
        axes.axhline(0, color="black", lw=0.8)
        axes.set(xticks=[])
    figure.tight_layout()
    save(figure, "concept-dual.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for draw in (one_round, drift, adaptivity, dual_averaging):
        draw()
