"""The figure of feedback shows the dependencies that autograd finds.

Gradients are taken through fwlab's own stacks, in float64: a state sees
another where the gradient from one to the other is not exactly 0.
"""

import functools
import re
from itertools import pairwise

import pytest
import torch

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


def check(figure, chosen: tuple, truth: dict, drawn: int | None = None):
    """What both models show; `drawn` layers of the longest path, or all of it."""
    now, words, drawings = figure.ask(SHOWN)
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
        check_model(shown, now["models"][model], model, chosen, truth[model], drawn)
        if not chosen[0]:
            continue
        said = words[words.index(MODELS[model] + ": it reads") :]
        length = longest(truth[model], chosen)
        assert f"depend on {len(truth[model][chosen][1])} of the other 23 " in said
        assert re.search(r"path to it has (\d+) layers?\.", said)[1] == str(length)
        whole = max(longest(truth[model], other) for other in ALL)
        assert re.search(r"takes (\d+) layers, one after", said)[1] == str(whole)


def check_model(shown, now: dict, model: str, chosen: tuple, graph: dict, drawn):
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
    count = length if drawn is None else min(drawn, length)
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
        }


#: Of each drawing, what it shows; of the lines of its path, the states at both ends.
SHOWN = """[state(), words(), all("svg:has([data-state])").map((svg) => {
  const cells = all("[data-state]", svg);
  const at = ({ x, y }) => {
    const near = cells.filter((cell) => {
      const b = cell.querySelectorAll("rect")[1].getBBox();
      return x >= b.x && x <= b.x + b.width && y >= b.y && y <= b.y + b.height;
    });
    return near.map((cell) => cell.dataset.state.split(",").map(Number))[0];
  };
  const ends = (line) => [0, line.getTotalLength()].map((s) => at(line.getPointAtLength(s)));
  const part = (name, tag) => all(`[data-part=${name}] ${tag}`, svg);
  return {
    hops: part("path", "path").map(ends),
    bar: part("bar", "rect").map((one) => one.getAttribute("fill") !== "none"),
    counter: svg.querySelector("[data-part=counter]").textContent,
    cells: Object.fromEntries(cells.map((cell) => [cell.dataset.state, {
      look: cell.dataset.look,
      text: cell.textContent,
      tab: cell.tabIndex,
      pressed: cell.ariaPressed,
    }])),
  };
})]"""


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


#: Milliseconds of a layer of the path.
TICK = 350


@pytest.fixture
def moving(fresh):
    """In a time that the tests advance; a click on a cell starts it again."""
    return fresh("feedback", timed=True)


def ticks(figure, count: int):
    figure.tab.clock.run_for(count * TICK)


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


def test_nothing_moves_where_that_is_asked_for(fresh, truth):
    figure = fresh("feedback", motion="reduce", timed=True)
    check(figure, (2, 4), truth)  # the whole path at once
    cell(figure, "feedback", 3, 6).click()
    check(figure, (3, 6), truth)
    ticks(figure, 20)
    check(figure, (3, 6), truth)
    assert figure.ask("document.getAnimations().length") == 0
    assert figure.role("button", name="Play").count() == 0


def test_depth(truth):
    """The formulas of the page."""
    for l, t in ALL:
        assert longest(truth["transformer"], (l, t)) == l
        with_feedback = (t - 1) * L + l if l else 0
        assert longest(truth["feedback"], (l, t)) == with_feedback


def test_on_a_phone(fresh, truth):
    figure = fresh("feedback", (390, 844), "reduce", touch=True)
    sides = figure.ask(
        """all("[data-state]").map((e) => e.getBoundingClientRect())
        .flatMap(({ width, height }) => [width, height])"""
    )
    assert len(sides) == 4 * len(ALL) and min(sides) >= 44
    cell(figure, "feedback", 2, 5).tap()
    check(figure, (2, 5), truth)
    assert figure.wide() <= 390
