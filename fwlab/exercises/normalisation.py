"""Features that sum to 1."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, ask, compare, compare_gradients, normal
from fwlab.exercises.exercise import Exercise
from fwlab.feature_maps import divide, sum_normalize, unit_range

# --- sum_normalize --------------------------------------------------


def _sum_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of x"""
    for shape in ((4,), (3, 5), (2, 3, 4, 6)):
        x = normal(generator, *shape).abs()
        ask(answer, x, x=x)


def _sum_is_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """makes the features of each key sum to one"""
    for shape in ((4,), (3, 5), (2, 3, 4, 6)):
        x = normal(generator, *shape).abs()
        total = ask(answer, x, x=x).sum(-1)
        compare(
            total,
            torch.ones_like(total),
            "These are sums over the last dimension. If they are almost right: "
            "is an epsilon added to the sum?",
        )


def _sum_keeps_ratios(answer: Answer, reference: Answer, generator: Generator) -> None:
    """keeps the ratios of the features"""
    x = normal(generator, 3, 5).abs() + 0.1
    found = ask(answer, x, x=x)
    compare(
        found / found[:, :1],
        x / x[:, :1],
        "These are the features of a key, divided by its first feature.",
    )


def _sum_ignores_scale(answer: Answer, reference: Answer, generator: Generator) -> None:
    """does not depend on the scale of the key"""
    x = normal(generator, 4, 6).abs()
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
    x = normal(generator, 6, 4).abs()
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
    return {"x": normal(generator, 3, 5).abs()}


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


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
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
    )
}
