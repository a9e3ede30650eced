"""Load published checkpoints: folders in the form of transformers.

Weights are read from safetensors only, and no code from the folder runs.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fwlab.files import read_json
from fwlab.models.families import EXPERTS, FAMILIES, Configuration, Family
from fwlab.models.language_model import LanguageModel

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX, TOKENIZER = f"{WEIGHTS}.index.json", "tokenizer.json"
#: The dtypes of weights that are not quantised.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def load(source: str | Path, dtype: torch.dtype | None = None) -> LanguageModel:
    """Load a published model from a folder or the hub, as a `LanguageModel`.

    - `source`: a folder with config.json and weights as safetensors, in one file or in
      shards with an index. Or the name of a model on the hub, OWNER/NAME, which is
      downloaded if huggingface_hub is installed.
    - `dtype`: of all weights; None = as the embedding in the file. Weights that
      have it already stay in the file, and are mapped into memory: they are read when
      they are used.
    - Returns a `LanguageModel` on the CPU, in evaluation mode.
    - Raises `ValueError` or `OSError`, which names the file, if anything is missing,
      superfluous, damaged, quantised, of the wrong shape, or not supported. Nothing is
      loaded then.

    docs/published.md says how closely each family agrees with transformers.

        >>> load("no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: expected a folder with a model, got 'no-such-folder'
    """
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise ValueError(f"load: expected dtype to be None or {names}, got {dtype!r}")
    folder = find(source)
    config = configuration(folder)
    try:
        family = FAMILIES[config.values["model_type"]](config)
    except (ArithmeticError, AttributeError, TypeError) as error:
        # For example, the file has a text in place of a number.
        raise ValueError(f"{config.path} is damaged: {error}") from None
    try:
        with torch.device("meta"):
            model = LanguageModel(**family.model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{config.path} is not supported: {error}") from None
    weights = _weights(folder, family, model.state_dict(), dtype)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def find(source: str | Path) -> Path:
    """Return the folder of a checkpoint, which is downloaded for a name on the hub.

    - Raises `FileNotFoundError` if there is none, and `ValueError` for a name on the
      hub without huggingface_hub.
    """
    folder = Path(source)
    if source != "" and folder.is_dir():  # An empty path is the current folder.
        return folder
    if not is_name(source):
        raise FileNotFoundError(f"expected a folder with a model, got {str(source)!r}")
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise ValueError(
            f"{source} is no folder here; to download the model of this name, install "
            "huggingface_hub"
        ) from None
    wanted = ["*.safetensors", "*.safetensors.index.json", TOKENIZER, "*config.json"]
    try:
        return Path(snapshot_download(str(source), allow_patterns=wanted))
    except Exception as error:  # Several libraries may raise errors.
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{source} is no folder here, and was not downloaded: {reason}"
        ) from None


def is_name(source: str | Path) -> bool:
    """Return True if `source` can only be the name of a model on the hub.

    A path into an existing folder counts as a misspelt path.
    """
    path, named = Path(source), re.fullmatch(r"[\w.-]+/[\w.-]+", str(source))
    return bool(named) and not path.exists() and not path.parent.exists()


def is_published(path: Path) -> bool:
    """Return True if a folder holds a published model, not a run of `fwlab train`."""
    config = path / CONFIG
    if config.is_file():
        values = read_json(config)
        return isinstance(values, dict) and "model_type" in values
    return (path / WEIGHTS).exists() or (path / INDEX).exists()


def configuration(folder: Path) -> Configuration:
    """Load the configuration of the text model from the folder of a checkpoint.

    - Raises `ValueError` or `OSError` if it is missing, damaged or not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"expected a model with {path}, got no such file")
    values = read_json(path)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = ": for a model with experts, see fwlab.hf.patch()" * (kind in EXPERTS)
        raise ValueError(
            f"{path}: expected model_type to be one of {', '.join(FAMILIES)}, "
            f"got {kind!r}{hint}"
        )
    text = values.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{path}: expected text_config to be an object, got {text!r}")
    outer = ("model_type", "tie_word_embeddings", "quantization_config")
    inner = values | text | {name: values[name] for name in outer if name in values}
    if inner.get("quantization_config") is not None:
        raise ValueError(
            f"{path}: expected weights that are not quantised, got a "
            "quantization_config"
        )
    return Configuration(inner, path)


def _stored(folder: Path, family: Family) -> tuple[dict[str, Tensor], Path]:
    """Load the weights by published name, and return them and the file that lists them.

    Raises `ValueError` or `OSError` for a file that is missing or damaged, for names
    that are missing or superfluous, and for quantised weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where, files, stored = folder / WEIGHTS, [WEIGHTS], {}
    if (folder / INDEX).is_file():
        where = folder / INDEX
        listed = read_json(where)
        map_ = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(map_, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in map_.values()
        ):
            raise ValueError(
                f"{where} is damaged: expected a weight_map from names to files here"
            )
        files = [*dict.fromkeys(map_.values())]
    for path in (folder / file for file in files):
        if not path.is_file():
            raise FileNotFoundError(f"expected the weights {path}, got no such file")
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut: {error}") from None
        for name, weight in tensors.items():
            known = name
            for old, new in family.renamed:
                known = known.replace(old, new)
            tied = known == "lm_head.weight" and family.model["tied"]
            if tied or known.startswith(family.ignored):
                continue
            if weight.dtype not in DTYPES:
                raise ValueError(
                    f"{path}: expected weights that are not quantised "
                    f"({', '.join(map(str, DTYPES))}), got {name} in {weight.dtype}"
                )
            stored[known] = weight
    wanted = {name for piece in family.pieces for name in piece.published}
    if wanted != stored.keys():
        missing, more = (
            ", ".join(sorted(names)[:20]) + f", of {len(names)}" * (len(names) > 20)
            for names in (wanted - stored.keys(), stored.keys() - wanted)
        )
        raise ValueError(
            f"{where}: expected the weights of its config.json, got "
            f"{missing or 'none'} missing, and {more or 'none'} superfluous"
        )
    return stored, where


def _weights(
    folder: Path, family: Family, expected: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the stored weights by our names, as views where possible.

    Raises what `_stored` raises, and `ValueError` for weights of another shape.
    """
    stored, where = _stored(folder, family)
    weights: dict[str, Tensor] = {}
    for piece in family.pieces:
        parts = [stored[name] for name in piece.published]
        dtype = parts[0].dtype if dtype is None else dtype  # The embedding comes first.
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        ours = [expected[name] for name in piece.ours]
        wanted = torch.cat(ours)  # The device is "meta", so no values are copied.
        if rows.dim() != wanted.dim() and rows.numel() == wanted.numel():
            rows = rows.reshape(wanted.shape)  # This reshapes grouped convolutions.
        if rows.shape != wanted.shape:
            raise ValueError(
                f"{where}: expected {', '.join(piece.published)} of shape "
                f"{[*wanted.shape]}, got {[*rows.shape]}"
            )
        if family.plus and "norm" in piece.ours[0] and "out_norm" not in piece.ours[0]:
            rows = rows.to(torch.promote_types(dtype, torch.float32)) + family.plus
        sizes = [len(weight) // piece.heads for weight in ours]
        split = rows.to(dtype).unflatten(0, (piece.heads, -1)).split(sizes, 1)
        together = (part.flatten(0, 1) for part in split)
        weights |= dict(zip(piece.ours, together, strict=True))
    return weights


def tokenizer(folder: Path, vocab_size: int) -> Any:
    """Load the tokenizer of a published model.

    - Returns a `tokenizers.Tokenizer`.
    - Raises `ValueError` or `OSError`, which names the file, if it is missing or
      damaged, has more tokens than the model, or if tokenizers is not installed.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(f"expected the tokenizer {path}, got no such file")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ValueError(
            f"to read {path}, install tokenizers, which comes with fwlab[hf]"
        ) from None
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises only `Exception`.
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is damaged: {reason}") from None
    last = max(found.get_vocab(with_added_tokens=True).values(), default=-1)
    if last >= vocab_size:
        raise ValueError(
            f"{path}: expected a tokenizer of at most the {vocab_size} tokens of the "
            f"model, got {last + 1}"
        )
    return found


def stops(folder: Path) -> set[int]:
    """Return the end-of-text tokens in generation_config.json, or else in config.json.

    - Raises `ValueError` or `OSError`, which names the file, for anything else there.
    """
    path = folder / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    found = values.get("eos_token_id") if isinstance(values, dict) else values
    if found is None:
        path, found = folder / CONFIG, configuration(folder).get("eos_token_id", [])
    ends = found if isinstance(found, list) else [found]
    if not all(isinstance(end, int) for end in ends):
        raise ValueError(
            f"{path}: expected eos_token_id to be a token or a list of them, "
            f"got {found!r}"
        )
    return {*ends}


def stream_text(
    source: str | Path, prompt: str, *sampling: Any, dtype: torch.dtype | None = None
) -> Iterator[str]:
    """Yield a prompt and its continuation, piece by piece.

    - `source`, `dtype`: as for `load`.
    - `sampling`: `max_new_tokens`, `temperature`, `top_k` and `seed` of
      `LanguageModel.generate`. The text ends at an end-of-text token.
    - Raises `ValueError` or `OSError` as `load` and `tokenizer` do, and for a prompt
      without tokens.
    """
    folder = find(source)
    model, ends = load(folder, dtype), stops(folder)
    coder = tokenizer(folder, model.vocab_size)
    tokens = coder.encode(prompt).ids
    if not tokens:
        raise ValueError(f"expected a prompt of at least one token, got {prompt!r}")
    from tokenizers.decoders import DecodeStream

    yield prompt
    pieces = DecodeStream(ids=tokens, skip_special_tokens=True)
    for new in model._stream(torch.tensor([tokens]), *sampling):
        if int(new) in ends:
            return
        # `step` returns None in the middle of a character.
        yield pieces.step(coder, int(new)) or ""
