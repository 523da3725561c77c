"""A file gets its name after its content is on the disk."""

import os

import pytest

from fedda.experiments.folder import Folder
from fedda.files import write_whole


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
@pytest.mark.parametrize("write", [write_whole, in_folder])
def test_the_content_is_on_the_disk_before_the_name(write, tmp_path, calls):
    write(tmp_path / "state", b"new")
    (content, named), (name, final), (folder, place) = calls
    assert (content, name, folder) == ("sync", "name", "sync")
    assert named.startswith(f"{tmp_path / 'state'}.") and named.endswith(".tmp")
    assert final == str(tmp_path / "state") and place == str(tmp_path)
    assert (tmp_path / "state").read_bytes() == b"new"
