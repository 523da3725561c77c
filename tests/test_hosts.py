"""Two hosts: network namespaces with a cable between them, and the launch lines of docs/scaling.md in each."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commands import ENVIRONMENT, IMPORTED, fedda
from test_distributed import close
from warm import standing_in

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
LAUNCH, SLURM = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
HOSTS = [f"fedda-{os.getpid()}-{i}" for i in range(2)]
CABLES = [f"fd{os.getpid() % 10**6}{end}" for end in "ab"]


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    """Their addresses; nothing of them is left at the end."""
    if shutil.which("ip") is None or ip("netns", "add", HOSTS[0], check=False).returncode:
        pytest.skip("needs iproute2 and the right to make network namespaces")
    try:
        ip("netns", "add", HOSTS[1])
        ip("link", "add", CABLES[0], "type", "veth", "peer", "name", CABLES[1])
        addresses = []
        for i, (host, cable) in enumerate(zip(HOSTS, CABLES, strict=True)):
            ip("link", "set", cable, "netns", host)
            addresses.append(f"10.77.0.{i + 1}")
            ip("-n", host, "addr", "add", f"{addresses[i]}/24", "dev", cable)
            for device in ("lo", cable):
                ip("-n", host, "link", "set", device, "up")
        yield addresses
    finally:
        for host in HOSTS:
            pids = ip("netns", "pids", host, check=False).stdout.split()
            subprocess.run(["kill", "-9", *pids], capture_output=True) if pids else None
            ip("netns", "del", host, check=False)
        assert not set(HOSTS) & {line.split()[0] for line in ip("netns").stdout.splitlines() if line}
        assert not any(cable in ip("link").stdout for cable in CABLES)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """torchrun on the path, forked, and stand-ins for SLURM's commands: srun runs its words on every host at once."""
    place = tmp_path_factory.mktemp("bin")
    programs = {
        "scontrol": '#!/bin/sh\n[ "$*" = "show hostnames two-hosts" ] && echo 10.77.0.1 && echo 10.77.0.2\n',
        "srun": "#!/bin/bash\n" + "".join(
            f'SLURM_NODEID={i} GLOO_SOCKET_IFNAME={cable} ip netns exec {host} "$@" & jobs+=($!)\n'
            for i, (host, cable) in enumerate(zip(HOSTS, CABLES, strict=True))
        ) + 'for job in "${jobs[@]}"; do wait $job || failed=1; done; exit ${failed:-0}\n',
    }  # fmt: skip
    for name, text in programs.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    with standing_in(place, {"torchrun": torchrun}, ENVIRONMENT, *IMPORTED):
        yield {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    done = fedda("run", "digits", "--rounds", 20, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_two_hosts_as_one_process(hosts, tools, alone, tmp_path):
    """The second host cannot even see the first one's folder: it works in one of its own."""
    processes = []
    for i, host in enumerate(HOSTS):
        (tmp_path / f"host{i}").mkdir()
        environment = ENVIRONMENT | tools | {"NODE": str(i), "HEAD": hosts[0], "GLOO_SOCKET_IFNAME": CABLES[i]}
        words = ["ip", "netns", "exec", host, "bash", "-c", LAUNCH]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(words, cwd=tmp_path / f"host{i}", env=environment, **how))
    for process in processes:
        printed, _ = process.communicate(timeout=600)
        assert process.returncode == 0, printed
    close(tmp_path / "host0" / "runs" / "hosts", alone, 2e-5)
    assert json.loads((tmp_path / "host0/runs/hosts/environment.json").read_text())["processes"] == 2
    assert not (tmp_path / "host1" / "runs").exists()


def test_a_slurm_job(hosts, tools, alone, tmp_path):
    slurm = {"SLURM_JOB_NODELIST": "two-hosts", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", "-c", SLURM],
        cwd=tmp_path,
        env=ENVIRONMENT | tools | slurm,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    close(tmp_path / "runs" / "slurm", alone, 2e-5)
