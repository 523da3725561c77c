"""The files of runs: who has them, and that they are whole."""

import errno
import os
import re
import stat
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import filelock
import pytest

from commands import ENVIRONMENT
from fedda import files
from fedda.runs.folder import Folder

HOLDER = """
import sys, time
from pathlib import Path
from fedda.files import locked
with locked(Path(sys.argv[1])) as ours:
    print(ours, flush=True)
    time.sleep(600)
"""


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path):
    file = tmp_path / "locks" / "one"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, file], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert holder.stdout.readline() == "True\n"
        with files.locked(file) as ours:
            assert not ours
        waited = []

        def wait():
            with files.locked(file, wait=True) as ours:
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
    with files.locked(file) as ours:
        assert ours


def test_a_file_system_without_locks_lets_everybody_in(tmp_path, monkeypatch):
    def refuses(handle, blocking):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock, "lock_descriptor", refuses)
    with files.locked(tmp_path / "one") as first, files.locked(tmp_path / "one") as second:
        assert first and second


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    file = files.write_whole(tmp_path / "one", "old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted(handle):
        raise KeyboardInterrupt

    for name, fails in product(("fsync", "replace"), (full, interrupted)):
        with monkeypatch.context() as broken, pytest.raises((OSError, KeyboardInterrupt)) as why:
            broken.setattr(f"os.{name}", lambda *given, fails=fails: fails(given[0]))
            files.write_whole(file, "new")
        assert fails is interrupted or (why.value.filename, why.value.errno) == (str(file), errno.ENOSPC)
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one", "old")]
    with pytest.raises(OSError) as why:
        files.write_whole(tmp_path / "absent" / "one", "new")
    assert why.value.filename == str(tmp_path / "absent" / "one") and "None" not in str(why.value)


def test_a_secret_is_its_owner_s_from_its_first_byte_on(tmp_path):
    file = files.write_whole(tmp_path / "secret", b"s", files.PRIVATE)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = os.umask(0o077)
    try:
        assert stat.S_IMODE(files.write_whole(tmp_path / "open", b"o", 0o644).stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_there_is_one_writer_of_whole_files():
    """A file is renamed into its place in one module; two others rename folders."""
    source = Path(files.__file__).parent
    renames = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"os\.(replace|rename)\(|mkstemp|NamedTemporaryFile", path.read_text())
    }
    assert renames == {"files.py", "data/cache.py", "runs/folder.py"}


@pytest.mark.parametrize("system", ["posix", "nt"])
def test_a_file_is_written_where_folders_have_no_handles(tmp_path, monkeypatch, system):
    monkeypatch.setattr(files, "open_folder", lambda path: None) if system == "nt" else None
    files.write_whole(tmp_path / "one", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("one", b"new")]


@pytest.fixture
def calls(monkeypatch):
    """What is synced and renamed, in order."""
    made, sync, rename = [], os.fsync, os.replace

    def fsync(handle):
        made.append(("sync", os.path.realpath(f"/proc/self/fd/{handle}")))
        sync(handle)

    def replace(old, new):
        made.append(("name", str(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    return made


def in_folder(path, content):
    Folder(path.parent).write(path.name, content)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the names of open files")
@pytest.mark.parametrize("write", [files.write_whole, in_folder])
def test_the_content_is_on_the_disk_before_the_name(write, tmp_path, calls):
    write(tmp_path / "state", b"new")
    (content, named), (name, final), (folder, place) = calls
    assert (content, name, folder) == ("sync", "name", "sync")
    assert named.startswith(f"{tmp_path / 'state'}.") and named.endswith(".tmp")
    assert final == str(tmp_path / "state") and place == str(tmp_path)
    assert (tmp_path / "state").read_bytes() == b"new"
