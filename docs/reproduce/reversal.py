"""Undo updates, and measure how far back fast weights can be recomputed.

A backward pass needs the fast weights of every step. Appendix F of the
paper keeps the last ones, and undoes one update after the other.
"""

from frame import Point, Points, every, main

from fwlab import plots
from fwlab.bench.undoing import undoing_error
from fwlab.plots import SERIES, WRONG

TITLE = "How far back updates can be undone"
SOURCE = "Schlag et al. 2021, appendix F"
COST = "quick: half a minute of one core; full: 2 minutes"

#: Labels of the methods that undo an update.
METHODS = {
    "stored": "increments stored",
    "inverted": "update inverted",
    "decay": "stored, decay 0.99",
}
LOOKS = {
    "float64": (SERIES[0], "o", "-"),
    "float32": (SERIES[1], "^", "--"),
    "bfloat16": (SERIES[2], "s", ":"),
}
#: Norms by which features are divided.
NORMS = ("sum", "l2")
LENGTHS = (64, 256, 1024, 2048, 4096, 16384)
#: Error that makes a gradient useless.
USELESS = 0.01


def points(quick: bool) -> list[Point]:
    return [
        {"method": method, "dtype": dtype, "key_norm": norm, "length": length}
        | {"map": "dpfp-1", "d_key": 16, "seed": seed}
        for length in (LENGTHS[:4] if quick else LENGTHS)
        for method in METHODS
        for dtype in LOOKS
        for norm in NORMS
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    names = ("method", "dtype", "key_norm", "length", "d_key", "seed")
    return {"error": undoing_error(**{name: point[name] for name in names})}


def claims(points: Points):
    """Yield claims that methods are exact at any length, or useless from 2048 steps on.

    The paper gives no errors.
    """
    lengths = LENGTHS if max(points["length"]) > LENGTHS[3] else LENGTHS[:4]
    small = "error below 1e-5 at any length"
    late = f"error above {USELESS} from 2048 steps on"
    for what, method, dtype, end in (
        ("increments stored, float32", "stored", "float32", small),
        ("increments stored, bfloat16", "stored", "bfloat16", late),
        ("update inverted, float32", "inverted", "float32", late),
        ("increments stored, float32, decay of 0.99", "decay", "float32", late),
    ):
        some = points(method=method, dtype=dtype)
        errors = {
            f"{norm}, {length} steps": some(key_norm=norm, length=length)["error"]
            for norm in NORMS
            for length in lengths
            if end == small or length >= 2048
        }
        # Show the error that is closest to the threshold.
        true, worst = (lambda error: error > USELESS), (lambda error: -error)
        if end == small:
            true, worst = (lambda error: error < 1e-5), (lambda error: error)
        yield every(f"{what}: {end}", errors, true, spec=".0e", x="", worst=worst)


def draw(points: Points):
    ways = [(method, norm) for method in METHODS for norm in NORMS]
    figure, axes = plots.grid(len(ways), "steps undone", "error")
    for ax, (method, norm) in zip(axes, ways, strict=True):
        for dtype, look in LOOKS.items():
            own = points(method=method, key_norm=norm, dtype=dtype)
            plots.series(ax, own, *look, dtype, "error", "length")
        ax.set_title(f"{METHODS[method]},\n{norm.replace('l2', 'L2')} normalisation")
        ax.axhline(USELESS, color=WRONG, linewidth=1, linestyle=(0, (4, 2)))
        ax.set(xscale="log", yscale="log", ylim=(1e-17, 1e20))
        ax.minorticks_off()
    plots.legend(figure, axes[0], columns=3)
    return figure


if __name__ == "__main__":
    main(__file__)
