"""Cases of the fast weight rules."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.bench.case import Case, Problem, Side
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step, read

BATCH, HEADS, WIDTH = 4, 4, 64
#: Per token, of DeltaProduct.
STEPS = 2
Operation = Any  # a rule of `fwlab.ops`


def delta_indexing(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The naive loop as it is often written, indexing at every step.

    The gradient of each index is a tensor of zeros as large as the whole
    input: its backward pass is quadratic in time.
    """
    W, y = q.new_zeros(*q.shape[:1], *q.shape[2:3], v.shape[-1], q.shape[-1]), []
    for t in range(q.shape[1]):
        W = delta_step(W, k[:, t], v[:, t], beta[:, t])
        y.append(read(W, q[:, t]))
    return torch.stack(y, dim=1)


def delta_products(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The fastest loop that we found: products in place of einsum.

    Harder to read than naive, and on a CPU about twice as fast, with nearly twice the memory.
    """
    W, y = q.new_zeros(*q.shape[:1], *q.shape[2:3], v.shape[-1], q.shape[-1]), []
    for q_t, k_t, v_t, beta_t in zip(
        *(x.unbind(1) for x in (q, k, v, beta)), strict=True
    ):
        v_bar = (W * k_t[..., None, :]).sum(-1)
        u_t = beta_t[..., None] * (v_t - v_bar)
        W = W + u_t[..., :, None] * k_t[..., None, :]
        y.append((W * q_t[..., None, :]).sum(-1))
    return torch.stack(y, dim=1)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    corrects: bool = False,
) -> Tensor:
    r"""A rule as a masked matrix of all pairs of steps.

    - `corrects`: whether step t writes what is missing, $v_t - \bar v_t$,
      in place of $v_t$. That is one triangular system.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    left: Tensor | None = None  # at step t, of what step s has written
    if log_decay is not None:
        total = log_decay.transpose(1, 2).cumsum(-1)
        left = (total[..., :, None] - total[..., None, :]).tril().exp()

    def pairs(rows: Tensor) -> Tensor:
        products = rows @ k.mT
        return products if left is None else products * left

    if beta is not None:
        v = beta.transpose(1, 2)[..., None] * v
    if corrects and beta is not None:
        # u + beta * (retrieved from all u before) = beta * v
        before = (beta.transpose(1, 2)[..., None] * pairs(k)).tril(-1)
        v = torch.linalg.solve_triangular(before, v, upper=False, unitriangular=True)
    return (pairs(q).tril() @ v).transpose(1, 2)


def gated_dense(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The gated rule writes beta, and keeps 1 - beta."""
    return dense(q, k, v, beta, torch.log1p(-beta))


#: The dense form of each rule that has one. With a decay per key channel
#: there would be one matrix per channel.
DENSE: dict[str, Side] = {
    "sum_rule": dense,
    "gated_rule": gated_dense,
    "delta_rule": partial(dense, corrects=True),
    "gated_delta_rule": partial(dense, corrects=True),
}


def example(
    op: Operation, sizes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Draw usual inputs of a rule by name, in float64.

    - `sizes`: those of its dimensions by name.
    """
    x = {}
    for name, dims in op.rule.tensors.names.items():
        if name in op.rule.optional:
            continue
        shape = [sizes[dim] for dim in dims]
        part = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name in "qk":
            x[name] = l2_normalize(part)
        elif name == "log_decay":
            x[name] = -F.softplus(part - 1)
        else:
            x[name] = part if name == "v" else torch.sigmoid(part)
    if "a" in x:  # RWKV-7 removes a part of what the key holds
        x |= {"a": -x["k"], "b": x["k"] * x["b"]}
    return x


def problem(
    dtype: torch.dtype,
    *,
    op: Operation,
    time: int,
    width: int,
    batch: int = BATCH,
    heads: int = HEADS,
) -> Problem:
    """Draw inputs of a rule, and the gradient of its result."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": batch, "time": time, "heads": heads, "queries": heads}
    sizes |= {"key": width, "value": width, "steps": STEPS}
    inputs = [x.to(dtype) for x in example(op, sizes, generator).values()]
    gradient = torch.randn(batch, time, heads, width, generator=generator)
    return [x.requires_grad_() for x in inputs], gradient.to(dtype)


def without_mean(op: Operation) -> Callable[..., Tensor]:
    """Return the operation without denominators."""
    return partial(op, normalize=False) if op.rule.loops.normalized else op


def _case(op: Operation, time: int, width: int = WIDTH) -> Case:
    name, plain = op.__name__, without_mean(op)
    more = MORE.get(name, {}).get((time, width), {})
    sides = ("naive", "chunked", "efficient")
    return Case(
        name,
        {"T": time, "batch": BATCH, "heads": HEADS, "width": width},
        partial(problem, op=op, time=time, width=width),
        {**more, **{side: partial(plain, implementation=side) for side in sides}},
        rounds=7 if time <= 1024 else 5,
        # One thread, for comparison with what the authors published.
        threads=1 if width < WIDTH else None,
    )


#: What others than fwlab compute it with, at some sizes.
MORE: dict[str, dict[tuple[int, int], dict[str, Side]]] = {
    "delta_rule": {
        (1024, WIDTH): {
            "indexing loop": delta_indexing,
            "products loop": delta_products,
        },
        (4096, WIDTH): {"products loop": delta_products},
    },
    "sum_rule": {(2048, 32): {"dense": dense}},
}
#: The rules, and the (time, width) of more problems than the first of each.
RULES = {op.__name__: op for op in ops.TABLE.values() if hasattr(op, "rule")}
LARGER = {"sum_rule": ((4096, 64), (2048, 32)), "delta_rule": ((4096, 64),)}
CASES = tuple(
    _case(op, *size)
    for name, op in RULES.items()
    for size in ((1024, WIDTH), *LARGER.get(name, ()))
)
