"""A test run that ends leaves nothing behind, however it ends.

`watch()` marks the environment of this process, so that everything it starts carries the mark, and starts a watchdog.
When this process has ended (well, by Ctrl-C, by `timeout`, by SIGKILL), the watchdog ends every process that carries the
mark, in whichever session or network namespace it is, and removes the namespaces that were made here.

A worker of pytest-xdist has a watchdog of its own. If the first process is killed, its watchdog ends the workers, and
theirs end what they have started. Where there is no /proc, nothing is watched.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "FEDDA_TEST_RUN"
PROC = Path("/proc")
POLL = 0.2  # seconds


def watch() -> None:
    """Start the watchdog of this process."""
    if not (PROC / "self" / "environ").exists():
        return
    os.environ[MARK] = f"{os.getpid()}-{os.urandom(8).hex()}"
    words = [sys.executable, "-S", "-E", __file__, str(os.getpid()), os.environ[MARK]]
    # Its environment has no mark, neither this one nor that of a test that has started this process.
    bare = {"PATH": os.environ.get("PATH", os.defpath)}
    nothing = subprocess.DEVNULL
    subprocess.Popen(words, env=bare, stdin=nothing, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True)


def marked(mark: str) -> list[int]:
    """The processes that carry the mark."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for place in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or it is somebody else's
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def end(mark: str, seconds: float = 30.0) -> None:
    """End all of them. One may start another in the meantime, so look again until there is none."""
    deadline = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL / 4)


def remove_networks(parent: int) -> None:
    """The namespaces (and a cable that was not plugged in yet) of the process with this number."""

    def ip(*words: str) -> str:
        return subprocess.run(["ip", *words], capture_output=True, text=True, check=False).stdout

    with suppress(OSError):  # there is no such command
        for line in ip("netns", "list").splitlines():
            name = line.split()[0] if line else ""
            if name == f"fedda-flower-{parent}" or name.startswith(f"fedda-{parent}-"):
                ip("netns", "del", name)
        if f"fd{parent % 10**6}a" in ip("link"):
            ip("link", "del", f"fd{parent % 10**6}a")


def main(parent: int, mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent:
        time.sleep(POLL)
    end(mark)
    remove_networks(parent)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
