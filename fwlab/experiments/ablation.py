"""What position codes and attention normalisation do to the delta rule.

Table 3 of Schlag et al. 2021, at a size that a processor can train.
"""

from math import inf, log

from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import Claim, Experiment, Point, select
from fwlab.experiments.text import LR, median_loss
from fwlab.models import Mixer
from fwlab.plots import FAST, INK
from fwlab.training import Config

#: Validation and test perplexity per word on WikiText-103 of the medium
#: model, with (position codes, attention normalisation).
PUBLISHED = {
    (1, 1): (30.4, 32.1),
    (0, 1): (29.2, 31.2),
    (1, 0): (29.7, 31.5),
    (0, 0): (28.1, 31.1),
}
NAMES = {
    (1, 1): "positions, normalised",
    (0, 1): "normalised",
    (1, 0): "positions",
    (0, 0): "neither",
}
CORPORA = {
    "shakespeare": "Tiny Shakespeare",
    "wikitext-2-test": "WikiText-2",
    "any": "Beginning of the text",
}
#: Feature maps: the paper's Delta Network has ELU + 1.
MAPS = {"linear": "ELU + 1", "dpfp": "DPFP"}


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"
    return [
        {
            "corpus": corpus,
            "map": map,
            "positions": positions,
            "normalize": normalize,
            "size": size,
            "lr": LR[size],
            "seed": seed,
        }
        for corpus in (("any",) if quick else ("shakespeare", "wikitext-2-test"))
        for map in (("linear",) if quick else MAPS)
        for positions, normalize in NAMES
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    return text.train(text.Run(*model(point), text.load(point["corpus"])))


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    mixer = text.fast_weights(
        "delta", point["map"], bool(point["normalize"]), bool(point["positions"])
    )
    return text.config(point, mixer), mixer


def claims(points: list[Point]) -> list[Claim]:
    every = []
    for corpus, map in _tables(points):
        losses = {
            each: loss
            for each in NAMES
            if (loss := median_loss(_variant(points, corpus, map, each))) is not None
        }
        where = f"{CORPORA[corpus]}, {MAPS[map]}"
        listed = ", ".join(f"{x:.3f} ({NAMES[each]})" for each, x in losses.items())
        complete = len(losses) == len(NAMES)
        every.append(
            Claim(
                f"{where}: normalisation costs, with and without positions",
                "perplexity per word 30.4, 29.2 against 29.7, 28.1",
                listed,
                all(losses[p, 1] > losses[p, 0] for p in (0, 1)) if complete else None,
            )
        )
        lowest = min(losses, key=lambda each: losses[each])
        every.append(
            Claim(
                f"{where}: lowest with neither",
                "perplexity per word 28.1 against 29.2 to 30.4",
                listed,
                lowest == (0, 0) if complete else None,
            )
        )
    return every


def _tables(points: list[Point]) -> list[tuple[str, str]]:
    return list({(p["corpus"], p["map"]): None for p in points})


def _variant(
    points: list[Point], corpus: str, map: str, each: tuple[int, int]
) -> list[Point]:
    positions, normalize = each
    return select(
        points, corpus=corpus, map=map, positions=positions, normalize=normalize
    )


def above(losses: list[float | None], without: float) -> list[float | None]:
    """Losses in per cent above the one with neither."""
    return [None if x is None else 100 * (x / without - 1) for x in losses]


def draw(points: list[Point]) -> Figure:
    tables = _tables(points)
    count = len(tables)
    figure, axes = plots.panels(2.0 * count + 0.6, count, sharex=True)
    for ax, (corpus, map) in zip(axes, tables, strict=True):
        without = median_loss(_variant(points, corpus, map, (0, 0)))
        ours = {
            name: above(
                [p["loss"] for p in _variant(points, corpus, map, each)], without or inf
            )
            for each, name in NAMES.items()
        }
        plots.rows(ax, ours, FAST, "o", "ours")
        for i, (marker, split) in enumerate((("x", "valid"), ("+", "test"))):
            theirs = {
                name: above([log(PUBLISHED[each][i])], log(PUBLISHED[0, 0][i]))
                for each, name in NAMES.items()
            }
            plots.rows(ax, theirs, INK, marker, f"published, {split}")
        ax.set_title(f"{CORPORA[corpus]}, {MAPS[map]}")
    axes[-1].set_xlabel("loss above that with neither, %")
    plots.legend(figure, axes[0], 3)
    return figure


EXPERIMENT = Experiment(
    name="ablation",
    title="Positions and attention normalisation for the delta rule",
    source="Schlag et al. 2021, Table 3",
    cost="quick: 2 min of one core; full: about 2.5 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
