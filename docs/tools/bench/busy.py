"""A training step while another program keeps a core busy.

PyTorch divides each of its many small operations among all threads, and
each time all wait for the last one. How they wait decides what happens if
one of them has no core for the moment. `fwlab train` tries it and chooses:
that should cost at most a tenth more than the best setting.
"""

import subprocess
import sys
import time
from statistics import median
from typing import Any

import torch

from bench.settings import fresh
from fwlab.bench.case import layout
from fwlab.training import Config, Trainer, threads
from fwlab.training.memory import keep_freed

MIXERS = ("softmax", "sum", "delta", "gated-delta", "aft-local")
TOKENS = (64, 512)
ROUNDS, SECONDS = 2, 3.0


def milliseconds(mixer: str, tokens: int, seconds: float) -> float:
    """The median time of a step of `fwlab train` at nanoGPT's CPU size."""
    keep_freed()
    text = "".join(chr(97 + i * i % 26) for i in range(20_000))
    config = Config(mixer, block=tokens, steps=10**6, eval_every=10**6, device="cpu")
    run = Trainer(config, text).run()
    next(run)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        next(run)
        times.append(time.perf_counter() - start)
    return round(1e3 * median(times), 1)


def chosen(mixer: str, tokens: int) -> str:
    """The setting that `fwlab train` chooses now."""
    config = Config(mixer, block=tokens, device="cpu")
    settings = threads.settings(torch.get_num_threads())
    return str(threads.fastest(threads.times(config, 65, settings)))


def run() -> list[dict[str, Any]]:
    """Times on a quiet machine and beside one busy core, by setting.

    Each is measured in processes of its own: PyTorch reads the variables
    only when it is loaded. The shortest of several rounds counts.
    """
    quiet = _rows("quiet")
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return [a | b for a, b in zip(quiet, _rows("busy"), strict=True)]
    finally:
        busy.kill()
        busy.wait()


def _rows(load: str) -> list[dict[str, Any]]:
    rows = []
    for mixer in MIXERS:
        for tokens in TOKENS:
            settings = threads.settings(torch.get_num_threads())
            choice = fresh("busy", f"chosen({mixer!r}, {tokens})", {})
            step = f"milliseconds({mixer!r}, {tokens}, {SECONDS})"
            rounds = [
                [fresh("busy", step, setting.environment()) for setting in settings]
                for _ in range(ROUNDS)
            ]
            times = [min(each) for each in zip(*rounds, strict=True)]
            for setting, ms in zip(settings, times, strict=True):
                row = {"mixer": mixer, "tokens": tokens, "setting": str(setting)}
                # What was chosen, as a multiple of the best.
                ratio = round(ms / min(times), 2) if str(setting) == choice else None
                rows.append({**row, load: ms, f"chosen_{load}": ratio})
    return rows


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text, with a header."""

    def told(row: dict[str, Any], load: str) -> list[str]:
        ratio = row[f"chosen_{load}"]
        return [f"{row[load]:.1f}", f"{ratio:.2f}" if ratio else ""]

    head = ["mixer", "T", "setting", "quiet ms", "chosen / best"]
    head += ["beside a busy core ms", "chosen / best"]
    names = ("mixer", "tokens", "setting")
    return [
        head,
        *(
            [*(str(r[name]) for name in names), *told(r, "quiet"), *told(r, "busy")]
            for r in rows
        ),
    ]


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print("A training step on a quiet machine, and beside one busy core\n")
    rows = run()
    print(layout(table(rows), left=3))
    return {"busy": rows}
