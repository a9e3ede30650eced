"""Training a language model: configuration, loop, checkpoints."""

from fwlab.training.checkpoint import Checkpoint, CheckpointError, load, save
from fwlab.training.config import Config
from fwlab.training.loop import Progress, Trainer
from fwlab.training.memory import PeakMemory
from fwlab.training.watch import watch

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
