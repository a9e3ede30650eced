"""GPU kernels on a machine without a GPU: dispatch and limits."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from fwlab import info, ops
from fwlab.ops.call import choice, launcher

if launcher.INTERPRETED or not launcher.installed():
    pytest.skip("no kernel can be compiled here", allow_module_level=True)

from fwlab.ops.additive.kernels import form

FORMS = Path(__file__).parents[1] / "docs/results/forms-nvidia-h200.json"
HOPPER, AMPERE = (9, 0), (8, 0)


def call(op="delta_rule", time=100, dtype=torch.float16, device="meta", **options):
    x = torch.zeros(1, time, 2, 8, dtype=dtype, device=device)
    return getattr(ops, op)(x, x, x, x[..., 0], **options)


def test_why_there_is_no_kernel():
    with pytest.raises(ValueError) as error:
        call(device="cpu", implementation="triton")
    assert str(error.value) == (
        "delta_rule: implementation 'triton' cannot run here: Triton needs a GPU, "
        "but the tensors are on cpu; 'efficient' can"
    )
    with (
        launcher.recording((7, 0)),
        pytest.raises(ValueError, match=r"7\.0 is below 7\.5"),
    ):
        call(implementation="triton")
    with (
        launcher.recording((9, 0)),
        pytest.raises(ValueError, match="no kernel for float64"),
    ):
        call(dtype=torch.float64, implementation="triton")


@pytest.mark.parametrize(
    ("dtype", "nu", "limit"),
    [
        (torch.float32, 2, None),
        (torch.float32, 3, "widths up to 256 in float32, got 384 and 64"),
        (torch.float16, 4, None),
        (torch.float16, 5, "widths up to 512 in half precision, got 640 and 64"),
    ],
)
def test_limit_of_features(dtype, nu, limit):
    """The features count, not the scalars that they are made of."""
    x = torch.zeros(1, 100, 1, 64, dtype=dtype, device="meta")
    with launcher.recording((9, 0)) as launches:
        if limit is None:
            ops.dpfp_delta_rule(x, x, x, x[..., 0], nu, implementation="triton")
            assert launches
        else:
            with pytest.raises(choice.Refused, match=limit) as error:
                ops.dpfp_delta_rule(x, x, x, x[..., 0], nu, implementation="triton")
            assert str(error.value.limit) in str(error.value)


@pytest.mark.parametrize(
    ("op", "capability", "time", "kernel"),
    [
        ("delta_rule", (9, 0), 5, "forward"),
        ("delta_rule", (9, 0), 4, "steps"),
        ("delta_rule", (7, 5), 100, "steps"),
        ("dpfp_delta_rule", (9, 0), 1, "forward"),
        ("dpfp_delta_rule", (7, 5), 100, "steps"),
    ],
)
def test_auto_picks_by_capability_and_length(op, capability, time, kernel):
    with launcher.recording(capability) as launches:
        call(op, time)
    assert kernel in [launch.kernel.__name__ for launch in launches]


def test_forms_are_those_that_a_gpu_chose():
    stand_in = launcher.StandIn((9, 0), "meta", lambda launch: None)
    rows = json.loads(FORMS.read_text("utf-8"))["chosen"]
    with launcher.standing_in(stand_in):
        for row in rows:
            name, width = row["case"], row["width"]
            v = torch.empty(8, 4096, 16, width, dtype=torch.bfloat16, device="meta")
            nu = int("DPFP" in name)
            K = width * (2 * nu or 1)
            made = form(v, K, nu, name.startswith("gated"), "delta" in name)
            assert made._asdict() == row["form"], name
    assert len(rows) == 10


def test_auto_falls_back_and_says_so(monkeypatch):
    """On a GPU with one warning, on a CPU without."""
    table = ops.TABLE["delta_rule"].implementations

    class OnGPU(torch.Tensor):
        device = torch.device("cuda")

    on_gpu = torch.zeros(1, dtype=torch.float64).as_subclass(OnGPU)
    monkeypatch.setattr(launcher, "capability", lambda device: (9, 0))
    with pytest.warns(UserWarning, match="for float64; 'efficient' is used instead"):
        chosen = choice.choose("delta_rule", table, "auto", on_gpu)
    assert chosen == ("efficient", table["efficient"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(device="cpu", dtype=torch.float32)


def test_lengths_do_not_compile_again():
    """The same kernels with the same constants for any length."""
    made = []
    for time in (1000, 1024, 1025):
        with launcher.recording((9, 0)) as launches:
            call(time=time)
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
    """Only the first dimension of a grid may be above 65,535."""

    def x(*shape):
        return torch.empty(
            *shape, dtype=torch.bfloat16, device="meta", requires_grad=True
        )

    heads = [x(1, time, 4, 16) for _ in range(3)]
    flat = [x(1, time, 64) for _ in range(3)]
    with launcher.recording((9, 0)) as launches:
        for y in (
            ops.aft_simple(*flat),
            ops.aft_full(*flat, x(time, time), implementation="triton"),
            ops.aft_local(*flat, x(time, 64)),
            ops.aft_conv(*heads, x(4, 64)),
        ):
            y.sum().backward()
    assert len(launches) > 20
    for launch in launches:
        assert launch.grid[0] < 2**31 and max(launch.grid[1:]) < 2**16
    for shape, message in (
        ((70_000, 8, 4), "batch up to 65535, got 70000"),
        ((1, 8, 70_000), "channels up to 65535, got 70000"),
    ):
        with launcher.recording((9, 0)), pytest.raises(ValueError, match=message):
            ops.aft_simple(*(x(*shape) for _ in range(3)), implementation="triton")


# Compilers that are known to be wrong on Hopper.


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """A function that makes Triton use a ptxas of this version."""

    def use(version):
        path = tmp_path / version
        path.write_text(f"#!/bin/sh\necho release {version}, V{version}.1\n")
        path.chmod(0o755)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
        launcher.untrusted.cache_clear()

    yield use
    launcher.untrusted.cache_clear()


@pytest.mark.parametrize("version", ["12.8", "13.0"])
def test_a_wrong_ptxas_is_refused_on_hopper(ptxas, version):
    """And what is to be set is there, with a version that will do."""
    ptxas(version)
    reason = launcher.untrusted(HOPPER)
    assert reason.startswith(f"ptxas {version} computes wrong numbers on Hopper; set")
    assert "TRITON_PTXAS_PATH to one of version 13.1 or newer" in reason
    path, own = re.search(r"own (\S+) is (\S+)$", reason).groups()
    assert launcher.numbers(own) >= launcher.PTXAS and path.endswith("ptxas-blackwell")
    assert launcher.untrusted(AMPERE) is None


@pytest.mark.parametrize("version", ["13.1", "13.3", "14.0"])
def test_a_newer_ptxas_is_taken(ptxas, version):
    ptxas(version)
    assert launcher.untrusted(HOPPER) is None


def test_a_wrong_triton_is_refused_on_hopper(ptxas, monkeypatch):
    """On a GPU; its stand-in runs no machine code."""
    ptxas("13.3")
    monkeypatch.setattr(launcher, "version", lambda package: (3, 7, 0))
    kernel = launcher.Kernel("fwlab.ops.additive.kernels")
    monkeypatch.setattr(launcher, "capability", lambda device: HOPPER)
    with launcher.standing_in(None):
        reason = kernel.refusal(torch.device("cuda"), {torch.float16})
    assert reason == (
        "Triton 3.7.0 computes wrong gradients on Hopper; install Triton 3.7.1 or newer"
    )
    with launcher.standing_in(launcher.StandIn(HOPPER, "cuda", print)):
        assert kernel.refusal(torch.device("cuda"), {torch.float16}) is None
    assert launcher.untrusted(AMPERE) is None


def test_info_shows_the_ptxas(ptxas, monkeypatch):
    ptxas("12.8")
    assert re.fullmatch(r"12\.8, \S+/12\.8", info._assembler())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: HOPPER)
    assert "12.8; not used: ptxas 12.8 computes wrong numbers" in info._assembler()
