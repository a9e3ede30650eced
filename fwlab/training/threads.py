"""How many threads train on a CPU, and how they wait for each other.

PyTorch divides every operation among its threads, and those that have
finished wait for the slowest. Threads that stay awake go on at once; those
that sleep leave their core to others. What is fastest depends on the model,
on the processor, and on what else runs there, so `fwlab train` tries it.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

import torch

from fwlab.training import devices
from fwlab.training.checkpoint import new_model
from fwlab.training.config import Config
from fwlab.training.memory import keep_freed
from fwlab.training.plan import Step

#: A run of fewer operations, about a minute, is not worth a trial.
LONG = 2**42
#: How long each setting is tried.
STEPS, SECONDS = 3, 0.5
#: A first step this many times as slow as the best ends the trial of a setting.
HOPELESS = 3
#: Fewer threads are chosen if they are not slower than this.
SLACK = 1.05
#: How a user decides. PyTorch reads both once, when it is loaded.
GIVEN = NUMBER, POLICY = "OMP_NUM_THREADS", "OMP_WAIT_POLICY"
#: Set for the process that starts again with what was chosen.
CHOSEN = "FWLAB_THREADS_CHOSEN"


class Setting(NamedTuple):
    """How many threads, and whether those that wait sleep."""

    number: int
    asleep: bool

    def environment(self) -> dict[str, str]:
        """What PyTorch has to find when it is loaded."""
        return {
            NUMBER: str(self.number),
            **({POLICY: "PASSIVE"} if self.asleep else {}),
        }

    def __str__(self) -> str:
        threads = f"{self.number} thread{'s' * (self.number > 1)}"
        return threads + " that sleep while they wait" * self.asleep


def choose(
    config: Config,
    vocabulary: int,
    steps: int,
    before: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Go on with the fastest setting, perhaps in a process that starts again.

    A short run has one thread. Nothing is tried either on a GPU, in several
    processes, and if the environment decides.

    - `config`: the run.
    - `vocabulary`: number of tokens.
    - `steps`: number of steps that are left.
    - `before`: the number of threads that the run had so far, and keeps: a
      different number would round differently.
    - `say`: prints which setting was chosen, and why.
    """
    if os.environ.pop(CHOSEN, None):
        return
    if devices.several() or devices.device(config.device).type != "cpu":
        return
    given = [f"{name}={os.environ[name]}" for name in GIVEN if name in os.environ]
    number = torch.get_num_threads()
    tried = settings(number)
    if before and before <= number and NUMBER not in os.environ:
        number = before
        torch.set_num_threads(number)
        tried = [s for s in settings(number) if s.number == number]
    with torch.device("meta"):
        parameters = new_model(config, vocabulary).num_parameters()
    if 6 * parameters * config.batch * config.block * steps < LONG:
        if not given and before is None:  # beside other programs, the safest
            torch.set_num_threads(1)
        return
    if given:
        say(f"training on {Setting(number, False)}, with {' and '.join(given)}")
        return
    if not _repeatable():
        tried = [s for s in tried if not s.asleep]
    if len(tried) < 2 or not (found := times(config, vocabulary, tried)):
        return
    chosen = fastest(found)
    others = (f"{s} {1e3 * t:.0f} ms" for s, t in found.items() if s != chosen)
    say(
        f"training on {chosen}: {1e3 * found[chosen]:.0f} ms a step; "
        f"also tried: {', '.join(others)}"
    )
    if chosen.asleep:
        _start_again(chosen)
    torch.set_num_threads(chosen.number)


def settings(most: int) -> list[Setting]:
    """What to compare: 1, 2, 4, ... threads, and as many as there can be."""
    numbers = sorted({*(2**i for i in range(most.bit_length())), most})
    return [Setting(n, asleep) for n in numbers for asleep in (False, True)[:n]]


def _repeatable() -> bool:
    """Whether this process is a command line, which can replace it.

    It is something else if a program calls `fwlab.cli.main`. Windows cannot
    replace a process.
    """
    return os.name == "posix" and sys.orig_argv[1 - len(sys.argv) :] == sys.argv[1:]


def _start_again(setting: Setting) -> None:
    """Run this command line in place of this process."""
    sys.stdout.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    given = {**setting.environment(), CHOSEN: "1"}
    os.execve(sys.executable, command, {**os.environ, **given})


def times(
    config: Config, vocabulary: int, settings: list[Setting]
) -> dict[Setting, float]:
    """Seconds of a training step in each setting, by processes of their own."""
    run = {"config": asdict(config), "vocabulary": vocabulary}
    found: dict[Setting, float] = {}
    for asleep in sorted({s.asleep for s in settings}):
        tried = sorted(s for s in settings if s.asleep == asleep)
        done = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import _try; _try()"],
            input=json.dumps({**run, "numbers": [s.number for s in tried]}),
            env={**os.environ, **tried[-1].environment()},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            found |= zip(tried, json.loads(done.stdout), strict=True)
    return found


def fastest(times: dict[Setting, float]) -> Setting:
    """The first of those that are nearly as fast as the fastest."""
    return min(s for s, t in times.items() if t <= SLACK * min(times.values()))


def _try() -> None:
    """Print the median time of a step with each number of threads, as JSON."""
    given: dict[str, Any] = json.load(sys.stdin)
    keep_freed()
    step = Step(Config(**given["config"]), given["vocabulary"])
    found: list[float] = []
    for number in given["numbers"]:
        torch.set_num_threads(number)
        seconds = [step()]
        if seconds[0] < HOPELESS * min(found, default=math.inf):
            seconds = []  # the first step prepares what the others find
            while len(seconds) < STEPS or sum(seconds) < SECONDS:
                seconds.append(step())
        found.append(median(seconds))
    print(json.dumps(found))
