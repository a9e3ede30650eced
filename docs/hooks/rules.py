"""Puts W of a rule in place of `<!-- memory: RULE -->`, after three tokens.

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
#: What rules take at all tokens, or at each: Rome, Lima and Oslo have a row of W each.
KEYS = float64([[1, 0, 0], [0, 0.8, 0.6], [1, 0, 0]])
GATES = {"q": KEYS, "k": KEYS, "v": torch.eye(3), "a": -KEYS, "b": 0.8 * KEYS}
GATES |= {"beta": 0.8, "ask": 0.5, "erase": 1, "write": 0.8}
DECAY, PER_CHANNEL = float64(0.7).log(), float64([0.7, 0.7, 1]).log()
SIZES = {"time": 3, "steps": 2, "key": 3, "value": 3}


def on_page_content(html, page, config, files):
    """Not in the Markdown: converting it would change a table."""
    return MARK.sub(lambda mark: render("memory.html", W=memory(mark[1])), html)


def memory(name: str) -> list[list[float]]:
    """Return the fast weights of a rule: rows are places, columns are channels."""
    rule = TABLE[name].rule
    given = {"normalize": False} if rule.normalized_loop else {}
    for tensor, dims in rule.tensors.names.items():
        if tensor == "log_decay" and name in ("sum_rule", "gated_rule"):
            continue  # without one, as on the page
        gates = GATES | {"log_decay": PER_CHANNEL if "key" in dims else DECAY}
        x = torch.as_tensor(gates[tensor], dtype=torch.float64)
        if x.dim() == 2:  # a row for each token
            x = x.view(1, 3, *[1] * (len(dims) - 3), 3)
        given[tensor] = x.expand([SIZES.get(dim, 1) for dim in dims])
    _, W = TABLE[name](**given, return_state=True, implementation="naive")
    return W[0, 0].tolist()
