"""What does the delta rule gain by replacing, and what a gate by forgetting?

Layers that differ in one thing: what a write removes. Each with and without
a short convolution, which also shows a layer its last few tokens.
"""

from itertools import product
from math import inf
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from fwlab import ops, plots
from fwlab.experiments import text
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    below_part,
    compared,
    losses,
    select,
)
from fwlab.experiments.language_model import ROTARY_SOFTMAX
from fwlab.layers import FastWeightAttention
from fwlab.layers.causal import Causal, with_state
from fwlab.models import Mixer
from fwlab.plots import FAST, TRAINED
from fwlab.training import Config


class Adding(FastWeightAttention):
    r"""The layer of the delta rule, but it removes nothing.

    $W \leftarrow W + \beta\, v \otimes \phi(k)$, with the same parameters, write
    strengths and features.
    """

    step = Causal.step  # by way of `_mix`

    def _apply_rule(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        fading: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        options |= {"normalize": False, "state": state}
        v = self.gates["beta"](x, k)[..., None] * v
        return with_state(ops.sum_rule(q, k, v, **options))


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
#: The bar for them: it keeps the whole window. It has no convolution.
ATTENTION = "attention, rotary positions"
#: Tokens that the short convolution sees; 0 = there is none.
CONVOLUTIONS = {0: "no convolution", 4: "convolution of 4"}


def points(quick: bool) -> list[Point]:
    settings = (*product(LAYERS, CONVOLUTIONS), (ATTENTION, 0))
    return text.points(quick, [{"layer": x, "conv_size": n} for x, n in settings])


def run(point: Point) -> Point:
    return text.train(text.Run(*model(point), text.load(point["corpus"])))


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    mixer = ROTARY_SOFTMAX
    if point["layer"] != ATTENTION:
        layer, rule, name = LAYERS[point["layer"]]
        conv_size = point["conv_size"]
        mixer = text.fast_weights(rule, name, layer=layer, conv_size=conv_size)
    return text.config(point, mixer), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    every = []
    for conv_size, where in CONVOLUTIONS.items():
        some = select(points, conv_size=conv_size)
        for one, other in (
            ("delta", "delta without removal"),
            ("delta", "sum"),
            ("gated", "delta"),
            ("gated", "delta, DPFP"),
            ("gated", "delta, unit keys"),
            ("gated delta, unit keys", "gated"),
            ("gated delta, unit keys", "delta, unit keys"),
        ):
            sides = [losses(some, layer=name) for name in (one, other)]
            every.append(compared(f"{where}: {one} below {other}", "", sides))
        what = f"{where}: delta without removal within 0.05 of sum"
        gaps = gap(some, "delta without removal", "sum")
        every.append(compared(what, "", [[*gaps.values()]], lambda x: abs(x) < 0.05))
    for one, other in (
        ("delta", "gated"),
        ("delta, DPFP", "gated"),
        ("delta, unit keys", "gated"),
        ("delta, unit keys", "gated delta, unit keys"),
    ):
        conv, bare = (gap(select(points, conv_size=n), one, other) for n in (4, 0))
        what = f"a convolution halves the gap by which {one} ends above {other}"
        every.append(below_part(what, conv, bare, 1 / 2))
    bar = losses(points, layer=ATTENTION)
    for conv_size, where in CONVOLUTIONS.items():
        for name in LAYERS:
            sides = [losses(points, layer=name, conv_size=conv_size), bar]
            every.append(compared(f"{where}: {name} below {ATTENTION}", "", sides))
    return every


def gap(points: list[Point], one: str, other: str) -> dict[int, float]:
    """By how much one layer ends above another, by seed.

    Infinite if the layer has failed, minus infinite if only the other has.
    """
    ends = {p["seed"]: p["loss"] for p in select(points, layer=other)}
    return {
        (seed := p["seed"]): inf
        if p["loss"] is None
        else -inf
        if ends[seed] is None
        else p["loss"] - ends[seed]
        for p in select(points, layer=one)
        if p["seed"] in ends
    }


def draw(points: list[Point]) -> Figure:
    figure, (ax,) = plots.panels(3.1)
    looks = ((TRAINED, "s"), (FAST, "o"))
    for (conv_size, label), look in zip(CONVOLUTIONS.items(), looks, strict=True):
        some = select(points, conv_size=conv_size)
        every = (*LAYERS, ATTENTION)
        plots.rows(ax, {name: losses(some, layer=name) for name in every}, *look, label)
    ax.set_xlabel("validation loss, nats per character")
    plots.legend(figure, ax, 2)
    return figure


EXPERIMENT = Experiment(
    name="replacing",
    title="Adding, replacing and forgetting, with and without a short convolution",
    source="ours; the layers are those of Schlag et al. 2021 and Yang et al. 2024",
    cost="quick: 5 min of one core; full: 70 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
