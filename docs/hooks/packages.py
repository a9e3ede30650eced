"""Copies the packages that docs/tools/npm.py has fetched into the site."""

import re
import sys
from base64 import b64encode
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from repository import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import npm as npm  # for hooks that run a program of npm

MODULES = ROOT / ".cache" / "npm" / "node_modules"
#: Folder of the site: package, and the files to copy from it.
ASSETS = {
    "assets/katex": (
        MODULES / "katex" / "dist",
        ["katex.min.css", "fonts/*.woff2"],
    ),
    "assets/fonts": (
        MODULES / "@fontsource",
        [
            "ibm-plex-sans/files/ibm-plex-sans-latin-400-*.woff2",
            "ibm-plex-sans/files/ibm-plex-sans-latin-600-normal.woff2",
            "ibm-plex-sans/files/ibm-plex-sans-greek-400-normal.woff2",
            "ibm-plex-mono/files/ibm-plex-mono-latin-400-*.woff2",
            "ibm-plex-mono/files/ibm-plex-mono-latin-600-normal.woff2",
        ],
    ),
}

#: A face in styles/site.css that is to be there with the first text.
FACE = re.compile(r'(font-display: block;[^}]*url\(")\.\./([^"]+)')


def fetched(package: Path, pattern: str) -> list[Path]:
    """The files of a package; raises a `PluginError` if there are none."""
    if found := sorted(package.glob(pattern)):
        return found
    raise PluginError(
        f"expected {package.relative_to(ROOT) / pattern}, got no such file: "
        "run `python docs/tools/npm.py` once"
    )


def on_files(files, config):
    for target, (package, patterns) in ASSETS.items():
        for pattern in patterns:
            for path in fetched(package, pattern):
                uri = f"{target}/{path.relative_to(package).as_posix()}"
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_post_build(config):
    site = Path(config.site_dir)
    css = site / "styles" / "site.css"

    def data(face: re.Match) -> str:
        letters = b64encode((site / face[2]).read_bytes()).decode()
        return f"{face[1]}data:font/woff2;base64,{letters}"

    css.write_text(FACE.sub(data, css.read_text("utf-8")), "utf-8")
