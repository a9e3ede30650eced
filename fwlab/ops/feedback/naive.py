r"""# Feedback memory, one step at a time

A layer of a transformer attends to what the layer below it has computed, never to
anything higher. The feedback transformer keeps *one* memory per step, made from the
results of all layers at that step, and every layer of every later step attends to it.
So even the lowest layer can use the highest representations of the past. The price is
that the steps must be computed one after the other.

The model is that of [Fan et al. 2020](https://arxiv.org/abs/2002.09402), with equation
numbers of our own. The positions are not theirs: a learned table has a maximum length,
but a projection of sinusoids (as in Transformer-XL) has none.

The functions below take the memories of all steps so far, and project them again at
every step and in every layer, as the equations say.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops.feedback.weights import EPS, FeedbackWeights


def merge_memory(states: Tensor, w: Tensor) -> Tensor:
    r"""Compute the memory of a step from its representations in all layers:

    $$m_t = \sum_{l=0}^{L} \mathrm{softmax}(w)_l\; x_t^l \tag{f1}$$

    $x_t^0$ is the input of the stack, and $x_t^L$ its output.

    - `states`: `[L + 1, ..., d]`, `w`: `[L + 1]`. Returns `[..., d]`.
    """
    return torch.einsum("l,l...d->...d", torch.softmax(w, dim=0), states)  # Eq. f1


def norm(x: Tensor, scale: Tensor) -> Tensor:
    """Apply a layer norm without a bias to `x` `[..., d]`, with `scale` `[d]`."""
    return F.layer_norm(x, scale.shape, scale, eps=EPS)


def project_memory(m: Tensor, W: Tensor, scale: Tensor | None, heads: int) -> Tensor:
    r"""Project all memories to keys or values:

    $$k_j = W_K\, \mathrm{LN}(m_j), \qquad
      v_j = W_V\, \mathrm{LN}(m_j) \tag{f2}$$

    - `m`: `[batch, past, d]`, `W`: `[d, d]`.
    - `scale`: `[d]`, the scale of the norm; None = no norm.
    - Returns `[batch, past, heads, d / heads]`.
    """
    m = m if scale is None else norm(m, scale)
    return (m @ W.T).unflatten(-1, (heads, -1))  # Eq. f2


def sinusoids(distance: Tensor, features: int) -> Tensor:
    r"""Return the sines and cosines of distances, for many wavelengths:

    $$s(\delta) = \big[\sin \omega_i \delta,\; \cos \omega_i \delta
      \big]_i, \qquad
      \omega_i = 10^{-4 i / n}, \quad i = 0 \dots n - 1 \tag{f3}$$

    - `distance`: float64 `[past]`, `features`: $2n$.
    - Returns float64 `[past, features]`.
    """
    n = features // 2
    i = torch.arange(n, dtype=torch.float64, device=distance.device)
    angle = distance[:, None] * 10.0 ** (-4 * i / n)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)  # Eq. f3


def softmax(a: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the softmax over real memories, or zeros if no memory is real.

    - `a`: `[batch, heads, past]`.
    - `mask`: `bool [batch, earlier]`, for the oldest memories; None = all are real.
    """
    if mask is None:
        return torch.softmax(a, dim=-1)
    later = a.shape[-1] - mask.shape[-1]
    hidden = F.pad(~mask, (0, later))[:, None]
    # With -inf, the softmax would be NaN if all memories are hidden.
    a = a.masked_fill(hidden, torch.finfo(a.dtype).min)
    return torch.softmax(a, dim=-1).masked_fill(hidden, 0)


def feedback_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None = None
) -> Tensor:
    r"""Compute the attention of one query to the memories of earlier steps:

    $$r_\delta = P\, s(\delta), \qquad
      a_{tj} = \frac{q_t \cdot k_j + q_t \cdot r_{t-j}}
                    {\sqrt{d_{\text{key}}}} \tag{f4}$$
    $$z_t = \sum_{j<t} \mathrm{softmax}_{j<t}(a_{tj})\, v_j \tag{f5}$$

    The memory of the step itself is not among them. At the first step there are no
    memories, and the sum is 0. Both terms of the score are those of the authors' code,
    which also omits the biases that Transformer-XL adds to the query in each term.

    - `q`: `[batch, heads, key]`.
    - `k`, `v`: `[batch, past, heads, key]`, oldest first: the last one is 1 step back.
    - `positions`: `[key, features]`.
    - `mask`: `bool [batch, earlier]`, which of the oldest memories are real; None =
      all.
    - Returns `[batch, heads, key]`.
    """
    past, key = k.shape[1], k.shape[-1]
    back = torch.arange(past, 0, -1, dtype=torch.float64)
    s = sinusoids(back, positions.shape[1]).to(q)
    r = s @ positions.T  # Eq. f4
    content = torch.einsum("bhd,bjhd->bhj", q, k)
    position = torch.einsum("bhd,jd->bhj", q, r)
    a = (content + position) / key**0.5  # Eq. f4
    return torch.einsum("bhj,bjhd->bhd", softmax(a, mask), v)  # Eq. f5


def feedback(
    x: Tensor, weights: FeedbackWeights, heads: int, k: Tensor,
    v: Tensor, mask: Tensor | None, factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""Compute the stack step by step: all layers of a step, then its memory.

    $$q_t^l = W_Q^l\, \mathrm{LN}(x_t^l), \qquad
      \tilde x_t^l = x_t^l + W_O^l\, z_t^l \tag{f6}$$
    $$x_t^{l+1} = \tilde x_t^l
      + W_2^l\, \mathrm{GELU}\big(W_1^l\,
        \mathrm{LN}(\tilde x_t^l)\big) \tag{f7}$$

    - `x`: `[batch, time, d]`.
    - `k`, `v`: `[batch, past, groups, heads, key]`, keys and values of the memories of
      earlier calls.
    - `mask`: `bool [batch, past]`, True = a real memory; None = all.
    - `factors`: of dropout, `[batch, time, layers, 2 * d + d_ff]`; None = 1.
    - Returns `y` like `x`, and the keys and values of all memories.
    """
    w, layers, groups = weights, weights.to_q.shape[0], k.shape[2]

    def keys_and_values(m: Tensor, g: int) -> tuple[Tensor, Tensor]:
        """Project `m` to keys and values (Eq. f2), and append them to `k` and `v`."""
        scale = None if w.norm_memory is None else w.norm_memory[g]
        new_k = project_memory(m, w.to_k[g], scale, heads)
        new_v = project_memory(m, w.to_v[g], scale, heads)
        return (
            torch.cat([k[:, :, g], new_k], dim=1),
            torch.cat([v[:, :, g], new_v], dim=1),
        )

    # A step computes its layers from the bottom up, then its memory.
    m, y = x[:, :0], []
    f_z = f_h = f_y = 1.0
    for t, x_t in enumerate(x.unbind(1)):
        states = [x_t]
        for l in range(layers):
            x_l = states[-1]
            if factors is not None:
                d, d_ff = w.contract.shape[1:]
                f_z, f_h, f_y = factors[:, t, l].split([d, d_ff, d], -1)
            q = norm(x_l, w.norm_mixer[l]) @ w.to_q[l].T  # Eq. f6
            z = feedback_attention(
                q.unflatten(-1, (heads, -1)),
                *keys_and_values(m, l if groups > 1 else 0),
                w.positions,
                mask,
            )
            x_l = x_l + f_z * (z.flatten(1) @ w.to_out[l].T)  # Eq. f6
            h = f_h * F.gelu(norm(x_l, w.norm_mlp[l]) @ w.expand[l].T)
            states.append(x_l + f_y * (h @ w.contract[l].T))  # Eq. f7
        m_t = merge_memory(torch.stack(states), w.merge)  # Eq. f1
        m = torch.cat([m, m_t[:, None]], dim=1)
        y.append(states[-1])

    parts = [keys_and_values(m, g) for g in range(groups)]
    k, v = (torch.stack(part, dim=2) for part in zip(*parts, strict=True))
    return torch.stack(y, dim=1), k, v
