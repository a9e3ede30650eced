"""`fwlab bench --gpu`, as far as it can be tested without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fwlab import cli, ops
from fwlab.bench import fla, kernels
from fwlab.bench.case import layout
from fwlab.ops._operation import Refused

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import results as hook  # noqa: E402

TINY = {
    case.name: case
    for case in kernels.cases(
        rule_sizes=((1, 70, 1, 16),),
        aft_sizes=((2, 24, 16, 4, 2),),
        feedback_sizes=((2, 6, 2, 16, 2),),
    )
}


def nothing(call):
    """Call once, and measure nothing."""
    call()
    return None, None


def test_slug():
    assert kernels.slug("NVIDIA GeForce RTX 4090 (Laptop)") == (
        "nvidia-geforce-rtx-4090-laptop"
    )


def test_default_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert kernels.written("x") == Path("gpu-x.json")
    monkeypatch.chdir(ROOT)
    assert kernels.written("x") == Path("docs/results/gpu-x.json")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu"], "there is no GPU"),
        (["--gpu", "--out", "new/here.json"], "there is no GPU"),
    ],
)
def test_refusal(tmp_path, monkeypatch, capsys, arguments, says):
    """Exit code 2, one sentence, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["fwlab", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and says in err
    assert not list(tmp_path.iterdir())


def test_a_wrong_compiler_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels._triton, "why_not", lambda minimum: "set this")
    with pytest.raises(ValueError, match="bench --gpu: set this"):
        kernels.main(tmp_path / "x.json", "")


def test_card(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 140 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    about = kernels.card()
    assert about["slug"] == "nvidia-h200" and about["capability"] == (9, 0)


def test_every_kernel_has_a_case():
    with_kernels = [n for n, op in ops.TABLE.items() if "triton" in op.forms]
    assert [*dict.fromkeys(case.name for case in kernels.cases())] == with_kernels
    assert [*TINY] == with_kernels
    keys = [case.key for case in kernels.cases()]
    assert len(set(keys)) == len(keys)


def tried(case, triton="efficient", change=None):
    """The rows of a case, with another implementation in place of the kernel."""
    sides = dict(case.sides)

    def stand_in(*inputs):
        y = sides[triton](*inputs)
        return y if change is None else change(y)

    return kernels.rows(
        case._replace(sides=sides | {"triton": stand_in}), "cpu", nothing
    )


@pytest.mark.parametrize("case", TINY.values(), ids=TINY)
def test_errors_are_those_of_an_independent_piece(case, monkeypatch):
    """As small as they are for efficient; flash-linear-attention is missing."""
    monkeypatch.setattr(fla, "version", lambda: None)
    found = tried(case)
    assert [row["side"] for row in found] == ["triton", "efficient"]
    for row in found:
        assert not row["reason"] and not kernels.wrong(row), row
        assert all(error > 0 for error in row["errors"].values())
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("op", ["delta_rule", "aft_conv", "feedback"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda y: y * 1.1, "float32 1.0e-01"),
        (lambda y: y * torch.nan, "float32: the result is not finite"),
        (lambda y: y[..., 1:], "Error: "),
    ],
)
def test_what_is_wrong_shows(op, change, says):
    """In the output or in a gradient, at any place of the piece."""
    ours, other = tried(TINY[op], change=change)[:1], tried(TINY[op])[1:]
    right, sentence = kernels.verdict(ours + other)
    json.dumps(ours, allow_nan=False)
    assert not right and sentence.startswith("wrong in 1 of 1 cases: " + op)
    assert says in sentence


def test_a_wrong_gradient_shows():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return 2 * dx

    (row, _) = tried(TINY["sum_rule"], change=Twice.apply)
    assert row["errors"]["float32"] == 1.0


def test_limits_are_no_failures(monkeypatch):
    """What a kernel refuses by design is neither right nor wrong."""
    case = TINY["delta_rule"]

    def refuses(*inputs):
        raise Refused("too wide")

    found = kernels.rows(
        case._replace(sides=case.sides | {"triton": refuses}), "cpu", nothing
    )[0]
    assert found["refused"] == "too wide" and found["reason"] is None
    assert not kernels.verdict([found])[0]
    json.dumps(found, allow_nan=False)


def row(side="triton", case="a", ms=1.0, error=1e-3, **more):
    """A row of the result."""
    values = {"op": "delta_rule", "case": case, "shape": {"T": 4096}, "side": side}
    values |= {"errors": {**dict.fromkeys(kernels.LIMITS), "bfloat16": error}}
    return values | {"refused": None, "reason": None, "ms": ms, "peak_mib": 2.0} | more


def test_verdict():
    good = [row(), row("fla", ms=2.0), row("efficient", ms=0.5)]
    assert kernels.verdict(good) == (
        True,
        "right in all 1 cases that the kernels take; faster than fla in 1 of 1; "
        "faster than efficient in 0 of 1",
    )
    refused = row(case="b", error=None, ms=None, refused="too wide")
    assert kernels.verdict([*good, refused])[0]
    assert kernels.verdict([refused]) == (False, "no kernel was checked")
    failed = row(case="b", error=None, ms=None, reason="out of memory")
    assert kernels.verdict([*good, failed]) == (
        False,
        "wrong in 1 of 2 cases: b: out of memory",
    )
    # What others do wrong is not ours.
    assert kernels.verdict([row(), row("fla", error=1.0)])[0]


def test_table():
    rows = [row(), row("fla", ms=2.0), row("efficient", ms=None, reason="out")]
    cells = kernels.table(rows)
    assert len({len(line) for line in layout(cells, left=3).splitlines()}) == 1
    assert [line[4] for line in cells] == ["x triton", "1.00", "2.00", "-"]


def whole():
    """A result as a run leaves it."""
    rows = [row(), row("fla", ms=2.0), row("efficient", ms=None, reason="out")]
    right, verdict = kernels.verdict(rows)
    about = {"name": "NVIDIA H200", "slug": "nvidia-h200", "capability": [9, 0]}
    about |= {"memory_gib": 139.8, "cuda": "13.0"}
    return {
        **{"complete": True, "card": about, "limits": kernels.LIMITS},
        **{"versions": kernels.versions(), "rows": rows, "right": right},
        **{
            "verdict": verdict,
            "seconds": 9.0,
            **kernels.provenance("fwlab bench --gpu"),
        },
    }


def test_page(tmp_path, monkeypatch):
    class Page:
        class file:
            src_uri = "results.md"

    def page():
        text = (ROOT / "docs" / "results.md").read_text("utf-8")
        return hook.on_page_markdown(text, Page, None, None)

    monkeypatch.setattr(hook, "RESULTS", tmp_path)
    assert "Not yet benchmarked on a GPU." in page()
    name = tmp_path / "gpu-nvidia-h200.json"
    name.write_text(json.dumps(whole()))
    text = page()
    assert "Not yet benchmarked" not in text
    assert "### NVIDIA H200" in text and "results/gpu-nvidia-h200.json" in text
    assert "faster than fla in 1 of 1" in text and "efficient: out" in text


def test_the_command(tmp_path, monkeypatch, capsys):
    """From its options to its file and its exit code, with one operation."""
    case = TINY["sum_rule"]
    wrong = case._replace(sides=case.sides | {"triton": lambda *x: 2 * x[2]})
    right = case._replace(sides=case.sides | {"triton": case.sides["efficient"]})
    about = whole()["card"]
    monkeypatch.setattr(kernels, "trusted_card", lambda: about)
    here = kernels.rows
    monkeypatch.setattr(kernels, "rows", lambda case, *_: here(case, "cpu", nothing))
    path = tmp_path / "x.json"
    arguments = ["fwlab", "bench", "--gpu", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    for one, code in ((wrong, 1), (right, 0)):
        monkeypatch.setattr(kernels, "cases", lambda one=one, **sizes: [one])
        if code:
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert ended.value.code == code
        else:
            cli.main()
        result = json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)
        assert result["complete"] and result["right"] == (not code)
        assert {row["ms"] for row in result["rows"]} == {None}
        assert result["verdict"] in capsys.readouterr().out


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


@pytest.mark.parametrize("name", fla.PEERS)
def test_the_peer_computes_the_same(name, monkeypatch):
    """Output and gradients of the loops, from functions with its conventions."""
    for kind in ("simple_gla", "delta_rule", "gated_delta_rule"):
        module = ModuleType(f"fla.ops.{kind}")
        setattr(module, f"chunk_{kind}", recurrent)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    case = TINY[name]
    inputs, dy = case.problem(torch.float64)
    found, wanted = (kernels.once(case.sides[s], inputs, dy) for s in ("fla", "naive"))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_name_is_imported_only_when_a_kernel_runs():
    """Neither the kernels nor flash-linear-attention."""
    code = (
        "import sys, fwlab.bench.kernels\n"
        "assert not [m for m in sys.modules if m in ('fla', 'triton')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
