"""Experiments as data: what is written is what is read back, and mistakes are said in one line."""

import copy
import math
import random
import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import tiny
from fedda import registry
from fedda.aggregation import Clip, Median, TopK
from fedda.experiments import Experiment, builtin, config, find, run
from fedda.experiments.overrides import override
from fedda.progress import Silence
from fedda.runs.toml import dumps

ALGORITHMS = list(registry.algorithms.entries)


def experiment(**changes):
    return config.parse(dumps(tiny(**changes)), "tiny.toml")


def test_toml_is_read_back_as_it_was_written():
    rng = random.Random(0)
    texts = ["", " ", 'a"b', "a\\b", "a\nb", "ü/[x].y = #", "\x7f\t\x00", "'", "日本"]

    def value(depth):
        kinds = ["int", "float", "bool", "text", "list"] + ["table"] * (depth < 3)
        match rng.choice(kinds):
            case "int":
                return rng.choice([0, -5, 2**63, 10**30])
            case "float":
                return rng.choice([0.1, 1e-300, 1e22, -0.0, math.inf, rng.random()])
            case "bool":
                return rng.random() < 0.5
            case "text":
                return rng.choice(texts)
            case "list":
                return [value(3) for _ in range(rng.randrange(3))]
            case _:
                return {rng.choice([*texts, "key", "k-1"]): value(depth + 1) for _ in range(rng.randrange(4))}

    for _ in range(300):
        table = {rng.choice([*texts, "key", "k-1"]): value(0) for _ in range(4)}
        assert tomllib.loads(dumps(table)) == table


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_default_survives_the_file(name):
    """Also those that are None, which TOML cannot say."""
    given = experiment(algorithms={"label": {"name": name}})
    full = given.completed()
    again = config.parse(full.toml(), "config.toml")
    assert again == full == again.completed()
    known = {k for k, v in registry.algorithms.find(name).defaults.items() if v is not None}
    assert set(full.algorithms["label"]) == known | {"name"}
    assert again.build("label") == given.build("label")


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if "prox" in registry.algorithms.find(n).defaults])
def test_nested_words_survive_the_file(name):
    given = experiment(algorithms={name: {"prox": {"kind": "box", "lower": -1, "upper": 1e-05}}})
    assert given.completed().build(name) == given.build(name)


def test_wrappers_survive_the_file():
    """With their defaults; a file that has none is written as before there were any."""
    given = experiment(aggregation=[CLIP | {"norm": {"local": [1, 0.5]}}, {"name": "topk"}, {"name": "median"}])
    full = given.completed()
    assert full == full.completed() == config.parse(full.toml(), "config.toml")
    assert full.aggregation[0] == {"name": "clip", "norm": {"local": [1, 0.5]}, "where": "server"}
    assert full.aggregation[1:] == [{"name": "topk", "share": 0.1}, {"name": "median"}]
    assert given.wrappers() == full.wrappers() == (Clip({"local": [1, 0.5]}), TopK(0.1), Median())
    for words in ({}, {"aggregation": []}):
        own = experiment(algorithms={"fedavg": {"lr": 0.1}}, **words)
        assert own.aggregation is None and own.wrappers() == () and own.completed().toml() == WITHOUT


WITHOUT = """\
name = "tiny"
title = ""
figure = ""
setting = ""
rounds = 6
every = 2
cohort = 4
seeds = [0, 1]
weights = "uniform"
detail = false

[problem]
data = "breast-cancer"
clients = 4
partition = "iid"
model = "logistic"
batch = 4
seed = 0
resplit = false

[algorithms.fedavg]
name = "fedavg"
lr = 0.1
steps = 5
server_lr = 1.0
"""


def test_the_options_of_the_problem_are_completed():
    full = experiment(problem={"data": "digits", "model": "mlp", "partition": "dirichlet"}).completed()
    words = full.problem.model_dump()
    assert words["alpha"] == registry.partitions.find("dirichlet").defaults["alpha"]
    assert words["hidden"] == [32] and words["clients"] == 10 and full.cohort == 10
    assert full == full.completed()


@pytest.mark.parametrize("name", builtin())
def test_the_built_in_experiments_are_whole(name):
    full = find(name).completed()
    assert full.name == name and full.title
    for label in full.algorithms:
        full.build(label)


def test_the_command_line_changes_an_experiment():
    chosen = override(experiment(), 3, " fedda-mvr ,fedda-2-1", "5,7")
    assert chosen.rounds == 3 and chosen.seeds == [5, 7]
    assert chosen.algorithms == {"fedda-mvr": tiny()["algorithms"]["fedda-mvr"], "fedda-2-1": {}}


PROBLEM = tiny()["problem"]
CLIP = {"name": "clip", "norm": 1.0}
MISTAKES = {
    "unknown key": (tiny(round=5), ["no key 'round'", "did you mean 'rounds'?"]),
    "missing key": ({k: v for k, v in tiny().items() if k != "rounds"}, ["'rounds' is missing"]),
    "missing table": ({k: v for k, v in tiny().items() if k != "problem"}, ["'problem' is missing"]),
    "missing data": (tiny(problem={"clients": 4}), ["'problem.data' is missing"]),
    "text for a number": (tiny(rounds="many"), ["rounds must be a whole number, got 'many'"]),
    "a part of a round": (tiny(rounds=2.5), ["rounds must be a whole number, got 2.5"]),
    "a truth for a number": (tiny(rounds=True), ["rounds must be a whole number, got True"]),
    "rounds without end": (tiny(rounds=10**400), ["rounds must be", "1000000000"]),
    "steps without end": (tiny(algorithms={"fedavg": {"steps": 10**21}}), ["steps must be a whole number"]),
    "no rounds": (tiny(rounds=0), ["rounds must be greater than or equal to 1, got 0"]),
    "every": (tiny(every=0), ["every must be greater", "got 0"]),
    "cohort": (tiny(cohort=9), ["cohort must be at most 4", "got 9"]),
    "no seeds": (tiny(seeds=[]), ["seeds must be distinct", "got []"]),
    "seeds repeated": (tiny(seeds=[1, 1]), ["seeds must be distinct", "got [1, 1]"]),
    "a negative seed": (tiny(seeds=[-1]), ["seeds must be", "got [-1]"]),
    "a huge seed": (tiny(seeds=[2**63]), ["seeds must be"]),
    "aggregation": (tiny(aggregation="clip"), ["aggregation must be a list of tables with a name", "got 'clip'"]),
    "one wrapper": (tiny(aggregation=CLIP), ["aggregation must be a list of tables with a name", "got {'name': 'clip'"]),
    "a bare wrapper": (tiny(aggregation=["clip"]), ["aggregation must be a list of tables with a name"]),
    "a wrapper without name": (tiny(aggregation=[{"norm": 1.0}]), ["aggregation must be a list of tables with a name"]),
    "wrapper": (tiny(aggregation=[{"name": "tpk"}]), ["aggregation: unknown aggregation 'tpk'; did you mean 'topk'?"]),
    "option of a wrapper": (tiny(aggregation=[CLIP | {"nrm": 2.0}]), ["aggregation: clip: no parameter 'nrm'; did you mean 'norm'?"]),
    "option that is missing": (tiny(aggregation=[{"name": "clip"}]), ["aggregation: clip: norm is missing"]),
    "share": (tiny(aggregation=[{"name": "topk", "share": 2}]), ["aggregation: TopK: share must be in (0, 1], got 2"]),
    "norm": (tiny(aggregation=[CLIP | {"norm": {"local": {"z": 1.0}}}]), ["Clip: norm must be a number > 0", "got {'z': 1.0}"]),
    "norm without end": (tiny(aggregation=[CLIP | {"norm": 10**400}]), ["Clip: norm must be a number > 0"]),
    "two means": (tiny(aggregation=[{"name": "median"}, {"name": "trimmed"}]), ["tiny: aggregation can replace the mean only once, got Median and Trimmed"]),
    "a clip too late": (tiny(aggregation=[{"name": "topk"}, CLIP | {"where": "client"}]), ["tiny: aggregation must have Clip, which acts on the client, before TopK"]),
    "weights": (tiny(weights="equal"), ["weights must be 'uniform' or 'samples', got 'equal'"]),
    "name": (tiny(name="../up"), ["name must be a plain name", "'../up'"]),
    "empty name": (tiny(name=""), ["name must be a plain name"]),
    "no algorithms": (tiny(algorithms={}), ["algorithms must hold at least one"]),
    "a number for a table": (tiny(algorithms={"fedavg": 3}), ["algorithms.fedavg must be a table, got 3"]),
    "a label of two lines": (tiny(algorithms={"a\nb": {"name": "fedavg"}}), ["label", "'a\\nb'"]),
    "an empty label": (tiny(algorithms={"": {"name": "fedavg"}}), ["label"]),
    "algorithm": (tiny(algorithms={"fedavgg": {}}), ["algorithms.fedavgg", "did you mean 'fedavg'?"]),
    "algorithm by name": (tiny(algorithms={"a": {"name": "fedd-mvr"}}), ["did you mean 'fedda-mvr'?"]),
    "a list for a name": (tiny(algorithms={"a": {"name": ["x"]}}), ["algorithms.a: name must be", "['x']"]),
    "word": (tiny(algorithms={"fedavg": {"rl": 0.1}}), ["no parameter 'rl'", "lr"]),
    "rate": (tiny(algorithms={"fedavg": {"lr": -0.1}}), ["algorithms.fedavg", "lr must be > 0, got -0.1"]),
    "rate as text": (tiny(algorithms={"fedavg": {"lr": "0.1"}}), ["lr must be > 0, got '0.1'"]),
    "steps": (tiny(algorithms={"fedavg": {"steps": 0}}), ["steps must be a whole number >= 1, got 0"]),
    "prox": (tiny(algorithms={"fedda-mvr": {"prox": {"kind": "l2"}}}), ["unknown prox 'l2'", "l1"]),
    "prox without kind": (tiny(algorithms={"fedda-mvr": {"prox": {"gamma": 1.0}}}), ["prox", "'kind'"]),
    "a list for a kind": (tiny(algorithms={"fedda-mvr": {"prox": {"kind": ["l1"]}}}), ["fedda-mvr"]),
    "gamma": (tiny(algorithms={"fedda-mvr": {"prox": {"kind": "l1"}}}), ["gamma is missing"]),
    "data": (tiny(problem=PROBLEM | {"data": "digit"}), ["unknown data set 'digit'", "'digits'"]),
    "partition": (tiny(problem=PROBLEM | {"partition": "dirichlt"}), ["partition", "'dirichlet'"]),
    "model": (tiny(problem=PROBLEM | {"model": "mpl"}), ["unknown model 'mpl'", "did you mean 'mlp'?"]),
    "key of the problem": (tiny(problem=PROBLEM | {"batchs": 4}), ["no key 'batchs'", "mean 'batch'?"]),
    "option of another": (tiny(problem=PROBLEM | {"rho": 0.8}), ["no key 'rho'"]),
    "what load hands on": (tiny(problem=PROBLEM | {"shape": 3, "dtype": "x"}), ["no key 'shape'"]),
    "clients": (tiny(problem=PROBLEM | {"clients": 10**6}), ["clients must be", "got 1000000"]),
    "alpha": (tiny(problem=PROBLEM | {"partition": "dirichlet", "alpha": -1}), ["alpha must be > 0, got -1"]),
    "by_client": (tiny(problem=PROBLEM | {"partition": "by_client"}), ["names no clients"]),
    "cnn without images": (tiny(problem=PROBLEM | {"model": "cnn"}), ["must be images"]),
    "hidden": (tiny(problem=PROBLEM | {"model": "mlp", "hidden": "wide"}), ["problem"]),
}  # fmt: skip


def whole(text):
    """All that is checked before a run."""
    full = config.parse(text, "tiny.toml").completed()
    full.problem.build()
    for label in full.algorithms:
        full.build(label)


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line(kind):
    table, fragments = MISTAKES[kind]
    with pytest.raises(ValueError) as why:
        whole(dumps(table))
    assert "\n" not in str(why.value)
    for fragment in fragments:
        assert fragment in str(why.value)
    assert str(why.value).startswith(("tiny.toml: ", "tiny: ", "problem: ", "algorithms."))


@pytest.mark.parametrize(
    "text",
    [
        "rounds =",
        "rounds = 5\nrounds = 6",
        "= 3",
        "[a",
        "\ufeff\ufeff",
        "x = " + "[" * 5000,
        "x = " + "9" * 5000,
    ],
)
def test_what_is_no_toml(text):
    with pytest.raises(ValueError, match=r"^tiny.toml: not valid TOML: .*\S$"):
        config.parse(text, "tiny.toml")


BASES = [
    tiny(problem={"data": "digits", "clients": 4, "partition": "dirichlet", "alpha": 0.5, "batch": 4}),
    tiny(algorithms={"a": {"name": "fedda-2-1", "prox": {"kind": "l1", "gamma": 0.01}}, "fedavg": {}}),
    tiny(aggregation=[CLIP, {"name": "topk", "share": 0.5}]),
    tiny(figure="cifar10", setting="paper", algorithms={"fedavg": {"preset": "cifar10", "group": "I = 5"}}),
]
VALUES = st.one_of(
    st.sampled_from([0, -1, 3, 10**30, math.inf, math.nan, True, "", "x", "fedavg", [], [1], ["x"], {}, {"a": 1}]),
    st.integers(1, 6), st.floats(0.001, 0.5), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.lists(st.floats(), max_size=3),
)  # fmt: skip


@st.composite
def experiments(draw):
    """The text of an experiment with a slip or two in its table, and sometimes one in the text itself."""
    table = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 2))):
        place = table
        while isinstance(inner := place.get(draw(st.sampled_from([*place, ""]))), dict) and inner:
            place = inner
        key = draw(st.sampled_from(list(place)))
        match draw(st.sampled_from([2, 2, 2, 0, 1])):
            case 0:
                del place[key]
                if not place:
                    place["spare"] = 1  # a table never gets empty by itself
            case 1:
                place[key + draw(st.sampled_from("sx_"))] = place.pop(key)
            case _:
                place[key] = copy.deepcopy(draw(VALUES))  # a table that was drawn twice would hold itself
    text = dumps(table)
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + draw(st.sampled_from('"=[]{}#\n.x\x00')) + text[at + draw(st.integers(0, 2)) :]
    return text


def test_a_fuzzed_file_is_refused_in_one_line_and_leaves_nothing_or_runs(tmp_path):
    seen = {"refused": 0, "ran": 0}

    @settings(max_examples=1000, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(experiments())
    def fuzz(text):
        out = tmp_path / "run"
        try:
            table = config.parse(text, "tiny.toml")
            small = table.model_copy(update={"rounds": 1, "every": 1, "seeds": table.seeds[:2]})
            run(small, out, Silence())
            assert (out / "metrics.jsonl").stat().st_size
            seen["ran"] += 1
        except ValueError as why:
            assert str(why) and "\n" not in str(why), text
            assert not list(tmp_path.iterdir()), text
            seen["refused"] += 1
        shutil.rmtree(out, ignore_errors=True)

    fuzz()
    assert seen["refused"] > 300 and seen["ran"] > 50, seen


def test_what_can_be_read(tmp_path):
    good = tmp_path / "good.toml"
    good.write_bytes(b"\xef\xbb\xbf" + dumps(tiny()).encode())  # as some editors write it
    assert isinstance(find(str(good)), Experiment)
    for content, words in ((b'title = "\xff"', "UTF-8"), (b"", "'name' is missing")):
        (tmp_path / "bad.toml").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            find(str(tmp_path / "bad.toml"))
    (tmp_path / "folder.toml").mkdir()
    for name, words in (
        ("folder.toml", "Is a directory"),
        ("none.toml", "No such file"),
        ("good.toml/x.toml", "Not a"),
    ):
        with pytest.raises(ValueError, match=words):
            find(str(tmp_path / name))
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        find("digit")


# -- single words from the command line --------------------------------------------------------------------------------
def test_single_words():
    words = ["problem.batch=8", "fedavg.lr=0.3", "every=3", "fedda-mvr.mu0=nu0", "problem.model=", "cohort=2"]
    chosen = override(experiment(), settings=words)
    assert (chosen.problem.batch, chosen.problem.model, chosen.every, chosen.cohort) == (8, "mlp", 3, 2)
    assert chosen.algorithms["fedavg"] == {"lr": 0.3} and chosen.algorithms["fedda-mvr"]["mu0"] == "nu0"


@pytest.mark.parametrize("word,line", [
    ("lr=3", "--set must be KEY=VALUE"),
    ("problem=3", "--set must be KEY=VALUE"),
    ("rounds", "--set must be KEY=VALUE"),
    ("problem.=3", "--set must be KEY=VALUE"),
    ("rounds=many", "rounds must be a whole number, got 'many'"),
    ("problem.batch=[1]", "problem.batch must be a whole number"),
])  # fmt: skip
def test_bad_single_words(word, line):
    with pytest.raises(ValueError, match=line):
        override(experiment(), settings=[word])


def test_what_is_no_longer_the_file_s_own_is_not_called_so():
    paper = experiment(setting="paper")
    for how, setting in (
        ({}, "paper"),
        ({"rounds": 3, "seeds": "4", "algorithms": "fedavg"}, "paper"),  # fewer, not other
        ({"settings": ["every=1"]}, "paper"),
        ({"settings": ["fedavg.lr=0.3"]}, "changed"),
        ({"settings": ["problem.batch=8"]}, "changed"),
        ({"settings": ['aggregation=[{name = "topk"}]']}, "changed"),
        ({"settings": ["aggregation=[]"]}, "paper"),
        ({"settings": ["aggregation="]}, "paper"),
        ({"data": "digits"}, "changed"),
        ({"algorithms": "fedavg,stem"}, "changed"),
        ({"settings": ["fedavg.lr=0.3", "setting=mine"]}, "mine"),
    ):
        assert override(paper, **how).setting == setting, how
    assert override(experiment(), settings=["fedavg.lr=0.3"]).setting == ""


def test_options_of_another_partition_or_model_are_left_behind():
    table = {"data": "digits", "partition": "dirichlet", "alpha": 0.5, "model": "mlp", "hidden": 8}
    chosen = override(experiment(problem=table), settings=["problem.partition=iid", "problem.model=logistic"])
    assert chosen.problem.model_extra == {}
    with pytest.raises(ValueError, match="no key 'rho'"):  # one that was just given is not
        override(experiment(problem=table), settings=["problem.partition=iid", "problem.rho=0.5"]).completed()


def test_the_longest_label_owns_a_word():
    tables = {"a": {"name": "fedavg"}, "a.b": {"name": "fedavg"}}
    chosen = override(experiment(algorithms=tables), settings=["a.b.lr=3.0"])
    assert chosen.algorithms == {"a": {"name": "fedavg"}, "a.b": {"name": "fedavg", "lr": 3.0}}


def test_values_from_a_preset_file(tmp_path):
    file = tmp_path / "best.toml"
    file.write_text("[fedavg]\nlr = 0.7\n[other]\nlr = 1.0\n")
    chosen = override(experiment(), preset=file)
    assert chosen.setting == "changed"  # one of the two
    assert override(experiment(), algorithms="fedavg", preset=file).setting == "tuned"
    assert chosen.algorithms["fedavg"] == {"lr": 0.7}
    assert chosen.algorithms["fedda-mvr"] == tiny()["algorithms"]["fedda-mvr"]
    assert registry.make("fedavg", preset=str(file)).lr == 0.7
    for text, line in (("[nobody]\nlr = 1.0\n", "has values for nobody, not for this run"), ("x = 1", "a table for each"),
                       ("x = ", "not valid TOML"), ('[fedavg]\nname = "stem"', "not the name of another algorithm"), ("\udc80", "not UTF-8")):  # fmt: skip
        file.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=line):
            override(experiment(), preset=file)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        override(experiment(), preset=tmp_path / "none.toml")
    file.write_text("[fedavg]\nlr = 0.7\n")
    with pytest.raises(ValueError, match="has no values for 'stem'; it has fedavg"):
        registry.make("stem", preset=str(file))


def kept_files():
    return sorted((Path(__file__).parent.parent / "paper" / "results").rglob("config.toml"))


def test_kept_files_are_read_as_they_were_run():
    """What came later has the value that the run had: new words of the problem are not written at their default, and
    new hyper-parameters of an algorithm are added to those that are kept."""
    files = kept_files()
    assert len(files) > 30
    for file in files:
        kept, completed = tomllib.loads(file.read_text()), tomllib.loads(config.read(file).completed().toml())
        for label, words in kept.pop("algorithms").items():
            found = completed["algorithms"].pop(label)
            assert {word: found[word] for word in words} == words, file
        assert not completed.pop("algorithms") and completed == kept, file


def test_the_network_s_norm_and_pool_are_written_where_they_say_something():
    def words(**more):
        return experiment(problem={"data": "digits", "model": "cnn", **more}).completed().problem.model_dump()

    assert words() == words(norm="none", pool="max") and not {"norm", "pool"} & set(words())
    assert words(norm="batch")["norm"] == "batch" and words(pool="stride")["pool"] == "stride"
    chosen = override(experiment(problem={"data": "digits", "model": "cnn"}), settings=["problem.norm=batch"])
    assert chosen.completed().problem.build().batch_norms.layers
    with pytest.raises(ValueError, match="no key 'norm' with this partition and model"):
        experiment(problem={"data": "digits", "model": "mlp", "norm": "batch"}).completed()
