"""Measure the kernels on a GPU, in one table, each with its error.

Every operation that has a kernel of ours is computed forward and backward by our kernel,
by flash-linear-attention if it is installed, and by the efficient form. Each is first
compared with the naive loop in float64, in three precisions, in memory filled with NaN;
then it is timed. Every row is written when it is measured, and a run that was stopped
goes on. `pytest -m gpu` in the repository checks more: states, ragged lengths, all widths.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from fwlab import ops
from fwlab.bench.measure import print_rows
from fwlab.bench.operations import largest_error, once
from fwlab.bench.problems import RULES, Problem, problem
from fwlab.files import destination, write_json
from fwlab.ops import _operation as operation
from fwlab.ops import _triton
from fwlab.provenance import provenance, version

#: Maximum relative error of an output or a gradient, by dtype.
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
#: The dtype in which calls are timed, the last dtype in `LIMITS`.
#: flash-linear-attention, which autotunes for minutes, is compared in `TIMED` only.
TIMED = "bfloat16"
SIDES = ("triton", "fla", "efficient")
#: Sizes of rules: long, wide with a partial last chunk, and shorter than one chunk.
RULE_SIZES = (
    {"batch": 8, "time": 4096, "heads": 16, "width": 64},
    {"batch": 4, "time": 2000, "heads": 16, "width": 128},
    {"batch": 32, "time": 50, "heads": 16, "width": 64},
)
AFT_SIZES = (
    {"batch": 32, "time": 2048, "width": 1024, "window": 64, "heads": 16},
    {"batch": 4, "time": 500, "width": 128, "window": 16, "heads": 4},
)
FEEDBACK_SIZES = ({"batch": 8, "time": 512, "width": 256, "heads": 8, "layers": 4},)
#: Function that measures milliseconds and peak MiB of a call; None = not measured.
Clock = Callable[[Callable[[], Any]], tuple[float | None, float | None]]
Row = dict[str, Any]


def cases() -> Iterator[tuple[Any, dict[str, int]]]:
    """Yield every operation that has a Triton kernel, once per size."""
    for name, op in ops.TABLE.items():
        sizes = FEEDBACK_SIZES if name == "feedback" else AFT_SIZES
        for size in RULE_SIZES if name in RULES else sizes:
            if "triton" in op.forms:
                yield op, size


def key(op: Any, size: dict[str, int]) -> str:
    """Return the name of a case: its operation and its sizes."""
    return "-".join([op.__name__, *(f"{n}{value}" for n, value in size.items())])


def peer(name: str) -> Callable[..., Tensor] | None:
    """Return the function of flash-linear-attention for an operation, or None.

    The function takes the tensors of our operation and does not scale queries. Its
    decays are logarithms: a decay of 0 is raised to 1e-11.
    """
    if not (version("flash-linear-attention") or version("fla-core")):
        return None

    def call(kind: str, *x: Tensor, **options: Tensor) -> Tensor:
        function = getattr(import_module(f"fla.ops.{kind}"), f"chunk_{kind}")
        return function(*x, scale=1.0, **options)[0]

    def gated(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        kept = (1 - beta.float()).clamp(min=1e-11)
        return call("simple_gla", q, k, beta[..., None] * v, g=kept.log())

    def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return call("delta_rule", q, k, v, beta=beta)

    def implicit(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return delta(q, k, v, beta / (1 + beta * k.square().sum(-1)))

    def gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return call("gated_delta_rule", q, k, v, g=g.float(), beta=beta)

    peers: dict[str, Any] = {
        "sum_rule": partial(call, "simple_gla"),
        "gated_rule": gated,
    }
    peers |= {"delta_rule": delta, "implicit_delta_rule": implicit}
    return (peers | {"gated_delta_rule": gated_delta}).get(name)


def piece(op: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return an independent part of a problem that is small enough for the naive loop.

    This part is the first head, or channel, of the first sequence; of a feedback
    stack, the first sequence.

    - `tensors`: the inputs of an operation, or the first of them, or their gradients.
    """
    parts = []
    names = dimensions(op)
    for at, x in enumerate(tensors):
        dims = names[at] if at < len(names) else ()  # Feedback weights have no names.
        for dim in ("batch", "heads", "queries", "channels"):
            if dim in dims and not (dim == "channels" and "heads" in dims):
                x = x.narrow(dims.index(dim), 0, 1)
        parts.append(x)
    return parts


def dimensions(op: Any) -> list[tuple[str, ...]]:
    """Return the dimension names of each input that `problem` draws."""
    optional = op.rule.optional if hasattr(op, "rule") else {"factors"}
    names = operation.annotated(op).names
    return [dims for name, dims in names.items() if name not in optional]


def compared(op: Any, results: list[Tensor]) -> list[Tensor]:
    """Return the output and gradients for the part of a problem selected by `piece`."""
    y, *gradients = results
    alone = sum("batch" in dims for dims in dimensions(op))
    return [*piece(op, [y]), *piece(op, gradients)[:alone]]


def measure_row(
    op: Any, size: dict[str, int], side: str, device: str, clock: Clock
) -> Row:
    """Measure errors, time and memory of one implementation, or record its failure."""
    shape = {"T" if n == "time" else n: value for n, value in size.items()}
    row: Row = {"op": op.__name__, "case": key(op, size), "shape": shape, "side": side}
    row |= {"errors": dict.fromkeys(LIMITS), "refused": None, "reason": None}
    row |= {"ms": None, "peak_mib": None}
    try:
        for dtype in LIMITS if side != "fla" else [TIMED]:
            given = problem(op, getattr(torch, dtype), **size)
            inputs = [x.detach().to(device).requires_grad_() for x in given.inputs]
            call: Any = peer(op.__name__) if side == "fla" else given.call
            named = {} if side == "fla" else {"implementation": side}
            given = Problem(given.call, inputs, given.gradient.to(device))
            exact = reference(op, given)
            work = partial(once, partial(call, **named), given)
            error = largest_error(compared(op, in_memory_of_nan(work)), exact)
            if not math.isfinite(error):
                raise ArithmeticError(f"{dtype}: the result is not finite")
            row["errors"][dtype] = float(f"{error:.1e}")
        row["ms"], row["peak_mib"] = clock(work)
    except operation.Refused as error:
        row["refused"] = str(error)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        row["reason"] = f"{type(error).__name__}: {first.strip()}"[:300]
    return row


def reference(op: Any, given: Problem) -> list[Tensor]:
    """Compute the output and gradients of a `piece` with the naive loop, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in piece(op, given.inputs)]
    (gradient,) = piece(op, [given.gradient.double()])
    naive = partial(given.call, implementation="naive")
    return once(naive, Problem(naive, leaves, gradient))


def in_memory_of_nan(call: Callable[[], Any]) -> Any:
    """Call a function while NaN fills new memory, to find unwritten entries."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    finally:
        torch.use_deterministic_algorithms(False)


def on_gpu(call: Callable[[], Any]) -> tuple[float, float]:
    """Measure the median time of a call with a cold cache, and its peak memory."""
    from triton.testing import do_bench

    ms = do_bench(call, warmup=100, rep=500, return_mode="median")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return float(f"{ms:.4g}"), round(peak, 1)


def verdict(rows: list[Row]) -> tuple[bool, str]:
    """Return True if all kernels are right, and a summary, ignoring refused cases."""
    ours = {row["case"]: row for row in rows if row["side"] == "triton"}
    bad = {case: why for case, row in ours.items() if (why := wrong(row))}
    checked = [row for row in ours.values() if any(row["errors"].values())]
    if bad:
        some = "; ".join(f"{case}: {', '.join(why)}" for case, why in bad.items())
        return False, f"wrong in {len(bad)} of {len(ours)} cases: {some}"
    if not checked:
        return False, "no kernel was checked"
    text = f"right in all {len(checked)} cases that the kernels take"
    for side in SIDES[1:]:
        both = [(r["ms"], ours[r["case"]]["ms"]) for r in rows if r["side"] == side]
        ratios = [theirs / mine for theirs, mine in both if theirs and mine]
        if ratios:
            faster = sum(ratio > 1 for ratio in ratios)
            text += f"; faster than {side} in {faster} of {len(ratios)}"
    return True, text


def wrong(row: Row) -> list[str]:
    """Describe the failure or excessive errors of a row, or return an empty list."""
    errors = {dtype: error for dtype, error in row["errors"].items() if error}
    beyond = [f"{d} {e:.1e}" for d, e in errors.items() if not e <= LIMITS[d]]
    return [row["reason"]] if row["reason"] else beyond


def main(out: Path | None, command: str) -> bool:
    """Check and time all kernels, print and save rows; return True if all are right.

    - `out`: the JSON file; None = gpu-CARD.json, in docs/results in the repository. If it
      has rows of the same card and versions, they are not measured again.
    - Raises `ValueError` if there is no GPU or no Triton, or if its compiler cannot be
      trusted.
    """
    if reason := _triton.why_not(minimum=(7, 5)):
        raise ValueError(f"bench --gpu: {reason}")
    card = about_card()
    folder = Path("docs", "results")
    here = folder if folder.is_dir() and Path("fwlab", "bench").is_dir() else Path()
    path = out or here / f"gpu-{card['slug']}.json"
    destination(path)
    names = ("torch", "triton", "flash-linear-attention", "fla-core")
    result: Row = {"complete": False, "card": card, "limits": LIMITS, "rows": []}
    result |= {"versions": {name: version(name) for name in names}}
    result |= provenance(command)
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    same = all(before.get(n) == result[n] for n in ("versions", "commit", "limits"))
    known = {(r["case"], r["side"]): r for r in before.get("rows", []) if same}
    print(f"{card['name']}: {path}\n")

    def measured() -> Iterator[Row]:
        ours = None
        for op, size in tqdm([*cases()], unit="case", disable=None, leave=False):
            for side in SIDES:
                if side == "fla" and peer(op.__name__) is None:
                    continue
                row = known.get((key(op, size), side))
                row = row or measure_row(op, size, side, "cuda", on_gpu)
                result["rows"].append(row)
                result["right"], result["verdict"] = verdict(result["rows"])
                write_json(path, result)  # Save each row, as the run may be stopped.
                shown = {name: row[name] for name in ("op", "shape", "side", "ms")}
                ours = row["ms"] if side == "triton" else ours
                ratio = row["ms"] / ours if row["ms"] and ours else None
                shown |= {"x triton": ratio, "MiB": row["peak_mib"]}
                yield shown | row["errors"]

    print_rows(measured(), [19, 56, 9, *[8] * 6])
    write_json(path, result | {"complete": True})
    for row in result["rows"]:
        if why := row["reason"] or row["refused"]:
            print(f"{row['case']}, {row['side']}: {why}")
    print(f"\n{result['verdict']}\n{path}")
    return result["right"]


def about_card() -> dict[str, Any]:
    """Return name, capability, memory and CUDA version of the GPU that PyTorch uses."""
    about = torch.cuda.get_device_properties(0)
    return {
        "name": about.name,
        "slug": re.sub(r"[^a-z0-9]+", "-", about.name.lower()).strip("-"),
        "capability": (about.major, about.minor),
        "memory_gib": round(about.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }
