"""A model of one's own, from training to a plain module: random layers, augmentation, the way out, going on."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedda
from conftest import close, stable
from fedda import registry

torch.manual_seed(0)
X, Y = torch.randn(90, 5, dtype=torch.float64), torch.randint(0, 3, (90,))
OWNER = torch.arange(90) % 6
NETWORK = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)).double()
ALGORITHMS = [entry.name for entry in registry.algorithms if not entry.alias_of]


def made(model=NETWORK, **options):
    return fedda.problem(
        model, F.cross_entropy, x=X[:72], y=Y[:72], client=OWNER[:72], batch=4, test=(X[72:], Y[72:]), **options
    )


def noise(x, uniform):
    return x * (1 + 0.2 * (uniform(5) - 0.5))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_engines_agree_on_random_layers_and_augmentation(name):
    problem, algorithm = made(augment=noise), stable(name)
    ends = [
        fedda.train(algorithm, problem, rounds=2, cohort=4, seed=[0, 3], engine=engine, every=2)
        for engine in ("sequential", "vectorised")
    ]
    close(ends[0].x, ends[1].x, 1e-12)
    assert not torch.equal(ends[0].x[0], ends[0].x[1])
    still = fedda.train(algorithm, made(copy.deepcopy(NETWORK).eval()), rounds=2, cohort=4, every=2)
    assert not torch.allclose(still.x, ends[0].x[0], rtol=1e-6)  # neither is without effect


@pytest.mark.parametrize("name", ["fedda-mvr", "scaffold", "fednova"])
def test_a_run_is_resumed_in_python_bit_for_bit(name):
    problem, algorithm = made(augment=noise), stable(name)
    options = {"cohort": 3, "seed": [1, 2]}
    whole = fedda.train(algorithm, problem, rounds=5, **options)
    half = fedda.train(algorithm, problem, rounds=2, **options)
    kept = {name: value.clone() for name, value in half.state.items()}
    rest = fedda.train(algorithm, problem, rounds=5, state=half.state, **options)
    assert torch.equal(rest.x, whole.x) and all(torch.equal(kept[k], half.state[k]) for k in kept)
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in (*whole.history[-2:], *rest.history[-2:])]
    assert rows[:2] == rows[2:]
    servers = list(fedda.rounds(algorithm, problem, 5, state=half.state, **options))
    assert len(servers) == 3 and torch.equal(servers[-1].x[:, 0], whole.x)


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(64, 10)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2).flatten(1)
        return self.out(self.dropout(F.relu(self.second(F.relu(self.first(h))))))


def bytes_of_digits():
    data = fedda.data.open_dataset("digits")
    x, x_test = (torch.as_tensor(part * 255).round().to(torch.uint8) for part in (data.x, data.x_test))
    return x, torch.as_tensor(data.y), x_test, torch.as_tensor(data.y_test)


def test_the_module_scores_what_the_history_says(tmp_path):
    x, y, x_test, y_test = bytes_of_digits()
    mean, std = x.float().mean(), x.float().std()
    problem = fedda.problem(
        Net(), F.cross_entropy, x=x, y=y, client=torch.arange(len(y)) % 5, test=(x_test, y_test), scale=(mean, std)
    )
    result = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=30, seed=[0, 7], every=30)
    for row in result.history[-2:]:
        module = result.model(seed=row["seed"])
        assert not module.training and not any(p.requires_grad for p in module.parameters())
        torch.save(module.state_dict(), tmp_path / "model.pt")
        with torch.no_grad():
            output = module(x_test)
        assert (output.argmax(1) == y_test).double().mean() == row["test_accuracy"] > 0.5
        assert float(F.cross_entropy(output, y_test)) == pytest.approx(row["test_loss"], rel=1e-5)
        # The user's own module takes the state_dict; it wants standardised samples.
        own = Net()
        own.load_state_dict(result.state_dict(seed=row["seed"]))
        assert own.first.weight is own.second.weight
        with torch.no_grad():
            assert torch.allclose(own.eval()((x_test.float() - mean) / std), output, atol=1e-5)
    assert repr(result).startswith("Result(round=30, parameters=") and len(repr(result)) < 250


def test_a_state_dict_is_a_start():
    problem = made()
    start = copy.deepcopy(NETWORK)
    with torch.no_grad():
        start[0].weight += 1
    first = fedda.train(fedda.make("fedavg"), problem, rounds=1, x0=start.state_dict(), every=1)
    flat = torch.cat([p.detach().flatten() for p in start.parameters()])
    assert torch.equal(first.x, fedda.train(fedda.make("fedavg"), problem, rounds=1, x0=flat, every=1).x)


@pytest.mark.parametrize(("ask", "line"), [
    (lambda: fedda.train(fedda.make("fedavg"), made(), 1, x0={"0.weight": torch.ones(8, 5)}), "x0 has no parameter '0.bias'"),
    (lambda: fedda.train(fedda.make("fedavg"), made(), 1, x0=nn.Sequential(nn.Linear(4, 8)).state_dict()), r"0.weight must have the shape \[8, 5\], got \[8, 4\]"),
    (lambda: fedda.train(fedda.make("fedavg"), made(), 1).model(seed=4), "seed must be one of 0, got 4"),
    (lambda: fedda.train(fedda.make("fedavg"), fedda.Quadratic([[1.0]], [[1.0]]), 1).model(), "has no network, it is a Quadratic"),
    (lambda: made(augment=lambda x, uniform: x[:, :2]), "must return samples of the same shape and dtype"),
    (lambda: made(augment=3), "augment must be a name, a table"),
])  # fmt: skip
def test_mistakes_are_one_line(ask, line):
    with pytest.raises(ValueError, match=line) as raised:
        ask()
    assert "\n" not in str(raised.value)
