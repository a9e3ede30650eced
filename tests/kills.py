"""Kill trainings, continue them, and compare them with unbroken ones.

    python tests/kills.py [--seed 7] [--cases 300] [--case 31]

Each case trains one of the `KINDS` below, kills it once or twice, and lets it end.
A kill comes at a random moment, or before a random operation on the files of the
run, which finds narrow windows. Weights, averages, curve, losses and sample must
be those of a run that nobody has killed, bit for bit. Cases depend on the seed and
their number only; `--case` repeats one.

Processes are copies of this one, which has loaded everything and computed nothing.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import accelerate  # noqa: F401
import terminal
import torch
import torch._dynamo
from safetensors import safe_open
from torch.distributed import TCPStore

from fwlab.training import Trainer, loop
from fwlab.training.checkpoint import CHECKSUM, FILE
from fwlab.training.lock import locked

TINY = [
    *("train", "--out", "run", "--device", "cpu", "--layers", "1", "--heads", "2"),
    *("--d-model", "8", "--block", "8", "--batch", "4", "--log-every", "1"),
    *("--eval-every", "3", "--eval-windows", "3", "--warmup", "2", "--lr", "1e-2"),
]
TEXT = "the quick brown fox jumps over the lazy dog. " * 12
STEPS = 9


def half_precision():
    """float16 is refused on a CPU, but its scaler works there."""
    accelerator = loop.devices.accelerator

    def with_scaler(*arguments, **options):
        prepared = accelerator(*arguments, **options)
        prepared.scaler = torch.amp.GradScaler("cpu", 2.0**127, growth_interval=3)
        return prepared

    loop.devices.accelerator = with_scaler


def clock():
    """Set forward and back by hours, as by someone or by a server."""
    now, jumps = time.time, random.Random(0)
    time.time = lambda: now() + jumps.choice((-5000, 0, 5000))


@dataclass(frozen=True)
class Kind:
    """A training: more options, and what each of its processes does first."""

    options: tuple[str, ...]
    before: object = None
    #: Processes, at first and after each kill.
    ranks: tuple[int, ...] = (1,)
    #: Its steps end here, and only then it is made longer.
    first: int = 0
    weight: int = 4


SHARD = ("--mixer", "delta", "--shard", "--min-lr", "1e-2", "--carry")
KINDS = {
    "plain": Kind(("--mixer", "delta")),
    "dropout": Kind(("--mixer", "softmax", "--attention-dropout", "0.3")),
    "carry": Kind(("--mixer", "sum", "--carry", "--dropout", "0.2")),
    "feedback": Kind(("--mixer", "feedback", "--carry"), weight=2),
    "packed words": Kind(("--pack", "--tokens", "words", "--corpus", "texts")),
    "growing": Kind(("--first-block", "3", "--grow-steps", "7")),
    "in parts": Kind(("--accumulate", "2", "--checkpointing")),
    "warm start": Kind(("--mixer", "softmax", "--start", "trained"), weight=2),
    "bf16": Kind(("--precision", "bf16")),
    "fp16": Kind((), half_precision),
    "clock": Kind((), clock),
    "longer": Kind(("--min-lr", "1e-2", "--schedule", "noam"), first=6, weight=6),
    "two": Kind(("--carry", "--dropout", "0.2"), ranks=(2, 2), weight=3),
    "shard": Kind(SHARD, ranks=(2, 2), weight=3),
    "two, one": Kind(SHARD, ranks=(2, 1), weight=2),
    "one, two": Kind(SHARD, ranks=(1, 2), weight=2),
}


# --- processes ---------------------------------------------------------


@dataclass
class Plan:
    """When a process is killed, and how.

    - `numbers`: the signals, one after the other; `FULL` = from then on, files
      cannot grow beyond `size` bytes, as on a full disk.
    - `at`: before this operation on the files of the run, from 1; or
    - `after`: this many seconds after the start.
    - `gap`: operations, or seconds, between two signals.
    - `victim`: the rank; None = all of them.
    - `rival`: a second process trains in the same folder, this much later.
    """

    numbers: tuple[int, ...] = ()
    at: int | None = None
    after: float = 0.0
    gap: float = 0.0
    victim: int | None = 0
    size: int = 0
    rival: float | None = None


FULL, RIVAL = 0, 9


#: What changes files, as Python reports it to audit hooks. A process cannot be
#: stopped inside one of them.
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}
EVENTS |= {"tempfile.mkstemp", "fcntl.flock", "os.truncate"}


class Operations:
    """Counts the operations on the files of the run, and kills before one."""

    def __init__(self, plan: Plan):
        self.count, self.plan, self.left = 0, plan, [*plan.numbers]
        sys.addaudithook(self.seen)
        fsync = os.fsync
        os.fsync = lambda f: (self.seen("open", ("run/fsync",)), fsync(f))[1]

    def seen(self, event, arguments):
        if event not in EVENTS or not (
            event == "fcntl.flock" or "run" in Path(str(arguments[0])).parts
        ):
            return
        self.count += 1
        at = self.plan.at
        if at is not None and self.left and self.count >= at:
            self.plan.at += max(1, round(self.plan.gap))
            number = self.left.pop(0)
            if number == FULL:
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.plan.size, -1))
            else:
                os.kill(os.getpid(), number)


def copy(folder, arguments, kind, plan, rank, environment):
    """In the copy: the command. Ends the process."""
    code = 70
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.environ.update(environment)
        printed = os.open(f"printed-{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        sample = Trainer.sample
        Trainer.sample = lambda self, length: sample(self, length=3)
        if kind.before is not None:
            kind.before()
        mine = plan.victim in (None, rank)
        counted = Operations(plan if plan.at is not None and mine else Plan())
        code, out, err = terminal.fwlab(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        print(out, err, f"exit {code}", flush=True)
        Path(f"operations-{rank}").write_text(str(counted.count))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def train(folder, arguments, kind, plan=None, ranks=1):
    """Start the ranks, kill them as planned; returns how each has ended.

    That is an exit code, or less than 0: the number of a signal.
    """
    plan = plan or Plan()
    for path in folder.glob("printed-*"):
        path.unlink()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids, ended, begin = {}, {}, time.monotonic()
    for rank in range(ranks):
        environment = {}
        if ranks > 1:
            environment = {
                "WORLD_SIZE": str(ranks),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
        if not (pid := os.fork()):
            copy(folder, arguments, kind, plan, rank, environment)
        pids[pid] = rank
    left, failed = [*plan.numbers], None
    while len(ended) < len(pids) or plan.rival is not None:
        pid, status = 0, 0
        if len(ended) < len(pids):
            pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid in pids:
            ended[pids[pid]] = os.waitstatus_to_exitcode(status)
            if ended[pids[pid]] and pids[pid] != RIVAL and failed is None:
                failed = now
        if plan.rival is not None and now - begin >= plan.rival:
            plan.rival = None
            if not (pid := os.fork()):
                copy(folder, arguments, kind, Plan(), RIVAL, {})
            pids[pid] = RIVAL
        alive = [pid for pid, r in pids.items() if r not in {*ended, RIVAL}]
        if left and plan.at is None and now - begin >= plan.after:
            number = left.pop(0)
            plan.after += plan.gap
            for pid in alive:
                if plan.victim in (None, pids[pid]):
                    os.kill(pid, number)
        # As torchrun does with the others when one has failed; it waits longer.
        if failed is not None and now - failed > 3:
            for pid in alive:
                os.kill(pid, signal.SIGTERM if now - failed < 13 else signal.SIGKILL)
        time.sleep(0.001)
    return [ended[rank] for rank in sorted(ended)]


# --- cases -------------------------------------------------------------


def folder_of(kind, at):
    at.mkdir()
    (at / "text.txt").write_text(TEXT)
    (at / "texts").mkdir()
    for i in range(12):
        (at / "texts" / f"{i:02}.txt").write_text(TEXT[: 60 + 17 * i])
    if "--start" in kind.options:
        (at / "trained").symlink_to(at.parent / "trained")
    return at


def command(kind, *more, steps=STEPS):
    corpus = () if "--corpus" in kind.options else ("--corpus", "text.txt")
    return [*TINY, *corpus, *kind.options, "--steps", str(steps), *more]


#: Of a result: how, when and where it was computed.
OTHERWISE = {"command", "date", "commit", "fwlab", "python", "torch", "machine"}
OTHERWISE |= {"threads", "first_step", "seconds", "tokens_per_second", "peak_mib"}


def about(run):
    """All that may not depend on kills."""
    facts = {}
    for name in ("last", "best"):
        with safe_open(run / name / FILE, "pt") as file:
            facts[name] = file.metadata()[CHECKSUM]  # of tensors and header
    lines = (run / "metrics.jsonl").read_text().splitlines()
    facts["metrics"] = [json.loads(line) for line in lines]
    seconds = [row.pop("seconds") for row in facts["metrics"]]
    assert seconds == sorted(seconds) and seconds[0] >= 0, seconds
    for row in facts["metrics"]:
        del row["tokens_per_second"]
    for name in ("config", "result"):
        read = json.loads((run / f"{name}.json").read_text())
        facts[name] = {k: x for k, x in read.items() if k not in OTHERWISE}
    facts["files"] = sorted(str(p.relative_to(run)) for p in run.rglob("*"))
    return facts


def printed(folder):
    return "".join(path.read_text() for path in folder.glob("printed-*"))


def close(one, other):
    """Other numbers of processes add in another order."""
    for a, b in zip(one["metrics"], other["metrics"], strict=True):
        for name in a:
            assert abs(a[name] - b[name]) < 1e-4, (a, b)
    assert one["files"] == other["files"]


@dataclass
class Night:
    """What has happened, by kind."""

    seed: int
    at: Path
    whole: dict = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)

    def unbroken(self, name):
        """What an unbroken run leaves, its operations and its seconds."""
        if name not in self.whole:
            kind = KINDS[name]
            folder = folder_of(kind, self.at / f"whole-{len(self.whole)}")
            if kind.first:
                self.must(train(folder, command(kind, steps=kind.first), kind), folder)
            begin = time.monotonic()
            more = ("--resume",) if kind.first else ()
            number = kind.ranks[0]
            self.must(train(folder, command(kind, *more), kind, ranks=number), folder)
            seconds = time.monotonic() - begin
            operations = int((folder / "operations-0").read_text())
            self.whole[name] = about(folder / "run"), operations, seconds
        return self.whole[name]

    def must(self, ended, folder):
        if any(ended):
            raise AssertionError(f"ended with {ended}")

    def plan(self, rng, name):
        _, operations, seconds = self.unbroken(name)
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, FULL))
        twice = number == signal.SIGTERM and rng.random() < 0.4
        numbers = (number,) * (2 if twice else 1)
        several = KINDS[name].ranks[0] > 1
        victim = rng.choice((None, 0, 1)) if several and number != FULL else 0
        if number == FULL or rng.random() < 0.7:
            gap, size = rng.choice((1, 1, 2, 5)), rng.choice((0, 9, 400, 3000))
            at = rng.randint(1, operations)
            return Plan(numbers, at, gap=gap, victim=victim, size=size)
        rival = None if several or rng.random() < 0.3 else rng.uniform(0, seconds)
        after, gap = rng.uniform(0, seconds), rng.uniform(0, 0.1)
        if rival is not None and rng.random() < 0.3:
            numbers = ()  # nobody is killed
        return Plan(numbers, after=after, gap=gap, victim=victim, rival=rival)

    def case(self, index):
        rng = random.Random(f"{self.seed} {index}")
        names = [*KINDS]
        name = rng.choices(names, [KINDS[n].weight for n in names])[0]
        kind = KINDS[name]
        expected = self.unbroken(name)[0]
        folder = folder_of(kind, self.at / f"case-{index}")
        run, said = folder / "run", []
        if kind.first:
            self.must(train(folder, command(kind, steps=kind.first), kind), folder)
        try:
            for i in range(rng.choice((1, 1, 2))):
                plan = self.plan(rng, name)
                said.append(str(plan))
                ranks = kind.ranks[min(i, len(kind.ranks) - 1)]
                if plan.victim and plan.victim >= ranks:
                    plan.victim = 0
                arguments = command(kind, *self.resume(rng, run))
                ended = train(folder, arguments, kind, plan, ranks)
                said.append(str(ended))
                self.allowed(ended, ranks, plan, folder)
                killed = any(
                    code != 2 or FULL in plan.numbers for code in ended if code
                )
                self.counts[name, "kills" if killed else "ended before"] += 1
                self.counts["signals", self.called(plan)] += killed
                self.counts["signals", "a second process"] += len(ended) > ranks
            arguments = command(kind, *self.resume(rng, run))
            self.must(train(folder, arguments, kind, ranks=kind.ranks[-1]), folder)
            facts = about(run)
            if len({*kind.ranks}) > 1:
                close(expected, facts)
            else:
                for part, value in expected.items():
                    assert facts[part] == value, (part, value, facts[part])
            self.counts[name, "continued"] += 1
        except Exception as error:
            self.wrong.append(index)
            print(f"case {index}, {name}: {said}\n{error!r:.1500}")
            print(printed(folder)[-3000:], flush=True)
        shutil.rmtree(folder)

    @staticmethod
    def called(plan):
        name = " twice" if len(plan.numbers) > 1 else ""
        when = "at a moment" if plan.at is None else "at a file"
        if FULL in plan.numbers or not plan.numbers:
            return "full disk" if plan.numbers else "nothing"
        return f"{signal.Signals(plan.numbers[0]).name}{name} {when}"

    @staticmethod
    def resume(rng, run):
        """Without a checkpoint, it is not needed."""
        begun = any((run / name / FILE).exists() for name in ("last", "best"))
        return ("--resume",) if begun or rng.random() < 0.5 else ()

    @staticmethod
    def allowed(ended, ranks, plan, folder):
        """One that was not killed itself may fail with the others."""
        said, known = printed(folder), {0, 130, *(-number for number in plan.numbers)}
        if FULL in plan.numbers or "trains there" in said or "run already" in said:
            known.add(2)
        if ranks == 1 and ("Traceback" in said or not {*ended} <= known):
            raise AssertionError(f"ended with {ended}")
        if len(ended) > ranks and not any(ended) and "nothing to do" not in said:
            raise AssertionError("both processes trained")
        if -signal.SIGKILL in ended and signal.SIGKILL not in plan.numbers:
            raise AssertionError("one of the processes hung")


def held(night):
    """All processes of a training are refused, and none waits for another."""
    kind, folder = KINDS["two"], folder_of(KINDS["two"], night.at / "held")
    (folder / "run").mkdir()
    with locked(folder / "run"):
        ended = train(folder, command(kind), kind, ranks=2)
    if ended != [2, 2]:
        night.wrong.append(f"held: {ended}")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--nproc-per-node", "2", "-m", "fwlab"]


def torchrun(night):
    """Three more, with the real launcher: it is stopped, it dies, a worker dies."""
    kind = Kind(("--carry", "--dropout", "0.2", "--eval-every", "20"))
    arguments = [*TORCHRUN, *command(kind, "--resume", steps=60)]

    def start(folder):
        with open(folder / "printed-0", "ab") as file:
            return subprocess.Popen(arguments, cwd=folder, stdout=file, stderr=file)

    expected = None
    for what in ("nothing", "torchrun SIGTERM", "torchrun SIGKILL", "worker SIGKILL"):
        folder = folder_of(kind, night.at / what)
        process, run = start(folder), folder / "run"
        rows = 0
        while what != "nothing" and process.poll() is None and rows < 30:
            time.sleep(0.002)
            with contextlib.suppress(FileNotFoundError):
                rows = (run / "metrics.jsonl").read_text().count("\n")
        number = getattr(signal, what.split()[-1], 0)
        if what.startswith("torchrun"):
            process.send_signal(number)
        elif what != "nothing":
            with contextlib.suppress(FileNotFoundError):  # at its end already
                _, pid, *_ = (run / ".lock").read_text().split()
                os.kill(int(pid), number)
        process.wait()
        night.counts["torchrun", what] += 1
        # Workers without their launcher train on, and hold the folder.
        tries = 0
        while what != "nothing" and start(folder).wait() and (tries := tries + 1) < 9:
            time.sleep(2)
        try:
            facts = about(run)
            expected = expected or facts
            assert facts == expected, what
            night.counts["torchrun", "continued"] += what != "nothing"
        except Exception as error:
            night.wrong.append(what)
            print(f"{what}: {error!r:.1500}\n{printed(folder)[-3000:]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().getrandbits(32)
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as at:
        night = Night(arguments.seed, Path(at))
        softmax = Kind(("--mixer", "softmax"))
        trained = folder_of(softmax, Path(at, "first"))
        night.must(train(trained, command(softmax), softmax), trained)
        (trained / "run").rename(Path(at, "trained"))
        cases = range(arguments.cases) if arguments.case is None else [arguments.case]
        for index in cases:
            night.case(index)
        if arguments.case is None:
            held(night)
            torchrun(night)
        for (name, what), count in sorted(night.counts.items()):
            print(f"{name:<14} {what:<24} {count}")
        total = Counter()
        for (name, what), count in night.counts.items():
            if name not in ("signals", "torchrun"):
                total[what] += count
        print(f"seed {arguments.seed}: {dict(total)}, wrong: {night.wrong}", flush=True)
    sys.exit(bool(night.wrong))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
