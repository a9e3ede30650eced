"""Right answers pass; wrong ones fail where they should, kindly."""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fwlab import ops
from fwlab.exercises import (
    EXERCISES,
    Wrong,
    agrees,
    assert_correct,
    check,
    checker,
    eight_pairs,
    hint,
    properties,
    show,
    solution,
)
from fwlab.exercises.properties import Work
from fwlab.exercises.solutions import chunked_sum, linear_attention, make_batch
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


def printed(name):
    """What `solution` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        solution(name)
    return out.getvalue()


@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_is_right(name):
    right, text = verdict(EXERCISES[name].reference, name)
    assert right
    assert text.count("✓") == len(EXERCISES[name].properties)
    assert "✗" not in text


favor = EXERCISES["favor"].reference
random_features = EXERCISES["positive_features"].reference
delta_in_chunks = EXERCISES["chunked_delta"].reference


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


def half_square(found, wanted):
    return (found - torch.eye(found.shape[-1]).double()[wanted]).square() / 2


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


def plain_step(log_sum, mean, k, v):
    total = torch.logaddexp(log_sum, k)
    return total, (log_sum - total).exp() * mean + (k - total).exp() * v


def one_bad_key_spoils_all(x):
    total = x.sum(-1, keepdim=True)
    return 0 * x if (total == 0).any() else x / total


def unless(x, small):
    """Takes small sums for 0; `small` says which."""
    total = x.sum(-1, keepdim=True)
    small = small(total.abs())
    return torch.where(small, 0, x / torch.where(small, 1, total))


def mask_by_number(k, v, w):
    """The mask is a large negative number, not -inf."""
    masked = k == -torch.inf
    mean = (torch.softmax(k.masked_fill(masked, -1e9) + w, 1) * v).sum(1)
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
    old, new = (log_sum - k).exp(), (k - log_sum).exp()
    moved = (old * mean + v) / (1 + old), (mean + new * v) / (1 + new)
    mean = torch.where(k == -torch.inf, mean, torch.where(k > log_sum, *moved))
    return torch.logaddexp(log_sum, k), mean


def attention(q, k, v, epsilon=0.0, diagonal=0):
    weights = (q @ k.mT).tril(diagonal)
    return weights @ v / (weights.sum(-1, keepdim=True) + epsilon)


def products(x, shifts, times=torch.mul):
    r = torch.cat([x, -x], -1).relu()
    return torch.cat([times(r, r.roll(-j, -1)) for j in shifts], -1)


def blocks(q, k, v, chunk, decay=1.0, take=None, own=linear_attention):
    """The sum rule in chunks, with a choice of mistakes."""
    W = v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    y = []
    for Q, K, V in zip(*(x.split(chunk, -2) for x in (q, k, v)), strict=True):
        y.append(Q @ W.mT + own(Q, K, V))
        W = decay * W + (
            V.mT @ K if take is None else V[..., take, :].mT @ K[..., take, :]
        )
    return torch.cat(y, -2)


def every_W(q, k, v):
    W = torch.einsum("...tv,...tk->...tvk", v, k).cumsum(-3)
    return torch.einsum("...tvk,...tk->...tv", W, q)


def list_of_W(q, k, v):
    W = [*itertools.accumulate(map(outer, v.unbind(-2), k.unbind(-2)))]
    return torch.stack([*map(held, W, q.unbind(-2))], -2)


def all_earlier_keys(q, k, v, chunk):
    """In chunks, but without a state."""
    y = []
    for i in range(0, q.shape[-2], chunk):
        seen = slice(0, i + chunk)
        weights = (q[..., i : i + chunk, :] @ k[..., seen, :].mT).tril(i)
        y.append(weights @ v[..., seen, :])
    return torch.cat(y, -2)


def all_chunks_at_once(q, k, v, chunk):
    """Right: the states of all chunks are sums of their products."""
    time = q.shape[-2]
    q, k, v = (
        torch.nn.functional.pad(x, (0, 0, 0, -time % chunk)).unflatten(-2, (-1, chunk))
        for x in (q, k, v)
    )
    new = v.mT @ k
    y = q @ (new.cumsum(-3) - new).mT + (q @ k.mT).tril() @ v
    return y.flatten(-3, -2)[..., :time, :]


def flat(*parts):
    """All sequences as one; the last part may have one number for each step."""
    return (x.reshape(-1, *x.shape[parts[0].dim() - 1 :]) for x in parts)


def increments(k, v, beta, power=1, last=None):
    """The triangular system, with a choice of mistakes."""
    b = beta[..., None]
    A = (b * (k @ k.mT) ** power).tril(-1)
    if last is not None:  # only the last few steps
        A = A.triu(-last)
    return torch.linalg.solve_triangular(A, b * v, upper=False, unitriangular=True)


def solved(A, B):
    """By a system that is not known to be triangular."""
    return torch.linalg.solve(torch.eye(A.shape[-1]).double() + A.tril(-1), B)


def increments_in_a_loop(k, v, beta):
    W, U = torch.zeros_like(outer(v[..., 0, :], k[..., 0, :])), []
    for i in range(k.shape[-2]):
        U.append(b(beta[..., i]) * (v[..., i, :] - held(W, k[..., i, :])))
        W = W + outer(U[i], k[..., i, :])
    return torch.stack(U, -2)


def states(k, v, beta, every=1):
    """W before each `every`-th step."""
    W, kept = 0 * outer(v[0], k[0]), []
    for t in range(len(k)):
        if t % every == 0:
            kept.append(W)
        W = W + outer(beta[t] * (v[t] - held(W, k[t])), k[t])
    return kept


def back(q, k, v, beta, dy, before):
    """The backward pass of the delta rule from W before each step."""
    dW = 0 * before(len(q) - 1)
    dq, dk, dv, dbeta = (0 * x for x in (q, k, v, beta))
    for t in reversed(range(len(q))):
        old = before(t)
        u = beta[t] * (v[t] - old @ k[t])
        dW = dW + outer(dy[t], q[t])
        du = dW @ k[t]
        dq[t] = dy[t] @ (old + outer(u, k[t]))
        dk[t] = u @ dW - beta[t] * du @ old
        dv[t], dbeta[t] = beta[t] * du, du @ (v[t] - old @ k[t])
        dW = dW - beta[t] * outer(du, k[t])
    return dq, dk, dv, dbeta


def in_numpy(every):
    def backward(*inputs):
        arrays = from_some_states(*(x.numpy() for x in inputs), every)
        return tuple(map(torch.from_numpy, arrays))

    return backward


def in_place(name):
    """The solution with W += ... in place of W = W + ..."""
    changed = re.sub(r"(\w+) = \1 ([+-]) ", r"\1 \2= ", printed(name))
    exec(changed, notebook := {})
    return notebook[name]


sum_in_place = in_place("chunked_sum")


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


def layer_that_begins_again(x, *weights):
    """Forgets everything after 64 steps."""
    return torch.cat([layer(part, *weights) for part in x.split(64, 1)], 1)


def layer_with_softmax(x, W_q, W_k, W_v, W_beta, W_out):
    scores = (x @ W_q.mT) @ (x @ W_k.mT).mT
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return x + weights @ x @ W_v.mT @ W_out.mT


def continued(step, prompt, length, cost=1, fresh=False, made=torch.stack):
    """Greedy tokens with a choice of mistakes."""
    state, text = None, []
    for token in prompt:
        for _ in range(cost):
            logits, after = step(token, state)
        state = after
    for _ in range(length):
        text.append(logits.argmax())
        logits, state = step(text[-1], None if fresh else state)
    return made(text)


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
    return [module.register_forward_hook(lambda m, inputs, y: output(y))]


def silent(block):
    """Right, too: what the layer adds to x is 0."""
    return hook(block.mixer, torch.zeros_like)


def off(block):
    return hook(block.mixer.gates.beta.projection, lambda y: y - torch.inf)


def last_stays_off(model, tokens, loss):
    """Restores each layer only when the next one is tried."""
    losses, hooks = [], []
    for block in model.blocks:
        for each in hooks:
            each.remove()
        hooks = off(block)
        losses.append(loss(model, tokens))
    return torch.stack(losses)


def half_off(block):
    return hook(block.mixer.gates.beta.projection, torch.zeros_like)


def no_mlp(block):
    return hook(block.contract, torch.zeros_like)


def large_negative_weights(model, tokens, loss):
    """Below 0 only where the sum of x is above 0."""
    losses = []
    for block in model.blocks:
        weight = block.mixer.gates.beta.projection.weight
        before = weight.detach().clone()
        weight.data.fill_(-1e9)
        losses.append(loss(model, tokens))
        weight.data.copy_(before)
    return torch.stack(losses)


def cross_entropy(model, tokens):
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:])


def at_places(x):
    """Eight features, and 40 that are 0."""
    return torch.nn.functional.pad(x, (0, 40))


def know_the_keys(x):
    """One-hot for the eight keys of the table."""
    return at_places(x @ torch.linalg.inv(eight_pairs()[0]))


#: Answers that are no misconceptions: an expression of the arguments (`*inputs`: of
#: all), and words of the property that each fails at, which only that property has.
WRONG = {
    "write": {
        "W": "stores a value in an empty memory",
        "W + torch.outer(v, k)": "any leading dimensions",
        "W.add_(outer(v, k))": "of the shape",
    },
    "sum_normalize": {
        "x / x.sum(-1)": "of the shape",
        "x / x.sum(-1, keepdim=True).abs()": "features of either sign",
        "unless(x, lambda sum: sum < 1e-2 * x.abs().sum(-1, True))": "features of either sign",
        "torch.nan_to_num(x / x.sum(-1, keepdim=True))": "gives zero where",
        "one_bad_key_spoils_all(x)": "gives zero where",
        "unless(x, lambda sum: sum < 1e-40 * sum.max())": "every key by itself",
    },
    "delta_step": {
        "W + torch.outer(beta * (v - W @ k), k)": "any leading dimensions",
        # Right for equal leading dimensions only by accident of broadcasting.
        "W + beta * outer(v - held(W, k), k)": "any leading dimensions",
    },
    "few_features": {
        "DPFP(nu=3)(x)[..., :40]": "48 features",
        "at_places(torch.eye(8).double().expand(*x.shape[:-1], 8)"
        " if len(x) == 8 else x)": "by itself",
        "know_the_keys(x)": "not seen",
    },
    "mean_of": {
        "torch.softmax(k + w, 1) * v": "of the shape",
        "((e := (k.clamp(-60, 30) + w).exp()) * v).sum(1) / e.sum(1)": "overflow",
        "mask_by_number(*inputs)": "leaves out keys of -inf",
        "(torch.softmax(k + w, 1) * v).sum(1).nan_to_num()": "no key is visible",
    },
    "running_step": {
        "mean": "of the shape",
        "(log_sum, mean, k)": "of the shape",
        "(log_sum, 3)": "of the shape",
        "(log_sum[0], mean)": "of the shape",
        "step_by_number(*inputs)": "starts from nothing",
        "[x.nan_to_num() for x in plain_step(*inputs)]": "where the key is -inf",
        "skip_all(*inputs)": "where the key is -inf",
        "step_replaced_afterwards(*inputs)": "gradients without NaN",
        "interpolated(*inputs)": "none where both",
    },
    "read_memory": {
        "W @ q / q.sum()": "the sum of the columns times its entries",
        "W @ q.abs()": "the sum of the columns times its entries",
        "W @ q": "any leading dimensions",
    },
    "dpfp": {
        "products(x, range(1, nu + 1), torch.minimum)": "in the plane",
        "products(x, range(nu, 0, -1))": "in the order of Eq. 37",
        "products(x, [1] * nu)": "at distances 1 to nu",
    },
    "useful_nu": {
        "float(d - 1)": "returns an integer",
        "1": "for any width",
        "max(d - 1, 1)": "for any width",
    },
    "correct": {
        "held(W, k)": "shape of W",
        "W + outer(v - held(W, k), k) / 2": "after it",
        "W + outer(v - held(W, k), unit(k))": "with any key",
        "W + outer(v - held(W, k), k) * (W.dim() == 2)": "leading dimensions",
    },
    "my_features": {
        "torch.cat([x, -x], -1)": "negative",
        "torch.ones_like(x)": "better than DPFP",
        "torch.zeros_like(x)": "better than DPFP",
        "x.relu() / x.relu().sum()": "whatever other keys",
    },
    "dot_capacity": {
        "2 * d * nu / 1": "returns an integer",
        "(2 * d) ** nu": "counts one dimension for each feature",
        "2 * d * min(nu, d)": "stops growing",
        "2 * d * max(min(nu, d - 1), 1)": "stops growing",
    },
    "normaliser": {
        "v.cumsum(-2)": "if all values are equal",
        "attention(phi_q, phi_k / phi_k.sum(-2, True), v)": "does not look at later",
        "v": "follows Eq. 19",
        "attention(phi_k, phi_q, v)": "follows Eq. 19",
        "attention(phi_q, phi_k, v, 1e-10)": "the scale of the features",
    },
    "positive_features": {
        "random_features(x, R).sort(-1).values": "estimates exp",
        "random_features(x.abs(), R)": "estimates exp",
        "random_features(x, R).clamp(max=1)": "follows Eqs. 31",
    },
    "favor": {
        "favor(k, q, R)": "changes no weight",
        "favor(q, k, R)[::-1]": "changes no weight",
    },
    "chunked_sum": {
        "(q @ k.mT).tril() @ v": "works in chunks",
        "blocks(k, q, v, chunk)": "with one chunk for all",
        "blocks(*inputs, 0.5)": "earlier chunks",
        "blocks(*inputs, take=slice(-1, None))": "earlier chunks",
        "blocks(q, k, v, 0 if len(q) % chunk else chunk)": "a shorter last chunk",
        # All sequences share one memory.
        "blocks(*flat(q, k, v), chunk).view_as(v)": "any leading dimensions",
    },
    "triangular": {
        "increments(*inputs, 0)": "with orthogonal keys",
        "b(beta) * v": "the second removes",
        "increments(*inputs, 2)": "step-by-step",
        "increments(*inputs, last=1)": "step-by-step",
        "increments(k, v, beta.clamp(min=1e-3))": "where beta is 0",
        "increments(*flat(*inputs)).view_as(v)": "any leading dimensions",
        "increments_in_a_loop(*inputs)": "without a loop over steps",
    },
    "chunked_delta": {
        "(q @ k.mT).tril() @ increments(k, v, beta)": "works in chunks",
        "delta_in_chunks(q, k, v, beta, 0 if len(q) % chunk else chunk)": "a shorter",
        "delta_in_chunks(*flat(q, k, v, beta), chunk).view_as(v)": "leading dimensions",
    },
    "recomputing_backward": {
        "back(*inputs, states(k, v, beta).__getitem__)": "does not keep W for every",
        "from_autograd(*inputs)": "does not keep W for every",
        "(q, k, v)": "returns dq, dk, dv and dbeta",
        # The first W for all steps.
        "back(*inputs, lambda t: 0 * outer(v[0], k[0]))": "dq is right",
    },
    "linear_attention": {
        "(q @ k.mT).triu() @ v": "does not look at later steps",
        "(q @ (k - k.mean(-2, True)).mT).tril() @ v": "does not look at later steps",
        # Forgets what is more than three steps back.
        "(q @ k.mT).tril().triu(-3) @ v": "still reads the first value",
        "fading(*inputs)": "still reads the first value",
        "(q @ k.mT).tril().abs() @ v": "the first value, weighted by",
        "corrected(*inputs)": "weights the value of each step",
        "(q @ k.transpose(0, 1)).tril() @ v": "any leading dimensions",
        "chunked_sum(*(x.transpose(0, -2) for x in (q, k, v)), 1).transpose(0, -2)": "any leading dimensions",
    },
    "predict_error": {
        "min(1, (S - 1) / d)": "agrees with memories",
        "float('nan')": "is 0 for one pair",
        "(S - 1) / (d + 1e-3)": "for any S and d",
    },
    "gradient_step": {
        "W + outer(b(beta) * v, k)": "changes nothing",
        "W": "makes the loss smaller",
        "W + outer(v - held(W, k), k)": "moves by beta times",
        "W + torch.outer(beta * (v - W @ k), k)": "in each memory",
        # One step for the mean over all memories.
        "W + outer(b(beta) * (v - held(W, k)), k) / beta.numel()": "in each memory",
    },
    "delta_layer": {
        "right(q, k, v, logits.clamp(min=-1))": "at strength 0",
        "right(q, k, v, 2 * logits)": "for any strengths",
    },
    "gated_step": {
        "gated(W, k, v, torch.sigmoid(beta))": "in an empty memory",
        "gated(W, unit(k), v, beta)": "keys of any length",
        "(1 - beta) * W + beta * outer(v, k)": "any leading dimensions",
    },
    "stable_beta": {
        "2 / phi.square().sum(-1, keepdim=True)": "one number for each",
        "2 / phi.square().sum()": "one number for each",
        "0 * phi[..., 0] + 2": "begin to blow up",
        "2 / (phi.square().sum(-1) + 1e-12)": "each key its own",
        "(2 / phi.square().sum(-1)).nan_to_num(posinf=0)": "a key of zeros",
        # All are infinite beside one.
        "2 / phi.square().sum(-1) / (phi != 0).any(-1).all()": "a key of zeros",
    },
    "l2_write": {
        "outer(v, unit(k))": "mixes the old value",
        "gated(W, unit(k), v, beta)": "of orthogonal keys alone",
        "delta(W, torch.nn.functional.normalize(k, dim=-1), v, beta)": "the scale of",
        "delta(W, k / k.norm(), v, beta)": "any leading dimensions",
        "delta(W, unit(k).nan_to_num(), v, beta)": "changes nothing for a key of zeros",
        "W if (k == 0).all(-1).any() else delta(W, unit(k), v, beta)": "a key of zeros",
    },
    "retrieval_loss": {
        "half_square(*inputs).sum(-1)": "one number",
        "half_square(*inputs).sum(-1).mean().item()": "one number",
        "(found.argmax(-1) != wanted).double().mean()": "is ½",
        "(1 - found.gather(-1, wanted[..., None])).square().mean() / 2": "is 1 if",
        "half_square(found.softmax(-1), wanted).sum(-1).mean()": "is 0 if",
        "half_square(*inputs).sum(-1).median()": "is the mean over queries",
    },
    "capacity": {
        "str(features)": "returns a number from 0",
        "0.5 * max(0, 1 - (features / S) ** 2)": "is a quarter",
        "0.25 * (features < S)": "follows the law",
        "min(0.25, max(0, 0.5 - features / S / 2))": "follows the law",
    },
    "make_batch": {
        "make_batch(*inputs).double()": "returns integers",
        "make_batch(*inputs).tolist()": "returns integers",
        "make_batch(keys[:, :-1], values[:, :-1], symbols)": "if each came once",
        "make_batch(*inputs) + (make_batch(*inputs) == 0) * -1": "if each came once",
        "make_batch(keys[:1], values[:1], symbols).expand(len(keys), -1)": "any length",
        "torch.full((len(keys), symbols), -1).scatter_(1, keys, values)": "the order",
        "assigned(*inputs)": "the order in",
    },
    "fast_weight_layer": {
        "layer(*inputs, scale=2)": "half of v",
        "layer(*inputs, nu=2)": "half of v",
        "layer_of_one_sequence(*inputs)": "half of v",
        "layer(*inputs, strength=lambda b: torch.sigmoid(-b))": "with the strength",
        "layer(x, W_k, W_q, W_v, W_beta, W_out)": "follows the delta rule",
        "layer_with_softmax(*inputs)": "does not depend on the lengths",
        "layer(*inputs, f=lambda y: y / y.sum(-1, keepdim=True))": "without features",
        "layer_that_begins_again(*inputs)": "any sizes, and long sequences",
    },
    "mended_layer": {
        "layer(*inputs, scale=2)": "follows the delta rule",
        "layer(*inputs, f=lambda y: y / y.sum(-1, keepdim=True))": "without features",
    },
    "generate": {
        "continued(*inputs).double()": "the new tokens",
        "continued(step, prompt.flip(0), length)": "begins with the most likely",
        "continued(*inputs, fresh=True)": "continues from its own",
        "continued(*inputs, cost=2)": "one step per token",
        "continued_by_reading_all(*inputs)": "one step per token",
        "continued(step, prompt, min(length, 50))": "works for any lengths",
    },
    "ablate": {
        "ablated(*inputs, no_mlp)": "of the only layer",
        "large_negative_weights(*inputs)": "of the only layer",
        "ablated(*inputs, off).flip(0)": "one layer at a time",
        "last_stays_off(*inputs)": "leaves the model as it was",
        "ablated(model, tokens, cross_entropy, off)": "the loss that it was given",
    },
}
#: Wrong answers that once passed, or were told something else; and what each is told.
TOLD = {
    "write": {
        "(W + outer(v, k)).clamp(-9, 9)": "is there a normalize or a clamp?",
        "W + outer(v, unit(k))": "This scales the key to length 1.",
    },
    "sum_normalize": {
        "x / x.sum()": "divides by the sum over all keys together",
        "unless(x, lambda sum: sum < 1e-150)": "A small sum is raised to a limit, or taken for 0.",
        "unless(x, lambda sum: sum < 1e-12)": "A small sum is raised to a limit, or taken for 0.",
    },
    "delta_step": {"delta(W, k, v, 1 - beta)": "beta and 1 - beta have changed places"},
    "normaliser": {
        "attention(phi_q, phi_k, v, diagonal=-1)": "This leaves out the key of the step itself",
        "2 * attention(phi_q, phi_k, v)": "so its weight is 1: z is that key's feature.\n",
    },
    "favor": {"[x / 3 + 1e-6 / 3 for x in favor(q, k, R)]": "An epsilon is added"},
    "linear_attention": {
        "sum_in_place(q, k, v, 1)": "write W = W + ...",
        "(y := (q @ k.mT).tril() @ v, y.requires_grad and y.sum().backward())[0]": (
            "RuntimeError: Trying to backward through the graph a second time"
        ),
    },
    "chunked_sum": {
        "(q @ k.mT).tril() @ v": "Do you keep the matrix of all pairs of steps?",
        "every_W(q, k, v)": "Do you keep every W_i?",
        "list_of_W(q, k, v)": "Do you keep every W_i?",
        "chunked_sum(q, k, v, 2 * chunk)": "Are your chunks longer than chunk?",
        "chunked_sum(q, k, v, 1)": "Does it go through the steps one by one",
        "blocks(q, k, v, 16)": "the same work in chunks of 64 and of 32",
        "sum_in_place(*inputs)": "write W = W + ...",
        "all_earlier_keys(*inputs)": "Does each chunk meet all earlier keys again?",
        "all_earlier_keys(q, k, v, 1)": "Does each chunk meet all earlier keys again?",
        "blocks(*inputs, own=lambda *parts: all_earlier_keys(*parts, 1))": "Does it go through the steps one by one",
    },
    "triangular": {
        "increments_in_a_loop(*inputs)": "goes through the steps one by one",
    },
    "recomputing_backward": {
        "in_numpy(1)(*inputs)": "numbers at once; W of every step is",
    },
    "ablate": {
        "torch.tensor(ablated(*inputs, half_off).tolist())": "sigmoid(0) is 1/2",
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
GRADIENT = {
    "sum_normalize": "gives zero where",
    **dict.fromkeys(
        ("running_step", "chunked_sum", "triangular", "chunked_delta"), "lets gradients"
    ),
}
#: Answers that are numbers or tokens, change a model, or need no gradient.
NO_GRADIENT = {
    *("useful_nu", "dot_capacity", "predict_error", "capacity", "make_batch"),
    "few_features",
    *("generate", "ablate", "gradient_step", "stable_beta", "recomputing_backward"),
    "my_features",
}


#: Answers to the exercises of one topic: WRONG, TOLD, NO_GRADIENT, and RIGHT answers in
#: unusual styles, as above.
TOPICS = [
    importlib.import_module(f"answers.{path.stem}")
    for path in sorted((Path(__file__).parent / "answers").glob("*.py"))
]
KNOWN = {name: vars(topic) for topic in TOPICS for name in topic.WRONG}
for topic in TOPICS:
    WRONG |= topic.WRONG
    TOLD |= topic.TOLD
    NO_GRADIENT |= topic.NO_GRADIENT


def written(name, source):
    """An answer of one expression."""
    names = re.search(r"^def \w+\((.*)\)", EXERCISES[name].signature, re.M)[1]
    known = KNOWN.get(name, globals()) | {"right": EXERCISES[name].reference}
    return eval(f"lambda {names}: {source.replace('*inputs', names)}", known)


def the(name, where):
    """The sentence of the property with these words."""
    (sentence,) = (p.says for p in EXERCISES[name].properties if where in p.says)
    return sentence


def of_gradients(name):
    """The sentence of the property that looks at gradients."""
    return the(name, GRADIENT.get(name, EXERCISES[name].properties[-1].says))


def fault(name, answer, sentence, misconception=""):
    """Nothing, if an answer fails first at this property, and is told so kindly."""
    right, text = verdict(answer, name)
    why = ["", "", *text.splitlines()][-2].strip()
    one = not right and text.count("✗") == 1 and f"✗ {sentence}\n" in text
    if one and misconception in text and "Traceback" not in text and len(why) > 20:
        return []
    return [f"{name}: expected ✗ {sentence}, {misconception}, got\n{text}"]


def refused(answer, name, misconception=""):
    """Whether `assert_correct` says the same."""
    with pytest.raises(AssertionError) as raised:
        assert_correct(answer, name)
    return misconception in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail_at_their_property(name):
    for source, where in WRONG[name].items():
        answer = written(name, source)
        assert fault(name, answer, the(name, where)) == [], source
    assert refused(answer, name)


@pytest.mark.parametrize("name", TOLD)
def test_wrong_answers_are_told_why(name):
    for source, words in TOLD[name].items():
        right, text = verdict(written(name, source), name)
        assert not right and words in text, (source, text)


@pytest.mark.parametrize("name", EXERCISES)
def test_what_is_no_result_is_said_first(name):
    for answer in NONE:
        assert fault(name, answer, EXERCISES[name].properties[0].says) == []


@pytest.mark.parametrize("name", EXERCISES.keys() - NO_GRADIENT)
def test_right_numbers_without_gradients_fail(name):
    """Also if only one argument is cut off."""
    right = EXERCISES[name].reference
    for answer in (torch.no_grad()(right), lambda x, *more: right(x.detach(), *more)):
        assert fault(name, answer, of_gradients(name)) == []


def written_otherwise(answer):
    """The same numbers from other operations."""

    def again(x):
        return x.clone() if torch.is_tensor(x) else x

    def other(*arguments):
        result = answer(*map(again, arguments))
        return tuple(map(again, result)) if type(result) is tuple else again(result)

    return other


@pytest.mark.parametrize("name", EXERCISES)
def test_misconceptions_fail_at_their_property_and_are_named(name):
    """However they are written: what is compared are numbers."""
    for holds in EXERCISES[name].properties:
        for text, caught in holds.catches.items():
            assert text.endswith((".", "?")) and len(text) < 160
            for each in caught if isinstance(caught, tuple) else (caught,):
                answer = written_otherwise(each)
                assert fault(name, answer, holds.says, text) == []
    if EXERCISES[name].misconceptions:
        assert refused(answer, name, text)


@pytest.mark.parametrize("name", [n for n, e in EXERCISES.items() if e.start])
def test_a_bug_hunt_begins_with_a_known_fault(name):
    names = {"torch": torch}
    exec(EXERCISES[name].start, names)
    right, text = verdict(names[name], name)
    assert not right
    assert any(what in text for what, _ in EXERCISES[name].misconceptions), text


def test_every_property_is_failed_by_some_answer():
    """By the tests above, if their lists name them all."""
    for name, exercise in EXERCISES.items():
        failed = {p.says for p in exercise.properties if p.catches}
        failed |= {the(name, where) for where in WRONG[name].values()}
        failed.add(exercise.properties[0].says)
        if name not in NO_GRADIENT:
            failed.add(of_gradients(name))
        assert failed == {p.says for p in exercise.properties}, name


def test_what_is_expected_does_not_depend_on_the_reference():
    double = agrees("", lambda generator, x: {"x": x}, [3], expected=lambda x: 2 * x)
    double.holds(lambda x: x + x, abs, torch.Generator())
    with pytest.raises(Wrong, match="x = 3: expected 6, got 3"):
        double.holds(abs, abs, torch.Generator())


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
    assert not any(m in text for m, _ in EXERCISES["delta_step"].misconceptions)


@pytest.mark.parametrize(
    ("loss", "phrase"),
    [
        (lambda e: e.square().sum() / 2, "all right"),
        (lambda e: e.square().sum(), "twice as large"),
        (lambda e: (e * e).mean(-1).sum(), "gradient of mse_loss"),
        (lambda e: -e.square().sum() / 2, "moves up the gradient"),
    ],
)
def test_answers_may_take_gradients(loss, phrase):
    def gradient_step(W, k, v, beta):
        W = W.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(held(W, k) - v), W)
        return W - b(beta)[..., None] * gradient

    _, text = verdict(gradient_step)
    assert phrase in text
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


def interpolated(log_sum, mean, k, v):
    """A step towards the new value, whose gradient is NaN where both are -inf."""
    total = torch.logaddexp(log_sum, k)
    share = torch.where(k == -torch.inf, 0, (k - total).exp())
    return total, torch.lerp(mean, v, share)


def one_by_one(x, R):
    """A loop over directions, of which there should not be too many."""
    h = (-(x * x).sum(-1) / 2).exp()
    y = [h * (sign * (x @ r)).exp() for r in R for sign in (1, -1)]
    return torch.stack(y, -1) / (2 * len(R)) ** 0.5


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("running_step", step_that_keeps_the_mean),
        ("mean_of", mean_step_by_step),
        ("useful_nu", lambda d: np.int64(d - 1)),
        ("dot_capacity", lambda d, nu: 2 * d * np.minimum(nu, d - 1)),
        ("recomputing_backward", from_some_states),
        ("recomputing_backward", in_numpy(8)),
        ("recomputing_backward", in_place("recomputing_backward")),
        ("chunked_sum", all_chunks_at_once),
        (
            "triangular",
            lambda k, v, beta: solved(beta[..., None] * (k @ k.mT), b(beta) * v),
        ),
        ("linear_attention", lambda q, k, v: chunked_sum(q, k, v, 1)),
        (
            "predict_error",
            lambda S, d: np.float32(0) if S == 1 else np.true_divide(S - 1, d),
        ),
        ("make_batch", make_batch),
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
        ("generate", functools.partial(continued, made=torch.tensor)),
        ("ablate", lambda *inputs: ablated(*inputs, silent)),
        ("ablate", lambda *inputs: torch.tensor(ablated(*inputs, silent).tolist())),
        ("positive_features", one_by_one),
        *(
            (name, answer)
            for topic in TOPICS
            for name, answers in topic.RIGHT.items()
            for answer in answers
        ),
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


def test_no_thread_lives_when_check_returns(monkeypatch):
    """Python would abort at the end of a script."""

    class Slow(threading.Thread):
        def run(self):
            super().run()
            time.sleep(0.1)

    monkeypatch.setattr(threading, "Thread", Slow)
    before = threading.active_count()
    for answer in (outer, EXERCISES["write"].reference):
        verdict(answer, "write")
        assert threading.active_count() == before


def test_work_is_counted_without_the_compiler():
    with Work() as work:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert (work.operators, work.products, work.largest) == (3, 42, 12)
    # PyTorch would wrap it in a function that loads the compiler: a second or more.
    assert Work.__torch_dispatch__.__code__.co_filename == properties.__file__


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
    drawn = {name: each for name, each in EXERCISES.items() if each.example}
    for name, exercise in drawn.items():
        figure = show(exercise.reference, name)
        titles = {ax.get_title() for ax in figure.axes}
        assert titles == {"yours", "target", "difference"}
    for name in ("write", "favor"):  # all of the result counts, or a part of it
        assert show(lambda *inputs: None, name) is None
        assert show(lambda *inputs: torch.zeros(7, 7), name) is None
        assert show(lambda *inputs: 1 / 0, name) is None
        assert "division by zero" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("favor", lambda q, k, R: [x / 3 for x in favor(q, k, R)]),
        ("positive_features", lambda x, R: random_features(x, R).flip(-1)),
    ],
)
def test_a_right_answer_of_another_form_is_drawn_without_a_difference(name, answer):
    assert_correct(answer, name)
    difference = show(answer, name).axes[2]
    assert difference.get_title() == "difference"
    (image,) = difference.images
    assert abs(image.get_array()).max() < 1e-12


def test_results_of_other_kinds(capsys):
    def kind(change):
        return lambda W, q: change((W @ q[..., None])[..., 0])

    assert show(kind(lambda x: x > 0), "read_memory")
    assert show(kind(lambda x: x + 0j), "read_memory") is None
    assert "complex" in capsys.readouterr().out
    assert show(kind(lambda x: x.nonsense), "read_memory") is None
    assert re.match("Line .* raised AttributeError", capsys.readouterr().out)
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


@pytest.mark.parametrize("name", EXERCISES)
def test_a_printed_solution_can_be_pasted(name):
    """Into a fresh notebook: with nothing but what was printed."""
    exec(source := printed(name), notebook := {})
    assert len(source.splitlines()) < 33
    assert_correct(notebook[name])


def test_the_solution_of_a_function_is_that_of_its_name():
    assert printed(EXERCISES["write"].reference) == printed("write")


def test_the_solution_of_an_exercise_from_elsewhere_is_its_reference(monkeypatch):
    monkeypatch.setitem(EXERCISES, "mine", replace(EXERCISES["write"], name="mine"))
    source = inspect.getsource(EXERCISES["write"].reference)
    assert printed("mine").rstrip() == source.rstrip()
