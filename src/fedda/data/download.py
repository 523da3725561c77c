"""Fetching a data set from its official place, with its checksum; nothing here runs unless it is asked for."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..registry import datasets
from .files import BadFile, home, reading
from .ondisk import ON_DISK, Download, OnDisk

RETRIES = 2  # after 1 and 2 seconds: a connection that was cut once is no reason to begin again by hand
Watch = Callable[[Download], Any]  # gives what pooch tells of its progress: total, update, reset, close


def fetch(name: str, watch: Watch | None = None) -> list[Path]:
    """Bring the files of a data set to the folder of the data, where they are not there already; give their paths."""
    if name not in ON_DISK:
        datasets.find(name)
        raise ValueError(f"{name}: there is nothing to fetch, it comes with an installed package")
    data = ON_DISK[name]
    if not present(data):
        if not data.downloads:
            raise ValueError(data.absent([[] for _ in data.files]))
        for download in data.downloads:
            file = retrieve(name, download, watch)
            if download.members:
                extract(file, download.members)
        data()  # read once: what was fetched can be used
    return [path for group in data.found() for path in group]


def present(data: OnDisk) -> bool:
    """Whether the files are there, can be read, and hold as many samples as the published ones."""
    try:
        found = data()
    except ValueError:
        return False
    return not data.train or (len(found.y), len(found.y_test)) == (data.train, data.test)


def retrieve(name: str, download: Download, watch: Watch | None) -> Path:
    """One file, put in its place only when its checksum is right."""
    import pooch  # type: ignore[import-untyped]
    import requests

    place = home() / download.file
    place.parent.mkdir(parents=True, exist_ok=True)
    pooch.get_logger().setLevel("WARNING")
    loader = pooch.HTTPDownloader(progressbar=watch(download) if watch else False, timeout=30)
    try:
        registry, urls = {place.name: f"md5:{download.md5}"}, {place.name: download.url}
        files = pooch.create(place.parent, base_url="", registry=registry, urls=urls, retry_if_failed=RETRIES)
        files.fetch(place.name, downloader=loader)
    except requests.RequestException as why:
        raise ValueError(failed(name, download, reason(why))) from None
    except ValueError as why:
        if "hash" not in str(why):
            raise
        raise ValueError(failed(name, download, "what came has another checksum, it was thrown away")) from None
    return place


def failed(name: str, download: Download, why: str) -> str:
    by_hand = f"put that file at {home() / download.file} and call again: fedda data fetch {name}"
    return f"{name}: cannot download {download.url}: {why}; try later, or {by_hand}"


def reason(why: Exception) -> str:
    import requests

    response = getattr(why, "response", None)
    if response is not None:
        return f"the server answers {response.status_code}"
    if isinstance(why, requests.Timeout):
        return "no answer in time"
    if isinstance(why, requests.exceptions.ChunkedEncodingError):
        return "the connection was cut"
    return "no connection" if isinstance(why, requests.ConnectionError) else type(why).__name__


def extract(archive: Path, members: tuple[str, ...]) -> None:
    """Take the files that are expected out of a .tar.gz, and nothing else; each appears whole or not at all."""
    with reading(archive, ".tar.gz archive"), tarfile.open(archive, "r:gz") as tar:
        for member in tar:  # in the archive's order: it is unpacked once
            if member.name not in members:
                continue
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None:
                raise BadFile(archive, f"{member.name} in it must be a plain file")
            place = archive.parent / member.name
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, stream.read(), 0o644)
    for name in members:
        if not (archive.parent / name).is_file():
            raise BadFile(archive, f"must hold {name}")
