"""Record the outputs of Qwen3.5's layer in transformers, for notebook 11.

    pip install transformers
    python docs/tools/qwen_layer.py

Writes `fwlab/data/results/qwen-layer.json`: sizes, a seed, and the outputs. Weights
and input are drawn by `fwlab.exercises.to_qwen.drawn`, in float64, on the CPU, and
rounded to float32 for the module.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Generator
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from fwlab.exercises.course.to_qwen import drawn
from fwlab.provenance import provenance

COMMAND = "python docs/tools/qwen_layer.py"
OUT = Path(__file__).parents[2] / "fwlab" / "data" / "results" / "qwen-layer.json"
CASES = {
    "plain": {"key_heads": 2, "value_heads": 2, "time": 9},
    "grouped": {"key_heads": 2, "value_heads": 4, "time": 9},
}
#: Weight names in `modern_layer`, by weight name in transformers.
NAMES = {
    "in_proj_qkv.weight": "W_qkv",
    "conv1d.weight": "conv",
    "in_proj_z.weight": "W_z",
    "in_proj_b.weight": "W_b",
    "in_proj_a.weight": "W_a",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm",
    "out_proj.weight": "W_out",
}


def outputs(seed: int, sizes: dict[str, Any]) -> Any:
    """Return the outputs `[batch, time, d]` of Qwen3.5's layer as nested lists."""
    given = drawn(Generator().manual_seed(seed), **sizes)
    heads, value = len(given["A_log"]), len(given["norm"])
    keys = (len(given["W_qkv"]) - heads * value) // 2
    config = Qwen3_5TextConfig(
        hidden_size=given["x"].shape[-1],
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=given["key_heads"],
        linear_num_value_heads=heads,
        linear_key_head_dim=keys // given["key_heads"],
        linear_value_head_dim=value,
        linear_conv_kernel_dim=given["conv"].shape[1],
        rms_norm_eps=1e-6,
        hidden_act="silu",
    )
    layer = Qwen3_5GatedDeltaNet(config, 0)
    weights = {name: given[ours].float() for name, ours in NAMES.items()}
    weights["conv1d.weight"] = weights["conv1d.weight"][:, None]
    layer.load_state_dict(weights)
    with torch.no_grad():
        y = layer(given["x"].float())
    return [[[round(x, 7) for x in row] for row in each] for each in y.tolist()]


def made() -> dict[str, Any]:
    """Return the content of the JSON file: cases with outputs, and the provenance."""
    cases = {
        name: {"seed": seed, "sizes": sizes, "outputs": outputs(seed, sizes)}
        for seed, (name, sizes) in enumerate(CASES.items())
    }
    source = provenance(COMMAND) | {"transformers": transformers.__version__}
    return {"module": "Qwen3_5GatedDeltaNet", "cases": cases, "provenance": source}


if __name__ == "__main__":
    OUT.write_text(json.dumps(made()) + "\n")
