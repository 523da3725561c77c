"""Real data for the tests: $FEDDA_TEST_DATA, or unpacked once from the archive beside the checkout, or skipped."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

UNPACK = Path(__file__).parents[2] / "shared" / "data" / "unpack.py"
# What each set of the archive is unpacked to.
FILES = {
    "cifar10": ["cifar-10-batches-py"],
    "femnist": ["femnist"],
    "mnist": ["mnist-by-writer.npz"],
    "crchisto": ["crchisto.npz", "crchisto-by-patient.npz"],
}


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
    if not all((place / file).exists() for file in FILES[name]):
        aside = Path(tempfile.mkdtemp(dir=place))
        try:
            subprocess.run([sys.executable, UNPACK, aside, name], check=True, capture_output=True)
            for file in FILES[name]:  # whole, or not there: other processes may be at it
                if not (place / file).exists():
                    os.rename(aside / file, place / file)
        except OSError:  # another process was faster
            if not all((place / file).exists() for file in FILES[name]):
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return place
