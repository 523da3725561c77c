"""The documentation site: it builds without a warning, needs no other host, and its reference leaves nothing out."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fedda
from fedda.cli.app import app
from fedda.experiments.config import Experiment, ProblemTable

ROOT = Path(__file__).parent.parent
RESOURCE = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\s\">]+", re.I)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_a_page_asks_no_other_host_for_anything(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        # The one link that is not a resource: the canonical address of a page, which this site has not.
        assert not (found := RESOURCE.findall(page.read_text())), f"{page.relative_to(site)}: {found}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet.relative_to(site)


def test_the_reference_has_every_public_name(site):
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    shown = set(re.findall(r'id="(fedda[\w.]*)"', text))
    modules = {"algorithms": "algorithms/README.md"}  # a page for each algorithm
    for name in set(fedda.__all__) - set(modules):
        value = getattr(fedda, name)
        home = value.__name__ if hasattr(value, "__path__") or hasattr(value, "__file__") else f"fedda.{name}"
        assert {f"fedda.{name}", home} & shown, f"docs/reference: no page has fedda.{name}"


def test_the_reference_has_every_command(site):
    text = (site / "reference" / "command-line.html").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        for path in [f"{name} {own}" for own in getattr(command, "commands", {})] or [name]:
            assert f">fedda {path}<" in text, path


def test_the_reference_has_every_key_of_an_experiment():
    page = (ROOT / "docs" / "reference" / "toml.md").read_text()
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    known = set(re.findall(r"`(\w+)`", rows))
    fields = {*Experiment.model_fields, *ProblemTable.model_fields} - {"problem", "algorithms"}
    assert known == fields


@pytest.mark.parametrize("repository", [None, "https://example.org/fedda"])
def test_the_description_of_the_package_has_no_relative_links(repository):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.description((ROOT / "README.md").read_text(), repository)
    assert "pip install 'fedda[report]'" in text and "## Twelve lines" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert ("![" in text) == (repository is not None)
