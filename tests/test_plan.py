"""`fedda plan`: bytes and shards against those of real processes, the arithmetic by hand. No time is compared."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fedda
import wires
from commands import inside, is_one_line, write
from fedda.engines import Sequential
from fedda.engines.distributed import MemoryRoute
from fedda.engines.simulated import Simulation
from fedda.engines.world import SingleProcess
from fedda.experiments import find
from fedda.experiments.ranks import Ranks
from fedda.experiments.runner import build_problem
from fedda.plan import drawn_cohorts, measure_rounds, plan, repeat_clients, requirements, rows_between, worlds
from fedda.problems.neural import Batch
from ranks import fine, spawn

K, R, ROUNDS, SEEDS = 13, 6, 5, [0, 3]
# no memory; a vector of each client; three of them; two exchanges a round
ALGORITHMS = {
    "fedavg": {}, "scaffold": {}, "local-amsgrad": {"state": "naive"}, "mime": {}, "fedda-mvr": {"lr": 0.01, "w": 1000.0},
}  # fmt: skip
VECTORS = {"fedavg": 0, "scaffold": 1, "local-amsgrad": 3, "mime": 0, "fedda-mvr": 0}


def silent(text):
    pass


def ranked(rank, size):
    world = SingleProcess()
    world.rank, world.size = rank, size
    return world


# -- against real processes --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    problem = {"data": "digits", "clients": K, "partition": "iid", "model": "mlp", "hidden": 4, "batch": 4}
    path = tmp_path_factory.mktemp("plan") / "wires.toml"
    return write(path, name="wires", rounds=10, every=5, cohort=R, seeds=SEEDS, problem=problem, algorithms=ALGORITHMS)


@pytest.fixture(scope="module")
def problem(experiment):
    return build_problem(find(str(experiment)).completed(), None)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bytes_and_shards_are_those_of_real_processes(experiment, problem, tmp_path, world):
    """Exact, over several rounds: the cohorts are drawn as the run draws them."""
    fine(spawn(world, wires.__file__, experiment, ROUNDS, tmp_path / "found"))
    counted = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(world)]
    completed, cohorts = find(str(experiment)).completed(), drawn_cohorts(K, R, SEEDS, ROUNDS)
    for label, vectors in VECTORS.items():
        algorithm, real = completed.build(label), [own[label] for own in counted]
        _, server = measure_rounds(algorithm, problem, completed, {2}, 1e-3, label, silent)
        line = requirements(algorithm, problem, server, K, cohorts, world)
        exchanges = 2 if label == "mime" else 1
        assert [own["all_reduce"] for own in real] == [ROUNDS * line["message_bytes"]] * world
        ring = line["wire_bytes"]["all_reduce"]
        assert ring == pytest.approx(2 * (world - 1) / world * real[0]["all_reduce"] / ROUNDS, rel=1e-12)
        away = sum(own["away"] for own in real)
        assert line["wire_bytes"]["rows"] * world * ROUNDS == pytest.approx(away, rel=1e-9)
        row = vectors * problem.d * problem.dtype.itemsize
        assert 2 * exchanges * row * line["rows_away"] * ROUNDS == pytest.approx(away, rel=1e-9)
        # every row of the cohort is handed over and back; those away are a part of them
        assert sum(own["handed"] for own in real) == 2 * exchanges * ROUNDS * len(SEEDS) * R * row
        assert line["memory_bytes"]["client_memory"] == max(own["memory"] for own in real)
        assert sum(own["memory"] for own in real) == len(SEEDS) * K * row
        assert server == real[0]["server"]
        start = 25 if fedda.Run(algorithm, problem, 2, force=True).counts.bytes_up else 0  # asks all at its start
        draws = 2 * K * max(start, 8)  # 8: a cohort of more than a quarter of the clients is drawn by sorting
        assert line["memory_bytes"]["bookkeeping"] == real[0]["books"] + draws
    moved = {label: sum(own[label]["away"] for own in counted) for label in ALGORITHMS}
    assert (moved["scaffold"] > 0) == (world > 1) and moved["fedavg"] == 0


def test_resident_data(experiment, problem):
    """A rank holds its own clients' samples where everyone takes part, else all of them."""
    completed = find(str(experiment)).completed()
    everyone = build_problem(completed.model_copy(update={"cohort": K}), None, ranks=Ranks(ranked(1, 2)))
    needs = partial(requirements, completed.build("fedavg"), problem, 0, K)
    test = sum(v.nbytes for v in problem.test)
    stored = needs(drawn_cohorts(K, R, SEEDS), 2)["memory_bytes"]["data"] - test
    assert stored == pytest.approx(sum(v.nbytes for v in problem.data), rel=1e-9)
    part = needs(drawn_cohorts(K, K, SEEDS), 2)["memory_bytes"]["data"] - test
    one = problem.data.x[0].nbytes + problem.data.y[0].nbytes
    assert part == pytest.approx(sum(v.nbytes for v in everyone.data), abs=K * one)  # clients differ by a sample
    assert part < 0.6 * stored


def test_rounds_are_measured_with_as_many_clients_as_a_process_has(experiment, problem, monkeypatch):
    completed = find(str(experiment)).completed()
    rows = plan(completed, K, R, 4, torch.device("cpu"), 1e-3, silent)
    assert [(row["algorithm"], row["processes"], row["clients_per_process"]) for row in rows] == [
        (label, world, share) for label in ALGORITHMS for world, share in ((1, 6), (2, 3), (4, 2))
    ]
    assert all(0 < row["seconds_per_round"] < 60 for row in rows)
    monkeypatch.setattr("fedda.plan.LONGEST", 1e-9)  # then only the smallest is measured
    times, _ = measure_rounds(completed.build("fedavg"), problem, completed, {20, 2, 6}, 1e-3, "fedavg", silent)
    assert list(times) == [2]


def test_repeated_clients_have_the_same_samples():
    problem = build_problem(find("digits").completed(), None)
    more = repeat_clients(problem, 23)
    assert more.clients == len(more.sizes) == 23
    for client in (0, 9, 10, 22):
        assert torch.equal(more.everything(client).x, problem.everything(client % 10).x)


# -- rows --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients,cohort,world", [(13, 6, 4), (50, 3, 5), (10_000, 100, 8), (9, 9, 4)])
def test_rows_are_those_of_the_engine(clients, cohort, world):
    """The matrix of owners and readers, from what each rank would give and take in these rounds."""
    problem = SimpleNamespace(
        clients=clients, sizes=torch.ones(clients), d=0, dtype=torch.float32, device=torch.device("cpu")
    )
    simulation = Simulation(problem, Sequential(), torch.tensor(SEEDS)[:, None], "uniform", ())
    matrix = rows_between(drawn_cohorts(clients, cohort, SEEDS, 3), clients, world)
    for tau in range(3):
        for rank in range(world):
            route = MemoryRoute.of(simulation.cohort(tau, cohort), ranked(rank, world))
            assert route.give == matrix[tau, rank].tolist() and route.take == matrix[tau, :, rank].tolist()
    away = matrix.sum() - matrix.diagonal(dim1=-2, dim2=-1).sum()
    assert matrix.sum() == 3 * 2 * cohort and (away == 0) == (clients == cohort)


# -- arithmetic --------------------------------------------------------------------------------------------------------
def by_hand(name, clients, cohorts, world, **params):
    """Of a problem whose numbers are known: ten parameters, five samples of 10 bytes each per client."""
    data = Batch(torch.zeros(25, 1, dtype=torch.float16), torch.zeros(25, dtype=torch.int64))
    tested = Batch(torch.zeros(70, dtype=torch.uint8), ())
    problem = SimpleNamespace(
        d=10, dtype=torch.float32, device=torch.device("cpu"), layout=[("w", (10,))], data=data, sizes=torch.full((5,), 5),
        d_personal=0, held_out={"test": tested}, bytes_per_client=lambda: 10**8,
    )  # fmt: skip
    return requirements(fedda.make(name, **params), problem, 500, clients, cohorts, world)


def test_arithmetic_by_hand():
    """Forty clients, twenty a round, three seeds, four processes; SCAFFOLD replies with two vectors and keeps one."""
    line = by_hand("scaffold", 40, [torch.arange(0, 40, 2).expand(3, 20)], 4)
    message = 8 * 3 * (20 + 1 + 20)
    assert line["message_bytes"] == message == 984
    assert line["wire_bytes"] == {"all_reduce": 1.5 * message, "rows": 0}
    assert line["rows_away"] == line["rows_share"] == 0  # every other client: each is read by its owner
    held = line["memory_bytes"]
    assert held["data"] == 40 * 50 + 70
    assert held["chunk"] == 10**8 * 3 * 5  # 5 clients each, where 2 GB would hold 6
    assert held["client_memory"] == 10 * 3 * 10 * 4 and held["rows"] == 3 * 5 * 3 * 10 * 4
    assert held["server"] == 2 * 500 + 2 * message
    assert held["bookkeeping"] == 24 * 40 + 8 * 3 * 40
    assert held["total"] == sum(value for key, value in held.items() if key != "total")
    assert by_hand("scaffold", 40, [torch.arange(20).expand(3, 20)], 1)["memory_bytes"]["chunk"] == 10**8 * 3 * 6


def test_an_algorithm_that_asks_all_clients_at_its_start():
    line = by_hand("fedda-mvr", 40, [torch.arange(10).expand(3, 10)], 2)
    assert line["memory_bytes"]["bookkeeping"] == (24 + 25 * 3) * 40
    assert by_hand("fedavg", 40, [torch.arange(10).expand(3, 10)], 2)["memory_bytes"]["bookkeeping"] == 24 * 40


def test_rows_by_hand():
    """The first twenty of forty clients on two processes: the second reads the last ten, which are the first's."""
    line = by_hand("scaffold", 40, [torch.arange(20).expand(3, 20)], 2)
    away = 3 * 10
    assert line["rows_away"] == away and line["rows_share"] == 0.5
    assert line["wire_bytes"]["rows"] == 10 * 4 * away  # one process sends them, the other sends them back


# -- the command -------------------------------------------------------------------------------------------------------
@pytest.fixture
def fedda_inside(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(inside, capsys, monkeypatch)


def test_the_command_plans_and_writes(experiment, tmp_path, fedda_inside):
    arguments = ("plan", experiment, "--gpus", 3, "--clients", "1e6", "--cohort", "1e2", "--seconds", 0.01)
    arguments += ("--algorithms", "fedavg,scaffold", "--set", "problem.hidden=2")
    code, stdout, stderr = fedda_inside(*arguments, "--out", "new/plan.json")
    assert code == 0, stderr
    assert "100 of 1,000,000 clients per round" in stdout and "aggregation" not in stdout
    assert "scaffold: rounds of 34 clients" in stderr
    written = json.loads((tmp_path / "new/plan.json").read_text())
    assert written["asked"] == {"clients": 10**6, "cohort": 100, "rounds": 10, "gpus": 3}
    lines = written["plan"]
    assert [(line["algorithm"], line["processes"]) for line in lines] == [
        (label, world) for label in ("fedavg", "scaffold") for world in worlds(3)
    ]
    d = 64 * 2 + 2 + 2 * 10 + 10
    for line in lines:
        replies = 2 * d if line["algorithm"] == "scaffold" else d
        assert line["message_bytes"] == 8 * 2 * (replies + 1 + 100)
        shard = line["memory_bytes"]["client_memory"]
        assert shard == (2 * -(-(10**6) // line["processes"]) * d * 4 if line["algorithm"] == "scaffold" else 0)
        assert 0 <= line["rows_share"] < 0.1 and line["seconds_per_round"] > 0
    few = ("plan", experiment, "--gpus", 1, "--seconds", 0.01, "--algorithms", "fedavg")
    code, stdout, stderr = fedda_inside(*few, "--set", 'aggregation=[{name = "median"}]')
    assert code == 0 and "6 of 13 clients" in stdout and "not included: the work, messages" in stdout, stderr


def test_rates_that_depend_on_the_length_of_the_run(tmp_path, fedda_inside):
    algorithms = {"fedda": {}, "fedavg": {"lr": {"kind": "cosine", "start": 0.1}}}
    file = write(tmp_path / "falls.toml", algorithms=algorithms)
    code, stdout, stderr = fedda_inside("plan", file, "--gpus", 1, "--seconds", 0.01)
    assert code == 0 and "fedda" in stdout and "fedavg" in stdout, stderr


MISTAKES = {
    "experiment": (["digit"], ["did you mean 'digits'?"]),
    "gpus": (["digits", "--gpus", "0"], ["--gpus must be a whole number from 1 to 65536, got 0"]),
    "clients": (["digits", "--clients", "many"], ["--clients", "'many'"]),
    "half a client": (["digits", "--clients", "10.5"], ["--clients must be a whole number from 1", "10.5"]),
    "too many": (["digits", "--clients", "1e12"], ["from 1 to 2147483647", "1000000000000"]),
    "not a number": (["digits", "--clients", "nan"], ["--clients", "nan"]),
    "fewer clients than cohort": (["digits", "--clients", "5"], ["--clients 5", "cohort, 10", "--cohort"]),
    "cohort": (["digits", "--clients", "1e3", "--cohort", "1e4"], ["--cohort", "from 1 to 1000", "10000"]),
    "device": (["digits", "--device", "gpu"], ["--device 'gpu' cannot be used here"]),
    "algorithm": (["digits", "--algorithms", "fedavgg"], ["did you mean 'fedavg'?"]),
    "seconds": (["digits", "--seconds", "0"], ["--seconds must be > 0"]),
    "below a file": (["digits", "--out", "taken/a.json"], ["cannot write", "taken"]),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, fedda_inside, kind):
    arguments, fragments = MISTAKES[kind]
    (tmp_path / "taken").write_text("mine")
    before = sorted(tmp_path.iterdir())
    code, stdout, stderr = fedda_inside("plan", *arguments)
    assert (code, stdout) == (2, "")
    is_one_line(stderr, *fragments)
    assert sorted(tmp_path.iterdir()) == before
