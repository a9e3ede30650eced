"""Features that keep the delta rule stable."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
    orthonormal,
)
from fwlab.exercises.exercise import Exercise
from fwlab.exercises.steps import step_has_shape, step_takes_heads, strength
from fwlab.feature_maps import divide, l2_normalize, sum_normalize, unit_range
from fwlab.ops.additive.rules.sum import write
from fwlab.ops.correcting.rules.delta import correct, delta_step, read

# --- stable_beta ----------------------------------------------------


def stable_beta(phi: Tensor) -> Tensor:
    """The factor 1 - beta |phi|² along the key must not fall below -1.

    - `phi`: `[..., key]`. Returns `[...]`; 2 / 0 is infinite.
    """
    return 2 / phi.square().sum(-1)


def _stable_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns one number for each key"""
    for shape in ((4,), (3, 5), (2, 3, 4, 6)):
        phi = normal(generator, *shape)
        ask(answer, phi[..., 0], phi=phi)


def _stable_of_unit_keys(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """gives 2 for keys of length 1"""
    for phi in (torch.eye(3, dtype=torch.float64), orthonormal(generator, 4)):
        found = ask(answer, phi[:, 0], phi=phi)
        compare(
            found,
            torch.full_like(found, 2),
            "The error along a key of length 1 is multiplied by 1 - beta with each "
            "write. Down to which factor does it not grow?",
        )


def _stable_at_the_edge(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lies where repeated writes begin to blow up"""
    for length in (0.5, 3.0):
        phi = length * orthonormal(generator, 4)[0]
        beta = ask(answer, phi[0], phi=phi).item()
        factor = 1 - beta * length**2
        if not abs(factor + 1) < 1e-8:
            raise Wrong(
                f"The key had length {length:g}. With your beta, {beta:.4g}, each "
                f"write multiplies the error by {factor:.4g}; at the edge it is -1."
            )


def _stable_by_key(answer: Answer, reference: Answer, generator: Generator) -> None:
    """gives each key its own, whatever the sizes and signs of its features"""
    for shape in ((6, 4), (2, 3, 5)):
        phi = normal(generator, *shape)
        for scale in (1e-50, 1.0, 1e50):
            size = scale * torch.tensor([1e-3, 1.0, 1e3]).double()
            size = size.repeat(shape[-2] // 3)
            found = ask(answer, phi[..., 0], phi=phi * size[:, None])
            compare(
                found * size**2,
                reference(phi),
                f"The keys had different lengths, around {scale:g}. These are your "
                "numbers times the squares of these lengths.",
            )


def _stable_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is infinite for a key of zeros"""
    phi = normal(generator, 4, 3)
    phi[1] = 0
    found = ask(answer, phi[:, 0], phi=phi)
    if found[1] != torch.inf:
        raise Wrong(
            f"A key of zeros got {found[1].item():g}. It changes nothing, so that no "
            "beta blows up."
        )
    rest = torch.arange(4) != 1
    compare(found[rest], reference(phi)[rest], "These keys stood beside one of zeros.")


def _features(generator: Generator) -> dict[str, Tensor]:
    return {"phi": normal(generator, 3, 5).abs()}


def _gone_at_once(phi: Tensor) -> Tensor:
    """This is the beta with which the error is gone after one write. Up to twice
    as much, it still does not grow.
    """
    return 1 / phi.square().sum(-1)


def _without_a_square(phi: Tensor) -> Tensor:
    """This divides by the length of the key. The factor has its square: the key
    is in the write and in the reading.
    """
    return 2 / phi.norm(dim=-1)


def _from_the_sum(phi: Tensor) -> Tensor:
    """This divides by the sum of the features. The factor along the key has the
    sum of their squares.
    """
    return 2 / phi.sum(-1)


def _from_the_squared_sum(phi: Tensor) -> Tensor:
    """This squares the sum of the features. The sum of their squares counts."""
    return 2 / phi.sum(-1).square()


def _one_for_all(phi: Tensor) -> Tensor:
    """This is one beta for all keys. Each key has a limit of its own."""
    beta = 2 / phi.square().sum(-1)
    return beta.amin().expand_as(beta)


def _at_most_one(phi: Tensor) -> Tensor:
    """This stops at 1. The sigmoid of Eq. 21 does, but the step itself is stable
    beyond.
    """
    return (2 / phi.square().sum(-1)).clamp(max=1)


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
    for scale in (1e-9, 1e9, 1e-100, 1e100):
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


def _with_epsilon(epsilon: float) -> Answer:
    def with_epsilon(x: Tensor) -> Tensor:
        """An epsilon is added to the sum. Small keys then sum to less than one, and
        a small negative sum may even become 0.
        """
        return x / (x.sum(-1, keepdim=True) + epsilon)

    return with_epsilon


def _at_least(epsilon: float) -> Answer:
    def at_least(x: Tensor) -> Tensor:
        """The sum is not let below a small number. That replaces smaller sums, and
        all negative ones.
        """
        return x / x.sum(-1, keepdim=True).clamp(min=epsilon)

    return at_least


def _only_zero_keys(x: Tensor) -> Tensor:
    """This spares keys of zeros only. The features 1 and -1 have the sum 0, too."""
    total = x.sum(-1, keepdim=True)
    zero = (x == 0).all(-1, keepdim=True)
    return torch.where(zero, 0, x / torch.where(zero, 1, total))


def _only_positive_sums(x: Tensor) -> Tensor:
    """This takes a negative sum for 0. It divides as any other number does; only a
    sum of exactly 0 gives 0.
    """
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / torch.where(total > 0, total, 1), 0)


def _undefined(x: Tensor) -> Tensor:
    """This is Eq. 29 as it stands, and 0 / 0 is NaN."""
    return x / x.sum(-1, keepdim=True)


# --- l2_write -------------------------------------------------------


def l2_write(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A step of the delta rule whose key has length 1."""
    return delta_step(W, l2_normalize(k), v, beta)


def _l2_stores_all(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with beta = 1, stores all of v, whatever the length of the key"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    unit = orthonormal(generator, 4)[0]
    for length in (1.0, 0.1, 7.0):
        written = ask(answer, W, W=W, k=length * unit, v=v, beta=strength(1.0))
        compare(
            read(written, unit),
            v,
            f"The key had length {length:g}. Read with the key of length 1, the "
            "memory should return v.",
        )


def _l2_mixes(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with a smaller beta, mixes the old value and the new one"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    unit = orthonormal(generator, 4)[0]
    for beta in (0.0, 0.25, 0.5):
        written = ask(answer, W, W=W, k=3 * unit, v=v, beta=strength(beta))
        compare(
            read(written, unit),
            (1 - beta) * read(W, unit) + beta * v,
            f"With beta = {beta}, the key should hold (1 - beta) old + beta new.",
        )


def _l2_spares_others(answer: Answer, reference: Answer, generator: Generator) -> None:
    """leaves the values of orthogonal keys alone"""
    W, v = normal(generator, 3, 4), normal(generator, 3)
    keys = orthonormal(generator, 4)
    written = ask(answer, W, W=W, k=3 * keys[0], v=v, beta=strength(0.7))
    for key in keys[1:]:
        compare(read(written, key), read(W, key), "This key was orthogonal to k.")


def _l2_ignores_scale(answer: Answer, reference: Answer, generator: Generator) -> None:
    """does not depend on the scale of the key"""
    W, k = normal(generator, 3, 4), normal(generator, 4)
    v = normal(generator, 3)
    for scale in (1e-100, 1e-9, 1e9, 1e100):
        compare(
            ask(answer, W, W=W, k=scale * k, v=v, beta=strength(0.5)),
            reference(W, k, v, strength(0.5)),
            f"The key was multiplied by {scale:g}. Is an epsilon added to its length?",
        )


def _l2_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """changes nothing for a key of zeros, and has gradients without NaN"""
    given = {
        "W": normal(generator, 3, 3, 4),
        "k": normal(generator, 3, 4),
        "v": normal(generator, 3, 3),
        "beta": torch.rand(3, generator=generator, dtype=torch.float64),
    }
    given["k"][1] = 0
    expected = reference(*given.values())
    because = "The second of three keys was all zeros."
    compare(ask(answer, expected, **given), expected, because)
    because += (
        " It should have no gradient: neither that of a division by 1, nor a NaN that "
        "you replace only afterwards."
    )
    compare_gradients(answer, reference, generator, because, **given)


def _l2_example(generator: Generator) -> dict[str, Tensor]:
    beta = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
    W, v = normal(generator, 3, 4), normal(generator, 3)
    return {"W": W, "k": normal(generator, 4).abs(), "v": v, "beta": beta}


def _unit(k: Tensor) -> Tensor:
    return k / k.norm(dim=-1, keepdim=True)


def _unit_sum(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Here the features of the key sum to 1 (Eq. 29). For reading to return v,
    their squares have to.
    """
    return delta_step(W, sum_normalize(k), v, beta)


def _any_length(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This is the plain delta step: the key keeps its length."""
    return delta_step(W, k, v, beta)


def _by_squared_length(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This divides the key by its squared length, so it has length 1 only if it
    had before.
    """
    return delta_step(W, k / k.square().sum(-1, keepdim=True), v, beta)


def _reads_without(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This reads the old value with the key as it came. Reading and writing need
    the same key of length 1.
    """
    return correct(W, _unit(k), v, read(W, k), beta)


def _writes_without(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This writes under the key as it came. Reading and writing need the same
    key of length 1.
    """
    return correct(W, k, v, read(W, _unit(k)), beta)


def _scales_beta(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This divides beta by |k|²: then reading with k returns v, but reading with
    the key of length 1 does not.
    """
    return delta_step(W, k, v, beta / k.square().sum(-1))


def _adds_unit(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """This only adds: what the key held before is not removed."""
    return write(W, _unit(k), beta[..., None] * v)


def _nothing_over_nothing(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A key of zeros is divided by its length here, and 0 / 0 is NaN."""
    return delta_step(W, _unit(k), v, beta)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "stable_beta",
            (
                "**The largest stable beta.** For features `phi` `[..., key]`, return "
                "`[...]`: for each key, the largest write strength with which the "
                "error along this key does not grow, however often it is written. "
                "For a key of zeros, it is infinite."
            ),
            (stable_beta,),
            (
                _stable_has_shape,
                _stable_of_unit_keys,
                _stable_at_the_edge,
                _stable_by_key,
                _stable_of_nothing,
            ),
            (
                "With each write, the error is multiplied by 1 - beta |phi|². Which "
                "factors make it grow?",
                "It grows if the factor is below -1. Solve 1 - beta |phi|² = -1.",
                "In PyTorch, a number divided by 0 is infinite already. Sum over the "
                "last dimension only.",
            ),
            _features,
            {
                _gone_at_once: _stable_of_unit_keys,
                _without_a_square: _stable_at_the_edge,
                _from_the_sum: _stable_of_unit_keys,
                _from_the_squared_sum: _stable_of_unit_keys,
                _one_for_all: _stable_by_key,
                _at_most_one: _stable_of_unit_keys,
            },
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
            {
                _over_everything: _sum_is_one,
                _by_length: _sum_is_one,
                _by_maximum: _sum_is_one,
                _by_softmax: _sum_keeps_ratios,
                _by_absolute_sum: _sum_takes_signs,
                _with_epsilon(1e-5): _sum_is_one,
                _with_epsilon(1e-6): _sum_is_one,
                _with_epsilon(1e-8): _sum_ignores_scale,
                _with_epsilon(1e-12): _sum_ignores_scale,
                _at_least(1e-6): _sum_ignores_scale,
                _at_least(1e-12): _sum_ignores_scale,
                _only_positive_sums: _sum_takes_signs,
                _only_zero_keys: _sum_of_nothing,
                _undefined: _sum_of_nothing,
            },
        ),
        Exercise(
            "l2_write",
            (
                "**A write that stores everything.** Return the memory after one "
                "step of the delta rule under the key `k` scaled to length 1, so "
                "that reading with that key returns `v` at `beta` = 1; for `W` "
                "`[..., value, key]`, `k` `[..., key]`, `v` `[..., value]` and "
                "`beta` `[...]`. A key of zeros changes nothing, with gradient 0; "
                "no epsilon."
            ),
            (l2_write, l2_normalize, delta_step),
            (
                step_has_shape,
                _l2_stores_all,
                _l2_mixes,
                _l2_spares_others,
                _l2_ignores_scale,
                step_takes_heads,
                _l2_of_nothing,
            ),
            (
                "Divide the key by its Euclidean length: the square root of the sum "
                "of its squares. Then it is the delta step of notebook 4.",
                "Use the key of length 1 twice: to read what is there, and to write.",
                "Choose twice with torch.where. Before the root: where the sum of "
                "squares is 0, put 1, since the root of 0 has an infinite "
                "derivative. After the division: there, put 0 for the key.",
            ),
            _l2_example,
            {
                _unit_sum: _l2_stores_all,
                _any_length: _l2_stores_all,
                _by_squared_length: _l2_stores_all,
                _reads_without: _l2_stores_all,
                _writes_without: _l2_stores_all,
                _scales_beta: _l2_stores_all,
                _adds_unit: _l2_stores_all,
                _nothing_over_nothing: _l2_of_nothing,
            },
        ),
    )
}
