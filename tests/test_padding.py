"""Prompts of unequal length in one batch: each row is what it is alone."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from alike import refuses
from torch import nn

from fwlab import ops
from fwlab.bench.measure import operator_calls
from fwlab.layers import FastWeightAttention, SoftmaxAttention
from fwlab.models import MIXERS, LanguageModel, Mixer

#: Padding has a place of its own: only forward takes it, at the end of rows.
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
#: Left, right, holes, only one real token, and none missing.
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
    """A model of large weights, which does not always say the same."""
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
    """Tokens, with something that is none wherever there is padding."""
    tokens = torch.randint(11, mask.shape, generator=torch.Generator().manual_seed(0))
    return tokens.where(mask, -100)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_each_row_is_what_it_is_alone(model):
    """At once; in pieces that are padded differently, and a token at a time."""
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
    """No token sees what comes after it; else such a mixer is named."""
    model, text = made(mixer), drawn(MASKS[[1, 4]])
    logits = model(text, key_mask=MASKS[[1, 4]])
    close(logits[0, :5], model(text[:1, :5])[0])
    assert not logits[0, 5:].any()
    name = type(getattr(model.blocks[0], "mixer", model.blocks[0])).__name__
    said = rf"expected a mixer that skips masked tokens .*, got {name}$"
    refuses(lambda: model(drawn(MASKS), key_mask=MASKS), said)
    refuses(lambda: model.prefill(text, key_mask=MASKS[[1, 4]]), said)
    refuses(lambda: model.generate(text, 1, key_mask=MASKS[[1, 4]]), said)


def test_gradients_ignore_padding(model):
    """Those of a padded batch are the sum of those of its rows."""
    weights = list(model.parameters())
    g = torch.Generator().manual_seed(1)
    r = torch.randn(*MASKS.shape, 11, generator=g, dtype=torch.float64)
    loss = (model(drawn(MASKS), key_mask=MASKS) * r).sum()
    found = torch.autograd.grad(loss, weights, materialize_grads=True)
    loss = sum(
        (model(row[keep][None]) * r[i, keep]).sum()
        for i, (row, keep) in enumerate(zip(drawn(MASKS), MASKS, strict=True))
    )
    wanted = torch.autograd.grad(loss, weights, materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)


def test_generate_continues_each_prompt(model):
    """Padded on either side; also past `max_len`, which rows reach one by one."""
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


def test_only_a_text_that_goes_on_is_too_long():
    """No warning where what is longer than `max_len` has stopped."""
    model, filling = made("softmax", max_len=10), torch.full((8,), -1)
    prompt = torch.stack([torch.arange(9), torch.cat([torch.tensor([1]), filling])])
    options = {"temperature": 0, "key_mask": prompt >= 0}
    with pytest.warns(UserWarning, match="max_len=10"):
        long, short = model.generate(prompt, 6, **options)[:, 9:]
    assert long[0] not in short
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = model.generate(prompt, 6, **options, stop=long[0].item())
    assert torch.equal(text[1, 9:], short)


def test_softmax_steps_from_a_masked_cache():
    """As few operators as without a mask, but for the mask itself."""
    model, counts = made("softmax"), []
    with torch.no_grad():
        for mask in (MASKS, torch.ones_like(MASKS)):
            _, state = model.prefill(drawn(mask), key_mask=mask)
            _, state = model.step(torch.arange(5), state)
            counts.append(
                operator_calls(lambda s=state: model.step(torch.arange(5), s))
            )
    assert counts[0] <= counts[1] + 17


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


def test_the_example_of_the_page():
    page = Path(__file__).resolve().parents[1] / "docs" / "api" / "models.md"
    section = page.read_text("utf-8").split("## Batches of unequal prompts\n")[1]
    code, printed = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)[:2]
    out = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(out):
        exec(compile(code, str(page), "exec"), {})
    assert out.getvalue() == printed
