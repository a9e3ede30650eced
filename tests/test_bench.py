"""Test that benchmarks run, and that they report wrong results."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fwlab import cli, ops
from fwlab.bench import kernels, measure, operations
from fwlab.models import MIXERS
from fwlab.ops._operation import Refused

ROOT = Path(__file__).resolve().parents[1]

OPS = {name: op for name, op in ops.TABLE.items() if name != "aft_conv2d"}
TINY = {"batch": 2, "time": 20, "width": 16, "heads": 2, "window": 4, "layers": 2}


def call_once(call):
    """Call a function once, and return None for the time and the memory."""
    call()
    return None, None


def test_the_command_prints_every_row_and_writes_all(tmp_path, monkeypatch, capsys):
    """`fwlab bench` prints aligned rows of all measurements, and writes a file."""
    monkeypatch.setattr(measure, "TURN", 0.0)
    monkeypatch.setattr(operations, "ROUNDS", 1)
    monkeypatch.setattr(operations, "STEPS", 1)
    case = (ops.aft_simple, {"time": 30, "width": 8})
    monkeypatch.setattr(operations, "CASES", (case,))
    train, decode = operations.measure_training, operations.measure_decoding
    monkeypatch.setattr(
        operations, "measure_training", lambda: train(("softmax", "sum"))
    )
    monkeypatch.setattr(operations, "POSITIONS", (2, 3))
    monkeypatch.setattr(operations, "measure_decoding", lambda: decode((2, 3)))
    path = tmp_path / "x.json"
    monkeypatch.setattr(sys, "argv", ["fwlab", "bench", "--out", str(path)])
    cli.main()
    result, text = json.loads(path.read_text("utf-8")), capsys.readouterr().out
    assert [row["side"] for row in result["rows"]] == ["naive", "efficient"]
    assert all(r["peak_mib"] > 0 and r["error"] < 1e-5 for r in result["rows"])
    softmax, added = result["mixers"]
    # Chunked rules use more operators than PyTorch's attention, which is one operator.
    assert 100 < softmax["operators"] < added["operators"]
    assert added["parameters"] == pytest.approx(softmax["parameters"], rel=0.02)
    rows = {row["layer"]: len(row["microseconds"]) for row in result["decoding"]}
    assert rows["fast weights, delta"] == 2 and rows["softmax"] == 1
    for table in text.split("\n\n")[2::2]:
        lines = [line for line in table.splitlines() if "  " in line]
        assert len(lines) > 2 and len({len(line) for line in lines}) == 1, table


def test_models_of_all_mixers_are_equally_large():
    """Apart from position tables, models of all mixers have equal sizes within 2 %."""
    with torch.device("meta"):
        sizes = {name: operations.new_model(name).num_parameters() for name in MIXERS}
    wanted = dict.fromkeys(MIXERS, sizes["softmax"])
    assert sizes == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("name", OPS)
def test_forms_and_pieces_compute_the_same(name, monkeypatch):
    """Errors of implementations and of split sequences are small, but not exactly 0."""
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    monkeypatch.setattr(torch, "float16", torch.float32)
    row = kernels.measure_row(OPS[name], TINY, "efficient", "cpu", call_once)
    assert not row["reason"] and not kernels.wrong(row), row
    assert all(error > 0 for error in row["errors"].values())
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("name", ["delta_rule", "aft_conv", "feedback"])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_what_is_wrong_shows(name, at, monkeypatch):
    """A benchmark reports wrong outputs, wrong gradients and non-finite values."""

    def once(side, given):
        found = operations.once(side, given)
        if side.keywords.get("implementation") == "efficient":
            found[abs(at)] = found[abs(at)] * (torch.nan if at < 0 else 1.1)
        return found

    monkeypatch.setattr(kernels, "once", once)
    row = kernels.measure_row(OPS[name], TINY, "efficient", "cpu", call_once)
    (why,) = kernels.wrong(row | {"side": "triton"})[:1]
    assert ("not finite" if at < 0 else "e-0") in why


def test_limits_are_no_failures(monkeypatch):
    """A case that a kernel does not support counts as neither correct nor wrong."""

    def refuse(*_):
        raise Refused("too wide")

    monkeypatch.setattr(kernels, "once", refuse)
    row = kernels.measure_row(ops.sum_rule, TINY, "triton", "cpu", call_once)
    assert row["refused"] == "too wide" and row["reason"] is None
    assert kernels.verdict([row]) == (False, "no kernel was checked")


def row_of(side="triton", case="a", ms=1.0, error=1e-3, **more):
    values = {"op": "delta_rule", "case": case, "shape": {"T": 4096}, "side": side}
    values |= {"errors": {**dict.fromkeys(kernels.LIMITS), "bfloat16": error}}
    return values | {"refused": None, "reason": None, "ms": ms, "peak_mib": 2.0} | more


def test_verdict():
    good = [row_of(), row_of("fla", ms=2.0), row_of("efficient", ms=0.5)]
    assert kernels.verdict(good) == (
        True,
        "right in all 1 cases that the kernels take; faster than fla in 1 of 1; "
        "faster than efficient in 0 of 1",
    )
    failed = row_of(case="b", error=None, ms=None, reason="out of memory")
    says = "wrong in 1 of 2 cases: b: out of memory"
    assert kernels.verdict([*good, failed]) == (False, says)
    # Errors of other libraries are not errors of fwlab.
    assert kernels.verdict([row_of(), row_of("fla", error=1.0)])[0]


def test_a_run_on_a_gpu_is_written_row_by_row_and_goes_on(tmp_path, monkeypatch):
    """A GPU benchmark that was interrupted continues with the missing rows."""
    about = {"name": "x", "slug": "x", "capability": (9, 0)}
    monkeypatch.setattr(kernels, "about_card", lambda: about)
    monkeypatch.setattr(kernels._triton, "why_not", lambda minimum: None)
    monkeypatch.setattr(kernels, "cases", lambda: [(ops.sum_rule, TINY)])
    monkeypatch.setattr(kernels, "provenance", lambda command: {"commit": "c"})
    asked = []

    def measured(op, size, side, device, clock):
        asked.append(side)
        if side == "efficient" and len(asked) < 3:
            raise KeyboardInterrupt
        return row_of(side, kernels.key(op, size))

    monkeypatch.setattr(kernels, "measure_row", measured)
    path = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        kernels.main(path, "")
    assert not json.loads(path.read_text("utf-8"))["complete"]
    assert kernels.main(path, "")
    assert asked == ["triton", "efficient", "efficient"]
    result = json.loads(path.read_text("utf-8"))
    assert result["complete"] and len(result["rows"]) == 2


@pytest.mark.parametrize("says", ["there is no GPU", "set this"])
def test_refusal(tmp_path, monkeypatch, capsys, says):
    """Without a GPU, `fwlab bench --gpu` exits with code 2 and writes no file."""
    monkeypatch.chdir(tmp_path)
    if says == "set this":
        monkeypatch.setattr(kernels._triton, "why_not", lambda minimum: says)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fwlab", "bench", "--gpu"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and says in err
    assert not list(tmp_path.iterdir())
