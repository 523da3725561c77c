# %% [markdown]
# # Your own model and data
#
# This notebook starts from arrays and a PyTorch module, and ends with a model file: train, compare, look at the
# clients, export. Replace the first cell by your own data.

# %%
import io

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fedda

# %% [markdown]
# ## Data
#
# Two half moons, seen by eight hospitals. Each hospital measures from another angle, so their data differ.
# `client` says who owns a sample; numbers or names are fine.

# %%
random = np.random.default_rng(0)
hospitals = [f"hospital {i}" for i in range(8)]
x, y, client = [], [], []
for i, name in enumerate(hospitals):
    n = int(random.integers(60, 160))
    label = random.integers(0, 2, n)
    angle = np.pi * random.random(n)
    points = np.stack([np.cos(angle) + label, np.where(label, 0.4 - np.sin(angle), np.sin(angle))], 1)
    turn = 0.12 * (i - 3.5)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    x.append((points + random.normal(scale=0.12, size=points.shape)) @ rotation.T)
    y.append(label)
    client += [name] * n
x, y = torch.tensor(np.concatenate(x), dtype=torch.float32), torch.tensor(np.concatenate(y))

figure, panels = plt.subplots(1, 4, figsize=(12, 2.8), sharex=True, sharey=True)
for axes, name in zip(panels, hospitals[::2], strict=True):
    mine = [i for i, owner in enumerate(client) if owner == name]
    axes.scatter(*x[mine].T, c=y[mine], cmap="coolwarm", s=8)
    axes.set_title(f"{name}: {len(mine)} samples")
plt.show()

# %% [markdown]
# ## A problem
#
# A fifth of every hospital's samples is kept for testing, with its owner, and a tenth is held out to choose the
# best round.

# %%
order = random.permutation(len(y))
test, train = order[: len(y) // 5], order[len(y) // 5 :]
owners = np.array(client)
torch.manual_seed(0)  # the first weights of the network
network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
problem = fedda.problem(
    network,
    nn.functional.cross_entropy,
    x=x[train],
    y=y[train],
    client=owners[train].tolist(),
    batch=16,
    test=(x[test], y[test], owners[test].tolist()),
    validation=0.1,
)

# %% [markdown]
# ## Train and compare
#
# `weights="samples"` weights hospitals by their samples. `patience=25` stops a run that no longer improves on the
# held-out samples.

# %%
methods = {
    "FedAvg": fedda.make("fedavg", lr=0.1, epochs=1),
    "FedAdam": fedda.make("fedadam", lr=0.1, server_lr=0.03, epochs=1),
    "SCAFFOLD": fedda.make("scaffold", lr=0.1, epochs=1),
}
results = {
    name: fedda.train(method, problem, rounds=120, cohort=0.5, weights="samples", patience=25)
    for name, method in methods.items()
}
for name, result in results.items():
    print(
        f"{name:9} {result.history[-1]['test_accuracy']:.1%} on test samples after {result.history[-1]['round']} rounds"
    )

figure, axes = plt.subplots(figsize=(7, 3.4))
for name, result in results.items():
    axes.plot(
        [row["round"] for row in result.history], [row["validation_accuracy"] for row in result.history], label=name
    )
axes.set(xlabel="round", ylabel="validation accuracy")
axes.grid(alpha=0.3)
axes.legend()
plt.show()

# %% [markdown]
# ## Each hospital
#
# Who is served badly? Compare training and test accuracy of the best method by hospital.

# %%
best = max(results, key=lambda name: results[name].best.metrics["validation_accuracy"])
rows = results[best].clients
figure, axes = plt.subplots(figsize=(8, 3))
axes.bar(np.arange(8) - 0.2, [row["train_accuracy"] for row in rows], 0.4, label="training samples")
axes.bar(np.arange(8) + 0.2, [row["test_accuracy"] for row in rows], 0.4, label="test samples")
axes.set(xticks=range(8), ylim=(0.5, 1.02), title=f"{best}: accuracy by hospital")
axes.set_xticklabels([row["client"] for row in rows], rotation=30, ha="right")
axes.legend(loc="lower right", framealpha=1)
plt.show()

# %% [markdown]
# ## Take the model home
#
# `result.best` is the model of the best round on held-out samples. The file needs PyTorch and no fedda.

# %%
fedda.export(results[best].best, "hospitals.pt")
saved = torch.load("hospitals.pt")
model = torch.export.load(io.BytesIO(saved["program"])).module()
with torch.no_grad():
    print(f"{float((model(x[test]).argmax(1) == y[test]).double().mean()):.1%} of the test samples")

grid = torch.tensor(np.stack(np.meshgrid(np.linspace(-2, 3, 120), np.linspace(-1.6, 1.8, 80)), -1), dtype=torch.float32)
with torch.no_grad():
    probability = model(grid.reshape(-1, 2)).softmax(1)[:, 1].reshape(80, 120)
figure, axes = plt.subplots(figsize=(6, 3.8))
axes.contourf(grid[..., 0], grid[..., 1], probability, levels=20, cmap="coolwarm", alpha=0.7)
axes.scatter(*x[test].T, c=y[test], cmap="coolwarm", s=10, edgecolor="white", linewidth=0.4)
axes.set_title("the exported model and the test samples")
plt.show()
