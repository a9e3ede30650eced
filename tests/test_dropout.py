"""Dropout: only in training, off by default, the same in all implementations."""

import re
from functools import partial

import pytest
import torch
from alike import agree, drawn_mask, error, random, refuses
from torch.utils.checkpoint import checkpoint

from fwlab import ops
from fwlab.feature_maps import ELU1
from fwlab.layers import (
    Block,
    CrossAttention,
    FeedbackTransformer,
    SoftmaxAttention,
    TransformerXL,
)
from fwlab.models import MIXERS, EncoderDecoder, LanguageModel, Mixer
from fwlab.ops import _triton
from fwlab.ops.feedback import why_not

WITH_WEIGHTS = ("softmax", "transformer-xl")
DROPOUT = 0.3
mixers = pytest.mark.parametrize("mixer", MIXERS)


def language_model(mixer, dropout=None):
    """`dropout` where there is one, also of attention weights; None = default."""
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
    """No random numbers are drawn, and nothing but training changes."""
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


@mixers
def test_training_draws_from_the_generator(mixer):
    model, text = language_model(mixer, DROPOUT), tokens(2, 20)
    y = seeded(model, text)
    assert torch.equal(seeded(model, text), y)
    assert not torch.equal(seeded(model, text, seed=2), y)
    # The prediction of a text in two parts is random, too.
    _, state = seeded(model.prefill, text[:, :9])
    y, _ = seeded(model.prefill, text[:, 9:], state)
    assert torch.equal(seeded(model.prefill, text[:, 9:], state)[0], y)
    assert not torch.equal(seeded(model.prefill, text[:, 9:], state, seed=2)[0], y)


def dropped(model, *inputs):
    """What each `nn.Dropout` gets and returns in one call, by its name."""
    calls = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, x, y, name=name: calls.setdefault(name, []).append((*x, y))
            )
    seeded(model, *inputs)
    return calls


def assert_dropped(x, y, p=DROPOUT):
    """The share of new zeros is right within 5 standard deviations."""
    x, y = x[x != 0], y[x != 0]
    share = (y == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / y.numel()) ** 0.5)
    torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - p))


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        # Embeddings, both branches of each block, and inside its MLP.
        (
            lambda: (language_model("delta", DROPOUT), tokens(40, 20)),
            {
                "dropout": [8],
                "blocks.0.dropout": [8, 32, 8],
                "blocks.1.dropout": [8, 32, 8],
            },
        ),
        (
            lambda: (
                encoder_decoder(layers=1, dropout=DROPOUT),
                *(tokens(60, 20), tokens(60, 21)),
            ),
            {
                "dropout": [8, 8],
                "encoder.0.dropout": [8, 32, 8],
                "decoder.0.dropout": [8, 8, 32, 8],
            },
        ),
    ],
    ids=["language model", "encoder-decoder"],
)
def test_where(model, widths):
    by_name = dropped(*model())
    assert {
        n: [x.shape[-1] for x, _ in calls] for n, calls in by_name.items()
    } == widths
    for calls in by_name.values():
        for x, y in calls:
            assert_dropped(x, y)


def test_where_in_feedback():
    """Each factor multiplies what the docstring of `ops.feedback` says."""
    torch.manual_seed(0)
    stack = FeedbackTransformer(6, 2, 2, d_ff=10, dropout=DROPOUT).double()
    [(x, factors)] = dropped(stack, random(40, 20, 6))["dropout"]
    assert x.shape == (40, 20, 2, 2 * 6 + 10)
    assert_dropped(x, factors)
    # Without dropout there are no factors, so that the kernels can run.
    assert not dropped(stack.eval(), random(2, 5, 6))
    assert not dropped(FeedbackTransformer(6, 2, 2).double(), random(2, 5, 6))

    x, w = random(1, 5, 6), stack.weights()
    without = {
        "attention": w._replace(to_out=w.to_out * 0),
        "inside the MLP": w._replace(expand=w.expand * 0),
        "MLP": w._replace(contract=w.contract * 0),
    }
    bounds = {"attention": (0, 6), "inside the MLP": (6, 16), "MLP": (16, 22)}
    for part, (start, stop) in bounds.items():
        factors = torch.ones(1, 5, 2, 22).double()
        factors[..., start:stop] = 0
        for implementation in ("naive", "efficient"):
            run = {"heads": 2, "implementation": implementation}
            y = ops.feedback(x, w, factors=factors, **run)
            torch.testing.assert_close(y, ops.feedback(x, without[part], **run))


def outcome(model, x, key_mask, implementation):
    """Output and gradients of the blocks of a model."""
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
        for parameter in block.parameters():  # not nearly linear
            torch.nn.init.normal_(parameter, std=0.5)
    key_mask = drawn_mask(2, 20, share=0.7)
    other = "auto" if mixer == "transformer-xl" else "efficient"  # it has one form
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
    """So little dropout that nothing is dropped: with mask, state and groups."""
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
    """Read with unit vectors as values, which give the weights themselves."""
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


def attentions():
    source = random(1, 6, 8, seed=1)
    stack = TransformerXL(8, 2, 1, memory=4, segment=3, attention_dropout=DROPOUT)
    cross = CrossAttention(8, 2, attention_dropout=DROPOUT)
    return {
        "softmax": (SoftmaxAttention(8, 2, attention_dropout=DROPOUT), None),
        "transformer-xl": (stack.blocks[0].mixer, None),
        "cross": (cross, source),
    }


@pytest.mark.parametrize("name", attentions())
def test_mean_over_draws_is_the_output_without(name):
    """Within 5 standard errors, estimated from the draws."""
    torch.manual_seed(0)
    layer, source = attentions()[name]
    layer, x, draws = layer.double(), random(1, 6, 8), 4000
    args = [x] if source is None else [x, source]
    many = [part.expand(draws, -1, -1) for part in args]
    y, wanted = seeded(layer, *many), layer.eval()(*args)
    off, spread = (y.mean(0) - wanted[0]).abs(), y.std(0)
    assert (spread > 0.01).any()
    assert (off <= 5 * spread / draws**0.5 + 1e-12).all()


@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_with_dropout_is_the_same_function(masked):
    x, source = random(2, 5, 8), random(2, 7, 8, seed=1)
    mask = drawn_mask(2, 7, seed=1) if masked else None
    if masked:
        mask[1] = False
    outputs = []
    for dropout in (1e-12, 0):
        torch.manual_seed(0)
        layer = CrossAttention(8, 2, attention_dropout=dropout).double()
        outputs.append(layer(x, source, mask))
    assert error(*outputs) < 1e-10


@pytest.mark.parametrize("attention", ["softmax", ELU1()], ids=["softmax", "elu"])
def test_encoder_decoder(attention):
    options = {"dropout": DROPOUT}
    if attention == "softmax":
        options["attention_dropout"] = DROPOUT
    plain = encoder_decoder(attention=attention)
    model = encoder_decoder(attention=attention, **options)
    assert plain.state_dict().keys() == model.state_dict().keys()
    texts = tokens(2, 6), tokens(2, 7)
    y = seeded(model, *texts)
    assert torch.equal(seeded(model, *texts), y)
    assert not torch.equal(seeded(model, *texts, seed=2), y)
    before = torch.get_rng_state()
    assert torch.equal(model.eval()(*texts), plain(*texts))
    assert torch.equal(model.generate(texts[0], 4, 1), plain.generate(texts[0], 4, 1))
    assert torch.equal(torch.get_rng_state(), before)


@mixers
def test_activation_checkpointing(mixer):
    """The second forward pass drops the same as the first."""
    model, text = language_model(mixer, DROPOUT), tokens(2, 20)

    def gradients(run):
        loss = (seeded(run) * random(2, 20, 11)).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    wanted = gradients(lambda: model(text))
    again = gradients(lambda: checkpoint(model, text, use_reentrant=False))
    assert all(map(torch.equal, again, wanted))


@pytest.mark.parametrize("mixer", ["softmax", "feedback"])
def test_compiled(mixer):
    model, text = language_model(mixer, DROPOUT), tokens(2, 20)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(seeded(compiled, text), seeded(model, text))


def test_empty():
    stack = FeedbackTransformer(6, 2, 2, dropout=DROPOUT)
    attention = SoftmaxAttention(6, 2, attention_dropout=DROPOUT)
    for layer in (stack, attention):
        for shape in ((0, 3, 6), (2, 0, 6)):
            x = torch.zeros(shape, requires_grad=True)
            layer(x).sum().backward()
            assert x.grad.shape == shape


def test_kernels_refuse(monkeypatch):
    monkeypatch.setattr(_triton, "why_not", lambda *inputs: None)
    stack = FeedbackTransformer(6, 2, 1)
    x, k = torch.zeros(1, 2, 6), torch.zeros(1, 0, 1, 2, 3)
    given = x, stack.weights(), 2, k, k, None
    factors = torch.ones(1, 2, 1, 12 + stack.weights().expand.shape[1])
    assert why_not(*given, factors) == "the kernels have no dropout"
    assert why_not(*given) is None


MAKERS = [
    ("dropout", "Block", lambda **p: Block(SoftmaxAttention(8, 2), 8, **p)),
    ("dropout", "FeedbackTransformer", partial(FeedbackTransformer, 8, 2, 1)),
    ("dropout", "LanguageModel", partial(LanguageModel, 11, d_model=8)),
    ("dropout", "EncoderDecoder", encoder_decoder),
    ("dropout", "softmax_attention", partial(ops.softmax_attention, *random(3, 2, 5, 1, 4))),
    ("attention_dropout", "SoftmaxAttention", partial(SoftmaxAttention, 8, 2)),
    ("attention_dropout", "CrossAttention", partial(CrossAttention, 8, 2)),
    ("attention_dropout", "TransformerXL", partial(TransformerXL, 8, 2, 1)),
    ("attention_dropout", "LanguageModel", partial(LanguageModel, 11, "softmax", d_model=8)),
    ("attention_dropout", "EncoderDecoder", encoder_decoder),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "name", "make"), MAKERS)
def test_range(argument, name, make):
    text = f"{name}: expected {argument} to be at least 0 and below 1, got "
    for value, kind in ((-0.1, ValueError), (1, ValueError), ("0.1", TypeError)):
        call = partial(make, **{argument: value})
        refuses(call, re.escape(text + repr(value)), kind)
    make(**{argument: 0}), make(**{argument: 0.999})


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


def test_factors_of_another_shape():
    stack = FeedbackTransformer(6, 2, 2, d_ff=10)
    x, w = torch.zeros(1, 5, 6), stack.weights()
    for shape, text in {
        (1, 5, 2, 21): "expected factors of shape [1, 5, 2, 22] ([batch, time, "
        "layers, 2 * d + d_ff]), got [1, 5, 2, 21]",
        (1, 5, 3, 22): "feedback: expected factors of shape [1, 5, 2, factors]",
    }.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            ops.feedback(x, w, heads=2, factors=torch.ones(shape))
