"""Export a trained model for a live figure of the site.

    python docs/tools/export_web.py CHECKPOINT OUT

One safetensors file: the weights in float16, and the rest of what the
figures need in the header. docs/figures/model.js implements the blocks of
`models.LanguageModel` with the delta rule and the sum rule, and computes with these
rounded weights in float32.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fwlab.data import Characters
from fwlab.files import replacing
from fwlab.models import LanguageModel
from fwlab.training import Checkpoint, CheckpointError, Config, load

#: Mixers that the live figure can run, and options that it does not implement.
WEB_MIXERS = ("delta", "sum")
OPTIONS = ("like", "conv", "out_norm", "out_gate", "beta_max", "norm", "mlp")


def export_web(path: str | Path, checkpoint: Checkpoint) -> int:
    """Write a model's weights for the live figure, and return the size in bytes.

    - Raises `CheckpointError` for a model that the figure cannot run.
    """
    config, vocabulary = checkpoint.config, checkpoint.vocabulary
    if config.mixer not in WEB_MIXERS or not isinstance(vocabulary, Characters):
        raise CheckpointError(
            f"expected a model of characters with the mixer {' or '.join(WEB_MIXERS)} "
            f"for the live figure, got {config.mixer}"
        )
    if given := [n for n in OPTIONS if getattr(config, n) != getattr(Config, n)]:
        raise CheckpointError(f"the live figure has no {', '.join(given)}")
    about = {
        **{n: getattr(config, n) for n in ("mixer", "layers", "heads", "d_model")},
        "alphabet": vocabulary.alphabet,
        "steps": checkpoint.step,
        "validation_loss": checkpoint.curve[-1][-1] if checkpoint.curve else None,
    }
    return write_web(Path(path), checkpoint.model, about)


def write_web(path: Path, model: LanguageModel, about: dict[str, Any]) -> int:
    """Write the weights of a model with metadata, and return the size in bytes."""
    tensors = {name: x.half().contiguous() for name, x in model.state_dict().items()}
    if not all(x.isfinite().all() for x in tensors.values()):
        raise CheckpointError("a weight is not finite in half precision")
    header = {"fwlab-web": "1", "model": json.dumps(about)}
    with replacing(path) as part:
        save_file(tensors, part, header)
    return path.stat().st_size


if __name__ == "__main__":
    trained, out = sys.argv[1:]
    print(f"{out}: {export_web(out, load(trained)):,} bytes")
