"""Normalisation."""

import torch

from fwlab.exercises.answers import (
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
    orthonormal,
)
from fwlab.exercises.course.delta_rule import (
    at_key,
    delta_step,
    elsewhere,
    step,
)
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly
from fwlab.feature_maps import l2_normalize
from fwlab.ops.linear.sum import read, write

# --- stable_beta ----------------------------------------------------


def _features(generator, *size):
    return {"phi": normal(generator, *(size or (3, 5))).abs()}


def _at_the_edge(answer, reference, generator):
    for length in (0.5, 3.0):
        phi = length * orthonormal(generator, 4)[0]
        beta = ask(answer, phi[0], phi=phi).item()
        factor = 1 - beta * length**2
        if not abs(factor + 1) < 1e-8:
            raise Wrong(
                f"The key had length {length:g}. With your beta, {beta:.4g}, each write "
                f"multiplies the error by {round(factor, 9):.9g}; at the edge it is -1."
            )


def _by_key(answer, reference, generator):
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


def _of_zeros(answer, reference, generator):
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


@exercise(_features, difficulty=2, importance=4, minutes=5)
def stable_beta(phi):
    """
    **The largest stable beta.** For features `phi` `[..., key]`, return `[...]`: for
    each key, the largest write strength with which the error along this key does not
    grow, however often it is written. For a key of zeros, it is infinite.

    ✓ returns one number for each key
        shape((4,), (3, 5), (2, 3, 4, 6))
    ✓ gives 2 for keys of length 1
        agrees(3, 4, draw=lambda g, count: {"phi": orthonormal(g, count)})
        == 0 * phi[:, 0] + 2
    ! The error along a key of length 1 is multiplied by 1 - beta with each write. Down
      to which factor does it not grow?
    ✗ This is the beta with which the error is gone after one write. Up to twice as
      much, it still does not grow.
        return 2 -> return 1
    ✗ This divides by the sum of the features. The factor along the key has the sum of
      their squares.
        (phi * phi) -> phi
    ✗ This squares the sum of the features. The sum of their squares counts.
        (phi * phi).sum(-1) -> phi.sum(-1).square()
    ✗ This stops at 1. The sigmoid of Eq. 21 does, but the step itself is stable beyond.
        2 / (phi * phi).sum(-1) -> (2 / (phi * phi).sum(-1)).clamp(max=1)
    ✗ An epsilon is added to the squared length. Without it, a key of zeros has an
      infinite beta already.
        (phi * phi).sum(-1) -> ((phi * phi).sum(-1) + 1e-6)
    ✓ lies where repeated writes begin to blow up
        _at_the_edge
    ✗ This divides by the length of the key. The factor has its square: the key is in
      the write and in the reading.
        (phi * phi).sum(-1) -> phi.norm(dim=-1)
    ✗ An epsilon is added to the squared length. Without it, a key of zeros has an
      infinite beta already.
        (phi * phi).sum(-1) -> ((phi * phi).sum(-1) + 1e-8)
    ✓ gives each key its own, whatever the sizes and signs of its features
        _by_key
    ✗ This is one beta for all keys. Each key has a limit of its own.
        .sum(-1) -> .sum(-1).amax().expand(phi.shape[:-1])
    ✗ A limit is set to the squared length. It gives short keys a beta that is too
      small.
        .sum(-1) -> .sum(-1).clamp(min=1e-8)
        .sum(-1) -> .sum(-1).clamp(min=1e-12)
    ✓ is infinite for a key of zeros
        _of_zeros
    ? With each write, the error is multiplied by 1 - beta |phi|². Which factors make it
      grow?
    ? It grows if the factor is below -1. Solve 1 - beta |phi|² = -1.
    ? In PyTorch, a number divided by 0 is infinite already. Sum over the last dimension
      only.
    """
    # The factor 1 - beta |phi|² may fall to -1. And 2 / 0 is infinite.
    return 2 / (phi * phi).sum(-1)


# --- sum_normalize --------------------------------------------------


def _keys(generator, *size):
    return {"x": normal(generator, *(size or (3, 5))).abs()}


#: Keys with features of either sign.
SIGNS = torch.tensor([[3.0, -1.0], [-2.0, -2.0], [1.0, -0.9990234375]]).double()
#: Sizes of six keys.
SCALES = torch.tensor([1, 1e-30, 1, 1e30, 1, 0]).double()


def _scaled(generator, scale):
    return {"x": scale * _keys(generator)["x"]}


def _sum_of_nothing(answer, reference, generator):
    x = torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.0, 0.0], [1.0, -3.0, 2.0]]).double()
    compare(
        ask(answer, x, x=x),
        reference(x),
        "The second key was all zeros, and the third was (1, -3, 2): both sums are 0.",
    )
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, x=x)


@exercise(_keys, difficulty=3, importance=4, minutes=9)
def sum_normalize(x):
    """
    **Sum normalisation** (Eq. 29). Divide the features of each key, the last dimension
    of `x`, by their sum. A key whose sum is 0 gives 0, with gradient 0; no epsilon.

    ✓ returns a tensor of the shape of x
        shape((4,), (3, 5), (2, 3, 4, 6))
    ✓ makes the features of each key sum to one
        agrees((4,), (3, 5), (2, 3, 4, 6), of=lambda y, x: y.sum(-1))
        == torch.ones_like(x[..., 0])
    ! These are sums over the last dimension. If they are almost right: is an epsilon
      added to the sum?
    ✗ This divides by the sum over all keys together. Each key has its own.
        x.sum(-1, keepdim=True) -> x.sum()
    ✗ This divides by the Euclidean length (l2_normalize), not by the sum.
        x.sum(-1, keepdim=True) -> x.norm(dim=-1, keepdim=True)
    ✗ This divides by the largest feature, not by the sum.
        x.sum -> x.amax
    ✗ An epsilon is added to the sum. Small keys then sum to less than one, and a small
      negative sum may even become 0.
        keepdim=True) -> keepdim=True) + 1e-5
        keepdim=True) -> keepdim=True) + 1e-6
    ✓ keeps the ratios of the features
        agrees(x=lambda x: x + 0.1, of=lambda y, x: y / y[:, :1])
        == x / x[:, :1]
    ! These are the features of a key, divided by its first feature.
    ✗ This is a softmax: it takes exp of the features first. They only need a division.
        x=x.exp()
    ✓ does not depend on the scale of the key
        agrees(1e-9, 1e9, 1e-300, 1e300, draw=_scaled)
        == x / x.sum(-1, keepdim=True)
    ! All features were multiplied by {scale:g}. Is an epsilon added to the sum, or is a
      small sum taken for 0?
    ✗ An epsilon is added to the sum. Small keys then sum to less than one, and a small
      negative sum may even become 0.
        keepdim=True) -> keepdim=True) + 1e-8
        keepdim=True) -> keepdim=True) + 1e-9
        keepdim=True) -> keepdim=True) + 1e-10
        keepdim=True) -> keepdim=True) + 1e-12
    ✗ A small sum is raised to a limit, or taken for 0. Every sum but 0 divides as it
      is, negative ones too.
        keepdim=True) -> keepdim=True).clamp(min=1e-6)
        keepdim=True) -> keepdim=True).clamp(min=1e-12)
        total == 0, 1 -> total.abs() < 1e-8, 1 ; total == 0, 0 -> total.abs() < 1e-8, 0
        total == 0, 1 -> total.abs() < 1e-12, 1 ; total == 0, 0 -> total.abs() < 1e-12, 0
    ✓ takes features of either sign
        agrees(SIGNS, draw=exactly("x"))
        == x / x.sum(-1, keepdim=True)
    ! The features were [[3.0, -1.0], [-2.0, -2.0], [1.0, -0.9990234375]].
    ✗ This divides by the sum of absolute values. Eq. 29 takes the plain sum, which can
      be negative.
        x.sum -> x.abs().sum
    ✗ This takes a negative sum for 0. It divides as any other number does; only a sum
      of exactly 0 gives 0.
        keepdim=True) -> keepdim=True).clamp(min=0)
    ✓ gives zero where the sum is zero, and a gradient of zero
        _sum_of_nothing
    ✗ This spares keys of zeros only. The features 1 and -1 have the sum 0, too.
        total == 0, 1 -> zero, 1 ; total == 0, 0 -> zero, 0
          ; # Divide -> zero = (x == 0).all(-1, keepdim=True)  # Divide
    ✗ This divides by 1 where the sum is 0, so that such a key keeps its features. It
      has to give 0.
        torch.where(total == 0, 0, shares) -> shares
    ✗ This replaces only 0 / 0. In a key such as (1, -1), which has the sum 0, it is
      1 / 0.
        (x / x.sum(-1, keepdim=True)).nan_to_num()
    ✗ This is Eq. 29 as it stands, and 0 / 0 is NaN.
        x / x.sum(-1, keepdim=True)
    ✓ treats every key by itself, whatever the others are
        agrees((6, 4), x=lambda x: x * SCALES[:, None])
    ! The sums of these keys differ by 60 orders of magnitude, and one is 0.
    ? Eq. 29 divides each key by the sum of its own features: sum over the last
      dimension, and keep it.
    ? A key of zeros has sum 0. fwlab's rule is 0 / 0 = 0, without an epsilon:
      torch.where can choose.
    ? Choose before dividing as well as after: where the sum is 0, divide by 1 instead.
      A NaN that torch.where discards still reaches the gradient.
    """
    total = x.sum(-1, keepdim=True)
    # Divide by 1 where the sum is 0, so that no gradient is NaN.
    shares = x / torch.where(total == 0, 1, total)
    return torch.where(total == 0, 0, shares)


# --- l2_write -------------------------------------------------------


def _l2_of_nothing(answer, reference, generator):
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


def _l2_example(generator):
    beta = 0.2 + 0.6 * torch.rand((), generator=generator, dtype=torch.float64)
    W, v = normal(generator, 3, 4), normal(generator, 3)
    return {"W": W, "k": normal(generator, 4).abs(), "v": v, "beta": beta}


@exercise(step, example=_l2_example, difficulty=3, importance=3, minutes=11)
def l2_write(W, k, v, beta):
    """
    **A write that stores everything.** Return the memory after one step of the delta
    rule under the key `k` scaled to length 1, so that reading with that key returns `v`
    at `beta` = 1; for `W` `[..., value, key]`, `k` `[..., key]`, `v` `[..., value]` and
    `beta` `[...]`. A key of zeros changes nothing, with gradient 0; no epsilon.

    ✓ returns a tensor of the shape of W
        shape((None, None, 3, 5), (None, None, 4, 2), (None, None, 1, 1))
    ✓ with beta = 1, stores all of v, whatever the length of the key
        agrees((1.0, 1.0), (1.0, 0.1), (1.0, 7.0), of=at_key)
        == v
    ! The key had length {length:g}. Read with the key of length 1, the memory should
      return v.
    ✗ Here the features of the key sum to 1 (Eq. 29). For reading to return v, their
      squares have to.
        torch.where(nothing, 0, unit) -> sum_normalize(k)
    ✗ This is the plain delta step: the key keeps its length.
        torch.where(nothing, 0, unit) -> k
    ✗ This divides the key by its squared length, so it has length 1 only if it had
      before.
        .sqrt() ->
    ✗ This reads the old value with the key as it came. Reading and writing need the
      same key of length 1.
        write(W, l2_normalize(k), beta[..., None] * (v - read(W, k)))
    ✗ This writes under the key as it came. Reading and writing need the same key of
      length 1.
        write(W, k, beta[..., None] * (v - read(W, l2_normalize(k))))
    ✗ This divides beta by |k|²: then reading with k returns v, but reading with the key
      of length 1 does not.
        delta_step(W, k, v, beta / k.square().sum(-1))
    ✗ An epsilon is added to the length: the key is a little too short.
        torch.where(nothing, 1, squares).sqrt() -> (squares.sqrt() + 1e-6)
        torch.where(nothing, 1, squares).sqrt() -> (squares.sqrt() + 1e-8)
        torch.where(nothing, 1, squares).sqrt() -> (squares + 1e-8).sqrt()
    ✗ This only adds: what the key held before is not removed.
        write(W, l2_normalize(k), beta[..., None] * v)
    ✓ with a smaller beta, mixes the old value and the new one
        agrees((0.0, 3.0), (0.25, 3.0), (0.5, 3.0), (1.0, 3.0), of=at_key)
        == (1 - beta) * at_key(W, W, k) + beta * v
    ! With beta = {beta}, the key should hold (1 - beta) old + beta new.
    ✓ leaves the values of orthogonal keys alone
        agrees((0.7, 3.0), of=elsewhere)
        == elsewhere(W, W, k)
    ! This key was orthogonal to k.
    ✓ does not depend on the scale of the key
        agrees((0.5, 1e-100), (0.5, 1e-9), (0.5, 1e9), (0.5, 1e100))
        == delta_step(W, k / k.norm(), v, beta)
    ! The key was multiplied by {length:g}. Is an epsilon added to its length?
    ✗ F.normalize raises a length below 1e-12 to it, so that shorter keys stay short.
        torch.where(nothing, 0, unit) -> torch.nn.functional.normalize(k, dim=-1)
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
        == delta_step(W, l2_normalize(k), v, beta)
    ! The leading dimensions were {lead}.
    ✗ This divides by the length of all keys together. Each key has its own.
        .sum(-1, keepdim=True) -> .sum()
    ✓ changes nothing for a key of zeros, and has gradients without NaN
        _l2_of_nothing
    ✗ A key of zeros is divided by its length here, and 0 / 0 is NaN.
        torch.where(nothing, 1, squares) -> squares ; torch.where(nothing, 0, unit) -> unit
    ? Divide the key by its Euclidean length: the square root of the sum of its squares.
      Then it is the delta step of notebook 4.
    ? Use the key of length 1 twice: to read what is there, and to write.
    ? Choose twice with torch.where. Before the root: where the sum of squares is 0, put
      1, since the root of 0 has an infinite derivative. After the division: there, put
      0 for the key.
    """
    squares = (k * k).sum(-1, keepdim=True)
    nothing = squares == 0
    unit = k / torch.where(nothing, 1, squares).sqrt()
    return delta_step(W, torch.where(nothing, 0, unit), v, beta)
