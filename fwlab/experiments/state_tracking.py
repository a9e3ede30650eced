"""What the delta rule can compute, and what a decay is for.

With beta above 1 an update can turn the fast weights around a key, and
products of such turns are permutations. A decay forgets.
"""

import itertools
from functools import cache
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from fwlab import ops, plots
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    below_part,
    select,
    throughout,
)
from fwlab.experiments.fit import fit, learning_curve
from fwlab.feature_maps import l2_normalize
from fwlab.plots import SERIES

#: Train on sequences of up to this many tokens, evaluate at these lengths.
NEAR, FAR = 32, 256
#: Width of keys and values of the permutations.
WIDTH = 8
#: Pairs per topic, topics, width of the keys.
PAIRS, TOPICS, D_KEY = 32, 8, 128
#: The decay per step of each gate; None = it erases at new topics.
FORGET: dict[str, float | None] = {
    "no decay": 1.0,
    "0.97 per step": 0.97,
    "0.9 per step": 0.9,
    "erase at a new topic": None,
}
#: The better and the worse gate, with one topic and with several.
CONSTANT = ("no decay", "0.97 per step")
ERASE = ("erase at a new topic", "no decay")


def points(quick: bool) -> list[Point]:
    settings = []
    compose = [(2, 1, 1), (2, 2, 1), (3, 1, 1), (3, 1, 2), (3, 2, 1), (3, 2, 2)]
    if not quick:
        compose += [(4, 1, 3), (4, 2, 1), (4, 2, 2), (4, 2, 3)]
    for items, limit, steps in compose:
        settings.append(("compose", "trained", items, limit, steps, ""))
    for items in (2, 3, 5):
        settings.append(("compose", "by hand", items, 2, items - 1, ""))
    for task in ("one topic", "topics"):
        for forget in FORGET:
            settings.append((task, "none", 0, 1, 1, forget))
    names = ("task", "weights", "items", "limit", "steps", "forget")
    budget = 500 if quick else 1500
    return [
        dict(zip(names, each, strict=True), seed=seed, budget=budget)
        for each in settings
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    if point["task"] != "compose":
        topics = TOPICS if point["task"] == "topics" else 1
        return {"near": None, "far": None, "loss": recall(topics, point["forget"])}
    model = Composer(point["items"], point["steps"], point["limit"])
    curve = None
    if point["weights"] == "by hand":
        model.by_hand()
    else:
        curve = train(model, point["budget"])
    near, far = (score(model, length) for length in (NEAR, FAR))
    return {"near": near, "far": far, "loss": None, "curve": curve}


# --- Composing permutations ---------------------------------------------


def permutations(items: int) -> list[tuple[int, ...]]:
    return list(itertools.permutations(range(items)))


@cache
def compositions(items: int) -> Tensor:
    """The number of `a` after `b`, `[a, b]`, in the list of all."""
    every = permutations(items)
    number = {each: i for i, each in enumerate(every)}
    return torch.tensor(
        [[number[tuple(a[i] for i in b)] for b in every] for a in every]
    )


class Composer(nn.Module):
    """A delta rule whose tokens are permutations.

    Each token has trained keys and strengths; it writes no values, so it
    only turns what the fast weights hold. A trained state is turned, and
    one trained query reads it after each token.

    - `items`: number of items that are permuted, at most 8; 2 is parity.
    - `steps`: number of updates per token.
    - `limit`: maximum of `beta`.
    """

    def __init__(self, items: int, steps: int, limit: float):
        super().__init__()
        self.items, self.steps, self.limit = items, steps, limit
        self.tokens = len(permutations(items))
        self.k = nn.Parameter(torch.randn(self.tokens, steps, WIDTH))
        self.strength = nn.Parameter(torch.rand(self.tokens, steps))
        self.W = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.q = nn.Parameter(torch.randn(WIDTH))
        self.to_out = nn.Linear(WIDTH, self.tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the composition so far, `[batch, time, tokens]`."""
        k = l2_normalize(self.k)[tokens].flatten(1, 2)[:, :, None]
        beta = self.limit * self.strength[tokens].flatten(1, 2)[:, :, None]
        W = self.W.expand(len(tokens), 1, -1, -1)
        y = ops.delta_rule(self.q.expand_as(k), k, torch.zeros_like(k), beta, state=W)
        assert isinstance(y, Tensor)
        return self.to_out(y[:, self.steps - 1 :: self.steps, 0])

    @torch.no_grad()
    def by_hand(self) -> None:
        r"""Two items $i$ and $j$ change places by a reflection.

        With $\beta = 2$ and $k = (e_i - e_j) / \sqrt 2$, the matrix
        $I - \beta\, k k^\top$ is that permutation, and every permutation
        takes at most `items` - 1 of them.
        """
        assert self.limit == 2
        eye, items = torch.eye(WIDTH), self.items
        self.strength.zero_()  # of updates that a token does not need
        self.k.fill_(1)
        self.q.zero_()
        self.q[:items] = torch.arange(items) - (items - 1) / 2
        self.W.copy_(eye)
        self.to_out.weight.zero_()
        for token, permutation in enumerate(permutations(items)):
            for step, (i, j) in enumerate(swaps(permutation)):
                self.k[token, step] = eye[i] - eye[j]
                self.strength[token, step] = 1
            moved = matrix(permutation) @ self.q[:items]
            self.to_out.weight[token, :items] = moved


def matrix(permutation: tuple[int, ...]) -> Tensor:
    """Moves entry `i` to place `permutation[i]`."""
    return torch.eye(len(permutation))[:, list(permutation)].clone()


def swaps(permutation: tuple[int, ...]) -> list[tuple[int, int]]:
    """Pairs to swap, whose matrices multiply to that of the permutation."""
    now, pairs = list(range(len(permutation))), []
    for i, wanted in enumerate(permutation):
        j = now.index(wanted)
        if i != j:
            now[i], now[j] = now[j], now[i]
            pairs.append((i, j))
    return pairs


def sequences(items: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and the composition of all tokens so far."""
    table = compositions(items)
    tokens = torch.randint(len(table), (batch, length))
    answers = [tokens[:, 0]]
    for t in range(1, length):
        answers.append(table[answers[-1], tokens[:, t]])
    return tokens, torch.stack(answers, 1)


#: What `train` does, in words.
SETUP = {
    "optimiser": "Adam",
    "schedule": "falls along a cosine",
    "lr": 1e-2,
    "batch": 64,
}


def train(model: Composer, budget: int) -> list[list[float]]:
    """Train on sequences that get longer, with `beta` kept in its range.

    - Returns the learning curve.
    """
    losses: list[float] = []

    def draw(step: int) -> tuple[Tensor, Tensor]:
        return sequences(model.items, 64, min(NEAR, 2 + 2 * NEAR * step // budget))

    def loss(model: Composer, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, answers = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())

    def cosine(adam: torch.optim.Optimizer, lr: float, steps: int) -> LRScheduler:
        return CosineAnnealingLR(adam, steps)

    how: dict[str, Any] = {"schedule": cosine, "clip": None, "losses": losses}
    for _ in fit(model, draw, loss, budget, 1e-2, **how):
        with torch.no_grad():
            model.strength.clamp_(0, 1)
    return learning_curve(losses, budget)


@torch.no_grad()
def score(model: Composer, length: int) -> float:
    """Scaled accuracy of the last 8 answers: 0 is chance, 1 is perfect."""
    tokens, answers = sequences(model.items, 256, length)
    right = (model(tokens).argmax(-1) == answers)[:, -8:].double().mean().item()
    chance = 1 / model.tokens
    return round((right - chance) / (1 - chance), 4)


# --- Forgetting ---------------------------------------------------------


@torch.no_grad()
def recall(topics: int, forget: str) -> float:
    """The loss of setting 1 for the pairs of the last topic.

    Keys are random and new in every topic; values are one-hot vectors.
    """
    batch, length = 16, topics * PAIRS
    k = l2_normalize(torch.randn(batch, length, 1, D_KEY))
    order = torch.rand(batch, topics, PAIRS).argsort(-1).flatten(1)
    v = F.one_hot(order, PAIRS).float()[:, :, None]
    decay = FORGET[forget]
    log_decay = torch.zeros(batch, length, 1)
    if decay is None:
        log_decay[:, ::PAIRS] = -torch.inf
    else:
        log_decay += torch.tensor(decay).log()
    beta = torch.ones_like(log_decay)
    _, W = ops.gated_delta_rule(k, k, v, beta, log_decay, return_state=True)
    assert isinstance(W, Tensor)
    retrieved = k[:, -PAIRS:, 0] @ W[:, 0].mT
    loss = (retrieved - v[:, -PAIRS:, 0]).square().sum(-1).mean() / 2
    return round(loss.item(), 5)


# --- What came out ------------------------------------------------------


#: How we differ from the papers, whose models have trained layers and values.
PROTOCOL = f"one head, trained state; trained on {NEAR} tokens, tested at {FAR}"


def claims(points: list[Point]) -> list[Claim]:
    compose = select(points, task="compose")
    trained = select(compose, weights="trained")
    narrow, wide = (select(trained, limit=limit) for limit in (1, 2))
    three, four = ([p for p in wide if p["items"] == n] for n in (3, 4))
    only = "only n = 2 with beta up to 2 solves S3 (Siems et al. 2025)"
    fail, solve, chance = (
        lambda score: score < 0.5,
        lambda score: score > 0.95,
        lambda score: abs(score) < 0.1,
    )
    every = [
        ("parity, beta up to 1: at chance", "0.017 (Table 3)",
         select(narrow, items=2), chance, 1),
        ("parity, beta up to 2: solved", "1.000 (Table 3)",
         select(wide, items=2), solve, 1),
        ("three items, n = 2, beta up to 2: solved", only,
         select(three, steps=2), solve, 1),
        ("three items, n = 1 or beta up to 1: not solved", only,
         select(narrow, items=3) + select(three, steps=1), fail, 3),
        ("by hand, n = items - 1, beta = 2: perfect", "",
         select(compose, weights="by hand"), lambda score: score == 1, 3),
    ]  # fmt: skip
    if any(p["items"] == 4 for p in trained):
        every += [
            ("four items, n = 3, beta up to 2: solved", "",
             select(four, steps=3), solve, 1),
            ("four items, n < 3 or beta up to 1: not solved", "",
             select(narrow, items=4) + [p for p in four if p["steps"] < 3], fail, 3),
        ]  # fmt: skip
    return [*(_scored(*each) for each in every), *_forgetting(points)]


def _scored(
    text: str, published: str, points: list[Point], holds: Any, expected: int
) -> Claim:
    """Scores at the larger length, by what is composed."""
    return throughout(
        text,
        published,
        {name: [p["far"] for p in own] for name, own in _by_name(points).items()},
        holds,
        expected,
        spec=".3f",
        x="",
        protocol=PROTOCOL if published else "",
    )


def _forgetting(points: list[Point]) -> list[Claim]:
    def losses(task: str, forget: str) -> dict[int, float]:
        some = select(points, task=task, forget=forget)
        return {p["seed"]: p["loss"] for p in some}

    return [
        below_part(text, losses(task, low), losses(task, high), 0.9)
        for text, task, (low, high) in (
            ("one topic: a decay of 0.97 per step costs", "one topic", CONSTANT),
            ("topics change: erasing the old one helps", "topics", ERASE),
        )
    ]


def _by_name(points: list[Point]) -> dict[str, list[Point]]:
    """Points of compositions by what differs, in the order of the points."""
    named: dict[str, list[Point]] = {}
    for p in points:
        what = "parity" if p["items"] == 2 else f"{p['items']} items"
        hand = ", by hand" if p["weights"] == "by hand" else ""
        name = f"{what}, β ≤ {p['limit']}, n = {p['steps']}{hand}"
        named.setdefault(name, []).append(p)
    return named


def draw(points: list[Point]) -> Figure:
    compose = _by_name(select(points, task="compose"))
    height = 2.8 + 0.3 * len(compose)
    heights = [len(compose) + 1, len(FORGET) + 1]
    figure, (upper, lower) = plots.panels(height, 2, height_ratios=heights)
    near, far = (_numbers(compose, y) for y in ("near", "far"))
    plots.rows(upper, near, SERIES[0], "^", f"{NEAR} tokens, as in training")
    plots.rows(upper, far, SERIES[1], "o", f"{FAR} tokens")
    upper.set(xlabel="scaled accuracy", xlim=(-0.1, 1.05))
    forget = {name: select(points, forget=name) for name in FORGET}
    for task, color, marker in (
        ("one topic", SERIES[0], "s"),
        ("topics", SERIES[1], "D"),
    ):
        label = task if task == "one topic" else f"last of {TOPICS} topics"
        own = {name: select(some, task=task) for name, some in forget.items()}
        plots.rows(lower, _numbers(own, "loss"), color, marker, label)
    lower.set(xlabel="loss", xlim=(0, None))
    for ax in (upper, lower):
        ax.legend(loc="lower left", bbox_to_anchor=(-0.6, 1))
    return figure


def _numbers(rows: dict[str, list[Point]], y: str) -> dict[str, list[float]]:
    return {name: [p[y] for p in own] for name, own in rows.items()}


EXPERIMENT = Experiment(
    name="state-tracking",
    title="What the delta rule can compute, and what a decay is for",
    source="Grazzi et al. 2024, Table 3; Siems et al. 2025",
    cost="quick: 1 min of one core; full: 5 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP if point["weights"] == "trained" else {},
)
