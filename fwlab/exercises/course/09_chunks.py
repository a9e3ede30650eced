"""Chunks."""

import torch

from fwlab.exercises.answers import Wrong, ask, normal
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import Work
from fwlab.feature_maps import l2_normalize

# --- chunked_sum ---------------------------------------------------------


def _sequence(generator, time=6, chunk=2, lead=(), key=4, value=3):
    q, k = normal(generator, 2, *lead, time, key)
    return {"q": q, "k": k, "v": normal(generator, *lead, time, value), "chunk": chunk}


def _wide(generator, time, chunk):
    return _sequence(generator, time, chunk, (), 48, 32)


@exercise(_sequence, difficulty=4, importance=5, minutes=15)
def chunked_sum(q, k, v, chunk):
    r"""
    **The sum rule in chunks.** For `q`, `k` `[..., time, key]` and `v` `[..., time,
    value]`, return the outputs $y_i = W_i\, q_i$ with $W_i = \sum_{j \le i} v_j
    k_j^\top$, `[..., time, value]`, computed in chunks of `chunk` steps; the last chunk
    may be shorter. Do not build the matrix of all pairs of steps.

    ✓ returns a tensor of the shape of v
        shape((6, 2), (3, 3), (8, 1))
    ✓ at the first step, reads the pair of that step
        agrees((6, 2), (6, 3), of=lambda y, *_: y[:1])
    ! y_1 is v_1 (k_1 . q_1). Is the diagonal of the block there, and nothing above it?
    ✗ The diagonal is left out: a step reads its own pair, too.
        .tril() -> .tril(-1)
    ✗ The block of a chunk has no mask: its steps read later steps of the chunk.
        .tril() ->
    ✗ This reads only the state before the chunk. The chunk's own pairs are missing.
        + (Q @ K.mT).tril() @ V ->
    ✗ The state is updated before it is read: pairs of the chunk count twice, and later
      ones are seen.
        Q @ W.mT -> Q @ (W + V.mT @ K).mT
    ✓ with one chunk for all steps, reads the steps up to its own
        agrees((4, 4), (7, 7))
    ! All {time} steps are in one chunk, so the state before it is 0.
    ✓ reads what earlier chunks have written
        agrees((6, 3), (4, 1), (12, 4))
    ! There were {time} steps in chunks of {chunk}. The state before a chunk holds all
      pairs of all earlier chunks, and none of its own.
    ✗ This computes the diagonal blocks alone: nothing reads the earlier chunks.
        Q @ W.mT + ->
    ✗ Each chunk replaces the state. It has to be added to what the state holds.
        W = W + -> W =
    ✓ takes a shorter last chunk, and chunks longer than the sequence
        agrees((7, 3), (5, 2), (3, 8), (1, 2))
    ! There were {time} steps in chunks of {chunk}.
    ✗ The last chunk is dropped if it is shorter than the others.
        q.shape[-2], chunk -> q.shape[-2] // chunk * chunk, chunk
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (6, 6)})
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to q, k and v
        gradient((7, 3))
    ✓ works in chunks: a few matrix products for each, and one state between them
        in_chunks(draw=_wide)
    ? Go from chunk to chunk with a state W that holds all earlier chunks. Read it
      before you add the chunk.
    ? The rows of a chunk read W, and by (Q K^T) with a mask the pairs of their own
      chunk, their own step included.
    ? x.split(chunk, -2) cuts the time axis; Q @ W.mT + (Q @ K.mT).tril() @ V; then W =
      W + V.mT @ K; torch.cat(y, -2).
    """
    W, y = torch.zeros_like(v[..., :1, :].mT @ k[..., :1, :]), []
    for i in range(0, q.shape[-2], chunk):
        Q, K, V = (x[..., i : i + chunk, :] for x in (q, k, v))
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ V)  # (c1)
        W = W + V.mT @ K  # (c2)
    return torch.cat(y, -2)


# --- triangular ----------------------------------------------------------


def _writes(generator, time=5, key=4, lead=()):
    beta = torch.rand(*lead, time, generator=generator, dtype=torch.float64)
    return {
        "k": l2_normalize(normal(generator, *lead, time, key)),
        "v": normal(generator, *lead, time, 3),
        "beta": 0.1 + 0.8 * beta,
    }


def _step_by_step(k, v, beta):
    W, rows = torch.zeros(v.shape[1], k.shape[1], dtype=v.dtype), []
    for k_i, v_i, beta_i in zip(k, v, beta, strict=True):
        rows.append(beta_i * (v_i - W @ k_i))
        W = W + torch.outer(rows[-1], k_i)
    return torch.stack(rows)


def _at_once(answer, reference, generator):
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


@exercise(_writes, difficulty=4, importance=5, minutes=9)
def triangular(k, v, beta):
    """
    **The triangular system.** From `k` `[..., time, key]`, `v` `[..., time, value]` and
    `beta` `[..., time]`, return the increments $U$ `[..., time, value]` that the delta
    rule writes, from an empty memory, by solving one triangular system.

    ✓ returns a tensor of the shape of v
        shape((5, 4), (1, 3), (3, 7))
    ✓ at the first step, writes beta v, since the memory is empty
        agrees(1, 5, of=lambda U, *_: U[:1])
        == beta[:1, None] * v[:1]
    ! This is the first row of U.
    ✗ The diagonal of beta K K^T is in the system: a step would read its own write.
        .tril(-1) -> .tril() + torch.eye(v.shape[-2])
          ; unitriangular=True -> unitriangular=False
    ✗ The unit matrix is missing: this solves A U = beta V, where A has its diagonal.
        .tril(-1) -> .tril() ; unitriangular=True -> unitriangular=False
    ✗ All of beta K K^T is in the system: steps remove what later steps write.
        .tril(-1) -> + torch.eye(v.shape[-2])
          ; solve_triangular(A, b * v, upper=False, unitriangular=True) -> solve(A, b * v)
    ✗ The triangle is the upper one: steps read later steps, not earlier ones.
        .tril(-1) -> .triu(1) ; upper=False -> upper=True
    ✗ The right side lacks beta: it is beta V, not V.
        b * v -> v
    ✓ with orthogonal keys, writes beta v at every step
        agrees(4, k=lambda k: torch.linalg.qr(k).Q)
        == beta[:, None] * v
    ! No key has anything stored under it, so nothing is removed.
    ✓ if two steps have the same key, the second removes what the first wrote
        agrees(2, k=lambda k: k[:1].expand(2, -1).contiguous(), of=lambda U, *_: U[1])
        == beta[1] * (v[1] - beta[0] * v[0])
    ! The first step stored beta_1 v_1 under the key, so u_2 is beta_2 (v_2 - beta_1
      v_1).
    ✗ beta scales the columns of K K^T here. It has to scale the rows: u_i has the
      strength of its own step.
        .tril(-1) -> .mT.tril(-1)
    ✗ The matrix lacks beta: what is removed is beta times what the key held.
        b * (k -> (k
    ✗ The sign is wrong: this solves (I - A) U = beta V.
        A = -> A = -
    ✓ gives the increments of the step-by-step rule
        agrees((6, 4), (9, 5), (40, 8))
        == _step_by_step(k, v, beta)
    ! There were {time} steps. Row i of A has beta_i, and entries only left of the
      diagonal.
    ✗ This multiplies by I - A. The inverse of I + A has all powers of A.
        torch.linalg.solve_triangular(A, b * v, upper=False, unitriangular=True) ->
          b * v - A @ (b * v)
    ✓ writes nothing where beta is 0
        agrees(beta=lambda beta: beta * torch.tensor([0, 1, 0, 1, 1]))
    ! beta was 0 at two steps. Do you divide by it?
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (5, 5)})
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to k, v and beta
        gradient()
    ✓ solves one system, without a loop over steps
        _at_once
    ? Move all u to one side: u_i + beta_i sum_{j<i} (k_i . k_j) u_j = beta_i v_i.
    ? That is (I + A) U = beta V. Row i of A has beta_i, and .tril(-1) keeps what is
      below the diagonal.
    ? torch.linalg.solve_triangular(A, B, upper=False, unitriangular=True) takes the
      diagonal to be 1; beta[..., None] scales rows.
    """
    b = beta[..., None]
    A = (b * (k @ k.mT)).tril(-1)
    return torch.linalg.solve_triangular(A, b * v, upper=False, unitriangular=True)


# --- chunked_delta -------------------------------------------------------


def _writes_and_reads(generator, time=6, chunk=2, lead=()):
    q = normal(generator, *lead, time, 4)
    return {"q": q, **_writes(generator, time, 4, lead), "chunk": chunk}


def _wide_writes(generator, time, chunk):
    inputs = _wide(generator, time, chunk)
    beta = torch.rand(time, generator=generator, dtype=torch.float64)
    q, k, v = inputs["q"], l2_normalize(inputs["k"]), inputs["v"]
    return {"q": q, "k": k, "v": v, "beta": beta, "chunk": chunk}


@exercise(_writes_and_reads, difficulty=4, importance=4, minutes=10)
def chunked_delta(q, k, v, beta, chunk):
    r"""
    **The delta rule in chunks.** For `q`, `k` `[..., time, key]`, `v` `[..., time,
    value]` and `beta` `[..., time]`, return the outputs $y_i = W_i\, q_i$ of the delta
    rule, from an empty memory, `[..., time, value]`, computed in chunks of `chunk`
    steps; the last chunk may be shorter.

    ✓ returns a tensor of the shape of v
        shape((6, 2), (3, 3), (8, 1))
    ✓ with one chunk for all steps, is the closed form
        agrees((4, 4), (7, 7))
        == (q @ k.mT).tril() @ triangular(k, v, beta)
    ! All {time} steps are in one chunk, so the state before it is 0.
    ✗ The increments are beta (V - K W^T): what earlier steps of the chunk wrote is not
      removed (d1).
        triangular(K, V - K @ W.mT, beta[..., i : i + chunk]) ->
          beta[..., i : i + chunk, None] * (V - K @ W.mT)
    ✗ The diagonal of Q K^T is left out: a step reads its own pair, too.
        .tril() -> .tril(-1)
    ✓ reads and corrects what earlier chunks have written
        agrees((6, 3), (4, 1), (12, 4))
        == (q @ k.mT).tril() @ triangular(k, v, beta)
    ! There were {time} steps in chunks of {chunk}.
    ✗ The increments do not see the state: its values under the keys of the chunk have
      to go, too, V - K W^T (d1).
        V - K @ W.mT -> V
    ✗ What the state holds is subtracted after the system. It belongs into it, since
      later rows depend on it (d1).
        triangular(K, V - K @ W.mT, beta[..., i : i + chunk]) ->
          triangular(K, V, beta[..., i : i + chunk]) - K @ W.mT
    ✗ The state gets the values V. It gets the increments U (d3).
        U.mT @ K -> V.mT @ K
    ✗ The queries do not read the state before the chunk, Q W^T (d2).
        Q @ W.mT + ->
    ✓ takes a shorter last chunk, and chunks longer than the sequence
        agrees((7, 3), (5, 2), (3, 8), (1, 2))
        == (q @ k.mT).tril() @ triangular(k, v, beta)
    ! There were {time} steps in chunks of {chunk}.
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (6, 6)})
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to q, k, v and beta
        gradient((7, 3))
    ✓ works in chunks: a few matrix products for each, and one state between them
        in_chunks(draw=_wide_writes)
    ? Take your chunks of the sum rule. Only the rows that are written change:
      increments U in place of values V.
    ? U solves (I + A) U = beta (V - K W^T): your triangular system, with V - K @ W.mT
      in place of V.
    ? U = triangular(K, V - K @ W.mT, b); Q @ W.mT + (Q @ K.mT).tril() @ U; then W = W +
      U.mT @ K.
    """
    W, y = torch.zeros_like(v[..., :1, :].mT @ k[..., :1, :]), []
    for i in range(0, q.shape[-2], chunk):
        Q, K, V = (x[..., i : i + chunk, :] for x in (q, k, v))
        U = triangular(K, V - K @ W.mT, beta[..., i : i + chunk])  # (d1)
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ U)  # (d2)
        W = W + U.mT @ K  # (d3)
    return torch.cat(y, -2)
