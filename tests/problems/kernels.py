"""The same problems at the sizes of the GPU kernels.

`tests/gpu` runs them on a GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from fwlab import ops
from fwlab.bench.kernels import LIMITS
from fwlab.ops.call.rule import Rule
from problems import ROWS, aft, error, feedback, outcome, parts, problem, rebuild, rules
from problems.row import Inputs, Row

#: With a normaliser, dq is the sum of weights times dy (v - y) times keys.
#: An error of y changes it by the error of dy y times z over the denominator.
#: Keys are positive and have much of their direction in common, so this product
#: is 2 (sum rule) to 4 times (gated rule) as large as dq, and rounding adds an
#: error in proportion. The analysis would allow 4; 2 is enough: the largest error
#: of the kernels, compiled for bfloat16 and emulated, was 1.2e-2 of dq itself.
#: The backward pass of FlashAttention subtracts dy y in the same way.
CANCELS = 2.0
#: What the sizes of a problem are called where it is drawn.
NAMES = {"K": "KEY", "V": "VALUE", "H": "HEADS", "C": "CHANNELS", "W": "WINDOW"}
NAMES |= {"width": "WIDTH", "layers": "LAYERS"}


class Problem(NamedTuple):
    """A row of the table at another size.

    - `op`: the operation, in `fwlab.ops`.
    - `name`, `row`: the row, and what it is called.
    - `sizes`: by the keys of `NAMES`.
    - `batch`: how many sequences, 1 or 2.
    """

    op: str
    name: str
    row: Row
    time: int
    sizes: dict[str, int]
    batch: int = 2

    @property
    def key(self) -> str:
        """Everything in one line."""
        sizes = {"T": self.time, **self.sizes}
        return " ".join([self.name, *(f"{name}{size}" for name, size in sizes.items())])

    def draw(self, dtype: torch.dtype, device: str = "cpu") -> tuple[Inputs, Any]:
        """Leaves of that dtype, and a state in full precision."""
        family = feedback if "feedback" in self.op else rules
        family = aft if "aft" in self.op else family
        sizes = {NAMES[name]: size for name, size in self.sizes.items()}
        with mock.patch.multiple(family, **sizes):
            inputs, state = problem(self.row, self.time, dtype)

        def here(x: torch.Tensor) -> torch.Tensor:
            x = x[: self.batch] if family is rules else x
            return x.detach().to(device).requires_grad_(x.requires_grad)

        return [here(x) for x in inputs], rebuild(state, here)

    def errors(
        self, dtype: str, device: str = "cpu", implementation: str = "triton"
    ) -> list[float]:
        """Relative errors: of the output, the state, and all gradients.

        Two runs of the kernel find what is wrong only at times.
        """
        inputs, state = self.draw(getattr(torch, dtype), device)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        start = rebuild(state, lambda x: x.detach().double().requires_grad_())
        wanted = outcome(self.row, exact, start, "naive")
        runs = [
            outcome(self.row, inputs, state, implementation)
            for _ in range(1 if device == "cpu" else 2)
        ]
        found = []
        for place, exact_one in enumerate(wanted):
            worst = max(_relative(run[place], exact_one) for run in runs)
            cancels = "normalized" in self.name and place == 1 + len(parts(state))
            found.append(worst / CANCELS if cancels else worst)
        return found


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The error, infinite if it is not a number."""
    # The bias of an only key has a gradient of 0, up to rounding.
    x = error(found, wanted) if wanted.any() else found.double().norm().item()
    return math.inf if math.isnan(x) else x


def _large_keys(row: Row) -> Row:
    """Their exponentials overflow unless a maximum is subtracted."""

    def make(time, generator, with_state):
        inputs, state = row.make(time, generator, with_state)
        inputs[1] = 10 * inputs[1]
        return inputs, state

    return replace(row, make=make)


def _rules(record: Rule) -> Iterator[Problem]:
    """Full and partial chunks; each width has a kernel of its own."""
    names = [record.mixer]
    if record.normalizes and not record.corrects:
        names.insert(0, f"{record.mixer}-normalized")
    if record.name == "sum_rule":
        names.append("sum-decay")
    sizes = [(130, 64, 64, 3), (77, 24, 40, 2), (1, 64, 64, 2), (1024, 64, 64, 2)]
    sizes.append((200, 128, 128, 2))
    if record.corrects:  # a few steps have a kernel of their own
        sizes += [(4, 32, 64, 2), (50, 32, 64, 2)]
        sizes += [(150, 384, 64, 2), (4096, 64, 64, 1)]
    for name in names:
        for time, K, V, H in sizes:
            widths = {"K": K, "V": V, "H": H}
            yield Problem(record.name, name, ROWS[name], time, widths)


def _dpfp() -> Iterator[Problem]:
    sizes = ((130, 128, 64, 2, 3), (77, 32, 40, 3, 1), (50, 64, 32, 2, 2))
    for time, K, V, H, nu in (*sizes, (34, 128, 128, 1, 1), (1024, 128, 64, 1, 3)):
        row = replace(
            ROWS["dpfp-delta"],
            op=partial(ops.dpfp_delta_rule, nu=nu),
            make=partial(rules.dpfp, nu=nu),
        )
        widths = {"K": K, "V": V, "H": H}
        yield Problem("dpfp_delta_rule", f"dpfp-delta {nu}", row, time, widths)


def _aft(name: str) -> Iterator[Problem]:
    op = name.replace("-", "_").removesuffix("_one_key")
    for time, C, W in ((130, 64, 32), (77, 40, 16), (1, 40, 16), (700, 64, 64)):
        widths = {"C": C, "W": W, "H": 2}
        yield Problem(op, name, ROWS[name], time, widths)
    widths = {"C": 64, "W": 32, "H": 2}
    yield Problem(op, f"{name}, large keys", _large_keys(ROWS[name]), 130, widths)


def _feedback() -> Iterator[Problem]:
    """Sizes at which the gradient of `merge` is no small difference."""
    for name in ("feedback", "feedback-shared"):
        for time, layers, width in ((40, 2, 64), (34, 3, 32), (130, 2, 96)):
            widths = {"layers": layers, "width": width}
            yield Problem("feedback", name, ROWS[name], time, widths)


def _all() -> Iterator[Problem]:
    for record in ops.TABLE.values():
        if (
            isinstance(record, Rule)
            and record.mixer
            and "triton" in record.implementations
        ):
            yield from _rules(record)
    yield from _dpfp()
    for name in aft.ROWS:
        yield from _aft(name)
    yield from _feedback()


#: In the order of the report.
PROBLEMS = tuple(_all())
__all__ = ["LIMITS", "PROBLEMS", "Problem"]
