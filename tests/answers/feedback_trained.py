"""Answers to the exercises on a trained feedback transformer."""

import math

import numpy as np
import torch

from fwlab.exercises import feedback_trained
from fwlab.exercises.feedback_trained import _grown
from fwlab.exercises.solutions import fool, warm_start
from fwlab.layers import FeedbackTransformer

NO_GRADIENT = {*feedback_trained.EXERCISES}


# --- interpreter


def impatient(clauses):
    """Looks a variable up that was never set."""
    values, after, run = {}, [], True
    for clause in clauses:
        words = clause.split()
        if words[0] == "if":
            limit = values[words[3]] if words[3] in values else int(words[3])
            a = values[words[1]]
            run = a < limit if words[2] == "<" else a > limit
            after.append(0)
            continue
        name = words[1] if words[0] == "print" else words[0]
        if run and words[0] != "print":
            values[name] = (
                int(words[2])
                if words[1] == "="
                else values[name] + 44 - ord(words[1][0])
            )
        run = True
        after.append(values[name])
    return torch.tensor(after)


def in_python(clauses):
    """Translates the program to Python, and runs it."""
    lines, indent = ["after = []"], ""
    for clause in clauses:
        words = clause.removesuffix(";").removesuffix(":").split()
        if words[0] == "if":
            lines += ["after.append(0)", " ".join(words) + ":"]
            indent = "    "
            continue
        name, do = (words[1], "pass") if words[0] == "print" else (words[0], None)
        if do is None:
            do = f"{name} {words[1][0]}= 1" if len(words) == 2 else " ".join(words)
        lines += [indent + do, f"after.append(globals().get({name!r}, 0))"]
        indent = ""
    names = {}
    exec("\n".join(lines), names)
    return torch.tensor(names["after"])


def by_recursion(clauses, values=None):
    """One clause, or a condition with its statement, and then the rest."""
    values = values or {}
    if not clauses:
        return torch.zeros(0, dtype=torch.int64)
    clause, *rest = clauses
    match clause.split():
        case ["if", name, sign, limit, _]:
            a, b = (values[t] if t in values else int(t) for t in (name, limit))
            inner = rest[0] if (a - b) * (-1 if sign == "<" else 1) > 0 else ""
            name = rest[0].split()[0]
            after = [0, *by_recursion([inner], values)] if inner else [0]
            values = values | ({name: int(after[1])} if inner else {})
            head = torch.tensor([0, values.get(name, 0)])
            return torch.cat([head, by_recursion(rest[1:], values)])
        case ["print", name, _]:
            pass
        case [name, "=", value, _]:
            values = values | {name: int(value)}
        case [name, step, _]:
            values = values | {name: values[name] + {"++": 1, "--": -1}[step]}
    head = torch.tensor([values.get(name, 0)])
    return torch.cat([head, by_recursion(rest, values)])


def with_tensors(clauses):
    """A row of values for all letters, and a mask in place of branches."""
    row, after, run = torch.zeros(128, dtype=torch.int64), [], torch.tensor(True)
    for clause in clauses:
        words = clause.split()
        if clause.startswith("if "):
            right = row[ord(words[3])] if words[3].isalpha() else int(words[3])
            left = row[ord(words[1])]
            run = left < right if words[2] == "<" else left > right
            after.append(torch.tensor(0))
            continue
        at = ord(words[1 if words[0] == "print" else 0])
        new = row[at] + words.count("++") - words.count("--")
        if "=" in words:
            new = torch.tensor(int(words[2]))
        row = row.clone()
        row[at] = torch.where(run, new, row[at])
        run = torch.tensor(True)
        after.append(row[at])
    return torch.stack(after)


# --- fool

CORE = ["x = 5 ;", "if x > 4 :", "x ++ ;", "if x > 9 :", "x -- ;", "print x ;"]
WALK = ["x ++ ;", "print x ;"]


def drawn_programs():
    """Of many random ones, the first that is good enough."""
    start = ["x = 9 ;", "if x < 10 :", "x -- ;", "if x < 4 :", "x ++ ;"]
    return (*start, "print x ;", *["x -- ;", "print x ;"] * 5)


# --- fair_scores


def at_once(first, second, tokens, labels):
    asked = labels >= 0
    right = [(m(tokens).argmax(-1) == labels) & asked for m in (first, second)]
    return 100 * torch.stack([r.sum() / asked.sum() for r in right])


def counted(first, second, tokens, labels):
    right, count = [0, 0], 0
    for row, wanted in zip(tokens, labels, strict=True):
        for x, y in zip(row, wanted, strict=True):
            if y < 0:
                continue
            count += 1
            for i, model in enumerate((first, second)):
                right[i] += int(model(x[None, None])[0, 0].argmax() == y)
    return torch.tensor([100 * r / count for r in right], dtype=torch.float64)


def weighted(first, second, tokens, labels):
    """A mean of the means of the parts, each with its number of answers."""
    parts = [*zip(tokens.split(3), labels.split(3), strict=True)]
    scores = []
    for model in (first, second):
        means = [(model(x).argmax(-1) == y)[y >= 0].double() for x, y in parts]
        weights = torch.tensor([float(len(m)) for m in means], dtype=torch.float64)
        each = torch.stack([m.sum() / max(1, len(m)) for m in means])
        scores.append(100 * (weights * each).sum() / weights.sum())
    return torch.stack(scores)


def in_numpy(first, second, tokens, labels):
    y = labels.numpy()
    right = [
        (m(tokens).numpy().argmax(-1) == y)[y >= 0].mean() for m in (first, second)
    ]
    return torch.from_numpy(100 * np.array(right))


# --- warm_start


def by_state_dicts(new, old, tokens):
    stack = FeedbackTransformer.from_transformer(old.blocks).state_dict()
    weights = {f"blocks.0.{name}": x for name, x in stack.items()}
    for name, x in old.state_dict().items():
        if name.startswith(("embedding", "norm")):
            weights[name] = x
    new.load_state_dict(weights)
    return new.eval()(tokens)


def by_assignment(new, old, tokens):
    new.embedding, new.norm = old.embedding, old.norm
    new.blocks[0] = FeedbackTransformer.from_transformer(old)
    new.eval()
    with torch.no_grad():
        return new(tokens)


def by_method(new, old, tokens):
    new.start_from(old)
    new.train(False)
    return new(tokens)


def in_training_mode(new, old, tokens):
    new.start_from(old)
    return new(tokens)


def token_by_token(new, old, tokens):
    new.start_from(old)
    new.eval()
    parts = [new(tokens[:, : t + 1])[:, -1:] for t in range(tokens.shape[1])]
    return torch.cat(parts, 1)


WRONG = {
    "interpreter": {
        "impatient(clauses)": "not set",
        "right(clauses)[:1]": "returns an integer",
        "right(clauses).double()": "returns an integer",
    },
    "fool": {
        "'x = 5 ;'": "at most 16",
        "[]": "at most 16",
        "CORE + WALK * 6": "at most 16",
        "['x = 5', *CORE[1:]]": "at most 16",
        "['y = 5 ;', 'print y ;']": "at most 16",
        "['if x > y :', 'x ++ ;']": "at most 16",
        "['print x ;', *CORE]": "legal",
        "CORE[1:]": "legal",
        "[*CORE, 'x = 7 ;']": "legal",
        "[*CORE[:2], *CORE[3:]]": "legal",
        "[*CORE[:2], 'print x ;']": "legal",
        "[*CORE, 'if x > 4 :']": "legal",
        "[*CORE, *['x ++ ;'] * 6]": "legal",
        "CORE": "at least 5",
        "CORE + ['print x ;'] * 8": "at least 5",
        "['x = 5 ;', *WALK * 5]": "at least 5",
        "[*CORE[:3], 'print x ;', *WALK * 4]": "at least 5",
    },
    "curriculum": {
        "2.0 + step": "returns an integer",
        "first + (last - first) * step // steps": "as many as last",
        "min(last, first + step)": "as many as last",
        "math.ceil(first + (last - first) * min(1, step / (share * steps)))": "evenly",
    },
    "warm_start": {
        "right(new, old, tokens)[:, -1]": "logits for each token",
        "right(new, old, tokens).softmax(-1)": "has the embedding",
        "feedback_trained._started(new, old, tokens, ('embedding',))": "has its final norm",
        "in_training_mode(new, old, tokens)": "without dropout",
    },
    "fair_scores": {
        "right(*inputs)[0]": "two numbers",
        "(right(*inputs) / 100, 1)[0]": "judges both",
        "torch.stack([right(*inputs)[0], feedback_trained._scored(*inputs, parts=2)[1]])": "same score",
    },
}
TOLD = {
    "interpreter": {
        "[0] * len(clauses)": "should return a tensor; it returned a list",
        "impatient(clauses)": "KeyError",
    },
    "fool": {
        "1 / 0": "ZeroDivisionError: division by zero",
        "None": "Expected a list of clauses, got something of type NoneType",
        "CORE": "your program: 1. Prints that fool all three rules: 1;",
    },
    "fair_scores": {
        "feedback_trained._scored(*inputs, shared=True)": "zip can be used up",
    },
}
RIGHT = {
    "interpreter": [in_python, by_recursion, with_tensors, lambda c: in_python([*c])],
    "fool": [
        drawn_programs,
        lambda: CORE + WALK * 4,
        lambda: tuple(fool()),
        lambda: [
            *("x = 4 ;", "if x < 2 :", "x ++ ;", "if x < 5 :", "x -- ;", "print x ;"),
            *["x ++ ;", "print x ;"] * 5,
        ],
    ],
    "curriculum": [
        lambda step, steps, first, last, share: (
            last
            if step >= share * steps
            else round(first + (last - first) * step / (share * steps))
        ),
        lambda step, steps, first, last, share: int(
            np.rint(np.interp(step, [0, share * steps], [first, last]))
        ),
        lambda step, steps, first, last, share: math.floor(
            first + (last - first) * min(step / steps, share) / share + 0.5
        ),
        lambda *inputs: int(torch.tensor(_grown(*inputs))),
    ],
    "warm_start": [
        by_state_dicts,
        by_assignment,
        by_method,
        token_by_token,
        lambda new, old, tokens: warm_start(new, old, tokens).double(),
    ],
    "fair_scores": [at_once, counted, weighted, in_numpy],
}
