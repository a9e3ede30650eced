r"""Attention whose memory is a fast weight matrix per head.

The slow weights are the projections, trained by gradient descent. They
program the fast weights $W$: each step they say what to write, where,
and how strongly.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fwlab import ops
from fwlab.feature_maps import DPFP, ELU1, KEY_NORMS, FeatureMap
from fwlab.layers.heads import check_input, head_width, split_heads

State = Tensor | ops.NormalizedState

#: Per rule: the operation, and what its paper does where a caller does
#: not say: feature map, key_norm, normalize.
RULES: dict[str, tuple[Callable, Callable[[], FeatureMap], str | None, bool]] = {
    "sum": (ops.sum_rule, ELU1, None, True),
    "delta": (ops.delta_rule, DPFP, "sum", False),
}


class FastWeightAttention(nn.Module):
    r"""Multi-head fast weight memory (Schlag et al. 2021).

    $q, k, v = W_q x, W_k x, W_v x$ per head, features $\phi(q), \phi(k)$,
    for the delta rule a write strength $\beta = \sigma(W_\beta x)$
    (Eq. 21), then the rule, then an output projection. No projection
    has a bias, as in the paper.

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of independent memories.
    - `feature_map`: a `FeatureMap`; None takes
      `ELU1()` for the sum rule and `DPFP(nu=1)` for the delta rule.
    - `rule`: "sum" or "delta".
    - `key_norm`: "sum", "l2" or None, applied to keys and queries after
      the feature map; "auto" takes "sum" for the delta rule (Eq. 29) and
      None for the sum rule.
    - `normalize`: divide by the sum of the keys (Eqs. 19, 26-28); None
      means yes for the sum rule and no for the delta rule.
    - Raises `ValueError` for sizes or names that do not fit.

    All three methods are causal, and any mixture of `prefill` and `step`
    gives what `forward` gives for the whole sequence.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        feature_map: FeatureMap | None = None,
        rule: str = "delta",
        key_norm: str | None = "auto",
        normalize: bool | None = None,
    ):
        super().__init__()
        width = head_width("FastWeightAttention", d_model, heads)
        if rule not in RULES:
            wanted = ", ".join(map(repr, RULES))
            raise ValueError(
                f"FastWeightAttention: unknown rule {rule!r}; wanted one of {wanted}"
            )
        self.op, default_map, default_norm, default_normalize = RULES[rule]
        if key_norm == "auto":
            key_norm = default_norm
        if key_norm not in KEY_NORMS:
            raise ValueError(
                f"FastWeightAttention: unknown key_norm {key_norm!r}; wanted 'sum', 'l2' or None"
            )
        self.d_model, self.heads, self.rule, self.key_norm = (
            d_model,
            heads,
            rule,
            key_norm,
        )
        self.normalize = default_normalize if normalize is None else normalize
        if feature_map is None:
            feature_map = default_map()
        elif not isinstance(feature_map, FeatureMap):
            raise TypeError(
                "FastWeightAttention: feature_map must be a FeatureMap, such as "
                f"DPFP(nu=1), not {feature_map!r}"
            )
        self.feature_map = feature_map
        #: `[heads, value, key]`, the shape of the fast weights of one sequence.
        self.state_shape = (heads, width, self.feature_map.width(width))

        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)
        self.to_beta = (
            nn.Linear(d_model, heads, bias=False) if rule == "delta" else None
        )
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, implementation: str = "auto"
    ) -> Tensor:
        """The whole sequence at once.

        - `x`: `[batch, time, d_model]`.
        - `key_mask`: `bool [batch, time]`, True = real token.
        - `implementation`: as for the operations of `fwlab.ops`.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError` for an `x` that does not fit.
        """
        return self.prefill(x, None, key_mask, implementation)[0]

    def prefill(
        self,
        x: Tensor,
        state: State | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
    ) -> tuple[Tensor, State]:
        """A stretch of the sequence at once, and the state after it.

        - `x`: `[batch, time, d_model]`.
        - `state`: the state before it; None = empty memory.
        - `key_mask`, `implementation`: as in `forward`.
        - Returns `(y, state)`: `[batch, time, d_model]`, and the fast
          weights `[batch, heads, value, key]` (with `normalize`, a
          `NormalizedState`).
        """
        check_input(
            "FastWeightAttention", "x", x, "batch time d_model", self.to_q.weight
        )
        q, k, v = (
            split_heads(project(x), self.heads)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        q, k = (KEY_NORMS[self.key_norm](self.feature_map(part)) for part in (q, k))
        gates = () if self.to_beta is None else (torch.sigmoid(self.to_beta(x)),)
        y, state = self.op(
            q,
            k,
            v,
            *gates,
            normalize=self.normalize,
            key_mask=key_mask,
            state=state,
            return_state=True,
            implementation=implementation,
        )
        return self.to_out(y.flatten(-2)), state

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One token, in time and memory that do not grow.

        - `x`: `[batch, d_model]`.
        - `state`: the state before it; None = empty memory.
        - Returns `(y, state)`, `y` being `[batch, d_model]`.
        """
        check_input("FastWeightAttention", "x", x, "batch d_model", self.to_q.weight)
        y, state = self.prefill(x[:, None], state, implementation="naive")
        return y[:, 0], state

    def extra_repr(self) -> str:
        return f"rule={self.rule!r}, key_norm={self.key_norm!r}, normalize={self.normalize}"
