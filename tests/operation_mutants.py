"""Insert mistakes into operations; the fixed cases of `fuzz.py` must find each one.

    python tests/operation_mutants.py [WORD ...]

With words, only mutants whose names contain one of the words run. Each mutant replaces
a text that occurs exactly once in one file, in a copy of the package. The fixed case
that fails is printed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


#: Mutants: a name, a file, the correct text, and the mistake that replaces it.
MUTANTS = """
gated rule keeps beta: ops/linear/gated.py
- kept, fading = 1 - beta[..., None]
+ kept, fading = beta[..., None]

distances of memories from 0: ops/feedback/naive.py
- torch.arange(past, 0, -1
+ torch.arange(past - 1, -1, -1

masked inputs are read: ops/_rules.py
- x = {name: masked(part, mask) for name, part in x.items()}
+ pass

a document keeps the memory before it: ops/_rules.py
- decay = decay.masked_fill(inner, 0)
+ pass

an early key reads the document before: ops/_rules.py
- if made.early:
+ if False:

all queries of a group read the first memory: ops/_rules.py
- W = W.repeat_interleave(group, 1)
+ W = W[:, :1].repeat_interleave(group * W.shape[1], 1)

the erase key is the key: ops/_rules.py
- return Inputs(decay, made.strength, erase_key, q, k, v, made.early)
+ return Inputs(decay, made.strength, erase_key if normalize else None, q, k, v, made.early)

0/0 is not 0: feature_maps.py
- return _or_inf(total, _LEAST * torch.finfo(wide).tiny)
+ return total

what a chunk wrote does not fade until its end: ops/_chunks.py
- [row * since_start for row in rows], k * until_end, kept
+ [row * since_start for row in rows], k, kept

gradient of a decay without the state: ops/_chunks.py
- met = (products.mT @ d_products)[:, 1:] * products[:, :-1]
+ met = ((products.mT @ d_products)[:, 1:] * products[:, :-1])[..., 1:]

early keys read after the decay: ops/_chunks.py
- row if early and i else row * decay
+ row * decay

the state does not fade between chunks: ops/efficient.py
- after.addcmul_(before, kept[i])
+ after.add_(before)

gradient of the state is not carried: ops/efficient.py
- torch.zeros_like(states[0]) if dW is None else dW.flatten(0, 1)
+ torch.zeros_like(states[0])

U without what the state erases: ops/efficient.py
- U = torch.baddbmm(U, terms.erase, before.mT)
+ pass

normaliser of the step before: ops/efficient.py
- total = (sums * x.q).sum(-1, keepdim=True)
+ total = (before * x.q).sum(-1, keepdim=True)

steps behind a row are those before it: ops/aft/window/efficient.py
- ((k, v), (k.flip(1), v.flip(1)))
+ ((k, v), (k, v))

large keys: means of small blocks are lost: ops/aft/full/efficient.py
- to_mean.copy_(torch.where(here, means, to_mean))
+ pass

memories of earlier blocks get no gradient: ops/feedback/efficient.py
- sums += torch.bmm(pairs[l, ..., :old].mT, x)
+ pass

a step forgets its strength: ops/efficient.py
- k = row(x.strength) * k
+ pass

an activation without its derivative: ops/fwp/efficient.py
- _tanh_backward(dW, W_i, grad_input=dP_i)
+ dP_i.copy_(dW)
"""
Mutant = tuple[str, str, str, str]


def found(mutant: Mutant) -> str | None:
    """Return the output of the first fixed case that fails on a mutant, or None."""
    name, file, before, after = mutant
    with tempfile.TemporaryDirectory() as at:
        copy = Path(at, "fwlab")
        shutil.copytree(ROOT / "fwlab", copy)
        path = copy / file
        text = path.read_text()
        if (count := text.count(before)) != 1:
            raise SystemExit(f"{name}: its text is {count} times in {file}")
        path.write_text(text.replace(before, after))
        command = [sys.executable, str(ROOT / "tests/fuzz.py"), "--fixed", "--first"]
        environment = os.environ | {"PYTHONPATH": at}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    return done.stdout.split("\n")[1] if done.returncode else None


def main(words: list[str]) -> bool:
    """Print the case that finds each mutant; return True if a mutant survives."""
    survivors = 0
    for mutant in re.findall(r"(.+): (\S+)\n- (.+)\n\+ (.+)", MUTANTS):
        if words and not any(word in mutant[0] for word in words):
            continue
        line = found(mutant)
        survivors += line is None
        print(f"{mutant[0]}\n    {line or 'SURVIVES'}", flush=True)
    print(f"{survivors} survive")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
