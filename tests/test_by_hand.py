"""Compare every operation and feature map with fractions that were computed by hand.

The fuzzer compares all forms with loops by people who know fwlab, and would not find
an error in both. No number here was computed by a program.
"""

import math
from math import inf, log

import pytest
import torch
from torch import Tensor

from fwlab import ops
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize


def double(numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def same(found: Tensor, wanted) -> None:
    wanted = wanted if isinstance(wanted, Tensor) else double(wanted)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-12, atol=1e-12)


def forms(op: str) -> list[str]:
    return [name for name in ops.implementations(op) if name in FORMS]


FORMS = ("naive", "chunked", "efficient")
both = pytest.mark.parametrize("implementation", ["naive", "efficient"])

#: Steps from W = (1, 2) for the query (1, 1); with a normaliser, z = (2, 1).
#: Each entry has the remaining arguments, W after the step, and the output.
STEPS = {
    # W decays to (1/2, 1/2), and 2 (1, 2) is added (Eqs. 17, 25).
    "sum": (
        {"k": (1, 2), "v": [2], "log_decay": (log(1 / 2), log(1 / 4))},
        (2.5, 4.5),
        7,
    ),
    # W = (4, 2) and z = (3, 1) give the output 6 / 4 (Eqs. 18, 19).
    "sum normalized": ({"k": (1, 0), "v": [3]}, (4, 2), 3 / 2),
    # W is half of (1, 2) plus half of 4 (1, 1), and z is (3/2, 1) (Eq. 52).
    "gated": ({"k": (1, 1), "v": [4], "beta": 1 / 2}, (2.5, 3), 5.5),
    "gated normalized": ({"k": (1, 1), "v": [4], "beta": 1 / 2}, (2.5, 3), 11 / 5),
    # The key retrieves 3, and half of 7 - 3 is written (Eqs. 20, 24).
    "delta": ({"k": (1, 1), "v": [7], "beta": 1 / 2}, (3, 4), 7),
    # The key retrieves 3/3, half of 7 - 1 is written, and z is (3, 2) (Eqs. 26 to 28).
    "delta normalized": ({"k": (1, 1), "v": [7], "beta": 1 / 2}, (4, 5), 9 / 5),
    # The key retrieves 3/2 from (1/2, 1), and half of 5/2 - 3/2 is written.
    "gated_delta": (
        {"k": (1, 1), "v": [2.5], "beta": 1 / 2, "log_decay": log(1 / 2)},
        (1, 1.5),
        5 / 2,
    ),
    # The decay cancels in 3/3, half of 5 - 1 is written, and z is (1, 1/2) + (1, 1).
    "gated_delta normalized": (
        {"k": (1, 1), "v": [5], "beta": 1 / 2, "log_decay": log(1 / 2)},
        (2.5, 3),
        11 / 7,
    ),
    # W decays to (1/2, 2), and the first entry moves halfway from 1/2 to 1.
    "kimi_delta": (
        {"k": (1, 0), "v": [1], "beta": 1 / 2, "log_decay": (log(1 / 2), 0)},
        (0.75, 2),
        11 / 4,
    ),
    # The step size is 1/5, because |k|^2 is 4, and a fifth of 7 - 2 is written.
    "implicit_delta": ({"k": (2, 0), "v": [7], "beta": 1}, (3, 2), 5),
    # The key retrieves a third of 1/2 + 1, and half of 5/2 - 1/2 is written.
    "comba": (
        {"k": (1, 1), "v": [2.5], "beta": 1 / 2, "log_decay": log(1 / 2), "ask": 1 / 3},
        (1.5, 2),
        3.5,
    ),
    # W decays to (1/2, 2), the key (2, 1/2) retrieves 2, and 6/2 - 2 is written.
    "gated_delta_rule_2": (
        {"k": (2, 1), "v": [6], "erase": (1, 1 / 2), "write": [1 / 2]}
        | {"log_decay": (log(1 / 2), 0)},
        (2.5, 3),
        5.5,
    ),
    # W decays to (1/2, 1); 1 is written at (1, 0), and half of 9/2 - 5/2 at (1, 1).
    "delta_product": (
        {"k": [(1, 0), (1, 1)], "v": [[1.5], [4.5]], "beta": [1, 1 / 2]}
        | {"log_decay": log(1 / 2)},
        (2.5, 2),
        4.5,
    ),
    # W decays to (1/2, 0); (1 - 2) (1, 2) and 3 (1, 1) are added.
    "rwkv7": (
        {"k": (1, 1), "v": [3], "a": (1, -1), "b": (1, 2)}
        | {"log_decay": (log(1 / 2), -inf)},
        (2.5, 1),
        3.5,
    ),
}


def name_of(rule: str) -> str:
    first = rule.split()[0]
    return first if first in ops.TABLE else f"{first}_rule"


@pytest.mark.parametrize(
    ("rule", "implementation"),
    [(rule, form) for rule in STEPS for form in forms(name_of(rule))],
)
def test_one_step_by_hand(rule, implementation):
    given, after, read = STEPS[rule]

    def shaped(x):
        """Add batch, time and head dimensions of size 1 to a step's numbers."""
        x = double(x)
        several = rule == "delta_product" and x.dim()
        return x[None, None, :, None] if several else x[None, None, None]

    options = {"state": double([[[[1, 2]]]])}
    if rule.endswith("normalized"):
        options = {
            "normalize": True,
            "state": ops.NormalizedState(*options.values(), double([[[2, 1]]])),
        }
    elif rule == "sum":
        options["normalize"] = False
    y, state = getattr(ops, name_of(rule))(
        double([[[[1, 1]]]]),
        **{name: shaped(x) for name, x in given.items()},
        **options,
        return_state=True,
        implementation=implementation,
    )
    W = state.W if isinstance(state, tuple) else state
    same(W.flatten(), double(after))
    same(y.flatten(), [read])


@pytest.mark.parametrize("implementation", FORMS)
def test_appendix_a(implementation):
    """A delta step agrees with the updates in Eq. 23 and, for beta = 1, in Eq. 51."""
    k, W = double([3, 0, 1]) / 4, double([[1, 2, 3], [-1, 0, 2]])
    v, beta = double([2, -3]), 0.25
    v_bar = W @ k
    mixed = beta * v + (1 - beta) * v_bar  # Eq. 22
    eq_23 = W + torch.outer(mixed, k) - torch.outer(v_bar, k)
    columns = [
        W[:, i] + k[i] * v - sum(k[i] * k[j] * W[:, j] for j in range(3))
        for i in range(3)
    ]
    for strength, wanted in ((beta, eq_23), (1, torch.stack(columns, 1))):
        _, found = ops.delta_rule(
            *(x[None, None, None] for x in (k, k, v)),
            double([[[strength]]]),
            state=W[None, None],
            return_state=True,
            implementation=implementation,
        )
        same(found[0, 0], wanted)


@pytest.mark.parametrize("op", ["gated_rule", "delta_rule"])
@pytest.mark.parametrize("implementation", FORMS)
def test_appendix_b(op, implementation):
    """The delta rule keeps values of orthogonal keys; the gated rule scales them."""
    keys = double([[1, 0, 0], [0, 1, 0]])
    v1, v2, v3 = double([[1, 2, 3], [4, 5, 6], [8, 5, 2]])
    W = torch.outer(v1, keys[0]) + torch.outer(v2, keys[1])
    _, W = getattr(ops, op)(
        *(x[None, None, None] for x in (keys[1], keys[1], v3)),
        double([[[1 / 4]]]),
        **({"normalize": False} if op == "gated_rule" else {}),
        state=W[None, None],
        return_state=True,
        implementation=implementation,
    )
    same(W[0, 0] @ keys[0], v1 if op == "delta_rule" else 0.75 * v1)
    same(W[0, 0] @ keys[1], [5, 5, 5])


@both
def test_fwp(implementation):
    """With the default activation, each step computes W = tanh(W + 1) (Eqs. 2, 3)."""
    one = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    w, wanted = 0.0, []
    for _ in range(3):
        w = math.tanh(w + 1)
        wanted.append(w)
    same(ops.fwp(one, one, one, implementation=implementation).flatten(), wanted)
    linear = ops.fwp(one, one, one, None, implementation=implementation)
    same(linear.flatten(), [1, 2, 3])


@both
def test_softmax_attention(implementation):
    """Outputs are means of 8, 4 and -2 with weights 1, 3 and 4 (Eq. 7)."""
    q, k = torch.zeros(2, 1, 3, 1, 4, dtype=torch.float64)
    q[..., 0], k[0, :, 0, 0] = 2, double([1, 3, 4]).log()  # q / sqrt(4) is 1.
    v = double([8, 4, -2]).view(1, 3, 1, 1)
    y = ops.softmax_attention(q, k, v, implementation=implementation)
    same(y.flatten(), [8, 20 / 4, 12 / 8])


def test_feedback_attention():
    """Two memories are weighted by keys and relative positions (Eqs. f3 to f5)."""
    q = double([[1, 0, 2, -1]])[None]
    k = double([[[1, 1, 0, 0]], [[0, 0, 1, 3]]])[None]
    v = double([[[1, 2, 3, 4]], [[5, 6, 7, 8]]])[None]
    P = double([[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 1, 1], [0, 0, 0, 3]])
    found = ops.feedback_attention(q, k, v, P)[0, 0]

    def wave(n):  # This is q . P s with the frequencies 1 and 1/100.
        return (
            math.sin(n) + 2 * (math.cos(n) + math.cos(n / 100)) - 3 * math.cos(n / 100)
        )

    # q . k is 1 and 2 - 3; the root of d_key is 2.
    old, new = (1 + wave(2)) / 2, (-1 + wave(1)) / 2
    weight = 1 / (1 + math.exp(new - old))
    same(found, weight * v[0, 0, 0] + (1 - weight) * v[0, 1, 0])


@both
def test_feedback(implementation):
    """A layer of width 2 has known outputs for two steps (Eqs. f1, f2, f6, f7).

    The second step attends to one memory, which has weight 1 for any key.
    """
    one = torch.ones(1, 2, 2, dtype=torch.float64)
    weights = ops.FeedbackWeights(
        merge=double([3 / 4, 1 / 4]).log(),
        norm_mixer=one[0, :1],
        to_q=one,
        to_k=one,
        to_v=double([[[1, 2], [0, 1]]]),
        positions=torch.ones(1, 2, dtype=torch.float64),
        to_out=double([[[2, -1], [1, 1]]]),
        norm_mlp=one[0, :1],
        expand=double([[[1, 0]]]),
        contract=double([[[1], [-2]]]),
        norm_memory=None,
    )

    def layer(x, z):
        a, b = x[0] + 2 * z[0] - z[1], x[1] + z[0] + z[1]
        half = (a - b) / 2  # This is the distance of a from the mean of a and b.
        u = half / math.sqrt(half**2 + 1e-5)
        h = u * (1 + math.erf(u / math.sqrt(2))) / 2
        return a + h, b - 2 * h

    first = layer((3, 1), (0, 0))
    m = [3 / 4 * x + y / 4 for x, y in zip((3, 1), first, strict=True)]
    second = layer((1, 5), (m[0] + 2 * m[1], m[1]))
    x = double([[[3, 1], [1, 5]]])
    y = ops.feedback(x, weights, heads=2, implementation=implementation)
    same(y[0], [first, second])


# --- AFT ---------------------------------------------------------------
#
# A key of log n has weight n, so every mean is a fraction.
# Three steps have the weights 1, 2 and 3, and the values 6, 12 and 30.
# The gates are 1/2, 1/2 and 3/4, since the sigmoid of log n is n / (n + 1).

Q, K = double([0, 0, log(3)]).view(1, 3, 1), double([1, 2, 3]).log().view(1, 3, 1)
V = double([6, 12, 30]).view(1, 3, 1)


@both
def test_aft_simple(implementation):
    how = {"implementation": implementation}
    # The means are 6, (6 + 24) / 3 = 10 and (6 + 24 + 90) / 6 = 20.
    y, state = ops.aft_simple(Q, K, V, return_state=True, **how)
    same(y.flatten(), [3, 5, 15])
    same(torch.cat(state).flatten(), [log(6), 20])
    # Without step 1, the means are 6 and (6 + 90) / 4 = 24; if not causal, both are 24.
    keep = torch.tensor([[True, False, True]])
    same(ops.aft_simple(Q, K, V, key_mask=keep, **how).flatten(), [3, 0, 18])
    y = ops.aft_simple(Q, K, V, key_mask=keep, causal=False, **how)
    same(y.flatten(), [12, 0, 18])


@both
def test_aft_full(implementation):
    # Weights are exp(key + bias). Row 1: weights 2, 6 and mean (12 + 72) / 8 = 21/2.
    # Row 2 has the weights 6, 12 and 6 and the mean (36 + 144 + 180) / 24 = 15.
    how, bias = (
        {"implementation": implementation},
        double([[5, 7, 7], [2, 3, 7], [6, 6, 2]]).log(),
    )
    same(ops.aft_full(Q, K, V, bias, **how).flatten(), [3, 21 / 4, 45 / 4])
    # If not causal, row 0 has weights 5, 14 and 21, and row 1 has 2, 6 and 21.
    y = ops.aft_full(Q, K, V, bias, causal=False, **how)
    same(y.flatten(), [207 / 20, 357 / 29, 45 / 4])


@both
def test_aft_local_and_conv(implementation):
    # The bias is 2 for the current step, 3 for the step before, and 1 for older steps.
    # Row 1 has the mean (18 + 48) / 7, and row 2 has the mean (6 + 72 + 180) / 13.
    how, band = {"implementation": implementation}, double([[2, 3]] * 3).log()
    y, state = ops.aft_local(Q, K, V, band, return_state=True, **how)
    same(y.flatten(), [3, 33 / 7, 387 / 26])
    # Steps 0 and 1, which have the mean 10, are older than the next window.
    same(torch.cat([state.log_sum, state.mean]).flatten(), [log(3), 10])
    # If not causal, the next step has bias 5; means: (12 + 120 + 90) / 15, 516 / 22.
    y = ops.aft_local(Q, K, V, double([[2, 3, 5]] * 3).log(), causal=False, **how)
    same(y.flatten(), [37 / 5, 129 / 11, 387 / 26])
    # The second head has doubled values and the biases 1 and 4.
    # The means of head 2 are 12, (48 + 48) / 6 and (12 + 192 + 180) / 12.
    q, k, v = (torch.stack(x, 2) for x in ((Q, Q), (K, K), (V, 2 * V)))
    y = ops.aft_conv(q, k, v, double([[2, 3], [1, 4]]).log(), **how)
    same(y[0, ..., 0].T, [[3, 33 / 7, 387 / 26], [6, 8, 24]])


@both
def test_aft_image(implementation):
    """AFT-conv has known outputs for 3 by 3 pixels with keys of 0 and values 1 to 9."""
    zeros = torch.zeros(1, 3, 3, 1, 1, dtype=torch.float64)
    v = torch.arange(1, 10).double().view(1, 3, 3, 1, 1)
    # Weights are 2 to the left, 3 below, 4 above on the right, and 5 for the pixel.
    kernel = double([[[1, 1, 4], [2, 5, 1], [1, 3, 1]]]).log()
    y = ops.aft_conv2d(zeros, zeros, v, kernel, implementation=implementation)
    # The sum of all values is 45, and the sum of all weights is 9.
    # Pixel 5 has the mean (45 + 4 * 5 + 4 + 2 * 8 + 3 * 3) / (9 + 4 + 1 + 2 + 3).
    # Pixel 1, with pixel 4 below, has the mean (45 + 4 + 2 * 4) / 15.
    # Pixel 3, with the pixels 2 and 6, has the mean (45 + 12 + 2 + 12) / 16.
    same(y.flatten()[[0, 2, 4]], [57 / 30, 71 / 32, 94 / 38])


# --- features ----------------------------------------------------------


def test_normalize():
    """Normalisations divide each row by its sum (Eq. 29) or norm; 0/0 is 0."""
    x = double([[1, 3, 0], [-5, 1, 0], [0, 0, 0], [1, -1, 0]])
    wanted = [[1 / 4, 3 / 4, 0], [5 / 4, -1 / 4, 0], [0, 0, 0], [0, 0, 0]]
    same(sum_normalize(x), double(wanted))
    x = double([[3, -4], [0, 0], [5, 12]])
    same(l2_normalize(x), double([[3 / 5, -4 / 5], [0, 0], [5 / 13, 12 / 13]]))


def test_dpfp():
    """DPFP multiplies r = (1, 2, 0, 0, 0, 3) by rotated copies of r (Eq. 37)."""
    x = double([[1, 2, -3], [-1, -2, 3]])
    one = double([[2, 0, 0, 0, 0, 3], [0, 0, 3, 2, 0, 0]])
    two = double([[0, 0, 0, 0, 0, 6], [0, 0, 6, 0, 0, 0]])
    same(DPFP()(x), one)
    same(DPFP(2)(x), torch.cat([one, two], -1))
    same(DPFP(3)(x), torch.cat([one, two, 0 * one], -1))
    assert [DPFP(nu).width(3) for nu in (1, 2, 3)] == [6, 12, 18]
