"""Run the notebooks and write each as a page with its outputs: NAME.py becomes NAME.md, and its pictures go to images/.

python docs/notebooks/build.py

A notebook is a Python file in jupytext's percent format: Jupyter opens it, and it runs as a script.
"""

import base64
import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
import nbclient

HERE = Path(__file__).parent
SOURCES = sorted(path for path in HERE.glob("*.py") if path.name != "build.py")
OUTPUT = re.compile(r"<!-- output -->\n.*?<!-- end -->\n\n", re.S)


def execute(source, folder):
    """The notebook with its outputs, run in a folder; a cell that fails raises."""
    notebook = jupytext.read(source)
    # The kernel of this Python, whatever other kernels are installed.
    kernels = Path(folder) / "share" / "jupyter" / "kernels" / "here"
    kernels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = str(command).replace("'", '"')
    (kernels / "kernel.json").write_text(f'{{"argv": {text}, "display_name": "here", "language": "python"}}')
    os.environ["JUPYTER_PATH"] = str(kernels.parents[1])
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="here", resources={"metadata": {"path": folder}}
    )
    return client.execute()


def page(name, notebook):
    """The page of a notebook, and its pictures by name."""
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            if len(parts) == 1:  # below the heading and the two lines that say what it is for
                parts.append(f"Run it yourself: [the notebook]({name}.py).")
            continue
        parts.append(f"```python\n{cell.source}\n```")
        shown = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stdout":
                shown.append(f"```text\n{output.text.rstrip()}\n```")
            elif picture := output.get("data", {}).get("image/png"):
                file = f"images/{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(picture)
                shown.append(f"![{title(cell.source)}]({file})")
        if shown:
            parts.append("<!-- output -->\n" + "\n\n".join(shown) + "\n<!-- end -->")
    return "\n\n".join(parts) + "\n", pictures


def title(source):
    """What a picture shows, from the labels of its axes."""
    words = re.findall(r"(?:[xy]label|title)=f?\"([^\"{]+)\"", source)
    return ", ".join(dict.fromkeys(words)) or "the plot of this cell"


def main():
    for source in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            text, pictures = page(source.stem, execute(source, folder))
        (HERE / "images").mkdir(exist_ok=True)
        for old in (HERE / "images").glob(f"{source.stem}-*.png"):
            old.unlink()
        for file, content in pictures.items():
            (HERE / file).write_bytes(content)
        source.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
