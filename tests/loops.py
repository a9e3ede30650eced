"""Compute every operation as a loop in float64, as in the papers, for `fuzz.py`.

No code here is from fwlab: one line per equation, with its number, on plain tensors.
A loop takes the options of a case, the inputs of one sequence, `[time, ...]`, and the
parts of its state. It returns y, and the parts of the final state. Masked tokens are
dropped before a loop is called; a loop gets the mask only if distances also count
masked tokens. The mask is True at real steps.
"""

import math
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]
Named = dict[str, Tensor]
Parts = list[Tensor]

ACTIVATIONS: Named | Any = {"none": None, "tanh": torch.tanh, "sin": torch.sin}


#: Operations whose reference loop is `fast_weights`.
RULES = ("sum_rule", "gated_rule", "delta_rule", "gated_delta_rule", "kimi_delta_rule")
RULES += ("gated_delta_rule_2", "comba_rule", "implicit_delta_rule", "delta_product")
RULES += ("rwkv7_rule",)
DELTA = ("delta_rule", "gated_delta_rule", "kimi_delta_rule", "comba_rule")
DELTA += ("implicit_delta_rule",)
AFT = ("aft_simple", "aft_full", "aft_local", "aft_conv", "aft_conv2d")
OTHERS = ("fwp", "softmax_attention", *AFT, "feedback", "feedback_attention")
MAPS = ("ELU1", "DPFP", "FAVOR", "RandomFourier", "sum_normalize", "l2_normalize")
#: Operations whose relative distances also count masked tokens.
PLACED = ("softmax_attention", "aft_full", "aft_local", "aft_conv", "aft_conv2d")


def over(x: Tensor, total: Tensor) -> Tensor:
    """Return x / total, or 0 with gradient 0 where `total` is 0."""
    return x / torch.where(total == 0, math.inf, total)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def dpfp(x: Tensor) -> Tensor:
    r = torch.relu(torch.cat([x, -x], -1))
    return r * torch.cat([r[..., 1:], r[..., :1]], -1)  # DPFP, Eq. 37 with nu = 1


def fast_weights(c: Case, x: Named, state: Parts) -> Any:
    op, (q, k), v = c["op"], (x["q"], x["k"]), x["v"]
    W, z = [*state, torch.zeros(())][:2]
    q = q if c["scale"] is None else q * c["scale"]
    heads = [i // c["group"] for i in range(q.shape[1])]
    y = v.new_zeros(len(q), len(heads), v.shape[-1])
    for t in range(len(q)):
        b = x["beta"][t][:, None] if "beta" in x else 1.0
        before = W
        if "log_decay" in x:  # Fast weights decay before they are read.
            d = x["log_decay"][t].exp()
            d = d[:, None] if d.dim() == 1 else d
            W, z = W * d[:, None], z * d
        new, more, ask = v[t], k[t], k[t]
        if op == "gated_rule":  # Eq. 52
            W, z = W * (1 - b)[..., None], z * (1 - b)
            new, more = b * new, b * more
        elif op == "rwkv7_rule":  # W (diag(d) + a b'), plus the term of the sum rule
            moved = (before * x["a"][t][:, None]).sum(-1)
            W = W + moved[..., None] * x["b"][t][:, None]
        elif op == "gated_delta_rule_2":
            retrieved = (W * (x["erase"][t] * ask)[:, None]).sum(-1)
            new = x["write"][t] * new - retrieved
        elif op == "delta_product":  # Apply all steps of a token except the last.
            for k_j, v_j, b_j in zip(
                more[:-1], new[:-1], x["beta"][t][:-1], strict=True
            ):
                u = b_j[:, None] * (v_j - (W * k_j[:, None]).sum(-1))
                W = W + u[..., None] * k_j[:, None]
            more, b = more[-1], x["beta"][t][-1][:, None]
            new = b * (new[-1] - (W * more[:, None]).sum(-1))
        elif op in DELTA:
            if op == "comba_rule":
                ask = x["ask"][t][:, None] * ask
            if op == "implicit_delta_rule":  # Use the step size of the implicit update.
                b = b / (1 + b * dot(ask, ask))
            v_bar = (W * ask[:, None]).sum(-1)  # Eq. 20
            v_bar = over(v_bar, dot(z, ask)) if c["normalize"] else v_bar  # Eq. 27
            new = b * (new - v_bar)  # Scale the error (Eqs. 24, 26).
        elif op != "sum_rule":  # The sum rule only adds (Eqs. 17, 18).
            raise NotImplementedError(f"{op} has no loop in tests/loops.py")
        key = more if op == "delta_product" else k[t]
        W, z = W + new[..., None] * key[:, None], z + more if c["normalize"] else z
        y_t = (W[heads] * q[t][:, None]).sum(-1)  # Eq. 25
        y_t = over(y_t, dot(z[heads], q[t])) if c["normalize"] else y_t  # Eqs. 19, 28
        y = y.index_put((torch.tensor(t),), y_t)
    return y, [W, z][: len(state)]


def fwp(c: Case, x: Named, state: Parts) -> Any:
    (W,), y = state, torch.zeros_like(x["a"])
    sigma = ACTIVATIONS[c["activation"]] or torch.positive
    for t in range(len(y)):
        W = sigma(W + x["a"][t][..., None] * x["b"][t][:, None])  # Eq. 2
        y = y.index_put((torch.tensor(t),), (W * x["x"][t][:, None]).sum(-1))  # Eq. 3
    return y, [W]


def softmax(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of `v` with weights softmax(a, 0), and logsumexp(a, 0)."""
    top = a.detach().amax(0) if len(a) else a.new_full(a.shape[1:], -math.inf)
    e = (a - torch.where(top == -math.inf, 0, top)).exp()
    total = e.sum(0)
    log = torch.where(total == 0, 1, total).log() + top
    return over((e * v).sum(0), total), log


def softmax_attention(c: Case, x: Named, state: Parts, real: Tensor) -> Any:
    q, past, width = x["q"], len(state[0]), max(x["q"].shape[-1], 1)
    k, v = (
        torch.cat([old, torch.where(real[:, None, None], x[n], 0)])
        for old, n in zip(state, "kv", strict=True)
    )
    seen = torch.cat([torch.ones(past, dtype=torch.bool), real])
    heads = [i // c["group"] for i in range(q.shape[1])]
    y = v.new_zeros(len(q), len(heads), v.shape[-1])
    for t in real.nonzero()[:, 0]:
        now = seen[: past + t + 1].nonzero()[:, 0]
        a = dot(k[now][:, heads], q[t])
        a = a * (width**-0.5 if c["scale"] is None else c["scale"])
        y = y.index_put((t,), softmax(a, v[now][:, heads])[0])  # Eq. 7
    return y, [k, v]


def bias_of(c: Case, x: Named, t: int, place: int | None) -> Tensor | float:
    """Return a key's bias for query t; `place` is None for a key outside windows."""
    op, s = c["op"], c["window"]
    if op == "aft_simple" or place is None:
        return 0.0
    if op == "aft_full":
        return x["bias"][t, place + x["bias"].shape[1] - len(x["bias"])]
    if op == "aft_conv2d":  # Find the position of the key relative to the pixel.
        (y0, x0), (y1, x1) = (divmod(i, x["q"].shape[1]) for i in (t, place))
        at = y1 - y0 + s - 1, x1 - x0 + s - 1
        inside = min(at) >= 0 and max(at) <= 2 * s - 2
        return x["kernel"][(slice(None), *at)][:, None] if inside else 0.0  # Eq. 6
    back = t - place
    if abs(back) >= s:
        return 0.0  # Eq. 4
    column = back if back >= 0 else s - 1 - back
    return x["band"][t, column] if op == "aft_local" else x["kernel"][:, column, None]


def aft(c: Case, x: Named, state: Parts, real: Tensor | None = None) -> Any:
    op, (q, k, v) = c["op"], (x[n] for n in "qkv")
    if op == "aft_conv2d":
        q, k, v = (p.flatten(0, 1) for p in (q, k, v))
    causal = c["causal"] and op != "aft_conv2d"
    real = torch.ones(len(q), dtype=torch.bool) if real is None else real
    shape, k, recent = v.shape[1:], k.expand(v.shape), 0
    none = k.new_full(shape, -math.inf), v.new_zeros(shape)
    keys: list[Any] = []  # (position, k, v) of merged, recent and new keys
    if causal and op != "aft_full":
        keys = [(None, *state[-2:])]
    if causal and op != "aft_simple":
        recent = len(state[0])
        keys += [(j - recent, state[0][j], state[1][j]) for j in range(recent)]
    keys = [(place, a.view(shape), b.view(shape)) for place, a, b in keys]
    for t, is_real in enumerate(real.flatten()):
        keys.append((t, k[t], v[t]) if is_real else (t, *none))
    y = torch.zeros_like(v)
    for t in real.flatten().nonzero()[:, 0].tolist():
        now = [(p, a, b) for p, a, b in keys if not causal or p is None or p <= t]
        a = torch.stack([k_j + bias_of(c, x, t, p) for p, k_j, _ in now])
        mean, _ = softmax(a, torch.stack([v_j for *_, v_j in now]))  # Eqs. 2, 4, 5, 6
        y = y.index_put((torch.tensor(t),), torch.sigmoid(q[t]) * mean)
    if not causal:
        return y.view(x["v"].shape), []
    flat = [torch.stack([key[i].flatten() for key in keys]) for i in (1, 2) if keys]
    if op == "aft_full":
        return y, flat or state
    older = len(keys) - recent
    mean, log = softmax(*(part[:older] for part in flat))
    return y, [*(part[older:] for part in flat if op != "aft_simple"), log, mean]


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attend with a query `[heads, key]` to keys `[past, heads, key]`, oldest first."""
    n = positions.shape[1] // 2
    waves = 10.0 ** (-4 * torch.arange(n) / n)
    angle = torch.arange(len(k), 0, -1)[:, None] * waves
    r = torch.cat([angle.sin(), angle.cos()], -1) @ positions.T  # Eqs. f3, f4
    a = (dot(k, q) + dot(r[:, None], q)) / q.shape[-1] ** 0.5  # Eq. f4
    return softmax(a, v)[0]  # Eq. f5


def feedback_attention(c: Case, x: Named, state: Parts) -> Any:
    return attend(x["q"], x["k"], x["v"], x["positions"]), []


def norm(x: Tensor, scale: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def feedback(c: Case, x: Named, state: Parts) -> Any:
    (k, v), y, heads = state, torch.zeros_like(x["x"]), c["heads"]
    d, d_ff = x["expand"].shape[:0:-1]
    for t in range(len(y)):
        states = [x["x"][t]]
        for l in range(c["layers"]):
            x_l, g = states[-1], l if k.shape[1] > 1 else 0
            f = x["factors"][t, l] if "factors" in x else torch.ones(2 * d + d_ff)
            q = x["to_q"][l] @ norm(x_l, x["norm_mixer"][l])  # Eq. f6
            z = attend(q.view(heads, -1), k[:, g], v[:, g], x["positions"])
            x_l = x_l + f[:d] * (x["to_out"][l] @ z.flatten())  # Eq. f6
            h = x["expand"][l] @ norm(x_l, x["norm_mlp"][l])
            h = h * (1 + torch.erf(h / 2**0.5)) / 2 * f[d:-d]  # GELU
            states.append(x_l + f[-d:] * (x["contract"][l] @ h))  # Eq. f7
        m = torch.softmax(x["merge"], 0) @ torch.stack(states)  # Eq. f1
        m = m.expand(k.shape[1], -1)
        m = norm(m, x["norm_memory"]) if "norm_memory" in x else m
        k, v = (
            torch.cat([old, torch.einsum("gij,gj->gi", W, m).view(1, *old.shape[1:])])
            for old, W in ((k, x["to_k"]), (v, x["to_v"]))
        )  # Eq. f2
        y = y.index_put((torch.tensor(t),), states[-1])
    return y, [k, v]


def feature_map(c: Case, x: Named, state: Parts) -> Any:
    op, p, omega = c["op"], x["x"], x.get("omega")
    if op == "ELU1":
        return torch.where(p > 0, p + 1, p.clamp(max=0).exp()), []  # Eq. 30
    if op == "DPFP":
        return dpfp(p), []
    if op == "sum_normalize":
        return over(p, p.sum(-1, keepdim=True)), []  # Eq. 29
    if op == "FAVOR":
        p = p * p.shape[-1] ** -0.25
        along = p @ omega.T
        both = torch.cat([along, -along], -1) - dot(p, p) / 2
        return both.exp() / (2 * len(omega)) ** 0.5, []  # FAVOR+ (Eqs. 31, 32)
    square = dot(p, p)
    root = torch.where(square == 0, 1, square).sqrt()
    p = over(p, torch.where(square == 0, 0, root))
    if op == "RandomFourier":
        along = p @ omega.T
        p = torch.cat([along.sin(), along.cos()], -1) / len(omega) ** 0.5
    return p, []


#: The reference loop of each operation and feature map.
LOOPS: dict[str, Any] = {
    **dict.fromkeys(RULES, fast_weights),
    **dict.fromkeys(AFT, aft),
    **dict.fromkeys(MAPS, feature_map),
    "fwp": fwp,
    "softmax_attention": softmax_attention,
    "feedback": feedback,
    "feedback_attention": feedback_attention,
}
