"""`fedda deploy`: the app that it writes, keys, one process, a Strategy for other apps, the four hospitals."""

import json
import os
import re
import shlex
import ssl
import stat
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import fields
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch

import fedda
from commands import ENVIRONMENT, inside, is_one_line
from conftest import close
from fedda import rng

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.cli.build import build_fab_from_disk
from flwr.cli.supernode.register import try_load_public_key
from flwr.clientapp import ClientApp

from fedda.deploy import InProcessGrid, Site, Strategy, join, trained
from fedda.deploy.init import TEMPLATES, init
from fedda.deploy.keys import make_keys
from fedda.deploy.server import Plan, serve
from fedda.deploy.simulate import configuration, simulate
from flowers import replayed, secret_of

ROOT = Path(__file__).parent.parent
HOSPITALS = ROOT / "examples" / "hospitals"
LOSS = torch.nn.functional.cross_entropy


@pytest.fixture
def said(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: inside(capsys, monkeypatch, "deploy", *arguments)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    place = tmp_path_factory.mktemp("apps") / "my-sites"
    init(place, 3)
    return place


def rows(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def state(out):
    from safetensors.torch import load_file

    return load_file(Path(out) / "state.safetensors")


# -- the app ----------------------------------------------------------------------------------------------------------
def test_the_app_has_every_setting_and_only_its_package_travels(app):
    config, _, components = configuration(app, [])
    assert [word.replace("-", "_") for word in config] == [field.name for field in fields(Plan)]
    assert Plan.of(config) == Plan(
        algorithm="fedda-mvr", params='{"lr": 0.08, "w": 1000.0, "steps": 5}', rounds=30, clients=3, participants="keys"
    )
    assert set(components.values()) == {"my_sites_app.server_app:app", "my_sites_app.client_app:app"}
    project = tomllib.loads((app / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    # What lies beside the package stays at home: above all the keys.
    make_keys(app / "keys", ["localhost"], [0])
    for folder, name in (("federation", "metrics.jsonl"), (".flwr", "config.toml"), ("keys", "note.md")):
        (app / folder).mkdir(exist_ok=True)
        (app / folder / name).write_text("{}")
    with zipfile.ZipFile(BytesIO(build_fab_from_disk(app))) as fab:
        names = {name for name in fab.namelist() if not name.startswith(".info/")}
    own = {f"my_sites_app/{name}.py" for name in ("__init__", "task", "client_app", "server_app")}
    assert names == own | {"pyproject.toml"}


def test_the_scripts_are_safe_unless_told_otherwise(app):
    for name in ("superlink.sh", "register.sh", "supernode.sh", "try.sh", "env.sh"):
        assert subprocess.run(["sh", "-n", app / name], check=False).returncode == 0
        assert "@" not in (app / name).read_text().replace('"$@"', "")
        assert os.access(app / name, os.X_OK) == (name != "env.sh")
    for switch in ("TELEMETRY_ENABLED=0", "DISABLE_UPDATE_CHECK=1", "DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"):
        assert f"FLWR_{switch}" in (app / "env.sh").read_text()


def test_the_page_of_the_app_names_what_is_there(app, said):
    text = (app / "README.md").read_text()
    assert "@" not in text and "(0 to 2)" in text
    for name in re.findall(r"[\w./]*\w\.(?:sh|py|toml|conf)\b|Caddyfile", text):
        assert (app / name).exists(), name
    (first, second) = re.findall(r"^```sh\n(.*)\n```", text, re.M)
    assert second == './try.sh "rounds=2"'  # the guide's own command, run by its test
    os.chdir(app)
    assert first.startswith("fedda deploy ") and said(*shlex.split(first)[2:])[0] == 0
    assert rows("simulation")[-1]["round"] == 5


def started(app, tmp_path, *arguments, **environment):
    """What a script would start, seen by commands that only say what they were given."""
    for name in ("flower-superlink", "flower-supernode", "fedda"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$@"\n' + ('exit "${CLOCK:-0}"\n' if name == "fedda" else ""))
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    how = {"capture_output": True, "text": True, "check": False, "env": {"PATH": path, **environment}}
    return subprocess.run([app / arguments[0], *arguments[1:]], **how)


def test_what_the_scripts_start(app, tmp_path):
    (app / "keys").mkdir(exist_ok=True)
    for name in ("ca.key", "ca.crt", "server.crt", "server.key", "node0", "node2"):
        (app / "keys" / name).touch()
    link = started(app, tmp_path, "superlink.sh")
    assert link.stderr.startswith("WARNING: keys/ca.key is here: move it to a place offline")
    (app / "keys" / "ca.key").unlink()
    link = started(app, tmp_path, "superlink.sh")
    assert "--insecure" not in link.stdout and not link.stderr
    assert "--enable-supernode-auth" in link.stdout and "--ssl-certfile keys/server.crt" in link.stdout
    assert "--host 127.0.0.1" in link.stdout  # nobody else reaches it unless asked
    wide = started(app, tmp_path, "superlink.sh", LISTEN="0.0.0.0")
    assert "--host 0.0.0.0" in wide.stdout and wide.stderr.startswith(
        "WARNING: LISTEN=0.0.0.0: whoever reaches port 9092"
    )
    assert wide.stderr.count("\n") == 1
    node = started(app, tmp_path, "supernode.sh", "2", NODE_CONFIG='data="a.npz"')
    assert "--insecure" not in node.stdout and "--auth-supernode-private-key keys/node2" in node.stdout
    assert "--root-certificates keys/ca.crt" in node.stdout
    assert "--node-config partition-id=2 num-partitions=3 memory='" in node.stdout
    assert '/memory/2\' data="a.npz"' in node.stdout
    assert f"root-certificates = '{app}/keys/ca.crt'" in (app / ".flwr" / "config.toml").read_text()
    for arguments in (("superlink.sh", "--insecure"), ("supernode.sh", "0", "--insecure")):
        bare = started(app, tmp_path, *arguments)
        assert "--insecure" in bare.stdout and bare.stderr.startswith("WARNING: INSECURE is set")
        assert "insecure = true" in (app / ".flwr" / "config.toml").read_text()
    # The clock is compared first: one that is off (1) ends it, a server that is not up yet (2) does not.
    assert node.stdout.startswith("deploy check 127.0.0.1:9092 --clock\n")
    for status in ("1", "2"):
        done = started(app, tmp_path, "supernode.sh", "0", CLOCK=status)
        assert (done.returncode, "--superlink" in done.stdout) == ((1, False) if status == "1" else (0, True))
    for name, arguments in {
        "node2": ("supernode.sh", "2"),
        "ca.crt": ("supernode.sh", "0"),
        "server.key": ("superlink.sh",),
    }.items():
        (app / "keys" / name).rename(tmp_path / name)
        missing = started(app, tmp_path, *arguments)
        assert missing.returncode == 2 and f"keys/{name} is missing: " in missing.stderr
        assert missing.stderr.count("\n") == 1 and "flower" not in missing.stdout
        (tmp_path / name).rename(app / "keys" / name)
    wrong = started(app, tmp_path, "supernode.sh", "one")
    assert wrong.returncode == 2 and wrong.stderr.startswith("usage: ")


@pytest.mark.parametrize(
    "arguments,fragments",
    [
        (["init", "full"], ["full", "not empty"]),
        (["init", "1st"], ["1st", "a letter"]),
        (["init", "under_score"], ["under_score", "letters, digits and hyphens"]),
        (["init", "new", "--clients", "0"], ["clients", "got 0"]),
        (["init", "new", "--clients", "1"], ["--clients must be at least 2, got 1"]),
        (["keys", "k"], ["--hosts", "--nodes"]),
        (["keys", "k", "--hosts", "a b"], ["'a b'"]),
        (["keys", "k", "--hosts", "localhost,"], ["''"]),
        (["keys", "k", "--hosts", "300.1.1.1"], ["'300.1.1.1'"]),
        (["keys", "k", "--nodes", "-1"], ["--nodes", "-1"]),
        (["keys", "k", "--only", "-1"], ["from 0", "-1"]),
        (["keys", "k", "--nodes", "2", "--only", "1"], ["--only"]),
        (["keys", "k", "--hosts", "a", "--days", "0"], ["days", "got 0"]),
        (["keys", "full/file", "--nodes", "1"], ["full/file", "not a folder"]),
        (["simulate", "full"], ["full", "no pyproject.toml"]),
        (["simulate", "nowhere"], ["nowhere", "no pyproject.toml"]),
    ],
)  # fmt: skip
def test_refusals_are_one_line(said, arguments, fragments):
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    code, _, stderr = said(*arguments)
    assert code == 2
    is_one_line(stderr, *fragments)
    assert Path("full/file").read_text() == "mine" and not Path("k").exists() and not Path("new").exists()


def test_without_flower_it_says_what_to_install(tmp_path):
    (tmp_path / "bare.py").write_text(
        "import sys\n"
        "sys.modules['flwr'] = None\n"
        "from fedda.cli import main\n"
        "for arguments in (['init', 'new'], ['simulate', 'new'], ['keys', 'new', '--nodes', '1']):\n"
        "    sys.argv = ['fedda', 'deploy', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print(end.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "bare.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "2\n" * 3
    for line in done.stderr.splitlines(keepends=True):
        is_one_line(line, "pip install 'fedda[flower]'")
    assert done.stderr.count("\n") == 3 and not (tmp_path / "new").exists()


# -- keys -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    place = tmp_path_factory.mktemp("keys") / "keys"
    before = os.umask(0)  # private whatever the user's umask is
    try:
        make_keys(place, ["link.example.org", "10.1.2.3"], [0, 1])
    finally:
        os.umask(before)
    return place


def test_private_keys_are_private(keys):
    assert {path.name for path in keys.iterdir()} == {
        "ca.key", "ca.crt", "server.key", "server.crt", "node0", "node0.pub", "node1", "node1.pub",
    }  # fmt: skip
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for path in keys.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o644 if path.suffix in (".crt", ".pub") else 0o600), path


def test_node_keys_are_as_flower_wants_them(keys):
    for node in ("node0", "node1"):
        private = serialization.load_ssh_private_key((keys / node).read_bytes(), None)
        assert isinstance(private.curve, ec.SECP384R1)
        own = private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        assert try_load_public_key(keys / f"{node}.pub") == own
    assert (keys / "node0").read_bytes() != (keys / "node1").read_bytes()


def shake_hands(keys, ca, host):
    """A TLS handshake in memory: a client that trusts `ca` and wants `host`."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys / "server.crt", keys / "server.key")
    client = ssl.create_default_context(cafile=ca)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    here, there = client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)
    for _ in range(4):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return here.version()


def test_the_certificate_holds_for_its_hosts_and_its_ca(keys, tmp_path):
    for host in ("link.example.org", "10.1.2.3", "127.0.0.1", "localhost"):
        assert shake_hands(keys, keys / "ca.crt", host) in ("TLSv1.2", "TLSv1.3")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(keys, keys / "ca.crt", "other.example.org")
    make_keys(tmp_path / "other", ["link.example.org"], [])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(keys, tmp_path / "other" / "ca.crt", "link.example.org")
    server, ca = (x509.load_pem_x509_certificate((keys / name).read_bytes()) for name in ("server.crt", "ca.crt"))
    server.verify_directly_issued_by(ca)
    named = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert named.get_values_for_type(x509.DNSName) == ["link.example.org", "localhost"]
    assert [str(ip) for ip in named.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1"]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert 364 <= (server.not_valid_after_utc - server.not_valid_before_utc).days <= 366


def test_keys_are_replaced_only_when_asked_and_the_ca_stays(said):
    code, stdout, _ = said("keys", "keys", "--hosts", "localhost", "--nodes", "1")
    assert code == 0 and "move keys/ca.key to a place offline" in stdout.splitlines()[1]
    before = {path.name: path.read_bytes() for path in Path("keys").iterdir()}
    for arguments in (["--hosts", "localhost"], ["--nodes", "2"], ["--only", "0"]):
        code, _, stderr = said("keys", "keys", *arguments)
        assert code == 2
        is_one_line(stderr, "exists already", "--overwrite")
    assert {path.name: path.read_bytes() for path in Path("keys").iterdir()} == before
    assert said("keys", "keys", "--hosts", "localhost", "--overwrite", "--days", "30")[0] == 0
    assert said("keys", "keys", "--only", "1")[0] == 0
    after = {path.name: path.read_bytes() for path in Path("keys").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.key", "server.crt"}
    assert set(after) - set(before) == {"node1", "node1.pub"}
    shake_hands(Path("keys"), Path("keys/ca.crt"), "localhost")  # the CA that the sites have
    Path("keys/ca.key").unlink()
    code, _, stderr = said("keys", "keys", "--hosts", "localhost", "--overwrite")
    assert code == 2 and Path("keys/server.crt").read_bytes() == after["server.crt"]
    is_one_line(stderr, "keys/ca.key: is missing: put it back here to sign")


# -- in one process ---------------------------------------------------------------------------------------------------
def digits(clients):
    """What the generated app has at its sites, as one problem."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    torch.manual_seed(int(rng.key(0, rng.MODEL)))
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).double()
    owner = np.arange(1438) % clients
    test = (x[1438:] / 16, y[1438:])
    return fedda.problem(model, LOSS, x=x[:1438] / 16, y=y[:1438], client=owner, batch=16, test=test)


def test_an_app_in_one_process_is_the_simulation(app, said):
    code, stdout, _ = said("simulate", app, "--run-config", "rounds=4 dtype='float64'")
    assert code == 0 and "round 4 of 4" in stdout and stdout.endswith("results: simulation\n")
    torch.manual_seed(int(rng.key(0, rng.MODEL)))
    first = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    x0 = torch.cat([p.detach().double().flatten() for p in first.parameters()])
    algorithm = fedda.make("fedda-mvr", lr=0.08, w=1000.0, steps=5)
    run = replayed(secret_of("simulation"), algorithm, digits(3), rounds=4, x0=x0, weights="uniform")
    close(state("simulation")["server.x"].flatten(), run.x, tol=1e-12)
    found, wanted = rows("simulation")[-1], run.history[-1]
    for name in ("train_loss", "test_loss", "test_accuracy", "bytes_up", "bytes_down", "gradients"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-12), name
    # A folder that holds a run is left alone; on request it is replaced, or gone on with.
    code, _, stderr = said("simulate", app, "--run-config", "rounds=4 dtype='float64'")
    assert code == 2
    is_one_line(stderr, "simulation", "holds a run")
    assert said("simulate", app, "--run-config", "rounds=2 dtype='float64'", "--overwrite")[0] == 0
    assert len(rows("simulation")) == 3
    assert said("simulate", app, "-c", "rounds=4", "-c", "dtype='float64' resume=true")[0] == 0
    run = replayed(secret_of("simulation"), algorithm, digits(3), rounds=4, x0=x0, weights="uniform")
    close(state("simulation")["server.x"].flatten(), run.x, tol=1e-12)
    assert [row["round"] for row in rows("simulation")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "text,fragment",
    [
        ("rouns=2", "no key 'rouns'"),
        ("rounds", "'rounds'"),
        ("rounds=two", "invalid format"),
        ("rounds='two'", "rounds must be a whole number"),
        ("absent.toml", "absent.toml: No such file"),
        ("algorithm='fedda-mwr'", "fedda-mvr"),
        ("params='{\"lr\": -1}'", "lr must be > 0"),
    ],
)
def test_a_wrong_run_config_is_one_line(app, said, text, fragment):
    code, _, stderr = said("simulate", app, "--run-config", text)
    assert code == 2 and not Path("simulation").exists()
    is_one_line(stderr, fragment)


def changed(place, file, old, new):
    init(place, 2)
    path = place / "site_app" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    return place


@pytest.mark.parametrize(
    "file,old,new,fragments",
    [
        ("client_app.py", "    mine = ", "    raise OSError('no such\\nfile')\n    mine = ", [": OSError: no such file", "client_app.py:23"]),
        ("client_app.py", "x[mine].reshape(-1, 64) / 16", "x[mine, :3]", [": ValueError: problem: the model and the loss cannot take this data"]),
        ("client_app.py", "app = client_app(site)", "application = client_app(site)", ["client_app:app", "AttributeError"]),
        ("client_app.py", "app = client_app(site)", "app = 3", ["must be a ClientApp, got int"]),
        ("client_app.py", "app = client_app(site)", "app = client_app(site", [": SyntaxError: '(' was never closed (client_app.py, line 33)\n"]),
        ("server_app.py", "import embedded", "import embeded", ["server_app:app", "ImportError"]),
        ("server_app.py", "x[1438:].reshape(-1, 64) / 16", "x[1438:, :3]", ["the model and the loss cannot take this data"]),
        ("server_app.py", 'y = embedded("digits")', "y = 1 / 0", ["server: ZeroDivisionError", "server_app.py:13"]),
        ("client_app.py", "metrics=metrics)", "metrics=metrics, allowed=('fedavg',))", [" refuses: the algorithm is refused: this site runs only fedavg"]),
    ],
)  # fmt: skip
def test_a_mistake_in_an_app_is_one_line(said, file, old, new, fragments):
    place = changed(Path("site"), file, old, new)
    code, _, stderr = said("simulate", place)
    assert code == 2
    is_one_line(stderr, *fragments)
    # Another app of the same name is not mixed up with it.
    place.rename("elsewhere")
    init(Path("site"), 2)
    assert said("simulate", "site", "--run-config", "rounds=1", "--out", "fine")[0] == 0


def test_a_site_with_another_model_is_left_out(said):
    place = changed(Path("site"), "client_app.py", "Site(model(),", "Site(__import__('torch').nn.Linear(64, 10),")
    code, _, stderr = said("simulate", place, "--run-config", "timeout=0.5")
    assert code == 2
    *notes, line = stderr.splitlines(keepends=True)
    assert notes == [
        f"note: a client is left out: the model of site {k}, with 650 numbers, has different parameters from the "
        "server's, with 2410\n"
        for k in range(2)
    ]
    is_one_line(line, "2 clients are needed, [] arrived")


# -- a Flower app that exists already -------------------------------------------------------------------------------
CLIENTS = 3


def samples(k):
    g = torch.Generator().manual_seed(k)
    x = torch.randn(20 + 5 * k, 4, generator=g, dtype=torch.float64)
    return x, (x[:, 0] + 0.3 * k > 0).long()


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def their_app():
    app = ClientApp()

    @app.train()
    def train(message, context):
        raise AssertionError("nobody asks for this")

    return join(app, lambda context: Site(network(), LOSS, *samples(context.node_config["partition-id"])))


def pooled():
    x, y = (torch.cat(part) for part in zip(*map(samples, range(CLIENTS)), strict=True))
    owner = torch.cat([torch.full((len(samples(k)[1]),), k) for k in range(CLIENTS)])
    return fedda.problem(network(), LOSS, x=x, y=y, client=owner, batch=8)


PARAMS = {
    "fedda-mvr": {"lr": 0.05, "w": 1000.0, "prox": {"kind": "l1", "gamma": 0.01}},
    "scaffold": {"lr": 0.1},
    "mime": {"lr": 0.1},
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_strategy_gives_the_numbers_of_the_engine(name, tmp_path):
    how = {"clients": CLIENTS, "cohort": 2, "batch": 8, "dtype": "float64", "weights": "samples", "max_samples": 100}
    strategy = Strategy(network(), LOSS, name, PARAMS[name], **how, out=str(tmp_path / "ours"))
    arrays, seen = ArrayRecord(network().state_dict()), {}

    def judged(tau, arrays):
        seen[tau] = torch.cat([v.flatten() for v in arrays.to_torch_state_dict().values()])
        return MetricRecord({"size": float(seen[tau].norm())})

    result = strategy.start(InProcessGrid(their_app(), CLIENTS), arrays, num_rounds=4, evaluate_fn=judged)
    secret = secret_of(tmp_path / "ours")
    run = replayed(secret, fedda.make(name, **PARAMS[name]), pooled(), rounds=4, cohort=2, weights="samples")
    x = torch.cat([v.flatten() for v in result.arrays.to_torch_state_dict().values()])
    close(x, run.x, tol=1e-12)
    plan = Plan(algorithm=name, params=json.dumps(PARAMS[name]), **how, rounds=4, out=str(tmp_path / "serve"))
    served = serve(InProcessGrid(their_app(), CLIENTS), plan, network, LOSS, say=lambda line: None, secret=secret)
    assert torch.equal(served.server.x.flatten(), x)
    # Metrics as Flower's own strategies give them; the judge sees each model once.
    assert list(result.evaluate_metrics_serverapp) == list(seen) == [0, 1, 2, 3, 4]
    assert torch.equal(seen[4], x) and not torch.equal(seen[3], x)
    for tau in range(5):
        loss = result.evaluate_metrics_clientapp[tau]["train_loss"]
        assert loss == pytest.approx(run.history[tau]["train_loss"], rel=1e-12)
    again = torch.cat([p.flatten() for p in trained(tmp_path / "ours", network()).parameters()])
    assert torch.equal(again, x)


def test_a_strategy_starts_where_it_is_told_and_goes_on(tmp_path):
    other = {name: torch.full_like(value, 0.25) for name, value in network().state_dict().items()}
    how = {"clients": CLIENTS, "batch": 8, "dtype": "float64", "out": str(tmp_path / "out")}
    begun = Strategy(network(), LOSS, "fedavg", {"lr": 0.1}, **how)
    grid = InProcessGrid(their_app(), CLIENTS)
    with pytest.warns(UserWarning, match="no config is sent"):
        begun.start(grid, ArrayRecord(other), num_rounds=2, train_config=ConfigRecord({"lr": 0.5}))
    with pytest.raises(ValueError, match="holds a run"):
        begun.start(grid, ArrayRecord(other), num_rounds=2)
    seen = []
    onward = Strategy(network(), LOSS, "fedavg", {"lr": 0.1}, **how, resume=True)
    result = onward.start(grid, ArrayRecord(other), num_rounds=3, evaluate_fn=lambda tau, _: seen.append(tau))
    assert seen == [3] and result.evaluate_metrics_serverapp == {}
    algorithm, x0 = fedda.make("fedavg", lr=0.1), torch.full((37,), 0.25, dtype=torch.float64)
    run = replayed(secret_of(tmp_path / "out"), algorithm, pooled(), rounds=3, x0=x0, weights="uniform")
    close(torch.cat([v.flatten() for v in result.arrays.to_torch_state_dict().values()]), run.x, tol=1e-12)


def test_a_strategy_refuses_what_is_not_its_model(tmp_path):
    strategy = Strategy(network(), LOSS, clients=CLIENTS, out=str(tmp_path / "out"))
    with pytest.raises(ValueError, match="initial_arrays must be a state_dict of the model"):
        strategy.start(InProcessGrid(their_app(), CLIENTS), ArrayRecord(torch.nn.Linear(1, 1).state_dict()))
    with pytest.raises(NotImplementedError, match="call start"):
        strategy.configure_train(1, ArrayRecord(), ConfigRecord(), None)
    with pytest.raises(ValueError, match=r"^the model must have 'other' with the shape \[3\], got none$"):
        from fedda.deploy.results import with_values

        with_values(network(), {"other": torch.zeros(3)})


@pytest.mark.parametrize("name", ["sampling", "drop", "availability", "personal", "patience"])
def test_options_of_simulations_are_refused(name):
    for ask in (lambda: Plan.of({name: "x"}), lambda: Strategy(network(), LOSS, **{name: "x"})):
        with pytest.raises(ValueError, match=rf"^Plan: federations do not offer {name}, it is for simulations"):
            ask()
    with pytest.raises(ValueError, match=r"^Strategy: no argument 'client'; did you mean 'clients'\?$"):
        Strategy(network(), LOSS, client=3)


# -- the hospitals, and what the guide says of Flower -----------------------------------------------------------------
def test_four_hospitals_find_the_pooled_model(said):
    from sklearn.linear_model import LogisticRegression

    assert said("simulate", HOSPITALS, "--out", "found")[0] == 0
    last = rows("found")[-1]
    assert last["round"] == 60 and last["dropped"] == 0
    done = subprocess.run(
        [sys.executable, HOSPITALS / "weights.py", "found"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == round(31 * last["nonzero"]) - 1  # the intercept is no measurement
    assert 13 <= len(lines) <= 18  # batches come from a secret, so no two runs are the same
    assert [line.split("  ")[1] for line in lines[:2]] == ["worst concave points", "worst radius"]
    # The same objective on all patients together, by somebody else.
    data = __import__("sklearn.datasets").datasets.load_breast_cancer()
    train = np.arange(569) % 5 != 0
    x, y = ((data.data - data.data.mean(0)) / data.data.std(0))[train], data.target[train]
    pooled = LogisticRegression(l1_ratio=1.0, C=1 / (len(y) * 0.02), solver="saga", tol=1e-6, max_iter=20_000)
    w, b = pooled.fit(x, y).coef_[0], pooled.intercept_[0]
    t = x @ w + b
    best = float(np.mean(np.logaddexp(0, t) - y * t) + 0.02 * np.abs(w).sum())
    assert best == pytest.approx(0.2143, abs=1e-4)
    assert -1e-6 < last["objective"] - best < 0.005
    assert last["test_accuracy"] >= 0.93


def test_the_hospitals_are_what_init_writes(tmp_path):
    init(tmp_path / "hospitals", 4)
    same = [name for name in TEMPLATES if name.endswith((".sh", ".conf"))]
    for name in (*same, "Caddyfile", ".gitignore"):
        assert (HOSPITALS / name).read_text() == (tmp_path / "hospitals" / name).read_text(), name
    ours = configuration(HOSPITALS, [])[0]
    assert Plan.of(ours).clients == 4 and "prox" in ours["params"]
    assert simulate(HOSPITALS, ["rounds=1 cohort=2"], tmp_path / "out") == tmp_path / "out"


def test_what_the_guide_says_of_flower_is_so():
    """The paths of the doors, and that there is no secure aggregation beside the legacy one."""
    import flwr.client.mod
    import flwr.clientapp.mod
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.supercore.routers.runtime.router import router as runtime
    from flwr.superlink.routers.control.router import router as control
    from flwr.superlink.routers.fleet.router import router as fleet

    assert [router.prefix for router in (fleet, control, runtime)] == ["/v1/fleet", "/v1/control", "/v1/runtime"]
    assert not any("secagg" in name for name in flwr.clientapp.mod.__all__)
    assert any("secagg" in name for name in flwr.client.mod.__all__)
    assert SecAggPlusWorkflow(3, 2).clipping_range == 8.0


def test_every_fault_of_the_guide_has_its_test():
    text = (ROOT / "docs" / "deployment.md").read_text()
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", text)
    assert len(named) >= 14
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file}.py::{name}"


def test_no_page_opens_the_superlink_to_everybody():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src/fedda/deploy/templates").iterdir()):
        assert "LISTEN=0.0.0.0" not in page.read_text(), page
