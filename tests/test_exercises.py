"""Right answers pass; wrong ones fail where they should, kindly."""

import contextlib
import functools
import inspect
import io
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

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
from fwlab.feature_maps import DPFP, sum_normalize

#: Seconds that nothing here takes, also beside other work.
LONG = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(checker, "SECONDS", LONG)


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


favor = EXERCISES["favor"].reference
feedback = EXERCISES["feedback_attention"].reference
random_features = EXERCISES["positive_features"].reference


def outer(v, k):
    return v[..., :, None] * k[..., None, :]


def held(W, k):
    return (W * k[..., None, :]).sum(-1)


def b(beta):
    return beta[..., None]


def delta(W, k, v, beta):
    return W + outer(b(beta) * (v - held(W, k)), k)


def unit(k):
    return k / k.norm(dim=-1, keepdim=True)


def gated(W, k, v, beta):
    return (1 - b(beta)[..., None]) * W + outer(b(beta) * v, k)


def write_in_place(W, k, v):
    W += outer(v, k)
    return W


def weigh(weights, states):
    return torch.einsum("l,l...->...", weights, states)


def half_square(found, wanted):
    return (found - torch.eye(found.shape[-1]).double()[wanted]).square() / 2


def held_last(keys, values, symbols):
    """Step by step, as a learner would."""
    held = torch.full((len(keys), symbols), -1)
    for t in range(keys.shape[1]):
        held[torch.arange(len(keys)), keys[:, t]] = values[:, t]
    return held


def scattered(keys, values, symbols):
    return torch.full((len(keys), symbols), -1).scatter_(1, keys, values)


def assigned(keys, values, symbols):
    held = torch.full((len(keys), symbols), -1)
    held[torch.arange(len(keys))[:, None], keys] = values
    return held


def latest(keys, values, symbols):
    """With a scatter in which the order does not matter."""
    steps = torch.arange(keys.shape[1]).expand_as(keys)
    last = torch.full((len(keys), symbols), -1)
    last = last.scatter_reduce(1, keys, steps, "amax")
    return torch.where(last < 0, -1, values.gather(1, last.clamp(min=0)))


def leave(*arguments):
    raise SystemExit("bye")


def softmax_mean(k, v, w):
    return (torch.softmax(k + w, 1) * v).sum(1)


def quotient(e, v):
    return (e * v).sum(1) / e.sum(1)


def plain_step(log_sum, mean, k, v):
    total = torch.logaddexp(log_sum, k)
    return total, (log_sum - total).exp() * mean + (k - total).exp() * v


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
    weights = weighted(q, k, 1 + 0 * v[..., :1])
    return weighted(q, k, v) / (weights + epsilon)


def r_of(x):
    return torch.cat([x, -x], -1).relu()


def products(x, shifts, times=torch.mul):
    r = r_of(x)
    return torch.cat([times(r, r.roll(-j, -1)) for j in shifts], -1)


def blocks(q, k, v, chunk, decay=1.0, take=None):
    """The sum rule in chunks, with a choice of mistakes."""
    W = v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    y = []
    for Q, K, V in zip(*(x.split(chunk, -2) for x in (q, k, v)), strict=True):
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ V)
        W = decay * W + (
            V.mT @ K if take is None else V[..., take, :].mT @ K[..., take, :]
        )
    return torch.cat(y, -2)


def flat(*parts):
    """All sequences as one; the last part may have one number for each step."""
    return (x.reshape(-1, *x.shape[parts[0].dim() - 1 :]) for x in parts)


def all_pairs(q, k, v, chunk):
    """Right, from the matrix of all pairs of steps."""
    return (q @ k.mT).tril() @ v


def increments(k, v, beta, power=1, last=None):
    """The triangular system, with a choice of mistakes."""
    b = beta[..., None]
    A = (b * (k @ k.mT) ** power).tril(-1)
    if last is not None:  # only the last few steps
        A = A.triu(-last)
    return torch.linalg.solve_triangular(A, b * v, upper=False, unitriangular=True)


def states(k, v, beta, every=1):
    """W before each `every`-th step."""
    W, found = v.new_zeros(v.shape[1], k.shape[1]), []
    for t in range(len(k)):
        if t % every == 0:
            found.append(W)
        W = W + outer(beta[t] * (v[t] - held(W, k[t])), k[t])
    return found


def back(q, k, v, beta, dy, before):
    """The backward pass of the delta rule from W before each step."""
    dW = 0 * before(len(q) - 1)
    found = [torch.empty_like(x) for x in (q, k, v, beta)]
    for t in reversed(range(len(q))):
        old = before(t)
        u = beta[t] * (v[t] - old @ k[t])
        dW = dW + outer(dy[t], q[t])
        du = dW @ k[t]
        found[0][t] = dy[t] @ (old + outer(u, k[t]))
        found[1][t] = u @ dW - beta[t] * du @ old
        found[2][t], found[3][t] = beta[t] * du, du @ (v[t] - old @ k[t])
        dW = dW - beta[t] * outer(du, k[t])
    return tuple(found)


def from_kept_states(q, k, v, beta, dy):
    """Right, with W of every step."""
    kept = states(k, v, beta)
    return back(q, k, v, beta, dy, kept.__getitem__)


def from_some_states(q, k, v, beta, dy, every=8):
    """Right: a state every few steps, and forward again from there."""
    kept = states(k, v, beta, every)

    def before(t):
        W, first = kept[t // every], t // every * every
        for i in range(first, t):
            W = W + outer(beta[i] * (v[i] - held(W, k[i])), k[i])
        return W

    return back(q, k, v, beta, dy, before)


def from_autograd(q, k, v, beta, dy):
    """Right, but autograd keeps W of every step."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, beta)]
    a, b, c, d = leaves
    W, y = v.new_zeros(v.shape[1], k.shape[1]), []
    for t in range(len(q)):
        W = W + outer(d[t] * (c[t] - held(W, b[t])), b[t])
        y.append(held(W, a[t]))
    return torch.autograd.grad((torch.stack(y) * dy).sum(), leaves)


def weighted(q, k, v):
    return (q @ k.mT).tril() @ v


def last_pairs(q, k, v):
    """Forgets what is more than three steps back."""
    return (q @ k.mT).tril().triu(-3) @ v


def fading(q, k, v):
    steps = torch.arange(q.shape[-2]).double()
    return ((q @ k.mT) * 0.9 ** (steps[:, None] - steps).clamp(min=0)).tril() @ v


def corrected(q, k, v):
    """The delta rule."""
    W, read = torch.zeros(v.shape[-1], k.shape[-1]).double(), []
    for q_i, k_i, v_i in zip(q, k, v, strict=True):
        W = W + outer(v_i - W @ k_i, k_i)
        read.append(W @ q_i)
    return torch.stack(read)


def loop_over_the_first_dimension(q, k, v):
    W, read = 0, []
    for q_i, k_i, v_i in zip(q, k, v, strict=True):
        W = W + outer(v_i, k_i)
        read.append(held(W, q_i))
    return torch.stack(read)


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


def continued(step, prompt, length, cost=1, fresh=False):
    """Greedy tokens with a choice of mistakes."""
    state, text = None, []
    for token in prompt:
        for _ in range(cost):
            logits, after = step(token, state)
        state = after
    for _ in range(length):
        text.append(logits.argmax())
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


#: Answers that are no misconceptions, by the property that each fails at: words
#: that only that property has.
WRONG = {
    "write": {
        "stores a value in an empty memory": [lambda W, k, v: W],
        "any leading dimensions": [lambda W, k, v: W + torch.outer(v, k)],
        "of the shape": [write_in_place],
    },
    "sum_normalize": {
        "of the shape": [lambda x: x / x.sum(-1)],
        "features of either sign": [
            lambda x: x / x.sum(-1, keepdim=True).abs(),
            by_own_size,
        ],
        "gives zero where": [
            lambda x: torch.nan_to_num(x / x.sum(-1, keepdim=True)),
            one_bad_key_spoils_all,
        ],
        "every key by itself": [by_largest_sum],
    },
    "delta_step": {
        "any leading dimensions": [
            lambda W, k, v, beta: W + torch.outer(beta * (v - W @ k), k),
            # Right for equal leading dimensions only by accident of broadcasting.
            lambda W, k, v, beta: W + beta * outer(v - held(W, k), k),
        ],
    },
    "mean_of": {
        "of the shape": [lambda k, v, w: torch.softmax(k + w, 1) * v],
        "does not overflow": [
            lambda k, v, w: quotient((k.clamp(-60, 30) + w).exp(), v)
        ],
        "leaves out keys of -inf": [mask_by_number],
        "no key is visible": [lambda k, v, w: torch.nan_to_num(softmax_mean(k, v, w))],
    },
    "running_step": {
        "of the shape": [
            lambda log_sum, mean, k, v: mean,
            lambda log_sum, mean, k, v: (log_sum, mean, k),
            lambda log_sum, mean, k, v: (log_sum, 3),
            lambda log_sum, mean, k, v: (log_sum[0], mean),
        ],
        "starts from nothing": [step_by_number],
        "where the key is -inf": [
            lambda *given: [x.nan_to_num() for x in plain_step(*given)],
            skip_all,
        ],
        "gradients without NaN": [step_replaced_afterwards],
    },
    "merge_memory": {
        "softmax of the logits": [
            lambda s, w: weigh((w / 2).softmax(0), s),
            lambda s, w: weigh(w.softmax(0)[:4], s[:4]),
        ],
        "even if other dimensions have the same size": [
            lambda s, w: (
                weigh(w.softmax(0), s)
                if s.shape[0] != s.shape[1]
                else (w.softmax(0) * s).sum(0)
            )
        ],
    },
    "feedback_attention": {
        "the mean of the values": [lambda q, k, v, P: v[:, 0] if len(v[0]) else 0 * q],
        "scaled dot-product": [lambda q, k, v, P: v.mean(1)],
        "adds both scores": [
            lambda q, k, v, P: feedback(
                q, k + (k == 0).all() * 1e-9, v, P * (1 if not k.any() else 2)
            )
        ],
        "without any memory": [
            lambda q, k, v, P: feedback(q, k, v, P) / (0 if v.shape[1] == 0 else 1)
        ],
        "large scores": [lambda q, k, v, P: feedback(q.clamp(-9, 9), k, v, P)],
    },
    "read_memory": {
        "the sum of the columns times its entries": [
            lambda W, q: W @ q / q.sum(),
            lambda W, q: W @ q.abs(),
        ],
        "any leading dimensions": [lambda W, q: W @ q],
    },
    "dpfp": {
        "in the plane": [lambda x, nu: products(x, range(1, nu + 1), torch.minimum)],
        "in the order of Eq. 37": [lambda x, nu: products(x, range(nu, 0, -1))],
        "at distances 1 to nu": [lambda x, nu: products(x, [1] * nu)],
    },
    "useful_nu": {
        "returns an integer": [lambda d: float(d - 1)],
        "for any width": [lambda d: 1, lambda d: max(d - 1, 1)],
    },
    "dot_capacity": {
        "returns an integer": [lambda d, nu: 2 * d * nu / 1],
        "counts one dimension for each feature": [lambda d, nu: (2 * d) ** nu],
        "stops growing": [
            lambda d, nu: 2 * d * min(nu, d),
            lambda d, nu: 2 * d * max(min(nu, d - 1), 1),
        ],
    },
    "normaliser": {
        "if all values are equal": [lambda q, k, v: v.cumsum(-2)],
        "does not look at later": [
            lambda q, k, v: attention(q, k / k.sum(-2, keepdim=True), v)
        ],
        "follows Eq. 19": [lambda q, k, v: v, lambda q, k, v: attention(k, q, v)],
        "the scale of the features": [lambda q, k, v: attention(q, k, v, 1e-10)],
    },
    "positive_features": {
        "estimates exp": [
            lambda x, R: random_features(x, R).sort(-1).values,
            lambda x, R: random_features(x.abs(), R),
        ],
        "follows Eqs. 31": [lambda x, R: random_features(x, R).clamp(max=1)],
    },
    "favor": {
        "changes no weight": [
            lambda q, k, R: favor(k, q, R),
            lambda q, k, R: favor(q, k, R)[::-1],
        ],
    },
    "chunked_sum": {
        "never has the matrix of all pairs": [all_pairs],
        "with one chunk for all": [lambda q, k, v, chunk: blocks(k, q, v, chunk)],
        "earlier chunks": [
            lambda q, k, v, chunk: blocks(q, k, v, chunk, 0.5),
            lambda q, k, v, chunk: blocks(q, k, v, chunk, take=slice(-1, None)),
        ],
        "takes a shorter last chunk": [
            lambda q, k, v, chunk: blocks(q, k, v, chunk if len(q) % chunk == 0 else 0)
        ],
        "any leading dimensions": [
            # All sequences share one memory.
            lambda *given: blocks(*flat(*given[:3]), given[3]).view_as(given[2])
        ],
    },
    "triangular": {
        "with orthogonal keys": [lambda k, v, beta: increments(k, v, beta, 0)],
        "the second removes": [lambda k, v, beta: b(beta) * v],
        "step-by-step": [
            lambda k, v, beta: increments(k, v, beta, 2),
            lambda k, v, beta: increments(k, v, beta, last=1),
        ],
        "where beta is 0": [lambda k, v, beta: increments(k, v, beta.clamp(min=1e-3))],
        "any leading dimensions": [
            lambda *given: increments(*flat(*given)).view_as(given[1])
        ],
    },
    "recomputing_backward": {
        "does not keep W for every step": [from_kept_states, from_autograd],
        "returns dq, dk, dv and dbeta": [lambda q, k, v, beta, dy: (q, k, v)],
        "dq is right": [
            # the first W for all steps
            lambda q, k, v, beta, dy: back(
                q, k, v, beta, dy, lambda t: 0 * outer(v[0], k[0])
            )
        ],
    },
    "linear_attention": {
        "does not look at later steps": [
            lambda q, k, v: (q @ k.mT).triu() @ v,
            lambda q, k, v: weighted(q, k - k.mean(-2, True), v),
        ],
        "still reads the first value": [last_pairs, fading],
        "the first value, weighted by": [lambda q, k, v: (q @ k.mT).tril().abs() @ v],
        "weights the value of each step": [corrected],
        "any leading dimensions": [
            lambda q, k, v: (q @ k.transpose(0, 1)).tril() @ v,
            loop_over_the_first_dimension,
        ],
    },
    "predict_error": {
        "agrees with memories": [
            lambda S, d: min(1, (S - 1) / d),
            lambda S, d: float("nan"),
        ],
        "for any S and d": [lambda S, d: (S - 1) / (d + 1e-3)],
    },
    "gradient_step": {
        "changes nothing": [lambda W, k, v, beta: W + outer(b(beta) * v, k)],
        "makes the loss smaller": [lambda W, k, v, beta: W],
        "moves by beta times": [lambda W, k, v, beta: W + outer(v - held(W, k), k)],
        "in each memory": [
            lambda W, k, v, beta: W + torch.outer(beta * (v - W @ k), k),
            # One step for the mean over all memories.
            lambda W, k, v, beta: (
                W + outer(b(beta) * (v - held(W, k)), k) / beta.numel()
            ),
        ],
    },
    "gated_step": {
        "in an empty memory": [
            lambda W, k, v, beta: gated(W, k, v, torch.sigmoid(beta))
        ],
        "keys of any length": [lambda W, k, v, beta: gated(W, unit(k), v, beta)],
        "any leading dimensions": [
            lambda W, k, v, beta: (1 - beta) * W + beta * outer(v, k)
        ],
    },
    "stable_beta": {
        "one number for each": [
            lambda phi: 2 / phi.square().sum(-1, keepdim=True),
            lambda phi: 2 / phi.square().sum(),
        ],
        "begin to blow up": [lambda phi: 0 * phi[..., 0] + 2],
        "each key its own": [lambda phi: 2 / (phi.square().sum(-1) + 1e-12)],
        "a key of zeros": [
            lambda phi: (2 / phi.square().sum(-1)).nan_to_num(posinf=0),
            lambda phi: (
                2 / phi.square().sum(-1)
                if (phi != 0).any(-1).all()
                else 0 * phi.sum(-1) + torch.inf
            ),
        ],
    },
    "l2_write": {
        "mixes the old value": [lambda W, k, v, beta: outer(v, unit(k))],
        "of orthogonal keys alone": [lambda W, k, v, beta: gated(W, unit(k), v, beta)],
        "the scale of the key": [
            lambda W, k, v, beta: delta(W, F.normalize(k, dim=-1), v, beta)
        ],
        "any leading dimensions": [
            lambda W, k, v, beta: delta(W, k / k.norm(), v, beta)
        ],
        "changes nothing for a key of zeros": [
            lambda W, k, v, beta: delta(W, unit(k).nan_to_num(), v, beta),
            lambda W, k, v, beta: (
                W if (k == 0).all(-1).any() else delta(W, unit(k), v, beta)
            ),
        ],
    },
    "retrieval_loss": {
        "one number": [
            lambda f, w: half_square(f, w).sum(-1),
            lambda f, w: half_square(f, w).sum(-1).mean().item(),
        ],
        "is ½": [lambda f, w: (f.argmax(-1) != w).double().mean()],
        "is 1 if reading returns another value": [
            lambda f, w: (1 - f.gather(-1, w[..., None])).square().mean() / 2
        ],
        "is 0 if": [lambda f, w: half_square(f.softmax(-1), w).sum(-1).mean()],
        "is the mean over queries": [lambda f, w: half_square(f, w).sum(-1).median()],
    },
    "capacity": {
        "returns a number from 0": [lambda S, features: str(features)],
        "is a quarter": [lambda S, features: 0.5 * max(0, 1 - (features / S) ** 2)],
        "follows the law": [
            lambda S, features: 0.25 * (features < S),
            lambda S, features: min(0.25, max(0, 0.5 - features / S / 2)),
        ],
    },
    "make_batch": {
        "returns integers": [
            lambda *given: held_last(*given).double(),
            lambda *given: held_last(*given).tolist(),
        ],
        "if each came once": [
            lambda k, v, n: held_last(k[:, :-1], v[:, :-1], n),
            lambda *given: torch.where(held_last(*given) > 0, held_last(*given), -1),
        ],
        "keeps sequences of any length apart": [
            lambda k, v, n: held_last(k[:1].expand_as(k), v[:1].expand_as(k), n)
        ],
        "the order in which one call writes": [scattered, assigned],
    },
    "fast_weight_layer": {
        "half of v": [
            lambda x, *w: layer(x, *w, scale=2),
            lambda x, *w: layer(x, *w, nu=2),
            layer_of_one_sequence,
        ],
        "writes with the strength": [
            lambda x, *w: layer(x, *w, strength=lambda b: 1 - torch.sigmoid(b))
        ],
        "follows the delta rule": [lambda x, q, k, *w: layer(x, k, q, *w)],
        "does not depend on the lengths": [layer_with_softmax],
        "writes nothing under a key without features": [layer_by_quotient],
        "any sizes, and long sequences": [
            # begins again after 64 steps
            lambda x, *w: torch.cat([layer(part, *w) for part in x.split(64, 1)], 1)
        ],
    },
    "generate": {
        "the new tokens": [
            lambda *given: EXERCISES["generate"].reference(*given).double()
        ],
        "begins with the most likely": [lambda f, x, n: continued(f, x.flip(0), n)],
        "continues from its own": [lambda *given: continued(*given, fresh=True)],
        "one step per token": [
            lambda *given: continued(*given, cost=2),
            continued_by_reading_all,
        ],
        "works for any lengths": [
            lambda step, prompt, length: continued(step, prompt, max(length, 1))
        ],
    },
    "ablate": {
        "of the only layer": [
            lambda *given: ablated(*given, no_mlp),
            large_negative_weights,
        ],
        "one layer at a time": [lambda *given: ablated(*given, off).flip(0)],
        "leaves the model as it was": [last_stays_off],
        "measures the loss that it was given": [
            lambda model, tokens, loss: ablated(model, tokens, cross_entropy, off)
        ],
    },
}
#: No results at all; what every exercise looks at first.
NONE = [
    lambda *arguments: None,
    lambda *arguments: 3.0,
    lambda *arguments: 1 / 0,
    lambda *arguments: torch.tensor(1.0),
    lambda: None,
    leave,
]
#: The property that looks at gradients; others do so last.
GRADIENT = {"sum_normalize": "gives zero where", "running_step": "lets gradients"}
#: Answers that are numbers or tokens, change a model, or need no gradient.
NO_GRADIENT = {
    *("useful_nu", "dot_capacity", "predict_error", "capacity", "make_batch"),
    *("generate", "ablate", "gradient_step", "stable_beta", "recomputing_backward"),
}


def the(name, where):
    """The property with these words."""
    (found,) = (p for p in EXERCISES[name].properties if where in p.__doc__)
    return found


def of_gradients(name):
    """The property that looks at gradients."""
    last = EXERCISES[name].properties[-1]
    return the(name, GRADIENT[name]) if name in GRADIENT else last


def fault(name, answer, holds, said=""):
    """Nothing, if an answer fails first at this property, and is told so kindly."""
    right, text = verdict(answer, name)
    why = ["", "", *text.splitlines()][-2].strip()
    one = not right and text.count("✗") == 1 and f"✗ {holds.__doc__.strip()}\n" in text
    if one and said in text and "Traceback" not in text and len(why) > 20:
        return []
    line = answer.__code__.co_firstlineno
    return [f"{name}, line {line}: expected ✗ {holds.__doc__}, {said}, got\n{text}"]


def refused(answer, name, said=""):
    """Whether `assert_correct` says the same."""
    with pytest.raises(AssertionError) as raised:
        assert_correct(answer, name)
    return said in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail_at_their_property(name):
    faults = []
    for where, answers in WRONG[name].items():
        for answer in answers:
            faults += fault(name, answer, the(name, where))
    assert not faults, "\n".join(faults)
    assert refused(answer, name)


def test_what_is_no_result_is_said_first():
    faults = []
    for name, exercise in EXERCISES.items():
        for answer in NONE:
            faults += fault(name, answer, exercise.properties[0])
    assert not faults, "\n".join(faults)


def test_right_numbers_without_gradients_fail():
    """Also if only one argument is cut off."""
    faults = []
    for name in EXERCISES.keys() - NO_GRADIENT:
        right = EXERCISES[name].reference
        cut = lambda x, *more, right=right: right(x.detach(), *more)  # noqa: E731
        for answer in (torch.no_grad()(right), cut):
            faults += fault(name, answer, of_gradients(name))
    assert not faults, "\n".join(faults)


def written_otherwise(answer):
    """The same numbers from other operations."""

    def other(*arguments):
        result = answer(*(x + 0 if torch.is_tensor(x) else x for x in arguments))
        return tuple(x * 1 for x in result) if type(result) is tuple else result * 1

    return other


def test_misconceptions_fail_at_their_property_and_are_named():
    """What is said is the docstring, also if it is written in another way."""
    faults = []
    for name, exercise in EXERCISES.items():
        for misconception, holds in exercise.misconceptions.items():
            said = " ".join(misconception.__doc__.split())
            faults += fault(name, misconception, holds, said)
            if not (said.endswith(".") and len(said) < 160):
                faults.append(f"{name}, {misconception.__name__}: {said}")
            otherwise = written_otherwise(misconception)
            assert refused(otherwise, name, said), misconception.__name__
    assert not faults, "\n".join(faults)


def test_every_property_is_failed_by_some_answer():
    """By the tests above, if their lists name them all."""
    for name, exercise in EXERCISES.items():
        named = {exercise.properties[0], *exercise.misconceptions.values()}
        named |= {the(name, where) for where in WRONG[name]}
        if name not in NO_GRADIENT:
            named.add(of_gradients(name))
        missing = [p.__doc__ for p in exercise.properties if p not in named]
        assert not missing, f"{name}: nothing fails at {missing}"


def test_messages_carry_numbers_and_causes():
    _, text = verdict(lambda W, k, v: None, "write")
    assert "returned None. Does it end in a `return`?" in text
    _, text = verdict(lambda W, k, v: W.T, "write")
    assert "shape [3, 5], got [5, 3]" in text
    _, text = verdict(lambda W, k, v: 1 / 0, "write")
    assert "raised ZeroDivisionError: division by zero" in text
    _, text = verdict(lambda x: x / 2, "sum_normalize")
    assert "expected 1, got" in text


def test_a_mistake_that_nobody_makes_has_no_name():
    _, text = verdict(lambda W, k, v, beta: W + 3 * outer(v, k), "delta_step")
    assert not any(
        " ".join(m.__doc__.split()) in text
        for m in EXERCISES["delta_step"].misconceptions
    )


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda e: e.square().sum() / 2, "all right"),
        (lambda e: e.square().sum(), "twice as large"),
        (lambda e: (e * e).mean(-1).sum(), "gradient of mse_loss"),
        (lambda e: -e.square().sum() / 2, "moves up the gradient"),
    ],
)
def test_answers_may_take_gradients(loss, said):
    def gradient_step(W, k, v, beta):
        W = W.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(held(W, k) - v), W)
        return W - b(beta)[..., None] * gradient

    _, text = verdict(gradient_step)
    assert said in text
    assert show(gradient_step) is not None


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


def increments_one_by_one(k, v, beta):
    """Forward substitution by hand."""
    rows = []
    for i in range(k.shape[-2]):
        earlier = (k[..., j, :] * k[..., i, :] for j in range(i))
        held = sum(u * x.sum(-1, True) for u, x in zip(rows, earlier, strict=True))
        rows.append(beta[..., i, None] * (v[..., i, :] - held))
    return torch.stack(rows, -2)


def attention_in_a_loop(q, k, v):
    W, read = torch.zeros_like(outer(v[..., 0, :], k[..., 0, :])), []
    for i in range(q.shape[-2]):
        W = W + outer(v[..., i, :], k[..., i, :])
        read.append(held(W, q[..., i, :]))
    return torch.stack(read, -2)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("running_step", step_that_keeps_the_mean),
        ("mean_of", mean_step_by_step),
        ("useful_nu", lambda d: np.int64(d - 1)),
        ("dot_capacity", lambda d, nu: 2 * d * np.minimum(nu, d - 1)),
        ("merge_memory", lambda states, w: torch.tensordot(w.softmax(0), states, 1)),
        ("recomputing_backward", from_some_states),
        ("chunked_sum", lambda q, k, v, chunk: blocks(q, k, v, min(chunk, 3))),
        ("triangular", increments_one_by_one),
        ("linear_attention", attention_in_a_loop),
        (
            "predict_error",
            lambda S, d: np.float32(0) if S == 1 else np.true_divide(S - 1, d),
        ),
        ("make_batch", held_last),
        ("make_batch", latest),
        (
            "retrieval_loss",
            lambda found, wanted: half_square(found, wanted).sum(-1).mean(),
        ),
        ("capacity", lambda S, features: max(0, S - features) / (2 * S)),
        (
            "capacity",
            lambda S, features: np.float64(features < S) * (1 - features / S) / 2,
        ),
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

    before = set(threading.enumerate())
    _, text = verdict(write)
    assert "took more than 0.5 seconds, and was stopped at line" in text
    assert "Is there a loop that never ends?" in text
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG)
        assert not thread.is_alive()
    # A call that Python cannot interrupt is left alone.
    released = threading.Event()
    assert not verdict(lambda *_: released.wait(LONG), "write")[0]
    (left,) = set(threading.enumerate()) - before
    released.set()
    left.join(LONG)


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


def test_unknown_names():
    def delta(W, k, v, beta):
        return W

    right, text = verdict(delta)
    assert not right
    assert "no exercise named 'delta'" in text
    assert all(name in text for name in EXERCISES)
    with pytest.raises(AssertionError, match="no exercise"):
        assert_correct(delta)


def test_hints(capsys):
    hints = EXERCISES["write"].hints
    for number, text in enumerate(hints, start=1):
        hint("write", number)
        assert text in capsys.readouterr().out
    for number in (0, len(hints) + 1, "x", 1.0, True):
        hint("write", number)
        assert f"{len(hints)} hints" in capsys.readouterr().out
    hint("nothing")
    assert "no exercise" in capsys.readouterr().out


def test_solutions_are_functions_of_the_package(capsys):
    """To the letter."""
    for name, exercise in EXERCISES.items():
        solution(name)
        source = capsys.readouterr().out
        right = exercise.reference
        assert inspect.getsource(right) in source and exercise.hints, name
        assert right.__module__.startswith("fwlab."), name

    def write(): ...

    solution("write")
    source = capsys.readouterr().out
    solution(write)
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


def is_well_formed(question):
    tempting = question.tempting
    if question.choices:
        possible = tempting.keys() | {question.truth} == set(question.choices)
    else:
        possible = question.tolerance > 0
    return (
        possible
        and question.text.endswith("?")
        and question.because.endswith(".")
        and is_right(question, question.truth)
        and tempting
        and not any(is_right(question, wrong) for wrong in tempting)
        and not any(why.endswith(".") for why in tempting.values())
    )


def test_questions():
    assert [n for n, each in QUESTIONS.items() if not is_well_formed(each)] == []


@pytest.mark.parametrize(
    ("truth", "said"),
    [(1 / 6, "0.167"), (1 / 256, "0.00391"), (0.875, "0.875"), (4096.0, "4096")],
)
def test_an_answer_has_at_most_three_digits_of_a_fraction(truth, said):
    assert replace(QUESTIONS["crosstalk"], truth=truth).answer == said


def test_a_quiz_answers_at_once(capsys):
    quiz("same_key", ...)
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "z")
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "c")
    assert "You predicted v1 + v2: right." in capsys.readouterr().out
