r"""Attention whose memory is a fast weight matrix per head.

The slow weights are the projections, trained by gradient descent. They
program the fast weights $W$: each step they say what to write, where,
how strongly, and how much of the rest to forget.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments, ops
from fwlab.feature_maps import DPFP, KEY_NORMS, FeatureMap
from fwlab.layers import gates
from fwlab.layers.causal import Causal
from fwlab.layers.heads import (
    check_input,
    head_width,
    project,
    real_tokens,
    run,
    shared_heads,
    split_heads,
)
from fwlab.layers.short_convolution import ShortConvolution
from fwlab.ops.call import checks, packed
from fwlab.ops.call.rule import Rule

State = Tensor | ops.NormalizedState | ops.ScaledState | ops.ConvState


#: The rules that have a layer, by name: their records say the rest.
RULES = {
    record.mixer.replace("-", "_"): record
    for record in ops.TABLE.values()
    if isinstance(record, Rule) and record.mixer
}


class FastWeightAttention(Causal):
    r"""Multi-head fast weight memory.

    $q, k, v = W_q x, W_k x, W_v x$ per head, features $\phi(q), \phi(k)$, the gates of
    the rule, then the rule, then an output projection. No projection has a bias, as in
    Schlag et al. 2021. The record of a rule has its gates and its defaults; a table of
    them is on the page "One equation, ten rules".

    Arguments:

    - `d_model`: width of the input; a multiple of `heads`.
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

    - `kv_heads`: number of memories; None = `heads`. With fewer, each is
      read by the queries of `heads / kv_heads` consecutive heads. Keys,
      values, gates and the state are that much smaller.
    - `expand_v`: width of the values of a head, in units of `d_model / heads`.
    - `conv_size`: if not 0, queries, keys and values pass a
      `ShortConvolution` over this many tokens before the feature map.
    - `out_norm`: divide what each head reads by its root mean square,
      and multiply it by trained weights: `torch.nn.RMSNorm`.
    - `out_gate`: multiply what each head reads by $\mathrm{SiLU}(W_g x)$, after
      the norm.
    - `beta_max`: the maximum of $\beta$ (or of the erasing gate) in a rule that
      corrects, above 0 and at most 2. A step multiplies what a key $k$ holds by
      $1 - \beta |k|^2$: with keys of length 1, a $\beta$ above 1 flips its sign.
      (In "implicit_delta" none does: a larger one only goes closer to the value.)
    - `steps`: steps per token, for a rule that can take several; None = the
      rule's default, 2 for "delta_product" and 1 for all others.

    All three methods are causal, and any mixture of `prefill` and `step`
    gives what `forward` gives for the whole sequence. With features that
    come with a scale (stabilised FAVOR+) and a denominator, the largest
    scale so far is carried along, and the memory fades when it grows:
    that changes no result, and nothing overflows or underflows.

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
        kv_heads: int | None = None,
        expand_v: float = 1,
        conv_size: int = 0,
        out_norm: bool = False,
        out_gate: bool = False,
        beta_max: float = 1,
        steps: int | None = None,
    ):
        super().__init__()
        width = head_width("FastWeightAttention", d_model, heads)
        self.kv_heads = memories = shared_heads("FastWeightAttention", heads, kv_heads)
        value = _value_width(width, expand_v)
        layer = "FastWeightAttention"
        arguments.integers(layer, 0, conv_size=conv_size)
        arguments.flags(layer, out_norm=out_norm, out_gate=out_gate)
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
        self.d_model, self.heads = d_model, heads
        self.rule, self.key_norm = rule, key_norm
        self.normalize = record.normalize if normalize is None else normalize
        if self.normalize and not record.normalizes:
            raise ValueError(
                f"FastWeightAttention: expected normalize=False for rule {rule!r}, "
                "which has no normaliser, got True"
            )
        if feature_map is None:
            feature_map = record.feature_map()
        elif not isinstance(feature_map, FeatureMap):
            raise TypeError(
                "FastWeightAttention: expected feature_map to be a FeatureMap, such "
                f"as DPFP(nu=1), got {feature_map!r}"
            )
        self.feature_map = feature_map
        #: `[kv_heads, value, key]`, the shape of the fast weights of one sequence.
        self.state_shape = (memories, value, self.feature_map.width(width))

        self.to_q = nn.Linear(d_model, d_model, bias=False)
        written = self.steps * memories
        self.to_k = nn.Linear(d_model, written * width, bias=False)
        self.to_v = nn.Linear(d_model, written * value, bias=False)
        self.to_out = nn.Linear(heads * value, d_model, bias=False)
        for gate in self._gates.values():
            gate.add(self)
        # Last, so that no other initial value depends on the options.
        self.conv: ShortConvolution | None = None
        if conv_size:
            channels = d_model + written * (width + value)
            self.conv = ShortConvolution(channels, conv_size)
        self.out_norm = nn.RMSNorm(value, eps=1e-5) if out_norm else None
        self.to_gate: nn.Linear | None = None
        if out_gate:
            self.to_gate = nn.Linear(d_model, heads * value, bias=False)

    def state_size(self, time: int = 0) -> int:
        """Number of scalars in the state of one sequence of any length.

        - `time`: tokens so far; has no effect.
        - Returns the total over all heads.
        """
        heads, value, key = self.state_shape
        per_head = value * key + (key if self.normalize else 0)
        past = 0
        if self.conv is not None:
            past = (self.conv.size - 1) * self.conv.channels
        return heads * (per_head + self._scales) + past

    @property
    def _scales(self) -> bool:
        """Whether the state has a running scale."""
        return self.normalize and self.key_norm is None and self.feature_map.scales

    @property
    def _nu(self) -> int:
        """`nu` of the features if the operation makes them itself, else 0."""
        phi, known = self.feature_map, RULES[self.rule].with_dpfp is not None
        if type(phi) is DPFP and known and self.key_norm == "sum":
            return 0 if self.normalize else phi.nu
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
          kv_heads, value, key]` (with `normalize`, a `NormalizedState`; with a running
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
        check_input("FastWeightAttention", "x", x, dims, self.to_q.weight)
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
        record, log_scale = RULES[self.rule], None
        name: Any = record.name
        options: dict[str, Any] = {}
        if record.normalizes:
            options["normalize"] = self.normalize
        # A gate may depend on the features of the keys.
        fading = None
        if self._scales:
            memory, before = None, None
            if state is not None:
                checks.state_kind("FastWeightAttention", state, ops.ScaledState)
                memory, before = state
            q, k, fading, log_scale = self._scaled_features(
                *self._apart(qk), before, key_mask, lengths
            )
        elif nu := self._nu:
            name, options, memory = record.with_dpfp, {"nu": nu}, state
            q, k = self._apart(qk)
        else:
            qk, memory = self._features(qk), state
            q, k = self._apart(qk)
        made = {n: gate.of(self, x, k) for n, gate in self._gates.items()}
        if fading is not None:
            name = record.with_decay or name
            made["log_decay"] = fading + made.get("log_decay", 0)
        y = getattr(ops, name)(
            q,
            k,
            v,
            **made,
            **options,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            state=memory,
            return_state=return_state,
            implementation=implementation,
        )
        if return_state:
            y, memory = y
            if log_scale is not None:
                memory = ops.ScaledState(memory, log_scale)
            if inputs is not None:
                memory = ops.ConvState(memory, inputs)
        return self.to_out(self._finish(y, x)), memory

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        parts: Any = self._modules
        like = parts["to_q"].weight
        check_input("FastWeightAttention", "x", x, "batch d_model", like)
        record, batch, memory = RULES[self.rule], x.shape[0], self.state_shape
        if (
            self.conv is not None
            or self._scales
            or not record.steps_from(state, x, (batch, *memory), self.normalize)
        ):
            return super().step(x, state)
        # All features at once: they do not depend on each other.
        qk = torch.cat([run(parts["to_q"], x), run(parts["to_k"], x)], -1)
        if qk.dtype != x.dtype:  # autocast
            return super().step(x, state)
        heads, written = self.heads, self.steps * self.kv_heads
        qk = self._features(qk.view(batch, 1, heads + written, -1))
        q, k = qk.split_with_sizes([heads, written], 2)
        v = run(parts["to_v"], x).view(batch, 1, written, -1)
        if record.steps:
            k, v = (part.unflatten(2, (self.steps, -1)) for part in (k, v))
        x = x.unsqueeze(1)
        made = {n: gate.of(self, x, k) for n, gate in self._gates.items()}
        y, state = record.step(q, k, v, made, state, self.normalize)
        return run(parts["to_out"], self._finish(y, x).view(batch, -1)), state

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
        written = self.steps * self.kv_heads
        value = written * self.state_shape[1]
        qk, v = qkv.split([qkv.shape[-1] - value, value], -1)
        v = split_heads(v, written)
        if RULES[self.rule].steps:
            v = v.unflatten(2, (self.steps, -1))
        return split_heads(qk, self.heads + written), v, inputs

    def _apart(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, each `[batch, time, heads, width]`."""
        q, k = qk.split([self.heads, qk.shape[2] - self.heads], 2)
        return q, k.unflatten(2, (self.steps, -1)) if RULES[self.rule].steps else k

    def _finish(self, y: Tensor, x: Tensor) -> Tensor:
        """What the heads read, side by side, after norm and gate."""
        if self.out_norm is not None:
            # Under autocast `y` has half the precision of the weights.
            y = self.out_norm(y.to(self.out_norm.weight.dtype))
        y = y.flatten(-2)
        return y if self.to_gate is None else y * F.silu(self.to_gate(x))

    # $\phi$, then the normalisation that `key_norm` names.
    def _features(self, x: Tensor) -> Tensor:
        phi: Any = self._modules["feature_map"]
        if self.key_norm is None:
            return phi(x)
        # A scale would be divided out again.
        return KEY_NORMS[self.key_norm](phi.scaled(x)[0])

    def _scaled_features(
        self,
        q: Tensor,
        k: Tensor,
        before: Tensor | None,
        key_mask: Tensor | None,
        lengths: list[int] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Features in units of the largest scale so far, $e^{M_t}$.

        The scale of a query cancels in the quotient. A memory in units
        of $e^{M_{t-1}}$ is brought to units of $e^{M_t}$ by the decay
        $\log d_t = M_{t-1} - M_t$. No step looks ahead.
        """
        q = self.feature_map.scaled(q)[0]
        k, scale = self.feature_map.scaled(k)
        assert scale is not None
        if key_mask is not None:
            scale = scale.masked_fill(~key_mask[..., None], -torch.inf)
        compute: packed.Compute = _running_maximum
        if lengths is not None:
            fills = {"scale": -torch.inf}
            compute = packed.by_document(compute, lengths, ("before",), fills)
        shape = (len(scale if lengths is None else lengths), self.kv_heads)
        if before is None:
            before = scale.new_full(shape, -torch.inf)
        part = ("FastWeightAttention", "state.log_scale", before)
        checks.state_part(*part, shape, scale.dtype, scale)
        both, after = compute(scale=scale, before=before)
        earlier, now = both.unbind(-1)
        k = k * _difference(scale, now).exp()[..., None].to(k.dtype)
        return q, k, _difference(earlier, now), after

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
