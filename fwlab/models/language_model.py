"""Build a language model from layers, and generate text with it."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fwlab import arguments
from fwlab.layers import (
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTSimple,
    Block,
    FastWeightAttention,
    FastWeightProgrammer,
    FeedbackTransformer,
    SoftmaxAttention,
    TransformerXL,
)
from fwlab.layers.block import new_norm, usual_d_ff
from fwlab.layers.fast_weight_attention import RULES
from fwlab.layers.one_token import call
from fwlab.models.tokens import check_range, check_tokens, tied_logits
from fwlab.ops import _operation as operation


class Size(NamedTuple):
    """Hold the sizes of a model, named as the arguments of `LanguageModel`."""

    layers: int
    heads: int
    d_model: int
    d_ff: int
    max_len: int
    dropout: float = 0.0
    attention_dropout: float = 0.0
    fast_weights: Mapping[str, Any] = {}
    softmax: Mapping[str, Any] = {}


class Mixer(NamedTuple):
    """Describe a layer that mixes tokens, and how a `LanguageModel` builds the layer.

    `Mixer(lambda s: FastWeightAttention(s.d_model, s.heads, DPFP(2)))` in place of a
    name makes a `LanguageModel` with a layer of your own.

    - `make`: makes the layer that mixes in each block, at the given size; if `whole`,
      the whole stack, whose layers depend on each other.
    - `positions`: add a table of learned positions to the embeddings. Softmax attention
      sees keys as a set: without a table it does not know their order. The same holds
      for AFT-simple, which has a table in its paper. Fast weights have none (nor do the
      paper's best delta networks, Table 3), and neither do mixers with biases or
      relative positions of their own. Without a table there is no maximum length.
    - `takes`: "fast_weights" or "softmax", the options of `LanguageModel` that `make`
      passes to its layer; "" = none.
    - `post_norm`: as for `layers.Block`.
    """

    make: Callable[[Size], nn.Module]
    whole: bool = False
    positions: bool = False
    takes: str = ""
    post_norm: bool = False


def _fast_weights(rule: str) -> Mixer:
    def make(s: Size) -> nn.Module:
        options = {"heads": s.heads, **s.fast_weights}
        like = options.pop("like", None)
        if like is None:
            return FastWeightAttention(s.d_model, rule=rule, **options)
        return FastWeightAttention.like(like, s.d_model, rule=rule, **options)

    return Mixer(make, takes="fast_weights")


def _softmax(s: Size) -> nn.Module:
    usual = {"heads": s.heads, "attention_dropout": s.attention_dropout}
    return SoftmaxAttention(s.d_model, **{**usual, **s.softmax})


def _feedback(shared: bool) -> Mixer:
    return Mixer(
        lambda s: FeedbackTransformer(
            s.d_model, s.heads, s.layers, s.d_ff, shared, dropout=s.dropout
        ),
        whole=True,
    )


MIXERS: dict[str, Mixer] = {
    "softmax": Mixer(_softmax, positions=True, takes="softmax"),
    "transformer-xl": Mixer(
        lambda s: TransformerXL(
            s.d_model,
            s.heads,
            s.layers,
            s.d_ff,
            # A training window holds a segment and a segment memory of equal length.
            memory=s.max_len // 2,
            segment=(s.max_len + 1) // 2,
            dropout=s.dropout,
            attention_dropout=s.attention_dropout,
        ),
        whole=True,
    ),
    **{rule.replace("_", "-"): _fast_weights(rule) for rule in RULES},
    "fwp": Mixer(lambda s: FastWeightProgrammer(s.d_model, s.heads)),
    "aft-simple": Mixer(lambda s: AFTSimple(s.d_model), positions=True),
    "aft-full": Mixer(lambda s: AFTFull(s.d_model, s.max_len)),
    "aft-local": Mixer(lambda s: AFTLocal(s.d_model, s.max_len, min(32, s.max_len))),
    "aft-conv": Mixer(lambda s: AFTConv(s.d_model, s.heads)),
    "feedback": _feedback(shared=False),
    "feedback-shared": _feedback(shared=True),
}
"""The mixers by name: how information passes from token to token."""

#: Options of blocks that a mixer for the whole stack requires.
USUAL = {"norm": "layer", "mlp": "gelu", "norm_eps": 1e-5}
#: Error texts: which mixers support `cu_seqlens`, and which support `key_mask`.
PACKS = (
    "a mixer that can keep packed documents apart with cu_seqlens (fast weights or "
    "aft-simple)"
)
SKIPS = (
    "a mixer that skips masked tokens (softmax, fast weights, fwp, aft-simple or "
    "feedback) for padding in prefill and generate, or before or between tokens"
)


class LanguageModel(nn.Module):
    r"""Build a language model of pre-norm blocks between tied embeddings, as in GPT-2.

    - `vocab_size`: number of tokens in the vocabulary, at least 1.
    - `mixer`: a name in `MIXERS`, or a `Mixer` of your own; or a list of them, one per
      layer, which is repeated if it is shorter and its length divides `layers`.
      `["gated-delta"] * 3 + ["softmax"]` is a hybrid stack, as in Qwen3-Next; so is the
      text "gated-delta*3,softmax".
    - `layers`, `heads`, `d_model`: depth, heads per layer, width. (Of the AFT mixers,
      only aft-conv has heads.)
    - `max_len`: maximum sequence length, for mixers with position tables (softmax,
      aft-simple, aft-full, aft-local); the others have none. transformer-xl takes
      segments of half this length.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`, and two thirds of it with
      "swiglu".
    - `dropout`: probability of dropout in training, from 0 to below 1: of embeddings
      with positions, of what every mixer and MLP adds to its input, and inside the
      MLPs.
    - `attention_dropout`: the same for attention weights. Only softmax and
      transformer-xl have it: AFT and fast weights compute no attention weights, and
      feedback does not drop them.
    - `fast_weights`: options of `FastWeightAttention` for the mixers that are rules of
      fast weights, such as `{"conv_size": 4, "out_norm": True}`. "like" among them is
      the name of a published layer, which `FastWeightAttention.like` knows and whose
      options the others change; the rule is the mixer's.
    - `softmax`: options of `SoftmaxAttention` for softmax. With "rope" among them it
      needs no table of positions; `{"rope": 0}` leaves it without any, and the layers
      with a decay in a hybrid stack know the order.
    - `norm`, `mlp`, `norm_eps`: as for `layers.Block`, in all blocks, and `norm` also
      before the logits.
    - `tied`: the embedding also computes the logits. If not, `to_logits` does.
    - Raises `ValueError` or `TypeError` for invalid sizes or names, or for options that
      no mixer of the stack has.

    No linear layer or norm has a bias. **Initial weights**: embeddings and linear
    layers normal with standard deviation 0.02; the two that end in the residual stream
    (the mixer's `to_out` and the second layer of the MLP, `contract`) with
    $0.02 / \sqrt{2 \cdot \text{layers}}$, so that the stream's variance does not grow
    with depth; norms 1; everything else as its layer defines it.

        >>> model = LanguageModel(65, "delta", layers=1, heads=2, d_model=8)
        >>> model.generate(torch.zeros(1, 3, dtype=torch.long), 5).shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        vocab_size: int,
        mixer: str | Mixer | Sequence[str | Mixer] = "delta",
        layers: int = 4,
        heads: int = 4,
        d_model: int = 128,
        max_len: int = 64,
        d_ff: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        *,
        fast_weights: Mapping[str, Any] | None = None,
        softmax: Mapping[str, Any] | None = None,
        norm: str = "layer",
        mlp: str = "gelu",
        norm_eps: float = 1e-5,
        tied: bool = True,
    ):
        super().__init__()
        arguments.dropout("LanguageModel", dropout)
        arguments.dropout("LanguageModel", attention_dropout, "attention_dropout")
        sizes = {"vocab_size": vocab_size, "layers": layers, "d_model": d_model}
        sizes |= {"max_len": max_len} | ({} if d_ff is None else {"d_ff": d_ff})
        arguments.integers("LanguageModel", 1, **sizes)
        arguments.flags("LanguageModel", tied=tied)
        stack = _stack(mixer, layers)
        d_ff = usual_d_ff(d_model, mlp) if d_ff is None else d_ff
        options = (
            _options("fast_weights", FastWeightAttention, fast_weights, stack),
            _options("softmax", SoftmaxAttention, softmax, stack),
        )
        drops = (dropout, attention_dropout)
        size = Size(layers, heads, d_model, d_ff, max_len, *drops, *options)
        form: dict[str, Any] = {"norm": norm, "mlp": mlp, "norm_eps": norm_eps}
        if stack[0].whole and form != USUAL:
            raise ValueError(
                "LanguageModel: expected blocks as usual for a mixer that replaces the "
                f"whole stack, {USUAL}, got {form}"
            )
        # Softmax attention with `rope` needs no table of positions.
        positions = any(
            m.positions and not (m.takes == "softmax" and "rope" in size.softmax)
            for m in stack
        )
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_len, d_model) if positions else None

        def block(m: Mixer) -> nn.Module:
            after = {**form, "post_norm": m.post_norm}
            return Block(m.make(size), d_model, d_ff, dropout, **after)

        # A mixer that replaces the stack of blocks is a single block.
        whole = stack[0].whole
        blocks = [stack[0].make(size)] if whole else [block(m) for m in stack]
        self.blocks: Any = nn.ModuleList(blocks)
        dropped = (getattr(m, "attention_dropout", 0) for m in self.blocks.modules())
        if attention_dropout and not any(dropped):
            raise ValueError(
                "LanguageModel: expected attention_dropout=0 for a mixer that drops "
                f"no attention weights, got {attention_dropout}"
            )
        self.norm = new_norm(norm, d_model, norm_eps)
        self.dropout = nn.Dropout(dropout)
        tables = (getattr(block, "max_len", None) for block in blocks)
        limited = positions or any(table is not None for table in tables)
        self.max_len = max_len if limited else None
        self.to_logits = None if tied else nn.Linear(d_model, vocab_size, bias=False)
        #: Save memory in training: keep only the inputs of blocks for backward passes.
        #: A function in place of True replaces `torch.utils.checkpoint.checkpoint`.
        self.checkpointing: bool | Callable[..., Any] = False

        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith((".to_out", ".contract"))
                std = 0.02 / (2 * layers) ** 0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=std)

    def start_from(self, trained: "LanguageModel") -> None:
        """Copy the weights of a trained model, as initial weights for training.

        - `trained`: a model of the same sizes, with the same mixer; for a Feedback
          Transformer also one with softmax attention, as
          `FeedbackTransformer.from_transformer` describes.
        - Raises `ValueError` for another vocabulary, mixer or size.
        """
        weights, stack = trained.state_dict(), self.blocks[0]
        if isinstance(stack, FeedbackTransformer) and not isinstance(
            trained.blocks[0], FeedbackTransformer
        ):
            begun = FeedbackTransformer.from_transformer(trained, stack.shared)
            weights = {
                name: weight
                for name, weight in weights.items()
                if not name.startswith(("blocks.", "positions."))
            } | {f"blocks.0.{name}": x for name, x in begun.state_dict().items()}
        try:
            self.load_state_dict(weights)
        except RuntimeError as error:
            reason = " ".join(str(error).split("\n")[1:2]).strip() or str(error)
            raise ValueError(
                f"start_from: expected a model of the same mixer and sizes ({reason})"
            ) from None

    def num_parameters(self) -> int:
        """Count the parameters, without position tables (as in nanoGPT).

        - Returns the count; tied embeddings count once.
        """
        owners: list[Any] = [m for m in self.modules() if hasattr(m, "position_tables")]
        uncounted = [p for m in owners for p in m.position_tables()]
        if self.positions is not None:
            uncounted += self.positions.parameters()
        total = sum(p.numel() for p in self.parameters())
        return total - sum(p.numel() for p in uncounted)

    def state_size(self, time: int) -> int:
        """Count the scalars of the state that `prefill` and `step` keep between tokens.

        - `time`: tokens so far.
        - Returns the count for one sequence, over all layers.
        """
        return sum(block.state_size(time) for block in self.blocks)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        hidden: list[Tensor] | None = None,
    ) -> Tensor:
        """Compute the logits of the next token at every position.

        - `tokens`: `int64 [batch, time]`, from 0 to `vocab_size - 1`.
        - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the borders of
          packed documents: none of them sees another one, and positions begin again.
          The batch is then 1. The mixers with fast weights and aft-simple take it.
        - `key_mask`: `bool [batch, time]`, True = real token. The others are padding,
          on any side, and may be any number. They are skipped: positions do not count
          them, and their logits are 0.
        - `implementation`: of all mixers, as for the operations of `fwlab.ops`. "naive"
          has second derivatives.
        - `hidden`: a list, to which all hidden states are appended, `[batch, time,
          d_model]`: the input of the first block and the output of each, the last after
          the norm.
        - Returns `[batch, time, vocab_size]`.
        - Raises `ValueError` beyond `max_len`, if the model has one, and for
          `cu_seqlens` with other mixers or with `key_mask`.
        """
        if cu_seqlens is not None and key_mask is not None:
            raise ValueError("LanguageModel: expected cu_seqlens or key_mask, got both")
        tokens = check_tokens("LanguageModel", tokens, self.vocab_size, key_mask)
        options: dict[str, Any] = {}
        if cu_seqlens is not None:
            operation.check_borders("LanguageModel", cu_seqlens, tokens)
            self._expect("packs", PACKS)
            options = {"cu_seqlens": cu_seqlens}
        # Padding at the end of a row needs no mask, since no real token sees it.
        elif key_mask is not None and (key_mask.diff(dim=1) & key_mask[:, 1:]).any():
            self._expect("skips", SKIPS)
            options = {"key_mask": key_mask}
        end = tokens.shape[1] if key_mask is None else key_mask.sum(1)
        x = self._embed(tokens, 0, end, key_mask, cu_seqlens)
        for block in self.blocks:
            if hidden is not None:
                hidden.append(x)
            x = self._through(block, x, implementation=implementation, **options)
        x = x if key_mask is None else x.where(key_mask[..., None], 0)
        return self._logits(x, hidden)

    def prefill(
        self,
        tokens: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        *,
        last: bool = False,
        hidden: list[Tensor] | None = None,
    ) -> tuple[Tensor, Any]:
        """Process part of a sequence, and return the state after it.

        - `tokens`: `int64 [batch, time]`.
        - `state`: what an earlier call returned; None = start of text.
        - `key_mask`: `bool [batch, time]`, True = real token, as in `forward`, of which
          only mixers that skip masked tokens take one. Each row continues from its own
          last real token.
        - `last`: only the logits of the last real token of each row,
          `[batch, vocab_size]`: with a large vocabulary, those of a whole prompt cost
          more than the rest.
        - `hidden`: as in `forward`; the last state only of the tokens that have logits.
        - Returns `(logits, state)`.
        - Raises `ValueError` as `forward` does, and for a row without a last token.
        """
        tokens = check_tokens("LanguageModel", tokens, self.vocab_size, key_mask)
        mask = None if key_mask is None or key_mask.all() else key_mask
        if mask is not None:
            self._expect("skips", SKIPS)
        counts: Any = tokens.shape[1] if mask is None else mask.sum(1)
        each = [counts] if mask is None else counts.tolist()
        if last and 0 in each:
            raise ValueError(
                "LanguageModel: expected at least one real token in every row, got "
                f"none in row {each.index(0)}"
            )
        past, parts = self._parts(state, len(tokens))
        after = [past + counts]
        x = self._embed(tokens, past, after[0], mask)
        options = {} if mask is None else {"key_mask": mask}
        for block, part in zip(self.blocks, parts, strict=True):
            if hidden is not None:
                hidden.append(x)
            x, part = self._through(block.prefill, x, part, **options)
            after.append(part)
        if mask is not None:
            x = x.where(mask[..., None], 0)
        if last:  # The cumulative mask reaches its maximum at the last True.
            end = counts - 1 if mask is None else mask.cumsum(1).argmax(1)
            x = x[torch.arange(len(x)), end]
        return self._logits(x, hidden), after

    def step(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Process one token of each sequence.

        - `tokens`: `int64 [batch]`.
        - `state`: as in `prefill`.
        - Returns `(logits, state)`, the logits `[batch, vocab_size]`.
        """
        column = check_tokens("LanguageModel", tokens[:, None], self.vocab_size)
        past, parts = self._parts(state, len(tokens))
        after = [past + 1]
        x = self._embed(column, past, after[0])[:, 0]
        for block, part in zip(self.blocks, parts, strict=True):
            x, part = block.step(x, part)
            after.append(part)
        return self._logits(x), after

    def _expect(self, attribute: str, wanted: str) -> None:
        """Raise `ValueError` unless the mixers of all blocks have an attribute."""
        for block in self.blocks:
            if not getattr(block, attribute, False):
                mixer = type(getattr(block, "mixer", block)).__name__
                raise ValueError(f"LanguageModel: expected {wanted}, got {mixer}")

    def _parts(self, state: Any, batch: int) -> tuple[Any, list]:
        """Split a state into the number of tokens so far and the state of each block.

        The number is one for all rows or, after padding, a tensor `[batch]`.
        """
        if state is None:
            return 0, [None] * len(self.blocks)
        past, *parts = state
        if isinstance(past, Tensor) and len(past) != batch:
            raise ValueError(
                f"LanguageModel: expected a state of {batch} sequences, got {len(past)}"
            )
        return past, parts

    def _through(self, block: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a block, with activation checkpointing if it is enabled."""
        if not (self.checkpointing and self.training and torch.is_grad_enabled()):
            return block(*inputs, **options)
        usual = functools.partial(checkpoint, use_reentrant=False)
        how = self.checkpointing if callable(self.checkpointing) else usual
        return how(functools.partial(block, **options), *inputs)

    def _embed(
        self,
        tokens: Tensor,
        past: int | Tensor,
        end: int | Tensor,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Embed tokens at positions from `past` to `end`, which may differ by row."""
        x = self.embedding(tokens)
        if self.max_len is not None:
            longest = _longest(end)
            each = torch.arange(tokens.shape[1], device=x.device)
            if cu_seqlens is not None:
                lengths = cu_seqlens.diff().tolist()
                longest, each = max(lengths), torch.cat([each[:n] for n in lengths])
            elif key_mask is not None:
                each = (key_mask.cumsum(1) - 1).clamp(min=0)
            if longest > self.max_len:
                raise ValueError(
                    f"LanguageModel: expected at most max_len={self.max_len} tokens, "
                    f"the length of the position table, got {longest}"
                )
            if self.positions is not None:
                begin = past[:, None] if isinstance(past, Tensor) else past
                x = x + self.positions(begin + each)
        return self.dropout(x) if self.dropout.p else x

    def _logits(self, x: Tensor, hidden: list[Tensor] | None = None) -> Tensor:
        x = call(self.norm, x)
        if hidden is not None:
            hidden.append(x)
        if self.to_logits is not None:
            return call(self.to_logits, x)
        return tied_logits(x, self.embedding, self.vocab_size)

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        *,
        key_mask: Tensor | None = None,
        stop: int | None = None,
    ) -> Tensor:
        """Continue a prompt, one token at a time, with `step`.

        - `prompt`: `int64 [batch, time]`, at least one token.
        - `max_new_tokens`: number of tokens to add, 0 or more.
        - `temperature`: divides the logits; 0 takes the most likely token.
        - `top_k`: sample from the `k` most likely tokens; None = from all.
        - `seed`: the same seed gives the same text; None = PyTorch's own generator.
        - `key_mask`: as in `prefill`, for prompts of unequal length in one batch: each
          row continues from its own last real token.
        - `stop`: the token that ends a text; None = none does. It fills the rest of its
          row.
        - Returns `int64 [batch, time + max_new_tokens]`, the prompt as it is and then
          the new tokens: fewer of them, once all rows have stopped.
        - Raises `ValueError` for an argument out of range.

        Fast weight models need constant memory. When the text becomes longer than
        `max_len`, a model that has one continues from the last `max_len` tokens, and
        warns once. In training mode dropout acts here, too: call `eval()` first.
        """
        new = self._stream(
            prompt, max_new_tokens, temperature, top_k, seed, key_mask, stop
        )
        return torch.cat([prompt, *(tokens[:, None] for tokens in new)], 1)

    @torch.no_grad()
    def _stream(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        seed: int | None,
        key_mask: Tensor | None = None,
        stop: int | None = None,
    ) -> Iterator[Tensor]:
        """Yield the new tokens of `generate` one step at a time, each `[batch]`."""
        check_tokens("generate", prompt, self.vocab_size, key_mask, "prompt")
        wanted = f"prompt of at least one token, got shape {list(prompt.shape)}"
        arguments.require("generate", prompt.shape[1], wanted)
        arguments.integers("generate", 0, max_new_tokens=max_new_tokens)
        check_range(1, torch.inf, top_k=top_k)
        check_range(0, 2**63 - 1, seed=seed)
        check_range(0, self.vocab_size - 1, stop=stop)
        arguments.numbers(
            "generate", "0 or more", lambda x: x >= 0, temperature=temperature
        )
        generator = None
        if seed is not None:
            generator = torch.Generator(prompt.device).manual_seed(seed)
        if key_mask is None:
            key_mask = torch.ones_like(prompt, dtype=torch.bool)

        text, state, warned = [prompt], None, False
        stopped = torch.zeros_like(prompt[:, 0], dtype=torch.bool)
        for count in range(max_new_tokens):
            if state is None or _longest(state[0]) == self.max_len:
                past, real = torch.cat(text, 1), F.pad(key_mask, (0, count), value=True)
                if self.max_len is not None:
                    ahead = real.flip(1).cumsum(1).flip(1)  # Count real tokens ahead.
                    if not warned and (ahead[~stopped, 0] > self.max_len).any():
                        warnings.warn(
                            f"the text is longer than max_len={self.max_len}: "
                            "continuing from its last tokens",
                            stacklevel=3,
                        )
                        warned = True
                    real = real & (ahead <= self.max_len)
                    past, real = past[:, real.any(0)], real[:, real.any(0)]
                logits, state = self.prefill(past, key_mask=real, last=True)
            else:
                logits, state = self.step(text[-1][:, 0], state)
            new = draw(logits, temperature, top_k, generator)
            if stop is not None:
                new = new.masked_fill(stopped, stop)
                stopped = new == stop
            text.append(new[:, None])
            yield new
            if stop is not None and stopped.all():
                return


def _longest(tokens: int | Tensor) -> int:
    """Return the number of tokens that the longest row of the batch has read."""
    return int(tokens.max()) if isinstance(tokens, Tensor) else tokens


def _stack(mixer: Any, layers: int) -> list[Mixer]:
    """Return a mixer per layer, repeating a list whose length must divide `layers`."""
    named = [mixer]
    if isinstance(mixer, str):
        named = [name for part in mixer.split(",") for name in _repeated(part, layers)]
    elif isinstance(mixer, Sequence) and not isinstance(mixer, Mixer):
        named = [*mixer]
    period = []
    for each in named:
        if not isinstance(each, Mixer):
            name = each.replace("_", "-") if isinstance(each, str) else each
            arguments.choice("LanguageModel", MIXERS, mixer=name)
            each = MIXERS[name]
        period.append(each)
    if not period or layers % len(period):
        raise ValueError(
            "LanguageModel: expected a number of mixers that divides "
            f"layers={layers}, got {len(period)}"
        )
    if len(period) > 1 and any(each.whole for each in period):
        raise ValueError(
            "LanguageModel: expected a mixer that replaces the whole stack to be the "
            f"only one, got {mixer!r}"
        )
    return period * (layers // len(period))


def _repeated(part: str, layers: int) -> list[str]:
    """Expand an entry such as "gated-delta*3" into repeated names."""
    name, star, count = (text.strip() for text in part.partition("*"))
    if star and not (count.isdecimal() and 0 < int(count) <= layers):
        raise ValueError(
            "LanguageModel: expected a number of layers after each * of mixer, as in "
            f"'gated-delta*3,softmax', from 1 to layers={layers}, got {part!r}"
        )
    return [name] * int(count or 1)


def _options(
    argument: str, layer: type, options: Any, stack: list[Mixer]
) -> Mapping[str, Any]:
    """Check the names of a layer's options, and return the options."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(
            f"LanguageModel: expected {argument} to be a dict of options of "
            f"{layer.__name__}, got {options!r}"
        )
    known = inspect.signature(layer).parameters.keys() - {"d_model", "rule"}
    known |= {"like"} if hasattr(layer, "like") else set()
    for name in options:
        named = {f"options in {argument}": name}
        arguments.choice("LanguageModel", sorted(known), **named)
    if options and not any(each.takes == argument for each in stack):
        raise ValueError(
            f"LanguageModel: expected no {argument} without a mixer that has such "
            f"options, got {dict(options)}"
        )
    return options


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw one token per row of logits: `[batch, vocab]` to `[batch]`."""
    if temperature < torch.finfo(logits.dtype).tiny:  # Division would give 0/0.
        return logits.argmax(-1)
    # Subtract the largest logit first, so that no temperature causes an overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        # Of equally likely tokens, take the first ones, as argmax does.
        order = logits.argsort(dim=-1, descending=True, stable=True)
        logits = logits.scatter(-1, order[:, top_k:], -torch.inf)
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
