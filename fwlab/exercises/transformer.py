"""A layer put together, and a model of such layers."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.asking import (
    CUT,
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
)
from fwlab.exercises.exercise import Exercise
from fwlab.feature_maps import DPFP, sum_normalize
from fwlab.models import LanguageModel

# --- fast_weight_layer ----------------------------------------------


def fast_weight_layer(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """One head with the delta rule, and the sum with its input."""
    phi = DPFP(nu=1)
    q, k = (sum_normalize(phi(x @ W.T)) for W in (W_q, W_k))  # Eqs. 37, 29
    v, beta = x @ W_v.T, torch.sigmoid(x @ W_beta.T)  # Eq. 21
    # Eqs. 20, 24, 25, for one head.
    y: Any = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T


def _layer(
    generator: Generator,
    batch: int = 2,
    time: int = 7,
    d: int = 6,
    key: int = 4,
    value: int = 3,
) -> dict[str, Tensor]:
    shapes = {
        "x": (batch, time, d),
        "W_q": (key, d),
        "W_k": (key, d),
        "W_v": (value, d),
        "W_beta": (1, d),
        "W_out": (d, value),
    }
    return {name: normal(generator, *shape) for name, shape in shapes.items()}


def _layer_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of x"""
    for sizes in ((2, 7, 6, 4, 3), (1, 1, 4, 4, 4), (3, 2, 5, 2, 7)):
        given = _layer(generator, *sizes)
        ask(answer, given["x"], **given)


def _layer_adds_x(answer: Answer, reference: Answer, generator: Generator) -> None:
    """adds what it reads to x"""
    given = _layer(generator)
    given["W_out"] = 0 * given["W_out"]
    found = ask(answer, given["x"], **given)
    compare(found, given["x"], "W_out was 0: then only x is left.")


def _layer_ignores_lengths(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not depend on the lengths of queries and keys"""
    given = _layer(generator)
    usual = ask(answer, given["x"], **given)
    for name in ("W_q", "W_k"):
        longer = {**given, name: 3 * given[name]}
        compare(
            ask(answer, given["x"], **longer),
            usual,
            f"{name} was multiplied by 3. Features that are divided by their sum "
            "(Eq. 29) stay the same.",
        )


def _layer_first_step(answer: Answer, reference: Answer, generator: Generator) -> None:
    """reads, at the first step, half of v where W_beta is 0"""
    given = _layer(generator, time=1)
    given["W_beta"] = 0 * given["W_beta"]
    given["W_q"] = given["W_k"]
    compare(
        ask(answer, given["x"], **given),
        reference(*given.values()),
        "Query and key were the same, phi. sigmoid(0) = 1/2, so W = v phi^T / 2 after "
        "the first write, and reading it gives phi · phi / 2 times v.",
    )


def _layer_strength(answer: Answer, reference: Answer, generator: Generator) -> None:
    """writes with the strength sigmoid(W_beta x)"""
    given = _layer(generator, time=1)
    compare(
        ask(answer, given["x"], **given),
        reference(*given.values()),
        "This was one step, with all weights drawn at random (Eq. 21).",
    )


def _layer_corrects(answer: Answer, reference: Answer, generator: Generator) -> None:
    """follows the delta rule from step to step"""
    given = _layer(generator, time=9)
    compare(
        ask(answer, given["x"], **given),
        reference(*given.values()),
        "These were 9 steps in 2 sequences. Each step removes what its key held, and "
        "each sequence has a memory of its own.",
    )


def _layer_without_features(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """writes nothing under a key without features"""
    given = _layer(generator)
    given["W_k"][1:] = 0
    compare(
        ask(answer, given["x"], **given),
        given["x"],
        "Only one entry of each key was not 0, so all features are 0, and so is their "
        "sum. sum_normalize gives 0 there.",
    )


def _layer_of_any_size(answer: Answer, reference: Answer, generator: Generator) -> None:
    """works for any sizes, and long sequences"""
    for sizes in ((1, 70, 3, 2, 5), (3, 3, 3, 3, 3), (4, 2, 8, 5, 1)):
        given = _layer(generator, *sizes)
        names = ("batch", "time", "d", "key", "value")
        said = ", ".join(f"{n} {s}" for n, s in zip(names, sizes, strict=True))
        compare(
            ask(answer, given["x"], **given),
            reference(*given.values()),
            f"The sizes were {said}.",
        )


def _layer_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to x and to all weights"""
    compare_gradients(answer, reference, generator, CUT, **_layer(generator, time=4))


def _read(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (part[:, :, None] for part in (q, k, v))
    y: Any = ops.delta_rule(q, k, v, beta)
    return y[:, :, 0]


def _features(x: Tensor) -> Tensor:
    return sum_normalize(DPFP(nu=1)(x))


def _strength(x: Tensor, W_beta: Tensor) -> Tensor:
    return torch.sigmoid(x @ W_beta.T)


def _no_residual(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """The sum with x is missing: the layer adds what it reads to its input."""
    return fast_weight_layer(x, W_q, W_k, W_v, W_beta, W_out) - x


def _not_normalised(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """The features are not divided by their sum (Eq. 29)."""
    q, k = (DPFP(nu=1)(x @ W.T) for W in (W_q, W_k))
    return x + _read(q, k, x @ W_v.T, _strength(x, W_beta)) @ W_out.T


def _keys_normalised(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """Only the features of the keys are divided by their sum; those of the
    queries have to be divided, too (Eq. 29).
    """
    q, k = DPFP(nu=1)(x @ W_q.T), _features(x @ W_k.T)
    return x + _read(q, k, x @ W_v.T, _strength(x, W_beta)) @ W_out.T


def _no_features(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """Queries and keys do not pass the feature map: phi is missing."""
    q, k = (sum_normalize(x @ W.T) for W in (W_q, W_k))
    return x + _read(q, k, x @ W_v.T, _strength(x, W_beta)) @ W_out.T


def _no_sigmoid(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """The write strength is W_beta x itself: the sigmoid is missing (Eq. 21)."""
    q, k = (_features(x @ W.T) for W in (W_q, W_k))
    return x + _read(q, k, x @ W_v.T, x @ W_beta.T) @ W_out.T


def _reads_first(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """This reads before it writes. Eq. 25 reads the memory that holds the
    pair of this step.
    """
    q, k = (_features(x @ W.T) for W in (W_q, W_k))
    # What is read at the next step with this query, after a write of nothing.
    late = torch.zeros_like(q[:, :1])
    q = torch.cat([q, late], 1)
    v, beta = x @ W_v.T, _strength(x, W_beta)
    k, v, beta = (F.pad(part, (0, 0, 1, 0)) for part in (k, v, beta))
    return x + _read(q, k, v, beta)[:, :-1] @ W_out.T


def _sums(
    x: Tensor, W_q: Tensor, W_k: Tensor, W_v: Tensor, W_beta: Tensor, W_out: Tensor
) -> Tensor:
    """This is the sum rule: what the key held is not removed (Eqs. 20, 24)."""
    q, k = (_features(x @ W.T) for W in (W_q, W_k))
    weights = (q @ k.mT).tril()
    return x + weights @ (_strength(x, W_beta) * (x @ W_v.T)) @ W_out.T


# --- generate -------------------------------------------------------

#: Takes a token and a state (None = nothing was read); returns logits of the
#: next token `[vocabulary]`, and the state after it.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def generate(step: Step, prompt: Tensor, length: int) -> Tensor:
    """Continue a prompt with the most likely tokens, one step per token."""
    state = None
    for token in prompt:
        logits, state = step(token, state)
    text: list[Tensor] = []
    while len(text) < length:
        text.append(logits.argmax())
        if len(text) < length:
            logits, state = step(text[-1], state)
    return torch.stack(text) if text else prompt[:0]


def _network(generator: Generator, tokens: int = 40, width: int = 8) -> Step:
    """A small random network whose next token depends on all it has read."""
    embedding = 2 * normal(generator, tokens, width)
    recurrent = 1.5 * normal(generator, width, width) / width**0.5
    out = normal(generator, tokens, width)

    def step(token: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        before = 0 if state is None else recurrent @ state
        after = torch.tanh(before + embedding[int(token)])
        return out @ after, after

    return step


def _text(
    generator: Generator, prompt: int = 5, length: int = 8, tokens: int = 40
) -> dict[str, Any]:
    return {
        "step": _network(generator, tokens),
        "prompt": torch.randint(tokens, (prompt,), generator=generator),
        "length": length,
    }


def _generates_tokens(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns the new tokens, without the prompt"""
    for prompt, length in ((5, 8), (1, 3), (4, 1)):
        given = _text(generator, prompt, length)
        ask(answer, reference(*given.values()), **given)


def _generates_first(answer: Answer, reference: Answer, generator: Generator) -> None:
    """begins with the most likely token after the whole prompt"""
    for prompt in (1, 2, 9):
        given = _text(generator, prompt, 1)
        compare(
            ask(answer, given["prompt"][:1], **given),
            reference(*given.values()),
            f"The prompt had {prompt} tokens. Each goes through step, in order, with "
            "the state that the one before it has left.",
        )


def _generates_on(answer: Answer, reference: Answer, generator: Generator) -> None:
    """continues from its own tokens, and from the state"""
    for _ in range(4):
        given = _text(generator, 3, 12)
        expected = reference(*given.values())
        compare(
            ask(answer, expected, **given),
            expected,
            "Each new token goes into step, with the latest state, to find the next.",
        )


def _generates_cheaply(answer: Answer, reference: Answer, generator: Generator) -> None:
    """takes one step per token"""
    given, taken = _text(generator, 6, 10), []
    step = given["step"]

    def counted(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        taken.append(token)
        return step(token, state)

    ask(answer, reference(*given.values()), **{**given, "step": counted})
    if len(taken) > 16:
        raise Wrong(
            f"A prompt of 6 tokens and 10 new ones took {len(taken)} steps; 16 are "
            "enough. The state already holds what was read."
        )


def _generates_any_length(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """works for any lengths, and adds nothing where length is 0"""
    for prompt, length, tokens in ((1, 60, 3), (70, 2, 300), (2, 1, 1), (3, 0, 9)):
        given = _text(generator, prompt, length, tokens)
        compare(
            ask(answer, reference(*given.values()), **given),
            reference(*given.values()),
            f"The prompt had {prompt} tokens of {tokens} different ones, and length "
            f"was {length}.",
        )


def _tokens(step: Step, token: Tensor, state: Any, length: int) -> list[Tensor]:
    """Greedy tokens from this token and state on."""
    found: list[Tensor] = []
    for _ in range(length):
        logits, state = step(token, state)
        token = logits.argmax()
        found.append(token)
    return found


def _state_after(step: Step, prompt: Tensor) -> Any:
    state = None
    for token in prompt:
        _, state = step(token, state)
    return state


def _drops_state(step: Step, prompt: Tensor, length: int) -> Tensor:
    """The state is dropped: step always gets None, so each token knows
    only the one before it.
    """
    found = []
    token = prompt[-1]
    for _ in range(length):
        token = step(token, None)[0].argmax()
        found.append(token)
    return torch.stack(found)


def _last_token_only(step: Step, prompt: Tensor, length: int) -> Tensor:
    """The prompt is not read: step gets only its last token."""
    return torch.stack(_tokens(step, prompt[-1], None, length))


def _reads_last_twice(step: Step, prompt: Tensor, length: int) -> Tensor:
    """The last token of the prompt is read twice: the logits that follow the
    prompt are there already.
    """
    return torch.stack(_tokens(step, prompt[-1], _state_after(step, prompt), length))


def _same_token(step: Step, prompt: Tensor, length: int) -> Tensor:
    """Every step gets the last token of the prompt, not the new one."""
    state, found = _state_after(step, prompt[:-1]), []
    for _ in range(length):
        logits, state = step(prompt[-1], state)
        found.append(logits.argmax())
    return torch.stack(found)


def _frozen_state(step: Step, prompt: Tensor, length: int) -> Tensor:
    """The state stays that of the prompt: each step has to continue from the
    state that the last one has left.
    """
    found = [generate(step, prompt, 1)[0]]
    state = _state_after(step, prompt)
    while len(found) < length:
        found.append(step(found[-1], state)[0].argmax())
    return torch.stack(found)


def _off_by_one(step: Step, prompt: Tensor, length: int) -> Tensor:
    """The first new token is missing: it goes into step, and not into the text."""
    return generate(step, prompt, length + 1)[1:]


def _with_prompt(step: Step, prompt: Tensor, length: int) -> Tensor:
    """The result begins with the prompt; only the new tokens are wanted."""
    return torch.cat([prompt, generate(step, prompt, length)])


# --- ablate ---------------------------------------------------------

#: Takes a model and tokens; returns a tensor of no dimensions.
Loss = Callable[[nn.Module, Tensor], Tensor]


def ablate(model: LanguageModel, tokens: Tensor, loss: Loss) -> Tensor:
    """The loss if one layer does not write, for each layer in turn."""

    def never(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return torch.full_like(output, -torch.inf)  # sigmoid makes it 0

    losses = []
    for block in model.blocks:
        # A hook replaces what to_beta returns, until the end of `with`.
        with block.mixer.to_beta.register_forward_hook(never):
            losses.append(loss(model, tokens))
    return torch.stack(losses)


def _cross_entropy(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _last_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1])[:, -1], tokens[:, -1])


def _model(
    generator: Generator, layers: int = 3, batch: int = 2, loss: Loss = _cross_entropy
) -> dict[str, Any]:
    vocabulary = 7
    # Without initial numbers, which would come from the caller's generator.
    with torch.device("meta"):
        model = LanguageModel(vocabulary, "delta", layers, 2, 8, d_ff=8)
    model = model.to_empty(device="cpu").double()
    for p in model.parameters():
        p.data = normal(generator, *p.shape)
    tokens = torch.randint(vocabulary, (batch, 10), generator=generator)
    return {"model": model, "tokens": tokens, "loss": loss}


def _ablate_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns one loss per layer"""
    for layers in (3, 1, 2):
        given = _model(generator, layers)
        ask(answer, normal(generator, layers), **given)


def _ablate_one_layer(answer: Answer, reference: Answer, generator: Generator) -> None:
    """switches off the memory of the only layer, and nothing else"""
    given = _model(generator, 1)
    compare(
        ask(answer, normal(generator, 1), **given),
        reference(*given.values()),
        "The model had one layer. With beta = 0 its memory stays empty and adds "
        "nothing to x; its MLP goes on.",
    )


def _ablate_in_turn(answer: Answer, reference: Answer, generator: Generator) -> None:
    """switches off one layer at a time"""
    for layers in (2, 4):
        given = _model(generator, layers)
        compare(
            ask(answer, normal(generator, layers), **given),
            reference(*given.values()),
            f"The model had {layers} layers. Entry i is the loss without the memory "
            "of layer i, with all others at work.",
        )


def _ablate_restores(answer: Answer, reference: Answer, generator: Generator) -> None:
    """leaves the model as it was"""
    given, used = _model(generator), []

    @wraps(answer)
    def kept(model: nn.Module, *rest: Any) -> Any:
        used.append(model)
        return answer(model, *rest)

    ask(kept, normal(generator, 3), **given)
    with torch.no_grad():
        before, after = (
            _cross_entropy(m, given["tokens"]) for m in (given["model"], *used)
        )
    compare(
        after,
        before,
        "This is the loss of the model, after your function has returned. Is there a "
        "hook to remove, or a weight to put back?",
    )


def _ablate_any_loss(answer: Answer, reference: Answer, generator: Generator) -> None:
    """measures the loss that it was given"""
    given = _model(generator, 2, 5, _last_token)
    compare(
        ask(answer, normal(generator, 2), **given),
        reference(*given.values()),
        "This loss was that of the last token only.",
    )


def _with_beta(logit: float, block: Any) -> Any:
    """Set the write strength of a block; returns what undoes it."""
    return block.mixer.to_beta.register_forward_hook(
        lambda module, inputs, output: torch.full_like(output, logit)
    )


def _one_by_one(
    model: Any, tokens: Tensor, loss: Loss, chosen: Any, logit: float = -torch.inf
) -> Tensor:
    """The loss for each layer, with `chosen(layer, all blocks)` changed."""
    losses = []
    for layer in range(len(model.blocks)):
        hooks = [_with_beta(logit, block) for block in chosen(layer, model.blocks)]
        losses.append(loss(model, tokens))
        for hook in hooks:
            hook.remove()
    return torch.stack(losses)


def _stays_off(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """A layer stays off when the next one is tried: the change is left in place."""
    losses = []
    for block in model.blocks:
        _with_beta(-torch.inf, block)
        losses.append(loss(model, tokens))
    return torch.stack(losses)


def _all_off(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """All layers are off at once, each time."""
    return _one_by_one(model, tokens, loss, lambda i, blocks: blocks)


def _half(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """This sets W_beta x to 0, and sigmoid(0) is 1/2: the layer still writes."""
    return _one_by_one(model, tokens, loss, lambda i, blocks: [blocks[i]], 0.0)


def _full(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """This sets the write strength to 1, not to 0: sigmoid(inf) is 1."""
    return _one_by_one(model, tokens, loss, lambda i, blocks: [blocks[i]], torch.inf)


def _only_one(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """This switches off all other layers, and keeps the one in question."""
    return _one_by_one(
        model, tokens, loss, lambda i, blocks: [*blocks[:i], *blocks[i + 1 :]]
    )


def _intact(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """Nothing is switched off. A hook has to return the new output."""
    return _one_by_one(model, tokens, loss, lambda i, blocks: [])


def _skips_block(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    """This leaves out the whole block. Only its memory should be off: its MLP
    goes on.
    """
    losses = []
    for block in model.blocks:
        hook = block.register_forward_hook(lambda module, inputs, output: inputs[0])
        losses.append(loss(model, tokens))
        hook.remove()
    return torch.stack(losses)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "fast_weight_layer",
            (
                "**The layer** (Eqs. 20, 21, 24, 25, 29 and 37). One head. `x` is "
                "`[batch, time, d]`, `W_q` and `W_k` are `[key, d]`, `W_v` is "
                "`[value, d]`, `W_beta` is `[1, d]`, `W_out` is `[d, value]`. Use "
                "`DPFP(nu=1)`, `sum_normalize` and `ops.delta_rule(q, k, v, beta)`, "
                "which takes `[batch, time, heads, ...]` and beta `[batch, time, "
                "heads]`. Return x plus what the layer adds to it, `[batch, time, d]`."
            ),
            (fast_weight_layer,),
            (
                _layer_has_shape,
                _layer_adds_x,
                _layer_ignores_lengths,
                _layer_first_step,
                _layer_strength,
                _layer_corrects,
                _layer_without_features,
                _layer_of_any_size,
                _layer_has_gradient,
            ),
            (
                "Project x to q, k and v, and to one number per step for beta. q and k "
                "go through the feature map and the division by the sum, beta through "
                "the sigmoid.",
                "x @ W_q.T has the shape [batch, time, key]; [:, :, None] gives it one "
                "head for ops.delta_rule, and [:, :, 0] takes it away again.",
                "y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], "
                "beta)[:, :, 0], and then x + y @ W_out.T.",
            ),
            _layer,
            {
                _no_residual: _layer_adds_x,
                _not_normalised: _layer_ignores_lengths,
                _keys_normalised: _layer_ignores_lengths,
                _no_features: _layer_first_step,
                _no_sigmoid: _layer_first_step,
                _reads_first: _layer_first_step,
                _sums: _layer_corrects,
            },
        ),
        Exercise(
            "generate",
            (
                "**Continue a text.** `step(token, state)` reads one token and returns "
                "`(logits, state)`: the logits of the next token, `[vocabulary]`, and "
                "the state after it. The state is None before the first token. Read "
                "`prompt`, `int64 [time]`, then add the most likely token again and "
                "again. Return the `length` new tokens, `int64 [length]`."
            ),
            (generate,),
            (
                _generates_tokens,
                _generates_first,
                _generates_on,
                _generates_cheaply,
                _generates_any_length,
            ),
            (
                "Two loops: one over the prompt, one over the new tokens. The state "
                "goes from call to call through both.",
                "After the last token of the prompt you have the logits of the first "
                "new token: take their argmax before you call step again.",
                "for token in prompt: logits, state = step(token, state). Then, length "
                "times: token = logits.argmax(), keep it, and call step with it.",
            ),
            _text,
            {
                _with_prompt: _generates_tokens,
                _drops_state: _generates_on,
                _last_token_only: _generates_on,
                _reads_last_twice: _generates_first,
                _same_token: _generates_on,
                _frozen_state: _generates_on,
                _off_by_one: _generates_first,
            },
        ),
        Exercise(
            "ablate",
            (
                "**One layer without memory.** `loss(model, tokens)` is the loss of a "
                "`LanguageModel`. Block `i` computes the write strengths as the "
                "sigmoid of what `model.blocks[i].mixer.to_beta`, an `nn.Linear`, "
                "returns. Return `[layers]`: entry `i` is the loss if layer `i` has "
                "write strength 0 and all others work. Leave the model as it was."
            ),
            (ablate,),
            (
                _ablate_has_shape,
                _ablate_one_layer,
                _ablate_in_turn,
                _ablate_restores,
                _ablate_any_loss,
            ),
            (
                "register_forward_hook(f) makes a module return f(module, inputs, "
                "output) in place of its output. Call remove() on what it returns, "
                "and the module is as before.",
                "Which number does the sigmoid turn into 0? Not 0, which becomes 1/2.",
                "The hook returns torch.full_like(output, -torch.inf). Collect the "
                "losses, and return torch.stack(losses).",
            ),
            _model,
            {
                _stays_off: _ablate_in_turn,
                _all_off: _ablate_in_turn,
                _half: _ablate_one_layer,
                _full: _ablate_one_layer,
                _only_one: _ablate_one_layer,
                _intact: _ablate_one_layer,
                _skips_block: _ablate_one_layer,
            },
        ),
    )
}
