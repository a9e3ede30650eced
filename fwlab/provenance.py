"""Where a result comes from: what you need to reproduce it."""

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fwlab


def provenance(command: str) -> dict[str, Any]:
    """Versions, machine, commit and date, as plain values for JSON.

    - `command`: the command line that produces the result.
    """
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "fwlab": fwlab.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": machine(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    """The commit of the source tree, with "+changes" if files differ.

    "none" if fwlab does not run from a git checkout.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "none"
    try:
        head = _git(root, "rev-parse", "--short=10", "HEAD")
        return head + (
            "+changes" if _git(root, "status", "--porcelain", "--", "fwlab") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return "none"


def machine() -> str:
    """Names of the processor and the GPU."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [
            line
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        if models:
            name = f"{models[0].split(':', 1)[1].strip()}, {len(models)} cores"
    if torch.cuda.is_available():
        name += f"; {torch.cuda.get_device_name()}"
    return f"{name}; {platform.system()} {platform.machine()}"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
        timeout=10,
    ).stdout.strip()
