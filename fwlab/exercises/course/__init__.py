"""The exercises of the course: a file for each notebook, beside what else it asks.

`04_delta_rule.py` is the module `fwlab.exercises.course.delta_rule`, so that its name
stays if the notebook gets another number. The files are loaded in this order; each may
import from those before it.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from fwlab.exercises.notation import EXERCISES, Exercise

TOPICS: dict[str, dict[str, Exercise]] = {}
"""Exercises by topic and name; `fwlab exercises export` writes a notebook for each."""

for _file in sorted(Path(__file__).parent.glob("[0-9][0-9]_*.py")):
    _name, _known = f"{__name__}.{_file.stem[3:]}", set(EXERCISES)
    _spec = spec_from_file_location(_name, _file)
    assert _spec and _spec.loader
    sys.modules[_name] = _module = module_from_spec(_spec)
    _spec.loader.exec_module(_module)
    globals()[_file.stem[3:]] = _module
    _topic = (_module.__doc__ or _file.stem).partition(".")[0]
    TOPICS[_topic] = {n: e for n, e in EXERCISES.items() if n not in _known}
