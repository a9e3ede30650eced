"""Find layers that use texts longer than those of training.

Trained with windows of 64 characters, tested with windows of up to 1024.
"""

import text
import torch
from frame import Numbers, Point, Points, holds, main, order
from torch.nn import functional as F

from fwlab import plots
from fwlab.layers import SoftmaxAttention
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, OTHER

TITLE = "Texts that are longer than those of training"
SOURCE = "ours, after Press et al. 2022"
COST = "quick: 3 min of one core; full: 26 min"

#: Window lengths: the training length first, then longer ones for tests.
LENGTHS = (64, 128, 256, 512, 1024)
#: Number of characters per forward pass of a test.
READ = 8192
#: Name of the delta rule with the unit keys of the gated delta rule, but no decay.
UNIT = "delta, unit keys"
#: Mixers of this experiment: controls, softmax attention for any length, delta rule.
OWN = text.CONTROLS | {
    "softmax-rotary": text.ROTARY_SOFTMAX,
    "softmax, no positions": Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads)),
    UNIT: text.fast_weights("delta", "identity"),
}
#: Mixers of the quick version, and all further mixers that take any length.
#: Softmax attention and other AFT layers learn positions only within the window.
QUICK = ("softmax-rotary", "transformer-xl", "sum", "gated", "delta", "gated-delta")
QUICK += (text.ALONE, text.CONVOLVED)
NAMES = (
    *QUICK,
    *("softmax, no positions", "kimi-delta", "fwp", "aft-conv", UNIT),
    *("gated-delta-2", "comba", "implicit-delta", "delta-product", "rwkv7"),
    *("feedback", "feedback-shared"),
)


def points(quick: bool) -> list[Point]:
    size = {} if quick else {"size": "small-800", "lr": text.LR["small"]}
    names = QUICK if quick else NAMES
    return text.points(quick, [{"mixer": name, **size} for name in names])


def mixer(point: Point) -> Mixer:
    return (MIXERS | OWN)[point["mixer"]]


@torch.no_grad()
def by_length(run: text.Run) -> Point:
    """Measure the loss of the same characters in windows of each length.

    Each window begins with an empty state.
    """
    count = (len(run.val_tokens) - 1) // max(LENGTHS) * max(LENGTHS)
    inputs, targets = (run.val_tokens[at : at + count].long() for at in (0, 1))
    found: Point = {}
    for length in LENGTHS:
        parts = inputs.view(-1, length).split(READ // length)
        logits = torch.cat([run.model(part).flatten(0, 1) for part in parts])
        loss = F.cross_entropy(logits, targets).item()
        found[f"loss_{length}"] = text.finite(loss)
    return found


def changes(points: Points, length: int = LENGTHS[-1]) -> Numbers:
    """Return the losses at `length` minus the losses at the training length."""
    before, after = points[f"loss_{LENGTHS[0]}"], points[f"loss_{length}"]
    return [*map(text.above, after, before)]


def claims(points: Points):
    """Yield claims seed by seed, since each model reads the same text at any length."""
    short, *_, long = LENGTHS
    ends = {name: changes(own) for name, own in points.by("mixer").items()}
    for name, end in ends.items():
        what = f"{name}: lower in windows of {long} than of {short}"
        yield holds(what, end, lambda x: x < 0, spec="+.3f")
    if UNIT in ends:
        what = f"change up to {long}: gated-delta below {UNIT}, which has no decay"
        yield order(what, [ends.get("gated-delta", []), ends[UNIT]], spec="+.3f")


def draw(points: Points):
    models = points.by("mixer")
    names = sorted(models, key=lambda name: text.middle(changes(models[name])))
    labels = "characters in a window", "change of loss"
    figure, axes = plots.grid(len(names), *labels, height=1.7)
    for ax, name in zip(axes, names, strict=True):
        own = [
            {"length": length, "loss": loss}
            for length in LENGTHS
            for loss in changes(models[name], length)
        ]
        others = ("softmax", "transformer", "aft", "feedback", "convolution")
        color = OTHER if name.startswith(others) else FAST
        plots.series(ax, own, color, "o", "-", x="length")
        ax.set_title(name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(LENGTHS, [*map(str, LENGTHS)])
        # A symmetric log scale shows small gains beside large losses.
        ax.set_yscale("symlog", linthresh=0.02)
        ax.set_yticks((-0.02, 0, 0.02, 0.2), ("−0.02", "0", "0.02", "0.2"))
    return figure


run, setup = text.experiment(mixer, by_length)

if __name__ == "__main__":
    main(__file__)
