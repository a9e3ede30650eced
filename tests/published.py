"""Make tiny random models of the transformers families that fwlab loads or patches."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
VOCABULARY = 61
#: Options that all model families share.
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
#: Options of linear attention, with two value heads for each key head.
LINEAR = SIZES | {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 8},
}
QWEN = LINEAR | {"head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
QWEN_EXPERTS = QWEN | EXPERTS
QWEN_EXPERTS |= {"num_experts": 4, "shared_expert_intermediate_size": 16}
SEEING = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 32, "num_position_embeddings": 4},
}
KIMI = (
    SIZES
    | EXPERTS
    | {
        **{"linear_num_heads": 2, "linear_head_dim": 8, "num_key_value_heads": 4},
        **{"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
        **{"v_head_dim": 6, "num_local_experts": 4},
    }
)
BARE = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
#: Model families: the model class, the configuration class and the options.
FAMILIES = {
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", QWEN_EXPERTS),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", QWEN_EXPERTS),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", LINEAR),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI),
    "olmo_hybrid-bare": ("OlmoHybridForCausalLM", "OlmoHybridConfig", LINEAR | BARE),
    "qwen3_5-sees": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": QWEN, "vision_config": SEEING, "tie_word_embeddings": True},
    ),
}


def tiny(family, noise=0.0, **changes):
    """Return a tiny random model; `noise` perturbs all weights, including norms."""
    model, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(
        getattr(transformers, config)(**sizes | changes)
    )
    with torch.no_grad():
        for weight in made.parameters():
            scale = noise if weight.dim() > 1 else 2 * noise
            weight.add_(torch.randn_like(weight) * scale)
    return made.eval()


def write_tokenizer(folder, words):
    """Write a word-level tokenizer; the id of a word is its index in `words`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: i for i, word in enumerate(words)}
    coder = Tokenizer(models.WordLevel(numbers, unk_token=words[0]))
    coder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    coder.save(str(folder / "tokenizer.json"))
