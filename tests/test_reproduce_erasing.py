"""`erasing`: all steps at once are the loop; the tasks; and what is a share."""

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
            | {"loss": loss + extra, "chosen_by": extra, "returned": 1.0}
            for name, losses in ends.items()
            for seed, loss in enumerate(losses)
            for lr, extra in ((0.1, 0.0), (0.2, 5.0))
        )

    ends = {NONE: [3.0, 3.2, 3.1], FIXED: [2.5, 2.7, 2.6], OWN: [1.1, 1.0, 1.2]}
    chosen = erasing.best(points(**ends))
    assert {*chosen["lr"]} == {0.1} and erasing.gains(chosen)
    assert erasing.shares(chosen, FIXED) == pytest.approx([0.25] * 3)
    assert erasing.content(chosen) == pytest.approx([0.75] * 3)
    overlap = points(**ends | {NONE: [1.1, 3.2, 3.1]})
    assert erasing.content(erasing.best(overlap)) == []


@pytest.mark.parametrize("task", ["pairs, 0.3", "source code"])
def test_a_point_runs(task, monkeypatch):
    monkeypatch.setitem(erasing.STEPS, erasing.kind(task), 20)
    (point,) = Points(erasing.points(True))(task=task, erased=OWN, seed=1)[:1]
    found = erasing.run(point)
    assert 0 < found["loss"] < (5 if task == "source code" else 1) and found["curve"]
    assert erasing.run(point) == found
