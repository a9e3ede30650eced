r"""Predict from four numbers how much a memory that only adds can return.

A memory adds $S$ keys with one-hot values, and then returns the last value of every
key. Its loss is predicted as $\frac12 (1 - D / S)$, where $D / S$ is a product of shares: of
features, of the rank of values, and of what time leaves of the last write of a key.
"""

import random
from statistics import mean, median

import torch
from answers import recall_error
from frame import Claim, Point, Points, main
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import plots
from fwlab.data.retrieval import last_values
from fwlab.fit import SETUP, fit
from fwlab.models.retriever import d_dot, feature_map
from fwlab.plots import FAST, INK, TRAINED

TITLE = "A law that predicts what a memory returns"
SOURCE = "ours"
COST = "quick: 1 min of one core; full: 9 min"

#: Values from which settings are sampled: numbers of keys S, feature maps, key widths;
#: in the second line, ranks of values / S, decays per step, writes of each key.
KEYS, MAPS, WIDTHS = (24, 32, 48, 64), ("linear", "dpfp-1"), (8, 12, 16, 24, 32)
RANKS, DECAYS, WRITES = (0.25, 0.5, 0.75, 1.0), (1.0, 0.99, 0.97, 0.95, 0.9), (1, 2, 3)
#: Bounds of the predicted loss. A loss of 0 means perfect retrieval; 0.5 means none.
LOW, HIGH = 0.05, 0.45
COUNT = {True: 20, False: 200}
BATCH, TEST, STEPS, LR = 32, 500, 800, 2e-2
#: Largest median error at which the law counts as confirmed.
NEAR = 0.02


def points(quick: bool) -> list[Point]:
    """Sample distinct settings; the full version contains all of the quick version."""
    chance, found = random.Random(0), []
    while len(found) < COUNT[quick]:
        S = chance.choice(KEYS)
        point = {
            "S": S,
            "map": chance.choice(MAPS),
            "d_key": chance.choice(WIDTHS),
            "rank": round(S * chance.choice(RANKS)),
            "decay": chance.choice(DECAYS),
            "writes": chance.choice(WRITES),
        }
        known = [{**p, "seed": 0} for p in found]
        if LOW < predicted(point) < HIGH and {**point, "seed": 0} not in known:
            found.append({**point, "seed": len(found) % 3 + 1})
    return sorted(found, key=lambda point: point["S"])


def predicted(point: Point) -> float:
    r"""Return the loss that the law predicts for the given settings.

    - Features: at most `d_dot` of $S$ keys can be mutually orthogonal.
    - Values: the outputs lie in a space of `rank` dimensions.
    - Time: a write of age $a$ decays to $\gamma^a$. The last write of a key counts,
      $n$ writes are returned, and the best factor for all of them leaves
      $(\mathbb E \gamma^{a_\mathrm{last}})^2 / (n\, \mathbb E \gamma^{2a})$.
    """
    S, n, decay = point["S"], point["writes"], point["decay"]
    features = min(1, (d_dot(point["map"], point["d_key"]) or S) / S)
    values = point["rank"] / S
    # Each key has n of the n S writes, at random times. The last write is the youngest.
    ages = range(n * S)
    youngest = [(1 - a / (n * S)) ** (n - 1) * n / (n * S) for a in ages]
    last = sum(p * decay**a for p, a in zip(youngest, ages, strict=True)) / sum(
        youngest
    )
    time = last**2 / (n * mean(decay ** (2 * a) for a in ages))
    return (1 - features * values * time) / 2


class Memory(nn.Module):
    """Add pairs to fast weights; keys and queries are learned, value directions fixed.

    - `point`: the settings.
    """

    def __init__(self, point: Point):
        super().__init__()
        S, width = point["S"], point["d_key"]
        self.decay, self.phi = point["decay"], feature_map(point["map"], width)
        self.keys, self.queries = (
            nn.Parameter(torch.randn(S, width)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1 / (self.phi.width(width))))
        Q = torch.linalg.qr(torch.randn(S, point["rank"])).Q
        self.register_buffer("values", Q @ Q.mT)  # Projects onto the value subspace.

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return retrieved values `[batch, S, S]` for sequences `[batch, writes]`."""
        k, q = self.phi(self.keys), self.phi(self.queries)
        match = F.embedding(keys, (q @ k.mT).mT).mT * self.scale  # [batch, S, writes]
        age = torch.arange(keys.shape[1]).flip(0)
        weights = match * self.decay**age
        found = weights @ F.one_hot(values, len(self.keys)).to(weights)
        return found @ self.values


def draw_pairs(count: int, S: int, writes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sample sequences that write each key `writes` times, with random values.

    - Returns keys and values `[count, writes * S]`, and the last value of each key.
    """
    keys = torch.rand(count, writes * S).argsort(-1) % S
    values = torch.rand(count, writes * S).argsort(-1) % S
    return keys, values, last_values(keys, values, S)


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    model, size = Memory(point), (point["S"], point["writes"])
    fitted = fit(model, lambda _: draw_pairs(BATCH, *size), recall_error, STEPS, LR)
    with torch.no_grad():
        loss = round(recall_error(model, draw_pairs(TEST, *size)).item(), 5)
    law = round(predicted(point), 5)
    return {"loss": loss, "predicted": law, "curve": fitted.curve}


setup = SETUP | {"batch": BATCH, "steps": STEPS, "lr": LR}


def claims(points: Points):
    """Yield claims on the predicted losses, all of which were fixed before the runs."""
    off = [abs(p["loss"] - p["predicted"]) for p in points]
    whole = len(points) in COUNT.values()
    yield Claim(
        f"the median error of {COUNT[len(points) < 200]} predicted losses is at most {NEAR}",
        "",
        f"{median(off):.4f}, the largest {max(off):.3f}",
        median(off) <= NEAR if whole else None,
    )
    below = [p["predicted"] - p["loss"] for p in points]
    yield Claim(
        f"no loss is below the law by more than {NEAR}",
        "",
        f"at most {max(below):.4f} below it",
        max(below) <= NEAR if whole else None,
    )


def draw(points: Points) -> Figure:
    figure, (ax,) = plots.panels(4.2)
    ax.plot([0, 0.5], [0, 0.5], color=INK, linewidth=1)
    for name, color, marker in (("linear", TRAINED, "s"), ("dpfp-1", FAST, "o")):
        own = points(map=name)
        label = {"linear": "ELU + 1", "dpfp-1": "DPFP"}[name]
        plots.marks(
            *(ax, own["predicted"], own["loss"], marker),
            color=color,
            alpha=0.6,
            markersize=5,
            label=label,
        )
    ax.set(xlabel="predicted loss", ylabel="loss after training")
    plots.legend(figure, ax, 2)
    return figure


if __name__ == "__main__":
    main(__file__)
