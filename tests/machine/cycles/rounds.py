"""How often each loop of a kernel runs: machine code does not say it."""

from collections.abc import Callable, Sequence
from typing import Any

from cycles.sass import Instruction, loops

Values = dict[str, Any]


def _over(*pairs: str) -> Callable[[Values], list[int]]:
    """Rounds of loops over a size in steps, such as "time/C"."""

    def rounds(values: Values) -> list[int]:
        sizes = (pair.split("/") for pair in pairs)
        return [-(-values[size] // values[step]) for size, step in sizes]

    return rounds


def _fixed(*rounds: int) -> Callable[[Values], list[int]]:
    return lambda values: list(rounds)


#: Kernel -> rounds of its loops, in the order of their ends.
ROUNDS: dict[str, Callable[[Values], list[int]]] = {
    "prepare": _fixed(15),
    "forward": _over("time/C"),
    "read": _fixed(),
    "multiply_decays": _fixed(),
    "summarize": _fixed(),
    "carry": _over("segments/AHEAD"),
    "outputs": _fixed(),
    "outputs_backward": _fixed(),
    "backward_state": _over("time/C"),
    "backward_inputs": _over(*["V/BV"] * 4),
    # flash-linear-attention
    "chunk_local_cumsum_scalar_kernel": _fixed(),
    "chunk_fwd_kernel_h": _over("T/BT"),
    "chunk_bwd_kernel_dh": _over("T/BT"),
    "chunk_bwd_kernel_dv": _over("K/BK"),
    "chunk_scaled_dot_kkt_fwd_kernel": _over("K/BK"),
    "merge_16x16_to_64x64_inverse_kernel": _fixed(14, 14, 14, 14),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": lambda x: [
        -(-x["K"] // x["BK"]),
        *[14] * 4,
    ],
    "recompute_w_u_fwd_kernel": _over("V/BV", "K/BK"),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": _over("T/BT"),
    "chunk_fwd_kernel_o": _over("K/BK"),
    "chunk_bwd_kernel_dv_local": _over("K/BK", "V/BV"),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": _over("T/BT"),
    "chunk_bwd_kernel_dqkwg": _over("V/BV"),
    "prepare_wy_repr_bwd_kernel": _over("K/BK", "V/BV", "K/BK"),
}

#: Kernels whose loops load again what the program has just loaded.
RELOADS = {"merge_16x16_to_64x64_inverse_kernel"}


def rounds(name: str, values: Values, code: Sequence[Instruction]) -> list[int]:
    """The rounds of the loops that the compiler has left.

    It unrolls the shortest; a loop of one round is none.
    """
    found = len(loops(code))
    wanted = ROUNDS[name](values)
    longest = sorted(range(len(wanted)), key=lambda i: -wanted[i])[:found]
    return [wanted[i] for i in sorted(longest)]
