"""Train a language model: configuration, loop, checkpoints."""

try:
    from fwlab.training.checkpoint import Checkpoint, CheckpointError, load, save
    from fwlab.training.config import Config
    from fwlab.training.loop import Progress, Trainer
    from fwlab.training.watch import watch
except ModuleNotFoundError as error:
    if error.name not in ("accelerate", "safetensors"):
        raise
    raise ModuleNotFoundError(
        f'training needs the package {error.name}: pip install "fwlab[train]"',
        name=error.name,
    ) from None

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Config",
    "Progress",
    "Trainer",
    "load",
    "save",
    "watch",
]
