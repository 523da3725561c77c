# %% [markdown]
# # First steps
#
# This notebook trains a small network over ten clients, looks at how their data differ, compares two methods, and
# shows what the result says about single clients. It takes a few seconds.

# %%
import matplotlib.pyplot as plt
import numpy as np

import fedda

# %% [markdown]
# ## The data of the clients
#
# Handwritten digits, divided over ten clients. With `rho=0.8`, eight of ten images of a class are at one client.

# %%
problem = fedda.load("digits", clients=10, partition="dominant_class", rho=0.8, model="mlp", batch=16)
labels = fedda.data.open_dataset("digits").y
owner = fedda.partition(labels, "dominant_class", clients=10, rho=0.8)
counts = np.array(
    [[np.sum((np.asarray(owner) == k) & (np.asarray(labels) == c)) for c in range(10)] for k in range(10)]
)

figure, axes = plt.subplots(figsize=(5, 3.6))
shown = axes.imshow(counts, cmap="Blues")
axes.set(xlabel="class", ylabel="client", xticks=range(10), yticks=range(10))
figure.colorbar(shown, label="images")
plt.show()

# %% [markdown]
# ## Two methods
#
# An algorithm is a name and its hyper-parameters. Several seeds run side by side in one program.

# %%
methods = {"FedAvg": fedda.make("fedavg", lr=0.64), "FedDA-2-1": fedda.make("fedda-2-1", lr=0.008)}
results = {name: fedda.train(method, problem, rounds=60, seed=[0, 1, 2]) for name, method in methods.items()}
for name, result in results.items():
    print(name, result)


# %% [markdown]
# `result.history` is a list of rows, one for each evaluation and seed. A plot of mean and range:


# %%
def curve(result, column):
    rounds = sorted({row["round"] for row in result.history})
    return rounds, np.array([[row[column] for row in result.history if row["round"] == r] for r in rounds])


figure, panels = plt.subplots(1, 2, figsize=(10, 3.6))
for axes, column in zip(panels, ("train_loss", "test_accuracy"), strict=True):
    for name, result in results.items():
        rounds, values = curve(result, column)
        axes.plot(rounds, values.mean(1), label=name)
        axes.fill_between(rounds, values.min(1), values.max(1), alpha=0.2)
    axes.set(xlabel="round", ylabel=column.replace("_", " "))
    axes.grid(alpha=0.3)
panels[0].set_yscale("log")
panels[1].set_ylim(0.8, 1)
panels[1].legend()
plt.show()

# %% [markdown]
# ## Single clients
#
# A good mean can hide a client for which the model is bad. `result.clients` has a row for each client and seed.

# %%
figure, axes = plt.subplots(figsize=(7, 3))
for i, (name, result) in enumerate(results.items()):
    rows = [row for row in result.clients if row["seed"] == 0]
    axes.bar(np.arange(10) + 0.4 * i, [row["train_accuracy"] for row in rows], width=0.4, label=name)
axes.set(xlabel="client", ylabel="accuracy on its own data", ylim=(0.8, 1.02), xticks=range(10))
axes.legend(loc="lower right", framealpha=1)
plt.show()

# %% [markdown]
# ## A page for others
#
# `fedda.report` writes one HTML file that needs no network. Send it to a colleague.

# %%
page = fedda.report(results, out="report.html")
print(page)
