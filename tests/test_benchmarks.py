"""The comparison with other simulators runs as its page says; no figure of time is held against anything."""

import json
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).parent.parent / "benchmarks" / "simulators" / "run.py"


def test_the_simulators_that_are_there_are_compared_and_the_others_are_named(tmp_path):
    out = tmp_path / "out.json"
    words = ["--workload=small", "--rounds=2", "--repeats=1", "--seeds=0", "--python", "pfl=no-such-python"]
    command = [sys.executable, str(DRIVER), *words, "--programs=plain,fedda,pfl", f"--json={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "pfl: left out, no-such-python has no package 'pfl'" in done.stdout
    results = json.loads(out.read_text())["small"]["results"]
    assert [result["program"] for result in results] == ["plain", "fedda"], done.stdout
    for result in results:
        assert f"| {result['program']} |" in done.stdout
        assert result["rounds"] == 2 and len(result["seconds_per_round"]) == 1
        assert 0.2 < result["final_accuracy"] < 1  # two rounds learn something: chance is 0.1
