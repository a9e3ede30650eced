"""Test that pages of reproduced results state and draw only the stored points."""

import html
import json
import re
from statistics import mean, median

import pytest
import reproduce as hook
from built import ROOT
from frame import Points
from reproduce import EXPERIMENTS

FOLDER = ROOT / "docs" / "reproduce"
RESULTS = {name: FOLDER / f"{name}.json" for name in EXPERIMENTS}


@pytest.fixture(scope="module")
def built(site) -> dict[str, str]:
    pages = (site / "reproduce").glob("*.html")
    return {path.stem: path.read_text("utf-8") for path in pages}


def test_pages_show_their_results(built):
    for name, path in RESULTS.items():
        page = html.unescape(built[name])
        drawn = f'id="plot-{name}-figure' in page
        assert drawn is path.exists()
        if not drawn:
            assert "It has not been run yet" in page
            continue
        results = json.loads(path.read_text("utf-8"))
        some = len(results["points"])
        grid = len(EXPERIMENTS[name].points(False))
        partial = f"{some} of {grid} points so far"
        assert (partial in page) is (some < grid)
        rows = re.findall("<tr>.*", page)
        for claim in EXPERIMENTS[name].claims(Points(results["points"])):
            parts = f"<td>{claim.text}<", f">{claim.found}<", f"{claim.verdict}<"
            if claim.holds is not None:
                shown = any(all(p in row for p in parts) for row in rows)
                assert shown, (name, claim)
        for run in results["runs"]:
            assert "+changes" not in run["commit"] and run["commit"] in page


def test_the_index_has_every_claim(built, site):
    """The index page and the CSV file list every claim, and the totals are correct."""
    page = html.unescape(built["index"])
    for each in hook._index():
        assert f"{each['experiment'].name}.html" in page and each["state"] in page
    rows = hook._rows()
    written = (site / "reproduce" / "claims.csv").read_text("utf-8")
    assert written == hook.table(), "python docs/hooks/reproduce.py writes this file"
    sums = re.findall(r"</svg> [a-z ]+ <b>(\d+)</b>", page)
    assert sum(map(int, sums)) == len(rows)
    # Each mark links to the row of its claim, and has the claim's title and fill.
    marks = re.findall('href="#(.+?)" title="(.+?)" aria-label=.+?fill="(.)', page)
    fills = {"published": "c", "ours": "n"}  # "c" is currentColor, "n" is none.
    assert [mark[1:] for mark in marks] == [
        (f"{row.claim.verdict}: {row.claim.text}", fills[row.kind]) for row in rows
    ]
    listed = re.findall('<tr id="(.+?)" .+?</td><td>(.+?)</td>', page)
    assert listed == [(name, text.partition(": ")[2]) for name, text, _ in marks]
    assert not re.search("<!-- (reproduce|full|given)", "".join(built.values()))


def test_claims_are_chosen_and_sorted(look):
    """The index page filters and sorts claims, and each mark links to its row."""
    tab = look("reproduce/index.html", width=390)
    rows, shown = tab.locator(".fw-claims tbody tr"), "tbody tr:not([hidden])"
    every = rows.count()
    assert tab.evaluate("document.documentElement.scrollHeight") < 8000
    tab.select_option("[name=experiment]", "capacity")
    few = tab.locator(f".fw-claims {shown}").count()
    assert 0 < few < every
    assert tab.locator(".fw-choose output").text_content() == f"{few} of {every} claims"
    # A mark leads to its row, even if a filter hides the row.
    tab.locator(".fw-chart a[aria-label]").last.click()
    assert tab.evaluate("document.querySelector(':target').rowIndex") == every
    assert tab.locator(f".fw-claims {shown}").count() == every
    first = "document.querySelector('.fw-claims tbody tr').dataset.verdict"
    ranks = {row.verdict: row.rank for row in hook._rows()}
    for extreme, sort in ((min, "ascending"), (max, "descending")):
        tab.locator(".fw-claims th button").last.click()
        assert tab.locator(f".fw-claims [aria-sort={sort}]").count() == 1
        assert ranks[tab.evaluate(first)] == extreme(ranks.values())
    plain = look("reproduce/index.html", java_script_enabled=False)
    assert plain.locator(f".fw-claims {shown}").count() == every
    assert not plain.locator(".fw-choose").is_visible()


# --- Numbers in the text ------------------------------------------------

#: Patterns for the section with our results, and for code, formulas and links.
SPOKEN = re.compile(r"^## Result$.*?(?=^## |\Z)", re.M | re.S)
NO_TEXT = re.compile(r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|<!-- reproduce: .*?-->")
NUMBER = r"(?<![\w.,])(\d[\d,]*(?:\.\d+)?)(?: ?(?:%|million|thousand))?"
PAGES = [p for p in sorted((ROOT / "docs/reproduce").glob("*.md")) if p.stem != "index"]


def said(text: str) -> list[tuple[str, str, str]]:
    """List (number, page, expression) for each number with a source comment."""
    return re.findall(f"{NUMBER}{hook.CHECKED.pattern}", text)


def unsaid(text: str) -> list[str]:
    """In result sections, list decimals and percentages without a source comment."""
    plain = NO_TEXT.sub("", "".join(SPOKEN.findall(text)))
    plain = re.sub(f"{NUMBER}{hook.CHECKED.pattern}", "", plain)
    found = re.finditer(rf"{NUMBER}", plain)
    return [m[0] for m in found if "." in m[1] or "%" in m[0]]


def value(name: str, expression: str) -> float:
    """Evaluate an expression; `of("loss", mixer="delta")` selects stored losses."""
    points = json.loads(RESULTS[name].read_text("utf-8"))["points"]

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
    """Numbers such as `2.34<!-- full: median(of("loss")) -->` equal their expressions.

    Settings and published numbers are marked `<!-- given -->`. Results of another
    page name that page: `2.82<!-- full state-size: ... -->`.
    """
    text = page.read_text("utf-8")
    for number, name, expression in said(text):
        if expression:
            digits = len(number.partition(".")[2])
            ours = f"{value(name or page.stem, expression):,.{digits}f}"
            assert number in (ours, ours.replace(",", "")), expression
    assert unsaid(text) == []


#: Their figures show the best rates only, so removing a result can have no effect.
CHOSEN = "rates", "erasing"
MARKS = [name for name in EXPERIMENTS if hook._load(name, True) and name not in CHOSEN]


@pytest.mark.parametrize("name", MARKS)
def test_only_what_was_run_is_drawn(name):
    """The figure of an experiment changes if one result is removed."""
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
    shown = hook._fill("capacity")
    assert "has not been run yet" in shown and "<svg" not in shown
    assert {each["state"] for each in hook._index()} == {"not run yet"}
