"""The figure of feedback shows the dependencies that autograd finds.

Gradients are taken through fwlab's own stacks, in float64: a state sees
another where the gradient from one to the other is not exactly 0.
"""

import functools
import re

import pytest
import torch

from fwlab.layers import Block, FeedbackTransformer, SoftmaxAttention
from fwlab.ops.feedback_memory import naive

L, T, WIDTH, HEADS = 3, 6, 8, 2
PAGE = "figures/feedback.html"
ALL = [(l, t) for t in range(1, T + 1) for l in range(L + 1)]
MODELS = {"transformer": "Transformer", "feedback": "Feedback transformer"}
CHOSEN = [(0, 1), (3, 1), (1, 2), (1, 4), (2, 3), (0, 5), (2, 6), (3, 6)]


def seen(result, states: dict) -> set:
    """The names of those `states` that have a gradient from `result`."""
    weights = torch.linspace(0.5, 2, result.numel(), dtype=result.dtype)
    loss = (result.flatten() * weights).sum()
    grads = torch.autograd.grad(
        loss, list(states.values()), allow_unused=True, retain_graph=True
    )
    return {
        name
        for name, grad in zip(states, grads, strict=True)
        if grad is not None and grad.count_nonzero()
    }


def leaf():
    return torch.randn(1, WIDTH, dtype=torch.float64).requires_grad_()


def transformer() -> dict:
    """Per state: what it reads directly, and all that it depends on."""
    blocks = [Block(SoftmaxAttention(WIDTH, HEADS), WIDTH).double() for _ in range(L)]

    def layer(l, below):
        return blocks[l - 1](torch.stack(below, dim=1)).unbind(1)

    states = {(0, t): leaf() for t in range(1, T + 1)}
    for l in range(1, L + 1):
        # Taken apart and put together again, so that each is a tensor.
        made = layer(l, [states[l - 1, t] for t in range(1, T + 1)])
        states |= {(l, t): made[t - 1] for t in range(1, T + 1)}
    found = {}
    for l, t in ALL:
        others = {name: x for name, x in states.items() if name != (l, t)}
        direct = set()
        if l:
            below = {(l - 1, j): leaf() for j in range(1, T + 1)}
            direct = seen(layer(l, list(below.values()))[t - 1], below)
        found[l, t] = direct, seen(states[l, t], others) if l else set()
    return found


def feedback(monkeypatch) -> dict:
    """The same for the feedback transformer, by its naive operation."""
    stack = FeedbackTransformer(WIDTH, HEADS, L).double()
    w = stack.weights()
    states, t = {}, 1
    norm, merge = naive.norm, naive.merge_memory

    def watch_norm(x, scale):
        # The norm before the attention gets x_t^l as it is.
        for l in range(L):
            if scale.data_ptr() == w.norm_mixer[l].data_ptr():
                states[l, t] = x
        return norm(x, scale)

    def watch_merge(stacked, logits):
        # What leaves the stack goes on through its memory alone.
        nonlocal t
        rows = list(stacked.unbind(0))
        states[L, t] = rows[L]
        t += 1
        return merge(torch.stack(rows), logits)

    x = torch.randn(1, T, WIDTH, dtype=torch.float64).requires_grad_()
    empty = torch.zeros(1, 0, L, HEADS, WIDTH // HEADS, dtype=torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(naive, "norm", watch_norm)
        patch.setattr(naive, "merge_memory", watch_merge)
        y, *_ = naive.feedback(x, w, HEADS, empty, empty, None)
    torch.testing.assert_close(y, stack(x))  # it is the real stack
    assert set(states) == set(ALL)

    found = {}
    for l, t_ in ALL:
        others = {name: state for name, state in states.items() if name != (l, t_)}
        reachable = seen(states[l, t_], others) if l else set()
        found[l, t_] = one_layer(w, l, t_) if l else set(), reachable
    return found


def one_layer(w, l: int, t: int) -> set:
    """What layer l reads at step t: a stack of it alone, on fresh states."""
    states = {name: leaf() for name in ALL}
    part = w._replace(
        merge=w.merge[:2],
        **{
            name: getattr(w, name)[l - 1 : l]
            for name in w._fields
            if name not in ("merge", "positions")
        },
    )
    m = [
        naive.merge_memory(torch.stack([states[k, j] for k in range(L + 1)]), w.merge)
        for j in range(1, t)
    ]
    k = v = torch.zeros(1, 0, 1, HEADS, WIDTH // HEADS, dtype=torch.float64)
    if m:
        k, v = (
            naive.project_memory(
                torch.stack(m, dim=1), W[0], part.norm_memory[0], HEADS
            ).unsqueeze(2)
            for W in (part.to_k, part.to_v)
        )
    y, *_ = naive.feedback(states[l - 1, t][:, None], part, HEADS, k, v, None)
    return seen(y, states)


@pytest.fixture(scope="module")
def truth():
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        return {"transformer": transformer(), "feedback": feedback(monkeypatch)}


def longest(graph: dict, state: tuple) -> int:
    """Layers on the longest path to a state, by what each one reads."""

    @functools.cache
    def to(state):
        return max((1 + to(other) for other in graph[state][0]), default=0)

    return to(state)


@pytest.fixture
def tab(look):
    return look(PAGE)


def state(tab) -> dict:
    return tab.evaluate("document.querySelector('#figure-feedback').figure.state()")


def cell(tab, l: int, t: int):
    return tab.locator(f"#figure-feedback [data-state='{l},{t}']")


def choose_model(tab, model: str):
    tab.get_by_role("radio", name=MODELS[model], exact=True).check()


def go(tab, goal: tuple):
    """To a state by arrow keys, from wherever the figure is."""
    l, t = state(tab)["chosen"]
    up, right = goal[0] - l, goal[1] - t
    cell(tab, l, t).focus()
    for key, times in (
        ("ArrowUp", up),
        ("ArrowDown", -up),
        ("ArrowRight", right),
        ("ArrowLeft", -right),
    ):
        for _ in range(max(0, times)):
            tab.keyboard.press(key)  # to whatever has the focus by now


def check(tab, model: str, chosen: tuple, truth: dict):
    now = state(tab)
    graph = truth[model]
    direct, reachable = graph[chosen]
    assert (now["model"], tuple(now["chosen"])) == (model, chosen)
    for name, expected in (("direct", direct), ("reachable", reachable)):
        shown = [tuple(other) for other in now[name]]
        assert set(shown) == expected, name
        assert len(shown) == len(expected), name
    top = {j for k, j in direct if k == L}
    assert set(now["memories"]) == (top if model == "feedback" else set())
    assert now["longest"] == longest(graph, chosen)
    assert now["sequential"] == max(longest(graph, other) for other in ALL)

    for other in ALL:
        look = (
            "chosen"
            if other == chosen
            else "direct"
            if other in direct
            else "reachable"
            if other in reachable
            else "none"
        )
        box = cell(tab, *other)
        assert box.get_attribute("data-look") == look, other
        assert box.text_content() == str(longest(graph, other)), other
        assert box.get_attribute("tabindex") == ("0" if look == "chosen" else "-1")
        assert box.get_attribute("aria-pressed") == str(look == "chosen").lower()
    words = tab.inner_text("#figure-feedback .fw-words")
    assert words.startswith(MODELS[model] + ".")
    assert f"takes {now['sequential']} layers one after the other" in words
    if chosen[0]:
        assert f"Layer {chosen[0]} at step {chosen[1]} " in words
        assert f"depend on {len(reachable)} of the other {len(ALL) - 1} " in words
        assert re.search(rf"path to it has {now['longest']} layers?\.", words)
    else:
        assert "reads no other state" in words


@pytest.mark.parametrize("model", MODELS)
def test_taps(tab, model, truth):
    choose_model(tab, model)
    for chosen in CHOSEN:
        cell(tab, *chosen).click()
        check(tab, model, chosen, truth)


@pytest.mark.parametrize("model", MODELS)
def test_arrow_keys(tab, model, truth):
    choose_model(tab, model)
    for chosen in CHOSEN:
        go(tab, chosen)
        check(tab, model, chosen, truth)


def test_edges_of_the_grid(tab):
    go(tab, (L, T))
    for key in ("ArrowUp", "ArrowRight"):
        tab.keyboard.press(key)
        assert state(tab)["chosen"] == [L, T]
    go(tab, (0, 1))
    for key in ("ArrowDown", "ArrowLeft"):
        tab.keyboard.press(key)
        assert state(tab)["chosen"] == [0, 1]


def test_the_model_by_keyboard(tab, truth):
    chosen = tuple(state(tab)["chosen"])
    check(tab, "feedback", chosen, truth)
    tab.get_by_role("radio", name=MODELS["feedback"], exact=True).press("ArrowLeft")
    check(tab, "transformer", chosen, truth)


def test_depth(truth):
    """The formulas of the page."""
    for l, t in ALL:
        assert longest(truth["transformer"], (l, t)) == l
        with_feedback = (t - 1) * L + l if l else 0
        assert longest(truth["feedback"], (l, t)) == with_feedback


def test_on_a_phone(look, truth):
    tab = look(PAGE, width=390, has_touch=True)
    for other in ALL:
        box = cell(tab, *other).bounding_box()
        assert min(box["width"], box["height"]) >= 24
    cell(tab, 2, 5).tap()
    check(tab, "feedback", (2, 5), truth)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
