"""Correctness of the kernels: errors against the naive form in float64.

Every run draws new inputs. They are rounded before both sides get them,
so that the error is that of the kernel alone.
"""

import math
import traceback
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fwlab.bench.gpu import problems
from fwlab.bench.gpu.problems import LIMITS, Problem, Tensors
from fwlab.ops.call.choice import Refused

#: A second run of the kernel finds errors that occur at random.
RUNS = 2


def rows(
    op: str,
    dtype: str,
    *,
    device: str,
    seed: int,
    quick: bool = False,
    without: tuple[str, ...] = (),
    only: list[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Messages for one operation in one precision: for each problem, a
    `part` with the start of its row, then the whole `row`.

    - `without`, `only`: keys of problems; None = all.
    """
    for problem in problems.of(op, quick=quick):
        if problem.key in without or (only is not None and problem.key not in only):
            continue
        head = {
            "problem": problem.key,
            "op": problem.op,
            "note": problem.note,
            "dtype": dtype,
            "shape": problem.shape,
            "limit": LIMITS[dtype],
            "errors": {},
            "efficient": None,
            "ok": False,
            "refused": None,
            "reason": None,
            "again": None,
        }
        yield {"part": problem.key, "head": head}
        yield {"row": head | check(problem, dtype, device, seed)}


def check(problem: Problem, dtype: str, device: str, seed: int) -> dict[str, Any]:
    """Errors of all tensors, or the reason for their absence.

    What is beyond the limits of a kernel is neither right nor wrong.
    """
    try:
        inputs, weights = _drawn(problem, dtype, device, seed)
        exact = compute(problem, "naive", _double(inputs), _double(weights))
        errors: dict[str, float] = {}
        for _ in range(RUNS):
            poison(device)
            found = compute(problem, "triton", inputs, weights)
            for name, error in relative(found, exact).items():
                error /= problem.cancels.get(name, 1.0)
                errors[name] = _worst(errors.get(name, 0.0), error)
    except Refused as error:
        return {"refused": str(error.limit)}
    except Exception as error:
        return {"reason": explain(error)}
    finite = all(map(math.isfinite, errors.values()))
    return {
        "errors": {name: rounded(error) for name, error in errors.items()},
        "efficient": _other(problem, inputs, weights, exact),
        "ok": finite and max(errors.values()) <= LIMITS[dtype],
        "reason": None if finite else "the result is not finite",
    }


def _other(
    problem: Problem, inputs: Tensors, weights: Tensors, exact: Tensors
) -> float | None:
    """The maximum error of the efficient form, to compare kernels with."""
    try:
        found = compute(problem, "efficient", inputs, weights)
        return rounded(max(relative(found, exact).values()))
    except Exception as error:
        explain(error)
        return None


def compute(
    problem: Problem, implementation: str, inputs: Tensors, weights: Tensors
) -> Tensors:
    """All outputs, and the gradients of all inputs.

    - `weights`: the gradients of the outputs.
    """
    leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.items()}
    out = problem.call(implementation, leaves)
    gradients = torch.autograd.grad(
        list(out.values()),
        list(leaves.values()),
        [weights[name] for name in out],
        # An input that has no effect gets None: a gradient of 0.
        allow_unused=True,
    )
    found = {name: x.detach() for name, x in out.items()}
    for (name, leaf), g in zip(leaves.items(), gradients, strict=True):
        found[f"d {name}"] = torch.zeros_like(leaf) if g is None else g
    return found


def relative(found: Tensors, exact: Tensors) -> dict[str, float]:
    """Norm of the error over norm of the exact tensor."""
    errors = {}
    for name, expected in exact.items():
        x = found[name].double()
        if x.shape != expected.shape:
            raise ValueError(
                f"expected {name} of shape {list(expected.shape)}, got {list(x.shape)}"
            )
        norm = expected.norm().item()
        errors[name] = (x - expected).norm().item() / (norm or 1.0)
    return errors


def rounded(error: float) -> float | None:
    """Two digits; None for NaN and infinity, which JSON does not have."""
    return float(f"{error:.1e}") if math.isfinite(error) else None


def poison(device: str) -> None:
    """Fill free memory with NaN, in every floating-point type.

    The caching allocator reuses these blocks next, so a kernel that reads
    memory before writing it produces NaN. Large blocks come first, so
    that small ones fill the gaps.
    """
    sizes = [2**28, *[2**20] * 32, *[2**16] * 64, *[2**12] * 64, *[2**9] * 64]
    if device == "cpu":
        sizes = sizes[33:]
    else:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    blocks = [
        torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes
    ]
    del blocks


def explain(error: BaseException) -> str:
    """One line about what went wrong; the traceback goes to the log."""
    traceback.print_exception(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1]
    # A compiler's first line says where, its last line why.
    if type(error).__name__ == "CompilationError":
        said = [*lines[:1], *lines[-1:]]
    return f"{type(error).__name__}: {' … '.join(said)}"[:300]


def _drawn(
    problem: Problem, dtype: str, device: str, seed: int
) -> tuple[Tensors, Tensors]:
    """Inputs and gradients of the outputs, rounded to their dtypes."""
    # Every problem has its own seed, the same in every process.
    own = zlib.crc32(problem.key.encode())
    generator = torch.Generator().manual_seed(seed ^ own)

    def kept(name: str, x: Tensor) -> Tensor:
        full = name.startswith("state")
        return x.to(device, torch.float32 if full else getattr(torch, dtype))

    inputs = {n: kept(n, x) for n, x in problem.draw(generator).items()}
    with torch.no_grad():
        shapes = problem.call("efficient", inputs)
    weights = {
        name: kept(name, torch.randn(y.shape, generator=generator))
        for name, y in shapes.items()
    }
    return inputs, weights


def _double(tensors: Tensors) -> Tensors:
    return {name: x.double() for name, x in tensors.items()}


def _worst(a: float, b: float) -> float:
    return b if math.isnan(b) else max(a, b)
