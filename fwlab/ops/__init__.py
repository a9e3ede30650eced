"""The mathematics, as functions of tensors, without parameters."""

from collections.abc import Callable

from fwlab.ops.delta import (
    DELTA_RULE,
    GATED_DELTA_RULE,
    delta_rule,
    gated_delta_rule,
)
from fwlab.ops.linear import (
    GATED_RULE,
    SUM_RULE,
    gated_rule,
    sum_rule,
)
from fwlab.ops.softmax import SOFTMAX_ATTENTION, softmax_attention
from fwlab.ops.state import (
    KeyValueCache,
    NormalizedState,
    ScaledState,
    detach,
)

__all__ = [
    "sum_rule",
    "gated_rule",
    "delta_rule",
    "gated_delta_rule",
    "softmax_attention",
    "implementations",
    "detach",
    "NormalizedState",
    "ScaledState",
    "KeyValueCache",
]

TABLE: dict[str, dict[str, Callable]] = {
    "sum_rule": SUM_RULE,
    "gated_rule": GATED_RULE,
    "delta_rule": DELTA_RULE,
    "gated_delta_rule": GATED_DELTA_RULE,
    "softmax_attention": SOFTMAX_ATTENTION,
}


def implementations(op: str) -> tuple[str, ...]:
    """The ways to compute an operation that are usable on this machine.

    - `op`: the name of a function of this module, such as "delta_rule".
    - Returns names for its `implementation` argument, simplest first.
    - Raises `ValueError` for an unknown name.
    """
    if op not in TABLE:
        raise ValueError(
            f"no operation {op!r}; wanted one of {', '.join(map(repr, TABLE))}"
        )
    return tuple(TABLE[op])
