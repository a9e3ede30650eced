"""Three exercises: writing, normalising, correcting."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.checker import (
    CUT,
    Answer,
    Exercise,
    ask,
    compare,
    compare_gradients,
)
from fwlab.feature_maps import divide, sum_normalize, unit_range
from fwlab.ops.delta.naive import delta_step
from fwlab.ops.linear.naive import read, write


def _random(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _orthonormal(generator: Generator, width: int) -> Tensor:
    """Orthogonal rows of length 1."""
    return torch.linalg.qr(_random(generator, width, width)).Q


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
    x = torch.tensor([[3.0, -1.0], [-2.0, -2.0]], dtype=torch.float64)
    compare(ask(answer, x, x=x), reference(x), f"The features were {x.tolist()}.")


def _sum_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """gives zero for a zero key, and a gradient of zero"""
    x = torch.zeros(2, 3, dtype=torch.float64)
    x[0] = torch.tensor([1.0, 2.0, 1.0])
    compare(ask(answer, x, x=x), reference(x), "The second key was all zeros: 0 / 0.")
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, x=x)


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


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "write",
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
        ),
        Exercise(
            "sum_normalize",
            (sum_normalize, unit_range, divide),
            (
                _sum_has_shape,
                _sum_is_one,
                _sum_keeps_ratios,
                _sum_ignores_scale,
                _sum_takes_signs,
                _sum_of_nothing,
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
        ),
        Exercise(
            "delta_step",
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
        ),
    )
}
