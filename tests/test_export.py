"""A trained model as a file: read back without fedda, it scores what the history says; predictions for new samples."""

import csv
import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import fedda
from commands import inside, is_one_line
from fedda.data import open_dataset
from fedda.experiments import find, run
from fedda.experiments.overrides import override
from fedda.progress import Silence
from fedda.runs.toml import dumps
from test_tables import table

PLUGIN = '''
from torch import nn
from torch.nn import functional as F
from fedda import registry


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a weight that is used twice."""

    def __init__(self, classes):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(64, classes)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2).flatten(1)
        return self.out(self.dropout(F.relu(self.second(F.relu(self.first(h))))))


@registry.models.register("own-net")
def own_net(shape, classes):
    """A network of one's own."""
    return Net(classes), F.cross_entropy
'''

READER = """
import io, json, sys
sys.modules["fedda"] = None  # an import of it would fail
import numpy as np, torch
arrays = np.load("digits.npz")
x, y = arrays["x_test"], arrays["y_test"]
saved = torch.load("model.pt")
model = torch.export.load(io.BytesIO(saved["program"])).module()
images = torch.from_numpy(x)[:, None]
score = lambda out: float((np.array(saved["classes"])[np.asarray(out).argmax(1)] == y).mean())
with torch.no_grad():
    scores = {"pt": score(model(images)), "one": score(torch.cat([model(images[i : i + 1]) for i in range(len(x))]))}
if len(sys.argv) > 1:
    import onnxruntime
    session = onnxruntime.InferenceSession("model.onnx")
    assert session.get_modelmeta().custom_metadata_map["classes"] == json.dumps(saved["classes"])
    scores["onnx"] = score(session.run(None, {"x": images.numpy()})[0])
print(json.dumps(scores))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on images of bytes with text labels, a network from a plugin, two seeds, two algorithms, validation."""
    folder = tmp_path_factory.mktemp("own")
    data = open_dataset("digits")
    x, x_test = (np.round(part[:, 0] * 255).astype(np.uint8) for part in (data.x, data.x_test))
    y, y_test = (np.char.add("digit ", part.astype(str)) for part in (data.y, data.y_test))
    np.savez(folder / "digits.npz", x=x, y=y, x_test=x_test, y_test=y_test)
    (folder / "net.py").write_text(PLUGIN)
    problem = {"data": "digits.npz", "clients": 4, "model": "own-net", "batch": 8, "validation": 0.2}
    algorithms = {"fedavg": {"lr": 0.2}, "again": {"name": "fedavg", "lr": 0.02}}
    table = {"name": "own", "rounds": 12, "every": 4, "seeds": [3, 5], "plugin": ["net.py"]}
    (folder / "own.toml").write_text(dumps(table | {"problem": problem, "algorithms": algorithms}))
    run(find(str(folder / "own.toml")), folder / "run", Silence())
    return folder


def rows_of(folder, **wanted):
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if wanted.items() <= row.items()]


def test_a_model_file_scores_what_the_history_says_without_fedda(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    formats = ["pt"] + ["onnx"] * all(importlib.util.find_spec(m) is not None for m in ("onnxruntime", "onnxscript"))
    for name in formats:
        code, out, err = inside(
            capsys, monkeypatch, "export", "run", "--algorithm", "fedavg", "--seed", 5, "--out", f"model.{name}"
        )
        assert (code, err) == (0, "") and out == f"model.{name}: fedavg, seed 5 (of 3, 5), round 12\n"
    [last] = rows_of(trained, algorithm="fedavg", seed=5, round=12)
    end = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", READER, *formats[1:]],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert end.returncode == 0, end.stderr
    scores = json.loads(end.stdout)
    assert set(scores.values()) == {last["test_accuracy"]} and len(scores) == len(formats) + 1
    if len(formats) == 1:
        pytest.skip("onnxruntime or onnxscript is missing")


def test_the_best_model_is_exported(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    inside(capsys, monkeypatch, "export", "run", "--algorithm", "again", "--best", "--out", "best.safetensors")
    rows = rows_of(trained, algorithm="again", seed=3)
    top = max(rows, key=lambda row: row["validation_accuracy"])
    with safe_open("best.safetensors", "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = {name: json.loads(text) for name, text in file.metadata().items() if name != "format"}
    net = sys.modules["fedda_plugin_net"].Net(10)
    net.load_state_dict(state)
    with np.load("digits.npz") as file:
        arrays = dict(file)
    x = (torch.from_numpy(arrays["x_test"])[:, None] - torch.tensor(about["mean"])) / torch.tensor(about["std"])
    with torch.no_grad():
        right = np.array(about["classes"])[net.eval()(x).argmax(1)] == arrays["y_test"]
    assert right.mean() == top["test_accuracy"] and "columns" not in about


def test_predictions_of_images_are_names_of_classes(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained)
    with np.load("digits.npz") as file:
        arrays = dict(file)
    np.savez("new.npz", x=arrays["x_test"])  # without targets
    for i, image in enumerate(arrays["x_test"][:3]):
        (trained / "pictures").mkdir(exist_ok=True)
        Image.fromarray(image).save(trained / "pictures" / f"{i}.png")
    written = {}
    for data in ("new.npz", "pictures"):
        code, _, err = inside(
            capsys, monkeypatch, "predict", "run", "--data", data, "--algorithm", "fedavg", "--out", "out.csv"
        )
        assert (code, err) == (0, "")
        with open("out.csv", newline="") as file:
            written[data] = list(csv.DictReader(file))
    [last] = rows_of(trained, algorithm="fedavg", seed=3, round=12)
    right = [row["prediction"] == label for row, label in zip(written["new.npz"], arrays["y_test"], strict=True)]
    assert np.mean(right) == last["test_accuracy"]
    assert all(0.1 < float(row["probability"]) <= 1 for row in written["new.npz"])
    assert [row["file"] for row in written["pictures"]] == ["0.png", "1.png", "2.png"]
    assert [r["prediction"] for r in written["pictures"]] == [r["prediction"] for r in written["new.npz"][:3]]


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["export", "run", "--out", "a.pt"], ["fedavg, again", "--algorithm"]),
        (["export", "run", "--algorithm", "fedavgg", "--out", "a.pt"], ["did you mean 'fedavg'"]),
        (["export", "run", "--algorithm", "again", "--seed", "4", "--out", "a.pt"], ["--seed", "3, 5", "got 4"]),
        (["export", "run", "--algorithm", "again", "--out", "a.bin"], [".pt, .safetensors or .onnx"]),
        (["export", "run", "--algorithm", "again", "--client", "0", "--out", "a.pt"], ["personal", "leave out client"]),
        (["export", "plain", "--algorithm", "again", "--best", "--out", "a.pt"], ["plain", "validation = 0.1"]),
        (["export", "nowhere", "--out", "a.pt"], ["nowhere", "holds no run"]),
        (["export", "run", "--algorithm", "again", "--out", "no/a.pt"], ["no/a.pt", "the folder no does not exist"]),
        (["predict", "run", "--algorithm", "again", "--data", "new.npz", "--out", "a.xls"], ["a.xls", "end in .csv"]),
        (["predict", "run", "--algorithm", "again", "--data", "none.npz", "--out", "a.csv"], ["none.npz", "no such"]),
        (["predict", "run", "--algorithm", "again", "--data", "small.npz", "--out", "a.csv"], ["[1, 8, 8]", "[1, 4, 4]"]),
        (["predict", "run", "--algorithm", "again", "--data", "floats.npz", "--out", "a.csv"], ["uint8", "float64"]),
        (["predict", "run", "--algorithm", "again", "--data", "t.csv", "--out", "a.csv"], ["t.csv", ".npz file"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(trained, capsys, monkeypatch, words, fragments):
    monkeypatch.chdir(trained)
    np.savez("small.npz", x=np.zeros((2, 4, 4), np.uint8))
    np.savez("floats.npz", x=np.zeros((2, 1, 8, 8)))
    (trained / "t.csv").write_text("a\n1\n")
    if "plain" in words:
        run(override(find("own.toml"), 1, "again", settings=["problem.validation="]), trained / "plain", Silence())
    code, _, err = inside(capsys, monkeypatch, *words)
    assert code == 2 and not any(trained.glob("a.*"))
    is_one_line(err, *fragments)


def test_a_table_is_predicted_by_the_names_of_its_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "houses.csv", rows=60)
    problem = {"data": "houses.csv", "target": "price", "client": "city", "model": "mlp", "hidden": [4]}
    (tmp_path / "t.toml").write_text(
        dumps({"name": "t", "rounds": 2, "problem": problem, "algorithms": {"fedavg": {"lr": 1e-13}}})
    )
    folder = tmp_path / "run"
    run(find("t.toml"), folder, Silence())
    lines = (tmp_path / "houses.csv").read_text().splitlines()
    area, rooms, kind = zip(*(line.split(",")[:3] for line in lines[1:]), strict=True)
    new = ["kind;id;rooms;area;price", *(f" {k} ;;{r};{a};" for k, r, a in zip(kind, rooms, area, strict=True))]
    (tmp_path / "new.csv").write_text("\n".join(new))  # another order, other columns, no target
    columns = {"area": list(map(float, area)), "rooms": list(map(int, rooms)), "kind": list(kind)}
    names = ["new.csv"]
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), tmp_path / "new.parquet")
        names.append("new.parquet")
    problem = fedda.load("houses.csv", target="price", client="city", model="mlp", hidden=[4])
    for name in names:
        assert inside(capsys, monkeypatch, "predict", "run", "--data", name, "--out", "p.csv")[0] == 0
        with open("p.csv", newline="") as file:
            got = np.array([float(row["prediction"]) for row in csv.DictReader(file)])
        inside(capsys, monkeypatch, "export", "run", "--out", "m.pt")
        saved = torch.load("m.pt")
        assert saved["columns"] == [["area", None], ["rooms", None], ["kind", ["flat", "house"]]]
        x = torch.tensor(
            [[float(a), int(r), k == "flat", k == "house"] for a, r, k in zip(area, rooms, kind, strict=True)]
        )
        network = problem.model
        network.load_state_dict(saved["state_dict"])
        with torch.no_grad():
            np.testing.assert_allclose(got, network((x - saved["mean"]) / saved["std"]).numpy(), rtol=1e-5)
    for change, fragments in (
        (("rooms", "Rooms"), ["new.csv", "no column 'rooms'"]),
        ((" flat ", "tent"), ["'kind'", "'tent'", "flat"]),
        ((";2;", ";many;"), ["'rooms'", "numbers"]),
        ((";2;", ";;"), ["no value for 'rooms'"]),
    ):
        (tmp_path / "new.csv").write_text("\n".join(new).replace(*change))
        code, _, err = inside(capsys, monkeypatch, "predict", "run", "--data", "new.csv", "--out", "q.csv")
        assert code == 2 and not (tmp_path / "q.csv").exists()
        is_one_line(err, *fragments)


def test_python_writes_the_same_file(tmp_path):
    x, y = torch.randn(60, 3), torch.randint(0, 2, (60,))
    problem = fedda.problem(nn.Linear(3, 2), F.cross_entropy, x=x, y=y, client=torch.arange(60) % 3, validation=0.2)
    result = fedda.train(fedda.make("fedavg", lr=0.5), problem, rounds=3, seed=[1, 2])
    for one, name in ((result, "last"), (result.best, "best")):
        saved = torch.load(fedda.export(one, tmp_path / f"{name}.pt", seed=2))
        for key, value in one.state_dict(seed=2).items():
            assert torch.equal(saved["state_dict"][key], value)
        assert saved["classes"] is saved["mean"] is None
    with pytest.raises(ValueError, match="seed must be one of 1, 2, got 0"):
        fedda.export(result, tmp_path / "a.pt", seed=0)


class Outputs(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.inner, self.form = nn.Linear(3, 2), form

    def forward(self, x):
        logits = self.inner(x)
        return {"logits": logits, "x": x + 0} if self.form is dict else (logits, x + 0)


@pytest.mark.parametrize(("form", "names"), [(dict, ["output_logits", "output_x"]), (tuple, ["output0", "output1"])])
def test_several_outputs_have_names_in_onnx(tmp_path, form, names):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    first = "logits" if form is dict else 0
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    problem = fedda.problem(Outputs(form), lambda output, y: F.cross_entropy(output[first], y), x=x, y=y)
    result = fedda.train(fedda.make("fedavg"), problem, rounds=1)
    session = onnxruntime.InferenceSession(fedda.export(result, tmp_path / "a.onnx"))
    assert [output.name for output in session.get_outputs()] == names
    [logits] = session.run(names[:1], {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(logits, result.model()(x)[first].numpy(), rtol=1e-4, atol=1e-6)


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) if bool(x.sum() > -1e9) else x[:, :2]


def test_a_model_that_cannot_be_a_program_keeps_its_weights(tmp_path):
    x, y = torch.randn(20, 3), torch.randint(0, 2, (20,))
    result = fedda.train(fedda.make("fedavg"), fedda.problem(Branches(3, 2), F.cross_entropy, x=x, y=y), rounds=1)
    with pytest.warns(UserWarning, match="holds its weights alone"):
        saved = torch.load(fedda.export(result, tmp_path / "a.pt"))
    assert saved["program"] is None and torch.equal(saved["state_dict"]["weight"], result.state_dict()["weight"])


def test_the_model_of_one_client_is_exported_and_predicts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = {"data": "digits", "clients": 3, "model": "mlp", "hidden": [4], "personal": "3.*", "validation": 0.2}
    table = {"name": "t", "rounds": 3, "problem": problem, "algorithms": {"fedavg": {"lr": 0.2}}}
    (tmp_path / "t.toml").write_text(dumps(table))
    run(find("t.toml"), tmp_path / "run", Silence())
    data = open_dataset("digits")
    np.savez("new.npz", x=data.x_test)
    states = {}
    for client in ("0", "2"):
        words = ("run", "--client", client, "--out")
        assert inside(capsys, monkeypatch, "export", *words, "m.safetensors")[0] == 0
        assert inside(capsys, monkeypatch, "predict", *words, "p.csv", "--data", "new.npz")[0] == 0
        states[client] = load_file("m.safetensors")
        network = find("t.toml").problem.build().model
        network.load_state_dict(states[client])
        with torch.no_grad():
            wanted = network(torch.from_numpy(data.x_test)).argmax(1).tolist()
        with open("p.csv", newline="") as file:
            assert [int(row["prediction"]) for row in csv.DictReader(file)] == wanted
    different = {name for name in states["0"] if not torch.equal(states["0"][name], states["2"][name])}
    assert different == {"3.weight", "3.bias"}
