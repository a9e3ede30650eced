"""The mathematics, as functions of tensors, without parameters."""

from typing import Any

from fwlab.ops import gpu
from fwlab.ops.aft import (
    AFT_CONV,
    AFT_CONV2D,
    AFT_FULL,
    AFT_LOCAL,
    AFT_SIMPLE,
    KeysAndValues,
    RunningMean,
    WindowState,
    aft_conv,
    aft_conv2d,
    aft_full,
    aft_local,
    aft_simple,
)
from fwlab.ops.delta import (
    DELTA_RULE,
    DPFP_DELTA_RULE,
    GATED_DELTA_RULE,
    delta_rule,
    dpfp_delta_rule,
    gated_delta_rule,
)
from fwlab.ops.feedback import (
    FEEDBACK,
    FeedbackState,
    FeedbackWeights,
    feedback,
    feedback_attention,
)
from fwlab.ops.fwp import FWP, fwp
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
    "fwp",
    "sum_rule",
    "gated_rule",
    "delta_rule",
    "dpfp_delta_rule",
    "gated_delta_rule",
    "softmax_attention",
    "aft_simple",
    "aft_full",
    "aft_local",
    "aft_conv",
    "aft_conv2d",
    "feedback",
    "feedback_attention",
    "implementations",
    "detach",
    "NormalizedState",
    "ScaledState",
    "KeyValueCache",
    "RunningMean",
    "KeysAndValues",
    "WindowState",
    "FeedbackWeights",
    "FeedbackState",
]

TABLE: dict[str, dict[str, Any]] = {
    "fwp": FWP,
    "sum_rule": SUM_RULE,
    "gated_rule": GATED_RULE,
    "delta_rule": DELTA_RULE,
    "dpfp_delta_rule": DPFP_DELTA_RULE,
    "gated_delta_rule": GATED_DELTA_RULE,
    "softmax_attention": SOFTMAX_ATTENTION,
    "aft_simple": AFT_SIMPLE,
    "aft_full": AFT_FULL,
    "aft_local": AFT_LOCAL,
    "aft_conv": AFT_CONV,
    "aft_conv2d": AFT_CONV2D,
    "feedback": FEEDBACK,
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
    return gpu.usable(TABLE[op])
