"""How the tests compare outputs, also those of one notebook alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pictures import pytest_collection_modifyitems
