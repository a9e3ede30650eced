"""The Attention Free Transformer against a transformer of equal size.

Images of digits pixel by pixel, text character by character, and one
layer alone, whose memory and speed are measured as sequences grow.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from math import inf, log
from operator import lt
from statistics import median
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops, plots
from fwlab.bench.measure import in_turns, peak_mib
from fwlab.data import Characters, CorpusError, corpus
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    listed,
    numbers_claim,
    select,
)
from fwlab.experiments.fit import SETUP, fit
from fwlab.layers import AFTConv, AFTFull, AFTLocal, AFTSimple, SoftmaxAttention
from fwlab.models import LanguageModel
from fwlab.plots import INK, OTHER, SERIES, WRONG

#: Rows and columns of an image; a pixel is a grey from 0 to 16.
SIDE, GREYS = 8, 17
PIXELS = SIDE * SIDE
#: Window of AFT-local and AFT-conv, and d' of factorised biases (Eq. 7).
WINDOW, FACTOR = 32, 16
HEADS = 4
#: Tokens per optimiser step.
TOKENS = 1024
#: Optimiser steps between evaluations; training ends after this many of
#: them without a better one.
EVERY, PATIENCE = 100, 5
#: Sequences and width of the layer that is measured alone.
BATCH, WIDTH = 4, 128
SOFTMAX, DENSE = "softmax", "softmax, dense"


class AFTConvImage(AFTConv):
    """AFT-conv for the pixels of an image, one after the other.

    Biases depend on the rows and columns between two pixels. A token is
    the pixel before the one that it predicts; the start token counts as
    the last pixel of a row above the image. `layers.AFTConv2d` is not
    causal.
    """

    columns = 2 * SIDE - 1
    entry: Tensor

    def __init__(self, d_model: int, heads: int):
        super().__init__(d_model, heads, window=(SIDE + 1) * self.columns)
        predicted = torch.arange(PIXELS)[:, None]
        seen = torch.arange(PIXELS) - 1
        # Later rows are not seen, so their entry does not matter.
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
    """Softmax attention that computes the matrix of all pairs of steps."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(x, implementation="naive")


#: The layers, of a width and a length.
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    SOFTMAX: lambda d, T: SoftmaxAttention(d, HEADS),
    "aft-simple": lambda d, T: AFTSimple(d),
    "aft-full": lambda d, T: AFTFull(d, T, FACTOR),
    "aft-local": lambda d, T: AFTLocal(d, T, min(WINDOW, T), FACTOR),
    "aft-conv": lambda d, T: AFTConv(d, HEADS, min(WINDOW, T)),
    "aft-conv-2d": lambda d, T: AFTConvImage(d, HEADS),
    DENSE: lambda d, T: Dense(d, HEADS),
}
#: Layers that are trained on images, on text, and that are measured alone.
OF_IMAGES = [name for name in LAYERS if name != DENSE]
OF_TEXT = [name for name in OF_IMAGES if name != "aft-conv-2d"]
OF_LENGTHS = [*OF_TEXT, DENSE]


def points(quick: bool) -> list[Point]:
    lengths = (128, 256, 512, 1024) if quick else (128, 256, 512, 1024, 2048, 4096)
    alone = [
        ("layer", name, T, WIDTH, 1, 0, 0.0)
        for T in lengths
        for name in OF_LENGTHS
        if name != DENSE or T <= 2048
    ]
    model = (32, 2, 800, 1e-2) if quick else (64, 4, 4000, 3e-3)
    images = [("digits", name, PIXELS, *model) for name in OF_IMAGES]
    texts = [
        ("text", name, T, *model)
        for T in (64, 128, 256, 512)
        for name in OF_TEXT
        if not quick  # a few seconds teach no text
    ]
    names = ("task", "mixer", "T", "d_model", "layers", "budget", "lr")
    return [
        dict(zip(names, each, strict=True), seed=seed)
        for task in (alone, images, texts)
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
    return empty | {"parameters": parameters, **trained}


# --- One layer ----------------------------------------------------------


def measure(mixer: str, T: int, d_model: int) -> Point:
    """Forward and backward pass of one layer: memory and time.

    Time is measured in turns with PyTorch's softmax attention (`fused`),
    so that other work on the machine slows down both.
    """
    own, fused = (_pass(name, T, d_model) for name in (mixer, SOFTMAX))
    times = in_turns({"milliseconds": own, "fused": fused}, rounds=3, turn=0.02)
    return {
        "mib": peak_mib(own),
        **{name: round(1e3 * median(each), 3) for name, each in times.items()},
    }


def _pass(mixer: str, T: int, d_model: int) -> Callable[[], object]:
    layer = LAYERS[mixer](d_model, T)
    x = torch.randn(BATCH, T, d_model, requires_grad=True)
    inputs, dy = [x, *layer.parameters()], torch.randn(BATCH, T, d_model)
    return lambda: torch.autograd.grad(layer(x), inputs, dy)


# --- Training -----------------------------------------------------------


class Data(NamedTuple):
    """Sequences of tokens: `[count, T + 1]`, the last one is predicted only.

    - `symbols`: number of different tokens.
    - `draw`: training sequences, this many.
    - `seen`: some of the training sequences, to evaluate.
    - `check`, `test`: sequences to choose when training ends, and others.
    """

    symbols: int
    draw: Callable[[int], Tensor]
    seen: Tensor
    check: Tensor
    test: Tensor


@cache
def digits() -> Data:
    """scikit-learn's digits row by row, after a start token.

    The split into 1297, 200 and 300 images is the same for all seeds.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise CorpusError(
            'the digits need the package scikit-learn: pip install "fwlab[reproduce]"'
        ) from None
    images = torch.from_numpy(load_digits().images).long().flatten(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    tokens = F.pad(images, (1, 0), value=GREYS)[order]
    train, check, test = tokens.split([len(tokens) - 500, 200, 300])
    return Data(
        GREYS + 1,
        lambda count: train[torch.randint(len(train), (count,))],
        train[:200],
        check,
        test,
    )


@cache
def _characters() -> tuple[int, Tensor]:
    """Number of different characters, and the text."""
    content = corpus()
    characters = Characters(content)
    return len(characters), characters.encode(content)


def text(T: int) -> Data:
    """Windows of a text: 90 % to train, 5 % to check, 5 % to test."""
    symbols, tokens = _characters()
    part = len(tokens) // 20
    train, check, test = tokens.split([len(tokens) - 2 * part, part, part])
    window = torch.arange(T + 1)

    def cut(tokens: Tensor) -> Tensor:
        """Windows side by side: as many tokens for every T."""
        return tokens[torch.arange(16384 // T)[:, None] * T + window]

    def draw(count: int) -> Tensor:
        return train[torch.randint(len(train) - T, (count, 1)) + window]

    return Data(symbols, draw, cut(train), cut(check), cut(test))


def build(mixer: str, symbols: int, T: int, d_model: int, layers: int) -> LanguageModel:
    """A model with this layer, and as many parameters as all others.

    Layers with fewer biases have wider MLPs. All models have learned
    positions, as in the paper, and the initial weights of the softmax
    model, which has the same projections.
    """
    sizes = {
        name: sum(p.numel() for p in LAYERS[name](d_model, T).parameters())
        for name in LAYERS
    }
    d_ff = 4 * d_model + (max(sizes.values()) - sizes[mixer]) // (2 * d_model)
    model = LanguageModel(symbols, SOFTMAX, layers, HEADS, d_model, T, d_ff)
    for block in model.blocks:
        layer = LAYERS[mixer](d_model, T)
        own = layer.state_dict() | block.mixer.state_dict()
        layer.load_state_dict(own)
        block.mixer = layer
    return model


def bits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean loss in bits per token."""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss / log(2)


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor) -> float:
    """`bits` of many sequences, a few at a time."""
    parts = tokens.split(max(1, TOKENS // tokens.shape[1]))
    return sum(bits(model, part).item() * len(part) for part in parts) / len(tokens)


def train(model: nn.Module, data: Data, budget: int, lr: float) -> Point:
    """Train until the loss of `check` no longer falls.

    - `budget`: maximum number of optimiser steps; `lr`: learning rate.
    - Returns what came out where that loss was lowest: bits per token
      of `test` (`loss`) and of `seen` (`train`), and the optimiser step.
    """
    best, since, reached, weights = inf, 0, 0, model.state_dict()
    count = TOKENS // (data.test.shape[1] - 1)
    decayed = partial(torch.optim.AdamW, weight_decay=0.1)
    steps = fit(model, lambda _: data.draw(count), bits, budget, lr, optimizer=decayed)
    for step in steps:
        if step % EVERY:
            continue
        now = evaluate(model, data.check)
        since += 1
        if now < best:
            best, since, reached = now, 0, step
            weights = {name: x.clone() for name, x in model.state_dict().items()}
        if since == PATIENCE:
            break
    model.load_state_dict(weights)
    parts = {"loss": data.test, "train": data.seen}
    losses = {name: round(evaluate(model, x), 4) for name, x in parts.items()}
    return {**losses, "steps": reached}


def setup(point: Point) -> Point:
    if point["task"] == "layer":
        return {"batch": BATCH, "heads": HEADS}
    return {
        **SETUP,
        "optimiser": "AdamW, weight decay 0.1, gradients clipped to 1",
        "batch": TOKENS // point["T"],
        "heads": HEADS,
    }


# --- What came out ------------------------------------------------------

#: Bits per sub-pixel of CIFAR-10 (Table 2) and per character of enwik8
#: (Table 4), test, 24 layers of width 256.
PUBLISHED = {
    "digits": {"softmax": 2.86, "aft-local": 2.74, "aft-simple": 2.89},
    "text": {"softmax": 1.130, "aft-local": 1.154, "aft-simple": 1.209},
}
NAMES = {
    SOFTMAX: "transformer",
    "aft-simple": "AFT-simple",
    "aft-full": "AFT-full",
    "aft-local": "AFT-local",
    "aft-conv": "AFT-conv",
    "aft-conv-2d": "AFT-conv 2-D",
}
#: The names in the figure of one layer, and in its claims.
ALONE = {**NAMES, SOFTMAX: "fused softmax", DENSE: "dense softmax"}


def claims(points: list[Point]) -> list[Claim]:
    images = _losses(select(points, task="digits"))
    every = [
        _below("digits", images, "aft-local", SOFTMAX),
        _below("digits", images, "aft-conv-2d", SOFTMAX),
        _below("digits", images, "aft-local", "aft-simple"),
    ]
    if max(p["T"] for p in points) > 1024:  # the full version
        texts = select(points, task="text")
        longest = _losses(select(texts, T=512))
        every += [
            _below("digits", images, SOFTMAX, "aft-simple"),
            _below("text", longest, SOFTMAX, "aft-local"),
            _below("text", longest, "aft-local", "aft-simple"),
            _longer(select(texts, mixer="aft-local")),
        ]
    alone = select(points, task="layer")
    return every + [_memory(name, select(alone, mixer=name)) for name in OF_LENGTHS]


def _losses(points: list[Point]) -> dict[str, float]:
    """The median loss by layer, in the order of `LAYERS`."""
    middle = plots.medians(points, "mixer", "loss")
    return {name: middle[name] for name in LAYERS if name in middle}


def _below(task: str, losses: dict[str, float], better: str, worse: str) -> Claim:
    known, lower = PUBLISHED[task], "lower (ours)"
    if better in known:
        lower = f"{known[better]:g} against {known[worse]:g}"
    text = f"{task}: {NAMES[better]} below {NAMES[worse]}"
    pair = [losses.get(better), losses.get(worse)]
    return numbers_claim(text, lower, pair, lt, unit=" bits")


def _longer(points: list[Point]) -> Claim:
    losses = plots.medians(points, "T", "loss")
    return Claim(
        "text: longer sequences lower the loss of AFT-local",
        "1.154, 1.135, 1.134 (T = 1024, 2048, 4096)",
        listed(losses, ".3f", "T"),
        all(a > b for a, b in pairwise(losses.values())) if len(losses) > 1 else None,
    )


def _memory(name: str, points: list[Point]) -> Claim:
    """The growth of memory where T doubles, at the greatest T."""
    mib = plots.medians(points, "T", "mib")
    growth = _growth(mib)
    what, source, holds = "grows with T", "Td (Table 1)", growth < 2.2
    ours = f"× {growth:.2f} where T doubles, up to {max(mib, default=0)}"
    if name == DENSE:
        what, source, holds = "grows with T²", "T² + Td (Table 1)", growth > 3
    elif name == SOFTMAX:
        source = "Td (ours)"
    elif name == "aft-full":
        # As in Table 1: the biases and their gradient are not counted.
        rest = _growth({T: x - 2 * 4 * T * T / 2**20 for T, x in mib.items()})
        what, holds = "grows with T, biases not counted", rest < 2.2
        ours = f"× {rest:.2f}; with biases {ours}"
    text = f"one layer, {ALONE[name]}: memory {what}"
    if growth == 0:
        return Claim(text, source, "–", None)
    return Claim(text, source, ours, holds)


def _growth(mib: dict[Any, float]) -> float:
    """The factor from half of the greatest length to it; 0 = not known."""
    last = max(mib, default=0)
    return mib[last] / mib[last // 2] if last // 2 in mib else 0.0


LOOKS = {
    SOFTMAX: (OTHER, "D", "-"),
    DENSE: (OTHER, "d", ":"),
    "aft-simple": (INK, "v", "-"),
    "aft-full": (SERIES[0], "^", "--"),
    "aft-local": (SERIES[1], "o", "-"),
    "aft-conv": (SERIES[2], "s", "-."),
}


def draw(points: list[Point]) -> Figure:
    texts = select(points, task="text")
    alone = [
        {**p, "share": p["milliseconds"] / p["fused"]}
        for p in select(points, task="layer")
    ]
    panels = [
        (alone, "mib", "memory, MiB"),
        (alone, "share", "time / fused softmax"),
    ]
    if texts:
        panels.insert(0, (texts, "loss", "bits per character"))
    height = 2.6 + 2.8 * len(panels)
    figure, (upper, *others) = plots.panels(height, len(panels) + 1)
    _difference(upper, select(points, task="digits"))
    for ax, (shown, y, label) in zip(others, panels, strict=True):
        for name, (color, marker, line) in LOOKS.items():
            here = select(shown, mixer=name)
            plots.series(ax, here, color, marker, line, ALONE[name], y, "T")
        lengths = sorted({p["T"] for p in shown})
        ax.set_xscale("log", base=2)
        if y != "loss":
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter("{x:g}")
        ax.set_xticks(lengths, [str(T) for T in lengths])
        ax.set(xlabel="$T$", ylabel=label)
    handles = [*others[-1].get_lines(), *upper.get_lines()]
    named = [each for each in handles if not str(each.get_label()).startswith("_")]
    figure.legend(handles=named, loc="outside upper left", ncols=2)
    return figure


def _difference(ax: Axes, points: list[Point]) -> None:
    """Bits per pixel more than the transformer's median, ours and published."""
    zero, known = _losses(points).get(SOFTMAX), PUBLISHED["digits"]
    for row, name in enumerate(OF_IMAGES):
        color, marker, _ = LOOKS.get(name, (WRONG, "P", ""))
        losses = [p["loss"] for p in select(points, mixer=name)]
        if zero is not None:
            extra = [loss - zero for loss in losses]
            plots.marks(ax, extra, [row] * len(losses), marker, color=color, alpha=0.7)
        if name in known:
            off = known[name] - known[SOFTMAX]
            label = None if row else "published, CIFAR-10"
            plots.published(ax, {off: row}, INK, label)
    ax.axvline(0, color=INK, linewidth=1)
    ax.set_yticks(range(len(OF_IMAGES)), [NAMES[name] for name in OF_IMAGES])
    ax.set_ylim(len(OF_IMAGES) - 0.5, -0.5)
    ax.set_xlabel("digits: extra bits per pixel")


EXPERIMENT = Experiment(
    name="aft",
    title="AFT against a transformer of equal size",
    source="Zhai et al. 2021, Tables 1, 2, 4 and 6",
    cost="quick: 4 min of one core; full: about 4 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=setup,
)
