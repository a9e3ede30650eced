"""Test dispatch and limits of GPU kernels on a machine without a GPU."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from alike import problem
from launches import recording

from fwlab import info, ops
from fwlab.ops import _triton, linear
from fwlab.ops._operation import Refused, choose
from fwlab.ops._rules import Inputs
from fwlab.ops.aft import limits as aft
from fwlab.ops.feedback import why_not as feedback_why_not

if _triton.INTERPRETED or not _triton.installed():
    pytest.skip("no kernel can be compiled here", allow_module_level=True)

from fwlab.ops.linear.kernels import form

FORMS = Path(__file__).parents[1] / "docs/results/forms-nvidia-h200.json"
HOPPER, AMPERE = (9, 0), (8, 0)
CUDA = torch.device("cuda")


def call(op="delta_rule", time=100, dtype=torch.float16, device="meta", **options):
    x = torch.zeros(1, time, 2, 8, dtype=dtype, device=device)
    return getattr(ops, op)(x, x, x, x[..., 0], **options)


class OnGPU(torch.Tensor):
    """Report the device "cuda" for a CPU tensor."""

    device, is_cuda, is_cpu = CUDA, True, False


def inputs(K=8, V=8, dtype=torch.float16, **more):
    q, v = (torch.zeros(1, 2, 1, n, dtype=dtype).as_subclass(OnGPU) for n in (K, V))
    return Inputs(q=q, k=q, v=v, **more)


@pytest.fixture
def capability(monkeypatch):
    """Return a function that sets the compute capability of the GPU."""

    def use(*value):
        monkeypatch.setattr(_triton, "capability", lambda device: value)
        monkeypatch.setattr(_triton, "_untrusted", lambda have: None)

    use(9, 0)
    return use


def test_why_there_is_no_kernel(capability):
    with pytest.raises(Refused) as error:
        call(device="cpu", implementation="triton")
    assert str(error.value) == (
        "delta_rule: implementation 'triton' cannot run here: Triton needs a GPU, "
        "but the tensors are on cpu; 'efficient' can"
    )
    assert linear.why_not(inputs()) is None
    assert (
        linear.why_not(inputs(dtype=torch.float64)) == "there is no kernel for float64"
    )
    capability(7, 5)
    assert linear.why_not(inputs()) == "compute capability 7.5 is below 8.0"
    assert _triton.why_not(CUDA, {torch.float16}, minimum=(7, 5)) is None


x = torch.zeros(1, 2, 1, 8)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"K": 256, "dtype": torch.float32}, None),
        ({"K": 257, "dtype": torch.float32}, "up to 256 in float32, got 257 and 8"),
        ({"V": 512}, None),
        ({"V": 513}, "up to 512 in half precision, got 8 and 513"),
        ({"decay": x[..., :1], "strength": x[..., :1]}, None),
        ({"decay": x}, "no kernel for a decay per key channel"),
        ({"erase_key": x}, "no kernel for a key of its own that erases"),
    ],
)
def test_limits_of_the_rules(given, says, capability):
    reason = linear.why_not(inputs(**given))
    assert reason is None if says is None else says in reason


def test_limits_of_the_others(capability):
    def x(*shape):
        return torch.zeros(1).as_subclass(OnGPU).expand(shape)

    assert aft.why_not(*[x(9, 8, 4)] * 3) is None
    with pytest.raises(Refused, match="there is no kernel for causal=False; 'effic"):
        ops.aft_local(*[x(9, 8, 4)] * 3, x(8, 3), causal=False, implementation="triton")
    for shape, message in (
        ((70_000, 8, 4), "batch up to 65535, got 70000"),
        ((1, 8, 70_000), "channels up to 65535, got 70000"),
    ):
        assert message in aft.why_not(*[x(*shape)] * 3)


def test_limits_of_the_feedback_memory(monkeypatch):
    monkeypatch.setattr(_triton, "why_not", lambda *inputs: None)
    p = problem("op=feedback time=2 heads=1 key=4 value=3")
    weights = {name: part for name, part in p.x.items() if name != "x"}
    w, k = ops.FeedbackWeights(**weights), torch.zeros(1, 0, 1, 1, 4)
    many = torch.empty(1, 2**30, 1, 1, 4, device="meta")
    wide = w._replace(positions=torch.zeros(4, 300))
    assert feedback_why_not(p.x["x"], w, 1, k, k, None) is None
    for given, says in (
        ((w, 1, k, k, None, k), "the kernels have no dropout"),
        ((w, 1, many, many, None), "there is no kernel for 1073741826 memories"),
        ((wide, 1, k, k, None), "the kernels take features up to 256, got 300"),
    ):
        assert feedback_why_not(p.x["x"], *given) == says


def test_forms_are_those_that_a_gpu_chose(capability):
    rows = json.loads(FORMS.read_text("utf-8"))["chosen"]
    for row in rows:
        name, width = row["case"], row["width"]
        v = torch.empty(8, 4096, 16, width, dtype=torch.bfloat16, device="meta")
        if "DPFP" not in name:  # DPFP no longer has kernels.
            made = form(v, width, name.startswith("gated"), "delta" in name)
            assert made._asdict() == row["form"], name
    assert len(rows) == 10


def test_auto_falls_back_and_says_so(capability):
    """On a GPU, "auto" warns about a fallback; on a CPU, it does not."""
    forms = ops.TABLE["delta_rule"].forms
    with pytest.warns(UserWarning, match="for float64; 'efficient' is used instead"):
        x = inputs(dtype=torch.float64)
        chosen = choose("delta_rule", forms, "auto", x.q, x)
    assert chosen is forms["efficient"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(device="cpu", dtype=torch.float32)


def test_lengths_do_not_compile_again():
    """Sequences of all lengths launch equal kernels with equal constants."""
    made = []
    for time in (1000, 1024, 1025):
        with recording((9, 0)) as launches:
            call(time=time, implementation="triton")
        made.append([(one.kernel, one.constants, one.warps) for one in launches])
    assert made[0] == made[1] == made[2]


def test_info_says_why():
    line = next(x for x in info.report().splitlines() if x.startswith("delta_rule"))
    if torch.cuda.is_available():
        assert "naive, chunked, efficient, triton" in line
    else:
        assert "naive, chunked, efficient (no triton: there is no GPU)" in line


@pytest.mark.parametrize("time", [70_000, 1_200_000])
def test_grids_have_room(time):
    """Only the first dimension of a grid exceeds 65,535."""

    def x(*shape):
        return torch.empty(
            *shape, dtype=torch.bfloat16, device="meta", requires_grad=True
        )

    heads = [x(1, time, 4, 16) for _ in range(3)]
    flat = [x(1, time, 64) for _ in range(3)]
    with recording((9, 0)) as launches:
        for y in (
            ops.aft_simple(*flat, implementation="triton"),
            ops.aft_full(*flat, x(time, time), implementation="triton"),
            ops.aft_local(*flat, x(time, 64), implementation="triton"),
            ops.aft_conv(*heads, x(4, 64), implementation="triton"),
        ):
            y.sum().backward()
    assert len(launches) > 20
    for launch in launches:
        assert launch.grid[0] < 2**31 and max(launch.grid[1:]) < 2**16


# --- Compilers with known errors on Hopper ---


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """Yield a function that makes Triton use a ptxas of a given version."""

    def use(version):
        path = tmp_path / version
        path.write_text(f"#!/bin/sh\necho release {version}, V{version}.1\n")
        path.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        _triton.untrusted.cache_clear()

    yield use
    _triton.untrusted.cache_clear()


@pytest.mark.parametrize("version", ["12.8", "13.0", "13.1", "13.3", "14.0"])
def test_a_wrong_ptxas_is_refused_on_hopper(ptxas, version):
    """On Hopper, a faulty ptxas is refused; the message names a suitable version."""
    ptxas(version)
    reason = _triton.untrusted(HOPPER)
    assert _triton.untrusted(AMPERE) is None
    if _triton.numbers(version) >= (13, 1):
        assert reason is None
        return
    assert reason.startswith(f"ptxas {version} computes wrong numbers on Hopper; set")
    assert "TRITON_PTXAS_PATH to one of version 13.1 or newer" in reason
    path, own = re.search(r"own (\S+) is (\S+)$", reason).groups()
    assert _triton.numbers(own) >= _triton.PTXAS and path.endswith("ptxas-blackwell")


def test_a_wrong_triton_is_refused_on_hopper(ptxas, monkeypatch):
    ptxas("13.3")
    monkeypatch.setattr(_triton, "version", lambda package: (3, 7, 0))
    monkeypatch.setattr(_triton, "capability", lambda device: HOPPER)
    assert _triton.why_not(CUDA, {torch.float16}) == (
        "Triton 3.7.0 computes wrong gradients on Hopper; install Triton 3.7.1 or newer"
    )
    assert _triton.untrusted(AMPERE) is None
