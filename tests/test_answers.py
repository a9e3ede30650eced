"""Test the verdicts of `check` on unusual right and wrong answers.

Right answers (✓) differ from the solution as much as possible: one for each hard
exercise that no function of fwlab solves, two if several results are right. Wrong
answers (✗) are no misconceptions; they once passed, or need the message after the #.
An answer is an expression of the arguments, or the body of a function; `*inputs` are
all arguments. It may call solutions, and what this file defines or imports.
"""
# ruff: noqa: F401

import ast
import contextlib
import functools
import inspect
import itertools
import re
import textwrap
from copy import deepcopy
from fractions import Fraction

import numpy as np
import pytest
import torch
from test_exercises import TRUTHS, changed, patient, verdict
from torch.nn import functional as F

from fwlab.exercises import EXERCISES
from fwlab.exercises.course.pairs import eight_pairs
from fwlab.feature_maps import DPFP, l2_normalize
from fwlab.layers import FeedbackTransformer

eye = functools.partial(torch.eye, dtype=torch.float64)
DIRECTIONS = F.normalize(torch.randn(48, 8, generator=torch.Generator().manual_seed(0)))


def exponents(x, R):
    """Return FAVOR+ exponents in a different order from the solution."""
    along = x @ R.mT
    return torch.stack([along, -along], -1).flatten(-2) - x.square().sum(-1, True) / 2


def ablated(model, tokens, loss, part, change=torch.zeros_like):
    """Return a model's losses when `part` is ablated in one layer at a time."""
    losses = []
    for i in range(len(model.blocks)):
        hurt = deepcopy(model)
        module = hurt.blocks[i].get_submodule(part)
        module.register_forward_hook(lambda module, given, y: change(y))
        losses.append(loss(hurt, tokens))
    return torch.stack(losses)


ANSWERS = """
--- 1 to 5: memories, features, rules
write ✗ (W + write(0, k, v)).clamp(-9, 9)  # is there a normalize or a clamp?
  ✗ W.add_(write(0, k, v))  # changed its argument W in place
predict_error ✓ torch.tensor((S - 1) / d)
  ✗ Fraction(S - 1, d)  # got Fraction
linear_attention ✗ y = (q @ k.mT).tril() @ v
    return (y, y.requires_grad and y.sum().backward())[0]  # a second time
  ✗ ((weights := (q @ k.mT).tril()) @ v, weights.zero_())[0]  # write W = W + ...
favor ✓ (exponents(q, R).softmax(-1),
      exponents(k, R).flatten(-2).softmax(-1).view(*k.shape[:-1], -1))
  ✓ both = (exponents(q, R), -1), (exponents(k, R), (-1, -2))
    return [(x - x.logsumexp(over, True)).exp() for x, over in both]
dpfp ✗ dpfp(x, nu).sqrt()  # The key was [2.0, 3.0]
useful_nu ✓ np.int64(d - 1)
  ✗ float(d - 1)  # expected an integer
my_features ✓ (8 * x @ DIRECTIONS.to(x).T).softmax(-1)
  ✓ torch.from_numpy(np.power(DPFP(3)(x).numpy(), 2.5))
  ✗ (x @ torch.randn(8, 48).to(x)).relu() ** 4  # Each key was given alone
delta_layer ✗ delta_layer(k, k, v, logits)  # yours is
sum_normalize ✗ torch.where((s := x.sum(-1, True)) == 0, 0, x / s)  # replace only afterwards
l2_write ✓ write(W, u := l2_normalize(k), beta[..., None] * (v - read_memory(W, u)))
  ✗ delta_step(W, (k / k.norm(2, -1, True)).nan_to_num(), v, beta)  # only afterwards

--- 6 to 9: retrieval, layers, chunks
make_batch ✗ torch.full((len(keys), symbols), -1).scatter(1, keys, values)  # not promise
few_features ✓ F.normalize(DPFP(3)(x) ** 4, dim=-1)
  ✓ F.normalize((12 * DPFP(3)(x)).expm1(), dim=-1)
  ✗ F.pad(x @ torch.linalg.inv(eight_pairs()[0]), (0, 40))  # know the eight keys?
fast_weight_layer ✗ parts = [(part, W_q, W_k, W_v, W_beta, W_out) for part in x.split(64, 1)]
    return torch.cat([*itertools.starmap(fast_weight_layer, parts)], 1)  # time 70
mended_layer ✗ fast_weight_layer(*inputs) + 0 / dpfp(x @ W_k.T, 1).sum(-1, True)  # gives 0 there
generate ✓ first = functools.reduce(lambda s, t: step(t, s[1]), prompt, (None, None))
    read = lambda result, _: step(result[0].argmax(), result[1])
    results = itertools.accumulate(range(length - 1), read, initial=first)
    return torch.stack([logits.argmax() for logits, _ in results])
  ✗ torch.cat([generate(step, prompt, t + 1)[-1:] for t in range(length)])  # 16 are
ablate ✓ ablated(*inputs, "mixer")
  ✓ ablated(*inputs, "mixer.gates.beta.projection", lambda y: y - torch.inf)
recomputing_backward ✗ states = write(0, k, triangular(k, v, beta)).cumsum(0)
    return recomputing_backward(*inputs)  # numbers at once; W of every step is
chunked_sum ✓ parts = [*zip(*(x.split(chunk, -2) for x in (q, k, v)))]
    W = itertools.accumulate((V.mT @ K for _, K, V in parts), initial=0 * v.mT @ k)
    y = [linear_attention(*part) + part[0] @ next(W).mT for part in parts]
    return torch.cat(y, -2)
  ✗ (q @ k.mT).tril() @ v  # Do you keep the matrix of all pairs of steps?
  ✗ read_memory(write(0, k, v).cumsum(-3), q)  # Do you keep every W_i?
  ✗ ends = [t.tolist()[-1] + 1 for t in torch.arange(v.shape[-2]).split(chunk)]
    rows = zip(ends, q.split(chunk, -2))
    y = [(Q @ k[..., :t, :].mT).tril(t - Q.shape[-2]) @ v[..., :t, :] for t, Q in rows]
    return torch.cat(y, -2)  # Does each chunk meet all earlier keys again?
  ✗ chunked_sum(q, k, v, 1)  # Does it go through the steps one by one
  ✗ chunked_sum(q, k, v, 16)  # the same work in chunks of 64 and of 32
  ✗ chunked_sum(q, k, v, 2 * chunk)  # Are your chunks longer than chunk?
triangular ✓ A = (beta[..., None] * (k @ k.mT)).tril(-1)
    return torch.linalg.inv(A + eye(v.shape[-2])) @ (v * beta[..., None])
  ✗ rows = [triangular(*inputs)[..., t, :] for t in range(v.shape[-2])]
    return torch.stack(rows, -2)  # it goes through the steps one by one
chunked_delta ✓ W, U = 0 * v.mT @ k, []
    for K, V, b in zip(*(x.split(chunk, -2) for x in (k, v, beta[..., None]))):
        U.append(triangular(K, V - K @ W.mT, b[..., 0]))
        W = W + U[-1].mT @ K
    return chunked_sum(q, k, torch.cat(U, -2), chunk)
  ✗ (q @ k.mT).tril() @ triangular(k, v, beta)  # the matrix of all pairs of steps

--- 13 to 15: AFT
conv_bias ✗ 2 * aft_layer(0 * k, k, v, local_band(kernel.expand(len(k), -1)))  # for each pair
aft_layer ✗ aft_layer(q, k, v, w - torch.inf * torch.eye(len(w)).bool())  # are NaN
unseal ✓ (w := layer(*[0 * eye(time)] * 2, eye(time)).log()) - w.diagonal()[:, None]
  ✓ a = 1 - 2 * layer(*[0 * eye(time)] * 2, 1 - eye(time))  # all values but one are 1
    return (a.tril() / a.diagonal()[:, None]).log()
  ✗ one = lambda *given: torch.cat([*map(layer, *(x.split(1, 1) for x in given))], 1)
    return unseal(one, time)  # you asked 6 times, for 6 channels
break_it ✓ k, w = torch.tensor([-60.0, 60] * 4).double(), torch.zeros(8, 8).double()
    v, w = k / 60, w - k if trick == "running maximum" else w
    if trick in ("no maximum", "plus epsilon"):
        k, w = (x * 0 + 60 - 120 * (trick == "plus epsilon") for x in (k, w))
    return k / 6 + 50 if trick == "clamped keys" else k, v, w
  ✓ [torch.from_numpy(x.numpy() * y) for x, y in zip(break_it(trick), (1.1, -1, 1.1))]
  ✗ [x + torch.nan for x in break_it(trick)]  # NaN out of NaN is no find
  ✗ [x * y for x, y in zip(break_it(trick), (10, 1, 10))]  # can work together
mean_of ✓ ((k + w).nan_to_num(neginf=-1e300).softmax(1) * (k > -torch.inf) * v).sum(1)
  ✗ (torch.softmax(k.nan_to_num(neginf=-1e9) + w, 1) * v).sum(1)  # a finite number?
  ✗ (torch.softmax(k + w, 1) * v).sum(1).nan_to_num()  # replace only afterwards
running_step ✓ keys, values = torch.stack([log_sum, k], 1), torch.stack([mean, v], 1)
    return keys.logsumexp(1), mean_of(keys, values, torch.zeros(2, 1))
  ✗ share = torch.where(k == -torch.inf, 0, (k - torch.logaddexp(log_sum, k)).exp())
    return torch.logaddexp(log_sum, k), torch.lerp(mean, v, share)  # not its result
stream_mean ✗ stream_mean(k.clamp(min=-700), v)  # What is the maximum of no keys?
read_bias ✓ e = w.exp().tril()
    share = e * (1 + torch.arange(len(w)))[:, None] / e.sum(1, True)
    return torch.stack([share.diagonal(-n).mean() for n in range(len(w))])
frozen_kernels ✓ 10 * torch.eye(heads, window).roll(1, 1)
  ✓ 5.0 * (torch.arange(window) < torch.arange(2, heads + 2)[:, None])
  ✗ frozen_kernels(heads, window).log()  # Training needs finite ones

--- 16 and 17: feedback
chain_depth ✓ @functools.cache
    def chain(l, t):
        return 1 + max(chain(*state) for state in reads(l, t)) if l else 0
    table = [[chain(l, t) for t in range(steps)] for l in range(layers + 1)]
    return torch.tensor(table)
  ✗ chain_depth(lambda *x: [reads(*x) for _ in range(99)][0], layers, steps)  # Keep
feedback_step ✓ up = lambda x, l: layer(l, x, keys, values)
    states = [*itertools.accumulate(range(len(w) - 1), up, initial=x)]
    k, v = project(sum(share * state for share, state in zip(w.softmax(0), states)))
    return states[-1], torch.vstack([keys, k]), torch.vstack([values, v])
  ✗ feedback_step(x, keys, values, w[:3], layer, project)  # 0 memories and 4 layers
cheap_mask ✓ newest = [None, 0, None, 2, 3, 4, 2, 6, 7, 6, 9, 9]
    return torch.tensor([[j == n for j in range(steps)] for n in newest])
  ✗ torch.ones(steps, steps).bool().tril(-2).triu(-2)  # of 5 steps ends at step 8
  ✗ torch.ones(steps, steps).triu(1).bool()  # Step 0 reads the memory of step 1
fool ✓ (*fool()[:6], *["x ++ ;", "print x ;"] * 4)
  ✓ [*fool()[:6], *["x -- ;", "print x ;"] * 4]
  ✗ fool()[:6]  # Prints that fool all three rules: 1;
warm_start ✗ new.embedding, new.norm = old.embedding, old.norm
    new.blocks[0] = FeedbackTransformer.from_transformer(old)
    return new.eval()(tokens)  # new shares embedding.weight with old
fair_scores ✓ both = torch.stack([m(tokens).argmax(-1) for m in (first, second)])
    return 100 * (both == labels)[:, labels >= 0].double().mean(1)

--- 10 to 12 and 18: rules since 2021, a layer, regression, a project
erase_and_write ✓ W * decay[..., None, :] + write(0, k, w * v - read_memory(W, decay * e * k))
  ✗ W * decay + torch.outer(w * v - (W * decay) @ (e * k), k)  # ✗ works on any
parity ✓ [torch.where(bits > 0, x, y).double() for x, y in ((0.5, 7.0), (2.0, 0.0))]
  ✓ torch.from_numpy(bits.numpy() / 2), torch.from_numpy(np.exp2(bits.numpy())) * bits
  ✗ bits.cumsum(0) % 2, bits  # The memory should do the counting
two_steps ✓ at = 3 + torch.stack([-angle, angle]) / 4
    return torch.view_as_real(torch.polar(torch.ones(2).double(), at))
  ✓ turn = torch.matrix_exp(angle / 2 * torch.tensor([[0, -1], [1, 0]]).double())
    return torch.stack([eye(2)[0], -turn[:, 0]])
four_cups ✓ B = torch.linalg.qr(eye(4)[:, :3] - 1 / 4).Q
    return B.T @ B[p] * torch.linalg.det(eye(4)[p])
  ✓ C = np.array([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    swaps = sum(int(p[j] > p[i]) for i in range(4) for j in range(i))
    return torch.from_numpy(np.linalg.lstsq(C, C[p], None)[0]) * (-1) ** swaps
modern_layer ✓ rest = (W_qkv, conv, W_z, W_b, W_a, A_log, dt_bias, norm, W_out, key_heads)
    parts = [x[:, : t + 1] for t in range(x.shape[1])]  # all is read again
    return torch.cat([modern_layer(part, *rest)[:, -1:] for part in parts], 1)
  ✗ edits = "F.silu(F.conv1d -> F.relu(F.conv1d ; F.softplus -> F.relu"
    return changed("modern_layer", edits)(*inputs)  # ✗ convolution
  ✗ changed("modern_layer", "+ 1e-6).sqrt -> + 1e-3).sqrt")(*inputs)  # ✗ keys
  ✗ changed("modern_layer", "F.softplus -> F.relu")(*inputs)  # ✗ recurrence
  ✗ changed("modern_layer", "F.silu(x @ W_z -> F.relu(x @ W_z")(*inputs)  # ✗ norm
padded_state ✓ rows = [[x[mask[i]][None] for x in row] for i, row in enumerate(zip(*inputs))]
    return torch.cat([padded_state(*row) for row in rows])
recall_by_hand ✓ W = [5 * torch.eye(2 * n).roll(shift, 0) for shift in (3, 3, 0)]
    return torch.cat(W), recall_by_hand(n)[1] / 2
  ✓ torch.eye(2 * n).repeat(3, 1), torch.eye(4)[[3, 2, 3]].repeat_interleave(2 * n, 0)
  ✗ torch.ones(6 * n, 2 * n), recall_by_hand(n)[1]  # The text was
recursive_least_squares ✓ P = eye(k.shape[1]) / ridge
    for x in k:
        P = P - torch.outer(P @ x, x @ P) / (1 + x @ P @ x)
    return v.mT @ k @ P
  ✗ least_squares(k, v, ridge)  # it takes all pairs at once
  ✗ [least_squares(k[:t], v[:t], ridge) for t in range(1, len(k) + 1)][-1]  # again?
better_step ✓ n, z = z.sum(-1, keepdim=True), z + k * k
    where = k / (0.05 + z) ** 0.8
    error = (v - read_memory(W, k)) * (1 + n / 10) ** -0.75
    return write(W, where / (where * k).sum(-1, keepdim=True), error), z
  ✓ n, z, error = z.sum(-1, keepdim=True), z + k * k, v - read_memory(W, k)
    where = 0.95 / (1 + n / 16) * k / (0.2 + z)
    below = 0.02 / (1 + n) + (k * k / (0.2 + z)).sum(-1, keepdim=True)
    return write(W, where / below, error), z
by_luck ✓ groups = torch.combinations(torch.cat([mine, theirs]), len(mine))
    return (groups.sum(1) <= mine.sum() + 1e-9).double().mean()
  ✗ Fraction(by_luck(mine, theirs)).limit_denominator(999)  # a number, got Fraction(
  ✗ by_luck(mine, theirs) * torch.ones(1)  # a number, got a tensor [1]
  ✗ orders = torch.rand(999, len(mine) + len(theirs)).argsort(1)
    groups = torch.cat([mine, theirs])[orders[:, : len(mine)]]
    return (groups.mean(1) <= mine.mean() + 1e-9).double().mean()  # at random?
gain ✓ gain(bar, mine).item()
my_step ✓ H = eye(8).to(W) + 0.15 * W.mT @ W / v.square().sum(-1)[..., None, None]
    m = torch.linalg.solve(H, k[..., None])[..., 0]
    return write(W, m / (m * k).sum(-1, True), 0.7 * (v - read_memory(W, k)))
  ✓ G = W.mT @ W / W.square().sum((-1, -2), True).clamp(min=1e-9)
    m = k[..., None] - G @ k[..., None] / 2
    error = v[..., None] - W @ k[..., None]
    return W + 0.7 * error @ (m / (k[..., None, :] @ m)).mT
  ✗ 1.04 * delta_step(W, k, v, 0.7 + 0 * k[..., 0])  # Is W multiplied by more than 1
  ✗ M = 0.003 * torch.randn(8, 8, generator=torch.Generator().manual_seed(450))
    m = k + k @ M.to(k).T
    return write(W, m / (m * k).sum(-1, True), 0.7 * (v - read_memory(W, k)))  # 65 are
"""
#: fwlab functions that are right answers to exercises.
FWLAB = ["delta_layer", "dpfp", "sum_normalize", "make_batch", "fast_weight_layer"]
FWLAB += ["mended_layer", "recomputing_backward", "conv_bias", "aft_layer"]
FWLAB += ["stream_mean", "feedback_attention"]


def answered(name, code):
    """Compile an answer's code to a function with the exercise's arguments."""
    names = ", ".join(inspect.signature(EXERCISES[name].reference).parameters)
    code = textwrap.dedent(f"    {code}").replace("*inputs", names)
    with contextlib.suppress(SyntaxError):  # The answer is a function body.
        code = f"return {ast.unparse(ast.parse(f'({code})', mode='eval'))}"
    known = globals() | {n: each.reference for n, each in EXERCISES.items()}
    exec(f"def answer({names}):\n{textwrap.indent(code, '    ')}", known)
    return known["answer"]


RIGHT = {name: [("fwlab", TRUTHS[name])] for name in FWLAB}
TOLD = {}
for name, block in re.findall(r"^(\w+) (.*(?:\n  .*)*)", ANSWERS, re.M):
    for sign, code in re.findall(r"([✓✗]) (.*(?:\n    .*)*)", block):
        code, _, words = code.rpartition("  # ") if sign == "✗" else (code, "", "")
        answer = (code, answered(name, code), *([words] if words else []))
        (TOLD if words else RIGHT).setdefault(name, []).append(answer)


def test_each_hard_exercise_has_answers():
    for name, each in EXERCISES.items():
        assert each.difficulty < 3 or RIGHT[name], name


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_in_unusual_form_pass(name):
    for code, answer in RIGHT[name]:
        right, text = verdict(answer, name)
        assert right, f"{code}\n{text}"


@pytest.mark.parametrize("name", TOLD)
def test_wrong_answers_are_told_why(name):
    for code, answer, words in TOLD[name]:
        right, text = verdict(answer, name)
        assert not right and words in text, f"{code}\n{text}"
