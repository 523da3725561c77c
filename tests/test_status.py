"""`fedda deploy status`: the table, JSON and the live page, from the folder of a run."""

import json
import os
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request

import pytest

from commands import inside, is_one_line

pytest.importorskip("flwr", reason="needs fedda[flower]")
from fedda.deploy.checkpoint import Checkpoint
from fedda.deploy.init import init
from fedda.deploy.report import Rejections, now
from fedda.deploy.simulate import simulate
from fedda.deploy.status import live_page, page

EVIL = "</td><script>document.title = 'owned'</script>\x1b[2J"


@pytest.fixture
def said(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    return lambda *arguments: inside(capsys, monkeypatch, "deploy", "status", *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that an app has done."""
    place = tmp_path_factory.mktemp("apps")
    init(place / "sites", 2)
    return simulate(place / "sites", ["rounds=2"], place / "out")


@pytest.fixture
def running(tmp_path):
    """The folder of a server that is at work: faults, a key, noise, a site left out."""
    server, rejections = Checkpoint(tmp_path / "run"), Rejections()
    server.begin(bytes(32))
    rejections.add("failed", 1, EVIL)
    for _ in range(3):
        rejections.add("late", 0, "no reply in 5 s")
    state = rejections.state()
    for k, site in state["sites"].items():
        site |= {"connected": k == "0", "samples": 20, "key": "SHA256:abc"}
    report = {
        "status": "running", "round": 3, "rounds": 12, "algorithm": "fedda-mvr", "out": "/srv/run", "started": now(),
        "updated": now(), "waiting": [1], "left_out": [2], "refused_nodes": ["node 9: it claims to be site 1"],
        "changed_samples": {"1": [2, 20]}, "privacy": {"epsilon_outside": 2.5, "epsilon_site": 3.0},
        "seconds": {"nodes": 2.0, "replies": 30.0}, "last_round": {"nodes": 0.5, "replies": 9.5}, **state,
    }  # fmt: skip
    server.write_report(report)
    yield server
    server.release()


def test_a_run_that_has_finished(finished, said):
    code, stdout, _ = said(finished)
    assert code == 0 and stdout.startswith(f"{finished}: finished, round 2 of 2, fedda-mvr\n")
    assert "sites connected: 2 of 2; replies used: 6; replies rejected: 0" in stdout
    assert re.search(r"^ *0 +connected +719 +3 +0 +not checked *$", stdout, re.M)
    for part in ("waiting for nodes", "packing and sending", "waiting for replies", "averaging", "evaluation"):
        assert re.search(rf"{part} +\d+\.\d\d +\d+\.\d", stdout), stdout
    code, stdout, _ = said(finished, "--json")
    assert code == 0 and json.loads(stdout)["sites"]["1"]["replies"] == 3


def test_a_run_at_work(running, said):
    code, stdout, _ = said(running.folder)
    assert code == 0 and "running, round 3 of 12" in stdout and "\x1b" not in stdout
    for line in (
        "last round: 10 s; time left: about 1 min 30 s; epsilon against the outside: 2.5; epsilon against a site: 3;",
        "waiting for site 1\nleft out by the plan: site 2\n",
        "site 1 claims 20 samples; before a resume it claimed 2\nnot let in: node 9: it claims to be site 1\n",
    ):
        assert line in stdout, stdout
    assert re.search(r"0 +late +3 +no reply in 5 s", stdout) and re.search(r"1 +failed +1 +</td><script>", stdout)


def test_before_the_first_round_is_complete_there_are_no_seconds_of_it(running, said):
    report = running.last_report()
    del report["last_round"]
    running.write_report(report)
    _, stdout, _ = said(running.folder)
    assert re.search(r"waiting for replies +30\.0 *$", stdout, re.M), stdout
    assert '<td>waiting for replies</td><td class="number"></td><td class="number">30.0</td>' in page(running.folder)


def test_a_server_that_has_died_is_named(running, said):
    running.release()  # as the operating system does when a process ends
    code, stdout, _ = said(running.folder)
    assert code == 1 and "died, round 3 of 12" in stdout and "submit the run with resume=true" in stdout
    running.lock()  # and the look has not left a lock behind


def test_the_page_escapes_everything(running, tmp_path):
    text = page(running.folder)
    assert "<script" not in text and "&lt;script&gt;document.title = &#x27;owned&#x27;&lt;/script&gt;?[2J" in text
    assert 'http-equiv="refresh"' in text and not re.search(r"\b(src|href|url)\b", text)  # nothing is loaded
    for words in ("round 3 of 12", "SHA256:abc", "epsilon against a site", "waiting for replies", "width:25.0%"):
        assert words in text


def fetched(port, path="/", host=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as why:
        return why.code, why.read().decode(), why.headers


@pytest.fixture
def live(tmp_path):
    server = live_page(tmp_path / "run", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_page_lives_longer_than_a_run(live, finished, tmp_path):
    """It is there before the run, shows it, and goes on when the folder is another one."""
    port = live.server_port
    assert live.server_address[0] == "127.0.0.1"
    status, text, headers = fetched(port)
    assert status == 200 and "holds no report of a run" in text
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert fetched(port, "/status.json")[0] == 404
    shutil.copytree(finished, tmp_path / "run")
    assert "round 2 of 2" in fetched(port)[1] and json.loads(fetched(port, "/status.json")[1])["round"] == 2
    (tmp_path / "run" / "report.json").write_text('{"status": ')
    assert fetched(port)[0] == 200 and "cannot be read" in fetched(port)[1]
    shutil.rmtree(tmp_path / "run")
    assert "holds no report of a run" in fetched(port)[1]
    # A page elsewhere, whose name was made to point here, and files beside the report.
    assert fetched(port, host="evil.example")[0] == 403 and fetched(port, host=f"localhost:{port}")[0] == 200
    assert fetched(port, "/report.json")[0] == fetched(port, "/../server.secret")[0] == 404


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_a_browser_runs_no_script_of_a_site(live, running):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={running.folder}/browser", "--dump-dom"]
    done = subprocess.run(
        ["chromium", *flags, f"http://127.0.0.1:{live.server_port}/"], capture_output=True, text=True, check=True,
        timeout=120, env=os.environ | {"HOME": str(running.folder)},
    )  # fmt: skip
    assert "<title>running, round 3 of 12, fedda-mvr - run</title>" in done.stdout
    assert "<script" not in done.stdout and "</main>" in done.stdout


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["absent"], ["absent", "holds no report of a run"]),
        (["absent", "--json", "--serve"], ["--json", "--serve"]),
        (["absent", "--serve", "--port", "70000"], ["--port", "70000"]),
        (["absent", "--serve", "--port", "BUSY"], ["--port", "in use"]),
    ],
)
def test_a_mistake_is_one_line(words, fragments, live, said):
    code, stdout, stderr = said(*(word.replace("BUSY", str(live.server_port)) for word in words))
    assert code == 2 and not stdout
    is_one_line(stderr, *fragments)
