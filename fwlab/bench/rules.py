"""Cases of the fast weight rules."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fwlab import ops
from fwlab.bench.case import Case, Problem, Side
from fwlab.ops.call.rule import Rule
from fwlab.ops.correcting.rules.delta import delta_step, read

BATCH, HEADS, WIDTH = 4, 4, 64


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


def problem(
    dtype: torch.dtype,
    *,
    record: Rule,
    time: int,
    width: int,
    batch: int = BATCH,
    heads: int = HEADS,
) -> Problem:
    """An example of the record, and the gradient of its result."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": batch, "time": time, "heads": heads, "key": width, "value": width}
    inputs = [x.to(dtype) for x in record.example(generator, None, **sizes).values()]
    gradient = torch.randn(batch, time, heads, width, generator=generator)
    return [x.requires_grad_() for x in inputs], gradient.to(dtype)


def of(record: Rule) -> Callable[..., Tensor]:
    """The operation, without denominators."""
    op = getattr(ops, record.name)
    return partial(op, normalize=False) if record.normalizes else op


def _case(record: Rule, time: int, width: int = WIDTH, **options) -> Case:
    op = of(record)
    more = MORE.get(record.name, {}).get((time, width), {})
    sides = ("naive", "chunked", "efficient")
    return Case(
        record.name,
        {"T": time, "batch": BATCH, "heads": HEADS, "width": width},
        partial(problem, record=record, time=time, width=width),
        {**more, **{side: partial(op, implementation=side) for side in sides}},
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
CASES = tuple(
    _case(record, *size)
    for record in ops.TABLE.values()
    if isinstance(record, Rule)
    for size in record.benchmarks
)
