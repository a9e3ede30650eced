"""Correctness and speed of the kernels on a GPU, in eight minutes.

First, every operation is compared with its naive form in float64. Then
all implementations are measured: fwlab, flash-linear-attention, PyTorch's
attention, the naive loops; and, to compare with, the peak rates of the
GPU. The work runs in separate processes: many for correctness (most of
that time is compilation), one for all measurements.
"""

import importlib.util
import os
import platform
import re
import secrets
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fwlab.bench.case import layout
from fwlab.bench.gpu import report, targets
from fwlab.bench.gpu.cases import CASES, FLA, QUICK
from fwlab.bench.gpu.measure import ROUNDS
from fwlab.bench.gpu.problems import LIMITS, PROBLEMS
from fwlab.bench.gpu.processes import Row, Worker, do_all
from fwlab.files import check_writable, write_json
from fwlab.provenance import provenance

#: Limits in seconds: of the whole run, of its first half, and of one part.
WHOLE, FIRST, PART = 460.0, 200.0, 100.0
#: A process that compiles needs a core, and takes some memory of the GPU.
MAX_WORKERS = 14


def main(out: Path | None, command: str, *, quick: bool = False) -> bool:
    """Check, measure, print and write; return whether all is correct.

    - `out`: the JSON file; None = docs/results/gpu-CARD.json in the
      repository, otherwise gpu-CARD.json in the current folder.
    - `quick`: fewer problems, the first cases, fewer rounds.
    - Raises `ValueError` if there is no GPU or no Triton.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "bench --gpu needs an Nvidia GPU, but PyTorch finds none on this machine"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError("bench --gpu needs Triton, which is not installed")
    about = card()
    path = default_path(about["slug"]) if out is None else out
    check_writable(path.parent)
    run = Run(path, command, about, quick)
    run.check()
    run.measure()
    run.finish()
    return run.right()


def card() -> dict[str, Any]:
    """The GPU that PyTorch uses."""
    about = torch.cuda.get_device_properties(0)
    return {
        "name": about.name,
        "slug": slug(about.name),
        "capability": [about.major, about.minor],
        "multiprocessors": about.multi_processor_count,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 1),
        "driver": driver(),
        "cuda": torch.version.cuda,
    }


def slug(name: str) -> str:
    """The name of a GPU as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def driver() -> str | None:
    """Version of the driver; None if nvidia-smi does not report it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, check=True, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def versions() -> dict[str, str | None]:
    """Versions of the packages that compute; None = not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", FLA, "fla-core"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def default_path(slug: str) -> Path:
    folder = Path("docs", "results")
    in_repository = folder.is_dir() and Path("fwlab", "bench").is_dir()
    return (folder if in_repository else Path()) / f"gpu-{slug}.json"


class Run:
    """One run, and its result so far.

    - `device`: where the work runs; "cpu" is for tests.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        about: dict[str, Any],
        quick: bool,
        device: str = "cuda",
    ) -> None:
        self.path, self.quick, self.device = path, quick, device
        self.start = time.monotonic()
        # Not next to the result, which is published.
        self.log = Path(tempfile.mkdtemp(prefix="fwlab-bench-")) / "log"
        self.result: dict[str, Any] = {
            "complete": False,
            "quick": quick,
            "seed": secrets.randbelow(2**31),
            "seconds": 0.0,
            "card": about,
            "versions": versions(),
            "rates": {},
            "correctness": [],
            "rows": [],
            "floors": {},
            "targets": [],
            "not_run": [],
            **provenance(command),
        }
        self.cases = list(CASES)[: QUICK if quick else None]
        self.sizes: dict[str, int] = {}

    def task(self, kind: str, **more: Any) -> dict[str, Any]:
        seed = self.result["seed"]
        return {"kind": kind, "device": self.device, "seed": seed, **more}

    def check(self) -> None:
        """Check every operation in every precision; meanwhile, compile
        what will be measured.
        """
        print(f"{self.result['card']['name']}: checking correctness, and compiling")
        warm = self.warm_up()
        tasks = [
            self.task("correctness", op=op, dtype=dtype, quick=self.quick)
            for op in PROBLEMS
            for dtype in LIMITS
        ]
        cores = os.cpu_count() or 1
        workers = [
            Worker(
                log=self.log,
                OMP_NUM_THREADS="1",
                # Do not keep choices from timings under parallel load.
                FLA_CACHE_RESULTS="0",
                TRITON_CACHE_AUTOTUNING="0",
            )
            for _ in range(max(1, min(MAX_WORKERS, cores - 2)))
        ]
        # Slow tasks come first, but correctness must not wait for all of them.
        early = 2 * len(workers) // 3
        self.do([*warm[:early], *tasks, *warm[early:]], workers, FIRST)

    def warm_up(self) -> list[dict[str, Any]]:
        """Tasks that compile, the slowest first."""
        found = []
        for key in self.cases:
            for side, given in CASES[key].sides.items():
                n = given.compiles
                if given.package is not None and given.version() is None:
                    continue  # not installed
                for i in range(n):
                    share = (i, n) if n > 1 else None
                    found.append(
                        self.task(
                            "warm-up", case=key, side=side, share=share, limit=FIRST
                        )
                    )
        return sorted(found, key=lambda task: task["share"] is None)

    def measure(self) -> None:
        """Measure the peak rates of the GPU, then the cases in sequence."""
        print("\nmeasuring rates and times")
        rounds = 2 if self.quick else ROUNDS
        tasks = [
            self.task("rates", sizes=self.sizes),
            *(self.task("case", case=case, rounds=rounds) for case in self.cases),
        ]
        self.do(tasks, [Worker(log=self.log)], WHOLE)

    def do(
        self, tasks: list[dict[str, Any]], workers: list[Worker], seconds: float
    ) -> None:
        end = self.start + (seconds / 2 if self.quick else seconds)
        do_all(tasks, workers, PART, end, self.finished)

    def finished(
        self, task: dict[str, Any], rows: list[Row], reason: str | None
    ) -> None:
        """Keep the results of a task, also on disk in case the run stops."""
        result, kind = self.result, task["kind"]
        name = " ".join(
            [
                kind,
                *(str(task[n]) for n in ("op", "dtype", "case", "side") if n in task),
            ]
        )
        if kind == "rates":
            for row in rows:
                why = row.pop("reason")
                result["rates"] |= row
                if why:
                    result["not_run"].append({"task": name, "reason": why})
        elif kind == "correctness":
            result["correctness"] += rows
        elif kind == "case":
            result["rows"] += rows
        # What is not compiled in time will be compiled when it is measured.
        if reason is not None and kind != "warm-up":
            result["not_run"].append({"task": name, "reason": reason})
        seconds = time.monotonic() - self.start
        print(report.line(seconds, kind, name, rows, reason), flush=True)
        self.write()

    def right(self) -> bool:
        """Whether everything was checked, and is correct."""
        gaps = (gap["task"].split()[0] for gap in self.result["not_run"])
        return "correctness" not in gaps and all(
            row["ok"] for row in self.result["correctness"]
        )

    def finish(self) -> None:
        self.result["complete"] = True
        self.write()
        print("\n" + layout(report.correctness(self.result), left=2))
        print("\n" + layout(report.rows(self.result), left=3))
        print("\n" + layout(report.targets(self.result), left=1))
        failures = report.failures(self.result)
        if failures:
            print("\n" + "\n".join(failures))
            print(f"output of the processes: {self.log}")
        print(f"\n{self.result['seconds']:.0f} s; {self.path}")

    def write(self) -> None:
        result = self.result
        order = [(op, dtype) for op in PROBLEMS for dtype in LIMITS]
        result["correctness"].sort(
            key=lambda row: order.index((row["op"], row["dtype"]))
        )
        result["floors"] = targets.floors(result["rates"])
        result["targets"] = targets.evaluate(
            result["correctness"],
            result["rows"],
            result["rates"],
            result["not_run"],
        )
        result["seconds"] = round(time.monotonic() - self.start, 1)
        write_json(self.path, result)
