"""Check the scripts of the site.

    python docs/tools/scripts.py

oxlint looks for names that do not exist or are not used, and for common mistakes;
tsc checks the types of the modules of docs/figures that begin with // @ts-check.
"""

import subprocess
import sys

from npm import DOCS, MODULES, fetch, program

CHECKS = {
    "oxlint": ["--deny-warnings", "-c", ".oxlintrc.json", "figures", "scripts"],
    "tsc": ["--project", "jsconfig.json"],
}


def main() -> None:
    fetch(tools=True)
    node, folder = program("node"), MODULES / ".bin"
    codes = [
        subprocess.run([*node, folder / name, *options], cwd=DOCS).returncode
        for name, options in CHECKS.items()
    ]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
