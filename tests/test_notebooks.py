"""The notebooks of the documentation run, and their pages show the code that runs."""

import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"
spec = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)


@pytest.mark.parametrize("source", build.SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_page_shows_it(source, tmp_path):
    """To write the pages anew: python docs/notebooks/build.py"""
    text, pictures = build.page(source.stem, build.execute(source, tmp_path))
    kept = source.with_suffix(".md").read_text()
    assert build.OUTPUT.sub("", text) == build.OUTPUT.sub("", kept)
    assert len(pictures) >= 3 and all((FOLDER / name).is_file() and name in kept for name in pictures)
