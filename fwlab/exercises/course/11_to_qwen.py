"""Layers of today."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

import fwlab.models
from fwlab.exercises.answers import Wrong, ask, normal
from fwlab.exercises.course.delta_rule import delta_step
from fwlab.exercises.course.since_2021 import gated_delta_step
from fwlab.exercises.course.start_here import read_memory
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly
from fwlab.feature_maps import l2_normalize
from fwlab.files import result

# --- what the published layer returns -------------------------------------


def published(name: str) -> tuple[dict[str, Any], Tensor]:
    """Arguments of `modern_layer`, and what the layer of transformers returns.

    The file `data/results/qwen-layer.json` holds sizes, a seed, and the outputs;
    `docs/tools/qwen_layer.py` makes it. Weights and input are drawn here, so that
    nobody has to store them.

    - `name`: "plain", or "grouped": twice as many value heads as key heads.
    - Returns the arguments by name and in order, in float64, and the outputs
      `[batch, time, d_model]`.
    """
    case = result("qwen-layer")["cases"][name]
    outputs = torch.tensor(case["outputs"], dtype=torch.float64)
    return drawn(Generator().manual_seed(case["seed"]), **case["sizes"]), outputs


def drawn(
    generator: Generator,
    batch: int = 2,
    time: int = 5,
    key_heads: int = 2,
    value_heads: int = 2,
    key: int = 3,
    value: int = 4,
    d: int = 6,
) -> dict[str, Any]:
    """Arguments of `modern_layer`."""
    draw = partial(normal, generator)
    channels = 2 * key_heads * key + value_heads * value
    return {
        "x": draw(batch, time, d),
        "W_qkv": draw(channels, d),
        "conv": draw(channels, 4) / 2,
        "W_z": draw(value_heads * value, d),
        "W_b": draw(value_heads, d),
        "W_a": draw(value_heads, d),
        "A_log": draw(value_heads) - 1,
        "dt_bias": draw(value_heads),
        "norm": 1 + draw(value) / 4,
        "W_out": draw(d, value_heads * value) / value_heads,
        "key_heads": key_heads,
    }


def measured(name: str) -> dict[str, list[dict[str, Any]]]:
    """Read runs that are too long for a notebook, by row: a run for each seed.

    - `name`: "recall" or "shakespeare", which `docs/tools/qwen_parts.py` makes with
      the settings in `data/results/qwen-parts.json`; or "hybrid", which is
      `docs/reproduce/hybrid.py --quick`.
    """
    if name == "hybrid":
        kind, runs = "stack", result("hybrid.quick")["points"]
    else:
        kind, runs = "row", result("qwen-parts")[name]["runs"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        rows.setdefault(run[kind], []).append(run)
    return rows


def recall_text(
    generator: Generator, batch: int = 16, items: int = 20, n: int = 8
) -> tuple[Tensor, Tensor]:
    """Pairs that are written, asked for, overwritten, and forgotten all together.

    Items of two tokens: `key value` writes; `key ?` asks, and the answer is the newest
    value of this key since the last `| |`, or `.` if there is none; `. .` does nothing.
    Keys are tokens 0 to n - 1, values the next n, then `.`, `|` and `?`.

    - Returns tokens and answers, `[batch, 2 items]`, an answer of -100 = not asked.
    """
    nothing, reset, ask = range(2 * n, 2 * n + 3)
    keys = torch.randint(n, (batch, items), generator=generator)
    values = torch.randint(n, 2 * n, (batch, items), generator=generator)
    chance = torch.rand(batch, items, generator=generator)
    held = torch.full((batch, n), nothing)
    tokens, answers = [], []
    for k, v, c in zip(keys.T, values.T, chance.T, strict=True):
        write, asks, fades = c < 0.5, (c >= 0.5) & (c < 0.9), c > 0.95
        first = torch.where(write | asks, k, torch.where(fades, reset, nothing))
        second = torch.where(write, v, torch.where(asks, ask, first))
        old = held.gather(1, k[:, None])[:, 0]
        tokens += [first, second]
        answers += [torch.full_like(old, -100), torch.where(asks, old, -100)]
        held = held.scatter(1, k[:, None], torch.where(write, v, old)[:, None])
        held = held.masked_fill(fades[:, None], nothing)
    return torch.stack(tokens, 1), torch.stack(answers, 1)


# --- value_groups ----------------------------------------------------------


def _heads(generator, key_heads=2, value_heads=4, lead=(2, 3)):
    return {"x": normal(generator, *lead, key_heads, 5), "value_heads": value_heads}


@exercise(_heads, difficulty=2, importance=3, minutes=6)
def value_groups(x, value_heads):
    """
    **Value groups.** For queries or keys `x` `[..., key heads, key]` and a number of
    `value_heads`, a multiple of the key heads, return `[..., value heads, key]`: each
    key head serves as many *consecutive* value heads.

    ✓ returns as many heads as there are values
        shape((2, 4), (1, 3), (3, 3))
    ✓ with as many key heads as value heads, changes nothing
        agrees((2, 2), (3, 3))
        == x
    ✗ This gives the mean of all key heads to every value head.
        x.mean(-2, keepdim=True).expand(*x.shape[:-2], value_heads, -1)
    ✗ The groups are in reverse order.
        x=x.flip(-2)
    ✓ with a single key head, gives it to every value head
        agrees((1, 4))
        == x.expand(*x.shape[:-2], value_heads, -1)
    ✗ A key head is shared, not divided up: every value head gets all of it.
        value_groups(x, value_heads) * x.shape[-2] / value_heads
    ✓ serves value heads that stand side by side
        agrees((2, 4), (3, 6), (2, 6))
    ! There were {key_heads} key heads for {value_heads} value heads.
    ✗ Here value heads take turns: 0, 1, 0, 1. Consecutive ones share a key head: 0, 0,
      1, 1.
        torch.cat([x] * (value_heads // x.shape[-2]), -2)
    ✓ works on any leading dimensions, such as [batch, time]
        agrees((2, 4, ()), (2, 4, (3,)), (2, 4, (4, 2)))
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to x
        gradient()
    ? Four value heads and two key heads: which key head does value head 1 use?
    ? Repeat each head value heads / key heads times, before the next one comes.
    ? torch.repeat_interleave repeats entries in place; Tensor.repeat repeats the whole
      row.
    """
    key_heads = x.shape[-2]
    return x.repeat_interleave(value_heads // key_heads, -2)


# --- modern_layer ----------------------------------------------------------


def gated_delta_rule(q, k, v, beta, log_decay):
    """Repeat the step of notebook 10 from an empty memory; read after each token."""
    W, y = v.new_zeros(*v[:, 0].shape, k.shape[-1]), []
    for t in range(q.shape[1]):
        W = gated_delta_step(W, k[:, t], v[:, t], beta[:, t], log_decay[:, t].exp())
        y.append(read_memory(W, q[:, t]))
    return torch.stack(y, 1)


def _as_published(answer, reference, generator):
    for name in ("plain", "grouped"):
        arguments, outputs = published(name)
        y = ask(answer, outputs, **arguments)
        off = ((y - outputs).norm() / outputs.norm()).item()
        if not off < 1e-5:
            raise Wrong(
                f'In the case "{name}", your output is off by {off:.1g} from that of '
                "transformers, relative to its size. Up to 1e-5 is rounding."
            )


# Three stages are looked at alone. In their checks W_out is a unit matrix, the norm has
# no weights and the gate is the same everywhere, so the direction of what a head reads
# comes out, whatever norm and gate do to its length.


def _shown(generator, time, key_heads=2, value_heads=2, key=3, value=4):
    width = value_heads * value
    given = drawn(generator, 2, time, key_heads, value_heads, key, value, d=width)
    given["x"][..., 0] = 1
    W_z = torch.zeros_like(given["W_z"])
    W_z[:, 0] = 1
    norm, W_out = torch.ones_like(given["norm"]), torch.eye(width).double()
    return given | {"W_z": W_z, "norm": norm, "W_out": W_out}


def _directions(y, x, W_qkv, conv, W_z, W_b, W_a, A_log, *_):
    return F.normalize(y.unflatten(-1, (len(A_log), -1)), dim=-1)


def _last_directions(y, *given):
    return _directions(y, *given)[:, -1]


def _overwriting(generator, time):
    """Give all tokens one key: each replaces what the one before has written."""
    given = _shown(generator, time, key=1)
    made, conv = given["W_qkv"], given["conv"]
    made[:4], conv[:4] = 0, 1  # the queries and keys of two heads
    made[:4, 0] = 1e4  # so long that no epsilon counts
    W_b = torch.zeros_like(given["W_b"])
    W_b[:, 0] = 100  # the sigmoid is 1
    A_log = torch.zeros_like(given["A_log"])
    return given | {"W_b": W_b, "W_a": 0 * W_b, "A_log": A_log, "dt_bias": A_log + 100}


def _orthogonal(generator, key_heads=2, value_heads=2):
    """Three tokens write under orthogonal keys, one of them short; nothing fades."""
    given = _shown(generator, 3, key_heads, value_heads, value=3)
    x = torch.eye(3, 3 * value_heads).double()
    queries = 0.5 + torch.rand(3 * key_heads, 3 * value_heads, generator=generator)
    lengths = 0.5 + torch.rand(key_heads, 1, 3 * value_heads, generator=generator)
    lengths[..., 0] /= 500
    keys, values = (lengths * x).flatten(0, 1), x.repeat(value_heads, 1)
    conv, W_b = torch.zeros_like(given["conv"]), torch.full_like(given["W_b"], 100)
    conv[:, -1] = 1
    A_log = torch.full_like(given["A_log"], -100)
    return given | {
        "x": x.expand(2, -1, -1),
        "W_qkv": torch.cat([queries, keys, values]).double(),
        "conv": conv,
        "W_z": torch.ones_like(given["W_z"]),
        "W_b": W_b,
        "W_a": 0 * W_b,
        "A_log": A_log,
        "dt_bias": A_log,
    }


@exercise(drawn, difficulty=4, importance=5, minutes=50)
def modern_layer(x, W_qkv, conv, W_z, W_b, W_a, A_log, dt_bias, norm, W_out, key_heads):
    """
    **The layer.** For `x` `[batch, time, d]`, return the output of the layer, `[batch,
    time, d]`, from an empty memory. `W_qkv` `[channels, d]` makes queries, keys and
    values side by side, `conv` `[channels, 4]` is the convolution, whose last column
    belongs to the token itself; `W_z`, `W_b`, `W_a`, `A_log`, `dt_bias`, `norm`
    `[value]` and `W_out` are those of the table. There are `key_heads` key heads, and
    `len(A_log)` value heads. Both epsilons are 1e-6.

    ✓ returns a tensor of the shape of x
        shape({}, {"time": 1})
    ✓ convolution: makes values by W_qkv, conv and SiLU
        agrees(1, 6, draw=_overwriting, of=_directions)
    ! These are directions of what each head reads. All keys were the same, so that is
      the value of the token alone. There are zeros before the first token, and in
      W_qkv queries come first, then keys, then values.
    ✗ There is no SiLU after the convolution.
        F.silu(F.conv1d -> (F.conv1d
    ✗ The convolution is turned around: its last column belongs to the token itself.
        conv=conv.flip(1)
    ✗ This convolution sees later tokens: its zeros belong before the first token.
        (conv.shape[1] - 1, 0) -> (0, 3)
    ✓ keys: have length 1, and neighbouring value heads share a key head
        agrees((), (2, 4), (1, 3), draw=_orthogonal, of=_last_directions)
    ! These are directions of what each head reads after three tokens, whose keys were
      orthogonal. There were {key_heads} key heads and {value_heads} value heads. One
      key was so short that its epsilon counts.
    ✗ Keys are used as they are. They have to be of length 1.
        p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() -> p
    ✗ Keys and queries are divided by their norm without an epsilon.
        + 1e-6 ->
    ✗ The epsilon of the keys belongs inside the root: sqrt(|x|² + 1e-6).
        (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() -> (p.norm(dim=-1, keepdim=True) + 1e-6)
    ✗ Value heads take turns with the key heads here. Consecutive ones share a key head.
        value_groups(q * q.shape[-1] ** -0.5, heads), value_groups(k, heads) ->
          (p.repeat(1, 1, heads // key_heads, 1) for p in (q * q.shape[-1] ** -0.5, k))
    ✓ recurrence: fades, corrects and reads, over several tokens
        agrees({"time": 2}, {"time": 7, "key": 4, "value": 3}, draw=_shown, of=_directions)
    ! These are directions of what each head reads. There were {time} tokens. Look at
      beta and at the decay: log d = -exp(A_log) softplus(a + dt_bias).
    ✗ The strength is 1 everywhere. It is the sigmoid of W_b x.
        torch.sigmoid(x @ W_b.T) -> torch.ones_like(x @ W_b.T)
    ✗ The exponential of A_log is missing.
        -A_log.exp() -> -A_log
    ✗ dt_bias is not added.
        + dt_bias ->
    ✗ The decay has a sigmoid in place of the softplus.
        F.softplus -> torch.sigmoid
    ✗ Nothing fades: log_decay is 0.
        -A_log.exp() -> 0 * A_log
    ✓ norm and gate: each head has its norm, then come gate and W_out
        agrees({"time": 1}, {}, {"value_heads": 4})
    ! All before the norm is right, but for the length of the queries, which the norm
      nearly hides. Epsilons count, too.
    ✗ The gate is a sigmoid here. In this layer it is SiLU.
        F.silu(x @ W_z.T) -> torch.sigmoid(x @ W_z.T)
    ✗ There is no gate.
        * F.silu(x @ W_z.T) ->
    ✗ The gate comes before the norm here. It comes after it.
        F.rms_norm(y -> F.rms_norm(y * F.silu(x @ W_z.T).view_as(y)
          ; (y.flatten(-2) * F.silu(x @ W_z.T)) -> y.flatten(-2)
    ✗ The norm multiplies by 1 + weight. In this layer it is the weight itself.
        norm=1 + norm
    ✗ There is no norm.
        F.rms_norm(y, (width,), norm, 1e-6) -> norm * y
    ✗ The norm is over all heads together. Each head has its own.
        F.rms_norm(y, (width,), norm, 1e-6) ->
          norm * F.rms_norm(y.flatten(-2), (heads * width,), eps=1e-6).view_as(y)
        F.rms_norm(y, (width,), norm, 1e-6) ->
          norm * F.rms_norm(y.flatten(-2), (heads * width,)).view_as(y)
    ✗ The queries lack the factor K^-0.5.
        * q.shape[-1] ** -0.5 ->
    ✗ The norm has another epsilon than 1e-6.
        norm, 1e-6 -> norm, 1e-5
        norm, 1e-6 -> norm, 0.0
    ✓ returns what the layer of transformers returns, to 1e-5
        _as_published
    ✓ lets gradients through to x and all weights
        gradient()
    ? Go through the equations from the top. After each one, print the shape. Queries
      and keys have key_heads heads until value_groups.
    ? F.pad((x @ W_qkv.T).mT, (3, 0)) puts three zeros before the first token; F.conv1d
      with groups=len(conv) takes conv[:, None].
    ? The rule is gated_delta_rule(q, k, v, beta, log_decay), the norm F.rms_norm(y,
      (value,), norm, 1e-6), once for each head.
    """
    heads, width = len(A_log), len(norm)
    qkv = F.pad((x @ W_qkv.T).mT, (conv.shape[1] - 1, 0))  # no token sees a later one
    qkv = F.silu(F.conv1d(qkv, conv[:, None], groups=len(conv))).mT
    keys = (qkv.shape[-1] - heads * width) // 2
    q, k, v = qkv.split([keys, keys, heads * width], -1)

    q, k = (p.unflatten(-1, (key_heads, -1)) for p in (q, k))
    q, k = (p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt() for p in (q, k))
    q, k = value_groups(q * q.shape[-1] ** -0.5, heads), value_groups(k, heads)
    beta = torch.sigmoid(x @ W_b.T)
    log_decay = -A_log.exp() * F.softplus(x @ W_a.T + dt_bias)
    y = gated_delta_rule(q, k, v.unflatten(-1, (heads, -1)), beta, log_decay)
    y = F.rms_norm(y, (width,), norm, 1e-6)
    return (y.flatten(-2) * F.silu(x @ W_z.T)) @ W_out.T


# --- padded_state ----------------------------------------------------------


def _padded(generator, before=0, tokens=4, after=2, gap=False):
    """Two sequences, of which the second has padding at its ends, or inside."""
    time = before + tokens + after
    k, v = normal(generator, 2, time, 4), normal(generator, 2, time, 3)
    beta, fade = torch.rand(2, 2, time, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, time, dtype=torch.bool)
    mask[1, :before] = mask[1, before + tokens :] = False
    if gap:
        mask[1, before + 1] = False
    return {
        "k": l2_normalize(k),
        "v": v,
        "beta": 0.1 + 0.8 * beta,
        "log_decay": -0.1 - fade,
        "mask": mask,
    }


def _alone(k, v, beta, log_decay, mask):
    """Run each sequence by itself, without its padding."""
    states = []
    for row in range(len(k)):
        W = v.new_zeros(v.shape[-1], k.shape[-1])
        for t in mask[row].nonzero()[:, 0]:
            W = log_decay[row, t].exp() * W
            W = delta_step(W, k[row, t], v[row, t], beta[row, t])
        states.append(W)
    return torch.stack(states)


START = """\
from fwlab.ops.delta.delta import delta_step


def padded_state(k, v, beta, log_decay, mask):
    k = torch.where(mask[..., None], k, 0)  # padding writes nothing
    v = torch.where(mask[..., None], v, 0)
    W = v.new_zeros(len(v), v.shape[-1], k.shape[-1])
    for t in range(k.shape[1]):
        W = log_decay[:, t, None, None].exp() * W
        W = delta_step(W, k[:, t], v[:, t], beta[:, t])
    return W"""


@exercise(_padded, difficulty=3, importance=4, minutes=10, start=START)
def padded_state(k, v, beta, log_decay, mask):
    """
    **Padding.** For keys `k` `[batch, time, key]`, values `v` `[batch, time, value]`,
    `beta` and `log_decay` `[batch, time]`, and a `mask` `[batch, time]` that is True at
    real tokens, return the state `[batch, value, key]` after the last token: for every
    sequence the state it has alone, without its padding.

    ✓ returns a state for each sequence
        shape({}, {"tokens": 1, "after": 0})
    ✓ without padding, is the state of the gated delta rule
        agrees({"after": 0}, {"after": 0, "tokens": 1})
        == _alone(k, v, beta, log_decay, mask)
    ! There was no padding here.
    ✗ The mask is upside down: it is True at real tokens.
        mask=mask == 0
    ✗ The state never fades. Real tokens do fade it.
        log_decay=0 * log_decay
    ✗ The strengths of the real tokens are lost, too.
        beta=torch.ones_like(beta)
    ✓ with padding at the start, the state is that of the sequence alone
        agrees({"before": 2, "after": 0})
        == _alone(k, v, beta, log_decay, mask)
    ! The padding came first. Does it write?
    ✗ Padding is written like any other token: the mask is not used.
        mask=torch.ones_like(mask)
    ✗ Padding does not fade the memory any more, but it is still written.
        k, v = (torch.where(mask[..., None], x, 0) for x in (k, v)) ->
    ✓ with padding at the end, the state is that of the sequence alone
        agrees({}, {"after": 5})
        == _alone(k, v, beta, log_decay, mask)
    ! There were {after} tokens of padding after the last real one. What do they still
      do to W?
    ✗ Padding writes nothing any more, but the memory fades at every token: the longer
      the padding, the less is left.
        start:
    ✗ The values of padding are 0, but its keys are not: writing 0 erases what the key
      holds.
        k, v = (torch.where(mask[..., None], x, 0) for x in (k, v)) -> v = v * mask[..., None]
    ✗ At padding the decay is 0 here, which erases everything. A decay of 1, log_decay =
      0, keeps it.
        torch.where(mask, log_decay, 0) -> torch.where(mask, log_decay, -torch.inf)
    ✓ with padding inside, the state is that of the sequence alone
        agrees({"gap": True}, {"gap": True, "before": 1})
        == _alone(k, v, beta, log_decay, mask)
    ! The padding was between two real tokens.
    ✓ lets gradients through to k, v, beta and log_decay
        gradient()
    ? Give the second sequence five more tokens of padding, and print the norm of its
      state. What should it be?
    ? A token does two things to W: it fades it, and it writes. Which of the two does
      the mask stop?
    ? Where the mask is False, log_decay has to be 0 as well: torch.where(mask,
      log_decay, 0).
    """
    k, v = (torch.where(mask[..., None], x, 0) for x in (k, v))
    log_decay = torch.where(mask, log_decay, 0)  # padding does not fade
    W = v.new_zeros(len(v), v.shape[-1], k.shape[-1])
    for t in range(k.shape[1]):
        W = log_decay[:, t, None, None].exp() * W
        W = delta_step(W, k[:, t], v[:, t], beta[:, t])
    return W


# --- recall_by_hand --------------------------------------------------------


def _tokens(generator, n, pairs, again):
    """Pairs of a key and a value; then one more key, which has a value."""
    keys = torch.randperm(n, generator=generator)[:pairs].tolist()
    keys += [keys[i] for i in torch.randint(pairs, (again,), generator=generator)]
    values = torch.randint(n, 2 * n, (len(keys),), generator=generator).tolist()
    text = [token for pair in zip(keys, values, strict=True) for token in pair]
    asked = torch.randint(len(keys), (), generator=generator)
    return [*text, keys[int(asked)]]


def answers(W_qkv: Tensor, conv: Tensor, tokens: list[int]) -> Tensor:
    """Read the memory at each token: one head, beta = 1, no decay, no norm.

    - `W_qkv` `[3 w, number of tokens]`, `conv` `[3 w, 4]`: as in `modern_layer`.
    - `tokens`: their numbers; the input is one-hot.
    - Returns `[time, w]`.
    """
    x = F.one_hot(torch.tensor(tokens), W_qkv.shape[1]).to(W_qkv.dtype)
    qkv = F.conv1d(F.pad((x @ W_qkv.T).mT, (3, 0)), conv[:, None], groups=len(conv))
    q, k, v = F.silu(qkv).mT[None].unflatten(-1, (3, 1, -1)).unbind(2)
    one = torch.ones_like(q[..., 0])
    y = gated_delta_rule(l2_normalize(q), l2_normalize(k), v, one, 0 * one)
    return y[0, :, 0]


def _recalls(pairs, again, because):
    def holds(answer, reference, generator):
        for n in (4, 8):
            like = dict(zip(("W_qkv", "conv"), reference(n), strict=True))
            W_qkv, conv = ask(answer, like, n=n)
            right = 0
            for _ in range(16):
                text = _tokens(generator, n, min(pairs, n), again)
                newest = dict(zip(text[:-1:2], text[1::2], strict=True))[text[-1]]
                read = answers(W_qkv, conv, text)[-1]
                right += int(read.argmax()) == newest
            if right < 16:
                raise Wrong(
                    f"With n = {n}, {right} of 16 sequences end in the right value. "
                    f"{because}"
                )

    return holds


@exercise(difficulty=4, importance=3, minutes=15, returns=("W_qkv", "conv"), open=True)
def recall_by_hand(n):
    """
    **Recall, by hand.** Tokens 0 to `n` - 1 are keys, `n` to 2 `n` - 1 values. A text
    is `key value key value ... key`, and the layer has to read, at the last key, the
    newest value of this key. Return `W_qkv` `[6 n, 2 n]` and `conv` `[6 n, 4]` with
    which it does, without training: inputs are one-hot, there is one head of width 2
    `n`, beta is 1 and nothing fades. Of the parts, only convolution, SiLU and unit keys
    act. The largest number that it reads should be at the place of the right value.

    ✓ returns W_qkv and conv
        shape(4, 8, draw=exactly("n"))
    ✓ recalls a single pair
        _recalls(1, 0, because)
    ! The text was `key value key`. At the value, which key does the layer write under,
      and at the last key, which query does it ask with?
    ✗ Without a convolution a token is its own key: the value is written under itself.
        conv[1, :, -2] -> conv[1, :, -1]
    ✗ The query is the token before, which is a value.
        conv[0, :, -1] = -> conv[0, :, -2] =
    ✗ The key is two tokens back.
        conv[1, :, -2] -> conv[1, :, -3]
    ✗ The columns of conv are the other way round: the last one belongs to the token
      itself.
        return W_qkv, conv -> return W_qkv, conv.flip(-1)
    ✓ recalls each of several pairs
        _recalls(8, 0, because)
    ! There was a pair for each key. Are the keys of different tokens orthogonal?
    ✗ Key and value are exchanged: the key is written under its value.
        conv[2, :, -1] -> conv[2, :, -2] ; conv[1, :, -2] -> conv[1, :, -1]
    ✓ recalls the newest value of a key that came again
        _recalls(3, 9, because)
    ! Keys came several times. The delta rule replaces a value, if the key is the same
      and no other key is like it.
    ? At a value, the memory should get: under the token before, this token. What do q,
      k and v need from which token?
    ? Let W_qkv be three unit matrices, one above the other. Then conv picks, for each
      of q, k and v, from which token it comes.
    ? conv[:, -1] is the token itself, conv[:, -2] the one before it. Only the keys,
      rows 2 n to 4 n - 1, come from the token before.
    """
    tokens = 2 * n
    W_qkv = torch.eye(tokens).repeat(3, 1)  # each of q, k, v is the token itself
    conv = torch.zeros(3, tokens, 4)
    conv[0, :, -1] = conv[2, :, -1] = 1  # query and value: of this token
    conv[1, :, -2] = 1  # key: the token before
    return W_qkv, conv.flatten(0, 1)


# --- a small Qwen ----------------------------------------------------------

#: The configuration of a checkpoint: Qwen3.5's shape, small.
SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    },
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def new_qwen(letters: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Draw the weights of a small Qwen, ready to be trained.

    - `letters`: the size of its vocabulary.
    - Returns them twice: part by part, as a model uses them, and by published name.
    """
    d, d_ff = 32, 64
    delta = {
        **{"in_proj_qkv": (64, d), "conv1d": (64, 1, 4), "in_proj_z": (32, d)},
        **{"in_proj_b": (4, d), "in_proj_a": (4, d), "A_log": (4,), "dt_bias": (4,)},
        **{"norm": (8,), "out_proj": (d, 32)},
    }
    attention = {
        **{"q_proj": (64, d), "k_proj": (16, d), "v_proj": (16, d)},
        **{"q_norm": (16,), "k_norm": (16,), "o_proj": (d, 32)},
    }
    mlp = {"gate_proj": (d_ff, d), "up_proj": (d_ff, d), "down_proj": (d, d_ff)}
    norms = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    first = {"dt_bias": -3.0, "norm": 1.0}  # memories fade slowly; a norm of 1
    weights: dict[str, Tensor] = {}

    def draw(shapes: Mapping[str, tuple[int, ...]], at: str) -> dict[str, Tensor]:
        drawn = {}
        for name, shape in shapes.items():
            x = torch.zeros(shape) + (first.get(name, 0.0) if "linear" in at else 0.0)
            x = torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else x
            drawn[name] = x.requires_grad_()
            bare = name in ("A_log", "dt_bias")
            weights[f"model.{at}{name}{'' if bare else '.weight'}"] = x
        return drawn

    qwen: dict[str, Any] = draw({"embed_tokens": (letters, d), "norm": (d,)}, "")
    qwen["layers"] = []
    for i, kind in enumerate(SMALL["layer_types"]):
        at, linear = f"layers.{i}.", kind == "linear_attention"
        mixer = (
            draw(delta, f"{at}linear_attn.")
            if linear
            else draw(attention, f"{at}self_attn.")
        )
        parts = {"mixer": mixer, "mlp": draw(mlp, f"{at}mlp.")}
        qwen["layers"].append(draw(norms, at) | parts)
    return qwen, weights


def as_published(weights: dict[str, Tensor], text: Tensor, logits: Tensor) -> str:
    """Save a small Qwen, let published code open and run it, and say if it agrees.

    That code is transformers; where it is missing, `fwlab.models.load`.

    - `weights`: by published name, from `new_qwen`.
    - `text`, `logits`: tokens `[batch, time]`, and what somebody's model returns.
    """
    from safetensors.torch import save_file

    letters = len(weights["model.embed_tokens.weight"])
    with TemporaryDirectory() as folder, torch.no_grad():
        saved = {name: w.detach() for name, w in weights.items()}
        save_file(saved, f"{folder}/model.safetensors", {"format": "pt"})
        config = json.dumps(SMALL | {"vocab_size": letters})
        Path(folder, "config.json").write_text(config)
        try:
            import transformers

            transformers.logging.set_verbosity_error()  # kernels that are missing
            transformers.logging.disable_progress_bar()
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            who, theirs = "transformers", model.float()(text).logits
        except (ImportError, ValueError):  # it is missing, or older than Qwen3.5
            who = "fwlab.models.load"
            theirs = fwlab.models.load(folder, torch.float32)(text)
    off = ((logits - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max()
    what = f"the logits of all {text.numel()} tokens as {who} does"
    if off < 1e-5:
        return f"It computes {what}, to 1e-5."
    return f"It does not compute {what}: they are off by {off:.1g}."


def ran(function: Callable[..., Any], *given: Any) -> list[str]:
    """Call a function, and list the functions of fwlab that run meanwhile."""
    names: set[str] = set()
    home = str(Path(fwlab.__file__).parent)

    def called(frame: Any, event: str, _: Any) -> None:
        name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
        inside = frame.f_code.co_filename.startswith(home) and "<" not in name
        if event == "call" and inside:
            names.add(name)

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        function(*given)
    finally:
        sys.setprofile(before)
    return sorted(names)
