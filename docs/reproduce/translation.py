"""Translate without softmax: Tables 1 and 6 of Schlag et al. 2021.

The text is number words instead of news: English to German, where the ones
come before the tens. Models read and write single characters.
"""

from functools import partial
from itertools import combinations

import torch
from frame import Claim, Numbers, Point, Points, main, order
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fwlab import plots
from fwlab.data import Characters, number_words
from fwlab.feature_maps import DPFP, ELU1, FAVOR, FeatureMap
from fwlab.fit import SETUP, fit, one_cycle
from fwlab.models import EncoderDecoder
from fwlab.plots import INK, SERIES

TITLE = "Translation without softmax, and how wide its features are"
SOURCE = "Schlag et al. 2021, Tables 1 and 6"
COST = "quick: 3 min of one core; full: 38 min"

#: Name and published BLEU by feature map and features per key entry (0 = softmax).
#: The BLEU is on the test set of WMT14. Table 1 has no DPFP-3.
MODELS: dict[tuple[str, int], tuple[str, float | None]] = {
    ("softmax", 0): ("standard", 27.7),
    ("linear", 1): ("Linear", 26.8),
    ("favor", 1): ("Performer-1x", 24.4),
    ("favor", 4): ("Performer-4x", 25.3),
    ("favor", 8): ("Performer-8x", 27.7),
    ("dpfp", 4): ("DPFP-4x", 26.9),
    ("dpfp", 6): ("DPFP-6x", None),
    ("dpfp", 8): ("DPFP-8x", 27.1),
    # Our own Performers, whose random features are sampled only once.
    ("favor-fixed", 1): ("Performer-1x, fixed", None),
    ("favor-fixed", 8): ("Performer-8x, fixed", None),
}
#: Table 6: features of a key of width 64, by features per key entry.
TABLE_6 = {4: 256, 6: 384, 8: 512}

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENGLISH = Characters(f"{LETTERS} -")
#: Characters of German texts. "<" and ">" mark the start and end of a number.
GERMAN = Characters(f"{LETTERS}äöüß<>")
START, END = GERMAN.encode("<>").tolist()

#: Number of examples that are held out of training.
TEST = 300
QUICK = {
    **{"layers": 1, "heads": 1, "d_key": 16, "limit": 1000, "train": 600},
    **{"batch": 32, "lr": 1e-2, "budget": 400},
}
FULL = QUICK | {"limit": 1_000_000, "train": 3000, "budget": 3000}


def points(quick: bool) -> list[Point]:
    """List settings by seed, so that partial results contain the paper's models."""
    return [
        {"map": kind, "ratio": ratio, **(QUICK if quick else FULL), "seed": seed}
        for ours in (False, True)
        for seed in (1, 2, 3)
        for kind, ratio in MODELS
        if ours == (kind == "favor-fixed")
    ]


def feature_map(kind: str, ratio: int, d_key: int) -> FeatureMap | None:
    """Return a feature map with `ratio * d_key` features, or None for softmax."""
    if kind in ("favor", "favor-fixed"):  # FAVOR+ has two features per direction.
        return FAVOR(d_key, ratio * d_key // 2, stabilize=True)
    if kind == "dpfp":
        return DPFP(ratio // 2)
    return ELU1() if kind == "linear" else None


def run(point: Point) -> Point:
    # Import before the training, since the extra "reproduce" may be missing.
    from sacrebleu.metrics import BLEU

    torch.manual_seed(point["seed"])
    count, heads, d_key = point["train"], point["heads"], point["d_key"]
    numbers = torch.randperm(point["limit"])[: count + TEST].tolist()
    phi = feature_map(point["map"], point["ratio"], d_key)
    sizes = len(ENGLISH), len(GERMAN), point["layers"], heads, heads * d_key
    model = EncoderDecoder(*sizes, attention=phi or "softmax", rule="sum")
    curve = train(model, numbers[:count], point)
    unseen = numbers[count:]
    written = translate(model, unseen)
    wanted = [number_words(number, "german") for number in unseen]
    exact = sum(a == b for a, b in zip(written, wanted, strict=True)) / len(unseen)
    # Compute BLEU on characters, since a German number is one word.
    bleu = BLEU(tokenize="char").corpus_score(written, [wanted]).score
    return {
        "d_dot": phi and phi.width(d_key),
        "bleu": round(bleu, 2),
        "exact": round(100 * exact, 2),
        "curve": curve,
    }


# --- The task -----------------------------------------------------------


def write(numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers as English and as German characters.

    - Returns English characters, `[numbers, source]`; a mask, which is False for
      padding; and German characters, between `START` and `END`, and padded with
      `END`, `[numbers, time]`.
    """
    english = [ENGLISH.encode(number_words(n)) for n in numbers]
    german = [GERMAN.encode(f"<{number_words(n, 'german')}>") for n in numbers]
    source = pad_sequence(english, True, padding_value=-1)
    return source.clamp(min=0), source >= 0, pad_sequence(german, True, END)


def train(model: EncoderDecoder, numbers: list[int], point: Point) -> list:
    """Train on random batches, with a learning rate that rises and then falls to 0.

    - Returns the learning curve.
    """
    pairs = write(numbers)

    def draw(_: int) -> tuple[Tensor, ...]:
        for part in model.modules():
            if isinstance(part, FAVOR) and point["map"] == "favor":
                part.redraw()  # As in the paper, redraw only during training.
        rows = torch.randint(len(pairs[0]), (point["batch"],))
        return tuple(part[rows] for part in pairs)

    def loss(model: EncoderDecoder, batch: tuple[Tensor, ...]) -> Tensor:
        source, mask, target = batch
        before, wanted = target[:, :-1], target[:, 1:]
        real = before != END
        return F.cross_entropy(model(source, before, mask)[real], wanted[real])

    rise = partial(one_cycle, rise=0.3)
    return fit(model, draw, loss, point["budget"], point["lr"], schedule=rise).curve


def translate(model: EncoderDecoder, numbers: list[int]) -> list[str]:
    """Translate numbers to German, up to the length of the longest correct answer."""
    source, mask, target = write(numbers)
    tokens = model.generate(source, target.shape[1] - 1, START, END, mask)
    return [GERMAN.decode(row).partition(">")[0] for row in tokens]


# --- Claims and figures -------------------------------------------------


def claims(points: Points):
    """Yield a claim for each pair of published results that are not equal."""
    # Compare the widths of our feature maps with Table 6.
    widths = {
        ratio: [feature_map(kind, ratio, 64).width(64) for kind in ("favor", "dpfp")]
        for ratio in TABLE_6
    }
    yield Claim(
        "features of Performer (m = 128, 192, 256) and DPFP (ν = 2, 3, 4), keys of "
        "width 64",
        f"{', '.join(map(str, TABLE_6.values()))} (Table 6)",
        ", ".join(" and ".join(map(str, both)) for both in widths.values()),
        all({*widths[ratio]} == {d} for ratio, d in TABLE_6.items()),
    )
    bleu = by_model(points, "bleu")

    def above(
        better: str, worse: str, published: str = "", protocol: str = ""
    ) -> Claim:
        what = f"BLEU: {better} above {worse}"
        sides = [bleu[better], bleu[worse]]
        return order(what, sides, published, sign=">", spec=".1f", protocol=protocol)

    known = {name: x for name, x in MODELS.values() if x is not None}
    best_first = sorted(known, key=known.__getitem__, reverse=True)
    for a, b in combinations(best_first, 2):
        if known[a] > known[b]:
            published = f"{known[a]}, {known[b]} (Table 1, test)"
            protocol = "number words, keys of width 16, one layer"
            if any(name.startswith("Performer") for name in (a, b)):
                protocol += ", FAVOR+ redrawn in training, not in evaluation"
            yield above(a, b, published, protocol)
    for name in ("Performer-1x", "Performer-8x"):
        yield above(f"{name}, fixed", name)


def by_model(points: Points, y: str) -> dict[str, Numbers]:
    """Return the results in column `y` by model, in the order of the paper."""
    return {
        name: points(map=kind, ratio=ratio)[y]
        for (kind, ratio), (name, _) in MODELS.items()
    }


def draw(points: Points):
    figure, (ours, theirs) = plots.panels(
        4.4, columns=2, sharey=True, width_ratios=[4, 3]
    )
    plots.rows(ours, by_model(points, "bleu"), SERIES[0], "o", "BLEU")
    plots.rows(ours, by_model(points, "exact"), SERIES[1], "s", "exact match")
    known = {row: x for row, (_, x) in enumerate(MODELS.values()) if x is not None}
    looks = {"markersize": 7, "markeredgewidth": 1.6, "color": INK}
    plots.marks(theirs, known.values(), known, "x", **looks)
    ours.set(xlabel="ours, %", xlim=(-3, 103), xticks=[0, 50, 100])
    theirs.set_xlabel("published\nBLEU", loc="right")
    theirs.set(xlim=(23.5, 28.5), xticks=[24, 26, 28])
    plots.legend(figure, ours, columns=2)
    return figure


setup = SETUP | {"schedule": "rises for 30 % of the steps, then falls"}

if __name__ == "__main__":
    main(__file__)
