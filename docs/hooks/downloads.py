"""Build the downloads: a wheel of the package, and two copies of each notebook.

The wheel is at the root of the site, and {{ wheel }} in a page is its name. The
setup cell of a notebook installs a wheel that it finds next to it. The copy in
`working` has no outputs until the reader has run it, the copy in `results` has them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from repository import ROOT

from fwlab.exercises.handouts import working_edition

BUILD = (
    "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
)


def on_files(files, config):
    name, wheel = build()
    config.extra["wheel"] = name
    files.append(File.generated(config, name, content=wheel))
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        text = path.read_text("utf-8")
        working = json.dumps(working_edition(json.loads(text)), ensure_ascii=False)
        for folder, content in (("working", working), ("results", text)):
            uri = f"notebooks/{folder}/{path.name}"
            files.append(File.generated(config, uri, content=content))
    return files


def build() -> tuple[str, bytes]:
    """Build the wheel offline with setuptools, and return its name and content.

    Errors: `PluginError` if there is no wheel, with the reason.
    """
    with TemporaryDirectory() as folder:
        # Build from a copy, since setuptools leaves files next to the sources.
        tree, out = Path(folder, "tree"), Path(folder, "out")
        no_cache = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "fwlab", tree / "fwlab", ignore=no_cache)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        command = [sys.executable, "-c", BUILD, str(out)]
        done = subprocess.run(command, cwd=tree, capture_output=True, encoding="utf-8")
        if done.returncode:
            raise PluginError(f"setuptools could not build the wheel:\n{done.stderr}")
        (wheel,) = out.glob("*.whl")
        return wheel.name, wheel.read_bytes()
