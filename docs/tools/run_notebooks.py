"""Execute the notebooks in place, so that git contains what readers see.

On the same machine the same code gives the same bytes, except in cells tagged
`nbval-ignore-output`: cell ids stay; timings and other traces of a run are
removed. On another processor the coordinates in a picture may differ in their
last digits; tests/pictures.py says what may not.

    python docs/tools/run_notebooks.py [NOTEBOOK ...]
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


def execute(path: Path) -> None:
    """Run one notebook, and write it back."""
    notebook = nbformat.read(path, as_version=4)
    os.environ["FWLAB_PROGRESS"] = ""  # nobody answers here
    NotebookClient(
        notebook,
        timeout=1200,
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
