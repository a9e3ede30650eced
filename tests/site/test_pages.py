"""Test in a browser that pages of the site are complete, legible and small."""

import gzip
import shutil
from collections import Counter
from functools import cache
from urllib.parse import urljoin, urlsplit

import pytest
from browser import served
from built import AXE, WIDTH, asks, search, until
from shift import shift

ALL = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
#: Rules of axe-core that depend on a theme's colours.
COLOURS = ["color-contrast", "link-in-text-block"]
#: One small page of each kind, because axe-core dominates the running time.
KINDS = (
    *("index", "course", "cheatsheet", "reproduce/ablation", "api/plots"),
    *("results", "results/speed", "results/tables"),
    *("figures/memory", "notebooks/09_chunks", "annotated/fwp"),
    *("annotated/equations", "annotated/source/layers/aft"),
)
#: The smallest font size in plots on a phone, by the beginning of a page's path.
PLOTS = {"results": 11, "reproduce/": 11, "kernels/": 11, "notebooks/": 9}


def test_every_kind_of_page_is_whole(look):
    # Something moves without reduced motion; otherwise the test could not fail.
    assert look("index.html").evaluate(asks.MOVES)
    seen = walk(look, [f"{name}.html" for name in KINDS], COLOURS)
    assert min(seen["plots"], seen["pressed"]) > 1


@pytest.mark.slow
def test_every_page_is_whole(look, pages):
    seen = walk(look, pages, ALL)
    assert min(seen["plots"], seen["pressed"]) > 10


def walk(look, pages, dark: list[str]) -> Counter:
    """Open each page with reduced motion, and assert that it has no visible defect.

    The window is first a phone with the light theme, then wide with the dark theme.

    Formulas are typeset, figures have the theme's colours, nothing is too wide or cut,
    no line has more than 80 letters, all lines have the same edges, letters of
    plots are legible, nothing moves by itself, the focus is visible, and axe-core
    finds no serious or critical violation.
    """
    axe = AXE.read_text("utf-8")
    wrong, seen = {}, Counter()
    # Open all folded parts, so that the test also checks hidden text.
    opened = "localStorage['fwlab.progress'] = '[\"everything\"]';"
    tab = look("404.html", motion="reduce", script=opened + asks.SMOOTH)
    base = tab.url.removesuffix("404.html")
    for page in pages:
        tab.set_viewport_size({"width": 390, "height": 844})
        tab.emulate_media(color_scheme="light")
        tab.goto(base + page, wait_until="load")
        tab.evaluate("document.fonts.ready.then(() => 0)")
        tab.evaluate(axe)
        found = tab.evaluate(asks.MOVES)
        known = tab.evaluate("document.fonts.check('1em KaTeX_Main')")
        if tab.locator(".katex").count() and not known:
            found.append("no font")
        found += examined(tab, "default", 390, ALL)
        wrongs = asks.RAW, asks.RED, asks.CUT_CELLS, asks.MISCOPIED
        for script in wrongs:
            found += tab.evaluate(script)
        for size in [size for kind, size in PLOTS.items() if page.startswith(kind)]:
            found += tab.evaluate(asks.LETTERS, size)
        seen["plots"] += tab.locator("svg:is([id^=fig], [id^=plot-])").count() > 0
        tab.set_viewport_size({"width": 1440, "height": 900})
        tab.emulate_media(color_scheme="dark")
        found += examined(tab, "slate", 1440, dark)
        for script in (asks.LONG, asks.EDGES):
            found += tab.evaluate(script)
        for button in tab.locator("article figure button:visible").all():
            if button.is_visible() and button.is_enabled():
                button.click()
                seen["pressed"] += 1
                found += tab.evaluate("document.getAnimations().length") * ["pressed"]
        tab.keyboard.press("Tab")  # Move the keyboard focus, which must be visible.
        found += tab.evaluate(asks.UNFOCUSED)
        found += tab.evaluate("globalThis.smooth")
        if found:
            wrong[page] = found
    assert wrong == {}
    return seen


def examined(tab, scheme: str, width: int, rules: list[str]) -> list[str]:
    """Return the violations of a page for a colour scheme and a window width."""
    tab.locator(f"body[data-md-color-scheme={scheme}]").wait_for()
    checks = (asks.FIGURES, asks.UNNAMED)
    found = [each for script in checks for each in tab.evaluate(script)]
    found += tab.evaluate(asks.RULES, {"rules": rules})
    return found + [f"{w} px wide" for w in [tab.evaluate(WIDTH)] if w > width]


def test_first_screens_stay_where_they_are(browser, address, site):
    """On a phone, the first screen is stable while scripts, fonts and figures load."""
    for page in ("index", "notebooks/04_delta_rule", "figures/memory"):
        assert shift(browser, f"{address}{page}.html") <= 0.01, page
    # A page that moves late exceeds the limit; otherwise the test could not fail.
    late = (
        "setTimeout(() => document.querySelector('h1').style.marginTop = '9rem', 999)"
    )
    html = (site / "figures" / "memory.html").read_text("utf-8")
    html = html.replace("</body>", f"<script>{late}</script></body>")
    assert shift(browser, f"{address}figures/memory.html", html) > 0.01


def test_a_table_is_sorted_by_a_column(look):
    """A click on a column header sorts a table; a second click reverses the order."""
    table = look("results/tables.html").locator("article table").first
    for sort in ("ascending", "descending"):
        table.get_by_role("button", name="Tokens/s").click()
        body = table.locator("tbody").first
        cells = body.locator("td:nth-child(6)").all_inner_texts()
        rates = [float(cell.replace(",", "").replace("–", "inf")) for cell in cells]
        assert len({*rates}) > 10
        assert rates == sorted(rates, reverse=sort == "descending")
        assert table.locator(f"th[aria-sort={sort}]").inner_text() == "Tokens/s"


def test_pages_are_light(look, site, pages):
    """Before interaction, pages load less than 400 kB, compressed and without fonts."""

    @cache
    def packed(name: str) -> int:
        return len(gzip.compress((site / name).read_bytes()))

    def named(page: str) -> set[str]:
        """Return the files that the HTML of a page loads."""
        urls = {urljoin(f"http://site/{page}", u) for u in pages[page].loads}
        paths = {urlsplit(u).path.lstrip("/") for u in urls if "http://site/" in u}
        # Drop the previous and the next page, which the head only links to.
        return {p for p in paths if (site / p).is_file() and ".html" not in p} | {page}

    # Scripts fetch more files; the theme's scripts fetch equal files on every page.
    tab = look("index.html")
    tab.wait_for_load_state("networkidle")
    entries = "performance.getEntriesByType('resource').map((e) => e.name)"
    base = tab.url.removesuffix("index.html")
    asked = {u.removeprefix(base) for u in tab.evaluate(entries) if "woff2" not in u}
    more = asked - named("index.html")
    sizes = {page: sum(map(packed, named(page) | more)) for page in pages}
    assert sizes["index.html"] < 300_000
    assert {page: size for page, size in sizes.items() if size >= 400_000} == {}


def test_site_opens_from_disk(look, site):
    """Formulas, links and search work from a file on disk, without a server."""
    tab = look("index.html", base=f"{site.as_uri()}/")
    assert tab.locator("article .katex").count() > 0
    search(tab, "triangular system")
    link = tab.locator(".md-search-result__link[href*='09_chunks.html?h=']")
    link.first.click()
    tab.wait_for_url("**/notebooks/09_chunks.html?h=*")
    tab.locator("article mark", has_text="triangular").first.wait_for()
    assert tab.locator("article .katex").count() > 0


#: Links of the page 404.html.
FROM_404 = ["index.html", "index.html", "course.html", "annotated/index.html"]


def test_page_that_is_not_there(browser, site, tmp_path):
    """The 404 page links to the site from any URL."""
    deep = shutil.copytree(site, tmp_path / "folder") / "notebooks" / "old"
    deep.mkdir()
    shutil.copy(site / "404.html", deep)
    with served(tmp_path) as root:
        tab = browser.new_page()
        tab.goto(f"{root}folder/notebooks/old/404.html")
        until(tab, "document.links[0].href.endsWith('/folder/index.html')")
        tab.evaluate(AXE.read_text("utf-8"))
        assert tab.evaluate(asks.RULES, {}) == []
        links = tab.evaluate("[...document.links].map((link) => link.href)")
        names = [link.removeprefix(f"{root}folder/") for link in links]
        assert names == FROM_404
        assert all((site / name).is_file() for name in names)
        tab.close()


def test_page_that_is_not_there_without_scripts(look):
    """Without scripts, the 404 page has styles and working links."""
    tab = look("404.html", java_script_enabled=False)
    assert tab.locator("noscript").is_visible()
    text = tab.locator("main").bounding_box()
    assert text["x"] > 100 and text["width"] < 640  # The text is a centred column.
    links = [link.get_attribute("href") for link in tab.locator("a").all()]
    assert links == FROM_404
