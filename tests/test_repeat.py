"""A run folder repeats its run from anywhere, and is not resumed on other data."""

import itertools
import json
import tomllib
import warnings

import numpy as np
import pytest
import torch

import fedda
from commands import inside, is_one_line, tiny
from fedda import plugins, registry
from fedda.experiments import config, find, run
from fedda.experiments.overrides import other_data_note, override, saved_experiment
from fedda.problems import fingerprint as hashing
from fedda.progress import Silence
from fedda.runs.toml import dumps

PLUGIN = """
import numpy as np
from torch import nn
from torch.nn import functional as F
from fedda import registry

@registry.models.register("own-line")
def own_line(shape, classes):
    "A line."
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes)), F.cross_entropy
"""

NUMBERS = itertools.count()


def arrays(path, seed=0, **changes):
    random = np.random.default_rng(seed)
    content = {"x": random.normal(size=(60, 4)).astype(np.float32), "y": np.arange(60) % 3} | changes
    np.savez(path, **content)
    return content


@pytest.fixture
def own(tmp_path):
    """An experiment in a folder of its own, with data and a plugin beside it."""
    folder = tmp_path / "study"
    name = f"own-line-{next(NUMBERS)}"  # a plugin stays registered until the process ends
    (folder / "data").mkdir(parents=True)
    arrays(folder / "data" / "mine.npz")
    (folder / "mine.py").write_text(PLUGIN.replace("own-line", name))
    problem = {"data": "data/mine.npz", "clients": 3, "model": name, "batch": 4}
    table = {
        "name": "own",
        "rounds": 3,
        "plugin": ["mine.py"],
        "problem": problem,
        "algorithms": {"fedavg": {"lr": 0.1}},
    }
    (folder / "own.toml").write_text(dumps(table))
    return folder


def test_a_configuration_repeats_its_run_from_anywhere(own, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(find("../study/own.toml"), tmp_path / "first", Silence())
    saved = tomllib.loads((tmp_path / "first" / "config.toml").read_text())
    assert saved["plugin"] == [str(own / "mine.py")] and saved["problem"]["data"] == str(own / "data" / "mine.npz")
    monkeypatch.chdir("/")
    run(find(str(tmp_path / "first" / "config.toml")), tmp_path / "second", Silence())
    for name in ("config.toml", "metrics.jsonl"):
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("first", "second"))
        assert first == second and first
    wanted = saved_experiment(find(str(own / "own.toml")), tmp_path / "first", 5)
    run(wanted, tmp_path / "first", Silence(), resume=True)


def test_plugins_of_the_command_line_are_recorded(own, monkeypatch):
    monkeypatch.chdir(own)
    (own / "other.py").write_text(PLUGIN.replace("own-line", "own-other"))
    plugins.load("other.py")
    changed = override(find("own.toml"), settings=["problem.model=own-other"], plugins=["other.py", "json"])
    assert changed.plugin == [str(own / "mine.py"), str(own / "other.py"), "json"]
    run(changed, own / "run", Silence())
    assert config.read(own / "run" / "config.toml").completed().toml() == (own / "run" / "config.toml").read_text()


def test_a_plugin_or_a_path_that_is_wrong_is_one_line(own, capsys, monkeypatch):
    text = (own / "own.toml").read_text()
    for change, fragments in (
        (('"mine.py"', '"absent.py"'), ["own.toml", "absent.py", "cannot be loaded"]),
        (('["mine.py"]', '"mine.py"'), ["plugin", "list"]),
        (("data/mine.npz", "data/absent.npz"), ["data/absent.npz", "no such file"]),
    ):
        (own / "own.toml").write_text(text.replace(*change))
        code, _, err = inside(capsys, monkeypatch, "run", own / "own.toml", "--out", own / "bad")
        assert code == 2 and not (own / "bad").exists()
        is_one_line(err, *fragments)


def test_presets_and_registered_names_are_found(tmp_path):
    (tmp_path / "best.toml").write_text("[fedavg]\nlr = 0.25\n")
    table = tiny(algorithms={"fedavg": {"preset": "best.toml"}})
    (tmp_path / "t.toml").write_text(dumps(table))
    (tmp_path / "breast-cancer").mkdir()  # a folder of this name does not hide the data set
    experiment = find(str(tmp_path / "t.toml"))
    assert experiment.problem.data == "breast-cancer"
    assert experiment.completed().algorithms["fedavg"]["lr"] == 0.25


def test_a_run_is_not_resumed_on_other_data(own, capsys, monkeypatch):
    experiment = find(str(own / "own.toml"))
    run(experiment, own / "run", Silence())
    before = arrays(own / "data" / "mine.npz")
    words = ["run", own / "own.toml", "--rounds", 5, "--resume", "--out", own / "run"]
    swapped = before["y"].copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    for changes in ({"y": swapped}, {"x": before["x"] + np.float32(1e-6)}):
        arrays(own / "data" / "mine.npz", **changes)
        content = {path: path.read_bytes() for path in own.rglob("run/*") if path.is_file()}
        code, _, err = inside(capsys, monkeypatch, *words)
        assert code == 2 and content == {path: path.read_bytes() for path in content}
        is_one_line(err, "other data")
        code, _, err = inside(capsys, monkeypatch, "export", own / "run", "--out", own / "m.pt")
        assert code == 2 and not (own / "m.pt").exists()
        is_one_line(err, "other data")
    arrays(own / "data" / "mine.npz")
    run(experiment, own / "run", Silence(), resume=True)


def test_data_of_a_plugin_is_hashed_too(tmp_path):
    content = {"y": np.arange(40) % 2}

    @registry.datasets.register("changing")
    def changing():
        """Data that changes."""
        x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        return fedda.data.Dataset(x[:30], content["y"][:30], x[30:], content["y"][30:], 2)

    problem = {"data": "changing", "clients": 2, "model": "logistic", "batch": 4}
    (tmp_path / "t.toml").write_text(dumps(tiny(problem=problem, algorithms={"fedavg": {}})))
    experiment = find(str(tmp_path / "t.toml"))
    run(experiment, tmp_path / "run", Silence())
    run(experiment, tmp_path / "run", Silence(), resume=True)
    content["y"] = 1 - content["y"]
    with pytest.raises(ValueError, match="other data"):
        run(experiment, tmp_path / "run", Silence(), resume=True)
    del registry.datasets.entries["changing"]


def test_the_hash_knows_all_targets_and_owners_and_spread_samples(tmp_path, monkeypatch):
    x, y, owners = torch.randn(50, 3), torch.randint(0, 2, (50,)), torch.arange(50) % 5

    def made(x=x, y=y, owner=owners, **more):
        return fedda.problem(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, x=x, y=y, client=owner, **more)

    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for whole in (1 << 28, 100):  # in the second turn the samples are "large"
        monkeypatch.setattr(hashing, "WHOLE", whole)
        monkeypatch.setattr(hashing, "SPREAD", 1 << 26 if whole > 100 else 5 * 12)
        hashes = [
            made(),
            made(y=y.flip(0)),
            made(owner=torch.arange(50) % 2),
            made(x=x + 1),
            made(test=(x, y)),
            made(validation=0.2),
            made(x[:49], y[:49], torch.arange(49) % 5),
        ]
        assert len({problem.fingerprint for problem in hashes}) == len(hashes)
        assert made(mapped).fingerprint == made().fingerprint == made().fingerprint
    part = made()
    assert part.fingerprint == part.only(slice(0, 2)).fingerprint == part.to(dtype=torch.float64).fingerprint


def test_other_data_has_no_title_of_the_first_and_its_rates_are_named(own, monkeypatch):
    monkeypatch.chdir(own)
    digits = find("digits")
    other = override(digits, data="data/mine.npz")
    assert "Digits" not in other.title and other.title.startswith("mine.npz") and other.setting == digits.setting
    assert other.problem.data == str(own / "data" / "mine.npz")
    note = other_data_note(digits, other)
    assert note.startswith("the hyper-parameters of digits were chosen for digits, not for mine.npz;")
    with pytest.warns(UserWarning, match=note):
        run(override(other, 1, "fedavg", "0", settings=["problem.partition=iid"]), own / "run", Silence(), note=note)
    assert other_data_note(digits, override(digits, 5)) == "" and override(digits, 5).title == digits.title
    assert other_data_note(digits, override(digits, algorithms="fedprox", data="data/mine.npz")) == ""
    with pytest.raises(ValueError), warnings.catch_warnings():  # an error is one line, without the note
        warnings.simplefilter("error")
        run(override(digits, data="absent.npz"), own / "bad", Silence(), note=note)


def test_doctor_names_versions_devices_and_folders(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "absent"))
    code, out, _ = inside(capsys, monkeypatch, "doctor")
    assert code == 0 and f"fedda    {fedda.__version__}" in out and torch.__version__ in out
    assert f"{tmp_path / 'absent'} (not there yet" in out and len(out.splitlines()) < 24
    for name in ("gpu", "triton", "compiler", "flower", "data", "extra    privacy (noise and its accounting): "):
        assert f"\n{name}" in out
    monkeypatch.setattr("fedda.cli.doctor.version", lambda name: "1.0" if name == "fedda" else None)
    monkeypatch.setattr("fedda.cli.doctor.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    _, out, _ = inside(capsys, monkeypatch, "doctor")
    for hint in ("pip install triton", "install gcc or clang", "flower   not installed", "pip install 'fedda[flower]'"):
        assert hint in out


def test_the_environment_holds_the_hash(own):
    run(find(str(own / "own.toml")), own / "run", Silence())
    known = json.loads((own / "run" / "environment.json").read_text())["data_sha256"]
    assert known == find(str(own / "own.toml")).problem.build().fingerprint and len(known) == 64
