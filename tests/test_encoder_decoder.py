"""Test `CrossAttention` and `EncoderDecoder`."""

import pytest
import torch
from alike import drawn_mask, numbers, random, refuses
from torch.nn import functional as F

from fwlab.feature_maps import DPFP, ELU1, FAVOR, RandomFourier
from fwlab.layers import CrossAttention
from fwlab.models import EncoderDecoder

MAPS = {
    "softmax": lambda: None,
    "elu": ELU1,
    "dpfp": lambda: DPFP(2),
    "favor": lambda: FAVOR(4, 8, seed=0),
    "fourier": lambda: RandomFourier(4, 8, seed=0),
}
maps = pytest.mark.parametrize("make_map", MAPS.values(), ids=MAPS)


def attention(make_map):
    torch.manual_seed(0)
    return CrossAttention(12, 3, make_map()).double()


@maps
@pytest.mark.parametrize("masked", [False, True])
def test_every_query_compares_itself_with_every_key(make_map, masked):
    """Cross-attention agrees with an explicit computation of all weights."""
    layer = attention(make_map)
    x, source = random(2, 7, 12), random(2, 9, 12, seed=1)
    mask = drawn_mask(2, 9) if masked else torch.ones(2, 9, dtype=torch.bool)
    projections = (layer.to_q(x), layer.to_k(source), layer.to_v(source))
    q, k, v = (part.unflatten(-1, (3, 4)) for part in projections)
    if layer.feature_map is None:
        weights = torch.einsum("bihd,bjhd->bhij", q, k).div(4**0.5).exp()
    else:
        q, k = layer.feature_map(q), layer.feature_map(k)
        weights = torch.einsum("bihd,bjhd->bhij", q, k)
    weights = weights * mask[:, None, None]
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = layer.to_out(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2))
    y = layer(x, source, mask if masked else None)
    torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-11)
    itself = layer(source, key_mask=mask)
    torch.testing.assert_close(itself, layer(source, source, mask))


@maps
def test_masked_tokens_may_be_anything(make_map):
    layer = attention(make_map)
    x = random(2, 7, 12).requires_grad_()
    source = random(2, 9, 12, seed=1).requires_grad_()
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 3:] = False
    keep[1, :] = False  # This row has no key.
    y = layer(x, torch.where(keep[..., None], source, torch.nan), keep)
    torch.testing.assert_close(y[:1], layer(x[:1], source[:1, :3]))
    assert not y[1].any()
    (y * random(2, 7, 12, seed=2)).sum().backward()
    for leaf in (x, source, *layer.parameters()):
        assert torch.isfinite(leaf.grad).all()
    assert not source.grad[~keep].any()


def test_long_keys_do_not_underflow():
    """With long keys, stabilised features do not underflow."""
    torch.manual_seed(0)
    layer = CrossAttention(12, 3, FAVOR(4, 8, seed=0))
    with torch.no_grad():
        layer.to_k.weight.mul_(40)
    x, source = random(2, 7, 12).float(), random(2, 9, 12).float()
    y = layer(x, source)
    exact = layer.double()(x.double(), source.double())
    assert (y - exact).norm() < 1e-3 * exact.norm()


KINDS = {
    "softmax": {"attention": "softmax"},
    "elu": {"attention": ELU1()},
    "delta": {"attention": DPFP(), "rule": "delta"},
    "favor": {"attention": FAVOR(8, 8, seed=0)},
}


@pytest.fixture(params=KINDS)
def model(request):
    torch.manual_seed(0)
    return EncoderDecoder(10, 12, 2, 2, 16, **KINDS[request.param]).double()


def tokens(*shape, vocab=10, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def test_prefill_and_step_are_forward(model):
    source, target = tokens(3, 9), tokens(3, 12, vocab=12)
    mask = torch.arange(9) < torch.tensor([[9], [5], [2]])
    whole = model(source, target, mask)
    assert whole.shape == (3, 12, 12)
    state = model.encode(source, mask)
    logits, state = model.prefill(target[:, :5], state)
    pieces = [logits]
    for t in range(5, 12):
        logits, state = model.step(target[:, t], state)
        pieces.append(logits[:, None])
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-11)


def test_padding_changes_nothing(model):
    source, target = tokens(1, 5), tokens(1, 6, vocab=12)
    wanted = model(source, target)
    longer = torch.cat([source, tokens(1, 4, seed=1)], 1)
    mask = (torch.arange(9) < 5)[None]
    torch.testing.assert_close(model(longer, target, mask), wanted)
    more = torch.cat([target, tokens(1, 3, seed=1)], 1)
    kept = (torch.arange(9) < 6)[None]
    for target_mask in (None, kept):
        logits = model(source, more, target_mask=target_mask)[:, :6]
        torch.testing.assert_close(logits, wanted)


def test_generate_is_greedy_argmax(model):
    source = tokens(3, 9)
    mask = torch.arange(9) < torch.tensor([[9], [5], [2]])
    text = model.generate(source, 12, start=3, source_mask=mask)
    assert text.shape == (3, 12)
    before = torch.cat([torch.full((3, 1), 3), text[:, :-1]], 1)
    assert torch.equal(model(source, before, mask).argmax(-1), text)
    assert model.generate(source, 0, start=3).shape == (3, 0)


def test_a_sequence_that_has_ended_stays_so(monkeypatch):
    model = EncoderDecoder(10, 12, 1, 2, 16)
    script = iter([[3, 11, 5], [11, 4, 5], [6, 6, 11], [1, 1, 1]])

    def step(self, tokens, state):
        return F.one_hot(torch.tensor(next(script)), 12), state

    monkeypatch.setattr(EncoderDecoder, "step", step)
    text = model.generate(tokens(3, 4), 9, start=10, end=11)
    assert text.tolist() == [[3, 11, 11], [11, 11, 11], [5, 5, 11]]


def test_decoding_needs_the_same_memory(model):
    sizes = []
    for source_time, time in ((3, 2), (30, 20)):
        state = model.encode(tokens(1, source_time))
        _, state = model.prefill(tokens(1, time), state)
        sizes.append(numbers(state))
        assert sizes[-1] == model.state_size(source_time, time)
    constant = isinstance(model.decoder[0].cross.feature_map, torch.nn.Module)
    assert (sizes[0] == sizes[1]) == constant


def test_every_weight_learns(model):
    logits = model(tokens(4, 9), tokens(4, 12, vocab=12))
    F.cross_entropy(logits.flatten(0, 1), tokens(48, vocab=12, seed=1)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())


def test_each_attention_has_a_map_of_its_own():
    phi = FAVOR(8, 8, seed=0)
    model = EncoderDecoder(10, 12, 2, 2, 16, attention=phi)
    maps = {id(m) for m in model.modules() if isinstance(m, FAVOR)}
    assert len(maps) == 6
    assert id(phi) not in maps


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CrossAttention(12, 3)(torch.zeros(2, 5, 9)), r"source of shape .*\[2, 5, 9\]"),
        (lambda: CrossAttention(12, 3).read(torch.zeros(2, 9), None), r"x of shape .*\[2, 9\]"),
        (lambda: CrossAttention(12, 3).write(torch.zeros(2, 5, 12), torch.ones(2, 5)), "expected key_mask to be a bool"),
        (lambda: EncoderDecoder(10, 12)(torch.tensor([[0, 10]]), tokens(1, 3)), "source from 0 to 9, got .* to 10"),
        (lambda: EncoderDecoder(10, 12)(tokens(3), tokens(2, 3)), r"source of shape .*got \[3\]"),
        (lambda: EncoderDecoder(10, 12)(tokens(2, 3), tokens(2, 3).float()), "target_in of dtype"),
        (lambda: EncoderDecoder(10, 12).generate(tokens(2, 3), 4, start=12), "start to be from 0 to 11, got 12"),
        (lambda: EncoderDecoder(10, 12).generate(tokens(2, 3), -1, start=1), "max_new_tokens"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, message):
    refuses(call, message)
