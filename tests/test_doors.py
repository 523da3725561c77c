"""The doors of a real SuperLink: open by itself, shut behind the proxies that `fedda deploy init` writes."""

import base64
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import inside, is_one_line

pytest.importorskip("flwr", reason="needs fedda[flower]")
import flwr
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import HTTPException
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.superlink.routers.fleet.node_auth import authenticate_node

from fedda.deploy.check import AHEAD, BEHIND, DOORS, NODE_CALLS
from fedda.deploy.init import init
from fedda.deploy.keys import make_keys
from flowers import Flowers
from ranks import free_port

NODES = 2
PROXIES = {
    "nginx": ["nginx", "-p", ".", "-c", "nginx.conf", "-e", "stderr"],
    "caddy": ["caddy", "run", "--config", "Caddyfile", "--adapter", "caddyfile"],
}
# Ways to write a control call that a proxy might take for one of a node.
DISGUISED = [
    "/v1/fleet/../control/list-runs", "/v1/fleet/%2e%2e/control/list-runs", "/v1/fleet/..%2fcontrol/list-runs",
    "//v1/control/list-runs", "/v1/control/list-runs?/v1/fleet/get-run", "/v1/control/list-runs#/v1/fleet/get-run",
    "/v1/control/list-runs%3f/../../fleet/get-run", "/v1/control/../fleet/get-run", "/v1/fleet/get-run?x", "/v1/fleet/",
    "/V1/FLEET/get-run",
]  # fmt: skip

TRY = """
import http.client, ssl

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

def status(path, body=b""):
    connection = http.client.HTTPSConnection("127.0.0.1", {port}, timeout=60, context=context)
    try:
        connection.request("POST", path, body, {{"content-type": "application/protobuf"}})
        return connection.getresponse().status
    except OSError:
        return 413  # the proxy closes the connection while the body is on its way
    finally:
        connection.close()

for path in {paths}:
    print("refused" if status(path) in (400, 403) else path)
print(f"small:{{status('/v1/fleet/push-object')}}")
print("large:refused" if status("/v1/fleet/push-object", bytes({size})) == 413 else "large:read")
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    place = tmp_path_factory.mktemp("apps") / "sites"
    init(place, NODES)
    make_keys(place / "keys", ["127.0.0.1"], list(range(NODES)))
    (place / ".flwr").mkdir()  # as env.sh does
    return place


@pytest.fixture(scope="module")
def flowers(tmp_path_factory, app):
    keys = app / "keys"
    made = Flowers(
        tmp_path_factory.mktemp("flowers") / "here",
        [
            *("--ssl-ca-certfile", keys / "ca.crt", "--ssl-certfile", keys / "server.crt"),
            *("--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"),
        ],
        lambda k: ["--root-certificates", keys / "ca.crt", "--auth-supernode-private-key", keys / f"node{k}"],
        f'root-certificates = "{keys / "ca.crt"}"',
    )
    try:
        made.open(0)
        yield made
    finally:
        made.close()


class Proxy:
    """A proxy with the configuration of the app, on a free port."""

    def __init__(self, name, app, flowers):
        self.port, self.log = free_port(), flowers.place / f"{name}.log"
        file = app / {"nginx": "nginx.conf", "caddy": "Caddyfile"}[name]
        text, ports = file.read_text(), {"9443": self.port, "127.0.0.1:9092": f"127.0.0.1:{flowers.port}"}
        for old, new in ports.items():
            assert old in text
            text = re.sub(rf"(?m)^([^#\n]*){re.escape(old)}", rf"\g<1>{new}", text)
        file.write_text(text)
        home = flowers.environment | {"HOME": str(flowers.place), "XDG_CONFIG_HOME": "", "XDG_DATA_HOME": ""}
        with open(self.log, "wb") as log:
            how = {"cwd": app, "env": home, "stdout": log, "stderr": log, "start_new_session": True}
            self.process = subprocess.Popen([*flowers.network.prefix, *PROXIES[name]], **how)

    def close(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture(scope="module")
def proxies(app, flowers):
    """The proxies that are installed here."""
    running = {name: Proxy(name, app, flowers) for name in PROXIES if shutil.which(name)}
    try:
        for proxy in running.values():
            deadline = time.monotonic() + 120
            while flowers.warm.run(["fedda", "deploy", "check", f"127.0.0.1:{proxy.port}"]).returncode == 2:
                assert time.monotonic() < deadline and proxy.process.poll() is None, proxy.log.read_text()
                time.sleep(0.2)
        yield running
    finally:
        for proxy in running.values():
            proxy.close()


def checked(flowers, port, *more):
    """What `fedda deploy check` says: exit status, and lines by door."""
    done = flowers.warm.run(["fedda", "deploy", "check", f"127.0.0.1:{port}", *more])
    assert not done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said.pop("clock") == "as the server's"
    return done.returncode, said


def test_every_door_of_a_plain_superlink_is_open(flowers, app):
    code, said = checked(flowers, flowers.port, "--root-certificates", app / "keys" / "ca.crt")
    assert code == 1
    assert said.pop("TLS").endswith("the certificate is valid for 127.0.0.1") and said.pop("without TLS") == "shut"
    assert said.pop("with TLS, nodes").startswith("open: nodes can connect")
    assert set(said) == {f"with TLS, {door.name}" for door in DOORS if not door.for_nodes}
    assert all(words.startswith("OPEN: ") for words in said.values()), said


@pytest.mark.parametrize("name", PROXIES)
def test_behind_the_proxy_only_nodes_get_in(name, proxies, flowers, app):
    if name not in proxies:
        pytest.skip(f"{name} is not installed: apt-get install {'nginx-light' if name == 'nginx' else name}")
    port = proxies[name].port
    code, said = checked(flowers, port, "--root-certificates", app / "keys" / "ca.crt")
    assert code == 0, said
    assert said.pop("with TLS, nodes").startswith("open: ") and said.pop("TLS").startswith("TLSv1.")
    assert {words.split(" (")[0] for words in said.values()} == {"shut"} and len(said) == len(DOORS)
    refused = flowers.warm.run(["fedda", "deploy", "check", f"127.0.0.1:{port}", "--root-certificates", other(app)])
    assert refused.returncode == 1 and "TLS: the certificate is WRONG" in refused.stdout
    # In the network of the federation: what is written as something else, and what is too large to be read.
    script = TRY.format(port=port, paths=DISGUISED, size=17 * 2**20)
    tried = flowers.warm.run([sys.executable, "-c", script])
    assert tried.returncode == 0, tried.stdout + tried.stderr
    assert tried.stdout.split() == ["refused"] * len(DISGUISED) + ["small:401", "large:refused"], tried.stdout


def other(app):
    """The certificate of somebody else's CA."""
    if not (app / "other").exists():
        make_keys(app / "other", ["127.0.0.1"], [])
    return app / "other" / "ca.crt"


def test_nodes_join_and_a_round_runs_through_the_proxy(proxies, flowers, app, tmp_path):
    if "nginx" not in proxies:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    flowers.doors = {0: proxies["nginx"].port, 1: proxies.get("caddy", proxies["nginx"]).port}
    for k in range(NODES):
        done = flowers.command("supernode", "register", app / "keys" / f"node{k}.pub", "t")
        assert done.returncode == 0, done.stdout + done.stderr
        flowers.join(k, NODES)
    out = flowers.submit(app, out=tmp_path / "out", rounds=1, timeout=300.0, participants=app / "keys")
    report = flowers.ended(out)
    assert report["rejected"] == {} and [s["samples"] for s in report["sites"].values()] == [719, 719], flowers.logs()
    assert (out / "metrics.jsonl").read_text().count("\n") == 2
    # The same command line through the proxy: it gets no further than its first call.
    file = Path(flowers.environment["FLWR_HOME"]) / "config.toml"
    text = file.read_text()
    try:
        file.write_text(text.replace(f":{flowers.port}", f":{proxies['nginx'].port}"))
        for words in (
            ["run", app, "t"],
            ["supernode", "list", "t"],
            ["supernode", "register", app / "keys/node0.pub", "t"],
        ):
            done = flowers.command(*words, "--format", "json")
            assert '"success": false' in done.stdout or done.returncode != 0, done.stdout
    finally:
        file.write_text(text)


# -- the command -------------------------------------------------------------------------------------------------------
class Answers(http.server.BaseHTTPRequestHandler):
    """A server without TLS that answers each path with a status, and whose clock is behind by some seconds."""

    statuses: dict = {}  # noqa: RUF012
    behind = 0

    def date_time_string(self, timestamp=None):
        return super().date_time_string(time.time() - self.behind)

    def do_POST(self):
        self.send_response(self.statuses.get(self.path, 404))
        self.send_header("content-length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made.server_port
    made.shutdown()
    thread.join()
    made.server_close()


def test_without_tls_every_open_door_is_wrong(server, capsys, monkeypatch):
    monkeypatch.setattr(Answers, "statuses", {"/v1/fleet/pull-messages": 401, "/v1/runtime/get-nodes": 502})
    code, stdout, _ = inside(capsys, monkeypatch, "deploy", "check", f"127.0.0.1:{server}")
    said = dict(line.split(": ", 1) for line in stdout.splitlines())
    assert code == 1 and said["TLS"].startswith("none") and said["without TLS, control"] == "shut (HTTP 404)"
    assert said["without TLS, nodes"].startswith("OPEN")
    assert said["without TLS, runtime"].startswith("UNKNOWN (HTTP 502)")  # a proxy passes it on


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["nowhere"], ["HOST:PORT", "'nowhere'"]),
        (["host:0"], ["HOST:PORT", "'host:0'"]),
        (["host:65536"], ["HOST:PORT"]),
        (["https://host:443"], ["HOST:PORT"]),
        (["127.0.0.1:CLOSED"], ["cannot be reached"]),
        (["no-such-host.invalid:9443"], ["cannot be reached"]),
        (["127.0.0.1:9443", "--root-certificates", "absent.crt"], ["absent.crt", "No such file"]),
        (["127.0.0.1:9443", "--root-certificates", __file__], ["test_doors.py", "not a certificate"]),
    ],
)
def test_a_mistake_is_one_line(words, fragments, capsys, monkeypatch):
    words = [word.replace("CLOSED", str(free_port())) for word in words]
    code, stdout, stderr = inside(capsys, monkeypatch, "deploy", "check", *words)
    assert code == 2 and not stdout
    is_one_line(stderr, *fragments)


def test_the_calls_of_nodes_are_those_of_flower():
    """All that a node with a key calls, and nothing that a node without one calls besides."""
    source = Path(flwr.__file__).parent / "supernode" / "fleet_http_client.py"
    calls = set(re.findall(r'path="/v1/fleet/(.+?)"', source.read_text()))
    assert set(NODE_CALLS) == calls - {"register-node", "unregister-node"}


# -- clocks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ahead", "code", "said"),
    [
        (0, 0, "clock: as the server's"),
        (3, 0, "clock: 3 s ahead of the server's; Flower allows at most 5 s ahead and 305 s behind"),
        (-200, 0, "clock: 200 s behind the server's; Flower allows"),
        (
            10,
            1,
            "clock: WRONG: 10 s ahead of the server's; Flower allows at most 5 s ahead and 305 s behind, and refuses",
        ),
        (-400, 1, "clock: WRONG: 400 s behind the server's"),
        (None, 0, "clock: UNKNOWN: the server does not say its time"),
    ],
)
def test_a_clock_that_is_off_is_named(ahead, code, said, server, capsys, monkeypatch):
    monkeypatch.setattr(Answers, "behind", ahead or 0)
    if ahead is None:
        monkeypatch.setattr(Answers, "date_time_string", lambda self: "now")
    found, stdout, _ = inside(capsys, monkeypatch, "deploy", "check", f"127.0.0.1:{server}", "--clock")
    near = {re.sub(r"\d+ s (ahead of|behind)", f"{abs(ahead or 0) + i} s \\1", said, count=1) for i in (-1, 0, 1)}
    assert found == code and stdout.count("\n") == 1 and any(stdout.startswith(line) for line in near), stdout


@pytest.mark.parametrize("ahead", [-AHEAD - 1, -BEHIND - 20, AHEAD - 2, AHEAD + 2, -BEHIND + 20])
def test_flower_allows_clocks_as_we_say(ahead):
    """Flower's own check of a node's signed time."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest

    key = ec.generate_private_key(ec.SECP384R1())
    public, moment = public_key_to_bytes(key.public_key()), (now() + timedelta(seconds=ahead)).isoformat()
    headers = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public).decode(), TIMESTAMP_HEADER: moment,
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(sign_message(key, moment.encode())).decode(),
    }  # fmt: skip
    state = SimpleNamespace(protobuf_request=ActivateNodeRequest(public_key=public))
    try:
        authenticate_node(SimpleNamespace(headers=headers, state=state))
        allowed = True
    except HTTPException as why:
        allowed = False
        assert why.status_code == 401
    assert allowed == (-BEHIND < ahead < AHEAD)
