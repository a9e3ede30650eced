"""Correctness and speed of the kernels on a GPU, in about eight minutes.

First, every operation is compared with its naive form in float64. Then
all implementations are measured: fwlab, flash-linear-attention, PyTorch's
attention, the naive loops; and, to compare with, the peak rates of the
GPU. The work runs in separate processes: many for correctness (most of
that time is compilation), one for all measurements. What is wrong runs
once more with another ptxas, which can tell a compiler's error from ours.
"""

import importlib.util
import os
import platform
import secrets
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fwlab.bench.case import layout
from fwlab.bench.gpu import dry, report, targets
from fwlab.bench.gpu.cases import CASES, FLA, QUICK
from fwlab.bench.gpu.measure import ROUNDS
from fwlab.bench.gpu.problems import LIMITS, PROBLEMS
from fwlab.bench.gpu.processes import COMMAND, Row, Worker, do_all
from fwlab.files import destination, write_json
from fwlab.ops.call import compiler, measured
from fwlab.provenance import provenance

#: Limits in seconds: of checking, of measuring, of one part, and of what
#: runs once more. The first holds for `MAX_WORKERS` processes.
FIRST, SECOND, PART, AGAIN = 200.0, 260.0, 100.0, 120.0
#: A process that compiles needs a core, and takes some memory of the GPU.
MAX_WORKERS = 14
#: An emulator takes as long as it takes: limits of a dry run, in seconds.
NEVER = 1e9


def main(
    out: Path | None, command: str, *, quick: bool = False, dry_run: bool = False
) -> bool:
    """Check, measure, print and write; return whether all is correct.

    - `out`: the JSON file; None = docs/results/gpu-CARD.json in the
      repository, otherwise gpu-CARD.json in the current folder; for a
      dry run, a temporary file.
    - `quick`: fewer problems, the first cases, fewer rounds.
    - `dry_run`: on a CPU, with an emulator: see `dry`.
    - Raises `ValueError` if there is no GPU or no Triton, or for a dry
      run no emulator.
    """
    if not dry_run and not torch.cuda.is_available():
        raise ValueError(
            "bench --gpu needs an Nvidia GPU, but PyTorch finds none on this machine"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError("bench --gpu needs Triton, which is not installed")
    if dry_run:
        dry.stand_in()
        dry.install()
    about = dry.CARD if dry_run else card()
    path = measured.written(about["slug"]) if out is None else out
    if dry_run and out is None:
        path = Path(tempfile.mkdtemp(prefix="fwlab-bench-")) / path.name
    destination(path)
    run = Run(path, command, about, quick, dry_run)
    run.check()
    if not dry_run:
        run.check_again()
    run.measure()
    run.finish()
    return run.right()


def card() -> dict[str, Any]:
    """The GPU that PyTorch uses."""
    about = torch.cuda.get_device_properties(0)
    return {
        "name": about.name,
        "slug": measured.slug(about.name),
        "capability": [about.major, about.minor],
        "multiprocessors": about.multi_processor_count,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "free_gib": round(torch.cuda.mem_get_info()[0] / 2**30, 1),
        "driver": driver(),
        "cuda": torch.version.cuda,
    }


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


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Run:
    """One run, and its result so far.

    - `dry`: on the CPU, with the emulator. Times go to the screen only.
    """

    def __init__(
        self,
        path: Path,
        command: str,
        about: dict[str, Any],
        quick: bool,
        dry_run: bool = False,
    ) -> None:
        self.path, self.quick, self.dry = path, quick, dry_run
        self.device = "cpu" if dry_run else "cuda"
        self.command = dry.COMMAND if dry_run else COMMAND
        self.workers = max(1, min(MAX_WORKERS, cores() - (0 if dry_run else 2)))
        share = 0.5 if quick else 1.0
        # Most of the first phase is compilation: fewer cores take longer.
        self.first = share * FIRST * MAX_WORKERS / self.workers
        self.second, self.part = share * SECOND, PART
        if dry_run:
            self.first = self.part = NEVER
        self.start = time.monotonic()
        self.end = self.start + self.first
        self.assembler, self.untrusted = compiler.assembler(
            tuple(about["capability"]),
        )
        # Not next to the result, which is published.
        self.log = Path(tempfile.mkdtemp(prefix="fwlab-bench-")) / "log"
        self.result: dict[str, Any] = {
            "complete": False,
            "quick": quick,
            "dry_run": dry_run,
            # A dry run looks at the plan, not for new inputs.
            "seed": 1 if dry_run else secrets.randbelow(2**31),
            "seconds": 0.0,
            "card": about,
            "versions": versions() | {"ptxas": self._ptxas(self.assembler)},
            "ptxas": {
                "why": self.assembler and self.assembler.why,
                "not_used": self.untrusted,
            },
            "rates": {},
            "correctness": [],
            "rows": [],
            "floors": {},
            "targets": [],
            "not_run": [],
            **provenance(command),
        }
        self.cases = list(CASES)[: QUICK if quick else None]
        self.sizes = dry.SIZES if dry_run else {}

    @staticmethod
    def _ptxas(one: compiler.Assembler | None) -> str | None:
        return compiler.said(one.version) if one else None

    def task(self, kind: str, **more: Any) -> dict[str, Any]:
        seed = self.result["seed"]
        return {"kind": kind, "device": self.device, "seed": seed, **more}

    def check(self) -> None:
        """Check every operation in every precision; meanwhile, compile
        what will be measured.
        """
        limit = "" if self.dry else f" and at most {self.first:.0f} s"
        print(
            f"{self.result['card']['name']}: checking correctness, and compiling, "
            f"in {self.workers} processes{limit}"
        )
        warm = self.warm_up()
        tasks = [
            self.task("correctness", op=op, dtype=dtype, quick=self.quick)
            for op in PROBLEMS
            for dtype in LIMITS
        ]
        # Slow tasks come first, but correctness must not wait for all of them.
        early = 2 * self.workers // 3
        self.do([*warm[:early], *tasks, *warm[early:]], self.several())

    def several(self, **environment: str) -> list[Worker]:
        """Processes that run side by side."""
        return [
            Worker(
                self.command,
                log=self.log,
                OMP_NUM_THREADS="1",
                # Do not keep choices from timings under parallel load.
                FLA_CACHE_RESULTS="0",
                TRITON_CACHE_AUTOTUNING="0",
                **environment,
            )
            for _ in range(self.workers)
        ]

    def check_again(self) -> None:
        """Run what is wrong once more, compiled with another ptxas."""
        wrong: dict[tuple[str, str], list[Row]] = {}
        for row in self.result["correctness"]:
            if not row["ok"] and not row["refused"]:
                wrong.setdefault((row["op"], row["dtype"]), []).append(row)
        self.other = self.another()
        if not wrong or self.other is None:
            return
        print(f"\nwhat is wrong, once more with ptxas {self.other}")
        tasks = [
            self.task(
                "again",
                op=op,
                dtype=dtype,
                quick=self.quick,
                only=[row["problem"] for row in rows],
            )
            for (op, dtype), rows in wrong.items()
        ]
        with tempfile.TemporaryDirectory(prefix="fwlab-bench-") as cache:
            # What Triton has on disk is from the first one.
            names = (compiler.CHOICE, compiler.BLACKWELL)
            choice = dict.fromkeys(names, self.other.path)
            workers = self.several(TRITON_CACHE_DIR=cache, **choice)
            self.end = time.monotonic() + AGAIN
            self.do(tasks, workers)

    def another(self) -> compiler.Assembler | None:
        """The newest ptxas of another version that the driver can take."""
        have = compiler.driver()
        others = [
            one
            for one in compiler.assemblers()
            if (self.assembler is None or one.version != self.assembler.version)
            and (have is None or one.version[0] <= have[0])
        ]
        return max(others, key=lambda one: one.version, default=None)

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
                            "warm-up",
                            case=key,
                            side=side,
                            share=share,
                            limit=self.first,
                        )
                    )
        return sorted(found, key=lambda task: task["share"] is None)

    def measure(self) -> None:
        """Measure the peak rates of the GPU, then the cases in sequence."""
        print("\nmeasuring rates and times")
        rounds = 1 if self.dry else 2 if self.quick else ROUNDS
        self.end = max(self.end, time.monotonic()) + self.second
        tasks = [
            self.task("rates", sizes=self.sizes),
            *(self.task("case", case=case, rounds=rounds) for case in self.cases),
        ]
        self.do(tasks, [Worker(self.command, log=self.log)])

    def do(self, tasks: list[dict[str, Any]], workers: list[Worker]) -> None:
        do_all(tasks, workers, self.part, self.end, self.finished)

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
        elif kind == "again":
            self.compare(rows)
        elif kind == "case":
            result["rows"] += rows
        # What is not compiled in time will be compiled when it is measured.
        if reason is not None and kind != "warm-up":
            result["not_run"].append({"task": name, "reason": reason})
        seconds = time.monotonic() - self.start
        print(report.line(seconds, kind, name, rows, reason), flush=True)
        self.write()

    def compare(self, rows: list[Row]) -> None:
        """Keep what another ptxas makes of wrong rows in these rows."""
        assert self.other is not None
        capability = tuple(self.result["card"]["capability"])
        other = {
            "ptxas": self._ptxas(self.other),
            "known_wrong": compiler.is_wrong(self.other.version, capability),
        }
        keys = ("op", "dtype", "problem")
        for again in rows:
            for row in self.result["correctness"]:
                if all(row[key] == again[key] for key in keys):
                    kept = {name: again[name] for name in ("errors", "ok", "reason")}
                    row["again"] = other | kept

    def right(self) -> bool:
        """Whether everything was checked, and is correct.

        What is beyond the limits of the kernels does not count.
        """
        gaps = (gap["task"].split()[0] for gap in self.result["not_run"])
        ran = [row for row in self.result["correctness"] if not row["refused"]]
        return bool(ran) and "correctness" not in gaps and all(r["ok"] for r in ran)

    def finish(self) -> None:
        self.result["complete"] = True
        self.write()
        if self.dry:
            print("\ntimes are those of an emulator on the CPU, not of a GPU")
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
        write_json(self.path, without_times(result) if self.dry else result)


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    """A result of a dry run as it is written: it measures no GPU."""
    times = ("ms", "fastest", "wall_ms", "forward_ms", "first_seconds")
    return result | {
        "rates": dict.fromkeys(result["rates"]),
        "floors": dict.fromkeys(result["floors"]),
        "rows": [row | dict.fromkeys(times) for row in result["rows"]],
        "targets": [t for t in result["targets"] if t["name"].endswith(": error")],
    }
