"""Show the progress of a training in a notebook."""

from collections.abc import Iterable
from contextlib import suppress

from fwlab.training.loop import Progress


def watch(run: Iterable[Progress], steps: int) -> list[Progress]:
    """Run a training loop, and show its progress in one line.

    - `run`: what `Trainer.run()` returns.
    - `steps`: total number of optimiser steps.
    - Returns everything that `run` yielded.

    The line is updated in place. The saved notebook contains only its final form, and
    no widget state. Outside a notebook, one line is printed per validation.
    """
    handle = None
    with suppress(ImportError):
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is not None:
            handle = display({"text/plain": "starting"}, raw=True, display_id=True)
    done, validation = [], ""
    for progress in run:
        done.append(progress)
        if progress.val_loss is not None:
            validation = f", validation loss {progress.val_loss:.3f}"
        line = (
            f"step {progress.step}/{steps}, {progress.seconds:.0f} s, "
            f"loss {progress.loss:.3f}{validation}"
        )
        if handle is not None and (progress.step % 10 == 0 or progress.step == steps):
            handle.update({"text/plain": line}, raw=True)
        elif handle is None and progress.val_loss is not None:
            print(line)
    return done
