"""Language models that differ only in how they mix tokens.

Tables 2 and 5 of Schlag et al. 2021 at a size that a processor can train:
all mixers, the delta rule against the sum rule with the same features, and
what else decides where the delta rule ends.
"""

from collections.abc import Sequence
from itertools import combinations
from math import inf, log
from operator import gt
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    losses,
    select,
)
from fwlab.experiments.text import LR, median_loss
from fwlab.layers import FastWeightAttention, SoftmaxAttention
from fwlab.layers.causal import Causal
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED
from fwlab.training import Config

#: A mixer, and the feature map of its keys.
Name = tuple[str, str]
SOFTMAX, ROTARY, XL = ("softmax", ""), ("softmax-rotary", ""), ("transformer-xl", "")
#: The control: a convolution over this many tokens, and no memory.
CONVOLUTION, CONV_SIZE = ("convolution", ""), 4
#: Validation perplexity per word on WikiText-103, small models.
TABLES: dict[str, dict[Name, float]] = {
    "Table 2": {
        SOFTMAX: 33.0,
        ("sum", "linear"): 37.1,
        ("delta", "linear"): 34.1,
        ("sum", "favor-half"): 39.0,
        ("delta", "favor-half"): 36.1,
    },
    "Table 5": {
        SOFTMAX: 33.0,
        ("sum", "favor"): 38.0,
        ("delta", "favor"): 36.0,
        ("sum", "dpfp"): 37.7,
        ("delta", "dpfp"): 33.9,
    },
}
PUBLISHED = TABLES["Table 2"] | TABLES["Table 5"]
#: Feature maps of which both rules are published.
BOTH = ("linear", "favor-half", "favor", "dpfp")
MAPS = {
    "linear": "ELU + 1",
    "favor": "FAVOR+",
    "favor-half": "FAVOR+, half as wide",
    "dpfp": "DPFP",
    "identity": "unit keys",
}
#: The loss of softmax attention, in nats per character.
NANOGPT = 1.88
#: How the features of FAVOR+ differ from published ones. It changes their order.
DRAWN = "FAVOR+ drawn once (theirs at every training step)"
#: The feature maps of the fast weight rules, as in `MIXERS`.
USUAL = {
    "sum": "linear",
    "gated": "linear",
    "delta": "dpfp",
    "gated-delta": "identity",
}
#: The mixers of the question why, with four settings each.
COMPARED = ("delta", "gated", "fwp", "gated-delta", "sum")
OTHER_LR = 3e-3
#: The third chart goes from here to there; what is above is written beside it.
NEAR, FAR = 1.75, 2.6
#: Attention that compares tokens by their distance, like fast weights without a
#: table of positions.
ROTARY_SOFTMAX = Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads, rope=1.0))


class ConvolutionAlone(FastWeightAttention):
    r"""The layer of the sum rule with a short convolution, but no fast weights.

    It returns $W_o$ times the convolved values: what a step would write, not what a
    memory answers. Queries and keys are computed as usual, and have no effect, so
    that everything else stays equal: initial weights, and numbers of parameters.
    """

    packs = skips = False
    step = Causal.step  # by way of `_mix`

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        assert self.conv is not None
        qkv = torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], -1)
        qkv, state = self.conv(qkv, state)
        return self.to_out(qkv[..., -self.channels[-1] :]), state

    def state_size(self, time: int = 0) -> int:
        assert self.conv is not None
        return (self.conv.size - 1) * self.conv.channels


def points(quick: bool) -> list[Point]:
    def setting(mixer: str, map: str | None = None, **changes: Any) -> Point:
        map = USUAL.get(mixer, "") if map is None else map
        return {"mixer": mixer, "map": map, "block": 64, "carry": 0, **changes}

    # What the delta rule lacks: a decay, keys of length 1, or both.
    lacking = [("gated-delta", "dpfp"), ("delta", "identity")]
    settings = [setting(*name) for name in (*PUBLISHED, ROTARY, XL, *lacking)]
    settings += [setting(mixer) for mixer in ("gated-delta", "gated", "fwp")]
    if not quick:
        settings += [setting(*one, size="nanogpt") for one in (SOFTMAX, CONVOLUTION)]
        for mixer in COMPARED:
            settings += [setting(mixer, block=256), setting(mixer, carry=1)]
            settings += [setting(mixer, lr=OTHER_LR)]
    return text.points(quick, settings)


def run(point: Point) -> Point:
    config, mixer = model(point)
    corpus = text.load(point["corpus"])
    return text.train(text.Run(config, mixer, corpus, bool(point["carry"])))


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    name, map = point["mixer"], point["map"]
    if name == ROTARY[0]:
        mixer = ROTARY_SOFTMAX
    elif name == CONVOLUTION[0]:
        mixer = text.fast_weights(
            "sum", "linear", layer=ConvolutionAlone, conv_size=CONV_SIZE
        )
    elif name in USUAL and map != USUAL[name]:
        mixer = text.fast_weights(name, map)
    else:
        mixer = MIXERS[name]
    return text.config(point, mixer, point["block"]), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    usual = as_usual(points)
    full = points[0]["size"] != "small"
    protocol = f"characters, {'0.8' if full else '0.1'} M parameters"
    every = [
        _below(usual, low, high, f"{row[low]}, {row[high]} ({table})", protocol)
        for table, row in TABLES.items()
        for low, high in combinations(sorted(row, key=row.__getitem__), 2)
    ]
    every.append(
        compared(
            "DPFP gains more from the delta rule than FAVOR+ (% of the loss)",
            "37.7 to 33.9, 38.0 to 36.0 (Table 5)",
            [saved(usual, "dpfp"), saved(usual, "favor")],
            gt,
            spec=".1f",
            protocol=f"{protocol}, {DRAWN}",
        )
    )
    delta = ("delta", "dpfp")
    for better in (("gated-delta", "dpfp"), ("delta", "identity"), ROTARY, XL):
        every.append(_below(usual, better, delta))
    every += [
        _below(usual, ROTARY, SOFTMAX),
        _below(usual, XL, ("gated-delta", "identity")),
    ]
    if full:
        every += [_softmax(longer(points, SOFTMAX)), *_why(points)]
    return every


def as_usual(points: list[Point]) -> list[Point]:
    """Without what is varied for the question why."""
    same = select(points, block=64, carry=0)
    return [p for p in same if p["lr"] == LR[p["size"]] and p["size"] != "nanogpt"]


def longer(points: list[Point], name: Name) -> list[Point]:
    """Those of a mixer with all of nanoGPT's optimiser steps."""
    return select(points, size="nanogpt", mixer=name[0])


def label(name: Name) -> str:
    mixer, map = name
    known = {ROTARY: "softmax, rotary positions", XL: "Transformer-XL"}
    return f"{mixer}, {MAPS[map]}" if map else known.get(name, mixer)


def _below(
    usual: list[Point], low: Name, high: Name, published: str = "", protocol: str = ""
) -> Claim:
    sides = [losses(usual, mixer=mixer, map=map) for mixer, map in (low, high)]
    if published and any(map.startswith("favor") for _, map in (low, high)):
        protocol += f", {DRAWN}"
    text = f"{label(low)}: below {label(high)}"
    return compared(text, published, sides, protocol=protocol)


def _softmax(points: list[Point]) -> Claim:
    return compared(
        "softmax: nanoGPT's loss, within 0.05",
        f"{NANOGPT} (nanoGPT's README)",
        [losses(points)],
        lambda loss: abs(loss - NANOGPT) <= 0.05,
        protocol="all of the last tenth; theirs 20 random batches",
    )


def saved(points: list[Point], name: str) -> list[float]:
    """The saving of each seed of the delta rule, in per cent of the sum
    rule's median loss; minus infinite if it diverged.
    """
    loss = median_loss(select(points, mixer="sum", map=name))
    return (
        []
        if loss in (None, inf)
        else [
            -inf if p["loss"] is None else 100 * (1 - p["loss"] / loss)
            for p in select(points, mixer="delta", map=name)
        ]
    )


def published_saving(name: str) -> float:
    """The same of the published losses, the logarithms of perplexities."""
    before, after = (log(PUBLISHED[rule, name]) for rule in ("sum", "delta"))
    return 100 * (1 - after / before)


def _why(points: list[Point]) -> list[Claim]:
    """When does the delta rule end behind the rules that forget?"""
    every = []
    for name, some in comparisons(points).items():
        known = {mixer: select(some, mixer=mixer) for mixer in COMPARED}
        middle = {mixer: median_loss(own) for mixer, own in known.items()}
        others = [mixer for mixer in COMPARED if mixer != "delta"]
        best = min(others, key=lambda mixer: middle[mixer] or inf)
        complete = None not in middle.values()
        sides: Sequence[list[float | None]] = [
            losses(known[mixer]) for mixer in ("delta", best)
        ]
        claim = compared(
            f"{name}: delta ends lowest of {', '.join(COMPARED)}",
            "",
            sides if complete else [[]],
        )
        found = f"{claim.found} ({best})" if complete else claim.found
        every.append(claim._replace(found=found))
    return every


def comparisons(points: list[Point]) -> dict[str, list[Point]]:
    """The points of the question why, by what is changed for all mixers."""
    own = [p for p in points if p["map"] == USUAL.get(p["mixer"], "")]
    return {
        "windows of 64": as_usual(own),
        "windows of 256": select(own, block=256),
        "state carried on": select(own, carry=1),
        "best of two rates": tuned(select(own, block=64, carry=0)),
    }


def tuned(points: list[Point]) -> list[Point]:
    """Keep each mixer's points with the learning rate of the lowest loss.

    Those of a mixer that has not yet run with both are left out.
    """
    best = []
    for mixer in {p["mixer"]: None for p in points}:
        own = select(points, mixer=mixer)
        rates = {p["lr"]: median_loss(select(own, lr=p["lr"])) for p in own}
        seeds = {len(select(own, lr=lr)) for lr in rates}
        if len(rates) > 1 and len(seeds) == 1:
            best += select(own, lr=min(rates, key=lambda lr: rates[lr] or inf))
    return best


def draw(points: list[Point]) -> Figure:
    usual = as_usual(points)
    named: dict[str, list[Point]] = {}
    for p in usual:
        # A feature map only where there are several.
        maps = {q["map"] for q in select(usual, mixer=p["mixer"])}
        one = p["map"] and len(maps) == 1
        name = p["mixer"] if one else label((p["mixer"], p["map"]))
        named.setdefault(name, []).append(p)
    full = points[0]["size"] != "small"
    if full:
        named["softmax, 2,000 steps"] = longer(points, SOFTMAX)
        named["no memory, 2,000 steps"] = longer(points, CONVOLUTION)
    panels = [len(named), len(BOTH)] + [len(COMPARED)] * full
    height = 0.26 * sum(panels) + 1.1 * len(panels)
    ratios = [n + 1 for n in panels]
    figure, axes = plots.panels(height, len(panels), height_ratios=ratios)

    best_first = dict(
        sorted(named.items(), key=lambda each: median_loss(each[1]) or inf)
    )
    for rule, color, marker in (
        ("sum", TRAINED, "s"),
        ("delta", FAST, "o"),
        ("", OTHER, "D"),
    ):
        shown = {
            name: [
                p["loss"]
                for p in own
                if (p["mixer"] if p["mixer"] in ("sum", "delta") else "") == rule
            ]
            for name, own in best_first.items()
        }
        plots.rows(axes[0], shown, color, marker, rule or "others")
    if full:
        axes[0].axvline(NANOGPT, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
    axes[0].set_xlabel("validation loss, nats per character")

    ours = {MAPS[name]: saved(usual, name) for name in BOTH}
    theirs = {MAPS[name]: [published_saving(name)] for name in BOTH}
    plots.rows(axes[1], ours, FAST, "o", "ours")
    plots.rows(axes[1], theirs, INK, "x", "published")
    axes[1].set_xlabel("% of the sum's loss saved")
    axes[1].axvline(0, color=INK, linewidth=1)

    if full:
        looks = zip((*SERIES, OTHER), "o^sD", strict=True)
        for (name, some), (color, marker) in zip(
            comparisons(points).items(), looks, strict=True
        ):
            shown = {m: losses(some, mixer=m) for m in COMPARED}
            plots.rows(axes[2], shown, color, marker, name)
            for row, own in enumerate(shown.values()):
                beyond = [x for x in own if x is not None and x > FAR]
                if beyond:
                    text = f"{min(beyond):.1f} to {max(beyond):.1f} →"
                    axes[2].text(
                        *(FAR, row - 0.1, text), color=color, ha="right", va="bottom"
                    )
        axes[2].set_xlim(NEAR, FAR)
        axes[2].set_xlabel("validation loss, nats per character")
    for ax in axes:
        ax.legend(loc="lower right", bbox_to_anchor=(1.05, 1), ncols=2)
    return figure


EXPERIMENT = Experiment(
    name="language-model",
    title="Language models that differ only in how they mix tokens",
    source="Schlag et al. 2021, Tables 2 and 5; nanoGPT",
    cost="quick: 7 min of one core; full: 3 hours",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
