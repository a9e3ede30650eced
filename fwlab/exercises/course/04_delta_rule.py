"""The delta rule."""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from fwlab.exercises.answers import Wrong, ask, normal
from fwlab.exercises.notation import exercise, started
from fwlab.feature_maps import l2_normalize
from fwlab.ops import delta_rule
from fwlab.ops.linear.sum import read, write

# --- delta_step -----------------------------------------------------


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


def at_key(new: Tensor, W: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
    """Read the new memory with the key, scaled to length 1."""
    return read(new, l2_normalize(k))


def elsewhere(new: Tensor, W: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
    """Read the new memory with keys that are orthogonal to this key."""
    unit = l2_normalize(k)
    return new - torch.outer(read(new, unit), unit)


@exercise(step, difficulty=2, importance=5, minutes=9)
def delta_step(W, k, v, beta):
    """
    **The delta step** (Eqs. 20 and 24). Return the memory after one step, for `W`
    `[..., value, key]`, `k` `[..., key]`, `v` `[..., value]` and `beta` `[...]`.

    ✓ returns a tensor of the shape of W
        shape((None, None, 3, 5), (None, None, 4, 2), (None, None, 1, 1))
    ✓ with beta = 1 and a key of length 1, replaces what the key held
        agrees((1.0, 1.0), of=at_key)
        == v
    ! Reading the key back should give exactly v.
    ✗ This is the sum rule: what the key held is not removed (Eq. 23).
        (v - old) -> v
    ✗ This writes the mixture of the new and the old value, but the old value stays
      there, too: it has to be removed (Eq. 23).
        beta[..., None] * (v - old) -> old + beta[..., None] * (v - old)
    ✗ This is only what is added in one step. The step returns the new memory.
        W + ->
    ✗ The sign is wrong: this moves away from v, since it adds W k - v.
        (v - old) -> (old - v)
    ✗ Here beta and 1 - beta have changed places: beta is the share of the new value.
        beta=1 - beta
    ✗ This applies a sigmoid to beta, which is between 0 and 1 already.
        beta=torch.sigmoid(beta)
    ✓ with beta = 0, changes nothing
        agrees(0.0)
        == W
    ✗ This ignores beta: it always replaces the whole value.
        beta=torch.ones_like(beta)
    ✗ This multiplies only the new value by beta. What is removed has to be multiplied,
      too: beta (v - W k).
        beta[..., None] * (v - old) -> beta[..., None] * v - old
    ✓ with beta between 0 and 1, mixes the old value and the new one
        agrees((0.0, 1.0), (0.25, 1.0), (0.5, 1.0), (1.0, 1.0), of=at_key)
        == (1 - beta) * at_key(W, W, k) + beta * v
    ! With beta = {beta}, the key should hold (1 - beta) old + beta new.
    ✗ This multiplies by beta twice: the difference of the mixture and the old value has
      a beta already (Eqs. 38-40).
        beta=beta * beta
    ✓ leaves the values of orthogonal keys alone
        agrees((0.7, 1.0), of=elsewhere)
        == elsewhere(W, W, k)
    ! A key orthogonal to k lost part of its value. Does beta shrink all of W?
    ✗ This is the gated rule (Eq. 52): it fades what all keys hold, not only what this
      key holds.
        gated_step(W, k, v, beta)
    ✓ follows Eq. 24 for keys of any length
        agrees((1.0, 0.5))
        == W + beta * torch.outer(v - W @ k, k)
    ! The key had length 0.5; the rule itself does not normalise it.
    ✗ This scales the key to length 1 first. The rule itself does not normalise keys.
        k=l2_normalize(k)
    ✗ This divides by the squared length of the key. The rule itself does not normalise
      keys.
        beta=beta / (k * k).sum(-1)
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
        == write(W, k, beta[..., None] * (v - read(W, k)))
    ! The leading dimensions were {lead}.
    ✗ This is right for one memory, but not for several at once: beta meets values as
      beta[..., None], and @ and torch.outer take single vectors.
        beta[..., None] -> beta
    ✓ lets gradients through to W, k, v and beta
        gradient({"lead": (2,)})
    ? First ask the memory what the key holds now: Eq. 20.
    ? Then write the difference between the new and the old value, times beta, under the
      same key: Eq. 24.
    ? old = torch.einsum("...vk,...k->...v", W, k), and beta[..., None] broadcasts with
      values.
    """
    old = torch.einsum("...vk,...k->...v", W, k)  # Eq. 20
    new = beta[..., None] * (v - old)
    return W + new[..., :, None] * k[..., None, :]  # Eq. 24


# --- gradient_step --------------------------------------------------


def _loss(W, k, v):
    return (read(W, k) - v).square().sum(-1) / 2


def _answered(generator):
    """Make a memory that returns v already."""
    inputs = step(generator, 0.5)
    return inputs | {"v": read(inputs["W"], inputs["k"])}


def _descends(answer, reference, generator):
    W, k, v, beta = step(generator, 0.1, 1.0).values()
    stepped = ask(answer, W, W=W, k=k, v=v, beta=beta)
    before, after = _loss(W, k, v).item(), _loss(stepped, k, v).item()
    if not after < before:
        raise Wrong(
            f"The loss was {before:.4g} before a step with beta = 0.1, and is "
            f"{after:.4g} after it. Do you move against the gradient?"
        )


@exercise(step, difficulty=2, importance=4, minutes=9)
def gradient_step(W, k, v, beta):
    r"""
    **A gradient step.** Return the memory after one step of gradient descent on
    $\tfrac12 \lvert W k - v \rvert^2$ with learning rate `beta`, for the arguments of
    exercise 1. Derive the gradient by hand, or let autograd do it.

    ✓ returns a tensor of the shape of W
        shape((None, None, 3, 5), (None, None, 4, 2), (None, None, 1, 1))
    ✓ where the memory already returns v, changes nothing
        agrees(draw=_answered)
        == W
    ! The loss is 0 here, and so is its gradient.
    ✗ This is the gradient, or the change alone. Return the memory after the step.
        W - beta[..., None, None] * gradient -> gradient
        W - -> -
    ✗ This is the gradient of |W k - v|, without the square, so its length does not
      depend on the error.
        gradient = error[ -> gradient = (error / error.norm(dim=-1, keepdim=True))[
    ✗ This divides the gradient by its length, so that it always moves by beta.
        * gradient -> * gradient / gradient.norm(dim=(-2, -1), keepdim=True)
    ✓ makes the loss smaller
        _descends
    ✗ This moves up the gradient. The loss falls in the direction of minus the gradient.
        W - -> W +
    ✓ moves by beta times the gradient
        agrees(
            *(
                (beta, None, *size)
                for size in ((3, 4), (5, 2), (1, 3))
                for beta in (0.0, 0.25, 0.5, 1.0)
            )
        )
        == W - beta * torch.autograd.functional.jacobian(lambda W: _loss(W, k, v), W)
    ! beta was {beta}. Is your loss ½ |W k - v|²: summed over the values, with the
      factor ½?
    ✗ This ignores beta, the learning rate.
        beta=torch.ones_like(beta)
    ✗ This is the gradient of |W k - v|², which is twice as large. The loss has a factor
      ½.
        beta=2 * beta
    ✗ This has the factor ½ once too often: the 2 of the derivative of a square cancels
      it.
        beta=beta / 2
    ✗ This is the gradient of mse_loss: a mean over the values, without the ½. The loss
      here is a sum.
        beta=2 * beta / v.shape[-1]
    ✗ The loss here is a mean over the values. It should be their sum.
        beta=beta / v.shape[-1]
    ✗ This divides by |k|², as a Newton step does. A gradient step moves by beta times
      the gradient.
        beta=beta / (k * k).sum(-1)
    ✓ takes a step of its own in each memory, with any leading dimensions
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
        == delta_step(W, k, v, beta)
    ! The leading dimensions were {lead}.
    ✗ This is right for one memory, but not for several at once: beta meets matrices as
      beta[..., None, None], and @ and torch.outer take single vectors.
        beta[..., None, None] -> beta
    ? Entry (i, j) of W occurs only in entry i of W k, with the factor k_j. What is the
      derivative of half a square?
    ? The gradient has the shape of W, and is an outer product of the error W k - v and
      the key.
    ? By autograd: W = W.detach().requires_grad_(), the loss summed over everything,
      then torch.autograd.grad(loss, W)[0].
    """
    error = torch.einsum("...vk,...k->...v", W, k) - v
    gradient = error[..., :, None] * k[..., None, :]
    return W - beta[..., None, None] * gradient


# --- gated_step -----------------------------------------------------


@exercise(step, difficulty=1, importance=4, minutes=7)
def gated_step(W, k, v, beta):
    """
    **The gated step** (Eq. 52). Return the memory after one step of the gated rule, for
    the arguments of exercise 1.

    ✓ returns a tensor of the shape of W
        shape((None, None, 3, 5), (None, None, 4, 2), (None, None, 1, 1))
    ✓ in an empty memory, stores beta times the value
        agrees((0.25, 1.0), (0.5, 1.0), (1.0, 1.0), W=torch.zeros_like, of=at_key)
        == beta * v
    ! beta was {beta}.
    ✗ This writes all of v. In Eq. 52 the new value is multiplied by beta, too.
        beta[..., None] * v -> v
    ✗ Here beta and 1 - beta have changed places: beta is the strength of the write.
        beta=1 - beta
    ✓ with beta between 0 and 1, mixes the old value and the new one
        agrees((0.0, 1.0), (0.25, 1.0), (0.5, 1.0), (1.0, 1.0), of=at_key)
        == (1 - beta) * at_key(W, W, k) + beta * v
    ! With beta = {beta}, the key should hold (1 - beta) old + beta new.
    ✗ This fades nothing: it adds beta v ⊗ k, and W stays as it is.
        (1 - beta[..., None, None]) * W -> W
    ✗ The sign is wrong: W is multiplied by 1 + beta, so it grows.
        1 - beta -> 1 + beta
    ✗ This fades W and corrects it as well, as the gated delta rule does. Eq. 52 does
      not read before it writes.
        delta_step((1 - beta[..., None, None]) * W, k, v, beta)
    ✓ fades the values of all other keys by 1 - beta
        agrees((0.75, 1.0), of=elsewhere)
        == 0.25 * elsewhere(W, W, k)
    ! With beta = 0.75, a key orthogonal to k should keep a quarter of its value.
    ✗ This is the delta rule: only what this key holds fades. Eq. 52 fades all of W.
        delta_step(W, k, v, beta)
    ✓ follows Eq. 52 for keys of any length
        agrees((0.5, 0.5), (0.5, 3.0))
        == (1 - beta) * W + beta * torch.outer(v, k)
    ! The key had length {length:g}; Eq. 52 does not normalise it.
    ✗ This scales the key to length 1 first. Eq. 52 takes it as it is.
        k=l2_normalize(k)
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
        == write((1 - beta[..., None, None]) * W, k, beta[..., None] * v)
    ! The leading dimensions were {lead}.
    ✗ This is right for one memory, but not for several at once: beta meets matrices as
      beta[..., None, None], and torch.outer takes single vectors.
        (1 - beta) * W + beta * torch.outer(v, k)
    ✓ lets gradients through to W, k, v and beta
        gradient({"lead": (2,)})
    ? Eq. 52 has two terms: one is W, made smaller, and the other is what the sum rule
      adds, made smaller.
    ? Nothing is read: what the key held before plays no part.
    ? beta[..., None, None] broadcasts with W, and beta[..., None] with values.
    """
    new = beta[..., None] * v
    return (1 - beta[..., None, None]) * W + new[..., :, None] * k[..., None, :]


# --- delta_layer ----------------------------------------------------


def _steps(generator, logit=None, time=6):
    """`logit`: that of all steps; None = each step its own."""
    q, k = (l2_normalize(normal(generator, time, 4)) for _ in range(2))
    logits = 2 * normal(generator, time)
    if logit is not None:
        logits = torch.full_like(logits, logit)
    return {"q": q, "k": k, "v": normal(generator, time, 3), "logits": logits}


def _asked_back(generator, logit):
    """Let each step ask for its own key."""
    inputs = _steps(generator, logit)
    return inputs | {"q": inputs["k"]}


DELTA_LAYER_START = """\
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
    return delta_step(W, k, v, torch.sigmoid(strength))"""


@exercise(_steps, difficulty=3, importance=3, minutes=10, start=DELTA_LAYER_START)
def delta_layer(q, k, v, logits):
    """
    **A sick layer.** For one head, `q` and `k` `[time, key]`, `v` `[time, value]` and
    `logits` `[time]`, return the readings of Eqs. 20-25, `[time, value]`, from an empty
    memory. The logits are what Eq. 21 applies its sigmoid to.

    ✓ returns a reading for each step
        shape({}, {"time": 1})
    ✓ at full strength, returns the value just written to its own key
        agrees(40.0, draw=_asked_back)
        == v
    ! Every logit was 40, so beta is 1, and each query was the key of its step.
    ✗ Two bugs are left. Watch one step at full strength: which value is read, and when.
        start:
    ✗ Each step reads before it writes, so it sees the memory of the step before. Eq. 25
      reads W_i.
        start: torch.sigmoid(strength) -> strength
    ✗ Here beta goes through two sigmoids: it is never below 1/2 and never above 0.73.
        beta[t] -> beta[t].sigmoid()
    ✗ There is no sigmoid left: Eq. 21 has one.
        torch.sigmoid(logits) -> logits
    ✓ at strength 0, writes nothing
        agrees(-800.0)
        == torch.zeros_like(v)
    ! Every logit was -800, so beta is 0, and the memory stays empty.
    ✓ follows Eqs. 20-25 for any strengths
        agrees((None, 6), (None, 1))
        == delta_rule(*(x[None, :, None] for x in (q, k, v, logits.sigmoid())))[0, :, 0]
    ✓ lets gradients through to q, k, v and the logits
        gradient()
    ? Set all logits to 40: beta should be 1. Which beta does the step get?
    ? Ask with the key that was just written. In what order does the loop read and
      write?
    ? One sigmoid is enough, and y.append has to come after the write.
    """
    W, beta = v.new_zeros(v.shape[1], k.shape[1]), torch.sigmoid(logits)  # Eq. 21
    y = []
    for t in range(len(k)):
        W = delta_step(W, k[t], v[t], beta[t])  # first write
        y.append(W @ q[t])  # then read (Eq. 25)
    return torch.stack(y)


#: The curves that the hunt starts from.
LAYERS = {"a healthy layer": delta_layer, "this layer": started("delta_layer")}


def train(layer: Callable[..., Tensor]) -> Tensor:
    """Learn how strongly to write values and noise, with a layer as above.

    Each step queries the key that it has just written; the target is the newest value
    of this key that was not noise.

    - Returns the loss of each optimiser step, `[60]`.
    """
    generator, losses = torch.Generator().manual_seed(0), []
    logits = torch.zeros(2, requires_grad=True)  # of noise, of a value
    adam = torch.optim.Adam([logits], lr=0.3)
    for _ in range(60):
        key, kind = torch.randint(4, (2, 24), generator=generator)
        k, v = torch.eye(4)[key], torch.randn(24, 3, generator=generator)
        wanted = delta_layer(k, k, v, 80.0 * (kind % 2) - 40)
        losses.append((layer(k, k, v, logits[kind % 2]) - wanted).square().mean())
        adam.zero_grad()
        losses[-1].backward()
        adam.step()
    return torch.stack(losses).detach()
