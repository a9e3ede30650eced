"""Test where the setup cell of notebooks searches for fwlab, and in which order.

Each test has a new virtual environment with all packages that are installed here,
except fwlab, and no network. Places that the cell searches later contain files
that would be wrong.
"""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import fwlab

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WHEEL = f"fwlab-{fwlab.__version__}-py3-none-any.whl"
#: The setup cell, which all notebooks share.
(SETUP,) = (
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOKS[0].read_text("utf-8"))["cells"]
    if cell["id"] == "setup"
)
#: A script that runs a cell as Jupyter does, and prints the path of fwlab.
RUN = """
import sys
from IPython.core.interactiveshell import InteractiveShell

done = InteractiveShell.instance().run_cell(sys.stdin.read())
print("stopped" if done.error_in_exec else sys.modules["fwlab"].__file__)
"""
#: A script that runs notebooks as `jupyter execute` does.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

book = nbformat.read(sys.stdin.read(), as_version=4)
book.cells.append(nbformat.v4.new_code_cell("print(fwlab.__file__)"))
NotebookClient(book, kernel_name="python3", timeout=600).execute()
print(book.cells[-1].outputs[0].text, end="")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel that the site offers."""
    import downloads

    name, content = downloads.build()
    assert name == WHEEL
    path = tmp_path_factory.mktemp("wheel") / name
    path.write_bytes(content)
    return path


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


class Machine:
    """Create a virtual environment and a folder for notebooks, and run code there."""

    def __init__(self, folder: Path):
        self.above = folder / "a course"  # Paths may contain spaces.
        self.here = self.above / "notebooks"
        self.home, self.others = folder / "home", folder / "others"
        for made in (self.here, self.home, self.others):
            made.mkdir(parents=True)
        self.prefix = folder / "venv"
        venv.create(self.prefix, symlinks=True)
        paths = {"base": str(self.prefix), "platbase": str(self.prefix)}
        self.packages = Path(sysconfig.get_path("purelib", vars=paths))
        self.installed = self.packages / "fwlab" / "__init__.py"
        # Skip fwlab and the path files of editable installs.
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "fwlab" not in path.name and path.suffix != ".pth":
                (self.others / path.name).symlink_to(path)
        (self.packages / "others.pth").write_text(f"{self.others}\n")

    def run(self, code: str, text: str, **env: str) -> str:
        """Run `code` with the input `text`, and return the output and errors."""
        # Set only these variables, and none of the user's other settings.
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "OMP_NUM_THREADS")}
        kept |= {"HOME": str(self.home), "PIP_NO_INDEX": "1"}
        kept |= {"https_proxy": "http://127.0.0.1:9"}
        # For the next two options, pip reads "0" as "do not do it".
        # Build isolation would download setuptools; the remaining steps take time.
        kept |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_WARN_CONFLICTS": "0"}
        kept |= {"PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run(
            [self.prefix / "bin" / "python", "-c", code],
            input=text,
            cwd=self.here,
            env=kept | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=600,
        ).stdout

    def set_up(self, cell: str = SETUP, **env: str) -> Path:
        """Run the setup cell, and return the path of fwlab that it found."""
        said = self.run(RUN, cell, **env)
        assert Path(said.splitlines()[-1]).is_file(), said
        return Path(said.splitlines()[-1])

    def stop(self, cell: str = SETUP, **env: str) -> str:
        """Run a setup cell that must fail, and return the output."""
        said = self.run(RUN, cell, **env)
        assert said.endswith("stopped\n"), said
        assert not list(self.packages.glob("fwlab*"))
        return re.sub(r"\x1b\[[\d;]*m", "", said)


def copy_of_package(folder: Path) -> Path:
    left = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fwlab", folder / "fwlab", ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


ADDRESS = "https://git.example/a/b"


def addressed() -> str:
    """Return the setup cell with a repository URL, as in docs/contribute.md."""
    page = (ROOT / "docs" / "contribute.md").read_text("utf-8")
    (change,) = re.findall(r"sed -i '(.*)' notebooks", page)
    done = subprocess.run(
        ["sed", change.replace("https://…", ADDRESS)],
        input=json.dumps(SETUP),
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    assert ADDRESS in done.stdout
    return json.loads(done.stdout)


def test_installed(machine, wheel):
    zipfile.ZipFile(wheel).extractall(machine.packages)
    (machine.here / WHEEL).write_text("no wheel")
    (machine.above / "fwlab").mkdir()
    (machine.above / "fwlab" / "__init__.py").touch()
    assert machine.set_up() == machine.installed


def test_wheel_beside_the_notebook(machine, wheel):
    shutil.copy(wheel, machine.here)
    older = machine.here / "fwlab-9.0.0-py3-none-any.whl"
    older.write_text("an older file")
    os.utime(older, (0, 0))
    # pip refuses the file name of a second download.
    (machine.here / WHEEL.replace(".whl", " (1).whl")).write_text("the same again")
    # Folders that only have the name fwlab are not checkouts.
    (machine.above / "fwlab").mkdir()
    (machine.here / "fwlab").mkdir()
    assert machine.set_up(addressed()) == machine.installed
    # The installation includes data, excludes torch, and is permanent.
    assert (machine.installed.parent / "data" / "results").is_dir()
    assert not list(machine.packages.glob("torch*"))
    assert machine.set_up() == machine.installed


def test_checkout_above_the_notebook(machine):
    copy_of_package(machine.above)
    (machine.here / WHEEL).write_text("no wheel")
    assert machine.set_up(addressed()) == machine.above / "fwlab" / "__init__.py"
    assert not list(machine.packages.glob("fwlab*"))


def test_address(machine, tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    copy_of_package(repository)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    alone = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "."]):
        subprocess.run([*git, *command], cwd=repository, env=alone, check=True)
    # git replaces the URL by the folder.
    instead = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": ADDRESS,
    }
    assert machine.set_up(addressed(), **instead) == machine.installed


def test_nowhere(machine):
    """If fwlab is not found or pip fails, the setup cell reports the reason."""
    (machine.above / "fwlab").mkdir()
    sentence = f"AssertionError: Put fwlab-*.whl into {machine.here}, and run"
    assert sentence in machine.stop()
    (machine.here / WHEEL).write_text("no wheel")
    said = machine.stop()
    assert f"ERROR: Wheel 'fwlab' located at {machine.here / WHEEL} is invalid" in said


def test_torch_stays_as_it_is(machine, wheel):
    """The setup cell never replaces an old torch, even if pip finds a newer version."""
    for path in machine.others.glob("torch*"):
        path.unlink()
    links = machine.above / "links"
    links.mkdir()
    for version in ("2.0.0", "2.9.0"):
        files = {
            "torch/__init__.py": f"__version__ = {version!r}",
            f"torch-{version}.dist-info/METADATA": "Metadata-Version: 2.1\n"
            f"Name: torch\nVersion: {version}\n",
            f"torch-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\n"
            "Root-Is-Purelib: true\nTag: py3-none-any\n",
            f"torch-{version}.dist-info/RECORD": "",
        }
        with zipfile.ZipFile(links / f"torch-{version}-py3-none-any.whl", "w") as made:
            for name, content in files.items():
                made.writestr(name, content)
    zipfile.ZipFile(links / "torch-2.0.0-py3-none-any.whl").extractall(machine.packages)
    shutil.copy(wheel, machine.here)
    assert "torch==2.0.0" in machine.stop(PIP_FIND_LINKS=links.as_uri())
    packages = {path.name for path in machine.packages.glob("torch*")}
    assert packages == {"torch", "torch-2.0.0.dist-info"}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_alone(machine, wheel, path):
    """A notebook and the wheel of the site run without any other file.

    There is no network, and no cached text.
    """
    shutil.copy(path, machine.here)
    shutil.copy(wheel, machine.here)
    said = machine.run(EXECUTE, path.name)
    assert said.splitlines()[-1] == str(machine.installed), said
