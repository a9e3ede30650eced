"""A published model with random weights: loaded by fwlab, and by transformers.

Each side is a process of its own with two threads, which loads the same folder:
the time until the first token of a long prompt, tokens per second after it (greedy),
and the peak memory of the process.
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.settings import fresh
from fwlab.bench.case import layout

#: Qwen3.5 by size: as the tests have it, and Qwen3.5-0.8B.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "0.8B": {
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
SIDES = ("fwlab", "transformers")
PROMPT, TOKENS = 2048, 32
ROUNDS = 3
THREADS = {"OMP_NUM_THREADS": "2"}


def save(size: str, folder: str) -> None:
    """A model with random weights, in float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SIZES[size], tie_word_embeddings=True)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)


@torch.no_grad()
def side(name: str, folder: str) -> dict[str, Any]:
    """Seconds to the first token, and per token after it; MiB at most."""
    if name == "fwlab":
        from fwlab.models import load

        model: Any = load(folder)

        def generate(prompt: torch.Tensor, n: int) -> torch.Tensor:
            return model.generate(prompt, n, temperature=0)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)

        def generate(prompt: torch.Tensor, n: int) -> torch.Tensor:
            sizes = {"max_new_tokens": n, "min_new_tokens": n}
            mask = torch.ones_like(prompt)
            return model.generate(
                prompt, **sizes, do_sample=False, attention_mask=mask, pad_token_id=0
            )

    prompt = torch.arange(PROMPT)[None] * 7 % 512
    generate(prompt[:, :64], 2)
    first, all_ = [], []
    for _ in range(ROUNDS):
        for times, n in ((first, 1), (all_, 1 + TOKENS)):
            start = time.perf_counter()
            text = generate(prompt, n)
            times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "first": min(first),
        "token": (min(all_) - min(first)) / TOKENS,
        "peak_mib": round(peak),
        "text": text[0, PROMPT:].tolist(),
    }


def measure() -> dict[str, Any]:
    """A row for each size and side; both have to write the same text."""
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            fresh("published", f"save({size!r}, {folder!r})", THREADS)
            found = {
                name: fresh("published", f"side({name!r}, {folder!r})", THREADS)
                for name in SIDES
            }
            files = sum(x.stat().st_size for x in Path(folder).glob("*.safetensors"))
        texts = [one.pop("text") for one in found.values()]
        equal = sum(a == b for a, b in zip(*texts, strict=True))
        for name, one in found.items():
            rows.append(
                {
                    "model": size,
                    "side": name,
                    "first_ms": round(1e3 * one["first"], 1),
                    "tokens_per_second": round(1 / one["token"], 2),
                    "peak_mib": one["peak_mib"],
                    "file_mib": round(files / 2**20),
                    "equal_tokens": equal,
                }
            )
    cells = [list(rows[0]), *([str(x) for x in row.values()] for row in rows)]
    print(layout(cells, left=2))
    return {"prompt": PROMPT, "tokens": TOKENS, "rows": rows}
