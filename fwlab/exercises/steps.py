"""What the exercises that write one step of a memory share: `(W, k, v, beta)`."""

from functools import partial

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import normal
from fwlab.exercises.exercise import Catches, Property
from fwlab.exercises.properties import agrees, gradient, shape, takes_heads
from fwlab.feature_maps import l2_normalize
from fwlab.ops.linear.sum import read


def step(
    generator: Generator,
    beta: float | None = None,
    length: float | None = None,
    value: int = 3,
    key: int = 4,
    lead: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """Draw the arguments of a step.

    - `beta`: None = each memory its own, from 0.2 to 0.8.
    - `length`: that of the key; None = as it is drawn.
    """
    strength = 0.2 + 0.6 * torch.rand(lead, generator=generator, dtype=torch.float64)
    W, k = normal(generator, *lead, value, key), normal(generator, *lead, key)
    return {
        "W": W,
        "k": k if length is None else length * l2_normalize(k),
        "v": normal(generator, *lead, value),
        "beta": strength if beta is None else torch.full_like(strength, beta),
    }


def at_key(new: Tensor, W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """What the new memory returns for the key, scaled to length 1."""
    return read(new, l2_normalize(k))


def elsewhere(new: Tensor, W: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
    """What the new memory holds under keys that are orthogonal to this key."""
    unit = l2_normalize(k)
    return new - torch.outer(read(new, unit), unit)


step_has_shape = partial(
    shape,
    "returns a tensor of the shape of W",
    step,
    [(None, None, 3, 5), (None, None, 4, 2), (None, None, 1, 1)],
)
step_takes_heads = partial(takes_heads, step, [(2,), (2, 3), (4, 4)])
step_has_gradient = partial(
    gradient, "lets gradients through to W, k, v and beta", step, {"lead": (2,)}
)


def step_mixes(
    length: float = 1.0,
    says: str = "with beta between 0 and 1, mixes the old value and the new one",
    catches: Catches | None = None,
) -> Property:
    """The key holds a mixture of values, for keys of this length."""
    return agrees(
        says,
        step,
        [(beta, length) for beta in (0.0, 0.25, 0.5, 1.0)],
        of=at_key,
        expected=lambda W, k, v, beta: (1 - beta) * read(W, l2_normalize(k)) + beta * v,
        because="With beta = {beta}, the key should hold (1 - beta) old + beta new.",
        catches=catches,
    )
