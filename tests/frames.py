"""The calls between a layer and the first matrix product of its recurrence.

python tests/frames.py
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import fwlab
from fwlab.layers import FastWeightAttention

PACKAGE = Path(fwlab.__file__).parents[1]
#: What counts as a product: `@`, `einsum` and the layers' `linear` are others.
PRODUCTS = ("bmm", "baddbmm")


class Called(NamedTuple):
    """A function of fwlab, such as "Rule.__call__", and its file."""

    name: str
    file: str


def frames(rule: str = "delta") -> list[Called]:
    """What runs, from outside to inside, when the recurrence first multiplies.

    Counted by a profiler, from `FastWeightAttention.forward` on. The functions
    that PyTorch calls in between are not counted, and a function that calls
    itself counts each time.
    """
    layer = FastWeightAttention(16, heads=2, rule=rule)
    x = torch.randn(1, 150, 16)
    called: list[Called] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or argument.__name__ not in PRODUCTS or called:
            return
        at: FrameType | None = frame
        while at is not None:
            path = Path(at.f_code.co_filename)
            if path.is_relative_to(PACKAGE / "fwlab"):
                file = path.relative_to(PACKAGE).as_posix()
                called.insert(0, Called(at.f_code.co_qualname, file))
            at = at.f_back

    layer(x)  # what is imported, checked or counted once
    sys.setprofile(profile)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return called


if __name__ == "__main__":
    for called in frames():
        print(f"{called.name:40}{called.file}")
