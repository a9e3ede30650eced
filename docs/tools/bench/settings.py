"""How threads wait: settings that only a process of its own can choose.

PyTorch reads the variables when it is loaded. Which setting is fastest
depends on the work: many small operations cost most where threads sleep.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Environment variables by setting.
SETTINGS: dict[str, dict[str, str]] = {
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spinning": {"OMP_WAIT_POLICY": "ACTIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def fresh(module: str, call: str, setting: dict[str, str]) -> Any:
    """What a call in a module of this folder returns in a new process.

    - `setting`: its environment variables; no other of OpenMP's are set.
    - The result has to be plain values.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    code = (
        f"import json; from bench import {module}; print(json.dumps({module}.{call}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | setting,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def busy_seconds() -> float | None:
    """Processor time that all programs together have used, or that another
    machine on the same processor has taken; None where nobody says.
    """
    try:
        first = Path("/proc/stat").read_text("utf-8").partition("\n")[0]
    except OSError:
        return None
    user, nice, system, _, _, *rest = map(int, first.split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
