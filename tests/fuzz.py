"""Random problems for every operation, compared with loops from the papers.

    python tests/fuzz.py [--seed 20260101] [--cases 2000]
    python tests/fuzz.py --case "op=delta_rule time=33 seed=7"

The loops below are in float64, step by step, one line per equation, and share
nothing with fwlab. A case is a row of options: the operation, its implementation,
shapes, precision, masks, packed documents, cuts, storage, which inputs need
gradients. Outputs, states and gradients are compared. A case that fails is made
simpler, one option at a time, as long as it still fails; what is printed last
repeats it. The seed is the date unless it is given, so that every night has cases of
its own.

An error counts relative to the norm of what is expected, or to a hundredth of the
largest norm in this case: a gradient may vanish by cancellation. It may exceed the
limit only where no implementation can do better: up to 32 times the error that the
loop itself has in float32 (in float64: times 2^-29), with inputs that are off by up to
a rounding. Problems whose expected values exceed 10,000 are not compared: the
recurrence diverges.
"""

import argparse
import contextlib
import datetime
import math
import random
import sys
from typing import Any

import torch
from torch import Tensor

from fwlab import feature_maps, ops
from fwlab.ops.rule import Rule

RULES = {name: op for name, op in ops.TABLE.items() if isinstance(op, Rule)}
MAPS = ("ELU1", "DPFP", "FAVOR", "RandomFourier", "sum_normalize", "l2_normalize")
OPERATIONS = (*ops.TABLE, "feedback_attention", *MAPS)
LIMITS = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
LARGEST = 1e4
#: Every option with its simplest value; "op" and "seed" have none.
SIMPLEST: dict[str, Any] = {
    "implementation": "naive",
    "batch": 1,
    "time": 1,
    "heads": 1,
    "group": 1,
    "key": 1,
    "value": 1,
    "dtype": "float64",
    "normalize": 0,
    "scale": 1.0,
    "size": 1.0,
    "gates": "mild",
    "zeros": 0,
    "optional": 0,
    "window": 1,
    "causal": 1,
    "narrow": 0,
    "activation": "none",
    "layers": 1,
    "shared": 0,
    "factors": 0,
    "mask": "none",
    "documents": 0,
    "cuts": 0,
    "state": 0,
    "storage": "plain",
    "grad": "all",
    "autocast": 0,
}
Case = dict[str, Any]
Named = dict[str, Tensor]


# The loops. Each takes the inputs of one sequence, `[time, ...]`, the parts of its
# state, and which steps are real; it returns y and the parts of the state after it.


def over(x: Tensor, total: Tensor) -> Tensor:
    """A quotient; 0, with gradient 0, where the denominator is 0."""
    return x / torch.where(total == 0, math.inf, total)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def dpfp(x: Tensor) -> Tensor:
    r = torch.relu(torch.cat([x, -x], -1))
    return r * torch.cat([r[..., 1:], r[..., :1]], -1)  # Eq. 37 with nu = 1


def fast_weights(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    op, y = c["op"], []
    W, z = state if c["normalize"] else (state[0], torch.zeros(()))
    q, k = x["q"], x["k"]
    if op == "dpfp_delta_rule":
        q, k = (over(p, p.sum(-1, keepdim=True)) for p in (dpfp(q), dpfp(k)))
    for t in range(len(q)):
        if not real[t]:
            y.append(torch.zeros(q.shape[1], x["v"].shape[-1]))
            continue
        k_t, v_t, b = k[t], x["v"][t], x["beta"][t][:, None] if "beta" in x else 1.0
        if "log_decay" in x:  # first fade
            d = x["log_decay"][t].exp().unflatten(-1, (-1, 1))
            d = d.squeeze(-1) if d.dim() == 3 else d
            W, z = W * d[:, None], z * d
        if op == "sum_rule":
            W, z = W + v_t[..., None] * k_t[:, None], z + k_t  # Eqs. 17, 18
        elif op == "gated_rule":
            W = (1 - b)[..., None] * W + (b * v_t)[..., None] * k_t[:, None]  # Eq. 52
            z = (1 - b) * z + b * k_t
        elif op in ("delta_rule", "dpfp_delta_rule", "gated_delta_rule", "kimi_delta_rule"):
            v_bar = (W * k_t[:, None]).sum(-1)  # Eq. 20
            if c["normalize"]:
                v_bar = over(v_bar, dot(z, k_t))  # Eq. 27
            W = W + (b * (v_t - v_bar))[..., None] * k_t[:, None]  # Eq. 24
            z = z + k_t  # Eq. 26
        else:
            raise NotImplementedError(f"{op} has no loop in tests/fuzz.py")
        q_t, readers = q[t] * (1 if c["scale"] is None else c["scale"]), range(q.shape[1])
        heads = [i // c["group"] for i in readers]
        y_t = (W[heads] * q_t[:, None]).sum(-1)  # Eq. 25
        y.append(over(y_t, dot(z[heads], q_t)) if c["normalize"] else y_t)  # Eq. 28
    return stack(y, x["v"], q.shape[1]), [W, z] if c["normalize"] else [W]


def stack(y: list[Tensor], like: Tensor, heads: int) -> Tensor:
    return torch.stack(y) if y else like.new_zeros(0, heads, like.shape[-1])


ACTIVATIONS: dict[str, Any] = {"none": None, "tanh": torch.tanh, "sin": torch.sin}


def fwp(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    (W,), y = state, []
    sigma = ACTIVATIONS[c["activation"]] or (lambda W: W)
    for a, b, x_t, is_real in zip(x["a"], x["b"], x["x"], real, strict=True):
        if is_real:
            W = sigma(W + a[..., None] * b[:, None])  # Eq. 2
        y_t = (W * x_t[:, None]).sum(-1)  # Eq. 3
        y.append(y_t if is_real else torch.zeros_like(a))
    return stack(y, x["a"], x["a"].shape[1]), [W]


def softmax(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of `v` with weights exp(a) along dimension 0, and log sum exp."""
    top = a.detach().amax(0) if len(a) else torch.zeros(a.shape[1:])
    e = (a - torch.where(top == -math.inf, 0, top)).exp()
    total = e.sum(0)
    log = torch.where(total == 0, 1, total).log() + top
    return over((e * v).sum(0), total), torch.where(total == 0, -math.inf, log)


def softmax_attention(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    q, scale, past = x["q"], c["scale"], len(state[0])
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    x = {n: torch.where(real[:, None, None], x[n], 0) for n in "kv"}
    k, v = torch.cat([state[0], x["k"]]), torch.cat([state[1], x["v"]])
    seen, y = torch.cat([torch.ones(past, dtype=torch.bool), real]), []
    heads = [i // c["group"] for i in range(q.shape[1])]
    for t in range(len(q)):
        now = seen[: past + t + 1].nonzero()[:, 0]
        a = dot(k[now][:, heads], q[t]) * scale
        y_t = softmax(a, v[now][:, heads])[0]  # Eq. 7
        y.append(y_t if real[t] else torch.zeros(len(heads), v.shape[-1]))
    return stack(y, v, q.shape[1]), [k, v]


def bias_of(c: Case, x: Named, t: int, place: Any) -> Tensor | float:
    """w between row t and the key at a place; None = outside of every window."""
    if c["op"] == "aft_full":
        return x["bias"][t, place + len(x["bias"][0]) - len(x["bias"])]
    if c["op"] == "aft_simple" or place is None:
        return 0.0
    s = c["window"]
    if c["op"] == "aft_conv2d":  # Eq. 6: the offset of the key from the pixel
        (y0, x0), (y1, x1) = (divmod(i, x["q"].shape[1]) for i in (t, place))
        row, column = y1 - y0 + s - 1, x1 - x0 + s - 1
        inside = 0 <= row < 2 * s - 1 and 0 <= column < 2 * s - 1
        return x["kernel"][:, row, column][:, None] if inside else 0.0
    back = t - place
    if abs(back) >= s:
        return 0.0  # Eq. 4
    column = back if back >= 0 else s - 1 - back
    return x["band"][t, column] if "band" in x else x["kernel"][:, column][:, None]


def aft(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    op, (q, k, v) = c["op"], (x[n] for n in "qkv")
    if op == "aft_conv2d":
        q, k, v = (p.flatten(0, 1) for p in (q, k, v))
    shape, time = v.shape[1:], len(v)
    causal = c["causal"] and op != "aft_conv2d"
    real = real.flatten()
    places: list[int | None] = []
    if op == "aft_simple" and state:
        state = [part[None] for part in state]
        places = [None]
    elif op == "aft_full" and state:
        places = list(range(-len(state[0]), 0))
    elif state:  # recent keys, and all older ones as one
        recent = state[0].shape[0]
        state = [torch.cat([state[2 + i][None], state[i]]) for i in (0, 1)]
        places = [None, *range(-recent, 0)]
    if state:
        k = torch.cat([state[0].reshape(-1, *shape), k.expand(v.shape)])
        v = torch.cat([state[1].reshape(-1, *shape), v])
    seen = [True] * len(places) + real.tolist()
    places += range(time)
    y = []
    for t in range(time):
        now = [
            i
            for i, place in enumerate(places)
            if seen[i] and (not causal or place is None or place <= t)
        ]
        a = [k[i] + bias_of(c, x, t, places[i]) for i in now]
        a = torch.stack(a).expand(-1, *shape) if a else k.new_zeros(0, *shape)
        mean = softmax(a, v[now])[0]  # Eqs. 2, 4, 5, 6
        y.append(torch.sigmoid(q[t]) * mean if real[t] else torch.zeros(shape))
    y_all = torch.stack(y) if y else v.new_zeros(0, *shape)
    if not causal:
        return y_all.reshape(x["v"].shape), []
    hidden = torch.tensor([not s for s in seen], dtype=torch.bool)
    hidden = hidden.view(-1, *[1] * len(shape))
    k = torch.where(hidden, -math.inf, k).expand(v.shape).flatten(1)
    v = torch.where(hidden, 0, v).flatten(1)
    if op == "aft_full":
        return y_all, [k, v]
    recent = c["window"] - 1 if op != "aft_simple" else 0
    more = max(recent - len(k), 0)  # before the start
    k = torch.cat([torch.full((more, k.shape[1]), -math.inf), k])
    v = torch.cat([torch.zeros(more, v.shape[1]), v])
    mean, log = softmax(k[: len(k) - recent], v[: len(k) - recent])
    own = [k[len(k) - recent :], v[len(k) - recent :]] if op != "aft_simple" else []
    return y_all, [*own, log, mean]


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """One query `[heads, key]`; memories `[past, heads, key]`, oldest first."""
    n = positions.shape[1] // 2
    angle = torch.arange(len(k), 0, -1)[:, None] * 10.0 ** (-4 * torch.arange(n) / n)
    r = torch.cat([angle.sin(), angle.cos()], -1) @ positions.T  # Eqs. f3, f4
    a = (dot(k, q) + dot(r[:, None], q)) / math.sqrt(q.shape[-1])  # Eq. f4
    return softmax(a, v)[0]  # Eq. f5


def norm(x: Tensor, scale: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def feedback(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    (k, v), y = state, []  # [past, groups, heads, key]
    d, heads = x["x"].shape[-1], c["heads"]
    for t, x_l in enumerate(x["x"]):
        if not real[t]:
            y.append(torch.zeros_like(x_l))
            continue
        states = [x_l]
        for l in range(c["layers"]):
            g = 0 if c["shared"] else l
            f = x["factors"][t, l] if "factors" in x else torch.ones(2 * d + c["value"])
            q = x["to_q"][l] @ norm(x_l, x["norm_mixer"][l])  # Eq. f6
            z = attend(q.view(heads, -1), k[:, g], v[:, g], x["positions"]).flatten()
            x_l = x_l + f[:d] * (x["to_out"][l] @ z)  # Eq. f6
            h = x["expand"][l] @ norm(x_l, x["norm_mlp"][l])
            h = h * (1 + torch.erf(h / math.sqrt(2))) / 2 * f[d:-d]  # GELU
            x_l = x_l + f[-d:] * (x["contract"][l] @ h)  # Eq. f7
            states.append(x_l)
        m = torch.softmax(x["merge"], 0) @ torch.stack(states)  # Eq. f1
        ms = norm(m, x["norm_memory"]) if "norm_memory" in x else m.expand(k.shape[1], -1)
        k, v = (
            torch.cat([old, torch.einsum("gij,gj->gi", x[n], ms).view(1, *old.shape[1:])])
            for old, n in ((k, "to_k"), (v, "to_v"))
        )  # Eq. f2
        y.append(x_l)
    return torch.stack(y) if y else x["x"], [k, v]


def feedback_attention(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    return attend(x["q"], x["k"], x["v"], x["positions"]), []


def feature_map(c: Case, x: Named, state: list[Tensor], real: Tensor) -> Any:
    x_, op = x["x"], c["op"]
    if op == "ELU1":
        return torch.where(x_ > 0, x_ + 1, x_.clamp(max=0).exp()), []  # Eq. 30
    if op == "DPFP":
        return dpfp(x_), []
    if op == "sum_normalize":
        return over(x_, x_.sum(-1, keepdim=True)), []  # Eq. 29
    length = dot(x_, x_)
    unit = over(x_, torch.where(length == 0, 1, length).sqrt())
    if op == "l2_normalize":
        return unit, []
    if op == "RandomFourier":
        along = unit @ c["map"].omega.to(x_.dtype).T
        return torch.cat([along.sin(), along.cos()], -1) / math.sqrt(3), []
    x_ = x_ * c["key"] ** -0.25
    along = x_ @ c["map"].omega.to(x_.dtype).T
    both = torch.cat([along, -along], -1)
    return (both - dot(x_, x_) / 2).exp() / math.sqrt(6), []  # Eqs. 31, 32


def loop_of(op: str) -> Any:
    if op in RULES:
        return fast_weights
    if op in MAPS:
        return feature_map
    return aft if op.startswith("aft") else globals()[op]


# Problems.


class Problem:
    """The tensors of a case, which its seed decides."""

    def __init__(self, c: Case):
        self.c, self.g = c, torch.Generator().manual_seed(c["seed"])
        op, B, T, H, K, V = (c[n] for n in ("op", "batch", "time", "heads", "key", "value"))
        steps = (B, T, K) if op == "aft_conv2d" else (B, T)
        self.mask = torch.ones(steps, dtype=torch.bool)
        if c["mask"] != "none":
            self.mask = self.uniform(*steps) < 0.7
            if c["mask"] == "row":
                self.mask[:1] = False
        self.ends = [0, *self.places(c["documents"] - 1), T] if c["documents"] else []
        self.cuts = [0, *self.places(c["cuts"]), T]
        self.module = self.feature_map() if op in MAPS else None
        B, make = c["documents"] or B, "rule" if op in RULES else op.split("_")[0]
        x, state = getattr(self, make if op not in MAPS else "map")(steps, B, H, K, V)
        by_step = ("q", "k", "v", "a", "b", "x", "beta", "log_decay", "factors")
        self.shared = [n for n in x if n not in by_step]
        if c["mask"] != "none" and c["storage"] != "expanded":
            for name in by_step[:-1]:  # a masked step may hold anything
                if name in x:
                    x[name][~self.mask] = math.nan
        dtype = getattr(torch, c["dtype"])
        wide = torch.promote_types(dtype, torch.float32)
        if op == "softmax_attention":
            wide = dtype  # a cache is in the precision of the inputs
        #: Roundings of float32 in one of the sums.
        self.rounding = 2.0**-29 if dtype == torch.float64 else 1.0
        self.x = {n: self.leaf(part, dtype) for n, part in x.items()}
        self.state = [self.leaf(part, wide, bool(c["state"])) for part in state]
        if "factors" in x:
            self.x["factors"].requires_grad_(False)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.g, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g, dtype=torch.float64)

    def places(self, count: int) -> list[int]:
        at = torch.randint(self.c["time"] + 1, (count,), generator=self.g)
        return sorted(at.tolist())

    def pick(self, shape: tuple[int, ...], *values: float) -> Tensor:
        at = torch.randint(len(values), shape, generator=self.g)
        return torch.tensor(values, dtype=torch.float64)[at]

    def laid(self, x: Tensor) -> Tensor:
        """The same values in other storage; "expanded" repeats some of them."""
        storage = self.c["storage"]
        if storage == "strided":
            return torch.stack([x, x], -1)[..., 1]
        if storage == "offset":
            return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
        if storage == "transposed":
            return x.mT.contiguous().mT if x.dim() > 1 else x
        if storage == "expanded" and x.numel():
            dim = 2 if x.dim() > 2 else 0
            return x.narrow(dim, 0, 1).expand(x.shape)
        return x

    def leaf(self, x: Tensor, dtype: torch.dtype, given: bool = True) -> Tensor:
        needs = self.c["grad"] == "all" or (
            self.c["grad"] == "some" and self.uniform(1).item() < 0.5
        )
        return self.laid(x.to(dtype)).requires_grad_(needs and given)

    # Features are not negative where something is divided by their sums: a
    # signed sum may come as close to 0 as it likes.
    def features(self, *shape: int) -> Tensor:
        if self.c["normalize"]:
            x = (self.uniform(*shape) + 0.05) / max(shape[-1], 1)
        else:
            x = self.normal(*shape)
            x = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3) * self.c["size"]
        if self.c["zeros"]:
            x[self.uniform(*shape[:-1]) < 0.2] = 0
        return x

    def gate(self, name: str, shape: tuple[int, ...]) -> Tensor:
        x = self.uniform(*shape)
        if name == "log_decay":
            x, edges = -x, [0, -1e-6, -30, -100, -1000, -math.inf]
            if self.c["normalize"]:  # with a z that float32 can hold
                edges = [0, -1e-6, -3]
        else:
            edges = [0, 1] if self.c["normalize"] else [0, 1, 2]
        if self.c["gates"] == "edges":
            at = self.uniform(*shape) < 0.3
            x = torch.where(at, self.pick(shape, *edges), x)
        return x

    def rule(self, steps, B, H, K, V):
        c, record = self.c, RULES[self.c["op"]]
        x = {
            "q": self.features(*steps, H * c["group"], K),
            "k": self.features(*steps, H, K),
            "v": self.normal(*steps, H, V),
        }
        for name, dims in record.gates.items():
            if name not in record.optional or c["optional"]:
                x[name] = self.gate(name, (*steps, *(H, K)[: len(dims.split())]))
        if c["op"] == "dpfp_delta_rule":
            K = 2 * K
        state = [self.normal(B, H, V, K), self.uniform(B, H, K) + 0.1]
        state = state if c["normalize"] else state[:1]
        return x, state if c["state"] else [torch.zeros_like(part) for part in state]

    def fwp(self, steps, B, H, K, V):
        x = {n: self.normal(*steps, H, K) / max(K, 1) for n in "bx"}
        W = self.normal(B, H, V, K) * self.c["state"]
        return {"a": self.normal(*steps, H, V), **x}, [W]

    def softmax(self, steps, B, H, K, V):
        q = self.normal(*steps, H * self.c["group"], K) * self.c["size"]
        x = {"q": q, "k": self.normal(*steps, H, K), "v": self.normal(*steps, H, V)}
        past = self.c["window"] * self.c["state"]
        return x, [self.normal(B, past, H, width) for width in (K, V)]

    def aft(self, steps, B, H, K, V):
        c, (T, s) = self.c, (self.c["time"], self.c["window"])
        heads = (H,) if "conv" in c["op"] else ()
        x = {n: self.normal(*steps, *heads, V) for n in "qkv"}
        x["k"] = x["k"] * c["size"]
        if heads and c["narrow"]:
            x["k"] = x["k"][..., :1].clone()
        past, recent = s * c["state"], s - 1
        width = s if c["causal"] else 2 * s - 1
        if c["op"] == "aft_full":
            x["bias"] = self.normal(T, past + T)
        elif c["op"] == "aft_local":
            x["band"] = self.normal(T, width)
        elif c["op"] == "aft_conv":
            x["kernel"] = self.normal(H, width)
        elif c["op"] == "aft_conv2d":
            x["kernel"] = self.normal(H, 2 * s - 1, 2 * s - 1)
        if not c["state"]:
            return x, []
        C = H * V if heads else V
        older = [self.normal(B, C), self.normal(B, C)]
        if c["op"] == "aft_simple":
            return x, older
        length = past if c["op"] == "aft_full" else recent
        rest = [self.normal(B, length, C), self.normal(B, length, C)]
        return x, rest if c["op"] == "aft_full" else [*rest, *older]

    def feedback(self, steps, B, H, K, V):
        c, L, d = self.c, self.c["layers"], H * K
        if c["op"] == "feedback_attention":
            x = {"q": self.normal(B, H, K), "positions": self.normal(K, 4)}
            return x | {n: self.normal(*steps, H, K) for n in "kv"}, []
        if d < 2:
            raise ValueError("a layer norm of one number has only rounding errors")
        G = 1 if c["shared"] else L
        x = {"x": self.normal(*steps, d), "merge": self.normal(L + 1)}
        for name, n in (("norm_mixer", L), ("norm_mlp", L), ("norm_memory", G)):
            x[name] = 1 + 0.2 * self.normal(n, d)
        for name, n in (("to_q", L), ("to_k", G), ("to_v", G), ("to_out", L)):
            x[name] = self.normal(n, d, d) / d**0.5
        x["expand"] = self.normal(L, V, d) / d**0.5
        x["contract"] = self.normal(L, d, V) / V**0.5
        x["positions"] = self.normal(K, 4)
        if c["narrow"]:
            del x["norm_memory"]
        if c["factors"]:
            x["factors"] = self.pick((*steps, L, 2 * d + V), 0.0, 1.25)
        past = c["window"] * c["state"]
        return x, [self.normal(B, past, G, H, K) for _ in "kv"]

    def map(self, steps, B, H, K, V):
        x = self.normal(*steps, H, K) * self.c["size"]
        if self.c["zeros"]:
            x[self.uniform(*steps, H) < 0.2] = 0
        return {"x": x.abs() if self.c["op"] == "sum_normalize" else x}, []

    def feature_map(self) -> Any:
        op = self.c["op"]
        if op in ("FAVOR", "RandomFourier"):
            return getattr(feature_maps, op)(self.c["key"], 3, seed=self.c["seed"])
        made = getattr(feature_maps, op)
        return made() if isinstance(made, type) else made

    # The calls.

    def found(self) -> list[tuple[str, Tensor]]:
        """What fwlab computes: outputs, states and gradients."""
        c = self.c
        with contextlib.ExitStack() as stack:
            if c["grad"] == "none":
                stack.enter_context(torch.no_grad())
            if c["autocast"]:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            y, state = self.called()
        parts = list(state) if isinstance(state, tuple) else [state]
        parts = [part for part in parts if part is not None and part.dtype != torch.bool]
        if c["op"] == "feedback" and c["mask"] != "none":
            parts = []  # which memories a state still has is its own affair
        return self.with_gradients([y, *parts], self.x, self.state)

    def called(self) -> Any:
        c, x = self.c, dict(self.x)
        if self.module is not None:
            return self.module(x["x"]), None
        op, options = getattr(ops, c["op"]), {}
        if c["op"] == "feedback_attention":
            return op(**x), None
        if c["op"] in RULES and RULES[c["op"]].normalizes and c["op"] != "dpfp_delta_rule":
            options["normalize"] = bool(c["normalize"])
        if c["op"] in RULES and c["op"] != "dpfp_delta_rule" or c["op"] == "softmax_attention":
            options["scale"] = c["scale"]
        if c["op"] == "fwp":
            options["activation"] = ACTIVATIONS[c["activation"]]
        if c["op"] in ("aft_simple", "aft_full", "aft_local", "aft_conv"):
            options["causal"] = bool(c["causal"])
        options["implementation"] = c["implementation"]
        if self.ends:
            options["cu_seqlens"] = torch.tensor(self.ends)
        if c["op"] == "aft_conv2d" or not c["causal"]:
            mask = self.mask if c["mask"] != "none" else None
            return op(**x, **options, key_mask=mask), None
        state = KINDS[c["op"]](self) if c["state"] else None
        pieces = []
        for a, b in zip(self.cuts, self.cuts[1:], strict=False):
            piece = {n: p if n in self.shared else p[:, a:b] for n, p in x.items()}
            if "band" in x:
                piece["band"] = x["band"][a:b]
            if "bias" in x:
                past = x["bias"].shape[1] - c["time"]
                piece["bias"] = x["bias"][a:b, : past + b]
            if c["op"] == "feedback":
                names = ops.FeedbackWeights._fields
                weights = {n: piece.pop(n) for n in names if n in piece}
                piece |= {"weights": ops.FeedbackWeights(**weights), "heads": c["heads"]}
            mask = self.mask[:, a:b] if c["mask"] != "none" else None
            y, state = op(**piece, **options, key_mask=mask, state=state, return_state=True)
            pieces.append(y)
        return torch.cat(pieces, 1), state

    def with_gradients(
        self, outputs: list[Tensor], x: Named, state: list[Tensor]
    ) -> list[tuple[str, Tensor]]:
        """Outputs and the gradients of all leaves, by name."""
        self.g.manual_seed(self.c["seed"] + 1)
        names = ["y", *(f"state {i}" for i in range(len(outputs) - 1))]
        result = list(zip(names, outputs, strict=True))
        dtypes = [self.x[next(iter(self.x))].dtype]
        dtypes += [part.dtype for part in self.state] or [torch.promote_types(dtypes[0], torch.float32)] * 9
        weights = [self.laid(self.normal(*o.shape).to(d)) for o, d in zip(outputs, dtypes, strict=False)]
        leaves = {f"d {n}": part for n, part in x.items()}
        leaves |= {f"d state {i}": part for i, part in enumerate(state)}
        pairs = [
            (torch.where(o.isinf(), 0, o), w.to(o.dtype))
            for o, w in zip(outputs, weights, strict=True)
            if o.requires_grad
        ]
        mine = {**self.x, **{f"state {i}": s for i, s in enumerate(self.state)}}
        wanted = {n: part for n, part in leaves.items() if mine[n[2:]].requires_grad}
        if not wanted:
            return result
        pairs = pairs or [(sum(part.sum() for part in wanted.values()) * 0, torch.zeros(()))]
        gradients = torch.autograd.grad(
            [o for o, _ in pairs], list(wanted.values()), [w for _, w in pairs],
            allow_unused=True, materialize_grads=True,
        )
        return result + list(zip(wanted, gradients, strict=True))

    def expected(self, jitter: int | None = None) -> list[tuple[str, Tensor]]:
        """What the loops compute; with jitter in float32, every input off by up to
        a rounding.
        """
        dtype = torch.float32 if jitter else torch.float64
        if jitter:
            self.g.manual_seed(jitter)

        def wide(part: Tensor) -> Tensor:
            part = part.detach().to(dtype)
            if jitter:
                noise = 2 * self.uniform(*part.shape) - 1
                part = part * (1 + torch.finfo(dtype).eps * noise).to(dtype)
            return part.requires_grad_()

        x = {n: wide(part) for n, part in self.x.items()}
        state = [wide(part) for part in self.state]
        c, T = self.c, self.c["time"]
        whole = [(b, 0, T) for b in range(c["batch"])]
        ends = list(zip(self.ends, self.ends[1:], strict=False))
        sequences = [(0, a, b) for a, b in ends] or whole
        loop, results = loop_of(c["op"]), []
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            for i, (row, a, b) in enumerate(sequences):
                own = {n: p if n in self.shared else p[row] for n, p in x.items()}
                if (a, b) != (0, T):
                    own = {n: p if n in self.shared else p[a:b] for n, p in own.items()}
                parts = [part[i] for part in state]
                results.append(loop({**c, "map": self.module}, own, parts, self.mask[row, a:b]))
        finally:
            torch.set_default_dtype(before)
        y = torch.stack([y for y, _ in results]) if not ends else torch.cat([y for y, _ in results])[None]
        if c["op"] == "feedback" and c["mask"] != "none":
            results = [(y, []) for y, _ in results]
        after = [torch.stack(each) for each in zip(*(s for _, s in results), strict=True)]
        return self.with_gradients([y, *after], x, state)


KINDS: dict[str, Any] = {
    **{
        name: lambda p: ops.NormalizedState(*p.state) if p.c["normalize"] else p.state[0]
        for name in RULES
    },
    "fwp": lambda p: p.state[0],
    "softmax_attention": lambda p: ops.KeyValueCache(*p.state, None),
    "aft_simple": lambda p: ops.RunningMean(*p.state),
    "aft_full": lambda p: ops.KeysAndValues(*p.state),
    "aft_local": lambda p: ops.WindowState(*p.state),
    "aft_conv": lambda p: ops.WindowState(*p.state),
    "feedback": lambda p: ops.FeedbackState(*p.state, None),
}


def check(c: Case) -> str | None:
    """What is wrong with a case, in one line; "beyond" = it is not compared."""
    p = Problem(c)
    wanted = p.expected() if c["batch"] else None
    if wanted and not all(beyond(x) for _, x in wanted):
        return "beyond"
    try:
        found = p.found()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    if wanted is None:
        return None
    if [n for n, _ in found] != [n for n, _ in wanted]:
        return f"expected {[n for n, _ in wanted]}, got {[n for n, _ in found]}"
    top = max((finite(x).norm().item() for _, x in wanted), default=0)
    off: list[tuple[str, float, float]] = []
    for i, ((name, x), (_, y)) in enumerate(zip(found, wanted, strict=True)):
        if x.shape != y.shape:
            return f"{name} has shape {list(x.shape)}, expected {list(y.shape)}"
        if not torch.equal(x.isinf(), y.isinf()) or x.isnan().any():
            return f"{name} is not finite where it should be"
        info = torch.finfo(x.dtype)
        error = (finite(x) - finite(y)).norm().item()
        floor = info.tiny * info.eps * math.sqrt(max(x.numel(), 1))
        limit = LIMITS[c["dtype"]] * max(finite(y).norm().item(), top / 100) + floor
        if error > limit:
            off.append((name, error / limit, i, error))
    if off:  # could anything do better?
        others = [p.expected(jitter) for jitter in (1, 2)]
    for name, times, i, error in off:
        change = max((finite(o[i][1]) - finite(wanted[i][1])).norm().item() for o in others)
        if not (math.isfinite(change) and error <= 32 * p.rounding * change):
            return f"{name} is off by {times:.2g} times the limit"
    return None


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), 0, x).detach().double()


def beyond(x: Tensor) -> bool:
    x = finite(x)
    return bool((x.abs() <= LARGEST).all())


# Cases.


def draw(seed: str) -> Case:
    """A random case that an operation can compute."""
    r = random.Random(seed)
    op = r.choice(OPERATIONS)
    rule, is_map = op in RULES, op in MAPS
    c: Case = {"op": op, "seed": r.randrange(10**6), **SIMPLEST}
    c["implementation"] = r.choice(ops.implementations(op)) if op in ops.TABLE else "naive"
    short = op in ("aft_conv2d", "feedback") or is_map
    c["time"] = r.choice([0, 1, 2, 3, r.randint(2, 12), r.randint(2, 12)] + [15, 16, 17, 31, 32, 33, r.randint(34, 70), 64, 65] * (not short))
    c["batch"] = r.choice([1, 1, 2, 2, 3]) if c["time"] < 30 else 1
    c["heads"] = r.choice([1, 2, 3])
    c["key"], c["value"] = r.choice([2, 3, 4]), r.choice([1, 2, 5])
    if op != "feedback":
        c["key"], c["value"] = r.choice([1, 2, 3, 5, 8]), r.choice([1, 2, 3, 5, 8])
    if not is_map and op not in ("feedback", "feedback_attention") and r.random() < 0.1:
        c[r.choice(["batch", "key", "value"] + ["heads"] * ("conv" not in op))] = 0
    c["dtype"] = r.choice(["float64", "float64", "float32", "float32", "float16", "bfloat16"])
    if rule or op == "softmax_attention":
        c["group"] = r.choice([1, 1, 2, 3])
        if op != "dpfp_delta_rule":
            c["scale"] = r.choice([None, None, 0.5, -0.7, 0.0, 3.0])
    if rule:
        c["gates"] = r.choice(["mild", "edges"])
        c["optional"] = r.randrange(2) * bool(RULES[op].optional)
        c["normalize"] = r.randrange(2) * (RULES[op].normalizes and op != "dpfp_delta_rule")
        c["zeros"] = r.choice([0, 0, 1])
    c["size"] = r.choice([1.0, 1.0, 0.1, 1.3])
    if op.startswith("aft") or op == "softmax_attention":
        c["size"] = r.choice([1.0, 1.0, 10.0, 300.0])
    c["window"] = r.choice([1, 2, 3, 5, 20]) if not op.endswith("2d") else r.choice([1, 2, 3])
    c["causal"] = int(not op.startswith("aft") or op == "aft_conv2d" or r.random() < 0.7)
    c["narrow"], c["shared"], c["factors"] = (int(r.random() < 0.3) for _ in range(3))
    c["activation"] = r.choice(list(ACTIVATIONS))
    c["layers"] = r.choice([1, 2, 3])
    c["mask"] = r.choice(["none", "none", "some", "row"]) if op in ops.TABLE else "none"
    stream = c["causal"] and op in KINDS
    c["state"] = r.randrange(2) * bool(stream)
    if stream:
        c["cuts"] = r.choice([0, 0, 1, 2])
        if (rule or op in ("fwp", "aft_simple")) and r.random() < 0.3:
            c["documents"], c["cuts"], c["batch"] = r.choice([1, 2, 4]), 0, 1
    c["storage"] = r.choice(["plain", "strided", "expanded", "offset", "transposed"])
    c["grad"] = r.choice(["all", "all", "all", "some", "none"])
    c["autocast"] = int(c["dtype"] == "float32" and op in KINDS and op != "softmax_attention" and r.random() < 0.1)
    return c


def simpler(c: Case, same: Any) -> Case:
    """Each option at its simplest, or halfway there, as long as it fails."""
    again = True
    while again:
        again = False
        for name, simplest in SIMPLEST.items():
            tries = [simplest]
            if isinstance(c[name], int) and c[name] > 1:
                tries += [c[name] // 2, c[name] - 1]
            for value in tries:
                other = {**c, name: value}
                if value != c[name] and same(other):
                    c, again = other, True
                    break
    return c


def fails(c: Case) -> bool:
    try:
        return check(c) not in (None, "beyond")
    except Exception:  # there is no such problem
        return False


def line(c: Case) -> str:
    return " ".join(f"{n}={v}" for n, v in c.items() if SIMPLEST.get(n, "") != v)


def parsed(text: str) -> Case:
    c = {**SIMPLEST, "seed": 0}
    for word in text.split():
        name, value = word.split("=")
        try:
            c[name] = int(value)
        except ValueError:
            c[name] = value
        if name in ("scale", "size"):
            c[name] = None if value == "None" else float(value)
    return c


def run(seed: int, cases: int) -> list[str]:
    """What is found among so many cases, each in one line."""
    finds, skipped = [], 0
    for i in range(cases):
        c = draw(f"{seed}/{i}")
        problem = check(c)
        if problem == "beyond":
            skipped += 1
        elif problem:
            c = simpler(c, fails)
            finds.append(f'--case "{line(c)}": {check(c)}')
            print(finds[-1], flush=True)
    print(f"seed {seed}: {cases} cases, {skipped} beyond, {len(finds)} finds")
    return finds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    today = f"{datetime.date.today():%Y%m%d}"
    parser.add_argument("--seed", type=int, default=int(today), help="default: the date")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--case", help="one case, as it was printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        print(check(parsed(args.case)) or "as expected")
    else:
        sys.exit(bool(run(args.seed, args.cases)))
