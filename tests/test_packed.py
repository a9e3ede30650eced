"""Packed sequences, beside what the fuzzer tries: errors, layers, models."""

import inspect

import alike
import pytest
import torch
from alike import refuses, weighted
from loops import RULES

from fwlab import ops
from fwlab.layers import FastWeightAttention
from fwlab.models import MIXERS, LanguageModel


def borders(lengths, dtype=torch.int64):
    """Where these documents begin and end in one row."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def with_gradients(results, leaves):
    gradients = torch.autograd.grad(weighted(*results), leaves, materialize_grads=True)
    return [*results, *gradients]


def agree(found, wanted, limit=1e-12):
    found, wanted = list(found), list(wanted)
    assert [x.dtype for x in found] == [x.dtype for x in wanted]
    alike.agree(found, wanted, limit)


def test_all_operations_with_one_memory_take_borders():
    found = {
        name
        for name in ops.__all__
        if callable(getattr(ops, name))
        and "cu_seqlens" in inspect.signature(getattr(ops, name)).parameters
    }
    assert found == {*RULES, "fwp", "aft_simple"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_in_both_directions(implementation, dtype):
    """AFT-simple without causality: each document has a mean of its own."""
    inputs = [torch.randn(1, 24, 3, requires_grad=True).double() for _ in "qkv"]
    lengths, how = [4, 0, 11, 9], {"implementation": implementation, "causal": False}
    y = ops.aft_simple(*inputs, cu_seqlens=borders(lengths, dtype), **how)
    each = zip(*(x.split(lengths, 1) for x in inputs), strict=True)
    wanted = torch.cat([ops.aft_simple(*x, **how) for x in each], 1)
    agree(with_gradients([y], inputs), with_gradients([wanted], inputs))


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
        (call([0, 7]), TypeError, "expected cu_seqlens to be a tensor, got list"),
        (call(ints(0.0, 7.0)), TypeError, "tensor of integers, got float32"),
        (call(ints(False, True)), TypeError, "tensor of integers, got bool"),
        (call(ints(0)), ValueError, r"expected cu_seqlens of shape \[documents \+ 1\].*got \[1\]"),
        (call(ints([0, 7])), ValueError, r"got \[1, 2\]"),
        (call(ints(1, 7)), ValueError, r"expected cu_seqlens to rise from 0 to 7, .*got \[1, 7\]"),
        (call(ints(0, 6)), ValueError, r"expected cu_seqlens to rise from 0 to 7, .*got \[0, 6\]"),
        (call(ints(0, 5, 4, 7)), ValueError, r"to rise from 0 to 7, the number of steps, got \[0, 5, 4, 7\]"),
        (call(ints(0, 7).to("meta")), ValueError, "expected cu_seqlens with values, got them on meta"),
        (call(ints(0, 2, 7), state=torch.zeros(1, 3, 4, 4)), ValueError, r"state to have a row for each of 2 documents, got \[1, 3, 4, 4\]"),
        (call(ints(0, 2, 7), key_mask=torch.ones(2, 7).bool()), ValueError, r"expected key_mask of shape \[1, 7\]"),
    ],
)  # fmt: skip
def test_errors(call, error_type, message):
    refuses(call, message, error_type)


def model(mixer):
    torch.manual_seed(0)
    made = LanguageModel(11, mixer, layers=2, heads=2, d_model=8, max_len=16).double()
    # Positions are drawn as small as all else, and would hardly be noticed.
    if made.positions is not None:
        torch.nn.init.normal_(made.positions.weight)
    return made


#: Mixers that keep several tokens, or see all.
CANNOT_PACK = sorted(
    {"softmax", "aft-full", "aft-local", "aft-conv", "transformer-xl"}
    | {"feedback", "feedback-shared"}
)
CAN_PACK = [mixer for mixer in MIXERS if mixer not in CANNOT_PACK]


@pytest.mark.parametrize("mixer", CAN_PACK)
def test_models(mixer):
    made, lengths = model(mixer), [5, 0, 16, 1]
    tokens = torch.randint(11, (1, 22), generator=torch.Generator().manual_seed(0))
    found = made(tokens, borders(lengths))
    wanted = torch.cat([made(part) for part in tokens.split(lengths, 1)], 1)
    leaves = [*made.parameters()]
    # A decay of 0 is a difference of large logarithms.
    agree(with_gradients([found], leaves), with_gradients([wanted], leaves), 1e-11)


@pytest.mark.parametrize("mixer", CANNOT_PACK)
def test_models_that_cannot_pack(mixer):
    made, tokens = model(mixer), torch.zeros(1, 3).long()
    name = type(getattr(made.blocks[0], "mixer", made.blocks[0])).__name__
    refuses(lambda: made(tokens, ints(0, 1, 3)), f"with cu_seqlens .*got {name}$")


def test_errors_of_layers_and_models():
    tokens, x = torch.zeros(1, 20).long(), torch.zeros(1, 20, 12).double()
    aft, delta = model("aft-simple"), model("delta")
    layer = FastWeightAttention(12, 3, conv_size=4, kv_heads=1)
    _, state = layer.double().prefill(x)
    two = x.expand(2, -1, -1)
    for call, message in (
        (lambda: aft(tokens, ints(0, 3, 20)), r"at most max_len=16 tokens.*got 17"),
        (
            lambda: aft(tokens, ints(0, 21)),
            r"LanguageModel: .*from 0 to 20, .*got \[0, 21\]",
        ),
        (
            lambda: delta(tokens.expand(2, -1), ints(0, 20)),
            "LanguageModel: expected a batch of 1",
        ),
        (lambda: layer(two, cu_seqlens=ints(0, 20)), "expected a batch of 1"),
        (
            lambda: layer(x, cu_seqlens=ints(0, 1)),
            r"from 0 to 20, .*got \[0, 1\]",
        ),
        (
            lambda: layer.prefill(x, state, cu_seqlens=ints(0, 3, 20)),
            r"expected state.inputs of shape \[2, 3, 20\]",
        ),
    ):
        refuses(call, message, ValueError)


def test_a_packed_layer_is_one_graph():
    """Documents of other lengths need no other graph."""
    layer, x = FastWeightAttention(12, 3), torch.randn(1, 9, 12)
    torch.compiler.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ([4, 0, 5], [7, 1, 1]):
        cu_seqlens = borders(lengths)
        with torch.no_grad():  # halves the time
            found = whole(x, cu_seqlens=cu_seqlens)
        agree([found], [layer(x, cu_seqlens=cu_seqlens)], 1e-6)
