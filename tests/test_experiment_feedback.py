"""`feedback-depth`, `feedback-curriculum`: what a short memory sees, and costs."""

import pytest
import torch

from fwlab.experiments import feedback_curriculum as curriculum
from fwlab.experiments import feedback_depth as depth
from fwlab.experiments import feedback_variables as variables
from fwlab.experiments.experiment import verdict
from fwlab.layers import FeedbackTransformer, SoftmaxAttention
from fwlab.models.language_model import Size

SIZE = Size(layers=2, heads=2, d_model=8, d_ff=16, max_len=12)


def short(model: str, memory: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = depth.mixer(model, memory).make(SIZE).double()
    if model == "feedback":  # memories are embeddings: only what is seen counts
        layer.merge.data[1:] = -1000
    return layer


@pytest.mark.parametrize("model", ["feedback", "transformer"])
def test_a_layer_sees_its_own_block_and_the_one_before(model):
    layer, x = short(model, 3), torch.randn(1, 12, 8, dtype=torch.float64)
    before = layer(x)
    for changed in range(12):
        other = x.clone()
        other[0, changed] = torch.randn(8)
        moved = (layer(other) - before).abs().amax((0, 2)) > 1e-9
        seen = {t for t in range(changed, 12) if t // 3 - changed // 3 <= 1}
        assert set(moved.nonzero()[:, 0].tolist()) == seen


def test_feedback_carries_on_what_a_short_memory_does_not_see():
    layer, x = short("feedback", 1), torch.randn(1, 12, 8, dtype=torch.float64)
    layer.merge.data.zero_()
    other = x.clone()
    other[0, 0] = torch.randn(8)
    moved = (layer(other) - layer(x)).abs().amax((0, 2))
    assert (moved > 1e-9).all()


@pytest.mark.parametrize(
    ("model", "usual"),
    [("feedback", FeedbackTransformer), ("transformer", SoftmaxAttention)],
)
def test_a_long_memory_is_no_limit(model, usual):
    layer, x = short(model, 7), torch.randn(2, 12, 8, dtype=torch.float64)
    if model == "feedback":
        layer.merge.data.zero_()
    own = list(layer.parameters())
    r = torch.randn_like(x)
    results = [
        [y, *torch.autograd.grad((y * r).sum(), own)]
        for y in (layer(x), usual.forward(layer, x))
    ]
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_claims_of_depth():
    """Deep feedback learns in longer training, or at another rate; times do not count."""
    for quick, published in ((True, [1, 0, 0, 0]), (False, [1, *[0] * 9])):
        points = depth.points(quick)
        low, steps = (1 if quick else 4), max(p["steps"] for p in points)
        for p in points:
            learned = p["model"] == "feedback" and (
                p["layers"] < low or p["steps"] == steps
            )
            accuracy = 70.0 if p["kind"] == "rule" else 80.0 if learned else 60.0
            if p["rate"] == 5e-4:
                accuracy = 75.0 if p["model"] == "feedback" else 65.0
            p["accuracy"] = None if p["kind"] == "time" else accuracy
        claims = depth.claims(points)
        assert verdict(claims) == "reproduced" and "failed" not in str(claims)
        expected = [True] * 4 if quick else [True] * 3 + [False] * 3 + [True] * 4
        assert [c.holds for c in claims] == expected
        assert [bool(c.published) for c in claims] == [bool(x) for x in published]
        assert (
            claims[3 if quick else 7].found
            == "80.0 [80.0, 80.0] against 60.0 [60.0, 60.0]"
        )
        if not quick:
            assert "against 70.0 [70.0, 70.0]" in claims[5].found
            assert claims[3].found == "60.0 [60.0, 60.0] against 60.0 [60.0, 60.0]"
            assert {c.found for c in claims[8:]} == {
                "75.0 [75.0, 75.0] against 65.0 [65.0, 65.0]"
            }
            some = [p for p in points if (p["rate"], p["seed"]) != (5e-4, 3)]
            assert [c.holds for c in depth.claims(some)[8:]] == [None, None]
        rest = [p for p in points if p["memory"] == depth.ALL]
        assert depth.claims(rest)[3 if quick else 7].holds is None


@pytest.mark.parametrize("quick", [True, False])
def test_claims_of_variables(quick):
    """What was published holds for the published numbers, in both versions."""
    points = variables.points(quick)
    for p in points:
        feedback, deep = variables.PUBLISHED[p["variables"]]
        usual = deep if p["model"] == "transformer" else 50
        p["accuracy"] = feedback if p["model"] == "feedback" else usual
        if p["rate"] != variables.RATES[quick][0]:
            p["accuracy"] = 99.5 if p["model"] == "feedback" else 40
    claims = variables.claims(points)
    published = [c for c in claims if c.published]
    assert len(published) == 6 and all(c.protocol for c in published)
    best = [c.found for c in claims if "best rate" in c.text]
    assert best == ["99.5 [99.5, 99.5] against 40.0 [40.0, 40.0]"] * (0 if quick else 2)
    assert sum(c.holds is None for c in published) == (4 if quick else 0)
    assert {c.verdict for c in claims} - {"not run"} == {"reproduced", "holds"}
    for p in points:
        p["accuracy"] = 50 if p["model"] == "feedback" else 60
    words = {c.verdict for c in variables.claims(points)[:4]}
    assert words == {"not", "does not"}
    left = [p for p in points if p["model"] != variables.RULES[0]]
    assert variables.claims(left)[3].verdict == "not run"


def test_a_way_that_does_not_arrive_is_no_shorter():
    points = curriculum.points(True)
    for p in points:
        p["chain"] = None if p["way"] == "from a transformer" else 9000
    growing, warm = curriculum.claims(points)
    assert growing.holds is False and "9.0 [9.0, 9.0]" in growing.found
    assert warm.holds is False and "failed" in warm.found
    assert not growing.published and not warm.published


def point_of(way: str) -> dict:
    first = next(p for p in curriculum.points(True) if p["way"] == way)
    return {**first, "statements": 6, "width": 8, "batch": 2, "budget": 4}


def test_cost_counts_all_stages():
    """All programs here are as long: `x = 1 ;` has one token per clause."""
    cost, point = curriculum.Cost(), point_of("from scratch")
    parallel = curriculum.build("softmax", point)
    assert list(cost.of(parallel, point, 3)) == [1, 2, 3]
    assert (cost.steps, cost.chain) == (3, 3)  # one layer, all tokens at once
    model = curriculum.build("feedback", point)
    assert list(cost.of(model, point, 2)) == [1, 2]
    assert cost.steps == 5 and 3 + 2 * 7 <= cost.chain <= 3 + 2 * 13


def test_growing_programs_are_shorter():
    chains = []
    for way in ("growing length", "from scratch"):
        cost, point = curriculum.Cost(), point_of(way) | {"statements": 16}
        model = curriculum.build("feedback", point)
        list(cost.of(model, point, 8))
        chains.append(cost.chain)
    assert chains[0] < 0.9 * chains[1]


def test_a_warm_start_keeps_what_was_trained():
    point = point_of("from a transformer")
    parallel = curriculum.build("softmax", point)
    list(curriculum.Cost().of(parallel, point, 2))
    model = curriculum.build("feedback", point)
    model.start_from(parallel)
    assert torch.equal(model.embedding.weight, parallel.embedding.weight)
    assert torch.equal(model.norm.weight, parallel.norm.weight)
    trained = parallel.blocks[0].expand.weight
    assert torch.equal(model.blocks[0].blocks[0].expand.weight, trained)
    tokens = torch.randint(10, (1, 5))
    assert model(tokens).shape == (1, 5, model.vocab_size)
