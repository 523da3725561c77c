"""The examples run and show what they say."""

import importlib.util
from pathlib import Path

import torch

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
