"""The benchmarks run and write their figures. No time is compared with anything."""

import json
import sys
from pathlib import Path

from commands import warm

DRIVER = Path(__file__).parent.parent / "benchmarks" / "simulators" / "run.py"


def test_the_simulators_that_are_there_are_compared_and_the_others_are_named(tmp_path):
    out = tmp_path / "out.json"
    arguments = ["--workload=small", "--rounds=2", "--repeats=1", "--seeds=0", "--python", "pfl=no-such-python"]
    command = [sys.executable, str(DRIVER), *arguments, "--programs=plain,fedda,pfl", f"--json={out}"]
    done = warm().run(command)
    assert done.returncode == 0, done.stderr
    assert "pfl: left out, no-such-python has no package 'pfl'" in done.stdout
    results = json.loads(out.read_text())["small"]["results"]
    assert [result["program"] for result in results] == ["plain", "fedda"], done.stdout
    for result in results:
        assert f"| {result['program']} |" in done.stdout
        assert result["rounds"] == 2 and len(result["seconds_per_round"]) == 1
        assert 0.2 < result["final_accuracy"] < 1  # two rounds learn something: chance is 0.1


def test_processes_beside_a_bare_all_reduce(tmp_path):
    """Sizes at which figures mean nothing: all of them are there, and add up."""
    out = tmp_path / "new" / "out.json"
    arguments = ["--worlds=2", "--hidden=2", "--turns=3"]
    command = [sys.executable, str(DRIVER.parents[1] / "distributed.py"), *arguments, f"--json={out}"]
    done = warm().run(command)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (own,) = found["overhead"]
    d = 64 * 2 + 2 + 2 * 10 + 10
    assert (own["processes"], own["parameters"]) == (2, d) and own["bytes"] == 8 * (d + 1 + 4)
    assert own["ratio"] == own["overhead_ms"] / own["bare_ms"] and own["quiet_bare_alone_ms"] > 0
    assert "medians, a round: " in done.stdout and found["target"] == 1.3


def test_what_private_noise_costs():
    command = [sys.executable, str(DRIVER.parents[1] / "noise.py"), "--shapes", "1e4", "3x1e3"]
    done = warm().run(command)
    assert done.returncode == 0, done.stderr
    assert "| 1e4 | ChaCha20 |" in done.stdout and "| 3x1e3 | opendp |" in done.stdout


def test_every_kind_of_network_beside_the_loop(tmp_path):
    out = tmp_path / "models.json"
    options = ["--small", "--device=cpu", "--algorithms=fedavg", "--seconds=0.001", f"--out={out}"]
    done = warm().run([sys.executable, str(DRIVER.parents[1] / "models.py"), *options])
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    kinds = {"cnn", "cnn-batchnorm", "mlp", "resnet8", "transformer", "lstm", "gru", "resnet18"}
    assert {row["model"] for row in rows} == kinds
    for row in rows:
        assert row["path"] in ("native", "traced", "loop") and min(row["loop_ms"], row["fedda_ms"], row["ratio"]) > 0
        assert (
            f"| {row['model']} | {row['parameters']:,} | {row['algorithm']} | float32 | {row['path']} |" in done.stdout
        )
