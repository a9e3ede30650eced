"""The command `fwlab`, without an interpreter that loads PyTorch for each call."""

import io
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

from fwlab import cli


def fwlab(*arguments: str) -> tuple[int, str, str]:
    """Run the command as a user would: exit code, stdout, stderr."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["fwlab", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()


@contextmanager
def copies() -> Iterator[Callable[..., str]]:
    """Yield `run(folder, *arguments, number=1, before=None)`, which returns what it prints.

    It runs the command in processes of their own.

    Several are the ranks of one training, as torchrun would start them. Each
    calls `before` at its start. They are copies of a process that has loaded
    everything and computed nothing: after a backward pass on a GPU, PyTorch
    refuses another one in a copy.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_load) as clean:
        yield lambda *arguments, **options: clean.submit(
            _start, *arguments, **options
        ).result()


def _load() -> None:
    """Load what the first step of a training would load."""
    import accelerate  # noqa: F401
    import torch._dynamo  # noqa: F401


def _start(
    folder: Path, *arguments: str, number: int = 1, before: Callable | None = None
) -> str:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {
        "WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    passed = folder, arguments, ranks if number > 1 else {}, before
    start_processes(_copy, passed, number, start_method="fork")
    return "".join(path.read_text("utf-8") for path in folder.glob("printed-*"))


def _copy(
    rank: int,
    folder: Path,
    arguments: tuple[str, ...],
    ranks: dict[str, str],
    before: Callable | None,
) -> None:
    os.chdir(folder)
    if ranks:
        os.environ.update(ranks, RANK=str(rank), LOCAL_RANK=str(rank))
    if before is not None:
        before()
    code, out, err = fwlab(*arguments)
    Path(f"printed-{rank}").write_text(out, "utf-8")
    assert code == 0, err
