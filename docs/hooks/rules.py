"""Puts W of a rule in place of `<!-- memory: RULE -->`, after three tokens.

Ada is in Rome, Bob is in Lima, then Ada is in Oslo. Bob's key has two channels, of
which a decay per channel spares the second.
"""

import re

import torch
from templates import render

from fwlab.ops import TABLE

MARK = re.compile(r"<!-- memory: (\w+) -->")
#: The keys have length 1; Rome, Lima and Oslo have a row of W each.
KEYS = torch.tensor([[1, 0, 0], [0, 0.8, 0.6], [1, 0, 0]]).double()
GATES = {"beta": 0.8, "ask": 0.5, "erase": 1, "write": 0.8}
DECAY, PER_CHANNEL = 0.7, [0.7, 0.7, 1]


def on_page_content(html, page, config, files):
    """Not in the Markdown: converting it would change a table."""
    return MARK.sub(lambda mark: render("memory.html", W=memory(mark[1])), html)


def memory(name: str) -> list[list[float]]:
    """The fast weights of a rule: a row for each place, a column for each channel."""
    sizes = {"batch": 1, "time": 3, "heads": 1, "steps": 2, "key": 3, "value": 3}
    rule, given = TABLE[name].rule, {"q": KEYS[None, :, None]}
    vectors = {"k": KEYS, "v": torch.eye(3), "a": -KEYS, "b": GATES["beta"] * KEYS}
    for tensor, dims in rule.tensors.names.items():
        shape = [sizes[dim] for dim in dims if dim in sizes]
        if tensor in vectors:
            rows = vectors[tensor].view(1, 3, *[1] * (len(shape) - 3), 3)
            given[tensor] = rows.expand(shape).double()
        elif tensor in GATES:
            given[tensor] = torch.full(shape, GATES[tensor]).double()
        elif tensor == "log_decay" and "[key]" not in dims and name != "gated_rule":
            decay = torch.tensor(PER_CHANNEL if "key" in dims else DECAY).double()
            given[tensor] = decay.log().expand(shape)
    plain = {"normalize": False} if rule.normalized_loop else {}
    _, W = TABLE[name](**given, **plain, return_state=True, implementation="naive")
    return W[0, 0].tolist()
