"""Test `LanguageModel`: stacks of mixers, options of layers, and generation."""

import warnings

import pytest
import torch
from alike import numbers, refuses
from torch.nn import functional as F

from fwlab.layers import FastWeightAttention
from fwlab.models import MIXERS, LanguageModel, Mixer
from fwlab.models.language_model import draw

HYBRID = ["gated-delta"] * 3 + ["softmax"]
#: All options of Qwen3.5, and one option of each remaining kind.
MODERN = {
    "mixer": HYBRID,
    "fast_weights": {"conv_size": 4, "out_norm": True, "out_gate": True},
    "softmax": {"rope": 0.5, "qk_norm": "head", "out_gate": True, "kv_heads": 1},
    "norm": "rms",
    "mlp": "swiglu",
    "norm_eps": 1e-6,
    "tied": False,
}
STACKS = {name: {"mixer": name, "layers": 2} for name in MIXERS}
STACKS |= {"hybrid": {"mixer": HYBRID}, "modern": MODERN}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def made(**options):
    torch.manual_seed(0)
    sizes = {"layers": 4, "heads": 2, "d_model": 16, "max_len": 40}
    return LanguageModel(**{"vocab_size": 11} | sizes | options).double()


@pytest.fixture(params=STACKS)
def model(request):
    return made(**STACKS[request.param])


def tokens(*shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(0))


def test_a_mixer_of_a_readers_own():
    """A user's mixer gets arguments by position, so the user may choose any names."""

    class Mean(torch.nn.Module):
        def forward(self, x, *rest):
            return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    model = LanguageModel(11, "sum", layers=1, heads=2, d_model=16, max_len=40)
    model.blocks[0].mixer = Mean()
    changed = tokens(2, 6)
    before = model(changed)
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    after = model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all()


def test_state_has_the_size_it_says(model):
    """The state of a model has the size that `state_size` returns."""
    for time in (1, 30):
        _, state = model.prefill(tokens(2, time))
        assert numbers(state) == 2 * model.state_size(time)


@every_mixer
def test_initial_weights(mixer):
    """Initial weights have the distribution that `LanguageModel` documents."""
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
    # The logits of an initial model are nearly uniform.
    logits = big(torch.randint(65, (4, 64))).flatten(0, 1)
    loss = F.cross_entropy(logits, torch.randint(65, (256,)))
    assert loss.item() == pytest.approx(4.174, abs=0.1)


def test_parameters_are_counted_without_position_tables():
    def count(max_len, **options):
        return LanguageModel(65, max_len=max_len, **options).num_parameters()

    for mixer in MIXERS:
        assert count(64, mixer=mixer) == count(128, mixer=mixer), mixer
    assert count(64, mixer="softmax") == 795_904  # nanoGPT prints 0.80M.
    # An MLP has two matrices and no bias.
    wider = count(64, mixer="sum", d_ff=513) - count(64, mixer="sum")
    assert wider == 4 * 2 * 128


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
    """Top-k sampling uses exactly k tokens, and the first ones among equal logits."""
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]]).repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    for k, wanted in ((1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])):
        drawn = draw(logits, 1.0, k, generator)
        assert drawn.unique().tolist() == wanted


def test_long_texts(model):
    """`generate` accepts prompts longer than `max_len`, but a forward pass does not."""
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": torch.zeros(1, 0).long()}, "prompt of at least one token"),
        ({"prompt": torch.zeros(3).long()}, "prompt of shape"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"prompt": torch.tensor([[1, 11]])}, "prompt from 0 to 10, got 1 to 11"),
        ({"prompt": torch.zeros(1, 2)}, "prompt of dtype"),
    ],
)
def test_generate_refuses(arguments, message):
    model = LanguageModel(11, layers=1, heads=1, d_model=4)
    arguments = {"prompt": tokens(1, 3), "max_new_tokens": 2, **arguments}
    refuses(lambda: model.generate(**arguments), message)


def rules(model):
    return [getattr(block.mixer, "rule", "softmax") for block in model.blocks]


def test_a_list_has_a_mixer_per_layer_and_is_repeated():
    own = Mixer(lambda s: FastWeightAttention(s.d_model, s.heads, rule="sum"))
    assert rules(made(mixer=HYBRID)) == ["gated_delta"] * 3 + ["softmax"]
    assert rules(made(mixer=["delta", "softmax"])) == ["delta", "softmax"] * 2
    assert rules(made(mixer=[own, "delta"])) == ["sum", "delta"] * 2
    assert rules(made(mixer=("kimi-delta",), layers=3)) == ["kimi_delta"] * 3


def test_rotary_positions_need_no_table():
    table = made(mixer=HYBRID)
    assert table.positions is not None and table.max_len == 40
    for share in (0, 0.5, 1):
        m = made(mixer=HYBRID, softmax={"rope": share})
        assert m.positions is None and m.max_len is None
        assert m(tokens(1, 50)).isfinite().all()
    # AFT-simple requires a table of positions.
    assert made(mixer="aft-simple,softmax", softmax={"rope": 1}).positions is not None


def test_weights_that_are_not_tied():
    m = made(mixer="delta", tied=False)
    tied = made(mixer="delta")
    assert m.num_parameters() == tied.num_parameters() + 11 * 16
    with torch.no_grad():
        m.to_logits.weight.copy_(m.embedding.weight)
        tied.load_state_dict(m.state_dict(), strict=False)
    text = tokens(2, 9)
    torch.testing.assert_close(m(text), tied(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": "delat"}, "'softmax', .*'sum'.*'delat'"),
        ({"mixer": HYBRID, "layers": 6}, "divides layers=6, got 4"),
        ({"mixer": []}, "divides layers=4, got 0"),
        ({"mixer": "delta*x,softmax"}, r"number of layers after each \*.*'delta\*x'"),
        ({"mixer": "delta,"}, "mixer to be one of .*''"),
        ({"mixer": ["delta", "feedback"]}, "whole stack to be the only one"),
        ({"mixer": "feedback", "norm": "rms"}, "whole stack, .*'norm': 'rms'"),
        ({"mixer": "softmax", "fast_weights": {"conv_size": 4}}, "no fast_weights"),
        ({"mixer": "delta", "softmax": {"rope": 1}}, "no softmax"),
        (
            {"mixer": "delta", "fast_weights": {"conv": 4}},
            "fast_weights .*'conv_size', .*got 'conv'",
        ),
        ({"mixer": "delta", "fast_weights": {"rule": "sum"}}, "got 'rule'"),
        ({"mixer": "sum", "fast_weights": {"beta_max": 2}}, "beta_max=1"),
        ({"fast_weights": {"like": "kimo"}}, "one of .*'kimi', got 'kimo'"),
        ({"mixer": "softmax", "softmax": {"rope": 0.3}}, "even integer, got rope=0.3"),
    ],
)
def test_errors_name_the_argument(options, message):
    refuses(lambda: made(**options), message)
