"""A rule of your own, and how to know that it is not better."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, shape
from fwlab.exercises.solutions import by_luck, gain, my_step, unequal
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step

Record = Mapping[str, Any]

#: What two runs should have in common, and how the checker calls it.
FIELDS = {
    "parameters": "Parameters",
    "data": "Data",
    "seeds": "Seeds",
    "tokens": "Training tokens",
    "windows": "Evaluation windows",
    "rates": "Learning rates tried",
}


def fairness(a: Record, b: Record) -> list[str]:
    """What is unequal between two records, in a sentence each.

    - `a`, `b`: each has `parameters`; `data`, a hash; `seeds`; `tokens`, how many
      it was trained on; `windows`, how many it was evaluated on; and `rates`, the
      learning rates of which it used the best. What a record does not say cannot
      be equal. Other entries do not matter.
    - Returns the sentences; none if all is equal.
    """
    differ = dict(zip(FIELDS, unequal(dict(a), dict(b)).tolist(), strict=True))
    return [
        f"{FIELDS[name]}: {_said(name, a)} against {_said(name, b)}{_more(name, a, b)}."
        for name in FIELDS
        if differ[name]
    ]


def _said(name: str, record: Record) -> str:
    value = record.get(name)
    if not value:
        return "not said"
    if name == "data":
        return str(value)[:8]
    if name == "seeds":
        return ", ".join(map(str, sorted(set(value))))
    return f"{len(set(value)) if name == 'rates' else value:,}"


def _more(name: str, a: Record, b: Record) -> str:
    x, y = a.get(name), b.get(name)
    if name in ("data", "seeds", "rates") or not (x and y):
        return ""
    return f" ({abs(x - y) / y:.1%} {'more' if x > y else 'fewer'})"


# --- by_luck --------------------------------------------------------


def _runs(generator: Generator, mine: int = 3, theirs: int = 3) -> dict[str, Tensor]:
    """Losses that are multiples of 1/64, so that their sums are exact."""
    losses = torch.randperm(64, generator=generator)[: mine + theirs].double() / 64 + 1
    return {"mine": losses[:mine], "theirs": losses[mine:]}


def _sorted_runs(generator: Generator, mine: int, theirs: int) -> dict[str, Tensor]:
    x = torch.cat(list(_runs(generator, mine, theirs).values())).sort().values
    order = torch.randperm(mine, generator=generator)
    return {"mine": x[:mine][order], "theirs": x[mine:]}


def _above(generator: Generator, mine: int, theirs: int) -> dict[str, Tensor]:
    """All of mine are worse."""
    runs = _sorted_runs(generator, theirs, mine)
    return {"mine": runs["theirs"], "theirs": runs["mine"]}


def _tied(generator: Generator, mine: int, theirs: int) -> dict[str, Tensor]:
    return {"mine": torch.ones(mine).double(), "theirs": torch.ones(theirs).double()}


def _share(mine: Tensor, theirs: Tensor, strict: bool = False) -> float:
    """The share of pairs of runs in which mine is not above theirs."""
    lower = mine[:, None] < theirs if strict else mine[:, None] <= theirs
    return lower.double().mean().item()


def _strictly(mine: Tensor, theirs: Tensor) -> float:
    return 1 - by_luck(-mine, -theirs)


def _two_sided(mine: Tensor, theirs: Tensor) -> float:
    return min(1.0, 2 * by_luck(mine, theirs))


def _paired(mine: Tensor, theirs: Tensor) -> float:
    """Only the signs of pairs change."""
    d = (mine - theirs).tolist()
    totals = [0.0]
    for x in d:
        totals = [t + s * x for t in totals for s in (1, -1)]
    return sum(t <= sum(d) + 1e-9 for t in totals) / len(totals)


BY_LUCK = Exercise(
    name="by_luck",
    notebook="18_project",
    difficulty=3,
    importance=5,
    minutes=12,
    task="**By luck.** `mine` and `theirs` are final losses, a tensor each, perhaps of "
    "different lengths. If the rules were equally good, all ways to divide these runs "
    "into two groups of these sizes would be equally likely. Return the share of the "
    "ways in which the mean of the first group is at most the mean of `mine`, a number.",
    reference=by_luck,
    properties=(
        agrees(
            "returns 1/20 for three runs that are below three others",
            _sorted_runs,
            [(3, 3)],
            expected=lambda mine, theirs: 1 / 20,
            because="Of six runs, three can be chosen in 20 ways. Only one has so low "
            "a mean.",
            catches={
                "This leaves out the division that was seen. It counts, too: no result "
                "has probability 0.": _strictly,
                "This counts both directions. The question is only whether mine is "
                "lower.": _two_sided,
                "This only changes the signs of pairs of runs. Here runs are not paired: "
                "all divisions count.": _paired,
                "This is the share of pairs of runs. Runs of a pair are not "
                "independent of other pairs.": (
                    _share,
                    lambda mine, theirs: 1 - _share(mine, theirs),
                ),
                "Half of the chance for each run: that would be so if each was compared "
                "with one other run alone.": lambda mine, theirs: (
                    0.5 ** len(mine) if mine.max() < theirs.min() else 0.5
                ),
            },
        ),
        agrees(
            "returns 1 if mine could not be higher, or if all runs are the same",
            lambda g, kind, mine, theirs: kind(g, mine, theirs),
            [(_above, 3, 3), (_above, 1, 4), (_tied, 2, 3)],
            expected=lambda mine, theirs: 1.0,
        ),
        agrees(
            "counts divisions for any runs",
            _runs,
            [(3, 3), (2, 5), (5, 2), (1, 6), (4, 4)],
            because="There were {mine} losses in mine, and {theirs} in theirs.",
        ),
    ),
    hints=(
        "Put all runs into one list. Which groups of len(mine) runs are there?",
        "itertools.combinations(runs, len(mine)) goes through them. Compare sums: all "
        "groups have the same size.",
        "The share is a mean of group_sum <= sum(mine). Sums in another order differ "
        "in the last digit, so allow 1e-9.",
    ),
    example=_runs,
)


# --- gain -----------------------------------------------------------


def _curves(
    generator: Generator, rates: int = 3, other: int = 3, seeds: int = 3
) -> dict[str, Tensor]:
    return {
        "bar": 1 + normal(generator, 2, rates, seeds).abs(),
        "mine": 1 + normal(generator, 2, other, seeds).abs(),
    }


def _copy(generator: Generator, rates: int) -> dict[str, Tensor]:
    """The same losses twice, of which the first rate is the worst."""
    bar = 1 + normal(generator, 2, rates, 3).abs()
    bar[:, 0] += 3
    return {"bar": bar, "mine": bar.clone()}


def _one_rate(generator: Generator, seeds: int) -> dict[str, Tensor]:
    return _curves(generator, 1, 1, seeds)


def _measured(losses: Tensor, chosen_by: int = 0, first: bool = False) -> Tensor:
    best = 0 if first else losses[chosen_by].mean(1).argmin()
    return losses[1, best].mean()


GAIN = Exercise(
    name="gain",
    notebook="18_project",
    difficulty=2,
    importance=5,
    minutes=9,
    task="**A gain out of nothing.** `bar` and `mine` are losses, `[2, rates, seeds]`, "
    "perhaps with different numbers of rates: first of validation, then of test. "
    "Return how much lower the mean test loss of `mine` is, a tensor without "
    "dimensions, each at the rate whose mean validation loss is smallest. For a copy of "
    "the bar, this code returns a gain. It has two bugs.",
    start="""\
def gain(bar, mine):
    test = mine[1]
    best = test.mean(1).argmin()
    return bar[1, 0].mean() - test[best].mean()""",
    reference=gain,
    properties=(
        shape("returns a number as a tensor", _curves, [(3, 3, 3), (4, 2, 5)]),
        agrees(
            "with one rate each, compares mean test losses",
            _one_rate,
            [3, 5, 1],
            because="The gain is positive if mine is lower.",
            catches={
                "The sign is turned around: a gain is positive if mine is lower.": (
                    lambda bar, mine: gain(mine, bar)
                ),
                "These are validation losses. They choose the rate, and so are too "
                "low.": lambda bar, mine: gain(bar[[0, 0]], mine[[0, 0]]),
                "This takes the best seed of each. Nobody can choose "
                "a lucky seed.": lambda bar, mine: bar[1].min() - mine[1].min(),
            },
        ),
        agrees(
            "gives a copy of the bar no gain",
            _copy,
            [2, 3, 5],
            expected=lambda bar, mine: bar.sum() * 0,
            because="There were {rates} rates, of which the first was the worst.",
            catches={
                "The bar runs at its first rate, while mine has its best. Each needs a "
                "choice of its own.": lambda bar, mine: (
                    _measured(bar, first=True) - _measured(mine)
                ),
                "Two bugs are left. Which rate does the bar run at, and which losses "
                "choose that of mine?": lambda bar, mine: (
                    _measured(bar, first=True) - _measured(mine, 1)
                ),
                "The bar is chosen by validation, and mine by its test loss.": (
                    lambda bar, mine: _measured(bar) - _measured(mine, 1)
                ),
            },
        ),
        agrees(
            "lets the validation loss choose the rate of each",
            _curves,
            [(4, 4, 3), (2, 6, 3), (5, 1, 4), (3, 3, 1)],
            because="The bar had {rates} rates, and mine {other}.",
            catches={
                "The test loss chooses the rates. A test loss that has chosen is no "
                "longer a test.": lambda bar, mine: (
                    _measured(bar, 1) - _measured(mine, 1)
                ),
            },
        ),
    ),
    hints=(
        "Do for the bar what is done for mine, in a loop over both.",
        "Which of the two rows of losses may choose? The other one is what you report.",
        "best = validation.mean(1).argmin() for each, and test[best].mean().",
    ),
    example=_curves,
)


# --- unequal --------------------------------------------------------


def _record() -> dict[str, Any]:
    return {
        "parameters": 795904,
        "data": "86c4e6aa",
        "seeds": (0, 1, 2),
        "tokens": 1536000,
        "windows": 240,
        "rates": (0.001, 0.003),
    }


def _pair(generator: Generator, **change: Any) -> dict[str, Any]:
    """Two records, which differ in these entries."""
    return {"a": _record(), "b": _record() | change}


def _missing(generator: Generator, where: str, entry: str) -> dict[str, Any]:
    records = {"a": _record(), "b": _record()}
    del records["b"][entry]
    if where == "both records":
        del records["a"][entry]
    return records


def _random_pair(generator: Generator) -> dict[str, Any]:
    others: dict[str, Any] = {
        "parameters": 795905,
        "data": "c4e686aa",
        "seeds": (0, 1, 3),
        "tokens": 1536001,
        "windows": 24,
        "rates": (0.001, 0.002, 0.003),
    }
    flips = torch.rand(6, generator=generator) < 0.5
    change = {name: x for (name, x), f in zip(others.items(), flips, strict=True) if f}
    return _pair(generator, **change)


def _with(a: Record, b: Record, name: str, differs: bool) -> Tensor:
    """The right answer but for one entry."""
    result = unequal(dict(a), dict(b))
    result[list(FIELDS).index(name)] = float(differs)
    return result


UNEQUAL = Exercise(
    name="unequal",
    notebook="18_project",
    difficulty=2,
    importance=4,
    minutes=12,
    task="**What is unequal?** `a` and `b` are records, dictionaries with "
    '`"parameters"`, `"data"` (a hash), `"seeds"`, `"tokens"`, `"windows"` and '
    '`"rates"`. Return a tensor of six booleans, in this order, true where the records '
    "are unequal and false where they are equal. Seeds are tuples of numbers in any "
    "order; the same seed twice is one run. Of the rates, compare how *many different* "
    "ones were tried: each rule has its own. What a record does not say cannot be equal, "
    "even if neither says it.",
    reference=unequal,
    properties=(
        shape("returns six numbers", _pair),
        agrees(
            "finds nothing in a record and its copy",
            _pair,
            expected=lambda a, b: torch.zeros(6).double(),
            catches={
                "This is 1 where records are equal.": lambda a, b: 1 - unequal(a, b),
            },
        ),
        agrees(
            "finds each number that differs, by however little",
            _pair,
            [
                {"parameters": 795905},
                {"data": "c4e686aa"},
                {"tokens": 1536001},
                {"windows": 24},
            ],
            because="The order is parameters, data, seeds, tokens, windows, rates.",
        ),
        agrees(
            "compares the sets of seeds",
            _pair,
            [{"seeds": (2, 0, 1)}, {"seeds": (0, 1, 2, 2)}, {"seeds": (0, 1, 3)}],
            because="The seeds of b were {change[seeds]}, those of a 0, 1 and 2.",
            catches={
                "This compares seeds in their order. Three runs are the same three "
                "in any order.": lambda a, b: _with(
                    a, b, "seeds", a.get("seeds") != b.get("seeds")
                ),
                "This compares how many seeds there are. They should be the same seeds: "
                "they draw the batches.": lambda a, b: _with(
                    a, b, "seeds", len(a.get("seeds", ())) != len(b.get("seeds", ()))
                ),
                "The same seed twice is one run: it counts once.": lambda a, b: _with(
                    a,
                    b,
                    "seeds",
                    sorted(a.get("seeds", ())) != sorted(b.get("seeds", ())),
                ),
            },
        ),
        agrees(
            "counts different learning rates",
            _pair,
            [
                {"rates": (0.01, 0.1)},
                {"rates": (0.001, 0.003, 0.001)},
                {"rates": (0.001,)},
            ],
            because="The rates of b were {change[rates]}, those of a 0.001 and 0.003. The last of the six "
            "numbers is theirs.",
            catches={
                "This compares the rates themselves. Each rule has its own best rate: "
                "equal is how many were tried.": lambda a, b: _with(
                    a, b, "rates", set(a.get("rates", ())) != set(b.get("rates", ()))
                ),
                "The same rate twice is one try.": lambda a, b: _with(
                    a, b, "rates", len(a.get("rates", ())) != len(b.get("rates", ()))
                ),
            },
        ),
        agrees(
            "takes what a record does not say as unequal",
            _missing,
            [(where, f) for where in ("one record", "both records") for f in FIELDS],
            because="{entry} was missing in {where}.",
            catches={
                "If neither record says it, nobody knows whether it was "
                "equal.": lambda a, b: (
                    unequal(a, b) * torch.tensor([f in a or f in b for f in FIELDS])
                ),
            },
        ),
        agrees("finds several differences at once", _random_pair, [()] * 6),
    ),
    hints=(
        "r.get(name) is None where a record r does not say something.",
        'set(r["seeds"]) forgets order and repeats; len(set(r["rates"])) counts.',
        "Write a function that makes a record comparable, then a list of six "
        "comparisons, and torch.tensor(list).",
    ),
    example=_random_pair,
)


# --- my_step --------------------------------------------------------

#: Other draws of eight pairs, and how many of them a rule has to win. By luck alone
#: that happens once in 170 times.
DRAWS, WINS = 20, 16


def draws() -> tuple[Tensor, Tensor]:
    """Keys and values of twenty other sets of eight pairs, `[20, 8, 8]`."""
    generator = torch.Generator().manual_seed(2021)
    keys, values = normal(generator, 2, DRAWS, 8, 8)
    return l2_normalize(keys), values


def errors(step: Answer) -> Tensor:
    """For each draw the mean of the two errors of the table, `[20]`.

    - `step`: takes `W` `[..., 8, 8]`, `k` `[..., 8]` and `v` `[..., 8]`.
    """
    keys, values = draws()
    new = torch.cat([values.flip(1)[:, :4], values[:, 4:]], 1)
    W, found = torch.zeros_like(values), []
    for wanted, count in ((values, 8), (new, 4)):
        for t in range(count):
            W = step(W, keys[:, t], wanted[:, t])
        off = (keys @ W.mT - wanted).square().sum((1, 2))
        found.append(off / wanted.square().sum((1, 2)))
    return torch.stack(found).mean(0).detach()


def constant(strength: float) -> Answer:
    """The delta rule with this strength."""
    return lambda W, k, v: delta_step(W, k, v, torch.full_like(k[..., 0], strength))


#: The best constant strength of the delta rule, to a tenth.
STRENGTH = 0.7


def _memory(generator: Generator, *lead: int) -> dict[str, Tensor]:
    return {
        "W": normal(generator, *lead, 8, 8),
        "k": l2_normalize(normal(generator, *lead, 8)),
        "v": normal(generator, *lead, 8),
    }


def _alone(answer: Answer, reference: Answer, generator: Generator) -> None:
    W, k, v = _memory(generator, 2, 3).values()
    together = ask(answer, W, W=W, k=k, v=v)
    for i, j in ((0, 2), (1, 0)):
        one = ask(answer, W[i, j], W=W[i, j], k=k[i, j], v=v[i, j])
        if not torch.allclose(together[i, j], one, rtol=1e-6, atol=1e-9):
            raise Wrong(
                f"Memory [{i}, {j}] of six came out otherwise than alone. Does a sum go "
                "over all dimensions?"
            )


def _wins(answer: Answer, reference: Answer, generator: Generator) -> None:
    def asked(W: Tensor, k: Tensor, v: Tensor) -> Any:
        return ask(answer, W, W=W, k=k, v=v)

    yours, bar = errors(asked), errors(constant(STRENGTH))
    if not torch.isfinite(yours).all():
        raise Wrong("Some errors are NaN or infinite.")
    wins = int((yours < bar - 1e-9).sum())
    if wins < WINS:
        raise Wrong(
            f"Your rule had the smaller error in {wins} of {DRAWS} draws; {WINS} are "
            f"needed. Its mean error is {yours.mean():.3f}, that of the delta rule with "
            f"strength {STRENGTH} {bar.mean():.3f}."
        )


MY_STEP = Exercise(
    name="my_step",
    notebook="18_project",
    difficulty=4,
    importance=4,
    minutes=20,
    task="**Your rule.** From `W` `[..., 8, 8]`, a key `k` `[..., 8]` and a value `v` "
    "`[..., 8]`, return the new memory. Draw keys of length 1 and values at random, write "
    "eight pairs, then give four of the keys new values, as in the table of the eight "
    "pairs. Your mean error of the two columns should be below that of the delta rule "
    "with its best constant strength, 0.7, in at least 16 of 20 draws.",
    reference=my_step,
    properties=(
        shape("returns a memory of the shape of W", _memory, [(), (2, 3)]),
        Property("treats each memory as if it were alone", _alone),
        Property(
            "beats the delta rule in at least 16 of 20 draws",
            _wins,
            {
                "This is the sum rule: it never replaces a value.": (
                    lambda W, k, v: W + v[..., :, None] * k[..., None, :]
                ),
                "This is the delta rule at full strength: each write disturbs all "
                "other keys as much as it can.": constant(1.0),
                "This is the bar itself.": constant(STRENGTH),
                "This is half a step, or the implicit step with beta = 1: it replaces "
                "too little.": constant(0.5),
            },
        ),
    ),
    hints=(
        "What disturbs a pair? A later write under a key that overlaps. Write where W "
        "holds little.",
        "W^T (W k) points to the directions of keys that W holds and that overlap with "
        "k. Write under k minus a little of it, and scale so that the step for k stays "
        "the same.",
        "W + 0.7 (v - W k) m^T with m = k - 0.1 W^T (W k) / |v|², divided by m · k.",
    ),
    example=_memory,
)

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise for exercise in (BY_LUCK, GAIN, UNEQUAL, MY_STEP)
}
