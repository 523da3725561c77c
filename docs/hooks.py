"""What mkdocs does besides rendering pages: files of the repository that pages link to become part of the site, and the
pages of the reference are filled in from the program.

`mkdocs.yml` names this file twice: as hooks of mkdocs, and as an extension of griffe, which reads docstrings.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import griffe
import jupytext
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
CODE = re.compile(r"^(```.*?^```|~~~.*?^~~~)|`[^`\n]+`", re.M | re.S)
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".json": "json", ".csv": "text"}
OUTSIDE = "repository"  # the folder of the site for files from outside docs/
COMMANDS = "<!-- commands: filled in when the site is built -->"
SITE_FILES: dict[Path, str] = {}  # the place on the site of every file outside docs/ that a page links to


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside docs/: pages as pages, pictures as they are, sources as pages that show them."""
    SITE_FILES.clear()
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    while pages:
        for target in outside(page := pages.pop(), page.read_text()):
            if target in SITE_FILES:
                continue
            path = f"{OUTSIDE}/{target.relative_to(ROOT).as_posix()}"
            if target.suffix == ".md":
                pages.append(target)
                added = File.generated(config, path, abs_src_path=str(target))
            elif target.suffix in LANGUAGES:
                text = f"# {target.relative_to(ROOT)}\n\n~~~{LANGUAGES[target.suffix]}\n{target.read_text()}\n~~~\n"
                added = File.generated(config, path := f"{path}.md", content=text)
            else:
                added = File.generated(config, path, abs_src_path=str(target))
            SITE_FILES[target] = path
            files.append(added)
    for source in sorted((DOCS / "notebooks").glob("*.py")):  # to download and open in Jupyter
        if source.with_suffix(".md").exists():
            SITE_FILES[source] = f"notebooks/{source.stem}.ipynb"
            notebook = jupytext.writes(jupytext.read(source), fmt="ipynb")
            files.append(File.generated(config, SITE_FILES[source], content=notebook))
    return files


def outside(page: Path, text: str) -> list[Path]:
    """The files outside docs/ that a page links to."""
    found = [resolve(page, link) for link in LINK.findall(CODE.sub("", text)) if "://" not in link]
    return [path for path in found if path.is_file() and DOCS not in path.parents]


def resolve(page: Path, link: str) -> Path:
    """The file that a link leads to; a folder's is its README.md."""
    path = (page.parent / link).resolve()
    return path / "README.md" if path.is_dir() else path


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to their places on the site, and the reference of the command line."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_line())
    here = page.file.src_uri
    if not (source := page.file.abs_src_path):  # a page made from a source file
        return markdown

    def place(link: re.Match[str]) -> str:
        if "://" in link[1]:
            return link[1]
        path = resolve(Path(source), link[1])
        if path in SITE_FILES:
            target = SITE_FILES[path]
        elif DOCS in path.parents:
            target = path.relative_to(DOCS).as_posix()
        else:
            return link[1]  # mkdocs complains
        return os.path.relpath(target, Path(here).parent)

    parts, end = [], 0
    for code in CODE.finditer(markdown):  # links in code stay as they are
        parts += [LINK.sub(place, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(place, markdown[end:])])


def command_line() -> str:
    """Every command with its arguments and options, from the program itself."""
    with warnings.catch_warnings(action="ignore"):  # typer uses a part of click that is going away
        import typer

        from fedda.cli.app import app

    group = typer.main.get_command(app)
    builtin = [command for name, command in sorted(group.commands.items()) if not command.hidden]
    return "\n\n".join(section for command in builtin for section in described(command, f"fedda {command.name}"))


def described(command: Any, path: str) -> list[str]:
    """The sections of one command, and those of the commands in it."""
    text = plain(command.help or "")
    if subcommands := getattr(command, "commands", None):
        found = [f"## {path}\n\n{text}"]
        for name, own in subcommands.items():
            found += described(own, f"{path} {name}")
        return found
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *(p.make_metavar(None) for p in arguments)])
    level = "##" if path.count(" ") == 1 else "###"
    parts = [f"{level} {path}", text, f"```text\n{usage}\n```"]
    if helped := [p for p in arguments if getattr(p, "help", None)]:
        rows = [f"| `{p.make_metavar(None)}` | {cell(p.help)} |" for p in helped]
        parts.append("\n".join(["| argument | meaning |", "| --- | --- |", *rows]))
    panels: dict[str, list[Any]] = {}
    for option in options:
        panels.setdefault(getattr(option, "rich_help_panel", None) or "Options", []).append(option)
    for title, own in panels.items():
        rows = [f"| {names(option)} | {cell(option.help)} | {default(option)} |" for option in own]
        parts.append("\n".join([f"| {title} | meaning | default |", "| --- | --- | --- |", *rows]))
    if command.epilog:
        parts.append(plain(command.epilog))
    return ["\n\n".join(filter(None, parts))]


def names(option: Any) -> str:
    value = option.metavar or option.type.name.upper()
    values = "" if option.is_flag or option.count else f" {value}"
    if choices := getattr(option.type, "choices", None):
        values = " " + " or ".join(map(str, choices))
    shown = [*option.opts, *option.secondary_opts]
    return " ".join(f"`{name}{'' if option.is_flag else values}`" for name in shown)


def default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value == () or callable(value) or "UNSET" in repr(value):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def cell(text: str | None) -> str:
    return plain(text or "").replace("\n", " ").replace("|", "\\|")


def plain(text: str) -> str:
    """Text without the markup of the terminal."""
    return re.sub(r"\[/?(?:bold|dim|italic|cyan|green|red|yellow)\]", "", text).replace("\b", "").strip()


class Doctests(griffe.Extension):
    """Show doctests in docstrings as code. Markdown would take `>>>` for a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = re.sub(
                r"(^>>> .*?)(?=\n[ \t]*\n|\Z)", r"```pycon\n\1\n```", obj.docstring.value, flags=re.M | re.S
            )
