"""The examples run and show what they say."""

import importlib.util
from pathlib import Path

import torch

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


def test_demo_rates_measures_what_it_says():
    """One rate of the recorded sweep, measured again."""
    from fedda.experiments import find

    (loss,) = example("demo_rates").losses(find("breast-cancer"), "fedavg", [0.02])
    text = (EXAMPLES.parent / "docs" / "demo-rates.md").read_text()
    assert f"0.02: {loss:.4f}" in text.split("## breast-cancer")[1]
