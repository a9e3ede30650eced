"""Correcting what a memory holds."""

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

# --- delta_step -----------------------------------------------------


def _delta_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of W"""
    for value, key in ((3, 5), (4, 2), (1, 1)):
        W, beta = normal(generator, value, key), torch.rand((), generator=generator)
        k, v = normal(generator, key), normal(generator, value)
        ask(answer, W, W=W, k=k, v=v, beta=beta.double())


def _strength(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _delta_replaces(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 1 and a key of length 1, replaces what the key held"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    k = orthonormal(generator, 4)[0]
    written = ask(answer, W, W=W, k=k, v=v, beta=_strength(1.0))
    compare(read(written, k), v, "Reading the key back should give exactly v.")


def _delta_keeps(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 0, changes nothing"""
    W, k, v = (normal(generator, *s) for s in ((3, 4), (4,), (3,)))
    compare(ask(answer, W, W=W, k=k, v=v, beta=_strength(0.0)), W)


def _delta_mixes(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta between 0 and 1, mixes the old value and the new one"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    k = orthonormal(generator, 4)[0]
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
        normal(generator, 3, 4),
        normal(generator, 3),
        orthonormal(generator, 4),
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
    W, v = normal(generator, 3, 4), normal(generator, 3)
    k = 0.5 * orthonormal(generator, 4)[0]
    compare(
        ask(answer, W, W=W, k=k, v=v, beta=_strength(1.0)),
        reference(W, k, v, _strength(1.0)),
        "The key had length 0.5; the rule itself does not normalise it.",
    )


def _delta_takes_heads(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (4, 4)):
        W = normal(generator, *lead, 4, 5)
        k, v = normal(generator, *lead, 5), normal(generator, *lead, 4)
        beta = torch.rand(lead, generator=generator, dtype=torch.float64)
        expected = reference(W, k, v, beta)
        found = ask(answer, expected, W=W, k=k, v=v, beta=beta)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def _delta_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to W, k, v and beta"""
    given = {
        "W": normal(generator, 2, 3, 4),
        "k": normal(generator, 2, 4),
        "v": normal(generator, 2, 3),
        "beta": torch.rand(2, generator=generator, dtype=torch.float64),
    }
    compare_gradients(answer, reference, generator, CUT, **given)


def _delta_example(generator: Generator) -> dict[str, Tensor]:
    beta = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
    W, k, v = (normal(generator, *shape) for shape in ((3, 4), (4,), (3,)))
    return {"W": W, "k": k, "v": v, "beta": beta}


def _no_removal(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the sum rule: what the key held is not removed (Eq. 23)."""
    return write(W, k, beta[..., None] * v)


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
    return write((1 - beta[..., None]) * W, k, beta * v)


def _removes_all(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This multiplies only the new value by beta. What is removed has to be
    multiplied, too: beta (v - W k).
    """
    return write(W, k, beta[..., None] * v - read(W, k))


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
