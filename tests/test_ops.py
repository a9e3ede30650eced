"""Every operation: naive is the reference, efficient must agree with it.

All operations are in one table, `problems.ROWS`; tests of a single
operation are in files of their own.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import fwlab
from fwlab import ops
from fwlab.ops.parts import chunks
from problems import (
    ROWS,
    dropped,
    error,
    outcome,
    parts,
    problem,
    rebuild,
    rules,
    saved_bytes,
    weighted,
)
from problems.row import Row

#: A step, a chunk, one step more, and several tiles of every size but for a rest.
TIMES = [1, 32, 33, 130]
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
streams = pytest.mark.parametrize(
    "row",
    [r for r in ROWS.values() if r.causal],
    ids=[n for n, r in ROWS.items() if r.causal],
)
masked = pytest.mark.parametrize(
    "row",
    [r for r in ROWS.values() if r.masked],
    ids=[n for n, r in ROWS.items() if r.masked],
)
both = pytest.mark.parametrize("implementation", ["naive", "efficient"])


@every_row
@pytest.mark.parametrize("time", TIMES)
def test_efficient_is_naive(row, time):
    inputs, state = problem(row, time)
    naive = outcome(row, inputs, state, "naive")
    efficient = outcome(row, inputs, state, "efficient")
    for found, wanted in zip(efficient, naive, strict=True):
        assert error(found, wanted) < 1e-10


@pytest.mark.parametrize("row", rules.ROWS.values(), ids=rules.ROWS)
@pytest.mark.parametrize("time", [1, 40, chunks.WHOLE + 1])
def test_without_states(row, time):
    """Short sequences are then a single chunk, of which all is kept."""
    inputs, _ = problem(row, time, with_state=False)
    keep = torch.rand(2, time, generator=torch.Generator().manual_seed(0)) < 0.8
    wanted = row(*inputs, key_mask=keep, implementation="naive")
    pulled = torch.autograd.grad(weighted(wanted), inputs)

    def compute(*inputs):
        return row(*inputs, key_mask=keep, implementation="efficient")

    found = compute(*inputs)
    with torch.no_grad():
        assert error(compute(*inputs), found) < 1e-14
    assert error(found, wanted) < 1e-10
    again = checkpoint(compute, *inputs, use_reentrant=False)
    for y, more in ((found, True), (found, False), (again, False)):
        gradients = torch.autograd.grad(weighted(y), inputs, retain_graph=more)
        # Where all weights are 1, that of a mean is 0, or rounding.
        for a, b in zip(gradients, pulled, strict=True):
            assert error(a, b) < 1e-10 or max(a.norm(), b.norm()) < 1e-14


@pytest.mark.parametrize("row", rules.ROWS.values(), ids=rules.ROWS)
@pytest.mark.parametrize(
    ("time", "dtype", "limit"),
    [
        (1, torch.float64, 1e-10),
        (70, torch.float64, 1e-10),
        (70, torch.float32, 1e-5),
        (33, torch.float16, 2e-3),
        (33, torch.bfloat16, 1e-2),
    ],
)
def test_chunked_is_naive(row, time, dtype, limit):
    """Autograd differentiates it, so values, states and gradients are all that
    can be wrong; also with masked steps, and in two pieces.
    """
    inputs, state = problem(row, time, dtype)
    naive = outcome(row, inputs, state, "naive")
    chunked = outcome(row, inputs, state, "chunked")
    for found, wanted in zip(chunked, naive, strict=True):
        assert error(found, wanted) < limit

    mask = torch.rand(2, time) < 0.7
    options = {"state": state, "key_mask": mask, "return_state": True}
    y, after = row(*inputs, **options, implementation="chunked")
    wanted, wanted_after = row(*inputs, **options, implementation="naive")
    cut = time // 3
    first, middle = row(
        *row.cut(inputs, 0, cut),
        **options | {"key_mask": mask[:, :cut]},
        implementation="chunked",
    )
    second, last = row(
        *row.cut(inputs, cut, time),
        **options | {"key_mask": mask[:, cut:], "state": middle},
        implementation="chunked",
    )
    joined = torch.cat([first, second], 1)
    for found, expected in (
        (y, wanted),
        (joined, wanted),
        *zip(parts(after), parts(wanted_after), strict=True),
        *zip(parts(last), parts(wanted_after), strict=True),
    ):
        assert error(found, expected) < limit


@every_row
@pytest.mark.parametrize(
    ("dtype", "limit", "time"),
    [
        (torch.float32, 1e-5, 70),
        (torch.float16, 2e-3, 40),
        (torch.bfloat16, 1e-2, 40),
    ],
)
def test_lower_precision(row, dtype, limit, time):
    inputs, state = problem(row, time, dtype=dtype)
    # The reference sees the same rounded inputs.
    exact = [x.detach().double().requires_grad_() for x in inputs]
    start = rebuild(
        state,
        lambda x: x.detach().double().requires_grad_() if x.is_floating_point() else x,
    )
    wanted = outcome(row, exact, start, "naive")
    for implementation in ("naive", "efficient"):
        found = outcome(row, inputs, state, implementation)
        assert found[0].dtype == dtype
        for a, b in zip(found, wanted, strict=True):
            assert error(a, b) < limit, implementation


@every_row
@pytest.mark.parametrize(
    ("time", "fast"),
    [(1, True), (9, True), pytest.param(1, False, marks=pytest.mark.slow)],
)
def test_gradcheck(row, time, fast, monkeypatch):
    row.small(monkeypatch)
    inputs, state = problem(row, time)
    leaves = [*inputs, *parts(state)]

    def run(*leaves):
        rest = iter(leaves[len(inputs) :])
        start = rebuild(state, lambda x: next(rest) if x.is_floating_point() else x)
        y, after = row(*leaves[: len(inputs)], state=start, return_state=True)
        return (y, *(x for x in parts(after) if torch.isfinite(x).all()))

    assert gradcheck(run, leaves, fast_mode=fast)


@every_row
def test_no_matter_how_chunks_are_cut(row, monkeypatch):
    inputs, state = problem(row, 50)
    wanted = outcome(row, inputs, state, "efficient")
    row.small(monkeypatch)
    for found, same in zip(
        outcome(row, inputs, state, "efficient"), wanted, strict=True
    ):
        assert error(found, same) < 1e-10


@streams
@both
def test_streaming(row, implementation):
    """A sequence split anywhere gives the same result, with gradients."""
    inputs, state = problem(row, 70)
    whole = outcome(row, inputs, state, implementation)
    for cuts in ([0, 1, 33, 34, 35], [64]):
        after, outputs = state, []
        for start, stop in itertools.pairwise([0, *cuts, 70]):
            y, after = row(
                *row.cut(inputs, start, stop),
                state=after,
                return_state=True,
                implementation=implementation,
            )
            outputs.append(y)
        y = torch.cat(outputs, dim=1)
        gradients = torch.autograd.grad(
            weighted(y, *parts(after)), [*inputs, *parts(state)]
        )
        for found, wanted in zip([y, *parts(after), *gradients], whole, strict=True):
            assert error(found, wanted) < 1e-10, cuts


@streams
@pytest.mark.parametrize("implementation", ["naive", "chunked", "efficient"])
def test_a_row_of_a_state_is_changed_in_place(row, implementation):
    """As where sequences end: `state[done] = 0`, while all has a graph."""
    if implementation == "chunked" and row not in rules.ROWS.values():
        pytest.skip("this operation has no chunked form")
    inputs, state = problem(row, 9)
    done = torch.tensor([True, False])
    results = []
    for change in (lambda x: x.index_fill(0, torch.tensor([0]), 0), reset):
        y, middle = row(
            *row.cut(inputs, 0, 5),
            state=state,
            return_state=True,
            implementation=implementation,
        )
        middle = rebuild(middle, change)
        assert not any(x[done].any() for x in parts(middle))
        more = row(*row.cut(inputs, 5, 9), state=middle, implementation=implementation)
        results += torch.autograd.grad(weighted(y, more), [*inputs, *parts(state)])
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))


def reset(x):
    x[torch.tensor([True, False])] = 0
    return x


@every_row
@both
def test_nothing_to_do(row, implementation):
    inputs, state = problem(row, 0)
    y, after = row(
        *inputs, state=state, return_state=True, implementation=implementation
    )
    full, start = problem(row, 1)
    shape = row(*full, state=start).shape
    assert list(y.shape) == [shape[0], 0, *shape[2:]]
    # The state after it may be changed in place.
    own = {part.data_ptr() for part in parts(state) if part.numel()}
    assert not own & {part.data_ptr() for part in parts(after) if part.numel()}
    for found, wanted in zip(parts(after), parts(state), strict=True):
        assert torch.equal(found, wanted)
    inputs, _ = problem(row, 0, with_state=False)
    y, _ = row(*inputs, return_state=True, implementation=implementation)
    for x, gradient in zip(inputs, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()


@every_row
def test_strange_strides(row):
    """Transposed and expanded inputs, and a gradient of stride 0."""
    inputs, state = problem(row, 40)
    leaves = [*inputs, *parts(state)]
    wanted = torch.autograd.grad(
        row(*inputs, state=state, implementation="naive").sum(), leaves
    )
    odd = []
    for x in inputs:
        wide = x.detach().transpose(0, -1).contiguous().transpose(0, -1)
        odd.append(wide.requires_grad_())
    assert any(not x.is_contiguous() for x in odd)
    y = row(*odd, state=state, implementation="efficient")
    found = torch.autograd.grad(y.sum(), [*odd, *parts(state)])
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-10

    # One sequence, seen twice without a copy.
    inputs, _ = problem(row, 40, with_state=False)
    once = [x[:1].detach().requires_grad_() if len(x) == 2 else x for x in inputs]

    def spread(implementation):
        wide = [x.expand(2, *x.shape[1:]) if len(x) == 1 else x for x in once]
        return torch.autograd.grad(
            row(*wide, implementation=implementation).sum(), once
        )

    for a, b in zip(spread("efficient"), spread("naive"), strict=True):
        assert error(a, b) < 1e-10


@every_row
def test_backward_twice_and_forwards_in_between(row):
    inputs, state = problem(row, 50)
    leaves = [*inputs, *parts(state)]
    wanted = outcome(row, inputs, state, "efficient")[-len(leaves) :]

    y, after = row(*inputs, state=state, return_state=True)
    loss = weighted(y, *parts(after))
    row(*(x * 0.5 for x in inputs), state=state)
    with torch.no_grad():
        row(*(x * 0.9 for x in inputs), state=state)
    for _ in range(2):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


@every_row
def test_only_what_is_asked_for(row, monkeypatch):
    """The state alone, the output alone, and one input alone."""
    row.small(monkeypatch)
    inputs, state = problem(row, 12)
    for pick in (0, 1):
        results = []
        for implementation in ("naive", "efficient"):
            y, after = row(
                *inputs, state=state, return_state=True, implementation=implementation
            )
            loss = weighted(y) if pick == 0 else weighted(*parts(after))
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
            zero = torch.zeros(())
            results.append([zero if g is None else g for g in found])
        for a, b in zip(*results, strict=True):
            assert error(b.expand_as(a) if b.dim() == 0 else b, a.expand_as(b)) < 1e-10
    inputs, _ = problem(row, 12, with_state=False)
    for place, x in enumerate(inputs):
        frozen = [y.detach() for y in inputs]
        frozen[place] = x
        alone, wanted = (
            torch.autograd.grad(weighted(row(*frozen, implementation=name)), x)[0]
            for name in ("efficient", "naive")
        )
        assert error(alone, wanted) < 1e-10


@every_row
@both
def test_nothing_of_the_caller_changes(row, implementation):
    inputs, state = problem(row, 50)
    before = [x.detach().clone() for x in [*inputs, *parts(state)]]
    outcome(row, inputs, state, implementation)
    for x, copy in zip([*inputs, *parts(state)], before, strict=True):
        assert torch.equal(x, copy)


@every_row
def test_second_derivative(row):
    """Naive has one; efficient is correct or reports that it has none."""
    inputs, _ = problem(row, 3, with_state=False)
    if row.twice:
        assert gradgradcheck(
            lambda *x: row(*x, implementation="naive"), inputs, fast_mode=True
        )

    def second(implementation):
        y = row(*inputs, implementation=implementation)
        first = torch.autograd.grad(weighted(y), inputs, create_graph=True)
        return torch.autograd.grad(weighted(*first, seed=2), inputs, allow_unused=True)

    try:
        found = second("efficient")
    except RuntimeError as refusal:
        assert "implementation='naive'" in str(refusal)
        return
    for a, b in zip(found, second("naive"), strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < 1e-10


@masked
@pytest.mark.parametrize("implementation", ["naive", "chunked", "efficient"])
def test_key_mask(row, implementation):
    """A masked step returns 0, and is as if the token were not there, whatever it
    contains. Where others know their distance from it, they still do.
    """
    if implementation == "chunked" and row not in rules.ROWS.values():
        pytest.skip("this operation has no chunked form")
    inputs, state = problem(row, 60)
    keep = torch.rand(2, 60, generator=torch.Generator().manual_seed(0)) < 0.6
    bad = [
        x
        if x.shape[:2] != (2, 60)
        else torch.where(keep.view(2, 60, *[1] * (x.dim() - 2)), x, torch.nan)
        for x in inputs
    ]
    options = {"state": state, "return_state": True, "key_mask": keep}
    y, after = row(*bad, **options, implementation=implementation)
    assert not y[~keep].any()
    if row.pick:
        wanted = dropped(row, inputs, state, keep)
    else:
        wanted, wanted_after = row(*inputs, **options, implementation="naive")
        wanted = [wanted, *parts(wanted_after)]
    for a, b in zip([y, *parts(after)][: len(wanted)], wanted, strict=True):
        assert error(torch.nan_to_num(a), torch.nan_to_num(b)) < 1e-10
    leaves = [*inputs, *parts(state)]
    gradients = torch.autograd.grad(weighted(y), leaves)
    for found, same in zip(
        gradients, torch.autograd.grad(weighted(wanted[0]), leaves), strict=True
    ):
        assert error(found, same) < 1e-10
    timed = [g for g in gradients if g.shape[:2] == (2, 60)]
    assert timed
    assert all(not g[~keep].any() for g in timed)


@every_row
def test_the_same_without_gradients(row):
    """Then nothing is saved, and nothing else changes."""
    inputs, state = problem(row, 150)
    whole = row(*inputs, state=state, return_state=True)
    with torch.no_grad():
        alone = row(*inputs, state=state, return_state=True)
    for a, b in zip(
        [whole[0], *parts(whole[1])], [alone[0], *parts(alone[1])], strict=True
    ):
        assert error(a, b) < 1e-14


@every_row
def test_what_is_kept_for_backward(row):
    """It grows with time only as inputs and outputs do, and naive keeps
    several times as much.
    """

    def kept(time, implementation):
        inputs = [x.requires_grad_() for x in row.large(time)]
        # A bias over pairs of steps is an input that no one can avoid.
        pairs = sum(x.nbytes for x in inputs if x.shape == (time, time))
        return saved_bytes(lambda: row(*inputs, implementation=implementation)) - pairs

    efficient = [kept(time, "efficient") for time in (256, 512, 1024)]
    assert efficient[2] - efficient[1] <= 2.1 * (efficient[1] - efficient[0])
    assert efficient[2] < 2.1 * efficient[1]
    # Naive keeps at least four times as much for four times the steps:
    # counted there, it would fill a small machine.
    assert 4 * kept(256, "naive") > row.ratio * efficient[2]


@every_row
@pytest.mark.parametrize("time", [1, 100])
def test_autocast(row, time):
    """Under autocast the sums stay in float32."""
    inputs, _ = problem(row, time, torch.float32, with_state=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = row(*inputs)
        gradients = torch.autograd.grad(weighted(found), inputs)
    assert torch.equal(found, row(*inputs))
    # The backward pass, too, wherever it is called.
    for a, b in zip(
        gradients, torch.autograd.grad(weighted(row(*inputs)), inputs), strict=True
    ):
        assert torch.equal(a, b)


@every_row
def test_activation_checkpointing(row):
    """It computes everything again in the backward pass, and only once."""
    inputs, state = problem(row, 20)

    def compute(*inputs):
        return weighted(row(*inputs, state=state))

    found = torch.autograd.grad(
        checkpoint(compute, *inputs, use_reentrant=False), inputs
    )
    for a, b in zip(found, torch.autograd.grad(compute(*inputs), inputs), strict=True):
        assert torch.equal(a, b)


@streams
@settings(max_examples=12)
@given(data=st.data())
def test_any_length_any_cut_any_chunk(row: Row, data):
    """Random lengths, splits, chunk sizes, seeds and precisions."""
    time = data.draw(st.integers(0, 40), label="time")
    cut = data.draw(st.integers(0, time), label="cut")
    dtype, limit = data.draw(
        st.sampled_from(
            [
                (torch.float64, 1e-10),
                (torch.float32, 1e-5),
                (torch.float16, 2e-3),
                (torch.bfloat16, 1e-2),
            ]
        ),
        label="dtype",
    )
    seed = data.draw(st.integers(0, 2**32), label="seed")
    inputs, state = problem(row, time, dtype, seed, data.draw(st.booleans()))
    exact = [x.detach().double() for x in inputs]
    start = rebuild(state, lambda x: x.double() if x.is_floating_point() else x)
    wanted = row(*exact, state=start, implementation="naive")
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="small chunks"):
            row.small(patch)
        y1, middle = row(*row.cut(inputs, 0, cut), state=state, return_state=True)
        y2 = row(*row.cut(inputs, cut, time), state=middle)
    y = torch.cat([y1, y2], 1)
    assert y.dtype == dtype
    assert error(y, wanted) < limit


def test_detach():
    state = ops.NormalizedState(*(torch.ones(2, requires_grad=True) for _ in "ab"))
    cut = fwlab.detach([state, None, {"x": (state.z,)}, 7])
    assert cut[3] == 7
    assert isinstance(cut[0], ops.NormalizedState)
    assert not cut[0].W.requires_grad
    assert cut[1] is None
    assert not cut[2]["x"][0].requires_grad
    with pytest.raises(TypeError, match="str"):
        fwlab.detach("W")


def test_implementations():
    assert ops.implementations("delta_rule") == ("naive", "chunked", "efficient")
    with pytest.raises(ValueError, match="delta_rul'"):
        ops.implementations("delta_rul")
    with pytest.raises(ValueError, match=r"got \['delta_rule'\]"):
        ops.implementations(["delta_rule"])


def bad(**changes):
    x = torch.zeros(2, 7, 3, 4)
    arguments = {"q": x, "k": x, "v": x, "beta": x[..., 0], **changes}
    q, k, v, beta = (arguments.pop(name) for name in ("q", "k", "v", "beta"))
    return lambda: ops.delta_rule(q, k, v, beta, **arguments)


@pytest.mark.parametrize(
    ("call", "error_type", "message"),
    [
        (bad(k=torch.zeros(2, 5, 3, 4)), ValueError, r"expected k of shape \[2, 7, 3, 4\].*got \[2, 5, 3, 4\]"),
        (bad(v=torch.zeros(2, 7, 4)), ValueError, r"expected v of shape \[2, 7, 3, value\].*got \[2, 7, 4\]"),
        (bad(beta=torch.zeros(2, 7, 3, 1)), ValueError, r"expected beta of shape \[2, 7, 3\]"),
        (bad(q=torch.zeros(2, 7, 3, 4).long()), TypeError, "expected q to be a floating-point tensor, got int64"),
        (bad(v=torch.zeros(2, 7, 3, 4).double()), TypeError, "expected v in the precision of q, .*got float64"),
        (bad(beta=0.5), TypeError, "expected beta to be a tensor, got float"),
        (bad(k=torch.zeros(2, 7, 3, 4, device="meta")), ValueError, "expected k on cpu, .*got meta"),
        (bad(state=torch.zeros(2, 3, 4, 5)), ValueError, r"expected state of shape \[2, 3, 4, 4\]"),
        (bad(state=torch.zeros(2, 3, 4, 4).double()), TypeError, r"expected state in \w+ for these inputs, got float64"),
        (bad(state=torch.zeros(2, 3, 4, 4), normalize=True), TypeError, "NormalizedState"),
        (bad(key_mask=torch.ones(2, 7)), TypeError, "expected key_mask to be a bool"),
        (bad(key_mask=torch.ones(2, 6).bool()), ValueError, r"expected key_mask of shape .*got \[2, 6\]"),
        (bad(scale="a"), TypeError, "expected scale to be a finite number, got 'a'"),
        (bad(scale=True), TypeError, "expected scale to be a finite number, got True"),
        (bad(scale=float("nan")), ValueError, "expected scale to be a finite number, got nan"),
        (bad(scale=torch.ones(2)), ValueError, r"finite number or a tensor of one, got a float32 tensor of shape \[2\]"),
        (bad(scale=torch.tensor(True)), ValueError, r"got a bool tensor of shape \[\]"),
        (bad(normalize="yes"), TypeError, "expected normalize to be True or False, got 'yes'"),
        (lambda: ops.aft_simple(*[torch.zeros(2, 7, 4)] * 3, causal="no"), TypeError, "aft_simple: expected causal to be True or False, got 'no'"),
        (lambda: ops.delta_product(torch.zeros(2, 7, 3, 4), *[torch.zeros(2, 7, 0, 3, 4)] * 2, torch.zeros(2, 7, 0, 3)), ValueError, r"delta_product: expected k .*with at least 1 step, got \[2, 7, 0, 3, 4\]"),
        (bad(k=torch.zeros(2, 7, 3, 4).to(torch.float8_e4m3fn)), TypeError, "expected k in float16, bfloat16, float32 or float64, got float8_e4m3fn"),
        (bad(implementation="cuda"), ValueError, "'naive', 'chunked', 'efficient'.*got 'cuda'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error_type, message):
    with pytest.raises(error_type, match=message) as info:
        call()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("nu", [0, True, 1.5, "1"])
def test_the_number_of_shifts(nu):
    x = torch.zeros(2, 7, 3, 4)
    wanted = "an integer" if nu else "at least 1"
    message = f"dpfp_delta_rule: expected nu to be {wanted}, got {nu!r}"
    with pytest.raises(TypeError if nu else ValueError, match=message):
        ops.dpfp_delta_rule(x, x, x, x[..., 0], nu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": 3}, "expected state to be a KeyValueCache"),
        ({"state": (None, None, None)}, "expected state.k to be a tensor"),
        ({"state": (torch.zeros(2, 3, 3, 4),) * 2 + (torch.ones(2, 3),)}, "bool"),
        ({"key_mask": torch.ones(2, 9)}, "expected key_mask to be a bool"),
        ({"implementation": "flash"}, "got 'flash'"),
        ({"scale": "a"}, "expected scale to be a finite number, got 'a'"),
        ({"scale": float("inf")}, "got inf"),
        ({"scale": torch.ones(3)}, r"got a float32 tensor of shape \[3\]"),
    ],
)
def test_softmax_errors(options, message):
    x = torch.zeros(2, 7, 3, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        ops.softmax_attention(x, x, x, **options)
    eight = x.to(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"expected q in float16, .*got float8_e5m2"):
        ops.softmax_attention(eight, eight, eight)
    mixed = ops.softmax_attention(x.bfloat16(), x, x)
    assert mixed.dtype == torch.float32


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_with_grouped_heads(implementation, masked):
    """As if each head of keys and values were there once per query."""
    inputs = (
        torch.randn(2, 20, heads, 4, dtype=torch.float64, requires_grad=True)
        for heads in (6, 2, 2)
    )
    q, k, v = inputs
    keep = torch.rand(2, 20) < 0.7 if masked else None

    def attend(*inputs):
        options = {"implementation": implementation, "return_state": True}
        pieces, cache = [], None
        for part in (slice(0, 12), slice(12, 20)):
            mask = None if keep is None else keep[:, part]
            y, cache = ops.softmax_attention(
                *(x[:, part] for x in inputs), state=cache, key_mask=mask, **options
            )
            pieces.append(y)
        return torch.cat(pieces, 1), cache

    y, cache = attend(q, k, v)
    wanted, _ = attend(q, *(x[:, :, [0, 0, 0, 1, 1, 1]] for x in (k, v)))
    assert cache.k.shape == cache.v.shape == (2, 20, 2, 4)
    assert error(y, wanted) < 1e-12
    for a, b in zip(
        *(torch.autograd.grad(weighted(x), [q, k, v]) for x in (y, wanted)), strict=True
    ):
        assert error(a, b) < 1e-12


@both
def test_a_row_of_a_cache_is_changed_in_place(implementation):
    """It shares no memory with the arguments, or with what backward needs."""
    q, k, v = torch.randn(3, 2, 5, 3, 4, requires_grad=True).unbind()
    mask, run = torch.ones(2, 5).bool(), {"implementation": implementation}
    y, cache = ops.softmax_attention(q, k, v, key_mask=mask, return_state=True, **run)
    for part in cache:
        part[0] = 0
    assert mask.all() and k[0].any() and v[0].any()
    wanted = ops.softmax_attention(q, k, v, **run)
    for a, b in zip(
        *(torch.autograd.grad(weighted(x), [q, k, v]) for x in (y, wanted)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_softmax_attention(implementation):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, 4, generator=generator).double() for _ in range(3))
    y = ops.softmax_attention(q, k, v, implementation=implementation)
    for t in range(9):
        weights = torch.softmax(
            torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / 2, -1
        )
        wanted = torch.einsum("bhs,bshv->bhv", weights, v[:, : t + 1])
        assert error(y[:, t], wanted) < 1e-12
    state, pieces = None, []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        piece, state = ops.softmax_attention(
            q[:, part],
            k[:, part],
            v[:, part],
            state=state,
            return_state=True,
            implementation=implementation,
        )
        pieces.append(piece)
    assert error(torch.cat(pieces, 1), y) < 1e-12

    keep = torch.tensor([[False, True, False, True, True, True, False, True, True]] * 2)
    dirty = [torch.where(keep[..., None, None], x, torch.nan) for x in (q, k, v)]
    masked = ops.softmax_attention(*dirty, key_mask=keep, implementation=implementation)
    wanted = ops.softmax_attention(*(x[:, keep[0]] for x in (q, k, v)))
    assert not masked[:, ~keep[0]].any()
    assert error(masked[:, keep[0]], wanted) < 1e-12
    _, state = ops.softmax_attention(
        *(x[:, :5] for x in dirty), key_mask=keep[:, :5], return_state=True
    )
    rest = ops.softmax_attention(
        *(x[:, 5:] for x in dirty), key_mask=keep[:, 5:], state=state
    )
    assert error(rest, masked[:, 5:]) < 1e-12


@every_row
def test_an_empty_batch(row):
    """No sequence at all: empty outputs, states and gradients of zeros."""
    inputs, _ = problem(row, 7, with_state=False)
    none = [x[:0] if x.shape[:2] == (2, 7) else x for x in inputs]
    y, after = row(*none, return_state=True)
    assert len(y) == 0
    assert all(len(x) == 0 for x in parts(after))


@pytest.mark.parametrize("op", ["gated_rule", "delta_rule", "gated_delta_rule"])
def test_a_gate_is_not_left_out(op):
    x, gate = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 2)
    rest = {"log_decay": gate} if op == "gated_delta_rule" else {}
    with pytest.raises(
        TypeError, match=f"{op}: expected beta to be a tensor, got NoneType"
    ):
        getattr(ops, op)(x, x, x, None, **rest)
    if rest:
        with pytest.raises(TypeError, match="expected log_decay to be a tensor"):
            ops.gated_delta_rule(x, x, x, gate, None)
