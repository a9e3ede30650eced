"""Compiling in several processes what one process will choose among.

flash-linear-attention has many configurations of each kernel, compiles
and times all at the first call, and takes the fastest. Compiling takes
minutes; so before anything is measured, each of several processes
compiles its share, and Triton keeps that on the disk. Times of that
phase mean nothing and are not taken: whoever measures, chooses.
"""

from collections.abc import Callable
from typing import Any


def compile_share(first: int, step: int) -> None:
    """From here on, in this process, kernels that choose among
    configurations see every `step`-th, from the `first`, and take any.
    """
    from triton.runtime.autotuner import Autotuner

    original = vars(Autotuner).get("fwlab_original", Autotuner.run)
    Autotuner.fwlab_original = original

    def run(self: Any, *arguments: Any, **more: Any) -> Any:
        everything = vars(self).setdefault("fwlab_configs", self.configs)
        if vars(self).get("fwlab_share") != (first, step):
            self.fwlab_share = (first, step)
            self.cache.clear()
        self.do_bench = call_once
        self.configs = everything[first::step] or everything[:1]
        try:
            return original(self, *arguments, **more)
        except Exception:  # none of these fits this card or these sizes
            self.configs = everything
            return original(self, *arguments, **more)

    Autotuner.run = run


def call_once(call: Callable[[], Any], quantiles: Any = None, **_: Any) -> list[float]:
    """In place of a measurement."""
    call()
    return [1.0, 1.0, 1.0]
