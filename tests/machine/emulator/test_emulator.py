"""The emulator itself: small programs, written by hand."""

import numpy as np
import pytest
import torch

from emulator import Fault, Unknown, block, formats
from emulator.memory import Tensors
from emulator.text import parse


def run(body: str, *data: np.ndarray, threads: int = 64, blocks: int = 1) -> None:
    """Run PTX with these arrays as its arguments: %rd0, %rd1, …

    %r0 is the thread, %r1 four times its number, %r2 the block.
    """
    count = len(data)
    head = ",\n".join(f"\t.param .u64 .ptr main_param_{n}" for n in range(count))
    loads = "".join(f"ld.param.b64 %rd{n}, [main_param_{n}];\n" for n in range(count))
    ptx = f"""
.visible .entry main(
{head}
)
.reqntid {threads}
{{
{loads}
mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 2;
mov.u32 %r2, %ctaid.x;
{body}
ret;
}}
"""
    program, tensors = parse(ptx, 1024), Tensors()
    addresses = [
        np.uint64(tensors.add(x.view(np.uint8).reshape(-1), f"x{n}"))
        for n, x in enumerate(data)
    ]
    parameters = dict(zip(program.parameters, addresses, strict=True))
    block.run(program, (blocks,), parameters, tensors)


#: Thread t stores %r9 at index t of the last tensor.
STORE = """
cvt.u64.u32 %rd8, %r1;
add.s64 %rd9, %rd{0}, %rd8;
st.global.b32 [ %rd9 + 0 ], %r9;
"""


def values(body: str, *data: np.ndarray, threads: int = 32) -> np.ndarray:
    """%r9 of every thread; %r3, %r4, … are its numbers of the given arrays."""
    loads = ["cvt.u64.u32 %rd8, %r1;"]
    for n in range(len(data)):
        loads += [f"add.s64 %rd9, %rd{n}, %rd8;", f"ld.global.b32 %r{3 + n}, [%rd9];"]
    out = np.zeros(threads, np.uint32)
    run("\n".join([*loads, body, STORE.format(len(data))]), *data, out, threads=threads)
    return out


generator = np.random.default_rng(0)
X, Y, Z = generator.integers(0, 2**32, (3, 32), np.uint32)
X[:4], Y[:4] = (0, 2**31, 2**32 - 1, 7), (1, 2**32 - 1, 31, 2**32 - 3)
SX, SY = X.view(np.int32).tolist(), Y.view(np.int32).tolist()


def signed(divide):
    return [divide(x, y) % 2**32 for x, y in zip(SX, SY, strict=True)]


def c_quotient(x, y):
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def pick(x, y, which):
    pool = x.to_bytes(4, "little") + y.to_bytes(4, "little")
    found = 0
    for place in range(4):
        nibble = which >> 4 * place & 15
        byte = pool[nibble & 7]
        byte = (255 if byte > 127 else 0) if nibble & 8 else byte
        found |= byte << 8 * place
    return found


WORDS = [(int(x), int(y), int(z)) for x, y, z in zip(X, Y, Z, strict=True)]
INTEGERS = {
    "sub.s32 %r9, %r3, %r4;": [(x - y) % 2**32 for x, y, _ in WORDS],
    "mul.lo.s32 %r9, %r3, %r4;": [x * y % 2**32 for x, y, _ in WORDS],
    "mul.hi.u32 %r9, %r3, %r4;": [x * y >> 32 for x, y, _ in WORDS],
    "mul.hi.s32 %r9, %r3, %r4;": [
        (x * y >> 32) % 2**32 for x, y in zip(SX, SY, strict=True)
    ],
    "mad.wide.u32 %rd7, %r3, %r4, 1; shr.u64 %rd7, %rd7, 8; cvt.u32.u64 %r9, %rd7;": [
        (x * y + 1 >> 8) % 2**32 for x, y, _ in WORDS
    ],
    "mad.wide.s32 %rd7, %r3, 3, -1; cvt.u32.u64 %r9, %rd7;": [
        (x * 3 - 1) % 2**32 for x, _, _ in WORDS
    ],
    "div.u32 %r9, %r3, %r4;": [x // y for x, y, _ in WORDS],
    "div.s32 %r9, %r3, %r4;": signed(c_quotient),
    "rem.s32 %r9, %r3, %r4;": signed(lambda x, y: x - c_quotient(x, y) * y),
    "shl.b32 %r9, %r3, %r5;": [x << z % 2**32 if z < 32 else 0 for x, _, z in WORDS],
    "shr.u32 %r9, %r3, 40;": [0] * 32,
    "shr.s32 %r9, %r3, 40;": [2**32 - 1 if x < 0 else 0 for x in SX],
    "shr.s32 %r9, %r3, 3;": [(x >> 3) % 2**32 for x in SX],
    "bfe.u32 %r9, %r3, 5, 7;": [x >> 5 & 127 for x, _, _ in WORDS],
    "bfe.s32 %r9, %r3, 5, 7;": [
        ((x >> 5 & 127) - (128 if x >> 11 & 1 else 0)) % 2**32 for x, _, _ in WORDS
    ],
    "prmt.b32 %r9, %r3, %r4, %r5;": [pick(*words) for words in WORDS],
    "max.s32 %r9, %r3, %r4;": [max(x, y) % 2**32 for x, y in zip(SX, SY, strict=True)],
    "setp.lt.s32 %p1, %r3, %r4; selp.b32 %r9, 1, 2, %p1;": [
        1 if x < y else 2 for x, y in zip(SX, SY, strict=True)
    ],
    "setp.lt.u32 %p1, %r3, %r4; not.pred %p2, %p1; selp.b32 %r9, 1, 2, %p2;": [
        2 if x < y else 1 for x, y, _ in WORDS
    ],
    "mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r9, {%rs2, %rs1};": [
        (x >> 16) | (x & 0xFFFF) << 16 for x, _, _ in WORDS
    ],
    "cvt.u16.u32 %rs1, %r3; cvt.s32.s16 %r9, %rs1;": [
        (x & 0xFFFF) - (65536 if x & 0x8000 else 0) & 2**32 - 1 for x, _, _ in WORDS
    ],
    "mov.b32 %r9, 5; setp.eq.b32 %p1, %r3, 0; @!%p1 mov.b32 %r9, %r4;": [
        y if x else 5 for x, y, _ in WORDS
    ],
    "shfl.sync.bfly.b32 %r9, %r3, 5, 31, -1;": X[np.arange(32) ^ 5],
    "shfl.sync.idx.b32 %r9, %r3, 9, 31, -1;": X[[9] * 32],
    "shfl.sync.up.b32 %r9, %r3, 3, 0, -1;": X[[0, 1, 2, *range(29)]],
    "shfl.sync.down.b32 %r9, %r3, 3, 31, -1;": X[[*range(3, 32), 29, 30, 31]],
    "redux.sync.max.s32 %r9, %r3, -1;": [X.view(np.int32).max()] * 32,
    "redux.sync.min.u32 %r9, %r3, -1;": [X.min()] * 32,
    "redux.sync.add.s32 %r9, %r3, -1;": [int(X.astype(np.int64).sum())] * 32,
    # Groups of eight.
    "shfl.sync.idx.b32 %r9, %r3, 1, 6175, -1;": X[np.arange(32) // 8 * 8 + 1],
}


@pytest.mark.parametrize("body", INTEGERS)
def test_integers(body):
    wanted = np.array([int(x) % 2**32 for x in INTEGERS[body]], np.uint32)
    assert (values(body.replace(";", ";\n"), X, Y, Z) == wanted).all()


F, G = generator.standard_normal((2, 32)).astype(np.float32)
F[:5] = 0.0, np.nan, np.inf, -np.inf, 1e-40
FLOATS = {
    "fma.rn.f32 %r9, %r3, %r4, 0f3F800000;": F.astype(np.float64) * G + 1,
    "max.f32 %r9, %r3, %r4;": np.fmax(F, G),
    "max.NaN.f32 %r9, %r3, %r4;": np.maximum(F, G),
    "div.full.f32 %r9, %r3, %r4;": F / G,
    "add.ftz.f32 %r9, %r3, 0f00000000;": np.where(np.abs(F) < 1e-38, 0, F),
    "ex2.approx.f32 %r9, %r4;": np.exp2(G),
    "setp.num.f32 %p1, %r3, %r4; selp.f32 %r9, 0f3F800000, 0f00000000, %p1;": [
        not np.isnan(x) for x in F
    ],
    "setp.ne.f32 %p1, %r3, %r3; selp.f32 %r9, 0f3F800000, 0f00000000, %p1;": [0] * 32,
    "setp.ltu.f32 %p1, %r3, %r4; selp.f32 %r9, 0f3F800000, 0f00000000, %p1;": [
        not x >= y for x, y in zip(F, G, strict=True)
    ],
    "setp.neu.f32 %p1, %r3, %r3; selp.f32 %r9, 0f3F800000, 0f00000000, %p1;": [
        np.isnan(x) for x in F
    ],
    "cvt.rn.bf16.f32 %rs1, %r4; cvt.f32.bf16 %r9, %rs1;": torch.tensor(G)
    .bfloat16()
    .float(),
    "cvt.rn.f16x2.f32 %r5, %r3, %r4; mov.b32 {%rs1, %rs2}, %r5; "
    "cvt.f32.f16 %r9, %rs2;": F.astype(np.float16),
}


@pytest.mark.parametrize("body", FLOATS)
def test_floats(body):
    found = values(body.replace(";", ";\n"), F, G).view(np.float32)
    wanted = np.asarray(FLOATS[body], np.float32)
    assert np.array_equal(found, wanted, equal_nan=True)


def test_formats():
    """As PyTorch rounds, for any number."""
    bits = generator.integers(0, 2**32, 20000, np.uint32)
    bits[:4] = 0x3F808000, 0x3F818000, 0x7F800000, 0x7F7FFFFF
    x = bits.view(np.float32)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        widen, narrow = formats.HALVES[name]
        with np.errstate(over="ignore", invalid="ignore"):
            found = widen(narrow(x))
        wanted = torch.tensor(x).to(dtype).float().numpy()
        assert np.array_equal(found, wanted, equal_nan=True)
    x = np.float32([1, -1]) * (1 + np.float32([2**-11, 2**-11 + 2**-20]))
    assert (formats.to_tf32(x) == np.float32([1 + 2**-10, -1 - 2**-10])).all()
    assert np.isnan(formats.to_tf32(np.float32([np.nan]))).all()


@pytest.mark.parametrize(
    ("kind", "one", "wanted"),
    [
        # 1 and -2; each plus 1.
        ("bf16x2", 0xC0003F80, 0xBF804000),
        ("f16x2", 0xC0003C00, 0xBC004000),
        # 256 + 1 lies between 256 and 258, and goes to the even one.
        ("bf16x2", 0x43804380, 0x43804380),
    ],
)
@pytest.mark.parametrize(
    "how", ["add.rn.{} %r9, %r6, %r7", "fma.rn.{} %r9, %r6, %r7, %r7"]
)
def test_two_numbers_in_a_register(how, kind, one, wanted):
    ones = {"bf16x2": 0x3F803F80, "f16x2": 0x3C003C00}[kind]
    body = f"mov.b32 %r6, {one};\nmov.b32 %r7, {ones};\n{how.format(kind)};"
    assert (values(body, X, Y, Z) == wanted).all()


def test_two_comparisons_at_once():
    """1 and -2 with 1 and 1: the first is in the lower half."""
    body = (
        "mov.b32 %r6, 0xC0003F80;\nmov.b32 %r7, 0x3F803F80;\n"
        "setp.eq.bf16x2 %p1|%p2, %r6, %r7;\n"
        "selp.b32 %r8, 1, 0, %p1;\nselp.b32 %r9, 5, 3, %p2;\nadd.u32 %r9, %r9, %r8;"
    )
    assert (values(body, X, Y, Z) == 4).all()


def test_what_is_unknown_has_a_name():
    for text in ("tcgen05.alloc [%r1], 64", "add.sat.s32 %r3, %r1, %r1"):
        with pytest.raises(Unknown, match=text.split()[0]):
            run(text + ";")


#: Each thread stores its own word, and reads the one of a thread 32 further.
EXCHANGE = """
st.shared.b32 [ %r1 + 0 ], %r0;
{0}
xor.b32 %r4, %r1, 128;
ld.shared.b32 %r9, [ %r4 + 0 ];
"""


def test_a_barrier_between_warps():
    out = np.zeros(64, np.uint32)
    run(EXCHANGE.format("bar.sync 0;") + STORE.format(0), out)
    assert (out == np.arange(64) ^ 32).all()
    with pytest.raises(Fault, match="read after a write of another warp"):
        run(EXCHANGE.format(""))
    with pytest.raises(Fault, match="a write after a read of another warp"):
        run(EXCHANGE.format("bar.sync 0;") + "st.shared.b32 [ %r1 + 0 ], %r0;")
    with pytest.raises(Fault, match="a write after a write of another warp"):
        run(
            "st.shared.b32 [%r1], %r0;\nxor.b32 %r4, %r1, 128;\nst.shared.b32 [%r4], 1;"
        )
    # Within a warp none is needed.
    run(EXCHANGE.format("").replace("128", "4"))


def test_a_word_that_two_warps_read():
    """Also where both read it in one instruction."""
    both = "mov.b32 %r5, 0;\nld.shared.b32 %r4, [%r5];\n"
    with pytest.raises(Fault, match="a write after a read"):
        run(both + "setp.eq.s32 %p1, %r0, 63;\n@%p1 st.shared.b32 [%r5], %r0;")
    with pytest.raises(Fault, match="two warps store different values"):
        run("mov.b32 %r5, 0;\nst.shared.b32 [%r5], %r0;")


COPY = """
cvt.u64.u32 %rd8, %r1;
add.s64 %rd9, %rd0, %rd8;
cp.async.ca.shared.global [ %r1 + 0 ], [ %rd9 + 0 ], 0x4, {0};
cp.async.commit_group;
{1}
ld.shared.b32 %r9, [ %r1 + 0 ];
"""


def test_copies_are_waited_for():
    x, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    run(COPY.format(4, "cp.async.wait_group 0;") + STORE.format(1), x, out)
    assert (out == x).all()
    run(COPY.format(0, "cp.async.wait_group 0;") + STORE.format(1), x, out)
    assert not out.any()
    for missing in ("", "cp.async.wait_group 1;"):
        with pytest.raises(Fault, match="still in flight"):
            run(COPY.format(4, missing), x)


def test_bounds_and_alignment():
    x = np.zeros(63, np.uint32)
    with pytest.raises(Fault, match=r"store outside of x0: bytes 252 to 256 of 252"):
        run("mov.b32 %r9, 1;" + STORE.format(0), x)
    with pytest.raises(
        Fault, match="load at address 0xfffffffc, outside of all tensors"
    ):
        run("ld.global.b32 %r9, [%rd0+-4];", x, x)
    with pytest.raises(Fault, match="not aligned to 8 bytes"):
        run("ld.global.v2.b32 {%r8, %r9}, [%rd0+4];", x)
    with pytest.raises(Fault, match="bytes 1024 to 1028 of 1024"):
        run("mov.b32 %r5, 1024;\nld.shared.b32 %r9, [%r5];")


def test_blocks_part_ways():
    """Odd blocks leave; threads of one block may not."""
    part = """
and.b32 %r4, {0}, 1;
setp.eq.s32 %p1, %r4, 1;
st.shared.b32 [%r1], %r2;
bar.sync 0;
mov.b32 %r9, 7;
@%p1 bra $end;
shl.b32 %r5, %r2, 8;
add.s32 %r1, %r1, %r5;
ld.shared.b32 %r9, [%r1];
$end:
"""
    x = np.zeros(64, np.uint32)
    with pytest.raises(Fault, match="the threads of a block part ways"):
        run(part.format("%r0"), x)
    out = np.zeros((3, 64), np.uint32)
    own = "xor.b32 %r6, %r0, %r0;\nshl.b32 %r1, %r0, 2;\n"
    where = "shl.b32 %r5, %r2, 8;\nadd.s32 %r1, %r1, %r5;\n"
    body = part.format("%r2").replace("add.s32 %r1, %r1, %r5;\n", "")
    body = body.replace("$end:", "") + "$end:\n" + own + where + STORE.format(0)
    run(body, out, blocks=3)
    assert (out == np.array([[0], [7], [2]])).all()


def test_what_was_never_set_is_nan():
    assert np.isnan(values("ld.shared.b32 %r9, [%r1];").view(np.float32)).all()
    assert np.isnan(values("mov.b32 %r9, %r7;").view(np.float32)).all()
    with pytest.raises(Fault, match="%p1 is read before it is set"):
        values("selp.b32 %r9, 1, 2, %p1;")
