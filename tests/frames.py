"""The calls between a layer and the first matrix product of its recurrence.

python tests/frames.py
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fwlab
from fwlab.layers import FastWeightAttention

PACKAGE = Path(fwlab.__file__).parents[1]
#: Products of many matrices, `@` included. Those of the layer itself are `mm`.
PRODUCTS = ("bmm", "baddbmm", "baddbmm_")


class Called(NamedTuple):
    """A function of fwlab, such as "Recurrence.__call__", and its file."""

    name: str
    file: str


class _First(TorchDispatchMode):
    """Looks up what is running when matrices are first multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Called] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None) -> Any:
        at: FrameType | None = None
        if operator.overloadpacket.__name__ in PRODUCTS and not self.called:
            at = sys._getframe()
        while at is not None:
            path = Path(at.f_code.co_filename)
            inner = at.f_code.co_name.startswith("<")  # as of a list
            if path.is_relative_to(PACKAGE / "fwlab") and not inner:
                file = path.relative_to(PACKAGE).as_posix()
                self.called.insert(0, Called(at.f_code.co_qualname, file))
            at = at.f_back
        return operator(*args, **(kwargs or {}))


def frames(rule: str = "delta", time: int = 150) -> list[Called]:
    """List the calls, from outside to inside, when the recurrence first multiplies.

    From `FastWeightAttention.forward` on. The functions that PyTorch calls in
    between are not counted, and a function that calls itself counts each time.
    """
    layer = FastWeightAttention(16, heads=2, rule=rule)
    with _First() as first:
        layer(torch.randn(1, time, 16))
    return first.called


if __name__ == "__main__":
    for called in frames():
        print(f"{called.name:40}{called.file}")
