"""Small mistakes in operations, each of which the fixed cases of `fuzz.py` must find.

    python tests/operation_mutants.py [WORD ...]

With words, only the mutants whose names contain one of them. Each is an edit of one
file, in a copy of the package: a text that occurs there exactly once, and what takes
its place. The case that finds it is printed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A mistake by name: `before` becomes `after` in a file of `fwlab`."""

    name: str
    file: str
    before: str
    after: str


RULES, CHUNKS = "ops/_rules.py", "ops/_chunks.py"
EFFICIENT, TILES = "ops/efficient.py", "ops/aft/full/efficient.py"
MUTANTS = (
    # Specifications.
    Mutant(
        "gated rule keeps beta",
        "ops/linear/gated.py",
        "kept, fading = 1 - beta[..., None]",
        "kept, fading = beta[..., None]",
    ),
    Mutant(
        "distances of memories from 0",
        "ops/feedback/naive.py",
        "torch.arange(past, 0, -1",
        "torch.arange(past - 1, -1, -1",
    ),
    # The frame.
    Mutant(
        "masked inputs are read",
        RULES,
        "x = {name: masked(part, mask) for name, part in x.items()}",
        "pass",
    ),
    # (a masked step of the loop that is real changes nothing but for a rule with
    # constants: the leaky rule of test_rules / the contribute page shows it)
    Mutant(
        "a document keeps the memory before it",
        RULES,
        "decay = decay.masked_fill(inner, 0)",
        "pass",
    ),
    Mutant(
        "an early key reads the document before", RULES, "if made.early:", "if False:"
    ),
    Mutant(
        "all queries of a group read the first memory",
        RULES,
        "W = W.repeat_interleave(group, 1)",
        "W = W[:, :1].repeat_interleave(group * W.shape[1], 1)",
    ),
    Mutant(
        "the erase key is the key",
        RULES,
        "return Inputs(decay, made.strength, erase_key, q, k, v, made.early)",
        "return Inputs(decay, made.strength, erase_key if normalize else None, q, k, v, made.early)",
    ),
    Mutant(
        "0/0 is not 0",
        "feature_maps.py",
        "return _or_inf(total, _LEAST * torch.finfo(wide).tiny)",
        "return total",
    ),
    # Efficient forms.
    Mutant(
        "what a chunk wrote does not fade until its end",
        CHUNKS,
        "[row * since_start for row in rows], k * until_end, kept",
        "[row * since_start for row in rows], k, kept",
    ),
    Mutant(
        "gradient of a decay without the state",
        CHUNKS,
        "met = (products.mT @ d_products)[:, 1:] * products[:, :-1]",
        "met = ((products.mT @ d_products)[:, 1:] * products[:, :-1])[..., 1:]",
    ),
    Mutant(
        "early keys read after the decay",
        CHUNKS,
        "row if early and i else row * decay",
        "row * decay",
    ),
    Mutant(
        "the state does not fade between chunks",
        EFFICIENT,
        "after.addcmul_(before, kept[i])",
        "after.add_(before)",
    ),
    Mutant(
        "gradient of the state is not carried",
        EFFICIENT,
        "torch.zeros_like(states[0]) if dW is None else dW.flatten(0, 1)",
        "torch.zeros_like(states[0])",
    ),
    Mutant(
        "U without what the state erases",
        EFFICIENT,
        "U = torch.baddbmm(U, terms.erase, before.mT)",
        "pass",
    ),
    Mutant(
        "normaliser of the step before",
        EFFICIENT,
        "total = (sums * x.q).sum(-1, keepdim=True)",
        "total = (before * x.q).sum(-1, keepdim=True)",
    ),
    Mutant(
        "steps behind a row are those before it",
        "ops/aft/window/efficient.py",
        "((k, v), (k.flip(1), v.flip(1)))",
        "((k, v), (k, v))",
    ),
    Mutant(
        "large keys: means of small blocks are lost",
        TILES,
        "to_mean.copy_(torch.where(here, means, to_mean))",
        "pass",
    ),
    Mutant(
        "memories of earlier blocks get no gradient",
        "ops/feedback/efficient.py",
        "sums += torch.bmm(pairs[l, ..., :old].mT, x)",
        "pass",
    ),
    Mutant("a step forgets its strength", EFFICIENT, "k = row(x.strength) * k", "pass"),
    Mutant(
        "an activation without its derivative",
        "ops/fwp/efficient.py",
        "_tanh_backward(dW, W_i, grad_input=dP_i)",
        "dP_i.copy_(dW)",
    ),
)


def found(mutant: Mutant) -> str | None:
    """Return what the fixed cases find; None = nothing."""
    with tempfile.TemporaryDirectory() as at:
        copy = Path(at, "fwlab")
        shutil.copytree(ROOT / "fwlab", copy)
        path = copy / mutant.file
        text = path.read_text()
        if (count := text.count(mutant.before)) != 1:
            raise SystemExit(f"{mutant.name}: its text is {count} times in {path.name}")
        path.write_text(text.replace(mutant.before, mutant.after))
        command = [sys.executable, str(ROOT / "tests/fuzz.py"), "--fixed", "--first"]
        environment = os.environ | {"PYTHONPATH": at}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
    return done.stdout.split("\n")[1] if done.returncode else None


def main(words: list[str]) -> bool:
    """Print what finds each mutant; return whether one survives."""
    survivors = 0
    for mutant in MUTANTS:
        if words and not any(word in mutant.name for word in words):
            continue
        line = found(mutant)
        survivors += line is None
        print(f"{mutant.name}\n    {line or 'SURVIVES'}", flush=True)
    print(f"{survivors} survive")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
