"""The first code cell of the notebooks: where it finds fwlab, and in what order.

Each test has a fresh virtual environment with all that is installed here,
except fwlab, and no network. Behind the place in which fwlab has to be
found, there are others that would not do.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import fwlab

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WHEEL = f"fwlab-{fwlab.__version__}-py3-none-any.whl"
#: All notebooks have the same one.
(SETUP,) = (
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOKS[0].read_text("utf-8"))["cells"]
    if cell["id"] == "setup"
)
#: Nothing can be installed from there.
NOWHERE = "/nowhere/fwlab.whl"
#: Runs a cell as Jupyter does, and says where fwlab is then.
RUN = """
import sys
from importlib.util import find_spec
from IPython.core.interactiveshell import InteractiveShell

done = InteractiveShell.instance().run_cell(sys.stdin.read())
print("stopped" if done.error_in_exec else "went on", file=sys.stderr)
print(getattr(find_spec("fwlab"), "origin", None))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel that the site offers."""
    sys.path.append(str(ROOT / "docs" / "hooks"))
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
    """A virtual environment, and a folder for the notebook in another one."""

    def __init__(self, folder: Path):
        self.above = folder / "a course"  # a space in the path, as people have
        self.here = self.above / "notebooks"
        self.here.mkdir(parents=True)
        self.home = folder / "home"
        self.home.mkdir()
        self.prefix = folder / "venv"
        venv.create(self.prefix, symlinks=True)
        self.python = self.prefix / "bin" / "python"
        paths = {"base": str(self.prefix), "platbase": str(self.prefix)}
        self.packages = Path(sysconfig.get_path("purelib", vars=paths))
        # A path file, as of an editable install.
        self.others = folder / "others"
        self.others.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "fwlab" not in path.name and path.suffix != ".pth":
                (self.others / path.name).symlink_to(path)
        (self.packages / "others.pth").write_text(f"{self.others}\n")

    def run(self, code: str, text: str | None = None, **env: str):
        # Only these variables: no other settings of the user.
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "OMP_NUM_THREADS")}
        kept |= {"HOME": str(self.home), "PIP_NO_INDEX": "1"}
        kept |= {"https_proxy": "http://127.0.0.1:9"}
        # For pip, "0" sets the option. Isolation would download setuptools
        # again; the others take time.
        kept |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_WARN_CONFLICTS": "0"}
        kept |= {"PIP_NO_COMPILE": "1"}
        return subprocess.run(
            [self.python, "-c", code],
            input=text,
            cwd=self.here,
            env=kept | env,
            capture_output=True,
            encoding="utf-8",
            timeout=600,
        )

    def set_up(self, cell: str = SETUP, **env: str) -> Path:
        """Return where fwlab is after the cell, which must not have stopped."""
        done = self.run(RUN, cell, **env)
        assert done.stderr == "went on\n", done.stdout + done.stderr
        return Path(done.stdout.splitlines()[-1])

    def stop(self, cell: str = SETUP, **env: str) -> str:
        """Return the message with which the cell stops."""
        done = self.run(RUN, cell, **env)
        assert done.stderr.endswith("stopped\n"), done.stdout + done.stderr
        assert done.stdout.endswith("None\n")
        assert not list(self.packages.glob("fwlab*"))
        assert "Traceback" not in done.stdout + done.stderr
        return (done.stdout + done.stderr).replace("None\n", "")

    @property
    def installed(self) -> Path:
        return self.packages / "fwlab" / "__init__.py"

    def decoy(self) -> None:
        """Make a package above the notebook that would not do."""
        (self.above / "fwlab").mkdir()
        (self.above / "fwlab" / "__init__.py").touch()


def copy_of_package(folder: Path) -> Path:
    left = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fwlab", folder / "fwlab", ignore=left)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


ADDRESS = "https://git.example/a/b"


def addressed() -> str:
    """Return the cell after what docs/contribute.md says on addresses."""
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
    machine.decoy()
    assert machine.set_up(FWLAB_SOURCE=NOWHERE) == machine.installed


def test_wheel_beside_the_notebook(machine, wheel):
    shutil.copy(wheel, machine.here)
    older = machine.here / "fwlab-0.0.10-py3-none-any.whl"
    older.write_text("an older one")
    os.utime(older, (0, 0))
    # Loaded a second time; pip does not take such a name.
    (machine.here / WHEEL.replace(".whl", " (1).whl")).write_text("the same again")
    machine.decoy()
    assert machine.set_up(FWLAB_SOURCE=NOWHERE) == machine.installed
    # With data, without a torch of its own, and for good.
    assert (machine.installed.parent / "data" / "results").is_dir()
    assert not list(machine.packages.glob("torch*"))
    assert machine.set_up() == machine.installed


def test_checkout_above_the_notebook(machine):
    copy_of_package(machine.above)
    origin = machine.set_up(addressed(), FWLAB_SOURCE=NOWHERE)
    assert origin == machine.above / "fwlab" / "__init__.py"
    assert not list(machine.packages.glob("fwlab*"))


def test_fwlab_source(machine, wheel):
    # A folder of that name is not yet a checkout.
    (machine.above / "fwlab").mkdir()
    (machine.here / "fwlab").mkdir()
    assert machine.set_up(addressed(), FWLAB_SOURCE=str(wheel)) == machine.installed


def test_address(machine, tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    copy_of_package(repository)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    alone = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "."]):
        subprocess.run([*git, *command], cwd=repository, env=alone, check=True)
    # git reads the address that is set, and takes the folder instead.
    instead = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{repository.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": ADDRESS,
    }
    assert machine.set_up(addressed(), **instead) == machine.installed


def test_nowhere(machine):
    """No place has it, or pip fails."""
    (machine.above / "fwlab").mkdir()
    (sentence, _) = machine.stop().splitlines()
    assert sentence == (
        "UsageError: fwlab is missing: put its wheel, fwlab-*.whl, into the folder "
        f"{machine.here}, and run this cell again."
    )
    said = machine.stop(FWLAB_SOURCE=NOWHERE)
    assert said.startswith(f"UsageError: pip could not install fwlab from {NOWHERE}: ")
    said = machine.stop(addressed())
    assert f"could not install fwlab from git+{ADDRESS}@main: " in said


def test_torch_stays_as_it_is(machine, wheel):
    """Even if it is too old, and pip could find a newer one."""
    for path in machine.others.glob("torch*"):
        path.unlink()
    links = machine.above / "links"
    links.mkdir()
    for version in ("2.0.0", "2.9.0"):
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }
        with zipfile.ZipFile(links / f"torch-{version}-py3-none-any.whl", "w") as made:
            for name, content in files.items():
                made.writestr(f"torch-{version}.dist-info/{name}", content)
    zipfile.ZipFile(links / "torch-2.0.0-py3-none-any.whl").extractall(machine.packages)
    shutil.copy(wheel, machine.here)
    said = machine.stop(PIP_FIND_LINKS=links.as_uri())
    assert "torch==2.0.0" in said
    packages = [path.name for path in machine.packages.glob("torch*")]
    assert packages == ["torch-2.0.0.dist-info"]


#: Runs notebooks as `jupyter execute` does.
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

name = sys.stdin.read()
book = nbformat.read(name, as_version=4)
where = "import fwlab; print(fwlab.__file__)"
book.cells.append(nbformat.v4.new_code_cell(where))
client = NotebookClient(book, kernel_name="python3", timeout=600)
try:
    client.execute()
finally:
    outputs = [cell.get("outputs", []) for cell in book.cells]
    print(outputs[-1][0]["text"] if outputs[-1] else "", end="")
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_alone(machine, wheel, path):
    """Run a notebook and the wheel, both taken from the site, and nothing else.

    There is no network, and no texts are kept from before.
    """
    shutil.copy(path, machine.here)
    shutil.copy(wheel, machine.here)
    done = machine.run(EXECUTE, path.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(machine.installed)
