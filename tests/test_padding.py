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
from fwlab.layers import AFTSimple, FastWeightAttention, SoftmaxAttention
from fwlab.models import MIXERS, LanguageModel, Mixer
from fwlab.models.language_model import RowStates

#: Padding gets a place of its own: the rows are computed one after the other.
BY_ROW = {"aft-full", "aft-local", "aft-conv", "transformer-xl"}
OWN = {
    "with convolutions": Mixer(
        lambda s: FastWeightAttention(s.d_model, s.heads, conv_size=4)
    ),
    "a layer that is not known": Mixer(lambda s: Unknown(s.d_model), positions=True),
    "a stack with rotary positions": [
        "gated-delta",
        Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads, rope=0.5)),
    ],
    "a stack with a window": ["softmax", "aft-conv"],
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


class Unknown(AFTSimple):
    """A layer that says nothing of padding, and fails if it gets any."""

    skips = False

    def prefill(self, x, state=None, key_mask=None, *others, **more):
        assert key_mask is None
        return super().prefill(x, state, key_mask, *others, **more)


def made(mixer, max_len=24):
    """A model of large weights, which does not always say the same."""
    torch.manual_seed(0)
    mixer = OWN.get(mixer, mixer)
    model = LanguageModel(11, mixer, 2, heads=2, d_model=8, max_len=max_len).double()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(std=0.5)
    return model


@pytest.fixture(params=[*MIXERS, *OWN])
def model(request):
    return made(request.param)


def drawn(mask):
    """Tokens, with something that is none wherever there is padding."""
    tokens = torch.randint(11, mask.shape, generator=torch.Generator().manual_seed(0))
    return tokens.where(mask, -100)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_each_row_is_what_it_is_alone(model):
    text, text_mask = drawn(MASKS), MASKS
    more_mask = MASKS.flip(0)[:, 1:6]
    more, one = drawn(more_mask), torch.arange(5)
    whole = model(text, key_mask=text_mask)
    first, state = model.prefill(text, key_mask=text_mask)
    second, state = model.prefill(more, state, more_mask)
    third, state = model.step(one, state)
    fourth, state = model.step(one, state)
    for i, keep in enumerate(text_mask):
        alone, rest = model.prefill(text[i, keep][None])
        close(whole[i, keep], alone[0])
        close(first[i, keep], alone[0])
        alone, rest = model.prefill(more[i, more_mask[i]][None], rest)
        close(second[i, more_mask[i]], alone[0])
        for found in (third, fourth):
            alone, rest = model.step(one[i : i + 1], rest)
            close(found[i], alone[0])
    for logits, mask in ((whole, text_mask), (first, text_mask), (second, more_mask)):
        assert not logits[~mask].any()


@pytest.mark.parametrize("mixer", sorted(BY_ROW))
def test_row_by_row_not_one_bit_differs(mixer):
    model = made(mixer).float()
    logits, state = model.prefill(drawn(MASKS), key_mask=MASKS)
    after, _ = model.step(torch.arange(5), state)
    for i, keep in enumerate(MASKS):
        alone, rest = model.prefill(drawn(MASKS)[i, keep][None])
        assert torch.equal(logits[i, keep], alone[0])
        assert torch.equal(after[i], model.step(torch.tensor([i]), rest)[0][0])


def test_only_mixers_with_places_of_their_own_go_row_by_row():
    for mixer in MIXERS:
        _, state = made(mixer).prefill(drawn(MASKS), key_mask=MASKS)
        assert isinstance(state, RowStates) == (mixer in BY_ROW), mixer


def test_rows_of_equal_length_share_a_state():
    """However they are padded."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]]).bool()
    for mixer in MIXERS:
        model = made(mixer)
        logits, state = model.prefill(drawn(mask), key_mask=mask)
        plain, wanted = model.prefill(drawn(mask)[mask].view(2, 3))
        assert torch.equal(logits[mask], plain.flatten(0, 1))
        assert type(state) is type(wanted) and state[0] == wanted[0] == 3


def test_a_state_goes_on_with_padding(model):
    """A beginning that all share, then pieces of unequal length."""
    start = drawn(torch.ones(5, 4).bool())
    _, state = model.prefill(start)
    last, state = model.prefill(drawn(MASKS), state, MASKS, last=True)
    for i, keep in enumerate(MASKS):
        row = torch.cat([start[i], drawn(MASKS)[i, keep]])
        close(last[i], model(row[None])[0, -1])


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
    model = made("softmax")
    with torch.no_grad():
        counts = []
        for mask in (MASKS, torch.ones_like(MASKS)):
            _, state = model.prefill(drawn(mask), key_mask=mask)
            _, state = model.step(torch.arange(5), state)
            count = operator_calls(
                lambda state=state: model.step(torch.arange(5), state)
            )
            counts.append(count)
            again, _ = model.step(torch.arange(5), state)
            for i, row in enumerate(mask):
                text = torch.cat([drawn(mask)[i, row], torch.tensor([i, i])])
                close(again[i], model(text[None])[0, -1])
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
        (
            lambda m, t: m.prefill(
                t, key_mask=MASKS & (MASKS.cumsum(1) > 1), last=True
            ),
            "real token in every row, got none in row 3",
        ),
        (lambda m, t: m.generate(t, 1, key_mask=MASKS[:4]), r"key_mask of shape"),
        (
            lambda m, t: m.generate(0 * t, 1, key_mask=~MASKS),
            "every row, got none in row 4",
        ),
        (lambda m, t: m.generate(t, 1, key_mask=MASKS, stop=11), "stop from 0 to 10"),
        (lambda m, t: m.generate(t, 1, key_mask=MASKS, stop=1.0), "stop"),
    ],
)
@pytest.mark.parametrize("mixer", ["softmax", "aft-full"])
def test_one_sentence(mixer, call, message):
    model = LanguageModel(11, mixer, layers=1, heads=2, d_model=8)
    refuses(lambda: call(model, drawn(MASKS)), message)


@pytest.mark.parametrize("mixer", ["softmax", "aft-full"])
def test_the_state_of_another_batch(mixer):
    model = LanguageModel(11, mixer, layers=1, heads=2, d_model=8)
    _, state = model.prefill(drawn(MASKS), key_mask=MASKS)
    said = "state of 2 sequences, got 5"
    refuses(lambda: model.prefill(torch.zeros(2, 3).long(), state), said)
    refuses(lambda: model.step(torch.zeros(2).long(), state), said)


def test_max_len_counts_real_tokens():
    for mixer in ("softmax", "aft-simple", "aft-full"):
        model = LanguageModel(11, mixer, layers=1, heads=2, d_model=8, max_len=9)
        long = torch.cat([MASKS, torch.zeros(5, 6).bool()], 1)
        assert model(drawn(long), key_mask=long).shape == (5, 15, 11)
        _, state = model.prefill(drawn(long), key_mask=long)
        said = "max_len=9 tokens, .*got 10"
        refuses(lambda m=model, s=state: m.step(torch.zeros(5).long(), s), said)


@pytest.mark.parametrize("mixer", ["softmax", "aft-conv"])
def test_detached_states_go_on(mixer):
    model = made(mixer)
    _, state = model.prefill(drawn(MASKS), key_mask=MASKS)
    wanted, _ = model.step(torch.arange(5), state)
    found, _ = model.step(torch.arange(5), ops.detach(state))
    assert torch.equal(found, wanted)


def test_the_example_of_the_page():
    page = Path(__file__).resolve().parents[1] / "docs" / "api" / "models.md"
    section = page.read_text("utf-8").split("## Batches of unequal prompts\n")[1]
    code, printed = re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)[:2]
    out = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(out):
        exec(compile(code, str(page), "exec"), {})
    assert out.getvalue() == printed
