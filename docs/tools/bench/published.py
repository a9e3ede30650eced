"""A published model with random weights: loaded by fwlab, and by transformers.

Both sides load the same folder and take turns in one process with two threads: the time
until a long prompt is read, and tokens per second after it (greedy). The peak memory is
that of a process for each side.
"""

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

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
ROUNDS = {"tiny": 9, "0.8B": 2}
THREADS = {"OMP_NUM_THREADS": "2"}
Read = Callable[..., tuple[Tensor, Any]]


def save(size: str, folder: str) -> None:
    """A model with random weights, in float32."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**SIZES[size], tie_word_embeddings=True)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)


def loaded(name: str, folder: str) -> tuple[Read, Read]:
    """How a side reads a prompt, and the token after it."""
    if name == "fwlab":
        from fwlab.models import load

        own = load(folder)
        return partial(own.prefill, last=True), own.step
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)

    def read(tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        options = {"use_cache": True, "logits_to_keep": 1}
        out = model(tokens, past_key_values=cache, **options)
        return out.logits[:, -1], out.past_key_values

    return read, lambda tokens, cache: read(tokens[:, None], cache)


@torch.no_grad()
def times(size: str, folder: str) -> list[dict[str, Any]]:
    """Median seconds of each side until the prompt is read, and of a token after it."""
    sides = [loaded(name, folder) for name in SIDES]
    found: list[dict[str, Any]] = [
        {"first": [], "token": [], "text": []} for _ in sides
    ]
    for _ in range(ROUNDS[size]):  # in turns: the machine is not always the same
        for (read, step), one in zip(sides, found, strict=True):
            start = time.perf_counter()
            logits, state = read(prompt())
            one["first"].append(time.perf_counter() - start)
            for _ in range(TOKENS):
                token = logits.argmax(-1)
                start = time.perf_counter()
                logits, state = step(token, state)
                one["token"].append(time.perf_counter() - start)
                one["text"].append(token.item())
    for one in found:
        one |= {name: statistics.median(one[name]) for name in ("first", "token")}
    return found


@torch.no_grad()
def peak(name: str, folder: str) -> float:
    """MiB of a process that loads one side, and reads the prompt and a token."""
    read, step = loaded(name, folder)
    logits, state = read(prompt())
    step(logits.argmax(-1), state)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prompt() -> Tensor:
    """Tokens that both vocabularies have."""
    return torch.arange(PROMPT)[None] * 7 % 512


def measure() -> dict[str, Any]:
    """A row for each size and side, and how many tokens of their texts are equal."""
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            fresh("published", f"save({size!r}, {folder!r})", THREADS)
            both = fresh("published", f"times({size!r}, {folder!r})", THREADS)
            peaks = [
                fresh("published", f"peak({name!r}, {folder!r})", THREADS)
                for name in SIDES
            ]
        ours, theirs = (one["text"] for one in both)
        equal = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)
        for name, one, mib in zip(SIDES, both, peaks, strict=True):
            rows.append(
                {
                    "model": size,
                    "side": name,
                    "first_ms": round(1e3 * one["first"], 1),
                    "tokens_per_second": round(1 / one["token"], 2),
                    "peak_mib": round(mib),
                    "equal": round(equal, 2),
                }
            )
    cells = [list(rows[0]), *([str(x) for x in row.values()] for row in rows)]
    print(layout(cells, left=2))
    return {"prompt": PROMPT, "tokens": TOKENS, "rows": rows}
