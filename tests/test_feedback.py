"""Test the feedback memory for bugs of other libraries, and `from_transformer`."""

import copy

import pytest
import torch
from alike import error, identical, problem, random, refuses

from fwlab import ops
from fwlab.layers import Block, FeedbackTransformer, SoftmaxAttention

HEADS = 2
both = pytest.mark.parametrize("implementation", ["naive", "efficient"])
forms = pytest.mark.parametrize("shared", [False, True])


def small_weights(layers=2, shared=False, normalize=True):
    sizes = f"layers={layers} heads=2 key=3 value=5 grad=none"
    p = problem(f"op=feedback {sizes} fewer={shared:d} edges={not normalize:d}")
    weights = {name: part for name, part in p.x.items() if name != "x"}
    return ops.FeedbackWeights(**{"norm_memory": None} | weights)


def sequence(time, d=6, batch=2, seed=1):
    return random(batch, time, d, seed=seed)


# --- Bugs of other libraries -----------------------------------------


@both
def test_no_longest_memory(implementation):
    """The number of memories has no limit, such as 512 or 4096 in other libraries."""
    k, v = (random(2, 5000, 1, HEADS, 3, seed=seed) for seed in (0, 1))
    run = {"heads": HEADS, "state": ops.FeedbackState(k, v, None)}
    x, w = sequence(3), small_weights(1)
    y, after = ops.feedback(
        x, w, return_state=True, implementation=implementation, **run
    )
    assert torch.isfinite(y).all()
    assert after.k.shape[1] == 5003
    assert error(y, ops.feedback(x, w, implementation="naive", **run)) < 1e-12


# --- from a parallel transformer -------------------------------------


class Model(torch.nn.Module):
    def __init__(self, layers=3, heads=HEADS, d=6, d_ff=10):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            Block(SoftmaxAttention(d, heads), d, d_ff) for _ in range(layers)
        )


@forms
@pytest.mark.parametrize("normalize", [True, False])
def test_from_transformer(shared, normalize):
    torch.manual_seed(0)
    model = Model().double()
    before = copy.deepcopy(model.state_dict())
    stack = FeedbackTransformer.from_transformer(model, shared, normalize)
    assert stack.dropout.p == 0
    blocks = FeedbackTransformer.from_transformer(model.blocks, shared, normalize)
    identical(stack.parameters(), blocks.parameters())
    dropping = FeedbackTransformer.from_transformer(model, dropout=0.3)
    assert dropping.dropout.p == 0.3
    assert not stack.merge.any()
    assert not stack.positions.any()
    for ours, theirs in zip(stack.blocks, model.blocks, strict=True):
        assert torch.equal(ours.to_q.weight, theirs.mixer.to_q.weight)
        assert torch.equal(ours.to_out.weight, theirs.mixer.to_out.weight)
        for name in ("norm_mixer", "norm_mlp", "expand", "contract"):
            a, b = getattr(ours, name).weight, getattr(theirs, name).weight
            assert torch.equal(a, b)
    for name in ("to_k", "to_v"):
        theirs = torch.stack([getattr(b.mixer, name).weight for b in model.blocks])
        wanted = theirs.mean(0, keepdim=True) if shared else theirs
        ours = torch.stack([getattr(m, name).weight for m in stack.memory])
        assert torch.equal(ours, wanted)
    assert (stack.memory[0].norm_memory is None) is not normalize
    x = sequence(9)
    (stack(x) * x).sum().backward()
    assert all(p.grad.any() for p in stack.parameters())
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(1)
    identical(model.state_dict().values(), before.values())


def test_from_something_else():
    def refused(blocks, message):
        refuses(lambda: FeedbackTransformer.from_transformer(blocks), message)

    refused([torch.nn.Linear(3, 3)], "block 0 to have a mixer")
    refused(3, "got int")
    gated = Block(SoftmaxAttention(8, 2), 8, mlp="swiglu")
    refused([gated], "block 0 without gate.weight, which has no counterpart")
    refused([], "at least one block")
    model = Model()
    model.blocks[1].mixer.to_v = torch.nn.Linear(6, 6)
    refused(model, "block 1 without mixer.to_v.bias, which")
    model.blocks[1].expand = None
    refused(model, r"block 1 to have expand\.weight")
    model = Model()
    model.blocks[2] = Block(SoftmaxAttention(6, HEADS), 6, 12)
    refused(model, r"blocks.2.expand.weight of shape \[10, 6\].*\[12, 6\]")


# --- errors ----------------------------------------------------------


def test_errors_name_the_argument():
    w, x = small_weights(2), sequence(4)
    cases = [
        (lambda: ops.feedback(x, tuple(w), heads=2), "expected weights to be a FeedbackWeights, got tuple"),
        (lambda: ops.feedback(x, w, heads=4), "expected heads to divide the width 6 of x, got heads=4"),
        (lambda: ops.feedback(x, w, heads=3), r"expected weights.positions of shape \[2, 4\].*got \[3, 4\]"),
        (lambda: ops.feedback(x, w, heads=2.0), "expected heads to be an integer, got 2.0"),
        (lambda: ops.feedback_attention(x, x, x, w.positions), r"expected k of shape \[2, past, 4, 6\].*got \[2, 4, 6\]"),
        (lambda: FeedbackTransformer(6, 2, 1)(x), "x of dtype"),
        (lambda: FeedbackTransformer(6, 2, 1).step(x.float()), r"\[batch, 6\]"),
    ]  # fmt: skip
    for call, message in cases:
        refuses(call, message)
