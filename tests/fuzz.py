"""Compare every operation with the reference loops of `loops.py` on random inputs.

    python tests/fuzz.py [--seed 20260101] [--cases 2000]
    python tests/fuzz.py --fixed [--implementation triton] [--device cuda]
    python tests/fuzz.py --case "op=delta_rule time=33 seed=7"

A case is a row of options: the operation, its implementation, shapes, precision, masks,
packed documents, cuts, storage, which inputs need gradients, how derivatives are taken,
whether the call is compiled. Outputs, states and gradients are compared, with masked
tokens dropped; no argument may change in place, and no result may share memory with an
argument. A case that fails is simplified, one option at a time, as long as it still
fails; the printed command reproduces the failure. The default seed is the date, so
every night draws new cases.

Allowed errors are the limits of docs/tested.md relative to the expected norm, and
a hundredth of a limit (or 32 roundings of float32) relative to the largest norm in the
case, because a gradient may vanish by cancellation. A larger error is allowed only for
ill-conditioned problems: up to 32 times the error of the loop in the precision of the
sums, with inputs perturbed by up to one rounding. Cases whose expected values exceed
10,000 are not compared, because their recurrence diverges.
"""

import argparse
import contextlib
import datetime
import inspect
import math
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch._dynamo
from loops import ACTIVATIONS, LOOPS, MAPS, PLACED, RULES, Case, Named, Parts
from torch import Tensor
from torch.utils._pytree import tree_map

from fwlab import feature_maps, ops
from fwlab.ops import _operation as operation

LIMITS = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
LARGEST = 1e4
OPERATIONS = tuple(LOOPS)
RANDOM = ("FAVOR", "RandomFourier")
#: Constructors that build the state of an operation from its parts.
KINDS: dict[str, Any] = {
    "softmax_attention": partial(ops.KeyValueCache, mask=None),
    "aft_simple": ops.RunningMean,
    "aft_full": ops.KeysAndValues,
    "aft_local": ops.WindowState,
    "aft_conv": ops.WindowState,
    "feedback": partial(ops.FeedbackState, mask=None),
}
#: Ways to differentiate; "vmap", "grad" and "jvp" are transforms of torch.func.
#: "ones": the incoming gradient is an expanded scalar; "twice": backward runs twice.
#: "between": backward after other calls; "second": second derivatives, if supported.
MODES = ("once", "ones", "twice", "between", "second", "vmap", "grad", "jvp")
#: The simplest value of every option of a case except "op" and "seed".
SIMPLEST: Case = {
    **{"implementation": "naive", "dtype": "float64", "mask": "none", "documents": 0},
    **{"cuts": 0, "state": 0, "storage": "plain", "grad": "all", "autocast": 0},
    **{"batch": 1, "time": 1, "heads": 1, "group": 1, "key": 1, "value": 1},
    **{"layers": 1, "window": 1, "causal": 1, "normalize": 0, "scale": None},
    **{"size": 1.0, "edges": 0, "activation": "none", "fewer": 0, "dropout": 0},
    **{"learned": 0, "wide_gates": 0, "channels": 0, "asked": "all", "mode": "once"},
    **{"compiled": 0, "device": "cpu"},
}
#: Inputs with a time dimension; a masked step may hold any value.
HIDDEN = ("q", "k", "v", "a", "b", "x", "beta", "log_decay", "erase", "write", "ask")
TIMED = (*HIDDEN, "factors")
#: Exact or special gate values; gates that are not listed use 0 and 1.
EDGES: dict[str, tuple[float, ...]] = {
    "log_decay": (0, -1e-6, -30, -100, -1000, -math.inf),
    **{"beta": (0, 1, 2), "a": (0,), "b": (0,)},
}
#: Gate values for which normalised outputs stay in the range of float32.
#: After a decay by e^-60, for example, a normalised output may be a mean or 0.
READABLE = (0, 1, -1e-6, -math.inf)


def takes(op: str) -> Any:
    """Return the parameters of an operation's signature, by name."""
    return inspect.signature(getattr(ops, op)).parameters if op not in MAPS else ()


class Problem:
    """Hold the named inputs `x` and the state of a case, sampled with its seed."""

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
        for name in HIDDEN:  # Masked steps may hold any value.
            if name in x and not self.mask.all() and c["storage"] != "expanded":
                x[name][~self.mask] = (math.nan, math.inf, -math.inf)[c["seed"] % 3]
        self.dtype, self.kept = dtype, torch.promote_types(dtype, torch.float32)
        shared = {*x, *["scale"] * c["learned"]} - {*TIMED, "bias", "band"}
        #: The dtype of sums; feature maps and PyTorch attention use the input's dtype.
        #: Autograd also uses the input's dtype to add gradients of a tensor used twice.
        #: A tensor is used twice in numerator and denominator, or in several pieces.
        self.sums = self.kept
        twice = c["normalize"] or op == "implicit_delta_rule"
        if op in MAPS or twice or (c["cuts"] and shared):
            self.sums = dtype
        if op == "softmax_attention":
            self.kept = self.sums = dtype
        if c["learned"]:
            x["scale"] = torch.tensor(1.0 if c["scale"] is None else c["scale"])
        dtypes = {n: self.kept for n in ("beta", "log_decay") if c["wide_gates"]}
        self.x = {n: self.leaf(part, dtypes.get(n, dtype)) for n, part in x.items()}
        self.state = [self.leaf(part, self.kept, c["state"]) for part in state]

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.g, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g, dtype=torch.float64)

    def laid(self, x: Tensor) -> Tensor:
        """Return `x` in the memory layout of the case; "expanded" repeats values."""
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
        return self.laid(x.to(self.c["device"], dtype)).requires_grad_(needs)

    # Each of the following methods samples inputs and a state for some operations.

    def rule(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        c, op = self.c, ops.TABLE[self.c["op"]]
        names = operation.annotated(op).names
        sizes = {"steps": 2, "heads": H, "key": K, "[key]": K, "value": V}
        several = (2,) * ("steps" in names["k"])
        x = {"v": self.normal(*steps, *several, H, V)}
        for name, heads in (("q", (H * c["group"],)), ("k", (*several, H))):
            x[name] = self.normal(*steps, *heads, K)
            x[name] /= x[name].norm(dim=-1, keepdim=True) / c["size"]
            if c["normalize"]:  # Sums of numbers of both signs may be close to 0.
                x[name] = x[name].abs() + 0.05
            if c["edges"]:
                x[name][self.uniform(*steps, *heads) < 0.2] = 0
        for name in [name for name in names if name not in "qkv"]:
            if name in op.rule.optional and c["fewer"]:
                continue
            dims = [d for d in names[name][2:] if d != "[key]" or c["channels"]]
            x[name] = self.uniform(*steps, *(sizes[dim] for dim in dims))
            x[name] *= -1 if name == "log_decay" else 1
            if c["edges"]:
                edges = [*EDGES.get(name, (0, 1))]
                edges += [1000] * (c["op"] == "implicit_delta_rule")
                edges = [e for e in edges if not c["normalize"] or e in READABLE]
                shape, edges = x[name].shape, torch.tensor(edges).double()
                value = edges[torch.randint(len(edges), shape, generator=self.g)]
                x[name] = torch.where(self.uniform(*shape) < 0.3, value, x[name])
        if c["op"] == "rwkv7_rule":  # As in the paper, erase a part of a key's value.
            x |= {"a": -x["k"], "b": x["k"] * x["b"]}
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
        if c["edges"]:  # No query attends to a key of -inf.
            x["k"][self.uniform(*x["k"].shape) < 0.1] = -math.inf
        past = s * c["state"] if op == "aft_full" else s - 1
        width = s if c["causal"] else 2 * s - 1
        weights = {
            "aft_full": ("bias", (T, past + T)),
            "aft_local": ("band", (T, width)),
            "aft_conv": ("kernel", (H, width)),
            "aft_conv2d": ("kernel", (H, 2 * s - 1, 2 * s - 1)),
        }
        if op in weights:
            size = c["size"] if c["edges"] else 1
            x[weights[op][0]] = self.normal(*weights[op][1]) * size
        C = math.prod(heads) * V
        recent = [self.normal(B, past, C) for _ in "kv"] * (op != "aft_simple")
        older = [self.normal(B, C) for _ in "kv"] * (op != "aft_full")
        state = recent + older
        for i, part in enumerate(state):
            if not c["state"]:  # The state has no key yet.
                part.fill_(0 if i % 2 else -math.inf)
        return x, state if c["causal"] and op != "aft_conv2d" else []

    def feedback(self, steps: Any, B: int, H: int, K: int, V: int) -> Any:
        c, L, d, G = self.c, self.c["layers"], H * K, self.c["layers"]
        if c["op"] == "feedback_attention":
            x = {"q": self.normal(B, H, K), "positions": self.normal(K, 4)}
            return x | {n: self.normal(*steps, H, K) for n in "kv"}, []
        if d < 4:  # The layer norm of two values is 1 and -1, with slope 0.
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
        made = getattr(feature_maps, self.c["op"])
        if self.c["op"] in RANDOM:
            self.module = made(K, 3, seed=self.c["seed"]).to(self.c["device"])
        else:
            self.module = made() if isinstance(made, type) else made
        return {"x": x.abs() if self.c["op"] == "sum_normalize" else x}, []

    # --- Results of fwlab ---

    def found(self) -> list[tuple[str, Tensor]]:
        """Compute outputs, states and gradients with fwlab."""
        c = self.c
        given = [*self.x.items(), *self.named(self.state)]
        before = [part.detach().clone() for _, part in given]
        memory = {part.untyped_storage().data_ptr() for _, part in given}
        with contextlib.ExitStack() as stack:
            if c["grad"] == "none":
                stack.enter_context(torch.no_grad())
            if c["autocast"]:
                stack.enter_context(torch.autocast(c["device"], torch.bfloat16))
            if c["compiled"]:
                torch.compiler.reset()
            outputs = self.called(self.x, self.state)
            if c["mode"] == "vmap":
                pairs = tree_map(
                    lambda p: torch.stack([p, p / 2]), [self.x, self.state]
                )
                outputs = [o[0] for o in torch.vmap(self.called)(*pairs)]
            if c["mode"] == "between":
                others = tree_map(lambda p: p.detach() / 2, [self.x, self.state])
                self.called(*others)
                with torch.no_grad():
                    self.called(*others)
        for i, o in enumerate(outputs):
            wanted = self.kept if i else self.dtype
            assert o.dtype == wanted, f"{o.dtype} in place of {wanted}"
            own = not o.numel() or o.untyped_storage().data_ptr() not in memory
            assert own, "a result shares memory with an argument"
        if c["mode"] in ("grad", "jvp"):
            named = self.transformed(outputs)
        else:
            named = self.with_gradients(outputs, self.x, self.state)
        for (name, part), copy in zip(given, before, strict=True):
            same = torch.equal(part.nan_to_num(7), copy.nan_to_num(7))
            assert same, f"{name} is changed in place"
        return [(name, part.detach().cpu()) for name, part in named]

    def transformed(self, outputs: Parts) -> list[tuple[str, Tensor]]:
        """Compute outputs, states and gradients with torch.func."""
        # Forward mode requires tensors whose elements do not share memory.
        given = tree_map(lambda p: p.detach().contiguous(), [self.x, self.state])
        weights = self.weights(outputs)

        def loss(x: Named, state: Parts) -> Tensor:
            y = [torch.where(o.isinf(), 0, o) for o in self.called(x, state)]
            return sum((o * w).double().sum() for o, w in zip(y, weights, strict=True))

        leaves = [n for n, _ in self.leaves(self.x, self.state)]
        if self.c["mode"] == "jvp":
            tangents = self.tangents()
            other = [
                {n: tangents.get(n, torch.zeros_like(p)) for n, p in given[0].items()},
                [tangents.get(n, torch.zeros_like(p)) for n, p in self.named(given[1])],
            ]
            _, along = torch.func.jvp(loss, tuple(given), tuple(other))
            return [*self.outputs(outputs), ("along", along)]
        dx, d_state = torch.func.grad(loss, (0, 1))(*given)
        all_of = dx | dict(self.named(d_state))
        return [*self.outputs(outputs), *((f"d {n}", all_of[n]) for n in leaves)]

    def called(self, x: Named, state: Parts) -> Parts:
        """Return y and the floating-point tensors of the final state of a call."""
        c, name = self.c, self.c["op"]
        if name in MAPS:
            return [self.module(x["x"])]
        if name == "feedback_attention":
            return [ops.feedback_attention(**x)]
        options = {n: c[n] for n in ("implementation", "heads")}
        options |= {n: bool(c[n]) for n in ("normalize", "causal")}
        options |= {"scale": c["scale"], "activation": ACTIVATIONS[c["activation"]]}
        options = {n: options[n] for n in takes(name) if n in options and n not in x}
        if self.ends:
            ends = torch.tensor(self.ends, device=c["device"])
            options |= {"cu_seqlens": ends}
        op = partial(getattr(ops, name), **options)
        if c["compiled"]:
            op = torch.compile(op, backend="aot_eager", fullgraph=True)
        mask = self.mask.to(c["device"]) if c["mask"] != "none" else None
        if not c["causal"] or name == "aft_conv2d":
            return [op(**x, key_mask=mask)]
        made: Any = None
        if c["state"]:
            one = ops.NormalizedState if len(state) > 1 else lambda W: W
            made = KINDS.get(name, one)(*state)
        y = []
        for i, (a, b) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            part = {n: self.piece(n, p, a, b) for n, p in x.items()}
            if c["compiled"] == 2:  # Compile one graph for all lengths.
                for n in set(part) & {*TIMED}:
                    torch._dynamo.maybe_mark_dynamic(part[n], 1)
            if name == "feedback":
                names = [n for n in ops.FeedbackWeights._fields if n in part]
                part |= {
                    "weights": ops.FeedbackWeights(**{n: part.pop(n) for n in names})
                }
            now = None if mask is None else mask[:, a:b]
            if self.c["asked"] == "y" and i == len(self.cuts) - 2:
                y.append(op(**part, key_mask=now, state=made))
                return [torch.cat(y, 1)]
            y_i, made = op(**part, key_mask=now, state=made, return_state=True)
            y.append(y_i)
        if name == "feedback" and mask is not None:
            made = None  # The final state, which omits masked steps, is not returned.
        parts = made if isinstance(made, tuple) else [made]
        parts = [p for p in parts if p is not None and p.is_floating_point()]
        return [torch.cat(y, 1), *parts]

    def piece(self, name: str, x: Tensor, a: int, b: int) -> Tensor:
        """Return steps `a` to `b` of an input, or all of it if it has no time steps."""
        if name == "bias":
            return x[a:b, : x.shape[1] - self.c["time"] + b]
        if name == "band":
            return x[a:b]
        return x[:, a:b] if name in TIMED else x

    # --- Expected results ---

    def expected(self, jitter: int = 0) -> list[tuple[str, Tensor]]:
        """Compute outputs, states and gradients with the reference loops.

        With `jitter`, compute in the dtype of the sums (float32 for float64), from
        inputs that are perturbed by up to one rounding.
        """
        c, sums = self.c, min(self.sums, torch.float32, key=lambda d: d.itemsize)
        dtype = sums if jitter else torch.float64

        def wide(part: Tensor) -> Tensor:
            part = part.detach().cpu().double()
            if jitter:
                noise = self.uniform(*part.shape) * 2 - 1
                part = (part * (1 + torch.finfo(dtype).eps * noise)).to(dtype)
            return part.requires_grad_()

        self.g.manual_seed(jitter)
        x = {name: wide(part) for name, part in self.x.items()}
        state = [wide(part) for part in self.state]
        more = {}
        if c["op"] in RANDOM:
            more["omega"] = self.module.omega.to("cpu", dtype)
        rows = [(0, slice(*ab)) for ab in zip(self.ends, self.ends[1:], strict=False)]
        rows = rows or [(i, slice(None)) for i in range(c["batch"])]
        y, after, before = [], [], torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            for i, (row, steps) in enumerate(rows):
                y_i, after_i = self.alone(
                    x, [part[i] for part in state], row, steps, more
                )
                y.append(y_i)
                after.append(after_i)
        finally:
            torch.set_default_dtype(before)
        whole = torch.cat(y)[None] if self.ends else torch.stack(y)
        states = [torch.stack(each) for each in zip(*after, strict=True)]
        return self.with_gradients([whole, *states], x, state)

    def alone(self, x: Named, state: Parts, row: int, steps: slice, more: Named) -> Any:
        """Run the reference loop on one sequence, leaving out masked tokens."""
        op, real = self.c["op"], self.mask[row][steps]
        if op == "feedback_attention":
            x = {n: p[row] if n in HIDDEN else p for n, p in x.items()}
            return LOOPS[op](self.c, x, state)
        x = {n: p[row][steps] if n in TIMED else p for n, p in x.items()} | more
        c = {**self.c, "scale": x.get("scale", self.c["scale"])}
        if op in PLACED:
            y, after = LOOPS[op](c, x, state, real)
        else:
            x = {n: p[real] if n in TIMED else p for n, p in x.items()}
            kept, after = LOOPS[op](c, x, state)
            y = kept.new_zeros(len(real), *kept.shape[1:])
            y = y.index_put((real.nonzero()[:, 0],), kept)
        dropped = op == "feedback" and c["mask"] != "none"
        return y, [] if c["asked"] == "y" or dropped else after

    def with_gradients(
        self, outputs: Parts, x: Named, state: Parts
    ) -> list[tuple[str, Tensor]]:
        """Return outputs and the gradients of a randomly weighted loss, by name."""
        c, mode = self.c, self.c["mode"]
        named, leaves = self.outputs(outputs), self.leaves(x, state)
        if c["grad"] == "none" or not leaves:
            return named
        first, last = int(c["asked"] == "state"), 1 if c["asked"] == "y" else None
        weighted = zip(outputs, self.weights(outputs), strict=True)
        pairs = [
            (torch.where(o.isinf(), 0, o), w)
            for o, w in [*weighted][first:last]
            if o.requires_grad
        ]
        names, tensors = zip(*leaves, strict=True)
        options: Any = {"allow_unused": True, "materialize_grads": True}

        def pull(pairs: list[tuple[Tensor, Tensor]], **more: bool) -> Parts:
            if not pairs:  # No output requires a gradient.
                return [torch.zeros_like(leaf) for leaf in tensors]
            of, weights = zip(*pairs, strict=True)
            return [*torch.autograd.grad(of, tensors, weights, **options, **more)]

        kept = mode in ("twice", "second")
        gradients = pull(pairs, create_graph=mode == "second", retain_graph=kept)
        if mode == "twice":
            again = pull(pairs)
            assert all(map(torch.equal, gradients, again)), "a kept graph changes"
        results = [(f"d {n}", d) for n, d in zip(names, gradients, strict=True)]
        if mode == "second":
            self.g.manual_seed(c["seed"] + 2)
            again = [(d, self.normal(*d.shape).to(d)) for d in gradients]
            again = pull([pair for pair in again if pair[0].requires_grad])
            results += [(f"dd {n}", d) for n, d in zip(names, again, strict=True)]
        if mode == "jvp":
            tangents = self.tangents()
            along = sum(
                (tangents[n].cpu().double() * d).sum()
                for n, d in zip(names, gradients, strict=True)
            )
            results = [("along", torch.as_tensor(along))]
        return named + results

    def named(self, state: Parts) -> list[tuple[str, Tensor]]:
        return [(f"state {i}", part) for i, part in enumerate(state, 1)]

    def outputs(self, parts: Parts) -> list[tuple[str, Tensor]]:
        return [("y", parts[0]), *self.named(parts[1:])]

    def leaves(self, x: Named, state: Parts) -> list[tuple[str, Tensor]]:
        """Return (name, tensor) pairs of the inputs whose gradients are compared."""
        given = [*x.items(), *self.named(state)]
        own = dict([*self.x.items(), *self.named(self.state)])
        return [(n, p) for n, p in given if own[n].requires_grad and n != "factors"]

    def tangents(self) -> Named:
        self.g.manual_seed(self.c["seed"] + 3)
        leaves = self.leaves(self.x, self.state)
        return {n: self.normal(*p.shape).to(p) for n, p in leaves}

    def weights(self, outputs: Parts) -> Parts:
        """Sample incoming gradients of outputs, in the memory layout of the case."""
        self.g.manual_seed(self.c["seed"] + 1)
        made = []
        for i, o in enumerate(outputs):
            w = self.laid(self.normal(*o.shape).to(self.kept if i else self.dtype))
            if self.c["mode"] == "ones":
                w = torch.ones((), dtype=o.dtype).expand(o.shape)
            made.append(w.to(o.device, o.dtype))
        return made


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isinf(), 0, x).detach().double()


def check(c: Case) -> str | None:
    """Run a case; return an error, None if correct, or "beyond" if not comparable."""
    p = Problem(c)
    wanted = p.expected() if c["batch"] else None
    if wanted and not all((finite(x).abs() <= LARGEST).all() for _, x in wanted):
        return "beyond"
    try:
        got = p.found()
    except Exception as e:
        text = " ".join(str(e).split())[:300]
        refused = c["mode"] == "second" and c["implementation"] not in EXACT
        if refused and "second derivative" in text and "implementation='naive'" in text:
            return None
        if c["implementation"] == "triton" and "cannot run here" in text:
            return "beyond"  # The kernel does not support this case.
        return f"{type(e).__name__}: {text}"
    if wanted is None:  # An empty batch has nothing to compare.
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
        limit += info.tiny * info.eps * size  # Allow subnormal rounding errors.
        if error <= limit:
            continue
        others = others or [p.expected(jitter) for jitter in (1, 2)]
        off = max((finite(o[i][1]) - finite(y)).norm().item() for o in others)
        off *= 2.0**-29 if p.sums == torch.float64 else 1
        if not error <= 32 * off:
            return f"{name} is off by {error / limit:.2g} times the limit"
    return None


def draw(seed: str, implementation: str | None = None, device: str = "cpu") -> Case:
    """Sample a case that its operation supports.

    - `implementation`: the form to test; None = any form that runs on a CPU.
    """
    r = random.Random(seed)
    names = [n for n in OPERATIONS if implementation in (None, *forms(n))]
    op = r.choice(names)
    has, table = takes(op), forms(op) != ("naive",)
    c: Case = {"op": op, "seed": r.randrange(10**6), **SIMPLEST, "device": device}
    dtypes = ["float64", "float32", "float64", "float32", "float16", "bfloat16"]
    if implementation == "triton":  # Triton's interpreter does not support bfloat16.
        dtypes = ["float32", "float16", *["bfloat16"] * (device == "cuda")]
    c["dtype"] = r.choice(dtypes)
    plain = [n for n in forms(op) if n != "triton"]
    c["implementation"] = implementation or r.choice(plain)
    long = table and op not in ("aft_conv2d", "feedback")
    borders = [15, 16, 17, 31, 32, 33, 64, 65, r.randint(34, 70)] if long else []
    short = [0, 1, 2, 3, *(r.randint(2, 12) for _ in range(5))]
    c["time"] = r.choice([*short, *borders])
    if op in RULES and c["time"] > 30 and r.random() < 0.2:
        c["time"] = r.choice([96, 97, 128, 130, 200])
    c["batch"] = r.choice([1, 1, 2, 3]) if c["time"] < 30 else 1
    c["heads"], c["layers"] = r.choice([1, 2, 3]), r.choice([1, 2, 3])
    c["key"], c["value"] = (r.choice([1, 2, 3, 5, 8]) for _ in "kv")
    if op == "feedback":
        c["key"] = r.choice([4, 6])
    elif long and r.random() < 0.1:
        none = ["batch", "value", "key", *["heads"] * ("conv" not in op)]
        c[r.choice(none)] = 0
    elif op in RULES and c["time"] < 50 and r.random() < 0.05:
        c["key"] = r.choice([40, 130, 256])  # DPFP features can be this wide.
    sizes = [1, 2, 3, 5, 20] if op != "aft_conv2d" else [1, 2, 3]
    c["window"] = r.choice(sizes)
    c["size"] = r.choice([1.0, 1.0, 0.1, 1.3])
    if op.startswith("aft"):
        c["size"] = r.choice([1.0, 1.0, 10.0, 300.0, 2000.0])
    if op == "softmax_attention":  # PyTorch's gradient error grows with the scores.
        c["size"] = r.choice([1.0, 3.0])  # The error is 6e-8 times the largest score.
    if "scale" in has:
        c["group"] = r.choice([1, 1, 2, 3])
        c["scale"] = r.choice([None, None, 0.5, -0.7, 0.0, 3.0])
        c["learned"] = int(r.random() < 0.3)
    c["wide_gates"] = r.randrange(2)
    for name in ("edges", "fewer", "dropout"):
        c[name] = int(r.random() < 0.4)
    c["normalize"] = r.randrange(2) * ("normalize" in has)
    c["channels"] = r.randrange(2) * (op == "sum_rule" and not c["normalize"])
    c["activation"] = r.choice(list(ACTIVATIONS))
    c["causal"] = int("causal" not in has or r.random() < 0.7)
    masks = ["none", "none", "some", "row"] if "key_mask" in has else ["none"]
    c["mask"] = r.choice(masks)
    if c["mask"] == "row" and c["batch"] == 1 and r.random() < 0.9:
        c["mask"] = "some"  # Masking a complete row would leave no token.
    if c["causal"] and "state" in has:
        c["state"], c["cuts"] = r.randrange(2), r.choice([0, 0, 1, 2])
        if "cu_seqlens" in has and r.random() < 0.3:
            c["documents"], c["cuts"], c["batch"] = r.choice([1, 2, 4]), 0, 1
        c["asked"] = r.choice(["all", "all", "y", "state"])
    c["storage"] = r.choice(["plain", "strided", "offset", "transposed", "expanded"])
    if op == "feedback" and c["storage"] == "expanded":
        c["storage"] = "plain"  # A layer norm of equal values returns rounding errors.
    c["grad"] = r.choice(["all", "all", "all", "some", "none"])
    # Autocast is not tested with softmax attention, which calls PyTorch's kernel.
    wide = c["dtype"] == "float32" and "state" in has and op != "softmax_attention"
    c["autocast"] = int(wide and r.random() < 0.2)
    kernel = implementation == "triton"
    if c["grad"] != "none" and r.random() < 0.6:
        c["mode"] = r.choice(MODES[: MODES.index("vmap")] if kernel else MODES)
    if c["mode"] in ("vmap", "grad", "jvp"):
        c |= {"implementation": "auto", "grad": "all", "asked": "all", "autocast": 0}
        c["state"] *= op in RULES
    if c["mode"] in ("second", "jvp") and "16" in c["dtype"]:
        c["mode"] = "twice"
    if table and not kernel and c["mode"] == "once" and r.random() < 0.05:
        # Except for "efficient", compile few steps, because loops are slow to trace.
        quick = c["implementation"] == "efficient"
        c["compiled"], c["time"] = r.choice([1, 2]), min(c["time"], 40 if quick else 3)
        c["cuts"] = min(c["cuts"], int(quick))
        c |= {n: max(c[n], 1) for n in ("batch", "heads", "key", "value")}
        # Without custom operators, PyTorch derives the backward pass of a graph.
        c["autocast"] *= quick
        if op == "fwp":  # Graphs cannot contain user-defined functions.
            c["activation"] = r.choice(["none", "tanh"])
        if op == "feedback":  # With a mask, the size of the state would depend on data.
            c["mask"] = "none"
    return c


def forms(op: str) -> tuple[str, ...]:
    """List the implementations of an operation that run on this machine."""
    if op in MAPS or op == "feedback_attention":
        return ("naive",)
    return ops.implementations(op)


PAIR = "heads=2 key=3 value=2 seed=1"
#: Options with equal key and value widths, which PyTorch's kernel requires.
EQUAL = f"dtype=float32 {PAIR} key=2"
SMALL = "state=1 batch=2 heads=2 group=2 key=3 value=2 wide_gates=1 seed=1"
#: Cases for code paths that random cases may miss, such as streaming one token.
#: The cases include the rule of 1991, several tiles, unequal rows and scores of 0.
#: Cases with packed documents have no states, or attend in both directions.
ALWAYS = (
    *(f"op={op} implementation=efficient grad=none {SMALL}" for op in RULES),
    *(
        f"op={op} implementation=efficient grad=none normalize=1 {SMALL}"
        for op in RULES
        if ops.TABLE[op].rule.normalized_loop
    ),
    f"op=fwp implementation=efficient time=40 activation=tanh {SMALL}",
    f"op=aft_full implementation=efficient time=150 {PAIR}",
    f"op=feedback implementation=efficient time=9 batch=3 mask=row cuts=2 {PAIR} seed=6",
    *(
        f"op=softmax_attention implementation=efficient scale={scale} time=9 {EQUAL}"
        for scale in (0.0, -0.3, 1e-300)
    ),
    *(
        f"op={op} implementation={form} documents=3 asked=y time=40 {PAIR}"
        for op in (*RULES, "aft_simple causal=0")
        for form in ("naive", "efficient")
    ),
)
#: Options that only some operations have.
HAVE = ("activation", "normalize", "causal")
#: Options that `fixed` combines with every implementation of every operation.
VARIED = ("dtype", "mask", "storage", "mode", "normalize", "compiled", "state", "edges")
VARIED += ("asked", "causal", "learned", "grad", "fewer", "autocast", "documents")
VARIED += ("cuts", "group", "channels", "activation", "window")


def fixed(
    count: int = 300, implementation: str | None = None, device: str = "cpu"
) -> list[Case]:
    """Return a fixed list of cases that covers many options of every operation.

    From many random cases, choose the cases that add most pairs of an implementation
    of an operation and a value of an option.
    """
    pool, compiled = [], set()
    cases = [parsed(text) for text in ALWAYS] * (implementation is None)
    for i in range(20 * count):
        c = draw(f"fixed/{i}", implementation, device)
        if c["compiled"]:  # Compile six operations once, because compilation is slow.
            if c["implementation"] == "efficient" and c["time"] and len(compiled) < 6:
                cases += [c] * (c["op"] not in compiled)
                compiled.add(c["op"])
            continue
        length = sum(c["time"] > border for border in (0, 1, 14, 32, 70))
        values = {(n, c[n]) for n in VARIED if n in takes(c["op"]) or n not in HAVE}
        values |= {(length, c["grad"] == "none"), ("key", c["key"] > 9)}
        values |= {(c["normalize"], c["fewer"], c["edges"])}
        form = c["op"], c["implementation"]
        if c["implementation"] == "auto":  # In torch.func, "auto" runs "chunked".
            values = {(n, c[n]) for n in ("mode", "normalize", "mask", "state")}
        pool.append((c, {(*form, *value) for value in values}))
    seen: set[Any] = set()
    for least in (16, 8, 4, 2, 1):
        for c, pairs in pool:
            if len(cases) < count and len(pairs - seen) >= least:
                seen |= pairs
                cases.append(c)
    return sorted(cases, key=lambda c: c["compiled"])


#: Implementations that have second derivatives.
EXACT = ("naive", "chunked")


def fails(c: Case) -> bool:
    try:
        return check(c) not in (None, "beyond")
    except Exception:  # The options contradict each other.
        return False


def simpler(c: Case) -> Case:
    """Simplify a failing case, one option at a time, as long as it still fails."""
    if c["compiled"]:  # Do not simplify a compiled case, because compilation is slow.
        return c
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
    """Parse a case from a line of `name=value` pairs, as `line` writes it."""
    c = {**SIMPLEST, "seed": 0}
    for name, value in (word.split("=") for word in text.split()):
        for kind in (str, float, int):
            with contextlib.suppress(ValueError):
                c[name] = kind(value)
    return c


def search(cases: Iterable[Case], first: bool = False) -> list[str]:
    """Print and return the commands and errors of all cases that fail.

    - `first`: stop at the first failure, and do not simplify its case.
    """
    finds, verdicts = [], Counter[bool]()
    for c in cases:
        problem = check(c)
        verdicts[problem == "beyond"] += 1
        if problem not in (None, "beyond"):
            c = c if first else simpler(c)
            finds.append(f'python tests/fuzz.py --case "{line(c)}": {check(c)}')
            print(finds[-1], flush=True)
            if first:
                break
    print(f"{verdicts.total()} cases, {verdicts[True]} beyond, {len(finds)} finds")
    return finds


def drawn(seed: int, count: int, **options: Any) -> Iterator[Case]:
    return (draw(f"{seed}/{i}", **options) for i in range(count))


TODAY = int(f"{datetime.date.today():%Y%m%d}")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=TODAY, help="default: the date")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--case", help="one case, as it was printed")
    parser.add_argument("--fixed", action="store_true", help="those of make test")
    parser.add_argument("--first", action="store_true", help="stop at the first find")
    parser.add_argument("--implementation", help="of all cases, such as triton")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.case:
        sys.exit(check(parsed(args.case)) or "as expected")
    options = {"implementation": args.implementation, "device": args.device}
    cases = fixed(**options) if args.fixed else drawn(args.seed, args.cases, **options)
    print(f"seed {args.seed}")
    sys.exit(bool(search(cases, args.first)))
