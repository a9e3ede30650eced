"""Time of one `step` of a layer, early and late in a text."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from fwlab import layers
from fwlab.layers.fast_weight_attention import RULES

D_MODEL, HEADS, BATCH = 128, 4, 4
POSITIONS = (10, 1_000, 10_000)
STEPS = 200  # per measurement
ROUNDS = 5


#: Layers that keep every key and value.
GROWING = ("AFT full", "softmax")


def makers(longest: int) -> dict[str, Any]:
    """The layers by name, with position tables for `longest` tokens."""
    fast = {
        f"fast weights, {rule}": layers.FastWeightAttention(D_MODEL, HEADS, rule=rule)
        for rule in RULES
    }
    return {
        **fast,
        "fast weights, 1991": layers.FastWeightProgrammer(D_MODEL, HEADS),
        "AFT simple": layers.AFTSimple(D_MODEL),
        "AFT local": layers.AFTLocal(D_MODEL, longest, window=32),
        "AFT conv": layers.AFTConv(D_MODEL, HEADS, window=32),
        "AFT full": layers.AFTFull(D_MODEL, longest, factor=32),
        "softmax": layers.SoftmaxAttention(D_MODEL, HEADS),
    }


@torch.no_grad()
def run(positions: tuple[int, ...] = POSITIONS) -> Iterator[dict[str, Any]]:
    """Yield the median times of `step` per layer and position, measured in turns.

    `prefill` computes the state at a position once; every call of `step`
    starts from it, so that all calls are at the same position. Layers
    whose state grows are there for comparison, without the last position.
    """
    torch.manual_seed(0)
    for name, layer in makers(positions[-1] + 1).items():
        used = positions[:-1] if name in GROWING else positions
        x = torch.randn(BATCH, positions[-1], D_MODEL)
        states = {p: layer.prefill(x[:, :p])[1] for p in used}
        times: dict[int, list[float]] = {p: [] for p in used}
        for _ in range(ROUNDS):
            for position, state in states.items():
                for _ in range(STEPS):
                    start = time.perf_counter()
                    layer.step(x[:, -1], state)
                    times[position].append(1e6 * (time.perf_counter() - start))
        median = {p: round(statistics.median(t), 1) for p, t in times.items()}
        yield {"layer": name, "microseconds": median}


def table(
    rows: list[dict[str, Any]], positions: tuple[int, ...] = POSITIONS
) -> list[list[str]]:
    """The rows as text, with a header."""
    cells = [["one step of", *(f"at {p:,}" for p in positions), "last / first"]]
    for r in rows:
        times = list(r["microseconds"].values())
        shown = [f"{t:.0f} µs" for t in times] + ["-"] * (len(positions) - len(times))
        cells.append([r["layer"], *shown, f"{times[-1] / times[0]:.2f}"])
    return cells
