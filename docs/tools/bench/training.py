"""The training loop of `fwlab train` next to a bare loop.

Both train the same model on the same windows, a few steps each in turns.
The bare loop is forward, backward and AdamW, and nothing else. `fwlab
train` has Accelerate around it, clips gradients, sets the learning rate,
and checks that the loss is finite.
"""

import time
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from fwlab.bench.case import layout
from fwlab.training import Config, Trainer
from fwlab.training.checkpoint import new_model

MIXERS = ("softmax", "sum", "delta")
ROUNDS, STEPS = 15, 10


def run(mixer: str, config: Config, rounds: int = ROUNDS) -> dict[str, Any]:
    """Tokens per second of both loops: medians of several rounds."""
    text = "".join(chr(97 + i * i % 26) for i in range(100_000))
    trainer = Trainer(config, text)
    model = new_model(config, len(trainer.vocabulary)).to(trainer.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr)
    progress = trainer.run()
    given = [trainer._batch()]

    def loop() -> None:
        for _ in range(STEPS):
            next(progress)

    def bare() -> None:
        for _ in range(STEPS):
            inputs, targets, *_ = given[0]
            optimizer.zero_grad()
            logits = model(inputs)
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()

    seconds: dict[str, list[float]] = {"loop": [], "bare": []}
    for _ in range(rounds + 1):
        for name, steps in (("loop", loop), ("bare", bare)):
            start = time.perf_counter()
            steps()
            seconds[name].append(time.perf_counter() - start)
    tokens = STEPS * config.batch * config.block
    # The first round warms up.
    loop_s, bare_s = (median(seconds[name][1:]) for name in ("loop", "bare"))
    return {
        "mixer": mixer,
        "tokens_per_second": round(tokens / loop_s),
        "bare_tokens_per_second": round(tokens / bare_s),
        "times_bare": round(bare_s / loop_s, 3),
    }


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print(
        f"Training at nanoGPT's size for a CPU, medians of {ROUNDS} rounds of "
        f"{STEPS} steps in turns\n"
    )
    rows = []
    for mixer in MIXERS:
        steps = (ROUNDS + 1) * STEPS + 1
        config = Config(mixer=mixer, steps=steps, eval_every=steps, device="cpu")
        rows.append(run(mixer, config))
    columns = [*rows[0]]
    head = ["mixer", "tokens/s of fwlab train", "tokens/s of a bare loop", "x bare"]
    print(layout([head, *([str(row[c]) for c in columns] for row in rows)]))
    return {"training": rows}
