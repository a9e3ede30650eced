"""What `fwlab bench --gpu` has found on a GPU, where that decides.

Its result is a file `gpu-NAME.json`, with the name of the GPU. "auto"
chooses between two kernels by it.
"""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

OURS, OTHERS = "fwlab", "flash-linear-attention"
"""Names in the result of kernels in Triton, and of those in `fla`."""

SHIPPED = Path(__file__).parents[1] / "data" / "results"


def slug(name: str) -> str:
    """The name of a GPU as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def written(name: str) -> Path:
    """Where the benchmark writes: docs/results of a clone, or here."""
    folder = Path("docs", "results")
    in_repository = folder.is_dir() and Path("fwlab", "bench").is_dir()
    return (folder if in_repository else Path()) / f"gpu-{name}.json"


def places(name: str) -> list[Path]:
    """Where a result is looked for, the first wins.

    The folder `FWLAB_DATA`, where the benchmark writes, the package.
    """
    folder = os.environ.get("FWLAB_DATA")
    found = [Path(folder, f"gpu-{name}.json")] if folder else []
    return [*found, written(name), SHIPPED / f"gpu-{name}.json"]


@functools.cache
def result(card: str) -> tuple[Path | None, dict[str, Any]]:
    """The result for this GPU, and its file; None = there is none.

    The answer stays the same until the process ends.
    """
    for path in places(slug(card)):
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if found.get("complete") and not found.get("dry_run"):
            return path, found
    return None, {}


@functools.cache
def prefers_ours(op: str, card: str) -> tuple[bool, str]:
    """Whether our kernels of `op` are right and faster, and why.

    - `card`: the name of the GPU.

    Right: in every problem that is within their limits. Faster: in
    every case that was measured with both.
    """
    path, found = result(card)
    if path is None:
        return False, f"there is no gpu-{slug(card)}.json"
    checked = [
        row["ok"]
        for row in found["correctness"]
        if row["op"] == op and not row["refused"]
    ]
    if not checked or not all(checked):
        return False, f"{path.name} does not say that triton is right"
    times: dict[str, dict[str, float]] = {}
    for row in found["rows"]:
        if row["op"] == op and row["ms"] is not None:
            times.setdefault(row["case"], {})[row["side"]] = row["ms"]
    ratios = [
        case[OTHERS] / case[OURS]
        for case in times.values()
        if OURS in case and OTHERS in case
    ]
    if not ratios or min(ratios) < 1:
        return False, f"{path.name} does not say that triton is faster"
    return True, f"{path.name} says that triton is right and faster"
