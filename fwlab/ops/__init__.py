"""The mathematics, as functions of tensors, without parameters."""

from fwlab.ops.additive.rules.gated import GATED_RULE, gated_rule
from fwlab.ops.additive.rules.sum import SUM_RULE, sum_rule
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
from fwlab.ops.call import choice, whole
from fwlab.ops.call.call import Operation
from fwlab.ops.correcting.rules.comba import COMBA_RULE, comba_rule
from fwlab.ops.correcting.rules.delta import DELTA_RULE, delta_rule
from fwlab.ops.correcting.rules.delta_product import (
    DELTA_PRODUCT,
    delta_product,
)
from fwlab.ops.correcting.rules.dpfp_delta import (
    DPFP_DELTA_RULE,
    dpfp_delta_rule,
)
from fwlab.ops.correcting.rules.gated_delta import (
    GATED_DELTA_RULE,
    gated_delta_rule,
)
from fwlab.ops.correcting.rules.gated_delta_2 import (
    GATED_DELTA_RULE_2,
    gated_delta_rule_2,
)
from fwlab.ops.correcting.rules.implicit_delta import (
    IMPLICIT_DELTA_RULE,
    implicit_delta_rule,
)
from fwlab.ops.correcting.rules.kimi import (
    KIMI_DELTA_RULE,
    kimi_delta_rule,
)
from fwlab.ops.correcting.rules.rwkv7 import RWKV7_RULE, rwkv7_rule
from fwlab.ops.feedback import (
    FEEDBACK,
    FeedbackState,
    FeedbackWeights,
    feedback,
    feedback_attention,
)
from fwlab.ops.fwp import FWP, fwp
from fwlab.ops.parts.state import (
    ConvState,
    KeyValueCache,
    NormalizedState,
    ScaledState,
    detach,
)
from fwlab.ops.softmax import SOFTMAX_ATTENTION, softmax_attention

__all__ = [
    "fwp",
    "sum_rule",
    "gated_rule",
    "delta_rule",
    "dpfp_delta_rule",
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

TABLE: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        FWP,
        SUM_RULE,
        GATED_RULE,
        DELTA_RULE,
        DPFP_DELTA_RULE,
        GATED_DELTA_RULE,
        KIMI_DELTA_RULE,
        GATED_DELTA_RULE_2,
        COMBA_RULE,
        IMPLICIT_DELTA_RULE,
        DELTA_PRODUCT,
        RWKV7_RULE,
        SOFTMAX_ATTENTION,
        AFT_SIMPLE,
        AFT_FULL,
        AFT_LOCAL,
        AFT_CONV,
        AFT_CONV2D,
        FEEDBACK,
    )
}
"""The records of all operations, by name: see `Operation`."""

whole.FUNCTIONS.update((name, globals()[name]) for name in TABLE)


def implementations(op: str) -> tuple[str, ...]:
    """The ways to compute an operation that are usable on this machine.

    - `op`: the name of a function of this module, such as "delta_rule".
    - Returns names for its `implementation` argument, simplest first.
    - Raises `ValueError` for an unknown name.

        >>> ops.implementations("softmax_attention")
        ('naive', 'efficient')
    """
    if not isinstance(op, str) or op not in TABLE:
        raise ValueError(
            f"expected op to be one of {', '.join(TABLE)}, got {op!r}"
        )
    return choice.usable(TABLE[op].implementations)
