"""Numbers worked out in fractions and closed forms, or taken from the papers.

Other tests compare the implementations with each other, and would not see a
slip that all of them share. No number here was computed by fwlab.
"""

import math
from functools import partial

import pytest
import torch

from fwlab import ops
from fwlab.data.retrieval import law
from fwlab.feature_maps import (
    DPFP,
    ELU1,
    FAVOR,
    RandomFourier,
    _ByNorm,
    _BySum,
    divide,
    l2_normalize,
    sum_normalize,
    unit_range,
)

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
LIMIT = {HALF: 2e-3, DOUBLE: 1e-12}

dtypes = pytest.mark.parametrize("dtype", [DOUBLE, HALF], ids=["float64", "float16"])


def ways(op):
    """To compute an operation on a CPU, in float64."""
    return [name for name in ops.implementations(op) if name != "triton"]


def every(*names):
    """Each operation in each of its implementations."""
    pairs = [(op, name) for op in names for name in ways(op)]
    return pytest.mark.parametrize(("op", "implementation"), pairs)


def double(numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


def same(found, wanted, dtype=DOUBLE):
    limit = LIMIT[dtype]
    torch.testing.assert_close(found.to(DOUBLE), wanted, rtol=limit, atol=limit)


# --- the fast weight rules ---------------------------------------------
#
# Two heads that differ in everything, three steps, keys of width 2. All rules
# are linear in the values and treat their channels alike, so one number
# stands for three channels: once, twice, and with the other sign.

CHANNELS = double([1, 2, -1])
#: `[time, head]`, and the width of a key.
Q = double([[[1, 2], [2, 1]], [[2, 1], [1, 3]], [[1, 1], [3, 1]]])
K = double([[[1, 0], [0, 1]], [[1 / 2, 1 / 2], [1, 1]], [[0, 1], [1 / 2, 0]]])
V = double([[1, 2], [3, -1], [2, 4]])
BETA = double([[1 / 2, 3 / 4], [1 / 4, 1 / 2], [3 / 4, 1 / 4]])
DECAY = double([[1 / 2, 1 / 4], [3 / 4, 1 / 2], [1 / 4, 3 / 4]])
#: One per key channel: `[time, head, key]`.
DECAYS = double(
    [
        [[1 / 2, 1], [1, 1 / 4]],
        [[1 / 4, 1 / 2], [1 / 2, 1]],
        [[1, 1 / 4], [3 / 4, 1 / 2]],
    ]
)
#: The memory before, `[head, key]`.
W, Z = double([[1, 2], [-1, 1]]), double([[1, 2], [2, 1]])

# The memory afterwards, and what was read at each step, of either head. As an
# example the first head under the sum rule, where W = (1, 2):
#   + 1 (1, 0)     = (2, 2),      read with (1, 2): 6
#   + 3 (1/2, 1/2) = (7/2, 7/2),  read with (2, 1): 21/2
#   + 2 (0, 1)     = (7/2, 11/2), read with (1, 1): 9
# and z = (1, 2) becomes (2, 2), (5/2, 5/2), (5/2, 7/2), which divides what is
# read by 6, 15/2 and 6.
SUM_Z = [[5 / 2, 7 / 2], [7 / 2, 3]]
FADED_Z = [[13 / 32, 21 / 16], [23 / 16, 39 / 32]]
RULES = {
    # Eqs. 17, 18, 19
    "sum": ([[6, 21 / 2, 9], [1, 4, 2]], [[7 / 2, 11 / 2], [0, 2]], None),
    "sum normalize": (
        [[1, 7 / 5, 3 / 2], [1 / 6, 1 / 3, 4 / 27]],
        [[7 / 2, 11 / 2], [0, 2]],
        SUM_Z,
    ),
    "sum decay": (
        [[7 / 2, 15 / 2, 103 / 32], [7 / 4, -3 / 4, 57 / 16]],
        [[21 / 32, 41 / 16], [37 / 32, 3 / 32]],
        None,
    ),
    "sum decay normalize": (
        [[1, 5 / 3, 103 / 55], [7 / 9, -6 / 49, 38 / 59]],
        [[21 / 32, 41 / 16], [37 / 32, 3 / 32]],
        FADED_Z,
    ),
    # Eq. 52
    "gated": (
        [[3, 27 / 8, 33 / 16], [5 / 4, 1 / 2, 3 / 8]],
        [[9 / 32, 57 / 32], [1 / 32, 9 / 32]],
        None,
    ),
    "gated normalize": (
        [[1, 9 / 7, 33 / 19], [5 / 8, 2 / 15, 2 / 15]],
        [[9 / 32, 57 / 32], [1 / 32, 9 / 32]],
        [[7 / 32, 31 / 32], [11 / 16, 3 / 4]],
    ),
    "gated decay": (
        [[7 / 4, 9 / 4, 1629 / 1024], [23 / 16, -27 / 32, 291 / 512]],
        [[51 / 1024, 789 / 512], [215 / 1024, -63 / 1024]],
        None,
    ),
    "gated decay normalize": (
        [[1, 3 / 2, 1629 / 829], [23 / 17, -54 / 169, 194 / 569]],
        [[51 / 1024, 789 / 512], [215 / 1024, -63 / 1024]],
        [[35 / 1024, 397 / 512], [217 / 512, 405 / 1024]],
    ),
    # Eqs. 20 to 28
    "delta": (
        [[5, 73 / 16, 207 / 64], [-1 / 4, 3 / 4, -371 / 128]],
        [[19 / 16, 131 / 64], [-161 / 128, 7 / 8]],
        None,
    ),
    "delta normalize": (
        [[5 / 6, 31 / 48, 467 / 640], [-1 / 24, 5 / 32, -493 / 3456]],
        [[41 / 32, 991 / 320], [-263 / 256, 37 / 32]],
        SUM_Z,
    ),
    "gated_delta decay": (
        [[11 / 4, 705 / 256, 7287 / 4096], [17 / 16, -35 / 32, -2235 / 4096]],
        [[219 / 1024, 6411 / 4096], [-697 / 4096, -9 / 256]],
        None,
    ),
    "gated_delta decay normalize": (
        [[5 / 7, 8 / 15, 1041 / 1375], [2 / 9, -83 / 343, -111 / 2065]],
        [[27 / 160, 453 / 400], [-51 / 1120, -9 / 56]],
        FADED_Z,
    ),
    # The first head: (1, 2) fades to (1/2, 2), and its first channel moves
    # halfway from 1/2 to 1: (3/4, 2), read with (1, 2): 19/4.
    "kimi_delta channels": (
        [[19 / 4, 583 / 256, 8477 / 4096], [-7 / 16, 1 / 16, -2999 / 2048]],
        [[125 / 256, 6477 / 4096], [-1181 / 2048, 17 / 64]],
        None,
    ),
}
rules = pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, implementation)
        for name in RULES
        for implementation in ways(f"{name.split()[0]}_rule")
    ],
)


def rule(name, **options):
    """The rule of that name as a function of q, k, v, with its gates."""
    rule, *words = name.split()
    gates = {} if rule == "sum" else {"beta": BETA[None]}
    if "decay" in words:
        gates["log_decay"] = DECAY.log()[None]
    if "channels" in words:  # such a rule has no normaliser
        gates["log_decay"] = DECAYS.log()[None]
    else:
        options["normalize"] = "normalize" in words

    def run(q, k, v, gates=gates, **more):
        return getattr(ops, f"{rule}_rule")(q, k, v, **gates, **options, **more)

    return run, gates


def channels(numbers):
    """One number in place of three channels: the values' width is new."""
    return numbers[..., None] * CHANNELS


def memory(W, Z, name, dtype):
    """`[head, key]` as a state of one sequence."""
    kind = SINGLE if dtype == HALF else dtype
    W = (W[:, None] * CHANNELS[:, None])[None].to(kind)
    return ops.NormalizedState(W, Z[None].to(kind)) if "normalize" in name else W


def check_state(state, W, Z, dtype):
    found = state if Z is None else state.W
    assert found.dtype == (SINGLE if dtype == HALF else dtype)
    same(found, (double(W)[:, None] * CHANNELS[:, None]).expand_as(found), dtype)
    if Z is not None:
        assert state.z.dtype == found.dtype
        same(state.z, double(Z).expand_as(state.z), dtype)


@rules
@dtypes
def test_three_steps(name, implementation, dtype):
    y, W_after, z_after = RULES[name]
    run, gates = rule(name, implementation=implementation)
    found, state = run(
        *(x[None].to(dtype) for x in (Q, K, channels(V))),
        gates={gate: x.to(dtype) for gate, x in gates.items()},
        state=memory(W, Z, name, dtype),
        return_state=True,
    )
    assert found.dtype == dtype
    same(found[0], channels(double(y).T), dtype)
    check_state(state, W_after, z_after, dtype)


@rules
def test_three_steps_of_which_others_are_masked(name, implementation):
    """A masked step in the middle, or at the end, whatever it holds."""
    y, W_after, z_after = RULES[name]
    run, gates = rule(name, implementation=implementation)
    keep = torch.tensor([[True, False, True, True], [True, True, True, False]])

    def spread(x):
        wide = torch.full((2, 4, *x.shape[1:]), math.nan, dtype=DOUBLE)
        wide[keep] = x.repeat(2, *[1] * (x.dim() - 1))
        return wide

    before = memory(W, Z, name, DOUBLE)
    if isinstance(before, tuple):
        before = ops.NormalizedState(
            *(x.repeat(2, *[1] * (x.dim() - 1)) for x in before)
        )
    else:
        before = before.repeat(2, 1, 1, 1)
    found, state = run(
        *(spread(x) for x in (Q, K, channels(V))),
        gates={gate: spread(x[0]) for gate, x in gates.items()},
        state=before,
        key_mask=keep,
        return_state=True,
    )
    same(found[keep], channels(double(y).T).repeat(2, 1, 1))
    assert not found[~keep].any()
    check_state(state, W_after, z_after, DOUBLE)


@rules
def test_scale(name, implementation):
    """Queries twice as long read twice as much, or the same mean."""
    y, W_after, z_after = RULES[name]
    run, _ = rule(name, implementation=implementation)
    found, state = run(
        *(x[None] for x in (Q, K, channels(V))),
        state=memory(W, Z, name, DOUBLE),
        return_state=True,
        scale=2.0,
    )
    factor = 1 if "normalize" in name else 2
    same(found[0], factor * channels(double(y).T))
    check_state(state, W_after, z_after, DOUBLE)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("sum decay", math.exp(-1 / 2)),
        ("gated", 1 - 2**-12),
        ("gated decay", (1 - 2**-12) * math.exp(-1 / 2)),
        ("gated_delta decay", math.exp(-1 / 2)),
        ("kimi_delta channels", math.exp(-1 / 2)),
    ],
)
def test_gates_of_half_precision(name, kept):
    """In float16, 1 - 2**-12 would be 1; the state knows the difference."""
    gates = {"beta": 2**-12, "log_decay": -1 / 2}
    none = torch.zeros(1, 1, 2, 3, dtype=HALF)
    for implementation in ways(f"{name.split()[0]}_rule"):
        run, names = rule(name, implementation=implementation)
        given = {
            gate: torch.full((1, 1, 2, 3)[: x.dim()], gates[gate], dtype=HALF)
            for gate, x in names.items()
        }
        W = torch.ones(1, 2, 3, 3)
        _, after = run(none, none, none, gates=given, state=W, return_state=True)
        torch.testing.assert_close(after, kept * W, rtol=2e-7, atol=0)


def constant(*shape, value=1.0):
    return torch.full(shape, value, dtype=DOUBLE)


LONG = 150
T = torch.arange(1, LONG + 1, dtype=DOUBLE)
#: Of one key, one query and gates that never change; |k|^2 = 1/2, q . k = 1.
#: Under the delta rules the memory moves by beta |k|^2 = 1/8 of the way.
ENDLESS = {
    "sum": T,
    "sum normalize": T**0,
    "sum decay": (1 - 0.75**T) / (1 - 0.75),
    "gated": 1 - 0.75**T,
    "gated decay": 0.25 * (1 - 0.5625**T) / (1 - 0.5625),
    "delta": 2 * (1 - 0.875**T),
    "gated_delta decay": 0.25 * (1 - 0.65625**T) / (1 - 0.65625),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_geometric_sums(name):
    """Closed forms over many steps, in chunks or not."""
    for implementation in ways(f"{name.split()[0]}_rule"):
        run, _ = rule(name, implementation=implementation)
        gates = {"beta": constant(1, LONG, 1, value=0.25)} if name[:3] != "sum" else {}
        if "decay" in name:
            gates["log_decay"] = constant(1, LONG, 1, value=0.75).log()
        q, k = constant(1, LONG, 1, 2), constant(1, LONG, 1, 2, value=0.5)
        y = run(q, k, constant(1, LONG, 1, 3) * CHANNELS, gates=gates)
        same(y[0, :, 0], channels(ENDLESS[name]))


@every("sum_rule")
def test_the_mean_of_all_values(op, implementation):
    """The sum rule, normalised, where all keys are the same (Eq. 19)."""
    q = k = constant(1, LONG, 2, 3)
    v = T[None, :, None, None] * double([1, -2])[:, None]
    y = ops.sum_rule(q, k, v, implementation=implementation)
    same(y[..., 0], ((T[:, None] + 1) / 2 * double([1, -2]))[None])


@every("gated_rule", "delta_rule")
def test_appendix_b(op, implementation):
    """The gated rule makes room everywhere, the delta rule where it writes."""
    v1, v2, v3 = double([[2, 0, 1], [0, 4, -1], [8, 8, 3]])
    e1, e2 = double([[1, 0], [0, 1]])
    W = torch.outer(v1, e1) + torch.outer(v2, e2)  # Eq. 53
    read = [
        getattr(ops, op)(
            q[None, None, None],
            e2[None, None, None],
            v3[None, None, None],
            constant(1, 1, 1, value=0.25),
            state=W[None, None],
            implementation=implementation,
        ).flatten()
        for q in (e1, e2)
    ]
    same(read[0], 0.75 * v1 if op == "gated_rule" else v1)
    same(read[1], double([2, 5, 0]))  # 3/4 v2 + 1/4 v3, under either rule


@every("delta_rule")
def test_appendix_a(op, implementation):
    """Removing and writing (Eq. 23), and what enters and leaves each column (Eq. 51)."""
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
        _, found = getattr(ops, op)(
            k[None, None, None],
            k[None, None, None],
            v[None, None, None],
            constant(1, 1, 1, value=strength),
            state=W[None, None],
            return_state=True,
            implementation=implementation,
        )
        same(found[0, 0], wanted)


def test_no_memory_beats_the_law():
    """Some of rank 2 reach it for three pairs, others stay above."""
    I = torch.eye(3, dtype=DOUBLE)
    shared = double([[1, 0, 0], [0, 1 / 2, 1 / 2], [0, 1 / 2, 1 / 2]])
    forgotten, random = I.clone(), double([[1, 2], [0, 1], [1, 1]])
    forgotten[2, 2] = 0
    loss = [
        ((I - G) ** 2).sum().item() / 6
        for G in (shared, forgotten, random @ random.T / 4)
    ]
    assert loss[:2] == pytest.approx([law(3, 2)] * 2)
    assert loss[2] > law(3, 2) + 0.01


@every("delta_rule")
def test_an_empty_memory_retrieves_zero(op, implementation):
    """Eq. 27 at the first step, and queries that meet no key."""
    k = double([[1, 1, 0, 0], [1, 0, 0, 0]])[None, :, None]
    q = double([[1, 0, 0, 0], [0, 0, 1, 0]])[None, :, None]
    y, state = ops.delta_rule(
        q,
        k,
        double([[4, 8], [2, 2]])[None, :, None],
        constant(1, 2, 1, value=0.25),
        normalize=True,
        return_state=True,
        implementation=implementation,
    )
    # 1/4 of (4, 8) is written. The second key reads just that, and writes
    # 1/4 of what is missing to (2, 2), which is (1, 0).
    same(y[0, :, 0], double([[1, 2], [0, 0]]))
    same(state.W[0, 0], double([[5 / 4, 1, 0, 0], [2, 2, 0, 0]]))
    same(state.z[0, 0], double([2, 1, 0, 0]))


@every("dpfp_delta_rule")
@dtypes
def test_dpfp_delta_rule_has_a_cell_per_quadrant(op, implementation, dtype):
    """Keys of width 2 have a single feature that is not 0 (Eqs. 33-36)."""
    k = double([[[1, 2], [-3, 1]], [[-1, -2], [-1, 4]], [[4, 1], [9, 9]]])[None]
    q = double([[[3, 1], [-1, 1]], [[5, 5], [-7, 3]], [[1, 1], [1, 1]]])[None]
    # Cells: (+ +), (- +), (- -), (+ -).
    W = double([[8, 1, 2, 3], [4, -4, 6, 7]])[None, :, None] * CHANNELS[:, None]
    y, after = ops.dpfp_delta_rule(
        *(
            x.to(dtype)
            for x in (q, k, channels(double([[0, 4], [6, 8], [1, 9]]))[None])
        ),
        double([[1 / 4, 1 / 2], [1 / 2, 1 / 4], [0, 1]])[None].to(dtype),
        key_mask=torch.tensor([[True, True, False]]),
        state=W.to(SINGLE if dtype == HALF else dtype),
        return_state=True,
        implementation=implementation,
    )
    assert y.dtype == dtype
    same(y[0], channels(double([[6, 0], [6, 2], [0, 0]])), dtype)
    wanted = double([[6, 1, 4, 3], [4, 2, 6, 7]])[:, None] * CHANNELS[:, None]
    same(after[0], wanted, dtype)


@every("dpfp_delta_rule")
def test_dpfp_delta_rule_with_two_shifts(op, implementation):
    """The same key twice: its features are (2, 0, 0, 0, 0, 3) / 11 of shift 1
    and (0, 0, 0, 0, 0, 6) / 11 of shift 2, so |phi|^2 = 49/121.
    """
    k = double([[1, 2, -3]])[None, None].expand(1, 2, 1, 3)
    y, W = ops.dpfp_delta_rule(
        k,
        k,
        double([[1], [3]])[None, :, None],
        double([[1 / 2], [1 / 4]])[None],
        nu=2,
        return_state=True,
        implementation=implementation,
    )
    first = 49 / 242
    total = 1 / 2 + (3 - first) / 4
    same(y.flatten(), double([first, total * 49 / 121]))
    phi = double([2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 6]) / 11
    same(W.flatten(), total * phi)


# --- 1991 --------------------------------------------------------------


@every("fwp")
@pytest.mark.parametrize("masked", [False, True])
@dtypes
def test_fwp(op, implementation, masked, dtype):
    """With the activation w^2; both heads, (W + a b) squared, then read."""
    a = double([[[1, 0, 2], [1, 1, 0]], [[0, 1, -1], [1, 0, 0]]])
    b = double([[[1, -1], [0, 1]], [[1, 2], [1, 1]]])
    x = double([[[1, 2], [2, 1]], [[1, 1], [1, -1]]])
    W = double([[[0, 0], [0, 0], [0, 0]], [[1, 0], [1, 0], [1, 0]]])[None]
    # After the first step W is (1 1, 0 0, 4 4) and (1 1, 1 1, 1 0).
    y = double([[[3, 0, 12], [3, 3, 2]], [[2, 5, 13], [0, 0, 1]]])
    wanted = double([[[1, 1], [1, 4], [9, 4]], [[4, 4], [1, 1], [1, 0]]])
    keep = None
    if masked:
        keep = torch.tensor([[True, False, True]])
        a, b, x = (torch.stack([p[0], p[0] * math.nan, p[1]]) for p in (a, b, x))
        y = torch.stack([y[0], 0 * y[0], y[1]])
    found, after = ops.fwp(
        *(part[None].to(dtype) for part in (a, b, x)),
        torch.square,
        key_mask=keep,
        state=W.to(SINGLE if dtype == HALF else dtype),
        return_state=True,
        implementation=implementation,
    )
    assert found.dtype == dtype
    assert after.dtype == (SINGLE if dtype == HALF else dtype)
    same(found[0], y, dtype)
    same(after[0], wanted, dtype)


@every("fwp")
def test_fwp_saturates(op, implementation):
    """tanh is the default: W = tanh(W + 1), step by step."""
    one = constant(1, 3, 1, 1)
    w, wanted = 0.0, []
    for _ in range(3):
        w = math.tanh(w + 1)
        wanted.append(w)
    found = ops.fwp(one, one, one, implementation=implementation)
    same(found.flatten(), double(wanted))
    found = ops.fwp(one, one, one, None, implementation=implementation)
    same(found.flatten(), double([1, 2, 3]))


# --- softmax -----------------------------------------------------------

#: Weights of the keys of either head, and the values, `[time, head]`.
WEIGHTS = double([[1, 2], [3, 1], [4, 1]])
VALUES = double([[8, 3], [4, 6], [-2, 1]])
#: 8, (8 + 12)/4, (8 + 12 - 8)/8 and 3, (6 + 6)/3, (6 + 6 + 1)/4.
MEANS = double([[8, 3], [5, 4], [3 / 2, 13 / 4]])


def logarithmic_keys():
    """Queries and keys whose products are the logarithms of the weights."""
    q, k = constant(1, 3, 2, 4, value=0.0), constant(1, 3, 2, 4, value=7.0)
    q[..., 0, 0] = q[..., 1, 1] = 1
    k[..., 0, 0], k[..., 1, 1] = WEIGHTS.log().T
    return q, k


@every("softmax_attention")
@dtypes
def test_softmax_attention(op, implementation, dtype):
    """Eq. 7; without `scale` queries are divided by the root of 4."""
    q, k = (x.to(dtype) for x in logarithmic_keys())
    v = channels(VALUES)[None].to(dtype)
    run = partial(ops.softmax_attention, implementation=implementation)
    for y in (run(q, k, v, scale=1.0), run(2 * q, k, v)):
        assert y.dtype == dtype
        same(y[0], channels(MEANS), dtype)
    y = run(q, k, v, scale=0.0)
    mean = double([[8, 3], [6, 9 / 2], [10 / 3, 10 / 3]])
    same(y[0], channels(mean), dtype)
    y, state = run(q[:, :2], k[:, :2], v[:, :2], scale=1.0, return_state=True)
    y = run(q[:, 2:], k[:, 2:], v[:, 2:], scale=1.0, state=state)
    same(y[0], channels(MEANS[2:]), dtype)


@every("softmax_attention")
def test_softmax_attention_with_a_masked_step(op, implementation):
    q, k = logarithmic_keys()
    keep = torch.tensor([[True, False, True]])
    y, state = ops.softmax_attention(
        q,
        torch.where(keep[..., None, None], k, math.nan),
        channels(VALUES)[None],
        scale=1.0,
        key_mask=keep,
        return_state=True,
        implementation=implementation,
    )
    # (8 - 8)/5 and (6 + 1)/3: the weights of the second step are missing.
    same(y[0], channels(double([[8, 3], [0, 0], [0, 7 / 3]])))
    assert torch.equal(state.mask, keep)
    same(state.v[0, ::2], channels(VALUES)[::2])


@every("softmax_attention")
def test_softmax_attention_adds_up_in_float32(op, implementation):
    """2049 is no number of float16: scores of 2049 and 2048 would be equal."""
    q = torch.ones(1, 2, 1, 2, dtype=HALF)
    k = torch.tensor([[2048, 1], [2048, 0]], dtype=HALF)[None, :, None]
    v = torch.tensor([[1], [0]], dtype=HALF)[None, :, None]
    y = ops.softmax_attention(q, k, v, scale=1.0, implementation=implementation)
    same(y.flatten(), double([1, math.e / (1 + math.e)]), HALF)


# --- feedback ----------------------------------------------------------


@dtypes
def test_feedback_attention(dtype):
    """Two memories, 2 and 1 steps back, and their waves (Eqs. f3 to f5)."""
    q = double([[1, 0, 2, -1], [0, 3, 0, 1]])[None]
    k = double([[[1, 1, 0, 0], [0, 1, 0, 2]], [[0, 0, 1, 3], [1, -1, 5, 0]]])[None]
    v = double([[[1, 2, 3, 4], [1, 0, 0, 0]], [[5, 6, 7, 8], [0, 0, 1, 0]]])[None]
    P = double([[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 1, 1], [0, 0, 0, 3]])
    found = ops.feedback_attention(*(x.to(dtype) for x in (q, k, v, P)))[0]
    assert found.dtype == dtype

    def waves(steps):
        slow = steps / 100  # 10^(-4 i / n), i = 1, n = 2
        s = [math.sin(steps), math.sin(slow), math.cos(steps), math.cos(slow)]
        return [s[0], 2 * s[1], s[2] + s[3], 3 * s[3]]

    far, near = waves(2), waves(1)
    scores = [
        # q . k and q . P s of either memory; the root of d_key is 2.
        (
            (1 + far[0] + 2 * far[2] - far[3]) / 2,
            (2 - 3 + near[0] + 2 * near[2] - near[3]) / 2,
        ),
        ((3 + 2 + 3 * far[1] + far[3]) / 2, (-3 + 3 * near[1] + near[3]) / 2),
    ]
    for head, (old, new) in enumerate(scores):
        weight = 1 / (1 + math.exp(new - old))
        wanted = weight * v[0, 0, head] + (1 - weight) * v[0, 1, head]
        same(found[head], wanted, dtype)


@every("feedback")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_feedback(op, implementation, shared, normalize):
    """Two layers, two steps of width 2 (Eqs. f1, f2, f6 and f7).

    The first step has no memory. The second has one, and its softmax nothing
    to choose from: queries, keys and positions do not count.
    """
    expand, contract = [[1, 0], [0, 2]], [[1, 3], [-2, 1]]
    mixed, merged = [[2, -1], [1, 1]], [1 / 8, 2 / 8, 5 / 8]
    values = [[[1, 2], [0, 1]], [[3, 0], [1, -1]]]
    memory_scale = [[1, 2], [3, -1]]
    weights = ops.FeedbackWeights(
        merge=double(merged).log(),
        norm_mixer=torch.ones(2, 2, dtype=DOUBLE),
        to_q=torch.ones(2, 2, 2, dtype=DOUBLE),
        to_k=double(values)[: 1 if shared else 2].mT,
        to_v=double(values)[: 1 if shared else 2],
        positions=torch.ones(1, 2, dtype=DOUBLE),
        to_out=torch.stack([double(mixed), double(mixed).T]),
        norm_mlp=double([[2, 1], [1, 3]]),
        expand=double(expand)[:, None],
        contract=double(contract)[:, :, None],
        norm_memory=double(memory_scale)[: 1 if shared else 2] if normalize else None,
    )

    def norm(a, b):
        """Of two numbers, one is as far above the mean as the other below."""
        half = (a - b) / 2
        return half / math.sqrt(half**2 + 1e-5)

    def gelu(h):
        return h * (1 + math.erf(h / math.sqrt(2))) / 2

    def layer(l, x, z):
        to_out = [mixed, [[2, 1], [-1, 1]]][l]
        a, b = (x[i] + to_out[i][0] * z[0] + to_out[i][1] * z[1] for i in (0, 1))
        u = norm(a, b)  # what is expanded: 2 u, then -3 u twice
        h = gelu([2 * u, 2 * 3 * -u][l])
        return a + contract[l][0] * h, b + contract[l][1] * h

    def of_memory(m, g, matrix):
        if normalize:
            u = norm(*m)
            m = memory_scale[g][0] * u, memory_scale[g][1] * -u
        return [row[0] * m[0] + row[1] * m[1] for row in matrix[g]]

    def step(x, memory):
        states = [x]
        for l in (0, 1):
            g = 0 if shared else l
            z = of_memory(memory, g, values) if memory else (0, 0)
            states.append(layer(l, states[-1], z))
        m = [sum(w * s[i] for w, s in zip(merged, states, strict=True)) for i in (0, 1)]
        return states[-1], m

    first, m1 = step((3, 1), None)
    second, m2 = step((1, 5), m1)
    y, state = ops.feedback(
        double([[[3, 1], [1, 5]]]),
        weights,
        heads=2,
        return_state=True,
        implementation=implementation,
    )
    same(y[0], double([first, second]))
    keys = [[[1, 0], [2, 1]], [[3, 1], [0, -1]]]  # the same, transposed
    for found, matrix in ((state.k, keys), (state.v, values)):
        groups = [0] if shared else [0, 1]
        wanted = [[of_memory(m, g, matrix) for g in groups] for m in (m1, m2)]
        same(found[0, ..., 0], double(wanted))


# --- features ----------------------------------------------------------


def test_divide():
    x, total = double([3, 3, 0, -5]), double([4, 0, 0, -2])
    x.requires_grad_(), total.requires_grad_()
    y = divide(x, total)
    same(y, double([3 / 4, 0, 0, 5 / 2]))
    dx, dtotal = torch.autograd.grad(y.sum(), [x, total])
    same(dx, double([1 / 4, 0, 0, -1 / 2]))
    same(dtotal, double([-3 / 16, 0, 0, 5 / 4]))
    same(divide(double([[1, 2], [3, 4]]), double([2])), double([[0.5, 1], [1.5, 2]]))


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, SINGLE, DOUBLE])
def test_unit_range(dtype):
    x = double([[5, -12], [0.5, 0.25], [1, 0], [0, 0], [-2, 1.5], [0.75, 3]])
    wanted = [[5 / 8, -3 / 2], [1, 1 / 2], [1, 0], [0, 0], [-1, 3 / 4], [3 / 8, 3 / 2]]
    found = unit_range(x.to(dtype))
    assert found.dtype == dtype
    assert found.tolist() == wanted
    assert unit_range(x[:, :0].to(dtype)).shape == (6, 0)
    x = x.to(dtype).requires_grad_()
    unit_range(x).sum().backward()
    assert x.grad[:, 0].tolist() == [1 / 8, 2, 1, x.grad[3, 0].item(), 1 / 2, 1 / 2]


def test_normalize():
    """Also in two rows at once, and with a sum below 0 (Eq. 29)."""
    x = double([[1, 3, 0], [-5, 1, 0], [0, 0, 0], [1, -1, 0]])
    wanted = [[1 / 4, 3 / 4, 0], [5 / 4, -1 / 4, 0], [0, 0, 0], [0, 0, 0]]
    same(sum_normalize(x), double(wanted))
    x = double([[3, -4], [0, 0], [5, 12]])
    same(l2_normalize(x), double([[3 / 5, -4 / 5], [0, 0], [5 / 13, 12 / 13]]))


def test_normalize_gradient():
    """Of the first share, and of the total, which second derivatives need."""
    x = double([[[1, 3], [-5, 1]], [[0, 0], [2, -2]]]).requires_grad_()
    share, total = _BySum.apply(x)
    (dx,) = torch.autograd.grad(share[..., 0].sum(), x, retain_graph=True)
    same(dx, double([[[3 / 16, -1 / 16], [1 / 16, 5 / 16]], [[0, 0], [0, 0]]]))
    (dn,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    same(dn, torch.ones_like(x))
    (both,) = torch.autograd.grad((share[..., :1] + total).sum(), x)
    same(both, dx + dn)
    x = double([[[3, -4], [0, 0]], [[5, 12], [0, -2]]]).requires_grad_()
    share, norm = _ByNorm.apply(x)
    (dx,) = torch.autograd.grad(share[..., 0].sum(), x, retain_graph=True)
    wanted = [[[16 / 125, 12 / 125], [0, 0]], [[144 / 2197, -60 / 2197], [1 / 2, 0]]]
    same(dx, double(wanted))
    (dn,) = torch.autograd.grad(norm.sum(), x, retain_graph=True)
    same(dn, double([[[3 / 5, -4 / 5], [0, 0]], [[5 / 13, 12 / 13], [0, -1]]]))
    (both,) = torch.autograd.grad((share[..., :1] + norm).sum(), x)
    same(both, dx + dn)


def test_elu1():
    x = double([[-math.log(4), 0], [2, -1], [1 / 2, 1]])
    wanted = double([[1 / 4, 1], [3, 1 / math.e], [3 / 2, 2]])
    same(ELU1()(x), wanted)
    features, scale = ELU1().scaled(x)
    same(features, wanted)
    assert scale is None


def test_dpfp():
    """Eq. 37. r is (1, 2, 0, 0, 0, 3), then (0, 0, 3, 1, 2, 0)."""
    x = double([[1, 2, -3], [-1, -2, 3]])
    one = double([[2, 0, 0, 0, 0, 3], [0, 0, 3, 2, 0, 0]])
    two = double([[0, 0, 0, 0, 0, 6], [0, 0, 6, 0, 0, 0]])
    same(DPFP()(x), one)
    same(DPFP(2)(x), torch.cat([one, two], -1))
    same(DPFP(3)(x), torch.cat([one, two, 0 * one], -1))
    assert [DPFP(nu).width(3) for nu in (1, 2, 3)] == [6, 12, 18]


def directed(phi, directions):
    """The same map, with directions that are known."""
    phi = phi.double()
    phi.omega.copy_(double(directions))
    return phi


def test_favor():
    """Eqs. 31 and 32: 2^x1 and 3^x2, with h(1, 2) = exp(-5/2) / 2."""
    known = [[math.log(2), 0], [0, math.log(3)]]
    phi = directed(FAVOR(2, 2, stabilize=False), known)
    numbers = double([2, 9, 1 / 2, 1 / 9])
    same(phi(double([1, 2])), math.exp(-5 / 2) / 2 * numbers)
    features, scale = phi.scaled(double([[1, 2]]))
    assert scale is None
    same(features[0], math.exp(-5 / 2) / 2 * numbers)


def test_favor_of_half_precision_has_exponents_in_float32():
    """2048 - 4097/2 is -1/2; in float16, where 4097/2 is 2048, it is 0."""
    phi = FAVOR(2, 1, stabilize=False).half()
    phi.omega.copy_(torch.tensor([[32, 0]]))
    found = phi(torch.tensor([64, 1], dtype=HALF))
    same(found, double([math.exp(-1 / 2) / math.sqrt(2), 0]), HALF)


def test_favor_stabilized():
    """Width 16: keys are halved first, which makes them (1, 2, 0 ...)."""
    known = torch.zeros(2, 16, dtype=DOUBLE)
    known[0, 0], known[1, 1] = math.log(2), math.log(3)
    phi = directed(FAVOR(16, 2), known.tolist())
    x = torch.zeros(2, 16, dtype=DOUBLE)
    x[0, :2] = double([2, 4])
    factor, numbers = math.exp(-5 / 2) / 2, double([2, 9, 1 / 2, 1 / 9])
    same(phi(x), torch.stack([factor * numbers, constant(4, value=1 / 2)]))
    features, scale = phi.scaled(x[None])
    same(features[0], torch.stack([numbers / 9, constant(4)]))
    same(scale[0], double([math.log(9 * factor), -math.log(2)]))
    phi, x = phi.half(), x.half()
    for half, wanted in ((phi(x), factor * numbers), (phi.scaled(x)[0], numbers / 9)):
        assert half.dtype == HALF
        same(half[0], wanted, HALF)


def test_random_fourier():
    """Angles of 30, 45 and 0 degrees; the key (3, 4) counts as (3/5, 4/5)."""
    known = [[5 * math.pi / 36, 0], [0, 5 * math.pi / 32], [0, 0]]
    phi = directed(RandomFourier(2, 3, bandwidth=2.0), known)
    half, root, three = 1 / 2, math.sqrt(1 / 2), math.sqrt(3) / 2
    wanted = double([half, root, 0, three, root, 1]) / math.sqrt(3)
    same(phi(double([[3, 4], [30, 40]])), torch.stack([wanted, wanted]))
    same(phi(double([0, 0])), double([0, 0, 0, 1, 1, 1]) / math.sqrt(3))
    assert phi(torch.ones(2, dtype=HALF)).dtype == HALF
