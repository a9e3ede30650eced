"""Set the public address of the repository everywhere, or remove it.

    python docs/tools/address.py URL [--site SITE]

URL is the page of the repository, as a browser shows it; an empty URL
removes the address again. SITE is where the site will be published. For a
repository on GitHub, the default is its address on GitHub Pages.

The address is set in mkdocs.yml, where the hooks of the site look it up,
and copied to the files that cannot look it up: README.md, CITATION.cff,
pyproject.toml, and two cells of each notebook.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1] / "hooks"))
from repository import BRANCH, ROOT, colab

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
URL = re.compile(r"https?://[A-Za-z0-9.-]+(:\d+)?(/[A-Za-z0-9._~-]+)*")

#: The first code cell of each notebook. It also runs with nothing but the
#: notebook and a wheel, and in IPython 7, which Colab has. It passes the
#: version of the installed torch to pip, so that pip keeps it.
SETUP = """\
# @title Setup: finds fwlab, or installs it
import os
import subprocess
import sys
from importlib import invalidate_caches, metadata, util
from pathlib import Path

from IPython.core.error import UsageError

wheels = sorted(Path.cwd().glob("fwlab-*-any.whl"), key=os.path.getmtime)
source = wheels[-1] if wheels else os.getenv("FWLAB_SOURCE")
if getattr(util.find_spec("fwlab"), "origin", None):
    pass  # it is installed
elif not wheels and Path("../fwlab/__init__.py").exists():
    sys.path.insert(0, str(Path.cwd().parent))  # this is a checkout
elif not source:
    where = f"into the folder {Path.cwd()}, and run this cell again"
    raise UsageError(f"fwlab is missing: put its wheel, fwlab-*.whl, {where}.")
else:
    if Path(source).exists():
        source = Path(source).resolve().as_uri()
    keep = [f"torch=={t.version}" for t in metadata.distributions(name="torch")]
    pip = [sys.executable, "-m", "pip", "install", "-qq", *keep]
    done = subprocess.run([*pip, f"fwlab[train] @ {source}"], capture_output=True)
    invalidate_caches()
    if done.returncode:
        why = done.stderr.decode(errors="replace")
        raise UsageError(f"pip could not install fwlab from {source}: {why}")"""


@dataclass(frozen=True)
class Address:
    """The address of the repository, and of its site; "" if not set.

    - `repository`: without a "/" at its end.
    - `site`: with a "/" at its end.
    """

    repository: str = ""
    site: str = ""

    @classmethod
    def of(cls, url: str, site: str = "") -> "Address":
        """From what a user typed.

        Errors: `ValueError`, with a sentence, if it is not an address.
        """
        url = url.strip().rstrip("/").removesuffix(".git")
        site = site.strip().rstrip("/")
        names = urlsplit(url).path.strip("/").split("/")
        if url and not (URL.fullmatch(url) and len(names) > 1):
            raise ValueError(f"{url!r} is not the address of a repository.")
        if url and urlsplit(url).netloc == "github.com":
            if len(names) != 2:
                raise ValueError(f"{url!r} is a page of GitHub, not a repository.")
            site = site or _github_pages(*names)
        if site and not URL.fullmatch(site):
            raise ValueError(f"{site!r} is not the address of a site.")
        return cls(url, f"{site}/" if site else "")

    @property
    def pip(self) -> str:
        """What pip installs from, "" if there is no address."""
        return f"git+{self.repository}@{BRANCH}" if self.repository else ""


def _github_pages(owner: str, name: str) -> str:
    host = f"{owner}.github.io".lower()
    return f"https://{host}" if name.lower() == host else f"https://{host}/{name}"


def current() -> Address:
    """The address that is set in mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    keys = dict(re.findall(r"^(repo_url|site_url): *(\S+)", text, re.MULTILINE))
    return Address(keys.get("repo_url", ""), keys.get("site_url", ""))


#: File: the lines that contain the address, and the line before them.
PLACES = {
    "mkdocs.yml": (r"(repo|site)_url:", r"# puts them after this line"),
    "README.md": (r'pip install "fwlab @ ', r"pip install .*fwlab-"),
    "CITATION.cff": (r"(url|repository-code):", r"license:"),
    "pyproject.toml": (r"urls = ", r"dependencies = "),
}


def _lines(address: Address) -> dict[str, list[str]]:
    """The lines that each file of PLACES has for an address."""
    repository, site = address.repository, address.site
    named = {"Repository": repository, "Documentation": site}
    urls = ", ".join(f'{key} = "{url}"' for key, url in named.items() if url)
    lines = {
        "mkdocs.yml": {
            f"repo_url: {repository}": repository,
            f"site_url: {site}": site,
        },
        "README.md": {f'pip install "fwlab @ {address.pip}"': repository},
        "CITATION.cff": {
            f"url: {site}": site,
            f"repository-code: {repository}": repository,
        },
        "pyproject.toml": {f"urls = {{ {urls} }}": urls},
    }
    return {
        file: [line for line, of in given.items() if of]
        for file, given in lines.items()
    }


def with_lines(text: str, old: str, after: str, new: list[str]) -> str:
    """Replace the lines of a text that begin with `old` by `new`.

    - `old`, `after`: regular expressions; one line must begin with `after`.
    """
    kept = [line for line in text.split("\n") if not re.match(old, line)]
    (place,) = (i for i, line in enumerate(kept) if re.match(after, line))
    return "\n".join([*kept[: place + 1], *new, *kept[place + 1 :]])


def with_cells(cells: list[Any], name: str, address: Address) -> list[Any]:
    """The cells of a notebook, with the address in its two cells.

    The badge is the first cell, and exists only if Colab can open the
    notebook. The set-up cell must exist already.

    - `name`: the notebook's file.
    """
    (setup,) = (cell for cell in cells if cell["id"] == "setup")
    setup["source"] = SETUP
    if address.pip:
        with_default = SETUP.replace('("FWLAB_SOURCE")', '("FWLAB_SOURCE") or address')
        line = f'address = "{address.pip}"\n'
        setup["source"] = with_default.replace("wheels =", f"{line}wheels =", 1)
    cells = [cell for cell in cells if cell["id"] != "badge"]
    if link := colab(address.repository, f"notebooks/{name}"):
        badge = f"[![Open In Colab]({BADGE})]({link})"
        made = {"cell_type": "markdown", "id": "badge", "metadata": {}}
        cells.insert(0, {**made, "source": badge})
    return cells


def rewrite_notebook(path: Path, address: Address) -> None:
    """Write the address into a notebook, and change nothing else."""
    book = json.loads(path.read_text(encoding="utf-8"))
    book["cells"] = with_cells(book["cells"], path.name, address)
    for cell in book["cells"]:
        if isinstance(cell["source"], str):
            cell["source"] = cell["source"].splitlines(keepends=True)
    # As nbformat writes it.
    text = json.dumps(book, ensure_ascii=False, indent=1, sort_keys=True)
    _write(path, text + "\n")


def rewrite(address: Address) -> None:
    """Write the address into every file that contains it."""
    for name, lines in _lines(address).items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        _write(path, with_lines(text, *PLACES[name], lines))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        rewrite_notebook(path, address)


def _write(path: Path, text: str) -> None:
    # To make, every written file looks new.
    if path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--site", default="", metavar="SITE")
    given = parser.parse_args()
    try:
        address = Address.of(given.url, given.site)
    except ValueError as error:
        sys.exit(str(error))
    rewrite(address)
    print(f"repository: {address.repository or 'not set'}")
    print(f"site: {address.site or 'not set'}")


if __name__ == "__main__":
    main()
