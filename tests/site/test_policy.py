"""Every page forbids what it does not need, and browsers hold it to that."""

import base64
import hashlib

import pytest
from built import PATIENCE, Page, asks, until

from fwlab.plots import _SLIDE

OTHER = "https://example.invalid/"
REFUSED = [
    *("connect-src", "form-action", "frame-src", "img-src"),
    *("script-src-attr", "script-src-elem", "style-src-elem"),
]


def test_every_page_has_the_policy(site, pages):
    """Before anything that it speaks of, and with every script of the page."""
    for name, page in {**pages, "404.html": Page(site / "404.html")}.items():
        *_, (_, charset), (tag, meta) = page.first
        assert [tag for tag, _ in page.first[:3]] == ["html", "head", "meta"], name
        assert charset == {"charset": "utf-8"}, name
        assert tag == "meta", name
        assert meta["http-equiv"] == "Content-Security-Policy", name
        policy = dict(part.split(" ", 1) for part in meta["content"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == "'none'", name
        assert policy["connect-src"] == "'self'", name
        # The theme's own, the one of the page that is not there, and of sliders.
        sliders = page.inline.count(_SLIDE)
        assert len(page.inline) == (1 if name == "404.html" else 3 + sliders), name
        hashes = [_hash(script) for script in page.inline]
        scripts = policy.pop("script-src").split()
        assert scripts == ["'self'", "file:", *dict.fromkeys(hashes)], name
        # Neither another host nor what makes a script of a text.
        sources = {source for sources in policy.values() for source in sources.split()}
        usual = {"'none'", "'self'", "file:", "data:", "'unsafe-inline'"}
        assert sources <= usual, name
        allowed = [what for what in policy if "unsafe" in policy[what]]
        assert allowed == ["style-src"], name
        assert page.handlers == [], name
        assert not any("javascript:" in url for url in page.links + page.loads), name


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@pytest.mark.parametrize("disk", [False, True], ids=["served", "from disk"])
def test_what_a_page_does_not_need_is_refused(browser, site, address, disk):
    """With an error in the console, which fails every test that uses `look`."""
    tab, said = browser.new_page(), []
    tab.set_default_timeout(PATIENCE)
    tab.on("console", lambda message: said.append((message.type, message.text)))
    tab.goto((f"{site.as_uri()}/" if disk else address) + "index.html")
    assert said == []
    tab.evaluate(asks.TRIES, OTHER)
    until(tab, "(all) => all.every((one) => refused.has(one))", REFUSED)
    assert tab.evaluate("globalThis.ran") is None
    assert {kind for kind, _ in said} == {"error"}
    assert all("Content Security Policy" in text for _, text in said)
    tab.close()
