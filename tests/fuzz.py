"""Random problems for every operation, compared with the loops of `loops.py`.

    python tests/fuzz.py [--seed 20260101] [--cases 2000]
    python tests/fuzz.py --case "op=delta_rule time=33 seed=7"

A case is a row of options: the operation, its implementation, shapes, precision, masks,
packed documents, cuts, storage, which inputs need gradients. Outputs, states and
gradients are compared. A case that fails is made simpler, one option at a time, as long
as it still fails; the line that is printed repeats it. The seed is the date unless it
is given, so every night has cases of its own.

What is allowed: the limits of docs/tested.md relative to the norm of what is expected,
and a hundredth of it (or 32 roundings of float32) relative to the largest norm in the
case, because a gradient may vanish by cancellation. More is allowed only where the
problem itself is that sensitive: 32 times the error of the loop in the precision of
the sums, with inputs that are off by up to one rounding. Cases whose expected values
exceed 10,000 are not compared, because there the recurrence diverges.
"""

import argparse
import contextlib
import datetime
import inspect
import math
import random
import sys
from functools import partial
from typing import Any

import torch
from loops import ACTIVATIONS, Case, Named, Parts, loop_of
from torch import Tensor

from fwlab import feature_maps, ops
from fwlab.ops.call.rule import Rule

LIMITS = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
LARGEST = 1e4
RULES = {name: record for name, record in ops.TABLE.items() if isinstance(record, Rule)}
MAPS = ("ELU1", "DPFP", "FAVOR", "RandomFourier", "sum_normalize", "l2_normalize")
OPERATIONS = (*ops.TABLE, "feedback_attention", *MAPS)
#: What makes a state of its parts.
KINDS: dict[str, Any] = {
    "softmax_attention": partial(ops.KeyValueCache, mask=None),
    "aft_simple": ops.RunningMean,
    "aft_full": ops.KeysAndValues,
    "aft_local": ops.WindowState,
    "aft_conv": ops.WindowState,
    "feedback": partial(ops.FeedbackState, mask=None),
}
#: Every option of a case but "op" and "seed", with its simplest value.
SIMPLEST: Case = {
    **{"implementation": "naive", "dtype": "float64", "mask": "none", "documents": 0},
    **{"cuts": 0, "state": 0, "storage": "plain", "grad": "all", "autocast": 0},
    **{"batch": 1, "time": 1, "heads": 1, "group": 1, "key": 1, "value": 1},
    **{"layers": 1, "window": 1, "causal": 1, "normalize": 0, "scale": None},
    **{"size": 1.0, "edges": 0, "activation": "none", "fewer": 0, "dropout": 0},
    **{"learned": 0, "wide_gates": 0},
}
#: Inputs with a dimension of time, which a mask hides.
HIDDEN = ("q", "k", "v", "a", "b", "x", "beta", "log_decay", "erase", "write", "ask")


def takes(op: str) -> Any:
    """The names of the arguments of an operation."""
    return inspect.signature(getattr(ops, op)).parameters if op not in MAPS else ()


class Problem:
    """The tensors of a case, which its seed decides; `x` are inputs by name."""

    def __init__(self, c: Case):
        self.c, self.g = c, torch.Generator().manual_seed(c["seed"])
        op, T, dtype = c["op"], c["time"], getattr(torch, c["dtype"])
        steps = [c["batch"], T, *[c["key"]] * (op == "aft_conv2d")]
        self.mask = torch.ones(steps, dtype=torch.bool)
        if c["mask"] != "none":
            self.mask = self.uniform(*steps) < 0.7
            self.mask[: c["mask"] == "row"] = False
        places = torch.randint(T + 1, (9,), generator=self.g).tolist()
        self.cuts = [0, *sorted(places[: c["cuts"]]), T]
        self.ends = [0, *sorted(places[: c["documents"] - 1]), T] * (c["documents"] > 0)
        kind = "rule" if op in RULES else "map" if op in MAPS else op.split("_")[0]
        B = c["documents"] or c["batch"]
        x, state = getattr(self, kind)(steps, B, c["heads"], c["key"], c["value"])
        for name in HIDDEN:  # a masked step may hold anything
            if name in x and not self.mask.all() and c["storage"] != "expanded":
                x[name][~self.mask] = math.nan
        kept = torch.promote_types(dtype, torch.float32)
        shared = {*x, *["scale"] * c["learned"]} - {*HIDDEN, "bias", "band", "factors"}
        #: The precision of sums. Maps have that of their input, and so has
        #: PyTorch's attention. Autograd adds up the gradients of a tensor that is
        #: used twice: in numerator and denominator, or in several pieces.
        self.sums = kept
        if op in MAPS or c["normalize"] or (c["cuts"] and shared):
            self.sums = dtype
        if op == "softmax_attention":
            kept = self.sums = dtype
        if c["learned"]:
            x["scale"] = torch.tensor(1.0 if c["scale"] is None else c["scale"])
        dtypes = {n: kept for n in ("beta", "log_decay") if c["wide_gates"]}
        self.x = {n: self.leaf(part, dtypes.get(n, dtype)) for n, part in x.items()}
        self.state = [self.leaf(part, kept, c["state"]) for part in state]

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.g, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g, dtype=torch.float64)

    def laid(self, x: Tensor) -> Tensor:
        """The same values in other storage; "expanded" repeats some of them."""
        storage, dim = self.c["storage"], max(0, min(x.dim() - 2, 2))
        if storage == "strided":
            return torch.stack([x, x], -1)[..., 1]
        if storage == "offset":
            return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
        if storage == "transposed" and x.dim() > 1:
            return x.mT.contiguous().mT
        if storage == "expanded" and x.dim() and x.numel():
            return x.narrow(dim, 0, 1).expand(x.shape)
        return x

    def leaf(self, x: Tensor, dtype: torch.dtype, factor: int = 1) -> Tensor:
        share = {"all": 1, "some": 0.5, "none": 0}[self.c["grad"]]
        needs = self.uniform(1).item() < share * factor
        return self.laid(x.to(dtype)).requires_grad_(needs)

    # Each makes the inputs and the state of some operations.

    def rule(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        c, record = self.c, RULES[self.c["op"]]
        sizes = {"steps": record.steps, "heads": H, "key": K, "value": V}
        several = (record.steps,) * bool(record.steps)
        x = {"v": self.normal(*steps, *several, H, V)}
        for name, heads in (("q", (H * c["group"],)), ("k", (*several, H))):
            x[name] = self.normal(*steps, *heads, K)
            x[name] /= x[name].norm(dim=-1, keepdim=True) / c["size"]
            if c["normalize"]:  # a sum of both signs may come close to 0
                x[name] = x[name].abs() + 0.05
            if c["edges"]:
                x[name][self.uniform(*steps, *heads) < 0.2] = 0
        # Without a normaliser anything goes. With one, what this loop reads has to
        # stay in its range.
        edges = {
            "beta": [0, 1, 2],
            "log_decay": [0, -1e-6, -30, -100, -1000, -math.inf],
        }
        if c["normalize"]:
            decays = [0, -1e-6, -3, -30, -100, -400, -1000, -math.inf]
            edges = {"beta": [0, 1], "log_decay": decays}
        for name, gate in record.gates.items():
            if gate.optional and c["fewer"]:
                continue
            dims = gate.dims.partition(" [")[0].split()
            x[name] = self.uniform(*steps, *(sizes[dim] for dim in dims))
            x[name] *= -1 if name == "log_decay" else 1
            if c["edges"]:
                shape, values = x[name].shape, edges.get(name, gate.edges)
                values = torch.tensor(values).double()
                value = values[torch.randint(len(values), shape, generator=self.g)]
                x[name] = torch.where(self.uniform(*shape) < 0.3, value, x[name])
        if record.corrects:  # of those that depend on the key
            x |= record.related(**x)
        K = 2 * K if c["op"] == "dpfp_delta_rule" else K
        state = [self.normal(B, H, V, K), self.uniform(B, H, K) + 0.1]
        return x, [part * c["state"] for part in state[: 1 + c["normalize"]]]

    def fwp(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        x = {n: self.normal(*steps, H, K) / max(K, 1) for n in "bx"}
        W = self.normal(B, H, V, K) * self.c["state"]
        return {"a": self.normal(*steps, H, V), **x}, [W]

    def softmax(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        past = self.c["window"] * self.c["state"]
        q = self.normal(*steps, H * self.c["group"], K) * self.c["size"]
        k, v = (self.normal(*steps, H, n) for n in (K, V))
        return {"q": q, "k": k, "v": v}, [self.normal(B, past, H, n) for n in (K, V)]

    def aft(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        c, op, T, s = self.c, self.c["op"], self.c["time"], self.c["window"]
        heads = [H] if "conv" in op else []
        x = {n: self.normal(*steps, *heads, V) for n in "qkv"}
        x["k"] *= c["size"]
        if heads and c["fewer"]:
            x["k"] = x["k"][..., :1].clone()
        past = s * c["state"] if op == "aft_full" else s - 1
        width = s if c["causal"] else 2 * s - 1
        weights = {
            "aft_full": ("bias", (T, past + T)),
            "aft_local": ("band", (T, width)),
            "aft_conv": ("kernel", (H, width)),
            "aft_conv2d": ("kernel", (H, 2 * s - 1, 2 * s - 1)),
        }
        if op in weights:
            x[weights[op][0]] = self.normal(*weights[op][1])
        C = math.prod(heads) * V
        recent = [self.normal(B, past, C) for _ in "kv"] * (op != "aft_simple")
        older = [self.normal(B, C) for _ in "kv"] * (op != "aft_full")
        state = recent + older
        for i, part in enumerate(state):
            if not c["state"]:  # no key yet
                part.fill_(0 if i % 2 else -math.inf)
        return x, state if c["causal"] and op != "aft_conv2d" else []

    def feedback(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        c, L, d, G = self.c, self.c["layers"], H * K, self.c["layers"]
        if c["op"] == "feedback_attention":
            x = {"q": self.normal(B, H, K), "positions": self.normal(K, 4)}
            return x | {n: self.normal(*steps, H, K) for n in "kv"}, []
        if d < 4:  # of two numbers, the norm is 1 and -1, with a slope of 0
            raise ValueError("a layer norm of so few numbers has rounding errors alone")
        G = 1 if c["fewer"] else L
        x = {"x": self.normal(*steps, d), "merge": self.normal(L + 1)}
        for name, n in (("norm_mixer", L), ("norm_mlp", L), ("norm_memory", G)):
            x[name] = 1 + 0.2 * self.normal(n, d)
        for name, n in (("to_q", L), ("to_k", G), ("to_v", G), ("to_out", L)):
            x[name] = self.normal(n, d, d) / d**0.5
        x["expand"], x["contract"] = self.normal(L, V, d), self.normal(L, d, V)
        x["positions"] = self.normal(K, 4)
        if c["edges"]:
            del x["norm_memory"]
        if c["dropout"]:
            x["factors"] = (self.uniform(*steps, L, 2 * d + V) < 0.8) * 1.25
        past = c["window"] * c["state"]
        return x, [self.normal(B, past, G, H, K) for _ in "kv"]

    def map(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        x = self.normal(*steps, H, K) * self.c["size"]
        if self.c["edges"]:
            x[self.uniform(*steps, H) < 0.2] = 0
        return {"x": x.abs() if self.c["op"] == "sum_normalize" else x}, []

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
        parts = [
            part for part in parts if part is not None and part.is_floating_point()
        ]
        return self.with_gradients([y, *parts], self.x, self.state)

    def called(self) -> Any:
        c, name = self.c, self.c["op"]
        if name in MAPS:
            return self.module()(self.x["x"]), None
        if name == "feedback_attention":
            return ops.feedback_attention(**self.x), None
        options = {n: c[n] for n in ("implementation", "heads")}
        options |= {n: bool(c[n]) for n in ("normalize", "causal")}
        options |= {"scale": c["scale"], "activation": ACTIVATIONS[c["activation"]]}
        options["cu_seqlens"] = torch.tensor(self.ends) if self.ends else None
        options = {
            n: options[n] for n in takes(name) if n in options and n not in self.x
        }
        op, masked = partial(getattr(ops, name), **options), c["mask"] != "none"
        if not c["causal"] or name == "aft_conv2d":
            return op(**self.x, key_mask=self.mask if masked else None), None
        state: Any = None
        if c["state"]:
            one = ops.NormalizedState if len(self.state) > 1 else lambda W: W
            state = KINDS.get(name, one)(*self.state)
        y = []
        for a, b in zip(self.cuts, self.cuts[1:], strict=False):
            x: Any = {n: self.piece(n, part, a, b) for n, part in self.x.items()}
            if name == "feedback":
                names = [n for n in ops.FeedbackWeights._fields if n in x]
                x["weights"] = ops.FeedbackWeights(**{n: x.pop(n) for n in names})
            mask = self.mask[:, a:b] if masked else None
            part, state = op(**x, key_mask=mask, state=state, return_state=True)
            y.append(part)
        hidden = name == "feedback" and masked  # a state drops masked memories
        return torch.cat(y, 1), None if hidden else state

    def piece(self, name: str, x: Tensor, a: int, b: int) -> Tensor:
        """The steps from a to b of an input."""
        if name == "bias":
            return x[a:b, : x.shape[1] - self.c["time"] + b]
        if name == "band":
            return x[a:b]
        return x[:, a:b] if name in (*HIDDEN, "factors") else x

    def module(self) -> Any:
        made = getattr(feature_maps, self.c["op"])
        if self.c["op"] in ("FAVOR", "RandomFourier"):
            return made(self.c["key"], 3, seed=self.c["seed"])
        return made() if isinstance(made, type) else made

    def expected(self, jitter: int = 0) -> list[tuple[str, Tensor]]:
        """What the loops compute; with jitter in the precision of the sums (of
        float32 for float64), from inputs that are off by up to a rounding.
        """
        c, sums = self.c, min(self.sums, torch.float32, key=lambda d: d.itemsize)
        dtype = sums if jitter else torch.float64

        def wide(part: Tensor) -> Tensor:
            part = part.detach().double()
            if jitter:
                noise = self.uniform(*part.shape) * 2 - 1
                part = (part * (1 + torch.finfo(dtype).eps * noise)).to(dtype)
            return part.requires_grad_()

        self.g.manual_seed(jitter)
        x = {name: wide(part) for name, part in self.x.items()}
        state = [wide(part) for part in self.state]
        more = {}
        if hasattr(module := self.module() if c["op"] in MAPS else None, "omega"):
            more["omega"] = module.omega.to(dtype)
        bounds = list(zip(self.ends, self.ends[1:], strict=False))
        rows = [(0, slice(*ab)) for ab in bounds]
        rows = rows or [(i, slice(None)) for i in range(c["batch"])]
        y, after, before = [], [], torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            for i, (row, steps) in enumerate(rows):
                own = {
                    n: p[row][steps if c["op"] != "feedback_attention" else ...]
                    if n in (*HIDDEN, "factors")
                    else p
                    for n, p in x.items()
                }
                parts = [part[i] for part in state]
                options = {**c, "scale": x.get("scale", c["scale"])}
                loop = partial(loop_of(c["op"]), options, own | more, parts)
                out = loop(self.mask[row][steps])
                y.append(out[0])
                after.append(
                    [] if c["op"] == "feedback" and c["mask"] != "none" else out[1]
                )
        finally:
            torch.set_default_dtype(before)
        whole = torch.cat(y)[None] if bounds else torch.stack(y)
        states = [torch.stack(each) for each in zip(*after, strict=True)]
        return self.with_gradients([whole, *states], x, state)

    def with_gradients(
        self, outputs: Parts, x: Named, state: Parts
    ) -> list[tuple[str, Tensor]]:
        """Outputs and gradients by name; the loss has random weights."""
        self.g.manual_seed(self.c["seed"] + 1)
        named = [("y" if i == 0 else f"state {i}", o) for i, o in enumerate(outputs)]
        kept = self.state[0].dtype if self.state else torch.float64
        first = next(iter(self.x.values())).dtype
        total, weights = [], []
        for i, (_, o) in enumerate(named):
            w = self.laid(self.normal(*o.shape).to(kept if i else first)).to(o.dtype)
            if o.requires_grad:
                total.append(torch.where(o.isinf(), 0, o))
                weights.append(w)
        leaves = [*x.items(), *((f"state {i}", s) for i, s in enumerate(state, 1))]
        mine = [*self.x.values(), *self.state]
        leaves = [a for a, own in zip(leaves, mine, strict=True) if own.requires_grad]
        leaves = [(n, leaf) for n, leaf in leaves if n != "factors"]
        if self.c["grad"] == "none" or not leaves:
            return named
        if not total:  # nothing has been computed
            return named + [(f"d {n}", torch.zeros_like(leaf)) for n, leaf in leaves]
        options = {"allow_unused": True, "materialize_grads": True}
        tensors = [leaf for _, leaf in leaves]
        gradients = torch.autograd.grad(total, tensors, weights, **options)
        return named + [
            (f"d {n}", d) for (n, _), d in zip(leaves, gradients, strict=True)
        ]


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), 0, x).detach().double()


def check(c: Case) -> str | None:
    """What is wrong with a case, in one line; "beyond" = it is not compared."""
    p = Problem(c)
    wanted = p.expected() if c["batch"] else None
    if wanted and not all((finite(x).abs() <= LARGEST).all() for _, x in wanted):
        return "beyond"
    try:
        got = p.found()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    if wanted is None:  # no sequence: nothing to compare
        return None
    if [(n, x.shape) for n, x in got] != [(n, x.shape) for n, x in wanted]:
        return f"wrong shapes: {[(n, [*x.shape]) for n, x in got]}"
    top = max(finite(x).norm().item() for _, x in wanted)
    others: list[Any] = []
    for i, ((name, x), (_, y)) in enumerate(zip(got, wanted, strict=True)):
        if not torch.equal(x.isinf(), y.isinf()) or x.isnan().any():
            return f"{name} is not finite where it should be"
        info, size = torch.finfo(x.dtype), max(x.numel(), 1) ** 0.5
        error = (finite(x) - finite(y)).norm().item()
        least = max(LIMITS[c["dtype"]] / 100, 2**-18 if p.sums != torch.float64 else 0)
        limit = LIMITS[c["dtype"]] * finite(y).norm().item() + least * top
        limit += info.tiny * info.eps * size  # numbers below the normal ones
        if error <= limit:
            continue
        others = others or [p.expected(jitter) for jitter in (1, 2)]
        off = max((finite(o[i][1]) - finite(y)).norm().item() for o in others)
        off *= 2.0**-29 if p.sums == torch.float64 else 1
        if not error <= 32 * off:
            return f"{name} is off by {error / limit:.2g} times the limit"
    return None


def draw(seed: str) -> Case:
    """A random case that its operation can compute."""
    r = random.Random(seed)
    op = r.choice(OPERATIONS)
    has, table = takes(op), op in ops.TABLE
    c: Case = {"op": op, "seed": r.randrange(10**6), **SIMPLEST}
    c["dtype"] = r.choice(
        ["float64", "float32", "float64", "float32", "float16", "bfloat16"]
    )
    c["implementation"] = r.choice(ops.implementations(op)) if table else "naive"
    long = table and op not in ("aft_conv2d", "feedback")
    borders = [15, 16, 17, 31, 32, 33, 64, 65, r.randint(34, 70)] if long else []
    c["time"] = r.choice([0, 1, 2, 3, *(r.randint(2, 12) for _ in range(5)), *borders])
    c["batch"] = r.choice([1, 1, 2, 3]) if c["time"] < 30 else 1
    c["heads"], c["layers"] = r.choice([1, 2, 3]), r.choice([1, 2, 3])
    c["key"], c["value"] = (r.choice([1, 2, 3, 5, 8]) for _ in "kv")
    if op == "feedback":
        c["key"] = r.choice([4, 6])
    elif long and r.random() < 0.1:
        none = ["batch", "value", *["heads"] * ("conv" not in op)]
        none += ["key"] * (op != "dpfp_delta_rule")  # a map takes at least 1
        c[r.choice(none)] = 0
    c["window"] = (
        r.choice([1, 2, 3, 5, 20]) if op != "aft_conv2d" else r.choice([1, 2, 3])
    )
    c["size"] = r.choice([1.0, 1.0, 0.1, 1.3])
    if op.startswith("aft"):
        c["size"] = r.choice([1.0, 1.0, 10.0, 300.0])
    if op == "softmax_attention":  # PyTorch's backward pass has an error of 6e-8
        c["size"] = r.choice([1.0, 3.0])  # times the largest score
    if "scale" in has:
        c["group"] = r.choice([1, 1, 2, 3])
        c["scale"] = r.choice([None, None, 0.5, -0.7, 0.0, 3.0])
        c["learned"] = int(r.random() < 0.3)
    c["wide_gates"] = r.randrange(2)
    for name in ("edges", "fewer", "dropout"):
        c[name] = int(r.random() < 0.4)
    c["normalize"] = r.randrange(2) * ("normalize" in has)
    c["activation"] = r.choice(list(ACTIVATIONS))
    c["causal"] = int("causal" not in has or r.random() < 0.7)
    c["mask"] = (
        r.choice(["none", "none", "some", "row"]) if "key_mask" in has else "none"
    )
    if c["causal"] and "state" in has:
        c["state"], c["cuts"] = r.randrange(2), r.choice([0, 0, 1, 2])
        if "cu_seqlens" in has and r.random() < 0.3:
            c["documents"], c["cuts"], c["batch"] = r.choice([1, 2, 4]), 0, 1
    c["storage"] = r.choice(["plain", "strided", "offset", "transposed", "expanded"])
    if op == "feedback" and c["storage"] == "expanded":
        c["storage"] = "plain"  # equal weights make equal numbers: see `feedback`
    c["grad"] = r.choice(["all", "all", "all", "some", "none"])
    # Softmax attention is PyTorch's own, in half precision there.
    wide = c["dtype"] == "float32" and "state" in has and op != "softmax_attention"
    c["autocast"] = int(wide and r.random() < 0.2)
    return c


def fails(c: Case) -> bool:
    try:
        return check(c) not in (None, "beyond")
    except Exception:  # there is no such problem
        return False


def simpler(c: Case) -> Case:
    """Each option at its simplest, or on the way there, as long as it fails."""
    for name, simplest in SIMPLEST.items():
        values = [simplest]
        if type(simplest) is int and c[name] > 1:
            values += [c[name] // 2, c[name] - 1]
        for value in values:
            if value != c[name] and fails(other := {**c, name: value}):
                return simpler(other)
    return c


def line(c: Case) -> str:
    return " ".join(f"{n}={v}" for n, v in c.items() if SIMPLEST.get(n, "") != v)


def parsed(text: str) -> Case:
    """The inverse of `line`."""
    c = {**SIMPLEST, "seed": 0}
    for name, value in (word.split("=") for word in text.split()):
        for kind in (str, float, int):
            with contextlib.suppress(ValueError):
                c[name] = kind(value)
    return c


def run(seed: int, cases: int) -> list[str]:
    """What is found among random cases: how to repeat it, and what it is."""
    finds, beyond = [], 0
    for i in range(cases):
        c = draw(f"{seed}/{i}")
        problem = check(c)
        if problem == "beyond":
            beyond += 1
        elif problem:
            c = simpler(c)
            finds.append(f'python tests/fuzz.py --case "{line(c)}": {check(c)}')
            print(finds[-1], flush=True)
    print(f"seed {seed}: {cases} cases, {beyond} beyond, {len(finds)} finds")
    return finds


TODAY = int(f"{datetime.date.today():%Y%m%d}")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=TODAY, help="default: the date")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--case", help="one case, as it was printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        sys.exit(check(parsed(args.case)) or "as expected")
    sys.exit(bool(run(args.seed, args.cases)))
