# %% [markdown]
# # Sparse models and constraints
#
# Which of thirty measurements of a tumour matter? Ten hospitals train a sparse logistic regression together. This
# notebook draws a regularisation path, adds constraints, and ends with a penalty of your own.

# %%
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import torch

import fedda
from fedda.testing import check_prox

problem = fedda.load("breast-cancer", clients=10, partition="iid", model="logistic", batch=32)


def train(prox, rounds=150):
    algorithm = fedda.make("fedda-mvr", lr=0.02, w=1000.0, prox=prox)
    return fedda.train(algorithm, problem, rounds=rounds, every=rounds, x0=torch.zeros(31))


# %% [markdown]
# ## A path of L1 penalties
#
# The L1 penalty makes weights exactly zero. A stronger one leaves fewer.

# %%
strengths = [0.003, 0.01, 0.03, 0.1]
path = {gamma: train(fedda.prox.L1(gamma)) for gamma in strengths}
for gamma, result in path.items():
    row = result.history[-1]
    print(f"gamma {gamma:<6} {row['nonzero']:5.0%} of the weights left, test accuracy {row['test_accuracy']:.1%}")

weights = torch.stack([result.x for result in path.values()])
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8))
left.plot(strengths, weights, lw=1)
left.set(xscale="log", xlabel="gamma", ylabel="weight", title="every line is a weight")
right.plot(strengths, [100 * r.history[-1]["nonzero"] for r in path.values()], "o-", label="weights left (%)")
right.plot(strengths, [100 * r.history[-1]["test_accuracy"] for r in path.values()], "s-", label="test accuracy (%)")
right.set(xscale="log", xlabel="gamma", ylim=(0, 103))
right.legend()
plt.show()

# %% [markdown]
# ## Constraints
#
# A constraint holds at every round and for every client, not only in the end. Here all weights lie in a box, or
# inside a ball in the 1-norm.

# %%
constraints = {
    "none": None,
    "box [-0.1, 0.1]": fedda.prox.Box(-0.1, 0.1),
    "1-norm at most 2": fedda.prox.L1Ball(2.0),
}
figure, panels = plt.subplots(1, 3, figsize=(12, 3), sharey=True)
for axes, (name, prox) in zip(panels, constraints.items(), strict=True):
    result = train(prox)
    axes.bar(range(len(result.x)), result.x.sort().values)
    axes.set_title(f"{name}\n{result.history[-1]['test_accuracy']:.1%}, 1-norm {float(result.x.abs().sum()):.2f}")
panels[0].set_ylabel("weights, sorted")
plt.show()


# %% [markdown]
# ## A penalty of your own
#
# The Huber penalty is quadratic near zero and linear far away. A penalty is a class with two methods: the
# proximal map, which minimises `s psi(x) + sum_j q_j (x_j - u_j)^2 / 2`, and its value. `check_prox` compares the
# map with many other points.


# %%
@dataclass(frozen=True)
class Huber(fedda.prox.Prox):
    """psi(x) = gamma sum_j h(x_j), h(x) = x^2 / (2 width) if |x| <= width, else |x| - width / 2."""

    gamma: float = 0.01
    width: float = 0.1

    def __call__(self, u, q, s):
        near = q * u / (q + s * self.gamma / self.width)
        far = u - torch.sign(u) * s * self.gamma / q
        return torch.where(near.abs() <= self.width, near, far)

    def value(self, x):
        size = x.abs()
        inside = size**2 / (2 * self.width)
        return self.gamma * torch.where(size <= self.width, inside, size - self.width / 2).sum(dim=-1)


check_prox(Huber, gamma=0.1)
result = train(Huber(gamma=0.03))
print(result)

t = np.linspace(-0.5, 0.5, 200)
u = torch.tensor(t)[None]
figure, axes = plt.subplots(figsize=(6, 3.4))
one = torch.ones(1, 1, dtype=torch.float64)
axes.plot(t, Huber(gamma=0.2)(u, one, one)[0], label="Huber")
axes.plot(t, fedda.prox.L1(0.2)(u, one, one)[0], label="L1")
axes.plot(t, t, ":", color="grey", label="no penalty")
axes.set(xlabel="before", ylabel="after the proximal map")
axes.legend()
plt.show()
