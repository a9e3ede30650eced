"""Translate with an encoder-decoder, with any attention."""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fwlab import arguments
from fwlab.feature_maps import FeatureMap
from fwlab.layers import Block, CrossAttention, FastWeightAttention, SoftmaxAttention
from fwlab.layers.fast_weight_attention import RULES
from fwlab.layers.positions import sinusoids
from fwlab.models.tokens import check_range, check_tokens, tied_logits


class DecoderState(NamedTuple):
    """Hold the state of the decoder between target tokens.

    - `past`: number of target tokens so far.
    - `source`: per layer, the state of the cross-attention.
    - `parts`: per layer, the state of the self-attention.
    """

    past: int
    source: list[Any]
    parts: list[Any]


class EncoderBlock(Block):
    """Apply a block whose attention sees the whole source."""

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        h = self.norm_mixer(x)
        return self._mix_channels(x + self.dropout(self.mixer(h, h, key_mask)))


class DecoderBlock(Block):
    """Apply a block with cross-attention to the source before its MLP."""

    def __init__(
        self,
        mixer: nn.Module,
        cross: CrossAttention,
        d_model: int,
        d_ff: int | None,
        dropout: float,
    ):
        super().__init__(mixer, d_model, d_ff, dropout)
        self.norm_cross = nn.LayerNorm(d_model, bias=False)
        self.cross = cross

    def read(
        self, x: Tensor, source: Any, state: Any, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Process a part of the target, and return its outputs and the new state."""
        h = self.norm_mixer(x)
        if x.shape[1] == 1 and key_mask is None:
            y, state = self.mixer.step(h[:, 0], state)
            y = y[:, None]
        else:
            y, state = self.mixer.prefill(h, state, key_mask)
        x = x + self.dropout(y)
        x = x + self.dropout(self.cross.read(self.norm_cross(x), source))
        return self._mix_channels(x), state


class EncoderDecoder(nn.Module):
    r"""Build the encoder-decoder of Vaswani et al. 2017 with any attention.

    The encoder's blocks see the whole source. The decoder's blocks see the source and
    the target so far. With a feature map, all three kinds of attention are fast
    weights: the encoder's and the cross-attention sum over all source tokens
    (`layers.CrossAttention`); the decoder's self-attention is a causal rule
    (`layers.FastWeightAttention`). Decoding then needs constant memory, however long
    the source is.

    - `source_vocab`, `target_vocab`: number of tokens in each vocabulary.
    - `layers`: number of blocks, in the encoder and in the decoder.
    - `heads`, `d_model`: heads per layer, width.
    - `attention`: "softmax", or a `FeatureMap`, of which every attention gets a copy.
    - `rule`: the decoder's fast weight rule, one that `FastWeightAttention` takes;
      softmax has none.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`.
    - `dropout`: probability of dropout in training, from 0 to below 1: of embeddings
      with positions, of what every attention and MLP adds to its input, and inside the
      MLPs.
    - `attention_dropout`: the same for attention weights; softmax only.
    - Raises `ValueError` or `TypeError` for invalid arguments.

    Positions are sinusoids, added to the embeddings on both sides: there is no maximum
    sequence length. The target's embeddings are also the weights of the last layer; the
    source, another language, has its own embeddings. Blocks are pre-norm, without
    biases. **Initial weights**: embeddings normal with variance $1/d$, and multiplied
    by $\sqrt d$ when looked up; linear layers Xavier uniform, norms 1.

        >>> model = EncoderDecoder(10, 12, layers=1, heads=2, d_model=8)
        >>> source = target = torch.zeros(1, 5, dtype=torch.long)
        >>> model(source, target).shape
        torch.Size([1, 5, 12])
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        layers: int = 2,
        heads: int = 4,
        d_model: int = 64,
        attention: str | FeatureMap = "softmax",
        rule: str = "sum",
        d_ff: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        arguments.dropout("EncoderDecoder", dropout)
        arguments.dropout("EncoderDecoder", attention_dropout, "attention_dropout")
        sizes = {"source_vocab": source_vocab, "target_vocab": target_vocab}
        sizes |= {"layers": layers, "d_model": d_model}
        arguments.integers("EncoderDecoder", 1, **sizes)
        rule = rule.replace("-", "_") if isinstance(rule, str) else rule
        arguments.choice("EncoderDecoder", RULES, rule=rule)
        phi = attention if isinstance(attention, FeatureMap) else None
        if phi is None and attention != "softmax":
            raise TypeError(
                "EncoderDecoder: expected attention to be 'softmax' or a FeatureMap, "
                f"such as ELU1(), got {attention!r}"
            )
        if attention_dropout and phi is not None:
            raise ValueError(
                "EncoderDecoder: expected attention_dropout=0 with a feature map, "
                f"which has no attention weights, got {attention_dropout}"
            )
        self.source_vocab, self.target_vocab = source_vocab, target_vocab
        self.d_model = d_model
        self.dropout = nn.Dropout(dropout)

        def causal() -> nn.Module:
            if phi is None:
                dropped: Any = {"attention_dropout": attention_dropout}
                return SoftmaxAttention(d_model, heads, **dropped)
            return FastWeightAttention(d_model, heads, copy.deepcopy(phi), rule)

        def cross() -> CrossAttention:
            return CrossAttention(d_model, heads, copy.deepcopy(phi), attention_dropout)

        self.source_embedding = nn.Embedding(source_vocab, d_model)
        self.target_embedding = nn.Embedding(target_vocab, d_model)
        self.encoder: Any = nn.ModuleList(
            EncoderBlock(cross(), d_model, d_ff, dropout) for _ in range(layers)
        )
        self.decoder: Any = nn.ModuleList(
            DecoderBlock(causal(), cross(), d_model, d_ff, dropout)
            for _ in range(layers)
        )
        self.norm_source = nn.LayerNorm(d_model, bias=False)
        self.norm = nn.LayerNorm(d_model, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=d_model**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def num_parameters(self) -> int:
        """Count the parameters, embeddings included.

        - Returns the count.
        """
        return sum(p.numel() for p in self.parameters())

    def state_size(self, source_time: int, time: int) -> int:
        """Count the scalars of the state that decoding keeps between tokens.

        - `source_time`: tokens of the source.
        - `time`: tokens of the target so far.
        - Returns the count for one sequence, over all layers.
        """
        return sum(
            block.cross.state_size(source_time) + block.mixer.state_size(time)
            for block in self.decoder
        )

    def forward(
        self,
        source: Tensor,
        target_in: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of the next target token at every position.

        - `source`: `int64 [batch, source]`.
        - `target_in`: `int64 [batch, time]`, a start token, then the target shifted by
          one step.
        - `source_mask`: `bool [batch, source]`, True = real token; None = all are.
        - `target_mask`: `bool [batch, time]`, the same. Padding after the end of a
          target needs no mask: no real token sees it.
        - Returns `[batch, time, target_vocab]`.
        - Raises `ValueError` or `TypeError` for invalid arguments.
        """
        return self.prefill(target_in, self.encode(source, source_mask), target_mask)[0]

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> DecoderState:
        """Encode the source, and write it into the decoder's state.

        - `source`, `source_mask`: as in `forward`.
        - Returns the state of the decoder before the first target token.
        """
        check_tokens("EncoderDecoder", source, self.source_vocab, argument="source")
        x = self._positioned(self.source_embedding(source), 0)
        for block in self.encoder:
            x = block(x, source_mask)
        x = self.norm_source(x)
        memories = [block.cross.write(x, source_mask) for block in self.decoder]
        return DecoderState(0, memories, [None] * len(memories))

    def prefill(
        self,
        target_in: Tensor,
        state: DecoderState,
        target_mask: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """Process part of the target, and return the state after it.

        - `target_in`: `int64 [batch, time]`.
        - `state`: what `encode`, `prefill` or `step` returned.
        - `target_mask`: as in `forward`.
        - Returns `(logits, state)`, the logits `[batch, time, target_vocab]`.
        """
        vocab = self.target_vocab
        check_tokens("EncoderDecoder", target_in, vocab, argument="target_in")
        x, parts = self._positioned(self.target_embedding(target_in), state.past), []
        each = zip(self.decoder, state.source, state.parts, strict=True)
        for block, source, part in each:
            x, part = block.read(x, source, part, target_mask)
            parts.append(part)
        past = state.past + target_in.shape[1]
        logits = tied_logits(self.norm(x), self.target_embedding, vocab)
        return logits, DecoderState(past, state.source, parts)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Process one target token of each sequence.

        - `tokens`: `int64 [batch]`.
        - `state`: what `encode`, `prefill` or `step` returned.
        - Returns `(logits, state)`, the logits `[batch, target_vocab]`.
        """
        logits, state = self.prefill(tokens[:, None], state)
        return logits[:, 0], state

    def _positioned(self, x: Tensor, past: int) -> Tensor:
        # Use the CPU, since the sinusoids need float64, which some devices lack.
        positions = torch.arange(past, past + x.shape[1], device="cpu")
        x = x * self.d_model**0.5 + sinusoids(positions, self.d_model).to(x)
        return self.dropout(x)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        max_new_tokens: int,
        start: int,
        end: int | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Translate by greedy decoding, which always takes the most likely next token.

        In training mode dropout acts here, too: call `eval()` first.

        - `source`, `source_mask`: as in `forward`.
        - `max_new_tokens`: maximum number of tokens, 0 or more.
        - `start`: the token before the first one.
        - `end`: the token that ends a sequence, and fills it up after that. None =
          always generate `max_new_tokens`.
        - Returns `int64 [batch, time]`, without the start token; `time` is the maximum
          of the sequence lengths.
        - Raises `ValueError` for an argument out of range.
        """
        arguments.integers("generate", 0, max_new_tokens=max_new_tokens)
        check_range(0, self.target_vocab - 1, start=start, end=end)
        state = self.encode(source, source_mask)
        tokens = torch.full_like(source[:, 0], start, dtype=torch.int64)
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        text = [tokens[:, None][:, :0]]
        for _ in range(max_new_tokens):
            logits, state = self.step(tokens, state)
            tokens = logits.argmax(-1)
            if end is not None:
                tokens = tokens.masked_fill(ended, end)
                ended = tokens == end
            text.append(tokens[:, None])
            if end is not None and ended.all():
                break
        return torch.cat(text, 1)
