"""Estimate the cost of a run before it starts: `fwlab train --dry-run`."""

import time

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fwlab.training.checkpoint import new_model
from fwlab.training.config import Config
from fwlab.training.loop import Loss, device

STEPS = 3
#: Maximum numbers of logits (2 GB with gradients) and operations in a measured step.
LOGITS, OPERATIONS = 2**28, 2**38


def describe(config: Config, vocabulary: int) -> str:
    """Train three steps on random tokens, and return a report on the cost of a run.

    The steps run in one process, without compilation and in float32. If a batch is
    too large to try, the cost is extrapolated from fewer windows.

    - `config`: the run.
    - `vocabulary`: number of tokens.
    - Raises `ValueError` for sizes that do not fit.
    """
    at = device(config.device)
    torch.manual_seed(config.seed)
    model = new_model(config, vocabulary).to(at)
    model.checkpointing = config.checkpointing
    loss, optimizer = Loss(model), torch.optim.AdamW(model.parameters(), config.lr)
    parameters = sum(p.numel() for p in model.parameters())
    part = config.batch // config.accumulate
    most = min(LOGITS // vocabulary, OPERATIONS // (6 * parameters))
    windows = min(part, max(1, most // config.block))
    tokens = torch.randint(vocabulary, (windows, config.block + 1), device=at)
    # Count the tensors saved for the backward pass, without the weights.
    sizes = {p.untyped_storage().data_ptr(): 0 for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        sizes.setdefault(storage.data_ptr(), storage.nbytes())
        return x

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            y = loss(tokens[:, :-1], tokens[:, 1:])[0]
        y.backward()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(tokens[:, :-1], tokens[:, 1:])[0].backward()
        optimizer.step()
        next(model.parameters()).sum().item()  # Wait for the device.
        times.append(time.perf_counter() - start)
    seconds = sorted(times)[STEPS // 2] * config.batch / windows
    operations = counter.get_total_flops() * config.batch // windows
    # Count weights, gradients, and Adam's two averages, in float32.
    fixed, kept = 16 * parameters / 2**30, sum(sizes.values()) * part / windows / 2**30
    return (
        f"{config.mixer}: {parameters / 1e6:.1f} million parameters, "
        f"{vocabulary:,} different tokens\n"
        f"state      {model.state_size(config.block):,} numbers per sequence of "
        f"{config.block} tokens\n"
        f"memory     at least {fixed + kept:.1f} GiB: {fixed:.2f} for weights, gradients "
        f"and averages, {kept:.2f} kept for the backward pass\n"
        f"operations {operations:.2g} per step, in matrix products\n"
        f"time       {seconds:.3g} s per step of {config.batch} windows, measured on "
        f"{at} with {windows} at a time; {config.steps:,} steps take "
        f"{_duration(seconds * config.steps)}"
    )


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
