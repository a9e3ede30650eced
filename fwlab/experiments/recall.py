"""What the delta rule is for: multi-query associative recall.

After Arora et al. 2023: a sequence shows pairs of tokens, a key and a
value, and then asks for the value of every key. In a second task keys
return with new values, and the most recent one counts.
"""

from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import plots
from fwlab.data import retrieval
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.fit import SETUP, fit
from fwlab.feature_maps import DPFP
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED, WRONG

#: A mixer, and its features: "own", or "dpfp-1" instead.
Name = tuple[str, str]
DELTA, SUM, SOFTMAX = ("delta", "own"), ("sum", "dpfp-1"), ("softmax", "own")
#: The target of a token that is not a query.
UNASKED = -100
D_MODEL, BATCH = 32, 32
#: Evaluate after each of this many optimiser steps, on this many
#: sequences, and stop at this accuracy. From half of the budget on, when
#: sequences are no longer getting longer, stop as well after two evaluations in
#: a row at chance: at most this many times one of the values in question.
EVERY, SEQUENCES, SOLVED, CHANCE = 100, 128, 0.999, 1.2


class Grid(NamedTuple):
    """Sizes of one version.

    - `layers`, `symbols`, `budget`, `rates`: of all its points.
    - `pairs`: numbers of keys, with `heads[0]` heads.
    - `heads`: numbers of heads with `middle` keys. More heads are
      narrower, so the fast weights are smaller.
    - `names`: mixers, which are run at all sizes.
    - `others`: those that are run with `middle` keys only.
    """

    layers: int
    symbols: int
    budget: int
    rates: tuple[float, ...]
    pairs: tuple[int, ...]
    heads: tuple[int, ...]
    middle: int
    names: tuple[Name, ...]
    others: tuple[Name, ...] = ()


QUICK = Grid(
    *(1, 32, 300, (2e-2,), (4, 8), (2, 4), 8),
    names=(SOFTMAX, DELTA, SUM, ("gated", "own"), ("gated-delta", "own")),
)
FULL = Grid(
    *(2, 128, 1000, (5e-3, 2e-2), (4, 8, 16), (2, 1, 4), 8),
    names=(SOFTMAX, DELTA, SUM, ("gated-delta", "own")),
    others=(
        *((mixer, "own") for mixer in ("sum", "gated", "kimi-delta", "fwp")),
        ("transformer-xl", "own"),
        *((f"aft-{form}", "own") for form in ("simple", "full", "local", "conv")),
        *((mixer, "own") for mixer in ("feedback", "feedback-shared")),
    ),
)


def points(quick: bool) -> list[Point]:
    """Order points by keys, so that a stopped run has all mixers up to some."""
    grid = QUICK if quick else FULL
    settings = []
    for name in (*grid.names, *grid.others):
        pairs = grid.pairs if name in grid.names else [grid.middle]
        sizes = [(count, grid.heads[0]) for count in pairs]
        if name in grid.names and name != SOFTMAX:
            sizes += [(grid.middle, heads) for heads in grid.heads[1:]]
        settings += [
            {
                "mixer": name[0],
                "map": name[1],
                "shows": shows,
                "pairs": count,
                "heads": heads,
                "layers": grid.layers,
                "symbols": grid.symbols,
                "lr": lr,
                "seed": seed,
                "budget": grid.budget,
            }
            for count, heads in sizes
            for shows in (1, 2)
            for lr in grid.rates
            for seed in (1, 2, 3)
        ]
    return sorted(settings, key=lambda point: point["pairs"])


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    pairs, symbols, shows = point["pairs"], point["symbols"], point["shows"]
    time = (2 * shows + 1) * pairs
    model = Recaller(
        *(point["mixer"], point["map"], 2 * symbols),
        *(point["layers"], point["heads"], time),
    )

    def draw(step: int) -> tuple[Tensor, Tensor]:
        """Two pairs are soon learned, and help with more."""
        count = min(pairs, 2 + 2 * pairs * (step + 1) // point["budget"])
        return sequences(BATCH, count, symbols, shows)

    curve: list[tuple[int, float]] = []
    for step in fit(model, draw, loss_of, point["budget"], point["lr"]):
        if step % EVERY == 0 or step == point["budget"]:
            test = sequences(SEQUENCES, pairs, symbols, shows)
            accuracy = right(model, *test)
            curve.append((step, round(accuracy, 4)))
            if accuracy >= SOLVED or at_chance(curve, pairs, point["budget"]):
                break
    return {
        "parameters": model.num_parameters(),
        "state": model.state_size(time),
        "accuracy": curve[-1][1],
        "steps": curve[-1][0],
        "curve": curve,
    }


def at_chance(curve: list[tuple[int, float]], pairs: int, budget: int) -> bool:
    """Whether the last two evaluations are late, and no better than guesses."""
    return len(curve) > 1 and all(
        2 * step >= budget and accuracy <= CHANCE / pairs
        for step, accuracy in curve[-2:]
    )


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, wanted = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def sequences(
    batch: int, pairs: int, symbols: int, shows: int = 1
) -> tuple[Tensor, Tensor]:
    """Pairs of a key and a value in random order, then every key once.

    - `pairs`: number of keys in a sequence.
    - `symbols`: number of keys there are, tokens from 0, and of values,
      tokens from `symbols`; at least `shows * pairs`.
    - `shows`: how often each key is shown, each time with another value.
    - Returns the tokens and what to answer after each, `[batch, time]`:
      the most recent value of a queried key, elsewhere `UNASKED`.
    """
    writes = shows * pairs
    drawn = retrieval(batch, symbols, writes)  # no key and no value twice
    known, values = drawn.keys[:, :pairs], drawn.values + symbols
    which = torch.rand(batch, writes).argsort(-1) % pairs
    step = torch.arange(writes).expand(batch, -1)
    last = torch.zeros_like(known).scatter_reduce(1, which, step, "amax")
    shown = torch.stack([known.gather(1, which), values], -1).flatten(1)
    order = torch.rand(batch, pairs).argsort(-1)
    answers = values.gather(1, last).gather(1, order)
    tokens = torch.cat([shown, known.gather(1, order)], 1)
    return tokens, torch.cat([torch.full_like(shown, UNASKED), answers], 1)


class Recaller(LanguageModel):
    """A language model whose embeddings contain the token before, too.

    A value then arrives together with its key, as after the short
    convolution of today's models: no mixer has to find out which key came
    before a value. It takes whole sequences, without `prefill` or `step`.

    - `mixer`, `vocabulary`, `layers`, `heads`, `max_len`, `options`: as for
      `LanguageModel`.
    - `features`: "own" for those of the mixer, or "dpfp-1" instead.
    """

    def __init__(
        self,
        mixer: str | list[str],
        features: str,
        vocabulary: int,
        layers: int,
        heads: int,
        max_len: int,
        **options: Any,
    ):
        sizes = (layers, heads, D_MODEL, max_len, 2 * D_MODEL)
        super().__init__(vocabulary, mixer, *sizes, **options)
        self.before = nn.Embedding(vocabulary, D_MODEL)
        enlarge(self)
        if features == "own":
            return
        for block in self.blocks:
            own = block.mixer
            block.mixer = FastWeightAttention(D_MODEL, heads, DPFP(nu=1), own.rule)
            block.mixer.load_state_dict(own.state_dict())  # features have no weights

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        before = F.pad(self.before(tokens[:, :-1]), (0, 0, 1, 0))
        x = self._embed(tokens, 0, tokens.shape[1]) + before
        for block in self.blocks:
            x = block(x)
        return self._logits(x)


def enlarge(model: nn.Module) -> None:
    """Initial weights larger than a language model's, which suit larger widths."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[-1] ** -0.5)


@torch.no_grad()
def right(model: nn.Module, tokens: Tensor, wanted: Tensor) -> float:
    """The share of queries that get the right value."""
    asked = wanted != UNASKED
    return (model(tokens)[asked].argmax(-1) == wanted[asked]).double().mean().item()


# --- What came out ------------------------------------------------------


class Look(NamedTuple):
    """The label, colour, marker and line of a mixer."""

    label: str
    color: str
    marker: str
    line: Any


#: Fast weights and softmax attention, at several sizes.
LOOKS = {
    DELTA: Look("delta, DPFP-1", FAST, "o", "-"),
    SUM: Look("sum, DPFP-1", WRONG, "D", "-."),
    ("gated-delta", "own"): Look("gated delta", SERIES[0], "s", "-"),
    ("gated", "own"): Look("gated, ELU + 1", SERIES[1], "v", "--"),
    SOFTMAX: Look("softmax", OTHER, "^", "-"),
}
#: What a row is called if not as its mixer.
LABELS = {name: look.label for name, look in LOOKS.items()}
LABELS |= {("sum", "own"): "sum, ELU + 1", ("kimi-delta", "own"): "Kimi delta"}
#: The looks of the tasks where every mixer has a row.
MARKS = {1: (TRAINED, "x"), 2: (INK, "o")}
TASKS = {1: "each key once", 2: "keys return with new values"}


def best(points: list[Point]) -> list[Point]:
    """The points of the best learning rate, for each mixer and size."""
    groups: dict[tuple[Any, ...], dict[float, list[Point]]] = {}
    for p in points:
        size = tuple(p[key] for key in ("mixer", "map", "shows", "pairs", "heads"))
        groups.setdefault(size, {}).setdefault(p["lr"], []).append(p)
    chosen = []
    for rates in groups.values():
        chosen += max(rates.values(), key=lambda own: median(accuracies(own)))
    return chosen


def accuracies(points: Iterable[Point]) -> list[float]:
    return [p["accuracy"] for p in points]


def _grid(points: list[Point]) -> Grid:
    return QUICK if points[0]["budget"] == QUICK.budget else FULL


def _of(points: list[Point], name: Name, **wanted: Any) -> list[Point]:
    return select(points, mixer=name[0], map=name[1], **wanted)


def draw(points: list[Point]) -> Figure:
    grid, chosen = _grid(points), best(points)
    size = len({p["mixer"] + p["map"] for p in chosen}) * 0.3 + 1.4
    heights = [4.2, size] if grid.others else [4.2]
    figure = Figure(figsize=(plots.WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)
    _sizes(parts[0, 0], chosen, grid)
    for part in parts[1:, 0]:
        _every(part, chosen, grid)
    return figure


def _every(part: SubFigure, points: list[Point], grid: Grid) -> None:
    """Every mixer at the middle size, the best of the second task on top."""
    ax = part.subplots()
    middle = select(points, pairs=grid.middle, heads=grid.heads[0])
    names = dict.fromkeys((p["mixer"], p["map"]) for p in middle)
    rows = {
        shows: {name: accuracies(_of(middle, name, shows=shows)) for name in names}
        for shows in TASKS
    }
    order = sorted(names, key=lambda name: -median(rows[2][name] or [0]))
    for shows, title in TASKS.items():
        named = {LABELS.get(name, str(name[0])): rows[shows][name] for name in order}
        plots.rows(ax, named, *MARKS[shows], title)
    ax.axvline(1 / grid.middle, color=plots.INK, linestyle=":", linewidth=1)
    ax.set(xlabel=f"accuracy, {grid.middle} keys", xlim=(-0.04, 1.04))
    part.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=2)


def _sizes(part: SubFigure, points: list[Point], grid: Grid) -> None:
    """Accuracy by number of keys (above) and by size of the state."""
    axes = part.subplots(2, 2, sharey=True, sharex="row")
    for column, (shows, title) in enumerate(TASKS.items()):
        by_pairs, by_state = axes[0, column], axes[1, column]
        by_pairs.set(title=title.replace(" with", "\nwith"), xlabel="keys")
        by_state.set(xlabel=f"scalars in the state,\n{grid.middle} keys")
        for name, look in LOOKS.items():
            own = _of(points, name, shows=shows)
            usual = select(own, heads=grid.heads[0])
            middle = select(own, pairs=grid.middle)
            _line(by_pairs, usual, look, "pairs")
            _line(by_state, middle, look, "state")
        counts = sorted({p["pairs"] for p in points})
        by_pairs.set_xscale("log", base=2)
        by_pairs.set_xticks(counts, [str(count) for count in counts])
        by_state.set_xscale("log", base=2)
        by_state.xaxis.set_major_formatter("{x:.0f}")
    for ax in axes[:, 0]:
        ax.set(ylabel="accuracy", ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    part.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=2
    )


def _line(ax: Axes, points: list[Point], look: Look, x: str) -> None:
    plots.series(
        ax, points, look.color, look.marker, look.line, look.label, "accuracy", x
    )


def claims(points: list[Point]) -> list[Claim]:
    """All are ours: the papers have curves, and no numbers.

    A claim counts the worst size of each seed.
    """
    grid, chosen = _grid(points), best(points)
    once, again = (select(chosen, shows=shows) for shows in TASKS)
    sizes = [(count, grid.heads[0]) for count in grid.pairs]

    def least(shows: int, name: Name, low: float) -> Claim:
        own = _by_seed(again if shows == 2 else once, name, sizes)
        text = f"{TASKS[shows]}, {name[0]}: {low} or more at every size"
        lowest = [min(sizes) for sizes in own.values()]
        return compared(text, "", [lowest], lambda x: x >= low)

    if grid is FULL:
        every, gap = [least(1, name, 0.99) for name in (SOFTMAX, DELTA)], 0.05
    else:
        names = (1, SOFTMAX), (1, DELTA), (1, SUM), (2, SOFTMAX), (2, DELTA)
        every, gap = [least(shows, name, 0.9) for shows, name in names], 0.3
        half = [max(sizes) for sizes in _by_seed(again, SUM, sizes).values()]
        text = f"{TASKS[2]}, sum: right about half of the time, 0.55 at most"
        every.append(compared(text, "", [half], lambda x: x <= 0.55))
    # A second layer of the sum rule can find out that a key was there.
    sizes += [(grid.middle, heads) for heads in grid.heads[1:]]
    delta, add = (_by_seed(again, name, sizes) for name in (DELTA, SUM))
    gaps = [
        min(a - b for a, b in zip(delta[seed], add[seed], strict=True))
        for seed in delta.keys() & add.keys()
    ]
    text = f"{TASKS[2]}: delta above sum by {gap} or more at every size"
    return [*every, compared(text, "", [gaps], lambda x: x >= gap)]


def _by_seed(
    points: list[Point], name: Name, sizes: list[tuple[int, int]]
) -> dict[int, list[float]]:
    """Accuracies at these numbers of keys and heads, of seeds that have all."""
    every = [
        p for pairs, heads in sizes for p in _of(points, name, pairs=pairs, heads=heads)
    ]
    found = {p["seed"]: accuracies(select(every, seed=p["seed"])) for p in every}
    return {seed: own for seed, own in found.items() if len(own) == len(sizes)}


EXPERIMENT = Experiment(
    name="recall",
    title="What the delta rule is for: recall when keys return",
    source="ours, after Arora et al. 2023",
    cost="quick: 4 min of one core; full: 76 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: {**SETUP, "batch": BATCH, "width": D_MODEL},
)
