"""Correcting what a memory holds."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    Answer,
    Wrong,
    ask,
    compare,
    normal,
    orthonormal,
)
from fwlab.exercises.exercise import Exercise
from fwlab.exercises.steps import (
    step_has_gradient,
    step_has_shape,
    step_mixes,
    step_takes_heads,
    strength,
)
from fwlab.ops.additive.rules.sum import read, write
from fwlab.ops.correcting.rules.delta import delta_step

# --- delta_step -----------------------------------------------------


def _delta_replaces(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 1 and a key of length 1, replaces what the key held"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    k = orthonormal(generator, 4)[0]
    written = ask(answer, W, W=W, k=k, v=v, beta=strength(1.0))
    compare(read(written, k), v, "Reading the key back should give exactly v.")


def _delta_keeps(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 0, changes nothing"""
    W, k, v = (normal(generator, *s) for s in ((3, 4), (4,), (3,)))
    compare(ask(answer, W, W=W, k=k, v=v, beta=strength(0.0)), W)


def _delta_spares_others(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """leaves the values of orthogonal keys alone"""
    W, v, keys = (
        normal(generator, 3, 4),
        normal(generator, 3),
        orthonormal(generator, 4),
    )
    written = ask(answer, W, W=W, k=keys[0], v=v, beta=strength(0.7))
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
        ask(answer, W, W=W, k=k, v=v, beta=strength(1.0)),
        reference(W, k, v, strength(1.0)),
        "The key had length 0.5; the rule itself does not normalise it.",
    )


def _delta_example(generator: Generator) -> dict[str, Tensor]:
    beta = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
    W, k, v = (normal(generator, *shape) for shape in ((3, 4), (4,), (3,)))
    return {"W": W, "k": k, "v": v, "beta": beta}


def _no_removal(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the sum rule: what the key held is not removed (Eq. 23)."""
    return write(W, k, beta[..., None] * v)


def _new_only(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This writes the mixture of the new and the old value, but the old value
    stays there, too: it has to be removed (Eq. 23).
    """
    beta = beta[..., None]
    return write(W, k, beta * v + (1 - beta) * read(W, k))


def _beta_twice(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This multiplies by beta twice: the difference of the mixture and the old
    value has a beta already (Eqs. 38-40).
    """
    return delta_step(W, k, v, beta * beta)


def _update_only(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is only what is added in one step. The step returns the new memory."""
    return delta_step(W, k, v, beta) - W


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


# --- gradient_step --------------------------------------------------


def gradient_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Step down the gradient of half the squared error.

    The gradient with respect to W is (W k - v) ⊗ k, so this is `delta_step`.
    """
    gradient = torch.einsum("...v,...k->...vk", read(W, k) - v, k)
    return W - beta[..., None, None] * gradient


def _loss(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (read(W, k) - v).square().sum(-1) / 2


def _gradient_stays(answer: Answer, reference: Answer, generator: Generator) -> None:
    """where the memory already returns v, changes nothing"""
    W, k = normal(generator, 3, 4), normal(generator, 4)
    found = ask(answer, W, W=W, k=k, v=read(W, k), beta=strength(0.5))
    compare(found, W, "The loss is 0 here, and so is its gradient.")


def _gradient_descends(answer: Answer, reference: Answer, generator: Generator) -> None:
    """makes the loss smaller"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    k = orthonormal(generator, 4)[0]
    stepped = ask(answer, W, W=W, k=k, v=v, beta=strength(0.1))
    before, after = _loss(W, k, v).item(), _loss(stepped, k, v).item()
    if not after < before:
        raise Wrong(
            f"The loss was {before:.4g} before a step with beta = 0.1, and is "
            f"{after:.4g} after it. Do you move against the gradient?"
        )


def _gradient_follows(answer: Answer, reference: Answer, generator: Generator) -> None:
    """moves by beta times the gradient"""
    for value, key in ((3, 4), (5, 2), (1, 3)):
        W, k = normal(generator, value, key), normal(generator, key)
        v = normal(generator, value)
        for beta in (0.0, 0.25, 0.5, 1.0):
            compare(
                ask(answer, W, W=W, k=k, v=v, beta=strength(beta)),
                reference(W, k, v, strength(beta)),
                f"beta was {beta}. Is your loss ½ |W k - v|²: summed over the "
                "values, with the factor ½?",
            )


def _gradient_takes_heads(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """takes a step of its own in each memory, with any leading dimensions"""
    step_takes_heads(answer, reference, generator)


def _ascends(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This moves up the gradient. The loss falls in the direction of minus the
    gradient.
    """
    return gradient_step(W, k, v, -beta)


def _without_half(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the gradient of |W k - v|², which is twice as large. The loss has
    a factor ½.
    """
    return gradient_step(W, k, v, 2 * beta)


def _half_twice(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This has the factor ½ once too often: the 2 of the derivative of a square
    cancels it.
    """
    return gradient_step(W, k, v, beta / 2)


def _mean_squared(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the gradient of mse_loss: a mean over the values, without the ½.
    The loss here is a sum.
    """
    return gradient_step(W, k, v, 2 * beta / v.shape[-1])


def _half_mean(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The loss here is a mean over the values. It should be their sum."""
    return gradient_step(W, k, v, beta / v.shape[-1])


def _without_square(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the gradient of |W k - v|, without the square, so its length does
    not depend on the error.
    """
    return gradient_step(W, k, v, beta / (read(W, k) - v).norm(dim=-1))


def _to_the_bottom(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This divides by |k|², as a Newton step does. A gradient step moves by beta
    times the gradient.
    """
    return gradient_step(W, k, v, beta / (k * k).sum(-1))


def _unit_gradient(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This divides the gradient by its length, so that it always moves by beta."""
    length = (read(W, k) - v).norm(dim=-1) * k.norm(dim=-1)
    return gradient_step(W, k, v, beta / length)


# --- gated_step -----------------------------------------------------


def gated_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Let the whole memory fade to make room for one pair (Eq. 52)."""
    return write((1 - beta[..., None, None]) * W, k, beta[..., None] * v)


def _gated_stores(answer: Answer, reference: Answer, generator: Generator) -> None:
    """in an empty memory, stores beta times the value"""
    v, k = normal(generator, 3), orthonormal(generator, 4)[0]
    empty = torch.zeros(3, 4, dtype=torch.float64)
    for beta in (0.25, 0.5, 1.0):
        written = ask(answer, empty, W=empty, k=k, v=v, beta=strength(beta))
        compare(read(written, k), beta * v, f"beta was {beta}.")


def _gated_fades_others(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """fades the values of all other keys by 1 - beta"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    keys = orthonormal(generator, 4)
    written = ask(answer, W, W=W, k=keys[0], v=v, beta=strength(0.75))
    for key in keys[1:]:
        compare(
            read(written, key),
            0.25 * read(W, key),
            "With beta = 0.75, a key orthogonal to k should keep a quarter of its "
            "value.",
        )


def _gated_any_length(answer: Answer, reference: Answer, generator: Generator) -> None:
    """follows Eq. 52 for keys of any length"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    for length in (0.5, 3.0):
        k = length * orthonormal(generator, 4)[0]
        compare(
            ask(answer, W, W=W, k=k, v=v, beta=strength(0.5)),
            reference(W, k, v, strength(0.5)),
            f"The key had length {length:g}; Eq. 52 does not normalise it.",
        )


def _fades_nothing(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This fades nothing: it adds beta v ⊗ k, and W stays as it is."""
    return write(W, k, beta[..., None] * v)


def _fades_this_key(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the delta rule: only what this key holds fades. Eq. 52 fades all
    of W.
    """
    return delta_step(W, k, v, beta)


def _whole_value(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This writes all of v. In Eq. 52 the new value is multiplied by beta, too."""
    return write((1 - beta[..., None, None]) * W, k, v)


def _the_other_way(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Here beta and 1 - beta have changed places: beta is the strength of the
    write.
    """
    return gated_step(W, k, v, 1 - beta)


def _grows(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The sign is wrong: W is multiplied by 1 + beta, so it grows."""
    return write((1 + beta[..., None, None]) * W, k, beta[..., None] * v)


def _fades_and_corrects(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This fades W and corrects it as well, as the gated delta rule does. Eq. 52
    does not read before it writes.
    """
    return delta_step((1 - beta[..., None, None]) * W, k, v, beta)


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
                step_has_shape,
                _delta_replaces,
                _delta_keeps,
                step_mixes,
                _delta_spares_others,
                _delta_any_length,
                step_takes_heads,
                step_has_gradient,
            ),
            (
                "First ask the memory what the key holds now: Eq. 20.",
                "Then write the difference between the new and the old value, "
                "times beta, under the same key: Eq. 24.",
                'old = torch.einsum("...vk,...k->...v", W, k), and beta[..., None] '
                "broadcasts with values.",
            ),
            _delta_example,
            {
                _no_removal: _delta_replaces,
                _new_only: _delta_replaces,
                _beta_twice: step_mixes,
                _update_only: _delta_replaces,
                _wrong_sign: _delta_replaces,
                _always_one: _delta_keeps,
                _fades: _delta_spares_others,
                _removes_all: _delta_keeps,
                _squashed: _delta_replaces,
                _unit_keys: _delta_any_length,
            },
        ),
        Exercise(
            "gradient_step",
            (
                "**A gradient step.** Return the memory after one step of gradient "
                "descent on $\\tfrac12 \\lvert W k - v \\rvert^2$ with learning "
                "rate `beta`, for the arguments of exercise 1. Derive the gradient "
                "by hand, or let autograd do it."
            ),
            (gradient_step, read),
            (
                step_has_shape,
                _gradient_stays,
                _gradient_descends,
                _gradient_follows,
                _gradient_takes_heads,
            ),
            (
                "Entry (i, j) of W occurs only in entry i of W k, with the factor "
                "k_j. What is the derivative of half a square?",
                "The gradient has the shape of W, and is an outer product of the "
                "error W k - v and the key.",
                "By autograd: W = W.detach().requires_grad_(), the loss summed over "
                "everything, then torch.autograd.grad(loss, W)[0].",
            ),
            _delta_example,
            {
                _ascends: _gradient_descends,
                _without_half: _gradient_follows,
                _half_twice: _gradient_follows,
                _mean_squared: _gradient_follows,
                _half_mean: _gradient_follows,
                _without_square: _gradient_stays,
                _to_the_bottom: _gradient_follows,
                _unit_gradient: _gradient_stays,
            },
        ),
        Exercise(
            "gated_step",
            (
                "**The gated step** (Eq. 52). Return the memory after one step of "
                "the gated rule, for the arguments of exercise 1."
            ),
            (gated_step, write),
            (
                step_has_shape,
                _gated_stores,
                step_mixes,
                _gated_fades_others,
                _gated_any_length,
                step_takes_heads,
                step_has_gradient,
            ),
            (
                "Eq. 52 has two terms: one is W, made smaller, and the other is "
                "what the sum rule adds, made smaller.",
                "Nothing is read: what the key held before plays no part.",
                "beta[..., None, None] broadcasts with W, and beta[..., None] with "
                "values.",
            ),
            _delta_example,
            {
                _fades_nothing: step_mixes,
                _fades_this_key: _gated_fades_others,
                _whole_value: _gated_stores,
                _the_other_way: _gated_stores,
                _grows: step_mixes,
                _fades_and_corrects: step_mixes,
            },
        ),
    )
}
