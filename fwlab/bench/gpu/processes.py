"""Run tasks in worker processes that may die, hang, or run out of time."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-u", "-m", "fwlab.bench.gpu.worker")

Row = dict[str, Any]


class Lost(Exception):
    """The worker died, or was stopped because it took too long."""


class Worker:
    """One process, started when first needed, and again if it is lost.

    - `log`: a file to which the output of the process is appended.
    - `environment`: variables for the process, in addition to our own.
    """

    def __init__(
        self,
        command: tuple[str, ...] = COMMAND,
        log: Path | None = None,
        **environment: str,
    ) -> None:
        self.log = log
        self.command, self.environment = command, os.environ | environment
        self.process: subprocess.Popen[str] | None = None
        self.closed = False

    def start(self) -> None:
        if self.closed:
            raise Lost("the run was stopped")
        # Not a pipe: it would fill up unread, and block the process.
        self.errors = tempfile.TemporaryFile(  # noqa: SIM115
            mode="w+", errors="replace"
        )
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
            env=self.environment,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        read = threading.Thread(
            target=_pass_on, args=(self.process.stdout, self.lines), daemon=True
        )
        read.start()

    def send(self, task: dict[str, Any]) -> None:
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise Lost(self.stop("the process ended")) from error

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next message; raises `Lost` if none arrives in that time."""
        try:
            line = self.lines.get(timeout=max(seconds, 0))
        except queue.Empty:
            raise Lost(
                self.stop(f"stopped after {seconds:.0f} s", killed=True)
            ) from None
        if line is None:
            raise Lost(self.stop("the process ended"))
        return json.loads(line)

    def stop(self, reason: str = "", killed: bool = False) -> str:
        """End the process; return the reason, and its last line of output."""
        process, self.process = self.process, None
        if process is None:
            return reason
        process.kill()
        code = None
        # A kernel that hangs may keep its process alive for a while, and
        # its pipe open: do not wait for them.
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            code = process.wait(timeout=10)
            assert process.stdin is not None and process.stdout is not None
            process.stdout.close()
            process.stdin.close()
        self.errors.seek(0)
        text = self.errors.read()
        self.errors.close()
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as log:
                log.write(text)
        if killed:
            return reason
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{reason} with code {code}: {''.join(said[-1:])}"[:300]

    def close(self) -> None:
        """End the process, and never start it again."""
        self.closed = True
        self.stop()


def _pass_on(stream: Any, lines: "queue.Queue[str | None]") -> None:
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        for line in stream:
            lines.put(line)
    lines.put(None)


def do(
    worker: Worker, task: dict[str, Any], limit: float, end: float
) -> tuple[list[Row], str | None]:
    """The rows of a task, and why there are no more, or None.

    - `limit`: seconds that a part may take.
    - `end`: `time.monotonic()` at which everything stops.

    A part that ends the process becomes a row with the reason. The task
    continues in a new process, without the parts that have a row.
    """
    rows: list[Row] = []
    without = list(task.get("without", ()))
    while True:
        part, head = None, None
        try:
            worker.send(task | {"without": without})
            while True:
                left = end - time.monotonic()
                message = worker.receive(min(limit, left))
                if "part" in message:
                    part, head = message["part"], message["head"]
                elif "row" in message:
                    rows.append(message["row"])
                    without.append(part)
                    head = None
                elif "failed" in message:
                    return rows, message["failed"]
                else:
                    return rows, None
        except Lost as lost:
            if time.monotonic() >= end:
                return rows, "out of time"
            if part is None:
                return rows, str(lost)
            if head is not None:
                rows.append(head | {"reason": str(lost)})
                without.append(part)


def do_all(
    tasks: list[dict[str, Any]],
    workers: list[Worker],
    limit: float,
    end: float,
    finished: Callable[[dict[str, Any], list[Row], str | None], None],
) -> None:
    """Run all tasks, in parallel on all workers.

    - `limit`: seconds per part, for tasks without a limit of their own.
    - `finished(task, rows, reason)`: called after each task, one call at
      a time; a task that was not started has no rows and a reason.
    """
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    one_at_a_time = threading.Lock()

    def work(worker: Worker) -> None:
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                break
            rows: list[Row] = []
            reason: str | None = "not started: out of time"
            if time.monotonic() < end:
                rows, reason = do(worker, task, task.get("limit", limit), end)
            with one_at_a_time:
                finished(task, rows, reason)
        worker.close()

    threads = [threading.Thread(target=work, args=(w,)) for w in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.close()
