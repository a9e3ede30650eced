"""Correcting what a memory holds."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, shape
from fwlab.exercises.solutions import gated_step, gradient_step
from fwlab.exercises.steps import (
    at_key,
    elsewhere,
    step,
    step_has_gradient,
    step_has_shape,
    step_mixes,
    step_takes_heads,
)
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step
from fwlab.ops.linear.sum import read, write

# --- delta_step -----------------------------------------------------


def _new_only(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    beta = beta[..., None]
    return write(W, k, beta * v + (1 - beta) * read(W, k))


DELTA_STEP = Exercise(
    name="delta_step",
    notebook="04_delta_rule",
    difficulty=2,
    importance=5,
    minutes=9,
    task="**The delta step** (Eqs. 20 and 24). Return the memory after "
    "one step, for `W` `[..., value, key]`, `k` `[..., key]`, `v` "
    "`[..., value]` and `beta` `[...]`.",
    reference=delta_step,
    properties=(
        step_has_shape(),
        agrees(
            "with beta = 1 and a key of length 1, replaces what the key held",
            step,
            [(1.0, 1.0)],
            of=at_key,
            expected=lambda W, k, v, beta: v,
            because="Reading the key back should give exactly v.",
            catches={
                "This is the sum rule: what the key held is not "
                "removed (Eq. 23).": lambda W, k, v, beta: write(
                    W, k, beta[..., None] * v
                ),
                "This writes the mixture of the new and the old value, but the old "
                "value stays there, too: it has to be removed (Eq. 23).": _new_only,
                "This is only what is added in one step. The step returns the new "
                "memory.": lambda W, k, v, beta: delta_step(W, k, v, beta) - W,
                "The sign is wrong: this moves away from v, since it adds W "
                "k - v.": lambda W, k, v, beta: delta_step(W, k, v, -beta),
                "Here beta and 1 - beta have changed places: beta is the share of the "
                "new value.": lambda W, k, v, beta: delta_step(W, k, v, 1 - beta),
                "This applies a sigmoid to beta, which is between 0 "
                "and 1 already.": lambda W, k, v, beta: delta_step(
                    W, k, v, torch.sigmoid(beta)
                ),
            },
        ),
        agrees(
            "with beta = 0, changes nothing",
            step,
            [0.0],
            expected=lambda W, k, v, beta: W,
            catches={
                "This ignores beta: it always replaces "
                "the whole value.": lambda W, k, v, beta: delta_step(
                    W, k, v, torch.ones_like(beta)
                ),
                "This multiplies only the new value by beta. What is removed has to be "
                "multiplied, too: beta (v - W k).": lambda W, k, v, beta: write(
                    W, k, beta[..., None] * v - read(W, k)
                ),
            },
        ),
        step_mixes(
            catches={
                "This multiplies by beta twice: the difference of the mixture and the "
                "old value has a beta already (Eqs. 38-40).": lambda W, k, v, beta: (
                    delta_step(W, k, v, beta * beta)
                )
            }
        ),
        agrees(
            "leaves the values of orthogonal keys alone",
            step,
            [(0.7, 1.0)],
            of=elsewhere,
            expected=lambda W, k, v, beta: elsewhere(W, W, k),
            because="A key orthogonal to k lost part of its value. Does beta shrink "
            "all of W?",
            catches={
                "This is the gated rule (Eq. 52): it fades what all keys hold, not "
                "only what this key holds.": lambda W, k, v, beta: gated_step(
                    W, k, v, beta
                )
            },
        ),
        agrees(
            "follows Eq. 24 for keys of any length",
            step,
            [(1.0, 0.5)],
            because="The key had length 0.5; the rule itself does not normalise it.",
            catches={
                "This divides by the squared length of the key. The rule itself does "
                "not normalise keys.": lambda W, k, v, beta: delta_step(
                    W, k, v, beta / (k * k).sum(-1)
                )
            },
        ),
        step_takes_heads(),
        step_has_gradient(),
    ),
    hints=(
        "First ask the memory what the key holds now: Eq. 20.",
        "Then write the difference between the new and the old value, "
        "times beta, under the same key: Eq. 24.",
        'old = torch.einsum("...vk,...k->...v", W, k), and beta[..., None] '
        "broadcasts with values.",
    ),
    example=step,
)


# --- gradient_step --------------------------------------------------


def _loss(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (read(W, k) - v).square().sum(-1) / 2


def _answered(generator: Generator) -> dict[str, Tensor]:
    """The memory returns v already."""
    inputs = step(generator, 0.5)
    return inputs | {"v": read(inputs["W"], inputs["k"])}


def _descends(answer: Answer, reference: Answer, generator: Generator) -> None:
    W, k, v, beta = step(generator, 0.1, 1.0).values()
    stepped = ask(answer, W, W=W, k=k, v=v, beta=beta)
    before, after = _loss(W, k, v).item(), _loss(stepped, k, v).item()
    if not after < before:
        raise Wrong(
            f"The loss was {before:.4g} before a step with beta = 0.1, and is "
            f"{after:.4g} after it. Do you move against the gradient?"
        )


def _unit_gradient(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    length = (read(W, k) - v).norm(dim=-1) * k.norm(dim=-1)
    return gradient_step(W, k, v, beta / length)


GRADIENT_STEP = Exercise(
    name="gradient_step",
    notebook="04_delta_rule",
    difficulty=2,
    importance=4,
    minutes=9,
    task="**A gradient step.** Return the memory after one step of gradient "
    "descent on $\\tfrac12 \\lvert W k - v \\rvert^2$ with learning "
    "rate `beta`, for the arguments of exercise 1. Derive the gradient "
    "by hand, or let autograd do it.",
    reference=gradient_step,
    properties=(
        step_has_shape(),
        agrees(
            "where the memory already returns v, changes nothing",
            _answered,
            expected=lambda W, k, v, beta: W,
            because="The loss is 0 here, and so is its gradient.",
            catches={
                "This is the gradient of |W k - v|, without the square, so its length "
                "does not depend on the error.": lambda W, k, v, beta: gradient_step(
                    W, k, v, beta / (read(W, k) - v).norm(dim=-1)
                ),
                "This divides the gradient by its length, so that it always moves by "
                "beta.": _unit_gradient,
            },
        ),
        Property(
            "makes the loss smaller",
            _descends,
            {
                "This moves up the gradient. The loss falls in the direction of minus "
                "the gradient.": lambda W, k, v, beta: gradient_step(W, k, v, -beta)
            },
        ),
        agrees(
            "moves by beta times the gradient",
            step,
            [
                *(
                    (beta, None, *size)
                    for size in ((3, 4), (5, 2), (1, 3))
                    for beta in (0.0, 0.25, 0.5, 1.0)
                )
            ],
            because="beta was {beta}. Is your loss ½ |W k - v|²: summed over the "
            "values, with the factor ½?",
            catches={
                "This is the gradient of |W k - v|², which is twice as large. The loss "
                "has a factor ½.": lambda W, k, v, beta: gradient_step(
                    W, k, v, 2 * beta
                ),
                "This has the factor ½ once too often: the 2 of the derivative of a "
                "square cancels it.": lambda W, k, v, beta: gradient_step(
                    W, k, v, beta / 2
                ),
                "This is the gradient of mse_loss: a mean over the values, without the "
                "½. The loss here is a sum.": lambda W, k, v, beta: gradient_step(
                    W, k, v, 2 * beta / v.shape[-1]
                ),
                "The loss here is a mean over the values. It should "
                "be their sum.": lambda W, k, v, beta: gradient_step(
                    W, k, v, beta / v.shape[-1]
                ),
                "This divides by |k|², as a Newton step does. A gradient step moves by "
                "beta times the gradient.": lambda W, k, v, beta: gradient_step(
                    W, k, v, beta / (k * k).sum(-1)
                ),
            },
        ),
        step_takes_heads(
            says="takes a step of its own in each memory, with any leading dimensions"
        ),
    ),
    hints=(
        "Entry (i, j) of W occurs only in entry i of W k, with the factor "
        "k_j. What is the derivative of half a square?",
        "The gradient has the shape of W, and is an outer product of the "
        "error W k - v and the key.",
        "By autograd: W = W.detach().requires_grad_(), the loss summed over "
        "everything, then torch.autograd.grad(loss, W)[0].",
    ),
    example=step,
)


# --- gated_step -----------------------------------------------------


GATED_STEP = Exercise(
    name="gated_step",
    notebook="04_delta_rule",
    difficulty=1,
    importance=4,
    minutes=7,
    task="**The gated step** (Eq. 52). Return the memory after one step of "
    "the gated rule, for the arguments of exercise 1.",
    reference=gated_step,
    properties=(
        step_has_shape(),
        agrees(
            "in an empty memory, stores beta times the value",
            step,
            [(0.25, 1.0), (0.5, 1.0), (1.0, 1.0)],
            change={"W": torch.zeros_like},
            of=at_key,
            expected=lambda W, k, v, beta: beta * v,
            because="beta was {beta}.",
            catches={
                "This writes all of v. In Eq. 52 the new value is multiplied by beta, "
                "too.": lambda W, k, v, beta: write(
                    (1 - beta[..., None, None]) * W, k, v
                ),
                "Here beta and 1 - beta have changed places: beta is the strength of "
                "the write.": lambda W, k, v, beta: gated_step(W, k, v, 1 - beta),
            },
        ),
        step_mixes(
            catches={
                "This fades nothing: it adds beta v ⊗ k, and W stays "
                "as it is.": lambda W, k, v, beta: write(W, k, beta[..., None] * v),
                "The sign is wrong: W is multiplied by 1 + beta, "
                "so it grows.": lambda W, k, v, beta: write(
                    (1 + beta[..., None, None]) * W, k, beta[..., None] * v
                ),
                "This fades W and corrects it as well, as the gated delta rule does. "
                "Eq. 52 does not read before it writes.": lambda W, k, v, beta: (
                    delta_step((1 - beta[..., None, None]) * W, k, v, beta)
                ),
            }
        ),
        agrees(
            "fades the values of all other keys by 1 - beta",
            step,
            [(0.75, 1.0)],
            of=elsewhere,
            expected=lambda W, k, v, beta: 0.25 * elsewhere(W, W, k),
            because="With beta = 0.75, a key orthogonal to k should keep a quarter of "
            "its value.",
            catches={
                "This is the delta rule: only what this key holds fades. Eq. 52 fades "
                "all of W.": lambda W, k, v, beta: delta_step(W, k, v, beta)
            },
        ),
        agrees(
            "follows Eq. 52 for keys of any length",
            step,
            [(0.5, 0.5), (0.5, 3.0)],
            because="The key had length {length:g}; Eq. 52 does not normalise it.",
        ),
        step_takes_heads(),
        step_has_gradient(),
    ),
    hints=(
        "Eq. 52 has two terms: one is W, made smaller, and the other is "
        "what the sum rule adds, made smaller.",
        "Nothing is read: what the key held before plays no part.",
        "beta[..., None, None] broadcasts with W, and beta[..., None] with values.",
    ),
    example=step,
)


# --- delta_layer ----------------------------------------------------


def healthy_layer(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
    """One head of the delta rule, step by step."""
    return _layer(q, k, v, torch.sigmoid(logits))


def _layer(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, late: bool = False) -> Tensor:
    """`late`: a step reads before it writes."""
    W, y = v.new_zeros(v.shape[1], k.shape[1]), []
    for q_t, k_t, v_t, beta_t in zip(q, k, v, beta, strict=True):
        before, W = W, delta_step(W, k_t, v_t, beta_t)
        y.append(read(before if late else W, q_t))
    return torch.stack(y)


def sick_layer(q: Tensor, k: Tensor, v: Tensor, logits: Tensor) -> Tensor:
    """The layer of the bug hunt, with both of its bugs."""
    return _layer(q, k, v, logits.sigmoid().sigmoid(), late=True)


#: The curves that the hunt starts from.
LAYERS = {"a healthy layer": healthy_layer, "this layer": sick_layer}


def _steps(
    generator: Generator, logit: float | None = None, time: int = 6
) -> dict[str, Tensor]:
    """`logit`: that of all steps; None = each step its own."""
    q, k = (l2_normalize(normal(generator, time, 4)) for _ in range(2))
    logits = 2 * normal(generator, time)
    if logit is not None:
        logits = torch.full_like(logits, logit)
    return {"q": q, "k": k, "v": normal(generator, time, 3), "logits": logits}


def _asked_back(generator: Generator, logit: float) -> dict[str, Tensor]:
    """Each step asks for its own key."""
    inputs = _steps(generator, logit)
    return inputs | {"q": inputs["k"]}


DELTA_LAYER = Exercise(
    name="delta_layer",
    notebook="04_delta_rule",
    difficulty=3,
    importance=3,
    minutes=10,
    task="**A sick layer.** For one head, `q` and `k` `[time, key]`, `v` "
    "`[time, value]` and `logits` `[time]`, return the readings of Eqs. 20-25, "
    "`[time, value]`, from an empty memory. The logits are what Eq. 21 applies its "
    "sigmoid to.",
    start="""\
from fwlab.ops.linear.sum import read
from fwlab.ops.delta.delta import delta_step


def delta_layer(q, k, v, logits):
    W, beta = v.new_zeros(v.shape[1], k.shape[1]), torch.sigmoid(logits)
    y = []
    for q_t, k_t, v_t, beta_t in zip(q, k, v, beta):
        y.append(read(W, q_t))
        W = step_of_layer(W, k_t, v_t, beta_t)
    return torch.stack(y)


def step_of_layer(W, k, v, strength):
    return delta_step(W, k, v, torch.sigmoid(strength))""",
    reference=healthy_layer,
    properties=(
        shape("returns a reading for each step", _steps, [{}, {"time": 1}]),
        agrees(
            "at full strength, returns the value just written to its own key",
            _asked_back,
            [40.0],
            expected=lambda q, k, v, logits: v,
            because="Every logit was 40, so beta is 1, and each query was the key of "
            "its step.",
            catches={
                "Two bugs are left. Watch one step at full strength: which value is read, "
                "and when.": sick_layer,
                "Each step reads before it writes, so it sees the memory of the step "
                "before. Eq. 25 reads W_i.": lambda q, k, v, logits: _layer(
                    q, k, v, logits.sigmoid(), late=True
                ),
                "Here beta goes through two sigmoids: it is never below 1/2 and never "
                "above 0.73.": lambda q, k, v, logits: _layer(
                    q, k, v, logits.sigmoid().sigmoid()
                ),
                "There is no sigmoid left: Eq. 21 has one.": _layer,
            },
        ),
        agrees(
            "at strength 0, writes nothing",
            _steps,
            [-800.0],
            expected=lambda q, k, v, logits: torch.zeros_like(v),
            because="Every logit was -800, so beta is 0, and the memory stays empty.",
        ),
        agrees("follows Eqs. 20-25 for any strengths", _steps, [(None, 6), (None, 1)]),
        gradient("lets gradients through to q, k, v and the logits", _steps),
    ),
    hints=(
        "Set all logits to 40: beta should be 1. Which beta does the step get?",
        "Ask with the key that was just written. In what order does the loop read "
        "and write?",
        "One sigmoid is enough, and y.append has to come after the write.",
    ),
    example=_steps,
)


EXERCISES = {
    each.name: each for each in (DELTA_STEP, GRADIENT_STEP, GATED_STEP, DELTA_LAYER)
}
