"""Several processes, joined by gloo: the numbers of one, whatever happens to the processes."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

import equal
from commands import ENVIRONMENT, UNHURRIED, fedda, warm, write
from conftest import NAMES
from fedda.engines.world import SingleProcess
from fedda.experiments.ranks import Pulse
from ranks import fine, free_port, spawn
from test_resume import same

ROUNDS = 60


# -- the same numbers -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def alone():
    """What every algorithm comes to in one process."""
    return dict(equal.outcomes("vectorised"))


# With three ranks and a cohort of two or three, some have one client and some have none; parts of five are unequal.
WORLDS = {
    1: ["few"],
    2: ["quadratic", "few", "broken", "digits", "float32", "resumed"],
    3: ["few", "weights", "in turn"],
}


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """The same on so many ranks, made when it is asked for."""

    @functools.cache
    def found(ranks):
        out = tmp_path_factory.mktemp("ranks") / "found.safetensors"
        fine(spawn(ranks, equal.__file__, out, *WORLDS[ranks]))
        return load_file(out)

    return found


@pytest.mark.parametrize("ranks,problem", [(ranks, problem) for ranks in WORLDS for problem in WORLDS[ranks]])
def test_every_algorithm_as_in_one_process(alone, together, ranks, problem):
    """Server, memory of all clients, counts and metrics; `few` is a cohort of two, smaller than the world."""
    bound = 2e-5 if problem == "float32" else 1e-12  # docs/scaling.md
    for name in NAMES if ranks > 1 else NAMES[::10]:
        for key, expected in alone[f"{problem}/{name}"].items():
            got = together(ranks)[f"{problem}/{name}/{key}"]
            where = f"{name} {key}: {{}}".format
            torch.testing.assert_close(got, expected, rtol=bound, atol=bound, equal_nan=True, msg=where)
    if problem == "broken":
        assert all(int(alone[f"broken/{name}"]["dropped"]) for name in NAMES)
    for name in NAMES if problem == "resumed" else ():  # the same as the run that was not interrupted
        key = "server.x"
        torch.testing.assert_close(
            together(ranks)[f"resumed/{name}/{key}"], alone[f"digits/{name}"][key], rtol=bound, atol=bound
        )


def test_memory_has_travelled(alone):
    """The table above says something about clients' memory only if there is some, and not zeros."""
    kept = {name: state["memory.c"] for name, state in alone.items() if "memory.c" in state}
    assert {"quadratic/scaffold", "digits/scaffold"} <= set(kept)
    assert all(int((c != 0).any(dim=-1).sum()) > 1 for c in kept.values())


def test_parts_cover_everything_once():
    for size in range(1, 9):
        world = SingleProcess()
        world.size = size
        for n in range(30):
            parts = world.parts(n)
            assert [k for part in parts for k in range(part.start, part.stop)] == list(range(n))
            assert max(p.stop - p.start for p in parts) - min(p.stop - p.start for p in parts) <= 1


# -- runs --------------------------------------------------------------------------------------------------------------
def torchrun(ranks, *words, restarts=0, program=("-m", "fedda"), **environment):
    """The command of `fedda` on so many ranks, as a user starts it; torchrun and its ranks are forked processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    launch += ["--monitor-interval=0.2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", *map(str, program)]
    return warm().start([*launch, *words], env=ENVIRONMENT | environment, start_new_session=True)


def ended(process, seconds=600):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, err


def workers(process):
    """The processes that torchrun has started: forked by a child of its own."""
    found = str(process.pid)
    for _ in range(2):
        found = ",".join(subprocess.run(["pgrep", "-P", found], capture_output=True, text=True).stdout.split())
    return [int(pid) for pid in found.split(",") if pid]


def rounds_so_far(folder):
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def close(folder, other, bound):
    """The same rows up to a bound."""
    rows = [list(map(json.loads, (f / "metrics.jsonl").read_text().splitlines())) for f in (folder, other)]
    assert len(rows[0]) == len(rows[1])
    for ours, theirs in zip(*rows, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == (pytest.approx(value, rel=bound, abs=bound) if isinstance(value, float) else value), key


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Slow enough to be killed: with an algorithm whose clients remember, on cohorts of three of seven."""
    problem = {"data": "digits", "clients": 7, "model": "mlp", "hidden": 16, "batch": 8}
    problem["validation"] = 0.2  # so that the best model of each seed is kept as well
    algorithms = {"scaffold": {"lr": 0.1}, "fedda-mvr": {"lr": 0.02, "w": 1000.0}}
    place = tmp_path_factory.mktemp("experiment") / "short.toml"
    return write(place, name="short", rounds=ROUNDS, every=5, cohort=3, problem=problem, algorithms=algorithms)


@pytest.fixture(scope="module")
def one(experiment, tmp_path_factory):
    """In one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    done = fedda("run", experiment, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def two(experiment, tmp_path_factory):
    """In two, undisturbed."""
    out = tmp_path_factory.mktemp("two") / "run"
    code, printed, err = ended(torchrun(2, "run", experiment, "--out", out))
    assert code == 0, err
    assert printed.count("report: ") == 1 and err.count("scaffold: done") == 1  # one of them speaks
    return out


def test_a_run_on_two_ranks_is_the_run_on_one(one, two):
    close(two, one, 2e-5)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


@pytest.mark.parametrize("cohort, personal", [(3, "2.*"), (5, "[26].*"), (5, None)])
def test_ranks_agree_on_batchnorm_s_statistics_and_personal_parameters(tmp_path, cohort, personal):
    """Each estimates with its clients alone, also where it holds no other samples (everybody in every round)."""
    problem = {"data": "digits", "clients": 5, "batch": 8, "validation": 0.1}
    problem |= {"model": "cnn", "filters": 4, "layers": 2, "norm": "batch"}
    problem |= {"personal": personal} if personal else {}
    words = {"rounds": 2, "cohort": cohort, "seeds": [0], "problem": problem, "algorithms": {"fedavg": {"lr": 0.05}}}
    experiment = write(tmp_path / "norm.toml", name="norm", **words)
    done = fedda("run", experiment, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    code, _, err = ended(torchrun(2, "run", experiment, "--out", tmp_path / "two"))
    assert code == 0, err
    close(tmp_path / "two", tmp_path / "one", 2e-5)


@pytest.mark.parametrize("kills", [3])
def test_killed_ranks_change_nothing(experiment, two, tmp_path, kills):
    """SIGKILL to either rank at random moments; torchrun starts all again, and they go on from the checkpoint."""
    drawn, out = random.Random(5), tmp_path / "run"
    process = torchrun(2, "run", experiment, "--out", out, "--save-seconds", 0.3, restarts=kills, program=[UNHURRIED])
    moments = sorted(
        drawn.sample(range(2, 2 * 2 * (ROUNDS // 5) - 4), kills)
    )  # rows, out of two seeds' and algorithms'
    for moment in moments:
        found = []
        while rounds_so_far(out) < moment or len(found := workers(process)) < 2:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.kill(drawn.choice(found), signal.SIGKILL)
        while set(found) & set(workers(process)):  # until torchrun has ended them all
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
    code, _, err = ended(process)
    assert code == 0, err
    assert err.count("(resumed)") >= 1
    same(out, two)


def test_stopped_on_three_ranks_and_gone_on_with_on_two(experiment, one, tmp_path):
    """SIGTERM to torchrun: saved, said, and another number of ranks may go on."""
    out = tmp_path / "run"
    process = torchrun(3, "run", experiment, "--out", out, program=[UNHURRIED])
    while rounds_so_far(out) < 9:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code != 0 and "torchrun --nproc-per-node=3 -m fedda run" in err and "--resume" in err
    assert 0 < rounds_so_far(out) < rounds_so_far(one)
    code, _, err = ended(torchrun(2, "run", experiment, "--out", out, "--resume"))
    assert code == 0, err
    close(out, one, 2e-5)


def test_replicas_are_shared_out(experiment, one, tmp_path):
    """Each rank has a seed of its own, and nothing travels."""
    code, _, err = ended(torchrun(2, "run", experiment, "--out", tmp_path / "run", "--shard", "replicas"))
    assert code == 0, err
    close(tmp_path / "run", one, 2e-5)
    state = [load_file(next((f / "checkpoint").glob("00-*.safetensors"))) for f in (tmp_path / "run", one)]
    assert state[0].keys() == state[1].keys()
    for name, value in state[1].items():
        torch.testing.assert_close(state[0][name], value, rtol=2e-5, atol=2e-5)


def test_points_of_a_sweep_are_shared_out(experiment, tmp_path):
    words = ["sweep", experiment, "--grid", "*.lr=x0.5,x1,x2", "--rounds", 10]
    done = fedda(*words, "--out", tmp_path / "one")
    assert done.returncode == 0, done.stderr
    code, _, err = ended(torchrun(3, *words, "--out", tmp_path / "three", "--shard", "replicas"))
    assert code == 0, err
    close(tmp_path / "three", tmp_path / "one", 2e-5)
    assert (tmp_path / "three/best.toml").read_text() == (tmp_path / "one/best.toml").read_text()


def test_a_restart_does_not_take_up_somebody_else_s_run(experiment, one, tmp_path):
    """Refused because the folder is taken, torchrun starts all again: they are refused again."""
    out = tmp_path / "taken"
    shutil.copytree(one, out)
    code, _, err = ended(torchrun(2, "run", experiment, "--out", out, restarts=1))
    assert code != 0 and "holds a run" in err and "resumed" not in err


def test_ranks_ask_each_other_about_once_a_second_also_after_a_resume():
    class Two(SingleProcess):
        size = 2

    for begun in (0, 20_000):
        pulse, asked = Pulse(Two(), 5.0, begun), []
        for k in range(begun + 1, begun + 41):
            time.sleep(0.01)
            before = pulse.next
            pulse(k, False, False)
            asked += [k] if pulse.next != before else []
        assert pulse.next - begun < 400  # about a hundred rounds a second


# -- failures ----------------------------------------------------------------------------------------------------------
def test_a_mistake_is_said_once(experiment, tmp_path):
    code, _, err = ended(torchrun(2, "run", experiment, "--out", tmp_path / "run", "--set", "scaffold.lr=-1"))
    assert code != 0
    assert err.count("lr must be > 0") == 1
    assert not (tmp_path / "run").exists()


def test_one_rank_fails_and_all_end_with_its_words(experiment, tmp_path):
    """A plugin that raises on rank 1 alone: nobody waits for it."""
    (tmp_path / "broken.py").write_text(
        "import os\nfrom fedda.problems.neural import Neural\nplain = Neural.gradients\n"
        "def gradients(self, x, batch):\n"
        "    if os.environ['RANK'] == '1':\n        raise ValueError('the disk of rank 1 is on fire')\n"
        "    return plain(self, x, batch)\nNeural.gradients = gradients\n"
    )
    words = ["run", experiment, "--out", tmp_path / "run", "--plugin", tmp_path / "broken.py"]
    results = spawn(2, "-m", "fedda", *words, seconds=240)  # a rank that does not answer is waited for for five minutes
    assert [code for code, *_ in results] == [1, 2]
    assert "rank 1: " in results[0][2] and "the disk of rank 1 is on fire" in results[0][2]
    assert "fedda: rank 1: " in results[1][2] and "on fire" in results[1][2]


def test_the_engine_alone_says_how_to_start_it():
    import fedda

    with pytest.raises(ValueError, match="torchrun"):
        fedda.train(fedda.make("fedavg"), fedda.Quadratic(A=[[1.0]], b=[[0.0]]), rounds=1, engine="distributed")


def test_options_for_several_processes(experiment, tmp_path):
    done = fedda("run", experiment, "--out", tmp_path / "run", "--shard", "replicas")
    assert done.returncode == 2 and "torchrun" in done.stderr
    done = fedda("run", experiment, "--out", tmp_path / "run", "--shard", "models")
    assert done.returncode == 2 and "'--shard': " in done.stderr
    code, _, err = ended(torchrun(3, "run", experiment, "--out", tmp_path / "run", "--shard", "replicas"))
    assert code != 0 and "3 ranks cannot share 2 replicas" in err


ON_A_GPU = """
import warnings, torch, fedda
from fedda.engines import Distributed, Vectorised
from fedda.run import Run
problem = fedda.load("digits", clients=6, model="mlp", hidden=8).to("cuda")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    runs = [Run(fedda.make("fedda-mvr", lr=0.02, w=1e3), problem, 4, engine=e) for e in (Distributed(), Vectorised())]
    for _ in range(5):
        [run.advance() for run in runs]
torch.testing.assert_close(runs[0].server.x, runs[1].server.x, rtol=1e-4, atol=1e-4)
print(runs[0].graph is not None, any("go" in str(w.message) and "host" in str(w.message) for w in said))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_gpu(ranks):
    """A sum by NCCL is part of the round's graph; two processes on one GPU go by the host, eagerly, and say so."""
    outputs = fine(spawn(ranks, "-c", ON_A_GPU, forked=False))
    graph = ranks <= torch.cuda.device_count()
    assert all(out.split() == [str(graph), str(not graph)] for out in outputs)
