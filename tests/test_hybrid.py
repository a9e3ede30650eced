"""Stacks of several mixers, and the options of their layers and blocks."""

import pytest
import torch
from alike import numbers, refuses
from torch.nn import functional as F

from fwlab.bench.measure import operator_calls
from fwlab.layers import Block, FastWeightAttention, SoftmaxAttention
from fwlab.models import LanguageModel, Mixer
from fwlab.ops import KeyValueCache

HYBRID = ["gated-delta"] * 3 + ["softmax"]
#: All that Qwen3.5 has, and an option of every kind.
MODERN = {
    "mixer": HYBRID,
    "fast_weights": {"conv_size": 4, "out_norm": True, "out_gate": True},
    "softmax": {"rope": 0.5, "qk_norm": "head", "out_gate": True, "kv_heads": 1},
    "norm": "rms",
    "mlp": "swiglu",
    "norm_eps": 1e-6,
    "tied": False,
}


def model(**options):
    torch.manual_seed(0)
    sizes = {"layers": 4, "heads": 2, "d_model": 16, "max_len": 40}
    return LanguageModel(11, **{**sizes, **options}).double()


def tokens(*shape):
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(0))


def rules(model):
    return [getattr(block.mixer, "rule", "softmax") for block in model.blocks]


def test_a_list_has_a_mixer_per_layer_and_is_repeated():
    own = Mixer(lambda s: FastWeightAttention(s.d_model, s.heads, rule="sum"))
    assert rules(model(mixer=HYBRID)) == ["gated_delta"] * 3 + ["softmax"]
    assert rules(model(mixer=["delta", "softmax"])) == ["delta", "softmax"] * 2
    assert rules(model(mixer=[own, "delta"])) == ["sum", "delta"] * 2
    assert rules(model(mixer=("kimi-delta",), layers=3)) == ["kimi_delta"] * 3


def test_the_same_as_text():
    for text, wanted in (
        ("gated-delta*3,softmax", HYBRID),
        ("sum, delta * 2 ,softmax*1", ["sum", "delta", "delta", "softmax"]),
        ("delta", ["delta"]),
    ):
        one, other = model(mixer=text), model(mixer=wanted)
        assert str(one) == str(other)
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"mixer": HYBRID}, MODERN], ids=["bare", "modern"])
def test_one_state_for_all(options):
    """Fast weights, inputs of convolutions and keys and values in one list."""
    m, text = model(**options), tokens(2, 30)
    whole = m(text)
    logits, state = m.prefill(text[:, :12])
    pieces = [logits]
    logits, state = m.prefill(text[:, 12:20], state)
    pieces.append(logits)
    with torch.no_grad():  # a step of its own
        for t in range(20, 30):
            logits, state = m.step(text[:, t], state)
            pieces.append(logits[:, None])
            assert numbers(state) == 2 * m.state_size(t + 1)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-12)


def test_padding_is_as_if_it_were_not_there():
    """On the left, on the right and inside; positions count real tokens."""
    m, text = model(**MODERN), tokens(3, 20)
    real = torch.arange(20) >= torch.tensor([[7], [0], [0]])
    real[1, 12:], real[2, 3:9] = False, False
    whole, (logits, state) = m(text, key_mask=real), m.prefill(text, key_mask=real)
    new, _ = m.step(text[:, 0], state)
    for i in range(3):
        alone = text[i : i + 1, real[i]]
        wanted, after = m.prefill(alone)
        for found in (whole, logits):
            torch.testing.assert_close(found[i, real[i]], wanted[0])
        step, _ = m.step(text[i : i + 1, 0], after)
        torch.testing.assert_close(new[i : i + 1], step)


def test_options_of_a_published_layer():
    m = model(
        mixer="kimi-delta*3,softmax", fast_weights={"like": "kimi", "conv_size": 2}
    )
    wanted = FastWeightAttention.like("kimi", 16, 2, conv_size=2)
    assert str(m.blocks[0].mixer) == str(wanted.double())
    # The rule is the mixer's.
    assert rules(model(mixer="delta", fast_weights={"like": "kimi"})) == ["delta"] * 4


def test_every_weight_learns():
    m, text = model(**MODERN), tokens(4, 31)
    logits = m(text[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
    for name, parameter in m.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_in_one_graph():
    options = {**MODERN, "mixer": "softmax", "fast_weights": None, "layers": 1}
    m, text = model(**options), tokens(2, 9)
    torch.compiler.reset()
    made = torch.compile(m, backend="eager", fullgraph=True)
    torch.testing.assert_close(made(text), m(text))


def test_rotary_positions_need_no_table():
    table = model(mixer=HYBRID)
    assert table.positions is not None and table.max_len == 40
    for share in (0, 0.5, 1):
        m = model(mixer=HYBRID, softmax={"rope": share})
        assert m.positions is None and m.max_len is None
        assert m(tokens(1, 50)).isfinite().all()
    # AFT-simple has a table all the same.
    assert model(mixer="aft-simple,softmax", softmax={"rope": 1}).positions is not None


def test_softmax_without_positions_sees_a_set():
    m = model(mixer="softmax", layers=1, softmax={"rope": 0})
    one, other = tokens(1, 9), tokens(1, 9).clone()
    other[:, :8] = one[:, :8].flip(1)
    torch.testing.assert_close(m(one)[:, -1], m(other)[:, -1])
    m = model(mixer="softmax", layers=1, softmax={"rope": 1})
    assert not torch.allclose(m(one)[:, -1], m(other)[:, -1])


def test_only_the_distance_turns_scores():
    torch.manual_seed(0)
    layer = SoftmaxAttention(16, 2, rope=1).double()
    x = torch.randn(1, 9, 16).double()
    q, k = (getattr(layer, f"to_{name}")(x).unflatten(-1, (2, 8)) for name in "qk")

    def scores(start):
        before = torch.zeros(1, start, 2, 8).double()
        state = KeyValueCache(before, before, None)
        turned = layer._with_positions(q, k, None, state)
        return torch.einsum("bihd,bjhd->bhij", *turned)

    torch.testing.assert_close(scores(0), scores(1000))
    assert not torch.allclose(scores(0), torch.einsum("bihd,bjhd->bhij", q, k))


def test_norms_and_mlps_by_hand():
    torch.manual_seed(0)
    mixer, x = SoftmaxAttention(8, 2), torch.randn(2, 5, 8)

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()

    options = {"norm": "rms", "mlp": "swiglu", "norm_eps": 1e-3}
    block = Block(mixer, 8, **options)
    wide = {
        name: getattr(block, name).weight for name in ("gate", "expand", "contract")
    }
    assert [*wide["gate"].shape] == [21, 8]  # two thirds of 4 * 8

    def mlp(x):
        gate, up = x @ wide["gate"].T, x @ wide["expand"].T
        return (gate * gate.sigmoid() * up) @ wide["contract"].T

    h = x + mixer(rms(x))
    torch.testing.assert_close(block(x), h + mlp(rms(h)))
    block.post_norm = True
    h = x + rms(mixer(x))
    torch.testing.assert_close(block(x), h + rms(mlp(h)))


def test_weights_that_are_not_tied():
    m = model(mixer="delta", tied=False)
    tied = model(mixer="delta")
    assert m.num_parameters() == tied.num_parameters() + 11 * 16
    with torch.no_grad():
        m.to_logits.weight.copy_(m.embedding.weight)
        tied.load_state_dict(m.state_dict(), strict=False)
    text = tokens(2, 9)
    torch.testing.assert_close(m(text), tied(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixer": HYBRID, "layers": 6}, "divides layers=6, got 4"),
        ({"mixer": []}, "divides layers=4, got 0"),
        ({"mixer": ["delta", "delat"]}, "mixer to be one of 'softmax', .*'delat'"),
        ({"mixer": "delta*x,softmax"}, r"number of layers after each \*.*'delta\*x'"),
        ({"mixer": "delta*0,softmax"}, r"number of layers after each \*"),
        ({"mixer": "delta,"}, "mixer to be one of .*''"),
        ({"mixer": ["delta", "feedback"]}, "whole stack to be the only one"),
        ({"mixer": "feedback", "norm": "rms"}, "whole stack, .*'norm': 'rms'"),
        ({"mixer": "softmax", "fast_weights": {"conv_size": 4}}, "no fast_weights"),
        ({"mixer": "fwp", "fast_weights": {"conv_size": 4}}, "no fast_weights"),
        ({"mixer": "delta", "softmax": {"rope": 1}}, "no softmax"),
        ({"mixer": "delta", "fast_weights": {"conv": 4}}, "conv_size, .*got 'conv'"),
        ({"mixer": "delta", "fast_weights": {"rule": "sum"}}, "got 'rule'"),
        ({"mixer": "sum", "fast_weights": {"beta_max": 2}}, "beta_max=1"),
        ({"fast_weights": {"like": "kimo"}}, "one of .*'kimi', got 'kimo'"),
        ({"norm": "batch"}, "norm to be one of 'layer', 'rms', got 'batch'"),
        ({"mlp": "relu"}, "mlp to be one of 'gelu', 'swiglu', got 'relu'"),
        ({"norm_eps": -1.0}, "norm_eps to be a number, 0 or more, got -1.0"),
        ({"mixer": "softmax", "softmax": {"rope": 0.3}}, "even integer, got rope=0.3"),
        ({"mixer": "softmax", "softmax": {"rope": 1.5}}, "rope from 0 to 1"),
        ({"mixer": "softmax", "softmax": {"rope_base": 0}}, "rope_base to be above 0"),
        ({"mixer": "softmax", "softmax": {"qk_norm": "l2"}}, "qk_norm to be one of"),
        ({"mixer": "softmax", "softmax": {"head_width": 0}}, "head_width to be at"),
    ],
)
def test_errors_name_the_argument(options, message):
    refuses(lambda: model(**options), message)


@pytest.mark.parametrize(
    "options",
    [
        {"mixer": 3},
        {"mixer": [3]},
        {"fast_weights": [4]},
        {"tied": 1},
        {"norm_eps": "small"},
        {"mixer": "softmax", "softmax": {"rope": "all"}},
        {"mixer": "softmax", "softmax": {"out_gate": "silu"}},
    ],
)
def test_a_wrong_type_is_a_type_error(options):
    with pytest.raises(TypeError, match="expected"):
        model(**options)


def test_a_token_takes_few_operators():
    """What the options add to softmax attention and to the block, per layer."""
    m = LanguageModel(
        5, "softmax", heads=2, d_model=8, layers=1, softmax={"rope": 1}, norm="rms"
    )
    with torch.no_grad():
        _, state = m.prefill(torch.zeros(1, 9, dtype=torch.long))
        _, state = m.step(torch.zeros(1, dtype=torch.long), state)
        count = operator_calls(lambda: m.step(torch.zeros(1).long(), state))
    assert count <= 88
