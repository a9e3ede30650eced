"""Whether the tests see every small mistake in the specifications.

mutmut changes one thing at a time in a copy of the code, a sign, a number, an
argument, and runs the tests that come by there. A mutant that they all pass
has survived: a test is missing, or the change changes nothing. The latter are
listed in `equivalent_mutants.toml`; any other survivor is a failure.

    python tests/mutants.py [FILE ...]

tries every mutant of those files; without FILE, those of the feature maps and
of every `naive.py`, and some of every `efficient.py`. Which tests are run, and
what is not changed, says `[tool.mutmut]` in `pyproject.toml`.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "equivalent_mutants.toml"
SPECIFICATIONS = ["fwlab/feature_maps.py", "fwlab/ops/*/naive.py"]
#: How many mutants of all `efficient.py` together.
SAMPLE = 60
CAUGHT = {"killed", "timeout", "segfault"}


def mutmut(*arguments: str) -> str:
    """What a command of mutmut prints; `run` prints for the reader."""
    command = [str(Path(sys.executable).with_name("mutmut")), *arguments]
    kept = None if arguments[0] == "run" else subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, stdout=kept, text=True, check=True)
    return done.stdout or ""


def results() -> dict[str, str]:
    """Every mutant there is, and what has become of it."""
    lines = mutmut("results", "--all", "True").splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines)


def module(path: Path | str) -> str:
    return str(path).removesuffix(".py").replace("/", ".")


def sample(names: list[str]) -> list[str]:
    """Always the same, and a change in one function moves no other."""
    names = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    return names[:SAMPLE]


def change(name: str) -> str:
    """The lines that are another in a mutant, before and after."""
    lines = mutmut("show", name).splitlines()[3:]
    changed = (line for line in lines if line[:1] in ("-", "+"))
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in changed)


def function(name: str) -> str:
    """`fwlab.file.x_name__mutmut_7`, or with a class between two signs."""
    file, _, mangled = name.partition("__mutmut_")[0].rpartition(".")
    return f"{file}.{mangled[2:].replace('ǁ', '.')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--jobs", default=str(os.cpu_count()))
    given = parser.parse_args()
    files = given.files
    if not files:
        shutil.rmtree(ROOT / "mutants", ignore_errors=True)
        files = [
            str(path.relative_to(ROOT)) for p in SPECIFICATIONS for path in ROOT.glob(p)
        ]
    mutmut("run", "--max-children", given.jobs, *(f"{module(f)}.x*" for f in files))
    if not given.files:
        others = [name for name in results() if ".efficient." in name]
        mutmut("run", "--max-children", given.jobs, *sample(others))

    known = {
        (entry["function"], entry["change"].strip()): entry["why"]
        for entry in tomllib.loads(LIST.read_text("utf-8"))["equivalent"]
    }
    tried = {n: s for n, s in results().items() if s != "not checked"}
    if given.files:
        tried = {
            n: s for n, s in tried.items() if n.rpartition(".")[0] in map(module, files)
        }
    counts, found = Counter(), set()
    for name, status in tried.items():
        file = name.rpartition(".")[0]
        counts[file, "mutants"] += 1
        if status in CAUGHT:
            continue
        key = function(name), change(name)
        if key in known:
            found.add(key)
            counts[file, "equivalent"] += 1
        else:
            counts[file, "survive"] += 1
            print(f"\n{name}: {status}\n{key[1]}")
    print()
    for file in sorted({file for file, _ in counts}):
        tally = (
            f"{counts[file, what]} {what}"
            for what in ("mutants", "equivalent", "survive")
        )
        print(f"{file}: {', '.join(tally)}")
    # An entry that meets no survivor is out of date, or its mutant is caught.
    modules = tuple(f"{module(file)}." for file in files)
    stale = [key for key in known if key[0].startswith(modules) and key not in found]
    for where, changed in stale:
        print(f"\nin {LIST.name} without a survivor: {where}\n{changed}")
    return int(bool(stale) or any(what == "survive" for _, what in counts))


if __name__ == "__main__":
    sys.exit(main())
