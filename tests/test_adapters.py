"""Test that adapters of linear layers, embeddings and norms work in every layer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fwlab.feature_maps import ELU1
from fwlab.layers import FeedbackTransformer, SoftmaxAttention
from fwlab.layers.feedback import called_module
from fwlab.models import MIXERS, EncoderDecoder, LanguageModel

KINDS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
#: Options of mixers that add convolutions, norms and gates.
MODERN = {
    "softmax": {"softmax": {"qk_norm": "head", "out_gate": True}, "tied": False},
    "gated-delta": {
        "fast_weights": {"conv_size": 3, "out_norm": True, "out_gate": True},
        "mlp": "swiglu",
        "norm": "rms",
    },
}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)
TEXT = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))


class Opaque(nn.Module):
    """Wrap a module so that it computes with its weight plus `change`."""

    def __init__(self, base, change):
        super().__init__()
        self.base, self.change = base, nn.Parameter(change)

    def forward(self, x):
        if isinstance(self.base, nn.Embedding):
            return self.base(x) + self.change[x]
        if isinstance(self.base, nn.Linear):
            return self.base(x) + x @ self.change.T
        scale = self.change / self.base.weight
        return self.base(x) * (1 + scale)


class Shown(Opaque):
    """Wrap a module as `Opaque` does, and expose the weight of the base module."""

    @property
    def weight(self):
        return self.base.weight


class Half(nn.Module):
    """Multiply by one half, as a deterministic replacement for dropout."""

    p = 0.5

    def forward(self, x):
        return x / 2


class Sum(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = nn.Parameter(change)

    def forward(self, weight):
        return weight + self.change


def wrapped(kind):
    def put(parent, name, module, change):
        setattr(parent, name, kind(module, change))

    return put


def hooked(parent, name, module, change):
    around = Opaque(copy.deepcopy(module), change)
    module.register_forward_hook(lambda module, inputs, y: around(*inputs))


def patched(parent, name, module, change):
    module.forward = Opaque(copy.deepcopy(module), change).forward


def parametrized(parent, name, module, change):
    parametrize.register_parametrization(module, "weight", Sum(change))


WAYS = {
    "opaque": wrapped(Opaque),
    "shown": wrapped(Shown),
    "hooked": hooked,
    "patched": patched,
    "parametrized": parametrized,
}


def adapted(model, put):
    """Return the model with all modules adapted, and a copy with merged weights."""
    merged, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            if type(module) in KINDS:
                shape = module.weight.shape
                change = 0.3 * torch.randn(shape, generator=generator).double()
                path = next(n for n, m in model.named_modules() if m is module)
                with torch.no_grad():
                    merged.get_submodule(path).weight.add_(change)
                put(parent, name, module, change)
    return model, merged


def small(mixer):
    torch.manual_seed(0)
    options = {"layers": 2, "heads": 2, "d_model": 8, "max_len": 12}
    return LanguageModel(11, mixer, **options, **MODERN.get(mixer, {})).double().eval()


def same(model, merged):
    """Assert that two models agree on a text in one call, in steps and with padding."""
    whole = merged(TEXT)
    skips = all(getattr(block, "skips", False) for block in model.blocks)
    keep = torch.ones_like(TEXT, dtype=torch.bool)
    keep[0, :4], keep[1, 7:] = not skips, False
    start = keep if skips else None
    logits, state = model.prefill(TEXT[:, :4])
    pieces = [logits]
    for t in range(4, 9):
        logits, state = model.step(TEXT[:, t], state)
        pieces.append(logits[:, None])
    after = model.step(TEXT[:, 0], model.prefill(TEXT, None, start)[1])[0]
    wanted = merged.step(TEXT[:, 0], merged.prefill(TEXT, None, start)[1])[0]
    for y, right in (
        (model(TEXT), whole),
        (torch.cat(pieces, 1), whole),
        (model(TEXT, key_mask=keep), merged(TEXT, key_mask=keep)),
        (after, wanted),
    ):
        torch.testing.assert_close(y, right, rtol=1e-9, atol=1e-11)


@every_mixer
@pytest.mark.parametrize("way", WAYS)
def test_adapters_act(mixer, way):
    """An adapted model has the same outputs as a model with the merged weights."""
    if way in ("hooked", "patched"):  # Tied logits use the embedding's weight.
        model = small(mixer)
        model.embedding, kept = nn.Identity(), model.embedding
        model, merged = adapted(model, WAYS[way])
        model.embedding = merged.embedding = kept
    else:
        model, merged = adapted(small(mixer), WAYS[way])
    same(model, merged)


def test_a_stack_of_feedback_says_what_it_calls():
    torch.manual_seed(0)
    stack = FeedbackTransformer(8, heads=2, layers=1)
    stack.blocks[0].expand = Opaque(stack.blocks[0].expand, torch.zeros(32, 8))
    x = torch.randn(1, 3, 8)
    for call in (stack.weights, lambda: stack(x, implementation="efficient")):
        with pytest.raises(ValueError, match="expand of type Opaque"):
            call()
    assert torch.equal(stack(x, implementation="naive"), stack(x))
    with pytest.raises(ValueError, match=r"state\.k of shape \[1, 2, 1, 2, 4\], got"):
        stack.prefill(x, stack.prefill(torch.randn(2, 2, 8))[1])


@pytest.mark.parametrize("shared", [False, True])
def test_a_stack_of_feedback_that_calls_is_trained(shared):
    """A feedback stack has the same gradients with and without hooks on its modules."""
    torch.manual_seed(0)
    stack = FeedbackTransformer(8, heads=2, layers=2, shared=shared)
    stack.dropout = Half()
    x, keep = torch.randn(2, 5, 8), torch.rand(2, 5) > 0.4
    other, seen = copy.deepcopy(stack), []
    handle = other.blocks[1].contract.register_forward_hook(lambda *_: seen.append(1))
    for each in (stack, other):
        y, state = each.prefill(x, None, keep)
        y, _ = each.prefill(x, state)
        y.square().sum().backward()
    for p, q in zip(stack.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    half = other.bfloat16().prefill(x.bfloat16())
    assert half[0].dtype == torch.bfloat16 and half[1].k.dtype == torch.float32
    handle.remove()
    assert seen and called_module(other.blocks) is None


def test_other_models_call_their_layers():
    for attention in ("softmax", ELU1()):
        torch.manual_seed(0)
        model = EncoderDecoder(11, 11, 1, heads=2, d_model=8, attention=attention)
        model, merged = adapted(model.double().eval(), WAYS["opaque"])
        torch.testing.assert_close(model(TEXT, TEXT), merged(TEXT, TEXT))


@pytest.mark.parametrize("weight", [torch.zeros(8, 8, dtype=torch.int8), "packed"])
def test_weights_that_are_no_numbers(weight):
    """A projection with int8 weights or packed weights accepts float32 inputs."""
    layer = SoftmaxAttention(8, 2)
    x = torch.randn(1, 4, 8)
    wanted = layer(x)
    base, layer.to_q = layer.to_q, Opaque(layer.to_q, torch.zeros(8, 8))
    layer.to_q.weight = (
        weight if isinstance(weight, str) else nn.Parameter(weight, False)
    )
    torch.testing.assert_close(layer(x), wanted)
    layer.to_q = base
    with pytest.raises(TypeError, match=r"expected x of dtype torch.float32"):
        layer(x.double())
