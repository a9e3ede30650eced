"""The Attention Free Transformer: a gated mean per channel."""

from fwlab.ops.aft.full import AFT_FULL, KeysAndValues, aft_full
from fwlab.ops.aft.simple import AFT_SIMPLE, RunningMean, aft_simple
from fwlab.ops.aft.window import (
    AFT_CONV,
    AFT_CONV2D,
    AFT_LOCAL,
    WindowState,
    aft_conv,
    aft_conv2d,
    aft_local,
)

__all__ = [
    "AFT_CONV",
    "AFT_CONV2D",
    "AFT_FULL",
    "AFT_LOCAL",
    "AFT_SIMPLE",
    "KeysAndValues",
    "RunningMean",
    "WindowState",
    "aft_conv",
    "aft_conv2d",
    "aft_full",
    "aft_local",
    "aft_simple",
]
