"""Compare ways to compute AFT with large keys.

The mean of Eq. 2 of Zhai et al. (2021), for a causal sequence, is computed
in seven ways. The gate does not matter here, so it is left out.
"""

from collections.abc import Callable, Iterator
from math import inf

import torch
from frame import Claim, Point, Points, main
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import ops, plots
from fwlab.plots import SERIES

TITLE = "Which ways to compute AFT survive large keys"
SOURCE = "ours; Zhai et al. 2021, Eq. 2, and public code"
COST = "quick and full: a few seconds of one core"

TIME, CHANNELS, TILE = 128, 8, 16
DTYPES = ("float32", "bfloat16", "float16")
#: Standard deviations of keys and position biases.
SCALES = (1, 3, 10, 30, 100, 300, 1000)
#: Absolute error above which an output is wrong. Values have standard deviation 1.
WRONG_BY = 0.1


def quotient(k: Tensor, v: Tensor, w: Tensor, epsilon: float = 0) -> Tensor:
    e_k, e_w = k.exp(), w.exp()
    return (e_w @ (e_k * v)) / (e_w @ e_k + epsilon)


def epsilon(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return quotient(k, v, w, epsilon=1e-6)


def clamped(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return quotient(k.clamp(-60, 30), v, w)


def all_keys(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return quotient(k - k.amax(0), v, w - w.amax(1, keepdim=True))


def separate(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    seen = w[..., None] > -inf
    e_k = (torch.where(seen, k, -inf) - k.cummax(0).values[:, None]).exp()
    e_w = (w - w.amax(1, keepdim=True)).exp()
    weights = e_w[..., None] * e_k
    return (weights * v).sum(1) / weights.sum(1)


def tiled(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    seen = w[..., None] > -inf
    scores = k + torch.where(seen, w[..., None], 0)
    tile = torch.arange(len(k)) // TILE
    near = (tile <= tile[:, None])[..., None]  # Include later keys of the same tile.
    top = torch.where(near, scores, -inf).amax(1, keepdim=True)
    weights = torch.where(seen, scores - top, -inf).exp()
    return (weights * v).sum(1) / weights.sum(1)


def fwlab(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    bias = torch.where(w > -inf, w, 0)
    gate = torch.zeros_like(k)  # sigmoid(0) is 1/2, hence the factor 2 below.
    y = ops.aft_full(gate[None], k[None], v[None], bias)
    assert isinstance(y, Tensor)
    return 2 * y[0]


#: Functions of `k` and `v` `[time, channels]` and biases `w` `[time, time]`.
#: Biases are -inf where a row may not see a step.
WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "no maximum": quotient,
    "epsilon": epsilon,
    "clamped keys": clamped,
    "maximum of all keys": all_keys,
    "separate maxima": separate,
    "maximum of a tile": tiled,
    "fwlab": fwlab,
}


def points(quick: bool) -> list[Point]:
    return [
        {"way": way, "dtype": dtype, "scale": scale, "seed": seed}
        for scale in ((1, 10, 100) if quick else SCALES)
        for way in WAYS
        for dtype in DTYPES
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    dtype, scale = getattr(torch, point["dtype"]), point["scale"]
    k, v, w = (
        (size * torch.randn(TIME, width)).to(dtype).requires_grad_()
        for size, width in ((scale, CHANNELS), (1, CHANNELS), (scale, TIME))
    )
    seen = torch.ones(TIME, TIME, dtype=torch.bool).tril()
    y = WAYS[point["way"]](k, v, torch.where(seen, w, -inf))
    (y * torch.randn(TIME, CHANNELS).to(dtype)).sum().backward()
    with torch.no_grad():
        exact = softmax(k.double(), v.double(), w.double(), seen)
    off = ((y.double() - exact).abs() <= WRONG_BY).logical_not()
    gradients = [x.grad for x in (k, v, w) if x.grad is not None]
    gradients[-1] = gradients[-1][seen]
    return {
        "outputs": share(~y.isfinite()),
        "gradients": share(~torch.cat([x.flatten() for x in gradients]).isfinite()),
        "wrong": share(off),
    }


def softmax(k: Tensor, v: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """Compute the output of AFT without its gate (Eq. 2) by a softmax for each row."""
    scores = torch.where(seen[..., None], k + w[..., None], -inf)
    return (scores.softmax(1) * v).sum(1)


def share(bad: Tensor) -> float:
    return round(bad.double().mean().item(), 5)


def claims(points: Points) -> Iterator[Claim]:
    bad = Points(p for p in points if p["outputs"] or p["gradients"] or p["wrong"])
    *others, ours = WAYS
    for way in others:
        scales = {dtype: bad(way=way, dtype=dtype)["scale"] for dtype in DTYPES}
        first = [f"{dtype} from {min(s)} on" for dtype, s in scales.items() if s]
        fails = all(scales.values()) if points(way=way) else None
        found = ", ".join(first) or "–"
        yield Claim(f"{way}: fails in every precision", "", found, fails)
    count, of = len(bad(way=ours)), len(points(way=ours))
    yield Claim(
        f"{ours}: no number is wrong or not finite",
        "",
        f"{count} of {of} points with such a number",
        count == 0 if of else None,
    )


def draw(points: Points) -> Figure:
    figure, axes = plots.grid(len(WAYS), r"deviation $\sigma$", "share", height=1.4)
    for ax, way in zip(axes, WAYS, strict=True):
        for dtype, color, marker in zip(DTYPES, SERIES, "o^s", strict=True):
            own = points(way=way, dtype=dtype)
            plots.series(ax, own, color, marker, "-", dtype, "wrong", "scale")
            plots.series(ax, own, color, "", ":", None, "gradients", "scale")
        ax.set_title(way)
        ax.set(xscale="log", ylim=(-0.05, 1.05), yticks=[0, 0.5, 1])
        ax.minorticks_off()
    plots.legend(figure, axes[0], columns=3)
    return figure


if __name__ == "__main__":
    main(__file__)
