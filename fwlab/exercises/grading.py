"""Grade a notebook: nbclient runs its cells in a kernel, with limits."""

import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any, NamedTuple

from fwlab.exercises import EXERCISES, checking
from fwlab.exercises.answers import short
from fwlab.exercises.handouts import own_exercises

#: Environment variables that are passed to a notebook.
PASSED = (
    *("PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS"),
    *("LD_LIBRARY_PATH", "SYSTEMROOT"),
)
#: Folders that a notebook sees under bubblewrap, besides Python and its packages.
SEEN = ("/usr", "/bin", "/lib", "/lib64", "/opt", "/nix", "/etc/alternatives")
#: Maximum size of a notebook in bytes.
LARGE = 2**26
#: Time limit for the start of a kernel, in seconds.
START = 300
#: MIME type of the output that reports a verdict of `check`.
VERDICT = "application/vnd.fwlab.verdict+json"


class Submission(NamedTuple):
    """Hold a submitted notebook, as `read` returns it.

    - `notebook`: path of the notebook.
    - `cells`: the source of each code cell.
    - `listed`: names of the exercises that it lists, as `student_notebook` writes
      them; None = it has no list.
    - `problem`: why the file is not a notebook; "" = no problem.
    """

    notebook: str
    cells: list[str]
    listed: list[str] | None = None
    problem: str = ""


def read(notebook: Path) -> Submission:
    """Read a submitted notebook, or record why the file is not a notebook."""
    got = "no file"
    errors = (OSError, ValueError, LookupError, TypeError, AttributeError)
    with suppress(*errors, RecursionError):
        if notebook.is_file():
            got = f"a file of more than {LARGE / 2**20:.0f} MiB"
            if notebook.stat().st_size <= LARGE:
                got = "a file that is no JSON"
                content = json.loads(notebook.read_bytes())
                got = "a file without cells"
                code = [c for c in content["cells"] if c["cell_type"] == "code"]
                cells = ["".join(cell["source"]) for cell in code]
                listed = content.get("metadata", {}).get("fwlab", {}).get("exercises")
                if not listed or not all(isinstance(name, str) for name in listed):
                    listed = None
                return Submission(str(notebook), cells, listed)
    problem = f"expected {notebook} to be a notebook, got {got}"
    return Submission(str(notebook), [], problem=problem)


def exercises_of(handout: Path) -> list[str]:
    """Return the exercises that a handed-out notebook lists or, without a list, checks.

    - Raises `ValueError` if the file is not a notebook, or has no exercise.
    """
    handed_out = read(handout)
    names = handed_out.listed or asked(handed_out.cells)
    if not names:
        got = f"expected {handout} to have exercises, got none"
        raise ValueError(handed_out.problem or got)
    return names


def asked(cells: list[str]) -> list[str]:
    """Return the names of the exercises that cells check, in order."""
    names: dict[str, None] = {}
    calls = r"^[^#\n]*\b(?:check|golf)\((.*)\)"
    for given in re.findall(calls, "\n".join(cells), re.MULTILINE):
        words = re.findall(r"""["'](\w+)["']""", given) or re.findall(r"\w+", given)
        names |= dict.fromkeys(word for word in words[-1:] if word in EXERCISES)
    return list(names)


def grade(
    notebook: Path | Submission,
    seconds: float = 300,
    cell_seconds: float = 60,
    gib: float = 4,
    expected: Iterable[str] | None = None,
    own: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Run a notebook, and return the verdicts of the notebook's checks on exercises.

    An exercise is right if one of its checks, at the moment when it runs,
    finds the answer right.

    - `notebook`: the answers of a learner. Without bubblewrap, a notebook may
      delete files: `read` all of them before you grade the first.
    - `seconds`: time limit of the whole notebook.
    - `cell_seconds`: time limit of one cell, in whole seconds.
    - `gib`: memory limit in GiB, on top of the memory of PyTorch; Linux only.
    - `expected`: names of the exercises; None = those that the notebook
      lists, or else those that it checks.
    - `own`: name and source of a module with further exercises, which the notebook
      may import.
    - Returns `notebook`; `exercises`, a list of `name`, `right` and `why`;
      `errors`, the cells that raised an error; `ended`: "finished", or why
      not; `listed`: True if there was a list of exercises; and `kept`: True if
      bubblewrap sandboxed the notebook.
    - Raises `ChildProcessError` if no notebook can run here.
    """
    handed_in = notebook if isinstance(notebook, Submission) else read(notebook)
    expected = handed_in.listed if expected is None else expected
    verdicts: list[tuple[str, str]] = []
    errors: list[dict[str, Any]] = []
    ended = handed_in.problem
    if not ended:
        limits = seconds, cell_seconds, gib
        verdicts, errors, ended = _run(handed_in.cells, *limits, own)
    names = [*asked(handed_in.cells), *(name for name, _ in verdicts)]
    missing = "not checked" if ended == "finished" else f"not checked: {ended}"
    graded = {
        name: {"name": name, "right": False, "why": missing}
        for name in (names if expected is None else expected)
    }
    for name, why in verdicts:
        if name in graded and not graded[name]["right"]:
            graded[name] |= {"right": not why, "why": why}
    return {
        "notebook": handed_in.notebook,
        "exercises": list(graded.values()),
        "errors": errors,
        "ended": ended,
        "listed": expected is not None,
        "kept": bool(_bubblewrap()),
    }


def report(graded: dict[str, Any]) -> str:
    """Format the result of `grade` as text for a terminal."""
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
    # Remove control characters, which a terminal might interpret.
    printed = ("".join(c if c.isprintable() else " " for c in line) for line in lines)
    return "\n".join(printed)


def caution() -> str:
    """Return a warning if graded notebooks are not sandboxed, else ""."""
    return (
        ""
        if _bubblewrap()
        else "without bubblewrap, a notebook can read and delete your files and use the "
        "network: use a container for a class that you do not trust"
    )


def _run(
    cells: list[str],
    seconds: float,
    cell_seconds: float,
    gib: float,
    own: tuple[str, str] | None,
) -> tuple[list[tuple[str, str]], list[dict[str, Any]], str]:
    """Run cells, and return verdicts (name, reason), errors and how the run ended."""
    try:
        import ipykernel  # noqa: F401
        from jupyter_client.manager import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import DeadKernelError
        from nbformat.v4 import new_code_cell, new_notebook
    except ModuleNotFoundError as lacks:
        raise ChildProcessError(
            f'grading needs the package {lacks.name}: pip install "fwlab[notebooks]"'
        ) from None
    verdicts, errors = [], []

    class Client(NotebookClient):
        def output(self, outs: Any, message: Any, *place: Any) -> None:
            """Append the verdict in a cell's output to `verdicts`, if there is one."""
            match message["content"].get("data", {}).get(VERDICT):
                case {"name": str(name), "why": str(why)}:  # Ignore other data.
                    verdicts.append((name, why))

    def failed(cell: Any, cell_index: int, execute_reply: Any) -> None:
        said = execute_reply["content"]
        error = f"{said['ename']}: {short(said['evalue'])}"
        if said["ename"] == "KeyboardInterrupt":
            error = f"TimeLimit: it took more than {cell_seconds:g} seconds"
        errors.append({"cell": cell_index, "error": error})

    first = f"import fwlab.exercises.grading as _\n_.prepare({own!r}, {gib})\ndel _"
    # Replace unpaired surrogates, which cannot be sent to a kernel.
    sources = [each.encode(errors="replace").decode() for each in (first, *cells)]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    quiet = logging.Logger("nbclient", logging.CRITICAL + 1)
    with TemporaryDirectory(ignore_cleanup_errors=True) as home:
        work = Path(home, "work")
        work.mkdir()
        sandbox, sockets = _bubblewrap(), {}
        if sandbox:  # The sandbox has its own network, so connect by files.
            sandbox = (*sandbox, "--bind", home, home, "--chdir", str(work))
            sockets = {"transport": "ipc", "ip": f"{home}/kernel"}
        file = f"{home}/kernel.json"
        manager: Any = AsyncKernelManager(connection_file=file, log=quiet, **sockets)
        python = (sys.executable, "-m", "ipykernel_launcher", "-f", file)
        manager.kernel_spec.argv = [*sandbox, *python]
        client = Client(
            notebook,
            manager,
            allow_errors=True,
            interrupt_on_timeout=True,
            timeout=START,
            startup_timeout=START,
            shutdown_kernel="immediate",
            on_cell_error=failed,
            log=quiet,
        )
        nowhere = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        place = {"cwd": str(work), "env": _environment(home), "cleanup_kc": True}
        try:
            with client.setup_kernel(**place, **nowhere):
                client.execute_cell(notebook.cells[0], 0)
                if errors:
                    raise RuntimeError(errors[0]["error"])
                client.timeout = math.ceil(cell_seconds)
                kernel = manager.provisioner.process
                limit = Timer(seconds, _kill, [kernel])
                limit.start()
                try:
                    for number, cell in enumerate(notebook.cells[1:], 1):
                        client.execute_cell(cell, number)
                    ended = "finished"
                except DeadKernelError:
                    ended = f"the time limit, {seconds:g} seconds"
                    if limit.is_alive():
                        code = kernel.wait()
                        ended = f"Python ended ({code}): perhaps the memory limit"
                finally:
                    limit.cancel()
                    _kill(kernel)
        except RuntimeError as error:
            raise ChildProcessError(f"no notebook can run here: {error}") from None
    return verdicts, errors, ended


def prepare(own: tuple[str, str] | None, gib: float) -> None:
    """Set up a kernel to report verdicts of `check`, and limit its memory."""
    from IPython import get_ipython

    # This output arrives even if a cell captures its output.
    publish = get_ipython().display_pub.publish
    checking.listener = lambda name, why: publish({VERDICT: {"name": name, "why": why}})
    if own:
        own_exercises(*own)
    if (pages := Path("/proc/self/statm")).exists():
        import resource

        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        most = used + int(gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _kill(kernel: "subprocess.Popen[bytes]") -> None:
    """Kill a kernel and its child processes."""
    with suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(kernel.pid, signal.SIGKILL)
        else:
            kernel.kill()


@cache
def _bubblewrap() -> tuple[str, ...]:
    """Return the command that sandboxes a kernel, or () if bubblewrap cannot run.

    The kernel then sees no files but the system's and Python's, no network and no
    other processes.
    """
    python = (sys.prefix, sys.base_prefix, Path(sys.executable).resolve().parents[1])
    seen = map(str, (*SEEN, *python, *_path()[1:], Path(__file__).parents[1]))
    command = (
        # The signal that interrupts a cell must not end bwrap.
        *("env", "--ignore-signal=INT"),
        *("bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *(word for path in seen for word in ("--ro-bind-try", path, path)),
        # With this variable, a kernel ends if it does not see this process.
        *("--unsetenv", "JPY_PARENT_PID"),
    )
    if not shutil.which("bwrap"):
        return ()
    tried = subprocess.run([*command, "true"], capture_output=True)
    return () if tried.returncode else command


def _environment(home: str) -> dict[str, str]:
    """Return the environment variables for a notebook, none of which is secret."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    places = dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP"), home)
    return passed | places | {"PYTHONPATH": os.pathsep.join(_path())}


def _path() -> list[str]:
    """Return the module search path of a kernel: fwlab and installed packages.

    The current folder is left out, since it may hold files that learners handed in.
    """
    root = str(Path(__file__).parents[2])
    others = [path for path in sys.path if path not in ("", os.getcwd(), root)]
    return [root, *others]
