"""Packed sequences: each document as if it were alone."""

import inspect
import math
from functools import partial

import alike
import pytest
import torch
from alike import refuses
from hypothesis import given
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from fwlab import feature_maps, ops
from fwlab.layers import AFTSimple, Block, FastWeightAttention, FastWeightProgrammer
from fwlab.models import MIXERS, LanguageModel
from fwlab.ops.call import packed, whole
from fwlab.ops.call.choice import KERNELS
from fwlab.ops.call.rule import Rule
from problems import ROWS, borders, fwp, packed_problem, parts, rebuild, rules, weighted
from problems.row import Row

PACKED = {**fwp.ROWS, **rules.ROWS, "aft-simple": ROWS["aft-simple"]}
every_row = pytest.mark.parametrize("row", PACKED.values(), ids=PACKED)
LENGTHS = [64, 0, 1, 65, 3, 63, 0]


def alone(row, inputs, lengths, state=None, key_mask=None, **options):
    """The same from one call for each document."""
    cut, y, after = borders(lengths).tolist(), [], []
    for i in range(len(lengths)):
        start, stop = cut[i : i + 2]
        y_i, after_i = row(
            *row.cut(inputs, start, stop),
            state=rebuild(state, lambda x, i=i: x[i : i + 1]),
            key_mask=None if key_mask is None else key_mask[:, start:stop],
            return_state=True,
            **options,
        )
        y.append(y_i)
        after.append(parts(after_i))
    return [torch.cat(y, 1), *map(torch.cat, zip(*after, strict=True))]


def together(row, inputs, lengths, **options):
    y, after = row(*inputs, cu_seqlens=borders(lengths), return_state=True, **options)
    return [y, *parts(after)]


def with_gradients(results, leaves):
    gradients = torch.autograd.grad(weighted(*results), leaves, materialize_grads=True)
    return [*results, *gradients]


def agree(found, wanted, limit=1e-12):
    found, wanted = list(found), list(wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    alike.agree(found, wanted, limit)


def ways():
    """Every row with each of its implementations."""
    found = []
    for name, row in PACKED.items():
        op = row.op.func if isinstance(row.op, partial) else row.op
        op = ops.sum_rule if op is rules.decaying_sum else op
        for implementation in ops.TABLE[op.__name__].implementations:
            if implementation not in KERNELS:
                label = f"{name}-{implementation}"
                found.append(pytest.param(row, implementation, id=label))
    return found


def test_all_operations_with_one_memory_take_borders():
    found = {
        name
        for name in ops.TABLE
        if "cu_seqlens" in inspect.signature(getattr(ops, name)).parameters
    }
    rule_names = {n for n, op in ops.TABLE.items() if isinstance(op, Rule)}
    assert found == rule_names | {"fwp", "aft_simple"}


@pytest.mark.parametrize(("row", "implementation"), ways())
@pytest.mark.parametrize("masked", [False, True])
def test_each_document_is_alone(row, implementation, masked):
    """Outputs, states and all gradients, the initial states' included."""
    lengths = [1, 5, 0, 2, 17, 9] if masked else LENGTHS
    inputs, state = packed_problem(row, lengths)
    options = {"state": state, "implementation": implementation}
    if masked:
        keep = torch.rand(1, sum(lengths), generator=torch.Generator().manual_seed(3))
        options["key_mask"] = keep < 0.7
    leaves = [*inputs, *parts(state)]
    agree(
        with_gradients(together(row, inputs, lengths, **options), leaves),
        with_gradients(alone(row, inputs, lengths, **options), leaves),
    )


@every_row
def test_without_states(row):
    inputs, _ = packed_problem(row, [3, 0, 7])
    agree(together(row, inputs, [3, 0, 7]), alone(row, inputs, [3, 0, 7]))
    y = row(*inputs, cu_seqlens=borders([3, 0, 7], torch.int32))
    assert torch.equal(y, together(row, inputs, [3, 0, 7])[0])


@every_row
def test_all_documents_may_be_empty(row):
    inputs, state = packed_problem(row, [0, 0, 0])
    y, *after = together(row, inputs, [0, 0, 0], state=state)
    assert y.shape[:2] == (1, 0)
    agree(after, parts(state))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("implementation", ["naive", "chunked", "efficient"])
def test_grouped_heads_and_scale(normalize, implementation):
    row = rules.ROWS["delta-normalized" if normalize else "delta"]
    (q, *others), state = packed_problem(row, [4, 11, 0, 9])
    inputs = [torch.cat([q, 1 - q], 2), *others]
    options = {"state": state, "scale": 0.3, "implementation": implementation}
    found = together(row, inputs, [4, 11, 0, 9], **options)
    agree(found, alone(row, inputs, [4, 11, 0, 9], **options))
    assert found[0].shape == (1, 24, 6, 5)


@every_row
def test_half_precision_and_autocast(row):
    inputs, state = packed_problem(row, [4, 11, 9], torch.bfloat16)
    found = together(row, inputs, [4, 11, 9], state=state)
    assert found[0].dtype == torch.bfloat16
    assert {x.dtype for x in parts(state)} == {torch.float32}
    agree(found, alone(row, inputs, [4, 11, 9], state=state), 1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agree(together(row, inputs, [4, 11, 9], state=state), found, 1e-7)


def test_in_both_directions():
    row = Row(partial(ops.aft_simple, causal=False), *[None] * 2)
    inputs, _ = packed_problem(PACKED["aft-simple"], [4, 0, 11, 9])
    for implementation in ("naive", "efficient"):
        y = row(*inputs, cu_seqlens=borders([4, 0, 11, 9]), implementation=implementation)  # fmt: skip
        cut = [row(*(x[:, a:b] for x in inputs)) for a, b in [(0, 4), (4, 15), (15, 24)]]  # fmt: skip
        agree(with_gradients([y], inputs), with_gradients([torch.cat(cut, 1)], inputs))


def test_activation_checkpointing():
    row = PACKED["delta"]
    inputs, state = packed_problem(row, [4, 11, 9])

    def run(*inputs):
        return together(row, inputs, [4, 11, 9], state=state)

    again = checkpoint(run, *inputs, use_reentrant=False)
    leaves = [*inputs, *parts(state)]
    agree(with_gradients(again, leaves), with_gradients(run(*inputs), leaves))


@given(st.lists(st.integers(0, 9) | st.integers(0, 5000), max_size=60))
def test_padding_is_bounded(lengths):
    """Every document is in one batch, less than half of which is padding."""
    found = packed.batches(lengths)
    real = [n for n in lengths if n]
    assert sorted(i for group in found for i in group) == [
        i for i, n in enumerate(lengths) if n
    ]
    padded = sum(max(lengths[i] for i in group) * len(group) for group in found)
    assert padded <= 2 * sum(real)
    if real:
        assert len(found) <= 1 + math.log2(max(real) / min(real))


def test_what_is_computed_at_once():
    shapes = []

    def compute(x, W, options):
        shapes.append((tuple(x.shape), tuple(W.shape), options))
        assert (x.sum((1, 2)) == W).all()
        return x, W + 1

    lengths = [2, 16, 9, 0, 1, 8, 3]
    x = torch.ones(1, sum(lengths), 1)
    run = packed.by_document(compute, lengths, ("W",), {})
    y, W = run(x=x, W=torch.tensor(lengths), options=5)
    # 8 + 9 + 16 of 48 steps are real; 3 more would be 36 of 64 ...
    assert shapes == [((4, 16, 1), (4,), 5), ((2, 2, 1), (2,), 5)]
    assert torch.equal(y, x)
    assert W.tolist() == [3, 17, 10, 0, 2, 9, 4]


@pytest.mark.parametrize("name", ["delta", "sum-normalized", "fwp-tanh", "aft-simple"])
def test_one_graph(name):
    """The operator reads the values when it runs, not when it is traced."""
    row = PACKED[name]
    inputs, state = packed_problem(row, [4, 0, 11])
    torch.compiler.reset()

    def run(*inputs, cu_seqlens):
        y, after = row(*inputs, cu_seqlens=cu_seqlens, state=state, return_state=True)
        return [y, *parts(after)]

    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    leaves = [*inputs, *parts(state)]
    for lengths in ([4, 0, 11], [7, 7, 1]):
        found = whole(*inputs, cu_seqlens=borders(lengths))
        wanted = together(row, inputs, lengths, state=state)
        agree(with_gradients(found, leaves), with_gradients(wanted, leaves))


def test_what_pytorch_is_told():
    inputs, state = packed_problem(PACKED["delta"], [2, 0, 4])
    cu_seqlens = borders([2, 0, 4])
    tensors = (state, *inputs, cu_seqlens)
    missing = [None] * (whole.TENSORS - len(tensors))
    size = list(inputs[2].shape)
    about = ("delta_rule", "q k v beta cu_seqlens", size)
    opcheck(
        torch.ops.fwlab.call.default,
        (*tensors, *missing, *about, "auto", False, None, 0, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@every_row
def test_without_data(row):
    inputs, state = packed_problem(row, [2, 0, 4])
    wanted = together(row, inputs, [2, 0, 4], state=state)
    bare = [x.to("meta") for x in inputs]
    options = {"state": rebuild(state, lambda x: x.to("meta")), "return_state": True}
    for device in ("meta", "cpu"):
        y, after = row(*bare, cu_seqlens=borders([2, 0, 4]).to(device), **options)
        for x, expected in zip([y, *parts(after)], wanted, strict=True):
            assert x.is_meta
            assert (x.shape, x.dtype) == (expected.shape, expected.dtype)


@every_row
def test_one_input_in_half_precision_without_data(row):
    """Also without documents."""
    inputs, state = packed_problem(row, [2, 0, 4])
    state = rebuild(state, torch.Tensor.float)

    def kinds(device, half, options):
        given = [x.detach().float().to(device) for x in inputs]
        given[half] = given[half].bfloat16()
        here = {n: rebuild(x, lambda x: x.to(device)) for n, x in options.items()}
        out = parts(row(*given, return_state=True, **here))
        return [(x.shape, x.dtype) for x in out]

    for half in range(len(inputs)):
        for options in ({}, {"cu_seqlens": borders([2, 0, 4]), "state": state}):
            wanted = kinds("cpu", half, options)
            assert kinds("meta", half, options) == wanted


def test_torch_func():
    inputs, _ = packed_problem(PACKED["delta"], [2, 0, 4])
    inputs = [x.detach() for x in inputs]
    row = partial(PACKED["delta"], cu_seqlens=borders([2, 0, 4]))
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(row(*leaves).square().sum(), leaves)
    found = torch.func.grad(lambda *x: row(*x).square().sum(), (0, 1, 2, 3))
    agree(found(*inputs), wanted)
    pairs = [torch.stack([x, x / 2]) for x in inputs]
    agree(torch.vmap(row)(*pairs), [row(*inputs), row(*(x / 2 for x in inputs))])


def call(cu_seqlens, batch=1, op="delta_rule", **options):
    x = torch.zeros(batch, 7, 3, 4)
    if op == "aft_simple":
        return lambda: ops.aft_simple(*[x[..., 0]] * 3, cu_seqlens=cu_seqlens)
    return lambda: ops.delta_rule(x, x, x, x[..., 0], cu_seqlens=cu_seqlens, **options)


def ints(*values):
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("call", "error_type", "message"),
    [
        (call(ints(0, 7), batch=2), ValueError, "expected a batch of 1 with cu_seqlens, got 2"),
        (call(ints(0, 7), batch=2, op="aft_simple"), ValueError, "aft_simple: expected a batch of 1"),
        (call([0, 7]), TypeError, "expected cu_seqlens to be a tensor of integers, got list"),
        (call(ints(0.0, 7.0)), TypeError, "tensor of integers, got float32"),
        (call(ints(False, True)), TypeError, "tensor of integers, got bool"),
        (call(ints(0)), ValueError, r"expected cu_seqlens of shape \[documents \+ 1\].*got \[1\]"),
        (call(ints([0, 7])), ValueError, r"got \[1, 2\]"),
        (call(ints(1, 7)), ValueError, "expected cu_seqlens to begin with 0, got 1"),
        (call(ints(0, 6)), ValueError, "expected cu_seqlens to end with the number of steps, 7, got 6"),
        (call(ints(0, 5, 4, 7)), ValueError, "expected cu_seqlens never to decrease, got 5 before 4"),
        (call(ints(0, 7).to("meta")), ValueError, "expected cu_seqlens with values, got a tensor on the device 'meta'"),
        (call(ints(0, 2, 7), state=torch.zeros(1, 3, 4, 4)), ValueError, r"expected state of shape \[2, 3, 4, 4\], got \[1, 3, 4, 4\]"),
        (call(ints(0, 2, 7), key_mask=torch.ones(2, 7).bool()), ValueError, r"expected key_mask of shape \[1, 7\]"),
    ],
)  # fmt: skip
def test_errors(call, error_type, message):
    refuses(call, message, error_type)


LAYERS = {
    "delta": lambda: FastWeightAttention(12, 3),
    "delta-conv": lambda: FastWeightAttention(12, 3, conv_size=4, kv_heads=1),
    "kimi": lambda: FastWeightAttention.like("kimi", 12, 3, value_heads=6),
    "favor": lambda: FastWeightAttention(
        12, 3, feature_maps.FAVOR(4, 8, seed=0), "sum", conv_size=2, value_heads=6
    ),
    "fwp": lambda: FastWeightProgrammer(12, 3),
    "aft-simple": lambda: AFTSimple(12),
    "block": lambda: Block(FastWeightAttention(12, 3, conv_size=1), 12),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layers(make, masked):
    """Also convolutions and running maxima begin again; in two calls."""
    torch.manual_seed(0)
    layer, lengths = make().double(), [5, 0, 1, 14, 2]
    cut = borders(lengths).tolist()
    x = torch.randn(1, 22, 12, dtype=torch.float64, requires_grad=True)
    keep = torch.rand(1, 22) < 0.6 if masked else None
    leaves = [x, *layer.parameters()]

    def separate():
        y, after = [], []
        for i, state in enumerate(states):
            part = slice(cut[i], cut[i + 1])
            mask = keep[:, part] if masked else None
            y_i, after_i = layer.prefill(x[:, part], state, mask)
            y.append(y_i)
            after.append(after_i)
        return torch.cat(y, 1), after

    states = [None] * 5
    y, after = separate()
    found = layer(x, keep, cu_seqlens=borders(lengths))
    agree(with_gradients([found], leaves), with_gradients([y], leaves))
    assert layer(x[:, :0], cu_seqlens=ints(0, 0, 0)).shape == (1, 0, 12)
    if isinstance(layer, Block):
        return  # has no state of its own
    states = ops.detach(after)
    y, after = separate()
    joined = map(torch.cat, zip(*map(parts, after), strict=True))
    _, middle = layer.prefill(x, None, keep, cu_seqlens=borders(lengths))
    middle = ops.detach(middle)
    found, after = layer.prefill(x, middle, keep, cu_seqlens=borders(lengths))
    agree(
        with_gradients([found, *parts(after)], leaves),
        with_gradients([y, *joined], leaves),
    )


def model(mixer):
    torch.manual_seed(0)
    made = LanguageModel(11, mixer, layers=2, heads=2, d_model=8, max_len=16).double()
    # Positions are drawn as small as all else, and would hardly be noticed.
    if made.positions is not None:
        torch.nn.init.normal_(made.positions.weight)
    return made


CAN_PACK = [*(op.mixer for op in ops.TABLE.values() if getattr(op, "mixer", None)), "fwp", "aft-simple"]  # fmt: skip


@pytest.mark.parametrize("mixer", CAN_PACK)
def test_models(mixer):
    made, lengths = model(mixer), [5, 0, 16, 1]
    tokens = torch.randint(11, (1, 22), generator=torch.Generator().manual_seed(0))
    found = made(tokens, borders(lengths))
    wanted = torch.cat([made(part) for part in tokens.split(lengths, 1)], 1)
    leaves = [*made.parameters()]
    agree(with_gradients([found], leaves), with_gradients([wanted], leaves))


@pytest.mark.parametrize("mixer", sorted({*MIXERS} - {*CAN_PACK}))
def test_models_that_cannot_pack(mixer):
    made, tokens = model(mixer), torch.zeros(1, 3).long()
    name = type(getattr(made.blocks[0], "mixer", made.blocks[0])).__name__
    refuses(lambda: made(tokens, ints(0, 1, 3)), f"with cu_seqlens .*got {name}$")


def test_errors_of_layers_and_models():
    tokens, x = torch.zeros(1, 20).long(), torch.zeros(1, 20, 12).double()
    aft, delta, layer = model("aft-simple"), model("delta"), LAYERS["delta-conv"]()
    _, state = layer.double().prefill(x)
    two = x.expand(2, -1, -1)
    for call, message in (
        (lambda: aft(tokens, ints(0, 3, 20)), r"at most max_len=16 tokens.*got 17"),
        (lambda: aft(tokens, ints(0, 21)), r"LanguageModel: .*end with .*20, got 21"),
        (
            lambda: delta(tokens.expand(2, -1), ints(0, 20)),
            "LanguageModel: expected a batch of 1",
        ),
        (lambda: layer(two, cu_seqlens=ints(0, 20)), "expected a batch of 1"),
        (
            lambda: layer(x, cu_seqlens=ints(0, 1)),
            r"FastWeightAttention: .*end with .*20, got 1",
        ),
        (
            lambda: layer.prefill(x, state, cu_seqlens=ints(0, 3, 20)),
            r"expected state.inputs of shape \[2, 3, 20\]",
        ),
    ):
        refuses(call, message, ValueError)


def test_a_packed_layer_is_one_graph():
    """Documents of other lengths need no other graph."""
    layer, x = LAYERS["delta"](), torch.randn(1, 9, 12)
    torch.compiler.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ([4, 0, 5], [7, 1, 1]):
        cu_seqlens = borders(lengths)
        with torch.no_grad():  # halves the time
            found = whole(x, cu_seqlens=cu_seqlens)
        agree([found], [layer(x, cu_seqlens=cu_seqlens)], 1e-6)
