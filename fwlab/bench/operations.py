"""Naive against efficient, training steps by mixer, and decoding.

All versions of a case are measured in turns in one process; the median is reported.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from fwlab import layers, ops
from fwlab.bench.measure import (
    in_turns,
    operator_calls,
    peak_mib,
    print_rows,
    shape_text,
)
from fwlab.bench.problems import RULES, SIZES, Problem, problem
from fwlab.layers import fast_weight_attention as heads
from fwlab.models import MIXERS, LanguageModel

#: Operations and sizes, the quick ones first. Naive AFT goes through all pairs of steps.
CASES: tuple[tuple[Any, dict[str, int]], ...] = (
    (ops.aft_full, {"time": 128, "width": 128}),
    (ops.aft_local, {"time": 128, "width": 128, "window": 32}),
    (ops.aft_conv, {"time": 128, "width": 128, "window": 32}),
    (ops.aft_simple, {"time": 2048, "width": 128}),
    (ops.fwp, {"time": 1024, "width": 32}),
    *((op, {"time": 1024, "width": 64}) for op in RULES.values()),
    (ops.sum_rule, {"time": 4096, "width": 64}),
    (ops.delta_rule, {"time": 4096, "width": 64}),
    (ops.feedback, {"time": 512, "width": 128, "layers": 1}),
    (ops.feedback, {"time": 256, "width": 128, "layers": 4}),
    (ops.feedback, {"time": 256, "width": 128, "layers": 4, "groups": 1}),
)
#: Turns of each side.
ROUNDS = 3
#: The model of the training steps: nanoGPT's size for a CPU.
VOCAB, LAYERS, HEADS, D_MODEL, BLOCK, BATCH = 65, 4, 4, 128, 64, 12
#: Tokens before a step of a layer, and steps in a measurement.
POSITIONS, STEPS = (10, 1_000, 10_000), 200


def once(side: Callable[..., Any], given: Problem) -> list[Tensor]:
    """Compute forward and backward: the output and every gradient."""
    y = side(*given.inputs)
    return [y.detach(), *torch.autograd.grad(y, given.inputs, given.gradient)]


def measure_case(op: Any, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Measure an operation at one size: a plain dict for each of its forms."""
    given, exact = (problem(op, t, **sizes) for t in (torch.float32, torch.float64))
    names = [name for name in op.forms if name != "triton"]
    calls = {
        name: partial(once, partial(given.call, implementation=name), given)
        for name in names
    }
    truth = once(partial(exact.call, implementation="naive"), exact)
    times = in_turns(calls, ROUNDS)
    median = {name: statistics.median(times[name]) for name in names}
    shape = {"T": sizes["time"], "batch": SIZES["batch"]}
    shape |= {name: size for name, size in sizes.items() if name != "time"}
    return [
        {
            "case": op.__name__,
            "shape": shape,
            "threads": torch.get_num_threads(),
            "side": name,
            "milliseconds": round(1e3 * median[name], 2),
            "fastest": round(1e3 * min(times[name]), 2),
            "times_slower": round(median[name] / median["efficient"], 1),
            "peak_mib": peak_mib(calls[name]),
            "error": float(f"{largest_error(calls[name](), truth):.1e}"),
        }
        for name in names
    ]


def largest_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest relative error of outputs and gradients; NaN is infinite."""
    errors = [
        ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        for a, b in zip(results, exact, strict=False)
    ]
    return max(error if error == error else float("inf") for error in errors)


def case_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Write the rows of operations as text, with a header."""
    cells = [["operation", "shape", "version", "ms", "fastest", "x efficient"]]
    cells[0] += ["MiB", "error"]
    for r in rows:
        numbers = [f"{r['milliseconds']:.1f}", f"{r['fastest']:.1f}"]
        numbers += [f"{r['times_slower']:.1f}", f"{r['peak_mib']:.1f}"]
        numbers.append(f"{r['error']:.0e}")
        cells.append([r["case"], shape_text(r["shape"]), r["side"], *numbers])
    return cells


@functools.cache
def equal_d_ff(mixer: str) -> int:
    """Find the width of MLPs, a multiple of 32, for a model as large as softmax, to 2 %."""

    def size(mixer: str, d_ff: int) -> int:
        with torch.device("meta"):
            return new_model(mixer, d_ff=d_ff).num_parameters()

    usual = 4 * D_MODEL
    missing = size("softmax", usual) - size(mixer, usual)
    more = size(mixer, usual + 32) - size(mixer, usual)
    return usual + 32 * round(missing / more)


def new_model(mixer: str, time: int = BLOCK, d_ff: int | None = None) -> LanguageModel:
    """Make a model for `time` tokens, as large as the softmax model unless `d_ff` is given."""
    d_ff = d_ff or equal_d_ff(mixer)
    return LanguageModel(VOCAB, mixer, LAYERS, HEADS, D_MODEL, max_len=time, d_ff=d_ff)


class TrainingStep:
    """A model, a batch and an optimiser. A call trains, and returns the loss."""

    def __init__(self, make: Callable[[], nn.Module], time: int = BLOCK):
        torch.manual_seed(0)
        self.model: Any = make()
        batch = max(BATCH * BLOCK // time, 1)
        self.tokens = torch.randint(VOCAB, (batch, time + 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def __call__(self) -> Tensor:
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def measure_training(mixers: tuple[str, ...] = (*MIXERS,)) -> Iterator[dict[str, Any]]:
    """Yield tokens per second (in turns), peak memory, operators and state by mixer."""
    steps = {mixer: TrainingStep(partial(new_model, mixer)) for mixer in mixers}
    times = in_turns(steps, ROUNDS, 0.5, shown=True)

    def start(mixer: str) -> None:
        step = TrainingStep(partial(new_model, mixer))
        step()
        step()  # the optimiser's state is there from the second one on

    for mixer, step in steps.items():
        yield {
            "mixer": mixer,
            "d_ff": equal_d_ff(mixer),
            "parameters": step.model.num_parameters(),
            "tokens_per_second": round(BATCH * BLOCK / statistics.median(times[mixer])),
            "peak_mib": peak_mib(partial(start, mixer)),
            "operators": operator_calls(step),
            "state_size": step.model.state_size(BLOCK),
        }


def training_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Write the rows of mixers as text, with a header."""
    head = ["mixer", "MLP width", "parameters", "tokens/s", "MiB", "operators", "state"]
    names = [*rows[0]] if rows else []
    return [head, *([r["mixer"], *(f"{r[n]:,.0f}" for n in names[1:])] for r in rows)]


def new_layers(longest: int) -> dict[str, Any]:
    """Make all layers by name, with position tables for `longest` tokens."""
    fast = {
        f"fast weights, {rule}": layers.FastWeightAttention(D_MODEL, HEADS, rule=rule)
        for rule in heads.RULES
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
def measure_decoding(
    positions: tuple[int, ...] = POSITIONS,
) -> Iterator[dict[str, Any]]:
    """Yield the median times of `step` by layer and position, measured in turns.

    `prefill` computes the state at a position once; every call of `step` starts from it,
    so that all calls are at the same position. Layers that keep every key and value are
    there for comparison, without the last position.
    """
    torch.manual_seed(0)
    for name, layer in new_layers(positions[-1] + 1).items():
        used = positions[:-1] if name in ("AFT full", "softmax") else positions
        x = torch.randn(4, positions[-1], D_MODEL)
        states = {p: layer.prefill(x[:, :p])[1] for p in used}
        calls = {p: partial(layer.step, x[:, -1], states[p]) for p in used}
        times: dict[int, list[float]] = {p: [] for p in used}
        for p in [*used] * (ROUNDS * STEPS):
            start = time.perf_counter()
            calls[p]()
            times[p].append(1e6 * (time.perf_counter() - start))
        median = {p: round(statistics.median(t), 1) for p, t in times.items()}
        yield {"layer": name, "microseconds": median}


def decoding_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Write the rows of layers as text, with a header."""
    cells = [["one step of", *(f"at {p:,}" for p in POSITIONS), "last / first"]]
    for r in rows:
        times = list(r["microseconds"].values())
        shown = [f"{t:.0f} µs" for t in times] + ["-"] * (len(POSITIONS) - len(times))
        cells.append([r["layer"], *shown, f"{times[-1] / times[0]:.2f}"])
    return cells


def measure() -> dict[str, Any]:
    """Print every row when it is measured, and return all of them."""
    print("Forward and backward\n", flush=True)
    cases = tqdm(CASES, unit="case", disable=None, leave=False, dynamic_ncols=True)
    widths = [19, 44, 9, *[7] * 4]
    rows = print_rows((measure_case(*case) for case in cases), case_table, widths, 3)
    print(
        f"\nA training step of a language model: {LAYERS} layers, {HEADS} heads, width "
        f"{D_MODEL}, windows of {BLOCK}, batch {BATCH}. All are measured in turns, so "
        "the first row takes about a minute.\n",
        flush=True,
    )
    widths = [max(map(len, MIXERS)), *[9] * 6]
    models = print_rows(([row] for row in measure_training()), training_table, widths)
    print(
        "\nOne step of a layer at a position in a text; batch 4, width "
        f"{D_MODEL}, {HEADS} heads, 1 thread\n",
        flush=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    widths = [max(map(len, new_layers(1))), *[9] * 3]
    steps = print_rows(([row] for row in measure_decoding()), decoding_table, widths)
    torch.set_num_threads(threads)
    return {"rows": rows, "mixers": models, "decoding": steps}
