"""Training a language model: configuration, loop, checkpoints."""

try:
    from fwlab.training.checkpoint import Checkpoint, CheckpointError, load, save
    from fwlab.training.config import Config
    from fwlab.training.loop import Progress, Trainer
    from fwlab.training.memory import PeakMemory
    from fwlab.training.watch import watch
except ModuleNotFoundError as error:
    if (error.name or "").startswith("fwlab"):
        raise
    raise ModuleNotFoundError(
        f'training needs the package {error.name}: pip install "fwlab[train]"',
        name=error.name,
    ) from None

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Config",
    "PeakMemory",
    "Progress",
    "Trainer",
    "load",
    "save",
    "watch",
]
