"""Whether the tests see every small mistake in the specifications.

mutmut changes one thing at a time in a copy of the code, a sign, a number, an
argument, and runs the tests that come by there. A mutant that they all pass
has survived: a test is missing, or the change changes nothing. The latter are
listed in `equivalent_mutants.toml`; any other survivor is a failure.

    python tests/mutants.py [FILE ...]

tries every mutant of those files; without FILE, those of the feature maps and of every
rule. Which tests are run, and what is not changed, says `[tool.mutmut]` in
`pyproject.toml`. Mistakes in other files are made by `operation_mutants.py`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "equivalent_mutants.toml"
SPECIFICATIONS = [
    "fwlab/feature_maps.py",
    "fwlab/ops/**/naive.py",
    "fwlab/ops/linear/*.py",
    "fwlab/ops/delta/*.py",
]
#: What stands beside the pages of the rules.
OTHERS = {"__init__.py", "chunked.py", "kernels.py"}
CAUGHT = {"killed", "timeout", "segfault"}


def mutmut(*arguments: str) -> str:
    """Return the output of a command of mutmut; `run` prints for the reader."""
    command = [str(Path(sys.executable).with_name("mutmut")), *arguments]
    kept = None if arguments[0] == "run" else subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, stdout=kept, text=True, check=True)
    return done.stdout or ""


def results() -> dict[str, str]:
    """Return every mutant and its result."""
    lines = mutmut("results", "--all", "True").splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines)


def module(path: Path | str) -> str:
    return str(path).removesuffix(".py").replace("/", ".")


def specifications() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for pattern in SPECIFICATIONS
        for path in ROOT.glob(pattern)
        if path.name not in OTHERS
    ]


def change(name: str) -> str:
    """Describe a mutant by its change: `old => new`, on one line."""
    lines = mutmut("show", name).splitlines()[3:]
    old, new = (
        " ".join(" ".join(x[1:] for x in lines if x[:1] == sign).split())
        for sign in "-+"
    )
    return f"{old} => {new}"


def function(name: str) -> str:
    """`fwlab.file.x_name__mutmut_7`, or with a class between two signs."""
    file, _, mangled = name.partition("__mutmut_")[0].rpartition(".")
    return f"{file}.{mangled[2:].replace('ǁ', '.')}"


def is_in(entry: dict[str, str], where: str, what: str) -> bool:
    return bool(
        re.fullmatch(entry["function"], where) and re.fullmatch(entry["change"], what)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--jobs", default=str(os.cpu_count()))
    given = parser.parse_args()
    files = given.files or specifications()
    # Other tests may come by there than in an earlier run.
    shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    mutmut("run", "--max-children", given.jobs, *(f"{module(f)}.x*" for f in files))

    known = tomllib.loads(LIST.read_text("utf-8"))["equivalent"]
    modules = {*map(module, files)}
    tried = {
        name: status
        for name, status in results().items()
        if status != "not checked" and name.rpartition(".")[0] in modules
    }
    counts, needless = Counter(), list(known)
    for name, status in tried.items():
        file = name.rpartition(".")[0]
        counts[file, "mutants"] += 1
        if status in CAUGHT:
            continue
        where, what = function(name), change(name)
        same = [entry for entry in known if is_in(entry, where, what)]
        counts[file, "equivalent" if same else "survive"] += 1
        needless = [entry for entry in needless if entry not in same]
        if not same:
            print(f"\n{where}: {status}\n  {what}")
    print()
    for file in sorted({file for file, _ in counts}):
        tally = (
            f"{counts[file, what]} {what}"
            for what in ("mutants", "equivalent", "survive")
        )
        print(f"{file}: {', '.join(tally)}")
    if given.files:
        needless = []
    for entry in needless:
        print(f"\nin {LIST.name}, but no survivor: {entry['change']}")
    return int(bool(needless) or any(what == "survive" for _, what in counts))


if __name__ == "__main__":
    sys.exit(main())
