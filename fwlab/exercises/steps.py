"""What the exercises that write one step of a memory share: `(W, k, v, beta)`."""

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
from fwlab.ops.additive.rules.sum import read


def strength(number: float) -> Tensor:
    """A beta for one memory, of shape `[]`."""
    return torch.tensor(number, dtype=torch.float64)


def step_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of W"""
    for value, key in ((3, 5), (4, 2), (1, 1)):
        W, beta = normal(generator, value, key), torch.rand((), generator=generator)
        k, v = normal(generator, key), normal(generator, value)
        ask(answer, W, W=W, k=k, v=v, beta=beta.double())


def step_mixes(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta between 0 and 1, mixes the old value and the new one"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    k = orthonormal(generator, 4)[0]
    for beta in (0.0, 0.25, 0.5, 1.0):
        written = ask(answer, W, W=W, k=k, v=v, beta=strength(beta))
        compare(
            read(written, k),
            (1 - beta) * read(W, k) + beta * v,
            f"With beta = {beta}, the key should hold (1 - beta) old + beta new.",
        )


def step_takes_heads(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works on any leading dimensions, such as [batch, heads]"""
    for lead in ((2,), (2, 3), (4, 4)):
        W = normal(generator, *lead, 4, 5)
        k, v = normal(generator, *lead, 5), normal(generator, *lead, 4)
        beta = torch.rand(lead, generator=generator, dtype=torch.float64)
        expected = reference(W, k, v, beta)
        found = ask(answer, expected, W=W, k=k, v=v, beta=beta)
        compare(found, expected, f"The leading dimensions were {list(lead)}.")


def step_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to W, k, v and beta"""
    given = {
        "W": normal(generator, 2, 3, 4),
        "k": normal(generator, 2, 4),
        "v": normal(generator, 2, 3),
        "beta": torch.rand(2, generator=generator, dtype=torch.float64),
    }
    compare_gradients(answer, reference, generator, CUT, **given)
