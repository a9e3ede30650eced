"""A trained model in one safetensors file.

The tensors are the model's weights (`model.…`), the optimiser's state
(`adam.…`) and the carried state (`state.…`). Configuration, vocabulary, step,
the loss scaler of float16 and a checksum of all are in the header. Batches,
learning rate and dropout follow from seed and step, so this is all that a run
needs to continue.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fwlab.data import Characters, Vocabulary, Words
from fwlab.files import replacing
from fwlab.models import LanguageModel
from fwlab.training.config import FREE, Config

FORMAT = "1"
#: The name of the file, in the folder of its own.
FILE = "checkpoint.safetensors"
#: The entries of a `torch.amp.GradScaler` that a run in float16 keeps.
SCALER = {"scale", "_growth_tracker"}
#: The entry of the header; the first checkpoints had none.
CHECKSUM = "sha256"


class CheckpointError(Exception):
    """The file is not readable, or does not contain the expected model."""


class Checkpoint(NamedTuple):
    """The contents of a checkpoint file.

    - `model`: with its trained weights, on the CPU.
    - `vocabulary`: its tokens, characters or words.
    - `config`: the run that produced it.
    - `step`: number of optimiser steps so far.
    - `adam`: the optimiser's state per parameter name.
    - `curve`: `[step, training loss, validation loss]` of every
      validation so far.
    - `corpus_sha256`: SHA-256 of the text it was trained on.
    - `state`: with `config.carry`, the parts of the state that the next
      windows begin with.
    - `scaler`: with `config.precision="fp16"`, by what losses are
      multiplied, and since when.
    """

    model: LanguageModel
    vocabulary: Vocabulary
    config: Config
    step: int
    adam: dict[str, dict[str, Tensor]]
    curve: list[list[float]]
    corpus_sha256: str
    state: Sequence[Tensor] = ()
    scaler: dict[str, float] = {}  # noqa: RUF012


#: The options of `FastWeightAttention`, by the names of `Config`.
OPTIONS = {
    "like": "like",
    "conv": "conv_size",
    "out_norm": "out_norm",
    "out_gate": "out_gate",
    "beta_max": "beta_max",
}


def model_arguments(config: Config) -> dict[str, Any]:
    """Those of the configured `LanguageModel`, but for the vocabulary."""
    usual = Config()
    fast_weights = {
        option: getattr(config, name)
        for name, option in OPTIONS.items()
        if getattr(config, name) != getattr(usual, name)
    }
    return {
        "mixer": config.mixer,
        "layers": config.layers,
        "heads": config.heads,
        "d_model": config.d_model,
        "max_len": config.block,
        "d_ff": config.d_ff,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "fast_weights": fast_weights,
        "softmax": {} if config.rope is None else {"rope": config.rope},
        "norm": config.norm,
        "mlp": config.mlp,
    }


def new_model(config: Config, vocab_size: int) -> LanguageModel:
    """An untrained model of the configured size."""
    return LanguageModel(vocab_size, **model_arguments(config))


def save(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, completely or not at all.

    - `path`: path of the file; an existing file is replaced.
    - `checkpoint`: what to write; its tensors may be on any device.
    - Raises `CheckpointError` if the file cannot be written.
    """
    tensors = {f"model.{name}": p for name, p in checkpoint.model.state_dict().items()}
    for name, state in checkpoint.adam.items():
        tensors |= {f"adam.{key}.{name}": part for key, part in state.items()}
    tensors |= {f"state.{i}": part for i, part in enumerate(checkpoint.state)}
    header = {
        "fwlab": FORMAT,
        "config": json.dumps(asdict(checkpoint.config)),
        "alphabet": json.dumps(
            checkpoint.vocabulary.vocabulary
            if isinstance(checkpoint.vocabulary, Words)
            else checkpoint.vocabulary.alphabet
        ),
        "step": str(checkpoint.step),
        "curve": json.dumps(checkpoint.curve),
        "corpus_sha256": checkpoint.corpus_sha256,
        "scaler": json.dumps(checkpoint.scaler),
    }
    data = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    header[CHECKSUM] = _checksum(header, data)
    try:
        with replacing(Path(path)) as part:
            save_file(data, part, header)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from None


def load(path: str | Path) -> Checkpoint:
    """Load a checkpoint that `save` wrote.

    - `path`: path of the file, of its folder, or of a run, whose best checkpoint
      is loaded.
    - Returns a `Checkpoint`, all of it on the CPU.
    - Raises `CheckpointError` if the file is missing, damaged or not
      fwlab's, if its tensors do not match its configuration, or if the best
      and the last checkpoint of a run are of different runs.
    - Raises `PermissionError` if the file may not be read.
    """
    if path == "":  # not the current folder
        raise CheckpointError("expected path to be a file or a folder, got ''")
    run, path = Path(path), _file(Path(path))
    if path == run / "best" / FILE:
        check_same_run(path, run / "last" / FILE)
    header, tensors = _read(path)
    try:
        config = _config(header)
        kind = Words if config.tokens == "words" else Characters
        vocabulary, step = kind(json.loads(header["alphabet"])), int(header["step"])
        curve, corpus_sha256 = json.loads(header["curve"]), header["corpus_sha256"]
        scaler, state = json.loads(header.get("scaler", "{}")), _state(tensors)
        if not all(len(row) == 3 and all(map(math.isfinite, row)) for row in curve):
            raise ValueError("expected a curve with rows of three numbers")
        if scaler and not (
            {*scaler} == SCALER and all(0 <= x < math.inf for x in scaler.values())
        ):
            raise ValueError(f"expected a loss scaler of {SCALER}, got {scaler}")
        if step < 0:
            raise ValueError(f"expected step to be 0 or more, got {step}")
        if config.layers > len(tensors):  # before as many are made
            raise ValueError(
                f"expected layers to be at most {len(tensors)}, the number of "
                f"its tensors, got {config.layers}"
            )
        with torch.device("meta"):  # the stored sizes may be huge
            expected = new_model(config, len(vocabulary)).state_dict()
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(_damaged_header(path, error)) from None

    weights = _weights(path, config, expected, tensors)
    adam = _adam(path, weights, tensors)
    if header.get(CHECKSUM, "") not in ("", _checksum(header, tensors)):
        raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    model = new_model(config, len(vocabulary))
    model.load_state_dict(weights)
    return Checkpoint(
        model, vocabulary, config, step, adam, curve, corpus_sha256, state, scaler
    )


def check_same_run(best: Path, last: Path) -> None:
    """Compare the headers of the two checkpoints of a run.

    - `best`, `last`: the files; there may be only one.
    - Raises `CheckpointError` if no run has written both.
    """
    try:
        (config, text, curve), (other, other_text, later) = map(_run_of, (best, last))
    except CheckpointError:
        return  # `load` says so of the one that is needed
    other_run = (
        "it is of another text" if text != other_text else difference(other, config)
    )
    # Killed after it wrote the best one, a run may have measured that again.
    if not other_run and curve[:-1] != later[: len(curve) - 1]:
        other_run = "it has other losses"
    if other_run:
        raise CheckpointError(
            f"expected {best} to be of the same run as {last}: {other_run}; remove the one "
            "that does not belong there"
        )


def _run_of(path: Path) -> tuple[Config, str, list[list[float]]]:
    header, _ = _read(path, tensors=False)
    try:
        return _config(header), header["corpus_sha256"], json.loads(header["curve"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(_damaged_header(path, error)) from None


def difference(config: Config, saved: Config) -> str:
    """Say why two configurations are different runs; "" = they are not."""
    for name in Config.__dataclass_fields__:
        expected, stored = getattr(config, name), getattr(saved, name)
        if name not in FREE and expected != stored:
            return f"expected {name} {expected!r}, got {stored!r}"
    return ""


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header of a file of fwlab train, and its tensors."""
    if path.is_file() and not os.access(path, os.R_OK):  # it may be sound
        raise PermissionError(f"expected {path} to be readable, got no permission")
    try:
        with safe_open(path, framework="pt") as file:
            header, names = file.metadata() or {}, file.keys() if tensors else ()
            stored = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({str(error).splitlines()[0]})"
        ) from None
    if "fwlab" not in header:
        raise CheckpointError(
            f"{path} is not a checkpoint of fwlab train: it has no fwlab header"
        )
    if header["fwlab"] != FORMAT:
        raise CheckpointError(
            f"{path}: expected checkpoint format {FORMAT}, got {header['fwlab']}"
        )
    return header, stored


def _config(header: dict[str, str]) -> Config:
    stored = json.loads(header["config"])
    return Config(
        **{f.name: stored[f.name] for f in fields(Config) if _known(f, stored)}
    )


def _damaged_header(path: Path, error: Exception) -> str:
    return f"the header of {path} is damaged ({str(error).splitlines()[0]})"


#: The fields in the configurations of the first checkpoints.
FIRST = [
    "corpus",
    "mixer",
    "layers",
    "heads",
    "d_model",
    "block",
    "batch",
    "steps",
    "lr",
    "min_lr",
    "warmup",
    "beta2",
    "weight_decay",
    "clip",
    "eval_every",
    "eval_windows",
    "seed",
    "device",
]


def _known(field: Field, stored: dict[str, Any]) -> bool:
    """Whether to read a field: old files lack those that have come since."""
    return field.name in FIRST or field.name in stored


def _state(tensors: dict[str, Tensor]) -> list[Tensor]:
    """The parts of the carried state, in order."""
    count = sum(name.startswith("state.") for name in tensors)
    return [tensors[f"state.{i}"] for i in range(count)]


def _file(path: Path) -> Path:
    places = (path, path / FILE, path / "best" / FILE, path / "last" / FILE)
    for place in places:
        if place.is_file():
            return place
    raise CheckpointError(f"there is no checkpoint {path}")


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of everything else in the file."""
    digest = hashlib.sha256()
    rest = {name: text for name, text in header.items() if name != CHECKSUM}
    digest.update(json.dumps(rest, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content = tensor.reshape(-1).view(torch.uint8)
        if sys.byteorder == "big":  # the file is in little-endian order
            content = content.view(-1, tensor.element_size()).flip(1).reshape(-1)
        digest.update(content.numpy().data)
    return digest.hexdigest()


def _weights(
    path: Path, config: Config, expected: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    weights = {
        n.removeprefix("model."): t
        for n, t in tensors.items()
        if n.startswith("model.")
    }
    for name in sorted(expected.keys() | weights.keys()):
        here, there = (
            list(d[name].shape) if name in d else "none" for d in (weights, expected)
        )
        if here != there:
            raise CheckpointError(
                f"{path} does not contain the {config.mixer} model of its header: "
                f"expected weight {name} of shape {there}, got {here}"
            )
    for name, tensor in weights.items():
        if tensor.dtype != expected[name].dtype:
            raise CheckpointError(
                f"{path} does not contain the {config.mixer} model of its header: "
                f"expected weight {name} of dtype {expected[name].dtype}, "
                f"got {tensor.dtype}"
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: expected weight {name} to be finite")
    return weights


def _adam(
    path: Path, weights: dict[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The optimiser's state, which has all weights or none."""
    stored = {
        n.removeprefix("adam."): t for n, t in tensors.items() if n.startswith("adam.")
    }
    if not stored:
        return {}
    adam: dict[str, dict[str, Tensor]] = {name: {} for name in weights}
    for name, weight in weights.items():
        shapes = {"step": [], "exp_avg": [*weight.shape], "exp_avg_sq": [*weight.shape]}
        for key, shape in shapes.items():
            part = stored.pop(f"{key}.{name}", None)
            if part is None or list(part.shape) != shape:
                raise CheckpointError(
                    f"{path} is damaged: expected the optimiser's {key} of {name} of "
                    f"shape {shape}, got {'none' if part is None else list(part.shape)}"
                )
            adam[name][key] = part
    if stored:
        raise CheckpointError(
            f"{path} is damaged: its optimiser state {min(stored)} belongs to no weight"
        )
    return adam
