"""Kernels of the fast weight rules against naive in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fwlab import ops
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops.additive import kernels as linear
from fwlab.ops.call import launcher
from fwlab.ops.call.rule import Rule
from fwlab.ops.correcting import kernels as delta
from problems import (
    borders,
    error,
    outcome,
    packed_problem,
    parts,
    problem,
    rebuild,
    rules,
    weighted,
)
from problems.row import Row

pytestmark = pytest.mark.slow
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}


def few(row: Row) -> Row:
    """The same problem for one sequence and two heads, to save time."""

    def make(time, generator, with_state):
        inputs, state = row.make(time, generator, with_state)
        heads = (x.shape.index(rules.HEADS, 2) for x in inputs)
        inputs = [x[:1].narrow(i, 0, 2) for x, i in zip(inputs, heads, strict=True)]
        return inputs, rebuild(state, lambda x: x[:1, :2])

    return replace(row, make=make)


#: The rows that no kernel computes.
WITHOUT = {"delta-normalized", "gated-delta-normalized", "sum-channels"}
for record in ops.TABLE.values():
    if isinstance(record, Rule) and "triton" not in record.implementations:
        WITHOUT |= {record.mixer, f"{record.mixer}-normalized"}
WHOLE = {name: row for name, row in rules.ROWS.items() if name not in WITHOUT}
ROWS = {name: few(row) for name, row in WHOLE.items()}
DELTA = ("delta", "gated-delta")


def wide(
    op, gates: int, key: int, value: int, *, heads: int = 2, batch: int = 1
) -> Row:
    """The same problem with other widths."""

    def make(time, generator, with_state):
        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        inputs = [l2_normalize(random(batch, time, heads, key)) for _ in range(2)]
        inputs.append(random(batch, time, heads, value))
        if gates > 0:
            inputs.append(torch.sigmoid(random(batch, time, heads)))
        if gates > 1:
            inputs.append(-torch.sigmoid(random(batch, time, heads)))
        return inputs, random(batch, heads, value, key) if with_state else None

    return Row(partial(op, normalize=False), make, lambda time: [])


def agrees(row: Row, time: int, dtype: torch.dtype, with_state: bool = True) -> None:
    inputs, state = problem(row, time, dtype=dtype, with_state=with_state)
    found = outcome(row, inputs, state, "triton")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    start = rebuild(state, lambda x: x.detach().double().requires_grad_())
    wanted = outcome(row, exact, start, "naive")
    assert found[0].dtype == dtype
    for x, leaf in zip(found[-len(inputs) :], inputs, strict=False):
        assert x.dtype in (dtype, torch.float32, leaf.dtype)
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < LIMITS[dtype]


#: Multiprocessors with which outputs are computed in the kernel that walks,
#: or in one of their own.
CORES = {"one kernel": 1, "split": 1000}


@pytest.fixture(params=CORES)
def split(request, monkeypatch):
    monkeypatch.setattr(
        launcher, "multiprocessors", lambda device: CORES[request.param]
    )


@pytest.fixture
def chunked(monkeypatch):
    monkeypatch.setattr(delta, "SHORT", 0)


@pytest.fixture
def stepped(monkeypatch):
    monkeypatch.setattr(delta, "SHORT", 64)


@pytest.mark.parametrize("row", WHOLE.values(), ids=WHOLE)
def test_chunks(row, chunked, monkeypatch):
    """Two whole chunks and a step, of several sequences and heads."""
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: 1)
    agrees(row, 33, torch.float32)


# Half precision has longer chunks.
@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_chunks_of_any_kind(row, time, dtype, cores, chunked, monkeypatch):
    monkeypatch.setattr(launcher, "multiprocessors", lambda device: CORES[cores])
    agrees(row, time, dtype)


# A step; a segment; and some more.
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("time", [1, 16, 17, 35])
@pytest.mark.parametrize("row", [ROWS[name] for name in DELTA], ids=DELTA)
def test_steps(row, time, dtype, stepped):
    agrees(row, time, dtype)


@pytest.mark.parametrize("row", [WHOLE[name] for name in DELTA], ids=DELTA)
def test_steps_of_several_sequences(row, stepped):
    agrees(row, 35, torch.float32)


def test_steps_of_a_long_sequence(monkeypatch):
    """Without tensor cores the recurrence takes any length."""
    monkeypatch.setattr(launcher, "capability", lambda device: (7, 5))
    monkeypatch.setattr(delta, "LONG_SEGMENT", 6)
    agrees(ROWS["gated-delta"], 20, torch.float32)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_without_a_state(row, chunked):
    agrees(row, 20, torch.float32, with_state=False)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_lengths_of_chunks(C, chunked, monkeypatch):
    made = linear.form
    monkeypatch.setattr(linear, "form", lambda *a: made(*a)._replace(C=C))
    agrees(ROWS["gated-delta"], 65, torch.float32)
    agrees(ROWS["gated-normalized"], 65, torch.float32)


def widest(*widths):
    """The widest precision that the kernels have room for."""
    return torch.float32 if max(widths) <= 256 else torch.float16


@pytest.mark.parametrize(
    ("op", "gates", "key", "value"),
    [
        (ops.delta_rule, 1, 130, 70),
        (ops.gated_delta_rule, 2, 70, 130),
        (ops.delta_rule, 1, 256, 24),
        (ops.delta_rule, 1, 384, 40),
        (ops.sum_rule, 0, 130, 130),
        (ops.gated_rule, 1, 40, 260),
    ],
)
def test_widths(op, gates, key, value, split, chunked):
    agrees(wide(op, gates, key, value), 17, widest(key, value))


@pytest.mark.parametrize("key", [100, 384])
def test_widths_of_steps(key, stepped):
    agrees(wide(ops.gated_delta_rule, 2, key, 40), 20, widest(key))


@pytest.mark.parametrize("name", ["sum-normalized", "gated-delta"])
def test_streaming(name, chunked):
    row = ROWS[name]
    inputs, state = problem(row, 40, dtype=torch.float32)
    whole = outcome(row, inputs, state, "triton")
    after, outputs = state, []
    for start, stop in ((0, 18), (18, 40)):
        cut = row.cut(inputs, start, stop)
        y, after = row(*cut, state=after, return_state=True, implementation="triton")
        outputs.append(y)
    y = torch.cat(outputs, 1)
    leaves = [*inputs, *parts(state)]
    gradients = torch.autograd.grad(weighted(y, *parts(after)), leaves)
    for a, b in zip([y, *parts(after), *gradients], whole, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("name", ["sum-decay-normalized", "gated-delta"])
@pytest.mark.parametrize("time", [20, 70])
def test_masks(name, time, stepped):
    row = WHOLE[name]
    inputs, state = problem(row, time, dtype=torch.float32)
    mask = torch.rand(2, time, generator=torch.Generator().manual_seed(0)) < 0.7
    y, after = row(
        *inputs, state=state, key_mask=mask, return_state=True, implementation="triton"
    )
    wanted, end = row(
        *inputs, state=state, key_mask=mask, return_state=True, implementation="naive"
    )
    assert not y[~mask].any()
    for a, b in zip([y, *parts(after)], [wanted, *parts(end)], strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("name", ["dpfp-delta", "sum-decay-normalized", "gated-delta"])
def test_packed(name):
    """Padded steps have a decay of 1 and features of 0."""
    lengths = [3, 0, 5]
    inputs, state = packed_problem(ROWS[name], lengths, torch.float32)
    op = partial(ROWS[name], cu_seqlens=borders(lengths))
    found, wanted = (
        outcome(op, inputs, state, implementation)
        for implementation in ("triton", "naive")
    )
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("pick", [0, 1])
@pytest.mark.parametrize("time", [20, 70])
def test_only_what_is_asked_for(time, pick, stepped):
    """Gradients of the output alone, and of the state alone; strides."""
    row = ROWS["gated-delta"]
    inputs, state = problem(row, time, dtype=torch.float32)
    odd = [x.detach().transpose(0, -1).contiguous().transpose(0, -1) for x in inputs]
    odd = [x.requires_grad_() for x in odd]
    found, wanted = (
        torch.autograd.grad(
            row(*given, state=state, return_state=True, implementation=name)[
                pick
            ].sum(),
            [*given[1:], state],
        )
        for name, given in (("triton", odd), ("naive", inputs))
    )
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("time", [20, 70])
def test_two_forwards_before_one_backward(time, stepped):
    row = ROWS["gated-delta"]
    inputs, state = problem(row, time, dtype=torch.float32)
    leaves = [*inputs, state]
    wanted = outcome(row, inputs, state, "triton")[-len(leaves) :]
    y, after = row(*inputs, state=state, return_state=True, implementation="triton")
    loss = weighted(y, after)
    with torch.no_grad():
        row(*(0.5 * x for x in inputs), state=state, implementation="triton")
    for _ in range(2):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert all(map(torch.equal, found, wanted))


def test_no_second_derivative():
    inputs, _ = problem(ROWS["delta"], 20, dtype=torch.float32)
    y = ROWS["delta"](*inputs, implementation="triton")
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), inputs, create_graph=True)


@pytest.mark.parametrize("time", [20, 70])
def test_divergence_is_not_hidden(time, stepped):
    """Keys that are much too long: never a wrong finite answer."""
    inputs, _ = problem(ROWS["delta"], time, dtype=torch.float32, with_state=False)
    q, k, v, _ = (x.detach() for x in inputs)
    k, beta = 300 * k + 1, torch.ones(q.shape[:3])
    naive = ops.delta_rule(q, k, v, beta, implementation="naive")
    y = ops.delta_rule(q, k, v, beta, implementation="triton")
    # From the first number on that naive cannot hold, neither can we.
    lost = ~torch.isfinite(naive).all(-1).all(-1)
    assert lost.any()
    assert not torch.isfinite(y[lost]).all()
    held = ~lost & torch.isfinite(y).all(-1).all(-1)
    for b in range(len(y)):
        steps = held[b].nonzero()[:5, 0]
        assert error(y[b, steps], naive[b, steps]) < 1e-3


def test_a_large_denominator_loses_nothing_in_float16():
    """1 / (z . q) is far below what float16 can hold."""
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
    # dq and dk are differences of nearly equal numbers: few digits are left.
    for a, b, limit in zip(found, wanted, (0.2, 0.05, 2e-3), strict=True):
        assert error(a, b) < limit


def test_negative_denominators():
    """Signed features, and a chunk that is not full."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, 5, 1, 8, generator=generator) + 0.1 for _ in range(2))
    given = [x.requires_grad_() for x in (-q, k, k - 0.5)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found = weighted(ops.sum_rule(*given, implementation="triton"))
    wanted = weighted(ops.sum_rule(*exact, implementation="naive"))
    gradients = torch.autograd.grad(found, given), torch.autograd.grad(wanted, exact)
    for a, b in zip(*gradients, strict=True):
        assert error(a, b) < 1e-5


def test_equal_keys_do_not_blur():
    """All keys the same: every power of the matrix is large, its inverse
    is not.
    """
    k = l2_normalize(torch.ones(1, 70, 1, 8))
    v, beta = torch.randn(1, 70, 1, 8), torch.ones(1, 70, 1)
    y = ops.delta_rule(k, k, v, beta, implementation="triton")
    assert error(y, v) < 1e-6


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("nu", "d"), [(1, 6), (2, 16), (3, 20)])
def test_dpfp_on_the_way_in(nu, d, dtype, capability, monkeypatch):
    monkeypatch.setattr(launcher, "capability", lambda device: capability)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 20, 2, n, generator=generator, dtype=torch.float64)
        for n in (d, d, 20)
    )
    k[:, 3] = 0.0
    beta = torch.rand(1, 20, 2, generator=generator, dtype=torch.float64)
    given = [x.to(dtype).requires_grad_() for x in (q, k, v, beta)]
    exact = [x.detach().double().requires_grad_() for x in given]
    y = ops.dpfp_delta_rule(*given, nu, implementation="triton")
    phi_q, phi_k = (sum_normalize(DPFP(nu)(x)) for x in exact[:2])
    wanted = ops.delta_rule(phi_q, phi_k, *exact[2:], implementation="naive")
    weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    found = [y, *torch.autograd.grad((y.double() * weights).sum(), given)]
    wanted = [wanted, *torch.autograd.grad((wanted * weights).sum(), exact)]
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < LIMITS[dtype]
    assert not found[2][:, 3].any()


def test_refusals_name_their_reason():
    x = torch.zeros(1, 3, 1, 4)
    beta = torch.zeros(1, 3, 1)
    with pytest.raises(ValueError, match=r"'triton' cannot run here.*float64"):
        ops.sum_rule(x.double(), x.double(), x.double(), implementation="triton")
    with pytest.raises(ValueError, match="interpreter does not compute in bfloat16"):
        ops.sum_rule(x.bfloat16(), x.bfloat16(), x.bfloat16(), implementation="triton")
    with pytest.raises(ValueError, match="for normalize=True; 'efficient' can"):
        ops.delta_rule(x, x, x, beta, normalize=True, implementation="triton")
    long = torch.zeros(1, 3, 1, 600)
    with pytest.raises(ValueError, match="up to 256 in float32, got 600 and 4"):
        ops.sum_rule(long, long, x, normalize=False, implementation="triton")
    assert ops.implementations("delta_rule") == (
        "naive",
        "chunked",
        "efficient",
        "triton",
    )


@pytest.mark.parametrize("name", ["sum-normalized", "dpfp-delta"])
def test_grouped_heads(name, chunked):
    """Two queries read one memory; DPFP features are made by the kernel."""

    def make(time, generator, with_state):
        (q, *rest), state = WHOLE[name].make(time, generator, with_state)
        one = [x[:1, :, :1] for x in rest]
        return [q[:1, :, :2], *one], rebuild(state, lambda x: x[:1, :1])

    agrees(replace(WHOLE[name], make=make), 17, torch.float32)


def test_a_faded_memory():
    """What it holds of one pair would be subnormal, and then 0."""
    k = torch.zeros(1, 20, 1, 16)
    k[:, 0] = 1
    v = torch.randn(1, 20, 1, 16, generator=torch.Generator().manual_seed(0))
    for faded in (-95.0, -200.0):
        decay = torch.full((1, 20, 1), faded / 19)
        given = [x.clone().requires_grad_() for x in (torch.ones_like(k), k, v, decay)]
        y = ops.sum_rule(*given[:3], log_decay=given[3], implementation="triton")
        torch.testing.assert_close(y, v[:, :1].expand_as(y))
        _, _, dv, dl = torch.autograd.grad(y.sum(), given)
        torch.testing.assert_close(dv[:, 0], torch.full_like(v[:, 0], 20.0))
        torch.testing.assert_close(dl, torch.zeros_like(dl), atol=1e-3, rtol=0)
