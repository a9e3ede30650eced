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
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, exactly, shape
from fwlab.exercises.solutions import l2_write, stable_beta
from fwlab.exercises.steps import (
    at_key,
    elsewhere,
    step,
    step_has_shape,
    step_mixes,
    step_takes_heads,
)
from fwlab.feature_maps import sum_normalize
from fwlab.ops.delta.delta import correct, delta_step, read
from fwlab.ops.linear.sum import write

# --- stable_beta ----------------------------------------------------


def _features(generator: Generator, *size: int) -> dict[str, Tensor]:
    return {"phi": normal(generator, *(size or (3, 5))).abs()}


def _at_the_edge(answer: Answer, reference: Answer, generator: Generator) -> None:
    for length in (0.5, 3.0):
        phi = length * orthonormal(generator, 4)[0]
        beta = ask(answer, phi[0], phi=phi).item()
        factor = 1 - beta * length**2
        if not abs(factor + 1) < 1e-8:
            raise Wrong(
                f"The key had length {length:g}. With your beta, {beta:.4g}, each "
                f"write multiplies the error by {factor:.4g}; at the edge it is -1."
            )


def _by_key(answer: Answer, reference: Answer, generator: Generator) -> None:
    for lead, key in (((6,), 4), ((2, 3), 5)):
        phi = normal(generator, *lead, key)
        for scale in (1e-50, 1.0, 1e50):
            size = scale * torch.tensor([1e-3, 1.0, 1e3]).double()
            size = size.repeat(lead[-1] // 3)
            beta = ask(answer, phi[..., 0], phi=phi * size[:, None])
            compare(
                beta * size**2,
                reference(phi),
                f"The keys had different lengths, around {scale:g}. These are your "
                "numbers times the squares of these lengths.",
            )


def _of_zeros(answer: Answer, reference: Answer, generator: Generator) -> None:
    phi = normal(generator, 4, 3)
    phi[1] = 0
    beta = ask(answer, phi[:, 0], phi=phi)
    if beta[1] != torch.inf:
        raise Wrong(
            f"A key of zeros got {beta[1].item():g}. It changes nothing, so that no "
            "beta blows up."
        )
    rest = torch.arange(4) != 1
    compare(beta[rest], reference(phi)[rest], "These keys stood beside one of zeros.")


STABLE_BETA = Exercise(
    name="stable_beta",
    notebook="05_normalisation",
    difficulty=2,
    importance=4,
    minutes=5,
    task="**The largest stable beta.** For features `phi` `[..., key]`, return "
    "`[...]`: for each key, the largest write strength with which the "
    "error along this key does not grow, however often it is written. "
    "For a key of zeros, it is infinite.",
    reference=stable_beta,
    properties=(
        shape(
            "returns one number for each key", _features, [(4,), (3, 5), (2, 3, 4, 6)]
        ),
        agrees(
            "gives 2 for keys of length 1",
            lambda g, count: {"phi": orthonormal(g, count)},
            [3, 4],
            expected=lambda phi: 0 * phi[:, 0] + 2,
            because="The error along a key of length 1 is multiplied by 1 - beta with "
            "each write. Down to which factor does it not grow?",
            catches={
                "This is the beta with which the error is gone after one write. Up to "
                "twice as much, it still does not grow.": lambda phi: (
                    1 / phi.square().sum(-1)
                ),
                "This divides by the sum of the features. The factor along the key has "
                "the sum of their squares.": lambda phi: 2 / phi.sum(-1),
                "This squares the sum of the features. The sum of their squares "
                "counts.": lambda phi: 2 / phi.sum(-1).square(),
                "This stops at 1. The sigmoid of Eq. 21 does, but the step itself is "
                "stable beyond.": lambda phi: (2 / phi.square().sum(-1)).clamp(max=1),
            },
        ),
        Property(
            "lies where repeated writes begin to blow up",
            _at_the_edge,
            {
                "This divides by the length of the key. The factor has its square: the "
                "key is in the write and in the reading.": lambda phi: (
                    2 / phi.norm(dim=-1)
                )
            },
        ),
        Property(
            "gives each key its own, whatever the sizes and signs of its features",
            _by_key,
            {
                "This is one beta for all keys. Each key has a limit "
                "of its own.": lambda phi: (
                    2 / phi.square().sum(-1).amax().expand_as(phi[..., 0])
                )
            },
        ),
        Property("is infinite for a key of zeros", _of_zeros),
    ),
    hints=(
        "With each write, the error is multiplied by 1 - beta |phi|². Which "
        "factors make it grow?",
        "It grows if the factor is below -1. Solve 1 - beta |phi|² = -1.",
        "In PyTorch, a number divided by 0 is infinite already. Sum over the "
        "last dimension only.",
    ),
    example=_features,
)


# --- sum_normalize --------------------------------------------------


def _keys(generator: Generator, *size: int) -> dict[str, Tensor]:
    return {"x": normal(generator, *(size or (3, 5))).abs()}


#: Keys with features of either sign.
SIGNS = torch.tensor([[3.0, -1.0], [-2.0, -2.0], [1.0, -0.9990234375]]).double()
#: Sizes of six keys.
SCALES = torch.tensor([1, 1e-30, 1, 1e30, 1, 0]).double()


def _sum_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    x = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [1.0, -3.0, 2.0]]).double()
    compare(
        ask(answer, x, x=x),
        reference(x),
        "The second key was all zeros, and the third was (1, -3, 2): both sums are 0.",
    )
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, x=x)


EPSILON = (
    "An epsilon is added to the sum. Small keys then sum to less than one, and a small "
    "negative sum may even become 0."
)


def _with_epsilon(epsilon: float) -> Answer:
    return lambda x: x / (x.sum(-1, keepdim=True) + epsilon)


def _at_least(epsilon: float) -> Answer:
    return lambda x: x / x.sum(-1, keepdim=True).clamp(min=epsilon)


def _only_zero_keys(x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    zero = (x == 0).all(-1, keepdim=True)
    return torch.where(zero, 0, x / torch.where(zero, 1, total))


def _only_positive_sums(x: Tensor) -> Tensor:
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / torch.where(total > 0, total, 1), 0)


SUM_NORMALIZE = Exercise(
    name="sum_normalize",
    notebook="05_normalisation",
    difficulty=3,
    importance=4,
    minutes=9,
    task="**Sum normalisation** (Eq. 29). Divide the features of each "
    "key, the last dimension of `x`, by their sum. A key whose sum "
    "is 0 gives 0, with gradient 0; no epsilon.",
    reference=sum_normalize,
    properties=(
        shape(
            "returns a tensor of the shape of x", _keys, [(4,), (3, 5), (2, 3, 4, 6)]
        ),
        agrees(
            "makes the features of each key sum to one",
            _keys,
            [(4,), (3, 5), (2, 3, 4, 6)],
            of=lambda y, x: y.sum(-1),
            expected=lambda x: torch.ones_like(x[..., 0]),
            because="These are sums over the last dimension. If they are almost right: "
            "is an epsilon added to the sum?",
            catches={
                "This divides by the sum over all keys together. Each key "
                "has its own.": lambda x: x / x.sum(),
                "This divides by the Euclidean length (l2_normalize), not "
                "by the sum.": lambda x: x / x.norm(dim=-1, keepdim=True),
                "This divides by the largest feature, not by the sum.": lambda x: (
                    x / x.amax(-1, keepdim=True)
                ),
                EPSILON: (_with_epsilon(1e-5), _with_epsilon(1e-6)),
            },
        ),
        agrees(
            "keeps the ratios of the features",
            _keys,
            change={"x": lambda x: x + 0.1},
            of=lambda y, x: y / y[:, :1],
            expected=lambda x: x / x[:, :1],
            because="These are the features of a key, divided by its first feature.",
            catches={
                "This is a softmax: it takes exp of the features first. They only need "
                "a division.": lambda x: torch.softmax(x, -1)
            },
        ),
        agrees(
            "does not depend on the scale of the key",
            lambda g, scale: {"x": scale * _keys(g)["x"]},
            [1e-9, 1e9, 1e-300, 1e300],
            because="All features were multiplied by {scale:g}. Is an epsilon added "
            "to the sum, or is a small sum taken for 0?",
            catches={
                EPSILON: (_with_epsilon(1e-8), _with_epsilon(1e-12)),
                "A small sum is raised to a limit, or taken for 0. Every sum but 0 "
                "divides as it is, negative ones too.": (
                    _at_least(1e-6),
                    _at_least(1e-12),
                ),
            },
        ),
        agrees(
            "takes features of either sign",
            exactly("x"),
            [SIGNS],
            because=f"The features were {SIGNS.tolist()}.",
            catches={
                "This divides by the sum of absolute values. Eq. 29 takes the plain "
                "sum, which can be negative.": lambda x: (
                    x / x.abs().sum(-1, keepdim=True)
                ),
                "This takes a negative sum for 0. It divides as any other number does; "
                "only a sum of exactly 0 gives 0.": _only_positive_sums,
            },
        ),
        Property(
            "gives zero where the sum is zero, and a gradient of zero",
            _sum_of_nothing,
            {
                "This spares keys of zeros only. The features 1 and -1 have the sum 0, "
                "too.": _only_zero_keys,
                "This is Eq. 29 as it stands, and 0 / 0 is NaN.": lambda x: (
                    x / x.sum(-1, keepdim=True)
                ),
            },
        ),
        agrees(
            "treats every key by itself, whatever the others are",
            _keys,
            [(6, 4)],
            change={"x": lambda x: x * SCALES[:, None]},
            because="The sums of these keys differ by 60 orders of magnitude, and one "
            "is 0.",
        ),
    ),
    hints=(
        "Eq. 29 divides each key by the sum of its own features: "
        "sum over the last dimension, and keep it.",
        "A key of zeros has sum 0. fwlab's rule is 0 / 0 = 0, without "
        "an epsilon: torch.where can choose.",
        "Choose before dividing as well as after: where the sum is 0, "
        "divide by 1 instead. A NaN that torch.where discards "
        "still reaches the gradient.",
    ),
    example=_keys,
)


# --- l2_write -------------------------------------------------------


def _l2_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs = step(generator, lead=(3,))
    inputs["k"][1] = 0
    expected = reference(*inputs.values())
    because = "The second of three keys was all zeros."
    compare(ask(answer, expected, **inputs), expected, because)
    because += (
        " It should have no gradient: neither that of a division by 1, nor a NaN that "
        "you replace only afterwards."
    )
    compare_gradients(answer, reference, generator, because, **inputs)


def _l2_example(generator: Generator) -> dict[str, Tensor]:
    beta = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
    W, v = normal(generator, 3, 4), normal(generator, 3)
    return {"W": W, "k": normal(generator, 4).abs(), "v": v, "beta": beta}


def _unit(k: Tensor) -> Tensor:
    return k / k.norm(dim=-1, keepdim=True)


L2_WRITE = Exercise(
    name="l2_write",
    notebook="05_normalisation",
    difficulty=3,
    importance=3,
    minutes=11,
    task="**A write that stores everything.** Return the memory after one "
    "step of the delta rule under the key `k` scaled to length 1, so "
    "that reading with that key returns `v` at `beta` = 1; for `W` "
    "`[..., value, key]`, `k` `[..., key]`, `v` `[..., value]` and "
    "`beta` `[...]`. A key of zeros changes nothing, with gradient 0; "
    "no epsilon.",
    reference=l2_write,
    properties=(
        step_has_shape(),
        agrees(
            "with beta = 1, stores all of v, whatever the length of the key",
            step,
            [(1.0, 1.0), (1.0, 0.1), (1.0, 7.0)],
            of=at_key,
            expected=lambda W, k, v, beta: v,
            because="The key had length {length:g}. Read with the key of length 1, the "
            "memory should return v.",
            catches={
                "Here the features of the key sum to 1 (Eq. 29). For reading to return "
                "v, their squares have to.": lambda W, k, v, beta: delta_step(
                    W, sum_normalize(k), v, beta
                ),
                "This is the plain delta step: the key "
                "keeps its length.": lambda W, k, v, beta: delta_step(W, k, v, beta),
                "This divides the key by its squared length, so it has length 1 only "
                "if it had before.": lambda W, k, v, beta: delta_step(
                    W, k / k.square().sum(-1, keepdim=True), v, beta
                ),
                "This reads the old value with the key as it came. Reading and writing "
                "need the same key of length 1.": lambda W, k, v, beta: correct(
                    W, _unit(k), v, read(W, k), beta
                ),
                "This writes under the key as it came. Reading and writing need the "
                "same key of length 1.": lambda W, k, v, beta: correct(
                    W, k, v, read(W, _unit(k)), beta
                ),
                "This divides beta by |k|²: then reading with k returns v, but reading "
                "with the key of length 1 does not.": lambda W, k, v, beta: delta_step(
                    W, k, v, beta / k.square().sum(-1)
                ),
                "This only adds: what the key held before "
                "is not removed.": lambda W, k, v, beta: write(
                    W, _unit(k), beta[..., None] * v
                ),
            },
        ),
        step_mixes(
            3.0, says="with a smaller beta, mixes the old value and the new one"
        ),
        agrees(
            "leaves the values of orthogonal keys alone",
            step,
            [(0.7, 3.0)],
            of=elsewhere,
            expected=lambda W, k, v, beta: elsewhere(W, W, k),
            because="This key was orthogonal to k.",
        ),
        agrees(
            "does not depend on the scale of the key",
            step,
            [(0.5, 1e-100), (0.5, 1e-9), (0.5, 1e9), (0.5, 1e100)],
            expected=lambda W, k, v, beta: delta_step(W, k / k.norm(), v, beta),
            because="The key was multiplied by {length:g}. Is an epsilon added to its "
            "length?",
        ),
        step_takes_heads(),
        Property(
            "changes nothing for a key of zeros, and has gradients without NaN",
            _l2_of_nothing,
            {
                "A key of zeros is divided by its length here, and 0 / "
                "0 is NaN.": lambda W, k, v, beta: delta_step(W, _unit(k), v, beta)
            },
        ),
    ),
    hints=(
        "Divide the key by its Euclidean length: the square root of the sum "
        "of its squares. Then it is the delta step of notebook 4.",
        "Use the key of length 1 twice: to read what is there, and to write.",
        "Choose twice with torch.where. Before the root: where the sum of "
        "squares is 0, put 1, since the root of 0 has an infinite "
        "derivative. After the division: there, put 0 for the key.",
    ),
    example=_l2_example,
)


EXERCISES = {each.name: each for each in (STABLE_BETA, SUM_NORMALIZE, L2_WRITE)}
