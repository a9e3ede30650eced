"""Answers to the exercises on writing as regression."""

from functools import partial

import torch

from fwlab.exercises import regression
from fwlab.exercises.solutions import delta_step, implicit_step, least_squares

# --- implicit_step ---------------------------------------------------


def towards(W, k, v, beta, power=2.0, below=1.0):
    """The step by its formula, with a choice of mistakes."""
    s = beta / (below + beta * k.norm(dim=-1) ** power)
    error = v - torch.einsum("...vk,...k->...v", W, k)
    return W + torch.einsum("...,...v,...k->...vk", s, error, k)


def by_system(W, k, v, beta):
    """Right: W' (I + beta k k^T) = W + beta v k^T."""
    b = beta[..., None, None]
    A = torch.eye(k.shape[-1]).double() + b * k[..., :, None] * k[..., None, :]
    B = W + b * v[..., :, None] * k[..., None, :]
    return torch.linalg.solve(A, B.mT).mT


def by_mean(W, k, v, beta):
    """Right: the value that is written is a mean of v and the reading."""
    weight = (beta * k.square().sum(-1))[..., None]
    old = (W * k[..., None, :]).sum(-1)
    new = (old + weight * v) / (1 + weight)
    change = torch.where(weight == 0, 0, (new - old) * beta[..., None] / weight)
    return W + change[..., :, None] * k[..., None, :]


def of_a_unit_key(W, k, v, beta):
    return implicit_step(W, k / k.norm(dim=-1, keepdim=True), v, beta)


def half_a_step(W, k, v, beta):
    return (W + delta_step(W, k, v, beta)) / 2


def descended(W, k, v, beta, steps=300):
    """Runs gradient descent on the two squares, with a fixed rate."""
    new = W
    for _ in range(steps):
        error = torch.einsum("...vk,...k->...v", new, k) - v
        slope = new - W + beta[..., None, None] * error[..., :, None] * k[..., None, :]
        new = new - 0.05 * slope
    return new


def fading(W, k, v, beta):
    """Right for this key; what all others hold fades."""
    unit = k / k.norm(dim=-1, keepdim=True)
    here = unit[..., :, None] * unit[..., None, :]
    return implicit_step(W, k, v, beta) - (W - W @ here) * beta[..., None, None] / 9


# --- least_squares ---------------------------------------------------


def by_pairs(k, v, ridge):
    """Right: a system of the size of the number of pairs."""
    A = k @ k.mT + ridge * torch.eye(k.shape[-2]).double()
    return torch.linalg.solve(A, v).mT @ k


def stacked(k, v, ridge):
    """Right: the ridge as further pairs with value 0."""
    more = torch.eye(k.shape[-1]).double() * ridge**0.5
    k_ = torch.cat([k, more.expand(*k.shape[:-2], -1, -1)], -2)
    v_ = torch.cat([v, v.new_zeros(*v.shape[:-2], k.shape[-1], v.shape[-1])], -2)
    return (torch.linalg.pinv(k_) @ v_).mT


def by_svd(k, v, ridge):
    """Right: singular values s become s / (s² + ridge)."""
    U, s, V = torch.linalg.svd(k, full_matrices=False)
    return v.mT @ (U * (s / (s * s + ridge))[..., None, :]) @ V


def by_inverse(k, v, ridge):
    H = torch.einsum("...ji,...jl->...il", k, k) + ridge * torch.eye(k.shape[-1])
    return v.mT @ k @ torch.linalg.inv(H)


def of_one_set(k, v, ridge):
    """All sets of pairs share one memory."""
    W = least_squares(k.flatten(0, -2), v.flatten(0, -2), ridge)
    return W.expand(*k.shape[:-2], *W.shape)


# --- recursive_least_squares -----------------------------------------


def by_prefixes(k, v, ridge):
    """Right: adds a pair to both sums, and solves at each step."""
    H, G = ridge * torch.eye(k.shape[1]).double(), 0
    for k_t, v_t in zip(k, v, strict=True):
        H, G = H + torch.outer(k_t, k_t), G + torch.outer(v_t, k_t)
    return torch.linalg.solve(H, G, left=False)


def by_gain(k, v, ridge):
    """Right: the gain first, then both updates."""
    W, P = v.new_zeros(v.shape[1], k.shape[1]), torch.eye(k.shape[1]).double() / ridge
    for k_t, v_t in zip(k, v, strict=True):
        gain = P @ k_t / (1 + k_t @ P @ k_t)
        W, P = W + torch.outer(v_t - W @ k_t, gain), P - torch.outer(gain, k_t @ P)
    return W


def by_summing(k, v, ridge):
    """Right: carries P and the sum of v k^T, and multiplies them at the end."""
    P, G = torch.eye(k.shape[1]).double() / ridge, v.mT @ k
    for k_t in k:
        Pk = P @ k_t
        P = P - Pk[:, None] * Pk / (1 + Pk @ k_t)
    return G @ P


def step_twice(k, v, ridge):
    """The new P, and its denominator again."""
    W, P = v.new_zeros(v.shape[1], k.shape[1]), torch.eye(k.shape[1]).double() / ridge
    for k_t, v_t in zip(k, v, strict=True):
        Pk = P @ k_t
        P = P - torch.outer(Pk, Pk) / (1 + k_t @ Pk)
        W = W + torch.outer(v_t - W @ k_t, P @ k_t) / (1 + k_t @ Pk)
    return W


def forgets(k, v, ridge, keep=0.9):
    """Old pairs count less and less."""
    weights = keep ** torch.arange(len(k) - 1, -1, -1).double()[:, None]
    return least_squares(k * weights.sqrt(), v * weights.sqrt(), ridge)


# --- better_step -----------------------------------------------------


def as_diagonal(W, z, k, v):
    """Right: the inverse of P in z, from the ridge on."""
    z = torch.where(z == 0, 0.1, z)
    n, z = z.sum(-1, keepdim=True) - 1.6, z + k**2
    where = k / z / (k * k / z).sum(-1, keepdim=True)
    u = (v - (W @ k[..., None])[..., 0]) * 16 / (16 + n)
    return W + u[..., None] * where[..., None, :], z


def by_root(W, z, k, v):
    """Right: weaker in used channels, by a root, and slower by another law."""
    n, z = z.sum(-1, keepdim=True), z + k * k
    where = k / (0.05 + z) ** 0.8
    where = where / (where * k).sum(-1, keepdim=True)
    u = (v - (W @ k[..., None])[..., 0]) * (1 + n / 10) ** -0.75
    return W + u[..., None] * where[..., None, :], z


def implicit_channels(W, z, k, v):
    """Right: never quite all the way, with a step that shrinks."""
    n, z = z.sum(-1, keepdim=True), z + k * k
    where = k / (0.2 + z)
    gain = where / (0.02 / (1 + n) + (where * k).sum(-1, keepdim=True))
    u = torch.einsum("...vk,...k->...v", W, k).sub(v).neg() * 0.95 / (1 + n / 16)
    return W + torch.einsum("...v,...k->...vk", u, gain), z


def counted_in_a_corner(W, z, k, v):
    """Right: only the first channels are treated apart, with n in z as it is."""
    n = z.sum(-1, keepdim=True)
    where = k * torch.where(n == 0, 1, (n + 1.6) / (16 * z + 1.6))
    where = where / (where * k).sum(-1, keepdim=True)
    u = (v - (W * k[..., None, :]).sum(-1)) * torch.rsqrt(1 + n / 6)
    return W + u[..., None] * where[..., None, :], z + k.square()


def by_dimensions(W, z, k, v):
    """Another strength for memories with leading dimensions."""
    return regression._better(W, z, k, v, slower=1 / W.dim())


def slower(W, z, k, v, law):
    """The delta rule, whose strength changes with the number of pairs so far."""
    return delta_step(W, k, v, law(z.sum(-1))), z + k * k


WRONG = {
    "implicit_step": {
        "towards(*inputs, below=0.0).nan_to_num()": "goes half the way",
        "half_a_step(*inputs)": "length of the key",
        "of_a_unit_key(*inputs)": "length of the key",
        "towards(W, k, v, beta, power=3.0)": "length of the key",
        "fading(*inputs)": "orthogonal",
        "towards(W, k, v, beta**2)": "minimises",
        "implicit_step(W, k, v, beta.clamp(max=100))": "never goes beyond",
        "descended(*inputs)": "never goes beyond",
        "W + implicit_step(0 * W, k, v - W @ k, beta)": "any leading",
        "towards(W, k, v, beta.mean())": "any leading",
    },
    "least_squares": {
        "right(k, v, ridge).mT": "returns one memory",
        "right(k, v, ridge) @ k.mT": "returns one memory",
        "right(k, v, ridge / 2)": "divides the values",
        "right(k, v, -ridge / 2)": "divides the values",
        "right(k, v, max(ridge, 1e-2))": "with fewer pairs",
        "of_one_set(*inputs)": "any leading",
    },
    "recursive_least_squares": {
        "least_squares(k, v, ridge).mT": "returns one memory",
        "step_twice(*inputs)": "stores half",
        "least_squares(k, v, ridge + ridge**2) * (1 + ridge)": "stores half",
        "least_squares(k, v, ridge) if len(k) < 50 else 0 * v.mT @ k": "is least squares",
        "forgets(*inputs)": "is least squares",
        "least_squares(k[-1:], v[-1:], ridge)": "is least squares",
    },
    "better_step": {
        "W": "returns W and z",
        "(W, z.sum())": "returns W and z",
        "by_dimensions(*inputs)": "treats each memory",
        "(implicit_step(W, k, v, k[..., 0] * 0 + 1), z)": "constant strength",
        "(W, z)": "constant strength",
        "slower(*inputs, lambda n: 1 / (1 + n))": "constant strength",
        "slower(*inputs, lambda n: 0.98**n)": "constant strength",
    },
}
TOLD = {
    "least_squares": {"v.mT @ torch.linalg.pinv(k).mT": "This forgets the ridge."},
    "recursive_least_squares": {
        "by_gain(k, v, 1 / ridge)": "is its inverse.",
    },
    "better_step": {
        "slower(*inputs, lambda n: 16 / (16 + n))": "share a few channels",
    },
}
RIGHT = {
    "implicit_step": [by_system, by_mean, towards, partial(towards, below=1)],
    "least_squares": [by_pairs, stacked, by_svd, by_inverse],
    "recursive_least_squares": [by_prefixes, by_gain, by_summing, by_pairs],
    "better_step": [as_diagonal, by_root, implicit_channels, counted_in_a_corner],
}
NO_GRADIENT = {"better_step"}
