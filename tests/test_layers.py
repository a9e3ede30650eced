"""Test that forward, prefill and step of each layer agree."""

import copy
from functools import partial

import pytest
import torch
from alike import agree, drawn_mask, error, identical, parts, rebuild, refuses, weighted

import fwlab
from fwlab import ops
from fwlab.feature_maps import DPFP, ELU1, FAVOR, RandomFourier, ReLU, l2_normalize
from fwlab.layers import (
    AFTConv,
    AFTConv2d,
    AFTFull,
    AFTLocal,
    AFTSimple,
    Block,
    CrossAttention,
    FastWeightAttention,
    FastWeightProgrammer,
    FeedbackTransformer,
    SoftmaxAttention,
    TransformerXL,
)
from fwlab.layers.fast_weight_attention import RULES
from fwlab.layers.transformer_xl import RelativeAttention
from fwlab.models import LanguageModel


def trained_biases(layer):
    """Set biases of a layer to random values, because initial biases are 0."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("to_"):
                parameter.copy_(torch.randn_like(parameter))
    return layer


#: Options of `FastWeightAttention(12, 4)`, and all options at once.
#: DPFP is left out, because all DPFP features of a key of width 3 may be 0.
#: Results of sum normalisation and half precision change abruptly close to 0.
OPTIONS = {
    "one-memory": {"kv_heads": 1},
    "expand_v": {"expand_v": 5 / 3},
    "conv": {"conv_size": 4},
    "conv-1": {"conv_size": 1},
    "norm": {"out_norm": True},
    "gate": {"out_gate": True},
}
ALL = {"kv_heads": 2, "expand_v": 2, "conv_size": 4, "out_norm": True, "out_gate": True}
#: Options of recent models that exclude some of the options in `ALL`.
VALUES = {"head_width": 5, "value_heads": 8, "conv_size": 3}
GATED = {
    "out_norm": True,
    "norm_eps": 0.1,
    "out_gate": "sigmoid",
    "low_rank_gate": True,
}
LIKE = {**VALUES, **GATED, "key_norm": "l2", "key_eps": 0.1, "scale": "softmax"}
OPTIONAL = {
    "delta-grouped": lambda: FastWeightAttention(12, 4, DPFP(nu=1), kv_heads=2),
    **{
        f"delta-{name}": partial(FastWeightAttention, 12, 4, ELU1(), **options)
        for name, options in OPTIONS.items()
    },
    **{
        f"{rule}-all": partial(FastWeightAttention, 12, 4, ELU1(), rule, **ALL)
        for rule in RULES
    },
    "favor-all": lambda: FastWeightAttention(
        12, 4, FAVOR(3, 6, seed=0), rule="sum", **ALL
    ),
    **{
        f"{rule}-values": partial(FastWeightAttention, 12, 4, rule=rule, **LIKE)
        for rule in ("delta", "kimi_delta", "gated_delta_2", "delta_product")
    },
    "dpfp-values": lambda: FastWeightAttention(
        12, 5, DPFP(nu=1), head_width=3, value_heads=10, scale=-2
    ),
    "favor-values": lambda: FastWeightAttention(
        12, 4, FAVOR(5, 6, seed=0), rule="sum", **VALUES
    ),
    "softmax-grouped": lambda: SoftmaxAttention(12, 4, kv_heads=2),
    "softmax-all": lambda: SoftmaxAttention(
        12, 4, 2, head_width=6, rope=2 / 3, qk_norm="head", out_gate=True
    ),
    "softmax-all-heads": lambda: SoftmaxAttention(12, 3, rope=1, qk_norm="all"),
}
LAYERS = {
    **OPTIONAL,
    "softmax": lambda: SoftmaxAttention(12, 3),
    **{rule: partial(FastWeightAttention, 12, 3, rule=rule) for rule in RULES},
    "delta-l2": lambda: FastWeightAttention(12, 3, ELU1(), key_norm="l2"),
    "delta-normalized": lambda: FastWeightAttention(12, 3, DPFP(2), normalize=True),
    "gated-plain": lambda: FastWeightAttention(
        12, 3, ReLU(), rule="gated", normalize=False
    ),
    "gated-fourier": lambda: FastWeightAttention(
        12, 3, RandomFourier(4, 5, bandwidth=0.3, seed=0), rule="gated"
    ),
    "favor-sum": lambda: FastWeightAttention(12, 3, FAVOR(4, 6, seed=0), rule="sum"),
    "favor-gated": lambda: FastWeightAttention(
        12, 3, FAVOR(4, 6, seed=0), rule="gated"
    ),
    "favor-delta": lambda: FastWeightAttention(12, 3, FAVOR(4, 6, seed=0)),
    "favor-delta-normalized": lambda: FastWeightAttention(
        12, 3, FAVOR(4, 6, seed=0), key_norm=None, normalize=True
    ),
    "favor-gated_delta": lambda: FastWeightAttention(
        12, 3, FAVOR(4, 6, seed=0), "gated_delta", key_norm=None, normalize=True
    ),
    "fwp": lambda: FastWeightProgrammer(12, 3),
    "fwp-linear": lambda: FastWeightProgrammer(12, activation=None),
    "aft-simple": lambda: AFTSimple(12),
    "aft-full": lambda: trained_biases(AFTFull(12, 40)),
    "aft-full-factor": lambda: AFTFull(12, 45, factor=3),
    "aft-local": lambda: trained_biases(AFTLocal(12, 40, window=5)),
    "aft-local-wide": lambda: trained_biases(AFTLocal(12, 40, window=60)),
    "aft-local-factor": lambda: AFTLocal(12, 45, window=5, factor=3),
    "aft-conv": lambda: trained_biases(AFTConv(12, 3, window=5)),
    "aft-conv-one-key": lambda: trained_biases(AFTConv(12, 3, 5, shared_key=True)),
    "sum-plain": lambda: FastWeightAttention(12, 3, rule="sum", normalize=False),
    "transformer-xl": lambda: TransformerXL(12, 3, 2, memory=4, segment=6),
    "feedback": lambda: FeedbackTransformer(12, 3, 2),
    "feedback-shared": lambda: FeedbackTransformer(12, 3, 2, shared=True),
    "feedback-plain": lambda: FeedbackTransformer(12, 3, 2, normalize_memory=False),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def setup(make, dtype=torch.float64):
    torch.manual_seed(0)
    layer = make().to(dtype)
    return layer, torch.randn(2, 40, 12, dtype=dtype)


@layers
def test_prefill_and_step_are_forward(make):
    """`prefill`, `step` and the naive loop agree with `forward`, and skip padding."""
    layer, x = setup(make)
    whole = layer(x)
    same = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
    pieces, state = [], None
    # Alternate between segments and single steps.
    for start, stop in ((0, 17), (17, 23), (23, 33), (33, 40)):
        if start in (0, 23):
            y, state = layer.prefill(x[:, start:stop], state)
            pieces.append(y)
        else:
            for t in range(start, stop):
                y, state = layer.step(x[:, t], state)
                pieces.append(y[:, None])
    same(torch.cat(pieces, 1), whole)
    same(layer.step(x[:, 0])[0], whole[:, 0])
    same(whole, layer(x, implementation="naive"))
    keep = (torch.arange(40) < 30).expand(2, 40)
    y = layer(x, key_mask=keep)
    same(y[:, :30], layer(x[:, :30]))
    assert not y[:, 30:].any()


@layers
def test_step_without_gradients(make):
    """Without gradients, a state can be continued twice; wrong states raise errors."""
    layer, x = setup(make)
    start, other = x[:, :3], x.flip(1)
    with torch.no_grad():
        _, state = layer.prefill(start[:, :2])
        _, state = layer.step(start[:, 2], state)
        wanted = layer(x), layer(torch.cat([start, other[:, :12]], 1))
        states, tokens = [state, state], (x[:, 3:], other)
        # Alternate, because one stream could overwrite the state of the other stream.
        for t in range(12):
            for i in range(2):
                y, states[i] = layer.step(tokens[i][:, t], states[i])
                same = wanted[i][:, 3 + t]
                torch.testing.assert_close(y, same, rtol=1e-10, atol=1e-12)
        for state in (3, (), (None, 3), x, rebuild(states[0], torch.Tensor.float)):
            for call in (
                partial(layer.step, x[:, 0]),
                partial(layer.prefill, x[:, :1]),
            ):
                with pytest.raises((TypeError, ValueError), match=r"expected .*state"):
                    call(state)
        few = rebuild(states[0], lambda part: part[:1])
        with pytest.raises(ValueError, match=r"expected .*state"):
            layer.step(x[:, 0], few)


@pytest.mark.parametrize("name", ["sum", "gated_delta", "kimi_delta-values"])
@torch.no_grad()
def test_a_token_in_half_precision(name, monkeypatch):
    """In half precision, `step` does not call `prefill` or round the state."""
    layer, x = setup(LAYERS[name], torch.bfloat16)
    _, state = layer.prefill(x)
    wanted = layer.prefill(x[:, :1], state)
    monkeypatch.setattr(layer, "prefill", None)
    y, state = layer.step(x[:, 0], state)
    assert y.dtype == torch.bfloat16
    for found, right in zip(parts((y[:, None], state)), parts(wanted), strict=True):
        assert found.dtype == right.dtype and error(found, right) < 1e-2


@pytest.mark.parametrize("name", [name for name in LAYERS if "aft" in name])
def test_later_tokens_change_no_bit(name):
    """Later tokens do not change any bit of earlier AFT outputs."""
    layer, x = setup(LAYERS[name])
    later = x.clone()
    later[:, 20:] = 100 * torch.randn(2, 20, 12)
    assert torch.equal(layer(later)[:, :20], layer(x)[:, :20])


@layers
def test_every_parameter_learns_and_moves(make):
    layer, x = setup(make, torch.float32)
    (layer(x) * torch.randn(2, 40, 12)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    twin = copy.deepcopy(layer).double()
    assert twin(x.double()).dtype == torch.float64
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


ALL_LAYERS = {
    **LAYERS,
    "relative": lambda: RelativeAttention(12, 3, memory=4, segment=6),
    "block": lambda: Block(SoftmaxAttention(12, 3), 12),
}
all_layers = pytest.mark.parametrize("make", ALL_LAYERS.values(), ids=ALL_LAYERS)


@pytest.mark.parametrize(
    "make",
    [*ALL_LAYERS.values(), lambda: AFTConv2d(12, 3, 3)],
    ids=[*ALL_LAYERS, "aft-conv2d"],
)
def test_what_stands_in_masked_steps_reaches_nothing(make):
    """Values at masked steps, even NaN, change no output and no gradient."""
    layer, x = setup(make)
    keep = drawn_mask(2, 40, share=0.7)
    if isinstance(layer, AFTConv2d):
        x, keep = x.view(2, 5, 8, 12), keep.view(2, 5, 8)
    results = []
    for filling in (1.0, torch.nan):
        dirty = torch.where(keep[..., None], x, filling).requires_grad_()
        y = layer(dirty, key_mask=keep)
        assert not y[~keep].any()
        # The loss ignores padding.
        loss = y[keep].sin().sum()
        leaves = [dirty, *layer.parameters()]
        results.append([y, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    assert not results[0][1][~keep].any()
    identical(*results)
    assert all(torch.isfinite(each).all() for each in results[1])


@all_layers
@pytest.mark.parametrize("masked", [False, True])
def test_no_steps_change_nothing(make, masked):
    """An empty prompt or segment does not change the outputs or states of a layer."""
    layer, x = setup(make)
    nothing = x[:, :0]
    mask = torch.ones(2, 0, dtype=torch.bool) if masked else None
    assert layer(nothing, key_mask=mask).shape == (2, 0, 12)
    y, state = layer.prefill(nothing, None, mask)
    assert y.shape == (2, 0, 12)
    y, state = layer.prefill(x[:, :9], state)
    torch.testing.assert_close(y, layer(x[:, :9]))
    y, after = layer.prefill(nothing, state, mask)
    assert y.shape == (2, 0, 12)
    identical(parts(state), parts(after))


@all_layers
def test_what_a_layer_refuses(make):
    """Inputs on a wrong device and unknown implementations raise an error."""
    layer, x = setup(make)
    said = "expected x on cpu, like the layer's weights, got meta"
    refuses(lambda: layer(x.to("meta")), said, ValueError)
    said = "expected implementation to be .*got 'fastest'"
    refuses(lambda: layer(x, implementation="fastest"), said)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "transformer-xl"])
def test_state_has_the_size_it_says(name):
    """The state of a layer has the size that `state_size` returns."""
    layer, x = setup(LAYERS[name])
    for time in (1, 40):
        _, state = layer.prefill(x[:, :time])
        size = sum(part.numel() for part in parts(state)) // len(x)
        try:
            assert size == layer.state_size()
        except TypeError:  # The state grows with time.
            assert size == layer.state_size(time)


@pytest.mark.parametrize("rule", ["sum", "gated"])
def test_favor_scale_changes_nothing(rule):
    """The running maximum of FAVOR+ rescales the state, but changes no output."""
    torch.manual_seed(0)
    layer = FastWeightAttention(12, 3, FAVOR(4, 6, seed=0), rule=rule).double()
    assert layer.has_running_scale
    x = 3 * torch.randn(2, 30, 12, dtype=torch.float64)
    y = layer(x)
    layer.feature_map.scales = False
    torch.testing.assert_close(y, layer(x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", ["gated_delta", "kimi_delta"])
def test_decays_start_as_published(rule):
    """Initial decay rates and step sizes are in the ranges of Yang et al. (2024)."""
    layer = FastWeightAttention(64, 32, rule=rule)
    rate = layer.gates.log_decay.log_rate.exp()
    step = torch.nn.functional.softplus(layer.gates.log_decay.bias)
    assert 0 < rate.min() < 4 < 12 < rate.max() <= 16
    assert 9.9e-4 < step.min() < 4e-3 < 2e-2 < step.max() < 0.101


def test_steps_of_a_token_are_in_its_projections():
    layer = FastWeightAttention(8, 2, rule="delta_product", steps=3)
    assert layer.to_k.weight.shape == layer.to_v.weight.shape == (24, 8)
    assert layer.gates.beta.projection.weight.shape == (6, 8)
    x = torch.randn(2, 5, 8)
    k, v = (to(x).view(2, 5, 3, 2, 4) for to in (layer.to_k, layer.to_v))
    beta = torch.sigmoid(layer.gates.beta.projection(x)).view(2, 5, 3, 2)
    q = l2_normalize(layer.to_q(x).view(2, 5, 2, 4))
    y = ops.delta_product(q, l2_normalize(k), v, beta)
    torch.testing.assert_close(layer(x), layer.to_out(y.flatten(2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FastWeightAttention(10, 3), "d_model=10 and heads=3"),
        (lambda: FastWeightProgrammer(12)(torch.zeros(2, 5, 9)), r"\[batch, time, 12\].*\[2, 5, 9\]"),
        (lambda: FastWeightProgrammer(12).step(torch.zeros(2, 5, 12)), r"\[batch, 12\]"),
        (lambda: FastWeightAttention(12, 3, rule="kimi_delta", normalize=True), "normalize=False for rule 'kimi_delta', which has no normaliser, got True"),
        (lambda: FastWeightAttention(12, 3)([1.0]), "x to be a tensor, got list"),
        (lambda: FastWeightAttention(12, 3)(torch.zeros(2, 5, 12).double()), "x of dtype"),
        (lambda: SoftmaxAttention(12, 3)(torch.zeros(2, 5, 12).long()), "x of dtype"),
        (lambda: SoftmaxAttention(12, 4, 3), "heads=4 and kv_heads=3"),
        (lambda: AFTConv2d(12, 3, size=4), "AFTConv2d: expected size to be odd, got 4"),
        (lambda: FastWeightAttention(12, 4, kv_heads=8), "heads=4 and kv_heads=8"),
        (lambda: FastWeightAttention(12, 4, value_heads=6), "value_heads to be a multiple of heads, got value_heads=6 and heads=4"),
        (lambda: FastWeightAttention(12, 4, kv_heads=2, value_heads=4), "kv_heads or value_heads, not both, got kv_heads=2 and value_heads=4"),
        (lambda: FastWeightAttention(12, 4, key_eps=1e-6), 'key_eps=0 without key_norm="l2", got 1e-06'),
        (lambda: FastWeightAttention(12, 4, rule="sum", scale=2), "scale=None with normalize=True, where it cancels, got 2"),
        (lambda: FastWeightAttention(12, 4, low_rank_gate=True), "low_rank_gate=False for out_gate=False, got True"),
        (lambda: FastWeightAttention(12, 4, expand_v=1.5), "width of a head, 3, to be a positive integer, got expand_v=1.5"),
        (lambda: FastWeightAttention(8, 2, rule="sum", beta_max=0.5), "'sum', which has no gate .*, got 0.5"),
        (lambda: FastWeightAttention(8, 2, rule="gated", beta_max=2), "'gated', which has no gate .*, got 2"),
        (lambda: FastWeightAttention(8, 2, rule="rwkv7", beta_max=2), "'rwkv7', which has no gate that it bounds"),
        (lambda: FastWeightAttention(8, 2, steps=2), "steps to be 1 for rule 'delta', got 2"),
        (lambda: FastWeightAttention(12, 4).prefill(torch.zeros(2, 5, 12), ops.ConvState(None, None)), r"^FastWeightAttention: .*without convolutions for conv_size=0, got a ConvState \(memory, inputs\)"),
        (lambda: FastWeightAttention(12, 4, conv_size=4).prefill(torch.zeros(2, 5, 12), torch.zeros(2, 4, 3, 6)), "state to be a ConvState"),
        (lambda: FastWeightAttention(12, 4, conv_size=4).prefill(torch.zeros(2, 5, 12), ops.ConvState(None, torch.zeros(2, 2, 36))), r"^FastWeightAttention: expected state.inputs of shape \[2, 3, 36\], got \[2, 2, 36\]"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, message):
    refuses(call, message)


PACKED = [name for name, make in LAYERS.items() if make().packs]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_document_is_as_if_it_were_alone(name, masked):
    """Packed documents have the outputs, states and gradients of separate calls."""
    layer, x = setup(LAYERS[name])
    lengths, x = [5, 0, 1, 14, 2], x[:1, :22].requires_grad_()
    cu_seqlens, leaves = torch.tensor([0, 5, 5, 6, 20, 22]), [x, *layer.parameters()]
    keep = drawn_mask(1, 22) if masked else None
    masks = keep.split(lengths, 1) if masked else [None] * 5
    states, packed = [None] * 5, None
    for _ in range(2):
        each = zip(x.split(lengths, 1), states, masks, strict=True)
        alone = [layer.prefill(*given) for given in each]
        y, packed = layer.prefill(x, packed, keep, cu_seqlens=cu_seqlens)
        joined = zip(*(parts(state) for _, state in alone), strict=True)
        found = [y, *parts(packed)]
        wanted = [torch.cat([y for y, _ in alone], 1), *map(torch.cat, joined)]
        for results in (found, wanted):
            loss = weighted(*results)
            results += torch.autograd.grad(loss, leaves, materialize_grads=True)
        agree(found, wanted)
        states = [fwlab.detach(state) for _, state in alone]
        packed = fwlab.detach(packed)
    assert layer(x[:, :0], cu_seqlens=cu_seqlens[:3] * 0).shape == (1, 0, 12)


@pytest.mark.parametrize("keep", [None, torch.arange(40).expand(2, 40) % 7 != 3])
@pytest.mark.parametrize("name", ["delta-conv", "favor-all"])
def test_convolutions_keep_their_inputs_in_full_precision(name, keep):
    """Convolution states are float32, so the next tokens may have any precision."""
    layer, x = setup(OPTIONAL[name], torch.float32)
    _, exact = layer.prefill(x, None, keep)
    wanted, _ = layer.step(x[:, 0], exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, state = layer.prefill(x, None, keep)
    half = copy.deepcopy(layer).bfloat16()
    _, other = half.prefill(x.bfloat16(), None, keep)
    for made, before, token in ((layer, state, x), (half, other, x.bfloat16())):
        assert {part.dtype for part in parts(before)} == {torch.float32}
        y, _ = made.step(token[:, 0], before)
        assert y.dtype == token.dtype and error(y, wanted) < 0.1
    kept = fwlab.detach(exact).inputs
    assert kept.untyped_storage().nbytes() == kept.nbytes


@pytest.mark.parametrize(
    "make",
    [*ALL_LAYERS.values(), lambda: CrossAttention(12, 3, ELU1())],
    ids=[*ALL_LAYERS, "cross"],
)
def test_autocast(make):
    layer, x = setup(make, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        y.sum().backward()
    assert (y - layer(x)).norm() < 0.1 * layer(x).norm()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize("name", ["gated_delta", "gated-delta"])
def test_names_have_hyphens_or_underscores(name):
    assert FastWeightAttention(8, 2, rule=name).rule == "gated_delta"
    preset = name.replace("delta", "delta_net")
    assert FastWeightAttention.like(preset, 8, 2).rule == "gated_delta"
    model = LanguageModel(5, f"{name}*1,softmax", layers=2, heads=2, d_model=8)
    assert model.blocks[0].mixer.rule == "gated_delta"
