"""Hugging Face Accelerate: devices, processes, precision, sharding.

`accelerate launch -m fwlab train ...` and `torchrun -m fwlab train ...` start
several processes. Each computes its share of every batch, and they add up
their gradients.
"""

import os
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fwlab.data.packing import NO_TARGET
from fwlab.models import LanguageModel
from fwlab.training.config import Config

if TYPE_CHECKING:  # importing it takes as long as importing PyTorch
    from accelerate import Accelerator

PRECISIONS = {"float32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerator(config: Config, model: LanguageModel, **options: Any) -> "Accelerator":
    """Make what moves, divides and joins the tensors of a run.

    - `config`: the run.
    - `model`: what will be trained.
    - `options`: more arguments of `Accelerator`.
    - Raises `ValueError` for what this machine cannot do.
    """
    try:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, DistributedType
        from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin
    except ModuleNotFoundError as error:
        if error.name != "accelerate":  # one that it needs itself
            raise
        raise ValueError(
            "training needs the package accelerate: pip install 'fwlab[train]'"
        ) from None

    at = device(config.device)
    if config.precision == "fp16" and at.type == "cpu":
        raise ValueError(
            "expected precision float32 or bf16 on a CPU, got fp16: its gradients "
            "would be too small"
        )
    if config.compile and at.type == "cpu" and not _compiler():
        raise ValueError(
            "expected a C++ compiler for compile on a CPU (g++ or clang++), found none"
        )
    # Accelerate keeps one state for a process, which may train several models.
    AcceleratorState._reset_state(reset_partial_state=not several())
    shard = config.shard or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if shard:
        if at.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise ValueError(
                f"expected a newer PyTorch to shard on CPUs, got {torch.__version__}"
            )
        options["fsdp_plugin"] = plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[type(model.blocks[0]).__name__],
        )
    if config.compile:
        backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "inductor")
        options["dynamo_plugin"] = TorchDynamoPlugin(backend=backend)
    accelerator = Accelerator(
        cpu=at.type == "cpu",
        mixed_precision=PRECISIONS[config.precision],
        step_scheduler_with_optimizer=False,
        **options,
    )
    if shard and several() and at.type == "cpu":
        # Accelerate shards on accelerators only, PyTorch also on CPUs.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def is_main(config: Config) -> bool:
    """Whether this process prints and writes; several find each other here."""
    if not several():
        return True
    from accelerate import PartialState

    return PartialState(cpu=device(config.device).type == "cpu").is_main_process


def from_main(value: Any) -> Any:
    """The value of the main process; all processes must call this."""
    if not several():
        return value
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value])[0]


def in_any(accelerator: "Accelerator", flag: bool) -> bool:
    """Whether the flag is True in a process; all processes must call this."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(flag, device=accelerator.device).int()))


def several() -> bool:
    """Whether several processes train one model."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _compiler() -> str | None:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for n in names if n and (path := shutil.which(n))), None)


def device(name: str) -> torch.device:
    """The device of a configuration, if it can compute here."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(name)
        torch.zeros(1, device=chosen).item()  # "meta" has no values
    except (RuntimeError, AssertionError):
        raise ValueError(
            "expected device to be auto, cpu, cuda or mps, and available here, "
            f"got {name!r}"
        ) from None
    return chosen


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be divided among processes, in one piece.

    All processes must call this.
    """
    full = getattr(tensor, "full_tensor", None)
    return tensor.detach() if full is None else full().detach()


def divided(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor, divided among processes as another one is."""
    if tensor.dim() == 0:
        return tensor
    if not hasattr(like, "full_tensor"):
        return tensor.to(like.device)
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


class Loss(nn.Module):
    """A model with its loss: what is compiled, copied or divided.

    A wrapper of several processes works through `forward`, so this is the
    only way in.
    """

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        state: Any = None,
        carry: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Mean loss in nats per token, and the state after the inputs.

        - `inputs`, `targets`: `int64 [batch, time]`; -100 = no target.
        - `state`: as in `LanguageModel.prefill`.
        - `carry`: return the state, too; None otherwise.
        - `cu_seqlens`: the borders of packed documents. If none of their
          tokens has a target, the loss is 0.
        """
        if carry:
            logits, state = self.model.prefill(inputs, state)
        else:
            logits, state = self.model(inputs, cu_seqlens=cu_seqlens), None
        scores, targets = logits.flatten(0, 1), targets.flatten()
        if cu_seqlens is None:
            return nn.functional.cross_entropy(scores, targets), state
        # At the end of an epoch a row may have no target, and its mean is 0/0.
        total = nn.functional.cross_entropy(scores, targets, reduction="sum")
        return total / (targets != NO_TARGET).sum().clamp(min=1), state
