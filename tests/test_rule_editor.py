"""Test the error messages and the tasks of the rule editor."""

import json
import re
import subprocess

import pytest
import torch
from npm import program
from test_blackboard import FIGURES, drawn, in_page

HEAD = "def step(W, k, v, beta):\n    "
#: Texts of rules, without `HEAD` unless they are complete, and the error messages.
MISTAKES = """
def step(W): return W => line 1: write def step(W, k, v, beta): and nothing else
def step(W, k, k):; return W => line 1: an input stands there twice
def step(W, gamma):; return W => line 1: no input gamma; there are W, n, write
sum = k => line 2: sum is a function; take another name
lambda = 2 => line 2: lambda is a word of Python, not a name
None = 2 => line 2: None is a word of Python, not a name
import = 2 => line 2: import is a word of Python, not a name
return W // 2 => line 2: there is no //
if W > 0: => line 2: write name = ... or return ...
W -= 1) * (2 => line 2: did not expect )
return W + kk => line 2: no name kk; there are W, k, v, beta
x = 2;; return W * sin(x) => line 4: no function sin; there are outer, diag, sum
return constructor => line 2: no name constructor
return toString(W) => line 2: no function toString
return W constructor => line 2: did not expect constructor
return where(W constructor 0, W, 0) => line 2: where begins with a comparison
return where(W, W, 0) => line 2: where begins with a comparison
return W > 0 => line 2: > is for where(k > 0, k, 0) alone
return W @ k => line 2: return the new W, a matrix of 4 × 5, not a vector of 4
return W * v => line 2: a matrix of 4 × 5 * a vector of 4 do not fit
return beta @ W => line 2: @ takes vectors and matrices, not a number
return outer(W, v) => line 2: outer takes vectors, not a matrix of 4 × 5
return exp(W, W) => line 2: exp takes 1, not 2
return (W => line 2: expected ) before the end
return W + => line 2: something is missing before the end
return outer(v -, k) => line 2: something is missing before ,
return W.T => line 2: there are no methods here, such as W.T
return k[0] => line 2: there are no parts here, such as k[0]
x = W => line 2: end with return, and the new W
return W;x = W => line 3: nothing comes after return
"""


MISTAKES = [line.split(" => ") for line in MISTAKES.strip().splitlines()] + [
    ["W + outer(v, k)", "line 1: write def step(W, k, v, beta): and nothing else"],
    ["def step(W):\nreturn W", "line 2: put spaces before it, since it is inside step"],
    [f"return {'(' * 60}W", "line 2: there are too many brackets"],
    [f"return W{' ' * 2_000}", "line 1: a rule has at most 2000 characters"],
]


def test_a_mistake_has_its_line():
    whole = ("def", "W + ")
    texts = [x if x.startswith(whole) else HEAD + x for x, _ in MISTAKES]
    found = in_page([(x.replace(";", "\n    "), *drawn(0)) for x in texts])
    for text, message, (_, said) in zip(texts, found, MISTAKES, strict=True):
        assert str(message).startswith(said), text


def test_work_is_bounded():
    W = torch.zeros(32, 32)
    text = f"def step(W):\n    return {'W @ ' * 200}W"
    (found,) = in_page([(text, W, [{"k": W[0]}])])
    assert found.startswith("line 2: this takes too long")


# --- The tasks ------------------------------------------------------------------

DRAW = """
const [folder, settings] = process.argv.slice(1);
const { default: rules } = await import(folder + "/rules.json", { with: { type: "json" } });
const { compile } = await import(folder + "/blackboard.js");
const { draw, share, INPUTS } = await import(folder + "/tasks.js");
console.log(JSON.stringify(JSON.parse(settings).map(([seeds, setting]) => {
  const draws = Array.from({ length: seeds }, (_, seed) => draw(setting, seed));
  const shares = ({ name, text }) => {
    const step = compile(text, Object.keys(INPUTS));
    return [name, draws.map((drawn) => share(step, drawn))];
  };
  return { ...draws[0], shares: Object.fromEntries(rules.map(shares)) };
})));
"""
ROOM = {"pairs": 5, "width": 24, "length": 1, "strength": 1}
#: Tasks by name: the number of draws, and the options of the task.
SETTINGS = {
    f"{task} {largest}": (5, ROOM | {"task": task, "two": largest == 2})
    for task in ("replace", "forget", "track")
    for largest in (1, 2)
}
TIGHT = ROOM | {"task": "forget", "pairs": 10, "width": 10, "strength": 0.9}


@pytest.fixture(scope="module")
def tasks():
    settings = SETTINGS | {"tight": (20, TIGHT)}
    command = [*program("node"), "--input-type=module", "-e", DRAW, FIGURES.as_uri()]
    done = subprocess.check_output([*command, json.dumps([*settings.values()])])
    return dict(zip(settings, json.loads(done), strict=True))


def test_tokens_say_what_each_key_should_hold(tasks):
    for name in SETTINGS:
        task = tasks[name]
        keys = [x["words"] for x in task["keys"]]
        values = [x["words"] for x in task["values"]]
        holds = {}
        for token in task["tokens"]:
            words, want = token["words"], token["want"]
            if " gets " in words:
                key, value = words.split(" gets ")
                if name.startswith("forget") and words == "key 1 gets value 1":
                    holds.clear()  # A new topic begins.
                holds[key] = value
            elif words == "the sign turns":
                turned = {"plus": "minus", "minus": "plus"}
                holds["the sign"] = turned[holds["the sign"]]
            else:
                one, other = (f"place {x}" for x in re.findall(r"\d+", words))
                holds[one], holds[other] = holds[other], holds[one]
            said = {keys[i]: values[j] for i, j in enumerate(want) if j >= 0}
            assert said == holds
        largest = max(token["given"]["beta"]["data"]["0"] for token in task["tokens"])
        assert largest == (2 if name == "track 2" else 1)


def test_what_rules_can_and_cannot(tasks):
    """Rules solve or fail tasks as theory predicts; see docs/figures/write.md."""

    def shares(task, rule):
        return tasks[task]["shares"][rule]

    swaps = ("delta", "gated delta", "Kimi", "gated delta 2", "Comba", "product")
    assert all(x == 1 for rule in swaps for x in shares("track 2", rule))
    assert all(x < 1 for rule in swaps for x in shares("track 1", rule))
    assert all(x < 1 for rule in ("sum", "RWKV-7") for x in shares("track 2", rule))
    for same in ("gated delta", "Kimi", "gated delta 2", "Comba", "RWKV-7"):
        assert shares("replace 2", same) == shares("replace 2", "delta")
    assert sum(shares("replace 2", "delta")) > sum(shares("replace 2", "sum"))
    # If not all keys fit, decay or erasing helps.
    gated, delta, adds = (sum(shares("tight", x)) for x in ("gated", "delta", "sum"))
    assert gated > delta + 1 > adds + 2
    assert shares("tight", "implicit") != shares("tight", "delta")
