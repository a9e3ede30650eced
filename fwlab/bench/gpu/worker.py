"""A process that runs tasks in sequence: `python -m fwlab.bench.gpu.worker`.

It takes one task per line, and answers in lines: the start of each part,
rows, and the end. It may die: after an illegal memory access, a process
can no longer use the GPU, and a kernel may hang. The process that sent
the task notices, and continues in a fresh process.
"""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


def run(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages of one task."""
    from fwlab.bench.gpu import correctness, measure
    from fwlab.bench.gpu.cases import CASES

    given = {
        "device": task["device"],
        "without": tuple(task.get("without", ())),
    }
    if task["kind"] == "rates":
        yield from measure.rates(**given, **task.get("sizes", {}))
        return
    given["seed"] = task["seed"]
    if task["kind"] in ("correctness", "again"):
        given["quick"], given["only"] = task["quick"], task.get("only")
        yield from correctness.rows(task["op"], task["dtype"], **given)
    elif task["kind"] == "warm-up":
        case, share = CASES[task["case"]], task["share"]
        yield from measure.warm_up(case, task["side"], share, **given)
    elif task["kind"] == "case":
        rounds = task["rounds"]
        yield from measure.rows(CASES[task["case"]], rounds=rounds, **given)
    else:
        raise ValueError(f"unknown kind of task {task['kind']!r}")


def broken(device: str) -> bool:
    """Whether this process can no longer use the GPU."""
    import torch

    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> None:
    """Answer on standard output; all other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    from fwlab.bench.gpu.correctness import explain

    for line in sys.stdin:
        task = json.loads(line)
        try:
            for message in run(task):
                tell(message)
                failed = message.get("row", {}).get("reason")
                if failed and broken(task["device"]):
                    os._exit(3)
        except Exception as error:
            tell({"failed": explain(error)})
            if broken(task["device"]):
                os._exit(3)
        tell({"done": True})


if __name__ == "__main__":
    main()
