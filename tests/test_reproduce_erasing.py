"""`erasing`: all steps at once are the loop; the tasks; and what is a share."""

from hashlib import sha256

import erasing
import pytest
import torch
from erasing import ERASED, FADE, FIXED, MAPS, NONE, OWN, Erasing
from frame import Points

from fwlab import ops


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("erased", ERASED)
def test_all_steps_at_once_are_the_loop(name, erased):
    torch.manual_seed(0)
    layer = Erasing(12, 3, 4, name, erased).double().eval()
    shape = (2, 3, 9)
    q, k = (layer.normalize(layer.phi(torch.randn(*shape, 4).double())) for _ in "qk")
    v, beta = torch.randn(*shape, 4).double(), torch.rand(shape).double()
    e = torch.zeros_like(k) if erased in (NONE, FADE) else layer.direction(k)
    assert erased in (NONE, FADE) or torch.allclose(
        e.norm(dim=-1)[:, :, 1:], k.norm(dim=-1)[:, :, 1:]
    )
    W, outputs = torch.zeros(2, 3, 4, k.shape[-1]).double(), []
    for t in range(9):
        b, k_t, v_t, e_t = beta[..., t, None, None], k[:, :, t], v[:, :, t], e[:, :, t]
        if erased == FADE:
            W = W * (1 - b * k_t.square().sum(-1)[..., None, None])
        W = W - b * (W @ e_t[..., None]) * e_t[..., None, :]
        W = W + b * v_t[..., None] * k_t[..., None, :]
        outputs.append((W @ q[:, :, t, :, None])[..., 0])
    found = layer.remember(q, k, v, beta)
    assert torch.allclose(found, torch.stack(outputs, 2), atol=1e-12)
    if erased == OWN:
        heads = (x.transpose(1, 2) for x in (q, k, v, beta))
        assert torch.allclose(found.transpose(1, 2), ops.delta_rule(*heads), atol=1e-12)


def test_each_direction_is_what_its_name_says():
    """As long as the key, and not that of any other step or sequence."""
    k = torch.rand(3, 2, 5, 4).double() + 0.1

    def direction(erased, mean=0.0):
        layer = Erasing(8, 2, 4, "ELU + 1", erased).double().eval()
        layer.mean += mean
        return layer.direction(k)

    lengths = k.norm(dim=-1, keepdim=True)
    wanted = {
        erasing.OTHERS: k[[2, 0, 1]],
        erasing.PREVIOUS: torch.cat([torch.zeros_like(k[:, :, :1]), k[:, :, :-1]], 2),
        FIXED: torch.ones_like(k),
        OWN: k,
    }
    for erased, e in wanted.items():
        unit = e / e.norm(dim=-1, keepdim=True).clamp(min=1e-9)
        assert torch.allclose(direction(erased), unit * lengths), erased
    centred = k - 0.3
    unit = centred / centred.norm(dim=-1, keepdim=True)
    assert torch.allclose(direction(erasing.CENTRED, 0.3), unit * lengths)
    layer = Erasing(8, 2, 4, "ELU + 1", erasing.CENTRED).double()
    layer.direction(torch.cat([k, torch.zeros_like(k)], 2))  # steps that write nothing
    assert torch.allclose(layer.mean[:, 0], k.mean((0, 2)))


def test_rates_are_chosen_and_scored_on_different_parts_of_a_text():
    read, symbols, *parts = erasing.tokens("source code")
    whole = erasing.corpus("python")[:1_000_000]
    assert sum(map(len, parts)) == len(whole) and symbols == len({*whole})
    assert [round(len(x) / len(whole), 2) for x in parts] == [0.9, 0.05, 0.05]
    assert read["corpus_sha256"] == sha256(whole.encode()).hexdigest()[:12]


@pytest.mark.parametrize("returns", erasing.RETURNS.values())
def test_the_last_value_of_a_key_is_asked(returns):
    torch.manual_seed(0)
    keys, values, last = erasing.draw_pairs(20, returns)
    for k, v, wanted in zip(keys.tolist(), values.tolist(), last.tolist(), strict=True):
        known = dict(zip(k, v, strict=True))
        assert [known[key] for key in range(erasing.PAIRS)] == wanted
        assert len(k) - len(known) == round(returns * erasing.PAIRS)


def test_the_rate_of_a_text_counts_other_successors():
    now = torch.tensor([[1, 2, 1, 2, 1, 3, 3, 3]])
    # After 1 come 2, 2, 3; after 2 come 1, 1; after 3 come 3, 3: one of seven differs.
    assert erasing.returned(now) == round(1 / 7, 4)


def test_a_share_is_of_a_gain_that_all_seeds_show():
    def points(**ends):
        return Points(
            {"task": "pairs, 1", "map": "DPFP", "erased": name, "lr": lr, "seed": seed}
            | {"loss": loss + extra, "chosen_by": -extra, "returned": 1.0}
            for name, losses in ends.items()
            for seed, loss in enumerate(losses)
            for lr, extra in ((0.1, 0.0), (0.2, -0.9))  # a lower loss, but not chosen
        )

    ends = {NONE: [3.0, 3.2, 3.1], FIXED: [2.5, 2.7, 2.6], OWN: [1.1, 1.0, 1.2]}
    chosen = erasing.best(points(**ends))
    assert {*chosen["lr"]} == {0.1} and erasing.gains(chosen)
    assert erasing.shares(chosen, FIXED) == pytest.approx([0.25] * 3)
    assert erasing.content(chosen) == pytest.approx([0.75] * 3)
    some = points(**ends)
    some[:] = [p for p in some if p["lr"] == 0.1 or p["seed"] < 2 or p["erased"] != OWN]
    for p in some:
        p["chosen_by"] *= -1  # the other rate would be chosen, but has not run as often
    assert {*erasing.best(some)(erased=OWN)["lr"]} == {0.1}
    overlap = points(**ends | {NONE: [1.1, 3.2, 3.1]})
    assert erasing.content(erasing.best(overlap)) == []


def test_the_hypotheses_are_those_of_the_page():
    """Of shares that are made up: rising ones, and a small and a large one of texts."""
    share = {"pairs, 0": 0.1, "pairs, 0.1": 0.2, "pairs, 0.3": 0.5, "pairs, 1": 0.9}
    share |= {"Shakespeare": 0.2, "source code": 0.3}
    points = Points(
        {**p, "chosen_by": 0.0, "loss": 1 - (p["erased"] != NONE) / 2}
        for p in erasing.points(False)
        if p["map"] == "ELU + 1"
    )
    for p in points:
        if p["erased"] == FIXED:
            p["loss"] = 1 - (1 - share[p["task"]]) / 2
        p["loss"] += 1e-3 * p["seed"]
    rising, low, high, *gains = erasing.claims(points)
    assert (
        rising.verdict == "holds" and "0.20 [0.20, 0.20] against 0.50" in rising.found
    )
    assert (low.verdict, high.verdict) == ("holds", "does not")
    assert {claim.verdict for claim in gains} == {"holds"} and len(gains) == 6


@pytest.mark.parametrize("task", ["pairs, 0.3", "source code"])
def test_a_point_runs(task, monkeypatch):
    monkeypatch.setitem(erasing.STEPS, erasing.kind(task), 20)
    (point,) = Points(erasing.points(True))(task=task, erased=OWN, seed=1)[:1]
    found = erasing.run(point)
    assert 0 < found["loss"] < (5 if task == "source code" else 1) and found["curve"]
    assert erasing.run(point) == found
