"""Parts of a model and of a sample: frozen parameters, parameters that stay on their clients, tuples and dicts."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedda
from conftest import close, stable

torch.manual_seed(0)
X, Y = torch.randn(60, 5, dtype=torch.float64), torch.randint(0, 3, (60,))
OWNER = torch.arange(60) % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.body(x))))


torch.manual_seed(1)
NET = Net().double()


def made(model=NET, **options):
    options = {"x": X[:48], "y": Y[:48], "client": OWNER[:48], "test": (X[48:], Y[48:])} | options
    return fedda.problem(model, F.cross_entropy, batch=4, **options)


def both_engines(algorithm, problem, **options):
    options = {"rounds": 3, "cohort": 3, "seed": [0, 1], "every": 3} | options
    one, other = (fedda.train(algorithm, problem, engine=e, **options) for e in ("sequential", "vectorised"))
    close(one.x, other.x, 1e-12)
    last = [{k: v for k, v in r.history[-1].items() if k != "seconds"} for r in (one, other)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)
    return other


# -- frozen parameters ------------------------------------------------------------------------------------------------
def test_only_the_named_parameters_are_trained_and_sent():
    problem = made(trainable=["head.*", "norm.weight"])
    assert [name for name, _ in problem.layout] == ["norm.weight", "head.weight", "head.bias"] and problem.d == 27
    result = both_engines(stable("fedda-mvr"), problem)
    state, before = result.state_dict(), NET.state_dict()
    moved = {name for name in before if "running" not in name and not torch.equal(state[name], before[name])}
    assert moved == {"norm.weight", "head.weight", "head.bias"} and set(state) == set(before)
    assert result.model()(X).shape == (60, 3)
    # A parameter that was frozen by hand is the same.
    by_hand = copy.deepcopy(NET)
    by_hand.body.requires_grad_(False)
    by_hand.norm.bias.requires_grad_(False)
    assert torch.equal(fedda.train(stable("fedda-mvr"), made(by_hand), rounds=3, cohort=3, seed=1).x, result.x[1])
    one = {"rounds": 3, "cohort": 3, "seed": 1}
    fewer, all_bytes = (fedda.train(stable("fedavg"), p, **one).history[-1]["bytes_up"] for p in (problem, made()))
    assert fewer * made().d == pytest.approx(all_bytes * problem.d, rel=0.05)


def test_a_first_model_with_other_frozen_parameters_is_refused():
    other = Net().double()
    problem, x0 = made(trainable="head.*"), other.state_dict()
    with pytest.raises(
        ValueError, match=r"x0 has another 'body.weight' than the model, which is frozen: call model.load"
    ):
        fedda.train(fedda.make("fedavg"), problem, rounds=1, x0=x0)
    result = fedda.train(fedda.make("fedavg"), made(other, trainable="head.*"), rounds=1, x0=x0)
    fedda.train(fedda.make("fedavg"), made(other, trainable="head.*"), rounds=1, x0=result.state_dict())


def test_a_pattern_for_nothing_names_the_parameters():
    with pytest.raises(ValueError, match=r"^problem: trainable = 'haed.\*' fits no parameter; there are body.weight, "):
        made(trainable="haed.*")
    with pytest.raises(ValueError, match=r"^load: trainable = 3 fits no parameter"):
        fedda.load("digits", trainable=[3])


def test_trainable_in_a_file():
    from fedda.experiments import find
    from fedda.experiments.overrides import override

    experiment = override(find("digits"), settings=["problem.trainable=3.*", "problem.model=mlp"]).completed()
    assert experiment.problem.trainable == "3.*" and experiment.problem.build().d == 330
    assert "trainable" not in find("digits").completed().toml()


# -- tuples and dicts -------------------------------------------------------------------------------------------------
class Two(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.drop = nn.Linear(5, 3), nn.Linear(5, 3, bias=False), nn.Dropout(0.2)

    def forward(self, a, mask):
        h = self.left(a) + self.right(self.drop(a) * mask)
        return {"logits": h, "size": (h**2).mean(-1)}


torch.manual_seed(2)
TWO = Two().double()
MASK = torch.rand(60, 5) < 0.5
SIZES = torch.rand(60, dtype=torch.float64)


def two_losses(output, y):
    return F.cross_entropy(output["logits"], y["class"]) + F.mse_loss(output["size"], y["size"])


def of_two(x, **options):
    y = {"class": Y, "size": SIZES}
    first, rest = (at(y, slice(0, 48)), at(y, slice(48, None)))
    test = at(x, slice(48, None)), rest
    return fedda.problem(
        TWO, two_losses, x=at(x, slice(0, 48)), y=first, client=OWNER[:48], batch=4, test=test, **options
    )


def at(tree, index):
    return {k: v[index] for k, v in tree.items()} if isinstance(tree, dict) else tuple(v[index] for v in tree)


def test_dicts_are_keywords_and_tuples_are_positions():
    named, placed = of_two({"mask": MASK, "a": X}), of_two((X, MASK))
    results = [both_engines(stable("scaffold"), problem) for problem in (named, placed)]
    assert torch.equal(results[0].x, results[1].x)
    assert results[0].history[-1] == results[1].history[-1] | {"seconds": results[0].history[-1]["seconds"]}
    model = results[0].model(seed=1)
    output = model(X[48:], MASK[48:])
    loss = two_losses(output, {"class": Y[48:], "size": SIZES[48:]})
    assert float(loss) == pytest.approx(results[0].history[-1]["test_loss"], rel=1e-12)


def test_a_dict_of_one_array_equals_the_array(tmp_path):
    class Named(Net):
        def forward(self, ids):
            return super().forward(ids)

    network = Named().double()
    network.load_state_dict(NET.state_dict())
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    rows = np.arange(48)
    plain = fedda.train(stable("fedda-mvr"), made(validation=0.2), rounds=3)
    for options in ({"x": {"ids": X[:48]}}, {"x": {"ids": mapped}, "rows": rows}):
        problem = made(network, **options, test=({"ids": X[48:]}, Y[48:]), validation=0.2)
        result = fedda.train(stable("fedda-mvr"), problem, rounds=3)
        close(result.x, plain.x, 1e-12)
        assert result.history[-1]["validation_loss"] == pytest.approx(plain.history[-1]["validation_loss"], rel=1e-12)
        assert problem.to(dtype=torch.float32).only(slice(1, 3)).batch(torch.tensor([1]), torch.tensor([7])).x[
            "ids"
        ].shape == (1, 4, 5)


def test_augmentation_sees_the_whole_sample():
    def masked(x, uniform):
        return {"a": x["a"] * (1 + uniform(5)), "mask": x["mask"]}

    problem = of_two({"a": X, "mask": MASK}, augment=masked)
    both_engines(stable("fedavg"), problem)
    with pytest.raises(ValueError, match=r"the augmentation must return samples of the same shape"):
        of_two({"a": X, "mask": MASK}, augment=lambda x, uniform: x["a"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"x": {"a": X[:48], "mask": MASK[:47]}}, "x and y must hold the same number of samples"),
        ({"x": {"a": X[:48]}}, "cannot take this data"),
        ({"x": {"x": X[:48]}, "scale": (0.0, 1.0)}, "scale needs an x that is one array"),
    ],
)
def test_mistakes_with_dicts(options, message):
    with pytest.raises(ValueError, match=message) as why:
        fedda.problem(TWO, two_losses, **({"y": {"class": Y[:48], "size": SIZES[:48]}} | options))
    assert "\n" not in str(why.value)


# -- parameters that stay on their clients -----------------------------------------------------------------------------
PLAIN = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def by_hand(problem, rounds, lr, steps):
    """FedPer with all clients: the head (layer 2) stays on its client, the body is averaged."""
    names = [name for name, _ in problem.layout]
    models = [copy.deepcopy(PLAIN) for _ in range(problem.clients)]
    simulation = fedda.Run(fedda.make("fedavg", lr=lr, steps=steps), problem).simulation
    for tau in range(rounds):
        cohort = simulation.cohort(tau, problem.clients)
        for client, model in enumerate(models):
            draws = torch.arange(steps)[:, None]
            keys = fedda.rng.fold(cohort.key[client : client + 1], draws)
            for x, y in problem.batches(torch.tensor([client]), keys):
                model.zero_grad()
                F.cross_entropy(model(x[0]), y[0]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= lr * p.grad
        with torch.no_grad():
            for name in names:
                mean = torch.stack([dict(m.named_parameters())[name] for m in models]).mean(0)
                for m in models:
                    dict(m.named_parameters())[name].copy_(mean)
    return models


def test_personal_layers_are_fedper_exactly():
    problem = made(PLAIN, personal="2.*", validation=0.2, test=(X[48:], Y[48:], OWNER[48:]))
    assert problem.d == 24 and problem.d_personal == 15 and [n for n, _ in problem.layout] == ["0.weight", "0.bias"]
    result = fedda.train(fedda.make("fedavg", lr=0.2, steps=3), problem, rounds=4, every=4)
    models = by_hand(problem, 4, 0.2, 3)
    row = result.history[-1]
    for client, model in enumerate(models):
        for name, value in result.state_dict(client=client).items():
            close(value, dict(model.named_parameters())[name], 1e-12)
    for part, data, owner in (
        ("train", problem.data, torch.repeat_interleave(problem.sizes)),
        ("test", problem.test, problem.owners["test"]),
        ("validation", problem.validation, problem.owners["validation"]),
    ):
        losses = torch.cat([F.cross_entropy(m(data.x[owner == k]), data.y[owner == k], reduction="none") for k, m in
                            enumerate(models)])  # fmt: skip
        if part == "train":
            losses = torch.stack([one.mean() for one in losses.split(problem.sizes.tolist())])
        assert row[f"{part}_loss"] == pytest.approx(float(losses.mean()), rel=1e-12)
    assert row["bytes_up"] == fedda.train(fedda.make("fedavg", lr=0.2, steps=3), made(PLAIN, trainable="0.*"), rounds=4).history[-1]["bytes_up"]  # fmt: skip
    with torch.no_grad():
        heads = torch.stack([m[2].weight for m in models]).mean(0)
    close(result.state_dict()["2.weight"], heads, 1e-12)


@pytest.mark.parametrize("name", ["fedda-mvr", "scaffold", "mime", "stem", "fednova", "fedadam"])
def test_engines_agree_on_personal_parameters_and_a_run_is_resumed(name):
    problem = made(personal="norm.*", personal_lr=fedda.schedules.inverse_sqrt(0.1), validation=0.1)
    result = both_engines(stable(name), problem, rounds=4)
    half = fedda.train(stable(name), problem, rounds=2, cohort=3, seed=[0, 1])
    rest = fedda.train(stable(name), problem, rounds=4, cohort=3, seed=[0, 1], state=half.state, every=4)
    assert torch.equal(rest.x, result.x)
    states = [result.state_dict(seed=1, client=k) for k in range(4)]
    assert not torch.equal(states[0]["norm.weight"], states[1]["norm.weight"])
    assert not torch.equal(states[0]["norm.running_mean"], states[1]["norm.running_mean"])  # FedBN: its own statistics
    assert torch.equal(states[0]["head.weight"], states[1]["head.weight"])
    seen = {r.history[-1]["validation_loss"] for r in (result, rest)}
    assert max(seen) == pytest.approx(min(seen), rel=1e-12)


def test_shared_batch_norms_keep_pooled_statistics():
    result = fedda.train(stable("fedavg"), made(personal="head.*"), rounds=2)
    means = [result.state_dict(client=k)["norm.running_mean"] for k in (0, 1)]
    assert torch.equal(*means)
    kept = {k: v for k, v in result.state_dict().items() if k in NET.state_dict()}
    again = fedda.train(stable("fedavg"), made(personal="head.*"), rounds=1, x0=kept)
    assert again.history[0]["test_loss"] == pytest.approx(result.history[-1]["test_loss"], rel=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"personal": "*"}, "^problem: all parameters are personal"),
        ({"personal": "nrom.*"}, r"^problem: personal = 'nrom.\*' fits no parameter; there are body.weight"),
        (
            {"personal": "norm.*", "test": (X[48:], Y[48:], OWNER[48:] + 9)},
            "^problem: test: the client '9' has no training samples",
        ),
    ],
)
def test_mistakes_with_personal_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        made(**options)
    with pytest.raises(ValueError, match=r"^model: there is no client 4; there are 0, 1, 2, 3"):
        fedda.train(stable("fedavg"), made(personal="norm.*"), rounds=1).model(client=4)


# -- GroupNorm --------------------------------------------------------------------------------------------------------
def test_batch_norms_become_group_norms():
    network = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.Sequential(nn.BatchNorm2d(12, affine=False)))
    nn.init.normal_(network[1].weight)
    network[1].bias.requires_grad_(False)
    other = fedda.to_group_norm(network.double(), groups=8)
    assert isinstance(network[1], nn.BatchNorm2d) and isinstance(other[2][0], nn.GroupNorm) and not other[2][0].affine
    x = torch.randn(2, 12, 4, 4, dtype=torch.float64)
    expected = F.group_norm(x, 6, network[1].weight, network[1].bias)
    assert torch.equal(other[1](x), expected) and other[1].num_groups == 6 and not other[1].bias.requires_grad
    assert isinstance(fedda.to_group_norm(nn.BatchNorm1d(7)), nn.GroupNorm)
    with pytest.raises(ValueError, match=r"^to_group_norm: groups must be"):
        fedda.to_group_norm(network, groups=0)
