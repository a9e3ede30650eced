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


@pytest.fixture(scope="module")
def built(site) -> dict[str, str]:
    return {
        path.stem: path.read_text("utf-8") for path in (site / "reproduce").glob("*")
    }


def test_pages_show_their_results(built):
    for (name, version), path in RESULTS.items():
        page = built[name]
        svg = f'<svg(?:(?!<svg).)*?id="plot-{name}-{version}-figure.*?</svg>'
        drawn = re.search(svg, page, re.DOTALL)
        assert bool(drawn) is path.exists()
        if not drawn:
            assert version == "full" and "The full grid has not been run yet." in page
            continue
        assert len(drawn[0].encode()) < 200_000
        results = json.loads(path.read_text("utf-8"))
        assert results["quick"] is (version == "quick")
        some = len(results["points"])
        partial = f"{some} of {results['grid']} points so far"
        assert (partial in page) is (some < results["grid"])
        text = html.unescape(page)
        for claim in EXPERIMENTS[name].claims(results["points"]):
            for part in (claim.text, claim.source, claim.found):
                assert f"<td>{part}</td>" in text, (name, version)
        for run in results["runs"]:
            assert "+changes" not in run["commit"] and run["commit"] in page


def test_the_index_has_every_claim(built):
    page = html.unescape(built["index"])
    for each in hook._index():
        assert f"{each['experiment'].name}.html" in page and each["state"] in page
        for claim in each["claims"]:
            assert f"<td>{claim.text}</td>" in page
    assert "<!-- reproduce:" not in "".join(built.values())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_only_what_was_run_is_drawn(name):
    """As many marks as seeds; one point more is another drawing."""
    points = json.loads(RESULTS[name, "quick"].read_text("utf-8"))["points"]

    def drawing(points):
        figure = EXPERIMENTS[name].draw(points)
        return [
            (tuple(line.get_xdata()), tuple(line.get_ydata()))
            for ax in figure.axes
            for line in ax.lines
        ]

    assert str(drawing(points[1:])) != str(drawing(points))


def test_missing_results_draw_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(hook.VERSIONS, "full", tmp_path)
    shown = hook._fill("capacity", "full")
    assert "has not been run yet" in shown and "<svg" not in shown
    monkeypatch.setitem(hook.VERSIONS, "quick", tmp_path)
    assert {each["state"] for each in hook._index()} == {"not yet run"}
