"""Right answers pass; wrong ones fail where they should, kindly."""

import contextlib
import functools
import io
import re
import threading
import time

import numpy as np
import pytest
import torch

from fwlab import ops
from fwlab.exercises import (
    EXERCISES,
    QUESTIONS,
    assert_correct,
    check,
    checker,
    hint,
    predict,
    quiz,
    reveal,
    show,
    solution,
)
from fwlab.exercises.predicting import is_right
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops.feedback_memory.naive import sinusoids


def verdict(answer, name=None):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        right = check(answer, name)
    return right, out.getvalue()


@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_is_right(name):
    right, text = verdict(EXERCISES[name].reference, name)
    assert right
    assert text.count("✓") == len(EXERCISES[name].properties)
    assert "✗" not in text
    assert_correct(EXERCISES[name].reference, name)


def outer(v, k):
    return v[..., :, None] * k[..., None, :]


def held(W, k):
    return (W * k[..., None, :]).sum(-1)


def b(beta):
    return beta[..., None]


def write_in_place(W, k, v):
    W += outer(v, k)
    return W


def weigh(weights, states):
    return torch.einsum("l,l...->...", weights, states)


def attend(q, k, v, P, dim=2, scale=None, last=1, reverse=False):
    """Feedback attention with a choice of mistakes."""
    past, key = k.shape[1], k.shape[-1]
    back = torch.arange(past, 0, -1).double() + last - 1
    r = sinusoids(back.flip(0) if reverse else back, P.shape[1]) @ P.T
    a = torch.einsum("bhd,bjhd->bhj", q, k) + torch.einsum("bhd,jd->bhj", q, r)
    a = torch.softmax(a / (key**0.5 if scale is None else scale), dim)
    return torch.einsum("bhj,bjhd->bhd", a, v)


def leave(*arguments):
    raise SystemExit("bye")


def softmax_mean(k, v, w):
    return (torch.softmax(k + w, 1) * v).sum(1)


def quotient(e, v):
    return (e * v).sum(1) / e.sum(1)


def two_maxima(k, v, w):
    return quotient((k - k.amax(1, True)).exp() * (w - w.amax(0)).exp(), v)


def plain_step(log_sum, mean, k, v):
    total = torch.logaddexp(log_sum, k)
    return total, (log_sum - total).exp() * mean + (k - total).exp() * v


def step_by_old_sum(log_sum, mean, k, v):
    new = (k - log_sum).exp()
    return log_sum + torch.log1p(new), (mean + new * v) / (1 + new)


def step_of_sums(log_sum, mean, k, v):
    old, new = log_sum.exp(), k.exp()
    return (old + new).log(), (old * mean + new * v) / (old + new)


def only_zero_keys(x):
    """Forgets that [1, -1] also has sum 0."""
    zero = (x == 0).all(-1, keepdim=True)
    return torch.where(zero, 0, x / torch.where(zero, 1, x.sum(-1, keepdim=True)))


def one_bad_key_spoils_all(x):
    total = x.sum(-1, keepdim=True)
    return 0 * x if (total == 0).any() else x / total


def by_largest_sum(x):
    """Right for keys of similar size: the rest falls below a threshold."""
    total = x.sum(-1, keepdim=True)
    small = total.abs() < 1e-40 * total.abs().max()
    return torch.where(small, 0 * x, x / torch.where(small, 1, total))


def by_own_size(x):
    """Takes a sum for 0 that is small next to its terms."""
    total = x.sum(-1, keepdim=True)
    small = total.abs() < 1e-2 * x.abs().sum(-1, keepdim=True)
    return torch.where(small, 0 * x, x / torch.where(small, 1, total))


def mask_by_number(k, v, w):
    """The mask is a large negative number, not -inf."""
    masked = k == -torch.inf
    mean = softmax_mean(k.masked_fill(masked, -1e9), v, w)
    return torch.where(masked.all(1), 0, mean)


def step_by_number(log_sum, mean, k, v):
    nothing = (log_sum == -torch.inf) & (k == -torch.inf)
    total, moved = plain_step(log_sum.clamp(min=-1e9), mean, k.clamp(min=-1e9), v)
    return total.masked_fill(nothing, -torch.inf), torch.where(nothing, mean, moved)


def skip_all(log_sum, mean, k, v):
    """Skips every channel if any key is masked."""
    if (k == -torch.inf).any():
        return log_sum, mean
    return EXERCISES["running_step"].reference(log_sum, mean, k, v)


def step_replaced_afterwards(log_sum, mean, k, v):
    """Right numbers, and NaN in the gradient."""
    total = torch.logaddexp(log_sum, k)
    old = (log_sum - total).exp().nan_to_num()
    new = (k - total).exp().nan_to_num()
    return total, old * mean + new * v


def attention(q, k, v, epsilon=0.0):
    """Normalised; -1 leaves out the key of the step itself."""
    weights = (q @ k.mT).tril(-1 if epsilon == -1 else 0)
    return weights @ v / (weights.sum(-1, keepdim=True) + max(epsilon, 0))


def random_features(x, R):
    return EXERCISES["positive_features"].reference(x, R)


def favor_of(q, k, R, of_q, of_k):
    """Maxima over these dimensions; 1: the mean in place of a maximum."""
    found = []
    for x, dims in ((q, of_q), (k, of_k)):
        e = torch.cat([x @ R.mT, -x @ R.mT], -1) - (x * x).sum(-1, True) / 2
        top = e.mean(-2, keepdim=True) if dims == 1 else e.amax(dims, keepdim=True)
        found.append((e - top).exp())
    return tuple(found)


def r_of(x):
    return torch.cat([x, -x], -1).relu()


def products(x, shifts, times=torch.mul):
    r = r_of(x)
    return torch.cat([times(r, r.roll(-j, -1)) for j in shifts], -1)


SHAPE = "returns a tensor of the shape of"
WRONG = {
    "write": [
        (lambda W, k, v: outer(v, k), "keeps what is already there"),
        (lambda W, k, v: W, "stores a value in an empty memory"),
        (lambda W, k, v: W - outer(v, k), "stores a value in an empty memory"),
        (lambda W, k, v: W + 2 * outer(v, k), "stores a value in an empty memory"),
        (lambda W, k, v: W + outer(k, v), SHAPE),
        (lambda W, k, v: W + torch.outer(v, k), "works on any leading dimensions"),
        (lambda W, k, v: W + outer(v - held(W, k), k), "keeps what is already there"),
        (lambda W, k, v: (W + outer(v, k)).float(), SHAPE),
        (write_in_place, SHAPE),
    ],
    "sum_normalize": [
        (lambda x: x, "sum to one"),
        (lambda x: x / x.sum(), "sum to one"),
        (lambda x: x / x.norm(dim=-1, keepdim=True), "sum to one"),
        (lambda x: x / x.amax(-1, keepdim=True), "sum to one"),
        (lambda x: x / x.sum(-1), SHAPE),
        (lambda x: torch.softmax(x, -1), "keeps the ratios"),
        (lambda x: x / (x.sum(-1, keepdim=True) + 1e-6), "sum to one"),
        (lambda x: x / x.sum(-1, keepdim=True).clamp(min=1e-6), "does not depend on"),
        (lambda x: x / x.abs().sum(-1, keepdim=True), "features of either sign"),
        (lambda x: x / x.sum(-1, keepdim=True), "gives zero where"),
        (
            lambda x: torch.nan_to_num(x / x.sum(-1, keepdim=True)),
            "gives zero where",
        ),
        (
            lambda x: EXERCISES["sum_normalize"].reference(x.detach()),
            "gives zero where",
        ),
        (only_zero_keys, "gives zero where"),
        (by_own_size, "features of either sign"),
        (one_bad_key_spoils_all, "gives zero where"),
        (lambda x: by_largest_sum(x), "every key by itself"),
    ],
    "delta_step": [
        (lambda W, k, v, beta: W + b(beta)[..., None] * outer(v, k), "replaces what"),
        (lambda W, k, v, beta: W - outer(b(beta) * (v - held(W, k)), k), "replaces"),
        (lambda W, k, v, beta: W + outer(v - held(W, k), k), "changes nothing"),
        (
            lambda W, k, v, beta: W + outer(b(beta) ** 2 * (v - held(W, k)), k),
            "mixes the old value",
        ),
        (
            lambda W, k, v, beta: (
                (1 - b(beta)[..., None]) * W + b(beta)[..., None] * outer(v, k)
            ),
            "leaves the values of orthogonal keys alone",
        ),
        (
            lambda W, k, v, beta: (
                W
                + outer(b(beta) * (v - held(W, k)), k)
                / (k * k).sum(-1)[..., None, None]
            ),
            "keys of any length",
        ),
        (
            lambda W, k, v, beta: W + torch.outer(beta * (v - W @ k), k),
            "works on any leading dimensions",
        ),
        # Right for equal leading dimensions only by accident of broadcasting.
        (
            lambda W, k, v, beta: W + beta * outer(v - held(W, k), k),
            "works on any leading dimensions",
        ),
    ],
}
WRONG |= {
    "mean_of": [
        (lambda k, v, w: v.mean(1), "softmax of the keys"),
        (lambda k, v, w: (torch.softmax(k + w, -1) * v).sum(1), "with one key"),
        (lambda k, v, w: torch.softmax(k + w, 1) * v, SHAPE),
        (lambda k, v, w: softmax_mean(k, v, 0 * w), "adds the bias"),
        (lambda k, v, w: softmax_mean(k, v, -w), "adds the bias"),
        (
            lambda k, v, w: (torch.softmax(k, 1) * w.exp() * v).sum(1),
            "with one key",
        ),
        (lambda k, v, w: quotient((k + w).exp(), v), "does not overflow"),
        (
            lambda k, v, w: quotient((k.clamp(-60, 30) + w).exp(), v),
            "does not overflow",
        ),
        (
            lambda k, v, w: quotient((k + w - (k + w).max()).exp(), v),
            "keeps channels and sequences",
        ),
        (two_maxima, "the maximum of k + w, not"),
        (mask_by_number, "leaves out keys of -inf"),
        (softmax_mean, "where no key is visible"),
        (lambda k, v, w: torch.nan_to_num(softmax_mean(k, v, w)), "no key is visible"),
        (
            lambda k, v, w: EXERCISES["mean_of"].reference(k, v, w).detach(),
            "where no key is visible",
        ),
    ],
    "running_step": [
        (lambda log_sum, mean, k, v: mean, SHAPE),
        (lambda log_sum, mean, k, v: (log_sum, mean, k), SHAPE),
        (lambda log_sum, mean, k, v: (log_sum, 3), SHAPE),
        (lambda log_sum, mean, k, v: (log_sum[0], mean), SHAPE),
        (lambda log_sum, mean, k, v: (log_sum.float(), mean.float()), SHAPE),
        (lambda log_sum, mean, k, v: (log_sum, mean), "adds up exponentials"),
        (lambda log_sum, mean, k, v: (log_sum + k, mean + v), "adds up exponentials"),
        (
            lambda *given: (plain_step(*given)[0], (given[1] + given[3]) / 2),
            "the softmax mean of all keys",
        ),
        (step_of_sums, "does not overflow"),
        (step_by_number, "starts from nothing"),
        (step_by_old_sum, "lets a far larger key"),
        (plain_step, "where the key is -inf"),
        (
            lambda *given: [x.nan_to_num() for x in plain_step(*given)],
            "where the key is -inf",
        ),
        (skip_all, "where the key is -inf"),
        (step_replaced_afterwards, "gradients without NaN"),
    ],
    "merge_memory": [
        (lambda states, w: states[0], "the plain mean"),
        (lambda states, w: weigh(w, states), "the plain mean"),
        (lambda states, w: states.mean(0), "returns that state"),
        (lambda states, w: states[-1], "the plain mean"),
        (lambda states, w: weigh(w.softmax(0)[1:], states[1:]), "the plain mean"),
        (
            lambda states, w: weigh(torch.softmax(w[1:], 0), states[1:]),
            "the plain mean",
        ),
        (lambda states, w: weigh(w.flip(0).softmax(0), states), "that state"),
        (lambda states, w: weigh((w / 2).softmax(0), states), "softmax of the logits"),
        (lambda states, w: weigh(w.exp() / w.exp().sum(), states), "not overflow"),
        (lambda states, w: weigh(w.softmax(0)[:4], states[:4]), "softmax of the"),
        (
            lambda states, w: (
                (w.softmax(0) * states.movedim(0, -1)).sum(-1)
                if states.shape[-1] != 4
                else (w.softmax(0) * states).sum(0)
            ),
            "of the shape",
        ),
        (
            lambda states, w: (
                weigh(w.softmax(0), states)
                if states.shape[0] != states.shape[1]
                else (w.softmax(0) * states).sum(0)
            ),
            "even if other dimensions have the same size",
        ),
    ],
    "feedback_attention": [
        (lambda q, k, v, P: attend(q, k, v, P, dim=1), "with one memory"),
        (lambda q, k, v, P: attend(q, k, v, P) * 2, "with one memory"),
        (lambda q, k, v, P: v[:, 0] if len(v[0]) else 0 * q, "the mean of the values"),
        (lambda q, k, v, P: v.mean(1), "scaled dot-product"),
        (lambda q, k, v, P: attend(q, k, v, P, scale=1), "scaled dot-product"),
        (
            lambda q, k, v, P: attend(q.flip(1), k, v, P),
            "scaled dot-product",
        ),
        (lambda q, k, v, P: attend(q, k, v, 0 * P), "measures distances"),
        (lambda q, k, v, P: attend(q, k, v, P, last=0), "measures distances"),
        (lambda q, k, v, P: attend(q, k, v, P, reverse=True), "measures distances"),
        (
            lambda q, k, v, P: attend(
                q, k + (k == 0).all() * 1e-9, v, P * (1 if not k.any() else 2)
            ),
            "adds both scores",
        ),
        (
            lambda q, k, v, P: attend(q, k, v, P) / (0 if v.shape[1] == 0 else 1),
            "without any memory",
        ),
    ],
}
WRONG |= {
    "read_memory": [
        (lambda W, q: W[:, 0], "returns a column of W"),
        (lambda W, q: W @ q / q.sum(), "the sum of the columns times its entries"),
        (lambda W, q: W @ q.abs(), "the sum of the columns times its entries"),
        (lambda W, q: W @ q + 1e-3, "returns a column of W"),
        (lambda W, q: torch.mv(W, q), "works on any leading dimensions"),
        (lambda W, q: W @ q, "works on any leading dimensions"),
        (lambda W, q: torch.einsum("...vk,...v->...k", W, q), SHAPE),
    ],
    "dpfp": [
        (lambda x, nu: r_of(x).repeat_interleave(nu, -1), "in the plane, has one"),
        (lambda x, nu: products(x, range(1, nu + 1), torch.minimum), "in the plane"),
        (
            lambda x, nu: products(x, range(1, nu + 1)).sort(-1).values,
            "in any order",
        ),
        (lambda x, nu: products(x, [1] * nu), "in any order"),
        (lambda x, nu: products(x, range(1, nu + 1)) ** 2 / 6, "in any order"),
        (lambda x, nu: products(x, range(1, nu + 1)).cumsum(-1), "in the plane"),
    ],
    "useful_nu": [
        (lambda d: float(d - 1), "returns an integer"),
        (lambda d: str(d), "returns an integer"),
        (lambda d: d // 2, "for any width"),
        (lambda d: 1, "for any width"),
        (lambda d: d * (d - 1) // 2, "for any width"),
        (lambda d: max(d - 1, 1), "for any width"),
    ],
    "dot_capacity": [
        (lambda d, nu: 2 * d * nu / 1, "returns an integer"),
        (lambda d, nu: d * nu, "counts one dimension for each feature"),
        (lambda d, nu: (2 * d) ** nu, "counts one dimension for each feature"),
        (lambda d, nu: 2 * d * min(nu, d), "stops growing"),
        (lambda d, nu: 2 * d * min(nu, 2 * d - 1), "stops growing"),
        (lambda d, nu: 2 * d * max(min(nu, d - 1), 1), "stops growing"),
    ],
}
WRONG |= {
    "normaliser": [
        (lambda q, k, v: attention(q, k, v) * 2, "the first value"),
        (lambda q, k, v: v, "follows Eq. 19"),
        (lambda q, k, v: v.cumsum(-2) / 2, "the first value"),
        (lambda q, k, v: attention(q.flip(-1), k, v), "follows Eq. 19"),
        (lambda q, k, v: attention(k, q, v), "follows Eq. 19"),
        (lambda q, k, v: attention(q, k, v, 1e-6), "the first value"),
        (lambda q, k, v: attention(q, k, v, -1), "the first value"),
        (lambda q, k, v: attention(q, k, v, 1e-10), "the scale of the features"),
    ],
    "positive_features": [
        (lambda x, R: random_features(x, R) * 2, "whose squares sum to 1"),
        (lambda x, R: random_features(x, R).log(), "only positive features"),
        (lambda x, R: random_features(x, 2 * R), "estimates exp"),
        (lambda x, R: random_features(x, R + 1), "estimates exp"),
        (lambda x, R: random_features(x, R).sort(-1).values, "estimates exp"),
        (lambda x, R: random_features(x.abs(), R), "estimates exp"),
        (lambda x, R: random_features(x, R).clamp(max=1), "follows Eqs. 31"),
    ],
    "favor": [
        (lambda q, k, R: favor_of(q, k, R, 1, (-2, -1)), "changes no weight"),
        (lambda q, k, R: favor_of(q, k, 2 * R, -1, (-2, -1)), "changes no weight"),
        (lambda q, k, R: favor_of(k, q, R, -1, (-2, -1)), "changes no weight"),
        (lambda q, k, R: favor_of(q, k, R, -1, -2), "changes no weight"),
        (lambda q, k, R: favor_of(q, k, R, -1, (-2, -1))[::-1], "changes no weight"),
        (lambda q, k, R: favor_of(q, k, R, (-2, -1), (-2, -1)), "neither overflows"),
        (
            lambda q, k, R: (
                favor_of(q, k, R, -1, tuple(range(1 - q.dim(), 0))[-3:])
                if q.dim() == 4
                else favor_of(q, k, R, -1, (-2, -1))
            ),
            "of its own for each sequence",
        ),
    ],
}


def layer(x, W_q, W_k, W_v, W_beta, W_out, f=None, scale=1, nu=1, strength=None):
    """The layer of notebook 7 with a choice of mistakes."""
    f = f or sum_normalize
    q, k = (f(DPFP(nu)(x @ W.mT))[:, :, None] for W in (W_q, W_k))
    beta = (strength or torch.sigmoid)(x @ W_beta.mT)
    y = ops.delta_rule(q, k, (x @ W_v.mT)[:, :, None], beta)[:, :, 0]
    return x + scale * y @ W_out.mT


def layer_of_one_sequence(x, *weights):
    """All sequences share one memory."""
    return layer(x.flatten(0, 1)[None], *weights).view_as(x)


def layer_by_quotient(x, *weights):
    """NaN where the sum is 0."""
    return layer(x, *weights, f=lambda y: y / y.sum(-1, keepdim=True))


def layer_with_softmax(x, W_q, W_k, W_v, W_beta, W_out):
    scores = (x @ W_q.mT) @ (x @ W_k.mT).mT
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return x + weights @ x @ W_v.mT @ W_out.mT


def continued(step, prompt, length, pick=torch.argmax, order=1, cost=1, fresh=False):
    """Greedy tokens with a choice of mistakes."""
    state, text = None, []
    for token in prompt[::order] if order > 0 else prompt.flip(0):
        for _ in range(cost):
            logits, after = step(token, state)
        state = after
    for _ in range(length):
        text.append(pick(logits))
        logits, state = step(text[-1], None if fresh else state)
    return torch.stack(text) if text else prompt[:0]


def continued_by_reading_all(step, prompt, length):
    """Right tokens, but all text is read again for each."""
    text = prompt
    for _ in range(length):
        new = EXERCISES["generate"].reference(step, text, 1)
        text = torch.cat([text, new])
    return text[len(prompt) :]


def ablated(model, tokens, loss, change, restore=True):
    """`change(block)` returns hooks, which are removed unless they stay."""
    losses = []
    for block in model.blocks:
        hooks = change(block)
        losses.append(loss(model, tokens))
        for hook in hooks if restore else ():
            hook.remove()
    return torch.stack(losses)


def hook(module, output):
    return [module.register_forward_hook(lambda m, given, y: output(y))]


def silent(block):
    """Right, too: what the layer adds to x is 0."""
    return hook(block.mixer, torch.zeros_like)


def off(block):
    return hook(block.mixer.to_beta, lambda y: y - torch.inf)


def last_stays_off(model, tokens, loss):
    """Restores each layer only when the next one is tried."""
    losses, hooks = [], []
    for block in model.blocks:
        for each in hooks:
            each.remove()
        hooks = off(block)
        losses.append(loss(model, tokens))
    return torch.stack(losses)


def no_mlp(block):
    return hook(block.contract, torch.zeros_like)


def large_negative_weights(model, tokens, loss):
    """Below 0 only where the sum of x is above 0."""
    losses = []
    for block in model.blocks:
        weight = block.mixer.to_beta.weight
        before = weight.detach().clone()
        weight.data.fill_(-1e9)
        losses.append(loss(model, tokens))
        weight.data.copy_(before)
    return torch.stack(losses)


def cross_entropy(model, tokens):
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:])


WRONG |= {
    "fast_weight_layer": [
        (lambda x, *w: x, "half of v"),
        (lambda x, *w: layer(x, *w, scale=2), "half of v"),
        (lambda x, *w: 2 * layer(x, *w), "adds what it reads"),
        (lambda x, *w: layer(x, *w, strength=torch.exp), "half of v"),
        (
            lambda x, *w: layer(x, *w, strength=lambda b: b.clamp(0, 1)),
            "half of v",
        ),
        (
            lambda x, *w: layer(x, *w, strength=lambda b: 1 - torch.sigmoid(b)),
            "writes with the strength",
        ),
        (lambda x, *w: layer(x, *w, f=l2_normalize), "half of v"),
        (lambda x, *w: layer(x, *w, nu=2), "half of v"),
        (lambda x, q, k, *w: layer(x, k, q, *w), "follows the delta rule"),
        (layer_with_softmax, "does not depend on the lengths"),
        (layer_of_one_sequence, "half of v"),
        (layer_by_quotient, "writes nothing under a key without features"),
    ],
    "generate": [
        (lambda *given: torch.stack([]), "returns the new tokens"),
        (
            lambda *given: EXERCISES["generate"].reference(*given).double(),
            "returns the new tokens",
        ),
        (
            lambda *given: continued(*given, pick=torch.argmin),
            "begins with the most likely",
        ),
        (lambda *given: continued(*given, order=-1), "begins with the most likely"),
        (lambda *given: continued(*given, order=2), "begins with the most likely"),
        (lambda *given: continued(*given, fresh=True), "continues from its own"),
        (lambda *given: continued(*given, cost=2), "one step per token"),
        (continued_by_reading_all, "one step per token"),
        (
            lambda step, prompt, length: continued(step, prompt, max(length, 1)),
            "works for any lengths",
        ),
    ],
    "ablate": [
        (lambda model, tokens, loss: loss(model, tokens), "one loss per layer"),
        (
            lambda model, tokens, loss: torch.stack(
                [loss(model, tokens) for _ in model.blocks]
            ),
            "of the only layer",
        ),
        (lambda *given: ablated(*given, no_mlp), "of the only layer"),
        (
            lambda *given: ablated(*given, lambda block: off(block) + no_mlp(block)),
            "of the only layer",
        ),
        (large_negative_weights, "of the only layer"),
        (lambda *given: ablated(*given, off).flip(0), "one layer at a time"),
        (
            lambda *given: ablated(*given, off).cumsum(0),
            "one layer at a time",
        ),
        (last_stays_off, "leaves the model as it was"),
        (
            lambda model, tokens, loss: ablated(model, tokens, cross_entropy, off),
            "measures the loss that it was given",
        ),
    ],
}
#: Answers that are numbers or tokens, or change a model, have no gradients.
NO_GRADIENT = ("useful_nu", "dot_capacity", "generate", "ablate")
for name, answers in WRONG.items():
    first = EXERCISES[name].properties[0].__doc__
    answers += [
        (lambda *arguments: None, first),
        (lambda *arguments: 3.0, first),
        (lambda *arguments: 1 / 0, first),
        (lambda *arguments: torch.tensor(1.0), first),
        (lambda: None, first),
        (leave, first),
    ]
GRADIENT = {
    "sum_normalize": "gives zero where the sum is zero, and a gradient",
    "running_step": "lets gradients through",
}
for name in WRONG.keys() - NO_GRADIENT:
    reference = EXERCISES[name].reference
    # Gradients come last, but for those of special cases.
    last = GRADIENT.get(name) or EXERCISES[name].properties[-1].__doc__
    WRONG[name] += [
        (torch.no_grad()(reference), last),
        # Only one argument is cut off.
        (lambda x, *more, f=reference: f(x.detach(), *more), last),
    ]
CASES = [(name, *case) for name, cases in WRONG.items() for case in cases]


@pytest.mark.parametrize(("name", "answer", "where"), CASES)
def test_wrong_answers_fail_at_their_property(name, answer, where):
    right, text = verdict(answer, name)
    assert not right
    first = text[text.index("✗") :]
    assert where in first.splitlines()[0]
    assert text.count("✗") == 1
    assert "Traceback" not in text
    assert len(text.splitlines()[-2].strip()) > 20  # says something
    with pytest.raises(AssertionError, match=name):
        assert_correct(answer, name)


def test_messages_carry_numbers_and_causes():
    _, text = verdict(lambda W, k, v: None, "write")
    assert "returned None. Does it end in a `return`?" in text
    _, text = verdict(lambda W, k, v: W.T, "write")
    assert "shape [3, 5], got [5, 3]" in text
    _, text = verdict(lambda W, k, v: 1 / 0, "write")
    assert "raised ZeroDivisionError: division by zero" in text
    _, text = verdict(lambda x: x / 2, "sum_normalize")
    assert "expected 1, got" in text


@pytest.mark.parametrize(
    ("name", "misconception"),
    [(name, each) for name, e in EXERCISES.items() for each in e.misconceptions],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_misconceptions_are_named(name, misconception):
    """What it says is its docstring, also if written in another way."""
    said = " ".join(misconception.__doc__.split())
    assert said.endswith(".") and len(said) < 160

    def other(*arguments):
        given = (x + 0 if torch.is_tensor(x) else x for x in arguments)
        result = misconception(*given)
        pair = isinstance(result, tuple)
        return tuple(x * 1 for x in result) if pair else result * 1

    for answer in (misconception, other):
        right, text = verdict(answer, name)
        assert not right and said in text
        with pytest.raises(AssertionError, match=re.escape(said[:40])):
            assert_correct(answer, name)


def test_a_mistake_that_nobody_makes_has_no_name():
    _, text = verdict(lambda W, k, v, beta: W + 3 * outer(v, k), "delta_step")
    assert not any(
        " ".join(m.__doc__.split()) in text
        for m in EXERCISES["delta_step"].misconceptions
    )


def test_the_line_that_raised_is_shown():
    def delta_step(W, k, v, beta):
        old = W @ k
        return W + torch.outer(old, missing)  # noqa: F821

    line = delta_step.__code__.co_firstlineno + 2
    _, text = verdict(delta_step)
    assert f"line {line}, `return W + torch.outer(old, missing)" in text
    assert "raised NameError: name 'missing' is not defined" in text


def numpy_features(x, R):
    return torch.from_numpy(random_features(x, R).numpy())


def numpy_products(x, nu):
    return torch.from_numpy(products(x, range(1, nu + 1)).numpy())


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("positive_features", numpy_features),
        ("dpfp", numpy_products),
        ("dpfp", functools.partial(numpy_products)),
    ],
)
def test_the_line_that_raised_is_that_of_the_learner(name, answer):
    text = verdict(answer, name)[1]
    assert ".numpy())` raised RuntimeError: Can't call numpy()" in text
    assert "lets gradients through" in text


def mean_step_by_step(k, v, w):
    log_sum, mean = torch.full_like(k[:, 0], -torch.inf), torch.zeros_like(v[:, 0])
    for i, bias in enumerate(w):
        step = EXERCISES["running_step"].reference
        log_sum, mean = step(log_sum, mean, k[:, i] + bias, v[:, i])
    return mean


def step_that_keeps_the_mean(log_sum, mean, k, v):
    """Where both are -inf, returns the mean, whose gradient is 1 there."""
    nothing = (log_sum == -torch.inf) & (k == -torch.inf)
    log_sum, k = log_sum.masked_fill(nothing, 0), k.masked_fill(nothing, 0)
    moved = mean + torch.sigmoid(k - log_sum) * (v - mean)
    total = torch.logaddexp(log_sum, k).masked_fill(nothing, -torch.inf)
    return total, torch.where(nothing, mean, moved)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("running_step", step_that_keeps_the_mean),
        ("mean_of", mean_step_by_step),
        ("useful_nu", lambda d: np.int64(d - 1)),
        ("dot_capacity", lambda d, nu: 2 * d * np.minimum(nu, d - 1)),
        ("merge_memory", lambda states, w: torch.tensordot(w.softmax(0), states, 1)),
        ("fast_weight_layer", layer),
        ("generate", continued),
        ("ablate", lambda *given: ablated(*given, silent)),
    ],
)
def test_unusual_right_answers(name, answer):
    assert_correct(answer, name)


def test_float32_inside_is_said_as_such():
    def write(W, k, v):
        return (W.float() + outer(v, k).float()).double()

    _, text = verdict(write)
    assert "few digits of float32" in text
    _, text = verdict(lambda W, k, v: (W + outer(v, k)).float(), "write")
    assert "float64 like the arguments, got float32" in text
    _, text = verdict(lambda W, k, v: (W + outer(v, k)) * (1 + 1e-7), "write")
    assert "float32" not in text
    expected, got = re.search(r"expected (\S+), got (\S+) ", text).groups()
    assert expected != got


def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(checker, "SECONDS", 0.5)

    def write(W, k, v):
        while True:
            with contextlib.suppress(Exception):
                v = v + 0

    before = threading.active_count()
    _, text = verdict(write)
    assert "took more than 0.5 seconds, and was stopped at line" in text
    assert "Is there a loop that never ends?" in text
    assert threading.active_count() == before
    # A call that Python cannot interrupt is left alone.
    start = time.monotonic()
    assert not verdict(lambda W, k, v: time.sleep(4), "write")[0]
    assert time.monotonic() - start < 3


def test_modes_of_the_caller_do_not_matter():
    with torch.no_grad():
        assert verdict(EXERCISES["write"].reference)[0]
    with torch.inference_mode():
        assert verdict(EXERCISES["write"].reference)[0]
    with torch.autocast("cpu"):
        assert verdict(EXERCISES["delta_step"].reference)[0]
    with torch.device("meta"):
        assert verdict(EXERCISES["sum_normalize"].reference)[0]


def test_modes_that_an_answer_leaves_behind_do_not_matter():
    def write(W, k, v):
        torch.set_grad_enabled(False)
        return W + outer(v, k)

    right, text = verdict(write)
    assert not right and "no gradient" in text
    assert torch.is_grad_enabled()


def test_show(capsys):
    for name, exercise in EXERCISES.items():
        figure = show(exercise.reference, name)
        titles = {ax.get_title() for ax in figure.axes}
        assert titles == {"yours", "target", "difference"}
        assert show(lambda *given: None, name) is None
        assert show(lambda *given: torch.zeros(7, 7), name) is None
        assert show(lambda *given: 1 / 0, name) is None
    assert "division by zero" in capsys.readouterr().out


def test_results_of_other_kinds(capsys):
    def kind(change):
        return lambda W, q: change((W @ q[..., None])[..., 0])

    assert show(kind(lambda x: x > 0), "read_memory")
    assert show(kind(lambda x: x + 0j), "read_memory") is None
    assert "complex" in capsys.readouterr().out
    assert show(kind(lambda x: x.nonsense), "read_memory") is None
    assert re.match("Line .* raised AttributeError", capsys.readouterr().out)
    predict("crosstalk", np.float32(0.5))
    assert capsys.readouterr().out == "Your prediction: 0.5.\n"
    for change in (torch.Tensor.to_sparse, lambda x: x.to("meta")):
        text = verdict(kind(change), "read_memory")[1]
        assert "✗ with a one-hot query" in text and "Your result led to" in text


@pytest.mark.parametrize("thing", [None, 3, "delta_step", torch.zeros(2)])
def test_check_of_something_else(thing):
    right, text = verdict(thing)
    assert not right
    assert "your function itself" in text
    right, text = verdict(thing, "delta_step")
    assert not right
    assert "your function itself" in text


def test_every_exercise_has_wrong_answers():
    assert WRONG.keys() == EXERCISES.keys()


def test_unknown_names():
    def delta(W, k, v, beta):
        return W

    right, text = verdict(delta)
    assert not right
    assert "no exercise named 'delta'" in text
    assert all(name in text for name in EXERCISES)
    with pytest.raises(AssertionError, match="no exercise"):
        assert_correct(delta)


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_and_solution(name, capsys):
    exercise = EXERCISES[name]
    for number, text in enumerate(exercise.hints, start=1):
        hint(name, number)
        assert text in capsys.readouterr().out
    for number in (0, len(exercise.hints) + 1, "x"):
        hint(name, number)
        assert f"{len(exercise.hints)} hints" in capsys.readouterr().out
    hint("nothing")
    assert "no exercise" in capsys.readouterr().out

    solution(name)
    source = capsys.readouterr().out
    assert f"def {exercise.reference.__name__}(" in source
    # The solution is the package's function, to the letter.
    assert exercise.reference.__module__.startswith("fwlab.")
    answer = {"__name__": name}
    exec(f"def {name}(): ...", answer)
    solution(answer[name])
    assert capsys.readouterr().out == source


# --- Predictions ---------------------------------------------------------


def test_a_prediction_is_noted_and_answered(capsys):
    predict("same_key", "b")
    assert "Your prediction: v2." in capsys.readouterr().out
    reveal("same_key", "v1 + v2")
    said = " ".join(capsys.readouterr().out.split())
    assert "The answer: v1 + v2." in said and "You predicted v2. That is what" in said
    predict("same_key", "v1 + v2")
    reveal("same_key")
    assert "You predicted v1 + v2: right." in capsys.readouterr().out

    predict("crosstalk", 0)
    reveal("crosstalk", 0.88)
    said = " ".join(capsys.readouterr().out.split())
    assert "You predicted 0, off by 0.875. A matrix of width 8" in said
    predict("crosstalk", 0.9)
    reveal("crosstalk")
    assert "You predicted 0.9: right." in capsys.readouterr().out
    predict("crosstalk", 7)
    reveal("crosstalk")
    assert capsys.readouterr().out.endswith("You predicted 7, off by 6.12.\n")


def test_without_a_prediction_the_question_is_asked(capsys):
    predict("same_key", "a")
    predict("same_key", ...)
    said = capsys.readouterr().out
    assert "  c) v1 + v2\n" in said
    assert QUESTIONS["same_key"].text in " ".join(said.split())
    reveal("same_key")
    assert "You predicted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("same_key", "z", "expected one of a, b, c, d, got 'z'"),
        ("same_key", 3, "expected one of a, b, c, d, got 3"),
        ("crosstalk", "a", "expected a number, got 'a'"),
        ("crosstalk", True, "expected a number, got True"),
        ("nothing", 1, "no question named 'nothing'"),
    ],
)
def test_answers_that_are_none(name, answer, said, capsys):
    predict(name, answer)
    assert said in capsys.readouterr().out


def test_a_notebook_that_finds_something_else_fails():
    with pytest.raises(AssertionError, match=r"expected to find 0\.875, got 0\.5"):
        reveal("crosstalk", 0.5)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
def test_questions(question):
    assert question.text.endswith("?") and question.because.endswith(".")
    assert is_right(question, question.truth)
    assert question.tempting
    for wrong in question.tempting:
        assert not is_right(question, wrong)
        assert not question.tempting[wrong].endswith(".")
    if question.choices:
        assert question.truth in question.choices
        assert question.tempting.keys() == set(question.choices) - {question.truth}
    else:
        assert question.tolerance > 0


def test_a_quiz_answers_at_once(capsys):
    quiz("same_key", ...)
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "z")
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "c")
    assert "You predicted v1 + v2: right." in capsys.readouterr().out
