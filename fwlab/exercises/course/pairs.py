"""One memory all the way: eight pairs, scored again after every idea.

Every notebook about memories ends with the same table, and adds to it. Its
rows are ways to remember eight pairs whose random keys of width 8 overlap.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fwlab import ops
from fwlab.feature_maps import (
    DPFP,
    ELU1,
    FAVOR,
    Identity,
    l2_normalize,
    sum_normalize,
)

#: Takes queries `[queries, 8]`, and keys and values `[time, 8]` in the order
#: in which they are written; returns what reading gives, `[queries, 8]`.
Memory = Callable[[Tensor, Tensor, Tensor], Tensor]
Features = Callable[[Tensor], Tensor]


def eight_pairs() -> tuple[Tensor, Tensor]:
    """Eight pairs, the same every time.

    - Returns keys of length 1 and values, both `[8, 8]`, in float64.
    """
    generator = torch.Generator().manual_seed(8)
    keys, values = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    return l2_normalize(keys), values


def score(memory: Memory) -> tuple[float, float]:
    """Measure how well a memory holds the eight pairs.

    - `memory`: takes queries `[queries, 8]`, and keys and values `[time, 8]`
      in the order in which they are written; returns what reading gives.
    - Returns two squared errors, relative to the values: after eight writes,
      and after the first four keys got new values. 0 is perfect; 1 is what a
      memory that returns zeros has.
    """
    keys, values = eight_pairs()
    new = values.flip(0)[:4]
    errors = []
    for k, v, wanted in (
        (keys, values, values),
        (
            torch.cat([keys, keys[:4]]),
            torch.cat([values, new]),
            torch.cat([new, values[4:]]),
        ),
    ):
        result = memory(keys, k, v)
        errors.append(float((result - wanted).square().sum() / wanted.square().sum()))
    return errors[0], errors[1]


def scoreboard(notebook: int, memories: Mapping[str, Memory]) -> None:
    """Print the table: rows of the notebooks before this one, then yours.

    - `notebook`: the number of this notebook.
    - `memories`: what this notebook adds, by name; see `score`.
    """
    rows = [
        (f"{number:02}", name, memory)
        for number, known in MEMORIES.items()
        if number < notebook
        for name, memory in known.items()
    ]
    rows += [("new", name, memory) for name, memory in memories.items()]
    width = max(len(name) for _, name, _ in rows)
    print(f"{'':4} {'error of reading':{width}}   eight pairs   four replaced")
    for where, name, memory in rows:
        first, second = score(memory)
        print(f"{where:4} {name:{width}} {first:13.3f} {second:15.3f}")


def softmax(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Read from a list of all pairs; the factor makes softmax pick one of them."""
    return torch.softmax(10 * queries @ keys.mT, -1) @ values


def rule(
    operation: Callable[..., Any],
    phi: Features,
    beta: float | None = None,
    **options: Any,
) -> Memory:
    """Read the memory of an operation with these features at the last step.

    - `beta`: the strength of each write, for operations that take one.
    """

    def memory(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        every = (len(queries), len(keys), 1, -1)  # each query has a memory of its own
        q = phi(queries)[:, None, None].expand(every)
        k, v = (x[None, :, None].expand(every) for x in (phi(keys), values))
        strength = () if beta is None else (torch.full_like(v[..., 0], beta),)
        y: Tensor = operation(q, k, v, *strength, **options)
        return y[:, -1, 0]

    return memory


def attention(phi: Features) -> Memory:
    """Linear attention (Eqs. 17-19) with these features."""
    return rule(ops.sum_rule, phi)


def delta(phi: Features, beta: float = 1.0) -> Memory:
    """Make a memory of the delta rule (Eqs. 20 to 25) with these features."""
    return rule(ops.delta_rule, phi, beta)


def least_squares(decay: float) -> Memory:
    """Make a memory that fits all pairs best; a pair counts decay^age, as in Mesa."""

    def memory(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        age = torch.arange(len(keys) - 1, -1, -1)[:, None]
        k = decay**age * keys
        H = k.mT @ keys + 1e-6 * torch.eye(keys.shape[-1], dtype=keys.dtype)
        return queries @ torch.linalg.solve(H, k.mT @ values)

    return memory


@cache
def directions() -> FAVOR:
    """Draw the random directions with the median error among the seeds 0 to 20."""
    return FAVOR(8, 64, stabilize=False, seed=1).double()


def favor(x: Tensor) -> Tensor:
    """Random features of exp(10 q . k), the kernel of the row of softmax.

    In float64, keys of this length need no maximum.
    """
    features: Tensor = directions()(10**0.5 * x)
    return features


@cache
def trained_projection() -> Tensor:
    """Train a projection of the eight keys for the delta rule with DPFP.

    It sees streams of these keys with random values, as a trained layer knows
    its symbols; it never sees the values that are scored.
    """
    generator = torch.Generator().manual_seed(6)
    keys, _ = eight_pairs()
    P = torch.eye(8, dtype=keys.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([P], lr=0.1)
    with torch.enable_grad():
        for _ in range(150):
            which = torch.randint(8, (8, 16), generator=generator)
            v = torch.randn(8, 16, 1, 8, generator=generator, dtype=keys.dtype)
            phi = sum_normalize(DPFP(nu=1)(keys @ P))
            k, beta = phi[which][:, :, None], torch.ones_like(v[..., 0])
            _, W = ops.delta_rule(k, k, v, beta, return_state=True)
            assert isinstance(W, Tensor)
            came = (which[..., None] == torch.arange(8)) * torch.arange(1, 17)[:, None]
            step, last = came.max(1)
            wanted = v[torch.arange(8)[:, None], last, 0]
            errors = (phi @ W[:, 0].mT - wanted)[step > 0]
            optimizer.zero_grad()
            errors.square().sum(-1).mean().backward()
            optimizer.step()
    return P.detach()


def trained(x: Tensor) -> Tensor:
    """DPFP of trained keys (the projection is trained when it is first used)."""
    return sum_normalize(DPFP(nu=1)(x @ trained_projection()))


def dpfp(normalize: Features) -> Features:
    return lambda x: normalize(DPFP(nu=3)(x))


MEMORIES: dict[int, dict[str, Memory]] = {
    1: {
        "sum": rule(ops.sum_rule, Identity(), normalize=False),
        "softmax attention": softmax,
    },
    2: {
        "linear attention, ELU + 1": attention(ELU1()),
        "linear attention, FAVOR+, 128 features": attention(favor),
    },
    3: {
        "linear attention, DPFP, nu = 1": attention(DPFP(nu=1)),
        "linear attention, DPFP, nu = 3": attention(DPFP(nu=3)),
    },
    4: {
        "delta rule, beta = 1": delta(Identity()),
        "delta rule, beta = 1/2": delta(Identity(), 0.5),
        "gated rule, beta = 1/2": rule(ops.gated_rule, Identity(), 0.5),
    },
    5: {
        "delta rule, DPFP, attention norm": rule(
            ops.delta_rule, DPFP(nu=3), 1.0, normalize=True
        ),
        "delta rule, DPFP, sum norm": delta(dpfp(sum_normalize)),
        "delta rule, DPFP, L2 norm": delta(dpfp(l2_normalize)),
    },
    6: {
        "linear attention, trained keys": attention(trained),
        "delta rule, trained keys": delta(trained),
    },
    12: {
        "least squares, decay 1": least_squares(1),
        "least squares, decay 0.8": least_squares(0.8),
    },
}
"""Rows of the table by the notebook that adds them."""
