"""Undoing updates: how far back can fast weights be recomputed?

A backward pass needs the fast weights of every step. Appendix F of the
paper keeps the last ones, and undoes one update after the other.
"""

from collections.abc import Callable
from math import isfinite

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import plots
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    select,
    throughout,
)
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.plots import SERIES, WRONG

#: How each update is undone.
METHODS = {
    "stored": "increments stored",
    "inverted": "update inverted",
    "decay": "stored, decay 0.99",
}
DTYPES = ("float64", "float32", "bfloat16")
NORMS = {"sum": sum_normalize, "l2": l2_normalize}
LENGTHS = (64, 256, 1024, 2048, 4096, 16384)
DECAY = 0.99
#: An error of this size is no use for a gradient.
USELESS = 0.01


def points(quick: bool) -> list[Point]:
    return [
        {
            "method": method,
            "dtype": dtype,
            "key_norm": norm,
            "length": length,
            "map": "dpfp-1",
            "d_key": 16,
            "seed": seed,
        }
        for length in (LENGTHS[:4] if quick else LENGTHS)
        for method in METHODS
        for dtype in DTYPES
        for norm in NORMS
        for seed in (1, 2, 3)
    ]


@torch.no_grad()
def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    length, d_key = point["length"], point["d_key"]
    dtype = getattr(torch, point["dtype"])
    k = NORMS[point["key_norm"]](DPFP(1)(torch.randn(length, d_key).double()))
    v = torch.randn(length, d_key).double()
    beta = torch.sigmoid(torch.randn(length).double())
    steps = [x.to(dtype).unbind() for x in (k, v, beta)]
    decay = DECAY if point["method"] == "decay" else 1.0
    W = k.new_zeros(d_key, k.shape[1], dtype=dtype)
    before, increments = [], []
    for k_t, v_t, beta_t in zip(*steps, strict=True):
        before.append(W)
        W = decay * W
        increments.append(beta_t * (v_t - W @ k_t))
        W = W + torch.outer(increments[-1], k_t)
    largest = torch.stack([each.double().norm() for each in before]).max()
    errors = []
    for k_t, v_t, beta_t in zip(*(reversed(x) for x in steps), strict=True):
        increment = increments.pop()
        if point["method"] == "inverted":
            increment = recovered(W, k_t, v_t, beta_t)
        W = (W - torch.outer(increment, k_t)) / decay
        errors.append((W - before.pop()).double().norm())
    error = (torch.stack(errors).max() / largest).item()
    return {"error": float(f"{error:.3g}") if isfinite(error) else None}


def recovered(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""The increment of a step, from the fast weights after it.

    $W_t k = (1 - \beta |k|^2)\, W_{t-1} k + \beta |k|^2\, v$, so
    $\beta (v - W_{t-1} k) = \beta (v - W_t k) / (1 - \beta |k|^2)$.
    """
    return beta * (v - W @ k) / (1 - beta * (k @ k))


def claims(points: list[Point]) -> list[Claim]:
    """What is right at any length, and what is no use from 2048 steps on.

    The paper gives no errors.
    """
    late = f"error above {USELESS} from 2048 steps on"
    return [
        _claim(points, "increments stored, float32: error below 1e-5 at any length",
               "stored", "float32", lambda error: error < 1e-5, 0),
        *(
            _claim(points, f"{what}: {late}", method, dtype, lambda x: x > USELESS, 2048)
            for what, method, dtype in (
                ("increments stored, bfloat16", "stored", "bfloat16"),
                ("update inverted, float32", "inverted", "float32"),
                ("increments stored, float32, decay of 0.99", "decay", "float32"),
            )
        ),
    ]  # fmt: skip


def _claim(
    points: list[Point],
    text: str,
    method: str,
    dtype: str,
    holds: Callable[[float], bool],
    start: int,
) -> Claim:
    """A claim about both normalisations, and every length from some on."""
    some = select(points, method=method, dtype=dtype)
    lengths = LENGTHS if len({p["length"] for p in points}) > 4 else LENGTHS[:4]
    groups = {
        f"{norm}, {length} steps": [
            p["error"] for p in select(some, key_norm=norm, length=length)
        ]
        for norm in NORMS
        for length in lengths
        if length >= start
    }
    sign = -1 if start else 1  # the closest to the threshold
    return throughout(
        text,
        "",
        groups,
        holds,
        len(groups),
        spec=".0e",
        x="",
        worst=lambda error: sign * error,
    )


def draw(points: list[Point]) -> Figure:
    figure, axes = plots.grid(len(METHODS) * len(NORMS), "steps undone", "error")
    looks = dict(
        zip(DTYPES, zip(SERIES, "o^s", ("-", "--", ":"), strict=True), strict=True)
    )
    pairs = [(method, norm) for method in METHODS for norm in NORMS]
    for ax, (method, norm) in zip(axes, pairs, strict=True):
        own = select(points, method=method, key_norm=norm)
        for dtype, (color, marker, line) in looks.items():
            some = select(own, dtype=dtype)
            plots.series(ax, some, color, marker, line, dtype, "error", "length")
        ax.axhline(USELESS, color=WRONG, linewidth=1, linestyle=(0, (4, 2)))
        ax.set_title(f"{METHODS[method]},\n{norm.replace('l2', 'L2')} normalisation")
        ax.set(xscale="log", yscale="log", ylim=(1e-17, 1e20))
        ax.minorticks_off()
    plots.legend(figure, axes[0], columns=3)
    return figure


EXPERIMENT = Experiment(
    name="reversal",
    title="How far back updates can be undone",
    source="Schlag et al. 2021, appendix F",
    cost="quick: half a minute of one core; full: 2 minutes",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
)
