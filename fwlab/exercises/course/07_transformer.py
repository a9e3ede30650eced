"""A transformer."""

from functools import wraps

import torch
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.notation import exercise
from fwlab.feature_maps import DPFP, sum_normalize
from fwlab.models import LanguageModel

# --- fast_weight_layer ----------------------------------------------


def _layer(generator, batch=2, time=7, d=6, key=4, value=3):
    shapes = {
        "x": (batch, time, d),
        "W_q": (key, d),
        "W_k": (key, d),
        "W_v": (value, d),
        "W_beta": (1, d),
        "W_out": (d, value),
    }
    return {name: normal(generator, *shape) for name, shape in shapes.items()}


def _same_query(generator):
    """One step, whose query is its key."""
    inputs = _layer(generator, time=1)
    return inputs | {"W_q": inputs["W_k"]}


def _any_length(answer, reference, generator):
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


@exercise(_layer, difficulty=3, importance=5, minutes=17)
def fast_weight_layer(x, W_q, W_k, W_v, W_beta, W_out):
    """
    **The layer** (Eqs. 20, 21, 24, 25, 29 and 37). One head. `x` is `[batch, time, d]`,
    `W_q` and `W_k` are `[key, d]`, `W_v` is `[value, d]`, `W_beta` is `[1, d]`, `W_out`
    is `[d, value]`. Use `DPFP(nu=1)`, `sum_normalize` and `ops.delta_rule(q, k, v,
    beta)`, which takes `[batch, time, heads, ...]` and beta `[batch, time, heads]`.
    Return x plus what the layer adds to it, `[batch, time, d]`.

    ✓ returns a tensor of the shape of x
        shape((2, 7, 6, 4, 3), (1, 1, 4, 4, 4), (3, 2, 5, 2, 7))
    ✓ adds what it reads to x
        agrees(W_out=torch.zeros_like)
        == x
    ! W_out was 0: then only x is left.
    ✗ The sum with x is missing: the layer adds what it reads to its input.
        return x + -> return
    ✓ does not depend on the lengths of queries and keys
        _any_length
    ✗ The features are not divided by their sum (Eq. 29).
        q = sum_normalize -> q = ; k = sum_normalize -> k =
    ✗ Only the features of the keys are divided by their sum; those of the queries have
      to be divided, too (Eq. 29).
        q = sum_normalize -> q =
    ✓ writes half of v at the first step where W_beta is 0
        agrees(draw=_same_query, W_beta=torch.zeros_like)
    ! Query and key were the same, phi. sigmoid(0) = 1/2, so W = v phi^T / 2 after the
      first write, and reading it gives phi · phi / 2 times v.
    ✗ Queries and keys do not pass the feature map: phi is missing.
        phi = DPFP(nu=1) -> phi = lambda x: x
    ✗ The features are divided by their Euclidean norm, not by their sum (Eq. 29).
        phi = DPFP(nu=1) -> phi, sum_normalize = DPFP(nu=1), lambda f: F.normalize(f, dim=-1)
    ✗ The write strength is W_beta x itself: the sigmoid is missing (Eq. 21).
        torch.sigmoid(x @ W_beta.T) -> x @ W_beta.T
    ✗ The features are divided by their sum over the sequences of the batch, not over
      the features of a token (Eq. 29).
        phi = DPFP(nu=1) ->
          phi, sum_normalize = DPFP(nu=1), lambda f: f / f.sum(0).clamp(min=1e-9)
    ✗ This reads before it writes. Eq. 25 reads the memory that holds the pair of this
      step.
        # One head ->
          q = F.pad(q, (0, 0, 0, 1)); k, v, beta = (F.pad(p, (0, 0, 1, 0)) for p in (k, v, beta))  #
          ; y[:, :, 0] -> y[:, :-1, 0]
    ✓ writes with the strength sigmoid(W_beta x)
        agrees({"time": 1})
    ! This was one step, with all weights drawn at random (Eq. 21).
    ✓ follows the delta rule from step to step
        agrees({"time": 9})
    ! These were 9 steps in 2 sequences. Each step removes what its key held, and each
      sequence has a memory of its own.
    ✗ This is the sum rule: what the key held is not removed (Eqs. 20, 24).
        y[:, :, 0] -> (q @ k.mT).tril() @ (beta * v)
    ✓ writes nothing under a key without features
        agrees(W_k=lambda W: W * torch.tensor([[1], [0], [0], [0]]))
        == x
    ! Only one entry of each key was not 0, so all features are 0, and so is their sum.
      sum_normalize gives 0 there.
    ✓ works for any sizes, and long sequences
        agrees((1, 70, 3, 2, 5), (3, 3, 3, 3, 3), (4, 2, 8, 5, 1))
    ! The sizes were batch {batch}, time {time}, d {d}, key {key}, value {value}.
    ✓ lets gradients through to x and to all weights
        gradient({"time": 4})
    ? Project x to q, k and v, and to one number per step for beta. q and k go through
      the feature map and the division by the sum, beta through the sigmoid.
    ? x @ W_q.T has the shape [batch, time, key]; [:, :, None] gives it one head for
      ops.delta_rule, and [:, :, 0] takes it away again.
    ? y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)[:, :, 0],
      and then x + y @ W_out.T.
    """
    phi = DPFP(nu=1)
    q = sum_normalize(phi(x @ W_q.T))  # Eqs. 37 and 29
    k = sum_normalize(phi(x @ W_k.T))
    v = x @ W_v.T
    beta = torch.sigmoid(x @ W_beta.T)  # Eq. 21
    # One head, which writes, then reads (Eqs. 20, 24 and 25).
    y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T


# --- generate -------------------------------------------------------


def _network(generator, tokens=40, width=8):
    """Make a small random network whose next token depends on all it has read."""
    embedding = 2 * normal(generator, tokens, width)
    recurrent = 1.5 * normal(generator, width, width) / width**0.5
    out = normal(generator, tokens, width)

    def step(token, state):
        before = 0 if state is None else recurrent @ state
        after = torch.tanh(before + embedding[int(token)])
        return out @ after, after

    return step


def _text(generator, before=5, length=8, tokens=40):
    return {
        "step": _network(generator, tokens),
        "prompt": torch.randint(tokens, (before,), generator=generator),
        "length": length,
    }


def _is_cheap(answer, reference, generator):
    inputs, taken = _text(generator, 6, 10), []
    step = inputs["step"]

    def counted(token, state):
        taken.append(token)
        return step(token, state)

    ask(answer, reference(*inputs.values()), **{**inputs, "step": counted})
    if len(taken) > 16:
        raise Wrong(
            f"A prompt of 6 tokens and 10 new ones took {len(taken)} steps; 16 are "
            "enough. The state already holds what was read."
        )


@exercise(_text, difficulty=3, importance=4, minutes=21)
def generate(step, prompt, length):
    """
    **Continue a text.** `step(token, state)` reads one token and returns `(logits,
    state)`: the logits of the next token, `[vocabulary]`, and the state after it. The
    state is None before the first token. Read `prompt`, `int64 [time]`, then add the
    most likely token again and again. Return the `length` new tokens, `int64 [length]`.

    ✓ returns the new tokens, without the prompt
        shape((5, 8), (1, 3), (4, 1))
    ✗ The result begins with the prompt; only the new tokens are wanted.
        torch.stack(text) -> torch.cat([prompt, torch.stack(text)])
    ✓ begins with the most likely token after the whole prompt
        agrees((1, 1), (2, 1), (9, 1))
    ! The prompt had {before} tokens. Each goes through step, in order, with the state
      that the one before it has left.
    ✗ The last token of the prompt is read twice: the logits that follow the prompt are
      there already.
        in prompt: -> in [*prompt, prompt[-1]]:
    ✗ The first new token is missing: it goes into step, and not into the text.
        generate(step, prompt, length + 1)[1:]
    ✓ continues from its own tokens, and from the state
        agrees(*[(3, 12)] * 4)
    ! Each new token goes into step, with the latest state, to find the next.
    ✗ The state is dropped: step always gets None, so each token knows only the one
      before it.
        step=lambda token, state: step(token, None)
    ✗ The prompt is not read: step gets only its last token.
        in prompt: -> in prompt[-1:]:
    ✗ Every step gets the last token of the prompt, not the new one.
        token = logits.argmax() -> text.append(logits.argmax()) ; text.append(token) ->
    ✗ The state stays that of the prompt: each step has to continue from the state that
      the last one has left.
        append(token) -> append(token); logits, _ = step(token, state)
          ; if len(text) < length -> if False
    ✓ takes one step per token
        _is_cheap
    ✓ works for any lengths
        agrees((1, 60, 3), (70, 2, 300), (2, 1, 1))
    ! The prompt had {before} tokens of {tokens} different ones, and length was
      {length}.
    ? Two loops: one over the prompt, one over the new tokens. The state goes from call
      to call through both.
    ? After the last token of the prompt you have the logits of the first new token:
      take their argmax before you call step again.
    ? for token in prompt: logits, state = step(token, state). Then, length times: token
      = logits.argmax(), keep it, and call step with it.
    """
    state, text = None, []
    for token in prompt:
        logits, state = step(token, state)
    while len(text) < length:
        token = logits.argmax()
        text.append(token)
        if len(text) < length:  # nobody needs the logits after the last one
            logits, state = step(token, state)
    return torch.stack(text)


# --- ablate ---------------------------------------------------------


def _cross_entropy(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _last_token(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1])[:, -1], tokens[:, -1])


def _model(generator, layers=3, batch=2, loss=_cross_entropy):
    vocabulary = 7
    # Without initial numbers, which would come from the caller's generator.
    with torch.device("meta"):
        model = LanguageModel(vocabulary, "delta", layers, 2, 8, d_ff=8)
    model = model.to_empty(device="cpu").double()
    for p in model.parameters():
        p.data = normal(generator, *p.shape)
    tokens = torch.randint(vocabulary, (batch, 10), generator=generator)
    return {"model": model, "tokens": tokens, "loss": loss}


def _restores(answer, reference, generator):
    inputs, used = _model(generator), []

    @wraps(answer)
    def kept(model, *rest):
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


@exercise(_model, difficulty=4, importance=3, minutes=19)
def ablate(model, tokens, loss):
    """
    **One layer without memory.** `loss(model, tokens)` is the loss of a
    `LanguageModel`. Block `i` computes the write strengths as the sigmoid of what
    `model.blocks[i].mixer.gates.beta.projection`, an `nn.Linear` without bias,
    returns. Return `[layers]`: entry `i` is the loss if layer `i` has write strength 0
    and all others work. Leave the model as it was.

    ✓ returns one loss per layer
        shape(3, 1, 2)
    ✓ switches off the memory of the only layer, and nothing else
        agrees(1)
    ! The model had one layer. With beta = 0 its memory stays empty and adds nothing to
      x; its MLP goes on.
    ✗ This sets W_beta x to 0, and sigmoid(0) is 1/2: the layer still writes.
        -torch.inf -> 0.0
    ✗ This sets the write strength to 1, not to 0: sigmoid(inf) is 1.
        -torch.inf -> torch.inf
    ✗ This switches off all other layers, and keeps the one in question.
        hook = block.mixer.gates.beta.projection.register_forward_hook(never) ->
          hooks = [b.mixer.gates.beta.projection.register_forward_hook(never)
          for b in model.blocks if b is not block]
          ; hook.remove() -> [each.remove() for each in hooks]
    ✗ Nothing is switched off. A hook has to return the new output.
        return torch.full_like -> torch.full_like
    ✗ This leaves out the whole block. Only its memory should be off: its MLP goes on.
        block.mixer.gates.beta.projection.register_forward_hook(never) ->
          block.register_forward_hook(lambda module, inputs, output: inputs[0])
    ✓ switches off one layer at a time
        agrees(2, 4)
    ! The model had {layers} layers. Entry i is the loss without the memory of layer i,
      with all others at work.
    ✗ A layer stays off when the next one is tried: the change is left in place.
        hook.remove() ->
    ✗ All layers are off at once, each time.
        hook = block.mixer.gates.beta.projection.register_forward_hook(never) ->
          hooks = [b.mixer.gates.beta.projection.register_forward_hook(never)
          for b in model.blocks]
          ; hook.remove() -> [each.remove() for each in hooks]
    ✓ leaves the model as it was
        _restores
    ✓ measures the loss that it was given
        agrees((2, 5, _last_token))
    ! This loss was that of the last token only.
    ? register_forward_hook(f) makes a module return f(module, inputs, output) in place
      of its output. Call remove() on what it returns, and the module is as before.
    ? Which number does the sigmoid turn into 0? Not 0, which becomes 1/2.
    ? The hook returns torch.full_like(output, -torch.inf). Collect the losses, and
      return torch.stack(losses).
    """

    def never(module, inputs, output):
        return torch.full_like(output, -torch.inf)  # whose sigmoid is 0

    losses = []
    for block in model.blocks:
        hook = block.mixer.gates.beta.projection.register_forward_hook(never)
        losses.append(loss(model, tokens))
        hook.remove()
    return torch.stack(losses)


# --- mended_layer ---------------------------------------------------

START = """\
from fwlab import ops
from fwlab.feature_maps import DPFP


def mended_layer(x, W_q, W_k, W_v, W_beta, W_out):
    def features(x):
        phi = DPFP(nu=1)(x)
        return phi / phi.sum(0).clamp(min=1e-9)  # Eq. 29

    q, k, v = features(x @ W_q.T), features(x @ W_k.T), x @ W_v.T
    beta = torch.sigmoid(x @ W_beta.T)
    y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T"""


@exercise(_layer, difficulty=3, importance=4, minutes=8, start=START)
def mended_layer(x, W_q, W_k, W_v, W_beta, W_out):
    """
    **Find the bug.** This layer is meant to be that of exercise 1: one head, the same
    arguments, the same result. It has a single mistake. Mend it in place.

    ✓ returns a tensor of the shape of x
        shape((2, 7, 6, 4, 3), (1, 1, 4, 4, 4), (3, 2, 5, 2, 7))
    ✓ follows the delta rule from step to step
        agrees({"time": 9})
    ! These were 9 steps in 2 sequences. Each step removes what its key held, and each
      sequence has a memory of its own.
    ✗ This is the layer as you found it.
        start:
    ✗ The features are divided by their sum over time, which later steps change.
        sum_normalize(phi) -> phi / phi.sum(1, keepdim=True).clamp(min=1e-9)
    ✓ writes nothing under a key without features
        agrees(W_k=lambda W: W * torch.tensor([[1], [0], [0], [0]]))
    ! Only one entry of each key was not 0, so all features are 0, and so is their sum.
      sum_normalize gives 0 there.
    ✗ A token without features has the sum 0, and 0 / 0 is NaN.
        sum_normalize(phi) -> phi / phi.sum(-1, keepdim=True)
    ✓ lets gradients through to x and to all weights
        gradient({"time": 4})
    ? In training, a window meets other windows in every batch. Which line mixes the
      sequences of a batch?
    ? phi is [batch, time, features]. Eq. 29 divides by the sum of the features of one
      token: which dimension is that, and which is 0?
    ? phi.sum(0) has the shape [time, features], and broadcasting hides it.
      sum_normalize(phi) divides by phi.sum(-1, keepdim=True), and gives 0 where that is
      0.
    """

    def features(x):
        phi = DPFP(nu=1)(x)
        return sum_normalize(phi)  # over the features of each token (Eq. 29)

    q, k, v = features(x @ W_q.T), features(x @ W_k.T), x @ W_v.T
    beta = torch.sigmoid(x @ W_beta.T)
    y = ops.delta_rule(q[:, :, None], k[:, :, None], v[:, :, None], beta)
    return x + y[:, :, 0] @ W_out.T
