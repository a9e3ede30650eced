"""`fwlab bench --gpu` with the kernels themselves, as far as they exist."""

import json

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from fwlab import ops
from fwlab.bench.gpu import cases, correctness, measure, problems, tuning, worker
from fwlab.bench.gpu import dry as tiny

pytestmark = pytest.mark.evidence
ALL = [problem for found in tiny.PROBLEMS.values() for problem in found]


def kernel(op: str) -> None:
    """Go on only if there is one."""
    if "triton" not in ops.TABLE[op].implementations:
        pytest.skip(f"{op} has no kernel yet")


@pytest.fixture(autouse=True)
def tiny_ones(monkeypatch):
    for op, mine in tiny.PROBLEMS.items():
        monkeypatch.setitem(problems.PROBLEMS, op, lambda mine=mine: mine)
    for key, case in tiny.CASES.items():
        monkeypatch.setitem(cases.CASES, key, case)
    monkeypatch.setattr(measure, "TURN", 1e-3)


@pytest.mark.parametrize("problem", ALL, ids=[problem.key for problem in ALL])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_correctness(problem, dtype):
    kernel(problem.op)
    row = correctness.check(problem, dtype, "cpu", seed=1)
    assert not row["reason"] and row["ok"], row


def test_a_refusal_is_a_row():
    """The interpreter has no bfloat16."""
    row = correctness.check(tiny.PROBLEMS["delta_rule"][0], "bfloat16", "cpu", seed=1)
    assert "bfloat16" in row["reason"] and not row.get("ok")


def test_a_task():
    """As the worker does it: every problem announced, then its row."""
    task = {
        "kind": "correctness",
        "op": "sum_rule",
        "dtype": "float32",
        "quick": True,
        "device": "cpu",
        "seed": 5,
        "without": [tiny.PROBLEMS["sum_rule"][0].key],
    }
    part, row = worker.run(task)
    assert part["part"] == tiny.PROBLEMS["sum_rule"][1].key
    assert row["row"]["ok"] and set(part["head"]) == set(row["row"])
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("key", tiny.CASES)
def test_times(key, monkeypatch):
    """In float32, since the interpreter has no bfloat16."""
    case = tiny.CASES[key]
    kernel(case.name)

    def draw(generator, time):
        return [x.float() for x in case.draw(generator, time)]

    monkeypatch.setitem(cases.CASES, key, case._replace(draw=draw))
    task = {"kind": "case", "case": key, "rounds": 1, "device": "cpu", "seed": 5}
    rows = [m["row"] for m in worker.run(task) if "row" in m]
    ours = next(row for row in rows if row["side"] == cases.FWLAB)
    assert ours["reason"] is None, ours
    assert ours["ms"] > 0 and ours["error"] < 1e-5
    task |= {"kind": "warm-up", "side": cases.FWLAB, "share": None}
    warm = [m["row"] for m in worker.run(task) if "row" in m]
    assert warm[0]["side"] == cases.FWLAB and warm[0]["reason"] is None


@triton.autotune([triton.Config({"PLACE": place}) for place in range(5)], key=["n"])
@triton.jit
def mark(x, n, PLACE: tl.constexpr):
    tl.store(x + PLACE, 1.0)


def test_shares_of_configurations(monkeypatch):
    """Three processes compile all five between them."""
    monkeypatch.setattr(Autotuner, "run", Autotuner.run)
    seen = []
    for share in ((0, 3), (1, 3), (2, 3), (7, 9)):
        tuning.compile_share(*share)
        x = torch.zeros(5)
        mark[(1,)](x, 5)
        seen.append(x.nonzero().flatten().tolist())
    assert seen == [[0, 3], [1, 4], [2], [0]]
