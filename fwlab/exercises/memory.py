"""Four exercises: a backward pass by hand, chunks, and the triangular system."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import (
    Work,
    agrees,
    gradient,
    in_chunks,
    shape,
    takes_heads,
)
from fwlab.exercises.solutions import (
    chunked_delta,
    chunked_sum,
    recomputing_backward,
    triangular,
)
from fwlab.feature_maps import l2_normalize

# --- chunked_sum ---------------------------------------------------------


def _sequence(
    generator: Generator,
    time: int = 6,
    chunk: int = 2,
    lead: tuple[int, ...] = (),
    key: int = 4,
    value: int = 3,
) -> dict[str, Any]:
    q, k = normal(generator, 2, *lead, time, key)
    return {"q": q, "k": k, "v": normal(generator, *lead, time, value), "chunk": chunk}


def _wide(generator: Generator, time: int, chunk: int) -> dict[str, Any]:
    return _sequence(generator, time, chunk, (), 48, 32)


def _blocks(
    rows: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: int,
    kept: float = 1.0,
) -> Tensor:
    """Rows of each chunk, from its parts and the state before it."""
    y, W = [], v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    for Q, K, V in zip(*(x.split(chunk, -2) for x in (q, k, v)), strict=True):
        y.append(rows(Q, K, V, W))
        W = kept * W + V.mT @ K
    return torch.cat(y, -2)


def _whole_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    whole = q.shape[-2] // chunk * chunk
    if not whole:
        return v[..., :0, :]
    q, k, v = (x[..., :whole, :] for x in (q, k, v))
    return chunked_sum(q, k, v, chunk)


CHUNKED_SUM = Exercise(
    name="chunked_sum",
    notebook="09_chunks",
    difficulty=4,
    importance=5,
    minutes=15,
    task="**The sum rule in chunks.** For `q`, `k` `[..., time, key]` and `v` "
    "`[..., time, value]`, return the outputs $y_i = W_i\\, q_i$ with $W_i "
    "= \\sum_{j \\le i} v_j k_j^\\top$, `[..., time, value]`, computed in "
    "chunks of `chunk` steps; the last chunk may be shorter. Do not build "
    "the matrix of all pairs of steps.",
    reference=chunked_sum,
    properties=(
        shape(
            "returns a tensor of the shape of v", _sequence, [(6, 2), (3, 3), (8, 1)]
        ),
        agrees(
            "at the first step, reads the pair of that step",
            _sequence,
            [(6, 2), (6, 3)],
            of=lambda y, *_: y[:1],
            because="y_1 is v_1 (k_1 . q_1). Is the diagonal of the block there, and "
            "nothing above it?",
            catches={
                "The diagonal is left out: a step reads its own pair, too.": partial(
                    _blocks, lambda Q, K, V, W: Q @ W.mT + (Q @ K.mT).tril(-1) @ V
                ),
                "The block of a chunk has no mask: its steps read later steps of the "
                "chunk.": partial(_blocks, lambda Q, K, V, W: Q @ W.mT + Q @ K.mT @ V),
                "This reads only the state before the chunk. The chunk's own pairs are "
                "missing.": partial(_blocks, lambda Q, K, V, W: Q @ W.mT),
                "The state is updated before it is read: pairs of the chunk count "
                "twice, and later ones are seen.": partial(
                    _blocks,
                    lambda Q, K, V, W: Q @ (W + V.mT @ K).mT + (Q @ K.mT).tril() @ V,
                ),
            },
        ),
        agrees(
            "with one chunk for all steps, reads the steps up to its own",
            _sequence,
            [(4, 4), (7, 7)],
            because="All {time} steps are in one chunk, so the state before it is 0.",
        ),
        agrees(
            "reads what earlier chunks have written",
            _sequence,
            [(6, 3), (4, 1), (12, 4)],
            because="There were {time} steps in chunks of {chunk}. The state before a "
            "chunk holds all pairs of all earlier chunks, and none of its own.",
            catches={
                "This computes the diagonal blocks alone: nothing reads the earlier "
                "chunks.": partial(_blocks, lambda Q, K, V, W: (Q @ K.mT).tril() @ V),
                "Each chunk replaces the state. It has to be added to what the state "
                "holds.": partial(
                    _blocks,
                    lambda Q, K, V, W: Q @ W.mT + (Q @ K.mT).tril() @ V,
                    kept=0.0,
                ),
            },
        ),
        agrees(
            "takes a shorter last chunk, and chunks longer than the sequence",
            _sequence,
            [(7, 3), (5, 2), (3, 8), (1, 2)],
            because="There were {time} steps in chunks of {chunk}.",
            catches={
                "The last chunk is dropped if it is shorter "
                "than the others.": _whole_chunks
            },
        ),
        takes_heads(_sequence, [(2,), (2, 3), (6, 6)]),
        gradient("lets gradients through to q, k and v", _sequence, (7, 3)),
        in_chunks(_wide),
    ),
    hints=(
        "Go from chunk to chunk with a state W that holds all earlier chunks. "
        "Read it before you add the chunk.",
        "The rows of a chunk read W, and by (Q K^T) with a mask the pairs of "
        "their own chunk, their own step included.",
        "x.split(chunk, -2) cuts the time axis; Q @ W.mT + (Q @ K.mT).tril() @ "
        "V; then W = W + V.mT @ K; torch.cat(y, -2).",
    ),
    example=_sequence,
)


# --- triangular ----------------------------------------------------------


def _writes(
    generator: Generator, time: int = 5, key: int = 4, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    beta = torch.rand(*lead, time, generator=generator, dtype=torch.float64)
    return {
        "k": l2_normalize(normal(generator, *lead, time, key)),
        "v": normal(generator, *lead, time, 3),
        "beta": 0.1 + 0.8 * beta,
    }


def _step_by_step(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    W, rows = torch.zeros(v.shape[1], k.shape[1], dtype=v.dtype), []
    for k_i, v_i, beta_i in zip(k, v, beta, strict=True):
        rows.append(beta_i * (v_i - W @ k_i))
        W = W + torch.outer(rows[-1], k_i)
    return torch.stack(rows)


def _solved(A: Tensor, v: Tensor, beta: Tensor | None = None) -> Tensor:
    """(I + A) U = beta V for any A; no beta = all are 1."""
    B = v if beta is None else beta[..., None] * v
    return torch.linalg.solve(torch.eye(A.shape[-1], dtype=A.dtype) + A, B)


def _rows(k: Tensor, beta: Tensor) -> Tensor:
    return beta[..., None] * (k @ k.mT)


def _first_order(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    B = beta[..., None] * v
    return B - _rows(k, beta).tril(-1) @ B


def _at_once(answer: Answer, reference: Answer, generator: Generator) -> None:
    time = 256
    inputs = _writes(generator, time)
    with Work() as work:
        ask(answer, inputs["v"], **inputs)
    if work.operators >= time:
        raise Wrong(
            f"With {time} steps, your function calls {work.operators:,} operators: it "
            "goes through the steps one by one. One torch.linalg.solve_triangular "
            "finds all rows of U."
        )


TRIANGULAR = Exercise(
    name="triangular",
    notebook="09_chunks",
    difficulty=4,
    importance=5,
    minutes=9,
    task="**The triangular system.** From `k` `[..., time, key]`, `v` "
    "`[..., time, value]` and `beta` `[..., time]`, return the increments "
    "$U$ `[..., time, value]` that the delta rule writes, from an empty "
    "memory, by solving one triangular system.",
    reference=triangular,
    properties=(
        shape("returns a tensor of the shape of v", _writes, [(5, 4), (1, 3), (3, 7)]),
        agrees(
            "at the first step, writes beta v, since the memory is empty",
            _writes,
            [1, 5],
            of=lambda U, *_: U[:1],
            expected=lambda k, v, beta: beta[:1, None] * v[:1],
            because="This is the first row of U.",
            catches={
                "The diagonal of beta K K^T is in the system: a step would read its "
                "own write.": lambda k, v, beta: _solved(
                    _rows(k, beta).tril(), v, beta
                ),
                "All of beta K K^T is in the system: steps remove what later steps "
                "write.": lambda k, v, beta: _solved(_rows(k, beta), v, beta),
                "The triangle is the upper one: steps read later steps, not earlier "
                "ones.": lambda k, v, beta: _solved(_rows(k, beta).triu(1), v, beta),
                "The right side lacks beta: it is beta V, not V.": lambda k, v, beta: (
                    _solved(_rows(k, beta).tril(-1), v)
                ),
            },
        ),
        agrees(
            "with orthogonal keys, writes beta v at every step",
            _writes,
            [4],
            change={"k": lambda k: torch.linalg.qr(k).Q},
            expected=lambda k, v, beta: beta[:, None] * v,
            because="No key has anything stored under it, so nothing is removed.",
        ),
        agrees(
            "if two steps have the same key, the second removes what the first wrote",
            _writes,
            [2],
            change={"k": lambda k: k[:1].expand(2, -1).contiguous()},
            of=lambda U, *_: U[1],
            expected=lambda k, v, beta: beta[1] * (v[1] - beta[0] * v[0]),
            because="The first step stored beta_1 v_1 under the key, so u_2 is beta_2 "
            "(v_2 - beta_1 v_1).",
            catches={
                "beta scales the columns of K K^T here. It has to scale the rows: u_i "
                "has the strength of its own step.": lambda k, v, beta: _solved(
                    _rows(k, beta).mT.tril(-1), v, beta
                ),
                "The matrix lacks beta: what is removed is beta times what the key "
                "held.": lambda k, v, beta: _solved((k @ k.mT).tril(-1), v, beta),
                "The sign is wrong: this solves (I - A) U "
                "= beta V.": lambda k, v, beta: _solved(
                    -_rows(k, beta).tril(-1), v, beta
                ),
            },
        ),
        agrees(
            "gives the increments of the step-by-step rule",
            _writes,
            [(6, 4), (9, 5), (40, 8)],
            expected=_step_by_step,
            because="There were {time} steps. Row i of A has beta_i, and entries only "
            "left of the diagonal.",
            catches={
                "This multiplies by I - A. The inverse of I + A has all "
                "powers of A.": _first_order
            },
        ),
        agrees(
            "writes nothing where beta is 0",
            _writes,
            change={"beta": lambda beta: beta * torch.tensor([0, 1, 0, 1, 1])},
            because="beta was 0 at two steps. Do you divide by it?",
        ),
        takes_heads(_writes, [(2,), (2, 3), (5, 5)]),
        gradient("lets gradients through to k, v and beta", _writes),
        Property("solves one system, without a loop over steps", _at_once),
    ),
    hints=(
        "Move all u to one side: u_i + beta_i sum_{j<i} (k_i . k_j) u_j = beta_i v_i.",
        "That is (I + A) U = beta V. Row i of A has beta_i, and .tril(-1) "
        "keeps what is below the diagonal.",
        "torch.linalg.solve_triangular(A, B, upper=False, unitriangular=True) "
        "takes the diagonal to be 1; beta[..., None] scales rows.",
    ),
    example=_writes,
)


# --- recomputing_backward ------------------------------------------------

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def _pass(
    generator: Generator, time: int = 5, key: int = 4, value: int = 3
) -> dict[str, Tensor]:
    q, k = l2_normalize(normal(generator, 2, time, key))
    v, dy = normal(generator, 2, time, value)
    beta = 0.1 + 0.8 * torch.rand(time, generator=generator, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "beta": beta, "dy": dy}


def _equal_writes(
    generator: Generator, time: int, strength: float
) -> dict[str, Tensor]:
    inputs = _pass(generator, time)
    return inputs | {"beta": torch.full_like(inputs["beta"], strength)}


NAMES = ("dq", "dk", "dv", "dbeta")
#: Steps and the widths of keys and values.
SIZES = [(2, 4, 3), (7, 4, 3), (6, 3, 5)]


def _keeps_no_states(answer: Answer, reference: Answer, generator: Generator) -> None:
    time, width = 128, 64
    inputs = _pass(generator, time, width, width)
    like = {name: inputs[name[1:]] for name in NAMES}
    with Work() as work:
        ask(answer, like, **inputs)
    traced = tracemalloc.is_tracing()  # by the reader, who goes on with it
    tracemalloc.start()  # again: what Python and NumPy hold
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        ask(answer, like, **inputs)
        held = work.peak + (tracemalloc.get_traced_memory()[1] - before) // 8
    finally:
        if not traced:
            tracemalloc.stop()
    if held > 2 / 3 * time * width * width:
        raise Wrong(
            f"With {time} steps and width {width}, your function held {held:,} "
            f"numbers at once; W of every step is {time * width * width:,}, and the "
            f"inputs are only {sum(x.numel() for x in inputs.values()):,}."
        )


def _mistaken(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    dy: Tensor,
    undo: Tensor | None = None,
    query_before: bool = False,
    key_after: bool = False,
    carried: float = 1.0,
    removed: float = 1.0,
    twice: float = 1.0,
    own: float = 1.0,
) -> Gradients:
    """The solution, with a choice of mistakes; `undo`: what it subtracts."""
    U = triangular(k, v, beta)
    W, undo = U.mT @ k, U if undo is None else undo
    dW = torch.zeros_like(W)
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    for t in reversed(range(len(q))):
        dW = carried * dW + torch.outer(dy[t], q[t])
        after, W = W, W - torch.outer(undo[t], k[t])
        du = (dW - (1 - own) * torch.outer(dy[t], q[t])) @ k[t]
        dq[t] = dy[t] @ (W if query_before else after)
        dk[t] = undo[t] @ dW - twice * beta[t] * du @ (after if key_after else W)
        dv[t] = beta[t] * du
        dbeta[t] = du @ (v[t] - W @ k[t])
        dW = dW - removed * beta[t] * torch.outer(du, k[t])
    return dq, dk, dv, dbeta


def _divides(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor) -> Gradients:
    W, undo = triangular(k, v, beta).mT @ k, []
    for k_t, v_t, b_t in zip(k.flip(0), v.flip(0), beta.flip(0), strict=True):
        undo.append(b_t * (v_t - W @ k_t) / (1 - b_t * (k_t @ k_t)))
        W = W - torch.outer(undo[-1], k_t)
    return _mistaken(q, k, v, beta, dy, undo=torch.stack(undo[::-1]))


RECOMPUTING_BACKWARD = Exercise(
    name="recomputing_backward",
    notebook="08_memory",
    difficulty=5,
    importance=4,
    minutes=35,
    task="**The backward pass without stored memories.** For one head of the "
    "delta rule, from an empty memory: `q` and `k` `[time, key]`, `v` "
    "`[time, value]`, `beta` `[time]`, and `dy` `[time, value]`, the "
    "gradient of the outputs $y_i = W_i q_i$. Return `dq, dk, dv, dbeta`. "
    "Do not keep $W_i$ for every step.",
    reference=recomputing_backward,
    properties=(
        shape(
            "returns dq, dk, dv and dbeta, shaped like q, k, v and beta",
            _pass,
            [(5, 4, 3), (1, 2, 2), (3, 3, 6)],
            names=NAMES,
        ),
        agrees(
            "is right for a single step",
            _pass,
            [1],
            names=NAMES,
            because="This is {name}. There is one step, and the memory before it is 0.",
            catches={
                "The increment is lost: this undoes v_i k_i^T. What was written is u_i "
                "k_i^T, with u_i = beta_i (v_i - W k_i).": lambda q, k, v, beta, dy: (
                    _mistaken(q, k, v, beta, dy, undo=v)
                ),
                "dk uses W after the step. The key reads the memory before its own "
                "write.": partial(_mistaken, key_after=True),
                "dq uses W before the step. The query reads the memory after the "
                "write.": partial(_mistaken, query_before=True),
                "du lacks the step's own query, which reads W_i, too: first add dy_i "
                "q_i^T to dW, then take du_i.": partial(_mistaken, own=0.0),
            },
        ),
        agrees(
            "carries dW from step to step: dv is right",
            _pass,
            SIZES,
            names=NAMES,
            only=("dv",),
            because="This is dv, which needs no W. dW gains dy_i q_i^T at each step, "
            "and loses beta_i du_i k_i^T on its way to the step before. Are "
            "the rows of the result in the order of the steps?",
            catches={
                "dW is not carried from step to step: a write is also read by all "
                "later steps.": partial(_mistaken, carried=0.0),
                "dW is carried as in the sum rule: the reading W_{i-1} k_i in u_i is "
                "forgotten.": partial(_mistaken, removed=0.0),
            },
        ),
        agrees(
            "has the W of every step: dq is right",
            _pass,
            SIZES,
            names=NAMES,
            only=("dq",),
            because="This is dq. The query of a step reads W_i, after the write of "
            "that step.",
            catches={
                "The increment is lost: this undoes beta_i v_i k_i^T. What was written "
                "is u_i k_i^T, with u_i = beta_i (v_i "
                "- W k_i).": lambda q, k, v, beta, dy: _mistaken(
                    q, k, v, beta, dy, undo=beta[:, None] * v
                )
            },
        ),
        agrees(
            "knows both uses of a key: dk and dbeta are right",
            _pass,
            SIZES,
            names=NAMES,
            only=("dk", "dbeta"),
            because="This is {name}. A key reads W_{{i-1}}, and u_i is written under "
            "it.",
            catches={
                "dk lacks its second part: the key also reads the "
                "memory, inside u_i.": partial(_mistaken, twice=0.0)
            },
        ),
        agrees(
            "is right for beta = 0, for beta = 1, and after many steps",
            _equal_writes,
            [(6, 0.0), (6, 1.0), (300, 0.95)],
            names=NAMES,
            because="This is {name}; there were {time} steps with beta = {strength:g} "
            "and keys of length 1. Do you divide by 1 - beta |k|²?",
            catches={
                "The increment is not kept but solved for: division by 1 - beta |k|² "
                "fails where that is 0, and errors grow at every step.": _divides
            },
        ),
        Property("does not keep W for every step", _keeps_no_states),
    ),
    hints=(
        "Run the rule forward first. Keep the last W and every increment u_i: "
        "a vector per step.",
        "Then go backward. At step t: dW += outer(dy[t], q[t]); dq[t] needs W; "
        "undo the write, W - outer(u[t], k[t]); now dk[t] and dbeta[t].",
        "du = dW @ k[t]; dv[t] = beta[t] * du; dbeta[t] = du @ (v[t] - W @ "
        "k[t]); dk[t] = u[t] @ dW - beta[t] * du @ W. Last, dW -= beta[t] * "
        "outer(du, k[t]).",
    ),
    example=_pass,
)


# --- chunked_delta -------------------------------------------------------


def _writes_and_reads(
    generator: Generator, time: int = 6, chunk: int = 2, lead: tuple[int, ...] = ()
) -> dict[str, Any]:
    q = normal(generator, *lead, time, 4)
    return {"q": q, **_writes(generator, time, 4, lead), "chunk": chunk}


def _wide_writes(generator: Generator, time: int, chunk: int) -> dict[str, Any]:
    inputs = _wide(generator, time, chunk)
    beta = torch.rand(time, generator=generator, dtype=torch.float64)
    q, k, v = inputs["q"], l2_normalize(inputs["k"]), inputs["v"]
    return {"q": q, "k": k, "v": v, "beta": beta, "chunk": chunk}


def _all_steps(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk: int | None = None
) -> Tensor:
    """The closed form, which has no chunks."""
    return (q @ k.mT).tril() @ triangular(k, v, beta)


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    chunk: int,
    state: float = 1.0,
    read: float = 1.0,
    own: int = 0,
    solve: bool = True,
) -> Tensor:
    """The solution, with a choice of mistakes."""
    W, y = torch.zeros_like(v[..., :1, :].mT @ k[..., :1, :]), []
    for Q, K, V, b in zip(
        *(x.split(chunk, -2) for x in (q, k, v, beta[..., None])), strict=True
    ):
        U = triangular(K, V - state * K @ W.mT, b[..., 0])
        U = U if solve else b * (V - state * K @ W.mT)
        y.append(read * Q @ W.mT + (Q @ K.mT).tril(own) @ U)
        W = W + U.mT @ K
    return torch.cat(y, -2)


CHUNKED_DELTA = Exercise(
    name="chunked_delta",
    notebook="09_chunks",
    difficulty=4,
    importance=4,
    minutes=10,
    task="**The delta rule in chunks.** For `q`, `k` `[..., time, key]`, `v` "
    "`[..., time, value]` and `beta` `[..., time]`, return the outputs $y_i = "
    "W_i\\, q_i$ of the delta rule, from an empty memory, `[..., time, value]`, "
    "computed in chunks of `chunk` steps; the last chunk may be shorter.",
    reference=chunked_delta,
    properties=(
        shape(
            "returns a tensor of the shape of v",
            _writes_and_reads,
            [(6, 2), (3, 3), (8, 1)],
        ),
        agrees(
            "with one chunk for all steps, is the closed form",
            _writes_and_reads,
            [(4, 4), (7, 7)],
            expected=_all_steps,
            because="All {time} steps are in one chunk, so the state before it is 0.",
            catches={
                "The increments are beta (V - K W^T): what earlier steps of the chunk "
                "wrote is not removed (d1).": partial(_chunks, solve=False),
                "The diagonal of Q K^T is left out: a step reads its own pair, "
                "too.": partial(_chunks, own=-1),
            },
        ),
        agrees(
            "reads and corrects what earlier chunks have written",
            _writes_and_reads,
            [(6, 3), (4, 1), (12, 4)],
            expected=_all_steps,
            because="There were {time} steps in chunks of {chunk}.",
            catches={
                "The increments do not see the state: its values under the keys of the "
                "chunk have to go, too, V - K W^T (d1).": partial(_chunks, state=0.0),
                "The queries do not read the state before the chunk, Q W^T "
                "(d2).": partial(_chunks, read=0.0),
            },
        ),
        agrees(
            "takes a shorter last chunk, and chunks longer than the sequence",
            _writes_and_reads,
            [(7, 3), (5, 2), (3, 8), (1, 2)],
            expected=_all_steps,
            because="There were {time} steps in chunks of {chunk}.",
        ),
        takes_heads(_writes_and_reads, [(2,), (2, 3), (6, 6)]),
        gradient(
            "lets gradients through to q, k, v and beta", _writes_and_reads, (7, 3)
        ),
        in_chunks(_wide_writes),
    ),
    hints=(
        "Take your chunks of the sum rule. Only the rows that are written change: "
        "increments U in place of values V.",
        "U solves (I + A) U = beta (V - K W^T): your triangular system, with "
        "V - K @ W.mT in place of V.",
        "U = triangular(K, V - K @ W.mT, b); Q @ W.mT + (Q @ K.mT).tril() @ U; "
        "then W = W + U.mT @ K.",
    ),
    example=_writes_and_reads,
)


EXERCISES = {
    each.name: each
    for each in (RECOMPUTING_BACKWARD, CHUNKED_SUM, TRIANGULAR, CHUNKED_DELTA)
}
