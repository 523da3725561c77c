"""Downloads of data sets from their official sources, with checksums; only `fedda data fetch` runs this."""

import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..extras import needed_for
from ..files import write_whole
from ..registry import datasets
from .files import BadFile, data_folder, reading
from .from_files import FILE_DATASETS, Download, FileDataset

RETRIES = 2  # after 1 and 2 seconds
ProgressBar = Callable[[Download], Any]  # makes a progress bar for pooch: total, update, reset, close


def fetch(name: str, progress: ProgressBar | None = None) -> list[Path]:
    """Download the files of a data set to the data folder, if they are not there already; return their paths."""
    if name not in FILE_DATASETS:
        datasets.find(name)
        raise ValueError(f"{name}: there is nothing to fetch: it comes with fedda")
    data = FILE_DATASETS[name]
    if not is_complete(data):
        if not data.downloads:
            raise ValueError(data.describe_absent([[] for _ in data.files]))
        for download in data.downloads:
            file = retrieve(name, download, progress)
            if download.members:
                extract(file, download.members)
        data()  # check that the files can be read
    return [path for group in data.paths() for path in group]


def is_complete(data: FileDataset) -> bool:
    """Whether the files can be read and hold the published number of samples."""
    try:
        content = data()
    except ValueError:
        return False
    return not data.train or (len(content.y), len(content.y_test)) == (data.train, data.test)


def retrieve(name: str, download: Download, progress: ProgressBar | None) -> Path:
    """Download one file; it appears under its name only if its checksum is right."""
    with needed_for("a download"):
        import pooch  # type: ignore[import-untyped]
        import requests

    path = data_folder() / download.file
    path.parent.mkdir(parents=True, exist_ok=True)
    pooch.get_logger().setLevel("WARNING")
    loader = pooch.HTTPDownloader(progressbar=progress(download) if progress else False, timeout=30)
    try:
        registry, urls = {path.name: f"md5:{download.md5}"}, {path.name: download.url}
        files = pooch.create(path.parent, base_url="", registry=registry, urls=urls, retry_if_failed=RETRIES)
        files.fetch(path.name, downloader=loader)
    except requests.RequestException as why:
        raise ValueError(failure(name, download, reason(why))) from None
    except ValueError as why:
        if "hash" not in str(why):
            raise
        raise ValueError(failure(name, download, "the checksum is wrong, so the file was deleted")) from None
    return path


def failure(name: str, download: Download, why: str) -> str:
    by_hand = f"put that file at {data_folder() / download.file} and call again: fedda data fetch {name}"
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
    """Extract only the expected files from a .tar.gz; each is written completely or not at all."""
    with reading(archive, ".tar.gz archive"), tarfile.open(archive, "r:gz") as tar:
        for member in tar:  # in the order of the archive, so that it is decompressed once
            if member.name not in members:
                continue
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None:
                raise BadFile(archive, f"{member.name} in it must be a plain file")
            path = archive.parent / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, stream.read(), 0o644)
    for name in members:
        if not (archive.parent / name).is_file():
            raise BadFile(archive, f"must hold {name}")
