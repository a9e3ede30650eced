"""Cells that break out of a graded notebook, break it, or mean no harm and do.

Each is graded between a right answer to `write` and one to `read_memory`. With it
is what the teacher is told: part of the error of the cell ("" = it raises
none), and why the notebook ended before its last cell ("" = it did not,
" " = for any reason).

None does harm if nothing holds it: signals are 0, which only asks whether another
signal could be sent, and programs sleep for a minute.
"""

import json
from pathlib import Path
from typing import NamedTuple

FIRST = """
from fwlab.exercises import check

def write(W, k, v):
    return W + v[..., :, None] * k[..., None, :]

_ = check(write)
"""
LAST = """
import fwlab.exercises

def read_memory(W, q):
    return (W @ q[..., None])[..., 0]

fwlab.exercises.check(read_memory)
"""
#: A notebook that asks for more than its cells check.
LISTED = ["write", "read_memory", "delta_step"]


class Cell(NamedTuple):
    source: str
    error: str = ""
    ended: str = ""


NO = "no network and no other programs"
LEFT = "ended Python"
LIMIT = "the time limit"
CHILD = "\nif pid == 0:\n    os.setsid()\n    time.sleep(60)\n"

CELLS = {
    # --- Leaving
    "sys.exit": Cell("import sys; sys.exit(3)", "SystemExit: 3"),
    "exit": Cell("exit()"),
    "os._exit": Cell("import os; os._exit(0)", ended=LEFT),
    "os._exit with a code": Cell("import os; os._exit(5)", ended=LEFT),
    "kills the parent": Cell("import os; os.kill(os.getppid(), 0)", NO),
    "kills itself": Cell("import os; os.kill(os.getpid(), 9)", NO),
    "kills all": Cell("import os; os.kill(-1, 0)", NO),
    "kills the parent from C": Cell(
        "import ctypes, os; assert ctypes.CDLL(None).kill(os.getppid(), 0) == 0",
        "AssertionError",
    ),
    "limits the parent": Cell(
        "import os, resource\np, cpu = os.getppid(), resource.RLIMIT_CPU\n"
        "resource.prlimit(p, cpu, resource.prlimit(p, cpu))",
        NO,
    ),
    "limits the parent from C": Cell(
        "import ctypes, os; assert ctypes.CDLL(None).prlimit(os.getppid(), 0, 0, 0) == 0",
        "AssertionError",
    ),
    "a namespace from C": Cell(
        "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "AssertionError",
    ),
    "abort": Cell("import os; os.abort()", ended="signal 6"),
    "segfault": Cell("import ctypes; ctypes.string_at(0)", ended="signal 11"),
    "dump_traceback_later": Cell(
        "import faulthandler, time\n"
        "faulthandler.dump_traceback_later(0.1, exit=True, file=open('f', 'w'))\n"
        "time.sleep(60)",
        ended=LEFT,
    ),
    "time of the processor": Cell(
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))\n"
        "while True: pass",
        ended="signal 9",
    ),
    # --- Never ending
    "sleeps": Cell("import time\nwhile True: time.sleep(1)", "more than 3 seconds"),
    "catches Exception": Cell(
        "while True:\n    try:\n        while True: pass\n    except Exception: pass",
        "more than 3 seconds",
    ),
    "catches everything": Cell(
        "import time\nwhile True:\n    try: time.sleep(1)\n"
        "    except BaseException: pass",
        ended=LIMIT,
    ),
    "holds the lock of Python": Cell("sum(range(10**14))", ended=LIMIT),
    "masks signals": Cell(
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    ),
    "ignores the alarm": Cell(
        "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)"
    ),
    "a thread that never ends": Cell(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1e6]).start()"
    ),
    "atexit": Cell("import atexit, time; atexit.register(time.sleep, 1e6)"),
    "an answer that never ends": Cell(
        "def delta_step(W, k, v, beta):\n    while True: pass\n\ncheck(delta_step)",
        "more than 3 seconds",
    ),
    # --- Errors
    "a message that raises": Cell(
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "an error whose message cannot be read",
    ),
    "a message that never ends": Cell(
        "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E",
        "more than 3 seconds",
    ),
    "a message of 10 MB": Cell("raise ValueError('x' * 10**7)", "ValueError: xxx"),
    "a message for the terminal": Cell(
        "raise ValueError('\\x1b[2J\\x1b]0;owned\\x07')", "ValueError:  [2J ]0;owned"
    ),
    "an error without a name": Cell(
        "class M(type):\n    __name__ = property(lambda self: 1 / 0)\n"
        "    def __bool__(self): 1 / 0\n"
        "class E(Exception, metaclass=M):\n    def __bool__(self): 1 / 0\nraise E",
        "an error whose message cannot be read",
    ),
    "SystemExit in SystemExit": Cell(
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
        "an error whose message cannot be read",
    ),
    "KeyboardInterrupt": Cell("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "GeneratorExit": Cell("raise GeneratorExit", "GeneratorExit"),
    "nested groups": Cell(
        "e = ValueError('deep')\nfor _ in range(5000): e = ExceptionGroup('g', [e])\n"
        "raise e",
        "ExceptionGroup: g",
    ),
    "100,000 brackets": Cell("(" * 100_000, "SyntaxError"),
    "20,000 minus signs": Cell("x = " + "-" * 20_000 + "1", "Error"),
    "100,000 attributes": Cell("x" + ".y" * 100_000, "Error"),
    "a very long sum": Cell("x = " + "+".join(["1"] * 50_000), "Error"),
    "100 levels of blocks": Cell(
        "\n".join(" " * n + "if 1:" for n in range(101)) + "\n" + " " * 101 + "pass",
        "Error",
    ),
    "NUL": Cell("x = '\0'", "Error"),
    "half a character": Cell("x = '\ud800'", "Error"),
    "a warning is an error": Cell("import warnings; warnings.simplefilter('error')"),
    "recursion": Cell("def f(): return f()\nf()", "RecursionError"),
    "deep data": Cell(
        "x = []\nfor _ in range(100_000): x = [x]\nrepr(x)", "RecursionError"
    ),
    # --- Output
    "output of 1 GB": Cell("for _ in range(1000): print('x' * 10**6)"),
    "a repr that never ends": Cell(
        "class R:\n    def __repr__(self):\n        while True: pass\nR()",
        "more than 3 seconds",
    ),
    "a repr that raises": Cell("class R:\n    def __repr__(self): 1 / 0\nR()"),
    "closes stdout": Cell("import sys; sys.stdout.close(); sys.stderr.close()"),
    "no stdout": Cell("import sys; sys.stdout = sys.__stdout__ = sys.stderr = None"),
    "closes 0 to 2": Cell("import os; [os.close(n) for n in range(3)]"),
    "closes all": Cell("import os; os.closerange(0, 4096)", ended=" "),
    "input": Cell("input()", "EOFError"),
    "getpass": Cell("import getpass; getpass.getpass()", "Error"),
    # --- Programs and processes
    "a shell": Cell("!sleep 60", NO),
    "a cell in bash": Cell("%%bash\nsleep 60", NO),
    "a shell of IPython": Cell("get_ipython().system('sleep 60')", NO),
    "subprocess": Cell(
        "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
        NO,
    ),
    "os.system": Cell("import os; os.system('sleep 60 &')", NO),
    "os.posix_spawn": Cell(
        "import os; os.posix_spawn('/bin/sleep', ['sleep', '60'], {})", NO
    ),
    "os.execv": Cell("import os; os.execv('/bin/sleep', ['sleep', '60'])", NO),
    "os.fork": Cell("import os, time\npid = os.fork()" + CHILD, NO),
    "os.forkpty": Cell("import os, time\npid = os.forkpty()[0]" + CHILD, NO),
    "pty.fork": Cell("import os, pty, time\npid = pty.fork()[0]" + CHILD, NO),
    "pty.spawn": Cell("import pty; pty.spawn(['sleep', '60'])", NO),
    "a fork bomb": Cell("import os\nfor _ in range(3): os.fork()", NO),
    "multiprocessing, fork": Cell(
        "import multiprocessing as m, time\n"
        "m.get_context('fork').Process(target=time.sleep, args=[60]).start()",
        NO,
    ),
    "multiprocessing, spawn": Cell(
        "import multiprocessing as m, time\n"
        "for _ in range(2):\n"
        "    m.get_context('spawn').Process(target=time.sleep, args=[60]).start()",
        NO,
    ),
    "multiprocessing, forkserver": Cell(
        "import multiprocessing as m, time\n"
        "m.get_context('forkserver').Process(target=time.sleep, args=[60]).start()",
        NO,
    ),
    "a pool": Cell(
        "from concurrent.futures import ProcessPoolExecutor as P\n"
        "print(P(2).submit(abs, -1).result())",
        NO,
    ),
    "a loader with workers": Cell(
        "import torch\nnext(iter(torch.utils.data.DataLoader([1, 2], num_workers=2)))",
        NO,
    ),
    "fork from C": Cell(
        "import ctypes, os, time\npid = ctypes.CDLL(None).fork()" + CHILD
    ),
    "system from C": Cell(
        "import ctypes; ctypes.CDLL(None).system(b'setsid sleep 60 &')"
    ),
    "fork without hooks, as from C": Cell(
        "import sys, os, time\n"
        "sys.modules['fwlab.exercises.graded'] = None\n"
        "main = [o for o in __import__('gc').get_objects()\n"
        "        if type(o) is dict and o.get('FORBIDDEN')]\n"
        "for each in main: each['FORBIDDEN'] = ()\n"
        "try: pid = os.fork()\n"
        "except OSError: pid = 1" + CHILD
    ),
    # --- Network
    "opens an address": Cell(
        "import urllib.request as u; u.urlopen('http://127.0.0.1:9', timeout=1)",
        NO,
    ),
    "sends a packet": Cell(
        "import socket\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
        "Error",
    ),
    "listens": Cell("import socket; socket.create_server(('', 0))", "Error"),
    # --- Memory and disk
    "1 TiB": Cell("x = bytearray(2**40)", "MemoryError"),
    "4 TiB in a tensor": Cell("import torch; torch.empty(2**40)", "RuntimeError"),
    "memory that grows": Cell(
        "x = []\nwhile True: x.append(bytearray(2**28))", "MemoryError"
    ),
    "a large file": Cell("open('x', 'wb').truncate(2**31)", "File too large"),
    "a full disk": Cell(
        "for n in range(9):\n"
        "    with open(f'x{n}', 'wb') as f: f.write(bytes(2**26))\n"
        "raise OSError('filled')",
        "OSError: ",
    ),
    "deep folders": Cell(
        "import os\nfor _ in range(1500):\n    os.mkdir('d'); os.chdir('d')"
    ),
    "folders that resist": Cell(
        "import os\nos.mkdir('d'); os.mkdir('d/e'); os.chmod('d', 0)\n"
        "os.symlink('/', 'l'); os.chmod('.', 0)"
    ),
    "removes its folder": Cell(
        "import os\nhere = os.getcwd(); os.chdir('/'); os.rmdir(here)\nraise OSError",
        "OSError",
    ),
    # --- What others use
    "half precision": Cell("import torch; torch.set_default_dtype(torch.float16)"),
    "meta": Cell("import torch; torch.set_default_device('meta')"),
    "no gradients": Cell("import torch; torch.set_grad_enabled(False)"),
    "inference": Cell("import torch; torch.inference_mode().__enter__()"),
    "a seed": Cell("import torch; torch.manual_seed(1); torch.set_num_threads(7)"),
    "deterministic": Cell("import torch; torch.use_deterministic_algorithms(True)"),
    "a mode": Cell(
        "import torch\nfrom torch.overrides import TorchFunctionMode\n"
        "class M(TorchFunctionMode):\n"
        "    def __torch_function__(self, *given): 1 / 0\n"
        "M().__enter__()"
    ),
    "an environment": Cell("import os; os.environ.clear(); os.chdir('/')"),
    "a trace": Cell("import sys; sys.settrace(lambda *given: None)"),
    "a limit of recursion": Cell("import sys; sys.setrecursionlimit(10**6)"),
    "few files": Cell(
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    ),
    "an event that raises": Cell(
        "get_ipython().events.register('post_run_cell', lambda r: 1 / 0)\n"
        "get_ipython().events.register('pre_run_cell', lambda r: 1 / 0)"
    ),
    "a hook for errors": Cell(
        "get_ipython().set_custom_exc((Exception,), lambda *given: 1 / 0)\n1 / 0",
        "Error",
    ),
    "an empty namespace": Cell("get_ipython().reset()"),
    "other functions": Cell(
        "import json, os, torch\n"
        "json.dumps = os.write = torch.allclose = torch.equal = lambda *given: True"
    ),
    "a magic command": Cell("%%time\n%matplotlib inline\nimport fwlab"),
    "top-level await": Cell("import asyncio\nawait asyncio.sleep(0.01)"),
    # --- Cheating
    "another check": Cell(
        "import fwlab.exercises\n"
        "check = fwlab.exercises.checker.check = lambda *given: True\n"
        "def delta_step(*given): pass\ncheck(delta_step)",
    ),
    "a printed verdict": Cell(
        "import json, os\n"
        "what = json.dumps({'name': 'delta_step', 'right': True, 'why': ''})\n"
        "print(what)\n"
        "for n in range(4096):\n"
        "    try: os.write(n, f'\\n{what}\\n'.encode())\n"
        "    except OSError: pass"
    ),
    "a verdict that is nonsense": Cell(
        "import gc, os\n"
        "for f in gc.get_objects():\n"
        "    if type(f).__name__ == 'function' and f.__name__ == 'say':\n"
        "        say = dict(zip(f.__code__.co_freevars, f.__closure__ or ()))\n"
        "        if not say: continue\n"
        "        log, key = (say[n].cell_contents for n in ('log', 'key'))\n"
        'for what in (\'[1]\', \'{"name": [1], "right": 1, "why": 1}\',\n'
        "             '{\"asked\": 3}', '{\"cell\": 1}', '[' * 10**5):\n"
        "    os.write(log, f'\\n{key}{what}\\n'.encode())"
    ),
    "writes nonsense everywhere": Cell(
        "import os\n"
        "for n in range(4096):\n"
        "    try: os.write(n, os.urandom(99))\n"
        "    except OSError: pass"
    ),
    # --- Answers
    "an answer that leaves": Cell(
        "def delta_step(*given): raise SystemExit\ncheck(delta_step)"
    ),
    "an answer with a bad error": Cell(
        "class E(BaseException):\n    def __str__(self): raise E\n"
        "def delta_step(*given): raise E\ncheck(delta_step)"
    ),
    "an answer with a bad result": Cell(
        "class R:\n    def __repr__(self): 1 / 0\n"
        "    def __class__(self): 1 / 0\n"
        "    def __iter__(self): 1 / 0\n"
        "def delta_step(*given): return R()\ncheck(delta_step)"
    ),
    "a long result": Cell(
        "def capacity(*given): return 'x' * 10**7\ncheck(capacity, 'delta_step')"
    ),
    "an answer that recurs": Cell(
        "def delta_step(*given): return delta_step()\ncheck(delta_step)"
    ),
    "a cyclic answer": Cell(
        "def delta_step(*given): 1 / 0\n"
        "delta_step.__wrapped__ = delta_step\ncheck(delta_step)"
    ),
    "an answer without a name": Cell(
        "class A:\n    __name__ = [1]\n    def __call__(self, *given): pass\ncheck(A())"
    ),
    "no answer": Cell("check()", "TypeError"),
    "an answer of a wrong type": Cell("check(3); check('delta_step'); check(check)"),
}


#: For one notebook: after each of these, the next cells run.
QUICK = (
    *(
        "masks signals",
        "sleeps",
        "sys.exit",
        "kills the parent",
        "a message that raises",
    ),
    *("100,000 brackets", "20,000 minus signs", "half a character", "1 TiB"),
    *("a message for the terminal", "a message of 10 MB", "a large file"),
    *("a shell", "os.forkpty", "multiprocessing, fork", "multiprocessing, spawn"),
    *("opens an address", "an answer with a bad error", "another check"),
    *("a printed verdict", "a verdict that is nonsense", "meta", "other functions"),
    *("closes stdout", "closes 0 to 2", "a thread that never ends", "atexit"),
)


def notebook(path: Path, *sources: str, listed: list[str] | None = None) -> Path:
    """Write a notebook of these cells, which lists these exercises."""
    code = [{"cell_type": "code", "source": source} for source in sources]
    metadata = {"fwlab": {"exercises": listed}} if listed else {}
    path.write_text(json.dumps({"metadata": metadata, "cells": code}), "utf-8")
    return path
