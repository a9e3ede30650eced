"""Translation without softmax: Tables 1 and 6 of Schlag et al. 2021.

The text is number words instead of news: English to German, where the ones
come before the tens. Models read and write single characters.
"""

from collections.abc import Iterable
from functools import partial
from itertools import combinations
from operator import gt
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fwlab import plots
from fwlab.data import Characters, number_words
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.fit import SETUP, fitted, one_cycle
from fwlab.experiments.retrieval import d_dot, feature_map
from fwlab.feature_maps import FAVOR
from fwlab.models import EncoderDecoder
from fwlab.plots import INK, SERIES

#: Feature map, and features per entry of a key (0: softmax has none), with
#: the published BLEU on WMT14's test set. Table 1 has no DPFP-3.
Model = tuple[str, int]
PUBLISHED: dict[Model, float | None] = {
    ("softmax", 0): 27.7,
    ("linear", 1): 26.8,
    ("favor", 1): 24.4,
    ("favor", 4): 25.3,
    ("favor", 8): 27.7,
    ("dpfp", 4): 26.9,
    ("dpfp", 6): None,
    ("dpfp", 8): 27.1,
}
#: Performer whose features are drawn only once: ours.
FIXED: list[Model] = [("favor-fixed", 1), ("favor-fixed", 8)]
#: Table 6: features of a key of width 64, by features per entry of the key.
TABLE_6 = {4: 256, 6: 384, 8: 512}

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENGLISH = Characters(f"{LETTERS} -")
#: "<" is written before a number, ">" after it.
GERMAN = Characters(f"{LETTERS}äöüß<>")
START, END = GERMAN.encode("<>").tolist()

#: Numbers that are held out of training.
TEST = 300
QUICK = {
    "layers": 1,
    "heads": 1,
    "d_key": 16,
    "limit": 1000,
    "train": 600,
    "batch": 32,
    "lr": 1e-2,
    "budget": 400,
}
FULL = QUICK | {"limit": 1_000_000, "train": 3000, "budget": 3000}


def points(quick: bool) -> list[Point]:
    """Order points by seed, so that a stopped run has all of the paper's models."""
    sizes = QUICK if quick else FULL
    return [
        {"map": kind, "ratio": ratio, **sizes, "seed": seed}
        for models in (list(PUBLISHED), FIXED)
        for seed in (1, 2, 3)
        for kind, ratio in models
    ]


def map_name(kind: str, ratio: int, d_key: int) -> str:
    """The feature map that makes `ratio * d_key` features of a key."""
    if kind in ("favor", "favor-fixed"):  # two features per direction
        return f"favor-{ratio * d_key // 2}-stable"
    return f"dpfp-{ratio // 2}" if kind == "dpfp" else kind


def run(point: Point) -> Point:
    metric = character_bleu()  # if it is missing, not only after training
    torch.manual_seed(point["seed"])
    count, d_key = point["train"], point["d_key"]
    numbers = torch.randperm(point["limit"])[: count + TEST].tolist()
    name = map_name(point["map"], point["ratio"], d_key)
    model = EncoderDecoder(
        len(ENGLISH),
        len(GERMAN),
        point["layers"],
        point["heads"],
        point["heads"] * d_key,
        attention=feature_map(name, d_key) or "softmax",
        rule="sum",
    )
    curve = train(model, Pairs.of(numbers[:count]), point)
    unseen = numbers[count:]
    written = translate(model, Pairs.of(unseen))
    wanted = [number_words(number, "german") for number in unseen]
    exact = sum(a == b for a, b in zip(written, wanted, strict=True)) / len(unseen)
    return {
        "d_dot": d_dot(name, d_key),
        "bleu": round(metric.corpus_score(written, [wanted]).score, 2),
        "exact": round(100 * exact, 2),
        "curve": curve,
    }


# --- The task -----------------------------------------------------------


class Pairs(NamedTuple):
    """Numbers in both languages.

    - `source`: English characters, `[numbers, source]`.
    - `mask`: which of them are real, not padding.
    - `target`: German characters, between `START` and `END`, and padded
      with `END`, `[numbers, time]`.
    """

    source: Tensor
    mask: Tensor
    target: Tensor

    @classmethod
    def of(cls, numbers: Iterable[int]) -> "Pairs":
        words = [(number_words(n), number_words(n, "german")) for n in numbers]
        source = pad_sequence(
            [ENGLISH.encode(english) for english, _ in words], True, padding_value=-1
        )
        target = pad_sequence(
            [GERMAN.encode(f"<{german}>") for _, german in words], True, END
        )
        return cls(source.clamp(min=0), source >= 0, target)

    def rows(self, rows: Tensor) -> "Pairs":
        return Pairs(self.source[rows], self.mask[rows], self.target[rows])


def train(model: EncoderDecoder, pairs: Pairs, point: Point) -> list[list[float]]:
    """Train on random batches, with a rate that rises and then falls to 0.

    - Returns the learning curve.
    """
    random = [part for part in model.modules() if isinstance(part, FAVOR)]

    def draw(_: int) -> Pairs:
        if point["map"] == "favor":
            for phi in random:
                phi.redraw()  # and not after training, as in the paper
        return pairs.rows(torch.randint(len(pairs.mask), (point["batch"],)))

    def loss(model: EncoderDecoder, batch: Pairs) -> Tensor:
        source, mask, target = batch
        before, wanted = target[:, :-1], target[:, 1:]
        real = before != END
        return F.cross_entropy(model(source, before, mask)[real], wanted[real])

    rise = partial(one_cycle, rise=0.3)
    return fitted(model, draw, loss, point["budget"], point["lr"], schedule=rise)


def translate(model: EncoderDecoder, pairs: Pairs) -> list[str]:
    """Translate, up to the length of the longest right answer."""
    most = pairs.target.shape[1] - 1
    tokens = model.generate(pairs.source, most, START, END, pairs.mask)
    return [GERMAN.decode(row).partition(">")[0] for row in tokens]


def character_bleu() -> Any:
    """sacrebleu's BLEU, of characters: a German number is one word."""
    # Not at the top of the file: listing experiments does not need it.
    try:
        from sacrebleu.metrics import BLEU
    except ModuleNotFoundError as error:
        if error.name not in (
            "sacrebleu",
            "sacrebleu.metrics",
        ):  # one that it needs itself
            raise
        raise ValueError(
            "cannot compute BLEU: sacrebleu is not installed; run "
            'pip install "fwlab[reproduce]"'
        ) from None
    return BLEU(tokenize="char")


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    """Every ordering of the published results; equal ones have none."""
    known = {model: bleu for model, bleu in PUBLISHED.items() if bleu is not None}
    best_first = sorted(known, key=known.__getitem__, reverse=True)
    sizes = "number words, keys of width 16, one layer"
    orders = [
        _order(points, a, b, f"{known[a]}, {known[b]} (Table 1, test)", sizes)
        for a, b in combinations(best_first, 2)
        if known[a] > known[b]
    ]
    fixed = [_order(points, each, ("favor", each[1])) for each in FIXED]
    return [_table_6(), *orders, *fixed]


def _table_6() -> Claim:
    """The feature maps themselves say how wide they are."""
    widths = {
        (kind, ratio): d_dot(map_name(kind, ratio, 64), 64)
        for kind in ("favor", "dpfp")
        for ratio in TABLE_6
    }
    return Claim(
        "features of Performer (m = 128, 192, 256) and DPFP (ν = 2, 3, 4), keys of width 64",
        f"{', '.join(map(str, TABLE_6.values()))} (Table 6)",
        ", ".join(
            " and ".join(str(widths[kind, ratio]) for kind in ("favor", "dpfp"))
            for ratio in TABLE_6
        ),
        all(d == TABLE_6[ratio] for (_, ratio), d in widths.items()),
    )


def _order(
    points: list[Point],
    better: Model,
    worse: Model,
    published: str = "",
    protocol: str = "",
) -> Claim:
    scores = [
        [p["bleu"] for p in select(points, map=kind, ratio=ratio)]
        for kind, ratio in (better, worse)
    ]
    text = f"BLEU: {label(better)} above {label(worse)}"
    return compared(text, published, scores, gt, spec=".1f", protocol=protocol)


def label(model: Model) -> str:
    kind, ratio = model
    if kind == "softmax":
        return "standard"
    if kind == "linear":
        return "Linear"
    name = f"{'DPFP' if kind == 'dpfp' else 'Performer'}-{ratio}x"
    return f"{name}, fixed" if model in FIXED else name


def draw(points: list[Point]) -> Figure:
    figure, (ours, theirs) = plots.panels(
        4.4, columns=2, sharey=True, width_ratios=[4, 3]
    )
    plots.rows(ours, _numbers(points, "bleu"), SERIES[0], "o", "BLEU")
    plots.rows(ours, _numbers(points, "exact"), SERIES[1], "s", "exact match")
    known = {row: x for row, x in enumerate(PUBLISHED.values()) if x is not None}
    plots.marks(
        theirs, known.values(), known, "x", markersize=7, markeredgewidth=1.6, color=INK
    )
    ours.set(xlabel="ours, %", xlim=(-3, 103), xticks=[0, 50, 100])
    theirs.set_xlabel("published\nBLEU", loc="right")
    theirs.set(xlim=(23.5, 28.5), xticks=[24, 26, 28])
    plots.legend(figure, ours, columns=2)
    return figure


def _numbers(points: list[Point], y: str) -> dict[str, list[float]]:
    """Group results by model, in the order of the paper."""
    return {
        label(model): [p[y] for p in select(points, map=model[0], ratio=model[1])]
        for model in [*PUBLISHED, *FIXED]
    }


EXPERIMENT = Experiment(
    name="translation",
    title="Translation without softmax, and how wide its features are",
    source="Schlag et al. 2021, Tables 1 and 6",
    cost="quick: 3 min of one core; full: 38 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP | {"schedule": "rises for 30 % of the steps, then falls"},
)
