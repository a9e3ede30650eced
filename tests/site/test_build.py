"""What can be said of the built site without opening a browser."""

import contextlib
import gzip
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from html import unescape
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import urlopen

import pytest
from conftest import BUILD, ROOT

import fwlab

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PACKAGE = ROOT / "fwlab"
#: Seconds that nothing here takes, also beside other work.
LONG = 1200.0
MODULES = [
    PACKAGE / "feature_maps.py",
    *sorted((PACKAGE / "ops").rglob("*.py")),
    *sorted((PACKAGE / "layers").rglob("*.py")),
]


def mkdocs_yml() -> str:
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_pages_are_there(pages):
    """Each Markdown page, each notebook, and each file with notes."""
    docs = ROOT / "docs"
    written = {p.relative_to(docs).with_suffix(".html") for p in docs.rglob("*.md")}
    names = {path.as_posix() for path in written}
    names |= {f"notebooks/{name}.html" for name in NOTEBOOKS}
    for path in MODULES:
        name = path.relative_to(PACKAGE).with_suffix(".html").as_posix()
        names.add(f"annotated/source/{name.replace('__init__', 'init')}")
    for path in (PACKAGE / "ops").glob("*/efficient.py"):
        names.add(f"annotated/{path.parent.name}.html")
    assert names <= pages.keys()


@pytest.mark.speed
def test_is_built_soon(site):
    if not BUILD:
        pytest.skip("FWLAB_SITE names a site that was built before")
    assert BUILD[0] < 90


@pytest.mark.slow
def test_serve_follows_changes(tmp_path):
    """`mkdocs serve`, in a copy: a page is built again when it changes,
    and so is one that is made of a file of the package.
    """
    copy = tmp_path / "fwlab"
    left = shutil.ignore_patterns(".*", "site", "runs", "tests", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left)
    (copy / ".cache").mkdir()
    (copy / ".cache" / "npm").symlink_to(ROOT / ".cache" / "npm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    serve = [sys.executable, "-m", "mkdocs", "serve", "--dev-addr", address]
    env = os.environ | {
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONPATH": str(copy),
        # What it has built is left there.
        "TMPDIR": str(tmp_path),
    }
    with open(tmp_path / "log", "w+") as log:
        server = subprocess.Popen(serve, cwd=copy, env=env, stdout=log, stderr=log)
        try:
            page = f"http://{address}/fwlab/annotated/equations.html"
            # The page asks to be told when it has changed.
            assert "livereload" in _wait_for(page, "Equations of the papers")
            file = copy / "fwlab" / "ops" / "delta" / "naive.py"
            text = file.read_text("utf-8")
            assert text.count("# Eq. 20") == 1
            file.write_text(text.replace("# Eq. 20", "# Eq. 12"), "utf-8")
            _wait_for(page.replace("equations", "source/ops/delta/naive"), "Eq. 12")
            row = re.search(
                r'id="schlag2021-12".*?</tr>', _wait_for(page, "<table"), re.S
            )
            assert "ops/delta/naive" in row[0]
            with (copy / "docs" / "notation.md").open("a") as notation:
                notation.write("\nA sentence of this test.\n")
            page = page.replace("annotated/equations", "notation")
            _wait_for(page, "A sentence of this test.")
        finally:
            # Not as Ctrl-C, which a process started in the background of a
            # shell does not get.
            server.kill()
            server.wait(timeout=LONG)


def _wait_for(page: str, words: str) -> str:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            html = urlopen(page, timeout=LONG).read().decode()
            if words in html:
                return html
        time.sleep(1)
    raise AssertionError(f"{page} did not show {words!r} within {LONG} s")


def test_citation_is_that_of_the_package():
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {fwlab.__version__}\n" in text
    for key, name in (("site_url", "url"), ("repo_url", "repository-code")):
        address = re.search(rf"^{key}: (\S+)", mkdocs_yml(), re.M)[1]
        assert f"\n{name}: {address}\n" in text


def test_links_and_anchors_resolve(site, pages):
    wrong = []
    for name, page in pages.items():
        for link in [*page.links, *page.loads]:
            url = urlsplit(urljoin(f"http://site/{name}", link))
            if url.netloc != "site":
                continue
            target = unquote(url.path).lstrip("/")
            if target.endswith("/") or not target:
                target += "index.html"
            known = target not in pages or not url.fragment
            if not (site / target).is_file() or not (
                known or unquote(url.fragment) in pages[target].ids
            ):
                wrong.append(f"{name}: {link}")
    assert wrong == []


def test_links_are_relative(pages):
    """So the site can be moved to any folder."""
    for name, page in pages.items():
        rooted = [u for u in [*page.links, *page.loads] if u.startswith("/")]
        assert rooted == [], name


def test_nothing_is_loaded_from_elsewhere(pages):
    """No script, style, image or font, also where no browser would ask."""
    for name, page in pages.items():
        loads = [u for u in page.loads if re.match(r"https?:|//", u)]
        canonical = [u for u in loads if u.startswith(public_address())]
        assert loads == canonical, name


def public_address() -> str:
    return re.search(r"^site_url: (\S+)", mkdocs_yml(), re.M)[1]


def test_styles_load_nothing_from_elsewhere(site):
    for path in site.rglob("*.css"):
        urls = re.findall(r"url\(\s*['\"]?(https?:|//)", path.read_text("utf-8"))
        assert urls == [], path


def test_ids_are_unique(pages):
    for name, page in pages.items():
        double = {i for i in page.ids if page.ids.count(i) > 1}
        assert double == set(), name


def test_html_is_small(site, pages):
    large = {n: len((site / n).read_bytes()) for n in pages}
    assert {n: size for n, size in large.items() if size >= 600_000} == {}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_can_be_downloaded(site, pages, name):
    page, source = f"notebooks/{name}.html", f"{name}.ipynb"
    assert source in pages[page].links
    original = (ROOT / "notebooks" / source).read_bytes()
    assert (site / "notebooks" / source).read_bytes() == original
    colab = [u for u in pages[page].links if "colab.research" in u]
    address = re.search(r"^repo_url: https://github.com/(\S+)", mkdocs_yml(), re.M)
    assert colab == [
        "https://colab.research.google.com/github/"
        f"{address[1]}/blob/main/notebooks/{source}"
    ]


def test_sitemap_lists_every_page(site, pages):
    tree = ET.parse(site / "sitemap.xml")
    listed = {e.text for e in tree.iter() if e.tag.endswith("}loc")}
    assert listed == {public_address() + name for name in pages}
    packed = gzip.decompress((site / "sitemap.xml.gz").read_bytes())
    assert b"<loc>" in packed


def test_every_page_says_what_it_is(site, pages):
    """The text that is shown where a page is linked to."""
    described: dict[str, str] = {}
    for name in pages:
        html = (site / name).read_text("utf-8")
        metas = dict(
            re.findall(r'<meta (?:name|property)="([^"]+)" content="([^"]*)"', html)
        )
        assert metas["og:title"] and metas["og:url"].startswith(public_address()), name
        assert 40 <= len(metas["og:description"]) <= 300, name
        assert unescape(metas["description"]) == unescape(metas["og:description"]), name
        described[name] = metas["og:description"]
    assert len(set(described.values())) == len(described)


def test_addresses_are_set_in_one_place():
    for key in ("repo_url", "site_url"):
        address = re.search(rf"^{key}: (\S+)", mkdocs_yml(), re.M)[1]
        assert mkdocs_yml().count(address) == 1
        for path in (ROOT / "docs").rglob("*"):
            if path.suffix in (".md", ".py", ".js", ".css", ".json"):
                assert address not in path.read_text(encoding="utf-8"), path


def test_lock_file_names_no_host():
    lock = (ROOT / "docs" / "package-lock.json").read_text()
    assert "resolved" not in lock and "registry" not in lock
    assert lock.count('"integrity"') == lock.count('"node_modules/')


def test_example_of_the_home_page_runs():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(example, "docs/index.md", "exec"), {})
