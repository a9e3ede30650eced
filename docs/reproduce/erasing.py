r"""Measure how much an error-correcting write improves on adding.

The delta rule removes what its memory returns for a key before it writes. Its gain over
adding is a share of decay, which any removal of the same strength brings, and a share of
content, which needs the key itself. Layers here differ only in the direction $e$ that is
erased: $W \leftarrow W (I - \beta\, e e^\top) + \beta\, v k^\top$ with $|e| = |k|$.
"""

from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from math import inf
from statistics import median
from typing import Any

import torch
from answers import loss as cross_entropy
from answers import recall_error
from frame import Claim, Point, Points, holds, main, order, paired
from matplotlib.figure import Figure
from text import finite
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import plots
from fwlab.data import Characters, corpus
from fwlab.data.retrieval import last_values
from fwlab.feature_maps import DPFP, ELU1, Identity, l2_normalize, sum_normalize
from fwlab.fit import SETUP, fit
from fwlab.models import LanguageModel, Mixer
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED

TITLE = "What an error-correcting write buys"
SOURCE = "ours"
COST = "quick: 10 min of one core; full: 5 hours"

#: Names of the directions that are erased before a write.
NONE, FADE, FIXED, OTHERS = (
    "nothing",
    "everything",
    "a fixed direction",
    "another's key",
)
PREVIOUS, CENTRED, OWN = "the previous key", "the key without its mean", "the key"
ERASED = (NONE, FADE, FIXED, OTHERS, PREVIOUS, CENTRED, OWN)
#: Feature map, and normalisation of keys and queries, by name.
MAPS = {
    "ELU + 1": (ELU1(), sum_normalize),
    "DPFP": (DPFP(nu=1), sum_normalize),
    "unit keys": (Identity(), l2_normalize),
}
#: Tasks by name: the share of keys that return with a new value, or a text.
RETURNS = {"pairs, 0": 0.0, "pairs, 0.1": 0.1, "pairs, 0.3": 0.3, "pairs, 1": 1.0}
TEXTS = {"Shakespeare": "shakespeare", "source code": "python"}
RATES = {"pairs": (1e-2, 3e-2, 1e-1), "text": (4e-3, 1e-2, 2.5e-2)}
STEPS = {"pairs": 400, "text": 1000}
SEEDS = (1, 2, 3, 4, 5)
#: Directions in the hypotheses. On text with ELU + 1, all rates run with three seeds.
COMPARED = (NONE, FIXED, OWN)
#: Best learning rates, at which all seeds run, in the order of `ERASED`. The best rate
#: has the lowest loss of seed 1, or of three seeds for `COMPARED` with ELU + 1.
CHOSEN = {
    ("Shakespeare", "ELU + 1"): (1e-2, 1e-2, 1e-2, 2.5e-2, 2.5e-2, 1e-2, 2.5e-2),
    ("Shakespeare", "DPFP"): (4e-3, 1e-2, 2.5e-2, 1e-2, 2.5e-2, 4e-3, 1e-2),
    ("Shakespeare", "unit keys"): (1e-2, 2.5e-2, 1e-2, 1e-2, 1e-2, 1e-2, 2.5e-2),
    ("source code", "ELU + 1"): (4e-3, 1e-2, 1e-2, 1e-2, 2.5e-2, 1e-2, 1e-2),
    ("source code", "DPFP"): (4e-3, 2.5e-2, 1e-2, 2.5e-2, 4e-3, 4e-3, 1e-2),
    ("source code", "unit keys"): (4e-3, 1e-2, 4e-3, 1e-2, 1e-2, 1e-2, 1e-2),
}
#: Number of keys and of values, batch sizes in training and test, and key width.
PAIRS, BATCH, TEST, WIDTH = 16, 32, 2000, 32
#: Sizes of the language models, length of windows, and windows per optimiser step.
LAYERS, HEADS, D_MODEL, WINDOW, WINDOWS = 2, 4, 64, 64, 8


def points(quick: bool) -> list[Point]:
    tasks = ["pairs, 0.3", "source code"] if quick else [*RETURNS, *TEXTS]
    return [
        {
            **{"task": task, "corpus": TEXTS.get(task, ""), "map": name},
            **{"erased": erased, "lr": lr, "seed": seed},
        }
        for seed in (SEEDS[:3] if quick else SEEDS)
        for task in tasks
        for name in (["ELU + 1"] if quick else MAPS)
        for erased in (COMPARED if quick else ERASED)
        for lr in (RATES[kind(task)] if quick else rates(task, name, erased, seed))
    ]


def rates(task: str, name: str, erased: str, seed: int) -> tuple[float, ...]:
    """Return all learning rates of a task, or the rate chosen with the first seeds."""
    three = name == "ELU + 1" and erased in COMPARED
    if task in RETURNS or seed <= (3 if three else 1):
        return RATES[kind(task)]
    return (CHOSEN[task, name][ERASED.index(erased)],)


def kind(task: str) -> str:
    return "text" if task in TEXTS else "pairs"


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    train = {"text": train_text, "pairs": train_pairs}[kind(point["task"])]
    return train(point, STEPS[kind(point["task"])])


# --- The layer --------------------------------------------------------------


class Erasing(nn.Module):
    """Apply a delta rule layer that erases the direction `erased` before each write.

    - `d_model`, `heads`, `width`: width of the inputs, number and width of heads.
    - `name`, `erased`: one of `MAPS`, and one of `ERASED`.
    """

    def __init__(self, d_model: int, heads: int, width: int, name: str, erased: str):
        super().__init__()
        self.heads, self.erased = heads, erased
        self.phi, self.normalize = MAPS[name]
        self.to_q, self.to_k, self.to_v = (
            nn.Linear(d_model, heads * width, bias=False) for _ in "qkv"
        )
        self.to_beta = nn.Linear(d_model, heads)
        self.to_out = nn.Linear(heads * width, d_model, bias=False)
        self.register_buffer("mean", torch.zeros(heads, 1, self.phi.width(width)))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        """Mix `x` `[batch, time, d_model]` along time, without changing the shape."""
        q, k = (
            self.normalize(self.phi(self._split(f(x)))) for f in (self.to_q, self.to_k)
        )
        v, beta = self._split(self.to_v(x)), self.to_beta(x).sigmoid().mT
        y = self.remember(q, k, v, beta)
        return self.to_out(y.transpose(1, 2).flatten(-2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def remember(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        """Return the value that each query retrieves after the write of its step.

        - `q`, `k`, `v`: `[batch, heads, time, width]`; `beta`: `[batch, heads, time]`.
        """
        if self.erased == NONE:
            return (q @ k.mT * beta[..., None, :]).tril() @ v
        if self.erased == FADE:  # Decay all of W, as the delta rule does along k only.
            kept = (1 - beta * k.square().sum(-1)).clamp(min=1e-6).log().cumsum(-1)
            left = (kept[..., :, None] - kept[..., None, :]).tril().exp()
            return (q @ k.mT * left * beta[..., None, :]).tril() @ v
        return erase(q, k, v, beta, self.direction(k))

    def direction(self, k: Tensor) -> Tensor:
        """Return the directions to erase, with the shape and lengths of the keys."""
        if self.training and self.erased == CENTRED:
            keys = k.detach()  # Keys are 0 in steps without a write.
            now = (keys.sum((0, 2)) / keys.any(-1).sum((0, 2))[:, None])[:, None]
            self.mean.lerp_(now, 0.05 if self.mean.any() else 1.0)
        e = {
            OWN: lambda: k,
            FIXED: lambda: torch.ones_like(k),
            OTHERS: lambda: k.roll(1, 0),  # Take the keys of another sequence.
            PREVIOUS: lambda: F.pad(k, (0, 0, 1, 0))[..., :-1, :],
            CENTRED: lambda: k - self.mean,
        }[self.erased]()
        return F.normalize(e, dim=-1) * k.norm(dim=-1, keepdim=True)


def erase(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, e: Tensor) -> Tensor:
    r"""Compute all steps of $W \leftarrow W (I - \beta e e^\top) + \beta v k^\top$ at once.

    The erased values $u_t = W_{t-1} e_t$ solve a triangular system:
    $u_t = \sum_{s<t} \beta_s (v_s\, k_s \cdot e_t - u_s\, e_s \cdot e_t)$.
    """
    beta = beta[..., None, :]
    reads = (e @ k.mT * beta).tril(-1) @ v
    system = (e @ e.mT * beta).tril(-1)
    u = torch.linalg.solve_triangular(system, reads, upper=False, unitriangular=True)
    return (q @ k.mT * beta).tril() @ v - (q @ e.mT * beta).tril() @ u


# --- Pairs ------------------------------------------------------------------


def draw_pairs(count: int, returns: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sample sequences of pairs in which a share of the keys is written twice.

    - Returns keys and values `[count, writes]` in random order, where every key is
      written once or twice, and the last value of each key `[count, PAIRS]`.
    """
    every = torch.rand(count, PAIRS).argsort(-1)
    keys = torch.cat([every, every[:, : round(returns * PAIRS)]], -1)
    keys = keys.gather(1, torch.rand(keys.shape).argsort(-1))
    values = torch.randint(PAIRS, keys.shape)
    return keys, values, last_values(keys, values, PAIRS)


class Memory(nn.Module):
    """Write key-value pairs with one layer, and then query every key."""

    def __init__(self, name: str, erased: str):
        super().__init__()
        self.layer = Erasing(WIDTH, 1, WIDTH, name, erased)
        self.embedding = nn.Embedding(PAIRS, WIDTH)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the values retrieved for all keys, `[batch, PAIRS, PAIRS]`."""
        layer, asked = self.layer, PAIRS
        k, q = self.embedding(keys), self.embedding.weight.expand(len(keys), -1, -1)
        beta = layer.to_beta(k).sigmoid()[..., 0]
        k, q = (
            layer.normalize(layer.phi(f(x)))
            for f, x in ((layer.to_k, k), (layer.to_q, q))
        )
        # Append the queries as steps that write nothing.
        q, k = F.pad(q, (0, 0, k.shape[1], 0)), F.pad(k, (0, 0, 0, asked))
        v = F.pad(F.one_hot(values, PAIRS).to(k), (0, 0, 0, asked))
        beta = F.pad(beta, (0, asked))
        return layer.remember(*(x[:, None] for x in (q, k, v, beta)))[:, 0, -asked:]


def train_pairs(point: Point, steps: int) -> Point:
    returns = RETURNS[point["task"]]
    model = Memory(point["map"], point["erased"])
    fitted = fit(
        model, lambda _: draw_pairs(BATCH, returns), recall_error, steps, point["lr"]
    )
    with torch.no_grad():
        tests = (
            recall_error(model.eval(), draw_pairs(TEST, returns)) for _ in range(2)
        )
        chosen, loss = (finite(x.item(), 5) for x in tests)
    return {
        "loss": loss,
        "chosen_by": chosen,
        "returned": returns,
        "curve": fitted.curve,
    }


# --- Text -------------------------------------------------------------------


@cache
def tokens(task: str) -> tuple[Point, int, Tensor, Tensor, Tensor]:
    """Return a text's name and hash, its vocabulary size, and three encoded parts.

    The parts are for training, for the choice of a rate, and for the score.
    """
    content = corpus(TEXTS[task])[:1_000_000]
    characters = Characters(content)
    encoded = characters.encode(content).long()
    part = len(encoded) // 20
    parts = encoded.split([len(encoded) - 2 * part, part, part])
    read = {
        "corpus_name": f"{task}, up to a million characters",
        "corpus_sha256": sha256(content.encode()).hexdigest()[:12],
    }
    return read, len(characters), *parts


def draw_text(text: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sample windows of a text, with the next characters as targets."""
    starts = torch.randint(len(text) - WINDOW, (count, 1)) + torch.arange(WINDOW + 1)
    windows = text[starts]
    return windows[:, :-1], windows[:, 1:]


def train_text(point: Point, steps: int) -> Point:
    read, symbols, text, *tests = tokens(point["task"])
    width = D_MODEL // HEADS
    mixer = Mixer(
        lambda s: Erasing(s.d_model, s.heads, width, point["map"], point["erased"])
    )
    model = LanguageModel(symbols, mixer, LAYERS, HEADS, D_MODEL, WINDOW)
    fitted = fit(
        *(model, lambda _: draw_text(text, WINDOWS), cross_entropy, steps, point["lr"])
    )
    model.eval()
    with torch.no_grad():
        windows = [test[: len(test) // (WINDOW + 1) * (WINDOW + 1)] for test in tests]
        windows = [test.view(-1, WINDOW + 1)[:600] for test in windows]
        chosen, loss = (
            finite(cross_entropy(model, (w[:, :-1], w[:, 1:])).item(), 5)
            for w in windows
        )
    return {
        "loss": loss,
        "chosen_by": chosen,
        "returned": returned(windows[1]),
        "curve": fitted.curve,
        **read,
    }


def returned(windows: Tensor) -> float:
    """Measure how often a character recurs with a different successor than last time.

    - `windows`: `[count, time]`.
    - Returns a share of all characters that have a successor.
    """
    now, after = windows[:, :-1], windows[:, 1:]
    earlier = (now[:, :, None] == now[:, None]).tril(-1)
    step = torch.arange(now.shape[1])
    last = torch.where(earlier, step, -1).amax(-1)
    again = after.gather(1, last.clamp(min=0)) != after
    return round(((last >= 0) & again).double().mean().item(), 4)


# --- Claims and figures -----------------------------------------------------


def best(points: Points) -> Points:
    """Select the runs at the learning rate with the lowest validation loss."""
    return points.at_best_rate("task", "map", "erased", by="chosen_by")


def shares(points: Points, control: str) -> list[float]:
    """Return a control's gain per seed, relative to the delta rule's median gain."""
    none, other, own = (points(erased=name) for name in (NONE, control, OWN))
    gain = median(none["loss"]) - median(own["loss"])
    return [(before - after) / gain for before, after, _ in paired(none, other, own)]


def gains(points: Points) -> bool:
    """Return True if erasing the key always gives a lower loss than erasing nothing."""
    own, none = (points(erased=name)["loss"] for name in (OWN, NONE))
    return bool(own and none) and max(own) < min(none) and max(none) < inf


def content(points: Points) -> list[float]:
    """Return the share of the gain that a fixed direction does not reach, per seed.

    The list is empty unless all seeds show a gain of the delta rule.
    """
    return [1 - x for x in shares(points, FIXED)] if gains(points) else []


def claims(points: Points) -> Iterator[Claim]:
    """Yield claims on the hypotheses, which were written down before the runs.

    Further claims state where the delta rule has a gain.
    """
    chosen = best(points)
    for name, some in chosen.by("map").items():
        own = {task: content(some(task=task)) for task in (*RETURNS, *TEXTS)}
        if len({p["task"] for p in points}) > 2:
            rising = [own[task] for task in ("pairs, 0.1", "pairs, 0.3", "pairs, 1")]
            text = "the share of content grows with the share of keys that return"
            yield order(f"{name}: {text}", rising, spec=".2f")
        for task in TEXTS if name == "ELU + 1" else ():
            yield holds(
                f"{name}, {task}: the share of content is below a quarter",
                own[task],
                lambda x: x < 0.25,
                spec=".2f",
            )
        for task in own:
            here = some(task=task)
            sides = [here(erased=OWN)["loss"], here(erased=NONE)["loss"]]
            if any(sides):
                yield order(f"{name}, {task}: erasing the key ends below adding", sides)


def place(point: Point) -> float:
    """Return the share of a task's steps whose key recurs with another value.

    It is measured for texts. For pairs, a share `r` of the keys returns: `r` of `1 + r`
    writes, and one in `PAIRS` of these repeats the old value.
    """
    r = point["returned"]
    return r if point["task"] in TEXTS else r / (1 + r) * (1 - 1 / PAIRS)


#: Lower edge of the figure, where all smaller shares are drawn.
LEAST = -1.0


def draw(points: Points) -> Figure:
    """Draw each direction's share of the gain against the share of returning keys."""
    chosen = best(points)
    names = [*chosen.by("map")]
    looks = {
        FADE: (INK, "v"),
        FIXED: (OTHER, "s"),
        OTHERS: (SERIES[1], "D"),
        PREVIOUS: (SERIES[2], "^"),
        CENTRED: (TRAINED, "P"),
        OWN: (FAST, "o"),
    }
    figure, axes = plots.panels(2.6 * len(names) + 0.6, len(names), sharex=True)
    for ax, name in zip(axes, names, strict=True):
        shown = [own for own in chosen(map=name).by("task").values() if gains(own)]
        for erased, (color, marker) in looks.items():
            rows = Points(
                {"at": place(own[0]), "share": max(share, LEAST)}
                for own in shown
                for share in shares(own, erased)
            )
            plots.series(ax, rows, color, marker, "", erased, "share", "at")
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.axhline(1, color=FAST, linewidth=0.8)
        ax.set(title=name, ylabel="share of the gain", ylim=(LEAST - 0.15, 1.6))
    for task in TEXTS:
        for own in chosen(task=task)[:1]:
            at = place(own), LEAST
            axes[0].annotate(task, at, rotation=90, ha="right", va="bottom")
    axes[-1].set_xlabel("steps whose key returns with another value")
    plots.legend(figure, axes[0], 2)
    return figure


def setup(point: Point) -> Point:
    steps = STEPS[kind(point["task"])]
    if point["task"] in TEXTS:
        sizes = {"layers": LAYERS, "heads": HEADS, "width": D_MODEL, "window": WINDOW}
        return SETUP | sizes | {"batch": WINDOWS, "steps": steps}
    return SETUP | {"width": WIDTH, "keys": PAIRS, "batch": BATCH, "steps": steps}


if __name__ == "__main__":
    main(__file__)
