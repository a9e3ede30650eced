"""Compilers that are known to be wrong on Hopper, on machines that only seem so."""

import os

import pytest

from fwlab import info
from fwlab.ops.call import compiler, gpu

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that installs programs ptxas: where -> version."""
    home = tmp_path / "triton" / "backends" / "nvidia" / "bin"
    folders = {"triton": [tmp_path / "triton"], "nvidia": [tmp_path / "nvidia"]}
    paths = {
        "ptxas": home / "ptxas",
        "ptxas-blackwell": home / "ptxas-blackwell",
        "nvcc": tmp_path / "nvidia" / "cu13" / "bin" / "ptxas",
        "home": tmp_path / "cuda" / "bin" / "ptxas",
    }

    def install(triton="3.7.1", driver=(13, 0), **versions):
        for name, version in versions.items():
            path = paths[name.replace("_", "-")]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\necho Cuda compilation tools, V{version}\n")
            path.chmod(0o755)
        numbers = tuple(map(int, triton.split(".")))
        monkeypatch.setattr(compiler, "triton", lambda: numbers)
        monkeypatch.setattr(compiler, "driver", lambda: driver)
        return {name: str(path) for name, path in paths.items()}

    used = []
    monkeypatch.setattr(compiler, "_folders", folders.get)
    monkeypatch.setattr(compiler, "use", used.append)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name in ("CUDA_PATH", compiler.CHOICE, compiler.BLACKWELL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    install.used = used
    for cached in (compiler.assembler, compiler.refusal):
        cached.cache_clear()
    yield install
    for cached in (compiler.assembler, compiler.refusal):
        cached.cache_clear()


def chosen(capability):
    one, reason = compiler.assembler(capability)
    assert reason == compiler.refusal(capability)
    return one.version, reason


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_a_wrong_one_gives_way_to_the_other_one_of_triton(machine, capability):
    paths = machine(ptxas="12.8.93", ptxas_blackwell="13.1.80", nvcc="13.0.88")
    version, reason = chosen(capability)
    assert reason is None
    assert version == ((13, 1, 80) if capability == HOPPER else (12, 8, 93))
    if capability == HOPPER:
        (used,) = machine.used
        assert used.path == paths["ptxas-blackwell"]
        assert "ptxas 12.8.93 is known to be wrong on Hopper" in str(used)
    else:
        assert not machine.used


@pytest.mark.parametrize(
    ("others", "version"),
    [
        ({"nvcc": "13.1.2", "home": "13.3.0"}, (13, 3, 0)),
        ({"nvcc": "13.3.1", "home": "13.1.0"}, (13, 3, 1)),
        ({"ptxas_blackwell": "13.0.88", "home": "13.2.0"}, (13, 2, 0)),
        # 14 is too new for this driver.
        ({"nvcc": "14.0.1", "home": "13.2.0"}, (13, 2, 0)),
    ],
)
def test_others_are_found(machine, others, version):
    machine(ptxas="12.8.93", **others)
    assert chosen(HOPPER) == (version, None)


def test_of_two_that_are_the_same_the_first_counts(machine):
    paths = machine(ptxas="12.8.93", ptxas_blackwell="13.1.80", nvcc="13.1.80")
    assert compiler.assembler(HOPPER)[0].path == paths["ptxas-blackwell"]
    assert [one.version for one in compiler.assemblers()] == [
        (12, 8, 93),
        (13, 1, 80),
    ]


def test_a_new_one_of_triton_stays(machine):
    machine(ptxas="13.4.1", ptxas_blackwell="13.5.1")
    assert chosen(HOPPER) == ((13, 4, 1), None)
    assert chosen(BLACKWELL) == ((13, 5, 1), None)


@pytest.mark.parametrize(
    ("home", "version"),
    [("13.2.0", (13, 1, 80)), ("13.3.0", (13, 3, 0)), ("14.0.1", (13, 1, 80))],
)
def test_one_of_triton_that_is_accepted(machine, home, version):
    """It gives way only to one with all faults fixed that the driver takes."""
    machine(ptxas="13.1.80", home=home)
    assert chosen(HOPPER) == (version, None)


def test_none_that_is_right(machine):
    machine(ptxas="12.8.93", ptxas_blackwell="13.0.88")
    _, reason = chosen(HOPPER)
    assert "there is no ptxas 13.1 or newer" in reason and "nvidia-cuda-nvcc" in reason
    assert not machine.used


def test_a_driver_that_is_too_old(machine):
    """The machine code of CUDA 13 would be refused by this driver."""
    machine(ptxas="12.8.93", ptxas_blackwell="13.1.80", driver=(12, 8))
    _, reason = chosen(HOPPER)
    assert "the driver, of CUDA 12.8, is too old for ptxas 13.1.80" in reason


def test_a_choice_is_kept(machine, monkeypatch):
    paths = machine(ptxas="12.8.93", ptxas_blackwell="13.1.80", home="12.8.93")
    monkeypatch.setenv(compiler.CHOICE, paths["home"])
    one, reason = compiler.assembler(HOPPER)
    assert (one.path, reason) == (paths["home"], None)
    assert one.why == "chosen by TRITON_PTXAS_PATH; known to be wrong on Hopper"
    assert compiler.assembler(AMPERE)[0].why == "chosen by TRITON_PTXAS_PATH"


def test_a_choice_for_blackwell(machine, monkeypatch):
    paths = machine(ptxas="12.8.93", ptxas_blackwell="13.1.80", home="12.9.1")
    monkeypatch.setenv(compiler.BLACKWELL, paths["home"])
    one, reason = compiler.assembler(BLACKWELL)
    assert (one.path, reason) == (paths["home"], None)
    assert one.why == "chosen by TRITON_PTXAS_BLACKWELL_PATH"
    assert compiler.assembler(HOPPER)[0].path == paths["ptxas-blackwell"]


def test_a_choice_that_is_none(machine, monkeypatch):
    machine(ptxas="13.4.1")
    monkeypatch.setenv(compiler.CHOICE, "/nowhere/ptxas")
    assert compiler.assembler(HOPPER) == (
        None,
        "TRITON_PTXAS_PATH is /nowhere/ptxas, which is not a ptxas",
    )


@pytest.mark.parametrize("version", ["3.6.0", "3.7.0"])
def test_wrong_triton(machine, version):
    machine(triton=version, ptxas="13.4.1")
    assert compiler.refusal(HOPPER) == (
        f"Triton {version} computes wrong gradients on Hopper, Triton 3.7.1 does not"
    )
    assert compiler.refusal(AMPERE) is None


def test_a_kernel_says_so(machine, monkeypatch):
    """On a GPU; a stand-in for one runs no machine code."""
    import torch

    machine(triton="3.7.0", ptxas="13.4.1")
    kernel = gpu.Kernel("fwlab.ops.additive.kernels")
    monkeypatch.setattr(gpu, "capability", lambda device: HOPPER)
    with gpu.standing_in(None):
        reason = kernel.refusal(torch.device("cuda"), {torch.float16})
    assert reason.startswith("Triton 3.7.0 computes wrong gradients")
    with gpu.standing_in(gpu.StandIn(HOPPER, "cuda", print)):
        assert kernel.refusal(torch.device("cuda"), {torch.float16}) is None


def test_info(machine, monkeypatch):
    paths = machine(ptxas="12.8.93", ptxas_blackwell="13.1.80")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: HOPPER)
    line = info._assembler()
    assert line == (
        "13.1.80 (Triton's ptxas-blackwell, because ptxas 12.8.93 is known to be "
        f"wrong on Hopper), {paths['ptxas-blackwell']}"
    )
    machine(ptxas_blackwell="13.0.88")
    compiler._version.cache_clear()
    compiler.assembler.cache_clear()
    assert "not used: ptxas 12.8.93 is known to be wrong" in info._assembler()


def test_triton_takes_it(tmp_path):
    """The real one, and what it keeps on disk has the version in its name."""
    knobs = pytest.importorskip("triton.knobs")
    from triton.backends.nvidia.compiler import get_ptxas_version

    path = tmp_path / "ptxas"
    path.write_text("#!/bin/sh\necho release 13.9, V13.9.1\n")
    path.chmod(0o755)
    before = os.environ.get(compiler.CHOICE)
    get_ptxas_version(90)
    try:
        compiler.use(compiler.Assembler(str(path), (13, 9, 1), "a test"))
        assert knobs.nvidia.ptxas.path == str(path)
        assert "13.9.1" in get_ptxas_version(90)
    finally:
        del knobs.nvidia.ptxas
        get_ptxas_version.cache_clear()
        os.environ.pop(compiler.CHOICE, None)
        if before is not None:
            os.environ[compiler.CHOICE] = before
