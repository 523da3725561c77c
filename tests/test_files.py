"""The files of runs: who has them, and that they are whole."""

import errno
import subprocess
import sys
import threading
import time

import filelock
import pytest

from commands import ENVIRONMENT
from fedda import files

HOLDER = """
import sys, time
from pathlib import Path
from fedda.files import alone
with alone(Path(sys.argv[1])) as ours:
    print(ours, flush=True)
    time.sleep(600)
"""


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path):
    file = tmp_path / "locks" / "one"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, file], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert holder.stdout.readline() == "True\n"
        with files.alone(file) as ours:
            assert not ours
        waited = []

        def wait():
            with files.alone(file, wait=True) as ours:
                waited.append(ours)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        assert not waited
    finally:
        holder.kill()
        holder.wait()
    thread.join(30)
    assert waited == [True]
    with files.alone(file) as ours:
        assert ours


def test_a_file_system_without_locks_lets_everybody_in(tmp_path, monkeypatch):
    def refuses(handle, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "lock_descriptor", refuses)
    with files.alone(tmp_path / "one") as first, files.alone(tmp_path / "one") as second:
        assert first and second


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_a_file_is_written_where_folders_have_no_handles(tmp_path, monkeypatch, system):
    monkeypatch.setattr(files, "open_folder", lambda path: None) if system == "nt" else None
    files.write_whole(tmp_path / "one", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("one", b"new")]
