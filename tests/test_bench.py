"""`fedda bench` prints and writes its figures, and its plain loop computes what the engines do. No time is compared."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

import fedda
from commands import inside, is_one_line, write
from fedda import rng
from fedda.bench import scaling, workloads
from fedda.bench.loop import LoopDraws, LoopFedAvg, LoopFedDA
from fedda.bench.plot import draw


@pytest.fixture
def fedda_inside(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(inside, capsys, monkeypatch)


def batches(problem, ids, key, draws):
    """What the engines draw for these clients, client by client."""
    every = [problem.standardised(problem.batch(ids, rng.fold(rng.fold(key, ids), i))) for i in range(draws)]
    return [[type(one)(one.x[k], one.y[k]) for one in every] for k in range(len(ids))]


@pytest.mark.parametrize("shape", [(5,), (3, 8, 8)], ids=["mlp", "cnn"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["float32", "float64"])
@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr"])
def test_the_plain_loop_equals_the_sequential_engine(name, dtype, tolerance, shape):
    arguments = {"hidden": 4} if len(shape) == 1 else {"filters": 2, "layers": 2}
    problem = workloads.noise(shape, clients=6, batch=4, samples=5, **arguments).to(dtype=dtype)
    algorithm = fedda.make(name, steps=3)
    run = fedda.Run(algorithm, problem, cohort=4, engine="sequential")
    simulation, everyone = run.simulation, torch.arange(problem.clients)
    if name == "fedavg":
        loop = LoopFedAvg(problem, algorithm.lr)
    else:
        loop = LoopFedDA(problem, algorithm, batches(problem, everyone, simulation.draws.keys[rng.START], 1))
    for tau in range(3):
        ids = rng.choose(rng.fold(simulation.draws.keys[rng.COHORT], tau), problem.clients, 4)
        loop.round(batches(problem, ids, rng.fold(simulation.draws.keys[rng.BATCH], tau), algorithm.steps))
        run.advance()
    x = torch.cat([p.flatten() for p in loop.server]) if name == "fedavg" else loop.x
    moved = (run.server.x[0] - problem.start(0)).abs().max()
    assert moved > 1e-3  # else equality would say nothing
    assert torch.allclose(x, run.server.x[0], rtol=0, atol=tolerance)
    if name == "fedda-mvr":
        assert torch.allclose(loop.nu, run.server.nu[0], rtol=0, atol=10 * tolerance)
        assert torch.allclose(loop.mu, run.server.mu[0], rtol=0, atol=10 * tolerance)


def test_the_loop_draws_its_own_samples_for_clients_that_differ():
    problem = workloads.noise((5,), clients=6, batch=4, samples=3, hidden=2)
    drawn = LoopDraws(problem, cohort=4, steps=2).round()
    owned = [{tuple(x.tolist()) for x in problem.everything(client).x} for client in range(6)]
    owners = []
    for own in drawn:
        seen = {tuple(x.tolist()) for batch in own for x in batch.x}
        owners += [client for client in range(6) if seen <= owned[client]]
    assert len(drawn) == len(owners) == len(set(owners)) == 4


NUMBERS = ("ms_per_step", "rounds_per_second", "images_per_second", "startup_seconds", "ratio_to_reference")


def test_the_small_workload(tmp_path, fedda_inside):
    arguments = ("--workload", "small", "--seconds", "0.01", "--algorithms", "fedavg,fedda-mvr,scaffold")
    code, stdout, stderr = fedda_inside("bench", *arguments, "--out", "new/figures.json")
    assert code == 0, stderr
    assert "small: fedda-mvr: " in stderr and "figures: new/figures.json" in stdout
    found = json.loads((tmp_path / "new/figures.json").read_text())
    machine = found["machine"]
    assert machine["torch"] == torch.__version__ and machine["command"].startswith("fedda bench --workload small")
    assert {"device", "processor", "threads", "date"} <= set(machine) and found["process_peak_mb"] > 10
    small = found["workloads"]["small"]
    assert (small["clients"], small["cohort"], small["steps"], small["batch"]) == (100, 10, 5, 16)
    assert not small["random_images"] and "random" not in stdout
    for name, own in small["algorithms"].items():
        assert own["gradients_per_round"] == (100 if name == "fedda-mvr" else 50)
        assert own["reference"] == ("sequential" if name == "scaffold" else "plain loop")
        assert list(own["paths"]) == ["native", "chain", "traced", "loop", own["reference"]]
        assert own["chosen"] in own["paths"] and own["seeds"] == 5 and own["precision"] == "float32"
        for row in own["paths"].values():
            assert all(row[number] > 0 for number in NUMBERS) and row["peak_memory_mb"] is None
            assert row["ms_per_step_min"] <= row["ms_per_step"] <= row["ms_per_step_max"]
            images = own["gradients_per_round"] * 16 * row["rounds_per_second"]
            assert row["images_per_second"] == pytest.approx(images)
        assert own["paths"][own["reference"]]["ratio_to_reference"] == 1


def test_the_images_of_the_cnn_are_said_to_be_random(tmp_path, fedda_inside, monkeypatch):
    monkeypatch.setattr(workloads, "CIFAR", (3, 8, 8))  # the paper's takes seconds
    arguments = ("--workload", "cnn", "--seconds", "0.01", "--algorithms", "fedavg")
    code, stdout, stderr = fedda_inside("bench", *arguments)
    assert code == 0, stderr
    assert "images are random" in stdout
    assert json.loads((tmp_path / "bench.json").read_text())["workloads"]["cnn"]["random_images"]


def test_scaling(tmp_path, fedda_inside, monkeypatch):
    few = [replace(sweep, values=sweep.values[:2]) for sweep in scaling.SWEEPS]
    monkeypatch.setattr(scaling, "SWEEPS", few)
    monkeypatch.setattr(scaling, "PATIENCE", 1e9)  # no value is too slow, whatever the machine
    arguments = (
        "--scaling",
        "--workload",
        "small",
        "--algorithms",
        "fedavg",
        "--seconds",
        "0.01",
        "--plot",
        "pictures",
    )
    code, stdout, stderr = fedda_inside("bench", *arguments)
    assert code == 0, stderr
    assert (tmp_path / "pictures/scaling-small.png").read_bytes()[1:4] == b"PNG"
    assert "picture: pictures/scaling-small.png" in stdout
    for own in json.loads((tmp_path / "bench.json").read_text())["scaling"]["small"].values():
        assert list(own) == ["clients", "steps", "parameters", "seeds", "population"]
        for rows in own.values():
            assert rows and all(row["fedda"][key] > 0 for row in rows for key in ("ms_per_step", "us_per_client_step"))
        assert [row["value"] for row in own["population"]] == [1000, 10_000]
        assert own["parameters"][0]["parameters"] < own["parameters"][1]["parameters"]
        assert all("plain loop" in row for row in own["clients"])


def test_what_becomes_too_slow_is_left_out():
    found = scaling.scaling("small", ["fedavg"], torch.device("cpu"), "auto", 1e-9, lambda text: None)
    assert all(len(rows) == 1 for rows in found["fedavg"].values())
    assert draw(found, "")[1:4] == b"PNG"


MISTAKES = {
    "workload": (["--workload", "smal"], ["--workload", "'small'", "'smal'"]),
    "algorithm": (["--algorithms", "fedavgg"], ["did you mean 'fedavg'?"]),
    "no algorithm": (["--algorithms", ","], ["--algorithms"]),
    "twice": (["--algorithms", "fedavg,fedavg"], ["different names"]),
    "seconds": (["--seconds", "0"], ["--seconds must be > 0, got 0"]),
    "seconds that never end": (["--seconds", "inf"], ["--seconds"]),
    "device": (["--device", "gpu"], ["--device 'gpu' cannot be used here"]),
    "precision": (["--precision", "fp8"], ["--precision", "'bf16'", "'fp8'"]),
    "precision of a GPU": (["--precision", "tf32"], ["tf32", "CUDA device"]),
    "plot alone": (["--plot", "here"], ["--plot", "--scaling"]),
    "a folder": (["--out", "."], ["cannot write", "Is a directory"]),
    "below a file": (["--out", "taken/a/b.json"], ["cannot write", "taken"]),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, fedda_inside, kind):
    arguments, fragments = MISTAKES[kind]
    (tmp_path / "taken").write_text("mine")
    code, stdout, stderr = fedda_inside("bench", *arguments)
    assert (code, stdout) == (2, "")
    is_one_line(stderr, *fragments)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_an_experiment_of_one_s_own(tmp_path, fedda_inside):
    file = write(
        tmp_path / "tiny.toml",
        title="Mine",
        cohort=3,
        algorithms={"a": {"name": "fedavg", "lr": 0.1}, "b": {"name": "scaffold", "epochs": 1}},
    )
    code, stdout, stderr = fedda_inside("bench", file, "--seconds", "0.01", "--algorithms", "b")
    assert code == 0 and "tiny: Mine" in stdout, stderr
    own = json.loads((tmp_path / "bench.json").read_text())["workloads"]["tiny"]
    assert (
        own["cohort"] == 3 and list(own["algorithms"]) == ["b"] and own["algorithms"]["b"]["reference"] == "sequential"
    )
    for wrong in (("--workload", "small"), ("--scaling",)):
        code, _, stderr = fedda_inside("bench", file, *wrong)
        assert code == 2
        is_one_line(stderr, "leave out EXPERIMENT")


def test_rates_that_depend_on_the_length_of_the_run(tmp_path, fedda_inside):
    file = write(tmp_path / "falls.toml", algorithms={"fedda": {}})
    code, stdout, stderr = fedda_inside("bench", file, "--seconds", "0.01")
    assert code == 0 and "fedda" in stdout, stderr


def test_help_shows_an_example(fedda_inside):
    code, stdout, _ = fedda_inside("bench", "--help")
    assert code == 0 and "Example: fedda bench" in stdout
