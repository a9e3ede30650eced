"""Tokens per second of generation, by the tokens read before.

A layer with fast weights carries a state of constant size from token to
token. Softmax attention reads a cache that grows, so from some context on
it is slower. Beside the mixers is nanoGPT's model with a cache that is
written in place.
"""

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.lengths import crossing, rounded
from bench.peers import NanoGPT
from fwlab.bench import mixers
from fwlab.bench.case import layout
from fwlab.models import LanguageModel

NANOGPT = "nanoGPT"
MIXERS = ("delta", "sum", "gated-delta", "softmax")
CONTEXTS = tuple(2**n for n in range(6, 14))
TOKENS = 32  # in a turn
ROUNDS = 7


class Cached:
    """nanoGPT's model, one token at a time.

    Keys and values of all `longest` tokens have their place from the
    beginning. A state is the number of tokens before.
    """

    def __init__(self, longest: int):
        self.model = NanoGPT(longest)
        shape = 1, mixers.HEADS, longest, mixers.D_MODEL // mixers.HEADS
        # Of any tokens, until they are written.
        self.cache = [
            (torch.randn(shape), torch.randn(shape)) for _ in self.model.blocks
        ]

    def step(self, tokens: Tensor, past: int) -> tuple[Tensor, int]:
        """As in `LanguageModel`; `tokens`: `[1]`."""
        model, now = self.model, past + 1
        x = model.tokens(tokens[:, None]) + model.positions.weight[past:now]
        for block, (K, V) in zip(model.blocks, self.cache, strict=True):
            q, k, v = block.attention.qkv(block.norms[0](x))
            K[:, :, past:now], V[:, :, past:now] = k, v
            y = F.scaled_dot_product_attention(q, K[:, :, :now], V[:, :, :now])
            x = block.mlp(x + block.attention.out(y.transpose(1, 2).flatten(2)))
        return model.head(model.norm(x))[:, 0], now


def models(longest: int) -> dict[str, Any]:
    """The models by name, for up to `longest` tokens."""
    torch.manual_seed(0)
    sizes = mixers.LAYERS, mixers.HEADS, mixers.D_MODEL
    made: dict[str, Any] = {
        name: LanguageModel(mixers.VOCAB, name, *sizes, max_len=longest).eval()
        for name in MIXERS
    }
    return made | {NANOGPT: Cached(longest)}


@torch.no_grad()
def run(contexts: tuple[int, ...] = CONTEXTS) -> list[dict[str, Any]]:
    """Median time of a token by model and context, measured in turns.

    In a turn, a model continues a text of this many tokens. The first token
    does not count: there a cache finds room for those to come.
    """
    made = models(contexts[-1] + TOKENS + 1)
    text = torch.randint(mixers.VOCAB, (1, contexts[-1]))
    token, rows = text[0, :1], []
    for context in contexts:
        states = {
            name: context if name == NANOGPT else model.prefill(text[:, :context])[1]
            for name, model in made.items()
        }
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(ROUNDS):
            for name, model in made.items():
                _, state = model.step(token, states[name])
                for _ in range(TOKENS):
                    start = time.perf_counter()
                    _, state = model.step(token, state)
                    times[name].append(time.perf_counter() - start)
        rows += [
            {
                "model": name,
                "context": context,
                "microseconds": round(1e6 * statistics.median(spent), 1),
            }
            for name, spent in times.items()
        ]
    return rows


def by_model(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Microseconds per token, by model and context."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        times.setdefault(row["model"], {})[row["context"]] = row["microseconds"]
    return times


def crossings(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """The context from which on a model is faster than nanoGPT's.

    None if it is slower at the greatest, see `crossing`.
    """
    times = by_model(rows)
    theirs = times.pop(NANOGPT)
    return {name: crossing(ours, theirs) for name, ours in times.items()}


def said(at: float | None, contexts: list[int]) -> str:
    """A crossing in words."""
    if at is None:
        return f"not up to {max(contexts):,}"
    if at == min(contexts):
        return f"at every context from {at:,.0f}"
    return f"from {rounded(at)}"


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Tokens per second as text, with a header."""
    times, faster = by_model(rows), crossings(rows)
    contexts = [*times[NANOGPT]]
    cells = [["model", *(f"{at:,}" for at in contexts), f"faster than {NANOGPT}"]]
    for name, line in times.items():
        words = said(faster[name], contexts) if name in faster else ""
        cells.append([name, *(f"{1e6 / us:,.0f}" for us in line.values()), words])
    return cells


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print(
        f"tokens per second after this many tokens: batch 1, {mixers.LAYERS} layers, "
        f"width {mixers.D_MODEL}, {mixers.HEADS} heads, 1 thread\n"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = run()
    torch.set_num_threads(threads)
    print(layout(table(rows)))
    return {"generation": rows}
