"""The layer of models that people run, and what its parts are for."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.asking import Answer, Wrong, ask, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, shape
from fwlab.exercises.solutions import (
    modern_layer,
    padded_state,
    recall_by_hand,
    value_groups,
)
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta import gated_delta
from fwlab.ops.delta.delta import delta_step

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
    file = resources.files("fwlab") / "data" / "results" / "qwen-layer.json"
    case = json.loads(file.read_text())["cases"][name]
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
) -> dict[str, Any]:
    """Arguments of `modern_layer`."""
    draw, d = partial(normal, generator), 6
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
    """Runs that are too long for a notebook, by row: a run for each seed.

    - `name`: "recall" or "shakespeare", which `docs/tools/qwen_parts.py` makes with
      the settings in `data/results/qwen-parts.json`; or "hybrid", which is
      `fwlab reproduce hybrid --quick`.
    """
    folder = resources.files("fwlab") / "data" / "results"
    rows: dict[str, list[dict[str, Any]]] = {}
    if name == "hybrid":
        found = json.loads((folder / "quick" / "hybrid.json").read_text("utf-8"))
        for run in found["points"]:
            rows.setdefault(run["stack"], []).append(run)
        return rows
    found = json.loads((folder / "qwen-parts.json").read_text("utf-8"))
    for run in found[name]["runs"]:
        rows.setdefault(run["row"], []).append(run)
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


def _heads(
    generator: Generator,
    key_heads: int = 2,
    value_heads: int = 4,
    lead: tuple[int, ...] = (2, 3),
) -> dict[str, Any]:
    return {"x": normal(generator, *lead, key_heads, 5), "value_heads": value_heads}


def _tiled(x: Tensor, value_heads: int) -> Tensor:
    return torch.cat([x] * (value_heads // x.shape[-2]), -2)


VALUE_GROUPS = Exercise(
    name="value_groups",
    notebook="16_to_qwen",
    difficulty=2,
    importance=3,
    minutes=6,
    task="**Value groups.** For queries or keys `x` `[..., key heads, key]` and a "
    "number of `value_heads`, a multiple of the key heads, return `[..., value heads, "
    "key]`: each key head serves as many *consecutive* value heads.",
    reference=value_groups,
    properties=(
        shape(
            "returns as many heads as there are values",
            _heads,
            [(2, 4), (1, 3), (3, 3)],
        ),
        agrees(
            "with as many key heads as value heads, changes nothing",
            _heads,
            [(2, 2), (3, 3)],
            expected=lambda x, value_heads: x,
            catches={
                "This gives the mean of all key heads to "
                "every value head.": lambda x, value_heads: x.mean(
                    -2, keepdim=True
                ).expand(*x.shape[:-2], value_heads, -1),
                "The groups are in reverse order.": lambda x, value_heads: value_groups(
                    x.flip(-2), value_heads
                ),
            },
        ),
        agrees(
            "with a single key head, gives it to every value head",
            _heads,
            [(1, 4)],
            expected=lambda x, value_heads: x.expand(*x.shape[:-2], value_heads, -1),
            catches={
                "A key head is shared, not divided up: every value head gets "
                "all of it.": lambda x, value_heads: (
                    value_groups(x, value_heads) * x.shape[-2] / value_heads
                ),
            },
        ),
        agrees(
            "serves value heads that stand side by side",
            _heads,
            [(2, 4), (3, 6), (2, 6)],
            because="There were {key_heads} key heads for {value_heads} value heads.",
            catches={
                "Here value heads take turns: 0, 1, 0, 1. Consecutive ones share a "
                "key head: 0, 0, 1, 1.": _tiled,
            },
        ),
        agrees(
            "works on any leading dimensions, such as [batch, time]",
            _heads,
            [(2, 4, ()), (2, 4, (3,)), (2, 4, (4, 2))],
            because="The leading dimensions were {lead}.",
        ),
        gradient("lets gradients through to x", _heads),
    ),
    hints=(
        "Four value heads and two key heads: which key head does value head 1 use?",
        "Repeat each head value heads / key heads times, before the next one comes.",
        "torch.repeat_interleave repeats entries in place; Tensor.repeat repeats the "
        "whole row.",
    ),
    example=_heads,
)


# --- modern_layer ----------------------------------------------------------


def layer_with(
    x: Tensor,
    W_qkv: Tensor,
    conv: Tensor,
    W_z: Tensor,
    W_b: Tensor,
    W_a: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    W_out: Tensor,
    key_heads: int,
    *,
    unit: Callable[[Tensor], Tensor] | None = None,
    group: Callable[[Tensor, int], Tensor] = value_groups,
    after: Callable[[Tensor], Tensor] = F.silu,
    amount: Callable[[Tensor], Tensor] = torch.exp,
    rate: Callable[[Tensor], Tensor] = F.softplus,
    gate: Callable[[Tensor], Tensor] = F.silu,
    strength: Callable[[Tensor], Tensor] = torch.sigmoid,
    finish: Callable[..., Tensor] | None = None,
    padding: tuple[int, int] = (3, 0),
    scale: float | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`modern_layer`, with a choice of changes; `scale`: in place of K^-0.5."""
    heads, width = len(A_log), len(norm)
    qkv = F.conv1d(F.pad((x @ W_qkv.T).mT, padding), conv[:, None], groups=len(conv))
    qkv = after(qkv).mT
    keys = (len(W_qkv) - heads * width) // 2
    q, k, v = qkv.split([keys, keys, heads * width], -1)
    q, k = (p.unflatten(-1, (key_heads, -1)) for p in (q, k))
    q, k = (_unit(p) if unit is None else unit(p) for p in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # The loop: the operation refuses a memory that grows, which is a mistake here.
    y, _ = gated_delta.loop(
        group(q, heads) * scale,
        group(k, heads),
        v.unflatten(-1, (heads, -1)),
        strength(x @ W_b.T),
        -amount(A_log) * rate(x @ W_a.T + dt_bias),
        x.new_zeros(len(x), heads, width, keys // key_heads),
    )
    z = gate(x @ W_z.T).unflatten(-1, (heads, -1))
    y = F.rms_norm(y, (width,), norm, eps) * z if finish is None else finish(y, z, norm)
    return y.flatten(-2) @ W_out.T


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _changed(name: str, function: Callable[[Tensor], Tensor]) -> Answer:
    """The solution, for one changed argument."""
    names = [*inspect.signature(modern_layer).parameters]

    def layer(*arguments: Any) -> Tensor:
        given = dict(zip(names, arguments, strict=True))
        return modern_layer(**given | {name: function(given[name])})

    return layer


def _as_published(answer: Answer, reference: Answer, generator: Generator) -> None:
    for name in ("plain", "grouped"):
        arguments, outputs = published(name)
        y = ask(answer, outputs, **arguments)
        off = ((y - outputs).norm() / outputs.norm()).item()
        if not off < 1e-5:
            raise Wrong(
                f'In the case "{name}", your output is off by {off:.1g} from that of '
                "transformers, relative to its size. Up to 1e-5 is rounding."
            )


def _first(y: Tensor, *_: Any) -> Tensor:
    return y[:, :1]


MODERN_LAYER = Exercise(
    name="modern_layer",
    notebook="16_to_qwen",
    difficulty=4,
    importance=5,
    minutes=25,
    task="**The layer.** For `x` `[batch, time, d]`, return the output of the layer, "
    "`[batch, time, d]`, from an empty memory. `W_qkv` `[channels, d]` makes queries, "
    "keys and values side by side, `conv` `[channels, 4]` is the convolution, whose last "
    "column belongs to the token itself; `W_z`, `W_b`, `W_a`, `A_log`, `dt_bias`, `norm` "
    "`[value]` and `W_out` are those of the table. There are `key_heads` key heads, and "
    "`len(A_log)` value heads. Both epsilons are 1e-6.",
    reference=modern_layer,
    properties=(
        shape("returns a tensor of the shape of x", drawn, [{}, {"time": 1}]),
        agrees(
            "at the first token, returns what it has just written, with norm and gate",
            drawn,
            [{"time": 1}, {}],
            of=_first,
            because="Before the first token there are zeros. The first steps are W_qkv, "
            "conv and SiLU, the last RMS norm, gate and W_out. Epsilons count, too.",
            catches={
                "The gate is a sigmoid here. In this layer it is SiLU.": partial(
                    layer_with, gate=torch.sigmoid
                ),
                "There is no gate.": partial(layer_with, gate=torch.ones_like),
                "The gate comes before the norm here. It comes after it.": partial(
                    layer_with,
                    finish=lambda y, z, norm: F.rms_norm(
                        y * z, (len(norm),), norm, 1e-6
                    ),
                ),
                "The norm multiplies by 1 + weight. In this layer it "
                "is the weight itself.": _changed("norm", lambda norm: 1 + norm),
                "There is no norm.": partial(
                    layer_with, finish=lambda y, z, norm: norm * y * z
                ),
                "The norm is over all heads together. Each head has its own.": partial(
                    layer_with,
                    finish=lambda y, z, norm: (
                        norm
                        * F.rms_norm(y.flatten(-2), (y[0, 0].numel(),)).view_as(y)
                        * z
                    ),
                ),
                "The strength is 1 everywhere. It is the sigmoid of W_b x.": partial(
                    layer_with, strength=torch.ones_like
                ),
                "Keys are used as they are. They have to be of length 1.": partial(
                    layer_with, unit=lambda x: x
                ),
                "The queries lack the factor K^-0.5.": partial(layer_with, scale=1.0),
                "Keys and queries are divided by their norm without an "
                "epsilon.": partial(layer_with, unit=l2_normalize),
                "The epsilon of the keys belongs inside the root: "
                "sqrt(|x|² + 1e-6).": partial(
                    layer_with, unit=lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6)
                ),
                "The norm has another epsilon than 1e-6.": (
                    partial(layer_with, eps=1e-5),
                    partial(layer_with, eps=0.0),
                ),
                "There is no SiLU after the convolution.": partial(
                    layer_with, after=lambda qkv: qkv
                ),
                "The convolution is turned around: its last column belongs to the "
                "token itself.": _changed("conv", lambda conv: conv.flip(1)),
                "This convolution sees later tokens: its zeros belong before the "
                "first token.": partial(layer_with, padding=(0, 3)),
            },
        ),
        agrees(
            "over several tokens, fades, corrects and reads",
            drawn,
            [{"time": 2}, {"time": 7, "key": 4, "value": 3}],
            because="There were {time} tokens. Look at beta and at the decay: log d = "
            "-exp(A_log) softplus(a + dt_bias).",
            catches={
                "The exponential of A_log is missing.": partial(
                    layer_with, amount=lambda A: A
                ),
                "dt_bias is not added.": _changed("dt_bias", torch.zeros_like),
                "The decay has a sigmoid in place of the softplus.": partial(
                    layer_with, rate=torch.sigmoid
                ),
                "Nothing fades: log_decay is 0.": partial(
                    layer_with, rate=torch.zeros_like
                ),
            },
        ),
        agrees(
            "with more value heads, shares key heads between neighbours",
            drawn,
            [{"value_heads": 4}, {"key_heads": 1, "value_heads": 3}],
            because="There were {key_heads} key heads and {value_heads} value heads.",
            catches={
                "Value heads take turns with the key heads here. Consecutive ones share "
                "a key head.": partial(layer_with, group=_tiled),
            },
        ),
        Property(
            "returns what the layer of transformers returns, to 1e-5", _as_published
        ),
        gradient("lets gradients through to x and all weights", drawn),
    ),
    hints=(
        "Go through the equations from the top. After each one, print the shape. Queries "
        "and keys have key_heads heads until value_groups.",
        "F.pad((x @ W_qkv.T).mT, (3, 0)) puts three zeros before the first token; "
        "F.conv1d with groups=len(conv) takes conv[:, None].",
        "The rule is ops.gated_delta_rule(q, k, v, beta, log_decay), the norm "
        "F.rms_norm(y, (value,), norm, 1e-6), once for each head.",
    ),
    example=drawn,
)


# --- padded_state ----------------------------------------------------------


def _padded(
    generator: Generator,
    before: int = 0,
    tokens: int = 4,
    after: int = 2,
    gap: bool = False,
) -> dict[str, Tensor]:
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


def _alone(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor
) -> Tensor:
    """Each sequence by itself, without its padding."""
    states = []
    for row in range(len(k)):
        W = v.new_zeros(v.shape[-1], k.shape[-1])
        for t in mask[row].nonzero()[:, 0]:
            W = log_decay[row, t].exp() * W
            W = delta_step(W, k[row, t], v[row, t], beta[row, t])
        states.append(W)
    return torch.stack(states)


def sick_state(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor
) -> Tensor:
    """What the faulty code of `padded_state` returns."""
    return _state(k, v, beta * mask, log_decay)


def _state(k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    return padded_state(k, v, beta, log_decay, torch.ones_like(beta, dtype=torch.bool))


def _emptied(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor
) -> Tensor:
    """Padding empties the memory."""
    return sick_state(k, v, beta, log_decay.where(mask == 1, -torch.inf), mask)


def _keys_only(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor
) -> Tensor:
    return _state(k * mask[..., None], v, beta, log_decay)


def _values_only(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, mask: Tensor
) -> Tensor:
    log_decay = log_decay * mask
    return _state(k, v * mask[..., None], beta, log_decay)


PADDED_STATE = Exercise(
    name="padded_state",
    notebook="16_to_qwen",
    difficulty=3,
    importance=4,
    minutes=10,
    task="**Padding.** For keys `k` `[batch, time, key]`, values `v` `[batch, time, "
    "value]`, `beta` and `log_decay` `[batch, time]`, and a `mask` `[batch, time]` that "
    "is True at real tokens, return the state `[batch, value, key]` after the last token: "
    "for every sequence the state it has alone, without its padding.",
    start="""\
from fwlab.ops.delta.delta import delta_step


def padded_state(k, v, beta, log_decay, mask):
    k = torch.where(mask[..., None], k, 0)  # padding writes nothing
    v = torch.where(mask[..., None], v, 0)
    W = v.new_zeros(len(v), v.shape[-1], k.shape[-1])
    for t in range(k.shape[1]):
        W = log_decay[:, t, None, None].exp() * W
        W = delta_step(W, k[:, t], v[:, t], beta[:, t])
    return W""",
    reference=padded_state,
    properties=(
        shape(
            "returns a state for each sequence",
            _padded,
            [{}, {"tokens": 1, "after": 0}],
        ),
        agrees(
            "without padding, is the state of the gated delta rule",
            _padded,
            [{"after": 0}, {"after": 0, "tokens": 1}],
            expected=_alone,
            because="There was no padding here.",
            catches={
                "The mask is upside down: it is True "
                "at real tokens.": lambda k, v, beta, log_decay, mask: padded_state(
                    k, v, beta, log_decay, mask == 0
                ),
                "The state never fades. Real tokens do fade it.": (
                    lambda k, v, beta, log_decay, mask: padded_state(
                        k, v, beta, 0 * log_decay, mask == 1
                    )
                ),
                "The strengths of the real tokens are lost, too.": (
                    lambda k, v, beta, log_decay, mask: padded_state(
                        k, v, torch.ones_like(beta), log_decay, mask == 1
                    )
                ),
            },
        ),
        agrees(
            "with padding at the start, the state is that of the sequence alone",
            _padded,
            [{"before": 2, "after": 0}],
            expected=_alone,
            because="The padding came first. Does it write?",
            catches={
                "Padding is written like any other token: the mask is "
                "not used.": lambda k, v, beta, log_decay, mask: _state(
                    k, v, beta, log_decay
                ),
            },
        ),
        agrees(
            "with padding at the end, the state is that of the sequence alone",
            _padded,
            [{}, {"after": 5}],
            expected=_alone,
            because="There were {after} tokens of padding after the last real one. What "
            "do they still do to W?",
            catches={
                "Padding writes nothing any more, but the memory fades at every token: "
                "the longer the padding, the less is left.": (sick_state, _keys_only),
                "The values of padding are 0, but its keys are not: writing 0 erases "
                "what the key holds.": _values_only,
                "At padding the decay is 0 here, which erases everything. A decay of 1, "
                "log_decay = 0, keeps it.": _emptied,
            },
        ),
        agrees(
            "with padding inside, the state is that of the sequence alone",
            _padded,
            [{"gap": True}, {"gap": True, "before": 1}],
            expected=_alone,
            because="The padding was between two real tokens.",
        ),
        gradient("lets gradients through to k, v, beta and log_decay", _padded),
    ),
    hints=(
        "Give the second sequence five more tokens of padding, and print the norm of its "
        "state. What should it be?",
        "A token does two things to W: it fades it, and it writes. Which of the two does "
        "the mask stop?",
        "Where the mask is False, log_decay has to be 0 as well: torch.where(mask, "
        "log_decay, 0).",
    ),
    example=_padded,
)


# --- recall_by_hand --------------------------------------------------------


def _tokens(generator: Generator, n: int, pairs: int, again: int) -> list[int]:
    """Pairs of a key and a value; then one more key, which has a value."""
    keys = torch.randperm(n, generator=generator)[:pairs].tolist()
    keys += [keys[i] for i in torch.randint(pairs, (again,), generator=generator)]
    values = torch.randint(n, 2 * n, (len(keys),), generator=generator).tolist()
    text = [token for pair in zip(keys, values, strict=True) for token in pair]
    asked = torch.randint(len(keys), (), generator=generator)
    return [*text, keys[int(asked)]]


def answers(W_qkv: Tensor, conv: Tensor, tokens: list[int]) -> Tensor:
    """What the layer reads at each token: one head, beta = 1, no decay, no norm.

    - `W_qkv` `[3 w, number of tokens]`, `conv` `[3 w, 4]`: as in `modern_layer`.
    - `tokens`: their numbers; the input is one-hot.
    - Returns `[time, w]`.
    """
    x = F.one_hot(torch.tensor(tokens), W_qkv.shape[1]).to(W_qkv.dtype)
    qkv = F.conv1d(F.pad((x @ W_qkv.T).mT, (3, 0)), conv[:, None], groups=len(conv))
    q, k, v = F.silu(qkv).mT[None].unflatten(-1, (3, 1, -1)).unbind(2)
    one = torch.ones_like(q[..., 0])
    y: Any = ops.gated_delta_rule(l2_normalize(q), l2_normalize(k), v, one, 0 * one)
    return y[0, :, 0]


def _recalls(
    says: str, pairs: int, again: int, because: str, catches: Any = None
) -> Property:
    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        for n in (4, 8):
            like = dict(zip(("W_qkv", "conv"), reference(n), strict=True))
            W_qkv, conv = ask(answer, like, n=n)
            right = 0
            for _ in range(16):
                text = _tokens(generator, n, min(pairs, n), again)
                newest = text[1:-1][text[:-1][::2][::-1].index(text[-1]) * -2 - 1]
                read = answers(W_qkv, conv, text)[-1]
                right += int(read.argmax()) == newest
            if right < 16:
                raise Wrong(
                    f"With n = {n}, {right} of 16 sequences end in the right value. "
                    f"{because}"
                )

    return Property(says, holds, catches or {})


def _by_hand(
    n: int, query: int = -1, key: int = -2, value: int = -1, rows: Any = None
) -> tuple[Tensor, Tensor]:
    """One tap for each of q, k and v."""
    conv = torch.zeros(3, 2 * n, 4)
    for part, tap in enumerate((query, key, value)):
        conv[part, :, tap] = 1
    W = torch.eye(2 * n).repeat(3, 1) if rows is None else rows
    return W, conv.flatten(0, 1)


RECALL_BY_HAND = Exercise(
    name="recall_by_hand",
    notebook="16_to_qwen",
    difficulty=4,
    importance=3,
    minutes=15,
    task="**Recall, by hand.** Tokens 0 to `n` - 1 are keys, `n` to 2 `n` - 1 values. A "
    "text is `key value key value ... key`, and the layer has to read, at the last key, "
    "the newest value of this key. Return `W_qkv` `[6 n, 2 n]` and `conv` `[6 n, 4]` "
    "with which it does, without training: inputs are one-hot, there is one head of width "
    "2 `n`, beta is 1 and nothing fades. The largest number that it reads should be at "
    "the place of the right value.",
    reference=recall_by_hand,
    properties=(
        shape(
            "returns W_qkv and conv",
            lambda generator, n: {"n": n},
            [4, 8],
            names=("W_qkv", "conv"),
        ),
        _recalls(
            "recalls a single pair",
            1,
            0,
            "The text was `key value key`. At the value, which key does the layer write "
            "under, and at the last key, which query does it ask with?",
            {
                "Without a convolution a token is its own key: the value is written "
                "under itself.": partial(_by_hand, key=-1),
                "The query is the token before, which is a value.": partial(
                    _by_hand, query=-2
                ),
                "The key is two tokens back.": partial(_by_hand, key=-3),
                "The columns of conv are the other way round: the last one belongs to "
                "the token itself.": partial(_by_hand, query=0, key=1, value=0),
            },
        ),
        _recalls(
            "recalls each of several pairs",
            8,
            0,
            "There was a pair for each key. Are the keys of different tokens orthogonal?",
            {
                "Key and value are exchanged: the key is "
                "written under its value.": partial(_by_hand, key=-1, value=-2),
            },
        ),
        _recalls(
            "recalls the newest value of a key that came again",
            3,
            9,
            "Keys came several times. The delta rule replaces a value, if the key is the "
            "same and no other key is like it.",
        ),
    ),
    hints=(
        "At a value, the memory should get: under the token before, this token. What do "
        "q, k and v need from which token?",
        "Let W_qkv be three unit matrices, one above the other. Then conv picks, for each "
        "of q, k and v, from which token it comes.",
        "conv[:, -1] is the token itself, conv[:, -2] the one before it. Only the keys, "
        "rows 2 n to 4 n - 1, come from the token before.",
    ),
)

EXERCISES = {
    each.name: each
    for each in (VALUE_GROUPS, MODERN_LAYER, PADDED_STATE, RECALL_BY_HAND)
}
