"""The pages of reproduced results say and draw what was run, and no more."""

import html
import json
import re
import sys

import pytest
from built import ROOT

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import reproduce as hook

from fwlab.experiments import EXPERIMENTS

RESULTS = {
    (name, version): folder / f"{name}.json"
    for name in EXPERIMENTS
    for version, folder in hook.VERSIONS.items()
}


def text_of(source: str) -> str:
    return html.unescape(source)


@pytest.fixture(scope="module")
def built(site) -> dict[str, str]:
    return {
        path.stem: path.read_text("utf-8") for path in (site / "reproduce").glob("*")
    }


@pytest.mark.parametrize(("name", "version"), RESULTS)
def test_a_page_shows_its_results(built, name, version):
    page, path = built[name], RESULTS[name, version]
    drawn = f'id="plot-{name}-{version}-figure' in page
    assert drawn is path.exists()
    if not drawn:
        assert version == "full" and "The full grid has not been run yet." in page
        return
    results = json.loads(path.read_text("utf-8"))
    assert results["quick"] is (version == "quick")
    some = len(results["points"])
    partial = f"{some} of {results['grid']} points so far"
    assert (partial in page) is (some < results["grid"])
    for claim in EXPERIMENTS[name].claims(results["points"]):
        for part in (claim.text, claim.source, claim.found):
            assert f"<td>{part}</td>" in text_of(page)
    for run in results["runs"]:
        assert "+changes" not in run["commit"] and run["commit"] in page


def test_the_index_has_every_claim(built):
    page = text_of(built["index"])
    for each in hook._index():
        assert f"{each['experiment'].name}.html" in page and each["state"] in page
        for claim in each["claims"]:
            assert f"<td>{claim.text}</td>" in page
    assert "<!-- reproduce:" not in "".join(built.values())


@pytest.mark.parametrize(("name", "version"), RESULTS)
def test_only_what_was_run_is_drawn(name, version):
    """As many marks as seeds; one point more is another drawing."""
    if not RESULTS[name, version].exists():
        pytest.skip("not yet run")
    points = json.loads(RESULTS[name, version].read_text("utf-8"))["points"]

    def drawing(points):
        figure = EXPERIMENTS[name].draw(points)
        return [
            (tuple(line.get_xdata()), tuple(line.get_ydata()))
            for ax in figure.axes
            for line in ax.lines
        ]

    assert str(drawing(points)) == str(drawing(points))
    assert str(drawing(points[1:])) != str(drawing(points))


def test_missing_results_draw_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(hook.VERSIONS, "full", tmp_path)
    shown = hook._fill("capacity", "full")
    assert "has not been run yet" in shown and "<svg" not in shown
    monkeypatch.setitem(hook.VERSIONS, "quick", tmp_path)
    assert {each["state"] for each in hook._index()} == {"not yet run"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_narrow_page_does_not_scroll_sideways(look, name, scheme):
    tab = look(f"reproduce/{name}.html", scheme=scheme, width=390)
    root = "document.documentElement"
    assert tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
    for drawing in tab.locator('article svg[role="img"]').all():
        box = drawing.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_marks_stay_readable():
    """Every committed figure stays small."""
    for name, version in RESULTS:
        path = RESULTS[name, version]
        if path.exists():
            shown = hook._result(EXPERIMENTS[name], version)
            svg = re.search("<svg.*</svg>", shown, re.DOTALL)
            assert svg and len(svg[0].encode()) < 200_000
