"""Published checkpoints: folders in the form of transformers.

Weights are read from safetensors only, and no code from the folder runs.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.files import read_json
from fwlab.models.families import FAMILIES, Configuration, Family, Piece
from fwlab.models.language_model import LanguageModel, draw

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX, TOKENIZER = f"{WEIGHTS}.index.json", "tokenizer.json"
#: The dtypes of weights that are not quantised, as safetensors names them.
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def load(source: str | Path, dtype: torch.dtype | None = None) -> LanguageModel:
    """Load a published model: of one of the families on the page "Published models".

    - `source`: a folder with config.json and weights as safetensors, in one file or in
      shards with an index. Or the name of a model on the hub, OWNER/NAME, which is
      downloaded if huggingface_hub is installed.
    - `dtype`: of all weights; None = that of the embedding in the file. Weights that
      have it already stay in the file, and are mapped into memory: they are read when
      they are used.
    - Returns a `LanguageModel` on the CPU, in evaluation mode.
    - Raises `ValueError` or `OSError`, which names the file, if anything is missing,
      superfluous, damaged, quantised, of the wrong shape, or not supported. Nothing is
      loaded then.

    That page also says how closely each family agrees with transformers.

        >>> load("no-such-folder")
        Traceback (most recent call last):
        FileNotFoundError: expected a folder with a model, got 'no-such-folder'
    """
    if dtype is not None and dtype not in DTYPES.values():
        names = ", ".join(map(str, DTYPES.values()))
        raise ValueError(f"load: expected dtype to be None or {names}, got {dtype!r}")
    folder = find(source)
    configuration = read(folder)
    try:
        family = FAMILIES[configuration.values["model_type"]](configuration)
    except (ArithmeticError, AttributeError, TypeError) as error:
        # Such as a text in place of a number.
        raise ValueError(f"{configuration.path} is damaged: {error}") from None
    try:
        with torch.device("meta"):
            model = LanguageModel(**family.model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{configuration.path} is not supported: {error}") from None
    weights = _weights(folder, family, model.state_dict(), dtype)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def find(source: str | Path) -> Path:
    """The folder of a checkpoint, downloaded first if it is a name on the hub.

    - Raises `FileNotFoundError` if there is none, and `ValueError` for a name on the
      hub without huggingface_hub.
    """
    folder = Path(source)
    if source != "" and folder.is_dir():  # without a name, it would be the current one
        return folder
    if not is_name(source):
        raise FileNotFoundError(f"expected a folder with a model, got {str(source)!r}")
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":  # one that it needs itself
            raise
        raise ValueError(
            f"{source} is no folder here; to download the model of this name, install "
            "huggingface_hub"
        ) from None
    wanted = ["*.safetensors", "*.safetensors.index.json", TOKENIZER, "*config.json"]
    try:
        return Path(snapshot_download(str(source), allow_patterns=wanted))
    except Exception as error:  # of several libraries
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{source} is no folder here, and was not downloaded: {reason}"
        ) from None


def is_name(source: str | Path) -> bool:
    """Whether this can only be the name of a model on the hub.

    A path into a folder that exists is no name, but misspelt.
    """
    path, named = Path(source), re.fullmatch(r"[\w.-]+/[\w.-]+", str(source))
    return bool(named) and not path.exists() and not path.parent.exists()


def is_published(path: Path) -> bool:
    """Whether a folder has a model in this form, not a run of `fwlab train`."""
    config = path / CONFIG
    if config.is_file():
        values = read_json(config)
        return isinstance(values, dict) and "model_type" in values
    return (path / WEIGHTS).exists() or (path / INDEX).exists()


def read(folder: Path) -> Configuration:
    """The configuration of the text model.

    - Raises `ValueError` or `OSError` if it is missing, damaged or not supported.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"expected a model with {path}, got no such file")
    values = read_json(path)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{path}: expected model_type to be one of {', '.join(FAMILIES)}, "
            f"got {kind!r}"
        )
    text = values.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"{path}: expected text_config to be an object, got {text!r}")
    inner = {**values, **text, "model_type": kind}
    # The outer model has the logits.
    for name in ("tie_word_embeddings", "quantization_config"):
        if name in values:
            inner[name] = values[name]
    if inner.get("quantization_config") is not None:
        raise ValueError(
            f"{path}: expected weights that are not quantised, got a "
            "quantization_config"
        )
    return Configuration(inner, path)


class Stored(NamedTuple):
    """Where a weight is: an open file, and its name there."""

    path: Path
    file: Any
    name: str


def _weights(
    folder: Path, family: Family, expected: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """All weights by our names, after all checks."""
    with ExitStack() as stack:
        stored, where = _open(folder, family, stack)
        wanted = [name for piece in family.pieces for name in piece.published]
        _check_names(where, wanted, stored)
        for piece in family.pieces:
            _check(piece, stored, expected)
        if dtype is None:
            dtype = _dtype(stored[family.pieces[0].published[0]])
        weights: dict[str, Tensor] = {}
        for piece in family.pieces:
            weights |= _read(piece, stored, expected, dtype)
    return weights


def _open(
    folder: Path, family: Family, stack: ExitStack
) -> tuple[dict[str, Stored], Path]:
    """The weights by their published names, and the file that lists them."""
    from safetensors import SafetensorError, safe_open

    index, files = folder / INDEX, {WEIGHTS: None}
    if where := index.is_file() and index:
        listed = read_json(index)
        map_ = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(map_, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in map_.values()
        ):
            raise ValueError(
                f"{index} is damaged: expected a weight_map from names to files here"
            )
        files = dict.fromkeys(map_.values())
    stored: dict[str, Stored] = {}
    for path in (folder / file for file in files):
        if not path.is_file():
            raise FileNotFoundError(f"expected the weights {path}, got no such file")
        try:
            file = stack.enter_context(safe_open(path, "pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or cut: {error}") from None
        for name in file.keys():  # noqa: SIM118
            known = name
            for old, new in family.renamed:
                known = known.replace(old, new)
            tied = known == "lm_head.weight" and family.model["tied"]
            if tied or known.startswith(family.ignored):
                continue
            if known in stored:
                raise ValueError(f"{path}: expected {known} once, got it again: {name}")
            stored[known] = Stored(path, file, name)
    return stored, where or folder / WEIGHTS


def _check_names(where: Path, wanted: list[str], stored: dict[str, Stored]) -> None:
    """Raise `ValueError` for names that are missing or superfluous."""
    missing = [name for name in wanted if name not in stored]
    known = {*wanted}
    superfluous = [stored[name].name for name in stored if name not in known]
    if missing or superfluous:
        raise ValueError(
            f"{where}: expected the weights of its config.json, got {_some(missing)} "
            f"missing, and {_some(superfluous)} superfluous"
        )


def _some(names: list[str]) -> str:
    """The first 20 names, and the number of the others."""
    if not names:
        return "none"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more


def _check(
    piece: Piece, stored: dict[str, Stored], expected: dict[str, Tensor]
) -> None:
    """Raise `ValueError` for weights of another shape, or quantised."""
    wanted = [*piece.form(_rows(piece, expected)).shape]
    rows = wanted[0]
    for name in piece.published:
        at = stored[name]
        _dtype(at)
        shape = list(at.file.get_slice(at.name).get_shape())
        last = name == piece.published[-1]
        fits = len(shape) == len(wanted) and shape[1:] == wanted[1:]
        if not fits or (shape[0] != rows if last else shape[0] > rows):
            raise ValueError(
                f"{at.path}: expected {at.name} of shape {[rows, *wanted[1:]]}, "
                f"got {shape}"
            )
        rows -= shape[0]


def _dtype(at: Stored) -> torch.dtype:
    """The dtype of a weight; raises `ValueError` if it is quantised."""
    kind = at.file.get_slice(at.name).get_dtype()
    if kind not in DTYPES:
        raise ValueError(
            f"{at.path}: expected weights that are not quantised "
            f"({', '.join(DTYPES)}), got {at.name} in {kind}"
        )
    return DTYPES[kind]


def _rows(piece: Piece, expected: dict[str, Tensor]) -> Tensor:
    """Our weights of a piece, one below the other."""
    return torch.cat([expected[name] for name in piece.ours])


def _read(
    piece: Piece,
    stored: dict[str, Stored],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The weights of a piece by our names. Rows are views where they can be."""
    parts = [
        stored[name].file.get_tensor(stored[name].name) for name in piece.published
    ]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if piece.plus:
        whole = whole.float() + piece.plus
    whole = whole.to(dtype).reshape(_rows(piece, expected).shape)
    if len(piece.ours) == 1:
        return {piece.ours[0]: whole}
    sizes = [len(expected[name]) // piece.heads for name in piece.ours]
    split = whole.unflatten(0, (piece.heads, -1)).split(sizes, 1)
    return {
        name: part.flatten(0, 1) for name, part in zip(piece.ours, split, strict=True)
    }


def tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of a published model.

    - Returns a `tokenizers.Tokenizer`.
    - Raises `ValueError` or `OSError`, which names the file, if it is missing or
      damaged, has more tokens than the model, or if tokenizers is not installed.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(f"expected the tokenizer {path}, got no such file")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":  # one that it needs itself
            raise
        raise ValueError(
            f"to read {path}, install tokenizers, which comes with fwlab[hf]"
        ) from None
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # it has no other class
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
    """The tokens that end a text: of generation_config.json, or of config.json.

    - Raises `ValueError` or `OSError`, which names the file, for anything else there.
    """
    path = folder / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    found = values.get("eos_token_id") if isinstance(values, dict) else values
    if found is None:
        path, found = folder / CONFIG, read(folder).get("eos_token_id", [])
    ends = found if isinstance(found, list) else [found]
    if not all(isinstance(end, int) for end in ends):
        raise ValueError(
            f"{path}: expected eos_token_id to be a token or a list of them, "
            f"got {found!r}"
        )
    return {*ends}


def told(
    source: str | Path, prompt: str, *sampling: Any, dtype: torch.dtype | None = None
) -> Iterator[str]:
    """A prompt and its continuation, in pieces as soon as they are there.

    - `source`, `dtype`: as for `load`.
    - `sampling`: `max_new_tokens`, `temperature`, `top_k` and `seed` of
      `LanguageModel.generate`. A token that ends a text ends it here, too.
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
    for token in _continued(model, torch.tensor([tokens]), *sampling):
        if token in ends:
            return
        # None in the middle of a character.
        yield pieces.step(coder, token) or ""


@torch.no_grad()
def _continued(
    model: LanguageModel,
    prompt: Tensor,
    length: int,
    temperature: float,
    top_k: int | None,
    seed: int | None,
) -> Iterator[int]:
    """The tokens of `LanguageModel.generate`, one by one."""
    model.generate(prompt, 0, temperature, top_k, seed)  # checks what it gets
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    new, state = prompt, None
    for _ in range(length):
        if state is None:
            logits, state = model.prefill(prompt, last=True)
        else:
            logits, state = model.step(new, state)
        new = draw(logits, temperature, top_k, generator)
        yield int(new)
