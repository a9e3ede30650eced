"""Test the messages of `check`, `show` and `hint` for arbitrary functions."""

import contextlib
import functools
import re
import sys
import threading
import time

import pytest
import torch
from test_exercises import LONG, patient, verdict  # noqa: F401

from fwlab.exercises import (
    EXERCISES,
    assert_correct,
    check,
    checking,
    hint,
    properties,
    show,
)
from fwlab.exercises.properties import Work

favor = EXERCISES["favor"].reference
random_features = EXERCISES["positive_features"].reference


def outer(v, k):
    return v[..., :, None] * k[..., None, :]


def held(W, k):
    return (W * k[..., None, :]).sum(-1)


def delta_step_of_one_memory(W, k, v, beta):
    assert W.dim() == 2
    return W + torch.outer(beta * v, k)


def gradient_step_too_far(W, k, v, beta):
    error = v - held(W, k)  # The solution has the opposite sign.
    return W + beta[..., None, None] * outer(2 * error, k) * 1.1


def two_mistakes(W, k, v, beta):
    """Return a delta step with two mistakes, of which the first property shows one."""
    old = held(W, k)
    return W + outer(beta[..., None] ** 2 * (v - old), k / k.norm())


def close(W, k, v, beta):
    """Return a delta step that removes only half of the retrieved value."""
    old = held(W, k) / 2
    return W + outer(beta[..., None] * (v - old), k)


no_gradient = torch.no_grad()(EXERCISES["delta_step"].reference)


@pytest.mark.parametrize(
    ("name", "answer", "said", "not_said"),
    [
        ("write", lambda W, k, v: None, "None. Does it end in a `return`?", "yours is"),
        ("write", lambda W, k, v: W.T, "shape [3, 5], got [5, 3]", ""),
        ("write", lambda W, k, v: 1 / 0, "ZeroDivisionError: division by zero", ""),
        ("sum_normalize", lambda x: x / 2, "expected 1, got", ""),
        (
            *("write", lambda W, k, v: (W.float() + outer(v, k).float()).double()),
            *("few digits of float32", ""),
        ),
        (
            *("write", lambda W, k, v: (W + outer(v, k)).float()),
            *("float64 like the arguments, got float32", ""),
        ),
        ("cheap_mask", lambda steps: torch.ones(steps, steps), "bool, got float32", ""),
        ("write", lambda W, k, v: (W + outer(v, k)) * (1 + 1e-7), "✗", "float32"),
        # If a mistake is no known misconception, the message has a small example.
        (
            *("delta_step", close),
            "With W = 1, k = 0.5, v = 0, beta = 0.5 yours is 0.9375; right is 0.875. "
            "There old is 0.25 in yours, and 0.5 in the solution.",
            "sum rule",
        ),
        ("delta_step", lambda W, k, v, beta: W + outer(v, k), "✗", "yours is"),
        # The numbers are right, but another property fails.
        ("delta_step", no_gradient, "✗", "yours is"),
        ("chunked_sum", lambda q, k, v, n: (q @ k.mT).tril() @ v, "✗", "yours is"),
        # This exercise has no small example.
        ("ablate", lambda m, tokens, loss: torch.zeros(len(m.blocks)), "✗", "yours is"),
        # Only attention weights are compared, so no part of the result is named.
        (
            *("favor", lambda q, k, R: (3 * favor(q, k, R)[0], favor(q, k, R)[1] ** 2)),
            *("numbers differ", "yours is"),
        ),
        # A variable is not reported if only its sign differs from the solution's.
        ("gradient_step", gradient_step_too_far, "yours is", "There error"),
        # A misconception is named even if the answer raises, or has another mistake.
        (
            *("delta_step", delta_step_of_one_memory),
            *("the sum rule: what the key held is not removed", ""),
        ),
        ("delta_step", two_mistakes, "multiplies by beta twice", ""),
        # With S = 4, this mistake has the same result as a misconception.
        ("predict_error", lambda S, d: (S - 1) // d, "✗", "what the best keys lose"),
    ],
)
def test_what_is_said(name, answer, said, not_said):
    right, text = verdict(answer, name)
    assert not right and said in text
    assert not not_said or not_said not in text


def test_numbers_that_differ_are_shown_to_the_digit_that_differs():
    _, text = verdict(lambda W, k, v: (W + outer(v, k)) * (1 + 1e-7), "write")
    expected, got = re.search(r"expected (\S+), got (\S+) ", text).groups()
    assert expected != got


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
        return W - beta[..., None, None] * gradient

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


@pytest.mark.parametrize("wrap", [lambda answer: answer, functools.partial])
@pytest.mark.parametrize("name", ["positive_features", "dpfp"])
def test_the_line_that_raised_is_that_of_the_learner(name, wrap):
    def answer(*given):
        return torch.from_numpy(EXERCISES[name].reference(*given).numpy())

    text = verdict(wrap(answer), name)[1]
    assert ".numpy())` raised RuntimeError: Can't call numpy()" in text
    assert "lets gradients through" in text


def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(checking, "SECONDS", 0.5)

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
    # A call that Python cannot interrupt is left running.
    released = threading.Event()
    assert not verdict(lambda *_: released.wait(LONG), "write")[0]
    (left,) = set(threading.enumerate()) - before
    released.set()
    left.join(LONG)


def test_no_thread_lives_when_check_returns(monkeypatch):
    """When `check` returns, no thread is alive, since Python would abort at exit."""

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
    # A method wrapped by PyTorch would load the compiler, which takes a second.
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
    for name in ("write", "favor"):  # write compares a full result, favor a part.
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
    for name in (None, "delta_step"):
        right, text = verdict(thing, name)
        assert not right and "your function itself" in text


def test_unknown_names():
    def delta(W, k, v, beta):
        return W

    right, text = verdict(delta)
    assert not right and "no exercise named 'delta'" in text
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


def test_what_a_wrong_answer_prints_is_shown_once(capsys):
    def write(W, k, v):
        print("here I am")
        return W - outer(v, k) / 2

    assert not check(write)
    printed = capsys.readouterr().out
    assert (
        "yours is" in printed and printed.count("here I am") == 4
    )  # Two properties call the answer.


def test_a_slow_answer_is_not_called_often():
    called = []

    def write(W, k, v):
        called.append(time.sleep(0.3))
        return W

    verdict(write)
    assert len(called) < 20


NOISY = ["mean_of", "stream_mean", "mended_kernel", "favor", "delta_step"]


@pytest.mark.parametrize("name", NOISY)
def test_noise_has_no_name(name):
    """Noise is not reported as a misconception, not even as one that returns NaN."""
    right = EXERCISES[name].reference

    def noisy(*given):
        result = right(*given)
        parts = result if isinstance(result, tuple) else (result,)
        parts = tuple(x + torch.linspace(0.1, 0.3, x.numel()).view_as(x) for x in parts)
        return parts if isinstance(result, tuple) else parts[0]

    text = verdict(noisy, name)[1]
    assert not any(why in text for why, _ in EXERCISES[name].misconceptions), text


def test_no_line_is_lost_to_recognition(monkeypatch):
    """Standard output is not redirected while `check` looks for a misconception."""

    def recognise(*_):
        time.sleep(0.5)
        return ""

    monkeypatch.setattr(checking, "_recognise", recognise)
    mine, seen = sys.stdout, []
    for _ in checking._verdicts(EXERCISES["write"], lambda W, k, v: W):
        time.sleep(0.1)
        seen.append(sys.stdout)
    assert len(seen) == 2 and all(out is mine for out in seen)
