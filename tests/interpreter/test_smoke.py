"""Run every kernel once in Triton's interpreter, forward and backward."""

import json
from pathlib import Path

import fuzz

from fwlab.ops import _triton

TABLE = Path(__file__).resolve().parents[2] / "docs/results/kernels.json"
SIZES = "implementation=triton dtype=float32 state=1 batch=2 heads=2 key=4 value=3"
#: Cases for every kernel, each with a number of multiprocessors; tiles have 4 steps.
#: With many multiprocessors, a separate kernel computes the outputs.
CASES = [
    ("op=sum_rule fewer=1 normalize=1 time=17", 1),
    ("op=gated_rule fewer=1 time=17", 1),
    ("op=delta_rule time=17", 1000),
    ("op=gated_delta_rule time=3", 1),
    ("op=aft_simple time=5", 1),
    ("op=aft_full window=3 time=5", 1),
    ("op=aft_local window=4 time=5", 1),
    ("op=aft_conv window=4 time=5", 1),
    ("op=feedback window=3 layers=2 time=3", 1),
]


def test_every_kernel(small, monkeypatch):
    real, launched, problems = _triton.launch, set(), {}

    def launch(kernel, *arguments, **options):
        launched.add(kernel.__name__)
        real(kernel, *arguments, **options)

    monkeypatch.setattr(_triton, "launch", launch)
    for case, cores in CASES:
        monkeypatch.setattr(_triton, "multiprocessors", lambda device, n=cores: n)
        problems[case] = fuzz.check(fuzz.parsed(f"{case} {SIZES}"))
    assert {case: what for case, what in problems.items() if what} == {}
    table = json.loads(TABLE.read_text("utf-8"))["kernels"]
    assert launched == {key.partition(",")[0] for row in table.values() for key in row}
