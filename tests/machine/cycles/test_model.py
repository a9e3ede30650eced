"""The cycle model, on programs whose cycles can be counted by hand."""

import json

import aot
import pytest

from cycles import model, rounds, sass, table

TABLE = json.loads(aot.TABLE.read_text("utf-8"))


def one(op, operands="", stall=1, writes=7, reads=7, waits=0, target=None, when=False):
    return sass.Instruction(op, operands, when, stall, writes, reads, waits, target)


END = one("EXIT")


def run(*code, warps=1, programs=1, trips=None):
    return model.cycles([*code, END], warps, programs, (trips or {}).__getitem__)


def test_text_of_the_disassembler():
    # Waits for scoreboards 0 and 2, gives its own result to 3, stalls 5 cycles.
    control = 5 | 3 << 5 | 7 << 8 | 0b101 << 11
    text = f"""
.L_x_1:
        /*0010*/ @!P0 LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x0000000402047981 */
                                           /* 0x{control << 41:016x} */
        /*0020*/ @P1 BRA `(.L_x_1) ;  /* 0xfffffffc00f07947 */
                                           /* 0x000fea000383ffff */
"""
    load, back = sass.parse(text)
    assert (load.op, load.name, load.predicated) == ("LDG.E.128", "LDG", True)
    assert (load.stall, load.writes, load.reads, load.waits) == (5, 3, 7, 0b101)
    assert back.target == 0 and sass.loops([load, back]) == [1]


def test_stalls_add_up():
    assert run(*[one("FFMA", stall=4)] * 10) == 40


def test_a_unit_takes_its_time():
    """16 special functions of one warp, 8 cycles each."""
    assert run(*[one("MUFU.EX2")] * 16) == 15 * 8 + 1
    # Four schedulers have four units: four warps take as long as one.
    assert run(*[one("MUFU.EX2")] * 16, warps=4) == 15 * 8 + 1
    assert run(*[one("MUFU.EX2")] * 16, warps=8) == pytest.approx(31 * 8, abs=8)


def test_a_load_is_waited_for():
    load, use = one("LDG.E", writes=0), one("FADD", waits=1)
    assert run(load, use) == model.GLOBAL + 1
    # Two programs wait at the same time.
    assert run(load, use, programs=2) < model.GLOBAL + 10


def test_what_is_loaded_again_is_near():
    code = [one("LDG.E", writes=0), one("FADD", waits=1), one("BRA", target=0), END]
    far, near = (
        model.cycles(code, 1, 1, {2: 5}.__getitem__, again) for again in (False, True)
    )
    assert far > 5 * model.GLOBAL > 5 * near


def test_a_barrier_waits_for_the_slowest_warp():
    """Both warps of one scheduler must have issued before either goes on."""
    slow = [one("MUFU.EX2")] * 10
    alone = run(*slow, one("FADD"), warps=8)
    assert run(*slow, one("BAR.SYNC"), one("FADD"), warps=8) >= alone + model.BARRIER


def test_products():
    """64 x 64 x 16: 32 cycles of arithmetic; 64 x 8 x 16: bound by its operands."""
    names = ("gdesc[UR4]", "R4")
    wide, narrow = (
        one("HGMMA.64x64x16.F32.BF16", f"R24, {a}, gdesc[UR8], R24") for a in names
    )
    assert model.cost(wide).busy == 32
    few = one("HGMMA.64x8x16.F32.BF16", "R24, gdesc[UR4], gdesc[UR8], R24")
    assert model.cost(few).busy == (64 * 16 + 8 * 16) * 2 / 128
    from_registers = narrow._replace(op="HGMMA.64x8x16.F32.BF16")
    assert model.cost(from_registers).busy == 64 * 8 * 16 / 2048
    with pytest.raises(ValueError, match="unknown product"):
        model.cost(one("HGMMA.SP.64x8x16"))


def test_asynchronous_products_end_before_they_are_used():
    product = one("HGMMA.64x64x16.F32", "R24, R4, gdesc[UR8], R24, gsb0")
    wait = one("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
    assert 32 + model.PRODUCT < run(product, wait) < 35 + model.PRODUCT
    assert run(product, one("WARPGROUP.DEPBAR.LE", "gsb0, 0x1")) < 5


def test_loops_and_branches():
    loop = [one("FADD"), one("BRA", target=0, when=True)]
    assert run(*loop, trips={1: 7}) - run(*loop, trips={1: 1}) == 6 * 2
    # Of two alternatives the second runs; a guard is not taken.
    choice = [
        one("BRA", target=3, when=True),
        *[one("MUFU.EX2")] * 1,
        one("BRA", target=4),
        one("FADD", stall=9),
        one("FADD"),
    ]
    assert run(*choice) == 1 + 9 + 1
    guard = [one("BRA", target=2, when=True), one("FADD", stall=9)]
    assert run(*guard) == 10


def whole(code, trips, **more):
    given = {"warps": 1, "registers": 32, "shared": 0, "programs": 132} | more
    return model.computing(code, trips=trips, **given)


def test_long_loops_are_continued():
    load, use = one("LDG.E", writes=0), one("FADD", waits=1)
    code = [load, use, one("BRA", target=0, when=True), END]
    exact = model.cycles(code, 1, 1, {2: 300}.__getitem__) / model.CLOCK * 1e6
    assert whole(code, [300]) == pytest.approx(exact, rel=1e-3)
    with pytest.raises(ValueError, match="expected rounds of 1 loops"):
        whole(code, [])


def test_waves_and_bandwidth():
    code = [one("MUFU.EX2")] * 100 + [END]
    once = whole(code, [])
    # 33 programs fit side by side on none: at most 32, so there are two waves.
    assert whole(code, [], registers=255, warps=8, programs=264) > 1.9 * once
    assert model.moving(3_000_000_000) == pytest.approx(1000)
    assert model.side_by_side(registers=128, shared=100 * 1024, warps=4) == 2


def test_unrolled_loops_have_no_rounds():
    values = {"V": 128, "BV": 64}
    assert rounds.rounds("backward_inputs", values, [END]) == []


@pytest.mark.parametrize("case", table.MODELLED)
def test_the_table_is_that_of_the_kernels(case):
    if TABLE["versions"] != aot.VERSIONS:
        pytest.skip("another compiler makes other code")
    assert table.ours(case) == TABLE["modelled"][case]


def test_every_modelled_case_is_in_the_table():
    assert list(TABLE["modelled"]) == table.MODELLED
    assert set(TABLE["fla"]["cases"]) == set(table.THEIRS)
