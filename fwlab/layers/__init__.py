"""Sequence layers: projections with parameters around the operations."""

from fwlab.layers.aft import AFTConv, AFTConv2d, AFTFull, AFTLocal, AFTSimple
from fwlab.layers.block import Block
from fwlab.layers.cross_attention import CrossAttention
from fwlab.layers.fast_weight_attention import FastWeightAttention
from fwlab.layers.fast_weight_programmer import FastWeightProgrammer
from fwlab.layers.feedback import FeedbackTransformer
from fwlab.layers.softmax_attention import SoftmaxAttention
from fwlab.layers.transformer_xl import TransformerXL

__all__ = [
    "FastWeightAttention",
    "FastWeightProgrammer",
    "SoftmaxAttention",
    "AFTSimple",
    "AFTFull",
    "AFTLocal",
    "AFTConv",
    "AFTConv2d",
    "FeedbackTransformer",
    "TransformerXL",
    "CrossAttention",
    "Block",
]
