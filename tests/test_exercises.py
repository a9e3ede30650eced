"""Test solutions, misconceptions and mutants of all exercises."""

import contextlib
import importlib.util
import io
import re
import signal
import sys

import pytest
import torch
from solution_mutants import mutants

from fwlab import feature_maps, ops
from fwlab.data.retrieval import last_values
from fwlab.exercises import (
    EXERCISES,
    answers,
    assert_correct,
    check,
    checking,
    solution,
)
from fwlab.exercises.notation import Misconception
from fwlab.ops.feedback import naive

#: A timeout in seconds that no test here reaches, even on a busy machine.
LONG = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(checking, "SECONDS", LONG)


def verdict(answer, name=None):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        right = check(answer, name)
    return right, out.getvalue()


def changed(name, edits):
    """Return the solution of an exercise as a function, with `edits` applied."""
    return Misconception(EXERCISES[name].reference, edits, "").made


def printed(name):
    """Return the text that `solution` prints for an exercise."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        solution(name)
    return out.getvalue()


# --- Solutions ---------------------------------------------------------------


@pytest.mark.parametrize("name", EXERCISES)
def test_a_printed_solution_is_right(name):
    """A printed solution is right in a new notebook that defines nothing else."""
    exec(source := printed(name), notebook := {})
    assert len(source.splitlines()) < 50 and '"""' not in source
    right, text = verdict(notebook[name])
    assert right and "✗" not in text
    assert text.count("✓") == len(EXERCISES[name].properties)


def test_the_solution_of_a_function_is_that_of_its_name():
    assert printed(EXERCISES["write"].reference) == printed("write")


def written(rule, W, k, v, *gates):
    """Return W after an fwlab operation has written one key and value."""
    q, k, v, *gates = (x[None, None, None] for x in (k, k, v, *gates))
    _, state = rule(q, k, v, *gates, state=W[None, None], return_state=True)
    return state[0, 0]


def read(rule, q, k, v, *gates):
    """Return the outputs of an fwlab operation for one sequence."""
    return rule(*(x[None, :, None] for x in (q, k, v, *gates)))[0, :, 0]


def sums(*parts, **options):
    return ops.sum_rule(*parts, normalize=False, **options)


def gradients(q, k, v, beta, dy):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, beta)]
    return torch.autograd.grad((read(ops.delta_rule, *leaves) * dy).sum(), leaves)


def layer(x, W_q, W_k, W_v, W_beta, W_out):
    q, k = (feature_maps.DPFP(1)(x @ W.mT)[:, :, None] for W in (W_q, W_k))
    q, k = map(feature_maps.sum_normalize, (q, k))
    y = ops.delta_rule(q, k, (x @ W_v.mT)[:, :, None], (x @ W_beta.mT).sigmoid())
    return x + y[:, :, 0] @ W_out.mT


def mean(k, v, *bias, rule=ops.aft_simple):
    """Return the means that an AFT operation computes, before the gate of one half."""
    return 2 * rule(*(x[None] for x in (0 * k, k, v)), *bias)[0]


#: fwlab functions that solutions must agree with, without sharing code.
#: In other exercises, a property compares answers with an independent result.
TRUTHS = {
    "gated_delta_step": lambda W, k, v, beta, decay: written(
        ops.gated_delta_rule, W, k, v, beta, decay.log()
    ),
    "erase_and_write": lambda W, decay, k, v, e, w: written(
        ops.gated_delta_rule_2, W, k, v, e, w, decay.log()
    ),
    "ask_is_not_write": lambda W, d, r, k, v, s: written(
        ops.rwkv7_rule, W, k, s * v, d * r, -s * k, d.log()
    ),
    "chunked_sum": lambda q, k, v, chunk: read(sums, q, k, v),
    "chunked_delta": lambda q, k, v, beta, chunk: read(ops.delta_rule, q, k, v, beta),
    "delta_layer": lambda q, k, v, x: read(ops.delta_rule, q, k, v, x.sigmoid()),
    "recomputing_backward": gradients,
    "fast_weight_layer": layer,
    "mended_layer": layer,
    "dpfp": lambda x, nu: feature_maps.DPFP(nu)(x),
    "sum_normalize": feature_maps.sum_normalize,
    "make_batch": last_values,
    "aft_layer": lambda q, k, v, w: ops.aft_full(q[None], k[None], v[None], w)[0],
    "conv_bias": lambda k, v, kernel: mean(
        k[:, None], v[:, None], kernel[None], rule=ops.aft_conv
    )[:, 0],
    "stream_mean": mean,
    "merge_memory": naive.merge_memory,
    "feedback_attention": ops.feedback_attention,
}


@pytest.mark.parametrize("name", TRUTHS)
def test_the_solution_agrees_with_the_function_of_fwlab(name):
    exercise = EXERCISES[name]
    for seed in range(3):
        given = exercise.example(torch.Generator().manual_seed(seed))
        found, right = (
            answers.tensors(f(*answers.copied(given).values()))
            for f in (exercise.reference, TRUTHS[name])
        )
        assert checking._same(found, right), (name, found, right)


# --- Wrong answers -----------------------------------------------------------

#: Answers that return no valid result, which every exercise must report first.
NONE = [
    lambda *arguments: 3.0,
    lambda *arguments: torch.tensor(1.0),
    lambda *arguments: None,
    lambda *arguments: 1 / 0,
    lambda: None,
    lambda *arguments: sys.exit("bye"),
]


def fault(name, answer, sentence, misconception=""):
    """Return [] if an answer fails with the message `sentence`, else an error."""
    right, text = verdict(answer, name)
    why = ["", "", *text.splitlines()][-2].strip()
    one = not right and text.count("✗") == 1 and f"✗ {sentence}\n" in text
    if one and misconception in text and "Traceback" not in text and len(why) > 20:
        return []
    return [f"{name}: expected ✗ {sentence}, {misconception}, got\n{text}"]


def written_otherwise(answer):
    """Wrap an answer so that it copies its arguments and its results."""

    def again(x):
        return x.clone() if torch.is_tensor(x) else x

    def other(*arguments):
        result = answer(*map(again, arguments))
        return tuple(map(again, result)) if type(result) is tuple else again(result)

    return other


@pytest.mark.parametrize("name", EXERCISES)
def test_what_is_no_result_is_said_first(name):
    """An answer that returns no valid result fails at the first property."""
    numbers = ("returns a number", "returns one number")
    first = EXERCISES[name].properties[0].says
    for answer in NONE[2 * first.startswith(numbers) :]:
        assert fault(name, answer, EXERCISES[name].properties[0].says) == []


@pytest.mark.parametrize("name", EXERCISES)
def test_each_misconception_fails_where_it_stands_and_gets_its_own_sentence(name):
    """Each misconception fails at its property with its message, even if wrapped."""
    for holds in EXERCISES[name].properties:
        for text, functions in holds.catches.items():
            assert text.endswith((".", "?")) and len(text) < 160
            for each in functions:
                answer = written_otherwise(each)
                assert fault(name, answer, holds.says, text) == []
    if EXERCISES[name].misconceptions:
        with pytest.raises(AssertionError, match=re.escape(text)):
            assert_correct(answer, name)


#: A pattern for the small constant in a misconception's code.
EPSILON = r"(?<=[=\s])1e-\d+(?=\))"


@pytest.mark.parametrize("name", EXERCISES)
def test_a_misconception_is_named_whatever_its_epsilon(name):
    for holds in EXERCISES[name].properties:
        for text, (first, *_) in holds.catches.items():
            old, arrow, new = first.line.partition(" ->")
            other = re.sub(EPSILON, "1e-10", new)
            if arrow and other != new and not re.search("psilon|limit", text):
                answer = changed(name, f"{old} ->{other}")
                assert fault(name, answer, holds.says, text) == []


@pytest.mark.parametrize("name", [n for n, e in EXERCISES.items() if e.start])
def test_a_bug_hunt_begins_with_a_known_fault(name):
    exec(EXERCISES[name].start, names := {"torch": torch})
    right, text = verdict(names[name], name)
    assert not right
    assert any(what in text for what, _ in EXERCISES[name].misconceptions), text


@pytest.mark.parametrize("name", EXERCISES)
def test_right_numbers_without_gradients_fail(name):
    """Right answers without gradients fail, even if only one argument is detached."""
    right, asked = EXERCISES[name].reference, EXERCISES[name].properties
    says = [each.says for each in asked if each.code.startswith("gradient(")]
    for answer in (torch.no_grad()(right), lambda x, *more: right(x.detach(), *more)):
        assert not says or fault(name, answer, says[0]) == []


#: Mutants that are right answers: the exercise, the change and the reason.
SAME = r"""
positive_features: h * features -> h / features # in another order
favor: top_q.detach() -> top_q | top_k.detach() -> top_k # cancels, has no gradient
my_features: 3 -> 4 # higher powers are better than DPFP, too
few_features: 3 -> 4 # higher powers have fewer errors, too
delta_layer, make_batch, position_shift, read_bias: 1 -> -1 # the last dimension
mended_kernel, two_steps, modern_layer, gain: 1 -> -1 # the last dimension
recursive_least_squares: 1 -> -1 # a chain of equal dimensions
modern_layer: 2 -> -2 # the same dimension
sum_normalize: 1 -> 2 | 1 -> -1 # nothing reads the number
l2_write: 1 -> 2 # nothing reads the number
mean_of, stream_mean: 0 -> 1 # nothing reads the number
running_step: 0 -> 1 | 1 -> 2 | 1 -> -1 # nothing reads the number
running_step: torch.maximum(log_sum, k).detach() -> torch.maximum(log_sum, k) # cancels
generate: len(text) < length -> len(text) <= length # one step more, within its limit
chunked_sum, chunked_delta: v[..., :1, :].mT @ k[..., :1, :] -> \
v[..., :1, :].mT * k[..., :1, :] # an outer product
chunked_sum, chunked_delta: v[..., :1, :].mT @ k[..., :1, :] -> \
k[..., :1, :] # zeros broadcast
triangular: 1 -> -1 # the diagonal of ones is taken as known
conv_bias: 0 -> 1 # padding that is cut off again
unseal: 50 + 0 * values -> 50 - 0 * values # plus or minus 0
unseal: 50 + 0 * values -> 0 * values | 50 -> 51 | 50 -> -50 # the gate cancels
unseal: 0 * values -> values | 0 -> 1 # the gate cancels
frozen_kernels: (i + 1) % window -> i + 1 # fewer heads than the window is long
frozen_kernels: 6.0 -> 7.0 # as sharp
frozen_kernels: i + 1 -> i - 1 | i + 1 -> i | 1 -> 2 | 1 -> -1 # other distances
fool: start + ['x ++ ;', 'print x ;'] * 4 + ['x -- ;', 'print x ;'] -> \
start + ['x ++ ;', 'print x ;'] * 4 # a shorter program fools it, too
four_cups: M * torch.linalg.det(M) -> M / torch.linalg.det(M) # it is 1 or -1
four_cups: 4 -> -4 # the determinant turns the sign back
recall_by_hand: 1 -> 2 | 1 -> -1 # the largest number stays the largest
recall_by_hand: 2 -> -2 # the same column of three
better_step: 0.1 -> 1.1 # another strength is better than the delta rule, too
by_luck: group <= sum(mine.tolist()) + 1e-09 -> group < sum(mine.tolist()) + 1e-09 | \
sum(mine.tolist()) + 1e-09 -> sum(mine.tolist()) # only rounding decides
"""
#: Exercises for which nearly every mutant is a right answer.
LEFT_OUT = {"break_it", "cheap_mask", "my_step"}


def passes(name, answer):
    """Return True if an answer passes all properties of an exercise; print nothing."""

    def late(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    for number, each in enumerate(EXERCISES[name].properties):
        signal.alarm(5)  # A mutant may never end.
        try:
            generator = torch.Generator().manual_seed(number)
            each.holds(answer, EXERCISES[name].reference, generator)
        except Exception:
            return False
        finally:
            signal.alarm(0)
    return True


@pytest.mark.parametrize("name", [n for n in EXERCISES if n not in LEFT_OUT])
def test_a_change_of_the_solution_is_refused(name):
    same = set()
    for names, changes in re.findall("(.+?): (.+) #", SAME.replace("\\\n", "")):
        same |= {*changes.split(" | ")} if name in names.split(", ") else set()
    passed = {what for what, answer in mutants(EXERCISES[name]) if passes(name, answer)}
    assert passed == same


# --- Faults in docstrings ----------------------------------------------------


HEAD = """from fwlab.exercises import exercise


@exercise()
def faulty(W, v):
    \"\"\"Task.

    """

RIGHT, WRONG = "✓ is right\n        agrees()\n    ", "✗ Wrong.\n        "
#: Faulty docstrings of exercises, and the line, text and fault that are reported.
FAULTS = {
    "✓ is right": (8, "is right", "has no code below it"),
    f"{RIGHT}  more": (10, "more", "is neither text nor code"),
    "✓ is right\n        nothing()": (9, "nothing()", "raises NameError"),
    "? hint": (4, "faulty", "has no ✓"),
    f"{WRONG}W=v": (8, "Wrong.", "comes before the first ✓"),
    f"{RIGHT}{WRONG}W=v\n    {WRONG}v=W": (10, "Wrong.", "is there twice"),
    "✓ is right\n        agrees": (9, "agrees", "raises TypeError('it is not called')"),
}
#: Faulty edits of misconceptions, and the faults that are reported.
EDITS = {
    "W + -> v + ; + v -> + W": "two edits overlap",
    "v * W -> W": "'v * W' occurs 0 times, not once",
    "W -> v": "'W' occurs 2 times, not once",
    "W + v -> W ; v": "there is no -> in 'v'",
    "W + v -> W +": "is not Python: invalid syntax",
    "W +": "is not Python: invalid syntax",
}
FAULTS |= {f"{RIGHT}{WRONG}{edit}": (11, edit, why) for edit, why in EDITS.items()}


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_told_with_its_place(text, tmp_path):
    line, said, why = FAULTS[text]
    file = tmp_path / "faulty.py"
    file.write_text(f'{HEAD}{text}\n    """\n    return W + v\n', "utf-8")
    spec = importlib.util.spec_from_file_location("faulty", file)
    sys.modules["faulty"] = module = importlib.util.module_from_spec(spec)
    try:
        with pytest.raises(ValueError) as raised:
            spec.loader.exec_module(module)
            EXERCISES["faulty"].compile()
    finally:
        EXERCISES.pop("faulty", None)
        del sys.modules["faulty"]
    assert str(raised.value).startswith(f"{file}:{line}: faulty: {said!r}: {why}")
