"""A language model built of layers, and sampling from it."""

import inspect
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
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
from fwlab.models.tokens import check_tokens, tied_logits
from fwlab.ops import _operation as operation


class Size(NamedTuple):
    """The size of a model; the names are those of `LanguageModel`."""

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
    """How information passes from token to token.

    `Mixer(lambda s: FastWeightAttention(s.d_model, s.heads, DPFP(2)))` in
    place of a name makes a `LanguageModel` with a layer of your own.

    - `make`: makes the layer that mixes in each block, at the given size;
      if `whole`, the whole stack, whose layers depend on each other.
    - `positions`: add a table of learned positions to the embeddings.
      Softmax attention sees keys as a set: without a table it does not
      know their order. The same holds for AFT-simple, which has a table
      in its paper. Fast weights have none (nor do the paper's best delta
      networks, Table 3), and neither do mixers with biases or relative
      positions of their own. Without a table there is no maximum length.
    - `takes`: "fast_weights" or "softmax", the options of `LanguageModel`
      that `make` passes to its layer; "" = none.
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


class RowStates(NamedTuple):
    """The state of rows that were computed one after the other.

    - `rows`: the state of each, as of a batch of one.
    """

    rows: list


MIXERS: dict[str, Mixer] = {
    "softmax": Mixer(_softmax, positions=True, takes="softmax"),
    "transformer-xl": Mixer(
        lambda s: TransformerXL(
            s.d_model,
            s.heads,
            s.layers,
            s.d_ff,
            # Half and half: a training window holds a segment with memory.
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

#: The layers whose options a model passes on, by the name of its argument.
OPTIONS: dict[str, type] = {
    "fast_weights": FastWeightAttention,
    "softmax": SoftmaxAttention,
}
#: The form of the blocks of a mixer that replaces the whole stack.
USUAL = {"norm": "layer", "mlp": "gelu", "norm_eps": 1e-5}


class LanguageModel(nn.Module):
    r"""Pre-norm blocks between tied embeddings (the form of GPT-2).

    - `vocab_size`: number of tokens in the vocabulary, at least 1.
    - `mixer`: a name in `MIXERS`, or a `Mixer` of your own; or a list of them,
      one per layer, which is repeated if it is shorter and its length divides
      `layers`. `["gated-delta"] * 3 + ["softmax"]` is a hybrid stack, as in
      Qwen3-Next; so is the text "gated-delta*3,softmax".
    - `layers`, `heads`, `d_model`: depth, heads per layer, width. (Of the
      AFT mixers, only aft-conv has heads.)
    - `max_len`: maximum sequence length, for mixers with position tables
      (softmax, aft-simple, aft-full, aft-local); the others have none.
      transformer-xl takes segments of half this length.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`, and two thirds of it
      with "swiglu".
    - `dropout`: probability of dropout in training, from 0 to below 1: of
      embeddings with positions, of what every mixer and MLP adds to its
      input, and inside the MLPs.
    - `attention_dropout`: the same for attention weights. Only softmax
      and transformer-xl have it: AFT and fast weights compute no
      attention weights, and feedback does not drop them.
    - `fast_weights`: options of `FastWeightAttention` for the mixers that are
      rules of fast weights, such as `{"conv_size": 4, "out_norm": True}`. "like"
      among them is the name of a published layer, which `FastWeightAttention.like` knows
      and whose options the others change; the rule is the mixer's.
    - `softmax`: options of `SoftmaxAttention` for softmax. With "rope" among them
      it needs no table of positions; `{"rope": 0}` leaves it without any, and
      the layers with a decay in a hybrid stack know the order.
    - `norm`, `mlp`, `norm_eps`: as for `layers.Block`, in all blocks, and `norm` also
      before the logits.
    - `tied`: the embedding also computes the logits. If not, `to_logits` does.
    - Raises `ValueError` or `TypeError` for invalid sizes or names, or for
      options that no mixer of the stack has.

    No linear layer or norm has a bias. **Initial weights**: embeddings
    and linear layers normal with standard deviation 0.02; the two that
    end in the residual stream (the mixer's `to_out` and the second layer
    of the MLP, `contract`) with $0.02 / \sqrt{2 \cdot \text{layers}}$,
    so that the stream's variance does not grow with depth; norms 1;
    everything else as its layer defines it.

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
        arguments.integers("LanguageModel", 1, layers=layers)
        stack = _stack(mixer, layers)
        options: Any = _options(stack, fast_weights=fast_weights, softmax=softmax)
        checked = {"vocab_size": vocab_size, "d_model": d_model, "max_len": max_len}
        arguments.integers("LanguageModel", 1, **checked)
        d_ff = usual_d_ff(d_model, mlp) if d_ff is None else d_ff
        arguments.integers("LanguageModel", 1, d_ff=d_ff)
        arguments.flags("LanguageModel", tied=tied)
        sizes = layers, heads, d_model, d_ff, max_len
        size = Size(*sizes, dropout, attention_dropout, **options)
        form: dict[str, Any] = {"norm": norm, "mlp": mlp, "norm_eps": norm_eps}
        whole = stack[0].whole
        if whole and form != USUAL:
            raise ValueError(
                "LanguageModel: expected blocks as usual for a mixer that replaces the "
                f"whole stack, {USUAL}, got {form}"
            )
        # With rotary positions or none, softmax needs no table.
        positions = any(
            m.positions and not (m.takes == "softmax" and "rope" in size.softmax)
            for m in stack
        )
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_len, d_model) if positions else None
        blocks = (
            [stack[0].make(size)]
            if whole
            else [
                Block(
                    m.make(size), d_model, d_ff, dropout, post_norm=m.post_norm, **form
                )
                for m in stack
            ]
        )
        if attention_dropout and not any(
            getattr(module, "attention_dropout", 0)
            for block in blocks
            for module in block.modules()
        ):
            raise ValueError(
                "LanguageModel: expected attention_dropout=0 for a mixer that drops "
                f"no attention weights, got {attention_dropout}"
            )
        # A whole stack is a chain of one block.
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = new_norm(norm, d_model, norm_eps)
        self.dropout = nn.Dropout(dropout)
        limited = positions or any(
            getattr(block, "max_len", None) is not None for block in blocks
        )
        self.max_len = max_len if limited else None
        self.to_logits = None if tied else nn.Linear(d_model, vocab_size, bias=False)
        #: Set this to save memory in training: only the inputs of each block
        #: are kept for the backward pass, which computes the rest again.
        self.checkpointing = False

        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                residual = name.endswith((".to_out", ".contract"))
                std = 0.02 / (2 * layers) ** 0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=std)

    def start_from(self, trained: "LanguageModel") -> None:
        """Take over the weights of a trained model, as a start for training.

        - `trained`: a model of the same sizes, with the same mixer; for a
          Feedback Transformer also one with softmax attention, as
          `FeedbackTransformer.from_transformer` describes.
        - Raises `ValueError` for another vocabulary, mixer or size.
        """
        if trained.vocab_size != self.vocab_size:
            raise ValueError(
                f"start_from: expected {self.vocab_size} tokens, got a model of "
                f"{trained.vocab_size}"
            )
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
        """Number of parameters, without position tables (as in nanoGPT).

        - Returns the count; tied embeddings count once.
        """
        owners: list[Any] = [m for m in self.modules() if hasattr(m, "position_tables")]
        uncounted = [p for m in owners for p in m.position_tables()]
        if self.positions is not None:
            uncounted += self.positions.parameters()
        total = sum(p.numel() for p in self.parameters())
        return total - sum(p.numel() for p in uncounted)

    def state_size(self, time: int) -> int:
        """Number of scalars that `prefill` and `step` carry from token to token.

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
    ) -> Tensor:
        """Logits of the next token at every position.

        - `tokens`: `int64 [batch, time]`, from 0 to `vocab_size - 1`.
        - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the
          borders of packed documents: none of them sees another one, and
          positions begin again. The batch is then 1. The mixers with fast
          weights and aft-simple take it.
        - `key_mask`: `bool [batch, time]`, True = real token. The others
          are padding, on any side, and may be any number. They are skipped:
          positions do not count them, and their logits are 0.
        - `implementation`: of all mixers, as for the operations of `fwlab.ops`.
          "naive" has second derivatives.
        - Returns `[batch, time, vocab_size]`.
        - Raises `ValueError` beyond `max_len`, if the model has one, and
          for `cu_seqlens` with other mixers or with `key_mask`.
        """
        # With the padding at the end, a causal model needs no mask.
        tokens, _, _ = _real_first(tokens, key_mask, self.vocab_size)
        options: dict[str, Any] = {}
        if cu_seqlens is not None:
            if key_mask is not None:
                raise ValueError(
                    "LanguageModel: expected cu_seqlens or key_mask, got both"
                )
            operation.check_borders("LanguageModel", cu_seqlens, tokens)
            for block in self.blocks:
                if not getattr(block, "packs", False):
                    mixer = type(getattr(block, "mixer", block)).__name__
                    raise ValueError(
                        "LanguageModel: expected a mixer that can keep packed "
                        "documents apart with cu_seqlens (fast weights or "
                        f"aft-simple), got {mixer}"
                    )
            options = {"cu_seqlens": cu_seqlens}
        x = self._embed(tokens, 0, tokens.shape[1], **options)
        for block in self.blocks:
            x = self._through(block, x, implementation=implementation, **options)
        return self._logits(_back(x, key_mask))

    def prefill(
        self,
        tokens: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        *,
        last: bool = False,
    ) -> tuple[Tensor, Any]:
        """Process part of a sequence, and return the state after it.

        - `tokens`: `int64 [batch, time]`.
        - `state`: what an earlier call returned; None = start of text.
        - `key_mask`: as in `forward`. Each row continues from its own last
          real token. If rows differ in their number, mixers that give
          padding a place of its own compute them one after the other.
        - `last`: only the logits of the last real token of each row,
          `[batch, vocab_size]`: with a large vocabulary, those of a whole
          prompt cost more than the rest.
        - Returns `(logits, state)`.
        - Raises `ValueError` as `forward` does, and for a row without a
          last token.
        """
        tokens, mask, new = _real_first(tokens, key_mask, self.vocab_size)
        counts = new if isinstance(new, tuple) else (new,)
        if last and 0 in counts:
            raise ValueError(
                "LanguageModel: expected at least one real token in every row, got "
                f"none in row {counts.index(0)}"
            )
        skips = all(getattr(block, "skips", False) for block in self.blocks)
        if isinstance(state, RowStates) or not (mask is None or skips):
            logits, state = self._by_row(tokens, state, new, last)
            return logits if last else _back(logits, key_mask), state
        past, parts = self._parts(state, len(tokens))
        after: list = [_more(past, new)]
        x = self._embed(tokens, past, after[0])
        options = {} if mask is None else {"key_mask": mask}
        for block, part in zip(self.blocks, parts, strict=True):
            x, part = self._through(block.prefill, x, part, **options)
            after.append(part)
        x = _last(x, new) if last else _back(x, key_mask)
        return self._logits(x), after

    def _by_row(
        self, tokens: Tensor, state: Any, new: int | tuple[int, ...], last: bool
    ) -> tuple[Tensor, RowStates]:
        """`prefill`, one row after the other: each has a state of its own."""
        batch, time = tokens.shape
        if not isinstance(state, RowStates):
            state = RowStates([_row(state, i) for i in range(batch)])
        _check_batch(state.rows, batch)
        counts = new if isinstance(new, tuple) else repeat(new)
        rows = [
            self.prefill(row[:, :count], part, last=last)
            for row, count, part in zip(
                tokens.split(1), counts, state.rows, strict=False
            )
        ]
        logits = [y for y, _ in rows]
        if not last:
            logits = [F.pad(y, (0, 0, 0, time - y.shape[1])) for y in logits]
        return torch.cat(logits), RowStates([part for _, part in rows])

    def _parts(self, state: Any, batch: int) -> tuple[Any, list]:
        """The number of tokens so far, and the state of each block."""
        if state is None:
            return 0, [None] * len(self.blocks)
        past, *parts = state
        if isinstance(past, tuple):
            _check_batch(past, batch)
        return past, parts

    def _through(self, block: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Run a block; with `checkpointing`, keep only its inputs."""
        if self.checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, **options)
        return block(*inputs, **options)

    def step(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Process one token of each sequence.

        - `tokens`: `int64 [batch]`.
        - `state`: as in `prefill`.
        - Returns `(logits, state)`, the logits `[batch, vocab_size]`.
        """
        if isinstance(state, RowStates):
            _check_batch(state.rows, len(tokens))
            rows = list(map(self.step, tokens.split(1), state.rows))
            return torch.cat([y for y, _ in rows]), RowStates([s for _, s in rows])
        column, _, _ = _real_first(tokens[:, None], None, self.vocab_size)
        past, parts = self._parts(state, len(tokens))
        after: list = [_more(past, 1)]
        x = self._embed(column, past, after[0])[:, 0]
        for block, part in zip(self.blocks, parts, strict=True):
            x, part = block.step(x, part)
            after.append(part)
        return self._logits(x), after

    def _embed(
        self,
        tokens: Tensor,
        past: int | tuple[int, ...],
        end: int | tuple[int, ...],
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Embeddings with positions `past` to `end`, of all rows or of each."""
        x = self.embedding(tokens)
        longest, lengths = _longest(end), None
        if cu_seqlens is not None and self.max_len is not None:
            lengths = cu_seqlens.diff().tolist()
            longest = max(lengths)
        if self.max_len is not None and longest > self.max_len:
            raise ValueError(
                f"LanguageModel: expected at most max_len={self.max_len} tokens, the "
                f"length of the position table, got {longest}"
            )
        if self.positions is not None:
            each = torch.arange(tokens.shape[1], device=x.device)
            if lengths is not None:
                each = torch.cat([each[:n] for n in lengths])
            elif isinstance(past, tuple):
                each = x.new_tensor(past, dtype=each.dtype)[:, None] + each
                each = each.clamp(max=longest - 1)  # of padding
            else:
                each = each + past
            x = x + self.positions(each)
        return self.dropout(x) if self.dropout.p else x

    def _logits(self, x: Tensor) -> Tensor:
        x = call(self.norm, x)
        if self.to_logits is not None:
            return call(self.to_logits, x)
        return tied_logits(x, self.embedding, self.vocab_size)

    @torch.no_grad()
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
        - `seed`: the same seed gives the same text; None = PyTorch's own
          generator.
        - `key_mask`: as in `forward`, for prompts of unequal length in one
          batch: each row continues from its own last real token.
        - `stop`: the token that ends a text; None = none does. It fills the
          rest of its row.
        - Returns `int64 [batch, time + max_new_tokens]`, the prompt as it is
          and then the new tokens: fewer of them, once all rows have stopped.
        - Raises `ValueError` for an argument out of range.

        Fast weight models need constant memory. When the text becomes
        longer than `max_len`, a model that has one continues from the
        last `max_len` tokens, and warns once. In training mode dropout
        acts here, too: call `eval()` first.
        """
        operation.check_dense("generate", "prompt", prompt)
        if prompt.dim() != 2 or prompt.shape[1] == 0:
            raise ValueError(
                "generate: expected prompt of shape [batch, time] with at least one "
                f"token, got {list(prompt.shape)}"
            )
        if key_mask is None:
            key_mask = torch.ones_like(prompt, dtype=torch.bool)
        batch, time = prompt.shape
        operation.check_mask(
            "generate", "key_mask", key_mask, prompt, batch=batch, time=time
        )
        arguments.integers("generate", 0, max_new_tokens=max_new_tokens)
        if stop is not None:
            arguments.integers("generate", 0, stop=stop)
            if stop >= self.vocab_size:
                raise ValueError(
                    f"generate: expected stop from 0 to {self.vocab_size - 1}, "
                    f"got {stop}"
                )
        if not temperature >= 0:
            raise ValueError(
                f"generate: expected temperature to be 0 or more, got {temperature}"
            )
        if top_k is not None:
            arguments.integers("generate", 1, top_k=top_k)
        if seed is not None and not 0 <= seed < 2**63:
            raise ValueError(f"generate: expected seed from 0 to 2**63 - 1, got {seed}")
        generator = None
        if seed is not None:
            generator = torch.Generator(prompt.device).manual_seed(seed)

        text, state, warned = [prompt], None, False
        stopped = torch.zeros_like(prompt[:, 0], dtype=torch.bool)
        for _ in range(max_new_tokens):
            if state is None or _length(state) == self.max_len:
                past = torch.cat(text, dim=1)
                real = F.pad(key_mask, (0, past.shape[1] - time), value=True)
                if self.max_len is not None:
                    ahead = real.flip(1).cumsum(1).flip(1)  # from here to the end
                    if not warned and (ahead[~stopped, 0] > self.max_len).any():
                        warnings.warn(
                            f"the text is longer than max_len={self.max_len}: "
                            "continuing from its last tokens",
                            stacklevel=2,
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
                stopped = stopped | (new == stop)
            text.append(new[:, None])
            if stop is not None and stopped.all():
                break
        return torch.cat(text, dim=1)


def _stack(mixer: Any, layers: int) -> list[Mixer]:
    """One mixer per layer; raises unless their number divides that of the layers."""
    counted: list[tuple[Any, int]] = [(mixer, 1)]
    if isinstance(mixer, str):
        counted = [_counted(part) for part in mixer.split(",")]
    elif isinstance(mixer, Sequence) and not isinstance(mixer, Mixer):
        counted = [(each, 1) for each in mixer]
    for each, _ in counted:
        if not isinstance(each, Mixer):
            arguments.choice("LanguageModel", MIXERS, mixer=_hyphens(each))
    total = sum(count for _, count in counted)
    if not total or layers % total:
        raise ValueError(
            "LanguageModel: expected a number of mixers that divides "
            f"layers={layers}, got {total}"
        )
    period = [
        each if isinstance(each, Mixer) else MIXERS[_hyphens(each)]
        for each, count in counted
        for _ in range(count)
    ]
    if total > 1 and any(each.whole for each in period):
        raise ValueError(
            "LanguageModel: expected a mixer that replaces the whole stack to be the "
            f"only one, got {mixer!r}"
        )
    return period * (layers // total)


def _hyphens(mixer: Any) -> Any:
    """Spell the name of a mixer as `MIXERS` does: `gated_delta` is "gated-delta"."""
    return mixer.replace("_", "-") if isinstance(mixer, str) else mixer


def _counted(part: str) -> tuple[str, int]:
    """A name, and for how many layers it is: 1, or what follows a star."""
    name, star, count = (text.strip() for text in part.partition("*"))
    if star and not (count.isdecimal() and int(count)):
        raise ValueError(
            "LanguageModel: expected a number of layers after each * of mixer, as in "
            f"'gated-delta*3,softmax', got {part!r}"
        )
    return name, int(count) if star else 1


def _options(stack: list[Mixer], **given: Any) -> dict[str, Mapping[str, Any]]:
    """The options of layers, after their checks; the layers check the values."""
    for argument, options in given.items():
        if options is None:
            given[argument] = {}
            continue
        layer = OPTIONS[argument]
        if not isinstance(options, Mapping):
            raise TypeError(
                f"LanguageModel: expected {argument} to be a dict of options of "
                f"{layer.__name__}, got {options!r}"
            )
        known = inspect.signature(layer).parameters.keys() - {"d_model", "rule"}
        if hasattr(layer, "like"):
            known |= {"like"}
        for name in options:
            if name not in known:
                raise ValueError(
                    f"LanguageModel: expected {argument} to have options of "
                    f"{layer.__name__}, {', '.join(sorted(known))}, got {name!r}"
                )
        if options and not any(each.takes == argument for each in stack):
            raise ValueError(
                f"LanguageModel: expected no {argument} without a mixer that has such "
                f"options, got {dict(options)}"
            )
    return given


def _real_first(
    tokens: Tensor, key_mask: Tensor | None, vocab_size: int
) -> tuple[Tensor, Tensor | None, int | tuple[int, ...]]:
    """The real tokens first, in their order, and their number in each row.

    - Returns tokens, their mask and the numbers; if all rows have as many,
      no mask and one number.
    - Raises `ValueError` or `TypeError` for wrong tokens or a wrong mask.
    """
    if key_mask is not None:
        operation.check_dense("LanguageModel", "tokens", tokens)
        sizes = dict(zip(("batch", "time"), tokens.shape, strict=False))
        operation.check_mask("LanguageModel", "key_mask", key_mask, tokens, **sizes)
        if tokens.shape == key_mask.shape:
            tokens = tokens.where(key_mask, 0)
    check_tokens("LanguageModel", "tokens", tokens, vocab_size)
    if key_mask is None:
        return tokens, None, tokens.shape[1]
    counts = key_mask.sum(1).tolist()
    order = (~key_mask).int().argsort(dim=1, stable=True)
    order = order[:, : max(counts, default=0)]
    tokens = tokens.gather(1, order)
    if len(set(counts)) <= 1:
        return tokens, None, tokens.shape[1]
    return tokens, key_mask.gather(1, order), tuple(counts)


def _last(x: Tensor, counts: int | tuple[int, ...]) -> Tensor:
    """The last real step of each row: `[batch, time, ...]` to `[batch, ...]`."""
    if not isinstance(counts, tuple):
        return x[:, counts - 1]
    return x[torch.arange(len(x)), torch.tensor(counts) - 1]


def _back(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """`[batch, real first, ...]` at the places of the tokens, with 0 for padding."""
    if key_mask is None:
        return x
    if x.shape[1] == 0:
        return x.new_zeros(*key_mask.shape, x.shape[-1])
    place = (key_mask.cumsum(1) - 1).clamp(min=0)
    return torch.where(key_mask[..., None], x.take_along_dim(place[..., None], 1), 0)


# Numbers of tokens: of all rows, or, once padding made them differ, a tuple. In a
# traced call a number is no `int`.
def _more(past: int | tuple[int, ...], new: int | tuple[int, ...]) -> Any:
    if not (isinstance(past, tuple) or isinstance(new, tuple)):
        return past + new
    rows = (n if isinstance(n, tuple) else repeat(n) for n in (past, new))
    return tuple(map(operator.add, *rows))


def _longest(tokens: int | tuple[int, ...]) -> int:
    return max(tokens) if isinstance(tokens, tuple) else tokens


def _length(state: Any) -> int:
    """The number of tokens of the longest row so far."""
    if isinstance(state, RowStates):
        return max(map(_length, state.rows))
    return _longest(state[0])


def _row(state: Any, i: int) -> Any:
    """The state of one row: all tensors of a state begin with the batch."""
    if isinstance(state, Tensor):
        return state[i : i + 1]
    if isinstance(state, tuple | list):
        parts = [_row(part, i) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)
    return state


def _check_batch(rows: tuple | list, batch: int) -> None:
    if len(rows) != batch:
        raise ValueError(
            f"LanguageModel: expected a state of {batch} sequences, got {len(rows)}"
        )


def draw(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw one token per row of logits: `[batch, vocab]` to `[batch]`."""
    if temperature < torch.finfo(logits.dtype).tiny:  # dividing by it is 0/0
        return logits.argmax(-1)
    # The largest logit becomes 0 first, so that no temperature overflows it.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None:
        # Of equally likely tokens, take the first ones, as argmax does.
        order = logits.argsort(dim=-1, descending=True, stable=True)
        logits = logits.scatter(-1, order[:, top_k:], -torch.inf)
    return torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
