r"""# RWKV-7, one step at a time

RWKV-7 ([Peng et al. 2025](https://arxiv.org/abs/2503.14456)) removes
with one pair of vectors and writes with another: the memory is
multiplied by a diagonal matrix plus a matrix of rank one. In the delta
rule these are the identity and $-\beta\, k \otimes k$. Equation numbers
are those of [Schlag et al. 2021](https://arxiv.org/abs/2102.11174),
those with a letter are ours. The paper writes vectors as rows: its
$v^\top k$ is our $v \otimes k$.

- `q`, `k`, `a`, `b`, `log_decay`: `[batch, time, heads, key]`.
- `v`: `[batch, time, heads, value]`.
- `W`: `[batch, heads, value, key]`.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.ops.call.call import Variants
from fwlab.ops.call.rule import Gate, Rule, decay_gate, factor, in_turn
from fwlab.ops.correcting import PLAIN
from fwlab.ops.correcting.rules.delta import read, steps


def transition(
    W: Tensor, a: Tensor, b: Tensor, log_decay: Tensor
) -> Tensor:
    r"""Multiply by a diagonal matrix plus one of rank one:

    $$\hat W_i = W_{i-1}\,\big(\mathrm{diag}(e^{\mathrm{log\_decay}_i})
      + a_i\, b_i^\top\big) \tag{n8}$$

    - `W`: `[..., value, key]`; `a`, `b`, `log_decay`: `[..., key]`.
    """
    moved = torch.einsum("...v,...k->...vk", read(W, a), b)
    return W * log_decay.exp()[..., None, :] + moved


def loop(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    log_decay: Tensor, W: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Move, add a pair, then read."""
    y = []
    for q_t, k_t, v_t, a_t, b_t, l_t in steps(q, k, v, a, b, log_decay):
        W = transition(W, a_t, b_t, l_t)  # (n8)
        W = W + torch.einsum("...v,...k->...vk", v_t, k_t)  # Eq. 17
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def two_steps(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
    log_decay: Tensor, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """First correct with `a` and `b`, towards 0; then add the pair.

    $a$ asks the memory before it fades. After that it would have to be
    $a$ divided by the decay, which may be 0.
    """
    return {
        "q": in_turn(torch.zeros_like(q), q),
        "k": in_turn(b, k),
        "v": in_turn(torch.zeros_like(v), v),
        "ask": in_turn(-a, torch.zeros_like(a)),
        "decay": factor(in_turn(log_decay, torch.zeros_like(a))),
        "early": True,
    }


RWKV7_RULE = Rule(
    name="rwkv7_rule",
    folder="correcting",
    implementations={"naive": Variants(loop), **PLAIN},
    gates={
        "a": Gate("heads key", edges=(0.0, 0.0), kind="removed"),
        "b": Gate("heads key", edges=(0.0, 0.0), kind="rate"),
        "log_decay": decay_gate("heads key", kind="bounded_decay"),
    },
    inputs=two_steps,
    # The paper removes a part of what the key holds.
    related=lambda k, b, **_: {"a": -k, "b": k * b},
    corrects=True,
    normalizes=False,
    mixer="rwkv7",
    key_norm="l2",
    benchmarks=((1024, 64),),
)


def rwkv7_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Fade every key channel, move a part of the memory, add, read.

    $W_t = W_{t-1} \big(\mathrm{diag}(e^{\text{log\_decay}_t})
    + a_t b_t^\top\big) + v_t \otimes k_t$ and $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`. Grouped heads as for
      `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `a`, `b`: `[batch, time, heads, key]`; the paper has
      $a = -\hat\kappa$ of length 1, and $b = \hat\kappa$ times a rate
      from 0 to 1 per channel.
    - `log_decay`: `[batch, time, heads, key]`, at most 0; the paper
      keeps it above $-0.61$. The rule is exact for any, $-\infty$
      included.
    - `scale`, `key_mask`, `cu_seqlens`, `state`, `return_state`: as for
      `sum_rule`.
    - `implementation`: "auto", "naive", "chunked" or "efficient".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    With $a = -b$, the key $b$ is emptied before the pair is added.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> none = torch.zeros_like(k)
        >>> ops.rwkv7_rule(k, k, v, -k, k, none).flatten()
        tensor([4., 8.])

    Source: Peng et al. 2025 (arXiv:2503.14456).
    """
    return RWKV7_RULE(
        q, k, v, {"a": a, "b": b, "log_decay": log_decay},
        scale=scale, key_mask=key_mask, cu_seqlens=cu_seqlens,
        state=state, return_state=return_state,
        implementation=implementation,
    )  # fmt: skip
