"""The best model of a run on its validation samples: in Python, in a run folder, over resume, in every engine."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import fedda
from commands import tiny
from conftest import stable
from fedda.best import BestModels
from fedda.experiments import Experiment, run
from fedda.progress import Silence
from fedda.run import Run
from ranks import fine, spawn

X = torch.randn(120, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).long() + (X[:, 2] > 0.5).long()
ALGORITHM = fedda.make("fedavg", lr=1.5, steps=2)  # so large that the metrics go up and down


def made(targets=Y, loss=F.cross_entropy, outputs=3, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, outputs)]
        model = nn.Sequential(*layers, *([nn.Flatten(0)] if outputs == 1 else [])).double()
    options = {"validation": 0.25} | options
    return fedda.problem(model, loss, x=X, y=targets, client=torch.arange(120) % 6, batch=4, **options)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_each_seed_keeps_the_model_of_its_best_row(engine):
    problem = made()
    result = fedda.train(ALGORITHM, problem, rounds=12, cohort=2, seed=[0, 5], engine=engine)
    best = result.best
    assert len(best.round) == 2 and best.x.shape == result.x.shape
    for i, seed in enumerate((0, 5)):
        rows = [row for row in result.history if row["seed"] == seed]
        top = max(row["validation_accuracy"] for row in rows)
        first = next(row for row in rows if row["validation_accuracy"] == top)
        assert best.round[i] == first["round"] and best.metrics[i] == {
            k: v for k, v in first.items() if isinstance(v, float) and k != "seconds"
        }
        held = problem.validation
        right = best.model(seed)(held.x).argmax(1) == held.y
        assert float(right.double().mean()) == top
        again = fedda.train(ALGORITHM, problem, rounds=first["round"] or 1, cohort=2, seed=seed, engine=engine)
        if first["round"]:
            torch.testing.assert_close(again.x, best.x[i], rtol=1e-12, atol=1e-12)
        assert list(best.state_dict(seed)) == list(problem.model.state_dict())
    assert any(r < 12 for r in best.round)  # otherwise this test would say nothing


def test_numbers_are_judged_by_their_loss():
    result = fedda.train(ALGORITHM, made(X[:, 0] * 2, F.mse_loss, 1), rounds=6, cohort=2)
    losses = [row["validation_loss"] for row in result.history]
    assert result.best.round == losses.index(min(losses)) and result.best.metrics["validation_loss"] == min(losses)
    assert repr(result.best) == f"Best(round={result.best.round}, parameters=49)"


def test_without_validation_samples_there_is_no_best():
    result = fedda.train(ALGORITHM, made(validation=None), rounds=1)
    with pytest.raises(ValueError, match=r"^best: .*validation=0.1$"):
        _ = result.best
    assert not any(name.startswith("best.") for name in result.state)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("seed", [3, [3, 4]])
def test_a_resumed_run_has_the_same_best(engine, seed):
    options = {"cohort": 2, "seed": seed, "engine": engine}
    for name in ("fedavg", "scaffold"):
        algorithm, problem = stable(name), made()
        whole = fedda.train(algorithm, problem, rounds=8, **options)
        half = fedda.train(algorithm, problem, rounds=5, **options)
        rest = fedda.train(algorithm, problem, rounds=8, state=half.state, **options)
        assert whole.state.keys() == rest.state.keys()
        for key, value in whole.state.items():
            assert torch.equal(value, rest.state[key]), key
        assert rest.best.metrics == whole.best.metrics and rest.best.round == whole.best.round


def test_a_checkpoint_holds_the_best_models(tmp_path):
    table = tiny()
    table["problem"]["validation"] = 0.2
    for name, rounds in (("whole", (6,)), ("parts", (4, 6))):
        for i, last in enumerate(rounds):
            experiment = Experiment.model_validate(table | {"rounds": last})
            run(experiment, tmp_path / name, Silence(), save_seconds=0, resume=i > 0)
    whole, parts = (tmp_path / name / "checkpoint" for name in ("whole", "parts"))
    for file in whole.glob("*.safetensors"):
        assert file.read_bytes() == (parts / file.name).read_bytes()
        state = load_file(file)
        rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
        for i in range(2):
            same = [r for r in rows if r["seed"] == i and r["algorithm"] in file.name]
            best = max(r["validation_accuracy"] for r in same)
            assert state["best.metrics.validation_accuracy"][i] == best
            assert state["best.round"][i] == next(r["round"] for r in same if r["validation_accuracy"] == best)


def test_a_diverged_replica_keeps_its_best_model():
    state = Run(ALGORITHM, made(), cohort=2, seed=[0, 1])
    state.evaluate()
    first = state.best.x.clone()
    state.silent = torch.tensor([9, 0])
    for _ in range(3):
        state.step()
        state.evaluate()
    assert torch.equal(state.best.x[0], first[0]) and math.isfinite(state.best.metrics[0]["validation_loss"])


def test_another_metric_can_choose():
    best = BestModels()
    best.chosen_by, best.directions = "validation_cost", {"cost": "lower"}
    for i, cost in enumerate((3.0, math.nan, 1.0, 2.0)):
        best.update(torch.full((1, 1), float(i)), [{"round": i, "validation_cost": cost, "validation_accuracy": i / 9}])
    assert best.rounds == [2] and best.x == 2.0


RANKS = f"""
import json
import sys
import torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
import fedda
from fedda.engines import join
from conftest import stable
from test_best import made

world, problem = join(), made()
for name in ("scaffold", "fedda-mvr"):
    options = dict(cohort=3, seed=[0, 1], engine="distributed")
    whole, half = (fedda.train(stable(name), problem, rounds=rounds, **options) for rounds in (6, 3))
    rest = fedda.train(stable(name), problem, rounds=6, state=half.state, **options)
    assert torch.equal(rest.x, whole.x) and torch.equal(rest.best.x, whole.best.x)
    assert rest.best.round == whole.best.round and rest.best.metrics == whole.best.metrics
    if world.rank == 0:
        print(json.dumps([whole.best.round, whole.best.x.tolist()]), flush=True)
"""


def test_two_processes_have_the_best_model_of_one_and_resume_in_python(tmp_path):
    (tmp_path / "program.py").write_text(RANKS)
    printed = fine(spawn(2, tmp_path / "program.py"))[0].splitlines()
    for name, line in zip(("scaffold", "fedda-mvr"), printed, strict=True):
        alone = fedda.train(stable(name), made(), rounds=6, cohort=3, seed=[0, 1], engine="sequential").best
        rounds, x = json.loads(line)
        assert rounds == alone.round
        torch.testing.assert_close(torch.tensor(x, dtype=torch.float64), alone.x, rtol=1e-12, atol=1e-12)
