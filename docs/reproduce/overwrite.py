"""Test which rules can replace a value: setting 2 of Schlag et al. 2021.

Keys return with new values, and the most recent one counts. A rule that
only adds retrieves a mixture of all values that a key ever had.
"""

from math import inf, isinf
from statistics import median
from typing import Any

from frame import Claim, Points, every, holds, main, order
from matplotlib.figure import Figure
from synthetic import Series, Setting, by_size, narrow, near, ordered, protocol

from fwlab import plots
from fwlab.data.retrieval import columns
from fwlab.models.retriever import ALL, ONE
from fwlab.plots import FAST, INK, SERIES, WRONG

TITLE = "Which rules can replace a value"
SOURCE = "Schlag et al. 2021, setting 2, Figs. 3 (S = 20) and 5"
COST = "quick: 3 min of one core; full: 1.9 hours"

#: Final losses in the authors' logs, on sequences of L = S pairs; one seed each.
#: Figure 5 shows all losses, and Figure 3 shows S = 20. One log ends at step 300.
PUBLISHED = columns("""
  S  delta/dpfp-1  delta/dpfp-2  delta/linear  sum/dpfp-1  fwm/dpfp-1  fwm/tanh  delta/favor-64
 20        0.0008        0.0010        0.0008      0.1048      0.0505    1.6900          0.1094
 40        0.0010        0.0005        0.0007      0.1136      0.4986    4.9900               -
 60        0.0061        0.0005        0.0005      0.1229      0.4997    9.7200               -
 80        0.0106        0.0008        0.1014      0.1190      0.5412   30.8000               -
100        0.0001             -        0.1615      0.1165      0.6869   43.5000               -
120        0.0183        0.0007        0.2229      0.1332      0.6265   56.3000               -
140        0.0493        0.0003        0.2640      0.1569      1.0550   60.4000               -
160        0.1142        0.0004        0.2909      0.1828      3.9240   74.9000               -
180        0.1384        0.0004        0.3220      0.2097      4.0320   85.7000               -
200        0.1855        0.0008        0.3425      0.2386      2.2820   96.9000               -
""")
#: Numbers of keys in the full version, and in the quick version.
SIZES, QUICK = (20, 40, 60, 80, 100, 120, 140, 200), (8, 16)
#: Rows of the grid. The paper does not run the gated rule.
#: `fwm` stores the fast weights of all steps, so it runs with small S and one key.
#: With delta and DPFP-1, numbers of keys between the edges are partly solved.
ROWS: tuple[tuple[Any, ...], ...] = (
    ("sum", "dpfp-1", WRONG, SIZES, (0, 0), QUICK, (8,), (20,), "D", "-."),
    ("gated", "dpfp-1", SERIES[1], SIZES[:5], None, QUICK, (), (20,), "v", "--"),
    ("fwm", "dpfp-1", SERIES[2], (), (0, 0), (), (8,), (20, 40), "P", "-"),
    ("fwm", "tanh", SERIES[2], (), None, (), (), (20,), "X", ":", 1e-4, 128),
    ("delta", "linear", FAST, SIZES, (60, 80), QUICK, (), None, "s", ":"),
    ("delta", "dpfp-1", FAST, SIZES, (40, 120), QUICK, (8,), None, "o", "-"),
    ("delta", "dpfp-2", FAST, SIZES, (200, inf), (), (), None, "^", "--"),
    ("delta", "favor-64", SERIES[0], (), None, (), (), (20, 40), "*", ":"),
)
SETTING = Setting(
    tuple(
        Series(
            PUBLISHED.get(f"{rule}/{phi}", {}),
            *(
                rule,
                phi,
                f"{rule}, {phi.replace('dpfp', 'DPFP').replace('favor-64', 'FAVOR+')}",
                *rest,
            ),
        )
        for rule, phi, *rest in ROWS
    ),
    repeat=True,
    figure="Fig. 5",
    anchors=(20,),
    d_key=32,
    budget=2000,
)
SUM, GATED, FWM, FWM_TANH, LINEAR, DPFP_1, DPFP_2, FAVOR = SETTING.series


def claims(points: Points):
    quick = narrow(points)
    if len(points) < len(SETTING.points(quick)):
        return  # The claims need all sizes.
    yield from SETTING.edges(points)
    for ask in (ALL, ONE):
        yield gap(points(ask=ask, map="dpfp-1"), ask)
    # Order the rules from the lowest to the highest published loss.
    rules, S, where = [DPFP_1, FWM, SUM, FWM_TANH], 20, "(Fig. 3)"
    if quick:
        rules, S, where = rules[:3], 8, "at S = 20 (Fig. 3)"
    small = points(S=S, ask=ONE)
    yield ordered(f"S = {S}, {ONE}: {{}}", small, rules, 20, where)
    if not quick:
        for s, start in ((SUM, 20), (LINEAR, 80), (DPFP_1, 120)):
            own = Points(p for p in s.of(points, ask=ALL) if p["S"] >= start)
            yield near(f"{s.label}, from S = {start}", own, s.published)
        own = FAVOR.of(points)
        yield near(f"{FAVOR.label}, S = 20", own, FAVOR.published)
        yield holds(
            f"{FAVOR.label}, S = 40: training fails",
            own(S=40)["loss"],
            isinf,
            "NaN (logs)",
            protocol=protocol(own),
        )
        large, rules = points(S=200, ask=ALL), [DPFP_2, DPFP_1, SUM, LINEAR]
        yield ordered(f"S = 200, {ALL}: {{}}", large, rules, 200, "(Fig. 5)")
        delta = DPFP_1.of(small)
        yield holds(
            f"S = 20, {ONE}: delta, DPFP-1 is solved within 1,000 optimiser steps",
            [p["steps"] if p["ended"] == "solved" else inf for p in delta],
            lambda steps: steps <= 1000,
            "700 (Fig. 3)",
            spec=".0f",
            protocol=protocol(small),
        )
    # With more repetitions the sum rule gets worse.
    add = SUM.of(small)
    text = f"S = {S}, sum, DPFP-1, {ONE}: better evaluated at L = S than at L = 2S"
    yield order(text, [add["loss"], add["loss_2S"]])
    yield SETTING.agreement(points)


def gap(points: Points, ask: str) -> Claim:
    """Return a claim that delta has a lower loss than sum at all common sizes."""
    low, high = (by_size(s.of(points)) for s in (DPFP_1, SUM))
    sizes = [S for S in low if S in high]
    theirs = [
        loss - DPFP_1.published[S]
        for S, loss in SUM.published.items()
        if S in sizes or narrow(points)
    ]
    claim = every(
        f"DPFP-1, {ask}: sum's loss minus delta's: above 0 at every S",
        {S: [median(high[S]) - median(low[S])] for S in sizes},
        lambda gap: gap > 0,
        f"at least {min(theirs):.4f} (Fig. 5)",
        worst=lambda gap: -gap,
        protocol=protocol(points),
    )
    # Differences of medians do not show whether seeds overlap.
    overlap = any(max(low[S]) >= min(high[S]) for S in sizes)
    seeds = min(len(side[S]) for side in (low, high) for S in sizes)
    apart = False if overlap else True if seeds >= 3 else None
    return claim._replace(apart=apart, seeds=seeds)


def draw(points: Points) -> Figure:
    quick = narrow(points)
    figure, (left, right) = plots.grid(2, "number of keys $S$", "loss", height=3.6)
    for s in SETTING.series:
        own = points(rule=s.rule, map=s.map)
        if not own or s is FWM_TANH:  # The losses of FWM are far above the chart.
            continue
        look = (s.color, s.marker, s.line)
        most = own(ask=ALL) or own
        one = Points(p for p in own if p not in most)
        plots.series(left, most, *look, s.label)
        plots.series(right, most, *look, y="loss_2S")
        for ax, y in ((left, "loss"), (right, "loss_2S")):
            plots.marks(ax, one["S"], one[y], "+", color=s.color, markersize=6)
        if not quick and s.published:
            plots.published(left, s.published, s.color)
    left.set(title="evaluated at $L = S$", ylim=(-0.02, 0.6))
    right.set(title="evaluated at $L = 2S$")
    if not quick:
        plots.published(left, {}, INK, "published")
    plots.marks(left, [], [], "+", color=INK, label=f"{ONE} asked")
    plots.legend(figure, left, columns=2)
    return figure


points, run, setup = SETTING.points, SETTING.run, SETTING.setup

if __name__ == "__main__":
    main(__file__)
