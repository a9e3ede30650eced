r"""Define attention by fast weights, with one matrix per head.

The slow weights are the projections, trained by gradient descent. They program the fast
weights $W$: at each step they determine what to write, with which key, how strongly,
and how much of the rest to forget.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments, ops
from fwlab.feature_maps import DPFP, ELU1, KEY_NORMS, FeatureMap, Identity
from fwlab.layers import gates, one_token, running_scale
from fwlab.layers import heads as sizes
from fwlab.layers.causal import Causal, check_input
from fwlab.layers.heads import normed, projections
from fwlab.layers.short_convolution import ShortConvolution
from fwlab.ops import _operation as operation


class Rule(NamedTuple):
    """Hold the operation, the gates and the defaults of a fast weight rule.

    - `operation`: the layer calls it with queries, keys, values and the gates.
    - `gates`: the functions that make gate modules, by arguments of the operation.
    - `feature_map`, `key_norm`, `normalize`: defaults of the layer; `normalize` is None
      for a rule without a normaliser.
    - `steps`: the default number of steps per token; 0 = always one step.
    - `decayed`: the operation that takes a `log_decay`, if `operation` does not.
    """

    operation: Callable[..., Any]
    gates: Mapping[str, Callable[[Any], nn.Module]]
    feature_map: Callable[[], FeatureMap] = Identity
    key_norm: str | None = "l2"
    normalize: bool | None = None
    steps: int = 0
    decayed: Callable[..., Any] | None = None


_BETA: dict[str, Any] = {"beta": gates.Beta}
_SHARE: dict[str, Any] = {"beta": gates.Share}
_DECAY: dict[str, Any] = {"log_decay": gates.LogDecay}
_CHANNELS: dict[str, Any] = {"log_decay": partial(gates.LogDecay, per_channel=True)}

#: The rules that a layer can have, by name.
RULES = {
    "sum": Rule(ops.sum_rule, {}, ELU1, None, True),
    "gated": Rule(ops.gated_rule, _SHARE, ELU1, None, True),
    "delta": Rule(
        ops.delta_rule, _BETA, DPFP, "sum", False, decayed=ops.gated_delta_rule
    ),
    "gated_delta": Rule(ops.gated_delta_rule, _BETA | _DECAY, normalize=False),
    "kimi_delta": Rule(ops.kimi_delta_rule, _BETA | _CHANNELS),
    "gated_delta_2": Rule(
        ops.gated_delta_rule_2,
        {"erase": gates.Erase, "write": gates.Write} | _CHANNELS,
    ),
    "comba": Rule(ops.comba_rule, _BETA | _DECAY | {"ask": gates.Ask}),
    "implicit_delta": Rule(ops.implicit_delta_rule, _BETA, key_norm=None),
    "delta_product": Rule(ops.delta_product, _BETA, steps=2),
    "rwkv7": Rule(
        ops.rwkv7_rule,
        {"a": gates.Removed, "b": gates.Rate, "log_decay": gates.BoundedDecay},
    ),
}
#: The functions that `out_gate` can select, by name.
OUT_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def _preset(rule: str, **options: Any) -> dict[str, Any]:
    """Return `options`, and the options that all published layers share."""
    shared = {"key_norm": "l2", "key_eps": 1e-6, "scale": "softmax"}
    return {"rule": rule, **shared, "conv_size": 4, "out_norm": True, **options}


#: The options of published layers without their sizes, by their names in
#: `FastWeightAttention.like`.
PRESETS = {
    # See arXiv:2406.06484 and DeltaNet of flash-linear-attention.
    "delta-net": _preset("delta"),
    # See arXiv:2412.06464 and GatedDeltaNet of flash-linear-attention.
    "gated-delta-net": _preset("gated_delta", expand_v=2, out_gate="silu"),
    # See Qwen3-Next and Qwen3.5 (Qwen3_5GatedDeltaNet of transformers).
    "qwen3.5": _preset("gated_delta", out_gate="silu", norm_eps=1e-6),
    # See arXiv:2604.03444 and OlmoHybridGatedDeltaNet of transformers.
    "olmo-hybrid": _preset("gated_delta", expand_v=2, out_gate="silu", beta_max=2),
    # See Kimi Linear (arXiv:2510.26692) and KimiLinearDeltaAttention of transformers.
    "kimi": _preset("kimi_delta", out_gate="sigmoid", low_rank_gate=True),
}


class FastWeightAttention(Causal):
    r"""Compute attention by fast weights, with one matrix per head.

    $q, k, v = W_q x, W_k x, W_v x$ per head, features $\phi(q), \phi(k)$, the gates of
    the rule, then the rule, then an output projection. No projection has a bias, as in
    Schlag et al. 2021. A table of the rules is on the page "One equation, ten rules".

    Arguments:

    - `d_model`: width of the input; a multiple of `heads`, or any with `head_width`.
    - `heads`: number of heads, each with its own memory.
    - `feature_map`: a `FeatureMap`; None takes the rule's default.
    - `rule`: the name of a rule in that table, such as "gated_delta" or "gated-delta".
    - `key_norm`: "sum", "l2" or None, applied to keys and queries after the feature map;
      "auto" takes the rule's default.
    - `normalize`: divide by the sum of the keys (Eqs. 19, 26-28); None takes the rule's
      default.
    - Raises `ValueError` or `TypeError` for invalid arguments.

    Options of today's models, all off (see "Options of `FastWeightAttention`" on the page
    of the layers); `FastWeightAttention.like` sets them as a published model does:

    - `head_width`: width of the queries and keys of a head; None = `d_model / heads`.
    - `kv_heads`: number of heads of keys and values, at most `heads`; None = `heads`.
      The queries of `heads / kv_heads` consecutive heads read one memory.
    - `value_heads`: number of heads of values, at least `heads`; None = `kv_heads`.
      `value_heads / heads` consecutive ones share a query and a key. Not together with
      `kv_heads`.
    - `expand_v`: width of the values of a head, divided by the width of its keys.
    - `key_eps`: divide keys and queries by $\sqrt{|k|^2 + \epsilon}$ with this
      $\epsilon$, for `key_norm="l2"`.
    - `scale`: a factor of the queries, for a rule that does not normalize; "softmax" =
      1 / sqrt(width of a head); None = 1.
    - `conv_size`: if not 0, queries, keys and values pass a `ShortConvolution` over this
      many tokens before the feature map.
    - `out_norm`: divide the output of each head by its root mean square, and multiply
      it by trained weights. `norm_eps` is added to the mean square.
    - `out_gate`: multiply the output of each head by $\mathrm{SiLU}(W_g x)$, after the
      norm: True or "silu". "sigmoid" = by $\sigma(W_g x)$.
    - `low_rank_gate`: use a product of two matrices for $W_g$, whose rank is the width
      of a head.
    - `beta_max`: the maximum of $\beta$ (or of the erasing gate) in a delta rule, above 0
      and at most 2. Above 1, a step can flip the sign of what a key of length 1 holds
      (not in "implicit_delta").
    - `steps`: steps per token, for a rule that can take several; None = the rule's
      default, 2 for "delta_product" and 1 for all others.

    The state of `prefill` and `step` is the fast weights `[batch, value_heads, value,
    key]`; with `normalize`, a `NormalizedState`; with a running scale, a `ScaledState`;
    with convolutions, a `ConvState` of that.

    With stabilised FAVOR+ and a normaliser, the layer tracks the running maximum of the
    log scale and rescales the state, as online softmax does: that changes no result. In
    float32 this is right as long as the largest of $|\Omega q|$ or of $|\Omega k|$ (in
    `FAVOR`, with its $d^{-1/4}$) is at most 30. From the first longer key on, a CPU
    computes in float64, up to 150, and the state is in float64. Under `torch.compile` and
    on a GPU, longer ones lose digits.

        >>> layer = FastWeightAttention(d_model=8, heads=2)
        >>> y, state = layer.prefill(torch.randn(1, 5, 8))
        >>> y.shape, state.shape
        (torch.Size([1, 5, 8]), torch.Size([1, 2, 4, 8]))
    """

    packs = skips = True
    one_token = "efficient"
    #: The rules that this class accepts; a subclass may accept other rules.
    rules = RULES

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
        rule = rule.replace("-", "_") if isinstance(rule, str) else rule
        arguments.choice(layer, self.rules, rule=rule)
        known = self.rules[rule]
        key_norm = known.key_norm if key_norm == "auto" else key_norm
        arguments.choice(layer, KEY_NORMS, key_norm=key_norm)
        width = sizes.head_width(layer, d_model, heads, head_width)
        keys = memories = sizes.shared_heads(layer, heads, kv_heads)
        if value_heads is not None:
            arguments.integers(layer, 1, value_heads=value_heads)
            memories = value_heads
        steps = (known.steps or 1) if steps is None else steps
        arguments.integers(layer, 1, steps=steps)
        arguments.integers(layer, 0, conv_size=conv_size)
        arguments.flags(layer, out_norm=out_norm, low_rank_gate=low_rank_gate)
        arguments.epsilon(layer, key_eps=key_eps, norm_eps=norm_eps)
        arguments.numbers(layer, "a number", lambda ratio: True, expand_v=expand_v)
        limits = "a number above 0, at most 2"
        arguments.numbers(layer, limits, lambda beta: 0 < beta <= 2, beta_max=beta_max)
        if not isinstance(out_gate, bool):
            arguments.choice(layer, OUT_GATES, out_gate=out_gate)
        if isinstance(scale, str):
            arguments.choice(layer, ["softmax"], scale=scale)
        elif scale is not None:
            operation.check_scale(layer, scale)
        expect = partial(arguments.require, layer)
        text = f"feature_map to be a FeatureMap, such as ELU1(), got {feature_map!r}"
        expect(isinstance(feature_map, FeatureMap | None), text, TypeError)
        text = f"normalize to be True, False or None, got {normalize!r}"
        expect(isinstance(normalize, bool | None), text, TypeError)
        normalize = bool(known.normalize if normalize is None else normalize)
        text = f"normalize=False for rule {rule!r}, which has no normaliser, got True"
        expect(not normalize or known.normalize is not None, text)
        text = f"kv_heads or value_heads, not both, got {kv_heads=} and {value_heads=}"
        expect(kv_heads is None or value_heads is None, text)
        text = f"value_heads to be a multiple of heads, got {value_heads=} and {heads=}"
        expect(value_heads is None or memories % heads == 0, text)
        wide = expand_v * width
        fits = 1 <= wide < math.inf and math.isclose(wide, round(wide), rel_tol=1e-9)
        text = f"expand_v times the width of a head, {width}, to be a positive integer"
        expect(fits, f"{text}, got {expand_v=}")
        text = f'key_eps=0 without key_norm="l2", got {key_eps}'
        expect(key_norm == "l2" or not key_eps, text)
        text = f"scale=None with normalize=True, where it cancels, got {scale!r}"
        expect(scale is None or not normalize, text)
        text = f"steps to be 1 for rule {rule!r}, got {steps}"
        expect(steps == 1 or known.steps, text)
        fits = not {gates.Beta, gates.Erase}.isdisjoint(known.gates.values())
        text = f"beta_max=1 for rule {rule!r}, which has no gate that it bounds"
        expect(fits or beta_max == 1, f"{text}, got {beta_max}")
        text = "low_rank_gate=False for out_gate=False, got True"
        expect(out_gate or not low_rank_gate, text)
        self.d_model, self.heads, self.head_width = d_model, heads, width
        self.kv_heads, self.value_heads, self.steps = keys, memories, steps
        self.rule, self.key_norm, self.key_eps = rule, key_norm, key_eps
        self.normalize, self.beta_max = normalize, beta_max
        self.scale: Any = width**-0.5 if scale == "softmax" else scale
        out_gate = "silu" if out_gate is True else out_gate
        self.out_gate = str(out_gate) if out_gate else None
        self.feature_map = known.feature_map() if feature_map is None else feature_map
        scales = self.feature_map.scales
        #: True if the state has a running maximum of feature scales.
        self.has_running_scale = normalize and key_norm is None and scales
        value = round(wide)
        #: The shape of the fast weights of one sequence, `(value_heads, value, key)`.
        self.state_shape = (memories, value, self.feature_map.width(width))
        #: The number of channels for queries, for keys and for values.
        self.channels = [heads * width, steps * keys * width, steps * memories * value]
        self.to_q, self.to_k, self.to_v = projections(d_model, *self.channels)
        read = max(heads, memories) * value
        self.to_out = nn.Linear(read, d_model, bias=False)
        self.gates = nn.ModuleDict({n: make(self) for n, make in known.gates.items()})
        # These layers come last, so that no other initial value depends on the options.
        self.conv: ShortConvolution | None = None
        if conv_size:
            self.conv = ShortConvolution(sum(self.channels), conv_size)
        self.out_norm = nn.RMSNorm(value, eps=norm_eps) if out_norm else None
        self.to_gate: nn.Module | None = None
        if out_gate and low_rank_gate:
            self.to_gate = gates.low_rank(self, read)
        elif out_gate:
            self.to_gate = nn.Linear(d_model, read, bias=False)

    @classmethod
    def like(cls, name: str, /, d_model: int, heads: int, **options: Any) -> Self:
        """Make a layer with the options of a published model.

        - `name`: "delta-net", "gated-delta-net", "qwen3.5", "olmo-hybrid" or "kimi".
        - `d_model`, `heads`, `options`: the arguments of `FastWeightAttention`, which
          override those of the model. The model does not set `value_heads` or sizes.
        - Returns the layer; raises `ValueError` or `TypeError` for an unknown name or
          invalid arguments.

            >>> layer = FastWeightAttention.like("kimi", d_model=8, heads=2, head_width=3)
            >>> layer.rule, layer.state_shape
            ('kimi_delta', (2, 3, 3))
        """
        name = name.replace("_", "-") if isinstance(name, str) else name
        arguments.choice("FastWeightAttention.like", PRESETS, name=name)
        preset = {"feature_map": Identity(), **PRESETS[name]}
        return cls(d_model, heads, **{**preset, **options})

    def state_size(self, time: int = 0) -> int:
        heads, value, key = self.state_shape
        per_head = value * key + (key if self.normalize else 0) + self.has_running_scale
        past = 0 if self.conv is None else (self.conv.size - 1) * self.conv.channels
        return heads * per_head + past

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Project the input, apply the rule, and project the outputs of the heads."""
        before = None
        if self.conv is not None and state is not None:
            operation.check_state("FastWeightAttention", state, ops.ConvState)
            state, before = state
        elif isinstance(state, ops.ConvState):
            raise TypeError(
                "FastWeightAttention: expected a state without convolutions for "
                "conv_size=0, got a ConvState (memory, inputs)"
            )
        documents = (options["key_mask"], options.get("cu_seqlens"))
        made = self.to_q(x), self.to_k(x), self.to_v(x)
        qk, v, inputs = self._heads(*made, before, *documents)
        if self.has_running_scale:
            y, state = running_scale.apply(self, x, qk, v, state, **options)
        else:
            q, k = self._split(self._features(qk))
            y, state = self._apply_rule(x, q, k, v, state, **options)
        if self.out_norm is None and self.to_gate is None:
            y = y.flatten(-2)
        else:
            y = self._norm_and_gate(y, x)
        if self.conv is not None and options["return_state"]:
            state = ops.ConvState(state, inputs)
        return self.to_out(y), state

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, before: Any, *documents: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Convolve queries, keys and values, and split them into heads.

        - `before`, `documents`: the arguments of a convolution besides its input.
        - Returns queries and keys in one tensor, values, and the inputs that the next
          convolution sees; None without convolutions.
        """
        qk = torch.cat([q, k], -1)
        if self.conv is not None:
            sizes = [qk.shape[-1], v.shape[-1]]
            both, before = self.conv(torch.cat([qk, v], -1), before, *documents)
            qk, v = both.split_with_sizes(sizes, -1)
        steps = (self.steps,) if self.rules[self.rule].steps else ()
        shared = self.heads + self.steps * self.kv_heads, self.head_width
        shape = qk.shape[:2]
        v = v.view(*shape, *steps, *self.state_shape[:2])
        return qk.view(*shape, *shared), v, before

    def _features(self, x: Tensor) -> Tensor:
        r"""Apply the feature map $\phi$, then the normalisation `key_norm`."""
        products = x.itemsize == 2 and isinstance(self.feature_map, DPFP)
        if (self.normalize or self.key_norm) and (products or x.dtype == torch.float16):
            # Features that are not yet normalised, and their gradients, may overflow in
            # float16, and products lose too many digits in bfloat16.
            y = self._features(x.float())
            # A kernel takes all its inputs in one dtype.
            return y if self.normalize and y.is_cpu else y.to(x.dtype)
        phi: Any = self.feature_map
        if self.key_norm is None:
            return phi(x)
        # The scale of features would cancel in the normalisation.
        x = phi.scaled(x)[0] if phi.scales else phi(x)
        if not self.key_eps:
            return KEY_NORMS[self.key_norm](x)
        # The squared norm is the width times the mean square of `rms_norm`.
        width = x.shape[-1]
        return F.rms_norm(x, (width,), eps=self.key_eps / width) * width**-0.5

    def _split(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Split queries from keys, and repeat both for each head of values."""
        q, k = qk.split_with_sizes([self.heads, self.steps * self.kv_heads], 2)
        if self.rules[self.rule].steps:
            k = k.unflatten(2, (self.steps, -1))
        group = self.value_heads // self.heads
        if group > 1:
            q, k = (part.repeat_interleave(group, -2) for part in (q, k))
        return q, k

    def _apply_rule(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """Compute the gates and call the rule; return outputs, and the state or None.

        - `options`: the options of the operation, and perhaps `fading`, the logarithm
          of an additional decay.
        """
        known = self.rules[self.rule]
        made = {name: gate(x, k) for name, gate in self.gates.items()}
        operation, fading = known.operation, options.pop("fading", None)
        if fading is not None:
            operation = known.decayed or operation
            made["log_decay"] = fading + made.get("log_decay", 0)
        if known.normalize is not None:
            options["normalize"] = self.normalize
        options |= {"scale": self.scale, "state": state}
        found = operation(q, k, v, **made, **options)
        return found if options["return_state"] else (found, None)

    def _norm_and_gate(self, y: Tensor, x: Tensor) -> Tensor:
        """Normalise the outputs of the heads, concatenate them, and gate them."""
        if self.out_norm is not None:
            y = normed(self.out_norm, y)
        y = y.flatten(-2)
        if self.to_gate is None or self.out_gate is None:
            return y
        return y * OUT_GATES[self.out_gate](self.to_gate(x))

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        check_input(self, x, "batch d_model", self.to_q)
        found = one_token.fast_weights(self, self.rules[self.rule], x, state)
        return super().step(x, state) if found is None else found

    def extra_repr(self) -> str:
        return (
            f"rule={self.rule!r}, key_norm={self.key_norm!r}, "
            f"normalize={self.normalize}, beta_max={self.beta_max}, steps={self.steps}"
        )
