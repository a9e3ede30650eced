"""The benchmarks: what they compute is compared, times are not."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fwlab import cli, ops
from fwlab.bench import kernels, measure, operations
from fwlab.bench.problems import problem
from fwlab.models import MIXERS
from fwlab.ops._operation import Refused

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "docs" / "hooks"), str(ROOT / "docs" / "tools")]
import crossings  # noqa: E402
import peers  # noqa: E402
import results as hook  # noqa: E402

OPS = {name: op for name, op in ops.TABLE.items() if name != "aft_conv2d"}
KERNELS = {name: op for name, op in OPS.items() if "triton" in op.forms}
TINY = {"batch": 2, "time": 20, "width": 16, "heads": 2, "window": 4, "layers": 2}


def call_once(call):
    """Call, and measure nothing."""
    call()
    return None, None


def test_peak_memory_is_that_of_the_tensors_alive_at_once():
    x = torch.ones(2**18)  # 1 MiB

    def call():
        y = x + 1
        z = y * 2
        del y
        return z + 3

    assert measure.peak_mib(call) == measure.peak_mib(call)
    assert measure.peak_mib(call) == pytest.approx(2, abs=0.01)


def test_operator_calls_of_both_passes():
    x = torch.ones(3, requires_grad=True)
    assert measure.operator_calls(lambda: x.cos().neg().abs()) == 3
    forward = measure.operator_calls(lambda: x.exp().sum())
    both = measure.operator_calls(lambda: torch.autograd.grad(x.exp().sum(), x))
    assert both >= forward + 3  # ones, expand, product


def test_the_command_prints_every_row_and_writes_all(tmp_path, monkeypatch, capsys):
    """One small case, two mixers, one position; all columns are straight."""
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
    # The rules of chunks need more operators than PyTorch's one.
    assert 100 < softmax["operators"] < added["operators"]
    assert added["parameters"] == pytest.approx(softmax["parameters"], rel=0.02)
    rows = {row["layer"]: len(row["microseconds"]) for row in result["decoding"]}
    assert rows["fast weights, delta"] == 2 and rows["softmax"] == 1
    for table in text.split("\n\n")[2::2]:
        lines = [line for line in table.splitlines() if "  " in line]
        assert len(lines) > 2 and len({len(line) for line in lines}) == 1, table


def test_models_of_all_mixers_are_equally_large():
    """Within 2 %, not counting position tables."""
    sizes = {name: operations.new_model(name).num_parameters() for name in MIXERS}
    wanted = dict.fromkeys(MIXERS, sizes["softmax"])
    assert sizes == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("mixer", "limit"), [("delta", 1180), ("sum", 810)])
def test_operators_of_a_short_sequence(mixer, limit):
    """Softmax attention needs 506, of which 210 are not those of a mixer."""
    step = operations.TrainingStep(lambda: operations.new_model(mixer))

    def both_passes():
        step.model(step.tokens[:, :-1]).sum().backward()

    assert measure.operator_calls(both_passes) <= limit


@pytest.mark.parametrize("name", OPS)
def test_forms_and_pieces_compute_the_same(name, monkeypatch):
    """The error of a piece is that of the whole: small, and above 0."""
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    monkeypatch.setattr(torch, "float16", torch.float32)
    row = kernels.measure_row(OPS[name], TINY, "efficient", "cpu", call_once)
    assert not row["reason"] and not kernels.wrong(row), row
    assert all(error > 0 for error in row["errors"].values())
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize("name", ["delta_rule", "aft_conv", "feedback"])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_what_is_wrong_shows(name, at, monkeypatch):
    """In the output, in a gradient, and where a result is not a number."""

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
    """What a kernel refuses by design is neither right nor wrong."""

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
    # What others do wrong is not ours.
    assert kernels.verdict([row_of(), row_of("fla", error=1.0)])[0]


def test_a_run_on_a_gpu_is_written_row_by_row_and_goes_on(tmp_path, monkeypatch):
    """What a run with the same versions has measured is not measured again."""
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
    """Exit code 2, one sentence, nothing written."""
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


def recurrent(q, k, v, g=None, beta=None, scale=None):
    """A rule in the conventions of flash-linear-attention, step by step."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    S, o = k.new_zeros(*k.shape[::2], k.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        if g is not None:
            S = S * g[:, t].exp()[..., None, None]
        new = v[:, t]
        if beta is not None:
            held = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            new = beta[:, t, :, None] * (new - held)
        S = S + k[:, t, :, :, None] * new[:, :, None]
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1), None


def test_the_peer_computes_the_same(monkeypatch):
    """Output and gradients of the loops, from functions with its conventions."""
    for kind in ("simple_gla", "delta_rule", "gated_delta_rule"):
        module = ModuleType(f"fla.ops.{kind}")
        setattr(module, f"chunk_{kind}", recurrent)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(kernels, "version", lambda package: "1")
    with_peer = {name: kernels.peer(name) for name in KERNELS if kernels.peer(name)}
    assert len(with_peer) == 5
    for name, theirs in with_peer.items():
        given = problem(OPS[name], torch.float64, time=20, width=8)
        found = operations.once(theirs, given)
        wanted = operations.once(
            lambda *x, call=given.call: call(*x, implementation="naive"), given
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_name_is_imported_only_when_a_kernel_runs():
    """Neither the kernels nor flash-linear-attention."""
    code = (
        "import sys, fwlab.bench.kernels\n"
        "assert not [m for m in sys.modules if m in ('fla', 'triton')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_of_a_gpu(tmp_path, monkeypatch):
    class Page:
        class file:
            src_uri = "results.md"

    def page():
        text = (ROOT / "docs" / "results.md").read_text("utf-8")
        return hook.on_page_markdown(text, Page, None, None)

    monkeypatch.setattr(hook, "RESULTS", tmp_path)
    assert "Not yet benchmarked on a GPU." in page()
    stored = json.loads((ROOT / "docs/results/gpu-nvidia-h200.json").read_text("utf-8"))
    (tmp_path / "gpu-nvidia-h200.json").write_text(json.dumps(stored))
    assert "Not yet benchmarked" not in page() and "### NVIDIA H200" in page()


SMALL = {
    "gated_delta": (2, 70, 2, 8),
    "aft_full": (40, 8),
    "normalised_sum": (2, 128, 2, 8),
}


@pytest.mark.parametrize("name", SMALL)
def test_peers_compute_the_same(name):
    torch.manual_seed(0)
    ours, theirs = getattr(peers, name)(*SMALL[name]).values()
    torch.manual_seed(0)
    for a, b in zip(ours(), theirs(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_cache_of_nanogpt_changes_nothing():
    torch.manual_seed(0)
    model, tokens = peers.NanoGPT(6), torch.randint(65, (1, 6))
    steps = [model(token, past) for past, token in enumerate(tokens.split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "at", "says"),
    [
        ({64: 1, 256: 1}, {64: 2, 256: 2}, 64, "at every length from T = 64"),
        ({64: 2, 256: 1}, {64: 1, 256: 2}, 128, "from T = 130"),
        ({64: 1, 256: 2}, {64: 2, 256: 1}, None, "not up to T = 256"),
    ],
)
def test_crossing(ours, theirs, at, says):
    found = crossings.crossing(ours, theirs)
    assert found == pytest.approx(at) and crossings.in_words(found, 64, 256) == says
