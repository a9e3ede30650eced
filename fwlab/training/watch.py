"""Progress of a run inside a notebook."""

from collections.abc import Iterable

from fwlab.training.loop import Progress


def watch(run: Iterable[Progress], steps: int) -> list[Progress]:
    """Consume a run, showing one line that is updated in place.

    - `run`: what `Trainer.run()` returns.
    - `steps`: how many steps it will do in all.
    - Returns everything it yielded.

    The saved notebook keeps only the last line, and no widget state.
    Outside of a notebook it prints a line per validation.
    """
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        shell = None
    else:
        shell = get_ipython()
    line, handle = "", None
    if shell is not None:
        handle = display({"text/plain": "starting"}, raw=True, display_id=True)
    seen, validation = [], ""
    for progress in run:
        seen.append(progress)
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
    return seen
