"""The benchmark measures what it says; no times are asserted."""

import torch

from fwlab import bench


def test_all_sides_compute_the_same():
    inputs, dy = bench.problem(40, torch.float64)
    for op, sides in bench.SIDES.items():
        exact = bench.once(sides["naive"], inputs, dy)
        assert len(exact) == (5 if op == "delta_rule" else 4)
        for side in sides.values():
            for a, b in zip(bench.once(side, inputs, dy), exact, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_small_run(monkeypatch):
    monkeypatch.setattr(bench, "HEADS", 1)
    monkeypatch.setattr(bench, "PROCESSES", 1)
    cases = (bench.Case("sum_rule", 128, ("naive", "efficient"), 1),)
    rows = bench.run(cases)
    assert [r["side"] for r in rows] == ["naive", "efficient"]
    assert all(r["milliseconds"] > 0 and r["error"] < 1e-5 for r in rows)
    text = bench.table(rows)
    assert text.splitlines()[0].split()[0] == "operation"
    assert len({len(line) for line in text.splitlines()}) == 1
