"""Grading a notebook: its cells run in a process of their own, with limits.

`fwlab.exercises.graded` is that process. docs/exercises.md says what a
notebook cannot do there, and what it still can.
"""

import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

from fwlab.exercises.graded import FILE, asked

#: The environment variables that a notebook sees.
PASSED = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS", "SYSTEMROOT"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
)
#: What bwrap shows of the file system, beside Python and its packages.
SEEN = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix"),
    *("/etc/alternatives", "/etc/fonts", "/etc/ld.so.cache", "/etc/localtime"),
)
#: The largest size of a notebook, and of what its process reports, in bytes.
LARGE = 2**26
#: Seconds that a process may take until its first cell.
START = 300
#: What that process reports; a notebook that finds out how can report anything.
SAYS: tuple[dict[str, type], ...] = (
    {"held": bool},
    {"asked": str},
    {"name": str, "right": bool, "why": str},
    {"cell": int, "error": str},
    {"finished": bool},
)


class Submission(NamedTuple):
    """What a learner hands in, as `read` finds it.

    - `notebook`: its path.
    - `cells`: the source of each code cell.
    - `listed`: names of the exercises that it lists, as `student_notebook` writes
      them; None = it has no list.
    - `problem`: why it is no notebook; "" = it is one.
    """

    notebook: str
    cells: list[str]
    listed: list[str] | None = None
    problem: str = ""


def read(notebook: Path) -> Submission:
    """Read what a learner hands in. What is no notebook says why."""
    try:
        content = _read(notebook)
    except ValueError as error:
        return Submission(str(notebook), [], problem=str(error))
    return Submission(str(notebook), _cells(content), _listed(content))


def grade(
    notebook: Path | Submission,
    seconds: float = 300,
    cell_seconds: float = 60,
    gib: float = 4,
    expected: Iterable[str] | None = None,
    own: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Run a notebook, and see which exercises its own checks find right.

    An exercise is right if one of its checks, at the moment when it runs,
    finds the answer right.

    - `notebook`: the answers of a learner. Where bwrap does not work, a notebook may
      delete files: `read` all of them before you grade the first.
    - `seconds`: time limit of the whole.
    - `cell_seconds`: time limit of one cell; not on Windows.
    - `gib`: how much memory it may take, on top of that of PyTorch; only
      where the system can limit it (not on Windows or macOS).
    - `expected`: names of the exercises; None = those that the notebook
      lists, or else those that it checks.
    - `own`: name and source of a module with further exercises, which the notebook
      may import.
    - Returns `notebook`; `exercises`, a list of `name`, `right` and `why`;
      `errors`, the cells that raised an error; `ended`: "finished", or why
      not; `listed`: whether there was a list of exercises; and `kept`, what
      kept the notebook in: of "bwrap" and "libseccomp", those that work here;
      None = no cell ran.
    - Raises `ChildProcessError` if the process ends before the first cell, which is
      no fault of the notebook: a package is missing, for example.
    """
    handed_in = notebook if isinstance(notebook, Submission) else read(notebook)
    expected = handed_in.listed if expected is None else expected
    reports: list[dict[str, Any]] = []
    ended, kept = handed_in.problem, None
    if not ended:
        sandbox, kept = _tried()
        task = {"cells": handed_in.cells, "cell_seconds": cell_seconds, "gib": gib}
        reports, ended = _run(sandbox, {**task, "own": own}, seconds)
    verdicts = [each for each in reports if "right" in each]
    names = [each["asked"] for each in reports if "asked" in each]
    names += [each["name"] for each in verdicts]
    missing = "not checked" if ended == "finished" else f"not checked: {ended}"
    graded = {
        name: {"name": name, "right": False, "why": missing}
        for name in (names if expected is None else expected)
    }
    for each in verdicts:
        name = each["name"]
        if name in graded and not graded[name]["right"]:
            graded[name] = {k: each[k] for k in ("name", "right", "why")}
    return {
        "notebook": handed_in.notebook,
        "exercises": list(graded.values()),
        "errors": [each for each in reports if "cell" in each],
        "ended": ended,
        "listed": expected is not None,
        "kept": kept,
    }


def exercises_of(handout: Path) -> list[str]:
    """The exercises of a notebook that was handed out: those that it lists, or
    else those that its cells check.

    - Raises `ValueError` if the file is no notebook, or has no exercise.
    """
    content = _read(handout)
    names = _listed(content) or asked(_cells(content))
    if not names:
        raise ValueError(f"expected {handout} to have exercises, got none")
    return names


def report(graded: dict[str, Any]) -> str:
    """The result of `grade`, as text."""
    exercises = graded["exercises"]
    right = sum(each["right"] for each in exercises)
    lines = [f"{graded['notebook']}: {right} of {len(exercises)} right"]
    for each in exercises:
        lines.append(f"{'✓' if each['right'] else '✗'} {each['name']}")
        if not each["right"]:
            lines.append(f"  {each['why']}")
    for each in graded["errors"]:
        lines.append(f"cell {each['cell']} raised {each['error']}")
    if graded["ended"] != "finished":
        lines.append(f"not finished: {graded['ended']}")
    if not graded["listed"]:
        lines.append("it lists no exercises; these are the ones it checks")
    return "\n".join(map(_plain, lines))


def missing() -> str:
    """Name what cannot keep notebooks in, on this machine: "bwrap", for example.

    - Raises `ChildProcessError` if notebooks cannot be graded here at all.
    """
    return " and ".join(sorted({"bwrap", "libseccomp"}.difference(_tried()[1])))


def _read(notebook: Path) -> dict[str, Any]:
    """The content of a notebook. Raises `ValueError`, in one sentence."""
    try:
        if notebook.is_dir():
            raise ValueError("a folder")
        if not notebook.is_file():
            raise ValueError("a device" if notebook.exists() else "no file")
        if (size := notebook.stat().st_size) > LARGE:
            raise ValueError(f"a file of {size / 2**20:.0f} MiB")
        content = json.loads(notebook.read_bytes())
        _cells(content)
    except OSError as error:
        what = f"a file that cannot be read ({error.strerror})"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        what = "a file that is no JSON"
    except (KeyError, TypeError):
        what = "a file without cells"
    except ValueError as error:
        what = str(error)
    else:
        return content  # type: ignore[no-any-return]
    raise ValueError(f"expected {notebook} to be a notebook, got {what}")


def _cells(content: dict[str, Any]) -> list[str]:
    """The source of each code cell."""
    cells = [c for c in content["cells"] if c["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in cells]


def _listed(content: dict[str, Any]) -> list[str] | None:
    """The exercises that a notebook lists; None = it has no list."""
    try:
        names = content["metadata"]["fwlab"]["exercises"]
    except (KeyError, TypeError):
        return None
    named = isinstance(names, list) and all(
        isinstance(name, str) and name.isidentifier() for name in names
    )
    return names if named and names else None


# --- The process of its own ---------------------------------------------


@cache
def _tried() -> tuple[tuple[str, ...], list[str]]:
    """The first sandbox in which a notebook without cells runs to its end, and what
    keeps notebooks in there.

    - Raises `ChildProcessError` if there is none.
    """
    task = {"cells": [], "cell_seconds": 60, "gib": 4, "own": None}
    bwrap = _bwrap()
    if bwrap:
        with suppress(ChildProcessError):
            return bwrap, ["bwrap", *_filters(bwrap, task)]
    return (), _filters((), task)


def _filters(sandbox: tuple[str, ...], task: dict[str, Any]) -> list[str]:
    """Run a task; returns ["libseccomp"] if it works there."""
    reports, _ = _run(sandbox, task, seconds=300)
    return ["libseccomp"] * any(each.get("held", False) for each in reports)


def _run(
    sandbox: tuple[str, ...], task: dict[str, Any], seconds: float
) -> tuple[list[dict[str, Any]], str]:
    """Run cells; returns the reports of their process, and how it ended."""
    # Reports begin with a word that the notebook is not told.
    key = secrets.token_hex()
    with (
        _scratch() as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as log,
        tempfile.TemporaryFile() as errors,
    ):
        source.write(json.dumps({**task, "key": key}).encode())
        source.seek(0)
        home, work = (Path("/tmp" if sandbox else folder, n) for n in ("home", "work"))
        if not sandbox:
            home.mkdir()
            work.mkdir()
        told, tell = os.pipe()
        process = subprocess.Popen(
            [
                *(sandbox and (*sandbox, "--info-fd", str(tell), "--chdir", str(work))),
                *(sys.executable, "-m", "fwlab.exercises.graded"),
            ],
            cwd=None if sandbox else work,
            env=_environment(home, work),
            stdin=source,
            stdout=log,
            stderr=errors,
            pass_fds=[tell] if sandbox else (),
            start_new_session=True,
        )
        os.close(tell)
        inside = None
        try:
            inside = _inside(told)
            # The limit is that of the cells: to load PyTorch may take as long.
            end = time.monotonic() + START
            while process.poll() is None and time.monotonic() < end:
                if key.encode() in os.pread(errors.fileno(), LARGE, 0):
                    break
                time.sleep(0.02)
            code = process.wait(seconds)
            ended = "the notebook ended Python"
            if number := -code if code < 0 else max(code - 128, 0):
                ended = f"signal {number}: perhaps the memory limit"
        except subprocess.TimeoutExpired:
            ended = f"the time limit, {seconds:g} seconds"
        finally:  # also if somebody interrupts this
            _end(process, inside)
            os.close(told)
        reports = _reports(log, key)
        errors.seek(0)
        lines = errors.read(LARGE).decode(errors="replace").splitlines()
    if key not in lines:  # it writes this there before the first cell
        why = _plain(lines[-1]) if lines else ended.replace("the notebook", "it")
        raise ChildProcessError(
            f"the process that grades did not reach the first cell: {why}"
        )
    if any("finished" in each for each in reports):
        ended = "finished"
    return reports, ended


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make an empty folder, and delete it, also where it is too deep for `shutil`."""
    folder, number = Path(tempfile.mkdtemp()), count()
    try:
        yield folder
    finally:
        folders = [folder]
        with suppress(OSError):
            folder.chmod(0o700)
            while folders:
                inner = folders.pop()
                for entry in [*os.scandir(inner)]:
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry)
                        continue
                    os.chmod(entry, 0o700)
                    folders.append(folder.with_name(f"{folder.name}-{next(number)}"))
                    os.rename(entry, folders[-1])
                inner.rmdir()


def _inside(told: int) -> int | None:
    """A handle of the first process in bwrap, which ends after all others in
    there; bwrap may end before. None = there is no bwrap, or it has ended.
    """
    info = os.read(told, 4096)  # there is more, so it stays open
    with suppress(OSError):
        if first := re.search(rb'"child-pid": (\d+)', info):
            return os.pidfd_open(int(first[1]))
    return None


def _end(process: "subprocess.Popen[bytes]", inside: int | None) -> None:
    """Kill the process and what it has started; all are gone when this returns."""
    with suppress(ProcessLookupError, PermissionError):
        if not hasattr(os, "killpg"):
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if inside is not None:  # bwrap has told it to end
        select.select([inside], [], [])
        os.close(inside)


def _reports(log: IO[bytes], key: str) -> list[dict[str, Any]]:
    """The reports of a process, and nothing else that a notebook wrote there."""
    log.seek(0)
    lines = log.read(LARGE).decode(errors="replace").split("\n")
    reports = []
    for line in lines:
        with suppress(ValueError, RecursionError):  # cut off, or forged
            if line.startswith(key):
                what = json.loads(line.removeprefix(key))
                if not isinstance(what, dict):
                    continue
                if {k: type(v) for k, v in what.items()} in SAYS:
                    reports.append({k: _plain(v) for k, v in what.items()})
    return reports


def _plain(text: Any) -> Any:
    """A text in one line, without what a terminal might obey."""
    if not isinstance(text, str):
        return text
    return "".join(c if c.isprintable() else " " for c in text[:2000])


def _bwrap() -> tuple[str, ...]:
    """The command that shows a notebook no files but the system's and
    Python's, no network and no processes; () = it is not installed.
    """
    if not (program := shutil.which("bwrap")):
        return ()
    python = (sys.prefix, sys.base_prefix, Path(sys.executable).resolve().parents[1])
    package = Path(__file__).parents[1]
    command = [program, "--unshare-all", "--die-with-parent", "--proc", "/proc"]
    # Root would keep its capabilities, and could make all of this writable.
    command += ["--cap-drop", "ALL"]
    command += ["--dev", "/dev", "--size", str(2**20), "--tmpfs", "/dev/shm"]
    command += ["--remount-ro", "/dev"]
    command += ["--size", str(FILE), "--tmpfs", "/tmp"]
    command += ["--dir", "/tmp/home", "--dir", "/tmp/work"]
    libraries = filter(None, os.getenv("LD_LIBRARY_PATH", "").split(os.pathsep))
    for path in map(str, (*SEEN, *libraries, *python, *_path()[1:], package)):
        command += ["--ro-bind-try", path, path]
    command += ["--remount-ro", "/"]
    return tuple(command)


def _environment(home: Path, work: Path) -> dict[str, str]:
    """What a notebook sees of the environment: nothing that is secret."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    places = dict.fromkeys(("HOME", "USERPROFILE", "MPLCONFIGDIR"), str(home))
    places |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))
    more = {"LOGNAME": "learner", "MPLBACKEND": "agg"}
    return passed | places | more | {"PYTHONPATH": os.pathsep.join(_path())}


def _path() -> list[str]:
    """Where Python finds modules: fwlab, also in a checkout that is not
    installed, and packages; but not in the folder in which this runs.
    """
    root, own = Path(__file__).parents[2], (Path.home(), Path.cwd())
    places = [Path(p).resolve() for p in sys.path if p]
    others = [p for p in places if not any(o.is_relative_to(p) for o in own)]
    return [str(root), *(str(p) for p in dict.fromkeys(others) if p != root)]
