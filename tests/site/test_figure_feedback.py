"""The figure of feedback shows the dependencies that autograd finds.

Gradients are taken through fwlab's own stacks, in float64: a state sees
another where the gradient from one to the other is not exactly 0.
"""

import functools
import re
from itertools import pairwise

import pytest
import torch
from built import asks

from fwlab.layers import Block, FeedbackTransformer, SoftmaxAttention
from fwlab.ops.feedback import naive

L, T, WIDTH, HEADS = 3, 6, 8, 2
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


def direct(model: str, l: int, t: int) -> set:
    """What a state reads: the same layer's inputs up to its step, or, with
    feedback, its own input and all states of the past."""
    if model == "transformer":
        return {(l - 1, j) for j in range(1, t + 1)} if l else set()
    return {(l - 1, t), *((k, j) for k, j in ALL if j < t)} if l else set()


def transformer() -> dict:
    """All states, each a function of those before it."""
    blocks = [Block(SoftmaxAttention(WIDTH, HEADS), WIDTH).double() for _ in range(L)]
    states = {(0, t): leaf() for t in range(1, T + 1)}
    for l in range(1, L + 1):
        # Taken apart and put together again, so that each is a tensor.
        below = torch.stack([states[l - 1, t] for t in range(1, T + 1)], dim=1)
        made = blocks[l - 1](below).unbind(1)
        states |= {(l, t): made[t - 1] for t in range(1, T + 1)}
    return states


def graph(model: str, states: dict) -> dict:
    """Per state: what it reads directly, and all that autograd finds behind it."""
    edges = {}
    for l, t in ALL:
        others = {name: x for name, x in states.items() if name != (l, t)}
        reachable = seen(states[l, t], others) if l else set()
        reads = direct(model, l, t)
        assert reads | {x for low in reads for x in edges[low][1]} == reachable
        edges[l, t] = reads, reachable
    return edges


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
    return states


@pytest.fixture(scope="module")
def truth():
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        states = {"transformer": transformer(), "feedback": feedback(monkeypatch)}
    return {model: graph(model, states[model]) for model in MODELS}


def longest(graph: dict, state: tuple) -> int:
    """Layers on the longest path to a state, by what each one reads."""

    @functools.cache
    def to(state):
        return max((1 + to(other) for other in graph[state][0]), default=0)

    return to(state)


@pytest.fixture
def figure(fresh):
    """Where nothing moves by itself."""
    return fresh("feedback", motion="reduce")


def cell(figure, model: str, l: int, t: int):
    drawing = figure.css("svg").nth(list(MODELS).index(model))
    return drawing.locator(f"[data-state='{l},{t}']")


def go(figure, model: str, goal: tuple):
    """To a state by arrow keys, from wherever the figure is."""
    l, t = figure.state()["chosen"]
    up, right = goal[0] - l, goal[1] - t
    cell(figure, model, l, t).focus()
    for key, times in (
        *(("ArrowUp", up), ("ArrowDown", -up)),
        *(("ArrowRight", right), ("ArrowLeft", -right)),
    ):
        for _ in range(times):
            figure.tab.keyboard.press(key)  # to whatever has the focus by now


def ticks(figure, count: int):
    """Layers of the path, in milliseconds."""
    figure.tab.clock.run_for(count * 350)


def check(figure, chosen: tuple, truth: dict, drawn: int | None = None):
    """What both models show; `drawn` layers of the longest path, or all of it."""
    rounds = drawn
    if rounds is None:
        rounds = max(longest(graph, chosen) for graph in truth.values())
    now, words, drawings = figure.ask(asks.FEEDBACK)
    assert tuple(now["chosen"]) == chosen
    if not chosen[0]:
        # An input has no path: both begin with it, and end.
        assert "reads no other state, in either model" in words
    else:
        assert words.startswith(f"Layer {chosen[0]} at step {chosen[1]}. ")
        # As the page says; the transformer has others that are as long.
        begin = {tuple(model["path"][0]) for model in now["models"].values()}
        assert begin == {(0, 1)}
    for model, shown in zip(MODELS, drawings, strict=True):
        check_model(shown, now["models"][model], model, chosen, truth[model], rounds)
        if not chosen[0]:
            continue
        said = words[words.index(MODELS[model] + ": it reads") :]
        length = longest(truth[model], chosen)
        assert f"depend on {len(truth[model][chosen][1])} of the other 23 " in said
        assert re.search(r"path to it has (\d+) layers?\.", said)[1] == str(length)
        whole = max(longest(truth[model], other) for other in ALL)
        assert re.search(r"takes (\d+) layers, one after", said)[1] == str(whole)


def check_model(shown, now: dict, model: str, chosen: tuple, graph: dict, rounds: int):
    direct, reachable = graph[chosen]
    for name, expected in (("direct", direct), ("reachable", reachable)):
        assert sorted(map(tuple, now[name])) == sorted(expected), name
    top = {j for k, j in direct if k == L}
    assert set(now["memories"]) == (top if model == "feedback" else set())
    length = longest(graph, chosen)
    assert now["longest"] == length
    assert now["sequential"] == max(longest(graph, other) for other in ALL)

    # A path along what is read, and as long as any.
    path = [tuple(step) for step in now["path"]]
    assert path[-1] == chosen and len(path) == length + 1
    assert all(low in graph[high][0] for low, high in pairwise(path))
    count = min(rounds, length)
    assert now["drawn"] == count
    # Each line begins and ends in the cells that it connects.
    assert [[tuple(end) for end in hop] for hop in shown["hops"]] == [
        list(hop) for hop in pairwise(path[: count + 1])
    ]
    assert shown["bar"] == [i < count for i in range(now["sequential"])]
    if length:
        layers = "layer" if length == 1 else "layers"
        start = f"longest path: {count} of {length} {layers};"
        assert shown["counter"].startswith(start)
    assert shown["counter"].endswith(f"whole sequence: {now['sequential']}")

    for other in ALL:
        looks = {"chosen": {chosen}, "direct": direct, "reachable": reachable}
        look = next((name for name, of in looks.items() if other in of), "none")
        own = look == "chosen"
        assert shown["cells"]["{},{}".format(*other)] == {
            "look": look,
            "text": str(longest(graph, other)),
            "tab": 0 if own else -1,
            "pressed": str(own).lower(),
            "known": longest(graph, other) <= rounds,
        }


@pytest.mark.parametrize("model", MODELS)
def test_taps_and_arrow_keys(figure, model, truth):
    """In either model: both show it."""
    for chosen in CHOSEN:
        cell(figure, model, *chosen).click()
        check(figure, chosen, truth)
    for chosen in CHOSEN:
        go(figure, model, chosen)
        check(figure, chosen, truth)
    # They end at the edges of the grid.
    for corner, keys in (
        *(((L, T), ("ArrowUp", "ArrowRight")), ((0, 1), ("ArrowDown", "ArrowLeft"))),
    ):
        go(figure, model, corner)
        for key in keys:
            figure.tab.keyboard.press(key)
            assert figure.state()["chosen"] == list(corner)


@pytest.fixture
def moving(fresh):
    """In a time that the tests advance; a click on a cell starts it again."""
    return fresh("feedback", timed=True)


def test_the_path_is_drawn_by_itself(fresh):
    """It may have ended before this test looks."""
    fresh("feedback").until(
        "state().running || Object.values(state().models).some((one) => one.drawn)"
    )


def test_the_path_is_drawn_layer_by_layer(moving, truth):
    for chosen in ((3, 2), (1, 3), (2, 1)):
        cell(moving, "transformer", *chosen).click()
        length = longest(truth["feedback"], chosen)
        for drawn in range(length):
            check(moving, chosen, truth, drawn)
            assert moving.state()["running"]
            ticks(moving, 1)
        check(moving, chosen, truth)
        assert not moving.state()["running"]
        ticks(moving, 10)
        check(moving, chosen, truth)


def test_play_replays_and_pauses(moving, truth):
    cell(moving, "feedback", 1, 3).click()
    ticks(moving, 7)
    check(moving, (1, 3), truth)
    moving.role("button", name="Play", exact=True).press("Enter")
    check(moving, (1, 3), truth, 0)
    ticks(moving, 3)
    moving.role("button", name="Pause", exact=True).press("Enter")
    ticks(moving, 10)
    check(moving, (1, 3), truth, 3)
    moving.press("Play")
    ticks(moving, 2)
    check(moving, (1, 3), truth, 5)
    cell(moving, "feedback", 0, 3).click()
    assert not moving.state()["running"]
    check(moving, (0, 3), truth)


def test_depth(truth):
    """The formulas of the page."""
    for l, t in ALL:
        assert longest(truth["transformer"], (l, t)) == l
        with_feedback = (t - 1) * L + l if l else 0
        assert longest(truth["feedback"], (l, t)) == with_feedback
