"""The Attention Free Transformer in all its forms."""

from functools import partial

import pytest
import torch
from torch import Generator, Tensor

from fwlab import ops
from fwlab.ops.aft.full import efficient as full_efficient
from fwlab.ops.aft.window import efficient as window_efficient
from problems.row import Inputs, Row

CHANNELS, HEADS, WINDOW = 6, 3, 4


def _random(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _state(generator: Generator, with_state: bool, steps: int | None) -> tuple:
    """(log_sum, mean), with the last `steps` keys and values in front."""
    if not with_state:
        return ()
    running = _random(generator, 2, CHANNELS), _random(generator, 2, CHANNELS)
    if steps is None:
        return running
    last = [_random(generator, 2, steps, CHANNELS) for _ in range(2)]
    return (*last, *running)


def simple(time: int, generator: Generator, with_state: bool):
    inputs = [2 * _random(generator, 2, time, CHANNELS) for _ in range(3)]
    state = _state(generator, with_state, None)
    return inputs, ops.RunningMean(*state) if with_state else None


def full(time: int, generator: Generator, with_state: bool):
    inputs, _ = simple(time, generator, False)
    past = 3 if with_state else 0
    inputs.append(_random(generator, time, past + time))
    last = [_random(generator, 2, past, CHANNELS) for _ in range(2)]
    return inputs, ops.KeysAndValues(*last) if with_state else None


def local(time: int, generator: Generator, with_state: bool):
    inputs, _ = simple(time, generator, False)
    inputs.append(_random(generator, time, WINDOW))
    state = _state(generator, with_state, WINDOW - 1)
    return inputs, ops.WindowState(*state) if with_state else None


def conv(time: int, generator: Generator, with_state: bool, *, one_key: bool):
    inputs, state = local(time, generator, with_state)
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in inputs[:3])
    kernel = _random(generator, HEADS, WINDOW)
    return [q, k[..., :1] if one_key else k, v, kernel], state


def cut_full(inputs: Inputs, start: int, stop: int) -> Inputs:
    q, k, v, bias = inputs
    past = bias.shape[1] - len(bias)
    return [*(x[:, start:stop] for x in (q, k, v)), bias[start:stop, : past + stop]]


def pick_full(inputs: Inputs, places: Tensor) -> Inputs:
    *timed, bias = inputs
    past = bias.shape[1] - len(bias)
    seen = torch.cat([torch.arange(past), past + places])
    return [*timed, bias[places][:, seen]]


def cut_local(inputs: Inputs, start: int, stop: int) -> Inputs:
    *timed, band = inputs
    return [*(x[:, start:stop] for x in timed), band[start:stop]]


def cut_conv(inputs: Inputs, start: int, stop: int) -> Inputs:
    *timed, kernel = inputs
    return [*(x[:, start:stop] for x in timed), kernel]


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for form in (full_efficient, window_efficient):
        monkeypatch.setattr(form, "TILE", 2)
    monkeypatch.setattr(full_efficient, "ROOM", 8)


def large(time: int, *, bias: str) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, time, 128, generator=generator) for _ in range(3))
    if bias == "none":
        return [q, k, v]
    if bias == "kernel":
        heads = [x.unflatten(-1, (4, 32)) for x in (q, k, v)]
        return [*heads, torch.randn(4, 32, generator=generator)]
    width = time if bias == "full" else 32
    return [q, k, v, torch.randn(time, width, generator=generator)]


ROWS = {
    "aft-simple": Row(
        ops.aft_simple, simple, partial(large, bias="none"), small=small, ratio=2
    ),
    "aft-full": Row(
        ops.aft_full,
        full,
        partial(large, bias="full"),
        cut=cut_full,
        pick=pick_full,
        small=small,
    ),
    "aft-local": Row(
        ops.aft_local,
        local,
        partial(large, bias="band"),
        cut=cut_local,
        pick=None,
        small=small,
    ),
    "aft-conv": Row(
        ops.aft_conv,
        partial(conv, one_key=False),
        partial(large, bias="kernel"),
        cut=cut_conv,
        pick=None,
        small=small,
    ),
    "aft-conv-one-key": Row(
        ops.aft_conv,
        partial(conv, one_key=True),
        partial(large, bias="kernel"),
        cut=cut_conv,
        pick=None,
        small=small,
    ),
}
