"""Test data, layers and training of docs/reproduce/aft.py and aft-stability.py."""

from importlib import import_module

import aft
import torch

from fwlab import ops

stability = import_module("aft-stability")


def test_digits_are_split_without_overlap():
    data = aft.digits()
    parts = [data.draw(500).unique(dim=0), data.check, data.test]
    assert [len(part) for part in parts[1:]] == [200, 300]
    every = torch.cat(parts)
    assert every.shape[1:] == (65,) and len(every.unique(dim=0)) == len(every)
    assert (every[:, 0] == 17).all()
    assert every[:, 1:].unique().tolist() == [*range(17)]


def test_windows_of_text_are_the_same_characters_for_every_length(monkeypatch):
    monkeypatch.setattr(aft, "characters", lambda: (7, torch.arange(400_000), ""))
    for T in (32, 256):
        data = aft.text(T)
        drawn = data.draw(50)
        assert drawn.shape == (50, T + 1) and drawn.max() < 360_000
        for part, first in ((data.check, 360_000), (data.test, 380_000)):
            wanted = torch.arange(first + 1, first + 16385)
            assert torch.equal(part[:, 1:].flatten(), wanted)


def test_models_are_equally_large():
    """All models have the same number of parameters within 1 %."""
    for T, names in ((64, (*aft.OF_IMAGES, aft.WHOLE)), (128, aft.WINDOWS.values())):
        every = [aft.build(name, 18, T, 32, 2) for name in (*names, "aft-simple")]
        sizes = [sum(p.numel() for p in model.parameters()) for model in every]
        assert max(sizes) - min(sizes) < 0.01 * max(sizes), sizes


def test_biases_by_rows_and_columns():
    """AFT with biases by row and column agrees with a loop over pixels."""
    layer, x = aft.AFTConvImage(8, 2).double(), torch.randn(2, 64, 8).double()
    torch.nn.init.ones_(layer.kernel.gamma)
    kernel = layer.kernel().view(2, 9, 15)
    w = torch.zeros(2, 64, 64).double()
    for t in range(64):
        for j in range(t + 1):
            row, column = divmod(j - 1, 8)  # The start token is at (-1, 7).
            w[:, t, j] = kernel[:, t // 8 - row, t % 8 - column + 7]
    qkv = [f(x) for f in (layer.to_q, layer.to_k, layer.to_v)]
    y = [ops.aft_full(*(a[..., 4 * h : 4 * h + 4] for a in qkv), w[h]) for h in (0, 1)]
    wanted = layer.to_out(torch.cat(y, -1))
    assert torch.allclose(layer(x), wanted, atol=1e-12)
    assert torch.allclose(layer(x[:, :30]), wanted[:, :30], atol=1e-12)


def test_training_ends_where_the_loss_no_longer_falls(monkeypatch):
    """Training stops early with the weights of the best evaluation, here the third."""
    losses, seen = iter([3, 2.5, 2, 4, 4, 4, 4, 4, 0]), []

    def evaluate(model, tokens):
        seen.append(model.weight.item())
        return next(losses) if tokens is check else seen[-1]

    monkeypatch.setattr(aft, "evaluate", evaluate)
    monkeypatch.setattr(aft, "bits", lambda model, x: model(x).sum())
    model, check, test = torch.nn.Linear(1, 1), torch.ones(1, 1), torch.ones(1, 2)
    data = aft.Data(0, lambda count: torch.ones(1, 1), test, check, test)
    found = aft.train(model, data, 1000, 0.1)
    assert found["steps"] == 300 and found["curve"][-1] == (800, 4)
    assert found["loss"] == found["train"] == round(seen[2], 4) != round(seen[7], 4)


def test_every_way_to_compute_aft():
    """Every method is correct for small keys, but only fwlab's for large keys."""
    k, v, w = (torch.randn(20, width).double() for width in (3, 3, 20))
    seen = torch.ones(20, 20, dtype=torch.bool).tril()
    exact = stability.softmax(k, v, w, seen)
    large = {"dtype": "float16", "scale": 100, "seed": 1}
    for name, way in stability.WAYS.items():
        y = way(k, v, torch.where(seen, w, -torch.inf))
        assert torch.allclose(y, exact, atol=1e-5 if name == "epsilon" else 1e-12), name
        fails = any(stability.run({"way": name, **large}).values())
        assert fails is (name != "fwlab"), name
