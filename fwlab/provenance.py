"""Record the origin of a result, to reproduce it."""

import datetime
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import fwlab


def provenance(command: str) -> dict[str, Any]:
    """Return versions, machine, commit and date as plain values for JSON.

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
    """Return the commit of the source tree, with "+changes" if files differ.

    "none" if fwlab does not run from a git checkout.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "none"
    try:
        changed = bool(
            _git(root, "status", "--porcelain", "--", "fwlab", "docs/reproduce/*.py")
        )
        return _git(root, "rev-parse", "--short=10", "HEAD") + "+changes" * changed
    except (OSError, subprocess.SubprocessError):
        return "none"


def machine() -> str:
    """Return the names of the processor and the GPU."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = re.findall(r"model name\s*: *(.*)", cpuinfo.read_text())
        if models:
            name = f"{models[0].strip()}, {len(models)} cores"
    if torch.cuda.is_available():
        name += f"; {torch.cuda.get_device_name()}"
    return f"{name}; {platform.system()} {platform.machine()}"


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(
        command, cwd=root, stderr=subprocess.DEVNULL, text=True, timeout=10
    ).strip()
