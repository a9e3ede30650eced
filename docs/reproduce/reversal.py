"""Undoing updates: how far back can fast weights be recomputed?

A backward pass needs the fast weights of every step. Appendix F of the
paper keeps the last ones, and undoes one update after the other.
"""

from collections.abc import Iterator

from frame import Claim, Experiment, Point, Points, every, main
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.ops.delta.reversal import undoing_error
from fwlab.plots import SERIES, WRONG

#: How each update is undone.
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
#: What features are divided by.
NORMS = ("sum", "l2")
LENGTHS = (64, 256, 1024, 2048, 4096, 16384)
#: An error of this size is no use for a gradient.
USELESS = 0.01


def points(quick: bool) -> list[Point]:
    return [
        {
            "method": method,
            "dtype": dtype,
            "key_norm": norm,
            "length": length,
            "map": "dpfp-1",
            "d_key": 16,
            "seed": seed,
        }
        for length in (LENGTHS[:4] if quick else LENGTHS)
        for method in METHODS
        for dtype in LOOKS
        for norm in NORMS
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    names = ("method", "dtype", "key_norm", "length", "d_key", "seed")
    return {"error": undoing_error(**{name: point[name] for name in names})}


def claims(points: Points) -> Iterator[Claim]:
    """Claim what is right at any length, and what is no use from 2048 steps on.

    The paper gives no errors.
    """

    lengths = LENGTHS if max(points["length"]) > LENGTHS[3] else LENGTHS[:4]

    def by_length(method: str, dtype: str, first: int = 0) -> dict[str, list[float]]:
        """Return the errors of both normalisations, at every length from this one."""
        some = points(method=method, dtype=dtype)
        return {
            f"{norm}, {length} steps": some(key_norm=norm, length=length)["error"]
            for norm in NORMS
            for length in lengths
            if length >= first
        }

    # Only the error that is closest to the threshold.
    shown = {"spec": ".0e", "x": ""}
    yield every(
        "increments stored, float32: error below 1e-5 at any length",
        by_length("stored", "float32"),
        lambda error: error < 1e-5,
        worst=lambda error: error,
        **shown,
    )
    for what, method, dtype in (
        ("increments stored, bfloat16", "stored", "bfloat16"),
        ("update inverted, float32", "inverted", "float32"),
        ("increments stored, float32, decay of 0.99", "decay", "float32"),
    ):
        yield every(
            f"{what}: error above {USELESS} from 2048 steps on",
            by_length(method, dtype, first=2048),
            lambda error: error > USELESS,
            worst=lambda error: -error,
            **shown,
        )


def draw(points: Points) -> Figure:
    pairs = [(method, norm) for method in METHODS for norm in NORMS]
    figure, axes = plots.grid(len(pairs), "steps undone", "error")
    for ax, (method, norm) in zip(axes, pairs, strict=True):
        for dtype, look in LOOKS.items():
            some = points(method=method, key_norm=norm, dtype=dtype)
            plots.series(ax, some, *look, dtype, "error", "length")
        ax.axhline(USELESS, color=WRONG, linewidth=1, linestyle=(0, (4, 2)))
        ax.set_title(f"{METHODS[method]},\n{norm.replace('l2', 'L2')} normalisation")
        ax.set(xscale="log", yscale="log", ylim=(1e-17, 1e20))
        ax.minorticks_off()
    plots.legend(figure, axes[0], columns=3)
    return figure


EXPERIMENT = Experiment(
    name="reversal",
    title="How far back updates can be undone",
    source="Schlag et al. 2021, appendix F",
    cost="quick: half a minute of one core; full: 2 minutes",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
