"""Reading a memory, writing into it, attention of writes and reads, and how well it
reads.
"""

import torch
from torch import Generator, Tensor

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
from fwlab.ops.additive.rules.sum import read, write
from fwlab.ops.correcting.rules.delta import delta_step

# --- read_memory ----------------------------------------------------


def _read_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of a value"""
    for value, key in ((3, 5), (5, 3), (1, 1)):
        W = normal(generator, value, key)
        ask(answer, W[:, 0], W=W, q=normal(generator, key))


def _read_finds_columns(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """with a one-hot query, returns a column of W"""
    W = normal(generator, 4, 4)
    for place, q in enumerate(torch.eye(4, dtype=torch.float64)):
        compare(
            ask(answer, W[:, place], W=W, q=q),
            W[:, place],
            f"The query was one-hot, with its 1 at place {place}: column {place} of W.",
        )


def _read_adds(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with any query, returns the sum of the columns times its entries"""
    for value, key in ((4, 4), (3, 5)):
        W, q = normal(generator, value, key), normal(generator, key)
        expected = sum((q[i] * W[:, i] for i in range(key)), torch.zeros(value))
        compare(ask(answer, W[:, 0], W=W, q=q), expected, "This is W q.")


def _read_takes_heads(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (4, 4)):
        W, q = normal(generator, *lead, 4, 4), normal(generator, *lead, 4)
        expected = reference(W, q)
        found = ask(answer, expected, W=W, q=q)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _read_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to W and q"""
    W, q = normal(generator, 2, 4, 5), normal(generator, 2, 5)
    compare_gradients(answer, reference, generator, CUT, W=W, q=q)


def _square(generator: Generator) -> dict[str, Tensor]:
    return {"W": normal(generator, 4, 4), "q": normal(generator, 4)}


def _read_rows(W: Tensor, q: Tensor) -> Tensor:
    """This is q W, not W q: the query meets the columns of W, its last dimension."""
    return read(W.mT, q)


def _read_best(W: Tensor, q: Tensor) -> Tensor:
    """This takes the column of the largest entry of the query alone. All columns
    count, each times its entry.
    """
    return torch.take_along_dim(W, q.argmax(-1)[..., None, None], -1)[..., 0]


def _read_mean(W: Tensor, q: Tensor) -> Tensor:
    """This takes the mean over the columns, and has to take the sum."""
    return read(W, q) / q.shape[-1]


def _read_softmax(W: Tensor, q: Tensor) -> Tensor:
    """This takes a softmax of the query first. Fast weights need none."""
    return read(W, torch.softmax(q, -1))


# --- write ----------------------------------------------------------


def _write_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of W"""
    for value, key in ((3, 5), (4, 2), (1, 1)):
        W = normal(generator, value, key)
        ask(answer, W, W=W, k=normal(generator, key), v=normal(generator, value))


def _write_fills_empty_memory(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """stores a value in an empty memory"""
    W, v = torch.zeros(3, 4, dtype=torch.float64), normal(generator, 3)
    for place in range(4):
        k = torch.eye(4, dtype=torch.float64)[place]
        written = ask(answer, W, W=W, k=k, v=v)
        compare(
            written[:, place],
            v,
            f"With the one-hot key {place}, column {place} of W should hold v.",
        )
        compare(read(written, k), v, "W k should be v.")


def _write_adds(answer: Answer, reference: Answer, generator: Generator) -> None:
    """keeps what is already there"""
    keys, values = orthonormal(generator, 4), normal(generator, 2, 3)
    W = values[0][:, None] * keys[0][None, :]
    written = ask(answer, W, W=W, k=keys[1], v=values[1])
    compare(
        read(written, keys[0]),
        values[0],
        "The write changed an earlier value under an orthogonal key.",
    )
    twice = ask(answer, W, W=W, k=keys[0], v=values[1])
    compare(
        read(twice, keys[0]),
        values.sum(0),
        "After two writes under one key, reading should return the sum of both values.",
    )


def _write_takes_heads(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (1, 2, 2)):
        W = normal(generator, *lead, 4, 5)
        k, v = normal(generator, *lead, 5), normal(generator, *lead, 4)
        expected = reference(W, k, v)
        found = ask(answer, expected, W=W, k=k, v=v)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _pair(generator: Generator) -> dict[str, Tensor]:
    return {
        "W": normal(generator, 2, 4, 5),
        "k": normal(generator, 2, 5),
        "v": normal(generator, 2, 4),
    }


def _write_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to W, k and v"""
    compare_gradients(answer, reference, generator, CUT, **_pair(generator))


def _outer(v: Tensor, k: Tensor) -> Tensor:
    return v[..., :, None] * k[..., None, :]


def _square_pair(generator: Generator) -> dict[str, Tensor]:
    return {
        "W": normal(generator, 4, 4),
        "k": normal(generator, 4),
        "v": normal(generator, 4),
    }


def _only_new(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This is the new pair alone: what W held is lost."""
    return _outer(v, k)


def _write_minus(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This subtracts the pair: W - v ⊗ k in place of W + v ⊗ k."""
    return W - _outer(v, k)


def _write_difference(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This is the delta rule already: it removes what the key held. Here a
    write only adds.
    """
    return delta_step(W, k, v, torch.ones_like(k[..., 0]))


def _write_transposed(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This adds k ⊗ v, with keys along the rows. Values go along the rows, and keys
    along the columns, so that W k is a value.
    """
    return W + _outer(k, v)


def _write_entry_by_entry(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This multiplies entry by entry, v * k. In v ⊗ k every entry of v meets every
    entry of k.
    """
    return W + v * k


# --- linear_attention -----------------------------------------------


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Eqs. 8 to 11, all steps at once."""
    return (q @ k.mT).tril() @ v


def _sequence(
    generator: Generator,
    lead: tuple[int, ...] = (),
    time: int = 5,
    key: int = 4,
    value: int = 4,
) -> dict[str, Tensor]:
    return {
        "q": normal(generator, *lead, time, key),
        "k": normal(generator, *lead, time, key),
        "v": normal(generator, *lead, time, value),
    }


def _attention_has_shape(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns a tensor of the shape of v"""
    for time, key, value in ((5, 4, 3), (1, 2, 6), (3, 5, 5)):
        given = _sequence(generator, (), time, key, value)
        ask(answer, given["v"], **given)


def _attention_is_causal(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not look at later steps"""
    given = _sequence(generator)
    later = {name: x.clone() for name, x in given.items()}
    for x in later.values():
        x[3:] = x[3:] * 2 + 1
    compare(
        ask(answer, given["v"], **later)[:3],
        ask(answer, given["v"], **given)[:3],
        "Only steps 3 and 4 were changed, and steps 0 to 2 changed with them.",
    )


def _attention_of_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """at the first step, returns the first value, weighted by k · q"""
    for time in (1, 5):
        given = _sequence(generator, time=time)
        compare(
            ask(answer, given["v"], **given)[0],
            given["v"][0] * (given["k"][0] @ given["q"][0]),
            "Step 0 reads a memory that holds one pair, its own.",
        )


def _attention_keeps_all(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """at the last step, still reads the first value"""
    given = _sequence(generator, time=7)
    given["k"], given["v"] = (0 * given[name] for name in "kv")
    given["k"][0] = given["v"][0] = 1.0
    compare(
        ask(answer, given["v"], **given)[-1],
        given["q"][-1].sum() * given["v"][0],
        "Only the first pair was not 0. Nothing takes it out of the memory, and "
        "nothing divides the sum.",
    )


def _attention_is_right(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """weights the value of each step j up to i by k_j · q_i"""
    for time, key, value in ((6, 4, 3), (6, 6, 6), (40, 3, 5)):
        given = _sequence(generator, (), time, key, value)
        expected = reference(**given)
        because = f"There were {time} steps, keys of width {key}, values of {value}."
        compare(ask(answer, expected, **given), expected, because)


def _attention_takes_heads(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead, time in (((2,), 4), ((2, 3), 5), ((4, 4), 4)):
        given = _sequence(generator, lead, time)
        expected = reference(**given)
        found = ask(answer, expected, **given)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _attention_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to q, k and v"""
    compare_gradients(answer, reference, generator, CUT, **_sequence(generator, (2,)))


def _sees_the_future(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This sees the future: step i reads all pairs, later ones included. It may read
    those up to i.
    """
    return q @ k.mT @ v


def _reads_before_writing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This leaves out the pair of the step itself. Write first, then read: j goes up to
    i, and includes it.
    """
    return (q @ k.mT).tril(-1) @ v


def _forgets_the_rest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This reads the pair of the step alone: W was replaced, in place of added to."""
    return (q * k).sum(-1, keepdim=True) * v


def _mean_of_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This divides by the number of pairs. A memory is a sum: nothing divides it."""
    count = torch.arange(1, q.shape[-2] + 1, dtype=v.dtype)
    return linear_attention(q, k, v) / count[:, None]


def _by_sum_of_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This divides by the sum of the weights, as softmax does. Here nothing divides:
    weights may be negative, and may sum to 0.
    """
    return linear_attention(q, k, v) / linear_attention(q, k, torch.ones_like(v))


def _with_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """There is still a softmax here, so no matrix can take the place of the list."""
    future = torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool()
    return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v


def _scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This divides by sqrt(d), a factor that the paper leaves out (Eq. 7)."""
    return linear_attention(q, k, v) / q.shape[-1] ** 0.5


def _keys_ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys and queries are swapped: this weights v_j by k_i · q_j, in place of
    k_j · q_i.
    """
    return linear_attention(k, q, v)


def _values_ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Here W is the sum of k ⊗ v, so it answers with keys. Values belong to the rows
    of W: v ⊗ k.
    """
    return linear_attention(q, v, k)


# --- predict_error --------------------------------------------------


def predict_error(S: int, d: int) -> float:
    """S - 1 other values, each with a weight whose square is 1 / d on average."""
    return (S - 1) / d


def _error_of_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is 0 for one pair, which nothing disturbs"""
    for d in (1, 8, 64):
        if abs(found := ask(answer, float, S=1, d=d)) > 1e-12:
            raise Wrong(
                f"S = 1, d = {d}: expected 0, got {found:g}. W k is v (k · k), and k "
                "has length 1."
            )


def _error_is_as_measured(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """agrees with memories that were filled and read, to within 10 %"""
    for S, d in ((2, 8), (9, 8), (33, 16), (5, 64)):
        k = l2_normalize(normal(generator, 2000, S, d))
        v = normal(generator, 2000, S, 4)
        error = k @ (k.mT @ v) - v
        measured = (error.square().sum() / v.square().sum()).item()
        if not abs((found := ask(answer, float, S=S, d=d)) / measured - 1) < 0.1:
            raise Wrong(
                f"S = {S}, d = {d}: 2000 memories had an error of {measured:.3g}, you "
                f"predict {found:.3g}."
            )


def _error_is_exact(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is right for any S and d, large ones too"""
    for S, d in ((2, 1), (8, 8), (100, 64), (10_001, 10), (3, 4096)):
        found, expected = ask(answer, float, S=S, d=d), reference(S, d)
        if not abs(found - expected) <= 1e-9 * expected:
            raise Wrong(f"S = {S}, d = {d}: expected {expected:g}, got {found:g}.")


def _size(generator: Generator) -> dict[str, object]:
    S, d = torch.randint(5, 40, (2,), generator=generator).tolist()
    return {"S": S, "d": d}


def _own_pair_too(S: int, d: int) -> float:
    """This counts the pair itself, too, which is read without an error: only the S - 1
    others disturb it.
    """
    return S / d


def _by_square_of_width(S: int, d: int) -> float:
    """This divides by d². The mean of (k_j · k_i)² is 1/d: the square is in it already."""
    return (S - 1) / d**2


def _without_square(S: int, d: int) -> float:
    """This is the length of the error, the root of what is asked: take its square."""
    return ((S - 1) / d) ** 0.5


def _by_root_of_width(S: int, d: int) -> float:
    """1/sqrt(d) is the typical size of k_j · k_i. The error has its square."""
    return (S - 1) / d**0.5


def _nothing_cancels(S: int, d: int) -> float:
    """This would be right if all S - 1 terms pointed the same way. The cross terms
    vanish, so squares add up, not lengths.
    """
    return (S - 1) ** 2 / d


def _share_that_is_lost(S: int, d: int) -> float:
    """This is what the best keys lose: d of them have room. Random keys disturb each
    other long before, and beyond 1.
    """
    return max(0.0, 1 - d / S)


def _room_for_d(S: int, d: int) -> float:
    """This takes the first d pairs to be free. That holds for orthogonal keys; random
    ones overlap, even two of them.
    """
    return max(0.0, (S - d) / d)


def _not_divided(S: int, d: int) -> float:
    """This weights every other value by 1, but its weight is k_j · k_i: small in a wide
    memory.
    """
    return S - 1


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "read_memory",
            (
                "**Read a memory.** Return $W q$: what the memory `W` "
                "`[..., value, key]` holds for the query `q` `[..., key]`. The dots "
                "are any leading dimensions, such as batch and heads."
            ),
            (read,),
            (
                _read_has_shape,
                _read_finds_columns,
                _read_adds,
                _read_takes_heads,
                _read_has_gradient,
            ),
            (
                "It is a matrix times a vector. Which dimension of W does the query meet?",
                "The last dimension of W is that of keys and queries; sum over it.",
                'torch.einsum("...vk,...k->...v", W, q). For plain matrices, W @ q.',
            ),
            _square,
            {
                _read_rows: _read_has_shape,
                _read_best: _read_adds,
                _read_mean: _read_finds_columns,
                _read_softmax: _read_finds_columns,
            },
        ),
        Exercise(
            "write",
            (
                r"**The outer-product write** (Eq. 17). Return $W + v \otimes "
                "k$, for `W` `[..., value, key]`, `k` `[..., key]` and `v` "
                "`[..., value]`. The dots are any leading dimensions, such as "
                "batch and heads."
            ),
            (write,),
            (
                _write_has_shape,
                _write_fills_empty_memory,
                _write_adds,
                _write_takes_heads,
                _write_has_gradient,
            ),
            (
                "Eq. 17 adds v ⊗ k to W. Entry (i, j) of v ⊗ k is v_i k_j.",
                "Give v a last dimension of 1 and k a second-to-last one, and "
                "multiply: broadcasting makes the matrix. Or name the indices in "
                "torch.einsum.",
                "v[..., :, None] has shape [..., value, 1], and k[..., None, :] "
                'has [..., 1, key]. In einsum: "...v,...k->...vk".',
            ),
            _square_pair,
            {
                _only_new: _write_adds,
                _write_minus: _write_fills_empty_memory,
                _write_difference: _write_adds,
                _write_transposed: _write_has_shape,
                _write_entry_by_entry: _write_has_shape,
            },
        ),
        Exercise(
            "linear_attention",
            (
                "**Attention without softmax** (Eqs. 8-11). From queries `q`, keys `k` "
                "`[..., time, key]` and values `v` `[..., time, value]`, return "
                "$y_i = \\sum_{j \\le i} v_j\\, (k_j \\cdot q_i)$ for every step $i$, "
                "`[..., time, value]`: in a loop that writes and reads, or all steps at "
                "once."
            ),
            (linear_attention,),
            (
                _attention_has_shape,
                _attention_is_causal,
                _attention_of_one,
                _attention_keeps_all,
                _attention_is_right,
                _attention_takes_heads,
                _attention_has_gradient,
            ),
            (
                "As a loop: start with W = 0. At each step, k[..., i, :] is the key of all "
                "leading dimensions: add v ⊗ k to W, as in write, then append W q to a "
                "list. torch.stack(list, -2) makes a tensor of it.",
                "All at once: q @ k.mT has the weight k_j · q_i in row i and column "
                "j. Later steps must not count.",
                ".tril() keeps the columns up to i of each row i. Multiply what is "
                "left by v.",
            ),
            _sequence,
            {
                _sees_the_future: _attention_is_causal,
                _reads_before_writing: _attention_of_one,
                _forgets_the_rest: _attention_keeps_all,
                _mean_of_pairs: _attention_keeps_all,
                _by_sum_of_weights: _attention_of_one,
                _with_softmax: _attention_of_one,
                _scaled: _attention_of_one,
                _keys_ask: _attention_keeps_all,
                _values_ask: _attention_has_shape,
            },
        ),
        Exercise(
            "predict_error",
            (
                "**Predict the error.** `S` pairs are written under random keys of "
                "length 1 and width `d`, and all are read. Return the expected squared "
                "error of a value that is read, relative to the squared length of a "
                "value."
            ),
            (predict_error,),
            (_error_of_one, _error_is_as_measured, _error_is_exact),
            (
                "How many other values come in, when you read one?",
                "Each of them comes in with the weight k_j · k_i. What is the mean of "
                "its square?",
                "The squares add up, the cross terms vanish: (number of other values) "
                "times (mean of the squared weight).",
            ),
            _size,
            {
                _own_pair_too: _error_of_one,
                _by_square_of_width: _error_is_as_measured,
                _without_square: _error_is_as_measured,
                _by_root_of_width: _error_is_as_measured,
                _nothing_cancels: _error_is_as_measured,
                _share_that_is_lost: _error_is_as_measured,
                _room_for_d: _error_is_as_measured,
                _not_divided: _error_is_as_measured,
            },
        ),
    )
}
