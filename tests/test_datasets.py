"""Files to data sets: every format, real and damaged; the cache; downloads; the `data` commands."""

import gzip
import hashlib
import http.server
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import realdata
from commands import ENVIRONMENT, fedda, is_one_line
from fedda.data import Dataset, cache, open_dataset, split
from fedda.data.arrays import moments
from fedda.data.download import fetch
from fedda.data.from_files import FILE_DATASETS, Download
from fedda.data.idx import FILES

RANDOM = np.random.default_rng(0)


def images(n, *shape):
    return RANDOM.integers(0, 256, (n, *shape), dtype=np.uint8)


# Small valid files of every format, each by a function of the folder; the paths of what it wrote.


def write_npz(folder, **changes):
    arrays = {"x": images(12, 5, 5), "y": np.arange(12) % 3, "client": np.arange(12) % 4} | changes
    np.savez(folder / "mine.npz", **{k: v for k, v in arrays.items() if v is not None})
    return [folder / "mine.npz"]


def write_medmnist(folder, **changes):
    arrays = {}
    for part, n in (("train", 18), ("val", 9), ("test", 9)):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = (
            images(n, 4, 4, 3),
            np.arange(n, dtype=np.uint8)[:, None] % 9,
        )
    arrays = {k: v for k, v in (arrays | changes).items() if v is not None}
    np.savez_compressed(folder / "pathmnist.npz", **arrays)
    return [folder / "pathmnist.npz"]


def write_cifar(folder, protocol=2, keys=str.encode, n=3, **changes):
    (folder / "cifar-10-batches-py").mkdir(exist_ok=True)
    paths = [
        folder / "cifar-10-batches-py" / name for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    ]
    for i, path in enumerate(paths):
        batch = {"batch_label": f"batch {i}", "labels": [i, 9, 0][:n], "data": images(n, 3072)} | changes
        path.write_bytes(pickle.dumps({keys(k): v for k, v in batch.items()}, protocol))
    return paths


def write_femnist(folder, **changes):
    paths = []
    for part in ("train", "test"):
        (folder / "femnist" / "data" / part).mkdir(parents=True, exist_ok=True)
        users = {f"f{i:04}_{i}": {"x": (images(2, 784) / 255).round(4).tolist(), "y": [i, 61]} for i in range(2)}
        content = {"users": list(users), "num_samples": [2, 2], "user_data": users} | changes
        paths.append(folder / "femnist" / "data" / part / "all_data_0.json")
        paths[-1].write_text(json.dumps(content))
    return paths


def write_idx(folder, suffix=".gz"):
    (folder / "mnist").mkdir(exist_ok=True)
    paths = [folder / "mnist" / f"{name}{suffix}" for name in FILES]
    for path, array in zip(paths, (images(6, 4, 4), np.arange(6), images(3, 4, 4), np.arange(3)), strict=True):
        head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        raw = head + array.astype(np.uint8).tobytes()
        path.write_bytes(gzip.compress(raw, mtime=0) if suffix else raw)
    return paths


def write_folder(folder, mode="RGB", suffix="png"):
    paths = []
    for name in ("cat", "dog"):
        (folder / "pets" / name).mkdir(parents=True, exist_ok=True)
        for i in range(4):
            paths.append(folder / "pets" / name / f"{i}.{suffix}")
            Image.fromarray(images(6, 7, 3) if mode == "RGB" else images(6, 7)).save(paths[-1])
    return paths


# format: how it is written, and the name it is opened by
FORMATS = {
    "npz": (write_npz, "{}/mine.npz"),
    "medmnist": (write_medmnist, "pathmnist"),
    "cifar": (write_cifar, "cifar10"),
    "femnist": (write_femnist, "femnist"),
    "idx": (lambda folder: write_idx(folder, ""), "mnist"),
    "idx.gz": (write_idx, "mnist"),
    "folder": (write_folder, "{}/pets"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder of data."""
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path))
    return tmp_path


def same(a, b):
    for one, other in zip(a, b, strict=True):
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_opens_and_again_from_the_cache(kind, place):
    write, name = FORMATS[kind]
    write(place)
    first = open_dataset(name.format(place))
    assert first.x.dtype == np.uint8 and first.x.ndim == 4 and first.x.shape[1] in (1, 3)
    assert first.y.dtype == first.y_test.dtype == np.int64
    assert len(first.x) == len(first.y) and len(first.x_test) == len(first.y_test) > 0
    np.testing.assert_allclose(first.mean, first.x.astype(float).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(first.std, first.x.astype(float).std((0, 2, 3)), rtol=1e-6)
    same(first, open_dataset(name.format(place)))
    same(first, open_dataset(name.format(place), fresh=True))


def test_images_are_read_exactly(place):
    x = images(12, 5, 6, 3)
    for stored, want in (
        (x, x.transpose(0, 3, 1, 2)), (x[..., 0], x[:, None, :, :, 0]), (x[..., :1], x[:, None, :, :, 0]),
        (x.transpose(0, 3, 1, 2), x.transpose(0, 3, 1, 2)),
    ):  # fmt: skip
        write_npz(place, x=stored, x_test=stored[:4], y_test=np.zeros(4, int))
        data = open_dataset(str(place / "mine.npz"))
        np.testing.assert_array_equal(data.x, want)
        np.testing.assert_array_equal(data.x_test, want[:4])
    write_cifar(place, data=(rows := images(3, 3072)))
    np.testing.assert_array_equal(open_dataset("cifar10").x[:3], rows.reshape(3, 3, 32, 32))
    paths = write_folder(place)
    data = open_dataset(str(place / "pets"))
    together = sorted(np.concatenate([data.x, data.x_test]).reshape(8, -1).tolist())
    assert together == sorted(np.asarray(Image.open(p)).transpose(2, 0, 1).ravel().tolist() for p in paths)
    assert data.names == ("cat", "dog")


def test_an_own_npz_file(place):
    x = RANDOM.normal(size=(20, 7))
    y = np.array(["no", "yes"])[np.arange(20) % 2]
    write_npz(place, x=x, y=y, client=np.array([f"hospital {i % 3}" for i in range(20)]))
    data = open_dataset(str(place / "mine.npz"))
    assert data.x.shape == (16, 7) and data.x.dtype == np.float32 and data.names == ("no", "yes")
    np.testing.assert_allclose(data.mean, data.x.mean(axis=0), atol=1e-6)  # columns are standardised
    assert (
        len(data.client) == 16
        and len(data.client_test) == 4
        and set(data.client) <= {f"hospital {i}" for i in range(3)}
    )
    rows = {
        tuple(row): (label, who) for row, label, who in zip(x.astype(np.float32), y, np.arange(20) % 3, strict=True)
    }
    for row, label, who in zip(data.x, data.y, data.client, strict=True):
        assert rows[tuple(row)] == (data.names[label], int(who[-1]))
    held = data.validation()
    assert held.names == data.names and len(held.client) == len(held.y) == 13 and len(held.client_test) == 3
    whole = images(20, 4, 4)
    write_npz(
        place,
        x=whole,
        y=np.arange(20) % 3,
        x_test=whole[:5],
        y_test=np.zeros(5, int),
        client=np.arange(20),
        client_test=np.arange(5),
    )
    data = open_dataset(str(place / "mine.npz"))
    assert data.classes == 3 and data.names is None and data.client_test.tolist() == [0, 1, 2, 3, 4]
    held = data.validation()
    same((held.mean, held.std), (data.mean, data.std))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("keys", [str, str.encode])
def test_cifar_pickles_of_every_kind(place, protocol, keys):
    write_cifar(place, protocol, keys, data=(rows := images(3, 3072)))
    data = open_dataset("cifar10")
    assert data.y[:3].tolist() == [0, 9, 0] and data.names[6] == "frog"
    np.testing.assert_array_equal(data.x_test, rows.reshape(3, 3, 32, 32))
    write_cifar(place, protocol, keys, data=np.asfortranarray(rows), labels=np.array([1, 2, 3]))
    np.testing.assert_array_equal(open_dataset("cifar10").x_test, rows.reshape(3, 3, 32, 32))


def test_cifar_pickles_of_numpy_1_and_2(place):
    for path in write_cifar(place):
        new = path.read_bytes()
        old = new.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        path.write_bytes(old if old != new else new.replace(b"cnumpy.core.multiarray\n", b"cnumpy._core.multiarray\n"))
        assert path.read_bytes() != new
    assert len(open_dataset("cifar10").y) == 15


def test_the_published_cifar_pickles_were_written_by_python_2(place):
    """Byte for byte as its cPickle did: keys and pixels are its str, opcodes U and T."""
    for path in write_cifar(place):
        rows = images(2, 3072)
        path.write_bytes(
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(K\x06K\x09e"
            b"U\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09U\x01bq\x0a"
            b"\x87q\x0bRq\x0c(K\x01K\x02M\x00\x0c\x86q\x0dcnumpy\ndtype\nq\x0eU\x02u1q\x0fK\x00K\x01\x87q\x10Rq\x11"
            b"(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq\x13b\x89T"
            + rows.nbytes.to_bytes(4, "little") + rows.tobytes() + b"q\x14tq\x15bu."
        )  # fmt: skip
    data = open_dataset("cifar10")
    assert data.y.tolist() == [6, 9] * 5
    np.testing.assert_array_equal(data.x_test, rows.reshape(2, 3, 32, 32))


def test_a_strange_shape_costs_no_memory(place):
    """A text in the place of a length would be multiplied."""
    good = pickle.dumps(np.zeros((2, 3), np.uint8), 2)
    (file, *_) = write_cifar(place, 2)
    shape, strange = b"K\x02K\x03\x86", b"J\x00\x94\x35\x77X\x01\x00\x00\x00a\x86"  # (2, 3), (2e9, "a")
    assert shape in good
    file.write_bytes(good.replace(shape, strange))
    tracemalloc.start()
    with pytest.raises(ValueError, match="data_batch_1"):
        open_dataset("cifar10")
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


class Malicious:
    def __init__(self, call, *given):
        self.what = call, given

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_malicious_pickle_is_refused_and_not_run(place, protocol):
    for call, words in (
        (os.system, (f"touch {place}/run",)),
        (eval, (f"open('{place}/run', 'w')",)),
        (open, (f"{place}/run", "w")),
    ):
        paths = write_cifar(place, protocol, filenames=Malicious(call, *words))
        with pytest.raises(
            ValueError, match=r"data_batch_1: is not a whole CIFAR-10 batch .*which no CIFAR-10 batch needs: not run"
        ) as why:
            open_dataset("cifar10")
        assert "\n" not in str(why.value) and not (place / "run").exists() and paths
    # the names that arrays need lead to no function of numpy or of codecs
    text = b"c_codecs\nencode\n(Vx\nVrot13\ntR."
    for raw in (
        text,
        b"cnumpy\nndarray\n(I99999999999\ntR.",
        b"cnumpy\ndtype\n(VO\ntR.",
        b"\x80\x02r\xff\xff\xff\x7f.",
    ):
        paths[0].write_bytes(raw)
        with pytest.raises(ValueError, match=r"data_batch_1: (is not a whole|must be the pickle of a dict)"):
            open_dataset("cifar10")


def test_mnist_where_torchvision_keeps_it(place):
    write_idx(place, "")
    first = open_dataset("mnist", fresh=True)
    (place / "MNIST").mkdir()
    (place / "mnist").rename(place / "MNIST" / "raw")
    same(first, open_dataset("mnist"))


def test_image_folders(place):
    write_folder(place, "L", "jpg")
    assert open_dataset(str(place / "pets")).x.shape[1:] == (1, 6, 7)
    Image.fromarray(images(6, 7, 3)).save(place / "pets" / "cat" / "0.jpg")  # one in colour: all are
    assert open_dataset(str(place / "pets")).x.shape[1:] == (3, 6, 7)
    (place / "split").mkdir()
    shutil.copytree(place / "pets", place / "split" / "train")
    (place / "split" / "test" / "dog").mkdir(parents=True)
    Image.fromarray(images(6, 7)).save(place / "split" / "test" / "dog" / "a.png")
    data = open_dataset(str(place / "split"))
    assert len(data.y) == 8 and data.y_test.tolist() == [1] and data.x_test.shape == (1, 3, 6, 7)


def bad_pixel(folder, value):
    paths = write_femnist(folder)
    content = json.loads(paths[0].read_text())
    content["user_data"]["f0000_0"]["x"][0][5] = value
    paths[0].write_text(json.dumps(content))


def bad_label(folder, value):
    paths = write_femnist(folder)
    content = json.loads(paths[0].read_text())
    content["user_data"]["f0000_0"]["y"][0] = value
    paths[0].write_text(json.dumps(content))


def overwrite(paths, content, which=0):
    paths[which].write_bytes(content)


def folder_of(folder, odd=None, **changes):
    write_folder(folder)
    if odd is not None:
        odd.save(folder / "pets" / "dog" / "2.png")


def save(path):
    np.save(path, np.arange(3))
    return path


def as_folder(path):
    path.unlink()
    path.mkdir()


NPZ = [
    ({"y": np.full(12, np.inf)}, "mine.npz: y must be finite numbers, as the targets of a regression are"),
    ({"y": np.arange(12) - 1}, "mine.npz: y must hold classes from 0 to 65535, got -1"),
    ({"y": np.arange(11)}, "mine.npz: y must be as long as its samples, 12, got 11"),
    ({"y": np.zeros((12, 2), int)}, r"y must hold one value per sample, got shape \[12, 2\]"),
    ({"y": np.full(12, 10**9)}, "y must hold classes from 0 to 65535, got 1000000000"),
    ({"y": np.array([None] * 12)}, "y must be numbers or texts, got objects"),
    ({"x": np.array([{}] * 12)}, "x must be numbers or texts, got objects"),
    ({"x": None}, "must hold the arrays x and y, or train_images, .*; it has y, client"),
    ({"x": None, "y": None, "client": None}, "it has none of them"),
    ({"x": np.full((12, 2), np.nan)}, "x must be finite numbers, sample 0 is not"),
    ({"x": np.full((12, 2), 1e300)}, "x must be finite numbers"),
    ({"x": np.zeros((12, 2), complex)}, "x must be numbers, got complex128"),
    ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "must be .samples, .... and not empty"),
    ({"x": np.zeros(12)}, r"x must be \[samples, ...\] and not empty, got shape \[12\]"),
    ({"x": images(12, 5, 5, 2)}, r"x: images must be .*, got shape \[12, 5, 5, 2\]"),
    ({"x": images(12, 1, 5, 5, 3)}, r"got shape \[12, 1, 5, 5, 3\]"),
    ({"x_test": images(3, 5, 5)}, "x_test and y_test must come together"),
    ({"x_test": images(3, 5, 6), "y_test": np.zeros(3, int)}, "x and x_test must be alike"),
    ({"x_test": np.zeros((3, 1, 5, 5)), "y_test": np.zeros(3, int)}, "x and x_test must be alike"),
    ({"x_test": images(3, 5, 5), "y_test": np.zeros(4, int)}, "y_test must be as long as its samples, 3, got 4"),
    ({"client": np.arange(12) / 2}, "client must be whole numbers or texts, got float64"),
    ({"client": np.arange(3)}, "client must be as long as its samples"),
    ({"client_test": np.arange(3)}, "client_test needs x_test"),
    ({"x": images(2, 5, 5), "y": np.arange(2), "client": None}, "at least 3 samples"),
]  # fmt: skip
BAD = [
    *(("npz", lambda f, c=c: write_npz(f, **c), line) for c, line in NPZ),
    ("npz", lambda f: overwrite(write_npz(f), b""), "mine.npz: is not a whole .npz file"),
    ("npz", lambda f: overwrite(write_npz(f), pickle.dumps(1)), "mine.npz: is not a whole .npz file"),
    ("npz", lambda f: shutil.move(save(f / "a.npy"), f / "mine.npz"), "mine.npz: is not a whole .npz file"),
    ("medmnist", lambda f: write_medmnist(f, train_labels=np.full((18, 1), 9)), "pathmnist.npz: train_labels must hold classes from 0 to 8, got 9"),
    ("medmnist", lambda f: write_medmnist(f, train_labels=np.zeros((18, 14), int)), r"pathmnist.npz: train_labels must hold one value per sample, got shape \[18, 14\]"),
    ("medmnist", lambda f: write_medmnist(f, test_images=None), "pathmnist.npz: must hold"),
    ("medmnist", lambda f: write_medmnist(f, test_images=np.zeros((9, 4, 4, 3))), "test_images must be uint8 images, got float64"),
    ("medmnist", lambda f: as_folder(*write_medmnist(f)), "pathmnist.npz: must be a .npz file, got a folder"),
    ("cifar", lambda f: write_cifar(f, labels=[0, 1, 10]), "data_batch_1: labels must be from 0 to 9, got 10"),
    ("cifar", lambda f: write_cifar(f, labels=[0, 1, -1]), "labels must be from 0 to 9, got -1"),
    ("cifar", lambda f: write_cifar(f, labels=[0, 1]), "labels must be one whole number for each of 3 images"),
    ("cifar", lambda f: write_cifar(f, labels=[0, 1, 0.5]), "labels must be whole numbers"),
    ("cifar", lambda f: write_cifar(f, data=images(3, 3071)), r"data must be uint8 \[n, 3072\] .* got uint8 \[3, 3071\]"),
    ("cifar", lambda f: write_cifar(f, data=np.zeros((3, 3072), np.int32)), "got int32"),
    ("cifar", lambda f: write_cifar(f, data=np.zeros((3, 3072))), "data_batch_1: is not a whole CIFAR-10 batch .*'f8', not of whole numbers"),
    ("cifar", lambda f: write_cifar(f, data=b"123"), "got something else"),
    ("cifar", lambda f: write_cifar(f, n=0), "data_batch_1: is not a whole CIFAR-10 batch"),
    ("cifar", lambda f: overwrite(write_cifar(f), pickle.dumps([1])), "must be the pickle of a dict, got list"),
    ("cifar", lambda f: overwrite(write_cifar(f), pickle.dumps({})), "must hold 'data', got nothing"),
    ("cifar", lambda f: overwrite(write_cifar(f), b"", 5), "test_batch: is not a whole CIFAR-10 batch"),
    ("femnist", lambda f: bad_pixel(f, 1.5), "all_data_0.json: f0000_0: pixels must be whole 255ths from 0 to 1"),
    ("femnist", lambda f: bad_pixel(f, 0.5), "pixels must be whole 255ths"),
    ("femnist", lambda f: bad_pixel(f, float("nan")), "all_data_0.json: is not a whole LEAF JSON file .*NaN is not a pixel"),
    ("femnist", lambda f: bad_label(f, 62), "f0000_0: labels must be whole numbers from 0 to 61"),
    ("femnist", lambda f: bad_label(f, 1.0), "f0000_0: labels must be whole numbers from 0 to 61"),
    ("femnist", lambda f: write_femnist(f, users=["a"]), "names 1 users, 2 counts and the data of 2"),
    ("femnist", lambda f: write_femnist(f, num_samples=[1, 2]), "f0000_0 has 2 images, 2 labels and the count 1"),
    ("femnist", lambda f: write_femnist(f, users=[], num_samples=[], user_data={}), "holds no image"),
    ("femnist", lambda f: overwrite(write_femnist(f), b"\xff\xfe"), "all_data_0.json: is not a whole LEAF JSON file .UnicodeDecodeError"),
    ("femnist", lambda f: overwrite(write_femnist(f), b"[" * 100000), "is not a whole LEAF JSON file .RecursionError"),
    ("idx", lambda f: overwrite(write_idx(f, ""), b"", 1), "train-labels-idx1-ubyte: must be an idx file"),
    ("idx", lambda f: overwrite(write_idx(f, ""), bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), 3), "t10k-labels-idx1-ubyte: must hold 3 bytes, got 2"),
    ("idx", lambda f: overwrite(write_idx(f, ""), bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 3, 4]), 3), "must hold 3 bytes, got more"),
    ("idx", lambda f: overwrite(write_idx(f, ""), bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2, 10]), 3), "labels must be from 0 to 9, got 10"),
    ("idx", lambda f: overwrite(write_idx(f, ""), bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2]), 3), "must hold a label for each of 3 images, got 2"),
    ("idx", lambda f: overwrite(write_idx(f, ""), bytes([0, 0, 8, 3] + [255] * 12), 2), "t10k-images-idx3-ubyte: "),
    ("idx.gz", lambda f: overwrite(write_idx(f), b"no gzip", 0), "train-images-idx3-ubyte.gz: is not a whole idx file"),
    ("folder", lambda f: folder_of(f, Image.new("RGB", (7, 8))), "dog/2.png: is 7x8 pixels, but .*cat/0.png is 7x6"),
    ("folder", lambda f: folder_of(f, Image.new("I;16", (7, 6))), "dog/2.png: must have 8 bits"),
    ("folder", lambda f: overwrite(write_folder(f), b"", 3), "cat/3.png: is not a whole image"),
    ("folder", lambda f: overwrite(write_folder(f), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 6\n", 3), "cat/3.png: is not a whole image"),
    ("folder", lambda f: (f / "pets" / "empty").mkdir(parents=True), "pets/empty: must hold images"),
    ("folder", lambda f: (f / "pets").mkdir(), "pets: must hold a folder of images for each class, two or more, got 0"),
    ("folder", lambda f: as_folder(write_folder(f)[1]), "cat/1.png: must be an image, got a folder"),
    ("folder", lambda f: (f / "pets").write_text(""), "pets: must be a .npz, .csv, .parquet or LEAF .json file, or a folder"),
]  # fmt: skip


@pytest.mark.parametrize("kind,spoil,line", BAD, ids=[f"{kind}-{i}" for i, (kind, _, _) in enumerate(BAD)])
def test_bad_files_are_refused_in_one_line(kind, spoil, line, place):
    spoil(place)
    with pytest.raises(ValueError, match=line) as why:
        open_dataset(FORMATS[kind][1].format(place))
    assert "\n" not in str(why.value) and str(place) in str(why.value)
    assert not list((place / "parsed").glob("*")) and not list((place / "parsed").glob(".*"))


def test_an_array_that_promises_more_than_it_holds_takes_no_memory(place):
    """The header of a member says 8 TB: refused before anything is reserved."""
    import zipfile

    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(place / "mine.npz", "w") as file:
        file.writestr("x.npy", head.getvalue() + bytes(100))
        file.writestr("y.npy", head.getvalue())
    with pytest.raises(ValueError, match=r"mine.npz: x must hold 8000000000000 bytes, got 100"):
        open_dataset(str(place / "mine.npz"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(place):
    os.mkfifo(place / "pathmnist.npz")
    with pytest.raises(ValueError, match=r"pathmnist.npz: must be a .* got a device or pipe"):
        open_dataset("pathmnist")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs users as Unix has them")
def test_a_file_without_permission(monkeypatch):
    """Root reads everything, so root reads as another user here, from a folder that is open to all."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        write_medmnist(Path(folder))[0].chmod(0)
        monkeypatch.setenv("FEDDA_DATA", folder)
        try:
            os.seteuid(user or 65534)
            with pytest.raises(ValueError, match=r"pathmnist.npz: cannot be read: Permission denied"):
                open_dataset("pathmnist")
        finally:
            os.seteuid(user)


def test_names(place):
    for name, line in (
        ("cifar", "unknown data set 'cifar'; did you mean 'cifar10'? (or give a .npz or .csv file, or a folder)"),
        ("xyzzy.npz", "xyzzy.npz: there is no such file or folder"),
        ("no/such", "no/such: there is no such file or folder"),
        ("cifar10", f"cifar10: {place}/cifar-10-batches-py/data_batch_1 (and 5 more) is absent; fetch it with: fedda data fetch cifar10"),
        ("femnist", "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"),
        ("colon", f"{place}/crchisto.npz is absent; put a .npz file with train_images"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(line)):
            open_dataset(name)
    with pytest.raises(ValueError, match=re.escape("known: bloodmnist, ")):
        open_dataset("zzz")


def test_the_folder_of_the_data(monkeypatch, tmp_path):
    from fedda.data.files import data_folder

    monkeypatch.delenv("FEDDA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "fedda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "fedda"


# --- the cache


def parsed(place):
    return sorted(p.name for p in (place / "parsed").iterdir())


def test_the_cache_follows_the_files(place):
    write_medmnist(place)
    first = open_dataset("pathmnist")
    assert isinstance(first.x, np.memmap) and not first.x.flags.writeable
    (before,) = parsed(place)
    write_medmnist(place, train_images=images(18, 4, 4, 3))
    os.utime(place / "pathmnist.npz", ns=(1, 1))
    second = open_dataset("pathmnist")
    assert not np.array_equal(first.x, second.x)
    (after,) = parsed(place)  # what belonged to the old file is gone
    assert before != after and after.startswith("pathmnist-")


@pytest.mark.parametrize("file", ["x.npy", "y_test.npy", "about.json"])
@pytest.mark.parametrize("how", ["cut", "empty", "gone", "noise"])
def test_a_damaged_cache_is_made_anew(place, file, how):
    write_medmnist(place)
    first = [None if v is None else np.array(v) for v in open_dataset("pathmnist")]
    (folder,) = (place / "parsed").iterdir()
    raw = (folder / file).read_bytes()
    changed = {"cut": raw[:-5], "empty": b"", "noise": bytes(255 - b for b in raw[:50]) + raw[50:]}
    if how == "gone":
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(changed[how])
    for one, other in zip(open_dataset("pathmnist"), first, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (folder / file).read_bytes() == raw and parsed(place) == [folder.name]


def test_without_a_place_to_write_there_is_no_cache(place):
    write_medmnist(place)
    (place / "parsed").write_text("in the way")
    assert len(open_dataset("pathmnist").y) == 18
    assert (place / "parsed").read_text() == "in the way"


def test_a_writer_that_fails_leaves_nothing(place, monkeypatch):
    write_medmnist(place)
    save, calls = np.save, []

    def full(*given, **how):
        calls.append(given)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save(*given, **how)

    monkeypatch.setattr(cache.np, "save", full)
    assert len(open_dataset("pathmnist").y) == 18
    assert len(calls) == 3 and parsed(place) == []


def test_a_killed_writer_leaves_nothing_that_is_taken_for_whole(place):
    write_medmnist(place)
    code = """if True:
        import os, signal
        from fedda.data import cache, open_dataset
        save, calls = cache.np.save, []
        def dying(*given, **how):
            save(*given, **how)
            calls.append(1)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        cache.np.save = dying
        open_dataset("pathmnist")
    """
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT | {"FEDDA_DATA": str(place)}, check=False)
    assert done.returncode == -9
    (left,) = parsed(place)
    assert left.startswith(".")
    assert len(open_dataset("pathmnist").y) == 18
    os.utime(place / "parsed" / left, (1, 1))  # an hour later and more
    write_medmnist(place)
    open_dataset("pathmnist")
    assert len(parsed(place)) == 1


def test_two_processes_at_once(place):
    write_medmnist(place)
    code = "from fedda.data import open_dataset; print(int(open_dataset('pathmnist').x.sum()))"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=ENVIRONMENT | {"FEDDA_DATA": str(place)}, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    sums = {process.communicate(timeout=600)[0] for process in both}
    assert sums == {f"{int(open_dataset('pathmnist').x.sum())}\n".encode()} and len(parsed(place)) == 1


def test_moments_of_many_images():
    x = images(3000, 2, 3, 3)
    mean, std = moments(x)
    np.testing.assert_allclose(mean, x.astype(float).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(std, x.astype(float).std((0, 2, 3)), rtol=1e-6)
    assert moments(np.full((4, 1, 2, 2), 7, np.uint8))[1].tolist() == [1.0]


# --- damaged bytes of every format: 1001 cases


@st.composite
def mutation(draw):
    """A change of some bytes, as a function of the whole: mostly near the ends, where the headers are."""
    kind = draw(st.sampled_from(["set", "set", "flip", "cut", "insert", "delete"]))
    near = draw(st.sampled_from(["begin", "begin", "end", "anywhere"]))
    place, byte, many = draw(st.integers(0, 400)), draw(st.integers(0, 255)), draw(st.integers(1, 8))
    share = draw(st.floats(0, 1))

    def change(raw):
        at = {"begin": place, "end": len(raw) - 1 - place, "anywhere": int(share * len(raw))}[near] % len(raw)
        new = bytearray(raw)
        if kind == "set":
            new[at : at + many] = bytes([byte]) * len(new[at : at + many])
        elif kind == "flip":
            new[at] ^= 1 << (byte % 8)
        elif kind == "cut":
            del new[at:]
        elif kind == "insert":
            new[at:at] = bytes([byte]) * many
        else:
            del new[at : at + many]
        return bytes(new)

    return change


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_bytes(kind, place):
    write, name = FORMATS[kind]
    paths = write(place)
    whole = [path.read_bytes() for path in paths]

    @settings(max_examples=143, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(paths) - 1), st.lists(mutation(), min_size=1, max_size=3))
    def refused_or_read(which, changes):
        raw = whole[which]
        for change in changes:
            raw = change(raw) if raw else raw
        paths[which].write_bytes(raw)
        try:
            data = open_dataset(name.format(place))
            assert isinstance(data, Dataset) and len(data.x) == len(data.y) and data.y.max() < data.classes
        except ValueError as why:
            assert "\n" not in str(why) and any(str(path) in str(why) for path in paths), str(why)
        finally:
            paths[which].write_bytes(whole[which])
            for folder in (place / "parsed").glob("*"):
                assert cache.load(folder) is not None
            assert not list((place / "parsed").glob(".*"))

    refused_or_read()


# --- downloads, from a server on this machine


class Server:
    """What it serves by path; the first `cuts` answers promise twice of what they send."""

    def __init__(self):
        self.files, self.asked, self.cuts = {}, [], 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                raw = outer.files.get(self.path)
                self.send_response(200 if raw is not None else 404)
                self.send_header("Content-Length", str(len(raw or b"") * (2 if outer.cuts else 1)))
                outer.cuts -= outer.cuts > 0
                self.end_headers()
                self.wfile.write(raw or b"")

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def server(monkeypatch):
    for word in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(word, raising=False)
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))  # between two attempts
    made = Server()
    yield made
    made.stop()


@pytest.fixture
def published(place, server, monkeypatch, tmp_path_factory):
    """PathMNIST, as small as ours, at the server."""
    raw = write_medmnist(tmp_path_factory.mktemp("published"))[0].read_bytes()
    server.files["/pathmnist.npz"] = raw
    download = Download(f"{server.url}/pathmnist.npz", hashlib.md5(raw).hexdigest(), "pathmnist.npz")
    monkeypatch.setitem(
        FILE_DATASETS, "pathmnist", replace(FILE_DATASETS["pathmnist"], downloads=(download,), train=18, test=9)
    )
    return raw


def test_fetch(place, server, published):
    told = []

    class Watch:
        total = 0

        def __init__(self, download):
            told.append(download.url)

        def update(self, n):
            told.append(n)

        def reset(self):
            pass

        def close(self):
            pass

    (path,) = fetch("pathmnist", Watch)
    assert path == place / "pathmnist.npz" and path.read_bytes() == published and len(told) > 1
    assert fetch("pathmnist") == [path] and server.asked == ["/pathmnist.npz"]  # not again
    path.write_bytes(published[:-1])
    fetch("pathmnist")
    assert path.read_bytes() == published and len(server.asked) == 2


def test_fetch_refuses_what_is_not_the_published_file(place, server, published):
    server.files["/pathmnist.npz"] = published + b"more"
    with pytest.raises(
        ValueError, match=r"the checksum is wrong, so the file was deleted; .*put that file at .*pathmnist.npz"
    ) as why:
        fetch("pathmnist")
    assert "\n" not in str(why.value) and list(place.iterdir()) == []


def test_fetch_when_the_connection_is_cut(place, server, published):
    server.cuts = 99
    with pytest.raises(
        ValueError, match=r"pathmnist: cannot download http://127.0.0.1.*: the connection was cut"
    ) as why:
        fetch("pathmnist")
    assert "\n" not in str(why.value) and list(place.iterdir()) == [] and len(server.asked) == 3


def test_fetch_goes_on_after_a_cut(place, server, published):
    server.cuts = 2
    (path,) = fetch("pathmnist")
    assert path.read_bytes() == published and len(server.asked) == 3


def test_fetch_without_a_server(place, server, published):
    del server.files["/pathmnist.npz"]
    with pytest.raises(ValueError, match=r"the server answers 404"):
        fetch("pathmnist")
    server.stop()
    with pytest.raises(ValueError, match=r"no connection; try later, or put that file at") as why:
        fetch("pathmnist")
    assert "\n" not in str(why.value) and list(place.iterdir()) == []
    (place / "pathmnist.npz").write_bytes(published)  # put there by hand
    assert fetch("pathmnist") == [place / "pathmnist.npz"]


@pytest.mark.parametrize("damage", [None, "link", "missing"])
def test_fetch_takes_only_what_it_expects_out_of_an_archive(place, server, monkeypatch, tmp_path_factory, damage):
    elsewhere = tmp_path_factory.mktemp("cifar")
    paths = write_cifar(elsewhere)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in paths[1:] if damage else paths:
            tar.add(path, f"cifar-10-batches-py/{path.name}")
        tar.add(paths[0], "../outside")
        tar.add(paths[0], "cifar-10-batches-py/another")
        if damage == "link":
            link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    server.files["/cifar.tar.gz"] = archive.getvalue()
    (official,) = FILE_DATASETS["cifar10"].downloads
    download = replace(official, url=f"{server.url}/cifar.tar.gz", md5=hashlib.md5(archive.getvalue()).hexdigest())
    monkeypatch.setitem(
        FILE_DATASETS, "cifar10", replace(FILE_DATASETS["cifar10"], downloads=(download,), train=15, test=3)
    )
    if damage:
        with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz: .*data_batch_1"):
            fetch("cifar10")
    else:
        fetch("cifar10")
        assert len(open_dataset("cifar10").y) == 15
        fetch("cifar10")
        assert len(server.asked) == 1
        names = sorted(p.name for p in (place / "cifar-10-batches-py").iterdir())
        assert names == sorted(p.name for p in paths) and not (place.parent / "outside").exists()


def test_what_cannot_be_fetched(place):
    for name, line in (("digits", "nothing to fetch"), ("femnist", "preprocess.sh"), ("nosuch", "unknown data set")):
        with pytest.raises(ValueError, match=line):
            fetch(name)


def test_every_source_has_a_checksum():
    for data in FILE_DATASETS.values():
        assert data.downloads or data.how, data.name
        for download in data.downloads:
            assert re.fullmatch("[0-9a-f]{32}", download.md5) and download.url.startswith("https://")


# --- the commands


def run(place, *words, **more):
    return fedda("data", *words, env=ENVIRONMENT | {"FEDDA_DATA": str(place)} | more, cwd=place)


def test_list_and_check(place):
    write_medmnist(place)
    write_cifar(place)[0].unlink()
    listed = run(place, "list")
    assert listed.returncode == 0 and not (place / "parsed").exists()  # nothing is read
    rows = {line.split("│")[1].strip(): line for line in listed.stdout.splitlines() if line.startswith("│")}
    assert "built in" in rows["digits"] and "1,438 + 359" in rows["digits"]
    assert "pathmnist.npz" in rows["pathmnist"] and "5 of 6 files" in rows["cifar10"] and "absent" in rows["mnist"]
    checked = run(place, "check", "pathmnist")
    assert checked.returncode == 0 and "18 for training, 9 for testing; 3x4x4 uint8" in checked.stdout
    assert "smooth muscle" in checked.stdout and "but not as published: 89,996" in checked.stdout


def test_check_reads_the_files_and_not_the_cache(place):
    path = write_npz(place, x=images(2000, 28, 28), y=np.arange(2000) % 3, client=None)[0]
    about = path.stat()
    open_dataset(str(path))
    raw = bytearray(path.read_bytes())
    raw[500_000] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    done = run(place, "check", "mine.npz")
    assert done.returncode == 2
    is_one_line(done.stderr, "mine.npz: is not a whole .npz file", "CRC")


def test_show(place):
    write_npz(place, x=images(90, 5, 5), y=np.arange(90) % 3, client=np.arange(90) % 65)
    done = run(place, "show", "mine.npz", "--partition", "by_client")
    assert done.returncode == 0 and Image.open(place / "mine.png").size[0] == 1650
    done = run(place, "show", "breast-cancer", "--partition", "dirichlet", "--option", "alpha=0.3", "--out", "a.png")
    assert done.returncode == 0 and Image.open(place / "a.png").size[0] == 1650


@pytest.mark.parametrize("words,fragments", [
    (["fetch", "pathmnist"], ["no connection", "pathmnist.npz"]),
    (["show", "digits", "--option", "alpha"], ["--option must be key=value"]),
    (["show", "digits", "--partition", "label_count", "--option", "labels=11"], ["label_count: labels must be a whole number from 1 to 10"]),
])  # fmt: skip
def test_mistakes_end_in_one_line(place, words, fragments):
    done = run(place, *words, HTTPS_PROXY="http://127.0.0.1:9")
    assert done.returncode == 2
    is_one_line("".join(line for line in done.stderr.splitlines(True) if not line.startswith("fetching")), *fragments)


# --- real data


@pytest.fixture
def real(monkeypatch):
    def chosen(name):
        place = realdata.folder(name)
        monkeypatch.setenv("FEDDA_DATA", str(place))

    return chosen


def test_real_cifar10(real):
    real("cifar10")
    data = open_dataset("cifar10", fresh=True)
    again = open_dataset("cifar10")
    same((again.y, again.x[::1000]), (data.y, data.x[::1000]))
    assert data.y[:5].tolist() == [6, 9, 9, 4, 1] and data.x.shape == (50000, 3, 32, 32)
    assert np.bincount(data.y).tolist() == [5000] * 10 and np.bincount(data.y_test).tolist() == [1000] * 10
    np.testing.assert_allclose(data.mean / 255, [0.4914, 0.4822, 0.4465], atol=1e-4)  # as everybody knows them
    np.testing.assert_allclose(data.std / 255, [0.2470, 0.2435, 0.2616], atol=1e-4)
    owner = split("dominant_class", data.y, 10, rho=0.8)
    table = np.bincount(owner[owner >= 0] * 10 + data.y[owner >= 0]).reshape(10, 10)
    assert (np.diag(table) == 4000).all() and (table[~np.eye(10, dtype=bool)] == 111).all()


def read_leaf(folder):
    """LEAF's files, read without a thought of speed or of mistakes."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        for user in content["users"]:
            samples = content["user_data"][user]
            for pixels, label in zip(samples["x"], samples["y"], strict=True):
                rows.append((user, label, bytes(int(255 * p + 0.5) for p in pixels)))
    return rows


def test_real_femnist(real):
    real("femnist")
    data = open_dataset("femnist", fresh=True)
    folder = realdata.folder("femnist") / "femnist" / "data"
    writers, total = set(), 0
    for part, who, y, x in (
        ("test", data.client_test, data.y_test, data.x_test),
        ("train", data.client, data.y, data.x),
    ):
        rows = read_leaf(folder / part)
        ours = zip(who, y, x, strict=True)
        assert len(rows) > 500
        assert [(str(name), int(label), image.tobytes()) for name, label, image in ours] == rows
        writers, total = writers | {row[0] for row in rows}, total + len(rows)
    assert data.classes == 62 == len(data.names) and len(writers) >= 60
    anew = data.resplit()
    assert len(anew.y) + len(anew.y_test) == total and anew.shift() < 0.1 < data.shift()
    assert len(np.unique(anew.client)) == len(writers)  # an owner of one image keeps it


def test_real_mnist_by_writer(real):
    real("mnist")
    data = open_dataset("mnist-writers", fresh=True)
    with np.load(realdata.folder("mnist") / "mnist-by-writer.npz") as file:
        assert np.bincount(data.y).tolist() == np.bincount(file["y"]).tolist()
        np.testing.assert_array_equal(data.x[:, 0], file["x"])
    assert np.bincount(data.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.x.shape == (60000, 1, 28, 28) and len(data.y_test) == 10000 and len(np.unique(data.client)) == 539
    assert data.y[:5].tolist() == [5, 0, 4, 1, 9]
    owner = split("by_client", data.y, 539, client=data.client)
    assert (np.bincount(owner) == np.unique(data.client, return_counts=True)[1]).all()


def test_real_colon(real):
    real("crchisto")
    data, patients = open_dataset("colon", fresh=True), open_dataset("colon-patients", fresh=True)
    assert data.x.shape[1:] == patients.x.shape[1:] == (3, 27, 27) and data.classes == patients.classes == 4
    assert len(patients.y) + len(patients.y_test) == 9896
    assert len(np.unique(patients.client)) == 48  # of 60; the other twelve are the test part
    with np.load(realdata.folder("crchisto") / "crchisto.npz") as file:
        np.testing.assert_array_equal(data.x, file["train_images"].transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(data.y_test, file["test_labels"][:, 0])
