"""Replace `<!-- memory: RULE -->` by a rule's fast weights W after three tokens.

Ada is in Rome, Bob is in Lima, then Ada is in Oslo. Bob's key has two channels, of
which a decay per channel spares the second.
"""

import re
from functools import partial

import torch
from templates import render

from fwlab.ops import TABLE

float64 = partial(torch.tensor, dtype=torch.float64)
MARK = re.compile(r"<!-- memory: (\w+) -->")
#: Keys of Ada, Bob and Ada. Each city (Rome, Lima, Oslo) has a row of W.
KEYS = float64([[1, 0, 0], [0, 0.8, 0.6], [1, 0, 0]])
DECAY, ONES = float64([0.7, 0.7, 1]).log(), torch.ones(3).double()


def on_page_content(html, page, config, files):
    """Insert tables of W into the HTML of a page, since Markdown would change them."""
    return MARK.sub(lambda mark: render("memory.html", W=memory(mark[1])), html)


def memory(name: str) -> list[list[float]]:
    """Return a rule's fast weights `[cities, channels]` after the three tokens."""
    W, gates = None, {"beta": float64(0.8), "ask": float64(0.5), "log_decay": DECAY}
    gates |= {"erase": ONES, "write": 0.8 * ONES}
    for k, v in zip(KEYS, ONES.diag(), strict=True):
        W = write(name, gates | {"q": k, "k": k, "v": v, "a": -k, "b": 0.8 * k}, W)
    return W[0, 0].tolist()


def write(name: str, told: dict[str, torch.Tensor], W: torch.Tensor | None):
    """Return the fast weights after one token of one sequence, for one head.

    - `told`: arguments for all rules. A rule with one decay for all channels gets the
      smallest one, and both steps of a token may get the same value.
    """
    rule, given = TABLE[name].rule, {"state": W, "return_state": True}
    if rule.normalized_loop:
        given["normalize"] = False
    for tensor, dims in rule.tensors.names.items():
        x = told[tensor]
        if tensor == "log_decay":
            if name in ("sum_rule", "gated_rule"):
                continue  # The page shows these rules without decay.
            x = x if "key" in dims else x.min()
        if x.dim() < len(dims) - 3:
            x = x.expand(2, *x.shape)
        given[tensor] = x[None, None].unsqueeze(3 if "steps" in dims else 2)
    return TABLE[name](**given, implementation="naive")[1]
