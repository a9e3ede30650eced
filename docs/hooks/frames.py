"""Precompute with fwlab the data of figures whose controls have few positions.

Each function of `DATA` returns what a script of docs/figures imports as
"fwlab-NAME"; docs/hooks/figures.py puts it in.
"""

import json
import math
import tomllib
from statistics import median

import torch
from repository import ROOT
from rules import write

from fwlab import ops


def _exact(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _plain(x: torch.Tensor) -> list:
    return json.loads(json.dumps(x.tolist()), parse_float=lambda s: round(float(s), 9))


def _lists(**tensors: torch.Tensor) -> dict[str, list]:
    return {name: _plain(x) for name, x in tensors.items()}


def puzzles() -> dict:
    return tomllib.loads((ROOT / "docs/figures/puzzles.toml").read_text("utf-8"))


# --- The delta rule in chunks ---

#: Angles of keys and queries in degrees, then values and write strengths.
KEYS = (0, 50, 95, 20, 70, 130, 10, 110, 40, 85, 150, 60)
QUERIES = (10, 30, 60, 100, 45, 120, 80, 15, 140, 55, 90, 35)
VALUES = (
    *((1, 0.4), (-0.6, 0.9), (0.3, -1), (0.8, 0.5), (-0.9, -0.2), (0.5, 0.7)),
    *((-0.4, 1), (0.9, -0.6), (0.2, 0.8), (-1, 0.3), (0.6, -0.7), (0.7, 0.1)),
)
BETAS = (1, 0.8, 0.5, 0.9, 1, 0.6, 0.8, 1, 0.7, 0.5, 0.9, 1)


def chunks() -> dict:
    """Compute the delta rule step by step, and in chunks by equations (d1) to (d3)."""
    angles = _exact([KEYS, QUERIES]).deg2rad()
    k, q = torch.stack([angles.cos(), angles.sin()], dim=-1)
    v, beta = _exact(VALUES), _exact(BETAS)
    steps = [x[None, :, None] for x in (q, k, v, beta)]

    def rule(part: slice, W: torch.Tensor) -> tuple:
        here, naive = (x[:, part] for x in steps), {"implementation": "naive"}
        return ops.delta_rule(*here, state=W, return_state=True, **naive)

    empty = torch.zeros(1, 1, 2, 2).double()
    W, held, reads = empty, [], []
    for i in range(len(k)):
        held.append(k[i] @ W[0, 0].mT)
        y, W = rule(slice(i, i + 1), W)
        reads.append(y[0, 0, 0])
    U = beta[:, None] * (v - torch.stack(held))  # The value that each step writes.
    made = {}
    for size in (3, 4, 6):
        cuts = [slice(i, i + size) for i in range(0, len(k), size)]
        W, states, chunks = empty, [empty], []
        A = beta[:, None] * (k @ k.mT).tril(-1)
        for cut in cuts:
            y, W = rule(cut, W)
            states.append(W)
            X = torch.eye(size).double().add(A[cut, cut]).inverse()
            chunks.append(_lists(U=U[cut], Y=y[0, :, 0], X=X))
        made[size] = {"states": [_plain(W[0, 0]) for W in states], "chunks": chunks}
    loop = zip(map(_plain, held), map(_plain, reads), strict=True)
    return {"loop": [{"held": h, "y": y} for h, y in loop], "sizes": made}


# --- The ladder of rules ---

LADDER_KEYS = {"A": (0.8, 0.6, 0), "B": (-0.6, 0.8, 0), "C": (0, 0, 1)}
ONE = (1, 1, 1)


def _put(key: str, value: tuple, erase: float = 1) -> tuple:
    return LADDER_KEYS[key], value, erase


def _swap(one: str, other: str) -> tuple:
    way = [a - b for a, b in zip(LADDER_KEYS[one], LADDER_KEYS[other], strict=True)]
    return [x / math.hypot(*way) for x in way], (0, 0), 2


#: Tokens: label, meaning, steps (key, value, erase strength), decay per column.
#: The last entry is the decay for rules that cannot erase.
TOKENS = (
    ("A", "A gets a value", [_put("A", (1, 0))], ONE, 1),
    ("B", "B gets a value", [_put("B", (0, 1))], ONE, 1),
    ("C", "C gets a value", [_put("C", (1, 1))], ONE, 1),
    ("A", "A gets another value", [_put("A", (0, -1))], ONE, 0.5),
    (
        *("| A", "a new topic: only C still counts, A gets a value"),
        *([_put("A", (0, 1))], (0, 0, 1), 0),
    ),
    ("+ C", "something is added to C", [_put("C", (1, -1), 0)], ONE, 1),
    ("− C", "C changes its sign", [_put("C", (0, 0), 2)], ONE, 1),
    (
        *("↻", "values move round: A’s to B, B’s to C, C’s to A"),
        *([_swap("B", "C"), _swap("A", "B")], ONE, 1),
    ),
)
#: Rules by name: new ability, kind of decay, smallest and largest erase strength.
RUNGS = {
    "sum": ("write pairs", "", 0, 0),
    "decay": ("fade", "all", 0, 0),
    "delta": ("replace", "", 1, 1),
    "gated delta": ("fade and replace", "least", 1, 1),
    "per channel": ("fade a column", "columns", 1, 1),
    "erase, write": ("write, not erase", "columns", 0, 1),
    "β up to 2": ("change a sign", "columns", 0, 2),
    "more steps": ("turn", "columns", 0, 2),
}


def ladder() -> dict:
    """Compute fast weights, and the values that keys retrieve, by rule and token.

    All rules get the steps of the most general rule, but only the gates they have.
    """
    keys = _exact([*LADDER_KEYS.values()])
    runs = {}
    for name, (adds, fades, least, most) in RUNGS.items():
        W, tokens = torch.zeros(2, 3).double(), []
        for *_, steps, decay, fade in TOKENS:
            before, taken = W, []
            for i, (k, v, erase) in enumerate(
                steps if name == "more steps" else steps[:1]
            ):
                d = {"": ONE, "all": [fade] * 3, "least": [min(decay)] * 3}
                d = _exact(d.get(fades, decay) if i == 0 else ONE)
                k, v = _exact(k), _exact(v)
                amount = min(max(erase, least), most)
                found = (W * d) @ (amount * k)
                told = {"q": k, "k": k, "v": v, "log_decay": d.log()}
                told |= {"erase": amount * _exact(ONE), "write": _exact((1, 1))}
                W = write("gated_delta_rule_2", told, W[None, None])[0, 0]
                made = {"found": found, "u": v - found}
                taken.append(_lists(d=d, r=amount * k, k=k, v=v, **made))
            reads = keys @ W.mT
            tokens.append(_lists(before=before, W=W, reads=reads) | {"steps": taken})
        runs[name] = {"adds": adds, "tokens": tokens}
    # The last rule is the most general one, so it retrieves the correct values.
    wanted = [token["reads"] for token in runs["more steps"]["tokens"]]
    for run in runs.values():
        for token, right in zip(run["tokens"], wanted, strict=True):
            pairs = zip(token["reads"], right, strict=True)
            token["right"] = [math.dist(y, x) < 1e-6 for y, x in pairs]
        run["score"] = sum(all(token["right"]) for token in run["tokens"])
    tokens = [{"label": label, "says": says} for label, says, *_ in TOKENS]
    return {"keys": [*LADDER_KEYS], "tokens": tokens, "wanted": wanted, "runs": runs}


# --- Ten rules on the tokens of the ladder ---


def _told(operation: str, steps: list, decay: tuple, n: int) -> dict:
    """Return a rule's arguments for one token, as described in docs/rules.md.

    - `steps`, `decay`: as in `TOKENS`; `n`: number of tokens since the topic began.
    """
    (k, v, erase), *second = steps
    k, v, one, columns = _exact(k), _exact(v), _exact(1.0), _exact(decay)
    told = {"q": k, "k": k, "v": v, "beta": one, "ask": min(erase, 1) * one}
    told |= {"erase": min(erase, 1) * torch.ones_like(k), "write": torch.ones_like(v)}
    told["log_decay"] = columns.log()
    if operation == "gated_rule":
        told["beta"] = one / n  # With this strength, W is the mean of all writes.
    if operation == "implicit_delta_rule":
        told["beta"] = 1e9 * one  # The step size beta / (1 + beta) is almost 1.
    if operation == "rwkv7_rule":
        told |= {"a": -k, "b": min(erase, 1) * k}
        told["log_decay"] = columns.clamp(min=0.545).log()
    if operation == "delta_product":
        k2, v2, erase2 = second[0] if second else _put("A", (0, 0), 0)
        told |= {"k": torch.stack([k, _exact(k2)]), "v": torch.stack([v, _exact(v2)])}
        told["beta"] = _exact([max(1, erase), erase2])
    return told


def ten() -> dict:
    """Compute fast weights and retrieved values for all tokens and the ten rules."""
    keys = _exact([*LADDER_KEYS.values()])
    wanted = ladder()["wanted"]
    rules = json.loads((ROOT / "docs/figures/rules.json").read_text("utf-8"))
    for each in rules:
        operation, W, n, each["tokens"] = each["operation"], None, 0, []
        for (*_, steps, decay, _), right in zip(TOKENS, wanted, strict=True):
            n = 1 if min(decay) < 1 else n + 1
            W = write(operation, _told(operation, steps, decay, n), W)
            reads = _plain(keys @ W[0, 0].mT)
            near = [math.dist(*pair) < 0.5 for pair in zip(reads, right, strict=True)]
            each["tokens"].append({"W": _plain(W[0, 0]), "reads": reads, "right": near})
    tokens = [says for _, says, *_ in TOKENS]
    return {"keys": [*LADDER_KEYS], "tokens": tokens, "wanted": wanted, "rules": rules}


# --- Trained fast weights, for the capacity figure ---


def capacity() -> dict:
    """Return median losses by key width, feature map and number of pairs."""
    losses: dict = {}
    for name in ("capacity.quick", "capacity"):
        path = ROOT / "docs" / "reproduce" / f"{name}.json"
        for p in json.loads(path.read_text("utf-8"))["points"]:
            if p["ask"] == "all keys" and p["S"] <= 128:
                kinds = losses.setdefault(p["d_key"], {}).setdefault(p["map"], {})
                kinds.setdefault(p["S"], []).append(p["loss"])
    return {
        width: {
            kind: [[S, round(median(each), 4)] for S, each in sorted(points.items())]
            for kind, points in kinds.items()
        }
        for width, kinds in losses.items()
    }


DATA = {f.__name__: f for f in (puzzles, chunks, ladder, ten, capacity)}
