"""Compare mixers when each has its own learning rate.

The mixers of the table in the README, five of them controls: a convolution without any
memory, attention with rotary positions, and attention and two rules behind the
convolution. Each is trained at several rates. A rate is chosen on one half of the validation text, and
its loss is that of the other half.
"""

import text
import torch
from frame import Numbers, Point, Points, every, main
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, FEATURES, INK, OTHER, TRAINED, WRONG

TITLE = "One learning rate for all, or one for each"
SOURCE = "ours"
COST = "quick: 5 min of one core; full: 4 hours"

#: Names of the controls: no memory, attention after a convolution, rotary attention.
ALONE, CONVOLVED, ROTARY = text.ALONE, text.CONVOLVED, "attention, rotary"
#: Rule and feature map of fast weights after a convolution, by name.
BEHIND = {
    "convolution + delta": ("delta", "dpfp"),
    "convolution + gated-delta": ("gated-delta", "identity"),
}
OWN = text.CONTROLS | {ROTARY: text.ROTARY_SOFTMAX}
OWN |= {
    name: text.fast_weights(*layer, conv_size=text.CONVOLUTION_SIZE)
    for name, layer in BEHIND.items()
}
#: Further mixers of the README's table.
BARE = (
    *("softmax", "transformer-xl", "sum", "gated", "delta", "gated-delta", "fwp"),
    *("aft-simple", "aft-full", "aft-local", "aft-conv", "feedback", "feedback-shared"),
)
#: Mixers of the quick version.
FEW = ("sum", "delta", "gated-delta", ALONE, ROTARY, CONVOLVED)
#: Learning rates of all mixers. The README uses the first rate of the full version.
RATES = {"quick": (1e-3, 4e-3, 1.6e-2), "full": (1e-3, 3e-3, 1e-2, 3e-2)}
#: Higher rates, for mixers whose best rate is the highest rate of `RATES`.
HIGHER = {"aft-full": 1e-1, "aft-local": 1e-1, "aft-conv": 1e-1}
#: Learning rate chosen with the first seed, at which two more seeds run, by mixer.
CHOSEN = {
    **dict.fromkeys(
        ("attention, rotary", "transformer-xl", "gated", "gated-delta"), 3e-3
    ),
    **dict.fromkeys(
        (ALONE, CONVOLVED, *BEHIND, "softmax", "sum", "delta", "aft-simple"), 1e-2
    ),
    **dict.fromkeys(("aft-full", "aft-local", "aft-conv"), 3e-2),
    **dict.fromkeys(("fwp", "feedback", "feedback-shared"), 3e-3),
}
#: Pairs of mixers, the first of which should have a lower loss at its best rate.
ORDERS = (
    ("delta", "sum"),
    ("gated", "delta"),
    ("gated-delta", "gated"),
    ("gated-delta", "delta"),
    ("aft-local", "aft-simple"),
    ("feedback", "transformer-xl"),
    ("convolution + gated-delta", "convolution + delta"),
)
#: Colours of the mixers that the figure highlights.
LOOKS = {"sum": OTHER, "delta": FAST, "gated-delta": FEATURES}
LOOKS |= {ALONE: WRONG, ROTARY: TRAINED}


def points(quick: bool) -> list[Point]:
    size = {"size": "small" if quick else text.FULL}
    corpus = {"corpus": "any" if quick else "shakespeare"}
    rates = RATES["quick" if quick else "full"]
    settings = [
        (mixer, lr, seed)
        for seed in (1, 2, 3)
        for mixer in (FEW if quick else (*OWN, *BARE))
        for lr in (rates if quick or seed == 1 else (CHOSEN[mixer],))
    ]
    settings += [] if quick else [(mixer, lr, 1) for mixer, lr in HIGHER.items()]
    return [
        {"mixer": mixer, "lr": lr, **size, **corpus, "seed": seed}
        for mixer, lr, seed in settings
    ]


def mixer(point: Point) -> Mixer:
    return (MIXERS | OWN)[point["mixer"]]


@torch.no_grad()
def halves(run: text.Run) -> Point:
    """Measure the loss on each half of the validation text."""
    block = run.config.block
    windows = run.val_tokens.long().unfold(0, block + 1, block)
    losses = []
    for half in windows.chunk(2):
        parts = [run.loss(x[:, :-1], x[:, 1:])[0] * len(x) for x in half.split(64)]
        losses.append(text.finite(sum(parts).item() / len(half)))
    return dict(zip(("chosen_by", "loss"), losses, strict=True))


# --- Claims and figures -------------------------------------------------


def best(points: Points) -> dict[str, Numbers]:
    """Return each mixer's losses on half the text, at the rate chosen on the rest."""
    chosen = tried(points).at_best_rate("mixer", by="chosen_by")
    return {
        mixer: points(mixer=mixer, lr=own[0]["lr"])["loss"]
        for mixer, own in chosen.by("mixer").items()
    }


def tried(points: Points) -> Points:
    """Select the runs of seeds that ran at every rate, to choose a mixer's rate."""
    rates = {*points["lr"]} - {*HIGHER.values()}
    groups = points.by("mixer", "seed").values()
    return Points(p for own in groups if {*own["lr"]} >= rates for p in own)


def from_the_edge(own: Points) -> int:
    """Count the grid steps from the best learning rate to the nearer end."""
    rates = sorted(own.by("lr"))
    place = rates.index(own.at_best_rate("mixer", by="chosen_by")[0]["lr"])
    return min(place, len(rates) - 1 - place)


def claims(points: Points):
    ends = best(points)
    quick = points[0]["size"] == "small"
    yield every(
        "the best rate is neither the lowest nor the highest (places to "
        "the nearer of these)",
        {
            mixer: [from_the_edge(own) for own in some.by("seed").values()]
            for mixer, some in tried(points).by("mixer").items()
        },
        lambda places: places >= 1,
        spec="g",
        x="",
        worst=lambda places: -places,
    )
    pairs = [*ORDERS, *((mixer, ALONE) for mixer in ends if mixer != ALONE)]
    for pair in pairs:
        if not quick or {*pair} <= {*FEW}:
            what = "{}, each at its best rate"
            sides = {mixer: ends.get(mixer, []) for mixer in pair}
            yield text.below(what, sides)


def draw(points: Points) -> Figure:
    """Draw the rank of each mixer at each learning rate, and at its best rate."""
    table = tried(points).by("mixer")
    rates = sorted({*points["lr"]} - {*HIGHER.values()})
    columns = [
        {mixer: text.middle(own(lr=lr)["loss"]) for mixer, own in table.items()}
        for lr in rates
    ]
    columns.append({mixer: text.middle(own) for mixer, own in best(points).items()})
    places = [sorted(column, key=column.__getitem__) for column in columns]
    figure, (ax,) = plots.panels(0.27 * len(table) + 0.7)
    for mixer in table:
        at = [(i, own.index(mixer)) for i, own in enumerate(places)]
        color, alpha = LOOKS.get(mixer, INK), 1 if mixer in LOOKS else 0.4
        ax.plot(*zip(*at, strict=True), "o-", color=color, alpha=alpha, markersize=4)
    names = [f"{lr:g}".lstrip("0") for lr in rates]  # The axis is narrow: omit the 0.
    ax.set_xticks(range(len(columns)), [*names, "best"])
    ax.set_xlabel("learning rate")
    ax.invert_yaxis()
    right = ax.secondary_yaxis("right")
    first = [f"{columns[0][mixer]:.2f}" for mixer in places[0]]
    last = [f"{columns[-1][mixer]:.2f} {mixer}" for mixer in places[-1]]
    for axis, labels in ((ax, first), (right, last)):
        axis.set_yticks(range(len(labels)), labels)
    return figure


run, setup = text.experiment(mixer, halves)

if __name__ == "__main__":
    main(__file__)
