"""Puts results of `fwlab reproduce` in place of `<!-- reproduce: ... -->`.

`NAME full` and `NAME quick` are the figure and the claims of an experiment,
`index` is a table of all claims. What was not run is not drawn.
"""

import re

import plots
from repository import ROOT
from templates import render

from fwlab.experiments import EXPERIMENTS, Experiment, results, verdict

RESULTS = ROOT / "docs" / "results"
MARK = re.compile(r"<!-- reproduce: (\S+) ?(\S*) -->")
VERSIONS = {"full": RESULTS, "quick": RESULTS / "quick"}


def on_page_content(html, page, config, files):
    """Here, and not before: converting Markdown would change a drawing."""
    return MARK.sub(lambda mark: _fill(*mark.groups()), html)


def _fill(name: str, version: str) -> str:
    if name == "index":
        return render("reproduce/index.html", experiments=_index())
    return _result(EXPERIMENTS[name], version)


def _index() -> list[dict]:
    """Every experiment with its best results."""
    found = []
    for experiment in EXPERIMENTS.values():
        full, quick = (_read(experiment, version) for version in VERSIONS)
        results = full or quick
        claims = experiment.claims(results["points"]) if results else []
        state = "not yet run"
        if results:
            state = verdict(claims)
            if not full:
                state += ", quick version"
            elif len(full["points"]) < full["grid"]:
                state += f", {len(full['points'])} of {full['grid']} points"
        found.append({"experiment": experiment, "claims": claims, "state": state})
    return found


def _result(experiment: Experiment, version: str) -> str:
    results = _read(experiment, version)
    claims = experiment.claims(results["points"]) if results else []
    return render(
        "reproduce/result.html",
        experiment=experiment,
        version=version,
        results=results,
        claims=claims,
        seeds=sorted({point["seed"] for point in results["points"]} if results else ()),
        figure=_figure(experiment, version, results, claims) if results else "",
    )


def _figure(experiment: Experiment, version: str, results: dict, claims) -> str:
    with plots.styled():
        said = "; ".join(f"{claim.text}: {claim.found}" for claim in claims)
        return plots.drawn(
            experiment.draw(results["points"]),
            f"{experiment.name}-{version}",
            f"{experiment.title}: {said}.".replace("$", ""),
        )


def _read(experiment: Experiment, version: str) -> dict | None:
    return results(experiment, VERSIONS[version])
