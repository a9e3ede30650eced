"""Rules since 2021."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, shape, takes_heads
from fwlab.exercises.solutions import (
    ask_is_not_write,
    erase_and_write,
    four_cups,
    gated_delta_step,
    parity,
    two_steps,
)
from fwlab.exercises.steps import at_key, elsewhere, step
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step
from fwlab.ops.linear.sum import read, write


def _share(generator: Generator, *lead: int) -> Tensor:
    """Numbers from 0.2 to 0.8."""
    return 0.2 + 0.6 * torch.rand(lead, generator=generator, dtype=torch.float64)


# --- ask_is_not_write -----------------------------------------------


def _one(
    generator: Generator, value: int = 3, key: int = 4, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    return {
        "W": normal(generator, *lead, value, key),
        "d": _share(generator, *lead, key),
        "r": l2_normalize(normal(generator, *lead, key)),
        "k": l2_normalize(normal(generator, *lead, key)),
        "v": normal(generator, *lead, value),
        "s": _share(generator, *lead),
    }


def _same_key(generator: Generator) -> dict[str, Tensor]:
    inputs = _one(generator)
    return inputs | {"d": torch.ones_like(inputs["d"]), "r": inputs["k"]}


def _nothing_fades(generator: Generator) -> dict[str, Tensor]:
    inputs = _one(generator)
    return inputs | {"d": torch.ones_like(inputs["d"])}


def _nothing_asked(generator: Generator) -> dict[str, Tensor]:
    inputs = _one(generator)
    return inputs | {"r": torch.zeros_like(inputs["r"])}


def _fade(W: Tensor, d: Tensor) -> Tensor:
    return W * d[..., None, :]


def _early(W: Tensor, d: Tensor, r: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    return write(_fade(W, d), k, s[..., None] * (v - read(W, r)))


ASK_IS_NOT_WRITE = Exercise(
    name="ask_is_not_write",
    notebook="15_since_2021",
    difficulty=2,
    importance=5,
    minutes=10,
    task="**Ask is not write** (d0). Return the memory after one step, for `W` "
    "`[..., value, key]`, the decay `d`, the asking key `r` and the writing key "
    "`k`, all `[..., key]`, `v` `[..., value]` and the strength `s` `[...]`.",
    reference=ask_is_not_write,
    properties=(
        shape("returns a tensor of the shape of W", _one, [(3, 4), (2, 5), (1, 1)]),
        agrees(
            "without a decay, and with one key for both, is the delta step",
            _same_key,
            expected=lambda W, d, r, k, v, s: delta_step(W, k, v, s),
            because="d was 1 and r was k, so this is Eq. 24 with beta = s.",
            catches={
                "This only adds. What the asking key returns has to be "
                "subtracted.": lambda W, d, r, k, v, s: write(
                    _fade(W, d), k, s[..., None] * v
                ),
                "The strength multiplies only the value. It multiplies the whole "
                "difference, s (v - answer).": lambda W, d, r, k, v, s: write(
                    _fade(W, d), k, s[..., None] * v - read(_fade(W, d), r)
                ),
                "The sign is wrong: this moves away from v.": lambda W, d, r, k, v, s: (
                    ask_is_not_write(W, d, r, k, v, -s)
                ),
                "This returns only what is added. The step returns the new "
                "memory.": lambda W, d, r, k, v, s: (
                    ask_is_not_write(W, d, r, k, v, s) - W
                ),
            },
        ),
        agrees(
            "asks with r, and writes under k",
            _nothing_fades,
            because="d was 1, but r and k were different keys.",
            catches={
                "This asks with the writing key, and r plays no "
                "part.": lambda W, d, r, k, v, s: ask_is_not_write(W, d, k, k, v, s),
                "This writes under the asking key, and k plays no "
                "part.": lambda W, d, r, k, v, s: ask_is_not_write(W, d, r, r, v, s),
                "The two keys have changed places: r asks, and k "
                "writes.": lambda W, d, r, k, v, s: ask_is_not_write(W, d, k, r, v, s),
            },
        ),
        agrees(
            "if it asks nothing, fades the old memory and adds the pair",
            _nothing_asked,
            expected=lambda W, d, r, k, v, s: write(_fade(W, d), k, s[..., None] * v),
            because="r was 0, so nothing is subtracted.",
            catches={
                "Nothing fades here: column j of W has to be multiplied by d_j "
                "first.": lambda W, d, r, k, v, s: ask_is_not_write(
                    W, torch.ones_like(d), r, k, v, s
                ),
                "The pair that is just written fades as well. Only what was there "
                "before does.": lambda W, d, r, k, v, s: _fade(
                    ask_is_not_write(W, torch.ones_like(d), r, k, v, s), d
                ),
                "This fades every column by the mean of d. Each has its "
                "own.": lambda W, d, r, k, v, s: ask_is_not_write(
                    W, d.mean(-1, keepdim=True).expand_as(d), r, k, v, s
                ),
            },
        ),
        agrees(
            "asks what is left after fading",
            _one,
            [(3, 4), (4, 4), (5, 2)],
            catches={
                "The key asks the memory before it fades: then more is subtracted than "
                "is still there.": _early,
            },
        ),
        takes_heads(_one, [(2,), (2, 3), (4, 4)]),
        gradient("lets gradients through to all arguments", _one, {"lead": (2,)}),
    ),
    hints=(
        "Three lines, as in (d0): fade, then the increment, then write.",
        "W diag(d) multiplies column j of W by d_j: d[..., None, :] broadcasts with W.",
        'answer = torch.einsum("...vk,...k->...v", faded, r); the increment is '
        "s[..., None] * (v - answer); it is written under k.",
    ),
    example=_one,
)


# --- gated_delta_step -----------------------------------------------


def _gated(
    generator: Generator,
    beta: float | None = None,
    decay: float | None = None,
    lead: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    """None = each memory its own."""
    inputs = step(generator, beta, 1.0, lead=lead)
    fading = _share(generator, *lead)
    if decay is not None:
        fading = torch.full_like(fading, decay)
    return inputs | {"decay": fading}


def _far(W: Tensor, decay: Tensor) -> Tensor:
    return decay[..., None, None] * W


def asks_too_early(
    W: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """The step of the bug hunt."""
    return write(_far(W, decay), k, beta[..., None] * (v - read(W, k)))


GATED_DELTA_STEP = Exercise(
    name="gated_delta_step",
    notebook="15_since_2021",
    difficulty=2,
    importance=5,
    minutes=8,
    task="**Find the bug.** This should be a step of the gated delta rule: the memory "
    "fades, then the delta rule corrects what is left. `W` is `[..., value, key]`, "
    "`k` `[..., key]`, `v` `[..., value]`, `beta` and `decay` `[...]`. Mend it.",
    start="""\
from fwlab.ops.linear.sum import read, write


def gated_delta_step(W, k, v, beta, decay):
    held = read(W, k)
    u = beta[..., None] * (v - held)
    return write(decay[..., None, None] * W, k, u)""",
    reference=gated_delta_step,
    properties=(
        shape("returns a tensor of the shape of W", _gated, [{}, {"lead": (2,)}]),
        agrees(
            "with decay 1, is the delta step",
            _gated,
            [(None, 1.0), (0.0, 1.0), (1.0, 1.0)],
            expected=lambda W, k, v, beta, decay: delta_step(W, k, v, beta),
            because="decay was 1, so nothing fades.",
            catches={
                "This keeps 1 - decay of the memory. decay is the share that "
                "stays.": lambda W, k, v, beta, decay: gated_delta_step(
                    W, k, v, beta, 1 - decay
                ),
                "This is the gated rule with two gates: it fades and adds, and asks "
                "nothing.": lambda W, k, v, beta, decay: write(
                    _far(W, decay), k, beta[..., None] * v
                ),
            },
        ),
        agrees(
            "with beta = 1, the key returns exactly the new value",
            _gated,
            [(1.0, 0.5), (1.0, 0.9), (1.0, 0.0)],
            of=lambda new, W, k, *rest: at_key(new, W, k, *rest[:2]),
            expected=lambda W, k, v, beta, decay: v,
            because="decay was {decay:g}.",
            catches={
                "The key is read before the memory fades. So more is subtracted than is "
                "still there.": asks_too_early,
                "The new value fades as well. Fade first, then "
                "write.": lambda W, k, v, beta, decay: _far(
                    delta_step(W, k, v, beta), decay
                ),
                "The memory fades twice before it is "
                "asked.": lambda W, k, v, beta, decay: write(
                    _far(W, decay),
                    k,
                    beta[..., None] * (v - read(_far(W, decay**2), k)),
                ),
            },
        ),
        agrees(
            "other keys keep a share of decay of their values",
            _gated,
            [(0.7, 0.5), (0.0, 0.25)],
            of=lambda new, W, k, *rest: elsewhere(new, W, k),
            expected=lambda W, k, v, beta, decay: elsewhere(_far(W, decay), W, k),
            because="This is what orthogonal keys hold; decay was {decay:g}.",
            catches={
                "Nothing fades here: this is the delta "
                "rule.": lambda W, k, v, beta, decay: delta_step(W, k, v, beta),
                "Only what this key holds fades here. A decay is for all "
                "keys.": lambda W, k, v, beta, decay: delta_step(
                    write(W, k, (decay - 1)[..., None] * read(W, k)), k, v, beta
                ),
            },
        ),
        agrees(
            "corrects what is left, for any strengths and decays",
            _gated,
            [(0.5, 0.5), (0.3, 0.9), (2.0, 0.8)],
        ),
        takes_heads(_gated, [(2,), (2, 3), (4, 4)]),
        gradient("lets gradients through to all arguments", _gated, {"lead": (2,)}),
    ),
    hints=(
        "With decay 1 all is well. With decay 0.5 and beta = 1, ask for the key that "
        "was just written: by how much is it off?",
        "It is off by (1 - decay) times the old value: too much was subtracted. From "
        "which memory was it read?",
        "Fade first: W = decay[..., None, None] * W, then the delta step on that W.",
    ),
    example=_gated,
)


# --- erase_and_write ------------------------------------------------


def _apart(
    generator: Generator,
    value: int = 3,
    key: int = 4,
    lead: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    return {
        "W": normal(generator, *lead, value, key),
        "decay": _share(generator, *lead, key),
        "k": l2_normalize(normal(generator, *lead, key)),
        "v": normal(generator, *lead, value),
        "e": _share(generator, *lead, key),
        "w": _share(generator, *lead, value),
    }


def _equal_gates(generator: Generator, beta: float) -> dict[str, Tensor]:
    inputs = _apart(generator)
    gates = {name: torch.full_like(inputs[name], beta) for name in ("e", "w")}
    return inputs | gates


def _instead(
    W: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    w: Tensor,
    asks: int = 1,
    writes: int = 0,
    whole: bool = False,
) -> Tensor:
    """The solution, with a choice of mistakes: powers of `e` in both keys."""
    faded = _fade(W, decay)
    held = read(faded, e**asks * k)
    return write(faded, e**writes * k, w * (v - held) if whole else w * v - held)


ERASE_AND_WRITE = Exercise(
    name="erase_and_write",
    notebook="15_since_2021",
    difficulty=3,
    importance=4,
    minutes=10,
    task="**Erase and write** (n5). In the gated delta rule 2, `e` `[..., key]` says "
    "how much to erase by key channel, and `w` `[..., value]` how much to write by "
    "value channel. Return the memory after one step, for `W` `[..., value, key]`, "
    "`decay` and `k` `[..., key]` and `v` `[..., value]`. One call of "
    "`ask_is_not_write` is enough: which key asks?",
    reference=erase_and_write,
    properties=(
        shape("returns a tensor of the shape of W", _apart, [(3, 4), (2, 5), (1, 1)]),
        agrees(
            "with both gates 0, only fades",
            _equal_gates,
            [0.0],
            expected=lambda W, decay, k, v, e, w: _fade(W, decay),
            because="Both gates were 0: nothing is erased, and nothing written.",
            catches={
                "This keeps e of what the key holds. e is the share that is "
                "erased.": lambda W, decay, k, v, e, w: erase_and_write(
                    W, decay, k, v, 1 - e, w
                ),
                "This ignores e: what the key holds is erased in all "
                "channels.": lambda W, decay, k, v, e, w: _instead(
                    W, decay, k, v, e, w, asks=0
                ),
                "This ignores w: the whole value is "
                "written.": lambda W, decay, k, v, e, w: erase_and_write(
                    W, decay, k, v, e, torch.ones_like(w)
                ),
            },
        ),
        agrees(
            "with both gates beta, is Kimi's rule",
            _equal_gates,
            [0.5, 1.0, 0.9],
            expected=lambda W, decay, k, v, e, w: delta_step(
                _fade(W, decay), k, v, w[..., 0]
            ),
            because="Both gates were {beta:g}.",
            catches={
                "This multiplies by both gates: what is erased has e alone, what is "
                "written has w alone.": lambda W, decay, k, v, e, w: _instead(
                    W, decay, k, v, e, w, whole=True
                ),
                "This erases under e ⊙ k as well. It erases, and writes, under "
                "k.": lambda W, decay, k, v, e, w: _instead(
                    W, decay, k, v, e, w, writes=1
                ),
                "The gate is on the key that writes. It belongs on the key that "
                "asks.": lambda W, decay, k, v, e, w: _instead(
                    W, decay, k, v, e, w, asks=0, writes=1
                ),
                "Here e is one more decay, so other keys lose their values, "
                "too.": lambda W, decay, k, v, e, w: write(
                    _fade(W, decay * (1 - e)), k, w * v
                ),
            },
        ),
        agrees(
            "with w = 0, erases without writing",
            _apart,
            change={"w": torch.zeros_like},
            because="w was 0. The answer to e ⊙ k is subtracted under k.",
            catches={
                "This erases under e ⊙ k what k holds. It should erase under k what e ⊙ "
                "k finds.": lambda W, decay, k, v, e, w: write(
                    write(_fade(W, decay), e * k, -read(_fade(W, decay), k)), k, w * v
                ),
                "This erases by the mean of e. Each key channel has its "
                "own.": lambda W, decay, k, v, e, w: erase_and_write(
                    W, decay, k, v, e.mean(-1, keepdim=True).expand_as(e), w
                ),
            },
        ),
        agrees(
            "follows (n5) for any gates",
            _apart,
            [(3, 4), (4, 4), (5, 2)],
            catches={
                "This writes by the mean of w. Each value channel has its "
                "own.": lambda W, decay, k, v, e, w: erase_and_write(
                    W, decay, k, v, e, w.mean(-1, keepdim=True).expand_as(w)
                ),
            },
        ),
        takes_heads(_apart, [(2,), (2, 3), (4, 4)]),
        gradient("lets gradients through to all arguments", _apart, {"lead": (2,)}),
    ),
    hints=(
        "What is erased is what the memory returns. To erase less of one key channel, "
        "ask less of it.",
        "The key that asks is e ⊙ k, the key that writes is k, the value is w ⊙ v.",
        "There is no strength left: in ask_is_not_write, s is 1, as "
        "torch.ones(W.shape[:-2]).",
    ),
    example=_apart,
)


# --- parity -----------------------------------------------------------


def _bits(generator: Generator, *bits: float, time: int = 8) -> dict[str, Tensor]:
    """These bits; none = random ones."""
    if bits:
        return {"bits": torch.tensor(bits, dtype=torch.float64)}
    drawn = torch.randint(2, (time,), generator=generator)
    return {"bits": drawn.double()}


def _readings(pair: tuple[Tensor, Tensor], bits: Tensor) -> Tensor:
    """What the memory of one number returns after each step."""
    w, read_back = bits.new_zeros(()), []
    for v, beta in zip(*pair, strict=True):
        w = w + beta * (v - w)
        read_back.append(w)
    return torch.stack(read_back)


def _odd(bits: Tensor) -> Tensor:
    return bits.cumsum(0) % 2


def _reads(says: str, sizes: list[tuple[float, ...]], **options: object) -> Property:
    """The readings are the parity."""
    options = {"of": _readings, "expected": _odd, **options}
    return agrees(says, _bits, sizes, names=("v", "beta"), **options)  # type: ignore[arg-type]


def _of_each_alone(answer: Answer, reference: Answer, generator: Generator) -> None:
    bits = _bits(generator, time=9)["bits"]
    like = {"v": bits, "beta": bits}
    whole = ask(answer, like, bits=bits)
    for i in range(len(bits)):
        alone = ask(answer, like | {n: bits[:1] for n in like}, bits=bits[i : i + 1])
        for name, x, y in zip(like, whole, alone, strict=True):
            if abs(x[i] - y[0]) > 1e-9:
                raise Wrong(
                    f"{name} of bit {i}, which is {bits[i]:g}, was {x[i]:.4g} in a "
                    f"sequence of 9 and is {y[0]:.4g} for this bit alone. The memory "
                    "should do the counting: each token knows only itself."
                )


PARITY = Exercise(
    name="parity",
    notebook="15_since_2021",
    difficulty=3,
    importance=5,
    minutes=12,
    task="**Parity.** A memory of one number starts at 0; its key and query are 1, so "
    "a step is $W \\leftarrow W + \\beta\\,(v - W)$, and reading returns $W$. For "
    "`bits` `[time]` (0.0 or 1.0), return `v, beta`, both `[time]`, each from its own "
    "bit alone, so that every reading is 1 where the number of ones so far is odd, "
    "and 0 where it is even.",
    reference=parity,
    properties=(
        shape(
            "returns v and beta, one of each for each bit", _bits, names=("v", "beta")
        ),
        _reads(
            "a first 1 makes the reading 1",
            [(1,)],
            because="The only bit was 1, so the reading should be 1.",
            catches={
                "This flips the sign. From 0 that leads nowhere: 0 and 1 have to change "
                "places.": lambda bits: (0 * bits, 2 * bits),
                "This reflects at 1, so that 0 becomes 2. Which point lies between 0 and "
                "1?": lambda bits: (bits, 2 * bits),
                "At 1/2 and beta = 1, both 0 and 1 become 1/2: odd and even are "
                "lost.": lambda bits: (bits / 2, bits),
            },
        ),
        _reads(
            "a 0 changes nothing",
            [(0,), (1, 0), (1, 0, 0)],
            because="Only ones should change the reading.",
            catches={
                "This writes each bit, and so remembers only the last of "
                "them.": lambda bits: (bits, torch.ones_like(bits)),
                "This reflects at every token. A 0 has to leave the memory as it "
                "is.": lambda bits: (torch.full_like(bits, 0.5), 0 * bits + 2),
                "Here a 0 makes the reading 0. It should leave it as it "
                "is.": lambda bits: (bits / 2, 1 + bits),
            },
        ),
        _reads(
            "a second 1 makes it 0 again",
            [(1, 1), (1, 0, 1)],
            because="Two ones are an even number.",
            catches={
                "This writes 1 at a 1: it stays at 1, and knows only that there was a "
                "1.": lambda bits: (bits, bits),
            },
        ),
        Property(
            "each token decides from its own bit",
            _of_each_alone,
            {
                "This counts outside of the memory, and only writes the "
                "result.": lambda bits: (_odd(bits), torch.ones_like(bits)),
            },
        ),
        _reads(
            "is right at every length",
            [(1.0,) * 1001, (1.0, 1.0, 0.0) * 300, ()],
            because="These are the readings of a long sequence.",
        ),
    ),
    hints=(
        "A 0 has to leave the memory alone: which strength does that?",
        "A 1 has to exchange 0 and 1. At beta = 2 the step is W + 2 (v - W) = 2 v - W.",
        "2 v - W is 1 for W = 0 and 0 for W = 1, if 2 v is 1.",
    ),
    example=_bits,
    matters=lambda pair, bits: (pair[0] * pair[1], pair[1]),
)


# --- two_steps ----------------------------------------------------------


def _turned(k: Tensor, angle: Tensor) -> Tensor:
    """The product of two steps with beta = 2: rows are where the axes go."""
    first, second = (torch.eye(2).double() - 2 * torch.outer(x, x) for x in k)
    return first @ second


def _turn(angle: Tensor) -> Tensor:
    c, s = angle.cos(), angle.sin()
    return torch.stack([torch.stack([c, s]), torch.stack([-s, c])])


def _keys(first: Tensor, second: Tensor) -> Tensor:
    """Two keys of length 1, at these angles."""
    at = torch.stack([first, second])
    return torch.stack([at.cos(), at.sin()], -1)


def _angle(generator: Generator, degrees: float | None = None) -> dict[str, Tensor]:
    drawn = 360 * torch.rand((), generator=generator, dtype=torch.float64)
    if degrees is not None:
        drawn = torch.full_like(drawn, degrees)
    return {"angle": drawn.deg2rad()}


TWO_STEPS = Exercise(
    name="two_steps",
    notebook="15_since_2021",
    difficulty=3,
    importance=4,
    minutes=12,
    task="**Two steps.** Each row of `W` is a point in the plane. Return two keys of "
    "length 1, `[2, 2]`, one in each row, such that two steps with $\\beta = 2$ and "
    "$v = 0$, one after the other, turn every point by `angle` (a tensor with one "
    "number, in radians), from the first axis towards the second.",
    reference=two_steps,
    properties=(
        shape("returns two keys", _angle),
        Property(
            "the keys have length 1",
            lambda answer, reference, generator: compare(
                ask(answer, torch.eye(2).double(), **_angle(generator)).norm(dim=-1),
                torch.ones(2).double(),
                "With another length, a step at beta = 2 is not a reflection.",
            ),
        ),
        agrees(
            "for an angle of 0, leaves all points where they are",
            _angle,
            [0.0],
            of=_turned,
            expected=lambda angle: torch.eye(2).double(),
            because="Reflecting twice with the same key changes nothing.",
            catches={
                "These keys are orthogonal at angle 0, and their product turns by half "
                "a turn. Start from equal keys.": lambda angle: _keys(
                    0 * angle, angle / 2 + torch.pi / 2
                ),
            },
        ),
        agrees(
            "for a quarter turn, moves the point (1, 0) to (0, 1)",
            _angle,
            [90.0],
            of=lambda k, angle: _turned(k, angle)[0],
            expected=lambda angle: torch.tensor([0.0, 1.0]).double(),
            because="This is where (1, 0) goes.",
            catches={
                "These keys are the angle apart, and turn by twice as "
                "much.": lambda angle: _keys(0 * angle, angle),
                "The keys are in the wrong order: this turns the other "
                "way.": lambda angle: _keys(angle / 2, 0 * angle),
                "Both keys are the same, so the second step undoes the "
                "first.": lambda angle: _keys(angle / 2, angle / 2),
                "These keys are twice the angle apart. It takes half.": lambda angle: (
                    _keys(0 * angle, 2 * angle)
                ),
            },
        ),
        agrees(
            "turns by any angle",
            _angle,
            [120.0, 72.0, 200.0, -30.0, None],
            of=_turned,
            expected=_turn,
            because="These are the places where (1, 0) and (0, 1) go.",
        ),
    ),
    hints=(
        "A reflection with key k changes the sign along k. Draw a point, and two keys "
        "with a small angle between them.",
        "Only the angle between the keys counts. For a key at 0 degrees and one at a "
        "degrees, (1, 0) goes to (-1, 0) first. Where does it go then?",
        "Two reflections turn by twice the angle between their keys: put them at 0 and "
        "at angle / 2.",
    ),
    example=_angle,
    matters=_turned,
)


# --- four_cups ------------------------------------------------------------

CORNERS = torch.tensor(
    [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=torch.float64
)


def _shuffles() -> Tensor:
    """All 24 permutations of four cups."""
    four = torch.cartesian_prod(*[torch.arange(4)] * 4)
    return four[(four.sort(-1).values == torch.arange(4)).all(-1)]


def _shuffle(generator: Generator) -> dict[str, Tensor]:
    return {"p": torch.randperm(4, generator=generator)}


def _matrices(answer: Answer) -> dict[tuple[int, ...], Tensor]:
    like = torch.eye(3).double()
    return {tuple(p.tolist()): ask(answer, like, p=p) for p in _shuffles()}


def _no_stretch(answer: Answer, reference: Answer, generator: Generator) -> None:
    for p, M in _matrices(answer).items():
        compare(
            M.double() @ M.mT.double(),
            torch.eye(3).double(),
            f"This is M M^T for p = {list(p)}. Steps with beta = 2 are reflections, so "
            "their products have M M^T = I.",
        )


def _follows(answer: Answer, reference: Answer, generator: Generator) -> None:
    M = _matrices(answer)
    for p in M:
        for then in M:
            both = tuple(then[i] for i in p)
            compare(
                M[p] @ M[then],
                M[both],
                f"First p = {list(p)}, then {list(then)}, is the shuffle {list(both)}. "
                "This is the product of your first two matrices, beside your third.",
            )


def _apart_from_each_other(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    M = _matrices(answer)
    for p in M:
        for other in M:
            if p < other and torch.allclose(M[p], M[other]):
                raise Wrong(
                    f"The shuffles {list(p)} and {list(other)} have the same matrix, so "
                    "no reading can tell them apart."
                )


def _steps_of(M: Tensor) -> int:
    return int(torch.linalg.matrix_rank(M - torch.eye(3).double(), atol=1e-6))


def _at_most_two(answer: Answer, reference: Answer, generator: Generator) -> None:
    steps = {p: _steps_of(M.double()) for p, M in _matrices(answer).items()}
    many = [p for p, count in steps.items() if count > 2]
    if many:
        raise Wrong(
            f"{len(many)} of the 24 shuffles change all three directions, and so take "
            f"three steps: {list(many[0])} is one of them. In three dimensions, every "
            "turn takes two. Which are no turns?"
        )


FOUR_CUPS = Exercise(
    name="four_cups",
    notebook="15_since_2021",
    difficulty=5,
    importance=2,
    minutes=20,
    task="**Open task: four cups in two steps.** The token `p`, four integers, moves "
    "the ball of cup `i` to cup `p[i]`. Return its matrix `[3, 3]`, float64: $W "
    "\\leftarrow W M$. One token after another must multiply to the matrix of the "
    "shuffle that does both, all 24 must differ, and each must be made of at most "
    "*two* reflections.",
    reference=four_cups,
    properties=(
        shape("returns a matrix with three rows and columns", _shuffle),
        Property(
            "stretches nothing",
            _no_stretch,
            {
                "This drops the fourth row and column, and with them the "
                "ball there.": lambda p: torch.eye(4).double()[p][:3, :3],
                "The four corners have squares that sum to 4 along each axis: divide by "
                "4.": lambda p: CORNERS.mT @ CORNERS[p],
            },
        ),
        Property(
            "a shuffle after another is the product of both",
            _follows,
            {
                "This moves every ball back: corner i has to go to corner "
                "p[i].": lambda p: CORNERS.mT @ CORNERS[p.argsort()] / 4,
            },
        ),
        Property(
            "tells all 24 shuffles apart",
            _apart_from_each_other,
            {
                "This only knows whether the number of swaps is odd.": lambda p: (
                    torch.eye(3).double() * torch.linalg.det(torch.eye(4).double()[p])
                ),
                "This leaves every ball where it is.": lambda p: torch.eye(3).double(),
            },
        ),
        Property(
            "takes at most two steps for each",
            _at_most_two,
            {
                "These are the moves of the tetrahedron. A swap of two cups is one "
                "reflection, but moving all four round is three.": lambda p: (
                    CORNERS.mT @ CORNERS[p] / 4
                ),
            },
        ),
    ),
    hints=(
        "Put the cups at the corners of a tetrahedron, C = (1, 1, 1), (1, -1, -1), (-1, "
        "1, -1), (-1, -1, 1). The matrix that takes corner i to corner p[i] is C.mT @ "
        "C[p] / 4. How many steps does each take?",
        "12 of these are turns, with two steps at most. The other 12 have determinant "
        "-1. What happens to the determinant of a 3 x 3 matrix if you change its sign?",
        "Multiply each matrix by its determinant. Does a product still have the right "
        "matrix? A line through a corner and 0 is as good as the corner.",
    ),
    example=_shuffle,
)


EXERCISES = {
    each.name: each
    for each in (
        ASK_IS_NOT_WRITE,
        GATED_DELTA_STEP,
        ERASE_AND_WRITE,
        PARITY,
        TWO_STEPS,
        FOUR_CUPS,
    )
}
