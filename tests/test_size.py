"""What became small stays small: the lines of Python in each room, at most."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Lines that were reached. Lower one when a room shrinks; to raise it takes a reason.
LINES = {
    "fwlab/ops": 9_370,
    "fwlab/layers": 2_630,
    "fwlab/models": 1_955,
    "fwlab/training": 1_651,
    "fwlab/data": 1_285,
    "fwlab/bench": 826,
    "fwlab/exercises": 10_574,
    "docs/reproduce": 6_560,
    "tests": 23_001,
}


def files(room: str) -> list[Path]:
    """The Python files of a room that belong to the repository."""
    command = ["git", "ls-files", "-z", "--", f"{room}/*.py"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("room", LINES)
def test_a_room_stays_small(room):
    lines = sum(path.read_bytes().count(b"\n") for path in files(room))
    assert lines <= LINES[room], f"{room} has {lines} lines"
