"""Execute the notebooks in place, so that git holds what a reader sees.

The same code gives the same bytes: cell ids stay, timings and whatever
else a run leaves behind is taken out. The badge and the set-up cell,
which carry the public address of the repository, are written anew from
`repo_url` in mkdocs.yml.

    python docs/tools/notebooks.py [NOTEBOOK ...]
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"


def public_address() -> str:
    """The one setting: `repo_url` in mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    match = re.search(r"^repo_url:\s*(\S+)", text, re.MULTILINE)
    if match is None:
        sys.exit("mkdocs.yml has no repo_url")
    return match[1].rstrip("/")


def colab_link(name: str) -> str:
    """Where Colab opens a notebook of the repository."""
    path = public_address().removeprefix("https://github.com/")
    return f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{name}"


def addressed_cells(name: str) -> dict[str, str]:
    """The sources of the two cells that carry the public address, by id."""
    return {
        "badge": f"[![Open In Colab]({BADGE})]({colab_link(name)})",
        "setup": "# @title Setup: installs fwlab where it is missing, as in Colab\n"
        "import importlib.util\n\n"
        'if importlib.util.find_spec("fwlab") is None:\n'
        f'    %pip install -q "fwlab[train] @ git+{public_address()}@main"',
    }


def execute(path: Path) -> None:
    """Run one notebook and write it back."""
    notebook = nbformat.read(path, as_version=4)
    addressed = addressed_cells(path.name)
    for cell in notebook.cells:
        cell.source = addressed.get(cell.id, cell.source)
    NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    nbformat.validate(notebook)
    nbformat.write(notebook, path)
    print(path.name)


if __name__ == "__main__":
    names = sys.argv[1:] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for name in names:
        execute(Path(name).resolve())
