"""Insert results of docs/reproduce/NAME.py in place of `<!-- reproduce: ... -->`.

`NAME` is the figure, the claims and the hyper-parameters of an experiment; `index`
draws all claims, and `claims` is a table of them. The file of this table is written by
`python docs/hooks/reproduce.py`. What was not run is not drawn. `<!-- full: ... -->`
after a number in a page computes the number from the results;
tests/site/test_reproduce.py compares the two.
"""

import csv
import io
import re
import sys
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import plots
from repository import ROOT
from templates import render

sys.path.insert(0, str(ROOT / "docs" / "reproduce"))
from frame import NAMES, Claim, Experiment, Points, load, results, texts_of, verdict

MARK = re.compile(r"<!-- reproduce: (\S+) -->")
#: A mark after a number: an expression that computes it from results, or "given".
#: The expression may follow the name of another experiment's page.
CHECKED = re.compile(r"<!-- (?:full(?: (\S+))?: (.+?)|given) -->")
EXPERIMENTS = {name: load(name) for name in NAMES}
TABLE = ROOT / "docs" / "reproduce" / "claims.csv"
COLUMNS = (
    *("experiment", "claim", "published", "ours: median [min, max]"),
    *("seeds apart", "protocol", "kind", "verdict", "corpora"),
)
#: Verdicts in the order in which the table of claims sorts them.
VERDICTS = (
    *("reproduced", "holds", "seeds overlap", "one seed", "not trained far enough"),
    *("not", "does not", "not run"),
)
#: Learning rates, which the table lists per mixer even if all mixers share one.
RATES = ("lr", "rate")


class Row(NamedTuple):
    """Represent a row of the claims table: an experiment and one of its claims."""

    experiment: Experiment
    claim: Claim

    @property
    def kind(self) -> str:
        return "published" if self.claim.published else "ours"

    @property
    def verdict(self) -> str:
        return f"{self.kind}: {self.claim.verdict}"

    @property
    def rank(self) -> int:
        return VERDICTS.index(self.claim.verdict)

    @property
    def apart(self) -> str:
        return {True: "yes", False: "no", None: "–"}[self.claim.apart]

    @property
    def corpora(self) -> str:
        """Return the names of the corpora that the experiment has used."""
        results = _load(self.experiment.name, False)
        return "; ".join(_texts(results["points"] if results else Points()))

    @property
    def protocol(self) -> str:
        """Return the difference from the published protocol, or "–" for our claims."""
        return self.claim.protocol or "the same" if self.claim.published else "–"


def on_files(files, config):
    _load.cache_clear()  # Results may change while `mkdocs serve` runs.
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri.startswith("reproduce/"):
        page.meta.setdefault("styles", []).append("styles/reproduce.css")
        page.meta["hide"] = ["navigation"]  # The tables need the full page width.
    return markdown


def on_page_content(html, page, config, files):
    """Insert drawings into the HTML of a page, since Markdown would change them."""
    html = MARK.sub(lambda mark: _fill(*mark.groups()), html)
    return CHECKED.sub("", html)


def _fill(name: str) -> str:
    if name in ("index", "claims"):
        kinds: dict[str, Counter] = {"published": Counter(), "ours": Counter()}
        for row in sorted(_rows(), key=lambda row: row.rank):
            kinds[row.kind][row.claim.verdict] += 1
        return render(f"reproduce/{name}.html", experiments=_index(), kinds=kinds)
    return _result(EXPERIMENTS[name])


def _index() -> list[dict]:
    """List all experiments with claims, verdict and number of finished runs."""
    found = []
    for experiment in EXPERIMENTS.values():
        results = _load(experiment.name, False)
        claims = _claims(experiment, results)
        state = verdict(claims) if results else "not run yet"
        grid = len(experiment.points(False))
        if results and len(results["points"]) < grid:
            state += f"; {len(results['points'])} of {grid} points"
        rows = [Row(experiment, claim) for claim in claims]
        found.append({"experiment": experiment, "state": state, "rows": rows})
    return found


def _rows() -> list[Row]:
    return [row for each in _index() for row in each["rows"]]


def table() -> str:
    """Return the table of all claims as CSV text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in _rows():
        name, claim = row.experiment.name, row.claim
        first = (name, claim.text, claim.published, claim.found, row.apart)
        writer.writerow([*first, row.protocol, row.kind, claim.verdict, row.corpora])
    return text.getvalue()


def _result(experiment: Experiment) -> str:
    results = _load(experiment.name, False)
    points = results["points"] if results else Points()
    claims = _claims(experiment, results)
    return render(
        "reproduce/result.html",
        experiment=experiment,
        results=results,
        grid=len(experiment.points(False)),
        rows=[Row(experiment, claim) for claim in claims],
        seeds=sorted({point["seed"] for point in points}),
        figure=_figure(experiment, results, claims) if results else "",
        texts=_texts(points),
        setup=_setup(experiment, points) if results else None,
    )


def _texts(points: Points) -> list[str]:
    """Return the name and SHA-256 of every training text."""
    return [text for every in texts_of(points).values() for text in every]


def _setup(experiment: Experiment, points: Points) -> dict[str, Any]:
    """Return the recorded hyper-parameters as a table with a row per mixer.

    - Returns `equal` (texts by name where all rows are equal), `columns`, and
      `rows` of texts. Settings with string values name the rows.
    """
    known = experiment.points(False)[0]
    words = [name for name, value in known.items() if isinstance(value, str)]
    found: dict[tuple, dict[str, dict]] = {}
    for point in points:
        settings = {name: point.get(name) for name in known}
        row = found.setdefault(tuple(settings[name] for name in words), {})
        for name, value in {**point.get("setup", {}), **settings}.items():
            row.setdefault(name, {})[value] = None
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    cells = {
        name: [_listed(row.get(name, {})) for row in found.values()] for name in names
    }
    equal = {name: each[0] for name, each in cells.items() if len({*each}) == 1}
    columns = [
        *(name for name in words if name not in equal),
        *(n for n in names if n not in words and (n not in equal or n in RATES)),
    ]
    rows = [list(row) for row in zip(*(cells[n] for n in columns), strict=True)]
    return {
        "equal": {name: text for name, text in equal.items() if name not in columns},
        "columns": columns,
        "rows": rows,
    }


def _listed(values) -> str:
    """Format the values of a setting as text, or only their range if there are many."""
    known = [value for value in values if value not in (None, "")]
    if all(isinstance(value, int | float) for value in known):
        known.sort()
    texts = [f"{x:g}" if isinstance(x, float) else str(x) for x in known]
    if len(texts) > 6:
        return f"{texts[0]} to {texts[-1]} ({len(texts)} values)"
    return ", ".join(texts) or "–"


def _figure(experiment: Experiment, results: dict, claims) -> str:
    with plots.styled():
        said = "; ".join(f"{claim.text}: {claim.found}" for claim in claims)
        return plots.drawn(
            experiment.draw(results["points"]),
            experiment.name,
            f"{experiment.title}: {said}.".replace("$", ""),
        )


def _claims(experiment: Experiment, results: dict | None) -> list[Claim]:
    return [*experiment.claims(results["points"])] if results else []


_load = cache(results)

if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
