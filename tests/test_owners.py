"""Files lead to nobody that they should not, and notebooks have what they need."""

import subprocess
from pathlib import Path

import nbformat
from owners import KNOWN, NOBODY, strangers

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def tracked() -> list[Path]:
    # Of a checkout that may belong to another user, as in a container.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co"]
    command += ["--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = done.stdout.decode().split("\0")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_leads_to_strangers():
    files = {path: path.read_bytes().decode(errors="ignore") for path in tracked()}
    assert len(files) > 100
    found = {path: strangers(text) for path, text in files.items()}
    assert {p: names for p, names in found.items() if names - {NOBODY}} == {}
    # Every allowed owner is linked to.
    text = "\n".join(t for p, t in files.items() if p.name != "owners.py")
    unlinked = {name for name in KNOWN if f"/{name}/" not in text}
    assert unlinked <= {"squidfunk", "srush", "sustcsonglin"}


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
