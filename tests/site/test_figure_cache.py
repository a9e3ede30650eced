"""The figure of state and cache: its sizes are those of fwlab's layers, and its
models are those of transformers' configurations."""

import re

import pytest
import torch
from built import ROOT
from figure import number

from fwlab.layers import FastWeightAttention, SoftmaxAttention

PAGE = (ROOT / "docs" / "figures" / "cache.md").read_text("utf-8")


@pytest.fixture
def figure(fresh):
    return fresh("cache")


def test_sizes_are_those_of_fwlab(figure):
    """In numbers: a head's memory, the inputs of a convolution, keys and values."""
    models = figure.state()["models"]
    for name, model in models.items():
        figure.choose(name)
        shown, fast = figure.state(), model["fast"]
        assert shown["attention"] == model["attention"] < model["layers"]
        with torch.device("meta"):
            memory = FastWeightAttention(
                fast["heads"] * fast["key"],
                fast["heads"],
                rule="gated_delta",
                expand_v=fast["value"] / fast["key"],
                conv_size=4,
            )
        fixed = fast["heads"] * fast["key"] * fast["value"]
        assert fixed + fast["inputs"] == memory.state_size()
        past = model["layers"] - model["attention"]
        state = past * (4 * fixed + 2 * fast["inputs"])
        cached = 2 * model["cached"]["numbers"]
        cache = model["attention"] * cached * shown["tokens"]
        assert shown["sizes"] == {
            "state": state,
            "cache": cache,
            "both": state + cache,
            "full": model["layers"] * cached * shown["tokens"],
        }
        even = state / (model["attention"] * cached)
        assert shown["even"] == pytest.approx(even)
        assert f" {even:,.0f} " in PAGE
        if "latent" not in name and (
            heads := re.search(r"(\d+) heads of (\d+)", model["cached"]["of"])
        ):
            count, width = map(int, heads.groups())
            attention = SoftmaxAttention(8, count, head_width=width)
            assert attention.state_size(1) == model["cached"]["numbers"]


def test_models_are_those_of_transformers(figure):
    """Of Qwen3.5's, layers, width and fast weights are the 0.8B model's."""
    pytest.importorskip("transformers.models")
    models = figure.state()["models"]
    from transformers import KimiLinearConfig, OlmoHybridConfig
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    qwen = Qwen3_5TextConfig(
        hidden_size=1024, num_hidden_layers=24, linear_num_value_heads=16
    )
    olmo, kimi = OlmoHybridConfig(), KimiLinearConfig()
    for name, config, fast, cached in (
        (
            "Qwen3.5 0.8B",
            qwen,
            (
                qwen.linear_num_value_heads,
                qwen.linear_key_head_dim,
                qwen.linear_value_head_dim,
            ),
            2 * qwen.num_key_value_heads * qwen.head_dim,
        ),
        (
            "Olmo Hybrid 7B",
            olmo,
            (
                olmo.linear_num_value_heads,
                olmo.linear_key_head_dim,
                olmo.linear_value_head_dim,
            ),
            2 * olmo.num_key_value_heads * olmo.hidden_size // olmo.num_attention_heads,
        ),
        (
            "Kimi Linear 48B",
            kimi,
            (kimi.linear_num_heads, kimi.linear_head_dim, kimi.linear_head_dim),
            kimi.kv_lora_rank + kimi.qk_rope_head_dim,
        ),
    ):
        shown = models[name]
        kinds = config.layer_types
        assert shown["layers"] == len(kinds) == config.num_hidden_layers
        assert shown["attention"] == kinds.count("full_attention")
        assert [shown["fast"][x] for x in ("heads", "key", "value")] == [*fast]
        assert config.linear_conv_kernel_dim == 4
        assert shown["cached"]["numbers"] == cached


def test_what_is_drawn_is_what_is_computed(figure):
    """Dots, sizes and words, at every context and with other sliders."""
    drawn = """{
      state: state(),
      words: words(),
      sizes: Object.fromEntries(all("[data-size]").map((e) => [e.dataset.size, e.textContent])),
      heights: Object.fromEntries(all("[data-dot]").map((e) => [e.dataset.dot, e.getAttribute("cy")])),
    }"""

    def mib(text: str) -> float:
        size, unit = text.split("\u00a0")
        return number(size) * {"MiB": 1, "GiB": 2**10, "TiB": 2**20}[unit]

    figure.slide("Sequences", 3)
    figure.slide("Attention layers", 12)
    for power, found in zip(
        range(10, 21), figure.sweep("Context", range(10, 21), drawn), strict=True
    ):
        shown = found["state"]
        assert (shown["tokens"], shown["sequences"], shown["attention"]) == (
            2**power,
            8,
            12,
        )
        for name, size in shown["sizes"].items():
            assert mib(found["sizes"][name]) == pytest.approx(size / 2**20, rel=0.006)
            share = (torch.tensor(size / 2**20).log2().item() + 2) / 24
            assert number(found["heights"][name]) == pytest.approx(
                240 - share * 218, abs=0.06
            )
        assert (
            f"state {found['sizes']['state']}, cache {found['sizes']['cache']}"
            in found["words"]
        )


def test_all_layers_of_one_kind(figure):
    figure.slide("Attention layers", 0)
    assert "cache none" in figure.words() and "no cache" in figure.words()
    figure.slide("Attention layers", 24)
    sizes = figure.state()["sizes"]
    assert sizes["both"] == sizes["full"] and "no state" in figure.words()
    # Another model has another number of layers.
    figure.choose("Kimi Linear 48B")
    assert figure.state()["attention"] == 6
    assert figure.slider("Attention layers").get_attribute("max") == "27"
