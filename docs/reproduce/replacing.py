"""Measure what the delta rule gains by replacing, and a gate by forgetting.

Layers differ in one thing: the part that a write removes. Each has a variant with
a short convolution, which also shows a layer its last few tokens.
"""

from itertools import product

import text
from frame import Point, Points, holds, main, order, paired

from fwlab import ops, plots
from fwlab.layers import FastWeightAttention
from fwlab.layers.causal import Causal, with_state
from fwlab.models import Mixer
from fwlab.plots import FAST, TRAINED

TITLE = "Adding, replacing and forgetting, with and without a short convolution"
SOURCE = "ours; the layers are those of Schlag et al. 2021 and Yang et al. 2024"
COST = "quick: 5 min of one core; full: 70 min"


class Adding(FastWeightAttention):
    r"""Apply the layer of the delta rule, but do not remove old values.

    $W \leftarrow W + \beta\, v \otimes \phi(k)$, with the same parameters, write
    strengths and features.
    """

    step = Causal.step  # Use the general step, which calls `_mix`.

    def _apply_rule(self, x, q, k, v, state, fading=None, **options):
        v = self.gates["beta"](x, k)[..., None] * v
        y = ops.sum_rule(q, k, v, **options | {"normalize": False, "state": state})
        return with_state(y)


#: Layers by what a write removes: class, rule and feature map.
#: The delta rule divides features by their sum; "identity" features have length 1.
LAYERS = {
    "sum": (FastWeightAttention, "sum", "linear"),
    "delta without removal": (Adding, "delta", "linear"),
    "delta": (FastWeightAttention, "delta", "linear"),
    "gated": (FastWeightAttention, "gated", "linear"),
    "delta, unit keys": (FastWeightAttention, "delta", "identity"),
    "gated delta, unit keys": (FastWeightAttention, "gated_delta", "identity"),
    "delta, DPFP": (FastWeightAttention, "delta", "dpfp"),
}
#: Name of the strong baseline, which attends to the whole window.
ATTENTION = "attention, rotary positions"
#: Name of the control, which has no memory.
NONE = "no memory"
#: Labels by width of the short convolution in tokens; 0 = no convolution.
CONVOLUTIONS = {0: "no convolution", 4: "convolution of 4"}
#: Pairs of layers, the first of which should have a lower loss than the second.
ORDERS = (
    ("delta", "delta without removal"),
    ("delta", "sum"),
    ("gated", "delta"),
    ("gated", "delta, DPFP"),
    ("gated", "delta, unit keys"),
    ("gated delta, unit keys", "gated"),
    ("gated delta, unit keys", "delta, unit keys"),
)
#: Pairs of layers, the first of which should gain more from a convolution.
GAPS = (
    ("delta", "gated"),
    ("delta, DPFP", "gated"),
    ("delta, unit keys", "gated"),
    ("delta, unit keys", "gated delta, unit keys"),
)


def points(quick: bool) -> list[Point]:
    settings = (*product((*LAYERS, ATTENTION), CONVOLUTIONS), (NONE, 4))
    return text.points(quick, [{"layer": x, "conv_size": n} for x, n in settings])


def mixer(point: Point) -> Mixer:
    name, conv_size = point["layer"], point["conv_size"]
    if name == ATTENTION:
        return text.CONVOLVED_SOFTMAX if conv_size else text.ROTARY_SOFTMAX
    if name == NONE:
        return text.CONVOLUTION
    layer, rule, features = LAYERS[name]
    return text.fast_weights(rule, features, layer=layer, conv_size=conv_size)


def claims(points: Points):
    for conv_size, where in CONVOLUTIONS.items():
        some = points(conv_size=conv_size)
        for one, other in ORDERS:
            sides = [some(layer=name)["loss"] for name in (one, other)]
            yield text.below(f"{where}: {one} below {other}", sides)
        what = f"{where}: delta without removal within 0.05 of sum"
        sides = [some(layer=name) for name in ("delta without removal", "sum")]
        gaps = [text.above(a, b) for a, b in paired(*sides)]
        yield holds(what, gaps, lambda x: abs(x) < 0.05)
    for pair in GAPS:
        one, other = pair
        ends = [points(conv_size=n, layer=name) for n in (4, 0) for name in pair]
        both = [(text.above(a, b), text.above(c, d)) for a, b, c, d in paired(*ends)]
        sides = [[gaps[i] for gaps in both] for i in (0, 1)]
        # Compare seed by seed, since the gains of two layers may overlap.
        off = [text.above(conv, bare / 2) for conv, bare in both]
        what = f"a convolution halves the gap by which {one} ends above {other}"
        found = order(what, sides).found
        yield holds(what, off, lambda x: x < 0)._replace(found=found)
    for conv_size, where in CONVOLUTIONS.items():
        some = points(conv_size=conv_size)
        for bar in (ATTENTION, NONE):
            for name in (*LAYERS, ATTENTION):
                if name != bar and (conv_size or bar != NONE):
                    sides = [some(layer=each)["loss"] for each in (name, bar)]
                    yield text.below(f"{where}: {name} below {bar}", sides)


def draw(points: Points):
    figure, (ax,) = plots.panels(3.1)
    looks = ((TRAINED, "s"), (FAST, "o"))
    for (conv_size, label), look in zip(CONVOLUTIONS.items(), looks, strict=True):
        some = points(conv_size=conv_size)
        losses = {name: some(layer=name)["loss"] for name in (*LAYERS, ATTENTION, NONE)}
        plots.rows(ax, losses, *look, label)
    ax.set_xlabel(text.LOSS)
    plots.legend(figure, ax, 2)
    return figure


run, setup = text.experiment(mixer)

if __name__ == "__main__":
    main(__file__)
