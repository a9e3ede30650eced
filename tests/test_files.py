"""Test that files are written completely or not at all, without temporary files."""

import os
import resource
import stat
from pathlib import Path

import nbformat
import pytest
from terminal import fwlab

from fwlab.files import OTHERS, read_json, replacing, write_json

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def pipe(tmp_path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def kind(path: Path) -> str:
    return stat.filemode(path.lstat().st_mode)[0]


def test_what_is_no_file_is_not_replaced(tmp_path, pipe):
    paths = [pipe, tmp_path / "link", tmp_path / "folder"]
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    before = {path: kind(path) for path in tmp_path.iterdir()}
    for path in paths:
        said = f"expected {path} to be a file, got a {OTHERS[kind(path.resolve())]}$"
        with pytest.raises(OSError, match=said):
            write_json(path, 1)
    assert {path: kind(path) for path in tmp_path.iterdir()} == before


def test_a_link_stays_and_its_target_is_written(tmp_path):
    folder, old = tmp_path / "folder", tmp_path / "old"
    folder.mkdir()
    old.write_text("0")
    links = {"link": "../old", "chain": "link"}
    links |= {"dangling": "../new/file", "loop": "loop"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for name in ("chain", "dangling"):
        write_json(folder / name, name)
    with pytest.raises(OSError, match="symbolic links"):
        write_json(folder / "loop", 1)
    assert {p.name: str(p.readlink()) for p in folder.iterdir()} == links
    assert read_json(old) == "chain"
    assert read_json(tmp_path / "new" / "file") == "dangling"


def test_mode(tmp_path):
    """A new file has the mode set by the umask; a replaced file has its old mode."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.touch(0o600)
    before = os.umask(0o027)
    try:
        with replacing(old) as part:
            assert stat.S_IMODE(part.stat().st_mode) == 0o600
            part.unlink()  # Some libraries create a new file.
            part.touch(0o644)
        write_json(new, 1)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, new)] == [0o600, 0o640]


def test_a_file_that_is_read_only_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # Root may write to any file.
    path = tmp_path / "x"
    write_json(path, 1)
    with pytest.raises(PermissionError, match=f"{path} to be writable"):
        write_json(path, 2)
    assert read_json(path) == 1


def test_nothing_is_left_if_the_disk_is_full(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"'{path}'$"):
            write_json(path, [*range(9999)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [path] and read_json(path) == 1


def test_the_file_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    """A file is synced before it is renamed, and its folder is synced afterwards."""
    seen, fsync, replace = [], os.fsync, os.replace

    def sync(file):
        seen.append(stat.filemode(os.fstat(file).st_mode)[0])
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda *x: (seen.append("name"), replace(*x)))
    write_json(tmp_path / "x", 1)
    assert seen == ["-", "name", "d"]


@pytest.mark.parametrize(
    "arguments",
    ["bench", "exercises grade no.ipynb", "plot no-run", "look no-run --text no-text"],
)
def test_commands_complain_before_they_work(pipe, monkeypatch, arguments):
    measure = "fwlab.bench.operations.measure_case"
    monkeypatch.setattr(measure, lambda *_: pytest.fail("measures"))
    code, _, error = fwlab(*arguments.split(), "--out", str(pipe))
    assert (code, error) == (2, f"fwlab: expected {pipe} to be a file, got a pipe\n")
    assert list(pipe.parent.iterdir()) == [pipe] and kind(pipe) == "p"


def test_what_is_no_json_is_named(tmp_path):
    path = tmp_path / "x.json"
    for text in (b"", b'{"a": 1', b"\xff", b"[" * 10**6):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=f"^{path} is damaged: no JSON"):
            read_json(path)


def test_results_of_the_notebooks_are_those_of_the_site():
    """The package has copies of results in docs, for notebooks without a checkout."""
    folder = ROOT / "fwlab" / "data" / "results"
    copies = sorted(folder.rglob("*.json"))
    # Results that docs/tools makes only for notebooks have no copy in docs.
    own = {path for path in copies if path.name.startswith(("feedback-t", "qwen-"))}
    assert len(own) == 5 and len(copies) == 29
    for path in {*copies} - own:
        homes = (ROOT / "docs" / name / path.name for name in ("results", "reproduce"))
        (original,) = (home for home in homes if home.exists())
        assert path.read_bytes() == original.read_bytes(), f"copy {original} to {path}"
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        book = nbformat.read(path, as_version=4)
        for cell in book.cells:
            if cell.cell_type == "code" and cell.id != "setup":
                assert "../" not in cell.source, (path, cell.id)
