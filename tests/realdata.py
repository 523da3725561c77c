"""Real data for the tests: $FEDDA_TEST_DATA, or unpacked once from the archive beside the checkout, or skipped."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

UNPACK = Path(__file__).parents[2] / "shared" / "data" / "unpack.py"
# What each set of the archive is unpacked to.
FILES = {
    "cifar10": ["cifar-10-batches-py"],
    "femnist": ["femnist"],
    "mnist": ["mnist-by-writer.npz"],
    "crchisto": ["crchisto.npz", "crchisto-by-patient.npz"],
}
# FEMNIST is 220 MB of JSON, a minute's work to write and to read. Every ninth writer is enough: 60 of 540, in all twelve
# files of each part. Some of them have all their images, others a tenth.
FEW = """
import sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
import imgpack, unpack
whole = imgpack.load
def few(file):
    found = whole(file)
    kept = found["writer"] % 9 == 0
    return {"x": found["x"][kept], "y": found["y"][kept], "writer": found["writer"][kept] // 9,
            "writer_ids": found["writer_ids"][::9]}
imgpack.load = few
unpack.femnist(Path(sys.argv[2]))
"""


def folder(name):
    """A folder of data, as FEDDA_DATA names one, with this set of the archive in it."""
    if given := os.environ.get("FEDDA_TEST_DATA"):
        if not all((Path(given) / file).exists() for file in FILES[name]):
            pytest.skip(f"$FEDDA_TEST_DATA has no {name}")
        return Path(given)
    if not UNPACK.exists():
        pytest.skip("no real data: set FEDDA_TEST_DATA to a folder that has it")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    place = Path(tempfile.gettempdir()) / f"fedda-test-data-{user}"
    place.mkdir(mode=0o700, exist_ok=True)
    if name == "femnist":
        place = place / "few"
        place.mkdir(exist_ok=True)
    with FileLock(place / f"{name}.lock"):  # one process unpacks, the others wait for it
        if not all((place / file).exists() for file in FILES[name]):
            aside = Path(tempfile.mkdtemp(dir=place))
            words = ["-c", FEW, UNPACK.parent, aside] if name == "femnist" else [UNPACK, aside, name]
            try:
                subprocess.run([sys.executable, *words], check=True, capture_output=True)
                for file in FILES[name]:  # whole, or not there, however this process ends
                    if not (place / file).exists():
                        os.rename(aside / file, place / file)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return place
