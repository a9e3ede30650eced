"""Peak rates of the GPU, and time and memory of the cases.

All sides of a case are measured in turns in one process, so that other
load on the machine affects all alike. A side that fails becomes a row
with the reason.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.bench.gpu.cases import Case, Function, Side
from fwlab.bench.gpu.correctness import explain, poison, rounded
from fwlab.bench.gpu.tuning import compile_share

ROUNDS = 5
TURN = 0.06  # target seconds of a side's turn
MAXIMUM = 4.0  # seconds after which a side gets no further turn
LONG = 1.0  # a call that takes more seconds is not repeated without need
FLUSH = 2**28  # bytes that evict everything from the L2 cache


class Ready(NamedTuple):
    """A side that has run once and is ready for its turns."""

    head: dict[str, Any]
    forward: Callable[[], Any]
    both: Callable[[], Any]
    calls: int
    long: bool


def rates(
    *,
    device: str,
    copied: int = 2**32,
    width: int = 8192,
    rounds: int = 20,
    without: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Peak rates of this GPU: copying, and matrix products.

    - `copied`: bytes of the buffer; `width`: of the square matrices.
    """
    for name, work in (
        ("copy_gb_per_s", lambda: _copy_rate(device, copied, rounds)),
        ("matrix_tflop_per_s", lambda: _matrix_rate(device, width, rounds)),
    ):
        if name in without:
            continue
        yield {"part": name, "head": {name: None, "reason": None}}
        try:
            yield {"row": {name: round(work(), 1), "reason": None}}
        except Exception as error:
            yield {"row": {name: None, "reason": f"{name}: {explain(error)}"}}
        free(device)


def _copy_rate(device: str, size: int, rounds: int) -> float:
    if device != "cpu":
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    x = torch.zeros(size, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    times = milliseconds(lambda: y.copy_(x), device, rounds)
    return 2 * size / (1e6 * min(times))  # read and written


def _matrix_rate(device: str, width: int, rounds: int) -> float:
    a, b = torch.randn(2, width, width, device=device).bfloat16()
    out = torch.empty_like(a)
    times = milliseconds(lambda: torch.mm(a, b, out=out), device, rounds)
    return 2 * width**3 / (1e9 * min(times))


def warm_up(
    case: Case,
    side: str,
    share: tuple[int, int] | None,
    *,
    device: str,
    seed: int,
    without: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Run a side once, so that its compiled kernels are on disk.

    - `share`: of the configurations; None = there is only one.
    """
    if side in without:
        return
    head = {"case": case.key, "side": side, "seconds": None, "reason": None}
    yield {"part": side, "head": head}
    start = time.perf_counter()
    try:
        if share is not None:
            compile_share(*share)
        given = case.sides[side]
        once(given.load(), *_problem(case, given, device, seed))
        synchronize(device)
    except Exception as error:
        head["reason"] = explain(error)
    yield {"row": head | {"seconds": round(time.perf_counter() - start, 1)}}
    free(device)


def rows(
    case: Case,
    *,
    device: str,
    seed: int,
    rounds: int = ROUNDS,
    without: tuple[str, ...] = (),
) -> Iterator[dict[str, Any]]:
    """Messages for one case: for each side, a `part` with the start of its
    row, then the whole `row`.
    """
    inputs, dy = _problem(case, next(iter(case.sides.values())), device, seed)
    exact, unknown = None, None
    try:
        exact = _exact(case, inputs, dy)
    except Exception as error:  # then there are only times
        unknown = f"error unknown: {explain(error)}"
    free(device)
    ready: list[Ready] = []
    for name, side in case.sides.items():
        if name in without:
            continue
        head = _head(case, name, side)
        yield {"part": name, "head": head}
        try:
            mine = (
                (inputs, dy)
                if side.time is None
                else _problem(case, side, device, seed)
            )
            head["note"] = unknown
            prepared = _prepare(case, side, head, mine, exact, device)
        except Exception as error:
            yield {"row": head | {"reason": explain(error)}}
        else:
            ready.append(prepared)
        free(device)
    yield from _take_turns(ready, device, rounds)


def _head(case: Case, name: str, side: Side) -> dict[str, Any]:
    return {
        "case": case.key,
        "op": case.name,
        "shape": case.shape,
        "dtype": "bfloat16",
        "side": name,
        "version": side.version(),
        "T": side.time or case.shape["T"],
        "ms": None,
        "fastest": None,
        "wall_ms": None,
        "forward_ms": None,
        "peak_mib": None,
        "error": None,
        "first_seconds": None,
        "note": None,
        "reason": None,
    }


def _problem(
    case: Case, side: Side, device: str, seed: int
) -> tuple[list[Tensor], Tensor]:
    """Inputs that require gradients, and a gradient of the output."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = case.draw(generator, side.time or case.shape["T"])
    # The output has the shape of the values; for a stack, of its input.
    like = inputs[min(2, case.compared - 1)]
    dy = torch.randn(like.shape, generator=generator, device=device)
    return [x.requires_grad_() for x in inputs], dy.to(like.dtype)


def once(function: Function, inputs: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    """Forward and backward pass: the output and every gradient."""
    y = function(*inputs)
    # Attention does not use the gates.
    return [y, *torch.autograd.grad(y, inputs, dy, allow_unused=True)]


def _exact(case: Case, inputs: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    """Output and gradients of a piece, in float64."""
    piece = [x.detach().double().requires_grad_() for x in case.piece(inputs)]
    return once(case.exact, piece, _piece_of(case, dy, inputs).double())


def _piece_of(case: Case, y: Tensor, inputs: list[Tensor]) -> Tensor:
    """The same piece of a tensor with the shape of the output."""
    place = min(2, case.compared - 1)
    return case.piece([*inputs[:place], y, *inputs[place + 1 :]])[place]


def _error(
    case: Case,
    found: list[Tensor | None],
    inputs: list[Tensor],
    exact: list[Tensor | None],
) -> float:
    """The maximum relative error within the piece."""
    gradients = [x if g is None else g for g, x in zip(found[1:], inputs, strict=True)]
    assert found[0] is not None
    have = [_piece_of(case, found[0], inputs), *case.piece(gradients)]
    worst = 0.0
    for a, b in list(zip(have, exact, strict=True))[: case.compared + 1]:
        if b is not None:
            error = ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
            worst = error if error != error else max(worst, error)
    return worst


def _prepare(
    case: Case,
    side: Side,
    head: dict[str, Any],
    problem: tuple[list[Tensor], Tensor],
    exact: list[Tensor | None] | None,
    device: str,
) -> Ready:
    """Prepare a side: everything in its row except the times."""
    inputs, dy = problem
    function = side.load()
    poison(device)
    start = time.perf_counter()
    found = once(function, inputs, dy)
    synchronize(device)
    head["first_seconds"] = round(time.perf_counter() - start, 1)
    if exact and side.same and side.time in (None, case.shape["T"]):
        head["error"] = rounded(_error(case, found, inputs, exact))
    found.clear()

    def both() -> None:
        once(function, inputs, dy)

    @torch.no_grad()
    def forward() -> None:
        function(*inputs)

    start = time.perf_counter()
    head["peak_mib"] = peak_mib(both, device)
    seconds = time.perf_counter() - start
    if seconds < LONG:  # most of that time was for freeing memory
        seconds = wall(both, device, 1) / 1e3
    forward()
    synchronize(device)
    calls = round(TURN / max(seconds, 1e-6))
    return Ready(head, forward, both, max(1, min(20, calls)), seconds > LONG)


def peak_mib(run: Callable[[], Any], device: str) -> float | None:
    """Peak MiB of a call, above what was allocated before it."""
    if device == "cpu":
        run()
        return None
    free(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _take_turns(
    sides: list[Ready], device: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """Times of all sides; one that fails gets no further turns."""
    times: dict[str, list[float]] = {s.head["side"]: [] for s in sides}
    walls: dict[str, list[float]] = {s.head["side"]: [] for s in sides}
    forwards: dict[str, list[float]] = {s.head["side"]: [] for s in sides}
    spent = dict.fromkeys(times, 0.0)
    gc.collect()
    gc.disable()  # a pause would count as a side's time
    try:
        for _ in range(rounds):
            for side in list(sides):
                name = side.head["side"]
                if spent[name] > MAXIMUM:
                    continue
                yield {"part": name, "head": side.head}
                start = time.perf_counter()
                try:
                    if not side.long:  # untimed, so that others' memory is freed
                        side.both()
                    times[name] += milliseconds(side.both, device, side.calls)
                    walls[name].append(wall(side.both, device, side.calls))
                    forwards[name] += milliseconds(side.forward, device, side.calls)
                except Exception as error:
                    yield {"row": side.head | {"reason": explain(error)}}
                    sides.remove(side)
                    free(device)
                spent[name] += time.perf_counter() - start
    finally:
        gc.enable()
    for side in sides:
        name = side.head["side"]
        yield {
            "row": side.head
            | {
                "ms": _figure(statistics.median(times[name])),
                "fastest": _figure(min(times[name])),
                "wall_ms": _figure(statistics.median(walls[name])),
                "forward_ms": _figure(statistics.median(forwards[name])),
            }
        }


def milliseconds(run: Callable[[], Any], device: str, calls: int) -> list[float]:
    """Milliseconds of each call by the clock of the GPU, with a cold cache.

    If the host is slower than the GPU, the GPU waits: host time counts.
    """
    if device == "cpu":
        return [wall(run, device, 1) for _ in range(calls)]
    cache = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(calls):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        first.record()
        run()
        last.record()
        pairs.append((first, last))
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in pairs]


def wall(run: Callable[[], Any], device: str, calls: int) -> float:
    """Milliseconds per call by the clock of the host, calls back to back."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / calls


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Free memory that is not in use."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _figure(ms: float) -> float:
    return float(f"{ms:.4g}")
