"""The pages of the API in the built site show every public name."""

import inspect
import re
from html.parser import HTMLParser

import pytest
from test_api import ALL, MODULES, Public, doc_of, names_of


class Shown(HTMLParser):
    """What a page explains: the ids of its headings, and the names that
    its signatures begin with.
    """

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.signed: set[str] = set()
        self.signs = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        heading = "doc-heading" in (attributes.get("class") or "")
        if re.fullmatch("h[1-6]", tag) and heading:
            self.ids.add(attributes["id"])
        self.signs |= "doc-signature" in (attributes.get("class") or "")

    def handle_data(self, data):
        if self.signs and data.strip():
            self.signed.add(data)
            self.signs = False


@pytest.fixture(scope="module")
def shown(site) -> dict[str, Shown]:
    return {
        module: Shown(
            (site / "api" / f"{module.rpartition('.')[2]}.html").read_text("utf-8")
        )
        for module in MODULES
    }


def places(p: Public) -> set[str]:
    """The headings under which a reader finds a name.

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
