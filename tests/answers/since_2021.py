"""Answers to the exercises on rules since 2021, wrong ones and right ones.

See tests/test_exercises.py for what the names mean.
"""

import math

import numpy as np
import torch

from fwlab.exercises import EXERCISES

one = EXERCISES["ask_is_not_write"].reference
SIGNS = torch.tensor([[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()


def outer(v, k):
    return v[..., :, None] * k[..., None, :]


def held(W, k):
    return (W * k[..., None, :]).sum(-1)


def tetra(p, corners=SIGNS):
    return torch.linalg.lstsq(corners, corners[p]).solution


def keys(first, second):
    at = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in (first, second)])
    return torch.stack([at.cos(), at.sin()], -1)


def sign(p):
    """+1 or -1, by counting the pairs that are out of order."""
    return (-1) ** sum(int(p[i] > p[j]) for i in range(4) for j in range(i, 4))


WRONG = {
    "ask_is_not_write": {
        "W.mT": "shape of W",
        "W * d[..., None] + outer(s[..., None] * (v - held(W, r)), k)": "shape of W",
        "W + outer(s[..., None] * (v + held(W, r)), k)": "is the delta step",
        "one(W, d, (r + k) / 2, k, v, s)": "asks with r",
        "one(W, d**2, r, k, v, s)": "fades the old memory",
        "one(W, 1 - d, r, k, v, s)": "is the delta step",
        "one(W, d, d * r, k, v, s)": "asks what is left",
        "W * d + torch.outer(s * (v - (W * d) @ r), k)": "any leading dimensions",
    },
    "gated_delta_step": {
        "W @ k": "shape of W",
        "right(W, k, v, 1 - beta, decay)": "is the delta step",
        "right(W, k, v, beta, decay) - W": "is the delta step",
        "right(W, k, v, beta.clamp(max=1), decay)": "any strengths",
        "right(W, k, v, beta, decay.clamp(min=0.6))": "other keys keep",
        "decay * W + torch.outer(beta * (v - decay * (W @ k)), k)": (
            "shape of W"  # a batch of two is among the sizes
        ),
        "right(W, k, v, beta, decay**2)": "other keys keep",
        "torch.stack([right(*x) for x in zip(W, k, v, beta, decay)]) "
        "if W.dim() == 3 else right(*inputs) if W.dim() == 2 else W": (
            "any leading dimensions"
        ),
    },
    "erase_and_write": {
        "W": "both gates 0",
        "W * decay[..., None, :]": "Kimi",
        "one(W, decay, k, e * k, w * v, w[..., 0])": "Kimi",
        "one(W, decay, w * k, k, e * v, w[..., 0])": "shape of W",
        "one(W, decay, k, k, v, e[..., 0])": "w = 0",
        "one(W, decay, e * k, k, v, w[..., 0])": "Kimi",
        "W * decay + torch.outer(w * v - (W * decay) @ (e * k), k)": "any leading",
    },
    "parity": {
        "bits.cumsum(0) % 2": "v and beta",
        "(bits / 2, 1.9 * bits)": "first 1",
        "(1 - bits, bits)": "first 1",
        "(bits / 2, 2 * bits * (torch.arange(len(bits)) < 500))": "every length",
        "(bits / 2, 2 * bits * (bits.cumsum(0) < 2))": "a second 1",
        "(bits.cumsum(0) % 2, bits)": "from its own bit",
    },
    "two_steps": {
        "right(angle)[0]": "two keys",
        "2 * right(angle)": "length 1",
        "keys(0, angle % torch.pi / 2)": "any angle",
        "keys(0, angle.clamp(max=3) / 2)": "any angle",
        "keys(0, -angle / 2)": "quarter turn",
        "keys(torch.pi / 2, angle / 2)": "angle of 0",
        "keys(0, angle / 4)": "quarter turn",
        "keys(0, angle.sin() * torch.pi / 4)": "any angle",
    },
    "four_cups": {
        "torch.eye(4).double()[p]": "three rows and columns",
        "-tetra(p)": "product of both",
        "2 * right(p)": "stretches nothing",
        "right(p).mT": "product of both",
        "tetra(p).abs()": "24 shuffles apart",
        "torch.eye(3).double() if sign(p) > 0 else tetra(p)": "product of both",
    },
}
TOLD = {
    "ask_is_not_write": {
        "one(W, d, k, r, v, s)": "The two keys have changed places",
        "one(W, torch.ones_like(d), r, k, v, s)": "Nothing fades here",
    },
    "gated_delta_step": {
        "decay[..., None, None] * W + outer(beta[..., None] * (v - held(W, k)), k)": (
            "The key is read before the memory fades."
        ),
    },
    "parity": {
        "(bits.cumsum(0) % 2, 0 * bits + 1)": "This counts outside of the memory",
        "(bits.cumsum(0) % 2, bits)": "The memory should do the counting",
    },
    "two_steps": {"keys(1, 1 + angle)": "turn by twice as much"},
    "four_cups": {"tetra(p)": "the moves of the tetrahedron"},
}


def as_a_matrix(W, d, r, k, v, s):
    """The old memory times a matrix, plus the pair."""
    eye = torch.eye(d.shape[-1], dtype=d.dtype)
    removes = eye - s[..., None, None] * outer(r, k)
    return W @ torch.diag_embed(d) @ removes + s[..., None, None] * outer(v, k)


def by_column(W, d, r, k, v, s):
    answer = sum(
        W[..., j] * d[..., j, None] * r[..., j, None] for j in range(d.shape[-1])
    )
    u = s[..., None] * (v - answer)
    columns = [
        W[..., j] * d[..., j, None] + u * k[..., j, None] for j in range(d.shape[-1])
    ]
    return torch.stack(columns, -1)


def asked_early(W, d, r, k, v, s):
    """The decay is moved from the memory to the key that asks."""
    return W * d[..., None, :] + outer(s[..., None] * (v - held(W, d * r)), k)


def mixed(W, d, r, k, v, s):
    """Half of the answer twice."""
    faded = torch.einsum("...vk,...k->...vk", W, d)
    return faded - outer(held(faded, s[..., None] * r), k) + outer(v, s[..., None] * k)


def turned_by_sum(angle):
    start = torch.tensor([1.0, 0.0]).double()
    half = angle / 2
    rows = torch.stack(
        [torch.stack([half.cos(), -half.sin()]), torch.stack([half.sin(), half.cos()])]
    )
    return torch.stack([start, rows @ start])


def bisected(angle):
    """The second key is orthogonal to the line that the second reflection keeps."""
    c, s = math.cos(angle), math.sin(angle)
    x = torch.tensor(
        [-1 - c, -s], dtype=torch.float64
    )  # from where (1, 0) is to where it goes
    if x.norm() < 1e-12:  # half a turn
        x = torch.tensor([0.0, 1.0]).double()
    return torch.stack([torch.tensor([1.0, 0.0]).double(), x / x.norm()])


def by_basis(p):
    """The shuffles of a basis of what sums to 0, for any such basis."""
    drawn = torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).double()
    B = torch.linalg.qr(drawn - drawn.mean(0)).Q
    return B.mT @ B[p] * sign(p)


def by_diagonals(p):
    """The turn of a cube that moves its diagonals like this, found by trying."""
    for axes in (
        torch.eye(3)[list(o)]
        for o in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    ):
        for signs in torch.cartesian_prod(*[torch.tensor([1.0, -1.0])] * 3):
            M = (axes * signs).double()
            moved = (SIGNS @ M @ SIGNS[p].mT).diagonal()
            if torch.linalg.det(M) > 0 and (moved.abs() > 2.9).all():
                return M
    raise AssertionError


RIGHT = {
    "ask_is_not_write": [as_a_matrix, by_column, asked_early, mixed],
    "gated_delta_step": [
        lambda W, k, v, beta, decay: as_a_matrix(
            W, decay[..., None].expand_as(k), k, k, v, beta
        ),
        lambda W, k, v, beta, decay: asked_early(
            W, decay[..., None] * torch.ones_like(k), k, k, v, beta
        ),
        lambda W, k, v, beta, decay: (
            (x := torch.einsum("...vk,...->...vk", W, decay))
            + torch.einsum(
                "...v,...k,...->...vk", v - (x @ k[..., None])[..., 0], k, beta
            )
        ),
        lambda W, k, v, beta, decay: by_column(
            W, decay[..., None] + 0 * k, k, k, v, beta
        ),
    ],
    "erase_and_write": [
        lambda W, decay, k, v, e, w: mixed(
            W, decay, e * k, k, w * v, torch.ones_like(k[..., 0])
        ),
        lambda W, decay, k, v, e, w: (
            W * decay[..., None, :] + outer(w * v - held(W, decay * e * k), k)
        ),
        lambda W, decay, k, v, e, w: (
            W @ (torch.diag_embed(decay) - outer(decay * e * k, k)) + outer(w * v, k)
        ),
        lambda W, decay, k, v, e, w: (
            (x := torch.einsum("...vk,...k->...vk", W, decay))
            + torch.einsum(
                "...v,...k->...vk",
                w * v - torch.einsum("...vk,...k,...k->...v", x, e, k),
                k,
            )
        ),
    ],
    "parity": [
        lambda bits: (bits / 2, bits + bits),
        lambda bits: tuple(
            torch.tensor([[0.5, 2 * b] for b in bits.tolist()]).double().T
        ),
        lambda bits: (
            torch.where(bits > 0, 0.5, 7.0).double(),
            torch.where(bits > 0, 2.0, 0.0).double(),
        ),
        lambda bits: [
            torch.from_numpy(x)
            for x in (bits.numpy() * 0.5, np.exp2(bits.numpy()) * bits.numpy())
        ],
    ],
    "two_steps": [
        turned_by_sum,
        bisected,
        lambda angle: keys(-angle / 4, angle / 4),
        lambda angle: keys(1.0, 1 + angle / 2 + math.pi),
        lambda angle: keys(0, float(angle) / 2).neg(),
    ],
    "four_cups": [
        by_basis,
        by_diagonals,
        lambda p: SIGNS.mT @ SIGNS[p] / 4 * torch.linalg.det(torch.eye(4)[p]).double(),
        lambda p: torch.linalg.lstsq(-SIGNS, SIGNS[p]).solution * -sign(p),
    ],
}
NO_GRADIENT = {"parity", "two_steps", "four_cups"}
