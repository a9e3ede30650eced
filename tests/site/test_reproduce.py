"""The pages of reproduced results say and draw what was run, and no more."""

import csv
import html
import json
import re
import sys
from dataclasses import replace
from statistics import mean, median

import pytest
from built import ROOT

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import reproduce as hook
from frame import Points
from reproduce import EXPERIMENTS

FOLDER = ROOT / "docs" / "reproduce"
RESULTS = {
    (name, version): FOLDER / f"{name}{'.quick' * (version == 'quick')}.json"
    for name in EXPERIMENTS
    for version in hook.VERSIONS
}


@pytest.fixture(scope="module")
def built(site) -> dict[str, str]:
    pages = (site / "reproduce").glob("*.html")
    return {path.stem: path.read_text("utf-8") for path in pages}


def test_pages_show_their_results(built):
    for (name, version), path in RESULTS.items():
        page = built[name]
        svg = f'<svg(?:(?!<svg).)*?id="plot-{name}-{version}-figure.*?</svg>'
        drawn = re.search(svg, page, re.DOTALL)
        assert bool(drawn) is path.exists()
        if not drawn:
            assert re.search(f"The {version} .+ has not been run yet", page)
            continue
        assert len(drawn[0].encode()) < 200_000
        results = json.loads(path.read_text("utf-8"))
        assert results["quick"] is (version == "quick")
        some = len(results["points"])
        partial = f"{some} of {results['grid']} points so far"
        assert (partial in page) is (some < results["grid"])
        text = html.unescape(page)
        claims = [*EXPERIMENTS[name].claims(Points(results["points"]))]
        for claim in claims:
            row = hook.Row(EXPERIMENTS[name], version, claim)
            if claim.holds is None:
                continue
            parts = f"<td>{claim.text}<", f">{claim.found}<", f"{claim.verdict}<"
            parts += f">{row.apart}<", claim.published
            kind = f"Protocol: {row.protocol}" if claim.published else "Claims of ours"
            assert any(
                f">{kind}<" in body
                and any(all(p in tr for p in parts) for tr in body.splitlines())
                for body in text.split("<tbody>")
            ), (name, version, claim)
        # Those not run are counted in the table of the version, and nowhere else.
        table = text.partition(html.unescape(drawn[0]))[2].partition("</table>")[0]
        said = re.findall(r"(\d+) claims? ha(?:s|ve) not been run yet\.", table)
        opened = sum(claim.holds is None for claim in claims)
        assert said == [str(opened)] * (opened > 0), (name, version)
        for run in results["runs"]:
            assert "+changes" not in run["commit"] and run["commit"] in page


#: Experiments that read a corpus.
TEXTS = (
    "erasing",
    "aft",
    "ablation",
    "language-model",
    "length",
    "rates",
    "replacing",
    "state-size",
)


def test_the_index_has_every_claim(built, site):
    """So has the file, and the sums above say as many."""
    page = html.unescape(built["index"])
    for each in hook._index():
        assert f"{each['experiment'].name}.html" in page and each["state"] in page
    rows = hook._rows()
    written = (site / "reproduce" / "claims.csv").read_text("utf-8")
    assert written == hook.table(), "python docs/hooks/reproduce.py writes this file"
    for each in csv.DictReader(written.splitlines()):
        assert bool(each["corpora"]) is (each["experiment"] in TEXTS)
    sums = re.findall(r"</svg> [a-z ]+ <b>(\d+)</b>", page)
    assert sum(map(int, sums)) == len(rows)
    # Every mark leads to its row, and is called and filled as that says.
    marks = re.findall('href="#(.+?)" title="(.+?)" aria-label=.+?fill="(.)', page)
    fills = {"published": "c", "ours": "n"}  # currentColor, none
    assert [mark[1:] for mark in marks] == [
        (f"{row.claim.verdict}: {row.claim.text}", fills[row.kind]) for row in rows
    ]
    listed = re.findall('<tr id="(.+?)" .+?</td><td>(.+?)</td>', page)
    assert listed == [(name, text.partition(": ")[2]) for name, text, _ in marks]
    assert not re.search("<!-- (reproduce|full|quick|given)", "".join(built.values()))


def test_claims_are_chosen_and_sorted(look):
    """Without a script all are there, and no choice that does nothing."""
    tab = look("reproduce/index.html", width=390)
    rows, shown = tab.locator(".fw-claims tbody tr"), "tbody tr:not([hidden])"
    every = rows.count()
    assert tab.evaluate("document.querySelector('.fw-box').clientHeight") < 844
    assert tab.evaluate("document.documentElement.scrollHeight") < 8000
    tab.select_option("[name=experiment]", "capacity")
    few = tab.locator(f".fw-claims {shown}").count()
    assert 0 < few < every
    assert tab.locator(".fw-choose output").text_content() == f"{few} of {every} claims"
    # A mark leads to its row, also to one that was left out.
    tab.locator(".fw-chart a[aria-label]").last.click()
    assert tab.evaluate("document.querySelector(':target').rowIndex") == every
    assert tab.locator(f".fw-claims {shown}").count() == every
    verdict = tab.locator(".fw-claims th button").last
    first = "document.querySelector('.fw-claims tbody tr').dataset.verdict"
    for last, sort in ((0, "ascending"), (-1, "descending")):
        verdict.click()
        assert tab.locator(f".fw-claims [aria-sort={sort}]").count() == 1
        ranks = [row.rank for row in hook._rows()]
        best = {row.verdict for row in hook._rows() if row.rank == sorted(ranks)[last]}
        assert tab.evaluate(first) in best
    plain = look("reproduce/index.html", java_script_enabled=False)
    assert plain.locator(f".fw-claims {shown}").count() == every
    assert not plain.locator(".fw-choose").is_visible()
    plain.locator(".fw-chart a[aria-label]").last.click()
    assert plain.locator(".fw-claims tr:target").is_visible()


def test_hyper_parameters_are_those_of_the_points():
    every = [
        *({"mixer": "delta", "lr": lr, "d": 8, "seed": 1} for lr in (0.1, 0.02)),
        {"mixer": "sum", "lr": 0.1, "d": 8, "seed": 2},
    ]
    made = replace(EXPERIMENTS["recall"], points=lambda quick: every)
    first = [{**every[0], "setup": {"batch": 3}}, *every[1:2]]
    assert hook._setup(
        made, "quick", [*first, {**every[2], "setup": {"batch": 3}}]
    ) == {
        "equal": {"batch": "3", "d": "8"},
        "columns": ["mixer", "lr", "seed"],
        "rows": [["delta", "0.02, 0.1", "1"], ["sum", "0.1", "2"]],
    }
    # A rate that all have is listed all the same.
    listed = hook._setup(made, "quick", [{**p, "lr": 0.1} for p in every])
    assert listed["equal"] == {"d": "8"}
    assert listed["rows"][1] == ["sum", "0.1", "2"]


# --- Numbers in the text ------------------------------------------------

#: Where a page speaks of our results, and what in it is no text.
SPOKEN = re.compile(r"^## (?:Result|Quick version)$.*?(?=^## |\Z)", re.M | re.S)
NO_TEXT = re.compile(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|<!-- reproduce: .*?-->")
NUMBER = r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(?: ?(?:%|million|thousand))?"
PAGES = [p for p in sorted((ROOT / "docs/reproduce").glob("*.md")) if p.stem != "index"]


def said(text: str) -> list[tuple[str, str, str, str]]:
    """Numbers that are followed by what they are: version, name and expression."""
    return re.findall(f"{NUMBER}{hook.CHECKED.pattern}", text)


def unsaid(text: str) -> list[str]:
    """Decimal fractions and per cents without."""
    plain = NO_TEXT.sub("", "".join(SPOKEN.findall(text)))
    plain = re.sub(f"{NUMBER}{hook.CHECKED.pattern}", "", plain)
    found = re.finditer(rf"{NUMBER}", plain)
    return [m[0] for m in found if "." in m[1] or "%" in m[0]]


def value(name: str, version: str, expression: str) -> float:
    """Evaluate an expression: `of("loss", mixer="delta")` are numbers of points."""
    points = json.loads(RESULTS[name, version].read_text("utf-8"))["points"]

    def of(field, **wanted):
        same = [p for p in points if all(p[k] == v for k, v in wanted.items())]
        assert same, f"{name} has no points with {wanted}"
        return [p[field] for p in same]

    known = {"of": of, "median": median, "mean": mean, "min": min, "max": max}
    return eval(
        expression,
        {"__builtins__": {"abs": abs, "len": len, "sum": sum, "zip": zip}, **known},
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_of_the_text_are_those_of_the_results(page):
    """Compare `2.34<!-- quick: median(of("loss", mixer="delta")) -->` with its results.

    Settings, and numbers that others have published, are `<!-- given -->`. Of the
    results of another page: `2.82<!-- full state-size: ... -->`.
    """
    text = page.read_text("utf-8")
    for number, version, name, expression in said(text):
        if version:
            digits = len(number.partition(".")[2])
            ours = f"{value(name or page.stem, version, expression):,.{digits}f}"
            assert number in (ours, ours.replace(",", "")), expression
    assert unsaid(text) == []


def test_a_number_that_is_not_checked_is_found():
    text = "## Result\n\nIt ends at 2.5, `1.5` and 30 %, with 12 keys.\n\n## Other\n\n7.5\n"
    assert unsaid(text) == ["2.5", "30 %"]
    marked = text.replace("2.5", "2.5<!-- full: 5 / 2 -->").replace(
        "30 %", "30 %<!-- given -->"
    )
    assert unsaid(marked) == []
    assert said(marked) == [("2.5", "full", "", "5 / 2"), ("30", "", "", "")]
    assert said("7<!-- full length: 3 + 4 -->") == [("7", "full", "length", "3 + 4")]


#: `rates` draws places, which one seed need not change.
MARKS = [name for name in EXPERIMENTS if hook._load(name, True) and name != "rates"]


@pytest.mark.parametrize("name", MARKS)
def test_only_what_was_run_is_drawn(name):
    """As many marks as seeds; one point more is another drawing."""
    points = hook._load(name, True)["points"]

    def drawing(points):
        points = Points(points)
        figure = EXPERIMENTS[name].draw(points)
        return [
            (tuple(line.get_xdata()), tuple(line.get_ydata()))
            for ax in figure.axes
            for line in ax.lines
        ]

    assert str(drawing(points[1:])) != str(drawing(points))


def test_missing_results_draw_nothing(monkeypatch):
    monkeypatch.setattr(hook, "_load", lambda name, quick: None)
    shown = hook._fill("capacity", "full")
    assert "has not been run yet" in shown and "<svg" not in shown
    assert {each["state"] for each in hook._index()} == {"not run yet"}
