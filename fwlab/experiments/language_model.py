"""Language models that differ only in how they mix tokens.

Tables 2 and 5 of Schlag et al. 2021 at a size that a processor can train:
all mixers, the delta rule against the sum rule with the same features, and
what else decides where the delta rule ends.
"""

from math import inf, log
from operator import gt
from typing import Any

from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import Claim, Experiment, Point, numbers_claim, select
from fwlab.experiments.text import LR, median_loss
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED
from fwlab.training import Config

#: Validation perplexity per word on WikiText-103, sum and delta: ELU + 1 in
#: Table 2, the others in Table 5, small models.
PUBLISHED = {"linear": (37.1, 34.1), "favor": (38.0, 36.0), "dpfp": (37.7, 33.9)}
MAPS = {"linear": "ELU + 1", "favor": "FAVOR+", "dpfp": "DPFP", "identity": "unit keys"}
#: The loss of softmax attention, in nats per character.
NANOGPT = 1.88
#: The feature maps of the fast weight rules, as in `MIXERS`.
USUAL = {
    "sum": "linear",
    "gated": "linear",
    "delta": "dpfp",
    "gated-delta": "identity",
    "kimi-delta": "identity",
}
#: The mixers of the question why, with as many settings each.
COMPARED = ("delta", "gated", "fwp", "gated-delta", "sum")
#: More mixers of the full version.
OTHERS = (
    *("transformer-xl", "kimi-delta", "aft-simple", "aft-full", "aft-local"),
    *("aft-conv", "feedback", "feedback-shared"),
)
OTHER_LR = (2e-3, 4e-3)


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"

    def setting(mixer: str, **changes: Any) -> Point:
        usual = {"map": USUAL.get(mixer, ""), "block": 64, "carry": 0, "lr": LR[size]}
        return {"mixer": mixer, **usual, **changes}

    settings = [setting("softmax")]
    for name in PUBLISHED:
        settings += [setting("sum", map=name), setting("delta", map=name)]
    # What the delta rule lacks: a decay, keys of length 1, or both.
    settings += [setting("delta", map="identity"), setting("gated-delta", map="dpfp")]
    settings += [setting(mixer) for mixer in ("gated-delta", "gated", "fwp")]
    if not quick:
        settings += [setting(mixer) for mixer in OTHERS]
        settings += [setting("gated", map="dpfp")]
        for mixer in COMPARED:
            settings += [setting(mixer, block=256), setting(mixer, carry=1)]
            settings += [setting(mixer, lr=lr) for lr in OTHER_LR]
    corpus = "any" if quick else "shakespeare"
    return [
        {**each, "size": size, "corpus": corpus, "seed": seed}
        for each in settings
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    config, mixer = model(point)
    corpus = text.load(point["corpus"])
    return text.train(text.Run(config, mixer, corpus, bool(point["carry"])))


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    name = point["mixer"]
    mixer = MIXERS[name]
    if name in USUAL and point["map"] != USUAL[name]:
        mixer = text.fast_weights(name, point["map"])
    return text.config(point, mixer, point["block"]), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    usual = as_usual(points)
    every = [_delta_below_sum(usual, name) for name in PUBLISHED]
    for what, mixer, map in (
        ("a decay, the same DPFP: gated delta ends below delta", "gated-delta", "dpfp"),
        ("keys of length 1 in place of DPFP: delta ends lower", "delta", "identity"),
    ):
        before = select(usual, mixer="delta", map="dpfp")
        every.append(_falls(what, before, select(usual, mixer=mixer, map=map)))
    if points[0]["size"] == "nanogpt":
        every += [_softmax(usual), *_why(points)]
    return every


def as_usual(points: list[Point]) -> list[Point]:
    """Without what is varied for the question why."""
    same = select(points, block=64, carry=0)
    return [p for p in same if p["lr"] == LR[p["size"]]]


def _delta_below_sum(usual: list[Point], name: str) -> Claim:
    before, after = (select(usual, mixer=rule, map=name) for rule in ("sum", "delta"))
    published = "perplexity per word {} → {}".format(*PUBLISHED[name])
    return _falls(f"{MAPS[name]}: delta ends below sum", before, after, published)


def _falls(
    what: str,
    before: list[Point],
    after: list[Point],
    published: str = "not published",
) -> Claim:
    """Claim that the median loss falls."""
    losses = [median_loss(before), median_loss(after)]
    return numbers_claim(what, published, losses, gt, between=" → ")


def _softmax(usual: list[Point]) -> Claim:
    return numbers_claim(
        "softmax attention: nanoGPT's loss, within 0.05",
        f"{NANOGPT}",
        [median_loss(select(usual, mixer="softmax"))],
        lambda loss: abs(loss - NANOGPT) <= 0.05,
    )


def saved(points: list[Point], name: str) -> list[float | None]:
    """The saving of each seed of the delta rule, in per cent of the sum
    rule's median loss.
    """
    loss = median_loss(select(points, mixer="sum", map=name)) or inf
    return [
        None if p["loss"] is None else 100 * (1 - p["loss"] / loss)
        for p in select(points, mixer="delta", map=name)
    ]


def published_saving(name: str) -> float:
    """The same of the published losses, the logarithms of perplexities."""
    before, after = map(log, PUBLISHED[name])
    return 100 * (1 - after / before)


def _why(points: list[Point]) -> list[Claim]:
    """When does the delta rule end behind the rules that forget?"""
    every = []
    for name, some in comparisons(points).items():
        losses = {
            mixer: loss
            for mixer in COMPARED
            if (loss := median_loss(select(some, mixer=mixer))) is not None
        }
        ahead = losses.get("delta", inf) <= min(losses.values(), default=inf)
        listed = ", ".join(f"{loss:.3f} ({mixer})" for mixer, loss in losses.items())
        every.append(
            Claim(
                f"{name}: delta ends lowest of {', '.join(COMPARED)}",
                "not published",
                listed or "–",
                ahead if len(losses) == len(COMPARED) else None,
            )
        )
    return every


def comparisons(points: list[Point]) -> dict[str, list[Point]]:
    """The points of the question why, by what is changed for all mixers."""
    own = [p for p in points if p["map"] == USUAL.get(p["mixer"], "")]
    return {
        "windows of 64": as_usual(own),
        "windows of 256": select(own, block=256),
        "state carried on": select(own, carry=1),
        "best of three learning rates": tuned(select(own, block=64, carry=0)),
    }


def tuned(points: list[Point]) -> list[Point]:
    """Keep each mixer's points with the learning rate of the lowest loss."""
    best = []
    for mixer in {p["mixer"]: None for p in points}:
        own = select(points, mixer=mixer)
        rates = {p["lr"]: median_loss(select(own, lr=p["lr"])) for p in own}
        best += select(own, lr=min(rates, key=lambda lr: rates[lr] or inf))
    return best


def draw(points: list[Point]) -> Figure:
    usual = as_usual(points)
    named: dict[str, list[Point]] = {}
    for p in usual:
        # A feature map only where there are several.
        maps = {q["map"] for q in select(usual, mixer=p["mixer"])}
        name = f"{p['mixer']}, {MAPS[p['map']]}" if len(maps) > 1 else p["mixer"]
        named.setdefault(name, []).append(p)
    full = points[0]["size"] == "nanogpt"
    panels = [len(named), len(PUBLISHED)] + [len(COMPARED)] * full
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

    ours = {MAPS[name]: saved(usual, name) for name in PUBLISHED}
    theirs = {MAPS[name]: [published_saving(name)] for name in PUBLISHED}
    plots.rows(axes[1], ours, FAST, "o", "ours")
    plots.rows(axes[1], theirs, INK, "x", "published")
    axes[1].set_xlabel("% of the sum's loss that delta saves")
    axes[1].set_xlim(0, None)

    if full:
        looks = zip((*SERIES, OTHER), "o^sD", strict=True)
        for (name, some), (color, marker) in zip(
            comparisons(points).items(), looks, strict=True
        ):
            shown = {m: [p["loss"] for p in select(some, mixer=m)] for m in COMPARED}
            plots.rows(axes[2], shown, color, marker, name)
        axes[2].set_xlabel("validation loss, nats per character")
    for ax in axes:
        ax.legend(loc="lower left", bbox_to_anchor=(-0.2, 1), ncols=3)
    return figure


EXPERIMENT = Experiment(
    name="language-model",
    title="Language models that differ only in how they mix tokens",
    source="Schlag et al. 2021, Tables 2 and 5; nanoGPT",
    cost="quick: 5 min of one core; full: about 6 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
