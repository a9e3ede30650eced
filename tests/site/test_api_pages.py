"""The pages of the API in the built site show every public name."""

import inspect
import re
from typing import NamedTuple

import pytest
from test_api import ALL, MODULES, Public, doc_of, names_of


class Shown(NamedTuple):
    """The ids of a page's headings, and the names its signatures begin with."""

    ids: set[str]
    signed: set[str]


@pytest.fixture(scope="module")
def shown(site) -> dict[str, Shown]:
    heading = '<h[1-6] id="([^"]+)" class="doc doc-heading">'
    signature = r'class="[^"]*doc-signature[^>]*>(?:\s*<[^>]*>)*([^<]+)'
    pages = {}
    for module in MODULES:
        path = site / "api" / f"{module.rpartition('.')[2]}.html"
        parts = (
            re.findall(what, path.read_text("utf-8")) for what in (heading, signature)
        )
        pages[module] = Shown(*map(set, parts))
    return pages


def places(p: Public) -> set[str]:
    """Return the headings under which a reader finds a name.

    A function that is named as its module stands under its full name; a
    method also under the public class that it is inherited from.
    """
    if p.owner is None:
        home = getattr(p.value, "__module__", None)
        return {p.name, f"{home}.{p.last}"} if home else {p.name}
    ways = {p.name}
    for q in ALL:
        if inspect.isclass(q.value) and issubclass(p.owner, q.value):
            own = vars(q.value).get(p.last)
            if own is not None and inspect.cleandoc(own.__doc__ or "") == doc_of(p):
                ways.add(f"{q.name}.{p.last}")
    return ways


@pytest.mark.parametrize("module", MODULES)
def test_the_page_shows_every_name(shown, module):
    wanted = [p for p in ALL if p.name.startswith(f"{module}.")]
    assert len(wanted) >= len(names_of(module)) > 0
    missing = [p.name for p in wanted if not places(p) & shown[module].ids]
    assert not missing
    # Functions, and classes that are made by arguments of their own.
    made = [
        p.last
        for p in wanted
        if (
            inspect.isfunction(p.value)
            and not isinstance(p.owner and vars(p.owner).get(p.last), property)
        )
        or (inspect.isclass(p.value) and "__init__" in vars(p.value))
    ]
    assert not set(made) - shown[module].signed
