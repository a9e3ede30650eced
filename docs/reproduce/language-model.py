"""Compare language models that differ only in how they mix tokens.

Tables 2 and 5 of Schlag et al. 2021 at a size that a processor can train:
all mixers, the delta rule against the sum rule with the same features, and
other influences on the loss of the delta rule.
"""

from collections.abc import Mapping
from itertools import combinations
from math import inf, isinf, log

import text
from frame import Claim, Point, Points, holds, main, order
from text import LR, PROTOCOL, WINDOWS, middle

from fwlab import plots
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED

TITLE = "Language models that differ only in how they mix tokens"
SOURCE = "Schlag et al. 2021, Tables 2 and 5; nanoGPT"
COST = "quick: 7 min of one core; full: 3 hours"

#: The name of a model: its mixer, and the feature map of its keys.
Name = tuple[str, str]
SOFTMAX, ROTARY, XL = ("softmax", ""), ("softmax-rotary", ""), ("transformer-xl", "")
#: Names of the controls: no memory, and attention after a convolution.
CONVOLUTION, CONVOLVED = ("convolution", ""), ("softmax-convolution", "")
#: Published perplexities per word of the sum and the delta rule, by feature map.
#: Small models; softmax attention has a perplexity of 33.0 (WikiText-103, validation).
PUBLISHED = {
    "linear": (37.1, 34.1),
    "favor-half": (39.0, 36.1),
    "favor": (38.0, 36.0),
    "dpfp": (37.7, 33.9),
}
TABLES = {"Table 2": ("linear", "favor-half"), "Table 5": ("favor", "dpfp")}
MAPS = {
    "linear": "ELU + 1",
    "favor": "FAVOR+",
    "favor-half": "FAVOR+, half as wide",
    "dpfp": "DPFP",
    "identity": "unit keys",
}
#: Published loss of softmax attention (nanoGPT), in nats per character.
NANOGPT = 1.88
#: Difference from the paper's FAVOR+, which changes the order of results.
DRAWN = "FAVOR+ drawn once (theirs at every training step)"
#: Mixers that run in four settings each, and their feature maps.
USUAL = {
    "delta": "dpfp",
    "gated": "linear",
    "fwp": "",
    "gated-delta": "identity",
    "sum": "linear",
}
OTHERS = ("gated", "fwp", "gated-delta", "sum")
#: Limits of the third chart. Larger losses are written beside the chart.
NEAR, FAR = 1.75, 2.6


def points(quick: bool) -> list[Point]:
    rules = [(rule, map) for map in PUBLISHED for rule in ("sum", "delta")]
    # Variants of the gated delta rule without unit keys, and without decay.
    lacking = [("gated-delta", "dpfp"), ("delta", "identity")]
    usual = [(mixer, USUAL[mixer]) for mixer in ("gated-delta", "gated", "fwp")]
    models = [SOFTMAX, *rules, ROTARY, XL, *lacking, *usual, CONVOLUTION, CONVOLVED]
    settings: list[tuple[Name, Point]] = [(name, {}) for name in models]
    if not quick:
        settings += [(name, {"size": "nanogpt"}) for name in (SOFTMAX, CONVOLUTION)]
        for name in USUAL.items():
            for changes in ({"block": 256}, {"carry": 1}, {"lr": 3e-3}):
                settings.append((name, changes))
    return text.points(
        quick,
        [
            {"mixer": mixer, "map": map, "block": 64, "carry": 0, **changes}
            for (mixer, map), changes in settings
        ],
    )


def mixer(point: Point) -> Mixer:
    name, map = point["mixer"], point["map"]
    if map != USUAL.get(name, ""):
        return text.fast_weights(name, map)
    own = {ROTARY[0]: text.ROTARY_SOFTMAX, CONVOLUTION[0]: text.CONVOLUTION}
    own[CONVOLVED[0]] = text.CONVOLVED_SOFTMAX
    return (MIXERS | own)[name]


# --- Claims and figures -------------------------------------------------


def claims(points: Points):
    usual = as_usual(points)
    full = points[0]["size"] != "small"
    size = f"{PROTOCOL}, {WINDOWS}, {'0.8' if full else '0.1'} M parameters"

    def below(low: Name, high: Name, published: str = "", protocol: str = "") -> Claim:
        sides = [usual(mixer=mixer, map=map)["loss"] for mixer, map in (low, high)]
        what = f"{label(low)}: below {label(high)}"
        return text.below(what, sides, published, protocol=protocol)

    for table, maps in TABLES.items():
        row = {SOFTMAX: 33.0}
        for map in maps:
            row["sum", map], row["delta", map] = PUBLISHED[map]
        for low, high in combinations(sorted(row, key=row.__getitem__), 2):
            drawn = any(map.startswith("favor") for _, map in (low, high))
            published = f"{row[low]}, {row[high]} ({table})"
            yield below(low, high, published, f"{size}, {DRAWN}" if drawn else size)
    yield order(
        "DPFP gains more from the delta rule than FAVOR+ (% of the loss)",
        [saved(usual, "dpfp"), saved(usual, "favor")],
        "37.7 to 33.9, 38.0 to 36.0 (Table 5)",
        sign=">",
        spec=".1f",
        protocol=f"{size}, {DRAWN}",
    )
    for better in (("gated-delta", "dpfp"), ("delta", "identity"), ROTARY, XL):
        yield below(better, ("delta", "dpfp"))
    yield below(ROTARY, SOFTMAX)
    yield below(XL, ("gated-delta", "identity"))
    best = ("delta", "identity"), ("gated-delta", "identity"), ("gated", "linear")
    for other in (SOFTMAX, ROTARY, XL, *best, CONVOLVED):
        yield below(other, CONVOLUTION)
    if full:
        yield holds(
            "softmax: nanoGPT's loss, within 0.05",
            points(size="nanogpt", mixer="softmax")["loss"],
            lambda loss: abs(loss - NANOGPT) <= 0.05,
            f"{NANOGPT} (nanoGPT's README)",
            protocol="all of the last tenth; theirs 20 random batches",
        )
        yield from why(points)


def why(points: Points):
    """Yield claims on the settings in which the delta rule has the lowest loss."""
    for name, some in comparisons(points).items():
        ends = {mixer: some(mixer=mixer)["loss"] for mixer in USUAL}
        best = min(OTHERS, key=lambda mixer: middle(ends[mixer]))
        what = f"{name}: delta ends lowest of {', '.join(USUAL)}"
        claim = text.below(what, [ends["delta"], ends[best]])
        yield claim._replace(found=f"{claim.found} ({best})")


def as_usual(points: Points) -> Points:
    """Select runs with the usual window, rate and size, and without a carried state."""
    same = points(block=64, carry=0)
    return Points(
        p for p in same if p["lr"] == LR[p["size"]] and p["size"] != "nanogpt"
    )


def comparisons(points: Points) -> dict[str, Points]:
    """Return the runs of the mixers in `USUAL`, by a setting that the runs share."""
    own = Points(p for p in points if p["map"] == USUAL.get(p["mixer"], ""))
    return {
        "windows of 64": as_usual(own),
        "windows of 256": own(block=256),
        "state carried on": own(carry=1),
        "best of two rates": own(block=64, carry=0).at_best_rate("mixer", by="loss"),
    }


def saved(points: Points, map: str) -> list[float]:
    """Return how far each delta rule loss is below the sum rule's median, in per cent.

    A diverged delta rule gives minus infinity, a diverged sum rule no numbers.
    """
    loss = middle(points(mixer="sum", map=map)["loss"])
    ends = [] if isinf(loss) else points(mixer="delta", map=map)["loss"]
    return [100 * (1 - end / loss) for end in ends]


def label(name: Name) -> str:
    mixer, map = name
    known = {ROTARY: "softmax, rotary positions", XL: "Transformer-XL"}
    known |= {CONVOLUTION: text.ALONE, CONVOLVED: text.CONVOLVED}
    return f"{mixer}, {MAPS[map]}" if map else known.get(name, mixer)


def draw(points: Points):
    rules = {"sum": "sum", "delta": "delta"}
    points = Points(p | {"rule": rules.get(p["mixer"], "others")} for p in points)
    usual = as_usual(points)
    models: dict[str, Points] = {}
    for name, own in usual.by("mixer", "map").items():
        # Name the feature map only if a mixer has several.
        one = name[1] and len(usual(mixer=name[0]).by("map")) == 1
        models[name[0] if one else label(name)] = own
    full = points[0]["size"] != "small"
    if full:
        longer = points(size="nanogpt")
        models["softmax, 2,000 steps"] = longer(mixer="softmax")
        models[f"{text.ALONE}, 2,000 steps"] = longer(mixer=CONVOLUTION[0])
    rows = [len(models), len(PUBLISHED)] + [len(USUAL)] * full
    height = 0.26 * sum(rows) + 1.1 * len(rows)
    ratios = [count + 1 for count in rows]
    figure, axes = plots.panels(height, len(rows), height_ratios=ratios)
    draw_models(axes[0], models)
    draw_savings(axes[1], usual)
    if full:
        axes[0].axvline(NANOGPT, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)
        draw_why(axes[2], comparisons(points))
    for ax in axes:
        ax.legend(loc="lower right", bbox_to_anchor=(1.05, 1), ncols=2)
    return figure


def draw_models(ax, models: Mapping[str, Points]):
    """Draw the losses of all models as rows, the lowest median first."""
    names = sorted(models, key=lambda name: middle(models[name]["loss"]))
    looks = {"sum": (TRAINED, "s"), "delta": (FAST, "o"), "others": (OTHER, "D")}
    for rule, look in looks.items():
        losses = {name: models[name](rule=rule)["loss"] for name in names}
        plots.rows(ax, losses, *look, rule)
    ax.set_xlabel(text.LOSS, loc="right")


def draw_savings(ax, points: Points):
    """Draw our and published loss savings of the delta rule against the sum rule."""
    ours = {MAPS[map]: saved(points, map) for map in PUBLISHED}
    theirs = {
        MAPS[map]: [100 * (1 - log(delta) / log(sums))]
        for map, (sums, delta) in PUBLISHED.items()
    }
    plots.rows(ax, ours, FAST, "o", "ours")
    plots.rows(ax, theirs, INK, "x", "published")
    ax.set_xlabel("% of the sum's loss saved")
    ax.axvline(0, color=INK, linewidth=1)


def draw_why(ax, compared: Mapping[str, Points]):
    looks = zip((*SERIES, OTHER), "o^sD", strict=True)
    for (name, some), (color, marker) in zip(compared.items(), looks, strict=True):
        losses = {mixer: some(mixer=mixer)["loss"] for mixer in USUAL}
        plots.rows(ax, losses, color, marker, name)
        for row, own in enumerate(losses.values()):
            beyond = [x for x in own if FAR < x < inf]
            if beyond:
                words = f"{min(beyond):.1f} to {max(beyond):.1f} →"
                ax.text(FAR, row - 0.1, words, color=color, ha="right", va="bottom")
    ax.set_xlim(NEAR, FAR)
    ax.set_xlabel(text.LOSS, loc="right")


run, setup = text.experiment(mixer)

if __name__ == "__main__":
    main(__file__)
