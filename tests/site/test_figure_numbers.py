"""Test that scripts of figures compute the same results as fwlab.

Each case yields pairs: the results of a script, in Node, for some states of its
figure, and the results of fwlab's formulas for the same inputs.
"""

import functools
import json
import math
import re
import tomllib
from copy import deepcopy

import pytest
import torch
from built import ROOT
from export_web import WEB_MIXERS, export_web
from moves import WORDS
from pair import PairConfig, pair_model
from safetensors import safe_open
from script import computed
from torch.nn import functional as F

from fwlab import ops
from fwlab.data import Characters
from fwlab.data.retrieval import law, loss
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.models import LanguageModel
from fwlab.training import Checkpoint, CheckpointError, Config
from fwlab.training.checkpoint import new_model

FIGURES = ROOT / "docs" / "figures"
double = functools.partial(torch.tensor, dtype=torch.float64)


def sequence(*rows):
    """Add batch and head dimensions of size 1 to tensors `[time, ...]`."""
    return [x[None, :, None] for x in rows]


def written(rule: str, k, v, beta: float = 1):
    """Return the fast weights W that fwlab computes after writing all pairs."""
    k, v, beta = sequence(k, v, double([beta] * len(k)))
    if rule == "sum":
        return ops.sum_rule(k, k, v, normalize=False, return_state=True)[1][0, 0]
    write = {"gated": ops.gated_rule}.get(rule, ops.delta_rule)
    return write(k, k, v, beta, return_state=True)[1][0, 0]


# --- Rules on a few pairs ---


def memory(compute):
    """Yield each rule's W and retrieved values, from the figure and from fwlab."""
    places = [(45, [0.9, 0.8]), (65, [-1, 0.5]), (140, [0.6, -1])]
    pairs = [{"degrees": angle, "value": value} for angle, value in places]
    settings = [("delta", 1), ("delta", 0.35), ("gated", 0.6), ("sum", 1)]
    states = [
        {"rule": rule, "beta": beta, "pairs": pairs, "next": pairs[0]}
        for rule, beta in settings
    ]
    for (rule, beta), shown in zip(settings, compute(states), strict=True):
        angles = double([angle for angle, _ in places]).deg2rad()
        keys = torch.stack([angles.cos(), angles.sin()], dim=-1)
        W = written(rule, keys, double([value for _, value in places]), beta)
        yield shown["W"], W
        yield [one["readback"] for one in shown["pairs"]], keys @ W.mT


def dpfp(compute):
    """Yield DPFP features and similarities of two keys, from the figure and fwlab."""
    seconds = ([-0.4, 1.4], [1.1, 0.3], [-0.7, -1])
    states = [{"nu": nu, "keys": [[0.6, 1.2], x]} for nu in (1, 2, 3) for x in seconds]
    for state, shown in zip(states, compute(states), strict=True):
        k = double(state["keys"])
        phi = DPFP(state["nu"])(k)
        share, unit, straight = sum_normalize(phi), l2_normalize(phi), l2_normalize(k)
        yield shown["features"], phi
        yield shown["cosine"], unit[0] @ unit[1]
        yield shown["normalisedDot"], share[0] @ share[1]
        yield shown["plainCosine"], straight[0] @ straight[1]


def capacity(compute):
    """Yield the loss for each number of pairs, which is never below the bound `law`."""
    settings = [(16, 1, "random"), (4, 3, "orthogonal")]
    states = [dict(zip(("width", "nu", "kind"), x, strict=True)) for x in settings]
    for (_, nu, _), shown in zip(settings, compute(states), strict=True):
        for name, memory in shown["memories"].items():
            keys, room = double(memory["keys"]), memory["room"]
            phi = l2_normalize(DPFP(nu)(keys)) if name == "dpfp" else keys
            assert room == phi.shape[1]
            limits = double([law(S, room) for S in range(1, 129)])
            yield memory["law"], limits
            assert (double(memory["losses"]) - limits).min() > -1e-9
            for S in (1, 15, 17, 128):
                read = phi[:S] @ written(name, phi[:S], torch.eye(S).double()).mT
                yield memory["losses"][S - 1], loss(read, torch.arange(S))


def forgets(compute):
    """Yield the values that four rules and softmax attention retrieve for each key."""
    many = " ".join(f"k{i}=v{i % 7}" for i in range(20))
    states = [
        {"width": 16, "beta": 0.8, "decay": 0.95},
        {"text": "a=red b=blue | c=blue a=green c=red", "width": 4, "decay": 0.7},
        {"text": many, "width": 64, "beta": 0.35},
    ]
    for shown in compute(states, "{ ...figure.state, ...state, ...found }"):
        keys, values = dict(shown["keys"]), dict(shown["values"])
        k = double([keys[key] for key, _ in shown["pairs"]])
        v = double([values[value] for _, value in shown["pairs"]])
        q = double([keys[one["key"]] for one in shown["asked"]])
        # Each query is a separate sequence, whose last output is compared.
        q = q[:, None, None].expand(-1, len(k), -1, -1)
        k, v = (x[None, :, None].expand(len(q), -1, -1, -1) for x in (k, v))
        beta = torch.full_like(k[..., 0], shown["beta"])
        root = shown["width"] ** 0.5
        decay = torch.full_like(beta, shown["decay"]).log()
        for name, y in {
            "sum": ops.sum_rule(q, k, v, normalize=False),
            "gated": ops.gated_rule(q, k, v, beta),
            "delta": ops.delta_rule(q, k, v, beta),
            "gated delta": ops.gated_delta_rule(q, k, v, beta, decay),
            "softmax": ops.softmax_attention(root * q, root * k, v),
        }.items():
            answers = shown["memories"][name]
            yield [one["y"] for one in answers], y[:, -1, 0]
            for one, asked in zip(answers, shown["asked"], strict=True):
                assert one["right"] == (one["said"] == [asked["value"]])


# --- Attention Free Transformer ---


def biases(compute):
    """Yield the outputs and weights of each AFT variant, from the figure and fwlab."""
    states = [{"form": form} for form in ("conv", "local", "full", "simple")]
    for shown in compute(states):
        w, seen = (double(shown[x]).nan_to_num() for x in ("bias", "weights"))
        k, v = (double(shown[x])[None, :, None] for x in ("keys", "values"))
        # The outputs for one-hot values are the weights.
        yield shown["outputs"], ops.aft_full(50 + 0 * k, k, v, w)[0, :, 0]
        eye = torch.eye(len(w)).double()[None]
        weights = ops.aft_full(50 + 0 * eye, k.expand_as(eye), eye, w)[0]
        yield seen.tolist(), weights


def quotients(k, v, c):
    """Return AFT outputs in float32, with `c[t]` subtracted from all keys of row t."""
    rows = []
    for t in range(len(k)):
        weights = torch.exp(k[: t + 1] - c[t])
        above, below = (weights * v[: t + 1]).sum(), weights.sum()
        rows.append((above / below).item())
    return rows


def aft(compute):
    """Yield exact AFT outputs of the figure and fwlab, and check float32 methods."""
    sizes = (-20, 60, 88, 103, 106, 200)
    states = [{"step": step, "large": size} for step in (4, 6) for size in sizes]
    for state, shown in zip(states, compute(states), strict=True):
        keys, v = (torch.tensor(shown[x]) for x in ("keys", "values"))
        ends = [4 * (t // 4 + 1) for t in range(8)]
        k, y = keys[None, :, None], v[None, :, None]
        exact = ops.aft_simple(100 + 0 * k.double(), k.double(), y.double())[0, :, 0]
        yield shown["exact"], exact
        wanted = {
            "none": quotients(keys, v, [0] * 8),
            "global": quotients(keys, v, [keys.max()] * 8),
            "tile": quotients(keys, v, [keys[:end].max() for end in ends]),
            "running": ops.aft_simple(100 + 0 * k, k, y)[0, :, 0].tolist(),
        }
        for name, outputs in wanted.items():
            method = shown["methods"][name]
            lost = [t + 1 for t, y in enumerate(outputs) if not math.isfinite(y)]
            assert method["lost"] == lost, (name, state)
            got = [y for y in map(float, method["outputs"]) if math.isfinite(y)]
            assert got == pytest.approx([*filter(math.isfinite, outputs)], rel=1e-6)


@pytest.mark.parametrize("case", [memory, dpfp, capacity, forgets, biases, aft])
def test_a_figure_computes_what_fwlab_does(tmp_path, case):
    def compute(states, of="found"):
        ask = "given.map((state) => ({ ...figure.state, ...state })).map((state) => "
        ask += f"((found) => ({of}))(figure.compute(state)))"
        return computed(case.__name__, ask, states, tmp_path)

    count = 0
    for got, wanted in case(compute):
        wanted = torch.as_tensor(wanted).double()
        torch.testing.assert_close(double(got), wanted, rtol=1e-6, atol=1e-6)
        count += 1
    assert count > 7


def test_feedback_shows_what_reads_what(tmp_path):
    """In each model, the figure marks all states that the chosen state depends on."""
    layers, steps = range(4), range(1, 7)
    chosen = [(l, t) for l in layers[1:] for t in steps]
    ask = "given.map((chosen) => figure.compute({ chosen, drawn: 99 }))"
    for (l, t), models in zip(
        chosen, computed("feedback", ask, chosen, tmp_path), strict=True
    ):
        past = {(k, j) for j in steps for k in layers if j < t}
        below = {(k, j) for j in steps for k in range(l) if j <= t}
        direct = {
            "transformer": {(k, j) for k, j in below if k == l - 1},
            "feedback": {*past, (l - 1, t)},
        }
        found = {"transformer": below, "feedback": past | {(k, t) for k in range(l)}}
        depth = {"transformer": l, "feedback": (t - 1) * layers[-1] + l}
        for name, now in models.items():
            assert {*map(tuple, now["direct"])} == direct[name]
            reachable = {tuple(map(int, one.split(","))) for one in now["reachable"]}
            assert reachable == found[name]
            assert now["count"] == len({*map(tuple, now["path"])}) - 1 == depth[name]


# --- Trained models ---


def weights(path: str) -> tuple[dict, dict]:
    """Read a model's metadata and tensors from a weight file."""
    with safe_open(FIGURES / f"{path}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        return about, {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118


def result(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8"))


@functools.cache
def model(path: str) -> LanguageModel:
    """Load the weights of a figure into a PyTorch model."""
    about, tensors = weights(path)
    if path.startswith("live"):
        made = pair_model(PairConfig(**result(path.replace("/", "-"))["config"]))
    else:
        sizes = {name: about[name] for name in ("layers", "heads", "d_model")}
        made = LanguageModel(len(about["alphabet"]), about["mixer"], **sizes)
    made.load_state_dict(tensors)
    return made.eval()


def close(got, wanted):
    torch.testing.assert_close(torch.tensor(got), wanted, atol=1e-4, rtol=1e-5)


@torch.no_grad()
def test_the_pair_answers_as_pytorch_does(tmp_path):
    paths = {
        rule: str(FIGURES / f"live/{rule}.safetensors") for rule in ("sum", "delta")
    }
    ask = "({ facts: figure.state.facts, answers: given.map((path) => "
    ask += "figure.run(load(path), figure.state.facts).answers) })"
    shown = computed("live", ask, [*paths.values()], tmp_path)
    told = [word for name, at in shown["facts"] for word in (name, "is", "in", at, ".")]
    for rule, answers in zip(paths, shown["answers"], strict=True):
        for answer in answers:
            text = [*told, "Where", "is", answer["name"], "?"]
            words = torch.tensor([[*map(WORDS.index, text)]])
            logits = model(f"live/{rule}")(words)[0, -1]
            close(answer["logits"], logits)
            assert answer["said"] == WORDS[int(logits.argmax())]
            place = dict(shown["facts"])[answer["name"]]  # The last move counts.
            assert answer["right"] == (answer["said"] == place)
            share = logits.softmax(-1)[WORDS.index(place)]
            assert answer["truth"] == pytest.approx(share.item(), abs=1e-4)


@pytest.mark.parametrize("rule", ["delta", "sum"])
@torch.no_grad()
def test_shakespeare_reads_as_pytorch_does(fresh, rule):
    """The figure computes the same losses, logits and fast weights as PyTorch."""
    figure = fresh("shakespeare")
    figure.start()
    figure.choose(f"{rule} rule")
    figure.until(f"state().rule === '{rule}'")
    text = "KING:\nWhat say you, sir? The crown, the crown!\n\nQUEEN:\nWhat crown"
    figure.text.fill(text)
    shown, made = figure.state(), model(f"shakespeare/{rule}")
    alphabet = weights(f"shakespeare/{rule}")[0]["alphabet"]
    tokens = torch.tensor([[*map(alphabet.index, text)]])
    logits = made(tokens)[0]
    close(shown["logits"], logits[-1])
    losses = F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    close(shown["bits"][1:], losses / math.log(2))
    layer, head = shown["head"]
    states = made.prefill(tokens)[1][1:]
    W = (states[layer] if rule == "delta" else states[layer].W)[0, head]
    close(shown["W"], W.flatten())


@pytest.mark.parametrize("mixer", WEB_MIXERS)
@torch.no_grad()
def test_an_exported_model_runs_in_a_page(tmp_path, mixer):
    """JavaScript runs an exported model in float16; unsupported models raise errors."""
    config = Config(mixer=mixer, layers=2, heads=2, d_model=8)
    made, tokens = new_model(config, 4), [0, 3, 1, 1, 2]
    run = Checkpoint(made, Characters("abcd"), config, 1, {}, [], "")
    path = tmp_path / "model.safetensors"
    assert export_web(path, run) == path.stat().st_size
    ask = "(() => { const made = load(given[0]), state = made.start(); return "
    ask += "given[1].map((token) => Array.from(made.step(token, state).logits)); })()"
    shown = computed("live", ask, [str(path), tokens], tmp_path)
    close(shown, made.half().float()(torch.tensor([tokens]))[0])
    with pytest.raises(CheckpointError, match="got softmax"):
        export_web(path, run._replace(config=Config(mixer="softmax")))
    for name, value in {"conv": 4, "like": "delta-net"}.items():
        with pytest.raises(CheckpointError, match=f"has no {name}"):
            export_web(path, run._replace(config=Config(mixer=mixer, **{name: value})))


def test_the_home_page_says_what_each_of_the_pair_can():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    for run in (result("live-sum"), result("live-delta")):
        for share in run["right"].values():
            assert re.search(rf"\b{100 * share:.1f} %", text)


# --- Puzzles ---

PUZZLES = tomllib.loads((FIGURES / "puzzles.toml").read_text("utf-8"))


def judged(answers: list, folder) -> list[dict]:
    """Return the page's verdict on each answer, which is a (puzzle name, rows) pair."""
    ask = "given.map(([name, answer]) => figure.judge(name, answer))"
    return computed("puzzles", ask, answers, folder)


def test_answers_to_puzzles_are_right(tmp_path):
    """The stored answer to each puzzle is correct and of minimal size."""
    verdicts = judged([(name, p["answer"]) for name, p in PUZZLES.items()], tmp_path)
    for (name, puzzle), verdict in zip(PUZZLES.items(), verdicts, strict=True):
        assert verdict["right"] and verdict["size"] == puzzle["best"], name
        assert verdict["says"].endswith(f"Nothing smaller exists: {puzzle['why']}.")


#: Wrong answers: a puzzle, the changed cells of the answer, and the page's message.
MISTAKES = """
keep; a=, key: one => ✗ a=, key: expected numbers such as 1, 0.5, 1/2 or √3,
keep; a=, key: 1 0 => need the same length; there are 2 and 1.
keep; a=, key: 1 0; a?, query: 1 0 => ✗ At most 1 column, got 2.
keep; a=, beta: 2 => ✗ a=: expected β · |key|² from 0 to 1, got 2.
keep; a=, key: 0.001 => in size; got 0.001.
keep; a=, beta: 1 1 => ✗ a=: expected one number as β.
keep; a=, value: 1 1 => ✗ a=: expected 1 numbers as the value.
keep; a=, value: 7 => the last reading is 7, expected 3.
flip; flip, value: x => ✗ flip: no number comes with this token
names; b=, key: 0.5 0 => a= and b= share a key: what one writes takes the place
names; b=, key: 3/5 4/5 => its key and the query of a? overlap, with a product of 0.6.
names; a?, query: 0 1 => What a=3,1 writes is not read: its key and the query of a? are
names; a=, value: 2*x => a=3,1 takes it from 0,0 to 6,2, not to 3,1; of what its key held
names; a=, value: 0 => a=3,1 changes nothing: its key holds that value already
"""


def test_what_is_wrong_in_a_puzzle_is_said(tmp_path):
    """The page names the misconception behind a wrong answer."""
    cases, wanted = [], []
    for line in MISTAKES.strip().splitlines():
        changes, _, said = line.partition(" => ")
        name, *cells = changes.split("; ")
        answer = deepcopy(PUZZLES[name]["answer"])
        for kind, field, text in (re.split(", |: ", cell) for cell in cells):
            answer[kind][0][field] = text
        cases.append((name, answer))
        wanted.append(said)
    for verdict, said in zip(judged(cases, tmp_path), wanted, strict=True):
        assert said in verdict["says"]
