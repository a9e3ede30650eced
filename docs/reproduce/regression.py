"""Solve regression in context: find the solver that a layer implements while it reads.

A layer reads pairs $(x_i, y_i)$ of one unknown linear map, and predicts the output
of another $x$. A fast weight layer can store a linear map in its memory.
"""

from typing import Any

import torch
from frame import Point, Points, every, main, order
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops, plots
from fwlab.feature_maps import l2_normalize
from fwlab.fit import SETUP, fit
from fwlab.plots import FAST, INK, OTHER

TITLE = "Regression in context"
SOURCE = "von Oswald et al. 2023 (one step of gradient descent)"
COST = "quick: 4 minutes of one core; full: 10 minutes"

LOOKS = {"sum": (OTHER, "s"), "delta": (FAST, "o"), "least squares": (INK, "^")}
#: The solver that each rule can implement.
SOLVERS = {
    "sum": "the best single step on all pairs",
    "delta": "the best steps pair by pair",
}
#: Variances of the noise in y, with labels.
NOISES = {0.0: "no noise", 0.25: "noise"}
#: Number of sequences per optimiser step, and in the test.
BATCH, TEST = 64, 8192
STEPS, LR = 1000, 0.05


def sizes(d: int) -> tuple[int, ...]:
    """Return the numbers of pairs per sequence for inputs of width `d`."""
    return d // 2, d, 2 * d, 4 * d


def points(quick: bool) -> list[Point]:
    d = 8 if quick else 16
    return [
        {"rule": rule, "noise": noise, "d": d, "n": n, "seed": seed}
        for noise in NOISES
        for n in sizes(d)
        for rule in LOOKS
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    d, n, noise = (point[name] for name in ("d", "n", "noise"))
    test = draw_pairs(TEST, n, d, noise)
    beta = curve = None
    if point["rule"] == "least squares":
        answers = least_squares(*test[:3], noise)
    else:
        layer = Layer(point["rule"], d)
        fitted = fit(layer, lambda _: draw_pairs(BATCH, n, d, noise), error, STEPS, LR)
        curve = fitted.curve
        with torch.no_grad():
            answers = layer(*test[:3])
        if point["rule"] == "delta":
            beta = round(layer.beta().item(), 3)
    loss = round(F.mse_loss(answers, test[3]).item(), 4)
    return {"loss": loss, "beta": beta, "curve": curve}


class Layer(nn.Module):
    """Apply one fast weight head with values $y_i$, without the rest of a model."""

    def __init__(self, rule: str, d: int) -> None:
        super().__init__()
        self.rule = rule
        self.query, self.key = (nn.Linear(d, d, bias=False) for _ in "qk")
        self.strength = nn.Parameter(torch.zeros(()))
        # Step size of the sum rule. The step size of the delta rule is beta.
        self.scale = nn.Parameter(torch.ones(()), requires_grad=rule == "sum")

    def beta(self) -> Tensor:
        """Return the write strength of the delta rule, the same for all pairs."""
        return self.strength.sigmoid()

    def forward(self, x: Tensor, y: Tensor, asked: Tensor) -> Tensor:
        """Return predictions for the inputs `asked` after the pairs of `x` and `y`.

        - `x`, `y`, `asked`: `[batch, n, d]`, `[batch, n]` and `[batch, d]`.
        - Returns `[batch]`.
        """
        # Only the last output is used, so the query is the same at every step.
        q = self.query(asked)[:, None, None].expand(-1, x.shape[1], 1, -1)
        k, v = self.key(x)[:, :, None], y[..., None, None]
        out: Any
        if self.rule == "sum":
            out = ops.sum_rule(q, k, v, normalize=False)
        else:
            beta = self.beta().expand(v.shape[:3])
            out = ops.delta_rule(q, l2_normalize(k), v, beta)
        return self.scale * out[:, -1, 0, 0]


def draw_pairs(batch: int, n: int, d: int, noise: float) -> tuple[Tensor, ...]:
    """Sample a random linear map, and inputs of norm 1, for each sequence.

    - Returns `x` `[batch, n, d]`, `y` `[batch, n]` with noise of this variance,
      the input to predict for `[batch, d]`, and its output `[batch]`. An output has
      variance 1, so that predicting 0 has a loss of 1.
    """
    w, x, e = (
        torch.randn(*shape) for shape in ((batch, d, 1), (batch, n + 1, d), (batch, n))
    )
    x = F.normalize(x, dim=-1)
    y = (x @ w)[..., 0]
    return x[:, :-1], y[:, :-1] + noise**0.5 * e, x[:, -1], y[:, -1]


def error(layer: nn.Module, pairs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean squared error of the predictions of a layer."""
    return F.mse_loss(layer(*pairs[:3]), pairs[3])


def least_squares(x: Tensor, y: Tensor, asked: Tensor, noise: float) -> Tensor:
    """Predict with the posterior mean of `w`, which is optimal on average."""
    x, y, asked = x.double(), y.double(), asked.double()
    inner = x @ x.mT + noise * torch.eye(x.shape[1])
    weights = torch.linalg.pinv(inner, hermitian=True, rtol=1e-9) @ y[..., None]
    return (asked[:, None] @ x.mT @ weights)[:, 0, 0].float()


# --- Losses of the solvers -----------------------------------------------


def best_step(n: int, d: int, noise: float) -> float:
    r"""Return the loss after one optimal gradient step on all pairs from $W = 0$.

    With $M = \sum_i x_i x_i^\top$, a step of size $\eta$ leaves
    $\mathbb E |(I - \eta M) w|^2 / d + \eta^2 \sigma^2 n / d$, where
    $\mathbb E M = n / d$ and $\mathbb E M^2 = n / d + n (n - 1) / d^2$.
    """
    return 1 - n / (d * (1 + noise) + n - 1)


def best_steps(n: int, d: int, noise: float) -> float:
    """Return the loss after one gradient step per pair, all of the optimal size.

    A step of size beta multiplies the loss by 1 - (2 beta - beta^2) / d on
    average, and adds beta^2 noise / d.
    """
    beta = torch.linspace(0.001, 1, 1000).double()
    kept = 1 - beta * (2 - beta) / d
    added = beta * noise / (2 - beta)
    return (kept**n * (1 - added) + added).min().item()


LAWS = {"sum": best_step, "delta": best_steps}


def claims(points: Points):
    """Yield our own claims that trained layers reach the losses of the solvers."""
    d = points[0]["d"]
    most = sizes(d)[-1]
    for noise, words in NOISES.items():
        some = points(noise=noise)
        for rule, solver in SOLVERS.items():
            off = {
                n: [
                    x / LAWS[rule](n, d, noise) - 1
                    for x in some(rule=rule, n=n)["loss"]
                ]
                for n in sizes(d)
            }
            yield every(
                f"{words}: {rule} ends within 10 % of {solver}",
                off,
                lambda x: abs(x) < 0.1,
                spec="+.1%",
                x="pairs",
                worst=abs,
            )
        rules = ("least squares", "delta", "sum")
        losses = {rule: some(rule=rule, n=most)["loss"] for rule in rules}
        yield order(f"{words}, {most} pairs: {{}}", losses)
    betas = [points(rule="delta", n=most, noise=noise)["beta"] for noise in (0.25, 0.0)]
    yield order(
        f"{most} pairs: a smaller beta is learned with noise", betas, spec=".2f"
    )


def draw(points: Points) -> Figure:
    figure, axes = plots.grid(len(NOISES), "pairs", "mean squared error", 2.6)
    for ax, (noise, words) in zip(axes, NOISES.items(), strict=True):
        for rule, (color, marker) in LOOKS.items():
            own = points(noise=noise, rule=rule)
            plots.series(ax, own, color, marker, "", rule, x="n")
            if own and rule in LAWS:
                pairs = range(min(own["n"]), max(own["n"]) + 1)
                losses = [LAWS[rule](n, own[0]["d"], noise) for n in pairs]
                ax.plot(pairs, losses, color=color)
        ax.set_title(words)
    plots.legend(figure, axes[0], columns=3)
    return figure


def setup(point: Point) -> Point:
    return (
        {}
        if point["rule"] == "least squares"
        else SETUP | {"batch": BATCH, "steps": STEPS, "lr": LR}
    )


if __name__ == "__main__":
    main(__file__)
