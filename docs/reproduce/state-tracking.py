"""Test the abilities of the delta rule, and the purpose of a decay.

With beta above 1 an update can turn the fast weights around a key, and
products of such turns are permutations. A decay forgets.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from answers import Batch, columns, growing, loss, scaled
from frame import Point, Points, every, holds, main, order, paired
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from fwlab import ops, plots
from fwlab.feature_maps import l2_normalize
from fwlab.fit import fit
from fwlab.plots import SERIES

TITLE = "What the delta rule can compute, and what a decay is for"
SOURCE = "Grazzi et al. 2024, Table 3; Siems et al. 2025"
COST = "quick: 1 min of one core; full: 5 min"

#: Settings of a composition: weights, items, maximum of beta, updates per token.
COMPOSE = ("weights", "items", "limit", "steps")
PARITY = [("trained", 2, 1, 1), ("trained", 2, 2, 1)]
THREE = [("trained", 3, limit, steps) for limit in (1, 2) for steps in (1, 2)]
FOUR = [("trained", 4, *each) for each in ((1, 3), (2, 1), (2, 2), (2, 3))]
BY_HAND = [("by hand", items, 2, items - 1) for items in (2, 3, 5)]
#: Length of the longest training sequences, and length of a longer test.
NEAR, FAR = 32, 256
#: Width of keys and values of the permutations.
WIDTH = 8
LR, BATCH = 1e-2, 64
#: Hyper-parameters of the training, as texts for the page.
SETUP = {"optimiser": "Adam", "schedule": "falls along a cosine"}
SETUP |= {"lr": LR, "batch": BATCH}
#: Pairs per topic, width of the keys, and number of topics of each task.
PAIRS, D_KEY = 32, 128
TOPICS = {"one topic": 1, "topics": 8}
#: Decay per step of each gate; None = the gate erases at new topics.
NO_DECAY, DECAY, ERASE = "no decay", "0.97 per step", "erase at a new topic"
FORGET = {NO_DECAY: 1.0, DECAY: 0.97, "0.9 per step": 0.9, ERASE: None}


def points(quick: bool) -> list[Point]:
    compose = PARITY + THREE + ([] if quick else FOUR) + BY_HAND
    settings = [("compose", *each, "") for each in compose]
    for task in TOPICS:
        settings += [(task, "none", 0, 1, 1, forget) for forget in FORGET]
    names = ("task", *COMPOSE, "forget")
    budget = 500 if quick else 1500
    return [
        dict(zip(names, each, strict=True), seed=seed, budget=budget)
        for each in settings
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    if point["task"] != "compose":
        left = recall(TOPICS[point["task"]], FORGET[point["forget"]])
        return {"near": None, "far": None, "loss": left}
    model, curve = Composer(point["items"], point["steps"], point["limit"]), None
    if point["weights"] == "by hand":
        model.by_hand()
    else:
        curve = train(model, point["budget"])
    near, far = (score(model, length) for length in (NEAR, FAR))
    return {"near": near, "far": far, "loss": None, "curve": curve}


# --- Composing permutations ---------------------------------------------


@cache
def permutations(items: int) -> Tensor:
    """Return all permutations of `items` items, `[count, items]`."""
    return torch.tensor([*itertools.permutations(range(items))])


@cache
def compositions(items: int) -> Tensor:
    """Return the index of each product of permutations, `[a, b]` for `a` after `b`."""
    some = permutations(items)
    return (some[:, some][:, :, None] == some).all(-1).long().argmax(-1)


class Composer(nn.Module):
    """Compose permutations, given as tokens, with one head of the delta rule.

    Each token has trained keys and strengths but no values, so it only rotates
    the fast weights. They begin with a trained state, and one trained query
    reads them after each token.

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
        """Return the logits of the composition so far, `[batch, time, tokens]`."""
        k = l2_normalize(self.k)[tokens].flatten(1, 2)[:, :, None]
        beta = self.limit * self.strength[tokens].flatten(1, 2)[:, :, None]
        W = self.W.expand(len(tokens), 1, -1, -1)
        y = ops.delta_rule(self.q.expand_as(k), k, torch.zeros_like(k), beta, state=W)
        return self.to_out(y[:, self.steps - 1 :: self.steps, 0])

    @torch.no_grad()
    def by_hand(self) -> None:
        r"""Set the weights so that a reflection swaps two items $i$ and $j$.

        With $\beta = 2$ and $k = (e_i - e_j) / \sqrt 2$, the matrix
        $I - \beta\, k k^\top$ is that permutation, and every permutation
        takes at most `items` - 1 of them.
        """
        assert self.limit == 2
        eye, items = torch.eye(WIDTH), self.items
        self.strength.zero_()  # Unneeded updates have strength 0.
        self.k.fill_(1)
        self.q.zero_()
        self.q[:items] = torch.arange(items) - (items - 1) / 2
        self.W.copy_(eye)
        self.to_out.weight.zero_()
        for token, permutation in enumerate(permutations(items)):
            for step, (i, j) in enumerate(swaps(permutation)):
                self.k[token, step] = eye[i] - eye[j]
                self.strength[token, step] = 1
            self.to_out.weight[token, permutation] = self.q[:items]


def swaps(permutation: Tensor) -> list[tuple[int, int]]:
    """Return pairs of items to swap whose product is the permutation."""
    now, pairs = list(range(len(permutation))), []
    for i, wanted in enumerate(permutation.tolist()):
        j = now.index(wanted)
        if i != j:
            now[i], now[j] = now[j], now[i]
            pairs.append((i, j))
    return pairs


def sequences(items: int, batch: int, length: int) -> Batch:
    """Sample sequences of random permutations, with their compositions as answers."""
    table = compositions(items)
    tokens = torch.randint(len(table), (batch, length))
    answers = [tokens[:, 0]]
    for t in range(1, length):
        answers.append(table[answers[-1], tokens[:, t]])
    return tokens, torch.stack(answers, 1)


def train(model: Composer, budget: int) -> list[tuple[int, float]]:
    """Train a model on sequences that get longer, and return the learning curve."""

    def adam(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Return an Adam optimizer that keeps `beta` in its range after every step."""
        optimizer = torch.optim.Adam(parameters, lr)
        optimizer.register_step_post_hook(lambda *_: model.strength.data.clamp_(0, 1))
        return optimizer

    return fit(
        model,
        lambda step: sequences(model.items, BATCH, growing(step, budget, NEAR)),
        *(loss, budget, LR),
        optimizer=adam,
        schedule=lambda optimizer, _, steps: CosineAnnealingLR(optimizer, steps),
        clip=None,
    ).curve


@torch.no_grad()
def score(model: Composer, length: int) -> float:
    """Return the scaled accuracy of the last 8 answers of random sequences."""
    tokens, answers = sequences(model.items, 256, length)
    right = (model(tokens).argmax(-1) == answers)[:, -8:].double()
    return scaled(right.mean().item(), model.tokens)


# --- Forgetting ---------------------------------------------------------


@torch.no_grad()
def recall(topics: int, decay: float | None) -> float:
    """Return the retrieval loss for the pairs of the last topic.

    Keys are random and new in every topic; values are one-hot vectors.
    """
    batch, length = 16, topics * PAIRS
    k = l2_normalize(torch.randn(batch, length, 1, D_KEY))
    order = torch.rand(batch, topics, PAIRS).argsort(-1).flatten(1)
    v = F.one_hot(order, PAIRS).float()[:, :, None]
    log_decay = torch.zeros(batch, length, 1)
    if decay is None:
        log_decay[:, ::PAIRS] = -torch.inf
    else:
        log_decay += torch.tensor(decay).log()
    beta = torch.ones_like(log_decay)
    _, W = ops.gated_delta_rule(k, k, v, beta, log_decay, return_state=True)
    retrieved = k[:, -PAIRS:, 0] @ W[:, 0].mT
    left = (retrieved - v[:, -PAIRS:, 0]).square().sum(-1).mean() / 2
    return round(left.item(), 5)


#: Difference from the papers, whose models have trained layers and values.
PROTOCOL = f"one head, trained state; trained on {NEAR} tokens, tested at {FAR}"


def composed(points: Points, settings: Iterable[tuple]) -> dict[str, Points]:
    """Return the runs of each composition, by the name of the setting."""
    groups = points.by(*COMPOSE)
    rows = {}
    for at in settings:
        weights, items, limit, steps = at
        what = "parity" if items == 2 else f"{items} items"
        hand = ", by hand" if weights == "by hand" else ""
        rows[f"{what}, β ≤ {limit}, n = {steps}{hand}"] = groups.get(at, Points())
    return rows


def claims(points: Points):
    only = "only n = 2 with beta up to 2 solves S3 (Siems et al. 2025)"
    chance, fail = lambda x: abs(x) < 0.1, lambda x: x < 0.5
    solve, perfect = lambda x: x > 0.95, lambda x: x == 1
    for text, published, settings, true in (
        ("parity, beta up to 1: at chance", "0.017 (Table 3)", PARITY[:1], chance),
        ("parity, beta up to 2: solved", "1.000 (Table 3)", PARITY[1:], solve),
        ("three items, n = 2, beta up to 2: solved", only, THREE[3:], solve),
        ("three items, n = 1 or beta up to 1: not solved", only, THREE[:3], fail),
        ("by hand, n = items - 1, beta = 2: perfect", "", BY_HAND, perfect),
        ("four items, n = 3, beta up to 2: solved", "", FOUR[3:], solve),
        ("four items, n < 3 or beta up to 1: not solved", "", FOUR[:3], fail),
    ):
        if settings[0] in FOUR and not points(items=4):
            continue  # The quick version has no runs with four items.
        rows = composed(points, settings)
        scores = {name: own["far"] for name, own in rows.items()}
        how = {"spec": ".3f", "x": "", "protocol": PROTOCOL if published else ""}
        yield every(text, scores, true, published, **how)
    for text, task, low, high in (
        ("one topic: a decay of 0.97 per step costs", "one topic", NO_DECAY, DECAY),
        ("topics change: erasing the old one helps", "topics", ERASE, NO_DECAY),
    ):
        # Compare seed by seed with a margin of a tenth, since losses may overlap.
        pairs = paired(*(points(task=task, forget=at) for at in (low, high)))
        sides = [[pair[i] for pair in pairs] for i in (0, 1)]
        off = [a - 0.9 * b for a, b in pairs]
        found = order(text, sides).found
        yield holds(text, off, lambda x: x < 0)._replace(found=found)


def draw(points: Points):
    own = points(task="compose")
    rows = composed(own, own.by(*COMPOSE))
    height = 2.8 + 0.3 * len(rows)
    heights = [len(rows) + 1, len(FORGET) + 1]
    figure, (upper, lower) = plots.panels(height, 2, height_ratios=heights)
    near, far = f"{NEAR} tokens, as in training", f"{FAR} tokens"
    columns(upper, rows, {"near": near, "far": far})
    upper.set(xlabel="scaled accuracy", xlim=(-0.1, 1.05))
    last = f"last of {TOPICS['topics']} topics"
    looks = ("one topic", SERIES[0], "s"), ("topics", SERIES[1], "D")
    for task, color, marker in looks:
        left = {forget: points(task=task, forget=forget)["loss"] for forget in FORGET}
        plots.rows(lower, left, color, marker, task if task == "one topic" else last)
    lower.set(xlabel="loss", xlim=(0, None))
    for ax in (upper, lower):
        ax.legend(loc="lower left", bbox_to_anchor=(-0.6, 1))
    return figure


def setup(point: Point) -> Point:
    return SETUP if point["weights"] == "trained" else {}


if __name__ == "__main__":
    main(__file__)
