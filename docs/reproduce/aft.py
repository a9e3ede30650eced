"""Compare the Attention Free Transformer with a transformer of equal size.

Images of digits pixel by pixel, text character by character, and one
single layer, whose memory and speed are measured as sequences grow.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from hashlib import sha256
from itertools import combinations
from math import inf, log
from statistics import median
from typing import Any, NamedTuple

import torch
from frame import Claim, Point, Points, main, order
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from text import ALONE as CONVOLUTION
from text import CONVOLVED, ConvolutionAlone, ConvolvedAttention, load, recorded
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops, plots
from fwlab.bench.measure import in_turns, peak_mib
from fwlab.data import Characters
from fwlab.feature_maps import ELU1
from fwlab.fit import SETUP, fit
from fwlab.layers import AFTConv, AFTFull, AFTLocal, AFTSimple, SoftmaxAttention
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED, WRONG

TITLE = "AFT against a transformer of equal size"
SOURCE = "Zhai et al. 2021, Tables 1 to 6"
COST = "quick: 4 min of one core; full: 100 min"

#: Side length of an image in pixels, and number of grey levels.
SIDE, GREYS = 8, 17
PIXELS = SIDE * SIDE
#: Window size of AFT-local and AFT-conv, and rank d' of factorised biases (Eq. 7).
WINDOW, FACTOR = 32, 16
HEADS = 4
#: Tokens per optimiser step.
TOKENS = 1024
#: Optimiser steps between evaluations, and maximum evaluations without improvement.
EVERY, PATIENCE = 100, 5
#: Batch size and width of the single layer that is measured.
BATCH, WIDTH = 4, 128
SOFTMAX, DENSE, ROTARY = "softmax", "softmax, dense", "softmax, rotary"
#: Name of the training text, for `load`.
CORPUS = "shakespeare"
#: Sequence lengths of texts. All layers are compared at the last length.
LENGTHS = (64, 128, 256, 512)


class AFTConvImage(AFTConv):
    """Apply causal AFT-conv to the pixels of an image in raster order.

    Biases depend on the rows and columns between two pixels. A token is
    the pixel before the one that it predicts. The start token counts as
    the last pixel of a row above the image. `layers.AFTConv2d` is not
    causal.
    """

    columns = 2 * SIDE - 1
    entry: Tensor

    def __init__(self, d_model: int, heads: int):
        super().__init__(d_model, heads, window=(SIDE + 1) * self.columns)
        predicted = torch.arange(PIXELS)[:, None]
        seen = torch.arange(PIXELS) - 1
        # Later rows are masked, so their entries do not matter.
        up = (predicted // SIDE - seen // SIDE).clamp(min=0)
        across = predicted % SIDE - seen % SIDE + SIDE - 1
        self.register_buffer("entry", up * self.columns + across, persistent=False)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        T = x.shape[1]
        w = self.kernel()[:, self.entry[:T, :T]]
        q, k, v = (
            project(x).chunk(self.heads, -1)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        y: Any = [ops.aft_full(*head) for head in zip(q, k, v, w, strict=True)]
        return self.to_out(torch.cat(y, -1))


class Dense(SoftmaxAttention):
    """Compute softmax attention with the full matrix of scores."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(x, implementation="naive")


#: Functions that build each layer from its width `d` and sequence length `T`.
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    SOFTMAX: lambda d, T: SoftmaxAttention(d, HEADS),
    "aft-simple": lambda d, T: AFTSimple(d),
    "aft-full": lambda d, T: AFTFull(d, T, FACTOR),
    "aft-local": lambda d, T: AFTLocal(d, T, min(WINDOW, T), FACTOR),
    "aft-conv": lambda d, T: AFTConv(d, HEADS, min(WINDOW, T)),
    "aft-conv-2d": lambda d, T: AFTConvImage(d, HEADS),
    DENSE: lambda d, T: Dense(d, HEADS),
    ROTARY: lambda d, T: SoftmaxAttention(d, HEADS, rope=1.0),
    CONVOLVED: lambda d, T: ConvolvedAttention(d, HEADS),
    CONVOLUTION: lambda d, T: ConvolutionAlone(d, HEADS, ELU1(), "sum", conv_size=4),
}
#: Names of AFT-local by window size, and of the layer without biases (Table 5).
WINDOWS = {s: f"aft-local, {s}" for s in (1, 2, 4, 8, 32, 64, 128)}
NO_WINDOW = {0: "aft-simple"}
#: Name of AFT-full with one bias per pair of positions, not factors (Table 3).
WHOLE = "aft-full, whole"


def local(window: int) -> Callable[[int, int], nn.Module]:
    return lambda d, T: AFTLocal(d, T, window, FACTOR)


ABLATED: dict[str, Callable[[int, int], nn.Module]] = {
    WHOLE: lambda d, T: AFTFull(d, T),
    **{name: local(window) for window, name in WINDOWS.items()},
}
#: Layers without position embeddings, which are trained only on text.
WITHOUT_POSITIONS = (ROTARY, CONVOLVED, CONVOLUTION)
#: Layers by use: trained on images, measured as single layers, trained on text.
OF_IMAGES = [name for name in LAYERS if name not in (DENSE, *WITHOUT_POSITIONS)]
OF_LENGTHS = [name for name in OF_IMAGES if name != "aft-conv-2d"] + [DENSE]
OF_TEXT = [name for name in LAYERS if name not in (DENSE, "aft-conv-2d")]


def points(quick: bool) -> list[Point]:
    lengths = (128, 256, 512, 1024) if quick else (128, 256, 512, 1024, 2048, 4096)
    alone = [
        ("layer", name, T, WIDTH, 1, 0, 0.0)
        for T in lengths
        for name in OF_LENGTHS
        if name != DENSE or T <= 2048
    ]
    model = (32, 2, 800, 1e-2) if quick else (64, 4, 1500, 3e-3)
    images = [("digits", name, PIXELS, *model) for name in OF_IMAGES]
    whole = [] if quick else [("digits", WHOLE, PIXELS, *model)]
    windows = [
        # The learning rate at which AFT-local learns text best, see rates.md.
        ("windows", name, 128, *model[:2], 800, 3e-2)
        for name in (NO_WINDOW | WINDOWS).values()
        if not quick
    ]
    texts = [
        ("text", name, T, *model)
        for T in LENGTHS
        for name in OF_TEXT
        # The quick version is too short to learn text.
        if not quick and (name == "aft-local" or LENGTHS[-1] == T)
    ]
    names = ("task", "mixer", "T", "d_model", "layers", "budget", "lr")
    return [
        # The quick version trains on no text, so its runs have no `corpus`.
        dict(zip(names, each, strict=True), seed=seed)
        | ({} if quick else {"corpus": CORPUS if task in (texts, windows) else ""})
        for task in (alone, images, texts, whole, windows)
        for seed in (1, 2, 3)
        for each in task
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    empty: Point = dict.fromkeys(
        ("parameters", "loss", "train", "steps", "mib", "milliseconds", "fused")
    )
    mixer, T, d_model = point["mixer"], point["T"], point["d_model"]
    if point["task"] == "layer":
        return empty | measure(mixer, T, d_model)
    data = digits() if point["task"] == "digits" else text(T)
    model = build(mixer, data.symbols, T, d_model, point["layers"])
    parameters = sum(p.numel() for p in model.parameters())
    trained = train(model, data, point["budget"], point["lr"])
    read = {} if point["task"] == "digits" else recorded(characters()[2])
    return empty | {"parameters": parameters, **trained, **read}


# --- One layer ----------------------------------------------------------


def measure(mixer: str, T: int, d_model: int) -> Point:
    """Measure memory and time of a forward and backward pass of one layer.

    Time is measured in turns with PyTorch's softmax attention (`fused`),
    so that other work on the machine slows down both.
    """
    own, fused = (passes(name, T, d_model) for name in (mixer, SOFTMAX))
    times = in_turns({"milliseconds": own, "fused": fused}, rounds=3, turn=0.02)
    return {
        "mib": peak_mib(own),
        **{name: round(1e3 * median(each), 3) for name, each in times.items()},
    }


def passes(mixer: str, T: int, d_model: int) -> Callable[[], object]:
    """Return a function that runs a forward and a backward pass of one layer."""
    layer = LAYERS[mixer](d_model, T)
    x = torch.randn(BATCH, T, d_model, requires_grad=True)
    inputs, dy = [x, *layer.parameters()], torch.randn(BATCH, T, d_model)
    return lambda: torch.autograd.grad(layer(x), inputs, dy)


# --- Training -----------------------------------------------------------


class Data(NamedTuple):
    """Hold token sequences `[count, T + 1]` whose last token is only a target.

    - `symbols`: number of distinct tokens.
    - `draw`: a function that draws this many training sequences.
    - `seen`: a part of the training sequences, for evaluation.
    - `check`, `test`: sequences for early stopping, and for the final evaluation.
    """

    symbols: int
    draw: Callable[[int], Tensor]
    seen: Tensor
    check: Tensor
    test: Tensor


@cache
def digits() -> Data:
    """Return scikit-learn's digits as sequences of pixels after a start token.

    The split into 1297, 200 and 300 images is the same for all seeds.
    """
    from sklearn.datasets import load_digits  # Needs fwlab[reproduce].

    images = torch.from_numpy(load_digits().images).long().flatten(1)
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    tokens = F.pad(images, (1, 0), value=GREYS)[mixed]
    train, check, test = tokens.split([len(tokens) - 500, 200, 300])

    def draw(count: int) -> Tensor:
        return train[torch.randint(len(train), (count,))]

    return Data(GREYS + 1, draw, train[:200], check, test)


@cache
def characters() -> tuple[int, Tensor, str]:
    """Return the vocabulary size, the encoded text, and the SHA-256 of the text."""
    content = load(CORPUS)
    vocabulary = Characters(content)
    digest = sha256(content.encode()).hexdigest()
    return len(vocabulary), vocabulary.encode(content), digest


def text(T: int) -> Data:
    """Return windows of `T` characters: 90 % to train, 5 % to check, 5 % to test."""
    symbols, tokens, _ = characters()
    part = len(tokens) // 20
    train, check, test = tokens.split([len(tokens) - 2 * part, part, part])
    window = torch.arange(T + 1)

    def cut(tokens: Tensor) -> Tensor:
        """Cut 16,384 tokens into adjacent windows."""
        return tokens[torch.arange(16384 // T)[:, None] * T + window]

    def draw(count: int) -> Tensor:
        return train[torch.randint(len(train) - T, (count, 1)) + window]

    return Data(symbols, draw, cut(train), cut(check), cut(test))


def build(mixer: str, symbols: int, T: int, d_model: int, layers: int) -> LanguageModel:
    """Build a language model with one kind of layer, as large as with any other kind.

    Layers with fewer biases have wider MLPs. All models have learned
    positions, as in the paper, except `WITHOUT_POSITIONS`, and the
    initial weights of the softmax model, which has the same projections.
    """
    new = (LAYERS | ABLATED)[mixer]
    *sizes, own = (
        sum(p.numel() for p in layer(d_model, T).parameters())
        for layer in (*LAYERS.values(), new)
    )
    d_ff = 4 * d_model + (max(sizes) - own) // (2 * d_model)
    model = LanguageModel(symbols, SOFTMAX, layers, HEADS, d_model, T, d_ff)
    if mixer in WITHOUT_POSITIONS:
        model.positions = None
    for block in model.blocks:
        layer = new(d_model, T)
        layer.load_state_dict(layer.state_dict() | block.mixer.state_dict())
        block.mixer = layer
    return model


def bits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of `tokens` in bits per token."""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss / log(2)


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor) -> float:
    """Return the mean loss in bits per token of many sequences, in small batches."""
    parts = tokens.split(max(1, TOKENS // tokens.shape[1]))
    return sum(bits(model, part).item() * len(part) for part in parts) / len(tokens)


def train(model: nn.Module, data: Data, budget: int, lr: float) -> Point:
    """Train until the loss on `data.check` no longer falls.

    - `budget`: maximum number of optimiser steps; `lr`: learning rate.
    - Returns the results at the lowest such loss: bits per token of `test`
      (`loss`) and of `seen` (`train`), and the optimiser step; and at most 20
      pairs of a step and the loss on `check`.
    """
    best, reached, weights = inf, 0, model.state_dict()

    def check(step: int) -> float:
        nonlocal best, reached, weights
        now = evaluate(model, data.check)
        if now < best:
            best, reached = now, step
            weights = {name: x.clone() for name, x in model.state_dict().items()}
        return round(now, 4)

    def stop(curve: list[tuple[int, float]]) -> str:
        waited = curve[-1][0] - reached
        return "no longer falls" if waited == PATIENCE * EVERY else ""

    count = TOKENS // (data.test.shape[1] - 1)
    fitted = fit(
        *(model, lambda _: data.draw(count), bits, budget, lr),
        optimizer=partial(torch.optim.AdamW, weight_decay=0.1),
        every=EVERY,
        evaluate=check,
        stop=stop,
    )
    model.load_state_dict(weights)
    loss, seen = (round(evaluate(model, x), 4) for x in (data.test, data.seen))
    return {"loss": loss, "train": seen, "steps": reached, "curve": fitted.short}


def setup(point: Point) -> Point:
    if point["task"] == "layer":
        return {"batch": BATCH, "heads": HEADS}
    return {
        **SETUP,
        "optimiser": "AdamW, weight decay 0.1, gradients clipped to 1",
        "batch": TOKENS // point["T"],
        "heads": HEADS,
    }


# --- Claims and figures -------------------------------------------------

#: Published results of models with 24 layers of width 256 (Tables 2 and 4).
#: Test losses are in bits per sub-pixel of CIFAR-10 and per character of enwik8.
#: The last row has the GB of memory for training on CIFAR-10.
PUBLISHED = {
    "digits": {"softmax": 2.86, "aft-local": 2.74, "aft-simple": 2.89},
    "text": {"softmax": 1.130, "aft-local": 1.154, "aft-simple": 1.209},
    "layer": {DENSE: 30.4, "aft-local": 12.8, "aft-simple": 9.5},
}
#: By task: name in claims, column, format, table, and how our protocol differs.
TASKS = {
    "digits": ("digits", "loss", ".3f", "Table 2", "8 × 8 pixels, small models"),
    "text": (
        *("text", "loss", ".3f", "Table 4"),
        "Shakespeare, windows of 512, small models",
    ),
    "layer": ("memory of one layer", "mib", ".1f", "GB, Table 2", "one layer"),
}
#: 0.95 times a bigram model's loss, in bits, on the last twentieth of the text.
TRIVIAL = {"text": 0.95 * 3.60}
#: Layers that the paper lacks. Our claims compare them with softmax and AFT-local.
OURS = {"digits": ["aft-conv-2d"], "text": [*WITHOUT_POSITIONS], "layer": []}
#: Name, colour, marker and line style of each layer in figures.
LOOKS = {
    SOFTMAX: ("transformer", OTHER, "D", "-"),
    DENSE: ("dense softmax", OTHER, "d", ":"),
    "aft-simple": ("AFT-simple", INK, "v", "-"),
    "aft-full": ("AFT-full", SERIES[0], "^", "--"),
    "aft-local": ("AFT-local", SERIES[1], "o", "-"),
    "aft-conv": ("AFT-conv", SERIES[2], "s", "-."),
    "aft-conv-2d": ("AFT-conv 2-D", WRONG, "P", ""),
    ROTARY: ("transformer, rotary positions", OTHER, "s", "--"),
    CONVOLVED: (CONVOLVED, FAST, "s", ""),
    CONVOLUTION: (CONVOLUTION, TRAINED, "P", ""),
}
NAMES = {name: title for name, (title, *_) in LOOKS.items()}
#: Names of the layers in measurements of one layer.
ALONE = {**NAMES, SOFTMAX: "fused softmax"}


def claims(points: Points) -> Iterator[Claim]:
    texts, alone = points(task="text"), points(task="layer")
    compared = {
        "digits": points(task="digits"),
        "text": texts(T=LENGTHS[-1]),
        "layer": alone(T=max(alone(mixer=DENSE)["T"], default=0)),
    }
    for task, (what, y, spec, table, protocol) in TASKS.items():
        known, some = PUBLISHED[task], compared[task]
        # Claim the order of every published pair, and of pairs with a layer in `OURS`.
        pairs = [*combinations(sorted(known, key=known.__getitem__), 2)]
        pairs += [(own, high) for own in OURS[task] for high in (SOFTMAX, "aft-local")]
        for low, high in pairs:
            listed = low in known
            yield order(
                f"{what}: {NAMES[low]} below {NAMES[high]}",
                [some(mixer=name)[y] for name in (low, high)],
                f"{known[low]:g}, {known[high]:g} ({table})" if listed else "",
                spec=spec,
                protocol=protocol if listed else "",
                trivial=TRIVIAL.get(task),
            )
        if task == "text":
            yield order(
                "text: longer windows lower the loss of AFT-local, "
                "T = 512, 256, 128, 64",
                [texts(mixer="aft-local", T=T)["loss"] for T in LENGTHS[::-1]],
                "1.134, 1.135, 1.154 (Table 6, T = 4096, 2048, 1024)",
                protocol="Shakespeare, small models, which grow with the window",
                trivial=TRIVIAL[task],
            )
    for name in OF_LENGTHS:
        yield memory(name, alone(mixer=name))
    if points(task="windows"):
        yield from ablations(points)


def ablations(points: Points) -> Iterator[Claim]:
    """Yield the claims of Tables 3 and 5 on factors and windows of position biases."""
    yield order(
        "digits: biases of 16 factors below whole ones, AFT-full",
        [points(task="digits", mixer=name)["loss"] for name in ("aft-full", WHOLE)],
        "2.74, 2.84 (Table 3)",
        protocol=TASKS["digits"][-1],
    )
    ends = {
        s: points(task="windows", mixer=name)["loss"]
        for s, name in (NO_WINDOW | WINDOWS).items()
    }
    for text, sizes, published in (
        (
            "up to 32 lower it",
            (32, 8, 4, 2, 1, 0),
            "1.154 < 1.162 < 1.165 < 1.176 < 1.205 < 1.209",
        ),
        ("above 32 raise it", (32, 64, 128), "1.154 < 1.160 < 1.173"),
    ):
        listed = ", ".join(map(str, sizes))
        yield order(
            f"text: the loss of AFT-local by its window, s = {listed}: windows {text}",
            [ends[s] for s in sizes],
            f"{published} (Table 5)",
            protocol="Shakespeare, T = 128 instead of 1024, small models",
            trivial=TRIVIAL["text"],
        )


def memory(name: str, points: Points) -> Claim:
    """Return a claim on how memory grows from T / 2 to T, for the largest T."""
    text = f"one layer, {ALONE[name]}: memory grows with T"
    source = "" if name == SOFTMAX else "Td (Table 1)"
    if name == DENSE:
        text, source = f"{text}²", "T² + Td (Table 1)"
    elif name == "aft-full":
        text = f"{text}, biases not counted"
    mib = plots.medians(points, "T", "mib")
    T = max(mib, default=0)
    if T // 2 not in mib:
        return Claim(text, source, "–", None)
    growth = mib[T] / mib[T // 2]
    found = f"× {growth:.2f} where T doubles, up to {T}"
    if name == "aft-full":
        # Table 1 does not count the biases and their gradient.
        rest = {n: mib[n] - 2 * 4 * n * n / 2**20 for n in (T, T // 2)}
        growth = rest[T] / rest[T // 2]
        found = f"× {growth:.2f}; with biases {found}"
    return Claim(text, source, found, growth > 3 if name == DENSE else growth < 2.2)


def draw(points: Points) -> Figure:
    texts = points(task="text")
    alone = Points(
        {**p, "share": p["milliseconds"] / p["fused"]} for p in points(task="layer")
    )
    panels = [
        (alone, "mib", "memory, MiB"),
        (alone, "share", "time / fused softmax"),
    ]
    if texts:
        panels.insert(0, (texts, "loss", "bits per character"))
    windows = Points(
        {**p, "window": s}
        for s, name in (NO_WINDOW | WINDOWS).items()
        for p in points(task="windows", mixer=name)
    )
    height = 2.6 + 2.8 * len(panels)
    count = len(panels) + 1 + bool(windows)
    figure, (upper, *others) = plots.panels(height + 2.4 * bool(windows), count)
    difference(upper, points(task="digits"))
    if windows:
        ax = others.pop()
        plots.series(ax, windows, SERIES[1], "o", "-", "", "loss", "window")
        ax.set_xscale("symlog", base=2, linthresh=1)
        ax.set_xticks([*NO_WINDOW, *WINDOWS], [str(s) for s in NO_WINDOW | WINDOWS])
        ax.set(xlabel="window of AFT-local, T = 128", ylabel="bits per character")
    for ax, (shown, y, label) in zip(others, panels, strict=True):
        names = NAMES if shown is texts else ALONE
        for name, (_, *look) in LOOKS.items():
            plots.series(ax, shown(mixer=name), *look, names[name], y, "T")
        lengths = sorted({*shown["T"]})
        ax.set_xscale("log", base=2)
        if y != "loss":
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xticks(lengths, [str(T) for T in lengths])
        ax.set(xlabel="$T$", ylabel=label)
    handles = {
        str(line.get_label()).removesuffix(" positions"): line
        for ax in (*others, upper)
        for line in ax.get_lines()
        if not str(line.get_label()).startswith("_")
    }
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=2)
    return figure


def difference(ax: Axes, points: Points) -> None:
    """Draw our and published differences from the transformer, in bits per pixel."""
    zero = plots.medians(points, "mixer", "loss").get(SOFTMAX)
    known, names = PUBLISHED["digits"], [NAMES[name] for name in OF_IMAGES]
    for row, name in enumerate(OF_IMAGES):
        _, color, marker, _ = LOOKS[name]
        if zero is not None:
            extra = [loss - zero for loss in points(mixer=name)["loss"]]
            own = dict.fromkeys(names, ()) | {NAMES[name]: extra}
            plots.rows(ax, own, color, marker)
        if name in known:
            off = known[name] - known[SOFTMAX]
            label = None if row else "published, CIFAR-10"
            plots.published(ax, {off: row}, INK, label)
    ax.axvline(0, color=INK, linewidth=1)
    ax.locator_params(axis="x", nbins=6)
    ax.set_xlabel("digits: extra bits per pixel")


if __name__ == "__main__":
    main(__file__)
