"""The downloads: the package as a wheel, and two editions of each notebook.

The wheel is at the root of the site, and {{ wheel }} in a page is its name. The
setup cell of a notebook installs a wheel that it finds next to it. mkdocs-jupyter
puts the notebook itself, with its results, next to its page; the edition for
working, in the folder beside, shows nothing before the reader has run it.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from repository import ROOT

from fwlab.exercises.handouts import working_edition

#: The files that go into a wheel.
PARTS = ("pyproject.toml", "README.md", "LICENSE", "fwlab")
#: The earliest date in a wheel, so that the same files give the same bytes.
EPOCH = "315532800"
BUILD = (
    "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
)


def on_files(files, config):
    name, wheel = build()
    config.extra["wheel"] = name
    files.append(File.generated(config, name, content=wheel))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        uri, content = (
            f"notebooks/working/{path.name}",
            working(path.read_text("utf-8")),
        )
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown.replace("{{ wheel }}", config.extra["wheel"])


def build() -> tuple[str, bytes]:
    """Name and content of the wheel. Needs setuptools, and no network.

    Errors: `PluginError` if there is no wheel, with the reason.
    """
    with TemporaryDirectory() as folder:
        # In a copy: setuptools leaves files next to those that it builds.
        tree, out = Path(folder, "tree"), Path(folder, "out")
        tree.mkdir()
        for part in PARTS:
            if (ROOT / part).is_dir():
                left = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / part, tree / part, ignore=left)
            else:
                shutil.copy(ROOT / part, tree)
        # The wheel keeps permissions, which depend on who checked out.
        for path in tree.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(out)],
            cwd=tree,
            env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH},
            capture_output=True,
            encoding="utf-8",
        )
        if done.returncode:
            raise PluginError(f"setuptools could not build the wheel:\n{done.stderr}")
        (wheel,) = out.glob("*.whl")
        return wheel.name, wheel.read_bytes()


def working(notebook: str) -> bytes:
    """A notebook without what its cells have shown."""
    content = working_edition(json.loads(notebook))
    return f"{json.dumps(content, ensure_ascii=False, indent=1)}\n".encode()
