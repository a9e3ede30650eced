"""The carried state of a run, as the list of tensors of a checkpoint."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fwlab.training.checkpoint import CheckpointError
from fwlab.training.config import Config

if TYPE_CHECKING:
    from accelerate import Accelerator


def gathered(states: Sequence[Any], accelerator: "Accelerator") -> list[Tensor]:
    """The parts of carried states, with the rows of all processes.

    - `states`: the states of this process, one for each part of a batch.
    """
    tensors = []
    for parts in zip(*map(tree_leaves, states), strict=True):
        if isinstance(parts[0], Tensor):
            part = torch.cat(parts).contiguous()
            if accelerator.num_processes > 1:
                part = accelerator.gather(part)
            tensors.append(part)
        elif parts[0] is not None:
            tensors.append(torch.tensor(parts[0]))
    return tensors


def restored(
    saved: Sequence[Tensor],
    example: Any,
    config: Config,
    accelerator: "Accelerator",
    device: torch.device,
) -> list[Any]:
    """The inverse of `gathered`.

    - `example`: any state, for its form.
    - Raises `CheckpointError` if the state has another form.
    """
    leaves, form = tree_flatten(example)
    if len(saved) != sum(x is not None for x in leaves):
        raise CheckpointError(
            f"expected a carried state of {len(leaves)} parts in the checkpoint, "
            f"got {len(saved)}"
        )
    parts, first = config.accumulate, accelerator.process_index
    rows, states = config.batch // (parts * accelerator.num_processes), []
    for part in range(first * parts, (first + 1) * parts):
        tensors, filled = iter(saved), []
        for old in leaves:
            new: Any = old if old is None else next(tensors)
            if isinstance(old, Tensor):
                new = new[part * rows : (part + 1) * rows].to(device)
            filled.append(int(new) if isinstance(old, int) else new)
        states.append(tree_unflatten(filled, form))
    return states
