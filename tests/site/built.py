"""Define constants and helpers for the tests of the built site.

They are not in a conftest.py: there are several, and an import of `conftest` could
find any of them.
"""

import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.utils.yaml import yaml_load

ROOT = Path(__file__).resolve().parents[2]
#: The URLs of the repository and the site, from the variables that mkdocs.yml reads.
REPOSITORY, SITE = os.getenv("REPO_URL", ""), os.getenv("SITE_URL", "")
SETTINGS = yaml_load((ROOT / "mkdocs.yml").read_text("utf-8"))
#: The new paths of pages that have moved, by old path.
(MOVED,) = (
    {
        re.sub(r"\.\w+$", ".html", old): re.sub(r"\.\w+$", ".html", new)
        for old, new in plugin["redirects"]["redirect_maps"].items()
    }
    for plugin in SETTINGS["plugins"]
    if "redirects" in plugin
)
#: JavaScript that returns a page's width, including the part outside the window.
WIDTH = "document.documentElement.scrollWidth"
AXE = ROOT / ".cache" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
#: A timeout in milliseconds that is long enough for a busy machine.
PATIENCE = 120_000
#: The JavaScript expressions of `asks.js`, by name, without comments.
_, *NAMED = re.split(
    r"^const (\w+) = ",
    Path(__file__).with_name("asks.js").read_text("utf-8"),
    flags=re.M,
)
asks = SimpleNamespace(
    **{
        name: re.sub(r";\s*(//.*\n\s*)*\Z", "", expression)
        for name, expression in zip(NAMED[::2], NAMED[1::2], strict=True)
    }
)


def some(all_, *usual: str) -> list:
    """Mark all parameters except `usual` as slow, so that `make test` skips them."""
    assert {*usual} <= {*all_}
    slow = pytest.mark.slow
    return [each if each in usual else pytest.param(each, marks=slow) for each in all_]


def until(tab, condition: str, argument=None) -> None:
    """Wait until a JavaScript expression, or a function of `argument`, is true.

    Playwright's own `wait_for_function` evaluates a string inside the page, which
    the content security policy of the page forbids.
    """
    end = time.monotonic() + PATIENCE / 1000
    while not tab.evaluate(condition, argument):
        assert time.monotonic() < end, f"this did not become true: {condition}"
        tab.wait_for_timeout(10)


def search(tab, query: str) -> None:
    """Type a query before the page fetches the search index, and wait for a result."""
    entries = "performance.getEntriesByType('resource').map((e) => e.name).join()"
    assert "assets/search.js" not in tab.evaluate(entries)
    tab.keyboard.press("/")
    tab.keyboard.type(query)
    tab.locator(".md-search-result__item").first.wait_for()


class Page(HTMLParser):
    """Parse a page of the site, and collect links, resources and ids."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif target := attributes.get("src") or attributes.get("href"):
            self.loads.append(target)
