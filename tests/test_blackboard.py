"""Test that docs/figures/blackboard.js and PyTorch agree on rules of the editor."""

import json
import math
import random
import re
import subprocess
from pathlib import Path

import torch
from npm import program
from torch.nn.functional import normalize

from fwlab import ops
from fwlab.exercises.blackboard import compiled

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
BLACKBOARD = FIGURES / "blackboard.js"
RULES = json.loads((FIGURES / "rules.json").read_text("utf-8"))
#: The widths of values and keys.
VALUE, KEY = 4, 5
RUN = """
import { readFileSync } from "node:fs";
const { compile, value } = await import(process.argv[1]);
const shape = (x) => (Array.isArray(x) ? [x.length, ...shape(x[0])] : []);
const made = (x) => value(shape(x), Float64Array.from([x].flat(2)));
const after = ([text, first, tokens]) => {
  try {
    const step = compile(text, ["W", ...Object.keys(tokens[0])]);
    const given = (token) => Object.entries(token).map(([name, x]) => [name, made(x)]);
    const next = (W, token) => step({ W, ...Object.fromEntries(given(token)) });
    return [...tokens.reduce(next, made(first)).data];
  } catch (error) {
    return error.message;
  }
};
console.log(JSON.stringify(JSON.parse(readFileSync(0)).map(after)));
"""


def in_page(cases):
    """Run rules in JavaScript, and return each rule's final W or its error."""
    command = [*program("node"), "--input-type=module", "-e", RUN, BLACKBOARD.as_uri()]
    sent = json.dumps([*cases], default=torch.Tensor.tolist)
    return json.loads(subprocess.check_output(command, input=sent, text=True))


def in_torch(text, W, tokens):
    step, takes = compiled(text)
    for token in tokens:
        W = step(*((token | {"W": W})[name] for name in takes))
    return W


def worst(cases):
    """Return the largest difference between JavaScript and PyTorch; inf on errors."""
    off = [0.0]
    for case, found in zip(cases, in_page(cases), strict=True):
        if isinstance(found, str) or None in found:
            return math.inf
        right = in_torch(*case).detach().flatten()
        apart = torch.tensor(found, dtype=right.dtype) - right
        off += apart.abs() / right.abs().clamp(min=1)
    return float(max(off))


def drawn(seed):
    """Return an empty W, and the random arguments of seven steps."""
    torch.manual_seed(seed)
    tokens = [
        {"n": torch.tensor(n + 1.0), "write": torch.rand(VALUE)} for n in range(7)
    ]
    for token in tokens:
        token |= {name: torch.rand(()) for name in ("beta", "beta2", "alpha", "c")}
        token |= {name: torch.rand(KEY) for name in ("alphas", "erase")}
        token |= {name: torch.randn(VALUE) for name in ("v", "v2")}
        token |= {name: normalize(torch.randn(KEY), dim=0) for name in ("k", "k2")}
    double = [{name: x.double() for name, x in token.items()} for token in tokens]
    return torch.zeros(VALUE, KEY).double(), double


def in_fwlab(operation, tokens, fades):
    """Return the final W of the fwlab operation for a rule in the editor."""
    given = {name: torch.stack([x[name] for x in tokens]) for name in tokens[0]}
    k, beta, alphas = given["k"], given["beta"], given["alphas"]
    given |= {"ask": given["c"], "q": k, "log_decay": given["alpha"].log()}
    if operation == "gated_rule":
        given["beta"] = 1 / given["n"]
    if operation in ("kimi_delta_rule", "gated_delta_rule_2"):
        given["log_decay"] = alphas.log()
    if operation == "rwkv7_rule":
        given |= {"a": -k, "b": beta[:, None] * k, "k": beta[:, None] * k}
        given["log_decay"] = alphas.clamp(min=0.545).log()
    steps = ("k", "v", "beta") if operation == "delta_product" else ()
    given |= {x: torch.stack([given[x], given[f"{x}2"]], 1) for x in steps}
    f = ops.TABLE[operation]
    options = {"normalize": False} if f.rule.normalized_loop else {}
    for name in set(f.rule.tensors.names) - (set() if fades else {"log_decay"}):
        # Add batch and head dimensions of size 1.
        options[name] = given[name][None].unsqueeze(3 if name in steps else 2)
    return f(**options, return_state=True, implementation="naive")[1][0, 0]


def test_ten_rules_are_those_of_fwlab():
    cases = [(rule["text"], *drawn(seed)) for rule in RULES for seed in range(3)]
    assert len(RULES) == 10 and worst(cases) < 1e-12
    for rule in RULES:
        W = in_fwlab(rule["operation"], drawn(7)[1], "alpha" in rule["text"])
        assert torch.allclose(in_torch(rule["text"], *drawn(7)), W, atol=1e-12)


#: Expressions that may replace a name A in a rule; B is another name.
PLACES = """
A - B - A;-A ** 2;A / 2 / (1 + B ** 2);2 ** -1 * A;abs(A) ** 2 ** 0.5;A * B;B - A * A;
exp(-A ** 2);sqrt(abs(A));log(1 + abs(A));relu(A);tanh(A);sigmoid(A);sign(A) * B;
maximum(A, B);minimum(A, 1e-1);where(A > B, A, 0);where(B <= A, B, A);norm(B) * A;
sum(B) + A;A @ B;B @ A;outer(v, A);diag(v) @ A;A @ diag(k);beta + 2 * A;W + A
"""
BODY = """
    W -= k - beta
    return tanh(W) / 2 + outer(tanh(beta * (v - W @ k)), k)"""


def variant(choose):
    """Replace some names of a rule by random expressions."""
    body = BODY
    for _ in range(4):
        at = choose.choice([*re.finditer(r"\b(W|k|v|beta)\b(?! -?=)", body)])
        part = choose.choice(PLACES.split(";")).strip().replace("A", at[0])
        part = part.replace("B", choose.choice(["W", "k", "v", "beta", "0.5"]))
        body = f"{body[: at.start()]}({part}){body[at.end() :]}"
    return f"def step(W, k, v, beta):{body}"


def depends(text, W, tokens):
    """Return True if W's gradients with respect to all inputs are finite and not 0."""
    inputs = [W, tokens[-1]["k"], tokens[-1]["v"], tokens[-1]["beta"]]
    inputs = [x.requires_grad_() for x in inputs]
    try:
        end = in_torch(text, W, tokens)
        sizes = [d.abs().max() for d in torch.autograd.grad(end.sum(), inputs)]
    except (RuntimeError, TypeError):  # Shapes do not fit, or W is constant.
        return False
    return end.shape == W.shape and all(1e-6 < x < math.inf for x in sizes)


def test_a_hundred_random_rules():
    """JavaScript and PyTorch agree on a hundred random rules that use all inputs."""
    choose, found = random.Random(0), {}
    while len(found) < 100:
        case = variant(choose), *drawn(len(found))
        found |= {case[0]: case} if depends(*case) else {}
    assert worst(found.values()) < 1e-6
