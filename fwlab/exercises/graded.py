"""The process in which a notebook is graded: its cells, and what they may not do.

`grading.grade` starts it. What to run comes through standard input; what is
found leaves through what was standard output before the first cell ran. In here
a notebook can do to Python what it likes, so this stops accidents and simple
tricks. What the notebook may do to the machine is limited by the system.
"""

import ast
import ctypes
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from fwlab.exercises import EXERCISES, checker
from fwlab.exercises.asking import described
from fwlab.exercises.handouts import own_exercises

#: What a graded notebook may not do: use the network, start programs or end
#: them. Python reports these; the system does not depend on it.
FORBIDDEN = (
    *("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.bind"),
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"),
    *("os.fork", "os.forkpty", "os.startfile", "_winapi.CreateProcess"),
    *("os.kill", "os.killpg", "resource.prlimit"),
)
REFUSED = "no network and no other programs while grading"
#: Calls of the Linux kernel that fail.
CALLS = (
    *("fork", "vfork", "execve", "execveat", "socket", "ptrace", "io_uring_setup"),
    *("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"),
    *("process_vm_writev", "unshare"),
)
#: Bytes that a file may have.
FILE = 2**28


def main() -> None:
    """Run the cells, and say what became of each and of every exercise."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
    except ModuleNotFoundError as lacks:
        sys.exit(f'it needs the package {lacks.name}: pip install "fwlab[train]"')

    class Shell(InteractiveShell):
        def enable_gui(self, gui: Any = None) -> None:
            """%matplotlib calls this; there is no window to open."""

        def showtraceback(self, *arguments: Any, **options: Any) -> None:
            """Nobody reads it, and an error may resist being shown."""

        showsyntaxerror = showtraceback

        def ask_exit(self) -> None:
            """What exit() calls: the next cells still count."""

    task = json.load(sys.stdin.buffer)
    log, key = os.dup(1), task["key"]
    nowhere = os.open(os.devnull, os.O_RDWR)
    write, dumps = os.write, json.dumps  # a notebook may replace those of modules

    def say(**what: Any) -> None:
        write(log, f"\n{key}{dumps(what)}\n".encode())

    shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
    checker.listener = lambda name, why: say(name=name, right=not why, why=why)
    if task["own"]:
        own_exercises(*task["own"])
    held = _restrict(task["gib"])
    write(2, f"\n{key}\n".encode())  # the first cell is next
    for stream in range(3):
        os.dup2(nowhere, stream)
    say(held=held)
    for name in asked(task["cells"]):
        say(asked=name)
    for number, source in enumerate(task["cells"], 1):
        # A cell before may have closed it.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        error: str | None
        try:
            with _alarm(task["cell_seconds"]):
                done = shell.run_cell(source)
                errors = (done.error_before_exec, done.error_in_exec)
                error = next((described(e) for e in errors if e is not None), None)
        except BaseException as late:  # IPython's own, or the alarm
            error = described(late)
        if error is not None:
            say(cell=number, error=error)
    say(finished=True)
    os._exit(0)  # threads and what is to happen at the exit do not hold it up


def asked(cells: list[str]) -> list[str]:
    """The exercises that cells check, in order, as far as their source shows it."""
    names: dict[str, None] = {}
    for source in cells:
        for call in _calls(source):
            by = {k.arg: k.value for k in call.keywords}
            parts = [by.get("answer"), *call.args, by.get("name")]
            for part in [each for each in parts if each is not None][-1:]:
                name = getattr(part, "value", getattr(part, "id", None))
                if name in EXERCISES:
                    names[name] = None
    return list(names)


def _calls(source: str) -> list[ast.Call]:
    """The calls of `check` and `golf`; in a cell that does not parse, because of a mistake or
    a magic command, those in the lines that do.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        lines = source.strip().splitlines()
        return [c for line in lines if line != source for c in _calls(line.strip())]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = ("id", "attr")  # check, or exercises.check
    checks = {"check", "golf"}
    return [c for c in calls if checks & {getattr(c.func, n, "") for n in names}]


class TimeLimit(KeyboardInterrupt):
    """A cell took too long. `except Exception` does not catch this."""


class _alarm:
    """Raise an error after this many seconds, and again, where signals can."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._ring)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
            signal.setitimer(signal.ITIMER_REAL, self.seconds, 1)

    def __exit__(self, *error: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_: object) -> None:
        raise TimeLimit(f"it took more than {self.seconds:g} seconds")


def _restrict(gib: float) -> bool:
    """Limit memory, files, network and processes. Returns whether the kernel
    forbids the last two, or only Python."""
    if sys.platform == "linux":
        dies_with_parent = 1
        ctypes.CDLL(None).prctl(dies_with_parent, signal.SIGKILL)
    held = _filter()
    sys.addaudithook(_audit)
    try:
        import _posixsubprocess
        import resource
    except ImportError:  # Windows
        return held

    def refuse(*arguments: Any) -> NoReturn:
        raise PermissionError(REFUSED)

    # multiprocessing starts programs with it, and Python does not report that
    _posixsubprocess.fork_exec = refuse

    def limit(what: int, size: int) -> None:
        hard = resource.getrlimit(what)[1]
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(what, (size, size))

    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, FILE)
    if (pages := Path("/proc/self/statm")).exists():
        used = int(pages.read_text().split()[0]) * resource.getpagesize()
        limit(resource.RLIMIT_AS, used + int(gib * 2**30))
    return held


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in FORBIDDEN:
        raise PermissionError(REFUSED)


class _Compare(ctypes.Structure):
    """libseccomp's comparison of an argument of a call with a, or with a and b."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("how", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def _filter() -> bool:
    """Let the kernel forbid processes, programs, sockets and signals to
    others, for all threads, if libseccomp is here; returns whether it does.
    """
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return False
    library.seccomp_init.restype = ctypes.c_void_p
    allow, fail, all_threads, thread = 0x7FFF0000, 0x00050000, 4, 0x00010000
    differs, masked = 1, 7
    rules = ctypes.c_void_p(library.seccomp_init(allow))
    library.seccomp_attr_set(rules, all_threads, 1)

    def forbid(name: str, *only: _Compare, reason: int = errno.EPERM) -> bool:
        number = library.seccomp_syscall_resolve_name(name.encode())
        rule = fail | reason, number, len(only), (_Compare * len(only))(*only)
        return bool(library.seccomp_rule_add_array(rules, *rule) == 0)

    for name in CALLS:
        forbid(name)
    for name in ("kill", "tgkill"):
        forbid(name, _Compare(0, differs, os.getpid()))
    # A limit on the time of another process ends it, too.
    forbid("prlimit64", _Compare(0, differs, 0))
    known = forbid("clone", _Compare(0, masked, thread, 0))
    # Its flags cannot be seen: use clone. An old libseccomp does not know it.
    known &= forbid("clone3", reason=errno.ENOSYS)
    return known and bool(library.seccomp_load(rules) == 0)


if __name__ == "__main__":
    main()
