r"""Attention whose memory is a fast weight matrix per head.

The slow weights are the projections, trained by gradient descent. They
program the fast weights $W$: each step they say what to write, where,
how strongly, and how much of the rest to forget.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments, ops
from fwlab.feature_maps import DPFP, KEY_NORMS, FeatureMap, Identity
from fwlab.layers import gates
from fwlab.layers.causal import Causal
from fwlab.layers.heads import (
    check_input,
    normed,
    project,
    real_tokens,
    run,
    shared_heads,
    split_heads,
    watched,
)
from fwlab.layers.heads import head_width as width_of_head
from fwlab.layers.short_convolution import ShortConvolution, can_step
from fwlab.ops.call import checks, packed, units
from fwlab.ops.call.rule import Rule

#: Features that are smaller, next to a largest one of 1, need float64.
LEAST = 1e-26
State = Tensor | ops.NormalizedState | ops.ScaledState | ops.ConvState


#: The rules that have a layer, by name: their records say the rest.
RULES = {
    record.mixer.replace("-", "_"): record
    for record in ops.TABLE.values()
    if isinstance(record, Rule) and record.mixer
}
#: The functions of `out_gate`, by name.
OUT_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class Preset(NamedTuple):
    """A published layer.

    - `options`: what it sets besides its sizes.
    - `source`: the paper, and the code that it agrees with.
    """

    options: Mapping[str, Any]
    source: str


def _preset(source: str, **options: Any) -> Preset:
    """One whose keys have length 1, and no other features."""
    shared = {"key_norm": "l2", "key_eps": 1e-6, "scale": "softmax"}
    return Preset({**shared, "conv_size": 4, "out_norm": True, **options}, source)


#: The layers of `FastWeightAttention.like`, by name.
PRESETS = {
    "delta-net": _preset(
        "Yang et al. 2024, arXiv:2406.06484; DeltaNet of flash-linear-attention",
        rule="delta",
    ),
    "gated-delta-net": _preset(
        "Yang et al. 2024, arXiv:2412.06464; GatedDeltaNet of flash-linear-attention",
        **{"rule": "gated_delta", "expand_v": 2, "out_gate": "silu"},
    ),
    "qwen3.5": _preset(
        "Qwen3-Next and Qwen3.5: Qwen3_5GatedDeltaNet of transformers",
        **{"rule": "gated_delta", "out_gate": "silu", "norm_eps": 1e-6},
    ),
    "olmo-hybrid": _preset(
        "Olmo Hybrid, arXiv:2604.03444: OlmoHybridGatedDeltaNet of transformers",
        **{"rule": "gated_delta", "expand_v": 2, "out_gate": "silu", "beta_max": 2},
    ),
    "kimi": _preset(
        "Kimi Linear, arXiv:2510.26692: KimiLinearDeltaAttention of transformers",
        **{"rule": "kimi_delta", "out_gate": "sigmoid", "low_rank_gate": True},
    ),
}


class FastWeightAttention(Causal):
    r"""Multi-head fast weight memory.

    $q, k, v = W_q x, W_k x, W_v x$ per head, features $\phi(q), \phi(k)$, the gates of
    the rule, then the rule, then an output projection. No projection has a bias, as in
    Schlag et al. 2021. The record of a rule has its gates and its defaults; a table of
    them is on the page "One equation, ten rules".

    Arguments:

    - `d_model`: width of the input; a multiple of `heads`, or any with `head_width`.
    - `heads`: number of heads, each with its own memory.
    - `feature_map`: a `FeatureMap`; None takes the rule's default.
    - `rule`: the name of a rule in that table, such as "gated_delta".
    - `key_norm`: "sum", "l2" or None, applied to keys and queries after
      the feature map; "auto" takes the rule's default.
    - `normalize`: divide by the sum of the keys (Eqs. 19, 26-28); None
      takes the rule's default.
    - Raises `ValueError` or `TypeError` for what does not fit.

    Options of today's models, all off (see "Options of
    `FastWeightAttention`" on the page of the layers):

    - `head_width`: width of the queries and keys of a head; None = `d_model / heads`.
    - `kv_heads`: number of heads of keys and values, at most `heads`; None = `heads`.
      The queries of `heads / kv_heads` consecutive heads read one memory. Keys,
      values, gates and the state are that much smaller.
    - `value_heads`: number of heads of values, at least `heads`; None = `kv_heads`.
      `value_heads / heads` consecutive ones share a query and a key; each has its
      own gates and its own memory. Not together with `kv_heads`.
    - `expand_v`: width of the values of a head, in units of the width of its keys.
    - `key_eps`: divide keys and queries by $\sqrt{|k|^2 + \epsilon}$ with this
      $\epsilon$, for `key_norm="l2"`. 0 divides by the length.
    - `scale`: a factor of the queries, for a rule that does not normalize; "softmax" =
      1 / sqrt(width of a head), as in softmax attention; None = 1.
    - `conv_size`: if not 0, queries, keys and values pass a
      `ShortConvolution` over this many tokens before the feature map.
    - `out_norm`: divide what each head reads by its root mean square,
      and multiply it by trained weights: `torch.nn.RMSNorm`.
    - `norm_eps`: added to the mean square in `out_norm`.
    - `out_gate`: multiply what each head reads by $\mathrm{SiLU}(W_g x)$, after
      the norm: True or "silu". "sigmoid" = by $\sigma(W_g x)$.
    - `low_rank_gate`: make $W_g$ as the product of two matrices, with the width of a
      head between them.
    - `beta_max`: the maximum of $\beta$ (or of the erasing gate) in a rule that
      corrects, above 0 and at most 2. A step multiplies what a key $k$ holds by
      $1 - \beta |k|^2$: with keys of length 1, a $\beta$ above 1 flips its sign.
      (In "implicit_delta" none does: a larger one only goes closer to the value.)
    - `steps`: steps per token, for a rule that can take several; None = the
      rule's default, 2 for "delta_product" and 1 for all others.

    `FastWeightAttention.like` sets them as a published model does.

    All three methods are causal, and any mixture of `prefill` and `step`
    gives what `forward` gives for the whole sequence. With features that
    come with a scale (stabilised FAVOR+) and a denominator, the largest
    scale so far is carried along, and the memory fades when it grows:
    that changes no result. In float32 this is right as long as the
    largest of $|\Omega q|$ or of $|\Omega k|$ (in `FAVOR`, with its
    $d^{-1/4}$) is at most 30. From the first longer key on, a CPU
    computes in float64, up to 150, and the state is in float64. Under
    `torch.compile` and on a GPU, longer ones lose digits.

        >>> layer = FastWeightAttention(d_model=8, heads=2)
        >>> y, state = layer.prefill(torch.randn(1, 5, 8))
        >>> y.shape, state.shape
        (torch.Size([1, 5, 8]), torch.Size([1, 2, 4, 8]))
    """

    packs = skips = True
    one_token = "efficient"

    def __init__(
        self,
        d_model: int,
        heads: int,
        feature_map: FeatureMap | None = None,
        rule: str = "delta",
        key_norm: str | None = "auto",
        normalize: bool | None = None,
        *,
        head_width: int | None = None,
        kv_heads: int | None = None,
        value_heads: int | None = None,
        expand_v: float = 1,
        key_eps: float = 0,
        scale: float | str | None = None,
        conv_size: int = 0,
        out_norm: bool = False,
        norm_eps: float = 1e-5,
        out_gate: bool | str = False,
        low_rank_gate: bool = False,
        beta_max: float = 1,
        steps: int | None = None,
    ):
        super().__init__()
        layer = "FastWeightAttention"
        self.head_width = width = width_of_head(layer, d_model, heads, head_width)
        self.kv_heads = keys = shared_heads(layer, heads, kv_heads)
        self.value_heads = memories = _value_heads(heads, kv_heads, value_heads)
        value = _value_width(width, expand_v)
        arguments.integers(layer, 0, conv_size=conv_size)
        arguments.flags(layer, out_norm=out_norm, low_rank_gate=low_rank_gate)
        arguments.epsilon(layer, key_eps=key_eps, norm_eps=norm_eps)
        self.out_gate = _out_gate(out_gate, low_rank_gate)
        if not isinstance(normalize, bool | None):
            raise TypeError(
                "FastWeightAttention: expected normalize to be True, False or None, "
                f"got {normalize!r}"
            )
        arguments.choice(layer, RULES, rule=rule)
        record = RULES[rule]
        self._gates = gates.of(record)
        bounded = any(gate.bounded for gate in self._gates.values())
        self.beta_max = _largest_beta(beta_max, rule, bounded)
        self.steps = _steps(steps, rule)
        if key_norm == "auto":
            key_norm = record.key_norm
        arguments.choice(layer, KEY_NORMS, key_norm=key_norm)
        if key_eps and key_norm != "l2":
            raise ValueError(
                f'{layer}: expected key_eps=0 without key_norm="l2", got {key_eps}'
            )
        self.d_model, self.heads = d_model, heads
        self.rule, self.key_norm, self.key_eps = rule, key_norm, key_eps
        self.normalize = record.normalize if normalize is None else normalize
        if self.normalize and not record.normalizes:
            raise ValueError(
                f"FastWeightAttention: expected normalize=False for rule {rule!r}, "
                "which has no normaliser, got True"
            )
        self.scale = _scale(scale, width, self.normalize)
        if feature_map is None:
            feature_map = record.feature_map()
        elif not isinstance(feature_map, FeatureMap):
            raise TypeError(
                "FastWeightAttention: expected feature_map to be a FeatureMap, such "
                f"as DPFP(nu=1), got {feature_map!r}"
            )
        self.feature_map = feature_map
        #: `[value_heads, value, key]`, the shape of the fast weights of one sequence.
        self.state_shape = (memories, value, self.feature_map.width(width))

        keys, values = self.steps * keys, self.steps * memories
        #: Channels of queries, keys and values.
        self.channels = [heads * width, keys * width, values * value]
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(d_model, size, bias=False) for size in self.channels
        )
        read = max(heads, memories) * value
        self.to_out = nn.Linear(read, d_model, bias=False)
        for gate in self._gates.values():
            gate.add(self)
        # Last, so that no other initial value depends on the options.
        self.conv: ShortConvolution | None = None
        self.conv_size = conv_size
        if conv_size:
            self.conv = ShortConvolution(sum(self.channels), conv_size)
        self.out_norm = nn.RMSNorm(value, eps=norm_eps) if out_norm else None
        self.to_gate: nn.Module | None = None
        if self.out_gate and low_rank_gate:
            self.to_gate = nn.Sequential(
                nn.Linear(d_model, width, bias=False),
                nn.Linear(width, read, bias=False),
            )
        elif self.out_gate:
            self.to_gate = nn.Linear(d_model, read, bias=False)

    @classmethod
    def like(cls, name: str, /, d_model: int, heads: int, **options: Any) -> Self:
        """A layer as in a published model.

        - `name`: "delta-net", "gated-delta-net", "qwen3.5", "olmo-hybrid" or "kimi".
        - `d_model`, `heads`, `options`: those of `FastWeightAttention`, which has a
          table of what a name sets. Options win. Sizes such as `head_width` and
          `value_heads` are yours to set.
        - Returns the layer.
        - Raises `ValueError` or `TypeError` for an unknown name, or what does not fit.

            >>> layer = FastWeightAttention.like("kimi", d_model=8, heads=2, head_width=3)
            >>> layer.rule, layer.state_shape
            ('kimi_delta', (2, 3, 3))
        """
        arguments.choice("FastWeightAttention.like", PRESETS, name=name)
        preset = {"feature_map": Identity(), **PRESETS[name].options}
        return cls(d_model, heads, **{**preset, **options})

    def state_size(self, time: int = 0) -> int:
        """Number of scalars in the state of one sequence of any length.

        - `time`: tokens so far; has no effect.
        - Returns the total over all heads.
        """
        heads, value, key = self.state_shape
        per_head = value * key + (key if self.normalize else 0)
        past = 0
        if self.conv is not None:
            past = (self.conv_size - 1) * sum(self.channels)
        return heads * (per_head + self._scales) + past

    @property
    def _scales(self) -> bool:
        """Whether the state has a running scale."""
        return self.normalize and self.key_norm is None and self.feature_map.scales

    @property
    def _nu(self) -> int:
        """`nu` of the features if the operation makes them itself, else 0."""
        phi, known = self.feature_map, RULES[self.rule].with_dpfp is not None
        known = known and not watched(phi)  # else it is called
        if type(phi) is DPFP and known and self.key_norm == "sum":
            return 0 if self.normalize or self.scale is not None else phi.nu
        return 0

    def prefill(
        self,
        x: Tensor,
        state: State | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """A stretch of the sequence at once, and the state after it.

        - `x`: `[batch, time, d_model]`.
        - `state`: the state before it; None = empty memory.
        - `key_mask`, `implementation`, `cu_seqlens`: as in `forward`.
        - Returns `(y, state)`: `[batch, time, d_model]`, and the fast weights `[batch,
          value_heads, value, key]` (with `normalize`, a `NormalizedState`; with a running
          scale, a `ScaledState`; with convolutions, a `ConvState` of that), with
          `cu_seqlens` those after each document.
        - Raises `ValueError` or `TypeError` for an invalid `x`, or the
          state of another layer.
        """
        return self._mix(x, state, key_mask, implementation, cu_seqlens, True)

    # No state before it, and none after it.
    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        return self._mix(x, None, key_mask, implementation, cu_seqlens, False)[0]

    def _mix(
        self,
        x: Tensor,
        state: Any,
        key_mask: Tensor | None,
        implementation: str,
        cu_seqlens: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, Any]:
        """`prefill`, with a state or None."""
        dims = "batch time d_model"
        check_input("FastWeightAttention", "x", x, dims, self.d_model, self.to_q)
        x = real_tokens("FastWeightAttention", x, dims, key_mask)
        inputs = None
        if self.conv is None and isinstance(state, ops.ConvState):
            raise TypeError(
                "FastWeightAttention: expected a state without convolutions for "
                "conv_size=0, got a ConvState (memory, inputs)"
            )
        if self.conv is not None and state is not None:
            checks.state_kind("FastWeightAttention", state, ops.ConvState)
            state, inputs = state
        lengths = None
        if cu_seqlens is not None and (self.conv is not None or self._scales):
            checks.documents("FastWeightAttention", cu_seqlens, len(x))
            lengths = packed.lengths("FastWeightAttention", cu_seqlens, x.shape[1])
        qk, v, inputs = self._qkv(x, inputs, key_mask, lengths)
        options: dict[str, Any] = {
            "key_mask": key_mask,
            "cu_seqlens": cu_seqlens,
            "return_state": return_state,
            "implementation": implementation,
        }
        if self._scales:
            y, memory = self._scaled(x, qk, v, state, lengths, **options)
        else:
            q, k = self._apart(qk if self._nu else self._features(qk))
            rule, made = self._rule(x, k, None)
            y, memory = rule(q, k, v, state=state, **made, **options), None
            if return_state:
                y, memory = y
        if inputs is not None and return_state:
            memory = ops.ConvState(memory, inputs)
        return self.to_out(self._finish(y, x)), memory

    def _rule(
        self, x: Tensor, k: Tensor, fading: Tensor | None
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The operation, its gates, and its options.

        - `fading`: a logarithm of a decay, besides that of the rule.
        """
        record = RULES[self.rule]
        name: Any = record.name
        options: dict[str, Any] = {}
        if self._nu:
            name, options["nu"] = record.with_dpfp, self._nu
        else:
            options["scale"] = self.scale
            if record.normalizes:
                options["normalize"] = self.normalize
        # A gate may depend on the features of the keys.
        options |= {n: gate.of(self, x, k) for n, gate in self._gates.items()}
        if fading is not None:
            name = record.with_decay or name
            options["log_decay"] = fading + options.get("log_decay", 0)
        return getattr(ops, name), options

    def _scaled(
        self,
        x: Tensor,
        qk: Tensor,
        v: Tensor,
        state: Any,
        lengths: list[int] | None,
        key_mask: Tensor | None,
        return_state: bool,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Compute the rule on features with a scale, and the state after it or None.

        The largest feature of a key is 1, but a query may ask for any. From the first
        key on that has features beyond float32, a CPU computes in float64.
        """
        memory, before, dtype = None, None, v.dtype
        if state is not None:
            checks.state_kind("FastWeightAttention", state, ops.ScaledState)
            memory, before = state
        if isinstance(before, Tensor) and before.dtype == torch.float64:
            qk, v = qk.double(), v.double()
        qk = qk.float() if qk.dtype == torch.float16 and qk.is_cpu else qk
        made = self._scaled_features(*self._apart(qk), before, key_mask, lengths)
        q, k, fading, after, tiny = made
        late: Tensor | None = None
        y: Any = None
        if tiny is not None:
            late = tiny.any(-1).cummax(1).values
            real = ~late if key_mask is None else key_mask & ~late
            rule, gates = self._rule(x, k, fading)
            y = rule(q, k, v, state=memory, key_mask=real, **gates, **options)
            if isinstance(before, Tensor):
                before = before.double()
            if isinstance(memory, ops.NormalizedState):
                memory = ops.NormalizedState(*(part.double() for part in memory))
            qk, v = qk.double(), v.double()
            made = self._scaled_features(*self._apart(qk), before, key_mask, lengths)
            q, k, fading, after, _ = made
        rule, gates = self._rule(x, k, fading)
        options |= {"key_mask": key_mask, "return_state": return_state}
        found = rule(q, k, v, state=memory, **gates, **options)
        exact, end = found if return_state else (found, None)
        if late is not None:
            # What comes later must not change what came before by a single bit.
            exact = torch.where(late[..., None, None], exact.to(dtype), y)
        return exact.to(dtype), None if end is None else ops.ScaledState(end, after)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        parts: Any = self._modules
        to_q, dims = parts["to_q"], "batch d_model"
        check_input("FastWeightAttention", "x", x, dims, self.d_model, to_q)
        record, conv, batch = RULES[self.rule], self.conv, x.shape[0]
        memory: Any = state
        inputs: Any = None
        if conv is not None and isinstance(state, ops.ConvState):
            memory, inputs = state
        shape = (batch, *self.state_shape)
        # The state after inputs of half precision has more.
        exact = x if x.itemsize > 2 else x.new_empty(0, dtype=torch.float32)
        if (
            not batch
            or self._scales
            or not record.steps_from(memory, exact, shape, self.normalize)
            or (conv is not None and not can_step(conv, inputs, batch, exact))
        ):
            return super().step(x, state)
        # All features at once: they do not depend on each other.
        qk = torch.cat([run(parts["to_q"], x), run(parts["to_k"], x)], -1)
        if qk.dtype != x.dtype:  # autocast
            return super().step(x, state)
        v = run(parts["to_v"], x)
        if conv is not None:
            qkv, inputs = conv.step(torch.cat([qk, v], -1), inputs)
            qk, v = qkv.split_with_sizes([qk.shape[-1], v.shape[-1]], -1)
        q, k = self._apart(self._features(qk.view(batch, 1, -1, self.head_width)))
        v = v.view(batch, 1, -1, self.state_shape[1])
        if record.steps:
            v = v.unflatten(2, (self.steps, -1))
        x = x.unsqueeze(1)
        made = {n: gate.of(self, x, k) for n, gate in self._gates.items()}
        if exact is not x:
            q, k, v = (part.to(exact.dtype) for part in (q, k, v))
            made = {n: gate.to(exact.dtype) for n, gate in made.items()}
        y, memory = record.step(q, k, v, made, memory, self.normalize)
        y = y.to(x.dtype) if self.scale is None else (self.scale * y).to(x.dtype)
        after = memory if inputs is None else ops.ConvState(memory, inputs)
        return run(parts["to_out"], self._finish(y, x).view(batch, -1)), after

    def _qkv(
        self,
        x: Tensor,
        inputs: Tensor | None,
        key_mask: Tensor | None,
        lengths: list[int] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys side by side, values, all per head, and what a later
        call needs of the inputs of the convolutions.
        """
        qkv = project(x, self.to_q, self.to_k, self.to_v)
        if self.conv is not None:
            qkv, inputs = self.conv(qkv, inputs, key_mask, lengths)
        value = self.channels[2]
        qk, v = qkv.split([qkv.shape[-1] - value, value], -1)
        v = split_heads(v, self.steps * self.value_heads)
        if RULES[self.rule].steps:
            v = v.unflatten(2, (self.steps, -1))
        return split_heads(qk, self.heads + self.steps * self.kv_heads), v, inputs

    def _apart(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, each `[batch, time, heads, width]`."""
        q, k = qk.split_with_sizes([self.heads, self.steps * self.kv_heads], 2)
        if RULES[self.rule].steps:
            k = k.unflatten(2, (self.steps, -1))
        group = self.value_heads // self.heads
        if group > 1:  # a copy for each head of values
            q, k = (part.repeat_interleave(group, -2) for part in (q, k))
        return q, k

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        """What the heads read, side by side, after norm and gate."""
        if self.out_norm is not None:
            y = normed(self.out_norm, y)
        y = y.flatten(-2)
        if self.to_gate is None or self.out_gate is None:
            return y
        return y * OUT_GATES[self.out_gate](run(self.to_gate, x))

    # $\phi$, then the normalisation that `key_norm` names.
    def _features(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16 and (self.normalize or self.key_norm):
            # Features before they are divided by their size, and their gradients,
            # may be beyond the numbers of float16.
            y = self._features(x.float())
            # (A kernel takes all its inputs in one precision.)
            return y if self.normalize and y.is_cpu else y.to(x.dtype)
        phi: Any = self._modules["feature_map"]
        if self.key_norm is None:
            return phi(x)
        # A scale would be divided out again.
        x = phi.scaled(x)[0]
        if not self.key_eps:
            return KEY_NORMS[self.key_norm](x)
        # The square length is the width times the mean square.
        width = x.shape[-1]
        return F.rms_norm(x, (width,), eps=self.key_eps / width) * width**-0.5

    def _scaled_features(
        self,
        q: Tensor,
        k: Tensor,
        before: Tensor | None,
        key_mask: Tensor | None,
        lengths: list[int] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        r"""Features in units of the largest scale so far, $e^{M_t}$.

        The scale of a query cancels in the quotient. A memory in units
        of $e^{M_{t-1}}$ is brought to units of $e^{M_t}$ by the decay
        $\log d_t = M_{t-1} - M_t$. No step looks ahead.

        - Returns queries, keys, the decay, the last scale, and which keys have a
          feature below `LEAST`; None = none has, or this is not known.
        """
        q = self.feature_map.scaled(q)[0]
        k, scale = self.feature_map.scaled(k)
        assert scale is not None
        tiny = None
        if k.dtype != torch.float64 and units.known(k) and k.numel():
            values = k.detach()
            tiny = values.amin(-1) < LEAST if values.amin().item() < LEAST else None
        if key_mask is not None:
            scale = scale.masked_fill(~key_mask[..., None], -torch.inf)
        compute: packed.Compute = _running_maximum
        if lengths is not None:
            fills = {"scale": -torch.inf}
            compute = packed.by_document(compute, lengths, ("before",), fills)
        shape = (scale.shape[0] if lengths is None else len(lengths), self.value_heads)
        if before is None:
            before = scale.new_full(shape, -torch.inf)
        part = ("FastWeightAttention", "state.log_scale", before)
        checks.state_part(*part, shape, scale.dtype, scale)
        both, after = compute(scale=scale, before=before)
        earlier, now = both.unbind(-1)
        k = k * _difference(scale, now).exp()[..., None].to(k.dtype)
        return q, k, _difference(earlier, now), after, tiny

    def extra_repr(self) -> str:
        return (
            f"rule={self.rule!r}, key_norm={self.key_norm!r}, "
            f"normalize={self.normalize}, beta_max={self.beta_max}, "
            f"steps={self.steps}"
        )


def _largest_beta(value: float, rule: str, bounded: bool) -> float:
    """`beta_max`; raises unless the rule has a gate that is `bounded` by it."""
    text = "FastWeightAttention: expected beta_max to be a number above 0, at most 2"
    if not arguments.number(value):
        raise TypeError(f"{text}, got {value!r}")
    if not 0 < value <= 2:
        raise ValueError(f"{text}, got {value!r}")
    if value != 1 and not bounded:
        reason = "which does not correct"
        if RULES[rule].corrects:
            reason = "which has no beta and no erasing gate to bound"
        raise ValueError(
            f"FastWeightAttention: expected beta_max=1 for rule {rule!r}, {reason}, "
            f"got {value!r}"
        )
    return value


def _steps(value: int | None, rule: str) -> int:
    """Steps per token; raises unless the rule can take this many."""
    text = "FastWeightAttention: expected steps to be"
    usual = RULES[rule].steps
    if value is None:
        return usual or 1
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{text} an integer or None, got {value!r}")
    if value < 1 or (value > 1 and not usual):
        limit = "at least 1" if usual else f"1 for rule {rule!r}"
        raise ValueError(f"{text} {limit}, got {value}")
    return value


def _value_heads(heads: int, kv_heads: int | None, value_heads: int | None) -> int:
    """The number of heads of values, None = as many as of keys; raises unless it
    is a multiple of `heads`, and alone.
    """
    if value_heads is None:
        return heads if kv_heads is None else kv_heads
    arguments.integers("FastWeightAttention", 1, value_heads=value_heads)
    if kv_heads is not None:
        raise ValueError(
            "FastWeightAttention: expected kv_heads or value_heads, not both, "
            f"got kv_heads={kv_heads} and value_heads={value_heads}"
        )
    if value_heads % heads:
        raise ValueError(
            "FastWeightAttention: expected value_heads to be a multiple of heads, "
            f"got value_heads={value_heads} and heads={heads}"
        )
    return value_heads


def _scale(scale: float | str | None, width: int, normalize: bool) -> float | None:
    """The factor of the queries, or None; raises for one that would cancel."""
    if scale is None:
        return None
    if normalize:
        raise ValueError(
            "FastWeightAttention: expected scale=None with normalize=True, where it "
            f"cancels, got {scale!r}"
        )
    if isinstance(scale, str):
        arguments.choice("FastWeightAttention", ["softmax"], scale=scale)
        return width**-0.5
    checks.scale("FastWeightAttention", scale)
    return scale


def _out_gate(value: bool | str, low_rank: bool) -> str | None:
    """The name of the gate's function, None without a gate."""
    if isinstance(value, bool):
        name = "silu" if value else None
    else:
        arguments.choice("FastWeightAttention", OUT_GATES, out_gate=value)
        name = value
    if low_rank and not name:
        raise ValueError(
            "FastWeightAttention: expected low_rank_gate=False for out_gate=False, "
            "got True"
        )
    return name


def _value_width(width: int, expand_v: float) -> int:
    """`expand_v` times the width of a head; raises unless an integer."""
    if not arguments.number(expand_v):
        raise TypeError(
            f"FastWeightAttention: expected expand_v to be a number, got {expand_v!r}"
        )
    wide = expand_v * width
    if not (1 <= wide < math.inf and math.isclose(wide, round(wide), rel_tol=1e-9)):
        raise ValueError(
            "FastWeightAttention: expected expand_v times the width of a head, "
            f"{width}, to be a positive integer, got expand_v={expand_v}"
        )
    return round(wide)


def _running_maximum(scale: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum so far without and with each step, `[batch, time, heads, 2]`,
    and with all of them, `[batch, heads]`.
    """
    top = torch.cat([before[:, None], scale], 1).cummax(1).values
    return torch.stack([top[:, :-1], top[:, 1:]], -1), top[:, -1]


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, and 0 where both are the same infinity."""
    return torch.where(a == b, 0, a - b)
