"""Sequence layers: projections with parameters around the operations."""

from fwlab.layers.fast_weight_attention import FastWeightAttention
from fwlab.layers.softmax_attention import SoftmaxAttention

__all__ = ["FastWeightAttention", "SoftmaxAttention"]
