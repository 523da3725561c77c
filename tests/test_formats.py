"""Data under any path: idx files, image folders by client, LEAF's texts; augmentation by name; what is said about gaps."""

import gzip
import json
import struct
import warnings

import numpy as np
import pytest
import torch

import fedda
from fedda import registry
from fedda.data import open_dataset
from fedda.experiments import find
from fedda.experiments.overrides import override

RANDOM = np.random.default_rng(0)


def write_idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(head + array.tobytes())


@pytest.mark.parametrize(
    "names, suffix", [(("train", "t10k"), ""), (("emnist-letters-train", "emnist-letters-test"), ".gz")]
)
def test_idx_files_in_a_folder_of_any_name(tmp_path, names, suffix):
    parts = [(RANDOM.integers(0, 256, (n, 6, 5), np.uint8), np.arange(n, dtype=np.uint8) % 12) for n in (24, 12)]
    folder = tmp_path / "my digits"
    folder.mkdir()
    for name, (x, y) in zip(names, parts, strict=True):
        write_idx(folder / f"{name}-images-idx3-ubyte{suffix}", x)
        write_idx(folder / f"{name}-labels-idx1-ubyte{suffix}", y)
    data = open_dataset(str(folder))
    assert data.x.shape == (24, 1, 6, 5) and data.classes == 12 and (data.x_test[:, 0] == parts[1][0]).all()
    assert (data.y_test == parts[1][1]).all() and fedda.load(str(folder), clients=3, model="logistic").clients == 3


def write_images(folder, number):
    from PIL import Image

    folder.mkdir(parents=True)
    for i in range(number):
        Image.fromarray(RANDOM.integers(0, 256, (4, 4), np.uint8)).save(folder / f"{i}.png")


@pytest.mark.parametrize("parts", [("",), ("train", "test")])
def test_a_folder_for_each_client(tmp_path, parts):
    for part in parts:
        for client, number in (("Rome", 3), ("Oslo", 4)):
            for kind in ("cat", "dog"):
                write_images(tmp_path / "pets" / part / client / kind, number)
    data = open_dataset(tmp_path / "pets")
    assert data.names == ("cat", "dog") and set(data.client) == {"Rome", "Oslo"}
    total = [len(data.y), len(data.y_test)]
    assert total == [14, 14] if len(parts) == 2 else sum(total) == 14
    assert fedda.load(str(tmp_path / "pets"), partition="by_client", model="logistic").clients == 2
    write_images(tmp_path / "plain name" / "a", 4)
    write_images(tmp_path / "plain name" / "b", 4)
    assert open_dataset(tmp_path / "plain name").client is None


TEXT = "To be, or not to be, that is the question: whether it is nobler in the mind to suffer"


def leaf(users, length=8):
    data = {
        user: {"x": [TEXT[i : i + length] for i in range(n)], "y": [TEXT[i + length] for i in range(n)]}
        for user, n in users.items()
    }
    return json.dumps({"users": list(users), "num_samples": list(users.values()), "user_data": data})


def test_leaf_s_shakespeare(tmp_path):
    (tmp_path / "all_data").mkdir()
    (tmp_path / "all_data" / "all_data.json").write_text(leaf({"HAMLET": 20, "GHOST": 10}))
    for path in (tmp_path, tmp_path / "all_data" / "all_data.json"):
        data = open_dataset(path)
        assert data.x.shape == (24, 8) and data.y.shape == (24, 8) and len(data.y_test) == 6
        assert (data.x[:, 1:] == data.y[:, :-1]).all() and set(data.client_test) == {"HAMLET", "GHOST"}
        letters = np.array(data.names)
        assert {"".join(letters[row]) for row in data.x} <= {TEXT[i : i + 8] for i in range(20)}
        assert {letters[row[-1]] for row in data.y} <= set(TEXT[8:28])
    problem = fedda.load(str(tmp_path), partition="by_client", model="lstm", width=4, layers=1, batch=4)
    assert problem.clients == 2 and "train_loss" in fedda.train(fedda.make("fedavg"), problem, rounds=1).history[-1]
    for name, users in (("train", {"HAMLET": 9}), ("test", {"HAMLET": 2})):
        (tmp_path / "split" / name).mkdir(parents=True)
        (tmp_path / "split" / name / "some.json").write_text(leaf(users))
    assert len(open_dataset(tmp_path / "split").y_test) == 2


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "is no LEAF JSON file|LEAF JSON"),
        (leaf({"A": 3}).replace(TEXT[:8], TEXT[:7]), "samples must be 7 characters|samples must be 8 characters"),
        (leaf({}), "holds no sample"),
        (leaf({"A": 2}), "too few samples"),
        (leaf({"A": 5}).replace('"y": ["', '"y": ["a", "'), "has 5 samples and 6 targets"),
    ],
)
def test_damaged_leaf_files(tmp_path, text, why):
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ValueError, match=why) as error:
        open_dataset(tmp_path / "mine.json")
    assert "\n" not in str(error.value) and "mine.json" in str(error.value)


# -- augmentation by name ---------------------------------------------------------------------------------------------
def test_augmentation_in_a_file_on_the_command_line_and_in_python():
    ways = {
        "crop_flip": fedda.augment.crop_flip(),
        '{kind = "crop", pad = 2}': fedda.augment.crop(2),
        '["flip", {kind = "cutout", size = 3}]': fedda.augment.compose(fedda.augment.flip(), fedda.augment.cutout(3)),
    }
    for text, function in ways.items():
        experiment = override(find("digits"), settings=[f"problem.augment={text}"]).completed()
        built = experiment.problem.build()
        assert built.augment == function
    assert "augment" not in find("digits").completed().toml()
    ids = torch.arange(2)
    plain, by_name = (fedda.load("digits", augment=a).batch(ids, ids).x for a in (fedda.augment.flip(), "flip"))
    assert torch.equal(plain, by_name)


def test_a_plugin_s_augmentation_has_a_name():
    @registry.augmentations.register("darker")
    def darker(by: float = 0.5):
        """Multiply by a number."""
        return lambda x, uniform: x * by

    try:
        ids = torch.arange(2)
        dark, plain = (
            fedda.load("digits", **o).batch(ids, ids).x for o in ({"augment": {"kind": "darker", "by": 0.25}}, {})
        )
        assert torch.equal(dark, plain * 0.25)
    finally:
        del registry.augmentations.known["darker"]


@pytest.mark.parametrize(
    "augment, why",
    [
        ("flop", "unknown augmentation 'flop'; did you mean 'flip'"),
        ({"kind": "crop", "pda": 2}, "crop: no parameter 'pda'; did you mean 'pad'"),
        ([], "augment must be a name, a table"),
        (3, "augment must be a name, a table"),
    ],
)
def test_mistakes_with_augmentation(augment, why):
    with pytest.raises(ValueError, match=why) as error:
        fedda.load("digits", augment=augment)
    assert "\n" not in str(error.value)


# -- gaps are said ----------------------------------------------------------------------------------------------------
def test_classes_without_samples_and_clients_without_training_samples_are_said(tmp_path):
    x = RANDOM.normal(size=(30, 3)).astype(np.float32)
    np.savez(tmp_path / "gaps.npz", x=x, y=np.array([0, 2, 7] * 10))
    with pytest.warns(
        UserWarning, match=r"gaps.npz: the classes 1, 3, 4, 5, 6 have no sample; the model gets 8 classes"
    ):
        fedda.load(str(tmp_path / "gaps.npz"), clients=2, model="logistic")
    client = np.array(["big"] * 15 + [f"c{i}" for i in range(15)])
    np.savez(tmp_path / "single.npz", x=x, y=np.arange(30) % 2, client=client)
    with pytest.warns(UserWarning, match=r"single.npz: \d clients have test samples only and do not take part: c"):
        assert fedda.load(str(tmp_path / "single.npz"), partition="by_client", model="logistic").clients < 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.savez(tmp_path / "full.npz", x=x, y=np.arange(30) % 3, client=np.arange(30) % 2)
        fedda.load(str(tmp_path / "full.npz"), partition="by_client", model="logistic")
