"""The worker of `fwlab bench --gpu` with cases that are small enough for a CPU."""

import sys

import torch

from fwlab.bench.gpu import cases, measure, problems, worker

torch.set_num_threads(1)

CASES = {
    case.key: case
    for case in (
        cases._rule("delta_rule", 1, 20, 1, 16),
        cases._rule("gated_delta_rule", 1, 20, 1, 16),
        cases._rule("sum_rule", 1, 20, 1, 16),
        cases._dpfp(1, 24, 1, 8, 1),
        cases._aft("aft_simple", 2, 24, 16),
        cases._aft("aft_full", 2, 24, 16),
        cases._aft("aft_local", 2, 24, 16, 4),
        cases._aft("aft_conv", 2, 24, 16, 4, 2),
        cases._feedback(2, 6, 2, 16, 2),
    )
}

NOTES = {"sum_rule": ("normalised", ""), "gated_rule": ("normalised", "")}

#: A few of each: ragged, with K != V, and one step.
PROBLEMS = {
    **{
        op: [
            problem
            for note in NOTES.get(op, ("",))
            for problem in (
                # Up to 64 steps the delta rules take another kernel.
                problems._rule(
                    op, note, 1, 70 if op == "delta_rule" else 37, 1, 16, 24
                ),
                problems._rule(op, note, 2, 1, 1, 16, 16),
            )
        ]
        for op in ("delta_rule", "gated_delta_rule", "sum_rule", "gated_rule")
    },
    "dpfp_delta_rule": [problems._features(1, 37, 1, 8, 16, 1)],
    **{
        op: [problems._aft_problem(op, "", 1, 37, 24, 8)]
        for op in ("aft_simple", "aft_full", "aft_local")
    },
    "aft_conv": [problems._aft_problem("aft_conv", "", 1, 37, 24, 8, heads=2)],
    "feedback": [problems._stack(1, 9, 2, 2, 16, 2)],
}


def install() -> None:
    """Replace the real cases by these, with one call per turn."""
    measure.TURN = 0.0
    cases.CASES.clear()
    cases.CASES.update(CASES)
    for op, mine in PROBLEMS.items():
        problems.PROBLEMS[op] = lambda mine=mine: mine


if __name__ == "__main__":
    install()
    sys.exit(worker.main())
