"""Since 2021."""

import torch

from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.course.delta_rule import delta_step, elsewhere, step
from fwlab.exercises.notation import exercise
from fwlab.feature_maps import l2_normalize
from fwlab.ops.linear.sum import read, write


def _share(generator, *lead):
    """Numbers from 0.2 to 0.8."""
    return 0.2 + 0.6 * torch.rand(lead, generator=generator, dtype=torch.float64)


# --- ask_is_not_write -----------------------------------------------


def _one(generator, value=3, key=4, lead=()):
    return {
        "W": normal(generator, *lead, value, key),
        "d": _share(generator, *lead, key),
        "r": l2_normalize(normal(generator, *lead, key)),
        "k": l2_normalize(normal(generator, *lead, key)),
        "v": normal(generator, *lead, value),
        "s": _share(generator, *lead),
    }


def _same_key(generator):
    inputs = _one(generator)
    return inputs | {"d": torch.ones_like(inputs["d"]), "r": inputs["k"]}


def _nothing_fades(generator):
    inputs = _one(generator)
    return inputs | {"d": torch.ones_like(inputs["d"])}


def _nothing_asked(generator):
    inputs = _one(generator)
    return inputs | {"r": torch.zeros_like(inputs["r"])}


@exercise(_one, difficulty=2, importance=5, minutes=10)
def ask_is_not_write(W, d, r, k, v, s):
    """
    **Ask is not write** (d0). Return the memory after one step, for `W` `[..., value,
    key]`, the decay `d`, the asking key `r` and the writing key `k`, all `[..., key]`,
    `v` `[..., value]` and the strength `s` `[...]`.

    ✓ returns a tensor of the shape of W
        shape((3, 4), (2, 5), (1, 1))
    ✓ without a decay, and with one key for both, is the delta step
        agrees(draw=_same_key)
        == delta_step(W, k, v, s)
    ! d was 1 and r was k, so this is Eq. 24 with beta = s.
    ✗ This only adds. What the asking key returns has to be subtracted.
        (v - answer) -> v
    ✗ The strength multiplies only the value. It multiplies the whole difference, s (v -
      answer).
        (v - answer) -> v - answer
    ✗ The strength plays no part: the whole difference is written.
        s=torch.ones_like(s)
    ✗ The sign is wrong: this moves away from v.
        s=-s
    ✗ This returns only what is added. The step returns the new memory.
        ask_is_not_write(W, d, r, k, v, s) - W
    ✓ asks with r, and writes under k
        agrees(draw=_nothing_fades)
    ! d was 1, but r and k were different keys.
    ✗ This asks with the writing key, and r plays no part.
        r=k
    ✗ This writes under the asking key, and k plays no part.
        k=r
    ✗ The two keys have changed places: r asks, and k writes.
        r=k, k=r
    ✓ if it asks nothing, fades the old memory and adds the pair
        agrees(draw=_nothing_asked)
        == write(W * d, k, s * v)
    ! r was 0, so nothing is subtracted.
    ✗ Nothing fades here: column j of W has to be multiplied by d_j first.
        d=torch.ones_like(d)
    ✗ The pair that is just written fades as well. Only what was there before does.
        ask_is_not_write(W, torch.ones_like(d), r, k, v, s) * d[..., None, :]
    ✗ This fades every column by the mean of d. Each has its own.
        d=d.mean(-1, keepdim=True)
    ✓ asks what is left after fading
        agrees((3, 4), (4, 4), (5, 2))
    ✗ The key asks the memory before it fades: then more is subtracted than is still
      there.
        W = W * d[..., None, :] -> ; return W + -> return W * d[..., None, :] +
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to all arguments
        gradient({"lead": (2,)})
    ? Three lines, as in (d0): fade, then the increment, then write.
    ? W diag(d) multiplies column j of W by d_j: d[..., None, :] broadcasts with W.
    ? answer = torch.einsum("...vk,...k->...v", faded, r); the increment is s[..., None]
      * (v - answer); it is written under k.
    """
    W = W * d[..., None, :]  # fade each column
    answer = torch.einsum("...vk,...k->...v", W, r)
    u = s[..., None] * (v - answer)
    return W + u[..., :, None] * k[..., None, :]


# --- gated_delta_step -----------------------------------------------


def _gated(generator, beta=None, decay=None, lead=()):
    """None = each memory its own."""
    inputs = step(generator, beta, 1.0, lead=lead)
    fading = _share(generator, *lead)
    if decay is not None:
        fading = torch.full_like(fading, decay)
    return inputs | {"decay": fading}


START = """\
from fwlab.ops.linear.sum import read, write


def gated_delta_step(W, k, v, beta, decay):
    held = read(W, k)
    u = beta[..., None] * (v - held)
    return write(decay[..., None, None] * W, k, u)"""


@exercise(_gated, difficulty=2, importance=5, minutes=8, start=START)
def gated_delta_step(W, k, v, beta, decay):
    """
    **Find the bug.** This should be a step of the gated delta rule: the memory fades,
    then the delta rule corrects what is left. `W` is `[..., value, key]`, `k` `[...,
    key]`, `v` `[..., value]`, `beta` and `decay` `[...]`. Mend it.

    ✓ returns a tensor of the shape of W
        shape({}, {"lead": (2,)})
    ✓ with decay 1, is the delta step
        agrees((None, 1.0), (0.0, 1.0), (1.0, 1.0))
        == delta_step(W, k, v, beta)
    ! decay was 1, so nothing fades.
    ✗ This keeps 1 - decay of the memory. decay is the share that stays.
        decay=1 - decay
    ✗ This is the gated rule with two gates: it fades and adds, and asks nothing.
        delta_step(W, k, v, beta) -> write(W, k, beta[..., None] * v)
    ✓ with beta = 1, the key returns exactly the new value
        agrees((1.0, 0.5), (1.0, 0.9), (1.0, 0.0), of=lambda new, W, k, *_: read(new, k))
        == v
    ! decay was {decay:g}.
    ✗ The key is read before the memory fades. So more is subtracted than is still
      there.
        start:
    ✗ What is asked has faded, but what is written to has not.
        start: v - held -> v - decay[..., None] * held ; decay[..., None, None] * W -> W
    ✗ The new value fades as well. Fade first, then write.
        decay[..., None, None] * delta_step(W, k, v, beta)
    ✗ The memory fades twice before it is asked.
        start: v - held -> v - decay[..., None] ** 2 * held
    ✓ other keys keep a share of decay of their values
        agrees((0.7, 0.5), (0.0, 0.25), of=elsewhere)
        == decay * elsewhere(W, W, k)
    ! This is what orthogonal keys hold; decay was {decay:g}.
    ✗ Nothing fades here: this is the delta rule.
        W = decay[..., None, None] * W ->
    ✗ Only what this key holds fades here. A decay is for all keys.
        decay[..., None, None] * W -> write(W, k, (decay - 1)[..., None] * read(W, k))
    ✓ corrects what is left, for any strengths and decays
        agrees((0.5, 0.5), (0.3, 0.9), (2.0, 0.8))
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to all arguments
        gradient({"lead": (2,)})
    ? With decay 1 all is well. With decay 0.5 and beta = 1, ask for the key that was
      just written: by how much is it off?
    ? It is off by (1 - decay) times the old value: too much was subtracted. From which
      memory was it read?
    ? Fade first: W = decay[..., None, None] * W, then the delta step on that W.
    """
    W = decay[..., None, None] * W  # first fade
    return delta_step(W, k, v, beta)  # then ask what is left


# --- erase_and_write ------------------------------------------------


def _apart(generator, value=3, key=4, lead=()):
    return {
        "W": normal(generator, *lead, value, key),
        "decay": _share(generator, *lead, key),
        "k": l2_normalize(normal(generator, *lead, key)),
        "v": normal(generator, *lead, value),
        "e": _share(generator, *lead, key),
        "w": _share(generator, *lead, value),
    }


def _equal_gates(generator, beta):
    inputs = _apart(generator)
    gates = {name: torch.full_like(inputs[name], beta) for name in ("e", "w")}
    return inputs | gates


@exercise(_apart, difficulty=3, importance=4, minutes=10)
def erase_and_write(W, decay, k, v, e, w):
    """
    **Erase and write** (n5). In the gated delta rule 2, `e` `[..., key]` says how much
    to erase by key channel, and `w` `[..., value]` how much to write by value channel.
    Return the memory after one step, for `W` `[..., value, key]`, `decay` and `k`
    `[..., key]` and `v` `[..., value]`. One call of `ask_is_not_write` is enough: which
    key asks?

    ✓ returns a tensor of the shape of W
        shape((3, 4), (2, 5), (1, 1))
    ✓ with both gates 0, only fades
        agrees(0.0, draw=_equal_gates)
        == W * decay
    ! Both gates were 0: nothing is erased, and nothing written.
    ✗ This keeps e of what the key holds. e is the share that is erased.
        e=1 - e
    ✗ This ignores e: what the key holds is erased in all channels.
        e * k -> k
    ✗ This ignores w: the whole value is written.
        w * v -> v
    ✓ with both gates beta, is Kimi's rule
        agrees(0.5, 1.0, 0.9, draw=_equal_gates)
        == delta_step(W * decay, k, v, w[..., 0])
    ! Both gates were {beta:g}.
    ✗ This multiplies by both gates: what is erased has e alone, what is written has w
      alone.
        return ask_is_not_write(W, decay, e * k, k, w * v, one) ->
          W = W * decay[..., None, :]; return write(W, k, w * (v - read(W, e * k)))
    ✗ The key asks the memory before it fades: then more is erased than is still there.
        w * v, one) -> w * v - read((1 - decay[..., None, :]) * W, e * k), one)
    ✗ This writes first, and then erases some of what it has just written.
        w * v, one) -> w * v - (e * k * k).sum(-1, keepdim=True) * w * v, one)
    ✗ This erases under e ⊙ k as well. It erases, and writes, under k.
        e * k, k -> e * k, e * k
    ✗ The gate is on the key that writes. It belongs on the key that asks.
        e * k, k -> k, e * k
    ✗ Here e is one more decay, so other keys lose their values, too.
        decay, e * k -> decay * (1 - e), 0 * k
    ✓ with w = 0, erases without writing
        agrees(w=torch.zeros_like)
    ! w was 0. The answer to e ⊙ k is subtracted under k.
    ✗ This erases under e ⊙ k what k holds. It should erase under k what e ⊙ k finds.
        return ask_is_not_write(W, decay, e * k, k, w * v, one) ->
          return write(ask_is_not_write(W, decay, k, e * k, 0 * v, one), k, w * v)
    ✗ This erases by the mean of e. Each key channel has its own.
        e=e.mean(-1, keepdim=True)
    ✓ follows (n5) for any gates
        agrees((3, 4), (4, 4), (5, 2))
    ✗ This writes by the mean of w. Each value channel has its own.
        w=w.mean(-1, keepdim=True)
    ✓ works on any leading dimensions, such as [batch, heads]
        agrees({"lead": (2,)}, {"lead": (2, 3)}, {"lead": (4, 4)})
    ! The leading dimensions were {lead}.
    ✓ lets gradients through to all arguments
        gradient({"lead": (2,)})
    ? What is erased is what the memory returns. To erase less of one key channel, ask
      less of it.
    ? The key that asks is e ⊙ k, the key that writes is k, the value is w ⊙ v.
    ? There is no strength left: in ask_is_not_write, s is 1, as
      torch.ones(W.shape[:-2]).
    """
    one = torch.ones(W.shape[:-2], dtype=W.dtype)
    return ask_is_not_write(W, decay, e * k, k, w * v, one)


# --- parity -----------------------------------------------------------


def _bits(generator, *bits, time=8):
    """Return these bits; none = random ones."""
    if bits:
        return {"bits": torch.tensor(bits, dtype=torch.float64)}
    drawn = torch.randint(2, (time,), generator=generator)
    return {"bits": drawn.double()}


def _readings(pair, bits):
    """Read a memory of one number after each step."""
    w, read_back = bits.new_zeros(()), []
    for v, beta in zip(*pair, strict=True):
        w = w + beta * (v - w)
        read_back.append(w)
    return torch.stack(read_back)


def _odd(bits):
    return bits.cumsum(0) % 2


def _of_each_alone(answer, reference, generator):
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


@exercise(
    _bits,
    difficulty=3,
    importance=5,
    minutes=12,
    returns=("v", "beta"),
    matters=lambda pair, bits: (pair[0] * pair[1], pair[1]),
)
def parity(bits):
    r"""
    **Parity.** A memory of one number starts at 0; its key and query are 1, so a step
    is $W \leftarrow W + \beta\,(v - W)$, and reading returns $W$. For `bits` `[time]`
    (0.0 or 1.0), return `v, beta`, both `[time]`, each from its own bit alone, so that
    every reading is 1 where the number of ones so far is odd, and 0 where it is even.

    ✓ returns v and beta, one of each for each bit
        shape()
    ✓ a first 1 makes the reading 1
        agrees((1,), of=_readings)
        == _odd(bits)
    ! The only bit was 1, so the reading should be 1.
    ✗ This flips the sign. From 0 that leads nowhere: 0 and 1 have to change places.
        (0 * bits, 2 * bits)
    ✗ This reflects at 1, so that 0 becomes 2. Which point lies between 0 and 1?
        (bits, 2 * bits)
    ✗ At 1/2 and beta = 1, both 0 and 1 become 1/2: odd and even are lost.
        (bits / 2, bits)
    ✓ a 0 changes nothing
        agrees((0,), (1, 0), (1, 0, 0), of=_readings)
        == _odd(bits)
    ! Only ones should change the reading.
    ✗ This writes each bit, and so remembers only the last of them.
        (bits, torch.ones_like(bits))
    ✗ This reflects at every token. A 0 has to leave the memory as it is.
        (torch.full_like(bits, 0.5), 0 * bits + 2)
    ✗ Here a 0 makes the reading 0. It should leave it as it is.
        (bits / 2, 1 + bits)
    ✓ a second 1 makes it 0 again
        agrees((1, 1), (1, 0, 1), of=_readings)
        == _odd(bits)
    ! Two ones are an even number.
    ✗ This writes 1 at a 1: it stays at 1, and knows only that there was a 1.
        (bits, bits)
    ✓ each token decides from its own bit
        _of_each_alone
    ✗ This counts outside of the memory, and only writes the result.
        (_odd(bits), torch.ones_like(bits))
    ✓ is right at every length
        agrees((1.0,) * 1001, (1.0, 1.0, 0.0) * 300, (), of=_readings)
        == _odd(bits)
    ! These are the readings of a long sequence.
    ? A 0 has to leave the memory alone: which strength does that?
    ? A 1 has to exchange 0 and 1. At beta = 2 the step is W + 2 (v - W) = 2 v - W.
    ? 2 v - W is 1 for W = 0 and 0 for W = 1, if 2 v is 1.
    """
    # At a 1, W becomes 2 v - W = 1 - W; at a 0 it stays.
    return torch.full_like(bits, 0.5), 2 * bits


# --- two_steps ----------------------------------------------------------


def _turned(k, angle):
    """Return the product of two steps with beta = 2: rows are where the axes go."""
    first, second = (torch.eye(2).double() - 2 * torch.outer(x, x) for x in k)
    return first @ second


def _turn(angle):
    c, s = angle.cos(), angle.sin()
    return torch.stack([torch.stack([c, s]), torch.stack([-s, c])])


def _angle(generator, degrees=None):
    drawn = 360 * torch.rand((), generator=generator, dtype=torch.float64)
    if degrees is not None:
        drawn = torch.full_like(drawn, degrees)
    return {"angle": drawn.deg2rad()}


def _have_length_one(answer, reference, generator):
    keys = ask(answer, torch.eye(2).double(), **_angle(generator))
    why = "With another length, a step at beta = 2 is not a reflection."
    compare(keys.norm(dim=-1), torch.ones(2).double(), why)


@exercise(_angle, difficulty=3, importance=4, minutes=12, matters=_turned)
def two_steps(angle):
    r"""
    **Two steps.** Each row of `W` is a point in the plane. Return two keys of length 1,
    `[2, 2]`, one in each row, such that two steps with $\beta = 2$ and $v = 0$, one
    after the other, turn every point by `angle` (a tensor with one number, in radians),
    from the first axis towards the second.

    ✓ returns two keys
        shape()
    ✓ the keys have length 1
        _have_length_one
    ✓ for an angle of 0, leaves all points where they are
        agrees(0.0, of=_turned)
        == torch.eye(2).double()
    ! Reflecting twice with the same key changes nothing.
    ✗ These keys are orthogonal at angle 0, and their product turns by half a turn.
      Start from equal keys.
        angle / 2 -> angle / 2 + torch.pi / 2
    ✓ for a quarter turn, moves the point (1, 0) to (0, 1)
        agrees(90.0, of=lambda k, angle: _turned(k, angle)[0])
        == torch.tensor([0.0, 1.0]).double()
    ! This is where (1, 0) goes.
    ✗ These keys are the angle apart, and turn by twice as much.
        angle / 2 -> angle
    ✗ The keys are in the wrong order: this turns the other way.
        0 * angle, angle / 2 -> angle / 2, 0 * angle
    ✗ Both keys are the same, so the second step undoes the first.
        0 * angle -> angle / 2
    ✗ These keys are twice the angle apart. It takes half.
        angle / 2 -> 2 * angle
    ✓ turns by any angle
        agrees(120.0, 72.0, 200.0, -30.0, None, of=_turned)
        == _turn(angle)
    ! These are the places where (1, 0) and (0, 1) go.
    ? A reflection with key k changes the sign along k. Draw a point, and two keys with
      a small angle between them.
    ? Only the angle between the keys counts. For a key at 0 degrees and one at a
      degrees, (1, 0) goes to (-1, 0) first. Where does it go then?
    ? Two reflections turn by twice the angle between their keys: put them at 0 and at
      angle / 2.
    """
    # Two reflections turn by twice the angle between their keys.
    at = torch.stack([0 * angle, angle / 2])
    return torch.stack([at.cos(), at.sin()], -1)


# --- four_cups ------------------------------------------------------------


def _shuffles():
    """List all 24 permutations of four cups."""
    four = torch.cartesian_prod(*[torch.arange(4)] * 4)
    return four[(four.sort(-1).values == torch.arange(4)).all(-1)]


def _shuffle(generator):
    return {"p": torch.randperm(4, generator=generator)}


def _matrices(answer):
    like = torch.eye(3).double()
    return {tuple(p.tolist()): ask(answer, like, p=p) for p in _shuffles()}


def _no_stretch(answer, reference, generator):
    for p, M in _matrices(answer).items():
        compare(
            M.double() @ M.mT.double(),
            torch.eye(3).double(),
            f"This is M M^T for p = {list(p)}. Steps with beta = 2 are reflections, so "
            "their products have M M^T = I.",
        )


def _follows(answer, reference, generator):
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


def _apart_from_each_other(answer, reference, generator):
    M = _matrices(answer)
    for p in M:
        for other in M:
            if p < other and torch.allclose(M[p], M[other]):
                raise Wrong(
                    f"The shuffles {list(p)} and {list(other)} have the same matrix, so "
                    "no reading can tell them apart."
                )


def _steps_of(M):
    return int(torch.linalg.matrix_rank(M - torch.eye(3).double(), atol=1e-6))


def _at_most_two(answer, reference, generator):
    steps = {p: _steps_of(M.double()) for p, M in _matrices(answer).items()}
    many = [p for p, count in steps.items() if count > 2]
    if many:
        raise Wrong(
            f"{len(many)} of the 24 shuffles change all three directions, and so take "
            f"three steps: {list(many[0])} is one of them. In three dimensions, every "
            "turn takes two. Which are no turns?"
        )


@exercise(_shuffle, difficulty=5, importance=2, minutes=20)
def four_cups(p):
    r"""
    **Open task: four cups in two steps.** The token `p`, four integers, moves the ball
    of cup `i` to cup `p[i]`. Return its matrix `[3, 3]`, float64: $W \leftarrow W M$.
    For `p` and then `r`, the product of both matrices must be that of the shuffle that
    does both: `four_cups(p) @ four_cups(r)` is `four_cups` of the shuffle `i` to
    `r[p[i]]`. All 24 must differ, and each must be made of at most *two* reflections.

    ✓ returns a matrix with three rows and columns
        shape()
    ✓ stretches nothing
        _no_stretch
    ✗ This drops the fourth row and column, and with them the ball there.
        torch.eye(4).double()[p][:3, :3]
    ✗ The four corners have squares that sum to 4 along each axis: divide by 4.
        / 4 -> ; * torch.linalg.det(M) ->
    ✓ a shuffle after another is the product of both
        _follows
    ✗ This moves every ball back: corner i has to go to corner p[i].
        C[p] -> C[p.argsort()] ; * torch.linalg.det(M) ->
    ✓ tells all 24 shuffles apart
        _apart_from_each_other
    ✗ This only knows whether the number of swaps is odd.
        return M -> return torch.eye(3).double()
    ✗ This leaves every ball where it is.
        torch.eye(3).double()
    ✓ takes at most two steps for each
        _at_most_two
    ✗ These are the moves of the tetrahedron. A swap of two cups is one reflection, but
      moving all four round is three.
        * torch.linalg.det(M) ->
    ? Put the cups at the corners of a tetrahedron, C = (1, 1, 1), (1, -1, -1), (-1, 1,
      -1), (-1, -1, 1). The matrix that takes corner i to corner p[i] is C.mT @ C[p] /
      4. How many steps does each take?
    ? 12 of these are turns, with two steps at most. The other 12 have determinant -1.
      What happens to the determinant of a 3 x 3 matrix if you change its sign?
    ? Multiply each matrix by its determinant. Does a product still have the right
      matrix? A line through a corner and 0 is as good as the corner.
    """
    corners = [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
    C = torch.tensor(corners, dtype=torch.float64)
    M = C.mT @ C[p] / 4  # corner i goes to corner p[i]
    return M * torch.linalg.det(M)  # with the sign of p, all are turns
