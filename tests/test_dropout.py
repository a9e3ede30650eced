"""Dropout: only in training, off by default, the same in all implementations."""

import pickle
import re

import pytest
import torch
from torch.nn import functional as F
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
from fwlab.ops.feedback import FEEDBACK
from problems import error

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


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


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
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, x, y, name=name: found.setdefault(name, []).append((*x, y))
            )
    seeded(model, *inputs)
    return found


def assert_dropped(x, y, p=DROPOUT):
    """The share of new zeros is right within 5 standard deviations."""
    x, y = x[x != 0], y[x != 0]
    share = (y == 0).double().mean().item()
    assert share == pytest.approx(p, abs=5 * (p * (1 - p) / y.numel()) ** 0.5)
    torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - p))


def test_where():
    """Embeddings, both branches of each block, and inside its MLP."""
    found = dropped(language_model("delta", DROPOUT), tokens(40, 20))
    widths = {name: [x.shape[-1] for x, _ in calls] for name, calls in found.items()}
    block = [8, 32, 8]
    assert widths == {"dropout": [8], "blocks.0.dropout": block} | {
        "blocks.1.dropout": block
    }
    for calls in found.values():
        for x, y in calls:
            assert_dropped(x, y)


def test_where_in_the_encoder_decoder():
    model = encoder_decoder(layers=1, dropout=DROPOUT)
    found = dropped(model, tokens(60, 20), tokens(60, 21))
    widths = {name: [x.shape[-1] for x, _ in calls] for name, calls in found.items()}
    assert widths == {
        "dropout": [8, 8],
        "encoder.0.dropout": [8, 32, 8],
        "decoder.0.dropout": [8, 8, 32, 8],
    }
    for calls in found.values():
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
    key_mask = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) < 0.7
    for mask in (None, key_mask):
        naive = outcome(model, x, mask, "naive")
        efficient = outcome(model, x, mask, "efficient")
        torch.testing.assert_close(efficient, naive, rtol=1e-9, atol=1e-11)
    # Masked steps still have the output 0.
    assert not naive[0][~key_mask].any()
    assert naive[0][key_mask].any(-1).all()


@pytest.mark.parametrize("shared", [False, True])
def test_feedback_continues_with_dropout(shared):
    """From memories of an earlier call, and without gradients."""
    torch.manual_seed(0)
    stack = FeedbackTransformer(6, 2, 2, shared=shared, dropout=DROPOUT).double()
    x, mask = random(2, 45, 6), torch.ones(2, 45, dtype=torch.bool)
    mask[0, 2:7] = False
    _, state = stack.prefill(x[:, :5], key_mask=mask[:, :5])
    state = ops.FeedbackState(*(s.detach() for s in state))
    found = {}
    for implementation in ("naive", "efficient"):
        k = state.k.clone().requires_grad_()
        args = x[:, 5:], state._replace(k=k), mask[:, 5:], implementation
        y, after = seeded(stack.prefill, *args)
        loss = (y * random(*y.shape, seed=3)).sum() + after.v.sin().sum()
        gradients = torch.autograd.grad(loss, [k, *stack.parameters()])
        found[implementation] = [y, after.k, after.v, *gradients]
        with torch.no_grad():
            torch.testing.assert_close(seeded(stack.prefill, *args)[0], y)
    for efficient, naive in zip(found["efficient"], found["naive"], strict=True):
        assert error(efficient, naive) < 1e-10


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_is_the_same_function(kv_heads, masked):
    """So little dropout that nothing is dropped: with mask, state and groups."""
    q, k, v = random(2, 9, 4, 3), random(2, 9, kv_heads, 3), random(2, 9, kv_heads, 5)
    mask = None
    if masked:
        mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    for scale in (None, 0.3):
        found = []
        for dropout in (0, 1e-12):
            state, pieces = None, []
            for part in (slice(0, 4), slice(4, 9)):
                y, state = ops.softmax_attention(
                    q[:, part],
                    k[:, part],
                    v[:, part],
                    scale=scale,
                    dropout=dropout,
                    key_mask=None if mask is None else mask[:, part],
                    state=state,
                    return_state=True,
                )
                pieces.append(y)
            found.append(torch.cat(pieces, 1))
        assert error(*reversed(found)) < 1e-10


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_attention_weights_are_dropped(implementation):
    """Read with unit vectors as values, which give the weights themselves."""
    time, run = 24, {"implementation": implementation}
    q, k = random(30, time, 2, 3), random(30, time, 2, 3, seed=1)
    unit = torch.eye(time).double()[:, None].expand(30, time, 2, time)
    weights = ops.softmax_attention(q, k, unit, **run)
    torch.manual_seed(1)
    found = ops.softmax_attention(q, k, unit, dropout=DROPOUT, **run)
    past = torch.ones(time, time, dtype=torch.bool).tril()
    seen = past[:, None].expand_as(weights)
    assert_dropped(weights[seen], found[seen])
    assert not found[~seen].any()


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
    mask = None
    if masked:
        mask = torch.rand(2, 7, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[1] = False
    found = []
    for dropout in (0, 1e-12):
        torch.manual_seed(0)
        layer = CrossAttention(8, 2, attention_dropout=dropout).double()
        found.append(layer(x, source, mask))
    assert error(*reversed(found)) < 1e-10


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


@pytest.mark.parametrize("mixer", WITH_WEIGHTS)
def test_attention_dropout_alone(mixer):
    model = LanguageModel(
        11, mixer, heads=2, layers=1, d_model=8, max_len=24, attention_dropout=DROPOUT
    )
    text = tokens(2, 20)
    y = seeded(model, text)
    assert not torch.equal(seeded(model, text, seed=2), y)


@mixers
def test_activation_checkpointing(mixer):
    """The second forward pass drops the same as the first."""
    model, text = language_model(mixer, DROPOUT), tokens(2, 20)

    def gradients(run):
        loss = (seeded(run) * random(2, 20, 11)).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    wanted = gradients(lambda: model(text))
    found = gradients(lambda: checkpoint(model, text, use_reentrant=False))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("mixer", ["softmax", "delta", "feedback"])
def test_resumed_training(mixer):
    """A seed per step and saved weights are all that a run needs."""

    def train(model, steps):
        for step in steps:
            torch.manual_seed(step)
            logits = model(tokens(2, 20))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens(2, 20).flatten())
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(
                    model.parameters(), gradients, strict=True
                ):
                    parameter -= 0.1 * gradient
        return model

    whole = train(language_model(mixer, DROPOUT), range(4))
    half = train(language_model(mixer, DROPOUT), range(2))
    torch.rand(7)  # what happens in between does not matter
    resumed = train(pickle.loads(pickle.dumps(half)), range(2, 4))
    for found, wanted in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted)


@mixers
def test_without_data(mixer):
    model = language_model(mixer, DROPOUT).to("meta")
    y = model(torch.zeros(2, 20, dtype=torch.int64, device="meta"))
    assert y.shape == (2, 20, 11)


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


def test_kernels_refuse():
    refuses = FEEDBACK.implementations["triton"].refuses
    sizes = {"d": 6, "key": 3, "features": 4}
    assert refuses((9, 0), **sizes, dropout=True) == "the kernels have no dropout"
    assert refuses((9, 0), **sizes, dropout=False) is None


def test_from_transformer():
    source = LanguageModel(11, "softmax", layers=2, heads=2, d_model=8)
    assert FeedbackTransformer.from_transformer(source).dropout.p == 0
    stack = FeedbackTransformer.from_transformer(source, dropout=DROPOUT)
    assert stack.dropout.p == DROPOUT


CONSTRUCTORS = {
    "Block": lambda p: Block(SoftmaxAttention(8, 2), 8, dropout=p),
    "FeedbackTransformer": lambda p: FeedbackTransformer(8, 2, 1, dropout=p),
    "LanguageModel": lambda p: LanguageModel(11, d_model=8, dropout=p),
    "EncoderDecoder": lambda p: encoder_decoder(dropout=p),
    "softmax_attention": lambda p: ops.softmax_attention(
        *random(3, 2, 5, 1, 4), dropout=p
    ),
}
OF_WEIGHTS = {
    "SoftmaxAttention": lambda p: SoftmaxAttention(8, 2, attention_dropout=p),
    "CrossAttention": lambda p: CrossAttention(8, 2, attention_dropout=p),
    "TransformerXL": lambda p: TransformerXL(8, 2, 1, attention_dropout=p),
    "LanguageModel": lambda p: LanguageModel(
        11, "softmax", d_model=8, attention_dropout=p
    ),
    "EncoderDecoder": lambda p: encoder_decoder(attention_dropout=p),
}


@pytest.mark.parametrize(
    ("argument", "name", "make"),
    [
        (argument, *item)
        for argument, makers in {
            "dropout": CONSTRUCTORS,
            "attention_dropout": OF_WEIGHTS,
        }.items()
        for item in makers.items()
    ],
)
def test_range(argument, name, make):
    text = f"{name}: expected {argument} to be at least 0 and below 1, got "
    for value in (-0.1, 1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=re.escape(text + repr(value))):
            make(value)
    for value in ("0.1", None, True):
        with pytest.raises(TypeError, match=re.escape(text + repr(value))):
            make(value)
    make(0), make(0.999)


def test_attention_dropout_needs_attention_weights():
    own = Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads))
    for mixer in (*(set(MIXERS) - set(WITH_WEIGHTS)), own):
        with pytest.raises(
            ValueError, match="expected attention_dropout=0 for a mixer"
        ):
            LanguageModel(11, mixer, heads=2, d_model=8, attention_dropout=0.1)
    for make in (
        lambda: CrossAttention(8, 2, ELU1(), attention_dropout=0.1),
        lambda: encoder_decoder(attention=ELU1(), attention_dropout=0.1),
    ):
        with pytest.raises(ValueError, match="expected attention_dropout=0 with a fea"):
            make()


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
