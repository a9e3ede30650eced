"""Reading a memory, and writing into it."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    CUT,
    Answer,
    ask,
    compare,
    compare_gradients,
    normal,
    orthonormal,
)
from fwlab.exercises.exercise import Exercise
from fwlab.ops.delta.naive import delta_step
from fwlab.ops.linear.naive import read, write

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
            (_read_rows, _read_best, _read_mean, _read_softmax),
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
            _pair,
            (_only_new, _write_minus, _write_difference),
        ),
    )
}
