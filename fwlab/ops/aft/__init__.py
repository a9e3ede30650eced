"""The Attention Free Transformer: a gated mean per channel."""

from fwlab.ops.aft.full import KeysAndValues, aft_full
from fwlab.ops.aft.simple import RunningMean, aft_simple
from fwlab.ops.aft.window import WindowState, aft_conv, aft_conv2d, aft_local

__all__ = [
    "KeysAndValues",
    "RunningMean",
    "WindowState",
    "aft_conv",
    "aft_conv2d",
    "aft_full",
    "aft_local",
    "aft_simple",
]
