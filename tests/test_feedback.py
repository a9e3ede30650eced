"""Feedback memory: what each step sees, at what cost, and known bugs."""

import copy

import pytest
import torch
from alike import (
    error,
    identical,
    problem,
    random,
    refuses,
)
from torch.nn import functional as F

from fwlab import ops
from fwlab.layers import Block, FeedbackTransformer, SoftmaxAttention
from fwlab.ops.feedback import naive

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


def only(layer, layers):
    """Logits that put exactly all the weight on one state."""
    merge = torch.full((layers + 1,), -1000.0, dtype=torch.float64)
    merge[layer] = 0
    return merge


def parallel(x, w, heads=HEADS):
    """Run the stack that sees only past *inputs*, in parallel over steps."""
    time, memory, layers = x.shape[1], x, len(w.to_q)
    key = x.shape[-1] // heads
    back = torch.arange(time)[:, None] - torch.arange(time)
    s = naive.sinusoids(back.flatten().double(), w.positions.shape[1])
    r = (s @ w.positions.T).view(time, time, key)

    def split(y):
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    for l in range(layers):
        g = min(l, len(w.to_k) - 1)
        m = memory if w.norm_memory is None else naive.norm(memory, w.norm_memory[g])
        q = split(naive.norm(x, w.norm_mixer[l]) @ w.to_q[l].T)
        k, v = split(m @ w.to_k[g].T), split(m @ w.to_v[g].T)
        a = q @ k.mT + torch.einsum("bhtd,tjd->bhtj", q, r)
        past = torch.ones(time, time, dtype=torch.bool).tril(-1)
        a = torch.softmax((a / key**0.5).masked_fill(~past, -torch.inf), -1)
        z = torch.nan_to_num(a) @ v  # the first step sees nothing
        x = x + z.transpose(1, 2).flatten(2) @ w.to_out[l].T
        h = F.gelu(naive.norm(x, w.norm_mlp[l]) @ w.expand[l].T)
        x = x + h @ w.contract[l].T
    return x


# --- the identities --------------------------------------------------


@both
@forms
def test_all_mass_on_the_input_is_parallel(implementation, shared):
    """F1: nothing higher comes back, so no step waits for another."""
    x = sequence(12)
    w = small_weights(3, shared)._replace(merge=only(0, 3))
    y = ops.feedback(x, w, heads=HEADS, implementation=implementation)
    assert error(y, parallel(x, w)) < 1e-12


@both
def test_one_layer_is_an_ordinary_one_and_two_are_not(implementation):
    """F2: only with feedback do two layers differ from a transformer."""
    x, shared = sequence(12), ("merge", "positions")
    for layers, same in ((1, True), (2, False)):
        w = small_weights(layers)._replace(merge=only(0, layers))
        wanted = x
        for l in range(layers):
            parts = w._asdict().items()
            one = (p if name in shared else p[l : l + 1] for name, p in parts)
            wanted = parallel(wanted, ops.FeedbackWeights(*one))
        found = ops.feedback(x, w, heads=HEADS, implementation=implementation)
        assert (error(found, wanted) < 1e-12) is same


def test_the_lowest_layer_sees_the_highest_of_the_past():
    """What neither a transformer nor weight on the input can do."""
    x = sequence(3, batch=1)
    for merge, sees in ((only(0, 2), False), (only(2, 2), True)):
        results = []
        for factor in (1, 2):
            w = small_weights(2)._replace(merge=merge)
            w.contract[1] *= factor  # changes the top state alone
            stack = ops.FeedbackWeights(
                *(p[:1] if n not in ("merge", "positions") else p for n, p in w._asdict().items())
            )  # fmt: skip
            _, state = ops.feedback(x[:, :2], w, heads=HEADS, return_state=True)
            # The lowest layer of step 3, from keys and values of layer 1.
            low = ops.FeedbackState(state.k[:, :, :1], state.v[:, :, :1], None)
            stack = stack._replace(merge=only(0, 1))
            results.append(ops.feedback(x[:, 2:], stack, heads=HEADS, state=low))
        assert torch.equal(*results) is not sees


# --- a single step ---------------------------------------------------


# --- what must not happen (reference: 4.3 of the peers) --------------


@both
def test_no_longest_memory(implementation):
    """B1, B2: more than 4096 memories, and more than 512."""
    k, v = (random(2, 5000, 1, HEADS, 3, seed=seed) for seed in (0, 1))
    run = {"heads": HEADS, "state": ops.FeedbackState(k, v, None)}
    x, w = sequence(3), small_weights(1)
    y, after = ops.feedback(
        x, w, return_state=True, implementation=implementation, **run
    )
    assert torch.isfinite(y).all()
    assert after.k.shape[1] == 5003
    assert error(y, ops.feedback(x, w, implementation="naive", **run)) < 1e-12


# --- causality and masks ---------------------------------------------


def test_a_sequence_without_any_token():
    """Its steps return 0, and later ones start from an empty state."""
    stack = FeedbackTransformer(6, HEADS, 2).double()
    x = sequence(10)
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[1] = False
    for implementation in ("naive", "efficient"):
        y, state = stack.prefill(x[:, :5], None, keep, implementation)
        assert not y[1].any()
        assert state.mask.tolist() == [[True] * 5, [False] * 5]
        y, _ = stack.prefill(x[:, 5:], state, implementation=implementation)
        assert error(y[1:], stack(x[1:, 5:])) < 1e-12
        assert error(y[:1], stack(x[:1])[:, 5:]) < 1e-12


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
        (lambda: FeedbackTransformer(6, 4, 2), "d_model=6 and heads=4"),
        (lambda: FeedbackTransformer(6, 2, 1)(x), "x of dtype"),
        (lambda: FeedbackTransformer(6, 2, 1).step(x.float()), r"\[batch, 6\]"),
    ]  # fmt: skip
    for call, message in cases:
        refuses(call, message)
