"""Four exercises: reading, writing, normalising, correcting."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    CUT,
    Answer,
    ask,
    compare,
    compare_gradients,
)
from fwlab.exercises.exercise import Exercise
from fwlab.feature_maps import divide, sum_normalize, unit_range
from fwlab.ops.delta.naive import delta_step
from fwlab.ops.linear.naive import read, write


def _random(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _orthonormal(generator: Generator, width: int) -> Tensor:
    """Orthogonal rows of length 1."""
    return torch.linalg.qr(_random(generator, width, width)).Q


# --- read_memory -----------------------------------------------------


def _read_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of a value"""
    for value, key in ((3, 5), (5, 3), (1, 1)):
        W = _random(generator, value, key)
        ask(answer, W[:, 0], W=W, q=_random(generator, key))


def _read_finds_columns(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """with a one-hot query, returns a column of W"""
    W = _random(generator, 4, 4)
    for place, q in enumerate(torch.eye(4, dtype=torch.float64)):
        compare(
            ask(answer, W[:, place], W=W, q=q),
            W[:, place],
            f"The query was one-hot, with its 1 at place {place}: column {place} of W.",
        )


def _read_adds(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with any query, returns the sum of the columns times its entries"""
    for value, key in ((4, 4), (3, 5)):
        W, q = _random(generator, value, key), _random(generator, key)
        expected = sum((q[i] * W[:, i] for i in range(key)), torch.zeros(value))
        compare(ask(answer, W[:, 0], W=W, q=q), expected, "This is W q.")


def _read_takes_heads(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (4, 4)):
        W, q = _random(generator, *lead, 4, 4), _random(generator, *lead, 4)
        expected = reference(W, q)
        found = ask(answer, expected, W=W, q=q)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _read_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to W and q"""
    W, q = _random(generator, 2, 4, 5), _random(generator, 2, 5)
    compare_gradients(answer, reference, generator, CUT, W=W, q=q)


def _square(generator: Generator) -> dict[str, Tensor]:
    return {"W": _random(generator, 4, 4), "q": _random(generator, 4)}


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


# --- write -----------------------------------------------------------


def _write_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of W"""
    for value, key in ((3, 5), (4, 2), (1, 1)):
        W = _random(generator, value, key)
        ask(answer, W, W=W, k=_random(generator, key), v=_random(generator, value))


def _write_fills_empty_memory(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """stores a value in an empty memory"""
    W, v = torch.zeros(3, 4, dtype=torch.float64), _random(generator, 3)
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
    keys, values = _orthonormal(generator, 4), _random(generator, 2, 3)
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
        W = _random(generator, *lead, 4, 5)
        k, v = _random(generator, *lead, 5), _random(generator, *lead, 4)
        expected = reference(W, k, v)
        found = ask(answer, expected, W=W, k=k, v=v)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _pair(generator: Generator) -> dict[str, Tensor]:
    return {
        "W": _random(generator, 2, 4, 5),
        "k": _random(generator, 2, 5),
        "v": _random(generator, 2, 4),
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


# --- sum_normalize ---------------------------------------------------


def _sum_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of x"""
    for shape in ((4,), (3, 5), (2, 3, 4, 6)):
        x = _random(generator, *shape).abs()
        ask(answer, x, x=x)


def _sum_is_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """makes the features of each key sum to one"""
    for shape in ((4,), (3, 5), (2, 3, 4, 6)):
        x = _random(generator, *shape).abs()
        total = ask(answer, x, x=x).sum(-1)
        compare(
            total,
            torch.ones_like(total),
            "These are sums over the last dimension. If they are almost right: "
            "is an epsilon added to the sum?",
        )


def _sum_keeps_ratios(answer: Answer, reference: Answer, generator: Generator) -> None:
    """keeps the ratios of the features"""
    x = _random(generator, 3, 5).abs() + 0.1
    found = ask(answer, x, x=x)
    compare(
        found / found[:, :1],
        x / x[:, :1],
        "These are the features of a key, divided by its first feature.",
    )


def _sum_ignores_scale(answer: Answer, reference: Answer, generator: Generator) -> None:
    """does not depend on the scale of the key"""
    x = _random(generator, 4, 6).abs()
    for scale in (1e-100, 1e-9, 1e9, 1e100):
        compare(
            ask(answer, x, x=x * scale),
            reference(x),
            f"All features were multiplied by {scale:g}. "
            "Is an epsilon added to the sum?",
        )


def _sum_takes_signs(answer: Answer, reference: Answer, generator: Generator) -> None:
    """takes features of either sign"""
    x = torch.tensor([[3.0, -1.0], [-2.0, -2.0], [1.0, -0.9990234375]]).double()
    compare(ask(answer, x, x=x), reference(x), f"The features were {x.tolist()}.")


def _sum_keeps_apart(answer: Answer, reference: Answer, generator: Generator) -> None:
    """treats every key by itself, whatever the others are"""
    x = _random(generator, 6, 4).abs()
    x[1::2] *= torch.tensor([1e-30, 1e30, 0.0], dtype=torch.float64)[:, None]
    compare(
        ask(answer, x, x=x),
        reference(x),
        "The sums of these keys differ by 60 orders of magnitude, and one is 0.",
    )


def _sum_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """gives zero where the sum is zero, and a gradient of zero"""
    x = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [1.0, -3.0, 2.0]]).double()
    compare(
        ask(answer, x, x=x),
        reference(x),
        "The second key was all zeros, and the third was (1, -3, 2): both sums are 0.",
    )
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, x=x)


def _keys(generator: Generator) -> dict[str, Tensor]:
    return {"x": _random(generator, 3, 5).abs()}


def _over_everything(x: Tensor) -> Tensor:
    """This divides by the sum over all keys together. Each key has its own."""
    return x / x.sum()


def _by_length(x: Tensor) -> Tensor:
    """This divides by the Euclidean length (l2_normalize), not by the sum."""
    return x / x.norm(dim=-1, keepdim=True)


def _by_maximum(x: Tensor) -> Tensor:
    """This divides by the largest feature, not by the sum."""
    return x / x.amax(-1, keepdim=True)


def _by_softmax(x: Tensor) -> Tensor:
    """This is a softmax: it takes exp of the features first. They only need
    a division.
    """
    return torch.softmax(x, -1)


def _by_absolute_sum(x: Tensor) -> Tensor:
    """This divides by the sum of absolute values. Eq. 29 takes the plain sum,
    which can be negative.
    """
    return x / x.abs().sum(-1, keepdim=True)


def _undefined(x: Tensor) -> Tensor:
    """This is Eq. 29 as it stands, and 0 / 0 is NaN."""
    return x / x.sum(-1, keepdim=True)


# --- delta_step ------------------------------------------------------


def _delta_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of W"""
    for value, key in ((3, 5), (4, 2), (1, 1)):
        W, beta = _random(generator, value, key), torch.rand((), generator=generator)
        k, v = _random(generator, key), _random(generator, value)
        ask(answer, W, W=W, k=k, v=v, beta=beta.double())


def _strength(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _delta_replaces(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 1 and a key of length 1, replaces what the key held"""
    W, v = _random(generator, 3, 4), _random(generator, 3)
    k = _orthonormal(generator, 4)[0]
    written = ask(answer, W, W=W, k=k, v=v, beta=_strength(1.0))
    compare(read(written, k), v, "Reading the key back should give exactly v.")


def _delta_keeps(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 0, changes nothing"""
    W, k, v = (_random(generator, *s) for s in ((3, 4), (4,), (3,)))
    compare(ask(answer, W, W=W, k=k, v=v, beta=_strength(0.0)), W)


def _delta_mixes(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta between 0 and 1, mixes the old value and the new one"""
    W, v = _random(generator, 3, 4), _random(generator, 3)
    k = _orthonormal(generator, 4)[0]
    for beta in (0.25, 0.5):
        written = ask(answer, W, W=W, k=k, v=v, beta=_strength(beta))
        compare(
            read(written, k),
            (1 - beta) * read(W, k) + beta * v,
            f"With beta = {beta}, the key should hold (1 - beta) old + beta new.",
        )


def _delta_spares_others(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """leaves the values of orthogonal keys alone"""
    W, v, keys = (
        _random(generator, 3, 4),
        _random(generator, 3),
        _orthonormal(generator, 4),
    )
    written = ask(answer, W, W=W, k=keys[0], v=v, beta=_strength(0.7))
    for key in keys[1:]:
        compare(
            read(written, key),
            read(W, key),
            "A key orthogonal to k lost part of its value. Does beta shrink all of W?",
        )


def _delta_any_length(answer: Answer, reference: Answer, generator: Generator) -> None:
    """follows Eq. 24 for keys of any length"""
    W, v = _random(generator, 3, 4), _random(generator, 3)
    k = 0.5 * _orthonormal(generator, 4)[0]
    compare(
        ask(answer, W, W=W, k=k, v=v, beta=_strength(1.0)),
        reference(W, k, v, _strength(1.0)),
        "The key had length 0.5; the rule itself does not normalise it.",
    )


def _delta_takes_heads(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (4, 4)):
        W = _random(generator, *lead, 4, 5)
        k, v = _random(generator, *lead, 5), _random(generator, *lead, 4)
        beta = torch.rand(lead, generator=generator, dtype=torch.float64)
        expected = reference(W, k, v, beta)
        found = ask(answer, expected, W=W, k=k, v=v, beta=beta)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _delta_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to W, k, v and beta"""
    beta = torch.rand(2, generator=generator, dtype=torch.float64)
    given = {**_pair(generator), "beta": beta}
    compare_gradients(answer, reference, generator, CUT, **given)


def _delta_example(generator: Generator) -> dict[str, Tensor]:
    beta = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
    W, k, v = (_random(generator, *shape) for shape in ((3, 4), (4,), (3,)))
    return {"W": W, "k": k, "v": v, "beta": beta}


def _no_removal(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the sum rule: what the key held is not removed (Eq. 23)."""
    return W + _outer(beta[..., None] * v, k)


def _wrong_sign(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The sign is wrong: this moves away from v, since it adds W k - v."""
    return delta_step(W, k, v, -beta)


def _always_one(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This ignores beta: it always replaces the whole value."""
    return delta_step(W, k, v, torch.ones_like(beta))


def _fades(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the gated rule (Eq. 52): it fades what all keys hold, not only
    what this key holds.
    """
    beta = beta[..., None]
    return (1 - beta[..., None]) * W + _outer(beta * v, k)


def _removes_all(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This multiplies only the new value by beta. What is removed has to be
    multiplied, too: beta (v - W k).
    """
    return W + _outer(beta[..., None] * v - read(W, k), k)


def _squashed(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This applies a sigmoid to beta, which is between 0 and 1 already."""
    return delta_step(W, k, v, torch.sigmoid(beta))


def _unit_keys(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This divides by the squared length of the key. The rule itself does not
    normalise keys.
    """
    return delta_step(W, k, v, beta / (k * k).sum(-1))


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
        Exercise(
            "sum_normalize",
            (
                "**Sum normalisation** (Eq. 29). Divide the features of each "
                "key, the last dimension of `x`, by their sum. A key whose sum "
                "is 0 gives 0, with gradient 0; no epsilon."
            ),
            (sum_normalize, unit_range, divide),
            (
                _sum_has_shape,
                _sum_is_one,
                _sum_keeps_ratios,
                _sum_ignores_scale,
                _sum_takes_signs,
                _sum_of_nothing,
                _sum_keeps_apart,
            ),
            (
                "Eq. 29 divides each key by the sum of its own features: "
                "sum over the last dimension, and keep it.",
                "A key of zeros has sum 0. fwlab's rule is 0 / 0 = 0, without "
                "an epsilon: torch.where can choose.",
                "Choose before dividing as well as after: where the sum is 0, "
                "divide by 1 instead. A NaN that torch.where discards "
                "still reaches the gradient.",
            ),
            _keys,
            (
                _over_everything,
                _by_length,
                _by_maximum,
                _by_softmax,
                _by_absolute_sum,
                _undefined,
            ),
        ),
        Exercise(
            "delta_step",
            (
                "**The delta step** (Eqs. 20 and 24). Return the memory after "
                "one step, for `W` `[..., value, key]`, `k` `[..., key]`, `v` "
                "`[..., value]` and `beta` `[...]`."
            ),
            (delta_step, read, write),
            (
                _delta_has_shape,
                _delta_replaces,
                _delta_keeps,
                _delta_mixes,
                _delta_spares_others,
                _delta_any_length,
                _delta_takes_heads,
                _delta_has_gradient,
            ),
            (
                "First ask the memory what the key holds now: Eq. 20.",
                "Then write the difference between the new and the old value, "
                "times beta, under the same key: Eq. 24.",
                'old = torch.einsum("...vk,...k->...v", W, k), and beta[..., None] '
                "broadcasts with values.",
            ),
            _delta_example,
            (
                _no_removal,
                _wrong_sign,
                _always_one,
                _fades,
                _removes_all,
                _squashed,
                _unit_keys,
            ),
        ),
    )
}
