"""What does the delta rule gain by replacing, and what a gate by forgetting?

Layers that differ in one thing: what a write removes. Each with and without
a short convolution, which also shows a layer its last few tokens.
"""

from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.text import LR, MAPS
from fwlab.layers import FastWeightAttention
from fwlab.layers.causal import Causal
from fwlab.models import Mixer
from fwlab.plots import FAST, TRAINED
from fwlab.training import Config


class Adding(FastWeightAttention):
    r"""The layer of the delta rule, but it removes nothing.

    $W \leftarrow W + \beta\, v \otimes \phi(k)$, with the same parameters, write
    strengths and features.
    """

    step = Causal.step  # by way of `prefill`

    def __init__(self, *sizes: Any, **options: Any):
        super().__init__(*sizes, **options)
        self.rule, self._beta = "sum", self._gates.pop("beta")

    def _qkv(self, x: Tensor, *parts: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        qk, v, inputs = super()._qkv(x, *parts)
        return qk, self._beta.of(self, x, qk)[..., None] * v, inputs


#: Layers by what a write removes: class, rule and feature map. Features are
#: divided by their sum in the delta rule, and have length 1 with "identity".
LAYERS: dict[str, tuple[type[FastWeightAttention], str, str]] = {
    "sum": (FastWeightAttention, "sum", "linear"),
    "delta without removal": (Adding, "delta", "linear"),
    "delta": (FastWeightAttention, "delta", "linear"),
    "gated": (FastWeightAttention, "gated", "linear"),
    "delta, unit keys": (FastWeightAttention, "delta", "identity"),
    "gated delta, unit keys": (FastWeightAttention, "gated_delta", "identity"),
    "delta, DPFP": (FastWeightAttention, "delta", "dpfp"),
}
#: Tokens that the short convolution sees; 0 = there is none.
CONVOLUTIONS = {0: "no convolution", 4: "convolution of 4"}


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"
    return [
        {
            "layer": name,
            "conv_size": conv_size,
            "size": size,
            "corpus": "any" if quick else "shakespeare",
            "lr": LR[size],
            "seed": seed,
        }
        for name in LAYERS
        for conv_size in CONVOLUTIONS
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    return text.train(text.Run(*model(point), text.load(point["corpus"])))


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    layer, rule, name = LAYERS[point["layer"]]
    key_norm = None
    if "delta" in rule:
        key_norm = "l2" if name == "identity" else "sum"
    mixer = Mixer(
        lambda s: layer(
            s.d_model,
            s.heads,
            MAPS[name](s.d_model // s.heads),
            rule,
            key_norm,
            conv_size=point["conv_size"],
        )
    )
    return text.config(point, mixer), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    every = []
    for conv_size, where in CONVOLUTIONS.items():
        some = select(points, conv_size=conv_size)
        for one, other in (
            ("delta", "delta without removal"),
            ("gated", "delta"),
            ("gated", "delta, DPFP"),
            ("gated", "delta, unit keys"),
            ("gated delta, unit keys", "gated"),
            ("gated delta, unit keys", "delta, unit keys"),
        ):
            sides = [losses(some, one), losses(some, other)]
            every.append(compared(f"{where}: {one} below {other}", "", sides))
        what = f"{where}: delta without removal within 0.05 of sum"
        gaps = gap(some, "delta without removal", "sum")
        every.append(compared(what, "", [gaps], lambda x: abs(x) < 0.05))
    for one in ("delta", "delta, DPFP", "delta, unit keys"):
        sides = [gap(select(points, conv_size=n), one, "gated") for n in CONVOLUTIONS]
        what = f"a convolution halves the gap by which {one} ends above gated"
        every.append(compared(what, "", sides, lambda bare, conv: conv < bare / 2))
    return every


def losses(points: list[Point], name: str) -> list[float | None]:
    """Losses of a layer, of all seeds."""
    return [p["loss"] for p in select(points, layer=name)]


def gap(points: list[Point], one: str, other: str) -> list[float | None]:
    """By how much one layer ends above another, for each seed of both."""
    ends = {p["seed"]: p["loss"] for p in select(points, layer=other)}
    return [
        None if None in (p["loss"], ends[p["seed"]]) else p["loss"] - ends[p["seed"]]
        for p in select(points, layer=one)
        if p["seed"] in ends
    ]


def draw(points: list[Point]) -> Figure:
    figure, (ax,) = plots.panels(3.1)
    looks = ((TRAINED, "s"), (FAST, "o"))
    for (conv_size, label), look in zip(CONVOLUTIONS.items(), looks, strict=True):
        some = select(points, conv_size=conv_size)
        plots.rows(ax, {name: losses(some, name) for name in LAYERS}, *look, label)
    ax.set_xlabel("validation loss, nats per character")
    plots.legend(figure, ax, 2)
    return figure


EXPERIMENT = Experiment(
    name="replacing",
    title="Adding, replacing and forgetting, with and without a short convolution",
    source="ours; the layers are those of Schlag et al. 2021 and Yang et al. 2024",
    cost="quick: 5 min of one core; full: about 2 hours",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
