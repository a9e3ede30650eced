"""A language model built of layers, and sampling from it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab.layers import FastWeightAttention, SoftmaxAttention

#: The mixers by name, and whether their models need a position table:
#: attention sees a set of keys, so softmax knows no order without one.
#: Fast weights are written in order; the paper's best delta networks
#: have no positions (Table 3), and no table also means no longest text.
MIXERS: dict[str, tuple[Callable[[int, int], nn.Module], bool]] = {
    "softmax": (SoftmaxAttention, True),
    "sum": (
        lambda d_model, heads: FastWeightAttention(d_model, heads, rule="sum"),
        False,
    ),
    "delta": (
        lambda d_model, heads: FastWeightAttention(d_model, heads, rule="delta"),
        False,
    ),
}


class Block(nn.Module):
    """Mix over time, then over channels, each behind its own norm."""

    def __init__(self, mixer: nn.Module, d_model: int):
        super().__init__()
        self.norm_mixer = nn.LayerNorm(d_model, bias=False)
        self.mixer: Any = mixer
        self.norm_mlp = nn.LayerNorm(d_model, bias=False)
        self.expand = nn.Linear(d_model, 4 * d_model, bias=False)
        self.contract = nn.Linear(4 * d_model, d_model, bias=False)

    def _mlp(self, x: Tensor) -> Tensor:
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self._mlp(x + self.mixer(self.norm_mixer(x)))

    def prefill(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer.prefill(self.norm_mixer(x), state)
        return self._mlp(x + y), state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer.step(self.norm_mixer(x), state)
        return self._mlp(x + y), state


class LanguageModel(nn.Module):
    r"""Pre-norm blocks between tied embeddings (the form of GPT-2).

    - `vocab_size`: number of different tokens, at least 1.
    - `mixer`: "softmax", "sum" or "delta".
    - `layers`, `heads`, `d_model`: depth, heads per layer, width.
    - `max_len`: longest sequence, for mixers that need a position table
      (softmax); the others ignore it and have no longest sequence.
    - Raises `ValueError` for sizes or names that do not fit.

    No linear layer or norm has a bias. **Initial weights**: embeddings
    and linear layers normal with standard deviation 0.02; the two that
    end in the residual stream (the mixer's output and the second layer
    of the MLP) with $0.02 / \sqrt{2 \cdot \text{layers}}$, so that the
    stream's variance does not grow with depth; norms 1.
    """

    def __init__(
        self,
        vocab_size: int,
        mixer: str = "delta",
        layers: int = 4,
        heads: int = 4,
        d_model: int = 128,
        max_len: int = 64,
    ):
        super().__init__()
        if mixer not in MIXERS:
            wanted = ", ".join(map(repr, MIXERS))
            raise ValueError(
                f"LanguageModel: unknown mixer {mixer!r}; wanted one of {wanted}"
            )
        sizes = {"vocab_size": vocab_size, "layers": layers, "max_len": max_len}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(
                    f"LanguageModel: {name} must be at least 1, not {size}"
                )
        make, positions = MIXERS[mixer]
        self.vocab_size, self.max_len = vocab_size, max_len if positions else None
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_len, d_model) if positions else None
        blocks = [Block(make(d_model, heads), d_model) for _ in range(layers)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(d_model, bias=False)

        residual = [m for b in blocks for m in (b.mixer.to_out, b.contract)]
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / (2 * layers) ** 0.5 if module in residual else 0.02
                nn.init.normal_(module.weight, std=std)

    def num_parameters(self) -> int:
        """Trained numbers, without the position table (as nanoGPT counts)."""
        total = sum(p.numel() for p in self.parameters())
        return total - (self.positions.weight.numel() if self.positions else 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        - `tokens`: `int64 [batch, time]`, from 0 to `vocab_size - 1`.
        - Returns `[batch, time, vocab_size]`.
        - Raises `ValueError` past `max_len` where the model has one.
        """
        x = self._embed(tokens, 0)
        for block in self.blocks:
            x = block(x)
        return self._logits(x)

    def prefill(self, tokens: Tensor, state: list | None = None) -> tuple[Tensor, list]:
        """The same for a stretch of the sequence, and the state after it.

        - `tokens`: `int64 [batch, time]`.
        - `state`: what an earlier call returned; None = start of text.
        - Returns `(logits, state)`.
        """
        past, parts = (
            (0, [None] * len(self.blocks)) if state is None else (state[0], state[1:])
        )
        x = self._embed(tokens, past)
        after: list = [past + tokens.shape[1]]
        for block, part in zip(self.blocks, parts, strict=True):
            x, part = block.prefill(x, part)
            after.append(part)
        return self._logits(x), after

    def step(self, tokens: Tensor, state: list | None = None) -> tuple[Tensor, list]:
        """One token of each sequence.

        - `tokens`: `int64 [batch]`.
        - Returns `(logits, state)`, the logits being `[batch, vocab_size]`.
        """
        past, parts = (
            (0, [None] * len(self.blocks)) if state is None else (state[0], state[1:])
        )
        x = self._embed(tokens[:, None], past)[:, 0]
        after: list = [past + 1]
        for block, part in zip(self.blocks, parts, strict=True):
            x, part = block.step(x, part)
            after.append(part)
        return self._logits(x), after

    def _embed(self, tokens: Tensor, past: int) -> Tensor:
        if tokens.dim() != 2:
            raise ValueError(
                f"LanguageModel: tokens have shape {list(tokens.shape)}, but [batch, time] was wanted"
            )
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(
                f"LanguageModel: tokens have dtype {tokens.dtype}; int64 was wanted"
            )
        # On an accelerator the look would wait for the device.
        if tokens.device.type == "cpu" and tokens.numel():
            least, most = tokens.min().item(), tokens.max().item()
            if least < 0 or most >= self.vocab_size:
                raise ValueError(
                    f"LanguageModel: tokens go from {least} to {most}, but "
                    f"0 to {self.vocab_size - 1} was wanted"
                )
        x = self.embedding(tokens)
        if self.positions is None or self.max_len is None:
            return x
        end = past + tokens.shape[1]
        if end > self.max_len:
            raise ValueError(
                f"LanguageModel: {end} tokens are more than max_len={self.max_len}, "
                "the length of the position table"
            )
        return x + self.positions.weight[past:end]

    def _logits(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.embedding.weight.T  # tied

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue a prompt, one token at a time, with `step`.

        - `prompt`: `int64 [batch, time]`, at least one token.
        - `max_new_tokens`: how many to add, 0 or more.
        - `temperature`: divides the logits; 0 takes the likeliest token.
        - `top_k`: draw among the `k` likeliest only; None = among all.
        - `seed`: same seed, same text; None = PyTorch's own generator.
        - Returns `int64 [batch, time + max_new_tokens]`, prompt included.
        - Raises `ValueError` for an argument out of range.

        Fast weight models need the same memory for every token. A model
        with `max_len` goes on from its last `max_len` tokens when the
        text grows longer, and warns once.
        """
        if prompt.dim() != 2 or prompt.shape[1] == 0:
            raise ValueError(
                f"generate: prompt has shape {list(prompt.shape)}, but [batch, time] "
                "with at least one token was wanted"
            )
        if max_new_tokens < 0:
            raise ValueError(
                f"generate: max_new_tokens must be 0 or more, not {max_new_tokens}"
            )
        if not temperature >= 0:
            raise ValueError(
                f"generate: temperature must be 0 or more, not {temperature}"
            )
        if top_k is not None and top_k < 1:
            raise ValueError(f"generate: top_k must be at least 1, not {top_k}")
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"generate: seed must be from 0 to 2**63 - 1, not {seed}")
        generator = None
        if seed is not None:
            generator = torch.Generator(prompt.device).manual_seed(seed)

        text, state, warned = [prompt], None, False
        for _ in range(max_new_tokens):
            if state is None or state[0] == self.max_len:
                seen = torch.cat(text, dim=1)
                if self.max_len is not None and seen.shape[1] > self.max_len:
                    seen = seen[:, -self.max_len :]
                    if not warned:
                        warnings.warn(
                            f"the text is longer than max_len={self.max_len}: "
                            "going on from its last tokens",
                            stacklevel=2,
                        )
                        warned = True
                logits, state = self.prefill(seen)
                logits = logits[:, -1]
            else:
                logits, state = self.step(text[-1][:, 0], state)
            text.append(_draw(logits, temperature, top_k, generator)[:, None])
        return torch.cat(text, dim=1)


def _draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """One token per row of logits: `[batch, vocab]` to `[batch]`."""
    if temperature == 0:
        return logits.argmax(-1)
    # The likeliest becomes 0 first: no temperature overflows it.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
