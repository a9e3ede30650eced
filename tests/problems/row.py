"""What the table of operations knows about each operation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Generator, Tensor

Inputs = list[Tensor]


def by_time(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The usual way to split: dimension 1 of every input is time."""
    return [x[:, start:stop] for x in inputs]


def untouched(inputs: Inputs, places: Tensor) -> Inputs:
    """For operations whose other inputs know no steps."""
    return inputs


def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """For operations that have no chunks."""


@dataclass(frozen=True)
class Row:
    """One operation, and random problems for it.

    - `op`: `op(*inputs, state=None, return_state=False, key_mask=None,
      implementation="auto")`.
    - `make`: `make(time, generator, with_state)` gives `(inputs, state)`
      in float64, batch 2, widths of 6 at most, and gates with exact
      zeros and ones; state is None without `with_state`.
    - `cut`: `cut(inputs, start, stop)`, the inputs of those steps.
    - `pick`: drops steps from the inputs that have them elsewhere, as others have
      been dropped already: `pick(inputs, places)` keeps those at `places`; None = a
      masked step cannot be dropped, because others know their distance from it.
    - `small`: sets chunk sizes so small that nine steps cross several
      chunks, and groups of chunks.
    - `large`: `large(time)` gives the inputs at width 128, batch 1, in
      float32, for counting what is kept for the backward pass.
    - `ratio`: how many times less of that efficient must keep.
    - `masked`: takes a `key_mask` `[batch, time]`.
    - `causal`: may be cut and streamed.
    - `twice`: naive has a second derivative.
    """

    op: Callable[..., Any]
    make: Callable[[int, Generator, bool], tuple[Inputs, Any]]
    large: Callable[[int], Inputs]
    cut: Callable[[Inputs, int, int], Inputs] = by_time
    pick: Callable[[Inputs, Tensor], Inputs] | None = untouched
    small: Callable[[pytest.MonkeyPatch], None] = as_it_is
    ratio: float = 4
    masked: bool = True
    causal: bool = True
    twice: bool = True

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        return self.op(*inputs, **options)
