"""Test that dropout acts only in training, and equally in all implementations."""

from functools import partial

import pytest
import torch
from alike import agree, drawn_mask, error, random, refuses

from fwlab import ops
from fwlab.feature_maps import ELU1
from fwlab.layers import (
    CrossAttention,
    FeedbackTransformer,
    SoftmaxAttention,
    TransformerXL,
)
from fwlab.models import MIXERS, EncoderDecoder, LanguageModel, Mixer

WITH_WEIGHTS = ("softmax", "transformer-xl")
DROPOUT = 0.3
mixers = pytest.mark.parametrize("mixer", MIXERS)


def language_model(mixer, dropout=None):
    """Return a language model with one dropout rate, or the default rates if None."""
    options = {} if dropout is None else {"dropout": dropout}
    if mixer in WITH_WEIGHTS and dropout is not None:
        options["attention_dropout"] = dropout
    torch.manual_seed(0)
    sizes = {"layers": 2, "heads": 2, "d_model": 8, "max_len": 24}
    return LanguageModel(11, mixer, **sizes, **options).double()


def encoder_decoder(**options):
    torch.manual_seed(0)
    return EncoderDecoder(9, 11, heads=2, d_model=8, **options).double()


def tokens(*shape):
    return torch.randint(9, shape, generator=torch.Generator().manual_seed(0))


def seeded(function, *args, seed=1):
    torch.manual_seed(seed)
    return function(*args)


@mixers
def test_off_by_default(mixer):
    """In evaluation mode, dropout draws no random numbers and changes no output."""
    plain, model = language_model(mixer), language_model(mixer, DROPOUT)
    assert plain.training
    assert plain.state_dict().keys() == model.state_dict().keys()
    text, before = tokens(2, 20), torch.get_rng_state()
    wanted = plain(text)
    model.eval()
    assert torch.equal(model(text), wanted)
    _, state = plain.prefill(text[:, :9])
    _, after = model.prefill(text[:, :9])
    for name, part in (("prefill", text[:, 9:]), ("step", text[:, 9])):
        wanted = getattr(plain, name)(part, state)[0]
        assert torch.equal(getattr(model, name)(part, after)[0], wanted)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("attention", ["softmax", ELU1()], ids=["softmax", "elu"])
def test_encoder_decoder(attention):
    weights = {"attention_dropout": DROPOUT} if attention == "softmax" else {}
    plain = encoder_decoder(attention=attention)
    model = encoder_decoder(attention=attention, dropout=DROPOUT, **weights)
    texts, before = (tokens(2, 6), tokens(2, 7)), torch.get_rng_state()
    assert torch.equal(model.eval()(*texts), plain(*texts))
    assert torch.equal(model.generate(texts[0], 4, 1), plain.generate(texts[0], 4, 1))
    assert torch.equal(torch.get_rng_state(), before)
    y = seeded(model.train(), *texts)
    assert torch.equal(seeded(model, *texts), y)
    assert not torch.equal(seeded(model, *texts, seed=2), y)


def dropped(model, *inputs):
    """Call a model, and return the inputs and outputs of each `nn.Dropout` by name."""
    calls = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, x, y, name=name: calls.setdefault(name, []).append((*x, y))
            )
    seeded(model, *inputs)
    return calls


def assert_dropped(x, y, p=DROPOUT):
    """Assert that a fraction `p` of entries is zeroed, within 5 standard deviations."""
    x, y = x[x != 0], y[x != 0]
    share = (y == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / y.numel()) ** 0.5)
    torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - p))


def test_where():
    """Dropout acts on embeddings, on all branches of each block, and inside the MLP."""
    language = dropped(language_model("delta", DROPOUT), tokens(40, 20))
    model = encoder_decoder(layers=1, dropout=DROPOUT)
    translation = dropped(model, tokens(60, 20), tokens(60, 21))
    block, decoder = [8, 32, 8], [8, 8, 32, 8]
    for by_name, widths in (
        (language, {"dropout": [8], "blocks.0.dropout": block}),
        (translation, {"dropout": [8, 8], "encoder.0.dropout": block}),
        (translation, {"decoder.0.dropout": decoder}),
    ):
        for name, wanted in widths.items():
            assert [x.shape[-1] for x, _ in by_name[name]] == wanted
        for x, y in (call for calls in by_name.values() for call in calls):
            assert_dropped(x, y)


def test_where_in_feedback():
    """A feedback layer has a dropout factor for each element that may be dropped."""
    torch.manual_seed(0)
    stack = FeedbackTransformer(6, 2, 2, d_ff=10, dropout=DROPOUT).double()
    [(x, factors)] = dropped(stack, random(40, 20, 6))["dropout"]
    assert x.shape == (40, 20, 2, 2 * 6 + 10)
    assert_dropped(x, factors)
    # Without dropout there are no factors, because the kernels do not take any.
    assert not dropped(stack.eval(), random(2, 5, 6))
    assert not dropped(FeedbackTransformer(6, 2, 2).double(), random(2, 5, 6))


def outcome(model, x, key_mask, implementation):
    """Return the output and the gradients of a model's blocks."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = x
    for block in model.blocks:
        y = block(y, key_mask, implementation)
    loss = (y * random(*y.shape, seed=2)).sum()
    parameters = list(model.blocks.parameters())
    gradients = torch.autograd.grad(loss, [x, *parameters], materialize_grads=True)
    return [y, *gradients]


@mixers
def test_naive_and_efficient_drop_the_same(mixer):
    model, x = language_model(mixer, DROPOUT), random(2, 20, 8)
    for block in model.blocks:
        for parameter in block.parameters():  # Large weights make blocks nonlinear.
            torch.nn.init.normal_(parameter, std=0.5)
    key_mask = drawn_mask(2, 20, share=0.7)
    other = "auto" if mixer == "transformer-xl" else "efficient"
    for mask in (None, key_mask):
        naive = outcome(model, x, mask, "naive")
        efficient = outcome(model, x, mask, other)
        torch.testing.assert_close(efficient, naive, rtol=1e-9, atol=1e-11)
    # Masked steps still have the output 0.
    assert not naive[0][~key_mask].any()
    assert naive[0][key_mask].any(-1).all()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_is_the_same_function(kv_heads, masked):
    """A tiny dropout rate does not change attention with a mask, a state or groups."""
    q, k, v = random(2, 9, 4, 3), random(2, 9, kv_heads, 3), random(2, 9, kv_heads, 5)
    mask = drawn_mask(2, 9, seed=1) if masked else None
    for scale in (None, 0.3):
        outputs = []
        for dropout in (0, 1e-12):
            state, options = None, {"scale": scale, "dropout": dropout}
            for part in (slice(0, 4), slice(4, 9)):
                options["key_mask"] = mask[:, part] if masked else None
                inputs = (each[:, part] for each in (q, k, v))
                y, state = ops.softmax_attention(
                    *inputs, state=state, return_state=True, **options
                )
                outputs.append(y)
        agree(outputs[2:], outputs[:2], 1e-10)


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_attention_weights_are_dropped(implementation):
    """Dropout acts on attention weights, which are the outputs for one-hot values."""
    time, run = 24, {"implementation": implementation}
    q, k = random(30, time, 2, 3), random(30, time, 2, 3, seed=1)
    unit = torch.eye(time).double()[:, None].expand(30, time, 2, time)
    weights = ops.softmax_attention(q, k, unit, **run)
    torch.manual_seed(1)
    kept = ops.softmax_attention(q, k, unit, dropout=DROPOUT, **run)
    past = torch.ones(time, time, dtype=torch.bool).tril()
    seen = past[:, None].expand_as(weights)
    assert_dropped(weights[seen], kept[seen])
    assert not kept[~seen].any()


@pytest.mark.parametrize("kind", ["softmax", "transformer-xl", "cross"])
def test_layers_pass_dropout_on(kind):
    """A tiny dropout rate does not change the output of a layer; a large rate does."""
    made = {
        "softmax": partial(SoftmaxAttention, 8, 2),
        "transformer-xl": partial(TransformerXL, 8, 2, 1, memory=4, segment=3),
        "cross": partial(CrossAttention, 8, 2),
    }[kind]
    given = [random(2, 6, 8)] + [random(2, 7, 8, seed=1)] * (kind == "cross")
    outputs = []
    for dropout in (0, 1e-12, DROPOUT):
        layer = seeded(partial(made, attention_dropout=dropout)).double()
        outputs.append(seeded(layer, *given))
    assert error(outputs[1], outputs[0]) < 1e-10 < error(outputs[2], outputs[0])


def test_attention_dropout_needs_attention_weights():
    own = Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads))
    p = {"attention_dropout": 0.1}
    for mixer in (*(set(MIXERS) - set(WITH_WEIGHTS)), own):
        call = partial(LanguageModel, 11, mixer, heads=2, d_model=8, **p)
        refuses(call, "expected attention_dropout=0 for a mixer", ValueError)
    for call in (
        partial(CrossAttention, 8, 2, ELU1(), **p),
        partial(encoder_decoder, attention=ELU1(), **p),
    ):
        refuses(call, "expected attention_dropout=0 with a fea", ValueError)
