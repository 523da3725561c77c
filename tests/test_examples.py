"""The examples run and show what they say."""

import importlib.util
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import fedda

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_biomarkers_ends_at_scikit_learn_s_optimum(tmp_path):
    """The same objective to 1e-4, the same measurements, and a picture."""
    biomarkers = example("biomarkers")
    problem = biomarkers.hospitals()
    ours, theirs, gaps = biomarkers.compare(problem, [0.01, 0.03, 0.1], rounds=4000)
    assert all(-1e-6 < gap < 1e-4 for gap in gaps), gaps
    assert torch.equal(ours[1, :30] != 0, theirs[1, :30].abs() > 1e-6)
    biomarkers.GAMMAS = [0.01, 0.03, 0.1]
    biomarkers.draw(ours, theirs, ours[0], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_biomarkers_group_lasso_is_optimal():
    """No library to compare with: the optimality conditions themselves, for every measurement."""
    biomarkers = example("biomarkers")
    problem = biomarkers.hospitals()
    groups = torch.cat([torch.arange(30) % 10, torch.tensor([-1])])
    x = biomarkers.federated(problem, fedda.prox.GroupLasso(0.02, groups), 1, 4000)[0].requires_grad_()
    logits = problem.data.x @ x[:30] + x[30]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, problem.data.y.double())
    (g,) = torch.autograd.grad(loss, x)
    x = x.detach()
    kept = 0
    for group in range(10):
        xg, gg, weight = x[groups == group], g[groups == group], 0.02 * 3**0.5
        if bool((xg != 0).any()):
            kept += 1
            assert float((gg + weight * xg / xg.norm()).norm()) < 2e-3
        else:
            assert float(gg.norm()) < weight + 2e-3
    assert 3 <= kept <= 7 and abs(float(g[30])) < 2e-3


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_images_from_a_folder_to_a_model_file(norm, folder_of_digits, tmp_path):
    images = example("images")
    result = images.train(folder_of_digits, norm, rounds=2, clients=3, width=4)
    assert isinstance(result.run.problem.model[1], nn.BatchNorm2d if norm == "batch" else nn.GroupNorm)
    file = fedda.export(result, tmp_path / "model.pt")
    program = torch.export.load(io.BytesIO(torch.load(file)["program"])).module()
    test = result.run.problem.test
    right = (program(test.x).argmax(1) == test.y).double().mean()
    assert float(right) == result.history[-1]["test_accuracy"]


@pytest.fixture(scope="module")
def folder_of_digits(tmp_path_factory):
    """A few images of each class."""
    place = tmp_path_factory.mktemp("images")
    example("images").digits(place)
    for folder in place.iterdir():
        for file in sorted(folder.iterdir())[20:]:
            file.unlink()
    return place


@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_shakespeare(model):
    result = example("shakespeare").train(model, rounds=2, clients=12, width=8)
    row = result.history[-1]
    assert row["validation_perplexity"] > 1 and 0 <= row["validation_token_accuracy"] <= 1
    assert len(result.clients) == 12 and all(row["train_loss"] > 0 for row in result.clients)


def test_houses(tmp_path):
    houses = example("houses")
    houses.write_table(tmp_path / "houses.csv", rows=200)
    result = houses.train(tmp_path / "houses.csv", rounds=40)
    first, last = result.history[0], result.history[-1]
    assert last["test_mae"] < first["test_mae"] / 2
    assert {row["client"] for row in result.clients} == set(houses.CITIES)


@pytest.mark.parametrize("personal", [False, True])
def test_fine_tuning_trains_the_last_layer_alone(personal):
    result = example("fine_tuning").train(personal, rounds=3, epochs=1)
    shared = 128 * 5 if personal else 129 * 5
    assert result.x.shape == (shared,) and result.history[-1]["bytes_up"] == 3 * 8 * 4 * shared
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
