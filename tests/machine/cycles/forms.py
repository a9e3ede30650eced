"""Writes forms-CARD.json: the kernels in chunks, timed in other forms.

    PYTHONPATH=tests/machine python -m cycles.forms

The file is written into the current folder: a person chooses from it, and adds the
forms as `chosen` to a copy in docs/results, which the page of the model shows.

Each rule runs forward and backward at the size of the model, once in the form that
`additive.kernels.form` gives it and once in each of `others`; the profiler says how
long each kernel takes. Then short sequences, step by step and in chunks. Triton
compiles each form when it is first used, which takes several seconds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cycles.measured import microseconds, rule
from fwlab import ops
from fwlab.bench import kernels
from fwlab.files import write_json
from fwlab.ops.additive import kernels as additive
from fwlab.ops.correcting import kernels as correcting
from fwlab.provenance import provenance

SHAPE = (8, 4096, 16)
WIDTHS = (64, 128)
LENGTHS = (1, 2, 4, 8, 16, 32, 50, 64, 100, 128)
BATCHES = ((32, 16), (1, 8))
#: The kernels that depend on a form.
KERNELS = (
    *("prepare", "multiply_decays", "forward", "read"),
    *("backward_state", "backward_inputs"),
)
#: Calls that the profiler takes the mean of.
CALLS = 6
#: name -> a rule, and how many gates it has.
CASES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "sum": (partial(ops.sum_rule, normalize=False), 0),
    "gated": (ops.gated_rule, 1),
    "delta": (ops.delta_rule, 1),
    "gated delta": (ops.gated_delta_rule, 2),
    "DPFP 1, delta": (ops.dpfp_delta_rule, 1),
}


def others(form: additive.Form) -> Iterator[additive.Form]:
    """Forms with chunks of the same length.

    The kernels that walk and those that take a chunk each do not depend on each
    other's choices, so a form tries one of each.
    """
    walk = [*product((16, 32, 64, 128), (4, 8), (1, 2, 3))]
    chunk = [*product((32, 64, 128), (32, 64, 128), (2, 4, 8))]
    for at in range(max(len(walk), len(chunk))):
        (BV, warps, stages), (BK, AV, chunk_warps) = (
            tried[at % len(tried)] for tried in (walk, chunk)
        )
        yield additive.Form(form.C, BV, warps, stages, BK, AV, chunk_warps)


def both(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    y = CASES[name][0](*inputs, implementation="triton")
    return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y))]


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The maximum relative difference."""
    pairs = zip(found, wanted, strict=True)
    worst = max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)
    return float(f"{worst:.1e}")


def forms(name: str, width: int) -> Iterator[dict[str, Any]]:
    """A row for each form, the first for the one in use."""
    inputs = rule(SHAPE, width, CASES[name][1], torch.bfloat16)
    real, used = additive.form, []

    def noted(*arguments: Any) -> additive.Form:
        used.append(real(*arguments))
        return used[-1]

    with mock.patch.object(additive, "form", noted):
        wanted = both(name, inputs)
    for form in (used[0], *others(used[0])):
        row: dict[str, Any] = {"case": name, "width": width, "form": form._asdict()}
        with mock.patch.object(additive, "form", lambda *_, form=form: form):
            try:
                row["error"] = error(both(name, inputs), wanted)
                times = microseconds(partial(both, name, inputs), CALLS)
                row["microseconds"] = {n: us for n, us in times.items() if n in KERNELS}
            except Exception as why:  # such as too much shared memory
                row["why"] = kernels.explain(why)
        yield row


def short(name: str, width: int) -> Iterator[dict[str, Any]]:
    """A row for each length and batch: the sum of all kernels, and the peak memory."""
    for time, (batch, heads) in product(LENGTHS, BATCHES):
        row = {"case": name, "width": width, "T": time, "batch": batch, "heads": heads}
        inputs = rule((batch, time, heads), width, CASES[name][1], torch.bfloat16)
        for way, by_steps in (("chunks", False), ("steps", True)):
            with mock.patch.object(correcting, "_by_steps", lambda *_, x=by_steps: x):
                call = partial(both, name, inputs)
                ms, mib = kernels.on_gpu(call)
                busy = sum(microseconds(call, CALLS).values())
            row[way] = {"microseconds": round(busy), "ms": ms, "peak_mib": mib}
        yield row


def main() -> None:
    """Measure, and write after each row."""
    card = kernels.card()
    path = Path(f"forms-{card['slug']}.json")
    result: dict[str, Any] = {
        "card": card,
        "versions": kernels.versions(),
        **provenance("PYTHONPATH=tests/machine python -m cycles.forms"),
        "forms": [],
        "short": [],
    }
    for kind, rows in (("forms", forms), ("short", short)):
        for width, name in product(WIDTHS, CASES):
            if kind == "short" and "delta" not in name:
                continue
            for row in rows(name, width):
                result[kind].append(row)
                print(row, flush=True)
                write_json(path, result)


if __name__ == "__main__":
    main()
