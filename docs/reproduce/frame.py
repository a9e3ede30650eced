"""Reproduce a published table or figure: its points, claims about them, and a figure.

`docs/reproduce/NAME.py` is an experiment: it has a TITLE, a SOURCE and a COST, and functions
`points`, `run`, `claims` and `draw` of `Experiment`, and perhaps `setup`, which can
also be a dictionary that holds for all points. The command
`python docs/reproduce/NAME.py --quick` runs it. The results are beside it, as NAME.json
and NAME.quick.json.
"""

import argparse
import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from math import inf, isinf
from operator import gt, lt
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from fwlab import plots
from fwlab.files import destination, read_json, replacing, write_json
from fwlab.provenance import provenance

HERE = Path(__file__).parent
#: All experiments, in the order of the index.
NAMES = (
    *("erasing", "capacity-law", "rates"),
    *("capacity", "overwrite", "favor-underflow", "ablation", "language-model"),
    *("recall", "state-size", "translation", "aft", "aft-stability"),
    *("feedback-variables", "feedback-depth", "feedback-curriculum", "feedback-tasks"),
    *("state-tracking", "reversal", "replacing", "regression"),
    *("mqar", "length", "formal", "hybrid"),
)
#: The settings of one run and, once it has ended, its results, as plain values.
Point = dict[str, Any]
#: One number per seed. The loss of a failed run is infinite.
Numbers = Sequence[float]


class Points(list[Point]):
    """Store results as a table: a call selects rows, an index by name returns a column.

    `Points(points)(rule="delta")["loss"]` are the losses of the delta rule. The loss of
    a failed run is infinite.
    """

    def __call__(self, **wanted: Any) -> "Points":
        return Points(p for p in self if all(p[k] == x for k, x in wanted.items()))

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str):
            return list(self)[name]
        return [inf if p[name] is None else p[name] for p in self]

    def by(self, *columns: str) -> "dict[Any, Points]":
        """Group the results by the values of one column or of several columns."""
        groups: dict[Any, Points] = {}
        for p in self:
            at = tuple(p[name] for name in columns)
            groups.setdefault(at if len(at) > 1 else at[0], Points()).append(p)
        return groups

    def at_best_rate(
        self,
        *columns: str,
        by: str,
        best: Callable[..., "Points"] = min,
        rate: str = "lr",
    ) -> "Points":
        """Select the results of each group at the learning rate with the best median.

        Rates with fewer seeds than another rate of the group do not count.

        - `columns`: points with equal values in these columns form a group.
        - `by`: the column whose medians `best` (`min` or `max`) compares.
        - `rate`: the column of learning rates.
        """
        kept = Points()
        for own in self.by(*columns).values():
            rates = own.by(rate).values()
            most = max(map(len, rates))
            complete = [some for some in rates if len(some) == most]
            kept += best(complete, key=lambda some: median(some[by]))
        return kept


def paired(*sides: Points) -> list[tuple[float, ...]]:
    """Match losses by seed; return a tuple, one loss per side, for each shared seed."""
    each = [dict(zip(side["seed"], side["loss"], strict=True)) for side in sides]
    seeds = [seed for seed in each[0] if all(seed in side for side in each)]
    return [tuple(side[seed] for side in each) for seed in seeds]


# --- Claims ---------------------------------------------------------------


class Claim(NamedTuple):
    """Hold a claim of an experiment and its result.

    - `text`: the claim.
    - `published`: the published numbers with their table; "" = a claim of ours,
      without published numbers.
    - `found`: our numbers, medians with the range over seeds, as text.
    - `holds`: True if the medians satisfy the claim; None = not run.
    - `apart`: True if all seeds agree: all of one side are below all of the
      other side. None = nothing to compare, or fewer than three seeds.
    - `protocol`: how our protocol differs from the published one; "" = it
      does not.
    - `seeds`: the smallest number of seeds behind a number that decides.
    - `trained`: True if all models are better than a trivial one.
    """

    text: str
    published: str
    found: str
    holds: bool | None
    apart: bool | None = None
    protocol: str = ""
    seeds: int = 3
    trained: bool = True

    @property
    def verdict(self) -> str:
        """Return the verdict in a few words, such as "holds" or "seeds overlap"."""
        if self.holds is None:
            return "not run"
        if not self.trained:
            return "not trained far enough"
        if self.apart is False:
            return "seeds overlap"
        if self.seeds < 3:
            return "one seed"
        yes, no = ("reproduced", "not") if self.published else ("holds", "does not")
        return yes if self.holds else no


def order(
    text: str,
    sides: Mapping[Any, Numbers] | Sequence[Numbers],
    published: str = "",
    *,
    sign: str = "<",
    spec: str = ".3f",
    protocol: str = "",
    trivial: float | None = None,
) -> Claim:
    """Return a claim that the medians of `sides` are in the given order.

    - `text`, `published`, `protocol`: as in `Claim`; `{}` in the text is replaced by
      the names of the sides with the sign between them.
    - `sides`: the numbers of each side, perhaps by name. An empty side was not run.
    - `sign`: "<", or ">" if the largest numbers come first.
    - `spec`: format of the numbers.
    - `trivial`: a loss that needs no training. If the median of a side is not below
      it, the claim counts as not trained far enough.
    - `apart` of the claim: True if neighbouring sides do not overlap: all sides if the
      claim holds, and otherwise two sides in the wrong order.
    """
    if isinstance(sides, Mapping):
        text = text.replace("{}", f" {sign} ".join(map(str, sides)))
        sides = [*sides.values()]
    before = {"<": lt, ">": gt}[sign]
    yes = apart = None
    if all(sides):
        right = [before(median(a), median(b)) for a, b in pairwise(sides)]
        yes = all(right)
        if min(map(len, sides)) >= 3:
            # One reversed pair is enough to refute a chain.
            clear = [
                max(a) < min(b) or max(b) < min(a)
                for (a, b), good in zip(pairwise(sides), right, strict=True)
                if yes or not good
            ]
            apart = all(clear) if yes else any(clear)
    found = _against(sides, spec)
    seeds = min(map(len, sides), default=0)
    trained = trivial is None or all(median(x) < trivial for x in sides if x)
    return Claim(text, published, found, yes, apart, protocol, seeds, trained)


def holds(
    text: str,
    numbers: Numbers,
    true: Callable[[float], bool],
    published: str = "",
    *,
    spec: str = ".3f",
    protocol: str = "",
) -> Claim:
    """Return a claim that `true` holds for the median of `numbers`.

    - `numbers`: numbers of all seeds; empty = not run.
    - `apart` of the claim: True if the condition holds for all seeds, or for none.
    """
    yes = true(median(numbers)) if numbers else None
    apart = len({*map(true, numbers)}) == 1 if len(numbers) >= 3 else None
    found = _against([numbers], spec)
    return Claim(text, published, found, yes, apart, protocol, len(numbers))


def every(
    text: str,
    groups: Mapping[Any, Numbers],
    true: Callable[[float], bool],
    published: str = "",
    *,
    spec: str = ".4f",
    x: str = "S",
    worst: Callable[[float], float] | None = None,
    protocol: str = "",
) -> Claim:
    """Return a claim that `true` holds for the median of every group, such as a size.

    - `groups`: the numbers of all seeds of each group, by its value of `x`. If some
      are empty, a claim that holds for the rest counts as not run.
    - `true`: the condition on the median of a group.
    - `spec`, `x`: format of the numbers, and the name of the groups' variable.
    - `worst`: show only the group whose median has the largest value of this function.
      Failing groups come first, and among them groups whose seeds agree; if none
      fails, groups whose seeds disagree come first. None = show all groups.
    - `apart` of the claim: True if all seeds agree, in all groups if the claim holds,
      and otherwise in a group that fails; None if they agree, but are fewer than
      three.
    """
    run = {at: numbers for at, numbers in groups.items() if numbers}
    middle = {at: median(numbers) for at, numbers in run.items()}
    good = {at: true(number) for at, number in middle.items()}
    agree = {at: len({*map(true, numbers)}) == 1 for at, numbers in run.items()}
    shown = [*run]
    if worst is not None and run:
        rank = {
            at: (not good[at], good[at] != agree[at], worst(middle[at])) for at in run
        }
        shown = [max(run, key=rank.__getitem__)]
    found = ", ".join(
        f"{_range(run[at], spec)} ({f'{x} = {at}' if x else at})" for at in shown
    )
    if len(shown) < len(run):
        found += f", the worst of {len(run)}"
    yes = True if len(run) == len(groups) else None
    seeds, clear = [len(run[at]) for at in run], all(agree.values())
    fewest = min(seeds, default=3)
    if not all(good.values()):
        # One failing group refutes the claim: take the group with the most seeds.
        yes, seeds = False, [len(run[at]) for at in run if agree[at] and not good[at]]
        fewest, clear = max(seeds, default=3), bool(seeds)
    apart = False if not clear else True if seeds and fewest >= 3 else None
    return Claim(text, published, found or "–", yes, apart, protocol, fewest)


def _against(sides: Iterable[Numbers], spec: str) -> str:
    return " against ".join(_range(side, spec) for side in sides if side) or "–"


def _range(numbers: Numbers, spec: str) -> str:
    """Format the median of `numbers`, with the range if there are several."""
    low, middle, high = (
        "failed" if isinf(x) else f"{x:{spec}}"
        for x in (min(numbers), median(numbers), max(numbers))
    )
    return middle if len(numbers) == 1 else f"{middle} [{low}, {high}]"


def verdict(claims: Iterable[Claim]) -> str:
    """Summarise the published claims, or our own claims if none is published.

    - Returns "reproduced", "partly", "not", "undecided" (too few seeds, say) or
      "not run"; of claims of ours "ours: holds", "ours: partly" and so on.
    """
    known = list(claims)
    counted = [claim for claim in known if claim.published] or known
    words = {claim.verdict for claim in counted}
    run = words - {"not run"}
    if not run:
        return "not run"
    if not run & {"reproduced", "not", "holds", "does not"}:
        word = "undecided"
    else:
        word = run.pop() if len(run) == 1 else "partly"
    so_far = " so far" if "not run" in words else ""
    return f"{'' if counted[0].published else 'ours: '}{word}{so_far}"


# --- Experiments ----------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """Describe the experiment that reproduces a published figure or table.

    - `name`: name of its page, its script and its files.
    - `title`: a few words for lists.
    - `source`: where it was published.
    - `cost`: time of the full and of the quick version.
    - `points`: returns the points of the full or (True) the quick version,
      each with what identifies it.
    - `run`: runs a point, and returns what to add to it.
    - `claims`: judges the claims by the points.
    - `draw`: draws the figure of the points.
    - `setup`: returns hyper-parameters of a point that are not settings.
    """

    name: str
    title: str
    source: str
    cost: str
    points: Callable[[bool], list[Point]]
    run: Callable[[Point], Point]
    claims: Callable[[Points], Iterable[Claim]]
    draw: Callable[[Points], Figure]
    setup: Callable[[Point], Mapping[str, Any]]


def load(name: str) -> Experiment:
    """Import the script of an experiment, and return it as an `Experiment`."""
    script = import_module(name)
    about = script.TITLE, script.SOURCE, script.COST
    does = script.points, script.run, script.claims, script.draw
    setup = getattr(script, "setup", {})
    same = setup if callable(setup) else lambda point: setup
    return Experiment(name, *about, *does, same)


def results(name: str, quick: bool, folder: Path = HERE) -> dict[str, Any] | None:
    """Read the collected results of an experiment, or return None if there are none.

    - Returns the results, with `points` as `Points`.
    - Raises `ValueError`, which names the file, if it holds something else.
    """
    path = folder / f"{name}{'.quick' * quick}.json"
    if not path.is_file():
        return None
    data = read_json(path)
    try:
        found = {**data, "points": Points(data["points"])}
        if data["experiment"] == name and data["runs"]:
            return found
    except (TypeError, KeyError):
        pass
    raise ValueError(f"{path} is not what {name}.py writes")


def texts_of(points: Iterable[Point]) -> dict[str, list[str]]:
    """Return the training texts (name and SHA-256) of all results, by corpus."""
    read: dict[str, dict[str, None]] = {}
    for p in points:
        if corpus := p.get("corpus"):
            text = f"{p['corpus_name']}, SHA-256 {p['corpus_sha256']}…"
            read.setdefault(corpus, {})[text] = None
    return {corpus: [*texts] for corpus, texts in read.items()}


class Runs:
    """Execute the runs of an experiment, and save each finished run.

    Each finished point is a file, so that a run that was stopped, in any way,
    continues where it was, and several machines can share a folder.

    - `quick`: the quick version instead of the full one.
    - `out`: the folder for the results.
    """

    def __init__(self, experiment: Experiment, quick: bool, out: Path = HERE):
        self.experiment, self.quick, self.out = experiment, quick, out
        self.points = experiment.points(quick)
        self.name = f"{experiment.name}{'.quick' * quick}"

    def read(self, index: int) -> dict[str, Any] | None:
        """Return a finished run and its provenance, or None if the run is not finished.

        A point also counts as not finished if its settings have changed since.
        """
        path = self._path(index)
        try:
            saved = read_json(path) if path.is_file() else None
            return saved if saved and self._is(index, saved["point"]) else None
        except (ValueError, TypeError, KeyError, AttributeError):
            warnings.warn(f"{path} is damaged: its point runs again", stacklevel=1)
            return None

    def run(self, index: int, made_by: dict[str, Any] | None = None) -> Point:
        """Execute one run with one thread, and save its result.

        - `made_by`: provenance of the point; None = determine it.
        - Returns the point with its results, its wall-clock and processor time in
          seconds, and its `setup`.
        """
        if not 0 <= index < len(self.points):
            last = len(self.points) - 1
            raise ValueError(f"expected a point from 0 to {last}, got {index}")
        torch.set_num_threads(1)
        # Record the commit before the run, as the source may change meanwhile.
        made_by = made_by or self.provenance()
        point = self.points[index]
        start, start_cpu = time.perf_counter(), time.process_time()
        point = {**point, **self.experiment.run(point)}
        point["seconds"] = round(time.perf_counter() - start, 3)
        point["cpu_seconds"] = round(time.process_time() - start_cpu, 3)
        if setup := self.experiment.setup(self.points[index]):
            point["setup"] = dict(setup)
        write_json(self._path(index), {"point": point, "run": made_by})
        return point

    def run_all(self, jobs: int) -> Generator[Point, None, None]:
        """Execute all unfinished runs in parallel, and yield each finished run."""
        left = [i for i in range(len(self.points)) if self.read(i) is None]
        context = multiprocessing.get_context("spawn")
        stop, made_by = context.Event(), self.provenance()
        if not left:
            return
        with ProcessPoolExecutor(
            min(jobs, len(left)), context, initializer=_end_with, initargs=(stop,)
        ) as pool:
            about = self.experiment.name, self.quick, self.out
            waiting = [pool.submit(_run, *about, index, made_by) for index in left]
            try:
                for future in as_completed(waiting):
                    yield future.result()
            except BaseException:
                stop.set()
                raise

    def collect(self) -> dict[str, Any]:
        """Write the results and the figure of all finished runs.

        Unfinished points keep their entries of an earlier file of results,
        so that a grid can be run in parts.

        - Returns the results.
        - Raises `ValueError` if no point is finished, or if points have read
          different texts under one name.
        """
        earlier = results(self.experiment.name, self.quick, self.out)
        saved = (
            [{"point": p, "run": earlier["runs"][p["run"]]} for p in earlier["points"]]
            if earlier
            else []
        )
        runs: list[dict[str, Any]] = []
        points = Points()
        for index in range(len(self.points)):
            kept = (each for each in saved if self._is(index, each["point"]))
            if each := self.read(index) or next(kept, None):
                if each["run"] not in runs:
                    runs.append(each["run"])
                points.append(each["point"] | {"run": runs.index(each["run"])})
        if not any(map(self.read, range(len(self.points)))):
            raise ValueError(
                f"nothing to collect: no point of {self.name} is finished in {self.out}"
            )
        for corpus, texts in texts_of(points).items():
            if len(texts) > 1:
                raise ValueError(
                    f"points of {self.name} have read {len(texts)} texts as corpus "
                    f"{corpus!r}: use another folder for each text"
                )
        collected = {
            "experiment": self.experiment.name,
            "quick": self.quick,
            "grid": len(self.points),
            "seconds": round(sum(points["seconds"]), 1),
            "runs": runs,
            "points": points,
        }
        with replacing(self.out / f"{self.name}.json") as part:
            part.write_text(_one_line_each(collected), encoding="utf-8")
        with mpl.rc_context(), replacing(self.out / f"{self.name}.svg") as part:
            plots.style()
            figure = self.experiment.draw(points)
            figure.savefig(part, format="svg", metadata={"Date": None})
        return collected

    def provenance(self) -> dict[str, Any]:
        """Return the versions, machine and commit that all runs share."""
        command = (
            f"python docs/reproduce/{self.experiment.name}.py{' --quick' * self.quick}"
        )
        return {**provenance(command), "threads": 1}

    def _is(self, index: int, point: Point) -> bool:
        return all(point.get(key) == x for key, x in self.points[index].items())

    def _path(self, index: int) -> Path:
        return self.out / ".points" / self.name / f"{index:04}.json"


def _run(
    name: str, quick: bool, out: Path, index: int, made_by: dict[str, Any]
) -> Point:
    return Runs(load(name), quick, out).run(index, made_by)


def _end_with(stop: Any) -> None:
    """End the current process when its parent process ends, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while parent.is_alive() and not stop.wait(0.5):
            pass
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles SIGINT.
    threading.Thread(target=watch, daemon=True).start()


def _one_line_each(collected: dict[str, Any]) -> str:
    """Format results as JSON with one line per entry of "runs" and of "points"."""
    lists = ("runs", "points")
    text = json.dumps(collected | dict.fromkeys(lists), indent=1, ensure_ascii=False)
    for name in lists:
        lines = (f"  {json.dumps(p, ensure_ascii=False)}" for p in collected[name])
        joined = ",\n".join(lines)
        text = text.replace(f'"{name}": null', f'"{name}": [\n{joined}\n ]')
    return text + "\n"


# --- The command ----------------------------------------------------------


def main(file: str) -> None:
    """Run the experiment of a script with command-line options, or resume it."""
    experiment = load(Path(file).stem)
    parser = argparse.ArgumentParser(
        description=f"{experiment.title} ({experiment.source}).",
        epilog=f"Cost: {experiment.cost}.",
    )
    say = parser.add_argument
    say("--quick", action="store_true", help="a version of a few minutes")
    say("--out", type=Path, default=HERE, help="folder for the results (default: here)")
    say(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="processes (default: one per core)",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--list", action="store_true", help="list the points, and run none"
    )
    one.add_argument("--point", type=int, help="run one point, as a task of a cluster")
    one.add_argument(
        "--collect", action="store_true", help="run nothing, write the results"
    )
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"expected jobs to be at least 1, got {given.jobs}")
    try:
        _work(Runs(experiment, given.quick, given.out), given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{experiment.name}.py: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; finished points are kept\n")


def _work(runs: Runs, given: argparse.Namespace) -> None:
    done = [runs.read(i) is not None for i in range(len(runs.points))]
    if given.list:
        for index, point in enumerate(runs.points):
            print(
                f"{index:4}  {'finished' if done[index] else '-':<8}  {_words(point)}"
            )
        return
    for ending in ("json", "svg"):  # Check paths now: writing comes hours later.
        destination(runs.out / f"{runs.name}.{ending}")
    if given.point is not None:
        print(_words(runs.run(given.point)))
        return
    if not given.collect:
        with (
            closing(runs.run_all(given.jobs)) as new,
            tqdm(total=len(done), initial=sum(done), unit="point") as bar,
        ):
            for point in new:
                bar.set_postfix_str(_words({n: point[n] for n in runs.points[0]}))
                bar.update()
    points = runs.collect()["points"]
    claims = [*runs.experiment.claims(points)]
    for claim in claims:
        known = f"published {claim.published}" if claim.published else "ours"
        print(f"{claim.text}\n  {known} | {claim.found} | {claim.verdict}")
    if not claims:
        print("no claims: they need all points")
    here = sum(runs.read(i) is not None for i in range(len(done)))
    counts = f"{len(points)} of {len(done)} points, {here} of them run here"
    print(f"{runs.name}: {verdict(claims)} ({counts})\n{runs.out / runs.name}.svg")


def _words(point: Point) -> str:
    plain = {n: x for n, x in point.items() if not isinstance(x, list | dict)}
    return ", ".join(f"{name} {x}" for name, x in plain.items())
