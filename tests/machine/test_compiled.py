"""Compile every Triton kernel for several kinds of GPU, and count register spills.

`python tests/machine/test_compiled.py` writes the resources of all kernels to
docs/results/kernels.json.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from alike import problem
from launches import Launch, recording

from fwlab import ops
from fwlab.files import write_json
from fwlab.ops import _operation as operation
from fwlab.ops import _triton
from fwlab.provenance import provenance

triton = pytest.importorskip("triton")
if _triton.INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas_version  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.slow
TABLE = Path(__file__).resolve().parents[2] / "docs/results/kernels.json"
TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
TYPES |= {torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: Bytes of shared memory that one program may use, by compute capability.
ROOM = {(9, 0): 227 * 1024, (8, 0): 163 * 1024, (7, 5): 64 * 1024}
HOPPER, AMPERE, TURING = ROOM
BOTH, ALL = (HOPPER, AMPERE), (HOPPER, AMPERE, TURING)
LONG = {"batch": 8, "time": 4096, "heads": 16, "queries": 16}
FEW = {"batch": 1, "time": 4096, "heads": 4, "queries": 4}
AFT = {"batch": 8, "time": 2048, "channels": 512, "window": 64}
CONV = AFT | {"heads": 8, "channels": 64, "keys": 64}
STACK = {"batch": 4, "time": 4, "past": 8, "layers": 2}
#: Cases by name: (operation, dtype, sizes, head width, compute capabilities).
CASES: dict[str, tuple[Any, ...]] = {
    "delta 64": (ops.delta_rule, BF16, LONG, 64, BOTH),
    "delta 128": (ops.delta_rule, BF16, LONG, 128, BOTH),
    "delta 256": (ops.delta_rule, BF16, LONG, 256, BOTH),
    "delta 384, 64": (ops.delta_rule, BF16, LONG | {"value": 64}, 384, BOTH),
    "delta 64, few heads": (ops.delta_rule, BF16, FEW, 64, BOTH),
    "delta 64 float32": (ops.delta_rule, FP32, LONG, 64, BOTH),
    "delta 256 float32": (ops.delta_rule, FP32, LONG, 256, BOTH),
    "gated delta 64": (ops.gated_delta_rule, BF16, LONG, 64, BOTH),
    "gated delta 128": (ops.gated_delta_rule, FP16, LONG, 128, BOTH),
    "gated delta 128, few heads": (ops.gated_delta_rule, BF16, FEW, 128, (HOPPER,)),
    "sum 64, normalized": (ops.sum_rule, BF16, LONG, 64, BOTH),
    "sum 128": (ops.sum_rule, BF16, LONG, 128, BOTH),
    "sum 64 float32, normalized": (ops.sum_rule, FP32, LONG, 64, BOTH),
    "gated 64, normalized": (ops.gated_rule, BF16, LONG, 64, BOTH),
    "AFT-simple": (ops.aft_simple, BF16, AFT, 0, ALL),
    "AFT-simple float32": (ops.aft_simple, FP32, AFT, 0, ALL),
    "AFT-local, window 64": (ops.aft_local, BF16, AFT, 0, ALL),
    "AFT-conv, window 64": (ops.aft_conv, BF16, CONV, 0, ALL),
    "AFT-full": (ops.aft_full, BF16, AFT | {"keys": 2048}, 0, BOTH),
    "feedback 64": (ops.feedback, BF16, STACK | {"heads": 4}, 64, ALL),
    "feedback 256": (ops.feedback, BF16, STACK | {"heads": 2}, 256, ALL),
}
TARGETS = [(name, target) for name, case in CASES.items() for target in case[-1]]


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """Return a tensor on the device "meta" that requires a gradient."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def call(name: str) -> torch.Tensor:
    """Call the operation of a case with tensors on the device "meta"."""
    op, dtype, sizes, width, _ = CASES[name]
    options: dict[str, Any] = {"implementation": "triton"}
    if op is ops.feedback:
        p = problem(f"op=feedback layers=2 heads={sizes['heads']} key={width}")
        weights = {n: meta(*x.shape) for n, x in p.x.items() if n != "x"}
        d = sizes["heads"] * width
        weights["expand"], weights["contract"] = meta(2, 4 * d, d), meta(2, d, 4 * d)
        options |= {"weights": ops.FeedbackWeights(**weights), "heads": sizes["heads"]}
        memory = meta(sizes["batch"], sizes["past"], 2, sizes["heads"], width)
        options["state"] = ops.FeedbackState(memory, memory, None)
        return op(meta(sizes["batch"], sizes["time"], d, dtype=dtype), **options)
    optional = op.rule.optional if hasattr(op, "rule") else ()
    if hasattr(op, "rule"):
        options |= {"normalize": "normalized" in name}
        sizes = {"key": width, "value": width} | sizes
    inputs = [
        # Biases are parameters and have full precision.
        meta(*(sizes[d] for d in dims), dtype=dtype if "batch" in dims else FP32)
        for name, dims in operation.annotated(op).names.items()
        if name not in optional
    ]
    return op(*inputs, **options)


def launches(name: str, capability: tuple[int, int]) -> list[Launch]:
    """List the forward and backward launches of a case for a compute capability."""
    with recording(capability) as recorded:
        call(name).sum().backward()
    return recorded


def build(launch: Launch, capability: tuple[int, int]) -> Any:
    """Compile the kernel of a launch for a compute capability."""
    kernel = launch.kernel
    given = dict(zip(kernel.arg_names, launch.arguments, strict=False))
    given |= launch.constants
    assert set(given) == set(kernel.arg_names), kernel.__name__
    signature, constants, attributes = {}, {}, {}
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
    choose_ptxas(capability)
    made = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options=_triton.options(launch.warps, launch.stages),
    )
    # Below compute capability 8.0, Triton would split matrix products into scalars.
    assert capability >= _triton.TENSOR_CORES or "tt.dot" not in made.asm["ttir"]
    # Each wait covers all products, because ptxas before 13.3 reuses registers early.
    # The ptxas error is listed in a table of docs/kernels/index.md.
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", made.asm["ptx"])
    assert set(waits) <= {"0"}, kernel.__name__
    return made


def choose_ptxas(capability: tuple[int, int]) -> str:
    """Select one of Triton's ptxas binaries (newer on Hopper); return its version."""
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    newer = capability[0] >= _triton.HOPPER
    knobs.nvidia.ptxas = str(folder / ("ptxas-blackwell" if newer else "ptxas"))
    get_ptxas_version.cache_clear()  # Triton's cache key includes the version.
    return re.search(r"V([\d.]+)", get_ptxas_version())[1]


def uses(name: str, capability: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Return the shared memory, registers and spilled bytes of a case's kernels."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found: dict[str, dict[str, int]] = {}
    for launch in launches(name, capability):
        made = build(launch, capability)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            command = [tool, "-res-usage", file.name]
            text = subprocess.check_output(command, encoding="utf-8")
        registers, stack = (
            int(re.search(rf"{w}:(\d+)", text)[1]) for w in ("REG", "STACK")
        )
        use = {"shared": made.metadata.shared, "registers": registers, "stack": stack}
        key = "{}, sm_{}{}".format(launch.kernel.__name__, *capability)
        # If a kernel is compiled several times, keep the largest numbers.
        use = {n: max(size, found.get(key, use)[n]) for n, size in use.items()}
        found[key] = use
    return found


def versions() -> dict[str, str]:
    """Return Triton's version, and the version of ptxas for each compute capability."""
    found = {"ptxas, sm_{}{}".format(*target): choose_ptxas(target) for target in ALL}
    return {"triton": triton.__version__, **found}


@pytest.mark.parametrize(("name", "capability"), TARGETS)
def test_what_kernels_take(name, capability):
    """Kernels fit in shared memory and spill at most 512 bytes more than recorded."""
    table = json.loads(TABLE.read_text("utf-8"))["kernels"][name]
    target, found = "{}{}".format(*capability), uses(name, capability)
    known = {key for key in table if key.endswith(target)}
    assert found.keys() == known, "run python tests/machine/test_compiled.py"
    for key, use in found.items():  # Numbers depend on the compiler version.
        assert use["shared"] <= ROOM[capability], key
        assert use["stack"] <= table[key]["stack"] + 512, key


@pytest.mark.parametrize(
    "name", ["gated delta 64", "delta 64, few heads", "feedback 64"]
)
def test_offsets_beyond_32_bits(name):
    """No kernel multiplies runtime scalars in 32 bits, because that might overflow.

    Steps times heads may exceed 2^31. Products of tiles are indices within a chunk, and
    the product of a scalar and a constant is the width of all heads.
    """
    made = {x.kernel: x for x in launches(name, HOPPER)}
    for launch in made.values():
        code = build(launch, HOPPER).asm["ttir"]
        constants = set(re.findall(r"(%\w+) = arith.constant", code))
        for pair in re.findall(r"arith\.muli (%\w+), (%\w+) : i32", code):
            assert constants.intersection(pair), (launch.kernel, pair)


if __name__ == "__main__":
    kernels: dict[str, dict[str, Any]] = {}
    for name, target in TARGETS:
        kernels.setdefault(name, {}).update(uses(name, target))
    about = provenance("python tests/machine/test_compiled.py")
    write_json(TABLE, {"versions": versions(), **about, "kernels": kernels})
