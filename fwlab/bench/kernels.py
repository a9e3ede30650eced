"""Speed of the kernels on a GPU, in one table, each with its error.

Every operation that has a kernel of ours is computed forward and backward
by our kernel, by flash-linear-attention if it is installed, and by the
efficient form. First each one is compared with the naive loop in float64,
in three precisions, in memory filled with NaN; then it is timed. Where the
tests of the repository are, `pytest -m gpu` checks more: states, ragged
lengths, all widths.
"""

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fwlab import ops
from fwlab.bench import aft, feedback, fla, rules
from fwlab.bench.case import Case, bar, once, printed, shape_text
from fwlab.files import destination, write_json
from fwlab.ops import _triton
from fwlab.ops._operation import Refused
from fwlab.provenance import provenance

#: Maximum relative error of an output or a gradient.
LIMITS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
#: The precision of the times, the last one. For each one, flash-linear-attention
#: tunes its kernels again, which takes minutes: it is compared in this one only.
TIMED = "bfloat16"
#: What is compared; the naive loop gives the reference.
SIDES = ("triton", "fla", "efficient")

#: batch, time, heads, width: long, wide and ragged, and short: less than one
#: chunk.
RULES = ((8, 4096, 16, 64), (4, 2000, 16, 128), (32, 50, 16, 64))
#: batch, time, width, window, heads.
AFT = ((32, 2048, 1024, 64, 16), (4, 500, 128, 16, 4))
#: batch, time, layers, width, heads.
FEEDBACK = ((8, 512, 4, 256, 8),)

Row = dict[str, Any]
#: Milliseconds and peak MiB of a call; None = not measured.
Clock = Callable[[Callable[[], Any]], tuple[float | None, float | None]]


def cases(
    rule_sizes: tuple[tuple[int, ...], ...] = RULES,
    aft_sizes: tuple[tuple[int, ...], ...] = AFT,
    feedback_sizes: tuple[tuple[int, ...], ...] = FEEDBACK,
) -> Iterator[Case]:
    """Every operation that has a kernel of ours, at its sizes."""
    for name, op in ops.TABLE.items():
        if "triton" not in op.forms:
            continue
        if hasattr(op, "rule"):
            for batch, steps, heads, width in rule_sizes:
                shape = {"batch": batch, "T": steps, "heads": heads, "width": width}
                problem = partial(
                    rules.problem,
                    op=op,
                    time=steps,
                    width=width,
                    batch=batch,
                    heads=heads,
                )
                yield _case(name, shape, problem, rules.without_mean(op))
        elif name == "feedback":
            for batch, steps, layers, width, heads in feedback_sizes:
                shape = {"batch": batch, "T": steps, "layers": layers, "width": width}
                problem = partial(
                    feedback.problem,
                    time=steps,
                    layers=layers,
                    groups=layers,
                    batch=batch,
                    width=width,
                    heads=heads,
                )
                yield _case(name, shape, problem, partial(feedback.stack, heads=heads))
        else:
            for batch, steps, width, window, heads in aft_sizes:
                shape = {"batch": batch, "T": steps, "width": width}
                bias = {
                    "aft_full": (steps, steps),
                    "aft_local": (steps, window),
                    "aft_conv": (heads, window),
                }.get(name, ())
                problem = partial(
                    aft.problem,
                    time=steps,
                    bias=bias,
                    batch=batch,
                    width=width,
                    heads=heads if name == "aft_conv" else None,
                )
                yield _case(name, shape, problem, op)


def _case(
    name: str,
    shape: dict[str, int],
    problem: Callable[[torch.dtype], Any],
    op: Callable[..., Tensor],
) -> Case:
    sides: dict[str, Any] = {
        side: fla.PEERS.get(name) if side == "fla" else partial(op, implementation=side)
        for side in (*SIDES, "naive")
    }
    return Case(name, shape, problem, {n: call for n, call in sides.items() if call})


def piece(op: str, inputs: list[Tensor]) -> tuple[list[Tensor], int]:
    """An independent part of the inputs, so that the naive loop has room.

    That is the first head, or channel, of the first sequence. Also returns
    how many of them, from the first on, have gradients of this part alone.
    """
    if op == "feedback":
        return [inputs[0][:1], *inputs[1:]], 1
    first = [x[:1, :, :1] for x in inputs[:3]]
    if op == "aft_conv":
        return [*first, *(kernel[:1] for kernel in inputs[3:])], 3
    if op.startswith("aft"):
        return [*first, *inputs[3:]], 3
    rule = ops.TABLE[op].rule
    heads = [
        dims.index("queries" if name == "q" else "heads")
        for name, dims in rule.tensors.names.items()
        if name not in rule.optional
    ]
    parts = [x[:1].narrow(at, 0, 1) for at, x in zip(heads, inputs, strict=False)]
    return parts, len(parts)


def rows(case: Case, device: str, clock: Clock) -> list[Row]:
    """A row for each side: errors by precision, time and memory, and why not."""
    by_side: dict[str, Row] = {
        side: {
            "op": case.name,
            "case": case.key,
            "shape": case.shape,
            "side": side,
            "errors": dict.fromkeys(LIMITS),
            "refused": None,
            "reason": None,
            "ms": None,
            "peak_mib": None,
        }
        for side in case.sides
        if side != case.exact and not (side == "fla" and not fla.version())
    }
    for dtype in LIMITS:
        inputs, dy = case.problem(getattr(torch, dtype))
        assert dy is not None
        inputs = [x.detach().to(device).requires_grad_() for x in inputs]
        dy = dy.to(device)
        try:
            exact = _reference(case, inputs, dy)
        except Exception as failure:
            reason = f"error unknown: {explain(failure)}"
            return [row | {"reason": reason} for row in by_side.values()]
        for side, row in by_side.items():
            if row["reason"] or (side == "fla" and dtype != TIMED):
                continue
            with _explained(row):
                with _memory_of_nan():
                    got = once(case.sides[side], inputs, dy)
                error = _error(case, got, exact)
                if not math.isfinite(error):
                    raise ArithmeticError(f"{dtype}: the result is not finite")
                row["errors"][dtype] = float(f"{error:.1e}")
    for side, row in by_side.items():
        if row["errors"][dtype] is None or row["reason"]:
            continue
        with _explained(row):
            row["ms"], row["peak_mib"] = clock(
                partial(once, case.sides[side], inputs, dy)
            )
    return [*by_side.values()]


def _reference(case: Case, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Output and gradients of the piece, by the naive loop in float64."""
    part, compared = piece(case.name, inputs)
    leaves = [x.detach().double().requires_grad_() for x in part]
    exact = once(case.sides[case.exact], leaves, _of_output(case, dy).double())
    return exact[: compared + 1]


def _of_output(case: Case, y: Tensor) -> Tensor:
    """The same piece of a tensor with the shape of the output."""
    return piece(case.name, [y])[0][0]


def _error(case: Case, results: list[Tensor], exact: list[Tensor]) -> float:
    """The maximum relative error of the piece; infinite if it is not a number."""
    y, *gradients = results
    have = [_of_output(case, y), *piece(case.name, gradients)[0]]
    worst = 0.0
    for a, b in zip(have, exact, strict=False):
        error = ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


@contextmanager
def _memory_of_nan() -> Iterator[None]:
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _explained(row: Row) -> Iterator[None]:
    """Keep in the row what goes wrong; a limit of a kernel is no failure."""
    try:
        yield
    except Refused as error:
        row["refused"] = str(error)
    except Exception as error:
        row["reason"] = explain(error)


def explain(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, ArithmeticError):
        return str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()}"[:300]


def on_gpu(call: Callable[[], Any]) -> tuple[float, float]:
    """The median time of a call with a cold cache, and its peak memory."""
    from triton.testing import do_bench

    ms = do_bench(call, warmup=100, rep=500, return_mode="median")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return float(f"{ms:.4g}"), round(peak, 1)


def wrong(row: Row) -> list[str]:
    """What is wrong with a row, in words."""
    beyond = [
        f"{dtype} {row['errors'][dtype]:.1e}"
        for dtype, limit in LIMITS.items()
        if row["errors"][dtype] is not None and not row["errors"][dtype] <= limit
    ]
    return [row["reason"]] if row["reason"] else beyond


def verdict(measured: list[Row]) -> tuple[bool, str]:
    """Whether our kernels are right, and one sentence about it.

    What a kernel refuses by design is neither right nor wrong.
    """
    ours = {row["case"]: row for row in measured if row["side"] == "triton"}
    bad = {case: wrong(row) for case, row in ours.items() if wrong(row)}
    checked = [row for row in ours.values() if any(row["errors"].values())]
    if bad:
        some = "; ".join(f"{case}: {', '.join(why)}" for case, why in bad.items())
        return False, f"wrong in {len(bad)} of {len(ours)} cases: {some}"
    if not checked:
        return False, "no kernel was checked"
    text = f"right in all {len(checked)} cases that the kernels take"
    for side in SIDES[1:]:
        ratios = [
            row["ms"] / ours[row["case"]]["ms"]
            for row in measured
            if row["side"] == side and row["ms"] and ours[row["case"]]["ms"]
        ]
        if ratios:
            faster = sum(ratio > 1 for ratio in ratios)
            text += f"; faster than {side} in {faster} of {len(ratios)}"
    return True, text


def table(measured: list[Row]) -> list[list[str]]:
    """The rows as text, with a header."""
    ours = {row["case"]: row["ms"] for row in measured if row["side"] == "triton"}
    cells = [["operation", "shape", "version", "ms", "x triton", "MiB", *LIMITS]]
    for row in measured:
        ms, base = row["ms"], ours.get(row["case"])
        cells.append(
            [
                row["op"],
                shape_text(row["shape"]),
                row["side"],
                "-" if ms is None else f"{ms:.3f}",
                f"{ms / base:.2f}" if ms and base else "-",
                "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}",
                *("-" if x is None else f"{x:.0e}" for x in row["errors"].values()),
            ]
        )
    return cells


def main(out: Path | None, command: str) -> bool:
    """Check, measure, print and write; return whether all is right.

    - `out`: the JSON file; None = docs/results/gpu-CARD.json in the
      repository, otherwise gpu-CARD.json in the current folder.
    - Raises `ValueError` if there is no GPU or no Triton, or if its compiler
      cannot be trusted.
    """
    about = trusted_card()
    path = out or written(about["slug"])
    destination(path)
    result: dict[str, Any] = {
        "complete": False,
        "card": about,
        "versions": versions(),
        "limits": LIMITS,
        "rows": [],
        **provenance(command),
    }
    print(f"{about['name']}: {path}\n")
    start = time.monotonic()
    every = [*cases()]
    widths = [
        max(len(case.name) for case in every),
        max(len(shape_text(case.shape)) for case in every),
        max(map(len, SIDES)),
        *[8] * 3,
    ]

    def measured() -> Iterator[list[Row]]:
        for case in bar(every):
            new = rows(case, "cuda", on_gpu)
            result["rows"] += new
            result["right"], result["verdict"] = verdict(result["rows"])
            result["seconds"] = round(time.monotonic() - start, 1)
            write_json(path, result)  # also if the run is stopped here
            yield new

    printed(measured(), table, widths, left=3)
    write_json(path, result | {"complete": True})
    for row in result["rows"]:
        if why := row["reason"] or row["refused"]:
            print(f"{row['case']}, {row['side']}: {why}")
    print(f"\n{result['verdict']}\n{path}")
    return result["right"]


def trusted_card() -> dict[str, Any]:
    """The GPU that PyTorch uses, if its kernels can be compiled; raises `ValueError`."""
    if reason := _triton.why_not(minimum=(7, 5)):
        raise ValueError(f"bench --gpu: {reason}")
    return card()


def card() -> dict[str, Any]:
    """The GPU that PyTorch uses."""
    about = torch.cuda.get_device_properties(0)
    return {
        "name": about.name,
        "slug": slug(about.name),
        "capability": (about.major, about.minor),
        "memory_gib": round(about.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def slug(name: str) -> str:
    """The name of a GPU as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def written(name: str) -> Path:
    """Where the result goes: docs/results of a clone, or here."""
    folder = Path("docs", "results")
    in_repository = folder.is_dir() and Path("fwlab", "bench").is_dir()
    return (folder if in_repository else Path()) / f"gpu-{name}.json"


def versions() -> dict[str, str | None]:
    """Versions of the packages that compute; None = not installed."""
    installed: dict[str, str | None] = {}
    for package in ("torch", "triton", "flash-linear-attention", "fla-core"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return installed
