"""Tables as data sets: columns of every kind, and one clear line for what cannot be used."""

import re
import warnings

import numpy as np
import pytest
import torch

import fedda
from commands import inside
from fedda.data import open_dataset
from fedda.data.files import BadFile
from fedda.data.tables import read_table
from fedda.experiments.config import ProblemTable


def table(path, rows=40, separator=",", **changes):
    random = np.random.default_rng(0)
    columns = {
        "area": [f"{v:.2f}" for v in random.uniform(20, 200, rows)],
        "rooms": [str(v) for v in random.integers(1, 6, rows)],
        "kind": [("flat", "house")[v] for v in random.integers(0, 2, rows)],
        "city": [("Ulm", "Bonn", "Kiel")[i % 3] for i in range(rows)],
        "price": [f"{v:.1f}" for v in random.uniform(1e5, 9e5, rows)],
    } | changes
    lines = [separator.join(columns), *(separator.join(row) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_numbers_texts_clients_and_a_target(tmp_path, separator):
    data = read_table(table(tmp_path / "a.csv", separator=separator), "price", "city")
    assert data.x.shape == (34, 4) and data.x_test.shape == (6, 4)  # area, rooms, flat, house
    assert data.y.dtype == np.float32 and data.classes == 0 and data.names is None
    assert set(data.client) == set(data.client_test) == {"Ulm", "Bonn", "Kiel"}
    np.testing.assert_array_equal(data.x[:, 2] + data.x[:, 3], 1)
    np.testing.assert_allclose(((data.x - data.mean) / data.std).mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(((data.x - data.mean) / data.std).std(axis=0), 1, atol=1e-5)


def test_classes_are_texts_or_whole_numbers(tmp_path):
    data = read_table(table(tmp_path / "a.csv"), "kind")
    assert data.names == ("flat", "house") and data.classes == 2 and set(data.y) == {0, 1} and data.client is None
    assert read_table(tmp_path / "a.csv", "rooms").names == ("1", "2", "3", "4", "5")


def test_parquet_is_read_like_csv(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    path = table(tmp_path / "a.csv")
    parquet.write_table(csv.read_csv(path), tmp_path / "a.parquet")
    one, other = read_table(path, "price", "city"), read_table(tmp_path / "a.parquet", "price", "city")
    np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(one.client, other.client)
    rows = {"a": [1, None, *range(10)], "b": [1.0, 2.0, float("nan"), *range(9)], "c": [None, *"xyxyxyxyxyx"]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "b.parquet")
    with pytest.raises(BadFile) as raised:
        read_table(tmp_path / "b.parquet", "b")
    assert (
        "no value for 'a' (1, the first in row 2), 'b' (1, the first in row 3), 'c' (1, the first in row 1); fill them in, "
        'or leave out the rows: missing="drop", or the columns: ignore=["a", "b", "c"]'
    ) in str(raised.value)
    with pytest.warns(UserWarning, match="3 of 12 rows have a gap and are left out"):
        data = read_table(tmp_path / "b.parquet", "a", missing="drop")
    assert data.classes == 9 and len(data.y) + len(data.y_test) == 9  # whole numbers stay whole


@pytest.mark.parametrize(
    ("changes", "target", "client", "message"),
    [
        ({}, None, None, 'which column is the target? target="..." names it; there are area, rooms, kind, city, price'),
        ({}, "prize", None, "there is no column 'prize'; did you mean 'price'?"),
        ({}, "price", "town", "there is no column 'town'"),
        ({"rooms": ["", *["2"] * 39]}, "price", None, "no value for 'rooms' (1, the first in line 2); fill them in, or"),
        ({"area": [*["2"] * 39, "nan"]}, "price", None, 'line 41: \'nan\'); fill them in, or leave out the rows: missing="drop", or the columns: ignore="area"'),
        ({"area": [*["2"] * 39, "inf"]}, "price", None, "area must be finite numbers, row 40 is not"),
        ({"price": [*["2.0"] * 39, "-inf"]}, "price", None, "price must be finite numbers, row 40 is not"),
        ({"kind": ["a", *["2"] * 38]}, "price", None, "line"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(tmp_path, changes, target, client, message):
    if message == "line":
        path = tmp_path / "a.csv"
        path.write_text("a,b\n1,2\n3\n")
        message = "line 3 has 1 entries, the first line has 2"
    else:
        path = table(tmp_path / "a.csv", **changes)
    with pytest.raises(BadFile) as raised:
        read_table(path, target, client)
    assert str(raised.value).startswith(str(path)) and message in str(raised.value) and "\n" not in str(raised.value)


def test_identifiers_are_not_features_or_classes(tmp_path):
    many = [str(i) for i in range(200)]
    path = table(tmp_path / "a.csv", rows=200, name=[f"n{i}" for i in many], number=many)
    with pytest.raises(
        BadFile, match=r"'name' \(200 different texts\); ignore=\"name\" leaves them out, client=\.\.\. makes"
    ):
        read_table(path, "price")
    with pytest.raises(BadFile, match='number has 200 different values in 200 rows; task="regression" takes it as'):
        read_table(path, "number")
    with pytest.raises(BadFile, match="name has 200 different values in 200 rows; a class needs several rows"):
        read_table(path, "name")
    nearly = table(tmp_path / "b.csv", rows=200, number=[*many[:-1], "12 kg"])
    with pytest.raises(BadFile, match=r"'number' \(numbers except '12 kg'\)"):
        read_table(nearly, "price")


def test_rows_with_gaps_are_left_out_if_asked(tmp_path):
    gaps = {"area": ["", "NA", *["2.5"] * 38], "kind": ["flat", "none", "None", *["none"] * 37]}
    path = table(tmp_path / "a.csv", **gaps)
    with pytest.raises(BadFile) as raised:
        read_table(path, "price", "city")
    assert "'area' (2, the first in line 2), 'kind' (1, the first in line 4: 'None')" in str(raised.value)
    wanted = {"data": str(path), "target": "price", "client": "city", "missing": "drop"}
    with pytest.warns(UserWarning, match="3 of 40 rows have a gap and are left out"):
        data = read_table(path, "price", "city", missing="drop")
    assert len(data.y) + len(data.y_test) == 37 and dict(data.columns)["kind"] == ("none",)
    with pytest.warns(UserWarning, match="3 of 40 rows"):
        assert ProblemTable(**wanted).build().columns == data.columns
    for changes, message in (
        ({"missing": "fill"}, "missing must be 'refuse' or 'drop', got 'fill'"),
        ({"task": "ranking"}, "task must be 'regression' or 'classes', got 'ranking'"),
    ):
        with pytest.raises(ValueError, match=message):
            fedda.load(str(path), target="price", client="city", **changes)
    with pytest.raises(BadFile, match="every row has a gap"):
        read_table(table(tmp_path / "b.csv", area=[""] * 40), "price", missing="drop")


def test_a_task_says_what_whole_numbers_are(tmp_path):
    path = table(tmp_path / "a.csv")
    data = read_table(path, "rooms", task="regression")
    assert data.y.dtype == np.float32 and data.classes == 0 and set(data.y) <= {1, 2, 3, 4, 5}
    with pytest.warns(
        UserWarning, match='rooms has the whole numbers 1 to 5, .*; task="regression" takes it as a number'
    ):
        read_table(path, "rooms")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_table(path, "rooms", task="classes").names == ("1", "2", "3", "4", "5")
    with pytest.raises(BadFile, match=r"kind must be numbers for task=\"regression\", got text: '"):
        read_table(path, "kind", task="regression")


def test_a_table_as_a_spreadsheet_writes_it(tmp_path):
    plain, path = table(tmp_path / "a.csv", city=["Köln", "Ulm"] * 20), tmp_path / "b.csv"
    text = "\ufeff" + plain.read_text("utf-8").replace(",", ";").replace(".", ",").replace("\n", "\r\n")
    path.write_text(text, encoding="utf-8", newline="")
    one, other = read_table(plain, "price", "city"), read_table(path, "price", "city")
    assert one.columns == other.columns
    for left, right in zip(one[:4], other[:4], strict=True):
        np.testing.assert_array_equal(left, right)
    path.write_text(text, encoding="utf-16")
    with pytest.raises(BadFile, match="is not text in UTF-8; save it in this encoding"):
        read_table(path, "price", "city")


def test_columns_are_ignored(tmp_path):
    days = [f"2024-{1 + i // 28:02d}-{1 + i % 28:02d}" for i in range(200)]
    path = table(tmp_path / "a.csv", rows=200, day=days, note=["", *["x"] * 199])
    with pytest.raises(BadFile, match=r"'day' \(200 different texts\); ignore=\"day\" leaves them out"):
        read_table(path, "price", "city", "note")
    assert [name for name, _ in read_table(path, "price", "city", ["day", "note"]).columns] == ["area", "rooms", "kind"]
    problem = fedda.load(str(path), target="price", client="city", ignore=["day", "note", "kind"])
    wanted = {"data": str(path), "target": "price", "client": "city", "ignore": ["day", "note", "kind"]}
    assert ProblemTable(**wanted).build().columns == problem.columns == (("area", None), ("rooms", None))
    for ignore, message in (
        ("days", "there is no column 'days'; did you mean 'day'"),
        (["day", "note", "price"], "'price' is the target or the client and cannot be ignored"),
        (["day", "note", "area", "rooms", "kind"], "there is no column besides the target and the client"),
        (3, "ignore must be the name of a column or a list of names, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            fedda.load(str(path), target="price", client="city", ignore=ignore)


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_regression_by_client_from_python_and_toml(tmp_path, model):
    path = table(tmp_path / "a.csv", rows=90)
    problem = fedda.load(str(path), target="price", client="city", model=model, batch=8)
    assert problem.clients == 3
    result = fedda.train(fedda.make("fedavg", lr=1e-12), problem, rounds=2)
    row = result.history[-1]
    assert row["train_loss"] > 1e9 and "train_accuracy" not in row and row["test_loss"] > 1e9
    module, raw = result.model(), torch.as_tensor(read_table(path, "price", "city").x_test)
    assert float(((module(raw) - problem.test.y) ** 2).mean()) == pytest.approx(row["test_loss"], rel=1e-5)
    wanted = {"data": str(path), "target": "price", "client": "city", "model": model, "batch": 8}
    built = ProblemTable(**wanted).build()
    assert built.clients == 3 and ProblemTable(**wanted).completed()["partition"] == "by_client"


def test_a_module_of_ones_own_on_a_table(tmp_path):
    path = table(tmp_path / "a.csv", rows=90)
    module = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    problem = fedda.load(str(path), target="price", client="city", model=module, loss=torch.nn.functional.mse_loss)
    assert problem.d == 5 and torch.equal(problem.start(3), problem.point())
    for options, line in (
        ({"model": module}, "a module needs its loss"),
        ({"loss": torch.nn.functional.mse_loss}, "a model by name has its own"),
        ({"partition": "dirichlet", "client": None}, "dirichlet divides by class, so y must be whole numbers or texts, got float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=line):
            fedda.load(str(path), target="price", **{"client": "city"} | options)
    with pytest.raises(
        ValueError, match="target, client, ignore, missing and task are for tables, and this data set is not"
    ):
        fedda.load("digits", target="price")


def test_partitions_by_class_refuse_numbers():
    y = np.linspace(0, 1, 100)
    with pytest.raises(ValueError, match=r"dirichlet divides by class.*quantiles"):
        fedda.partition(y, "dirichlet", clients=4)
    assert len(fedda.partition(y, "iid", clients=4)) == 100
    for name in ("dirichlet", "dominant_class", "label_count"):
        owners = [
            fedda.partition(classes, name, clients=4)
            for classes in (np.arange(99) % 2, ["cat", "dog", *["cat", "dog"] * 48, "cat"])
        ]
        np.testing.assert_array_equal(*owners)
    quantiles = np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))
    assert set(fedda.partition(quantiles, "dirichlet", clients=4, alpha=0.3)) == {0, 1, 2, 3}


def test_numbers_in_an_npz_file_are_a_table_for_regression(tmp_path):
    random = np.random.default_rng(0)
    x = random.normal(size=(90, 3)) * [1, 1e3, 1e5] + [0, 5e3, 0]
    np.savez(tmp_path / "mine.npz", x=x, y=x[:, 0], client=np.arange(90) % 3)
    problem = fedda.load(str(tmp_path / "mine.npz"), partition="by_client", model="logistic", metrics=["r2"])
    everything = problem.standardised(problem.pick(problem.data, slice(None))).x
    torch.testing.assert_close(everything.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(everything.std(0, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    result = fedda.train(fedda.make("fedavg", lr=0.1), problem, rounds=40)
    assert result.history[-1]["test_r2"] > 0.99 and "test_accuracy" not in result.history[-1]
    raw = open_dataset(str(tmp_path / "mine.npz"))
    error = ((result.model()(torch.as_tensor(raw.x_test)) - torch.as_tensor(raw.y_test)) ** 2).mean()
    assert float(error) == pytest.approx(result.history[-1]["test_loss"], rel=1e-4)


def test_classes_saved_as_floats_and_large_targets_are_said(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.eye(30), y=np.arange(30) % 3 * 1.0)
    with pytest.warns(UserWarning, match=r"y has 3 different values of type float64: this is taken as regression"):
        fedda.load(str(tmp_path / "mine.npz"), clients=2, model="logistic")
    path = table(tmp_path / "a.csv")
    with pytest.warns(UserWarning, match=r"the targets have a deviation of .*: divide them"):
        fedda.load(str(path), target="price", client="city")


@pytest.mark.parametrize(("target", "shown"), [("price", "e+05 to "), ("kind", "house")])
def test_tables_are_checked_and_drawn(tmp_path, capsys, monkeypatch, target, shown):
    path, picture = table(tmp_path / "a.csv"), tmp_path / "a.png"
    code, stdout, _ = inside(capsys, monkeypatch, "data", "check", path, "--target", target, "--client", "city")
    assert code == 0 and "columns: standardised" in stdout and "clients (training): 3" in stdout and shown in stdout
    words = ("data", "check", path, "--target", target, "--client", "city", "--ignore", "area")
    fewer = inside(capsys, monkeypatch, *words)[1]
    columns = [int(re.search(r"; (\d+) float32", text)[1]) for text in (stdout, fewer)]
    assert columns[1] == columns[0] - 1 and "area" in stdout and "area" not in fewer
    words = ("data", "show", path, "--target", target, "--client", "city", "--out", picture)
    assert inside(capsys, monkeypatch, *words)[0] == 0 and picture.read_bytes()[1:4] == b"PNG"
