"""Export a trained model for a live figure of the site.

    python docs/tools/export_web.py CHECKPOINT OUT

One safetensors file: the weights in float16, and the rest of what the
figures need in the header. docs/figures/model.js implements the blocks of
`models.LanguageModel` with the delta rule and the sum rule.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fwlab.data import Characters
from fwlab.files import destination, replacing
from fwlab.models import LanguageModel
from fwlab.training import Checkpoint, CheckpointError, load

FORMAT = "1"
#: The mixers that the figure of Shakespeare can run.
WEB_MIXERS = ("delta", "sum")


def export_web(path: str | Path, checkpoint: Checkpoint) -> int:
    """Write the weights for the figure of Shakespeare, and return their bytes.

    A weight in float16 has three decimal digits. The figure computes
    with these rounded weights in float32.

    - `checkpoint`: what `load` returned, of a model with one of `WEB_MIXERS`.
    - Raises `CheckpointError` for another model, for weights that
      overflow in float16, or if the file cannot be written.
    """
    config, vocabulary = checkpoint.config, checkpoint.vocabulary
    if config.mixer not in WEB_MIXERS or not isinstance(vocabulary, Characters):
        raise CheckpointError(
            f"expected a model of characters with the mixer {' or '.join(WEB_MIXERS)} "
            f"for the live figure, got {config.mixer}"
        )
    about = {
        **{n: getattr(config, n) for n in ("mixer", "layers", "heads", "d_model")},
        "alphabet": vocabulary.alphabet,
        "steps": checkpoint.step,
        "validation_loss": checkpoint.curve[-1][-1] if checkpoint.curve else None,
    }
    return write_web(path, checkpoint.model, about)


def write_web(path: str | Path, model: LanguageModel, about: dict[str, Any]) -> int:
    """Write weights in float16 with plain values about them in the header.

    Returns and raises as `export_web`.
    """
    tensors = {
        name: weight.detach().cpu().half().contiguous()
        for name, weight in model.state_dict().items()
    }
    for name, weight in tensors.items():
        if not torch.isfinite(weight).all():
            raise CheckpointError(f"weight {name} is too large for float16")
    header = {"fwlab-web": FORMAT, "model": json.dumps(about)}
    try:
        with replacing(Path(path)) as part:
            save_file(tensors, part, header)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from None
    return Path(path).stat().st_size


if __name__ == "__main__":
    trained, out = sys.argv[1:]
    destination(Path(out))
    print(f"{out}: {export_web(out, load(trained)):,} bytes")
