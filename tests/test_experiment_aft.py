"""`fwlab reproduce aft`: the data, the models, and what is measured."""

import sys
from hashlib import sha256

import pytest
import torch

from fwlab import ops
from fwlab.data import CorpusError
from fwlab.experiments import aft, verdict


def test_digits_are_split_without_overlap():
    data = aft.digits()
    parts = [data.draw(500).unique(dim=0), data.check, data.test]
    assert [len(part) for part in parts[1:]] == [200, 300]
    every = torch.cat(parts)
    assert every.shape[1:] == (65,) and len(every.unique(dim=0)) == len(every)
    assert (every[:, 0] == 17).all()
    assert every[:, 1:].min() == 0 and every[:, 1:].max() == 16 < data.symbols - 1


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    aft.digits.cache_clear()
    with pytest.raises(CorpusError, match=r"fwlab\[reproduce\]"):
        aft.digits()


def test_windows_of_text_are_the_same_characters_for_every_length(monkeypatch):
    monkeypatch.setattr(aft, "_characters", lambda: (7, torch.arange(400_000), ""))
    for T in (32, 256):
        data = aft.text(T)
        drawn = data.draw(50)
        assert drawn.shape == (50, T + 1) and drawn.max() < 360_000
        for part, first in ((data.check, 360_000), (data.test, 380_000)):
            wanted = torch.arange(first + 1, first + 16385)
            assert torch.equal(part[:, 1:].flatten(), wanted)


@pytest.mark.parametrize("T", [64, 256])
def test_models_are_equally_large_and_start_alike(T):
    sizes = {}
    for name in aft.OF_IMAGES if T == 64 else aft.OF_TEXT:
        model = aft.build(name, 18, T, 32, 2)
        parameters = dict(model.named_parameters())
        table = parameters.pop("positions.weight", None)
        assert (table is None) is (name == aft.ROTARY)
        sizes[name] = sum(p.numel() for p in parameters.values())
        assert 0.015 < model.blocks[0].mixer.to_q.weight.std() < 0.025
    assert max(sizes.values()) - min(sizes.values()) < 0.01 * max(sizes.values()), sizes


def image_layer(gamma: float) -> aft.AFTConvImage:
    torch.manual_seed(0)
    layer = aft.AFTConvImage(8, 2).double()
    torch.nn.init.constant_(layer.kernel.gamma, gamma)
    return layer


def test_biases_by_rows_and_columns():
    """Against a loop over pixels; and no pixel sees a later one."""
    layer, x = image_layer(1.0), torch.randn(2, 64, 8).double()
    kernel = layer.kernel().view(2, 9, 15)
    w = torch.zeros(2, 64, 64).double()
    for t in range(64):
        for j in range(t + 1):
            row, column = divmod(j - 1, 8)  # the start token: row -1, column 7
            w[:, t, j] = kernel[:, t // 8 - row, t % 8 - column + 7]
    y = [
        ops.aft_full(
            *(f(x)[..., head] for f in (layer.to_q, layer.to_k, layer.to_v)), b
        )
        for head, b in zip((slice(4), slice(4, 8)), w, strict=True)
    ]
    wanted = layer.to_out(torch.cat(y, -1))
    assert torch.allclose(layer(x), wanted, atol=1e-12)
    assert torch.allclose(layer(x[:, :30]), wanted[:, :30], atol=1e-12)
    before, x[:, 40] = layer(x), 0
    assert torch.equal(layer(x)[:, :40], before[:, :40])


def test_without_biases_it_is_aft_simple():
    layer, x = image_layer(0.0), torch.randn(2, 64, 8).double()
    y = ops.aft_simple(*(f(x) for f in (layer.to_q, layer.to_k, layer.to_v)))
    assert torch.allclose(layer(x), layer.to_out(y), atol=1e-12)


def test_dense_attention_is_attention():
    torch.manual_seed(0)
    dense, fused = (aft.LAYERS[name](16, 20) for name in (aft.DENSE, aft.SOFTMAX))
    fused.load_state_dict(dense.state_dict())
    x = torch.randn(2, 20, 16)
    assert torch.allclose(dense(x), fused(x), atol=1e-6)


def test_memory_of_pairs_and_of_windows():
    """Dense attention is quadratic in time, AFT-local is linear."""
    mib = {
        (name, T): aft.peak_mib(aft._pass(name, T, 32))
        for name in (aft.DENSE, "aft-local")
        for T in (256, 512)
    }
    assert mib[aft.DENSE, 512] > 3 * mib[aft.DENSE, 256]
    assert mib["aft-local", 512] < 2.2 * mib["aft-local", 256]


@pytest.mark.parametrize("quick", [True, False])
def test_every_ordering_of_the_tables_is_a_claim(quick):
    """Three models in Tables 2 and 4, and their memory; texts only in full."""
    points = aft.points(quick)
    for sign, said in ((1, "reproduced"), (-1, "not")):
        for p in points:
            known = aft.PUBLISHED[p["task"]].get(p["mixer"], 1.2)
            p["loss"] = p["mib"] = sign * known + 1e-5 * p["seed"] - 1e-3 * p["T"]
        claims = [c for c in aft.claims(points) if "Table" in c.published]
        orders = [c for c in claims if c.protocol]
        assert len(orders) == 10
        left = [c for c in orders if c.text.startswith("text")]
        assert len(left) == 4
        if quick:
            assert verdict(left) == "not run"
        run = [c for c in orders if c not in left or not quick]
        assert {c.verdict for c in run if "longer" not in c.text} == {said}
        assert "12.8, 30.4 (GB, Table 2)" in {c.published for c in run}
        (longer,) = (c for c in left if "longer" in c.text)
        assert longer.verdict == ("not run" if quick else "reproduced")


def test_a_text_is_recorded(monkeypatch):
    text = "To be, or not to be" * 20_000
    monkeypatch.setattr(aft, "load", lambda name: text * (name == "shakespeare"))
    monkeypatch.setattr(aft, "train", lambda *_: {"loss": 1.0})
    aft._characters.cache_clear()
    point = next(p for p in aft.points(False) if p["task"] == "text")
    found = aft.run(point)
    aft._characters.cache_clear()
    assert found["corpus_name"] == "another text"
    assert found["corpus_sha256"] == sha256(text.encode()).hexdigest()[:12]


def test_texts_are_compared_at_one_length():
    texts = [p for p in aft.points(False) if p["task"] == "text"]
    assert len(texts) == 27
    assert {p["mixer"] for p in texts if p["T"] == 64} == {"aft-local"}
    assert {p["mixer"] for p in texts if p["T"] == 512} == {*aft.OF_TEXT}
    assert {p["corpus"] for p in texts} == {"shakespeare"}
