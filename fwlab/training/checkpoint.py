"""A trained model in one safetensors file.

The tensors are the model's weights (`model.…`) and the optimiser's
averages (`adam.…`); configuration, alphabet and step are in the header.
"""

import contextlib
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fwlab.data import Characters
from fwlab.models import LanguageModel
from fwlab.training.config import Config

FORMAT = "1"


class CheckpointError(Exception):
    """A file that cannot be read, or does not hold the wanted model."""


class Checkpoint(NamedTuple):
    """What a file holds.

    - `model`: with its trained weights, on the CPU.
    - `characters`: the alphabet it was trained on.
    - `config`: the run that made it.
    - `step`: how many optimiser steps it has seen.
    - `adam`: the optimiser's state per parameter name.
    """

    model: LanguageModel
    characters: Characters
    config: Config
    step: int
    adam: dict[str, dict[str, Tensor]]


def new_model(config: Config, vocab_size: int) -> LanguageModel:
    """An untrained model of the size a configuration names."""
    return LanguageModel(
        vocab_size,
        config.mixer,
        layers=config.layers,
        heads=config.heads,
        d_model=config.d_model,
        max_len=config.block,
    )


def save(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, all of it or nothing.

    Raises `CheckpointError` where the file cannot be written.
    """
    tensors = {f"model.{name}": p for name, p in checkpoint.model.state_dict().items()}
    for name, state in checkpoint.adam.items():
        tensors |= {f"adam.{key}.{name}": part for key, part in state.items()}
    header = {
        "fwlab": FORMAT,
        "config": json.dumps(asdict(checkpoint.config)),
        "alphabet": json.dumps(checkpoint.characters.alphabet),
        "step": str(checkpoint.step),
    }
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
            part,
            header,
        )
        os.replace(part, path)  # readers see the old file or the new one
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from None


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint that `save` wrote.

    Raises `CheckpointError` for a file that is missing, damaged, not
    fwlab's, or whose tensors are not those of the model it names.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({str(error).splitlines()[0]})"
        ) from None
    if header.get("fwlab") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of fwlab train (no fwlab header in it)"
        )
    try:
        stored = json.loads(header["config"])
        config = Config(**{f.name: stored[f.name] for f in fields(Config)})
        characters, step = (
            Characters(json.loads(header["alphabet"])),
            int(header["step"]),
        )
        model = new_model(config, len(characters))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the header of {path} is damaged ({error})") from None

    model.load_state_dict(_weights(path, config, model, tensors))
    adam: dict[str, dict[str, Tensor]] = {}
    for name, part in tensors.items():
        if name.startswith("adam."):
            _, key, parameter = name.split(".", 2)
            adam.setdefault(parameter, {})[key] = part
    return Checkpoint(model, characters, config, step, adam)


def _weights(
    path: Path, config: Config, model: LanguageModel, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    found = {
        n.removeprefix("model."): t
        for n, t in tensors.items()
        if n.startswith("model.")
    }
    wanted = model.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        here, there = (
            list(d[name].shape) if name in d else "none" for d in (found, wanted)
        )
        if here != there:
            raise CheckpointError(
                f"{path} holds another model: its weight {name} is {here}, "
                f"the {config.mixer} model of its header wants {there}"
            )
    for name, tensor in found.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path} holds a weight {name} that is not finite")
    return found
