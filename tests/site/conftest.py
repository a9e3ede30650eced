"""Build the site once, and open it in headless Chromium without a network.

The build is strict. All requests of the browser to hosts other than the local server
are blocked and recorded.
FWLAB_SITE names the folder of a site that is already built, which saves time
while you write a page.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from browser import OPTIONS, chromium, served
from built import MOVED, ROOT, Page
from figure import fresh, look  # noqa: F401


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """Return the folder of the built site."""
    if built := os.environ.get("FWLAB_SITE"):
        return Path(built).resolve()
    folder = tmp_path_factory.mktemp("site")
    # Do not use --quiet, which hides warnings from --strict.
    build = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    for command in (["docs/tools/npm.py"], build):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            encoding="utf-8",
        )
        said = [line for line in done.stderr.splitlines() if "INFO" not in line]
        if done.returncode:
            pytest.fail("\n".join([" ".join(command), *said]), pytrace=False)
    return folder


@pytest.fixture(scope="session")
def pages(site) -> dict[str, Page]:
    """Return all pages of the site by path, except 404.html and redirects."""
    names = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return {name: Page(site / name) for name in sorted({*names} - {"404.html", *MOVED})}


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop("no Chromium to look at the site with: install it, or set CHROMIUM")
    with sync_playwright() as p:
        yield Browser(lambda: p.chromium.launch(executable_path=path, args=OPTIONS))


class Browser:
    """Wrap a Playwright browser, which starts on first use and again after a crash."""

    def __init__(self, start):
        self.start, self.running = start, None

    def __getattr__(self, name):
        if self.running is None or not self.running.is_connected():
            self.running = self.start()
        return getattr(self.running, name)


#: A pattern for Playwright's messages after a page or the browser has crashed.
GONE = re.compile("playwright.*(crashed|has been closed|Connection closed)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Repeat a test whose browser crashed, because a crash is not a defect of the site.

    A test that fails for any other reason is not repeated.
    """
    if "browser" not in getattr(item, "fixturenames", ()):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed and GONE.search(report.longreprtext) for report in reports):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="session")
def address(site):
    with served(site) as base:
        yield base
