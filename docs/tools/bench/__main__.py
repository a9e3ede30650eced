"""Runs benchmarks: make bench NAME="peers lengths"

With --write, each also goes to docs/results/NAME-cpu.json.
"""

import argparse
import importlib
from pathlib import Path

from fwlab import bench

NAMES = (
    "peers",
    "lengths",
    "busy",
    "imports",
    "steps",
    "training",
    "generation",
    "published",
)
RESULTS = Path(__file__).resolve().parents[2] / "results"


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", choices=NAMES)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        out = RESULTS / f"{name}-cpu.json" if arguments.write else None
        command = f"PYTHONPATH=docs/tools python -m bench {name}"
        command += " --write" * arguments.write
        bench.main(importlib.import_module(f"bench.{name}").measure, out, command)


if __name__ == "__main__":
    main()
