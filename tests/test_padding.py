"""Test that a padded or packed sequence has the results of a separate call."""

import warnings

import pytest
import torch
from alike import agree, refuses, weighted
from torch import nn

from fwlab import ops
from fwlab.layers import FastWeightAttention, SoftmaxAttention
from fwlab.models import MIXERS, LanguageModel, Mixer

#: Mixers in which padding has a position; only `forward` accepts right padding.
REFUSED = ("aft-full", "aft-local", "aft-conv", "transformer-xl")
OWN = {
    "with convolutions": Mixer(
        lambda s: FastWeightAttention(s.d_model, s.heads, conv_size=4)
    ),
    "a stack with rotary positions": [
        "gated-delta",
        Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads, rope=0.5)),
    ],
}
#: Masks: padding on the left, on the right, in between, around a token, or nowhere.
MASKS = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 1, 0, 1, 1],
        [0, 0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
).bool()


def made(mixer, max_len=24):
    """Return a model with large random weights, so that its predictions vary."""
    torch.manual_seed(0)
    mixer = OWN.get(mixer, mixer)
    model = LanguageModel(11, mixer, 2, heads=2, d_model=8, max_len=max_len).double()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=0.5)
    return model


@pytest.fixture(params=[*(m for m in MIXERS if m not in REFUSED), *OWN])
def model(request):
    return made(request.param)


def drawn(mask):
    """Sample random tokens, with an invalid id at masked positions."""
    tokens = torch.randint(11, mask.shape, generator=torch.Generator().manual_seed(0))
    return tokens.where(mask, -100)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_each_row_is_what_it_is_alone(model):
    """Each padded row has the results of a separate call, in segments and in steps."""
    start, more_mask = drawn(torch.ones(5, 2).bool()), MASKS.flip(0)[:, 1:6]
    text, more, one = drawn(MASKS), drawn(more_mask), torch.arange(5)
    whole, (_, state) = model(text, key_mask=MASKS), model.prefill(start)
    first, state = model.prefill(text, state, MASKS)
    last, _ = model.prefill(text, model.prefill(start)[1], MASKS, last=True)
    second, state = model.prefill(more, state, more_mask)
    third, state = model.step(one, ops.detach(state))
    fourth, state = model.step(one, state)
    for i, keep in enumerate(MASKS):
        close(whole[i, keep], model(text[i, keep][None])[0])
        alone, rest = model.prefill(torch.cat([start[i], text[i, keep]])[None])
        close(first[i, keep], alone[0, 2:])
        close(last[i], alone[0, -1])
        alone, rest = model.prefill(more[i, more_mask[i]][None], rest)
        close(second[i, more_mask[i]], alone[0])
        for found in (third, fourth):
            alone, rest = model.step(one[i : i + 1], rest)
            close(found[i], alone[0])
    for logits, mask in ((whole, MASKS), (first, MASKS), (second, more_mask)):
        assert not logits[~mask].any()


@pytest.mark.parametrize("mixer", REFUSED)
def test_padding_with_a_place_of_its_own(mixer):
    """Padding on the right changes no earlier token; unsupported uses raise errors."""
    model, text = made(mixer), drawn(MASKS[[1, 4]])
    logits = model(text, key_mask=MASKS[[1, 4]])
    close(logits[0, :5], model(text[:1, :5])[0])
    assert not logits[0, 5:].any()
    name = type(getattr(model.blocks[0], "mixer", model.blocks[0])).__name__
    said = rf"expected a mixer that skips masked tokens .*, got {name}$"
    refuses(lambda: model(drawn(MASKS), key_mask=MASKS), said)
    refuses(lambda: model.prefill(text, key_mask=MASKS[[1, 4]]), said)
    refuses(lambda: model.generate(text, 1, key_mask=MASKS[[1, 4]]), said)


def test_generate_continues_each_prompt(model):
    """`generate` ignores padding on either side of a prompt, even beyond `max_len`."""
    prompts = [drawn(torch.ones(n).bool()) for n in (3, 20, 1, 20)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = [model.generate(p[None], 8, temperature=0)[0, -8:] for p in prompts]
        for side in ("left", "right"):
            batch = nn.utils.rnn.pad_sequence(
                prompts, batch_first=True, padding_value=-1, padding_side=side
            )
            text = model.generate(batch, 8, temperature=0, key_mask=batch >= 0)
            assert torch.equal(text[:, :20], batch)
            assert torch.equal(text[:, 20:], torch.stack(wanted))


def test_generate_stops():
    model, prompt, key_mask = made("delta"), drawn(MASKS), MASKS
    free = model.generate(prompt, 30, seed=0, key_mask=key_mask)
    new = free[:, 9:].tolist()
    stop = new[0][2]
    text = model.generate(prompt, 30, seed=0, key_mask=key_mask, stop=stop)
    ends = [row.index(stop) for row in new]
    assert text.shape == (5, 9 + max(ends) + 1) and len(set(ends)) > 1
    for row, wanted, end in zip(text[:, 9:].tolist(), new, ends, strict=True):
        assert row[: end + 1] == wanted[: end + 1]
        assert row[end:] == [stop] * (len(row) - end)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, t: m(t, key_mask=MASKS[:, 1:]), r"key_mask of shape \[5, 9\]"),
        (lambda m, t: m(t, key_mask=MASKS.int()), "key_mask to be a bool tensor"),
        (lambda m, t: m(t.double(), key_mask=MASKS), "tokens of dtype"),
        (lambda m, t: m(t[0], key_mask=MASKS[0]), "tokens of shape"),
        (lambda m, t: m(t[:, :0], torch.tensor([0, 0]), MASKS[:, :0]), "got both"),
        (lambda m, t: m(t - 200, key_mask=MASKS), "tokens from 0 to 10"),
        (lambda m, t: m.generate(t, 1, key_mask=MASKS[:4]), r"key_mask of shape"),
        (lambda m, t: m.generate(0 * t, 1, key_mask=~MASKS), "every row, got none in row 4"),
        (lambda m, t: m.generate(t, 1, key_mask=MASKS, stop=11), "stop to be from 0 to 10"),
        (lambda m, t: m.generate(t, 1, key_mask=MASKS, stop=1.0), "stop"),
    ],
)  # fmt: skip
def test_one_sentence(call, message):
    model = LanguageModel(11, "softmax", layers=1, heads=2, d_model=8)
    refuses(lambda: call(model, drawn(MASKS)), message)


@pytest.mark.parametrize("mixer", ["softmax", "aft-simple"])
def test_lengths_are_those_of_real_tokens(mixer):
    model = LanguageModel(11, mixer, layers=1, heads=2, d_model=8, max_len=9)
    long = torch.cat([MASKS, torch.zeros(5, 6).bool()], 1)
    assert model(drawn(long), key_mask=long).shape == (5, 15, 11)
    _, state = model.prefill(drawn(long), key_mask=long)
    said = "max_len=9 tokens, .*got 10"
    refuses(lambda: model.step(torch.zeros(5).long(), state), said)
    said = "state of 2 sequences, got 5"
    refuses(lambda: model.prefill(torch.zeros(2, 3).long(), state), said)
    refuses(lambda: model.step(torch.zeros(2).long(), state), said)


# --- packed: documents in one row --------------------------------------


def ints(*values):
    return torch.tensor(values)


def refused(cu_seqlens, batch=1, op="delta_rule", **options):
    x = torch.zeros(batch, 7, 3, 4)
    if op == "aft_simple":
        return lambda: ops.aft_simple(*[x[..., 0]] * 3, cu_seqlens=cu_seqlens)
    return lambda: ops.delta_rule(x, x, x, x[..., 0], cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize(
    ("call", "error_type", "message"),
    [
        (refused(ints(0, 7), batch=2), ValueError, "expected a batch of 1 with cu_seqlens, got 2"),
        (refused(ints(0, 7), batch=2, op="aft_simple"), ValueError, "aft_simple: expected a batch of 1"),
        (refused([0, 7]), TypeError, "expected cu_seqlens to be a tensor, got list"),
        (refused(ints(0.0, 7.0)), TypeError, "tensor of integers, got float32"),
        (refused(ints(False, True)), TypeError, "tensor of integers, got bool"),
        (refused(ints(0)), ValueError, r"expected cu_seqlens of shape \[documents \+ 1\].*got \[1\]"),
        (refused(ints([0, 7])), ValueError, r"got \[1, 2\]"),
        (refused(ints(1, 7)), ValueError, r"expected cu_seqlens to rise from 0 to 7, .*got \[1, 7\]"),
        (refused(ints(0, 6)), ValueError, r"expected cu_seqlens to rise from 0 to 7, .*got \[0, 6\]"),
        (refused(ints(0, 5, 4, 7)), ValueError, r"to rise from 0 to 7, the number of steps, got \[0, 5, 4, 7\]"),
        (refused(ints(0, 7).to("meta")), ValueError, "expected cu_seqlens with values, got them on meta"),
        (refused(ints(0, 2, 7), state=torch.zeros(1, 3, 4, 4)), ValueError, r"state to have a row for each of 2 documents, got \[1, 3, 4, 4\]"),
        (refused(ints(0, 2, 7), key_mask=torch.ones(2, 7).bool()), ValueError, r"expected key_mask of shape \[1, 7\]"),
    ],
)  # fmt: skip
def test_borders_that_do_not_fit(call, error_type, message):
    refuses(call, message, error_type)


#: Mixers with one state per sequence, which a new document can reset.
PACKS = ("softmax", "aft-full", "aft-local", "aft-conv", "transformer-xl")
PACKS = {*MIXERS} - {*PACKS, "feedback", "feedback-shared"}


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_packed_document_is_as_if_it_were_alone(mixer):
    """Packed documents have the results of separate calls, or raise an error."""
    model, lengths = made(mixer), [5, 0, 16, 1]
    text, borders = drawn(torch.ones(1, 22).bool()), ints(0, 5, 5, 21, 22)
    if mixer not in PACKS:
        name = type(getattr(model.blocks[0], "mixer", model.blocks[0])).__name__
        refuses(lambda: model(text, borders), f"with cu_seqlens .*got {name}$")
        return
    wanted = torch.cat([model(part) for part in text.split(lengths, 1)], 1)
    results, leaves = [], [*model.parameters()]
    for y in (model(text, borders), wanted):
        loss = weighted(y)
        results.append([y, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    # Errors are larger, since a decay of 0 is a difference of large logarithms.
    agree(*results, 1e-10)


def test_borders_of_layers_and_models():
    tokens, x = torch.zeros(1, 40).long(), torch.zeros(1, 20, 12).double()
    layer = FastWeightAttention(12, 3, conv_size=4, kv_heads=1).double()
    _, state = layer.prefill(x)
    long = r"at most max_len=24 tokens.*got 37"
    refuses(lambda: made("aft-simple")(tokens, ints(0, 3, 40)), long)
    refuses(lambda: made("delta")(tokens, ints(0, 41)), r"0 to 40, .*got \[0, 41\]")
    refuses(lambda: layer(x, cu_seqlens=ints(0, 1)), r"from 0 to 20, .*got \[0, 1\]")
    refuses(
        lambda: layer.prefill(x, state, cu_seqlens=ints(0, 3, 20)),
        r"expected state.inputs of shape \[2, 3, 20\]",
    )


def test_a_packed_layer_is_one_graph():
    """Packed documents with new lengths do not compile a new graph."""
    layer, x = FastWeightAttention(12, 3), torch.randn(1, 9, 12)
    torch.compiler.reset()
    whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ([4, 0, 5], [7, 1, 1]):
        cu_seqlens = ints(0, *lengths).cumsum(0)
        with torch.no_grad():  # Without gradients, the test takes half as long.
            found = whole(x, cu_seqlens=cu_seqlens)
        agree([found], [layer(x, cu_seqlens=cu_seqlens)], 1e-6)
