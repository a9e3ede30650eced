"""Compare a rule with its bar: `python compare.py` takes about ten seconds.

It reads `rule.py` in this folder, or in the folder that you name, prints what a
report needs, and saves `results.json` there.
"""

import json
import runpy
import sys
from pathlib import Path

import torch

from fwlab.exercises.course.contest import best, contest
from fwlab.exercises.course.project import by_luck, fairness
from fwlab.provenance import provenance

folder = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
folder = folder if folder.is_dir() else folder.parent
rule = runpy.run_path(str(folder / "rule.py"))
torch.set_num_threads(1)
records = {
    name: contest(seeds=rule["SEEDS"], **rule[name.upper()])
    for name in ("bar", "yours")
}
losses = {}
for name, record in records.items():
    rate, runs = best(record)
    losses[name] = torch.tensor(runs)
    dots = ", ".join(f"{loss:.3f}" for loss in runs)
    print(f"{name:<5} mean {losses[name].mean():.3f} at rate {rate:<5} runs {dots}")
print(f"yours is lower by luck: {by_luck(losses['yours'], losses['bar']):.2f}")
for sentence in fairness(records["yours"], records["bar"]):
    print(f"unequal: {sentence}")
text = json.dumps(records | provenance("python compare.py"), indent=1)
(folder / "results.json").write_text(text + "\n", "utf-8")
