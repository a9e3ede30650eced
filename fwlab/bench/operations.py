"""Measure naive against efficient forms, training steps by mixer, and decoding.

All versions of a case are measured in turns in one process; the median is reported.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from fwlab import layers, ops
from fwlab.bench.measure import in_turns, operator_calls, peak_mib, print_rows
from fwlab.bench.problems import RULES, SIZES, Problem, problem
from fwlab.files import destination, write_json
from fwlab.layers import fast_weight_attention as heads
from fwlab.models import MIXERS, LanguageModel, Mixer
from fwlab.provenance import provenance

#: Operations and sizes, quick cases first. Naive AFT computes all pairs of steps.
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
#: Number of turns in which each implementation is measured.
ROUNDS = 3
#: Sizes of the model that takes training steps: nanoGPT's sizes for a CPU.
VOCAB, LAYERS, HEADS, D_MODEL, BLOCK, BATCH = 65, 4, 4, 128, 64, 12
#: Numbers of tokens before a timed decoding step, and steps per measurement.
POSITIONS, STEPS = (10, 1_000, 10_000), 200


def once(side: Callable[..., Any], given: Problem) -> list[Tensor]:
    """Run a forward and a backward pass, and return the output and all gradients."""
    y = side(*given.inputs)
    return [y.detach(), *torch.autograd.grad(y, given.inputs, given.gradient)]


def measure_case(op: Any, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Measure an operation at one size, and return a dict for each implementation."""
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
    """Return the largest relative error of outputs and gradients; NaN counts as inf."""
    errors = [
        ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item()
        for a, b in zip(results, exact, strict=False)
    ]
    return max(error if error == error else float("inf") for error in errors)


def equal_d_ff(
    mixer: str | Mixer,
    sizes: tuple[int, int, int, int] = (LAYERS, HEADS, D_MODEL, BLOCK),
) -> int:
    """Return an MLP width, a multiple of 32, for the softmax model's size within 2 %.

    - `sizes`: `layers`, `heads`, `d_model` and `max_len` of `LanguageModel`.
    """
    layers, _, d_model, _ = sizes

    def size(mixer: str | Mixer) -> int:
        with torch.device("meta"):
            return LanguageModel(VOCAB, mixer, *sizes, 4 * d_model).num_parameters()

    # Each layer has an MLP with two matrices.
    missing = (size("softmax") - size(mixer)) / (2 * layers * d_model)
    return 4 * d_model + 32 * round(missing / 32)


def new_model(mixer: str, time: int = BLOCK, d_ff: int | None = None) -> LanguageModel:
    """Build a model for `time` tokens; without `d_ff`, of the softmax model's size."""
    d_ff = d_ff or equal_d_ff(mixer)
    return LanguageModel(VOCAB, mixer, LAYERS, HEADS, D_MODEL, max_len=time, d_ff=d_ff)


class TrainingStep:
    """Take one training step of a model on a fixed batch in each call."""

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
    """Yield speed, peak memory, operator count and state size of training, by mixer."""
    steps = {mixer: TrainingStep(partial(new_model, mixer)) for mixer in mixers}
    times = in_turns(steps, ROUNDS, 0.5, shown=True)

    def start(mixer: str) -> None:
        step = TrainingStep(partial(new_model, mixer))
        step()
        step()  # From the second step on, the optimiser has a state.

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


def new_layers(longest: int) -> dict[str, Any]:
    """Build all layers by name, with position tables for `longest` tokens."""
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
    included for comparison, without the last position.
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


def main(out: Path | None, command: str) -> None:
    """Run the CPU benchmarks, print every row, and write all rows to `out` if given."""
    if out is not None:
        destination(out)
    source = provenance(command)
    print(
        f"float32; torch {source['torch']}, {source['threads']} threads, "
        f"{source['machine']}\n\nForward and backward\n",
        flush=True,
    )
    cases = tqdm(CASES, unit="case", disable=None, leave=False, dynamic_ncols=True)
    widths = [19, 44, 7, 9, *[12] * 3, 8, 8]
    rows = chain.from_iterable(measure_case(*case) for case in cases)
    result = {"rows": print_rows(rows, widths)}
    print(
        f"\nA training step of a language model: {LAYERS} layers, {HEADS} heads, width "
        f"{D_MODEL}, windows of {BLOCK}, batch {BATCH}. All are measured in turns, so "
        "the first row takes about a minute.\n",
        flush=True,
    )
    widths = [max(map(len, MIXERS)), 5, 10, 17, 8, 9, 10]
    result["mixers"] = print_rows(measure_training(), widths)
    print(
        "\nMicroseconds of one step of a layer, by its position in a text; batch 4, "
        f"width {D_MODEL}, {HEADS} heads, 1 thread\n",
        flush=True,
    )
    torch.set_num_threads(1)
    widths = [max(map(len, new_layers(1))), 40]
    result["decoding"] = print_rows(measure_decoding(), widths)
    torch.set_num_threads(source["threads"])
    if out is not None:
        write_json(out, {"dtype": "float32", "seed": 0, **result, **source})
        print(f"\n{out}")
