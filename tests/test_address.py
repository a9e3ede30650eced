"""The address of the repository is set everywhere or nowhere."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from address import ROOT, Address
from owners import KNOWN, NOBODY, strangers

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
GITHUB = f"https://github.com/{NOBODY}/my-fwlab"
PAGES = f"https://{NOBODY}.github.io/my-fwlab/"


def tracked() -> list[Path]:
    # Of a checkout that may belong to another user, as in a container.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co"]
    command += ["--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = done.stdout.decode().split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def copy_to(folder: Path) -> None:
    for path in tracked():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def test_no_file_leads_to_strangers():
    files = {path: path.read_bytes().decode(errors="ignore") for path in tracked()}
    assert len(files) > 100
    found = {path: strangers(text) for path, text in files.items()}
    assert {p: names for p, names in found.items() if names - {NOBODY}} == {}
    # Every allowed owner is linked to.
    text = "\n".join(t for p, t in files.items() if p.name != "owners.py")
    unlinked = {name for name in KNOWN if f"/{name}/" not in text}
    assert unlinked <= {"squidfunk", "srush", "sustcsonglin"}


@pytest.mark.parametrize(
    ("url", "site", "wanted"),
    [
        ("", "", Address()),
        (f" {GITHUB}.git", "", Address(GITHUB, PAGES)),
        (f"{GITHUB}/", "https://a.example", Address(GITHUB, "https://a.example/")),
        ("https://git.example/a/b/c", "", Address("https://git.example/a/b/c")),
        ("https://git.example/a", "", None),
        ("https://me:secret@git.example/a/b", "", None),
        ("git@git.example:a/b", "", None),
        (f"{GITHUB}/tree/main", "", None),
        (GITHUB, "https://a.example/?b", None),
    ],
)
def test_what_is_typed_becomes_an_address(url, site, wanted):
    if wanted is None:
        with pytest.raises(ValueError, match=r"^'.*' is .*\.$"):
            Address.of(url, site)
    else:
        assert Address.of(url, site) == wanted


@pytest.fixture
def copy(tmp_path) -> Path:
    """Files of the repository, without tests."""
    copy_to(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "tests")
    return tmp_path / "copy"


def content(folder: Path) -> dict[Path, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {p.relative_to(folder): p.read_bytes() for p in files if "pyc" not in p.name}


def make_address(folder: Path, *given: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "-s", "address", f"PYTHON={sys.executable}", *given],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def test_set_and_unset(copy):
    make_address(copy, "URL=")  # whatever is set here
    unset = content(copy)
    assert make_address(copy, f"URL={GITHUB}").returncode == 0
    once = content(copy)
    changed = {path.as_posix() for path in once if once[path] != unset[path]}
    files = {"CITATION.cff", "README.md", "mkdocs.yml", "pyproject.toml"}
    assert changed == files | {f"notebooks/{path.name}" for path in PATHS}
    refused = make_address(copy, "URL=https://git.example")
    assert refused.returncode
    assert "'https://git.example' is not the address" in refused.stderr
    make_address(copy, f"URL={GITHUB}.git")
    assert content(copy) == once

    said = {name: (copy / name).read_text("utf-8") for name in files}
    config = yaml.load(said["mkdocs.yml"], yaml.BaseLoader)
    citation = yaml.safe_load(said["CITATION.cff"])
    urls = tomllib.loads(said["pyproject.toml"])["project"]["urls"]
    for address in (
        (config["repo_url"], config["site_url"]),
        (citation["repository-code"], citation["url"]),
        (urls["Repository"], urls["Documentation"]),
    ):
        assert address == (GITHUB, PAGES)
    assert f'pip install "fwlab @ git+{GITHUB}@main"\n' in said["README.md"]
    for path in PATHS:
        badge, setup = addressed(copy / "notebooks" / path.name)
        colab = f"https://colab.research.google.com/github/{NOBODY}/my-fwlab/"
        assert f"({colab}blob/main/notebooks/{path.name})" in badge
        assert f'"git+{GITHUB}@main"' in setup

    make_address(copy, "URL=https://git.example/a/b", "SITE=https://a.example/")
    # Colab opens notebooks of GitHub only.
    text = b"\n".join(content(copy).values()).decode(errors="ignore")
    assert NOBODY not in text and "git+https://git.example/a/b@main" in text
    make_address(copy, "URL=")
    assert content(copy) == unset


def addressed(path: Path) -> tuple[str, str]:
    """The badge ("" if there is none) and the set-up cell."""
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = {cell.id: cell.source for cell in book.cells}
    assert "badge" not in cells or book.cells[0].id == "badge"
    return cells.get("badge", ""), cells["setup"]


def test_results_of_the_notebooks_are_those_of_the_site():
    """A notebook that runs alone has no docs folder: the package has copies."""
    folder = ROOT / "fwlab" / "data" / "results"
    copies = sorted(folder.rglob("*.json"))
    # Runs of notebooks alone, by a tool in docs/tools, are nowhere else.
    own = {path for path in copies if path.name.startswith(("feedback-t", "qwen-"))}
    assert len(own) == 5 and len(copies) == 29
    for path in {*copies} - own:
        homes = (ROOT / "docs" / name / path.name for name in ("results", "reproduce"))
        (original,) = (home for home in homes if home.exists())
        assert path.read_bytes() == original.read_bytes(), f"copy {original} to {path}"
    for path in PATHS:
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code" and cell.id != "setup":
                assert "../" not in cell.source, (path, cell.id)
