"""Test Triton kernels on cases that the fuzzer does not draw."""

import fuzz
import pytest
import torch
from alike import call, error, parts, problem, weighted

from fwlab import ops
from fwlab.ops import _triton
from fwlab.ops.aft.window import kernels as window
from fwlab.ops.feedback import kernels as feedback
from fwlab.ops.linear import kernels as linear

pytestmark = pytest.mark.slow
FORMS = ("aft_simple", "aft_full", "aft_local", "aft_conv")
AFT = "batch=2 heads=3 value=2 window=4 dtype=float32"
RULE = "batch=2 heads=2 key=6 value=5 state=1"
FEEDBACK = "batch=2 heads=2 key=4 value=5 layers=2 window=3 dtype=float32"
#: Lengths of two tiles and one step, of two tiles, and of part of a tile.
LENGTHS = ("time=9", "time=8", "time=1")
MORE = ("state=1", "mask=some", "size=60.0")
CASES = [f"op={op} {AFT} {n} {more}" for op in FORMS for n in LENGTHS for more in MORE]
CASES += [f"op=aft_full {AFT} {time} causal=0" for time in LENGTHS]
#: Cases with more channels than a program handles, or windows that end in a tile.
CASES += [f"op={op} {AFT} time=3 batch=1 value=70" for op in FORMS[:3]]
CASES += [f"op=aft_local {AFT} time=9 window={width}" for width in (1, 5, 11)]
#: Feedback cases: memories per layer, shared, or without norm; odd widths; one head.
STACKS = [
    f"{kind} {more} {time}"
    for kind in ("", "fewer=1", "edges=1")
    for more in ("state=0", "state=1", "mask=some cuts=1")
    for time in ("time=1", "time=6")
]
STACKS += ["time=6 heads=3 key=5", "time=6 heads=1 key=17", "time=6 key=32"]
KINDS = ("float32", "float16")
CASES += [
    f"op=feedback {FEEDBACK} {stack} dtype={k}" for stack in STACKS for k in KINDS
]
KERNELS = [
    *("sum_rule fewer=1", "sum_rule", "sum_rule fewer=1 normalize=1"),
    *("gated_rule fewer=1", "gated_rule normalize=1", "delta_rule", "gated_delta_rule"),
]


def agrees(text):
    assert fuzz.check(fuzz.parsed(f"{text} implementation=triton")) is None


@pytest.mark.parametrize("case", CASES)
def test_small_tiles(case, small):
    agrees(case)


@pytest.mark.parametrize("op", FORMS)
def test_whole_tiles(op):
    agrees(f"op={op} {AFT} time=65 state=1")


# With many multiprocessors, a separate kernel computes the outputs.
@pytest.mark.parametrize(("cores", "dtype"), [(1, "float16"), (1000, "float32")])
@pytest.mark.parametrize("op", KERNELS)
def test_chunks(op, dtype, cores, monkeypatch):
    """Two complete chunks and one more step agree with the reference loop."""
    monkeypatch.setattr(_triton, "multiprocessors", lambda device: cores)
    agrees(f"op={op} time=33 {RULE} dtype={dtype}")


@pytest.mark.parametrize("op", FORMS)
def test_later_keys_change_no_bit(op, small):
    p = problem(f"op={op} time=7 {AFT}", grad="none")
    how = {"implementation": "triton"}
    before = call(p, **how)
    for t, key, value in ((2, 1e30, -1e20), (5, 1e30, -1e20), (5, 12, 3e38)):
        changed = {name: p.x[name].clone() for name in "kv"}
        changed["k"][:, t:] = key
        changed["v"][:, t:] = value
        assert torch.equal(call(p, **changed, **how)[:, :t], before[:, :t])


@pytest.mark.parametrize("op", ["aft_full", "aft_local"])
def test_windows_without_tensor_cores(op, small, monkeypatch):
    """AFT windows are correct with and without tensor cores."""
    taken, one = [], window._at
    monkeypatch.setattr(window, "_at", lambda *x: [taken.append(0), one(*x)][1])
    agrees(f"op={op} time=7 state=1 {AFT}")
    assert not taken
    monkeypatch.setattr(_triton, "TENSOR_CORES", (10, 0))
    monkeypatch.setattr(window, "_dot", None)
    agrees(f"op={op} time=7 state=1 {AFT}")
    assert taken


@pytest.mark.parametrize(("op", "name"), [("aft_full", "bias"), ("aft_local", "band")])
def test_a_row_alone_is_taken_key_by_key(op, name, small):
    """A row with large biases is accurate and does not change any other row."""
    p = problem(f"op={op} time=7 {AFT}", grad="none")
    how = {"implementation": "triton"}
    before, table = call(p, **how), p.x[name].clone()
    table[5] *= 60
    after = call(p, **{name: table}, **how)
    rest = [t for t in range(7) if t != 5]
    assert torch.equal(after[:, rest], before[:, rest])
    exact = {n: x.double() for n, x in p.x.items()} | {name: table.double()}
    assert error(after, call(p, **exact, implementation="naive")) < 1e-4


@pytest.mark.parametrize("C", [16, 32, 64])
def test_lengths_of_chunks(C, monkeypatch):
    made = linear.form
    monkeypatch.setattr(linear, "form", lambda *a: made(*a)._replace(C=C))
    agrees(f"op=gated_delta_rule time=65 dtype=float32 {RULE}")
    agrees(f"op=gated_rule normalize=1 time=65 dtype=float32 {RULE}")


@pytest.mark.parametrize(
    "case",
    [
        "op=delta_rule dtype=float32 key=130 value=70",
        "op=gated_delta_rule dtype=float32 key=70 value=130",
        "op=delta_rule dtype=float32 key=256 value=24",
        "op=delta_rule dtype=float16 key=384 value=40",
        "op=sum_rule dtype=float32 key=130 value=130",
        "op=gated_rule dtype=float16 key=40 value=260",
    ],
)
def test_widths(case):
    """Kernels for wide heads are correct in the largest dtype that fits in memory."""
    agrees(f"{case} time=17 state=1 heads=2")


@pytest.mark.parametrize("time", [20, 70])
def test_divergence_is_not_hidden(time):
    """If long keys make the recurrence diverge, finite outputs are still correct."""
    x = problem(f"op=delta_rule time={time} dtype=float32 {RULE}").x
    q, k, v = (x[name].detach() for name in "qkv")
    k, beta = 300 * k + 1, torch.ones(q.shape[:3])
    naive = ops.delta_rule(q, k, v, beta, implementation="naive")
    y = ops.delta_rule(q, k, v, beta, implementation="triton")
    # Where the naive loop overflows, the kernel must overflow, too.
    lost = ~torch.isfinite(naive).all(-1).all(-1)
    assert lost.any()
    assert not torch.isfinite(y[lost]).all()
    held = ~lost & torch.isfinite(y).all(-1).all(-1)
    for b in range(len(y)):
        steps = held[b].nonzero()[:5, 0]
        assert error(y[b, steps], naive[b, steps]) < 1e-3


def test_a_large_denominator_loses_nothing_in_float16():
    """Gradients are accurate although 1 / (z . q) is too small for float16."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (1 + torch.rand(1, 70, 1, 32, generator=generator) for _ in range(3))
    given = [x.half().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in given]
    dy = 1e-3 * torch.randn(v.shape, generator=generator)
    found = torch.autograd.grad(
        ops.sum_rule(*given, implementation="triton"), given, dy.half()
    )
    wanted = torch.autograd.grad(
        ops.sum_rule(*exact, implementation="naive"), exact, dy.half().double()
    )
    # dq and dk are differences of nearly equal numbers, which lose digits.
    for a, b, limit in zip(found, wanted, (0.2, 0.05, 2e-3), strict=True):
        assert error(a, b) < limit


def test_negative_denominators():
    """Gradients are correct for negative denominators in an incomplete chunk."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, 5, 1, 8, generator=generator) + 0.1 for _ in range(2))
    given = [x.requires_grad_() for x in (-q, k, k - 0.5)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found = weighted(ops.sum_rule(*given, implementation="triton"))
    wanted = weighted(ops.sum_rule(*exact, implementation="naive"))
    gradients = torch.autograd.grad(found, given), torch.autograd.grad(wanted, exact)
    for a, b in zip(*gradients, strict=True):
        assert error(a, b) < 1e-5


def test_a_state_that_wants_no_gradient(small, monkeypatch):
    """If a state requires no gradient, the kernel computes no gradient for it."""
    p = problem(f"op=feedback time=3 state=1 {FEEDBACK}")
    counts, pull = [], feedback.pull_memories

    def counted(loop, count, clock):
        counts.append(count)
        pull(loop, count, clock)

    def gradients(state):
        run = {"return_state": True, "implementation": "triton"}
        loss = weighted(*parts(call(p, state=ops.FeedbackState(*state, None), **run)))
        return torch.autograd.grad(loss, [*p.x.values()])

    wanted = gradients(p.state)
    monkeypatch.setattr(feedback, "pull_memories", counted)
    found = gradients([part.detach() for part in p.state])
    assert counts == [1, 1, 1]
    assert all(map(torch.equal, found, wanted))
