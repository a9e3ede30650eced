"""Every page forbids what it does not need, and browsers hold it to that."""

import base64
import hashlib

import pytest
from built import PATIENCE, asks, until

OTHER = "https://example.invalid/"
REFUSED = [
    *("connect-src", "form-action", "frame-src", "img-src"),
    *("script-src-attr", "script-src-elem", "style-src-elem"),
]


def test_every_page_allows_its_own_scripts_alone(pages):
    """Before any of them, and nothing that makes a script of a text."""
    for name, page in pages.items():
        (_, charset), (_, meta) = page.first[2:4]
        assert charset == {"charset": "utf-8"}, name
        policy = dict(part.split(" ", 1) for part in meta["content"].split("; "))
        digests = [hashlib.sha256(x.encode()).digest() for x in page.inline]
        hashes = [f"'sha256-{base64.b64encode(x).decode()}'" for x in digests]
        allowed = ["'self'", "file:", *dict.fromkeys(hashes)]
        assert policy["script-src"].split() == allowed, name
        assert [kind for kind in policy if "unsafe" in policy[kind]] == ["style-src"]
        assert page.handlers == [], name


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
