"""A trained model in one safetensors file.

The tensors are the model's weights (`model.…`) and the optimiser's
averages (`adam.…`); configuration, alphabet and step are in the header.
"""

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fwlab.data import Characters
from fwlab.files import replacing
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
    - `curve`: `[step, training loss, validation loss]` of every
      validation so far.
    - `corpus_sha256`: of the text it was trained on.
    """

    model: LanguageModel
    characters: Characters
    config: Config
    step: int
    adam: dict[str, dict[str, Tensor]]
    curve: list[list[float]]
    corpus_sha256: str


def new_model(config: Config, vocab_size: int) -> LanguageModel:
    """An untrained model of the size a configuration names."""
    return LanguageModel(
        vocab_size,
        config.mixer,
        layers=config.layers,
        heads=config.heads,
        d_model=config.d_model,
        max_len=config.block,
        d_ff=config.d_ff,
    )


def save(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, all of it or nothing.

    - `path`: of the file, which is replaced if it is there.
    - `checkpoint`: what to write; its tensors may be on any device.
    - Raises `CheckpointError` where the file cannot be written.
    """
    tensors = {f"model.{name}": p for name, p in checkpoint.model.state_dict().items()}
    for name, state in checkpoint.adam.items():
        tensors |= {f"adam.{key}.{name}": part for key, part in state.items()}
    header = {
        "fwlab": FORMAT,
        "config": json.dumps(asdict(checkpoint.config)),
        "alphabet": json.dumps(checkpoint.characters.alphabet),
        "step": str(checkpoint.step),
        "curve": json.dumps(checkpoint.curve),
        "corpus_sha256": checkpoint.corpus_sha256,
    }
    data = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        with replacing(Path(path)) as part:
            save_file(data, part, header)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from None


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint that `save` wrote.

    - `path`: of the file.
    - Returns a `Checkpoint`, all of it on the CPU.
    - Raises `CheckpointError` for a file that is missing, damaged, not
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
    if "fwlab" not in header:
        raise CheckpointError(
            f"{path} is not a checkpoint of fwlab train (no fwlab header in it)"
        )
    if header["fwlab"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {header['fwlab']}; this version reads format {FORMAT}"
        )
    try:
        # The first checkpoints knew no d_ff.
        stored = {"d_ff": None, **json.loads(header["config"])}
        config = Config(**{f.name: stored[f.name] for f in fields(Config)})
        characters, step = (
            Characters(json.loads(header["alphabet"])),
            int(header["step"]),
        )
        curve, corpus_sha256 = json.loads(header["curve"]), header["corpus_sha256"]
        if not all(len(row) == 3 and all(map(math.isfinite, row)) for row in curve):
            raise ValueError("its curve is not made of rows of three numbers")
        if step < 0:
            raise ValueError(f"step {step} is negative")
        with torch.device("meta"):  # the stored sizes may be anything
            wanted = new_model(config, len(characters)).state_dict()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the header of {path} is damaged ({error})") from None

    weights = _weights(path, config, wanted, tensors)
    adam = _adam(path, weights, tensors)
    model = new_model(config, len(characters))
    model.load_state_dict(weights)
    return Checkpoint(model, characters, config, step, adam, curve, corpus_sha256)


def _weights(
    path: Path, config: Config, wanted: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    found = {
        n.removeprefix("model."): t
        for n, t in tensors.items()
        if n.startswith("model.")
    }
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
        if tensor.dtype != wanted[name].dtype:
            raise CheckpointError(
                f"{path} holds another model: its weight {name} has dtype "
                f"{tensor.dtype}, {wanted[name].dtype} was wanted"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path} holds a weight {name} that is not finite")
    return found


def _adam(
    path: Path, weights: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The optimiser's state: that of every weight, or none at all."""
    found = {
        n.removeprefix("adam."): t for n, t in tensors.items() if n.startswith("adam.")
    }
    if not found:
        return {}
    adam: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    for name, weight in weights.items():
        shapes = {"step": [], "exp_avg": [*weight.shape], "exp_avg_sq": [*weight.shape]}
        for key, shape in shapes.items():
            part = found.pop(f"{key}.{name}", None)
            if part is None or list(part.shape) != shape:
                raise CheckpointError(
                    f"{path} is damaged: the optimiser's {key} of {name} is "
                    f"{'missing' if part is None else list(part.shape)}, {shape} was wanted"
                )
            adam[name][key] = part
    if found:
        raise CheckpointError(
            f"{path} is damaged: it has an optimiser state {min(found)} of no weight"
        )
    return adam
