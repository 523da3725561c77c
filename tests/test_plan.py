"""`fedda plan`: bytes and shards against what real processes hand on and hold; the arithmetic by hand; no time is held
against anything."""

import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import wires
from commands import inside, is_one_line, write
from fedda.engines import Simulation, SingleProcess
from fedda.engines.distributed import MemoryRoute
from fedda.experiments import find
from fedda.experiments.ranks import Ranks
from fedda.experiments.runner import built
from fedda.plan import Link, Method, Profile, Size, measured, measured_link, predict, worlds
from fedda.plan.measure import wide
from fedda.plan.predict import memory
from fedda.plan.rows import rounds_of, travels
from ranks import fine, spawn

K, R, ROUNDS, SEEDS = 13, 6, 5, [0, 3]
# no memory; a vector of each client; three of them; two exchanges a round
ALGORITHMS = {
    "fedavg": {}, "scaffold": {}, "local-amsgrad": {"state": "naive"}, "mime": {}, "fedda-mvr": {"lr": 0.01, "w": 1000.0},
}  # fmt: skip


def ranked(rank, size):
    world = SingleProcess()
    world.rank, world.size = rank, size
    return world


# -- against real processes --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    problem = {"data": "digits", "clients": K, "partition": "iid", "model": "mlp", "hidden": 4, "batch": 4}
    place = tmp_path_factory.mktemp("plan") / "wires.toml"
    return write(place, name="wires", rounds=10, every=5, cohort=R, seeds=SEEDS, problem=problem, algorithms=ALGORITHMS)


@pytest.fixture(scope="module")
def profile(experiment):
    """Measured, for as short as can be."""
    return measured(
        find(str(experiment)), [2, 3, R], False, torch.device("cpu"), Link(1e-4, 1e9), 1e-3, lambda words: None
    )


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_and_shards_are_those_of_real_processes(experiment, profile, tmp_path, world):
    """Exact, over several rounds: the cohorts are drawn as the run draws them."""
    fine(spawn(world, wires.__file__, experiment, ROUNDS, tmp_path / "found"))
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(world)]
    size, drawn = Size(K, R, 10, 3), rounds_of(K, R, SEEDS, ROUNDS)
    for label in ALGORITHMS:
        line, real = predict(profile, label, size, world, drawn), [own[label] for own in found]
        exchanges = len(profile.methods[label].exchanges)
        assert [own["all_reduce"] for own in real] == [ROUNDS * line["message_bytes"]] * world
        ring = line["wire_bytes"]["all_reduce"]
        assert ring == pytest.approx(2 * (world - 1) / world * real[0]["all_reduce"] / ROUNDS, rel=1e-12)
        away = sum(own["away"] for own in real)
        assert line["wire_bytes"]["rows"] * world * ROUNDS == pytest.approx(away, rel=1e-9)
        vectors = profile.methods[label].memory
        row = vectors * profile.parameters * profile.number
        assert 2 * exchanges * row * line["rows_away"] * ROUNDS == pytest.approx(away, rel=1e-9)
        # every row of the cohort is handed over and back, to whomever; those away are a part of them
        assert sum(own["handed"] for own in real) == 2 * exchanges * ROUNDS * len(SEEDS) * R * row
        assert line["memory_bytes"]["client_memory"] == max(own["memory"] for own in real)
        assert sum(own["memory"] for own in real) == len(SEEDS) * K * row
        assert profile.methods[label].server == real[0]["server"]
        books = memory(profile, replace(profile.methods[label], start=[]), Size(1000, 10, 1, 1), world).bookkeeping
        assert books == 1000 * real[0]["books"] / K
    moved = {label: sum(own[label]["away"] for own in found) for label in ALGORITHMS}
    assert (moved["scaffold"] > 0) == (world > 1) and moved["fedavg"] == 0
    assert {label: method.memory for label, method in profile.methods.items()}["local-amsgrad"] == 3
    assert len(profile.methods["mime"].exchanges) == 2 and profile.methods["fedda-mvr"].start == [[profile.parameters]]


def test_resident_data(experiment, profile):
    """A rank holds its own clients' samples where everyone takes part, else all of them."""
    completed = find(str(experiment)).completed()
    whole = built(completed, None)
    everyone = built(completed.model_copy(update={"cohort": K}), None, ranks=Ranks(ranked(1, 2)))
    method, test = profile.methods["fedavg"], sum(v.nbytes for v in whole.test)
    assert profile.test_bytes == test
    stored = memory(profile, method, Size(K, R, 1, 1), 2).data - test
    assert stored == pytest.approx(sum(v.nbytes for v in whole.data), rel=1e-9)
    part = memory(profile, method, Size(K, K, 1, 1), 2).data - test
    one = whole.data.x[0].nbytes + whole.data.y[0].nbytes
    assert part == pytest.approx(sum(v.nbytes for v in everyone.data), abs=K * one)  # clients differ by a sample
    assert part < 0.6 * stored


def test_the_profile_is_of_rounds_that_were_run(experiment, profile):
    samples = int(built(find(str(experiment)).completed(), None).sizes.sum())
    assert profile.replicas == 2 and profile.samples * K == pytest.approx(samples)
    for method in profile.methods.values():
        assert [clients for clients, _ in method.rounds] == [2, 3, 6]
        assert all(math.isfinite(seconds) and seconds > 0 for _, seconds in method.rounds)
    assert profile.methods["fedda-mvr"].start_seconds > 0 == profile.methods["fedavg"].start_seconds
    assert profile.methods["fedda-mvr"].exchanges == [[profile.parameters] * 2]
    assert profile.sample_seconds > 0


def test_a_wide_problem_has_the_same_clients_again():
    problem = built(find("digits").completed(), None)
    many = wide(problem, 23)
    assert many.clients == len(many.sizes) == 23
    for client in (0, 9, 10, 22):
        assert torch.equal(many.everything(client).x, problem.everything(client % 10).x)


# -- rows --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients,cohort,world", [(13, 6, 4), (50, 3, 5), (10_000, 100, 8), (9, 9, 4)])
def test_rows_are_those_of_the_engine(clients, cohort, world):
    """The matrix of owners and readers, from what each rank would give and take in these rounds."""
    problem = SimpleNamespace(
        clients=clients, sizes=torch.ones(clients), d=0, dtype=torch.float32, device=torch.device("cpu")
    )
    simulation = Simulation(problem, None, torch.tensor(SEEDS)[:, None], "uniform", ())
    matrix = travels(rounds_of(clients, cohort, SEEDS, 3), clients, world)
    for tau in range(3):
        for rank in range(world):
            journey = MemoryRoute.of(simulation.cohort(tau, cohort), ranked(rank, world))
            assert journey.give == matrix[tau, rank].tolist() and journey.take == matrix[tau, :, rank].tolist()
    away = matrix.sum() - matrix.diagonal(dim1=-2, dim2=-1).sum()
    assert matrix.sum() == 3 * 2 * cohort and (away == 0) == (clients == cohort)


# -- arithmetic --------------------------------------------------------------------------------------------------------
def by_hand(**changes):
    method = Method(
        exchanges=[[10, 10], [3]], start=[[10]], memory=2, server=500, rounds=[(5, 1.0), (10, 2.0), (20, 5.0)],
        start_seconds=0.01,
    )  # fmt: skip
    values = {
        "name": "x", "problem": {}, "replicas": 3, "parameters": 10, "number": 4, "device": "cpu", "shared": True,
        "cores": 2, "device_bytes": 10**6, "chunk_bytes": 3000, "client_bytes": 100, "data_bytes": 50.0, "test_bytes": 70,
        "samples": 5.0, "test_samples": 20, "sample_seconds": 0.001, "link": Link(0.1, 1000.0, True),
        "machine": {}, "methods": {"m": method}, "tables": {},
    }  # fmt: skip
    return Profile(**values | changes)


def test_arithmetic_by_hand():
    """Forty clients, twenty a round, on four processes that share two cores."""
    size, drawn = Size(40, 20, 100, 11), [torch.arange(0, 40, 2).expand(3, 20)]
    line = predict(by_hand(), "m", size, 4, drawn)
    messages = [8 * 3 * (20 + 1 + 20), 8 * 3 * (3 + 1 + 20)]
    assert line["message_bytes"] == sum(messages) == 984 + 576
    assert line["wire_bytes"]["all_reduce"] == pytest.approx(1.5 * 1560)
    assert line["rows_away"] == 0 and line["wire_bytes"]["rows"] == 0  # every other client: all with their owners
    held = line["memory_bytes"]
    assert held["data"] == 40 * 50 + 70
    assert held["chunk"] == 100 * 3 * 5  # 5 clients each, where 10 would be allowed
    assert held["client_memory"] == 10 * 2 * 3 * 10 * 4 and held["rows"] == 3 * 5 * 2 * 3 * 10 * 4
    assert held["server"] == 2 * 500 + 2 * 984
    assert held["bookkeeping"] == 24 * 40 + 25 * 3 * 40  # everyone is asked at the start
    assert held["total"] == sum(value for key, value in held.items() if key != "total")
    # compute: 5 clients take 1 s, twice that as two share a core
    assert line["slots"] == 2 and line["seconds_per_round"]["compute"] == pytest.approx(2.0)
    reduce = sum(6 * (0.1 + b / 4 / 1000) for b in messages)
    swaps = 2 * 2 * 3 * 0.1  # two exchanges, there and back, three steps each, no row away
    assert line["seconds_per_round"]["exchange"] == pytest.approx(2 * (reduce + swaps))
    begin = 2 * 0.01 * 10 + 6 * (0.1 + 8 * 3 * (10 + 1 + 40) / 4 / 1000)
    looks = 2 * 11 * (40 * 5 + 20) * 0.001 / 4
    assert line["start_seconds"] == pytest.approx(begin) and line["evaluation_seconds"] == pytest.approx(looks)
    assert line["hours"] == pytest.approx((100 * (2 + 2 * (reduce + swaps)) + begin + looks) / 3600)


def test_rows_by_hand():
    """The first twenty of forty clients on two processes: the second reads the last ten, which are the first's."""
    line = predict(by_hand(), "m", Size(40, 20, 1, 1), 2, [torch.arange(20).expand(3, 20)])
    row, away = 2 * 10 * 4, 3 * 10
    assert line["rows_away"] == away and line["rows_share"] == 0.5
    # each exchange: one rank sends them there, the other sends them back
    assert line["wire_bytes"]["rows"] == 2 * row * away
    one_way = row * away
    exchange = sum(2 * (0.1 + 8 * 3 * (m + 1 + 20) / 2 / 1000) for m in (20, 3)) + 2 * 2 * (0.1 + one_way / 2 / 1000)
    assert line["seconds_per_round"]["exchange"] == pytest.approx(exchange)


def test_gpus_and_networks_take_no_turns():
    size, drawn = Size(40, 20, 1, 1), [torch.arange(0, 40, 2).expand(3, 20)]
    turns = predict(by_hand(), "m", size, 4, drawn)["seconds_per_round"]
    gpu = predict(by_hand(shared=False), "m", size, 4, drawn)
    assert gpu["slots"] == 4 and gpu["seconds_per_round"]["compute"] == turns["compute"] / 2
    told = predict(by_hand(link=Link(0.1, 1000.0)), "m", size, 4, drawn)["seconds_per_round"]
    assert told["exchange"] == turns["exchange"] / 2 and told["compute"] == turns["compute"]
    assert predict(by_hand(), "m", size, 1, drawn)["seconds_per_round"] == {"compute": 5, "exchange": 0, "total": 5}


def test_what_does_not_fit():
    """Processes share the memory of a machine, not of their GPUs."""
    size, drawn = Size(40, 20, 1, 1), [torch.arange(0, 40, 2).expand(3, 20)]
    need = predict(by_hand(), "m", size, 2, drawn)["memory_bytes"]["total"]
    for shared, room, fits in ((True, 2 * need, True), (True, 2 * need - 1, False), (False, need, True)):
        assert predict(by_hand(shared=shared, device_bytes=room), "m", size, 2, drawn)["fits"] == fits
    chunked = memory(by_hand(chunk_bytes=650), by_hand().methods["m"], size, 1)
    assert chunked.chunk == 2 * 300  # what is allowed holds two clients


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture
def fedda_inside(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(inside, capsys, monkeypatch)


def test_the_command_measures_saves_and_plans_again(experiment, tmp_path, fedda_inside):
    words = ("plan", experiment, "--gpus", 3, "--clients", "1e6", "--cohort", "1e3")
    few = ("--algorithms", "fedavg,scaffold", "--seconds", 0.01)
    code, stdout, stderr = fedda_inside(*words, *few, "--set", "problem.hidden=2", "--out", "new/plan.json")
    assert code == 0, stderr
    assert "1,000 of 1,000,000 clients a round" in stdout and "measured between two local processes" in stdout
    assert "scaffold: cohorts of" in stderr
    found = json.loads((tmp_path / "new/plan.json").read_text())
    assert found["asked"] == {"clients": 10**6, "cohort": 1000, "rounds": 10, "evaluations": 3, "gpus": 3}
    link = found["profile"]["link"]
    assert link["local"] and 0 < link["latency"] < 10 and link["bandwidth"] > 1e3
    lines = found["plan"]
    assert [(line["algorithm"], line["processes"]) for line in lines] == [
        (label, world) for label in ("fedavg", "scaffold") for world in worlds(3)
    ]
    d = found["profile"]["parameters"]
    for line in lines:
        replies = 2 * d if line["algorithm"] == "scaffold" else d
        assert line["message_bytes"] == 8 * 2 * (replies + 1 + 1000)
        shard = line["memory_bytes"]["client_memory"]
        assert shard == (2 * -(-(10**6) // line["processes"]) * d * 4 if line["algorithm"] == "scaffold" else 0)
        assert 0 <= line["rows_share"] < 0.1
    # the same again, without a measurement; and on a network
    code, stdout, stderr = fedda_inside(
        *words, *few, "--set", "problem.hidden=2", "--profile", "new/plan.json", "--out", "b.json"
    )
    assert code == 0, stderr
    assert "cohorts of" not in stderr
    assert json.loads((tmp_path / "b.json").read_text())["plan"] == lines
    network = ("--link", 100, "--latency", 20, "--profile", "new/plan.json", "--set", "problem.hidden=2")
    assert "aggregation" not in stdout
    wrapped = ("--set", 'aggregation=[{name = "median"}]')
    code, stdout, stderr = fedda_inside(*words, *few, *network, *wrapped, "--out", "c.json")
    assert code == 0 and "not in these figures: aggregation" in stdout
    assert "20 µs a step, 100 Gbit/s, as given" in stdout
    told = json.loads((tmp_path / "c.json").read_text())
    assert told["profile"]["link"] == {"latency": 2e-5, "bandwidth": 12.5e9, "local": False}
    assert told["plan"][0]["seconds_per_round"] == lines[0]["seconds_per_round"]  # alone there is nothing to send
    # another task has another profile
    code, stdout, stderr = fedda_inside(*words, *few, "--profile", "new/plan.json")
    assert (code, stdout) == (2, "")
    is_one_line(stderr, "new/plan.json: was measured with another problem")
    code, stdout, stderr = fedda_inside(*words, "--profile", "new/plan.json", "--set", "problem.hidden=2")
    assert code == 2
    is_one_line(stderr, "new/plan.json: has no algorithm 'local-amsgrad', only fedavg, scaffold")


def test_a_link_that_cannot_be_measured(monkeypatch):
    monkeypatch.setattr("fedda.plan.link.sys", SimpleNamespace(executable="false"))
    with pytest.raises(ValueError, match=r"cannot be timed .*give --link and --latency"):
        measured_link()


MISTAKES = {
    "experiment": (["digit"], ["did you mean 'digits'?"]),
    "gpus": (["digits", "--gpus", "0"], ["--gpus must be a whole number from 1 to 65536, got 0"]),
    "clients": (["digits", "--clients", "many"], ["--clients must be a whole number", "'many'"]),
    "half a client": (["digits", "--clients", "10.5"], ["--clients", "'10.5'"]),
    "too many": (["digits", "--clients", "1e12"], ["from 1 to 2147483647", "'1e12'"]),
    "not a number": (["digits", "--clients", "nan"], ["--clients", "'nan'"]),
    "fewer clients than cohort": (["digits", "--clients", "5"], ["--clients 5", "cohort, 10", "--cohort"]),
    "cohort": (["digits", "--clients", "1e3", "--cohort", "1e4"], ["--cohort", "from 1 to 1000", "'1e4'"]),
    "device": (["digits", "--device", "gpu"], ["--device 'gpu' cannot be used here"]),
    "algorithm": (["digits", "--algorithms", "fedavgg"], ["did you mean 'fedavg'?"]),
    "link": (["digits", "--link", "-1"], ["--link must be > 0, got -1"]),
    "latency": (["digits", "--latency", "inf"], ["--latency must be > 0, got inf"]),
    "seconds": (["digits", "--seconds", "0"], ["--seconds must be > 0"]),
    "no profile": (["digits", "--profile", "nowhere.json"], ["nowhere.json: cannot be read"]),
    "no JSON": (["digits", "--profile", "taken"], ["taken: holds no profile", "--out"]),
    "another JSON": (["digits", "--profile", "other.json"], ["other.json: holds no profile"]),
    "a damaged one": (["digits", "--profile", "damaged.json"], ["damaged.json: holds no profile"]),
    "below a file": (["digits", "--out", "taken/a.json"], ["cannot write", "taken"]),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, fedda_inside, kind):
    words, fragments = MISTAKES[kind]
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "damaged.json").write_text(json.dumps({"profile": by_hand().json() | {"replicas": "three"}}))
    before = sorted(tmp_path.iterdir())
    code, stdout, stderr = fedda_inside("plan", *words)
    assert (code, stdout) == (2, "")
    is_one_line(stderr, *fragments)
    assert sorted(tmp_path.iterdir()) == before


def test_a_profile_comes_back_as_it_was():
    assert Profile.of(json.loads(json.dumps(by_hand().json())), "here") == by_hand()
