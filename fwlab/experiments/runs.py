"""Running the points of an experiment, in any number of processes.

Each finished point is a file of its own, so a run that is stopped, in any
way, continues where it was, and several machines can share a folder. Points
and results have a checksum, except those of older versions.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

from fwlab import plots
from fwlab.experiments.experiment import Experiment, Point
from fwlab.files import destination, read_json, replacing, write_json
from fwlab.provenance import provenance

#: Names of texts by the first 12 digits of their SHA-256; text.py adds those
#: that it loads.
TEXTS = {
    "86c4e6aa9db7": "Tiny Shakespeare",
    "8a73136f699d": "Tiny Shakespeare, the first 300,000 characters",
}


class Runs:
    """The points of an experiment, and those of them that are finished.

    - `experiment`: what to run.
    - `quick`: the quick version instead of the full one.
    - `out`: the folder for the results.
    """

    def __init__(self, experiment: Experiment, quick: bool, out: Path):
        self.experiment, self.quick, self.out = experiment, quick, out
        self.points = experiment.points(quick)
        version = "quick" if quick else "full"
        self.folder = out / ".points" / experiment.name / version

    def read(self, index: int) -> dict[str, Any] | None:
        """A finished point with its provenance; None = not finished.

        A point whose settings have changed since is not finished. Nor is one
        whose file is damaged: a warning says so.
        """
        path = self._path(index)
        if not path.is_file():
            return None
        try:
            saved = _sound(path, self.experiment, lambda saved: [_point(saved)])
        except ValueError as error:
            warnings.warn(f"{error}; its point has to run again", stacklevel=1)
            return None
        return saved if self._is(index, saved["point"]) else None

    def run(self, index: int, made_by: dict[str, Any] | None = None) -> Point:
        """Run a point and save it, in one thread.

        - `made_by`: its provenance; None = find it out.
        - Returns it with what running it has found, its time in seconds (on
          the clock, and of the processor) and its `setup`.
        """
        if not 0 <= index < len(self.points):
            raise ValueError(
                f"expected a point from 0 to {len(self.points) - 1}, got {index}"
            )
        path = destination(self._path(index))
        torch.set_num_threads(1)
        # Before the point runs: the source may change while it does.
        made_by = made_by or self._provenance()
        point = self.points[index]
        start, start_cpu = time.perf_counter(), time.process_time()
        point = {**point, **self.experiment.run(point)}
        point["seconds"] = round(time.perf_counter() - start, 3)
        point["cpu_seconds"] = round(time.process_time() - start_cpu, 3)
        if setup := self.experiment.setup(self.points[index]):
            point["setup"] = dict(setup)
        write_json(path, _sealed({"point": point, "run": made_by}))
        return point

    def run_all(self, jobs: int) -> Generator[Point, None, None]:
        """Run what is not finished; yields each point when it is."""
        left = [i for i in range(len(self.points)) if self.read(i) is None]
        if not left:
            return
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        with ProcessPoolExecutor(
            min(jobs, len(left)), context, initializer=_end_with, initargs=(stop,)
        ) as pool:
            about = self.experiment.name, self.quick, self.out
            made_by = self._provenance()
            waiting = [pool.submit(_run, *about, made_by, index) for index in left]
            try:
                for future in as_completed(waiting):
                    yield future.result()
            except BaseException:
                stop.set()
                raise

    def collect(self) -> dict[str, Any]:
        """Write the results and the figure of all finished points.

        Points that are not finished here keep what an earlier results file
        in the folder says of them, so that a grid can be run in parts.

        - Returns the results.
        - Raises `ValueError` if no point is finished, if points are missing
          and the earlier file is damaged, or if points have read different
          texts under one name.
        """
        finished = {i: s for i in range(len(self.points)) if (s := self.read(i))}
        if 0 < len(finished) < len(self.points):
            finished = self._earlier() | finished
        saved = [each for _, each in sorted(finished.items())]
        if not saved:
            raise ValueError(
                f"nothing to collect: no point of {self.experiment.name} is "
                f"finished in {self.folder}"
            )
        runs: list[dict[str, Any]] = []
        points = []
        for each in saved:
            if each["run"] not in runs:
                runs.append(each["run"])
            points.append({**each["point"], "run": runs.index(each["run"])})
        self._check_texts(points)
        collected = {
            "experiment": self.experiment.name,
            "quick": self.quick,
            "grid": len(self.points),
            "seconds": round(sum(point["seconds"] for point in points), 1),
            "runs": runs,
            "points": points,
        }
        collected = _sealed(collected)
        name = self.experiment.name
        with replacing(self.out / f"{name}.json") as part:
            part.write_text(_one_line_each(collected), encoding="utf-8")
        with mpl.rc_context(), replacing(self.out / f"{name}.svg") as part:
            plots.style()
            figure = self.experiment.draw(points)
            figure.savefig(part, format="svg", metadata={"Date": None})
        return collected

    def _check_texts(self, points: list[Point]) -> None:
        """Without a network, another text has the same name."""
        for name, texts in texts_of(points).items():
            if len(texts) > 1:
                raise ValueError(
                    f"points of {self.experiment.name} have read {len(texts)} texts "
                    f"as corpus {name!r} ({'; '.join(texts)}): use another folder "
                    "for each text"
                )

    def _earlier(self) -> dict[int, dict[str, Any]]:
        """Points of an earlier results file, as `read` returns them."""
        try:
            earlier = results(self.experiment, self.out) or {"points": []}
        except ValueError as error:
            raise ValueError(f"{error}; move it away to collect without it") from None
        kept = {}
        for point in earlier["points"]:
            run = earlier["runs"][point.pop("run")]
            for index in range(len(self.points)):
                if self._is(index, point):
                    kept[index] = {"point": point, "run": run}
        return kept

    def _is(self, index: int, point: Point) -> bool:
        settings = self.points[index].items()
        return all(point.get(key) == value for key, value in settings)

    def _provenance(self) -> dict[str, Any]:
        """The provenance that all points share."""
        command = f"fwlab reproduce {self.experiment.name}" + " --quick" * self.quick
        return {**provenance(command), "threads": 1}

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:04}.json"


def results(experiment: Experiment, folder: Path) -> dict[str, Any] | None:
    """Load what `Runs.collect` has written to a folder; None = nothing yet.

    - Raises `ValueError`, which names the file, if it is damaged.
    """
    path = folder / f"{experiment.name}.json"
    if not path.is_file():
        return None
    return _sound(path, experiment, lambda data: _points(data, experiment.name))


def texts_of(points: Iterable[Point]) -> dict[str, list[str]]:
    """The texts that points have read, by the name of the corpus in their settings.

    - Returns for each corpus its texts in words, more than one if points differ.
    """
    read: dict[str, list[str]] = {}
    for point in points:
        if corpus := point.get("corpus"):
            texts = read.setdefault(corpus, [])
            if (text := _text(point)) not in texts:
                texts.append(text)
    return read


def _text(point: Point) -> str:
    digest = point.get("corpus_sha256")
    if digest is None:
        return "corpus not recorded"
    # Points of older versions have no name.
    name = point.get("corpus_name") or TEXTS.get(digest, "another text")
    return f"{name}, SHA-256 {digest}…"


def _sealed(data: dict[str, Any]) -> dict[str, Any]:
    """Plain data with its checksum."""
    return {**data, "sha256": _checksum(data)}


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _sound(
    path: Path, experiment: Experiment, points: Callable[[Any], list[Point]]
) -> dict[str, Any]:
    """Load what `_sealed` has made.

    - `points`: the points of the data, which can be anything.
    - Raises `ValueError`, which names the file, if it is damaged.
    """
    data = read_json(path)
    try:
        checksum = data.pop("sha256", None)
        contained = points(data)
        if checksum is None:  # of an older version: is all there that is needed?
            experiment.claims(contained)
    except Exception:
        raise ValueError(
            f"{path} is damaged: not what fwlab reproduce {experiment.name} writes"
        ) from None
    if checksum not in (None, _checksum(data)):
        raise ValueError(f"{path} is damaged: its checksum does not match")
    return data


def _point(saved: dict[str, Any]) -> Point:
    """A point with its provenance."""
    point, run = saved["point"], saved["run"]
    return {**point, "seconds": point["seconds"] + 0.0, "run": {**run}}


def _points(collected: dict[str, Any], name: str) -> list[Point]:
    if collected["experiment"] != name or collected["grid"] < 1:
        raise ValueError
    runs = collected["runs"]
    return [
        _point({"point": point, "run": runs[point["run"]]})
        for point in collected["points"]
    ]


def _run(
    name: str,
    quick: bool,
    out: Path,
    made_by: dict[str, Any],
    index: int,
) -> Point:
    from fwlab.experiments import EXPERIMENTS

    return Runs(EXPERIMENTS[name], quick, out).run(index, made_by)


def _end_with(stop: Any) -> None:
    """End this process with the one that started it, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while parent.is_alive() and not stop.wait(0.5):
            pass
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=watch, daemon=True).start()


def _one_line_each(results: dict[str, Any]) -> str:
    """JSON with one line for each point and run."""
    lists = ("runs", "points")
    text = json.dumps({**results, **dict.fromkeys(lists)}, indent=1, ensure_ascii=False)
    for name in lists:
        lines = ",\n".join(
            f"  {json.dumps(each, ensure_ascii=False)}" for each in results[name]
        )
        text = text.replace(f'"{name}": null', f'"{name}": [\n{lines}\n ]')
    return text + "\n"
