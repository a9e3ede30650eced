"""Targets of the kernels, and whether they are reached."""

from typing import Any, NamedTuple

from fwlab.bench.gpu.cases import (
    CASES,
    DENSE,
    FLA,
    FWLAB,
    MATERIALISED,
    NAIVE,
    Floor,
)
from fwlab.bench.gpu.problems import LIMITS


class Target(NamedTuple):
    """A number that a case should reach.

    - `what`: "speed" (times faster than `against`), "memory" (peak, as a
      fraction of that of `against`), "floor" (multiple of the roofline
      floor), or "bandwidth" (fraction of the copy rate).
    - `must`, `aim`: the required and the desired value; None = none.
    """

    name: str
    case: str
    what: str
    against: str | None
    must: float | None
    aim: float | None

    @property
    def at_most(self) -> bool:
        return self.what in ("memory", "floor")


def _of(op: str, place: int = 0) -> str:
    return [key for key, case in CASES.items() if case.name == op][place]


def _aft() -> list[Target]:
    found = []
    for op in ("aft_simple", "aft_local", "aft_conv"):
        for place, size in ((0, "wide"), (1, "narrow")):
            name, case = f"AFT {op.removeprefix('aft_')}, {size}", _of(op, place)
            found += [
                Target(f"{name}: speed", case, "speed", DENSE, 4, None),
                Target(f"{name}: memory", case, "memory", DENSE, 1 / 8, None),
            ]
    return found


TARGETS = (
    Target("delta 64: speed", _of("delta_rule"), "speed", FLA, 0.9, 1.4),
    Target("delta 64: floor", _of("delta_rule"), "floor", None, None, 3),
    Target("delta 64: memory", _of("delta_rule"), "memory", FLA, 1, 0.6),
    Target("delta 128: speed", _of("delta_rule", 3), "speed", FLA, 0.8, 1.1),
    Target("small 1024: speed", _of("delta_rule", 1), "speed", FLA, 1.5, 3),
    Target("small 512: speed", _of("delta_rule", 2), "speed", FLA, 1.5, 3),
    Target("fused DPFP: speed", _of("dpfp_delta_rule"), "speed", MATERIALISED, 2, None),
    Target(
        "fused DPFP: memory",
        _of("dpfp_delta_rule"),
        "memory",
        MATERIALISED,
        1 / 3,
        None,
    ),
    Target("linear attention: speed", _of("sum_rule"), "speed", FLA, 0.9, 1.3),
    *_aft(),
    Target("AFT simple: bandwidth", _of("aft_simple"), "bandwidth", None, 0.6, None),
    Target("feedback: speed", _of("feedback"), "speed", NAIVE, 4, 8),
)


def evaluate(
    correctness: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    rates: dict[str, Any],
    not_run: list[dict[str, str]],
) -> list[dict[str, Any]]:
    """A row per target: name, must, aim, measured value, verdict."""
    sides = {(row["case"], row["side"]): row for row in rows}
    found = []
    unchecked = {
        gap["task"].split()[-1]
        for gap in not_run
        if gap["task"].startswith("correctness")
    }
    for dtype, limit in LIMITS.items():
        ours = [
            row for row in correctness if row["dtype"] == dtype and not row["refused"]
        ]
        errors = [e for row in ours for e in row["errors"].values()]
        known = [e for e in errors if e is not None]
        worst = max(known) if known else None
        verdict = "reached"
        if not all(row["ok"] for row in ours):
            verdict = "missed"
        elif not ours or dtype in unchecked:
            verdict = "not measured"  # or not completely
        found.append(_row(f"{dtype}: error", limit, None, worst, True, verdict))
    for target in TARGETS:
        measured = _measure(target, sides, rates)
        verdict = _verdict(target, measured)
        found.append(
            _row(
                target.name,
                target.must,
                target.aim,
                measured,
                target.at_most,
                verdict,
            )
        )
    return found


def _row(
    name: str,
    must: float | None,
    aim: float | None,
    measured: float | None,
    at_most: bool,
    verdict: str,
) -> dict[str, Any]:
    return {
        "name": name,
        "must": _short(must),
        "aim": _short(aim),
        "at_most": at_most,
        "measured": _short(measured),
        "verdict": verdict,
    }


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.3g}")


def _measure(
    target: Target,
    sides: dict[tuple[str, str], dict[str, Any]],
    rates: dict[str, Any],
) -> float | None:
    ours = sides.get((target.case, FWLAB))
    if ours is None or ours["reason"] is not None:
        return None
    case = CASES[target.case]
    if target.what == "floor":
        floor = case.floor and case.floor.milliseconds(rates)
        return ours["ms"] / floor if floor else None
    if target.what == "bandwidth":
        rate = rates.get("copy_gb_per_s")
        if not rate or case.floor is None:
            return None
        return sum(case.floor.bytes) / (1e6 * ours["ms"]) / rate
    other = sides.get((target.case, target.against or ""))
    if other is None or other["reason"] is not None or other["T"] != ours["T"]:
        return None
    if target.what == "memory":
        if not ours["peak_mib"] or not other["peak_mib"]:
            return None
        return ours["peak_mib"] / other["peak_mib"]
    # By both clocks: the worse ratio counts.
    return min(other[clock] / ours[clock] for clock in ("ms", "wall_ms"))


def _verdict(target: Target, measured: float | None) -> str:
    def holds(bound: float) -> bool:
        assert measured is not None
        return measured <= bound if target.at_most else measured >= bound

    if measured is None:
        return "not measured"
    if target.must is not None and not holds(target.must):
        return "missed"
    if target.aim is None:
        return "reached"
    if holds(target.aim):
        return "aim reached"
    return "reached" if target.must is not None else "missed"


def floors(rates: dict[str, Any]) -> dict[str, float | None]:
    """Minimum milliseconds of forward and backward for any kernel."""
    found: dict[str, float | None] = {}
    for key, case in CASES.items():
        floor: Floor | None = case.floor
        found[key] = _short(floor.milliseconds(rates)) if floor else None
    return found
