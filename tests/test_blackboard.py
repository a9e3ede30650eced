"""The language of the rule editor means what it means with PyTorch's tensors.

docs/figures/blackboard.js runs the texts in Node; the same texts run in Python.
"""

import json
import math
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from npm import program
from torch.nn import functional as F

from fwlab import ops

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
RULES = json.loads((FIGURES / "rules.json").read_text("utf-8"))
#: Widths of a value and of a key, and tokens.
VALUE, KEY, TIME = 4, 5, 7
RUN = """
import { readFileSync } from "node:fs";
const { compile, value } = await import(process.argv[1]);
const made = ({ shape, data }) => value(shape, Float64Array.from(data));
const after = ({ text, ...given }) => {
  let W = made(given.W);
  const tokens = given.tokens.map((token) =>
    Object.fromEntries(Object.entries(token).map(([name, x]) => [name, made(x)])),
  );
  try {
    const step = compile(text, Object.keys({ W, ...tokens[0] }));
    for (const token of tokens) W = step({ W, ...token });
    return { ...W, data: [...W.data] };
  } catch (error) {
    return { error: error.message };
  }
};
console.log(JSON.stringify(JSON.parse(readFileSync(0)).map(after)));
"""
FUNCTIONS = (torch.outer, torch.diag, torch.exp, torch.log, torch.sqrt, torch.abs)
FUNCTIONS += (torch.sign, torch.relu, torch.tanh, torch.sigmoid, torch.sum)
FUNCTIONS += (torch.maximum, torch.minimum, torch.where)


def numbers(data):
    """Return numbers of JSON as a tensor; what is no number there is NaN."""
    known = [math.nan if x is None else x for x in data]
    return torch.tensor(known, dtype=torch.float64)


def as_tensor(x):
    return (
        x
        if isinstance(x, torch.Tensor)
        else torch.tensor(float(x), dtype=torch.float64)
    )


def in_page(cases, module=FIGURES / "blackboard.js"):
    """Run texts as the page does: W after all tokens, or an error."""

    def plain(x):
        return {"shape": list(x.shape), "data": x.flatten().tolist()}

    sent = [
        {
            "text": text,
            "W": plain(W),
            "tokens": [{name: plain(x) for name, x in each.items()} for each in tokens],
        }
        for text, W, tokens in cases
    ]
    command = [*program("node"), "--input-type=module", "-e", RUN, module.as_uri()]
    done = subprocess.run(
        command, input=json.dumps(sent), capture_output=True, text=True, check=True
    )
    return [
        x if "error" in x else numbers(x["data"]).view(x["shape"])
        for x in json.loads(done.stdout)
    ]


def of_tensors(f):
    return lambda *x: f(*map(as_tensor, x))


def in_python(text, W, tokens):
    scope = {f.__name__: of_tensors(f) for f in FUNCTIONS}
    scope["norm"] = of_tensors(torch.linalg.vector_norm)
    exec(text, scope)
    W = W.clone()  # += changes it in place
    takes = scope["step"].__code__.co_varnames[: scope["step"].__code__.co_argcount]
    for token in tokens:
        given = {"W": W, **token}
        W = scope["step"](*(given[name] for name in takes))
    return W


def drawn(seed):
    """Draw an empty memory, and what a step may take at every token."""
    torch.manual_seed(seed)
    real = {"dtype": torch.float64}

    def token(n):
        given = {
            name: torch.rand((), **real) for name in ("beta", "beta2", "alpha", "c")
        }
        given |= {name: torch.rand(KEY, **real) for name in ("alphas", "erase")}
        given |= {name: torch.randn(VALUE, **real) for name in ("v", "v2")}
        given |= {name: torch.randn(KEY, **real) for name in ("k", "k2")}
        given |= {name: F.normalize(given[name], dim=0) for name in ("k", "k2")}
        return given | {
            "write": torch.rand(VALUE, **real),
            "n": torch.tensor(n, **real),
        }

    return torch.zeros(VALUE, KEY, **real), [token(n + 1) for n in range(TIME)]


def in_fwlab(operation, tokens):
    """Run the operation of fwlab that a text stands for."""
    given = {name: torch.stack([x[name] for x in tokens]) for name in tokens[0]}
    k, beta = given["k"], given["beta"]
    given |= {"ask": given["c"], "q": k, "log_decay": given["alpha"].log()}
    if operation == "gated_rule":
        given["beta"] = 1 / given["n"]
    if operation in ("kimi_delta_rule", "gated_delta_rule_2"):
        given["log_decay"] = given["alphas"].log()
    if operation == "rwkv7_rule":
        given |= {"a": -k, "b": beta[:, None] * k, "k": beta[:, None] * k}
        given["log_decay"] = given["alphas"].clamp(min=0.545).log()
    if operation == "delta_product":
        given |= {
            x: torch.stack([given[x], given[f"{x}2"]], 1) for x in ("k", "v", "beta")
        }
    rule = ops.TABLE[operation].rule
    options = {"normalize": False} if rule.normalized_loop else {}
    names = [
        x for x in rule.tensors.names if x != "log_decay" or "alpha" in TAKES[operation]
    ]
    for name in names:
        x = given[name]
        steps = operation == "delta_product" and name in ("k", "v", "beta")
        options[name] = x[None].unsqueeze(3 if steps else 2)  # one sequence, one head
    f = ops.TABLE[operation]
    return f(**options, return_state=True, implementation="naive")[1][0, 0]


TAKES = {rule["operation"]: rule["text"].partition(")")[0] for rule in RULES}


def worst(cases, module=FIGURES / "blackboard.js"):
    """Return the largest difference, relative to 1 at least; infinite after an error."""
    largest = 0.0
    for case, W in zip(cases, in_page(cases, module), strict=True):
        if isinstance(W, dict):
            return float("inf")
        right = in_python(*case)
        off = (W - right).abs() / right.abs().clamp(min=1)
        largest = max(
            largest, off.max().item() if off.isfinite().all() else float("inf")
        )
    return largest


def test_ten_rules_are_those_of_fwlab():
    cases = [(rule["text"], *drawn(seed)) for rule in RULES for seed in range(3)]
    assert len(RULES) == 10 and worst(cases) < 1e-12
    for rule in RULES:
        W, tokens = drawn(7)
        text = in_python(rule["text"], W, tokens)
        assert torch.allclose(text, in_fwlab(rule["operation"], tokens), atol=1e-12)


# --- Random rules -------------------------------------------------------------

#: Expressions by what they are; a letter in braces stands for another expression: n is
#: a number, k a key, v a value and m a matrix. The first is the simplest.
GRAMMAR = {
    "n": "beta;0.5;1e-1;sum({k});norm({v});norm({m});{k} @ {k};exp(-{n});{n} ** 2;"
    "-{n} ** 2;1 / (1 + {n} ** 2);sqrt(abs({n}));log(1 + abs({n}));2 ** -1;2 ** 3 ** 0.5;"
    "minimum({n}, {n});{n} - {n} - {n};{n} / 2 / 2;sum({m});beta + 2 * {n};1 - {n} * {n}",
    "k": "k;{v} @ {m};{k} * {k};{k} - {k};{n} * {k};-{k};relu({k});where({k} > 0, {k}, {n})",
    "v": "v;{m} @ {k};{v} + {v};{v} / (1 + {v} ** 2);{n} * {v};sigmoid({v});tanh({v});"
    "sign({v});maximum({v}, {n});where({v} <= {n}, 0, {v});v - {n} * {m} @ {k}",
    "m": "W;outer({v}, {k});{m} + {m};{m} - {m} - {m};{n} * {m};{m} * {k};diag({v}) @ {m};"
    "{m} @ diag({k});tanh({m});abs({m});where({m} > {n}, {m}, 0);{m} + {k};{m} - {n}",
}


def variant(choose):
    """Make a step of several lines, by chance."""

    def grow(what, depth):
        choices = GRAMMAR[what].split(";")
        text = choose.choice(choices) if depth else choices[0]
        while (at := text.find("{")) >= 0:
            part = grow(text[at + 1], max(0, depth - 1))
            part = f"({part})" if depth > 1 else part
            text = text[:at] + part + text[at + 3 :]
        return text

    lines = [f"x = {grow('m', 3)}", f"W {choose.choice('+-')}= tanh(x)"]
    lines += [f"y = {grow('v', 3)}", f"return W / 2 + outer(tanh(y), {grow('k', 1)})"]
    return "def step(W, k, v, beta):\n" + "\n".join(f"    {line}" for line in lines)


def variants(count):
    """Draw random rules that depend on all that they take, and stay finite."""
    choose, found = random.Random(0), []
    while len(found) < count:
        case = variant(choose), *drawn(len(found))
        if depends(*case):
            found.append(case)
    return found


def depends(text, W, tokens):
    end = in_python(text, W, tokens)
    others = [
        in_python(text, W, [x | {name: x[name] + 0.01} for x in tokens])
        for name in ("k", "v", "beta")
    ]
    # A memory that starts with other numbers, after one token.
    first, other = (in_python(text, start, tokens[:1]) for start in (W, W + 0.01))
    moved = [
        (x - y).abs().max() for x, y in [(end, x) for x in others] + [(first, other)]
    ]
    return bool(end.isfinite().all()) and min(moved) > 1e-6


@pytest.fixture(scope="module")
def many():
    return variants(100)


def test_a_hundred_random_rules(many):
    assert len({text for text, *_ in many}) == 100 and worst(many) < 1e-6


@pytest.mark.parametrize(
    "right, fault",
    {
        "a turned sign": ("((a, b) => a - b,", "((a, b) => b - a,"),
        "* binds like +": (
            '"*": [2,',
            '"*": [1,',
        ),
        "-x ** 2 is (-x) ** 2": ("joined(SIGN) : operand()", "operand() : operand()"),
        "a vector does not go with every row": ("b[i % b.length]", "b[i]"),
        "> is <": ('each((a, b) => +(a > b), ">")', 'each((a, b) => +(a < b), ">")'),
        "a column in place of a row": (
            "and[j * columns + c]",
            "and[c * inner + j]",
        ),
    }.values(),
)
def test_planted_faults_are_seen(many, tmp_path, right, fault):
    source = (FIGURES / "blackboard.js").read_text("utf-8")
    assert source.count(right) == 1
    wrong = tmp_path / "blackboard.js"
    wrong.write_text(source.replace(right, fault), "utf-8")
    assert worst(many, wrong) > 1e-6


# --- What it refuses ------------------------------------------------------------


@pytest.mark.parametrize(
    "text, said",
    {
        "W + outer(v, k)": "line 1: write def step(W, k, v, beta): and nothing else",
        "def step(W): return W": "line 1: write def step(W, k, v, beta): and nothing",
        "def step(W, k, k):\n    return W": "line 1: an input stands there twice",
        "def step(W, k):\n    sum = k": "line 2: sum is a function; take another name",
        "def step(W):\n    W -= 1) * (2": "line 2: did not expect )",
        "def step(W):\n    return where(W constructor 0, W, 0)": "line 2: where begins with",
        "def step(W):\n    return W constructor": "line 2: did not expect constructor",
        "def step(W, gamma):\n    return W": "line 1: no input gamma; there are W, ",
        "def step(W, k):\n    return W + kk": "line 2: no name kk; there are W, k",
        "def step(W):\n\n    x = 2\n    return W * sin(x)": "line 4: no function sin;",
        "def step(W, k):\n    return W @ k": "line 2: return the new W, a matrix of 4 × 5, "
        "not a vector of 4",
        "def step(W, v):\n    return W * v": "line 2: a matrix of 4 × 5 * a vector of 4 ",
        "def step(W, beta):\n    return beta @ W": "line 2: @ takes vectors and matrices, ",
        "def step(W, v):\n    return outer(W, v)": "line 2: outer takes vectors, not a matrix",
        "def step(W):\n    x = W": "line 2: end with return, and the new W",
        "def step(W):\n    return W\n    x = W": "line 3: nothing comes after return",
        "def step(W):\nreturn W": "line 2: put spaces before it, since it is inside step",
        "def step(W):\n    if W > 0:": "line 2: write name = ... or return ...",
        "def step(W):\n    return W > 0": "line 2: > is for where(k > 0, k, 0) alone",
        "def step(W):\n    return where(W, W, 0)": "line 2: where begins with a comparison",
        "def step(W):\n    return (W": "line 2: expected ) before the end",
        "def step(W):\n    return W W": "line 2: did not expect W",
        "def step(W):\n    return W.T": "line 2: there are no methods here, such as W.T",
        "def step(k):\n    return k[0]": "line 2: there are no parts here, such as k[0]",
        "def step(W):\n    return constructor": "line 2: no name constructor",
        "def step(W):\n    return toString(W)": "line 2: no function toString",
        "def step(W):\n    return " + "(" * 1_900 + "W": "line 2: ",
        "def step(W):\n    return W" + " " * 2_000: "line 1: a rule has at most 2000",
        "def step(W):\n    lambda = 2": "line 2: lambda is a word of Python",
    }.items(),
)
def test_a_mistake_has_its_line(text, said):
    ((found),) = in_page([(text, *drawn(0))])
    assert found["error"].startswith(said)


def test_work_is_bounded():
    W = torch.zeros(32, 32, dtype=torch.float64)
    text = "def step(W):\n    return W @ " + "W @ " * 200 + "W"
    ((found),) = in_page([(text, W, [{"k": W[0]}])])
    assert found["error"].startswith("line 2: this takes too long")


# --- The tasks ------------------------------------------------------------------

DRAW = """
const [tasks, rules, language] = await Promise.all([
  import(process.argv[1] + "/tasks.js"),
  import(process.argv[1] + "/rules.json", { with: { type: "json" } }),
  import(process.argv[1] + "/blackboard.js"),
]);
const found = {};
for (const task of Object.keys(tasks.TASKS))
  for (const two of [false, true]) {
    const setting = { task, pairs: 5, width: 24, length: 1, strength: 1, two };
    const { tokens, values, keys } = tasks.draw(setting, 3);
    const shares = rules.default.map(({ name, text }) => {
      const step = language.compile(text, Object.keys(tasks.INPUTS));
      const draws = [0, 1, 2, 3, 4].map((seed) => tasks.draw(setting, seed));
      return [name, draws.map((drawn) => tasks.share(step, drawn))];
    });
    const told = tokens.map(({ words, want, given }) => [words, want, given.beta.data[0]]);
    found[`${task} ${two}`] = { told, values, keys, shares: Object.fromEntries(shares) };
  }
const tight = { task: "forget", pairs: 10, width: 10, length: 1, strength: 0.9, two: false };
found.tight = Object.fromEntries(rules.default.map(({ name, text }) => {
  const step = language.compile(text, Object.keys(tasks.INPUTS));
  return [name, [...Array(20).keys()].map((seed) => tasks.share(step, tasks.draw(tight, seed)))];
}));
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def tasks():
    command = [*program("node"), "--input-type=module", "-e", DRAW, FIGURES.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_tokens_say_what_each_key_should_hold(tasks):
    assert len(tasks) == 7
    for name, drawn in tasks.items():
        if name == "tight":
            continue
        keys = [x["words"] for x in drawn["keys"]]
        values = [x["words"] for x in drawn["values"]]
        holds = {}
        for words, want, _ in drawn["told"]:
            if " gets " in words:
                key, value = words.split(" gets ")
                if name.startswith("forget") and words == "key 1 gets value 1":
                    holds.clear()  # a new topic
                holds[key] = value
            elif words == "the sign turns":
                turned = {"plus": "minus", "minus": "plus"}
                holds["the sign"] = turned[holds["the sign"]]
            else:
                one, other = (f"place {x}" for x in re.findall(r"\d+", words))
                holds[one], holds[other] = holds[other], holds[one]
            said = {keys[i]: values[j] for i, j in enumerate(want) if j >= 0}
            assert said == holds
        largest = max(beta for *_, beta in drawn["told"])
        assert largest == (2 if name == "track true" else 1)


def test_what_rules_can_and_cannot(tasks):
    """By theory, with room for all keys: see docs/figures/write.md."""

    def shares(task, rule):
        return tasks[task]["shares"][rule]

    swaps = ("delta", "gated delta", "Kimi", "gated delta 2", "Comba", "product")
    assert all(x == 1 for rule in swaps for x in shares("track true", rule))
    assert all(x < 1 for rule in swaps for x in shares("track false", rule))
    assert all(x < 1 for rule in ("sum", "RWKV-7") for x in shares("track true", rule))
    for same in ("gated delta", "Kimi", "gated delta 2", "Comba", "RWKV-7"):
        assert shares("replace true", same) == shares("replace true", "delta")
    assert sum(shares("replace true", "delta")) > sum(shares("replace true", "sum"))
    # Where not all keys fit: it helps to forget, or to correct.
    gated, delta, adds = (sum(tasks["tight"][x]) for x in ("gated", "delta", "sum"))
    assert gated > delta + 1 > adds + 2
    assert tasks["tight"]["implicit"] != tasks["tight"]["delta"]
