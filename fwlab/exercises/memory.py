"""Three exercises: chunks of a sum, the triangular system, a backward pass by hand."""

import weakref
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fwlab.exercises.asking import (
    CUT,
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
    orthonormal,
)
from fwlab.exercises.exercise import Exercise
from fwlab.feature_maps import l2_normalize


class _Alive(TorchDispatchMode):
    """Counts the numbers of all tensors made meanwhile that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage(), x.element_size())
        return result

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        key, numbers = id(storage), storage.nbytes() // size
        if key not in self._known:  # else a view, or changed in place
            self._known.add(key)
            self.now += numbers
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, numbers)

    def _free(self, key: int, numbers: int) -> None:
        self._known.discard(key)
        self.now -= numbers


# --- chunked_sum ---------------------------------------------------------


def chunked_sum(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """(c1) and (c2) without decay and strength."""
    W = v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    y = []
    for Q, K, V in zip(*(x.split(chunk, -2) for x in (q, k, v)), strict=True):
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ V)  # (c1)
        W = W + V.mT @ K  # (c2)
    return torch.cat(y, -2)


def _sequence(
    generator: Generator, time: int = 6, chunk: int = 2, lead: tuple[int, ...] = ()
) -> dict[str, Any]:
    q, k = normal(generator, 2, *lead, time, 4)
    return {"q": q, "k": k, "v": normal(generator, *lead, time, 3), "chunk": chunk}


def _chunked_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of v"""
    for time, chunk in ((6, 2), (3, 3), (8, 1)):
        given = _sequence(generator, time, chunk)
        ask(answer, given["v"], **given)


def _chunked_reads_own_step(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """at the first step, reads the pair of that step"""
    for chunk in (2, 3):
        given = _sequence(generator, 6, chunk)
        compare(
            ask(answer, given["v"], **given)[:1],
            reference(**given)[:1],
            "y_1 is v_1 (k_1 . q_1). Is the diagonal of the block there, and nothing "
            "above it?",
        )


def _chunked_is_one_block(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """with one chunk for all steps, reads the steps up to its own"""
    for time in (4, 7):
        given = _sequence(generator, time, time)
        compare(
            ask(answer, given["v"], **given),
            reference(**given),
            f"All {time} steps are in one chunk, so the state before it is 0.",
        )


def _chunked_carries_state(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """reads what earlier chunks have written"""
    for time, chunk in ((6, 3), (4, 1), (12, 4)):
        given = _sequence(generator, time, chunk)
        compare(
            ask(answer, given["v"], **given),
            reference(**given),
            f"There were {time} steps in chunks of {chunk}. The state before a chunk "
            "holds all pairs of all earlier chunks, and none of its own.",
        )


def _chunked_keeps_the_rest(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """takes a shorter last chunk, and chunks longer than the sequence"""
    for time, chunk in ((7, 3), (5, 2), (3, 8), (1, 2)):
        given = _sequence(generator, time, chunk)
        because = f"There were {time} steps in chunks of {chunk}."
        compare(ask(answer, given["v"], **given), reference(**given), because)


def _chunked_takes_heads(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (5, 5)):
        given = _sequence(generator, 5, 2, lead)
        because = f"The leading dimensions were {list(lead)}."
        compare(ask(answer, given["v"], **given), reference(**given), because)


def _chunked_stays_small(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """never has the matrix of all pairs of steps"""
    time = 1024
    given = _sequence(generator, time, 16)
    with _Alive() as alive:
        found = ask(answer, given["v"], **given)
    compare(found, reference(**given), f"There were {time} steps in chunks of 16.")
    if alive.peak > time * time / 8:
        raise Wrong(
            f"With {time} steps in chunks of 16, your tensors held {alive.peak:,} "
            f"numbers at once; all {time} x {time} pairs are {time * time:,}, and the "
            f"pairs of all diagonal blocks only {time * 16:,}."
        )


def _chunked_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to q, k and v"""
    compare_gradients(answer, reference, generator, CUT, **_sequence(generator, 7, 3))


def _cut(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Any:
    """Rows of each chunk, and the state before it."""
    W = v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    for Q, K, V in zip(*(x.split(chunk, -2) for x in (q, k, v)), strict=True):
        yield Q, K, V, W
        W = W + V.mT @ K


def _without_own_step(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The diagonal is left out: a step reads its own pair, too."""
    y = [Q @ W.mT + (Q @ K.mT).tril(-1) @ V for Q, K, V, W in _cut(q, k, v, chunk)]
    return torch.cat(y, -2)


def _without_mask(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The block of a chunk has no mask: its steps read later steps of the chunk."""
    y = [Q @ W.mT + Q @ K.mT @ V for Q, K, V, W in _cut(q, k, v, chunk)]
    return torch.cat(y, -2)


def _without_block(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """This reads only the state before the chunk. The chunk's own pairs are missing."""
    return torch.cat([Q @ W.mT for Q, _, _, W in _cut(q, k, v, chunk)], -2)


def _without_state(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """This computes the diagonal blocks alone: nothing reads the earlier chunks."""
    y = [(Q @ K.mT).tril() @ V for Q, K, V, _ in _cut(q, k, v, chunk)]
    return torch.cat(y, -2)


def _written_first(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The state is updated before it is read: pairs of the chunk count twice, and
    later ones are seen.
    """
    y = [
        Q @ (W + V.mT @ K).mT + (Q @ K.mT).tril() @ V
        for Q, K, V, W in _cut(q, k, v, chunk)
    ]
    return torch.cat(y, -2)


def _replaced(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """Each chunk replaces the state. It has to be added to what the state holds."""
    y, W = [], v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    for Q, K, V in zip(*(x.split(chunk, -2) for x in (q, k, v)), strict=True):
        y.append(Q @ W.mT + (Q @ K.mT).tril() @ V)
        W = V.mT @ K
    return torch.cat(y, -2)


def _whole_chunks(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> Tensor:
    """The last chunk is dropped if it is shorter than the others."""
    whole = q.shape[-2] // chunk * chunk
    if not whole:
        return v[..., :0, :]
    q, k, v = (x[..., :whole, :] for x in (q, k, v))
    return chunked_sum(q, k, v, chunk)


# --- triangular ----------------------------------------------------------


def triangular(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """(d1) from an empty memory and without decay."""
    b = beta[..., None]
    A = (b * (k @ k.mT)).tril(-1)
    return torch.linalg.solve_triangular(A, b * v, upper=False, unitriangular=True)


def _writes(
    generator: Generator, lead: tuple[int, ...] = (), time: int = 5, key: int = 4
) -> dict[str, Tensor]:
    beta = torch.rand(*lead, time, generator=generator, dtype=torch.float64)
    return {
        "k": l2_normalize(normal(generator, *lead, time, key)),
        "v": normal(generator, *lead, time, 3),
        "beta": 0.1 + 0.8 * beta,
    }


def _triangular_has_shape(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns a tensor of the shape of v"""
    for time, key in ((5, 4), (1, 3), (3, 7)):
        given = _writes(generator, (), time, key)
        ask(answer, given["v"], **given)


def _triangular_starts_empty(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """at the first step, writes beta v, since the memory is empty"""
    for time in (1, 5):
        given = _writes(generator, (), time)
        compare(
            ask(answer, given["v"], **given)[:1],
            given["beta"][:1, None] * given["v"][:1],
            "This is the first row of U.",
        )


def _triangular_of_orthogonal_keys(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """with orthogonal keys, writes beta v at every step"""
    given = {**_writes(generator, (), 4), "k": orthonormal(generator, 4)}
    compare(
        ask(answer, given["v"], **given),
        given["beta"][:, None] * given["v"],
        "No key has anything stored under it, so nothing is removed.",
    )


def _triangular_removes(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """if two steps have the same key, the second removes what the first wrote"""
    given = _writes(generator, (), 2)
    given["k"] = given["k"][:1].expand(2, -1).contiguous()
    v, (first, second) = given["v"], given["beta"]
    compare(
        ask(answer, v, **given)[1],
        second * (v[1] - first * v[0]),
        "The first step stored beta_1 v_1 under the key, so u_2 is beta_2 (v_2 - "
        "beta_1 v_1).",
    )


def _triangular_is_the_loop(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """gives the increments of the step-by-step rule"""
    for time, key in ((6, 4), (9, 5), (40, 8)):
        given = _writes(generator, (), time, key)
        W, rows = given["v"].new_zeros(3, key), []
        for k, v, b in zip(*given.values(), strict=True):
            rows.append(b * (v - W @ k))
            W = W + torch.outer(rows[-1], k)
        compare(
            ask(answer, given["v"], **given),
            torch.stack(rows),
            f"There were {time} steps. Row i of A has beta_i, and entries only left of "
            "the diagonal.",
        )


def _triangular_takes_zeros(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """writes nothing where beta is 0"""
    given = _writes(generator)
    given["beta"][[0, 2]] = 0
    compare(
        ask(answer, given["v"], **given),
        reference(**given),
        "beta was 0 at two steps. Do you divide by it?",
    )


def _triangular_takes_heads(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (5, 5)):
        given = _writes(generator, lead)
        because = f"The leading dimensions were {list(lead)}."
        compare(ask(answer, given["v"], **given), reference(**given), because)


def _triangular_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to k, v and beta"""
    compare_gradients(answer, reference, generator, CUT, **_writes(generator))


def _solved(A: Tensor, B: Tensor) -> Tensor:
    """(I + A) U = B for any A."""
    return torch.linalg.solve(torch.eye(A.shape[-1], dtype=A.dtype) + A, B)


def _with_diagonal(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The diagonal of beta K K^T is in the system: a step would read its own write."""
    b = beta[..., None]
    return _solved((b * (k @ k.mT)).tril(), b * v)


def _all_steps(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """All of beta K K^T is in the system: steps remove what later steps write."""
    b = beta[..., None]
    return _solved(b * (k @ k.mT), b * v)


def _upper(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The triangle is the upper one: steps read later steps, not earlier ones."""
    b = beta[..., None]
    return _solved((b * (k @ k.mT)).triu(1), b * v)


def _columns_scaled(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """beta scales the columns of K K^T here. It has to scale the rows: u_i has
    the strength of its own step.
    """
    return _solved((beta[..., None, :] * (k @ k.mT)).tril(-1), beta[..., None] * v)


def _v_at_full(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The right side lacks beta: it is beta V, not V."""
    return _solved((beta[..., None] * (k @ k.mT)).tril(-1), v)


def _removed_at_full(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The matrix lacks beta: what is removed is beta times what the key held."""
    return _solved((k @ k.mT).tril(-1), beta[..., None] * v)


def _first_order(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This multiplies by I - A. The inverse of I + A has all powers of A."""
    b = beta[..., None]
    return b * v - (b * (k @ k.mT)).tril(-1) @ (b * v)


def _added(k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The sign is wrong: this solves (I - A) U = beta V."""
    b = beta[..., None]
    return _solved(-(b * (k @ k.mT)).tril(-1), b * v)


# --- recomputing_backward ------------------------------------------------

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def recomputing_backward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """Reversal: keep the last W and all increments, and undo one write after
    the other.
    """
    W, U = v.new_zeros(v.shape[1], k.shape[1]), []
    for k_t, v_t, b_t in zip(k, v, beta, strict=True):
        U.append(b_t * (v_t - W @ k_t))
        W = W + torch.outer(U[-1], k_t)
    dW = torch.zeros_like(W)
    dq, dk, dv, dbeta = (torch.empty_like(x) for x in (q, k, v, beta))
    for t in reversed(range(len(q))):
        dW = dW + torch.outer(dy[t], q[t])
        dq[t] = dy[t] @ W
        W = W - torch.outer(U[t], k[t])  # now the one before the step
        du = dW @ k[t]
        dk[t] = U[t] @ dW - beta[t] * du @ W
        dv[t] = beta[t] * du
        dbeta[t] = du @ (v[t] - W @ k[t])
        dW = dW - beta[t] * torch.outer(du, k[t])
    return dq, dk, dv, dbeta


def _pass(
    generator: Generator, time: int = 5, key: int = 4, value: int = 3
) -> dict[str, Tensor]:
    q, k = l2_normalize(normal(generator, 2, time, key))
    v, dy = normal(generator, 2, time, value)
    beta = 0.1 + 0.8 * torch.rand(time, generator=generator, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "beta": beta, "dy": dy}


NAMES = ("dq", "dk", "dv", "dbeta")


def _gradients(answer: Answer, **given: Tensor) -> dict[str, Tensor]:
    like = {name: given[name[1:]] for name in NAMES}
    return dict(zip(NAMES, ask(answer, like, **given), strict=True))


def _expected(reference: Answer, **given: Tensor) -> dict[str, Tensor]:
    return dict(zip(NAMES, reference(**given), strict=True))


def _backward_has_shape(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns dq, dk, dv and dbeta, shaped like q, k, v and beta"""
    for sizes in ((5, 4, 3), (1, 2, 2), (3, 3, 6)):
        _gradients(answer, **_pass(generator, *sizes))


def _backward_of_one_step(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """is right for a single step"""
    given = _pass(generator, 1)
    found, expected = _gradients(answer, **given), _expected(reference, **given)
    for name in NAMES:
        compare(
            found[name],
            expected[name],
            f"This is {name}. There is one step, and the memory before it is 0.",
        )


def _backward_carries(answer: Answer, reference: Answer, generator: Generator) -> None:
    """carries dW from step to step: dv is right"""
    for sizes in ((2, 4, 3), (7, 4, 3), (6, 3, 5)):
        given = _pass(generator, *sizes)
        compare(
            _gradients(answer, **given)["dv"],
            _expected(reference, **given)["dv"],
            "This is dv, which needs no W. dW gains dy_i q_i^T at each step, and loses "
            "beta_i du_i k_i^T on its way to the step before. Are the rows of the result "
            "in the order of the steps?",
        )


def _backward_has_queries(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """has the W of every step: dq is right"""
    for sizes in ((2, 4, 3), (7, 4, 3), (6, 3, 5)):
        given = _pass(generator, *sizes)
        compare(
            _gradients(answer, **given)["dq"],
            _expected(reference, **given)["dq"],
            "This is dq. The query of a step reads W_i, after the write of that step.",
        )


def _backward_has_keys(answer: Answer, reference: Answer, generator: Generator) -> None:
    """knows both uses of a key: dk and dbeta are right"""
    for sizes in ((2, 4, 3), (7, 4, 3), (6, 3, 5)):
        given = _pass(generator, *sizes)
        found, expected = _gradients(answer, **given), _expected(reference, **given)
        for name in ("dk", "dbeta"):
            compare(
                found[name],
                expected[name],
                f"This is {name}. A key reads W_{{i-1}}, and u_i is written under it.",
            )


def _backward_takes_full_writes(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """is right for beta = 0, for beta = 1, and after many steps"""
    for time, strength in ((6, 0.0), (6, 1.0), (300, 0.95)):
        given = _pass(generator, time)
        given["beta"] = torch.full_like(given["beta"], strength)
        found, expected = _gradients(answer, **given), _expected(reference, **given)
        for name in NAMES:
            compare(
                found[name],
                expected[name],
                f"This is {name}; there were {time} steps with beta = {strength:g} and "
                "keys of length 1. Do you divide by 1 - beta |k|²?",
            )


def _backward_stores_no_states(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not keep W for every step"""
    time, width = 128, 64
    given = _pass(generator, time, width, width)
    with _Alive() as alive:
        _gradients(answer, **given)
    if alive.peak > 2 / 3 * time * width * width:
        raise Wrong(
            f"With {time} steps and width {width}, your tensors held {alive.peak:,} "
            f"numbers at once; W of every step is {time * width * width:,}, and the "
            f"inputs are only {sum(x.numel() for x in given.values()):,}."
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


def _undoes_values(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """The increment is lost: this undoes v_i k_i^T. What was written is u_i k_i^T,
    with u_i = beta_i (v_i - W k_i).
    """
    return _mistaken(q, k, v, beta, dy, undo=v)


def _undoes_strong_values(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """The increment is lost: this undoes beta_i v_i k_i^T. What was written is
    u_i k_i^T, with u_i = beta_i (v_i - W k_i).
    """
    return _mistaken(q, k, v, beta, dy, undo=beta[:, None] * v)


def _divides(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor) -> Gradients:
    """The increment is not kept but solved for: division by 1 - beta |k|² fails
    where that is 0, and errors grow at every step.
    """
    W, found = triangular(k, v, beta).mT @ k, []
    for k_t, v_t, b_t in zip(k.flip(0), v.flip(0), beta.flip(0), strict=True):
        found.append(b_t * (v_t - W @ k_t) / (1 - b_t * (k_t @ k_t)))
        W = W - torch.outer(found[-1], k_t)
    return _mistaken(q, k, v, beta, dy, undo=torch.stack(found[::-1]))


def _key_after(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor) -> Gradients:
    """dk uses W after the step. The key reads the memory before its own write."""
    return _mistaken(q, k, v, beta, dy, key_after=True)


def _query_before(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """dq uses W before the step. The query reads the memory after the write."""
    return _mistaken(q, k, v, beta, dy, query_before=True)


def _own_step_late(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """du lacks the step's own query, which reads W_i, too: first add dy_i q_i^T to
    dW, then take du_i.
    """
    return _mistaken(q, k, v, beta, dy, own=0.0)


def _not_carried(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """dW is not carried from step to step: a write is also read by all later steps."""
    return _mistaken(q, k, v, beta, dy, carried=0.0)


def _carried_whole(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor
) -> Gradients:
    """dW is carried as in the sum rule: the reading W_{i-1} k_i in u_i is forgotten."""
    return _mistaken(q, k, v, beta, dy, removed=0.0)


def _key_once(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, dy: Tensor) -> Gradients:
    """dk lacks its second part: the key also reads the memory, inside u_i."""
    return _mistaken(q, k, v, beta, dy, twice=0.0)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "recomputing_backward",
            (
                "**The backward pass without stored memories.** For one head of the "
                "delta rule, from an empty memory: `q` and `k` `[time, key]`, `v` "
                "`[time, value]`, `beta` `[time]`, and `dy` `[time, value]`, the "
                "gradient of the outputs $y_i = W_i q_i$. Return `dq, dk, dv, dbeta`. "
                "Do not keep $W_i$ for every step."
            ),
            (recomputing_backward,),
            (
                _backward_has_shape,
                _backward_of_one_step,
                _backward_carries,
                _backward_has_queries,
                _backward_has_keys,
                _backward_takes_full_writes,
                _backward_stores_no_states,
            ),
            (
                "Run the rule forward first. Keep the last W and every increment u_i: "
                "a vector per step.",
                "Then go backward. At step t: dW += outer(dy[t], q[t]); dq[t] needs W; "
                "undo the write, W - outer(u[t], k[t]); now dk[t] and dbeta[t].",
                "du = dW @ k[t]; dv[t] = beta[t] * du; dbeta[t] = du @ (v[t] - W @ "
                "k[t]); dk[t] = u[t] @ dW - beta[t] * du @ W. Last, dW -= beta[t] * "
                "outer(du, k[t]).",
            ),
            _pass,
            {
                _undoes_values: _backward_of_one_step,
                _undoes_strong_values: _backward_has_queries,
                _divides: _backward_takes_full_writes,
                _key_after: _backward_of_one_step,
                _query_before: _backward_of_one_step,
                _own_step_late: _backward_of_one_step,
                _not_carried: _backward_carries,
                _carried_whole: _backward_carries,
                _key_once: _backward_has_keys,
            },
        ),
        Exercise(
            "chunked_sum",
            (
                "**The sum rule in chunks.** For `q`, `k` `[..., time, key]` and `v` "
                "`[..., time, value]`, return the outputs $y_i = W_i\\, q_i$ with $W_i "
                "= \\sum_{j \\le i} v_j k_j^\\top$, `[..., time, value]`, computed in "
                "chunks of `chunk` steps; the last chunk may be shorter. Do not build "
                "the matrix of all pairs of steps."
            ),
            (chunked_sum,),
            (
                _chunked_has_shape,
                _chunked_reads_own_step,
                _chunked_is_one_block,
                _chunked_carries_state,
                _chunked_keeps_the_rest,
                _chunked_takes_heads,
                _chunked_stays_small,
                _chunked_has_gradient,
            ),
            (
                "Go from chunk to chunk with a state W that holds all earlier chunks. "
                "Read it before you add the chunk.",
                "The rows of a chunk read W, and by (Q K^T) with a mask the pairs of "
                "their own chunk, their own step included.",
                "x.split(chunk, -2) cuts the time axis; Q @ W.mT + (Q @ K.mT).tril() @ "
                "V; then W = W + V.mT @ K; torch.cat(y, -2).",
            ),
            _sequence,
            {
                _without_own_step: _chunked_reads_own_step,
                _without_mask: _chunked_reads_own_step,
                _without_block: _chunked_reads_own_step,
                _without_state: _chunked_carries_state,
                _written_first: _chunked_reads_own_step,
                _replaced: _chunked_carries_state,
                _whole_chunks: _chunked_keeps_the_rest,
            },
        ),
        Exercise(
            "triangular",
            (
                "**The triangular system.** From `k` `[..., time, key]`, `v` "
                "`[..., time, value]` and `beta` `[..., time]`, return the increments "
                "$U$ `[..., time, value]` that the delta rule writes, from an empty "
                "memory, by solving one triangular system."
            ),
            (triangular,),
            (
                _triangular_has_shape,
                _triangular_starts_empty,
                _triangular_of_orthogonal_keys,
                _triangular_removes,
                _triangular_is_the_loop,
                _triangular_takes_zeros,
                _triangular_takes_heads,
                _triangular_has_gradient,
            ),
            (
                "Move all u to one side: u_i + beta_i sum_{j<i} (k_i . k_j) u_j = "
                "beta_i v_i.",
                "That is (I + A) U = beta V. Row i of A has beta_i, and .tril(-1) "
                "keeps what is below the diagonal.",
                "torch.linalg.solve_triangular(A, B, upper=False, unitriangular=True) "
                "takes the diagonal to be 1; beta[..., None] scales rows.",
            ),
            _writes,
            {
                _with_diagonal: _triangular_starts_empty,
                _all_steps: _triangular_starts_empty,
                _upper: _triangular_starts_empty,
                _columns_scaled: _triangular_removes,
                _v_at_full: _triangular_starts_empty,
                _removed_at_full: _triangular_removes,
                _first_order: _triangular_is_the_loop,
                _added: _triangular_removes,
            },
        ),
    )
}
"""All exercises on memory by name."""
