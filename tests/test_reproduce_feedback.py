"""Test layers, costs and tasks of docs/reproduce/feedback-*.py."""

from importlib import import_module

import pytest
import torch
from statements import build

from fwlab.layers import FeedbackTransformer, SoftmaxAttention
from fwlab.models.language_model import Size

depth = import_module("feedback-depth")
curriculum = import_module("feedback-curriculum")
tasks = import_module("feedback-tasks")
SIZE = Size(layers=2, heads=2, d_model=8, d_ff=16, max_len=12)
USUAL = {"feedback": FeedbackTransformer, "transformer": SoftmaxAttention}


def reached(layer):
    """Return the pairs (i, t) for which input i changes output t of a layer."""
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    pairs = set()
    for changed in range(12):
        other = x.clone()
        other[0, changed] = torch.randn(8)
        moved = (layer(other) - layer(x)).abs().amax((0, 2)) > 1e-9
        pairs |= {(changed, t) for t in moved.nonzero()[:, 0].tolist()}
    return pairs


@pytest.mark.parametrize("model", USUAL)
def test_a_layer_sees_its_own_block_and_the_one_before(model):
    torch.manual_seed(0)
    layer = depth.mixer(model, 3).make(SIZE).double()
    before = {(i, t) for t in range(12) for i in range(t + 1)}
    near = {(i, t) for i, t in before if t // 3 - i // 3 <= 1}
    if model == "feedback":
        assert reached(layer) == before  # Memories depend on all earlier steps.
        layer.merge.data[1:] = -1000  # After this, each memory is only an embedding.
    assert reached(layer) == near


@pytest.mark.parametrize("model", USUAL)
def test_a_long_memory_is_no_limit(model):
    layer = depth.mixer(model, 7).make(SIZE).double()
    x, r = torch.randn(2, 2, 12, 8, dtype=torch.float64)
    results = [
        [y, *torch.autograd.grad((y * r).sum(), [*layer.parameters()])]
        for y in (layer(x), USUAL[model].forward(layer, x))
    ]
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_cost_counts_all_stages(monkeypatch):
    """The cost of a curriculum includes all stages, and growing lengths cost less."""
    monkeypatch.setattr(curriculum, "EVERY", 1)
    tiny = {"statements": 5, "batch": 2, "budget": 4, "parallel": 3, "layers": 2}
    point = curriculum.points(True)[2] | tiny
    found = curriculum.run(point | {"target": 100.0})
    assert found["steps"] == 3 + 1 and 2 * (3 + 6) <= found["chain"] <= 2 * (3 + 11)
    assert [step for step, _ in found["curve"]] == [4]
    chains = {way: {"steps": 0, "chain": 0, "cpu": 0.0} for way in curriculum.WAYS}
    for way, cost in chains.items():
        long = point | {"way": way, "statements": 16}
        curriculum.train(build("feedback", long, 2), long, 8, cost)
    growing, full = (chains[way]["chain"] for way in ("growing length", "from scratch"))
    assert growing < 0.9 * full


def test_tasks_are_what_the_page_says():
    """The answers of the tasks walk, count, copy and reverse are correct."""
    torch.manual_seed(0)
    actions, places = tasks.walk(3, 200)
    for steps, squares in zip(actions.tolist(), places.tolist(), strict=True):
        place, turn = 0 + 0j, 1j  # The walk begins at row 0, column 0, along the row.
        for step, square in zip(steps, squares, strict=True):
            turn *= {0: 1, 1: 1j, 2: -1j}[step]
            to = place + turn * (step == 0)
            inside = 0 <= to.real <= 7 and 0 <= to.imag <= 7
            place = to if inside else place
            assert square == 8 * place.real + place.imag
    ticks, counts = tasks.count(2, 30)
    assert counts[0, -1] == ticks[0].sum() % 10
    for name, turned in (("copy", False), ("reverse", True)):
        tokens, answers = tasks.asked(tasks.TASKS[name], 2, 5)
        wanted = tokens[:, :5].flip(1) if turned else tokens[:, :5]
        assert torch.equal(answers[:, 5:], wanted) and (answers[:, :5] < 0).all()
        assert (tokens[:, 5] == 8).all() and torch.equal(tokens[:, 6:], wanted[:, :-1])
