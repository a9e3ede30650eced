"""`erasing`: all steps at once are the loop; the tasks; and what is a share."""

from hashlib import sha256

import erasing
import pytest
import torch
from erasing import ERASED, FADE, FIXED, MAPS, NONE, OWN, Erasing

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
