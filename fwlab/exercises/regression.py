"""Writing as online regression: one step, a stable step, all steps."""

from functools import cache, partial
from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal, orthonormal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import Part, agrees, gradient, shape, takes_heads
from fwlab.exercises.solutions import (
    better_step,
    implicit_step,
    least_squares,
    recursive_least_squares,
)
from fwlab.exercises.steps import (
    at_key,
    elsewhere,
    step,
    step_has_gradient,
    step_has_shape,
    step_takes_heads,
)
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step
from fwlab.ops.linear.sum import read, write

# --- implicit_step --------------------------------------------------


def _square(k: Tensor) -> Tensor:
    return k.square().sum(-1)


def _minimises(answer: Answer, reference: Answer, generator: Generator) -> None:
    for beta, length in ((0.3, 2.0), (4.0, 0.7), (2.0, 1.5)):
        W, k, v, b = step(generator, beta, length).values()
        new = ask(answer, W, W=W, k=k, v=v, beta=b).detach().requires_grad_()
        cost = (new - W).square().sum() + b * (read(new, k) - v).square().sum()
        (slope,) = torch.autograd.grad(cost, new)
        compare(
            slope,
            torch.zeros_like(W),
            f"This is the gradient of what should be minimal, at your W'. beta was "
            f"{beta}, and the key had length {length}.",
        )


IMPLICIT_STEP = Exercise(
    name="implicit_step",
    notebook="17_regression",
    difficulty=2,
    importance=4,
    minutes=7,
    task="**The implicit step.** Return the memory $W'$ for which $\\lvert W' - W "
    "\\rvert^2 + \\beta\\, \\lvert W' k - v \\rvert^2$ is smallest, for `W` `[..., "
    "value, key]`, `k` `[..., key]`, `v` `[..., value]` and `beta` `[...]`, which may "
    "be above 1.",
    reference=implicit_step,
    properties=(
        step_has_shape(),
        agrees(
            "with beta = 1 and a key of length 1, goes half the way to v",
            step,
            [(1.0, 1.0)],
            of=at_key,
            expected=lambda W, k, v, beta: (read(W, k) + v) / 2,
            because="Half the way makes both squares equally large.",
            catches={
                "This is the delta rule: its step follows the gradient at the old W, "
                "not at the new one.": lambda W, k, v, beta: delta_step(W, k, v, beta),
                "One of the two terms counts twice here: either both have a factor ½, "
                "or none has.": (
                    lambda W, k, v, beta: delta_step(
                        W, k, v, beta / (2 + beta * _square(k))
                    ),
                    lambda W, k, v, beta: implicit_step(W, k, v, 2 * beta),
                ),
                "The sign is wrong: this moves away from v.": lambda W, k, v, beta: (
                    delta_step(W, k, v, -beta / (1 + beta * _square(k)))
                ),
                "This stays close to 0, and not to W: what other keys hold is "
                "lost.": lambda W, k, v, beta: implicit_step(0 * W, k, v, beta),
                "What the key held is not subtracted: this adds s v, where it should "
                "add s (v - W k).": lambda W, k, v, beta: write(
                    W, k, (beta / (1 + beta * _square(k)))[..., None] * v
                ),
            },
        ),
        agrees(
            "with beta = 0, changes nothing",
            step,
            [(0.0, 1.0), (0.0, 2.0)],
            expected=lambda W, k, v, beta: W,
            catches={
                "beta is only below the line. It also multiplies "
                "the step.": lambda W, k, v, beta: delta_step(
                    W, k, v, 1 / (1 + beta * _square(k))
                ),
                "This ignores beta.": lambda W, k, v, beta: delta_step(
                    W, k, v, 1 / (1 + _square(k))
                ),
            },
        ),
        agrees(
            "goes as far as the length of the key asks for",
            step,
            [(1.0, 3.0), (1.0, 0.5)],
            of=lambda new, W, k, v, beta: read(new, k),
            because="beta was 1, and the key had length {length:g}. This is what the "
            "new memory returns for it.",
            catches={
                "This forgets the length of the key: |k|² comes with beta in the "
                "denominator.": lambda W, k, v, beta: delta_step(
                    W, k, v, beta / (1 + beta)
                ),
                "This has the length of the key where its square "
                "belongs.": lambda W, k, v, beta: delta_step(
                    W, k, v, beta / (1 + beta * k.norm(dim=-1))
                ),
            },
        ),
        agrees(
            "leaves the values of orthogonal keys alone",
            step,
            [(0.7, 1.0), (3.0, 2.0)],
            of=elsewhere,
            expected=lambda W, k, v, beta: elsewhere(W, W, k),
            because="A key orthogonal to k lost part of its value.",
        ),
        Property(
            "minimises |W' - W|² + beta |W' k - v|²",
            _minimises,
            {
                "beta is missing in the denominator: it multiplies |k|² "
                "there.": lambda W, k, v, beta: delta_step(
                    W, k, v, beta / (1 + _square(k))
                ),
            },
        ),
        agrees(
            "never goes beyond v, however long the key and large beta",
            step,
            [(1e3, 10.0), (1e6, 1.0), (1.0, 1e3)],
            of=lambda new, W, k, v, beta: read(new, k),
            because="beta was {beta:g}, and the key had length {length:g}.",
        ),
        step_takes_heads(),
        step_has_gradient(),
    ),
    hints=(
        "Where the sum is smallest, its gradient is 0: W' - W + beta (W' k - v) k^T = "
        "0. W' is on both sides.",
        "Multiply this equation by k. The new error W' k - v is the old one, divided "
        "by 1 + beta |k|².",
        "It is a delta step with strength beta / (1 + beta |k|²); |k|² is "
        "(k * k).sum(-1).",
    ),
    example=step,
)


# --- least_squares --------------------------------------------------


def _pairs(
    generator: Generator,
    pairs: int = 6,
    key: int = 4,
    value: int = 3,
    ridge: float = 0.5,
    lead: tuple[int, ...] = (),
) -> dict[str, Any]:
    k, v = normal(generator, *lead, pairs, key), normal(generator, *lead, pairs, value)
    return {"k": k, "v": v, "ridge": ridge}


def _orthonormal(generator: Generator, ridge: float) -> dict[str, Any]:
    inputs = _pairs(generator, 4, 4, 3, ridge)
    return inputs | {"k": orthonormal(generator, 4)}


def _returned(W: Tensor, k: Tensor, *rest: Any) -> Tensor:
    """What the memory returns for all keys."""
    return k @ W.mT


def _solved(k: Tensor, v: Tensor, add: Tensor) -> Tensor:
    """Least squares with any matrix added to the sum of k k^T."""
    return (torch.linalg.pinv(k.mT @ k + add) @ k.mT @ v).mT


def _eye(k: Tensor) -> Tensor:
    return torch.eye(k.shape[-1], dtype=k.dtype)


def _only_diagonal(k: Tensor, v: Tensor, ridge: float) -> Tensor:
    return v.mT @ (k / (k.square().sum(-2, keepdim=True) + ridge))


def _one_by_one(k: Tensor, v: Tensor, ridge: float) -> Tensor:
    W = torch.zeros_like(v[..., :1, :].mT @ k[..., :1, :])
    for j in range(k.shape[-2]):
        k_j, v_j = k[..., j, :], v[..., j, :]
        W = implicit_step(W, k_j, v_j, k.new_full(k.shape[:-2], 1 / ridge))
    return W


def _has_no_slope(answer: Answer, reference: Answer, generator: Generator) -> None:
    for pairs, key, value, ridge in ((6, 4, 3, 0.5), (9, 2, 5, 2.0), (3, 3, 3, 1.0)):
        k, v, _ = _pairs(generator, pairs, key, value).values()
        W = ask(answer, reference(k, v, ridge), k=k, v=v, ridge=ridge)
        W = W.detach().requires_grad_()
        cost = (k @ W.mT - v).square().sum() + ridge * W.square().sum()
        (slope,) = torch.autograd.grad(cost, W)
        compare(
            slope,
            torch.zeros_like(W),
            "This is the gradient of what should be minimal, at your W. There were "
            f"{pairs} pairs under keys of width {key}, and the ridge was {ridge}.",
        )


LEAST_SQUARES = Exercise(
    name="least_squares",
    notebook="17_regression",
    difficulty=2,
    importance=4,
    minutes=8,
    task="**All pairs at once.** For keys `k` `[..., pairs, key]`, values `v` `[..., "
    "pairs, value]` and a number `ridge` above 0, return the memory $W$ `[..., value, "
    "key]` for which $\\sum_j \\lvert W k_j - v_j \\rvert^2 + \\text{ridge}\\, \\lvert "
    "W \\rvert^2$ is smallest.",
    reference=least_squares,
    properties=(
        shape(
            "returns one memory, [value, key]",
            _pairs,
            [(6, 4, 3), (2, 4, 5), (1, 1, 2)],
        ),
        agrees(
            "divides the values of orthonormal keys by 1 + ridge",
            _orthonormal,
            [0.5, 1.0, 3.0],
            of=_returned,
            expected=lambda k, v, ridge: v / (1 + ridge),
            because="The ridge was {ridge}, and these are the values that your memory "
            "returns. Each costs |W k_j - v_j|² + ridge |W k_j|².",
            catches={
                "This forgets the ridge. It keeps W small, and makes it unique when "
                "there are few pairs.": (
                    lambda k, v, ridge: (torch.linalg.pinv(k) @ v).mT,
                    lambda k, v, ridge: _solved(k, v, 1e-6 * _eye(k)),
                ),
                "This is the sum rule, the sum of v_j k_j^T: it takes keys to be "
                "orthonormal, and has no ridge.": lambda k, v, ridge: v.mT @ k,
                "The ridge is multiplied by the number of pairs: here errors are summed "
                "over pairs, not averaged.": lambda k, v, ridge: least_squares(
                    k, v, ridge * k.shape[-2]
                ),
                "The ridge is added to all entries of the sum of k k^T. It belongs on "
                "the diagonal.": lambda k, v, ridge: _solved(
                    k, v, torch.full_like(_eye(k), ridge)
                ),
                "The ridge is squared here.": lambda k, v, ridge: least_squares(
                    k, v, ridge**2
                ),
            },
        ),
        Property(
            "minimises the squared errors and the ridge",
            _has_no_slope,
            {
                "This uses only the diagonal of the sum of k k^T, so it ignores how "
                "keys overlap.": _only_diagonal,
                "This takes one implicit step for each pair. Later steps then disturb "
                "earlier pairs.": _one_by_one,
            },
        ),
        agrees(
            "with fewer pairs than the key is wide, and a small ridge, returns them",
            _pairs,
            [(3, 8, 2, 1e-4), (1, 6, 3, 1e-3), (1, 1, 1, 1e-6)],
            because="There were {pairs} pairs under keys of width {key}, and the ridge "
            "was {ridge:g}.",
        ),
        takes_heads(_pairs, [(2,), (2, 3), (6, 6)]),
        gradient("lets gradients through to k and v", _pairs),
    ),
    hints=(
        "Set the gradient to zero: W (sum of k_j k_j^T + ridge I) = sum of v_j k_j^T. "
        "Two sums, and one system.",
        "With a row for each pair, the two sums are k.mT @ k and v.mT @ k, for any "
        "leading dimensions.",
        "H is symmetric, so that W.mT solves H W.mT = k.mT @ v: torch.linalg.solve.",
    ),
    example=_pairs,
)


# --- recursive_least_squares ----------------------------------------


def _recursion(
    k: Tensor,
    v: Tensor,
    ridge: float,
    first: float = -1.0,
    late: bool = False,
    one: float = 1.0,
    sign: float = 1.0,
    still: bool = False,
    again: float = 0.0,
) -> Tensor:
    """The solution with a choice of mistakes.

    - `first`: the power of the ridge in the first inverse.
    - `late`: the pair is written before the inverse has learned its key.
    - `one`, `sign`: the constant in the denominator, and the sign of what is removed.
    - `still`: the inverse never learns.
    - `again`: the share of the ridge that is added again with each pair.
    """
    W, P = v.new_zeros(v.shape[1], k.shape[1]), ridge**first * _eye(k)
    for k_t, v_t in zip(k, v, strict=True):
        Pk = P @ k_t
        error, gain = v_t - W @ k_t, Pk / (1 + k_t @ Pk)
        W = W + torch.outer(error, Pk if late else gain)
        if not still:
            P = P - sign * torch.outer(Pk, Pk) / (one + k_t @ Pk)
        if again:
            P = torch.linalg.inv(torch.linalg.inv(P) + again * ridge * _eye(k))
    return W


#: The faulty code of the bug hunt.
sick_recursion = partial(_recursion, first=1.0, late=True)


def _few(generator: Generator, pairs: int, key: int, ridge: float) -> dict[str, Any]:
    return _pairs(generator, pairs, key, 3, ridge)


def _one_pair(generator: Generator, ridge: float) -> dict[str, Any]:
    inputs = _pairs(generator, 1, 4, 3, ridge)
    return inputs | {"k": l2_normalize(inputs["k"])}


RECURSIVE_LEAST_SQUARES = Exercise(
    name="recursive_least_squares",
    notebook="17_regression",
    difficulty=4,
    importance=3,
    minutes=12,
    task="**A sick recursion.** For keys `k` `[pairs, key]`, values `v` `[pairs, "
    "value]` and a number `ridge` above 0, return what `least_squares` does, `[value, "
    "key]`, one pair after the other. The recursion carries $W$ and the inverse $P = "
    "H^{-1}$.",
    start="""\
def recursive_least_squares(k, v, ridge):
    W = v.new_zeros(v.shape[1], k.shape[1])
    P = ridge * torch.eye(k.shape[1], dtype=k.dtype)
    for k_t, v_t in zip(k, v):
        Pk = P @ k_t
        W = W + torch.outer(v_t - W @ k_t, Pk)
        P = P - torch.outer(Pk, Pk) / (1 + k_t @ Pk)
    return W""",
    reference=recursive_least_squares,
    properties=(
        shape("returns one memory, [value, key]", _few, [(5, 4, 0.5), (1, 3, 1.0)]),
        agrees(
            "with ridge = 1, stores half of one value",
            _one_pair,
            [1.0],
            of=_returned,
            expected=lambda k, v, ridge: v / 2,
            because="There was one pair, whose key had length 1.",
            catches={
                "Two bugs are left. Look at one pair: what is H before it, and which P "
                "does its write need?": sick_recursion,
                "The pair is written under P k with the P of before. It needs P k with "
                "the P that knows this key.": partial(_recursion, late=True),
            },
        ),
        agrees(
            "with any ridge, stores one value divided by 1 + ridge",
            _one_pair,
            [0.01, 0.5, 20.0],
            of=_returned,
            expected=lambda k, v, ridge: v / (1 + ridge),
            because="The ridge was {ridge}, and the key had length 1.",
            catches={
                "Before the first pair H is ridge I, and P is its inverse.": partial(
                    _recursion, first=1.0
                ),
                "P starts from I, as if the ridge were 1.": partial(
                    _recursion, first=0.0
                ),
            },
        ),
        agrees(
            "is least squares, after any number of pairs",
            _few,
            [(2, 4, 0.5), (5, 5, 0.1), (9, 3, 2.0), (100, 6, 0.01)],
            expected=lambda k, v, ridge: least_squares(k, v, ridge),
            because="There were {pairs} pairs under keys of width {key}, and the ridge "
            "was {ridge}.",
            catches={
                "P stays as it was, so each pair gets an implicit step, and nothing is "
                "learned about keys.": partial(_recursion, still=True),
                "P is divided by k P k alone: with the 1 + of the write, the ridge "
                "stays in it.": partial(_recursion, one=1e-9),
                "The ridge is added again with each pair. It is in the first P, "
                "once.": partial(_recursion, again=1.0),
                "P grows with every key. What is known about a key makes P smaller "
                "there.": partial(_recursion, sign=-1.0),
            },
        ),
        gradient("lets gradients through to k and v", _few, (5, 4, 0.5)),
    ),
    hints=(
        "Try one pair with ridge = 1 by hand: H = I before it, and W should be v k^T "
        "/ 2 after it. Then try another ridge.",
        "The new P times k is P k / (1 + k · P k) with the old P. Which of them is in "
        "the write?",
        "Update P first, then write with P @ k_t; and start from torch.eye(...) / "
        "ridge.",
    ),
    example=_pairs,
)


# --- better_step ----------------------------------------------------

#: The width of keys and values of the open task.
WIDTH = 16
#: What multiplies the channels of its keys, before they are scaled to length 1.
CHANNELS = {
    "even": torch.ones(WIDTH).double(),
    "uneven": 0.8 ** torch.arange(WIDTH).double(),
}


def stored(kind: str, pairs: int, memories: int = 100) -> tuple[Tensor, Tensor]:
    """The pairs of the open task: keys of length 1 and values.

    - `kind`: of keys, a name in `CHANNELS`.
    - Returns keys and values, both `[memories, pairs, WIDTH]`.
    """
    generator = Generator().manual_seed(pairs)
    k, v = (normal(generator, memories, pairs, WIDTH) for _ in range(2))
    return l2_normalize(k * CHANNELS[kind]), v


def lost(step: Answer, kind: str, pairs: int) -> float:
    """The relative squared error of all pairs after each was written once.

    - `step`: takes W, z, k and v, and returns the new W and z.
    """
    k, v = stored(kind, pairs)
    W, z = k.new_zeros(len(k), WIDTH, WIDTH), torch.zeros_like(k[:, 0])
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        W, z = step(W, z, k_t, v_t)
    return float((k @ W.mT - v).square().sum() / v.square().sum())


def constant(beta: float) -> Answer:
    """The delta rule with one strength for all pairs, as a step of the open task."""

    def delta(W: Tensor, z: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return delta_step(W, k, v, k.new_full(k.shape[:-1], beta)), z

    return delta


@cache
def to_beat(kind: str, pairs: int) -> float:
    """The error of the delta rule with the constant strength that suits best."""
    return min(lost(constant(beta / 20), kind, pairs) for beta in range(1, 21))


def _seen(generator: Generator, *lead: int) -> dict[str, Tensor]:
    """A memory that has seen a few pairs."""
    W = normal(generator, *lead, WIDTH, WIDTH)
    z = normal(generator, *lead, WIDTH).square()
    k = l2_normalize(normal(generator, *lead, WIDTH))
    return {"W": W, "z": z, "k": k, "v": normal(generator, *lead, WIDTH)}


def _alone(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs = _seen(generator, 2, 3)
    like = {"W": inputs["W"], "z": inputs["z"]}
    together = ask(answer, like, **inputs)
    first = {name: x[1, 2] for name, x in inputs.items()}
    alone = ask(answer, {"W": first["W"], "z": first["z"]}, **first)
    for name, one, many in zip("Wz", alone, together, strict=True):
        because = f"This is {name} of a memory alone, and of the same one among six."
        compare(one, many[1, 2], because)


def _beats(kind: str) -> Part:
    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        def asked(W: Tensor, z: Tensor, k: Tensor, v: Tensor) -> Any:
            return ask(answer, {"W": W, "z": z}, W=W, z=z, k=k, v=v)

        for pairs in (WIDTH, 2 * WIDTH):
            yours, bar = lost(asked, kind, pairs), to_beat(kind, pairs)
            if not yours < bar:
                raise Wrong(
                    f"After {pairs} pairs under {kind} keys, your error is "
                    f"{yours:.3f}; the one to beat is {bar:.3f}."
                )

    return holds


def _better(
    W: Tensor,
    z: Tensor,
    k: Tensor,
    v: Tensor,
    slower: float = 1.0,
    channels: bool = True,
) -> tuple[Tensor, Tensor]:
    """The solution with a choice of mistakes.

    - `slower`: how much slower later pairs are written; 0 = not at all.
    - `channels`: a key is written where few others are.
    """
    before, z = z.sum(-1, keepdim=True), z + k * k
    where = k / (0.1 + z) if channels else k
    where = where / (where * k).sum(-1, keepdim=True)
    strength = 1 / (1 + slower * before / k.shape[-1])
    return write(W, where, strength * (v - read(W, k))), z


BETTER_STEP = Exercise(
    name="better_step",
    notebook="17_regression",
    difficulty=5,
    importance=2,
    minutes=20,
    task="**Beat the delta rule in its own memory.** Beside `W` `[..., 16, 16]` your "
    "step may carry one vector, `z` `[..., 16]`; both start at 0. Given the key `k` "
    "`[..., 16]`, of length 1, and the value `v` `[..., 16]` of the next pair, return "
    "the new `W` and `z`. After 16 and after 32 pairs, the mean error of all of them "
    "should be smaller than that of the delta rule with the best constant strength: "
    "under *even* keys, which have random directions, and under *uneven* ones, whose "
    "channel $j$ was first multiplied by $0.8^j$.",
    reference=better_step,
    properties=(
        shape("returns W and z", _seen, [(), (2,)], names=("W", "z")),
        Property("treats each memory by itself, with any leading dimensions", _alone),
        Property(
            "beats the best constant strength under even keys",
            _beats("even"),
            {
                "This is the delta rule with beta = 1.": constant(1.0),
                "This is the delta rule with a constant strength: "
                "the one to beat.": constant(0.5),
                "This writes where few keys are, and is as strong for the last pair as "
                "for the first.": partial(_better, slower=0.0),
                "Later pairs are written weakly too soon: one of 16 directions is "
                "known after one pair.": partial(_better, slower=16.0, channels=False),
            },
        ),
        Property(
            "beats it under uneven keys, too",
            _beats("uneven"),
            {
                "Later pairs are written more weakly, which is enough for even keys. "
                "Here all keys share a few channels.": partial(_better, channels=False)
            },
        ),
    ),
    hints=(
        "How much is known already? With z + k * k, z counts pairs: their squares sum "
        "to 1. Least squares moves less and less with each pair. How could you?",
        "z also says which channels all keys share. Recursive least squares asks with "
        "k and writes under P k; its P is a matrix, but could be diagonal.",
        "Write under where = k / (0.1 + z), divided by (where · k) so that beta = 1 "
        "stores everything; and let the strength fall as 16 / (16 + pairs so far).",
    ),
    example=_seen,
)


EXERCISES = {
    each.name: each
    for each in (IMPLICIT_STEP, LEAST_SQUARES, RECURSIVE_LEAST_SQUARES, BETTER_STEP)
}
