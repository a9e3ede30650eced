"""Answers to the exercises of notebook 16."""

import torch
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.solutions import padded_state, recall_by_hand, value_groups

NO_GRADIENT = {"recall_by_hand"}


# --- value_groups


def by_index(x, value_heads):
    return x[..., torch.arange(value_heads) * x.shape[-2] // value_heads, :]


def by_expanding(x, value_heads):
    *lead, heads, width = x.shape
    x = x[..., None, :].expand(*lead, heads, value_heads // heads, width)
    return x.reshape(*lead, value_heads, width)


def by_matrix(x, value_heads):
    heads = x.shape[-2]
    which = torch.arange(value_heads)[:, None] // (value_heads // heads)
    return (which == torch.arange(heads)).to(x.dtype) @ x


def one_after_another(x, value_heads):
    each = value_heads // x.shape[-2]
    return torch.stack([x[..., h // each, :] for h in range(value_heads)], -2)


# --- modern_layer


def token_by_token(
    x, W_qkv, conv, W_z, W_b, W_a, A_log, dt_bias, norm, W_out, key_heads
):
    """Loops over time and heads, with a window of four inputs."""
    heads, V = len(A_log), len(norm)
    K = (len(W_qkv) - heads * V) // (2 * key_heads)
    W = x.new_zeros(len(x), heads, V, K)
    last, rows = [x.new_zeros(len(x), len(W_qkv))] * 3, []
    for x_t in x.unbind(1):
        last.append(x_t @ W_qkv.T)
        mixed = sum(c * p for c, p in zip(conv.unbind(1), last[-4:], strict=True))
        mixed, states, read = mixed * mixed.sigmoid(), [], []
        beta = 1 / (1 + (-(x_t @ W_b.T)).exp())
        fade = (1 + (x_t @ W_a.T + dt_bias).exp()) ** -A_log.exp()
        for h in range(heads):
            g = h * key_heads // heads
            q = mixed[:, g * K : (g + 1) * K]
            k = mixed[:, (key_heads + g) * K : (key_heads + g + 1) * K]
            v = mixed[:, 2 * key_heads * K + h * V :][:, :V]
            q, k = (p * ((p * p).sum(1, keepdim=True) + 1e-6).rsqrt() for p in (q, k))
            S = fade[:, h, None, None] * W[:, h]
            u = beta[:, h, None] * (v - torch.einsum("bvk,bk->bv", S, k))
            S = S + torch.einsum("bv,bk->bvk", u, k)
            y = torch.einsum("bvk,bk->bv", S, q) / K**0.5
            y = norm * y / ((y * y).mean(1, keepdim=True) + 1e-6).sqrt()
            z = x_t @ W_z[h * V : (h + 1) * V].T
            states.append(S)
            read.append(y * z * z.sigmoid())
        W = torch.stack(states, 1)
        rows.append(torch.cat(read, 1) @ W_out.T)
    return torch.stack(rows, 1)


def layer(
    x,
    W_qkv,
    conv,
    W_z,
    W_b,
    W_a,
    A_log,
    dt_bias,
    norm,
    W_out,
    key_heads,
    repeat=value_groups,
    rule=ops.gated_delta_rule,
    ask=1,
    out=lambda y: y,
):
    """With one convolution each for q, k and v."""
    heads = len(A_log)
    keys = (len(W_qkv) - heads * len(norm)) // 2
    parts = []
    for W, c in zip(
        *(p.split([keys, keys, len(p) - 2 * keys]) for p in (W_qkv, conv)), strict=True
    ):
        part = F.linear(x, W).transpose(1, 2)
        c = c.unsqueeze(1)
        part = F.conv1d(part, c, padding=3, groups=len(c))[..., : x.shape[1]]
        parts.append(F.silu(part).transpose(1, 2))
    q, k = (p.unflatten(-1, (key_heads, -1)) for p in parts[:2])
    q, k = (p / (p.norm(dim=-1, keepdim=True) ** 2 + 1e-6) ** 0.5 for p in (q, k))
    q = ask * q / q.shape[-1] ** 0.5
    v, b = parts[2].unflatten(-1, (heads, -1)), F.linear(x, W_b).sigmoid()
    fade = F.logsigmoid(-F.linear(x, W_a) - dt_bias) * A_log.exp()
    y = rule(repeat(q, heads), repeat(k, heads), v, b, fade)
    y = out(y) * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm
    z = F.silu(F.linear(x, W_z)).unflatten(-1, (heads, -1))
    return F.linear((y * z).flatten(2), W_out)


def naive(*inputs):
    def rule(q, k, v, beta, fade):
        return ops.gated_delta_rule(q, k, v, beta, fade, implementation="naive")

    return layer(*inputs, rule=rule)


def batch_by_batch(x, *weights):
    return torch.cat([layer(row[None], *weights) for row in x])


def in_einsums(*inputs):
    return layer(*inputs, repeat=by_matrix)


def late(q, k, v, beta, fade):
    """Reads before it writes."""
    y = ops.gated_delta_rule(q, k, v, beta, fade)
    return torch.cat([0 * y[:, :1], y[:, :-1]], 1)


def no_correction(q, k, v, beta, fade):
    v = beta[..., None] * v
    return ops.sum_rule(q, k, v, log_decay=fade, normalize=False)


def fades_last(q, k, v, beta, fade):
    later = torch.cat([torch.zeros_like(fade[:, :1]), fade[:, :-1]], 1)
    return ops.gated_delta_rule(q, k, v, beta, later)


# --- padded_state


def with_a_mask(k, v, beta, log_decay, mask):
    one = [x[:, :, None] for x in (k, k, v, beta, log_decay)]
    return ops.gated_delta_rule(*one, key_mask=mask, return_state=True)[1][:, 0]


def neutral(k, v, beta, log_decay, mask):
    real = mask.to(v.dtype)
    return every(k, v, beta * real, log_decay * real)


def every(k, v, beta, log_decay):
    W = v.new_zeros(len(v), v.shape[2], k.shape[2])
    for k_t, v_t, b_t, l_t in zip(
        *(x.unbind(1) for x in (k, v, beta, log_decay)), strict=True
    ):
        W = W * l_t.exp()[:, None, None]
        error = v_t - torch.einsum("bvk,bk->bv", W, k_t)
        W = W + torch.einsum("b,bv,bk->bvk", b_t, error, k_t)
    return W


def keeps_the_old(k, v, beta, log_decay, mask):
    W = v.new_zeros(len(v), v.shape[2], k.shape[2])
    for t in range(k.shape[1]):
        step = [x[:, t : t + 1] for x in (k, v, beta, log_decay)]
        new = log_decay[:, t].exp()[:, None, None] * W
        new = new + every(step[0], step[1] - (new @ k[:, t, :, None]).mT, *step[2:])
        W = torch.where(mask[:, t, None, None], new, W)
    return W


def alone(k, v, beta, log_decay, mask):
    rows = [
        every(*(x[i, mask[i]][None] for x in (k, v, beta, log_decay)))
        for i in range(len(k))
    ]
    return torch.cat(rows)


def before_the_end(k, v, beta, log_decay, mask):
    """Stops at the first padded token."""
    real = mask.to(v.dtype).cumprod(1)
    return every(k, v, beta * real, log_decay * real)


def after_the_start(k, v, beta, log_decay, mask):
    """Counts every token from the first real one on as real."""
    real = mask.to(v.dtype).cummax(1).values
    return every(k, v, beta * real, log_decay * real)


def to_the_last(k, v, beta, log_decay, mask):
    """Counts every token up to the last real one as real, also inside."""
    real = mask.flip(1).to(v.dtype).cummax(1).values.flip(1)
    real = real * mask.to(v.dtype).cummax(1).values
    return every(k, v, beta * real, log_decay * real)


# --- recall_by_hand


def turned(n):
    """Keys in another orthonormal basis."""
    Q = torch.linalg.qr(torch.rand(2 * n, 2 * n, generator=torch.Generator())).Q
    _, conv = recall_by_hand(n)
    return torch.cat([2 * Q, 2 * Q, torch.eye(2 * n)]), conv


def negative(n):
    """A weight of 0 where nothing is needed; keys larger than queries."""
    W, conv = recall_by_hand(n)
    W[: 4 * n] *= 3
    W[: 4 * n, n:] = 0
    return W, conv


def half_taps(n):
    W, conv = recall_by_hand(n)
    return 5 * W, conv / 2


def in_a_loop(n):
    W, conv = torch.zeros(6 * n, 2 * n), torch.zeros(6 * n, 4)
    for token in range(2 * n):
        for part, tap in enumerate((3, 2, 3)):
            W[part * 2 * n + token, token] = 1
            conv[part * 2 * n + token, tap] = 1
    return W, conv


def taps(n, q=(0, 0, 0, 1), k=(0, 0, 1, 0), v=(0, 0, 0, 1), W=None):
    conv = torch.tensor([q, k, v]).float().repeat_interleave(2 * n, 0)
    return torch.eye(2 * n).repeat(3, 1) if W is None else W, conv


def in_context(n):
    """Keys that contain the value before them, too."""
    W, conv = taps(n)
    conv[3 * n : 4 * n] = torch.tensor([0.0, 2, 0, 0])
    return W, conv


WRONG = {
    "value_groups": {
        "x": "as many heads",
        "x.repeat_interleave(value_heads, -2)": "as many heads",
        "x.repeat_interleave(value_heads // x.shape[-2], -1)": "as many heads",
        "torch.cat([x] + [0 * x] * (value_heads // x.shape[-2] - 1), -2)": "single key",
        "x.repeat(*[1] * (x.dim() - 2), value_heads // x.shape[-2], 1)": "side by side",
        "x[..., torch.arange(value_heads) % x.shape[-2], :]": "side by side",
        "right(x, value_heads).flip(-2)": "changes nothing",
        "x.repeat_interleave(value_heads // x.shape[2], 2)": "leading dimensions",
        "right(x.detach(), value_heads)": "lets gradients",
    },
    "modern_layer": {
        "x[..., :3]": "of the shape",
        "right(x * 1, W_qkv, conv, W_z, -W_b, W_a, A_log, dt_bias, norm, W_out, "
        "key_heads)": "first token",
        "layer(*inputs, rule=late)": "first token",
        "layer(*inputs, out=torch.relu)": "first token",
        "layer(*inputs, ask=-1)": "first token",
        "layer(*inputs, rule=no_correction)": "several tokens",
        "layer(*inputs, rule=fades_last)": "several tokens",
        "right(x, W_qkv, conv, W_z, W_b, W_a, -A_log, dt_bias, norm, W_out, "
        "key_heads)": "several tokens",
        "layer(*inputs, repeat=lambda x, h: x.flip(-2).repeat_interleave("
        "h // x.shape[-2], -2) if h > x.shape[-2] else x)": "more value heads",
        "right(*inputs) * (1 + 3e-5 * (x.shape[1] == 9))": "transformers",
    },
    "padded_state": {
        "every(k, v, beta, log_decay)[:, :2]": "state for each",
        "every(k, v, beta * mask, 0 * log_decay)": "without padding",
        "every(k, v, beta * mask, log_decay.exp())": "without padding",
        "right(k, v, beta, log_decay, mask) * mask[:, :1, None]": "at the start",
        "before_the_end(*inputs)": "at the start",
        "right(k, v, beta, log_decay, mask) * mask[:, -1:, None]": "at the end",
        "after_the_start(*inputs)": "at the end",
        "to_the_last(*inputs)": "padding inside",
    },
    "recall_by_hand": {
        "(torch.eye(2 * n), torch.ones(6 * n, 4))": "returns W_qkv",
        "taps(n, k=(0, 0, 0, 0))": "single pair",
        "taps(n, k=(0, 0, 1, 1), v=(0, 0, 1, 0))": "several pairs",
        "taps(n, v=(0, 0, 0, 0))": "single pair",
        "taps(n, W=torch.ones(6 * n, 2 * n))": "single pair",
        "taps(n, W=torch.zeros(6 * n, 2 * n))": "single pair",
        "taps(n, k=(0, 0, -1, 0))": "single pair",
        "taps(n, W=torch.cat([torch.ones(4 * n, 2 * n), torch.eye(2 * n)]))": (
            "single pair"
        ),
        "taps(n, k=(1, 1, 1, 0))": "single pair",
        "in_context(n)": "came again",
    },
}
TOLD = {
    "padded_state": {
        "every(k, v, beta * mask, log_decay)": "the longer the padding",
    },
    "modern_layer": {
        "right(x.flip(1), *[W_qkv, conv.flip(1), W_z, W_b, W_a, A_log, dt_bias, norm, "
        "W_out, key_heads]).flip(1)": "Before the first token there are zeros",
    },
}
RIGHT = {
    "value_groups": [by_index, by_expanding, by_matrix, one_after_another],
    "modern_layer": [token_by_token, naive, batch_by_batch, in_einsums],
    "padded_state": [with_a_mask, neutral, keeps_the_old, alone],
    "recall_by_hand": [turned, negative, half_taps, in_a_loop],
}
del padded_state
