"""Right answers pass; wrong ones fail where they should, kindly."""

import contextlib
import io

import pytest
import torch

from fwlab.exercises import EXERCISES, assert_correct, check, hint, solution
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
        (lambda x: x / x.sum(-1, keepdim=True), "gives zero for a zero key"),
        (
            lambda x: torch.nan_to_num(x / x.sum(-1, keepdim=True)),
            "gives zero for a zero key",
        ),
        (
            lambda x: EXERCISES["sum_normalize"].reference(x.detach()),
            "gives zero for a zero key",
        ),
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
        (step_by_old_sum, "lets a far larger key"),
        (plain_step, "for a key of -inf"),
        (
            lambda *given: [x.nan_to_num() for x in plain_step(*given)],
            "for a key of -inf",
        ),
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
for answers in WRONG.values():
    answers += [
        (lambda *arguments: None, SHAPE),
        (lambda *arguments: 3.0, SHAPE),
        (lambda *arguments: 1 / 0, SHAPE),
        (lambda *arguments: torch.tensor(1.0), SHAPE),
        (lambda: None, SHAPE),
        (leave, SHAPE),
    ]
for name in WRONG:
    reference = EXERCISES[name].reference
    last = EXERCISES[name].properties[-1].__doc__ or ""
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
    solution(exercise.reference)
    assert capsys.readouterr().out == source
