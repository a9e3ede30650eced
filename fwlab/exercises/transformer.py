"""A layer put together, and a model of such layers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, shape
from fwlab.exercises.solutions import (
    ablate,
    fast_weight_layer,
    generate,
    mended_layer,
)
from fwlab.feature_maps import DPFP, sum_normalize
from fwlab.models import LanguageModel

# --- fast_weight_layer ----------------------------------------------


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


def _same_query(generator: Generator) -> dict[str, Tensor]:
    """One step, whose query is its key."""
    inputs = _layer(generator, time=1)
    return inputs | {"W_q": inputs["W_k"]}


def _any_length(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs = _layer(generator)
    usual = ask(answer, inputs["x"], **inputs)
    for name in ("W_q", "W_k"):
        longer = {**inputs, name: 3 * inputs[name]}
        compare(
            ask(answer, inputs["x"], **longer),
            usual,
            f"{name} was multiplied by 3. Features that are divided by their sum "
            "(Eq. 29) stay the same.",
        )


def _read(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    q, k, v = (part[:, :, None] for part in (q, k, v))
    y: Any = ops.delta_rule(q, k, v, beta)
    return y[:, :, 0]


def _features(x: Tensor) -> Tensor:
    return sum_normalize(DPFP(nu=1)(x))


def _over_batch(x: Tensor) -> Tensor:
    phi = DPFP(nu=1)(x)
    return phi / phi.sum(0).clamp(min=1e-9)


def _other(
    x: Tensor,
    W_q: Tensor,
    W_k: Tensor,
    W_v: Tensor,
    W_beta: Tensor,
    W_out: Tensor,
    queries: Callable[[Tensor], Tensor] = _features,
    keys: Callable[[Tensor], Tensor] = _features,
    strength: Callable[[Tensor], Tensor] = torch.sigmoid,
    read: Callable[..., Tensor] = _read,
) -> Tensor:
    """The layer, with other functions in place of its own."""
    q, k, v = queries(x @ W_q.T), keys(x @ W_k.T), x @ W_v.T
    return x + read(q, k, v, strength(x @ W_beta.T)) @ W_out.T


def _reads_first(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """Pairs are written a step later, so a query meets the ones before it."""
    k, v, beta = (F.pad(part, (0, 0, 1, 0)) for part in (k, v, beta))
    return _read(F.pad(q, (0, 0, 0, 1)), k, v, beta)[:, :-1]


def _sums(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ (beta * v)


FAST_WEIGHT_LAYER = Exercise(
    name="fast_weight_layer",
    notebook="07_transformer",
    difficulty=3,
    importance=5,
    minutes=17,
    task="**The layer** (Eqs. 20, 21, 24, 25, 29 and 37). One head. `x` is "
    "`[batch, time, d]`, `W_q` and `W_k` are `[key, d]`, `W_v` is "
    "`[value, d]`, `W_beta` is `[1, d]`, `W_out` is `[d, value]`. Use "
    "`DPFP(nu=1)`, `sum_normalize` and `ops.delta_rule(q, k, v, beta)`, "
    "which takes `[batch, time, heads, ...]` and beta `[batch, time, "
    "heads]`. Return x plus what the layer adds to it, `[batch, time, d]`.",
    reference=fast_weight_layer,
    properties=(
        shape(
            "returns a tensor of the shape of x",
            _layer,
            [(2, 7, 6, 4, 3), (1, 1, 4, 4, 4), (3, 2, 5, 2, 7)],
        ),
        agrees(
            "adds what it reads to x",
            _layer,
            change={"W_out": torch.zeros_like},
            expected=lambda x, *weights: x,
            because="W_out was 0: then only x is left.",
            catches={
                "The sum with x is missing: the layer adds what it reads "
                "to its input.": lambda x, W_q, W_k, W_v, W_beta, W_out: (
                    fast_weight_layer(x, W_q, W_k, W_v, W_beta, W_out) - x
                )
            },
        ),
        Property(
            "does not depend on the lengths of queries and keys",
            _any_length,
            {
                "The features are not divided by their sum (Eq. 29).": partial(
                    _other, queries=DPFP(nu=1), keys=DPFP(nu=1)
                ),
                "Only the features of the keys are divided by their sum; those of the "
                "queries have to be divided, too (Eq. 29).": partial(
                    _other, queries=DPFP(nu=1)
                ),
            },
        ),
        agrees(
            "writes half of v at the first step where W_beta is 0",
            _same_query,
            change={"W_beta": torch.zeros_like},
            because="Query and key were the same, phi. sigmoid(0) = 1/2, so W = v "
            "phi^T / 2 after the first write, and reading it gives phi · phi / "
            "2 times v.",
            catches={
                "Queries and keys do not pass the feature map: "
                "phi is missing.": partial(
                    _other, queries=sum_normalize, keys=sum_normalize
                ),
                "The write strength is W_beta x itself: the sigmoid is missing (Eq. "
                "21).": partial(_other, strength=lambda logit: logit),
                "The features are divided by their sum over the sequences of the "
                "batch, not over the features of a token (Eq. 29).": partial(
                    _other, queries=_over_batch, keys=_over_batch
                ),
                "This reads before it writes. Eq. 25 reads the memory that holds the "
                "pair of this step.": partial(_other, read=_reads_first),
            },
        ),
        agrees(
            "writes with the strength sigmoid(W_beta x)",
            _layer,
            [{"time": 1}],
            because="This was one step, with all weights drawn at random (Eq. 21).",
        ),
        agrees(
            "follows the delta rule from step to step",
            _layer,
            [{"time": 9}],
            because="These were 9 steps in 2 sequences. Each step removes what its key "
            "held, and each sequence has a memory of its own.",
            catches={
                "This is the sum rule: what the key held is not removed "
                "(Eqs. 20, 24).": partial(_other, read=_sums)
            },
        ),
        agrees(
            "writes nothing under a key without features",
            _layer,
            change={"W_k": lambda W: W * torch.tensor([[1], [0], [0], [0]])},
            expected=lambda x, *weights: x,
            because="Only one entry of each key was not 0, so all features are 0, and "
            "so is their sum. sum_normalize gives 0 there.",
        ),
        agrees(
            "works for any sizes, and long sequences",
            _layer,
            [(1, 70, 3, 2, 5), (3, 3, 3, 3, 3), (4, 2, 8, 5, 1)],
            because="The sizes were batch {batch}, time {time}, d {d}, key {key}, "
            "value {value}.",
        ),
        gradient("lets gradients through to x and to all weights", _layer, {"time": 4}),
    ),
    hints=(
        "Project x to q, k and v, and to one number per step for beta. q and k "
        "go through the feature map and the division by the sum, beta through "
        "the sigmoid.",
        "x @ W_q.T has the shape [batch, time, key]; [:, :, None] gives it one "
        "head for ops.delta_rule, and [:, :, 0] takes it away again.",
        "y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], "
        "beta)[:, :, 0], and then x + y @ W_out.T.",
    ),
    example=_layer,
)


# --- generate -------------------------------------------------------

#: Takes a token and a state (None = nothing was read); returns logits of the
#: next token `[vocabulary]`, and the state after it.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


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
    generator: Generator, before: int = 5, length: int = 8, tokens: int = 40
) -> dict[str, Any]:
    return {
        "step": _network(generator, tokens),
        "prompt": torch.randint(tokens, (before,), generator=generator),
        "length": length,
    }


def _is_cheap(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs, taken = _text(generator, 6, 10), []
    step = inputs["step"]

    def counted(token: Tensor, state: Any) -> tuple[Tensor, Any]:
        taken.append(token)
        return step(token, state)

    ask(answer, reference(*inputs.values()), **{**inputs, "step": counted})
    if len(taken) > 16:
        raise Wrong(
            f"A prompt of 6 tokens and 10 new ones took {len(taken)} steps; 16 are "
            "enough. The state already holds what was read."
        )


def _tokens(step: Step, token: Tensor, state: Any, length: int) -> list[Tensor]:
    """Greedy tokens from this token and state on."""
    text: list[Tensor] = []
    for _ in range(length):
        logits, state = step(token, state)
        token = logits.argmax()
        text.append(token)
    return text


def _state_after(step: Step, prompt: Tensor) -> Any:
    state = None
    for token in prompt:
        _, state = step(token, state)
    return state


def _drops_state(step: Step, prompt: Tensor, length: int) -> Tensor:
    return generate(lambda token, state: (step(token, None)[0], None), prompt, length)


def _same_token(step: Step, prompt: Tensor, length: int) -> Tensor:
    state, text = _state_after(step, prompt[:-1]), []
    for _ in range(length):
        logits, state = step(prompt[-1], state)
        text.append(logits.argmax())
    return torch.stack(text)


def _frozen_state(step: Step, prompt: Tensor, length: int) -> Tensor:
    text, state = [*generate(step, prompt, 1)], _state_after(step, prompt)
    while len(text) < length:
        text.append(step(text[-1], state)[0].argmax())
    return torch.stack(text)


GENERATE = Exercise(
    name="generate",
    notebook="07_transformer",
    difficulty=3,
    importance=4,
    minutes=21,
    task="**Continue a text.** `step(token, state)` reads one token and returns "
    "`(logits, state)`: the logits of the next token, `[vocabulary]`, and "
    "the state after it. The state is None before the first token. Read "
    "`prompt`, `int64 [time]`, then add the most likely token again and "
    "again. Return the `length` new tokens, `int64 [length]`.",
    reference=generate,
    properties=(
        shape(
            "returns the new tokens, without the prompt",
            _text,
            [(5, 8), (1, 3), (4, 1)],
            catches={
                "The result begins with the prompt; only the new "
                "tokens are wanted.": lambda step, prompt, length: torch.cat(
                    [prompt, generate(step, prompt, length)]
                )
            },
        ),
        agrees(
            "begins with the most likely token after the whole prompt",
            _text,
            [(1, 1), (2, 1), (9, 1)],
            because="The prompt had {before} tokens. Each goes through step, in order, "
            "with the state that the one before it has left.",
            catches={
                "The last token of the prompt is read twice: the logits that follow "
                "the prompt are there already.": lambda step, prompt, length: (
                    torch.stack(
                        _tokens(step, prompt[-1], _state_after(step, prompt), length)
                    )
                ),
                "The first new token is missing: it goes into step, and not into the "
                "text.": lambda step, prompt, length: generate(
                    step, prompt, length + 1
                )[1:],
            },
        ),
        agrees(
            "continues from its own tokens, and from the state",
            _text,
            [(3, 12)] * 4,
            because="Each new token goes into step, with the latest state, to find the "
            "next.",
            catches={
                "The state is dropped: step always gets None, so each token knows only "
                "the one before it.": _drops_state,
                "The prompt is not read: step gets only "
                "its last token.": lambda step, prompt, length: torch.stack(
                    _tokens(step, prompt[-1], None, length)
                ),
                "Every step gets the last token of the prompt, not "
                "the new one.": _same_token,
                "The state stays that of the prompt: each step has to continue from "
                "the state that the last one has left.": _frozen_state,
            },
        ),
        Property("takes one step per token", _is_cheap),
        agrees(
            "works for any lengths",
            _text,
            [(1, 60, 3), (70, 2, 300), (2, 1, 1)],
            because="The prompt had {before} tokens of {tokens} different ones, and "
            "length was {length}.",
        ),
    ),
    hints=(
        "Two loops: one over the prompt, one over the new tokens. The state "
        "goes from call to call through both.",
        "After the last token of the prompt you have the logits of the first "
        "new token: take their argmax before you call step again.",
        "for token in prompt: logits, state = step(token, state). Then, length "
        "times: token = logits.argmax(), keep it, and call step with it.",
    ),
    example=_text,
)


# --- ablate ---------------------------------------------------------

#: Takes a model and tokens; returns a tensor of no dimensions.
Loss = Callable[[nn.Module, Tensor], Tensor]


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


def _restores(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs, used = _model(generator), []

    @wraps(answer)
    def kept(model: nn.Module, *rest: Any) -> Any:
        used.append(model)
        return answer(model, *rest)

    ask(kept, normal(generator, 3), **inputs)
    with torch.no_grad():
        before, after = (
            _cross_entropy(m, inputs["tokens"]) for m in (inputs["model"], *used)
        )
    compare(
        after,
        before,
        "This is the loss of the model, after your function has returned. Is there a "
        "hook to remove, or a weight to put back?",
    )


def _with_beta(logit: float, block: Any) -> Any:
    """Set the write strength of a block; returns what undoes it."""
    return block.mixer.gates.beta.projection.register_forward_hook(
        lambda module, inputs, output: torch.full_like(output, logit)
    )


def _one_by_one(
    model: Any,
    tokens: Tensor,
    loss: Loss,
    chosen: Any = lambda layer, blocks: [blocks[layer]],
    logit: float = -torch.inf,
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
    losses = []
    for block in model.blocks:
        _with_beta(-torch.inf, block)
        losses.append(loss(model, tokens))
    return torch.stack(losses)


def _skips_block(model: Any, tokens: Tensor, loss: Loss) -> Tensor:
    losses = []
    for block in model.blocks:
        hook = block.register_forward_hook(lambda module, inputs, output: inputs[0])
        losses.append(loss(model, tokens))
        hook.remove()
    return torch.stack(losses)


ABLATE = Exercise(
    name="ablate",
    notebook="07_transformer",
    difficulty=4,
    importance=3,
    minutes=19,
    task="**One layer without memory.** `loss(model, tokens)` is the loss of a "
    "`LanguageModel`. Block `i` computes the write strengths as the "
    "sigmoid of what `model.blocks[i].mixer.gates.beta.projection`, an `nn.Linear` "
    "without bias, returns. Return `[layers]`: entry `i` is the loss if layer `i` has "
    "write strength 0 and all others work. Leave the model as it was.",
    reference=ablate,
    properties=(
        shape("returns one loss per layer", _model, [3, 1, 2]),
        agrees(
            "switches off the memory of the only layer, and nothing else",
            _model,
            [1],
            because="The model had one layer. With beta = 0 its memory stays empty and "
            "adds nothing to x; its MLP goes on.",
            catches={
                "This sets W_beta x to 0, and sigmoid(0) is 1/2: the layer still "
                "writes.": partial(_one_by_one, logit=0.0),
                "This sets the write strength to 1, not to 0: "
                "sigmoid(inf) is 1.": partial(_one_by_one, logit=torch.inf),
                "This switches off all other layers, and keeps the "
                "one in question.": partial(
                    _one_by_one,
                    chosen=lambda i, blocks: [*blocks[:i], *blocks[i + 1 :]],
                ),
                "Nothing is switched off. A hook has to return "
                "the new output.": partial(_one_by_one, chosen=lambda i, blocks: []),
                "This leaves out the whole block. Only its memory should be off: its "
                "MLP goes on.": _skips_block,
            },
        ),
        agrees(
            "switches off one layer at a time",
            _model,
            [2, 4],
            because="The model had {layers} layers. Entry i is the loss without the "
            "memory of layer i, with all others at work.",
            catches={
                "A layer stays off when the next one is tried: the change is left in "
                "place.": _stays_off,
                "All layers are off at once, each time.": partial(
                    _one_by_one, chosen=lambda i, blocks: blocks
                ),
            },
        ),
        Property("leaves the model as it was", _restores),
        agrees(
            "measures the loss that it was given",
            _model,
            [(2, 5, _last_token)],
            because="This loss was that of the last token only.",
        ),
    ),
    hints=(
        "register_forward_hook(f) makes a module return f(module, inputs, "
        "output) in place of its output. Call remove() on what it returns, "
        "and the module is as before.",
        "Which number does the sigmoid turn into 0? Not 0, which becomes 1/2.",
        "The hook returns torch.full_like(output, -torch.inf). Collect the "
        "losses, and return torch.stack(losses).",
    ),
    example=_model,
)


# --- mended_layer ---------------------------------------------------


#: What `check` says of it must not tell where the bug is.
_AS_FOUND = {
    "This is the layer as you found it.": partial(
        _other, queries=_over_batch, keys=_over_batch
    )
}
MENDED_LAYER = replace(
    FAST_WEIGHT_LAYER,
    name="mended_layer",
    task="**Find the bug.** This layer is meant to be that of exercise 1: one head, "
    "the same arguments, the same result. It has a single mistake. Mend it in place.",
    start="""\
from fwlab import ops
from fwlab.feature_maps import DPFP


def mended_layer(x, W_q, W_k, W_v, W_beta, W_out):
    def features(x):
        phi = DPFP(nu=1)(x)
        return phi / phi.sum(0).clamp(min=1e-9)  # Eq. 29

    q, k, v = features(x @ W_q.T), features(x @ W_k.T), x @ W_v.T
    beta = torch.sigmoid(x @ W_beta.T)
    y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T""",
    reference=mended_layer,
    properties=(
        FAST_WEIGHT_LAYER.properties[0],
        *(
            replace(each, catches=_AS_FOUND if "step to step" in each.says else {})
            for each in FAST_WEIGHT_LAYER.properties
            if each.says.startswith(("follows", "writes nothing", "lets gradients"))
        ),
    ),
    hints=(
        "In training, a window meets other windows in every batch. Which line mixes "
        "the sequences of a batch?",
        "phi is [batch, time, features]. Eq. 29 divides by the sum of the features of "
        "one token: which dimension is that, and which is 0?",
        "phi.sum(0) has the shape [time, features], and broadcasting hides it. "
        "sum_normalize(phi) divides by phi.sum(-1, keepdim=True), and gives 0 where "
        "that is 0.",
    ),
    difficulty=3,
    importance=4,
    minutes=8,
)


EXERCISES = {
    each.name: each for each in (FAST_WEIGHT_LAYER, GENERATE, ABLATE, MENDED_LAYER)
}
