"""Save a trained model in one safetensors file, and load it.

The tensors are the model's weights (`model.…`), the optimiser's state (`adam.…`) and
the carried state (`state.…`). Configuration, vocabulary, step and a checksum of all are
in the header. Batches, learning rate and dropout follow from seed and step, so this is
all that a run needs to continue.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor

from fwlab.data import Characters, Vocabulary, Words
from fwlab.files import replacing
from fwlab.models import LanguageModel
from fwlab.training.config import Config

FORMAT = "1"
#: Name of the checkpoint file in its folder.
FILE = "checkpoint.safetensors"


class CheckpointError(ValueError):
    """Signal that a checkpoint is unreadable or does not contain the expected model."""


class Checkpoint(NamedTuple):
    """Hold the contents of a checkpoint file.

    - `model`: the model with trained weights, on the CPU.
    - `vocabulary`: its tokens, characters or words.
    - `config`: the run that produced it.
    - `step`: number of optimiser steps so far.
    - `adam`: the optimiser's state per parameter name.
    - `curve`: `[step, training loss, validation loss]` of every validation so far.
    - `corpus_sha256`: SHA-256 of the text it was trained on.
    - `state`: with `config.carry`, the parts of the state that the next windows begin
      with.
    """

    model: LanguageModel
    vocabulary: Vocabulary
    config: Config
    step: int
    adam: dict[str, dict[str, Tensor]]
    curve: list[list[float]]
    corpus_sha256: str
    state: Sequence[Tensor] = ()


def model_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of the configured `LanguageModel`, except `vocab_size`."""
    names = ["mixer", "layers", "heads", "d_model", "d_ff", "dropout"]
    names += ["attention_dropout", "norm", "mlp"]
    # A mixer without fast weights refuses these options of `FastWeightAttention`.
    options = {"like": "like", "conv": "conv_size", "beta_max": "beta_max"}
    options |= {"out_norm": "out_norm", "out_gate": "out_gate"}
    return {
        **{name: getattr(config, name) for name in names},
        "max_len": config.block,
        "fast_weights": {
            option: getattr(config, name)
            for name, option in options.items()
            if getattr(config, name) != getattr(Config, name)
        },
        "softmax": {} if config.rope is None else {"rope": config.rope},
    }


def new_model(config: Config, vocab_size: int) -> LanguageModel:
    """Build an untrained `LanguageModel` from a configuration."""
    return LanguageModel(vocab_size, **model_arguments(config))


def save(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a file, completely or not at all.

    - `path`: path of the file; an existing file is replaced.
    - `checkpoint`: what to write; its tensors may be on any device.
    - Raises `CheckpointError` if the file cannot be written.
    """
    tensors = {f"model.{name}": p for name, p in checkpoint.model.state_dict().items()}
    for name, state in checkpoint.adam.items():
        tensors |= {f"adam.{key}.{name}": part for key, part in state.items()}
    tensors |= {f"state.{i}": part for i, part in enumerate(checkpoint.state)}
    data = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header = {
        "fwlab": FORMAT,
        "config": json.dumps(asdict(checkpoint.config)),
        "alphabet": json.dumps(checkpoint.vocabulary.vocabulary),
        "step": str(checkpoint.step),
        "curve": json.dumps(checkpoint.curve),
        "corpus_sha256": checkpoint.corpus_sha256,
    }
    header["sha256"] = _checksum(header, data)
    try:
        with replacing(Path(path)) as part:
            # `save_file` writes a temporary file, which remains if the process is killed.
            part.write_bytes(serialize(data, header))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from None


def load(path: str | Path) -> Checkpoint:
    """Load a checkpoint that `save` wrote.

    - `path`: path of the file, of its folder, or of a run, whose best checkpoint is
      loaded.
    - Returns a `Checkpoint`, all of it on the CPU.
    - Raises `CheckpointError` if the file is missing, damaged or not fwlab's.
    """
    path = _file(Path(path))
    try:
        with safe_open(path, framework="pt") as file:
            header, names = file.metadata() or {}, file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({str(error).splitlines()[0]})"
        ) from None
    if header.get("fwlab") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of fwlab train: expected format {FORMAT} in its "
            f"header, got {header.get('fwlab')}"
        )
    if header.pop("sha256", None) != _checksum(header, tensors):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "adam": {}, "state": {}}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        parts[kind][rest] = tensor
    try:
        config = Config(**json.loads(header["config"]))
        kind_of_tokens = Words if config.tokens == "words" else Characters
        vocabulary = kind_of_tokens(json.loads(header["alphabet"]))
        model = new_model(config, len(vocabulary))
        model.load_state_dict(parts["model"])
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(
            f"{path} does not contain the model of its header: {why}"
        ) from None
    adam: dict[str, dict[str, Tensor]] = {}
    for name, part in parts["adam"].items():
        key, _, parameter = name.partition(".")
        adam.setdefault(parameter, {})[key] = part
    return Checkpoint(
        model,
        vocabulary,
        config,
        int(header["step"]),
        adam,
        json.loads(header["curve"]),
        header["corpus_sha256"],
        [parts["state"][str(i)] for i in range(len(parts["state"]))],
    )


def _file(path: Path) -> Path:
    for place in (path, path / FILE, path / "best" / FILE, path / "last" / FILE):
        if place.is_file():
            return place
    raise CheckpointError(f"there is no checkpoint {path}")


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the header and the tensors of a checkpoint."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
