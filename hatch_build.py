"""The README as the package's description: other pages cannot follow its relative links, nor show its pictures.

With `urls.Repository` in pyproject.toml links lead there. Without it, pictures are left out and links become text.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*")
LINK = re.compile(r"(!?\[[^\]]*\]\()(?!https?://)([^)#\s]+)")
TEXT = re.compile(r"\[([^\]]*)\]\((?!https?://)[^)]*\)")


def description(readme: str, repository: str | None) -> str:
    """The README for readers outside the repository."""
    text = readme.replace("In a checkout, with Python", "With Python").replace("pip install '.[", "pip install 'fedda[")
    if repository:
        return LINK.sub(lambda link: f"{link[1]}{repository.rstrip('/')}/{place(link)}/HEAD/{link[2]}", text)
    return TEXT.sub(r"\1", IMAGE.sub("", text))


def place(link: re.Match[str]) -> str:
    return "raw" if link[1].startswith("!") else "blob"


class ReadmeHook(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict) -> None:
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = description(readme, metadata.get("urls", {}).get("Repository"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
