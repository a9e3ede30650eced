"""Compile recorded launches for a GPU that this machine lacks.

As a program, it writes what they need to docs/results/kernels.json.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.compiler import ASTSource

from fwlab import ops
from fwlab.files import write_json
from fwlab.ops import _triton
from fwlab.provenance import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from launches import Launch, recording

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Use(NamedTuple):
    """The resources of a multiprocessor that a compiled kernel needs.

    - `shared`: bytes of shared memory per program.
    - `registers`: per thread.
    - `stack`: bytes per thread in slow local memory; above 0 registers
      have been spilled.
    """

    shared: int
    registers: int
    stack: int


def values(launch: Launch) -> dict[str, Any]:
    """The arguments and constants of a launch, by name."""
    return dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | (
        launch.constants
    )


def source(launch: Launch) -> ASTSource:
    """What Triton would compile for these arguments."""
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    given = values(launch)
    assert set(given) == set(kernel.arg_names), kernel.__name__
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        if value is None or kernel.params[place].is_constexpr:
            signature[name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            assert value.is_contiguous(), (kernel.__name__, name)
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            assert kernel.params[place].do_not_specialize, (kernel.__name__, name)
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs=attributes
    )


def build(launch: Launch, capability: tuple[int, int]) -> Any:
    """The kernel, compiled for that compute capability."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    choose_ptxas(capability)
    result = triton.compile(
        source(launch),
        target=target,
        options=_triton.options(launch.warps, launch.stages),
    )
    # Triton has no tensor cores before 8.0: products would fall apart.
    assert capability >= _triton.TENSOR_CORES or "tt.dot" not in result.asm["ttir"]
    # No product is pending across a wait, so ptxas before 13.3 will do:
    # docs/kernels/index.md.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", result.asm["ptx"])
    assert set(waits) <= {"0"}, launch.kernel.__name__
    return result


def choose_ptxas(capability: tuple[int, int]) -> str:
    """Let Triton compile with its own ptxas; its version, such as "13.1.80".

    For Hopper it is the newer one of the two, as fwlab asks of its users.
    """
    newer = capability[0] >= _triton.HOPPER
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    knobs.nvidia.ptxas = str(folder / ("ptxas-blackwell" if newer else "ptxas"))
    get_ptxas_version.cache_clear()  # it is in the names of what Triton keeps
    return re.search(r"V([\d.]+)", get_ptxas_version())[1]


def use(kernel: Any) -> Use:
    """The resources of a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name],
            check=True,
            capture_output=True,
            encoding="utf-8",
        ).stdout
    registers, stack = (
        int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK")
    )
    return Use(kernel.metadata.shared, registers, stack)


def launches(
    run: Callable[[], torch.Tensor], capability: tuple[int, int]
) -> list[Launch]:
    """The launches of forward and backward of `run` on such a GPU."""
    with recording(capability) as recorded:
        go_back(run())
    return list(recorded)


def go_back(y: torch.Tensor, dy: torch.Tensor | None = None) -> None:
    """The gradients of all leaves, which are not added to anything."""
    leaves, waiting = {}, [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            leaves[node.variable] = None
        waiting += [following for following, _ in node.next_functions if following]
    dy = torch.empty_like(y) if dy is None else dy
    torch.autograd.grad(y, list(leaves), dy, allow_unused=True)


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data that requires a gradient."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def rule(
    op: Callable,
    gates: int,
    *widths: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int] = (8, 4096, 16),
    **options,
) -> Callable[[], torch.Tensor]:
    """A call of a fast weight rule with keys and values of these widths."""

    def run():
        key, value = widths
        q, k = (meta(*shape, key, dtype=dtype) for _ in range(2))
        v = meta(*shape, value, dtype=dtype)
        more = [meta(*shape, dtype=dtype) for _ in range(gates)]
        return op(q, k, v, *more, **options)

    return run


def aft(
    op: Callable, dtype: torch.dtype, *bias: int, heads: tuple[int, ...] = ()
) -> Callable[[], torch.Tensor]:
    """A call of an AFT at 2048 steps and 512 channels."""

    def run():
        q, k, v = (meta(8, 2048, *(heads or (512,)), dtype=dtype) for _ in range(3))
        weights = [meta(*bias, dtype=torch.float32)] if bias else []
        return op(q, k, v, *weights, implementation="triton")

    return run


def memory(heads: int, key: int) -> Callable[[], torch.Tensor]:
    """A feedback stack of two layers with a state and a mask."""

    def run():
        d, layers, batch, past = heads * key, 2, 4, 8
        shapes = {
            "merge": (layers + 1,),
            "norm_mixer": (layers, d),
            "to_q": (layers, d, d),
            "to_k": (layers, d, d),
            "to_v": (layers, d, d),
            "positions": (key, key),
            "to_out": (layers, d, d),
            "norm_mlp": (layers, d),
            "expand": (layers, 4 * d, d),
            "contract": (layers, d, 4 * d),
            "norm_memory": (layers, d),
        }
        weights = ops.FeedbackWeights(
            **{name: meta(*shape, dtype=FP32) for name, shape in shapes.items()}
        )
        x = meta(batch, 4, d, dtype=BF16)
        kv = (meta(batch, past, layers, heads, key, dtype=FP32) for _ in range(2))
        state = ops.FeedbackState(*kv, None)
        return ops.feedback(
            x, weights, heads=heads, state=state, implementation="triton"
        )

    return run


HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
#: Bytes of shared memory that one program may have.
ROOM = {HOPPER: 227 * 1024, AMPERE: 163 * 1024, TURING: 64 * 1024}
BOTH, ALL = (HOPPER, AMPERE), (HOPPER, AMPERE, TURING)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
triton_form = {"implementation": "triton", "normalize": False}

#: name -> (a call, the capabilities it is compiled for).
CASES: dict[str, tuple[Callable[[], torch.Tensor], tuple[tuple[int, int], ...]]] = {
    "delta 64": (rule(ops.delta_rule, 1, 64, 64, dtype=BF16, **triton_form), BOTH),
    "delta 128": (rule(ops.delta_rule, 1, 128, 128, dtype=BF16, **triton_form), BOTH),
    "delta 256": (rule(ops.delta_rule, 1, 256, 256, dtype=BF16, **triton_form), BOTH),
    "delta 384, 64": (
        rule(ops.delta_rule, 1, 384, 64, dtype=BF16, **triton_form),
        BOTH,
    ),
    "delta 64, few heads": (
        rule(ops.delta_rule, 1, 64, 64, dtype=BF16, shape=(1, 4096, 4), **triton_form),
        BOTH,
    ),
    "delta 64 float32": (
        rule(ops.delta_rule, 1, 64, 64, dtype=FP32, **triton_form),
        BOTH,
    ),
    "delta 256 float32": (
        rule(ops.delta_rule, 1, 256, 256, dtype=FP32, **triton_form),
        BOTH,
    ),
    "gated delta 64": (
        rule(ops.gated_delta_rule, 2, 64, 64, dtype=BF16, **triton_form),
        BOTH,
    ),
    "gated delta 128": (
        rule(ops.gated_delta_rule, 2, 128, 128, dtype=FP16, **triton_form),
        BOTH,
    ),
    "gated delta 128, few heads": (
        rule(
            ops.gated_delta_rule,
            *(2, 128, 128),
            dtype=BF16,
            shape=(1, 4096, 4),
            **triton_form,
        ),
        (HOPPER,),
    ),
    "sum 64, normalized": (
        rule(ops.sum_rule, 0, 64, 64, dtype=BF16, implementation="triton"),
        BOTH,
    ),
    "sum 128": (rule(ops.sum_rule, 0, 128, 128, dtype=BF16, **triton_form), BOTH),
    "sum 64 float32, normalized": (
        rule(ops.sum_rule, 0, 64, 64, dtype=FP32, implementation="triton"),
        BOTH,
    ),
    "gated 64, normalized": (
        rule(
            ops.gated_rule,
            1,
            64,
            64,
            dtype=BF16,
            normalize=True,
            implementation="triton",
        ),
        BOTH,
    ),
    "AFT-simple": (aft(ops.aft_simple, BF16), ALL),
    "AFT-simple float32": (aft(ops.aft_simple, FP32), ALL),
    "AFT-local, window 64": (aft(ops.aft_local, BF16, 2048, 64), ALL),
    "AFT-conv, window 64": (aft(ops.aft_conv, BF16, 8, 64, heads=(8, 64)), ALL),
    "AFT-full": (aft(ops.aft_full, BF16, 2048, 2048), BOTH),
    "feedback 64": (memory(4, 64), ALL),
    "feedback 256": (memory(2, 256), ALL),
}


def key(launch: Launch, capability: tuple[int, int]) -> str:
    """The key of a kernel in the table."""
    return f"{launch.kernel.__name__}, sm_{capability[0]}{capability[1]}"


def uses(name: str, capability: tuple[int, int]) -> dict[str, Use]:
    """Every kernel of a case on one GPU, compiled."""
    found: dict[str, Use] = {}
    for launch in launches(CASES[name][0], capability):
        one, place = use(build(launch, capability)), key(launch, capability)
        # A kernel may be compiled in more than one way: the worst.
        found[place] = Use(*map(max, one, found.get(place, one)))
    return found


def rows() -> dict[str, dict[str, dict[str, int]]]:
    """Everything, compiled: case -> kernel and target -> resources."""
    return {
        name: {
            place: found._asdict()
            for capability in capabilities
            for place, found in uses(name, capability).items()
        }
        for name, (_, capabilities) in CASES.items()
    }


def _versions() -> dict[str, str]:
    found = {"triton": triton.__version__}
    for capability in ALL:
        found["ptxas, sm_{}{}".format(*capability)] = choose_ptxas(capability)
    del knobs.nvidia.ptxas
    get_ptxas_version.cache_clear()
    return found


#: The releases that compile: of Triton, and of ptxas for each GPU.
VERSIONS = _versions()
TABLE = Path(__file__).resolve().parents[2] / "docs/results/kernels.json"


if __name__ == "__main__":
    about = {"versions": VERSIONS, **provenance("python tests/machine/aot.py")}
    write_json(TABLE, {**about, "kernels": rows()})
