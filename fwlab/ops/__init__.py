"""The mathematics, as functions of tensors, without parameters."""

from typing import Any

from fwlab.ops._operation import Kernel
from fwlab.ops.aft import (
    KeysAndValues,
    RunningMean,
    WindowState,
    aft_conv,
    aft_conv2d,
    aft_full,
    aft_local,
    aft_simple,
)
from fwlab.ops.delta.comba import comba_rule
from fwlab.ops.delta.delta import delta_rule
from fwlab.ops.delta.delta_product import delta_product
from fwlab.ops.delta.gated_delta import gated_delta_rule
from fwlab.ops.delta.gated_delta_2 import gated_delta_rule_2
from fwlab.ops.delta.implicit_delta import implicit_delta_rule
from fwlab.ops.delta.kimi import kimi_delta_rule
from fwlab.ops.delta.rwkv7 import rwkv7_rule
from fwlab.ops.feedback import (
    FeedbackState,
    FeedbackWeights,
    feedback,
    feedback_attention,
)
from fwlab.ops.fwp import fwp
from fwlab.ops.linear.gated import gated_rule
from fwlab.ops.linear.sum import sum_rule
from fwlab.ops.softmax import softmax_attention
from fwlab.ops.states import (
    ConvState,
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
    "gated_delta_rule",
    "kimi_delta_rule",
    "gated_delta_rule_2",
    "comba_rule",
    "implicit_delta_rule",
    "delta_product",
    "rwkv7_rule",
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
    "ConvState",
    "KeyValueCache",
    "RunningMean",
    "KeysAndValues",
    "WindowState",
    "FeedbackWeights",
    "FeedbackState",
]


TABLE: dict[str, Any] = {
    name: globals()[name] for name in __all__ if hasattr(globals().get(name), "forms")
}
"""All operations by name; `forms` lists the implementations of each, simplest first."""


def implementations(op: str) -> tuple[str, ...]:
    """Return the implementations of an operation that can run on this machine.

    - `op`: the name of a function of this module, such as "delta_rule".
    - Returns names for its `implementation` argument, simplest first.
    - Raises `ValueError` for an unknown name.

        >>> ops.implementations("softmax_attention")
        ('naive', 'efficient')
    """
    if not isinstance(op, str) or op not in TABLE:
        raise ValueError(f"expected op to be one of {', '.join(TABLE)}, got {op!r}")
    return tuple(
        name
        for name, form in TABLE[op].forms.items()
        if not isinstance(form, Kernel) or form.why_not() is None
    )
