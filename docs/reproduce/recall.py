"""Test the delta rule on its purpose: multi-query associative recall.

After Arora et al. 2023: a sequence shows pairs of tokens, a key and a
value, and then asks for the value of every key. In a second task keys
return with new values, and the most recent one counts.
"""

from statistics import median

import torch
from answers import UNASKED, WIDTH, Batch, Recaller, growing, loss, right
from frame import Point, Points, holds, main
from matplotlib.figure import Figure, SubFigure

from fwlab import plots
from fwlab.data.retrieval import last_values, retrieval
from fwlab.fit import SETUP, fit
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED, WRONG

TITLE = "What the delta rule is for: recall when keys return"
SOURCE = "ours, after Arora et al. 2023"
COST = "quick: 4 min of one core; full: 76 min"

#: Name of a mixer, and "own" or "dpfp-1" for its features.
Name = tuple[str, str]
DELTA, SUM, SOFTMAX = ("delta", "own"), ("sum", "dpfp-1"), ("softmax", "own")
GATED, GATED_DELTA = ("gated", "own"), ("gated-delta", "own")
#: Mixers that run at all sizes, quick and full, and mixers that run at one size.
QUICK = (SOFTMAX, DELTA, SUM, GATED, GATED_DELTA)
FULL = (SOFTMAX, DELTA, SUM, GATED_DELTA)
OTHERS = (
    *("sum", "gated", "kimi-delta", "fwp", "transformer-xl"),
    *("aft-simple", "aft-full", "aft-local", "aft-conv"),
    *("feedback", "feedback-shared"),
)
#: Numbers of keys and of heads at which all mixers run.
KEYS, HEADS = 8, 2
TASKS = {1: "each key once", 2: "keys return with new values"}
BATCH = 32
#: Optimiser steps between evaluations, sequences per evaluation, accuracy to stop at.
#: After half of the budget, training also stops after two evaluations at chance level.
#: Chance level is an accuracy of at most `CHANCE` divided by the number of keys.
EVERY, SEQUENCES, SOLVED, CHANCE = 100, 128, 0.999, 1.2


def sizes(quick: bool) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (keys, heads) settings: one list varies the keys, one varies the heads.

    More heads are narrower, so the fast weights are smaller.
    """
    keys, heads = ((4, 8), (4,)) if quick else ((4, 8, 16), (1, 4))
    return [(number, HEADS) for number in keys], [(KEYS, number) for number in heads]


def points(quick: bool) -> list[Point]:
    """List settings by number of keys, so that partial results contain all mixers."""
    layers, symbols, budget = (1, 32, 300) if quick else (2, 128, 1000)
    usual, others = sizes(quick)
    grid = {name: usual + others for name in (QUICK if quick else FULL)}
    grid[SOFTMAX] = usual
    if not quick:
        grid |= {(mixer, "own"): [(KEYS, HEADS)] for mixer in OTHERS}
    every = [
        {"mixer": mixer, "map": features, "shows": shows, "pairs": pairs}
        | {"heads": heads, "layers": layers, "symbols": symbols}
        | {"lr": lr, "seed": seed, "budget": budget}
        for (mixer, features), own in grid.items()
        for pairs, heads in own
        for shows in TASKS
        for lr in ((2e-2,) if quick else (5e-3, 2e-2))
        for seed in (1, 2, 3)
    ]
    return sorted(every, key=lambda point: point["pairs"])


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    pairs, symbols, shows = point["pairs"], point["symbols"], point["shows"]
    budget, time = point["budget"], (2 * shows + 1) * pairs
    model = Recaller(
        *(point["mixer"], point["map"], 2 * symbols),
        *(point["layers"], point["heads"], time),
    )

    def draw(step: int) -> Batch:
        return sequences(BATCH, growing(step + 1, budget, pairs), symbols, shows)

    def evaluate(_: int) -> float:
        test = sequences(SEQUENCES, pairs, symbols, shows)
        return round(right(model, *test).mean().item(), 4)

    def stop(curve: list[tuple[int, float]]) -> str:
        late = [step for step, accuracy in curve[-2:] if accuracy <= CHANCE / pairs]
        if len(late) == 2 and 2 * late[0] >= budget:
            return "at chance"
        return "solved" if curve[-1][1] >= SOLVED else ""

    how = {"every": EVERY, "evaluate": evaluate, "stop": stop}
    curve = fit(model, draw, loss, budget, point["lr"], **how).curve
    return {
        "parameters": model.num_parameters(),
        "state": model.state_size(time),
        "accuracy": curve[-1][1],
        "steps": curve[-1][0],
        "curve": curve,
    }


def sequences(batch: int, pairs: int, symbols: int, shows: int = 1) -> Batch:
    """Sample key-value pairs in random order, followed by every key as a query.

    - `pairs`: number of keys in a sequence.
    - `symbols`: number of possible keys (tokens from 0) and of possible values
      (tokens from `symbols`); at least `shows * pairs`.
    - `shows`: how often each key is shown, each time with another value.
    - Returns the tokens and the answer after each, `[batch, time]`:
      the most recent value of a queried key, elsewhere `UNASKED`.
    """
    writes = shows * pairs
    drawn = retrieval(batch, symbols, writes)  # Keys and values are distinct.
    known, values = drawn.keys[:, :pairs], drawn.values + symbols
    which = torch.rand(batch, writes).argsort(-1) % pairs
    shown = torch.stack([known.gather(1, which), values], -1).flatten(1)
    order = torch.rand(batch, pairs).argsort(-1)
    answers = last_values(which, values, pairs).gather(1, order)
    tokens = torch.cat([shown, known.gather(1, order)], 1)
    return tokens, torch.cat([torch.full_like(shown, UNASKED), answers], 1)


# --- Claims and figures -------------------------------------------------


def best(points: Points) -> Points:
    """Select the runs of each mixer and size at the best learning rate."""
    kinds = ("mixer", "map", "shows", "pairs", "heads")
    return points.at_best_rate(*kinds, by="accuracy", best=max)


def by_seed(points: Points, name: Name, shows: int, sizes: list) -> dict[int, list]:
    """Return the accuracies at `sizes` by seed, for seeds that ran at all sizes."""
    own = points(mixer=name[0], map=name[1], shows=shows)
    some = Points(p for size in sizes for p in own(pairs=size[0], heads=size[1]))
    found = {seed: each["accuracy"] for seed, each in some.by("seed").items()}
    return {seed: each for seed, each in found.items() if len(each) == len(sizes)}


def claims(points: Points):
    """Yield claims of our own, since the papers have curves but no numbers.

    A claim counts the worst size of each seed.
    """
    chosen, quick = best(points), points[0]["layers"] == 1
    usual, others = sizes(quick)
    low, gap = (0.9, 0.3) if quick else (0.99, 0.05)
    for name in (SOFTMAX, DELTA):
        lowest = [min(own) for own in by_seed(chosen, name, 1, usual).values()]
        text = f"{TASKS[1]}, {name[0]}: {low} or more at every size"
        yield holds(text, lowest, lambda accuracy: accuracy >= low)
    delta, add = (by_seed(chosen, name, 2, usual + others) for name in (DELTA, SUM))
    gaps = [
        min(a - b for a, b in zip(delta[seed], add[seed], strict=True))
        for seed in delta.keys() & add.keys()
    ]
    text = f"{TASKS[2]}: delta above sum by {gap} or more at every size"
    yield holds(text, gaps, lambda x: x >= gap)


#: Colour, marker, line and label of fast weights and softmax attention.
LOOKS = {
    DELTA: (FAST, "o", "-", "delta, DPFP-1"),
    SUM: (WRONG, "D", "-.", "sum, DPFP-1"),
    GATED_DELTA: (SERIES[0], "s", "-", "gated delta"),
    GATED: (SERIES[1], "v", "--", "gated, ELU + 1"),
    SOFTMAX: (OTHER, "^", "-", "softmax"),
}
#: Labels of rows that differ from the name of the mixer.
LABELS = {name: label for name, (*_, label) in LOOKS.items()}
LABELS |= {("sum", "own"): "sum, ELU + 1", ("kimi-delta", "own"): "Kimi delta"}
#: Colour and marker of each task in the figure with a row for every mixer.
MARKS = {1: (TRAINED, "x"), 2: (INK, "o")}


def draw(points: Points):
    chosen = best(points)
    names = chosen.by("mixer", "map")
    heights = [4.2]
    if points[0]["layers"] > 1:
        heights += [0.3 * len(names) + 1.4]
    figure = Figure(figsize=(plots.WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)
    by_size(parts[0, 0], chosen)
    for part in parts[1:, 0]:
        by_mixer(part, chosen(pairs=KEYS, heads=HEADS))
    return figure


def by_size(part: SubFigure, points: Points) -> None:
    """Draw the accuracy by number of keys (above) and by size of the state (below)."""
    axes = part.subplots(2, 2, sharey=True, sharex="row")
    counts = sorted({*points["pairs"]})
    for (above, below), (shows, title) in zip(axes.T, TASKS.items(), strict=True):
        above.set(title=title.replace(" with", "\nwith"), xlabel="keys")
        below.set(xlabel=f"scalars in the state,\n{KEYS} keys")
        for (mixer, features), look in LOOKS.items():
            own = points(mixer=mixer, map=features, shows=shows)
            plots.series(above, own(heads=HEADS), *look, "accuracy", "pairs")
            plots.series(below, own(pairs=KEYS), *look, "accuracy", "state")
        for ax in (above, below):
            ax.set_xscale("log", base=2)
        above.set_xticks(counts, [*map(str, counts)])
        below.xaxis.set_major_formatter("{x:.0f}")
    for ax in axes[:, 0]:
        ax.set(ylabel="accuracy", ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    plots.legend(part, axes[0, 0], columns=2)


def by_mixer(part: SubFigure, points: Points) -> None:
    """Draw the accuracies of each mixer as a row, sorted by the second task."""
    ax = part.subplots()
    rows = {
        name: {shows: own(shows=shows)["accuracy"] for shows in TASKS}
        for name, own in points.by("mixer", "map").items()
    }
    names = sorted(rows, key=lambda name: -median(rows[name][2] or [0]))
    for shows, title in TASKS.items():
        named = {LABELS.get(name, name[0]): rows[name][shows] for name in names}
        plots.rows(ax, named, *MARKS[shows], title)
    ax.axvline(1 / KEYS, color=plots.INK, linestyle=":", linewidth=1)
    ax.set(xlabel=f"accuracy, {KEYS} keys", xlim=(-0.04, 1.04))
    plots.legend(part, ax, columns=2)


setup = SETUP | {"batch": BATCH, "width": WIDTH}

if __name__ == "__main__":
    main(__file__)
