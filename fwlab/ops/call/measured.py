"""Which kernels "auto" prefers, by a result of `fwlab bench --gpu`.

The result is a file `gpu-NAME.json`, with the name of the GPU. It
compares our kernels with functions of flash-linear-attention. For the
delta rules, `implementation="fla"` calls the same functions. For the
sum rule, the benchmark measures `chunk_linear_attn`, which normalises
by itself; "fla" calls `chunk_simple_gla`, as this function does inside,
and normalises in full precision with PyTorch. So the time there is not
that of "fla".
"""

import contextlib
import functools
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

OURS, OTHERS = "fwlab", "flash-linear-attention"
"""What the result calls our kernels, and those to compare with."""

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


class Result(NamedTuple):
    """What counts here of a result.

    - `right`: for each operation, whether it was right in all problems
      within its limits.
    - `times`: for each operation and case, milliseconds by version.
    """

    path: Path
    right: dict[str, bool]
    times: dict[str, dict[str, dict[str, float]]]


@functools.cache
def result(card: str) -> Result | None:
    """The result for this GPU; None = there is none.

    The answer stays the same until the process ends.
    """
    for path in places(slug(card)):
        # One that is damaged, or of an older version, is none.
        with contextlib.suppress(
            OSError, ValueError, LookupError, TypeError, AttributeError
        ):
            found = json.loads(path.read_text("utf-8"))
            if _whole(found):
                return _read(path, found)
    return None


def _whole(found: dict[str, Any]) -> bool:
    """Whether the run had all problems and cases, on a GPU, to its end."""
    return found["complete"] and not (
        found["quick"] or found["dry_run"]
    )


def _read(path: Path, found: dict[str, Any]) -> Result:
    right: dict[str, bool] = {}
    for row in found["correctness"]:
        if not row["refused"]:
            right[row["op"]] = bool(row["ok"]) and right.get(
                row["op"], True
            )
    for gap in found[
        "not_run"
    ]:  # such as "correctness sum_rule float32"
        kind, *names = gap["task"].split()
        if kind == "correctness":
            right[names[0]] = False
    times: dict[str, dict[str, dict[str, float]]] = {}
    for row in found["rows"]:
        if row["ms"] is not None:
            cases = times.setdefault(row["op"], {})
            cases.setdefault(row["case"], {})[row["side"]] = float(
                row["ms"]
            )
    return Result(path, right, times)


@functools.cache
def prefers_ours(op: str, card: str) -> tuple[bool, str]:
    """Whether our kernels of `op` are right and faster, and why.

    - `card`: the name of the GPU.

    Right: in every problem that is within their limits, and none was
    left out. Faster: in every case that was measured with both.
    """
    found = result(card)
    if found is None:
        return (
            False,
            f"there is no gpu-{slug(card)}.json of a whole run",
        )
    name = found.path.name
    if not found.right.get(op):
        return False, f"{name} does not say that triton is right"
    faster = [
        case[OTHERS] >= case[OURS]
        for case in found.times.get(op, {}).values()
        if OURS in case and OTHERS in case
    ]
    if not faster or not all(faster):
        return False, f"{name} does not say that triton is faster"
    return True, f"{name} says that triton is right and faster"
