"""The language model and text generation."""

import warnings

import pytest
import torch
from alike import numbers, refuses
from torch.nn import functional as F

from fwlab.bench.measure import operator_calls
from fwlab.models import MIXERS, LanguageModel
from fwlab.models.language_model import draw


@pytest.fixture(params=MIXERS)
def mixer(request):
    return request.param


@pytest.fixture
def model(mixer):
    torch.manual_seed(0)
    return LanguageModel(11, mixer, layers=2, heads=2, d_model=16, max_len=40).double()


def tokens(*shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(0))


def test_prefill_and_step_are_forward(model):
    text = tokens(2, 30)
    whole = model(text)
    logits, state = model.prefill(text[:, :12])
    pieces = [logits]
    logits, state = model.prefill(text[:, 12:20], state)
    pieces.append(logits)
    for t in range(20, 30):
        logits, state = model.step(text[:, t], state)
        pieces.append(logits[:, None])
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-12)


def test_initial_weights(mixer):
    """What the docstring states."""
    torch.manual_seed(1)
    big = LanguageModel(65, mixer, layers=8, heads=2, d_model=128)
    for name, module in big.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.LayerNorm):
            assert module.bias is None
            assert (weight == 1).all(), name
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            assert getattr(module, "bias", None) is None
            residual = name.endswith(("to_out", "contract"))
            wanted = 0.02 / 4 if residual else 0.02
            assert weight.std().item() == pytest.approx(wanted, rel=0.1), name
    ends = [n for n, _ in big.named_parameters() if "to_out" in n or "contract" in n]
    assert len(ends) == 16
    # An untrained model is nearly undecided.
    logits = big(torch.randint(65, (4, 64))).flatten(0, 1)
    loss = F.cross_entropy(logits, torch.randint(65, (256,)))
    assert loss.item() == pytest.approx(4.174, abs=0.1)


def test_every_weight_learns(mixer):
    torch.manual_seed(0)
    model = LanguageModel(11, mixer, layers=2, heads=2, d_model=16, max_len=40)
    text = tokens(4, 41)
    logits = model(text[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        # AFT-conv scales its kernel by a gamma that starts at 0 (Eq. 8).
        assert parameter.grad.any() != name.endswith("kernel.raw"), name


def test_state_size(model):
    """It equals the actual size, at any length."""
    for time in (1, 7, 33, 40):
        _, state = model.prefill(tokens(1, time))
        assert numbers(state) == model.state_size(time), time


def test_parameters_are_counted_without_position_tables():
    def count(max_len, **options):
        return LanguageModel(65, max_len=max_len, **options).num_parameters()

    for mixer in MIXERS:
        assert count(64, mixer=mixer) == count(128, mixer=mixer), mixer
    assert count(64, mixer="softmax") == 795_904  # nanoGPT prints 0.80M
    # An MLP is two matrices without bias.
    wider = count(64, mixer="sum", d_ff=513) - count(64, mixer="sum")
    assert wider == 4 * 2 * 128


def test_generate_is_greedy_argmax(model):
    text = model.generate(tokens(2, 5), 20, temperature=0)
    assert text.shape == (2, 25)
    assert torch.equal(text[:, :5], tokens(2, 5))
    logits = model(text)
    assert torch.equal(logits[:, 4:-1].argmax(-1), text[:, 5:])


def test_generate_is_seeded(model):
    prompt = tokens(2, 5)
    first = model.generate(prompt, 15, seed=1)
    assert torch.equal(first, model.generate(prompt, 15, seed=1))
    assert not torch.equal(first, model.generate(prompt, 15, seed=2))
    assert torch.equal(
        model.generate(prompt, 15, top_k=1, seed=1),
        model.generate(prompt, 15, temperature=0),
    )
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_top_k_draws_among_exactly_k():
    """Also if more tokens are equally likely: then from the first ones."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]]).repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    for k, wanted in ((1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])):
        drawn = draw(logits, 1.0, k, generator)
        assert drawn.unique().tolist() == wanted


def test_long_texts(model):
    """No limit without positions; with them, the last max_len tokens."""
    prompt = tokens(1, 50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = model.generate(prompt, 5, temperature=0)
    if model.max_len is None:
        assert not caught
        logits = model(text)[:, 49:-1]
    else:
        assert len(caught) == 1
        assert "max_len=40" in str(caught[0].message)
        with pytest.raises(ValueError, match=r"max_len=40 tokens.*got 50"):
            model(prompt)
        logits = torch.cat(
            [model(text[:, i - 40 : i])[:, -1:] for i in range(50, 55)], 1
        )
    assert torch.equal(logits.argmax(-1), text[:, 50:])


def test_layers_differ():
    model = LanguageModel(11, "delta", layers=2, heads=2, d_model=16)
    a, b = (block.mixer.to_q.weight for block in model.blocks)
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixer": "delat"}, "'softmax', .*'sum'.*'delat'"),
        ({"vocab_size": 0}, "vocab_size to be at least 1, got 0"),
        ({"layers": 0}, "layers"),
        ({"d_ff": 0}, "d_ff to be at least 1, got 0"),
        ({"heads": 3}, "d_model=128 and heads=3"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    refuses(lambda: LanguageModel(**{"vocab_size": 11, **arguments}), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": torch.zeros(1, 0).long()}, "prompt of shape"),
        ({"prompt": torch.zeros(3).long()}, "prompt of shape"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"prompt": torch.tensor([[1, 11]])}, "tokens from 0 to 10, got 1 to 11"),
        ({"prompt": torch.zeros(1, 2)}, "tokens of dtype"),
    ],
)
def test_generate_refuses(arguments, message):
    model = LanguageModel(11, layers=1, heads=1, d_model=4)
    arguments = {"prompt": tokens(1, 3), "max_new_tokens": 2, **arguments}
    refuses(lambda: model.generate(**arguments), message)


@pytest.mark.parametrize(
    ("mixer", "operators"),
    [("softmax", 150), ("sum", 231), ("delta", 263), ("gated-delta", 299)],
)
def test_a_token_takes_few_operators(mixer, operators):
    """Text is generated token by token: what is not arithmetic costs most."""
    model = LanguageModel(5, mixer, heads=2, d_model=8, max_len=12)
    with torch.no_grad():
        _, state = model.prefill(torch.zeros(1, 9, dtype=torch.long))
        _, state = model.step(torch.zeros(1, dtype=torch.long), state)
        count = operator_calls(lambda: model.step(torch.zeros(1).long(), state))
    assert count <= operators + 2  # the token itself


def test_second_derivatives(mixer, model):
    """The naive form has them; another one has them, too, or says that it has none."""
    text, weight = tokens(1, 3), model.embedding.weight
    place = text[0, 0], 0

    def first(**options):
        loss = model(text, **options).logsumexp(-1).sum()
        return torch.autograd.grad(loss, weight, create_graph=True)[0][place]

    gradient = first(implementation="naive")
    second = torch.autograd.grad(gradient, weight)[0][place]
    with torch.no_grad():
        weight[place] += 1e-6
    change = (first(implementation="naive") - gradient) / 1e-6
    torch.testing.assert_close(second, change, rtol=1e-3, atol=1e-5)
    if mixer in ("softmax", "transformer-xl"):  # PyTorch's own
        return
    with torch.no_grad():
        weight[place] -= 1e-6
    try:
        found = torch.autograd.grad(first(), weight)[0][place]
    except RuntimeError as refusal:
        assert "implementation='naive'" in str(refusal)
    else:
        torch.testing.assert_close(found, second)
