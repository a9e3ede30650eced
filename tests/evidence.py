"""Evidence: results that are dear to get, each with a stamp of its sources.

Kernels in Triton's interpreter and in the emulator, resources of compiled kernels,
mutants: they take minutes, and speak of few files. Each piece is run when one of
them has changed, and leaves a record in `tests/evidence/` with the hash of every
file that it speaks of. `make test` compares these hashes only.

    python tests/evidence.py [--all] [NAME ...]

renews what is out of date, or the named pieces; with --all, everything. A run that
fails leaves the old record.

Nobody lists the sources: they are the files of the repository that the run imports,
without those of operations that it does not speak of. What is read in another
way is named by `also`.
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "tests" / "evidence"
#: Where a run writes what it has found: its counts, and what it has imported.
FOUND = "FWLAB_EVIDENCE"

#: Whose change leaves the evidence of other families as it is.
FAMILIES = {
    "rules": (
        "fwlab/ops/correcting/",
        "fwlab/ops/additive/",
        "tests/problems/rules.py",
    ),
    "aft": ("fwlab/ops/aft/", "tests/problems/aft.py"),
    "feedback": ("fwlab/ops/feedback/", "tests/problems/feedback.py"),
    "without kernels": (
        "fwlab/ops/fwp/",
        "fwlab/ops/softmax/",
        "tests/problems/fwp.py",
    ),
}
#: They say how tests are run and counted.
AROUND = (
    "tests/conftest.py",
    "tests/budget.py",
    "tests/evidence.py",
    "tests/processor/",
)
#: The versions that results depend on.
PINNED = ("mutmut==", "numpy==", "torch==", "triton==")


class Piece(NamedTuple):
    """One piece of evidence.

    - `tests`: arguments of pytest, which runs those that are marked `evidence`.
    - `families`: whose operations it speaks of.
    - `also`: globs of files that it reads without importing them.
    - `interpreted`: with kernels in Triton's interpreter.
    - `mutants`: what mutants.py tries, in place of tests.
    """

    tests: str = ""
    families: tuple[str, ...] = tuple(FAMILIES)
    also: tuple[str, ...] = ()
    interpreted: bool = False
    mutants: str = ""

    @property
    def command(self) -> str:
        if self.mutants:
            return f"python tests/mutants.py {self.mutants}"
        setting = "TRITON_INTERPRET=1 " * self.interpreted
        return f"{setting}python -m pytest -m evidence {self.tests}"


#: What mutants depend on besides the file that they are of.
MUTMUT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mutmut"]
MUTANTS = (
    *(
        test.partition("::")[0]
        for test in MUTMUT["pytest_add_cli_args_test_selection"]
        if test.startswith("tests/")
    ),
    "tests/alike.py",
    "tests/problems/*.py",
    "tests/equivalent_mutants.toml",
)
KERNELS = ("rules", "aft", "feedback")
#: The others: they all match one of these.
ONLY = {
    "rules": "-k 'not aft and not feedback'",
    "aft": "-k aft",
    "feedback": "-k feedback",
}
PIECES: dict[str, Piece] = {
    **{
        f"interpreter-{name}": Piece(
            f"tests/interpreter/test_{name}.py", (name,), interpreted=True
        )
        for name in KERNELS
    },
    **{
        f"emulator-{name}": Piece(
            f"tests/machine/emulator {ONLY[name]}",
            (name,),
            ("docs/results/emulator.json",) * (name == "rules"),
        )
        for name in KERNELS
    },
    **{
        f"compiled-{name}": Piece(
            f"tests/machine/test_compiled.py tests/machine/cycles {ONLY[name]}",
            (name,),
            ("docs/results/kernels.json",),
        )
        for name in KERNELS
    },
    # Their work is done by processes of their own.
    "dry-run": Piece(
        "tests/test_bench_gpu.py",
        KERNELS,
        (
            "fwlab/bench/kernels.py",
            "fwlab/ops/**/kernels.py",
            "fwlab/ops/triton_tiles.py",
            "tests/machine/emulator/*.py",
        ),
    ),
}
#: The loops: a `naive.py`, or the pages of all rules of a recurrence.
for _pattern in ("fwlab/ops/**/naive.py", "fwlab/ops/*/rules/[a-z]*.py"):
    for _path in sorted(ROOT.glob(_pattern)):
        _file = _path.relative_to(ROOT).as_posix()
        _name = "-".join(_path.relative_to(ROOT / "fwlab/ops").parts[:-1])
        _name = "mutants-" + _name.removesuffix("-rules")
        _before = PIECES.get(_name, Piece())
        PIECES[_name] = Piece(
            mutants=f"{_before.mutants} {_file}".strip(),
            also=(*MUTANTS, *_before.also, _file),
        )
PIECES |= {
    "mutants-features": Piece(
        mutants="fwlab/feature_maps.py", also=("fwlab/feature_maps.py", *MUTANTS)
    ),
    "mutants-efficient": Piece(
        mutants="efficient", also=("fwlab/ops/**/efficient.py", *MUTANTS)
    ),
}


def sources(piece: Piece, imported: list[str]) -> dict[str, str]:
    """The hash of every file that a piece speaks of, by its path."""
    others = tuple(
        path
        for family, paths in FAMILIES.items()
        if family not in piece.families
        for path in paths
    )
    paths = {
        path.relative_to(ROOT).as_posix()
        for x in piece.also
        for path in ROOT.glob(x)
        if "test_" in x or not path.name.startswith("test_")
    }
    paths |= {path for path in imported if not path.startswith((*others, *AROUND))}
    found = {path: digest(path) for path in sorted(paths)}
    found["constraints.txt"] = digest("constraints.txt", PINNED)
    if piece.mutants:
        found["pyproject.toml"] = hashed(json.dumps(MUTMUT))
    return found


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest(path: str, lines: tuple[str, ...] = ("",)) -> str:
    """The hash of a file, or of its lines that begin like this; "" if there is none."""
    if not (ROOT / path).exists():
        return ""
    kept = [
        x for x in (ROOT / path).read_text("utf-8").splitlines() if x.startswith(lines)
    ]
    return hashed("\n".join(kept))


def changed(name: str) -> list[str]:
    """What is no longer as it was when this piece was recorded."""
    path = RECORDS / f"{name}.json"
    if not path.exists():
        return ["there is no record"]
    record, piece = json.loads(path.read_text("utf-8")), PIECES[name]
    now = sources(piece, list(record["sources"]))
    found = [path for path in now if now[path] != record["sources"].get(path)]
    return found + ["its command"] * (record["command"] != piece.command)


def stale() -> dict[str, list[str]]:
    """The pieces to renew, with what has changed."""
    return {name: found for name in PIECES if (found := changed(name))}


def renew(name: str) -> bool:
    """Run a piece, and record it if it succeeds."""
    piece = PIECES[name]
    print(f"{name}: {piece.command}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        environment = os.environ | {FOUND: str(found), "FWLAB_GROUP": ""}
        # A record speaks of the usual order, and of the examples of every day.
        for setting in ("FWLAB_PROCESSOR", "PYTEST_ADDOPTS"):
            environment.pop(setting, None)
        if not piece.mutants:
            plugin = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_PLUGINS": "evidence"}
            environment |= plugin
        command = piece.command.replace("python", f"'{sys.executable}'", 1)
        before, spent = sources(piece, tracked()), seconds()
        done = subprocess.run(command, shell=True, cwd=ROOT, env=environment)
        spent = seconds() - spent
        if done.returncode:
            print(f"{name} failed: its record stays as it was")
            return False
        result = json.loads(found.read_text("utf-8"))
    if result.get("skipped") or not result.get("passed", result.get("mutants")):
        print(f"{name} was not run as a whole: its record stays as it was")
        return False
    now = sources(piece, result.pop("imported"))
    if moved := [path for path in now if now[path] != before.get(path)]:
        print(f"{name}: {', '.join(moved)} changed while it ran; its record stays")
        return False
    write(name, result, now, spent)
    return True


def tracked() -> list[str]:
    """Every file of Python that a run could import."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in ("fwlab", "tests", "docs/tools")
        for path in (ROOT / folder).rglob("*.py")
    ]


def write(
    name: str, counts: dict[str, Any], found: dict[str, str], spent: float
) -> None:
    """Write a record."""
    import numpy

    from fwlab.provenance import provenance

    record = {
        **provenance(PIECES[name].command),
        "numpy": numpy.__version__,
        "triton": find_spec("triton") and version("triton"),
        "processor_seconds": round(spent),
        **counts,
        "sources": found,
    }
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    (RECORDS / f"{name}.json").write_text(text, "utf-8")


def seconds() -> float:
    """Processor time of the processes that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def leave(counts: dict[str, Any]) -> None:
    """What a run tells the process that has started it."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    imported = {str(Path(file).resolve()) for file in files if file}
    here = set(tracked())
    imported = {x.removeprefix(f"{ROOT}/") for x in imported} & here
    Path(os.environ[FOUND]).write_text(
        json.dumps({**counts, "imported": sorted(imported)}), "utf-8"
    )


# As a plugin of pytest, in the runs that this file starts.

_counts: Counter[str] = Counter()


def pytest_runtest_logreport(report) -> None:
    if report.when == "call" or report.skipped:
        _counts[report.outcome] += 1


def pytest_sessionfinish(session) -> None:
    if session.config.option.markexpr == "evidence" and os.environ.get(FOUND):
        leave(_counts)


def main() -> int:
    """Renew what is to be renewed; 1 if any of it failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PIECES))
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.names) - set(PIECES):
        parser.error(f"expected names of {', '.join(PIECES)}, got {sorted(unknown)}")
    names = given.names or (list(PIECES) if given.all else list(stale()))
    results = [renew(name) for name in names]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
