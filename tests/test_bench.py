"""The benchmark measures what it claims; tests assert no times."""

import pytest
import torch

from fwlab import bench, ops
from fwlab.bench import case as measuring
from fwlab.bench import decoding, mixers, peers, rules
from fwlab.models import MIXERS


@pytest.mark.parametrize("case", bench.CASES, ids=[c.key for c in bench.CASES])
def test_every_case_is_complete(case):
    assert "efficient" in case.sides
    assert case.exact in case.sides
    inputs, dy = case.problem(torch.float32)
    assert all(x.requires_grad for x in inputs)
    assert dy.dtype == torch.float32


def test_names_are_unique():
    keys = [case.key for case in bench.CASES]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("op", dict.fromkeys(case.name for case in rules.CASES))
def test_all_sides_compute_the_same(op):
    record = ops.TABLE[op]
    inputs, dy = rules.problem(torch.float64, record=record, time=40, width=8)
    sides = {
        name: side
        for case in rules.CASES
        if case.name == op
        for name, side in case.sides.items()
    }
    exact = measuring.once(sides["naive"], inputs, dy)
    assert len(exact) == 4 + len(record.required)
    assert {"naive", "chunked", "efficient"} <= set(sides)
    for side in sides.values():
        for a, b in zip(measuring.once(side, inputs, dy), exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_small_run(monkeypatch):
    monkeypatch.setattr(measuring, "PROCESSES", 1)
    monkeypatch.setattr(measuring, "TURN", 0.01)
    case = next(c for c in bench.CASES if c.name == "aft_simple")  # the quickest
    rows = measuring.run(case._replace(rounds=1))
    assert [r["side"] for r in rows] == ["naive loop", "efficient"]
    assert all(r["milliseconds"] > 0 and r["error"] < 1e-5 for r in rows)
    # The output and three gradients, each of 4 MiB, are there at the end.
    assert all(r["peak_mib"] is None or r["peak_mib"] > 16 for r in rows)
    text = measuring.layout(bench.table(rows), left=3)
    assert text.splitlines()[0].split()[0] == "operation"
    assert len({len(line) for line in text.splitlines()}) == 1


def test_decoding(monkeypatch):
    monkeypatch.setattr(decoding, "STEPS", 2)
    monkeypatch.setattr(decoding, "ROUNDS", 1)
    rows = decoding.run((3, 5, 9))
    assert {row["layer"] for row in rows} == set(decoding.makers(10))
    for row in rows:
        grows = row["layer"] in decoding.GROWING
        assert list(row["microseconds"]) == ([3, 5] if grows else [3, 5, 9])
        assert all(t > 0 for t in row["microseconds"].values())
    assert len({len(row) for row in decoding.table(rows)}) == 1


@pytest.mark.parametrize("mixer", MIXERS)
def test_models_of_all_mixers_are_equally_large(mixer):
    """Within 2 %, not counting position tables."""
    sizes = {
        name: mixers.model(name, mixers.equal_d_ff(name)).num_parameters()
        for name in ("softmax", mixer)
    }
    assert sizes[mixer] == pytest.approx(sizes["softmax"], rel=0.02)


def test_mixers(monkeypatch):
    monkeypatch.setattr(mixers, "ROUNDS", 1)
    monkeypatch.setattr(mixers, "TURN", 0.0)
    monkeypatch.setattr(mixers, "PROCESSES", 1)
    rows = mixers.run(("softmax", "sum"))
    assert [r["mixer"] for r in rows] == ["softmax", "sum"]
    assert all(r["tokens_per_second"] > 0 for r in rows)
    assert len({len(row) for row in mixers.table(rows)}) == 1


SMALL = (
    peers.gated_delta(2, 70, 2, 8, 1, 1),
    peers.one_step(2, 2, 8, 1, 1),
    peers.aft_dense(40, 8, 5, 1, 1),
    peers.aft_dense(40, 8, None, 1, 1),
    peers.normalized_sum(2, 150, 2, 8, "chunks", lambda: peers.sum_chunks, 1, 1),
    peers.normalized_sum(2, 70, 2, 8, "package", peers._fast_transformers, 1, 1),
    peers.dpfp(2, 10, 2, 8, 1, 1),
)


@pytest.mark.parametrize("comparison", SMALL, ids=[c.key for c in SMALL])
def test_peers_compute_the_same(comparison):
    try:
        sides = {"ours": comparison.ours(), "theirs": comparison.theirs()}
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed")
    assert peers.difference(comparison, sides) < 1e-5


def test_peers_of_training_are_equally_large():
    sizes = [
        sum(p.numel() for p in model.parameters())
        for model in (peers.NanoGPT(), mixers.of("softmax"))
    ]
    assert sizes[0] == sizes[1]


def test_a_comparison(monkeypatch):
    monkeypatch.setattr(peers, "peak_memory", peers.peak_of)
    monkeypatch.setattr(peers, "COMPARISONS", SMALL)
    monkeypatch.setattr(measuring, "TURN", 0.001)
    row = peers.run(SMALL[3])
    assert row["reason"] is None and row["difference"] < 1e-5
    assert 0 < row["worst"] <= row["ratio"] <= row["best"]
    missing = SMALL[0]._replace(theirs=lambda: __import__("no_such_package"))
    other = peers.run(missing)
    assert other["reason"] == "no_such_package is not installed"
    cells = peers.table([row, other])
    assert len({len(line) for line in cells}) == 1
    assert "no_such_package is not installed" in cells[2]


def test_comparisons_have_their_own_keys():
    keys = [c.key for c in peers.COMPARISONS]
    assert len(set(keys)) == len(keys)
    assert all(c.must <= c.aim for c in peers.COMPARISONS)
