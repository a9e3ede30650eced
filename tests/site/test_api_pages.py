"""Test that the pages of the API in the built site show every public name."""

import inspect
import re

import pytest
from test_api import ALL, MODULES, names_of


@pytest.mark.parametrize("module", MODULES)
def test_the_page_shows_every_name(site, module):
    """The API page of a module shows all public names, and signatures of functions."""
    path = site / "api" / f"{module.rpartition('.')[2]}.html"
    html = path.read_text("utf-8")
    headings = {*re.findall('<h[1-6] id="([^"]+)" class="doc doc-heading">', html)}
    begin = r'class="[^"]*doc-signature[^>]*>(?:\s*<[^>]*>)*([^<]+)'
    signed = {*re.findall(begin, html)}
    shown = [p for p in ALL if p.owner is None and p.name.startswith(f"{module}.")]
    assert len(shown) >= len(names_of(module)) > 0
    for p in shown:
        home = getattr(p.value, "__module__", None)
        assert headings & {p.name, f"{home}.{p.last}"}, p.name
        assert p.last in signed or not inspect.isfunction(p.value), p.name
