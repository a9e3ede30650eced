"""What figures compute is what fwlab computes.

Each case yields pairs: what a script has, by Node, for some states of its figure, and
what the formulas of fwlab have for the same inputs.
"""

import functools
import json
import math
import re
import tomllib
from copy import deepcopy
from itertools import pairwise, zip_longest

import pytest
import torch
from built import ROOT
from moves import NAMES, PLACES, WORDS
from pair import PairConfig, pair_model
from safetensors import safe_open
from script import computed
from torch.nn import functional as F

from fwlab import ops
from fwlab.data.retrieval import law, loss
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel

FIGURES = ROOT / "docs" / "figures"
double = functools.partial(torch.tensor, dtype=torch.float64)


def sequence(*rows):
    """As the inputs of an operation: one text, one head."""
    return [x[None, :, None] for x in rows]


def written(rule: str, k, v, beta: float = 1):
    """Return W after all pairs."""
    k, v, beta = sequence(k, v, double([beta] * len(k)))
    if rule == "sum":
        _, W = ops.sum_rule(k, k, v, normalize=False, return_state=True)
    else:
        write = {"gated": ops.gated_rule}.get(rule, ops.delta_rule)
        _, W = write(k, k, v, beta, return_state=True)
    return W[0, 0]


# Rules on a few pairs


def memory(compute):
    """W and every reading, for each rule."""
    places = [(45, [0.9, 0.8]), (65, [-1, 0.5]), (140, [0.6, -1])]
    pairs = [{"degrees": angle, "value": value} for angle, value in places]
    settings = [("delta", 1), ("delta", 0.35), ("gated", 0.6), ("sum", 1)]
    states = [
        {"rule": rule, "beta": beta, "pairs": pairs, "next": pairs[0]}
        for rule, beta in settings
    ]
    for (rule, beta), shown in zip(settings, compute(states), strict=True):
        keys = double([one["key"] for one in shown["pairs"]])
        angles = double([angle for angle, _ in places]).deg2rad()
        yield keys.tolist(), torch.stack([angles.cos(), angles.sin()], dim=-1)
        values = double([value for _, value in places])
        W = written(rule, keys, values, beta)
        yield shown["W"], W
        read = keys @ W.mT
        yield [one["readback"] for one in shown["pairs"]], read
        yield [one["error"] for one in shown["pairs"]], (read - values).norm(dim=-1)


def dpfp(compute):
    """Features of both keys, in fwlab's order, and their overlaps."""
    states = [
        {"nu": nu, "keys": [[0.6, 1.2], second]}
        for nu in (1, 2, 3)
        for second in ([-0.4, 1.4], [1.1, 0.3], [-0.7, -1])
    ]
    for state, shown in zip(states, compute(states), strict=True):
        k = double(state["keys"])
        phi = DPFP(state["nu"])(k)
        share, unit, straight = sum_normalize(phi), l2_normalize(phi), l2_normalize(k)
        yield shown["features"], phi
        yield shown["normalised"], share
        yield [shown["dot"], shown["cosine"]], [phi[0] @ phi[1], unit[0] @ unit[1]]
        yield shown["normalisedDot"], share[0] @ share[1]
        yield shown["plainDot"], k[0] @ k[1]
        yield shown["plainCosine"], straight[0] @ straight[1]


def capacity(compute):
    """Losses after every number of pairs; none is below the law."""
    settings = [(16, 1, "random"), (4, 3, "orthogonal")]
    states = [dict(zip(("width", "nu", "kind"), x, strict=True)) for x in settings]
    for (width, nu, _), shown in zip(settings, compute(states), strict=True):
        for name, memory in shown["memories"].items():
            keys, room = double(memory["keys"]), memory["room"]
            yield room, DPFP(nu).width(width) if name == "dpfp" else width
            phi = l2_normalize(DPFP(nu)(keys)) if name == "dpfp" else keys
            limits = [law(S, room) for S in range(1, 129)]
            yield memory["law"], limits
            assert (double(memory["losses"]) - double(limits)).min() > -1e-9
            for S in (1, 15, 17, 128):
                W = written(name, phi[:S], torch.eye(S).double())
                read = phi[:S] @ W.mT
                yield memory["losses"][S - 1], loss(read, torch.arange(S))
                others = read - torch.diag(torch.full((S,), 1e9))
                right = (read.diagonal() > others.amax(1) + 1e-9).sum()
                yield memory["right"][S - 1], right if S > 1 else 1


def forgets(compute):
    """Yield what five memories read for every key that is asked for."""
    many = " ".join(f"k{i}=v{i % 7}" for i in range(20))
    states = [
        {"width": 16, "beta": 0.8, "decay": 0.95},
        {"text": "a=red b=blue | c=blue a=green c=red", "width": 4, "decay": 0.7},
        {"text": many, "width": 64, "beta": 0.35},
    ]
    for shown in compute(states, "{ ...figure.state, ...state, ...found }"):
        keys, values = dict(shown["keys"]), dict(shown["values"])
        k, v = (
            double([of[p[i]] for p in shown["pairs"]])
            for i, of in ((0, keys), (1, values))
        )
        q = double([keys[one["key"]] for one in shown["asked"]])
        # Each query is a text of its own, whose last step reads.
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
            near = [*values]
            for one, asked, read in zip(
                answers, shown["asked"], y[:, -1, 0], strict=True
            ):
                like = double([*values.values()]) @ read
                best = [near[i] for i in (like > like.max() - 1e-9).nonzero()[:, 0]]
                assert one["said"] == (best if read.any() else [])
                assert one["right"] == (one["said"] == [asked["value"]])


# Attention Free Transformer


def biases(compute):
    """Weights and outputs of each form."""
    states = [{"form": form} for form in ("conv", "local", "full", "simple")]
    for shown in compute(states):
        w, seen = (double(shown[x]).nan_to_num() for x in ("bias", "weights"))
        k, v = (double(shown[x])[None, :, None] for x in ("keys", "values"))
        # Outputs; and weights, as the outputs of one-hot values.
        yield shown["outputs"], ops.aft_full(50 + 0 * k, k, v, w)[0, :, 0]
        eye = torch.eye(len(w)).double()[None]
        weights = ops.aft_full(50 + 0 * eye, k.expand_as(eye), eye, w)[0]
        yield seen.tolist(), weights


def quotients(k, v, c):
    """float32, with `c[t]` taken off all keys that row t sees."""
    rows = []
    for t in range(len(k)):
        weights = torch.exp(k[: t + 1] - c[t])
        above = below = torch.zeros(())
        for weight, value in zip(weights, v, strict=False):
            above, below = above + weight * value, below + weight
        rows.append((above / below).item())
    return rows


def aft(compute):
    """Four ways to compute float32 outputs, for large keys of every kind."""
    sizes = (-20, 60, 88, 103, 106, 200)
    states = [{"step": step, "large": size} for step in (4, 6) for size in sizes]
    for state, shown in zip(states, compute(states), strict=True):
        keys, v = (torch.tensor(shown[x]) for x in ("keys", "values"))
        ends = [4 * (t // 4 + 1) for t in range(8)]
        k, y = keys[None, :, None], v[None, :, None]
        open_gate = 100 + 0 * k
        exact = ops.aft_simple(open_gate.double(), k.double(), y.double())[0, :, 0]
        yield shown["exact"], exact
        wanted = {
            "none": quotients(keys, v, [0] * 8),
            "global": quotients(keys, v, [keys.max()] * 8),
            "tile": quotients(keys, v, [keys[:end].max() for end in ends]),
            "running": ops.aft_simple(open_gate, k, y)[0, :, 0].tolist(),
        }
        for name, outputs in wanted.items():
            method = shown["methods"][name]
            lost = [t + 1 for t, y in enumerate(outputs) if not math.isfinite(y)]
            assert method["lost"] == lost, (name, state)
            got = [y for y in map(float, method["outputs"]) if math.isfinite(y)]
            kept = [y for y in outputs if math.isfinite(y)]
            assert got == pytest.approx(kept, rel=1e-6)
            errors = [
                abs(y / x - 1) for y, x in zip(outputs, exact.tolist(), strict=True)
            ]
            wrong = [t + 1 for t, e in enumerate(errors) if e > 1e-3]
            assert method["wrong"] == [t for t in wrong if t not in lost], name
            plotted = shown["worst"][name][state["large"] + 20]
            assert plotted["lost"] == bool(lost)
            finite = [e for t, e in enumerate(errors, 1) if t not in lost]
            assert plotted["error"] == pytest.approx(
                max(finite, default=0), rel=0.02, abs=5e-7
            )


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


# Feedback


def test_feedback_shows_what_reads_what(tmp_path):
    """Show all that a state can depend on, by the definitions of both models.

    And a path to it that is as long as its page says.
    """
    layers, steps = range(4), range(1, 7)
    chosen = [(l, t) for l in layers for t in steps]
    ask = "given.map((chosen) => figure.compute({ chosen, drawn: 99 }))"
    for (l, t), models in zip(
        chosen, computed("feedback", ask, chosen, tmp_path), strict=True
    ):
        past = {(k, j) for j in steps for k in layers if j < t}
        below = {(k, j) for j in steps for k in range(l) if j <= t}
        direct = {
            "transformer": {(k, j) for k, j in below if k == l - 1},
            "feedback": {*past, (l - 1, t)} if l else set(),
        }
        found = {"transformer": below, "feedback": past | {(k, t) for k in range(l)}}
        depth = {"transformer": l, "feedback": (t - 1) * layers[-1] + l}
        for name, now in models.items():
            assert {*map(tuple, now["direct"])} == direct[name]
            reachable = {tuple(map(int, one.split(","))) for one in now["reachable"]}
            assert reachable == (found[name] if l else set())
            assert now["count"] == len(now["path"]) - 1 == (depth[name] if l else 0)
            assert all(tuple(low) != tuple(high) for low, high in pairwise(now["path"]))


# Trained models


def weights(path: str) -> tuple[dict, dict]:
    """Read the metadata and tensors of a file of weights."""
    with safe_open(FIGURES / f"{path}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        return about, {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118


def result(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text("utf-8"))


@functools.cache
def model(path: str) -> LanguageModel:
    """Return the weights of a figure in PyTorch."""
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
    facts = shown["facts"]
    told = [word for name, place in facts for word in (name, "is", "in", place, ".")]
    for rule, answers in zip(paths, shown["answers"], strict=True):
        for answer in answers:
            text = [*told, "Where", "is", answer["name"], "?"]
            words = torch.tensor([[*map(WORDS.index, text)]])
            logits = model(f"live/{rule}")(words)[0, -1]
            close(answer["logits"], logits)
            assert answer["said"] == WORDS[int(logits.argmax())]
            places = [place for name, place in facts if name == answer["name"]]
            assert answer["place"] == places[-1]
            assert answer["right"] == (answer["said"] == places[-1])
            share = logits.softmax(-1)[WORDS.index(places[-1])]
            assert answer["truth"] == pytest.approx(share.item(), abs=1e-4)


@pytest.mark.parametrize("rule", ["delta", "sum"])
@torch.no_grad()
def test_shakespeare_reads_as_pytorch_does(fresh, rule):
    """Losses, logits and fast weights, and the values that its answers are near."""
    figure = fresh("shakespeare")
    figure.start()
    figure.choose(f"{rule} rule")
    figure.until(f"state().rule === '{rule}'")
    text = "KING:\nWhat say you, sir? The crown, the crown!\n\nQUEEN:\nWhat crown"
    figure.text.fill(text)
    shown = figure.state()
    made, alphabet = (
        model(f"shakespeare/{rule}"),
        weights(f"shakespeare/{rule}")[0]["alphabet"],
    )
    tokens = torch.tensor([[*map(alphabet.index, text)]])
    logits = made(tokens)[0]
    close(shown["logits"], logits[-1])
    losses = F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
    close(shown["bits"][1:], losses / math.log(2))
    layer, head = shown["head"]
    states = made.prefill(tokens)[1][1:]
    W = (states[layer] if rule == "delta" else states[layer].W)[0, head]
    close(shown["W"], W.flatten())
    assert layer == 0
    mixer, x = made.blocks[0].mixer, made.blocks[0].norm_mixer(made.embedding(tokens))
    split = [to(x).unflatten(-1, (mixer.heads, -1)) for to in (mixer.to_k, mixer.to_v)]
    key, value = mixer._features(split[0])[0, :, head], split[1][0, :, head]
    like = torch.cosine_similarity((key @ W.T)[:, None], value[None], dim=-1)
    close(like[range(len(text)), shown["answers"]].tolist(), like.max(1).values)
    recalled = sum(text[i] == c for i, c in zip(shown["answers"], text, strict=True))
    assert f"recalls {recalled} of {len(text)} characters" in figure.words()


@torch.no_grad()
def strengths(path: str, tokens: list[int]) -> torch.Tensor:
    """Return the write strengths of PyTorch, [time, layer, head]."""
    found = []

    def keep(_, inputs, output):
        found.append(output.sigmoid()[0])

    gates = [block.mixer.gates.beta.projection for block in model(path).blocks]
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    model(path)(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def test_strengths_are_those_of_pytorch(fresh):
    """And the page says what they are: of characters by head, and of words."""
    figure = fresh("shakespeare")
    figure.start()
    page = (FIGURES / "shakespeare.md").read_text("utf-8")
    shown = figure.state()
    alphabet = weights("shakespeare/delta")[0]["alphabet"]
    wanted = strengths("shakespeare/delta", [*map(alphabet.index, shown["text"])])
    for head, kinds in ((0, ("spaces", "vowels")), (2, ("line breaks", "capitals"))):
        figure.press(f"layer 1, head {head + 1}")
        close(figure.state()["strengths"], wanted[:, 0, head])
        said = dict(re.findall(r"([a-z ]+) (\d\.\d\d)", figure.words()))
        said = {kind.strip(): mean for kind, mean in said.items()}
        for kind in kinds:
            assert f"{kind} with {said[kind]}" in page
    assert (wanted[[*map(shown["text"].index, " \n")], 0, 0] > 0.5).any()
    of = strengths("live/delta", [*range(len(WORDS))])[:, 0, 0].tolist()
    of = dict(zip(WORDS, of, strict=True))
    for group in (PLACES, NAMES):
        said = [of[word] for word in group]
        assert f"{min(said):.2f} to {max(said):.2f}" in page
    assert {f"{of[word]:.2f}" for word in ("is", "Where", ".", "?")} == {"0.01", "0.02"}


def test_only_the_rule_differs_in_the_pair():
    """Its results are those of its weights, and the home page says them."""
    (about, tensors), (other, others) = (
        weights(f"live/{rule}") for rule in ("sum", "delta")
    )
    assert about | {"mixer": "delta"} == other
    assert {n: w.shape for n, w in tensors.items()} == {
        n: w.shape for n, w in others.items()
    }
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    added, corrected = result("live-sum"), result("live-delta")
    assert added["config"] | {"rule": "delta"} == corrected["config"]
    assert added["state_size"] == corrected["state_size"]
    for run in (added, corrected):
        for share in run["right"].values():
            assert re.search(rf"\b{100 * share:.1f} %", text)
    assert f"{added['parameters']:,} parameters" in text
    assert sum(w.numel() for w in tensors.values()) == added["parameters"]


# What is kept of a text


def test_sizes_of_hybrid_models():
    """Those of fwlab's layers, for the configurations of transformers."""
    pytest.importorskip("transformers.models")
    from transformers import KimiLinearConfig, OlmoHybridConfig
    from transformers.models.qwen3_5 import Qwen3_5TextConfig

    qwen = Qwen3_5TextConfig(
        hidden_size=1024, num_hidden_layers=24, linear_num_value_heads=16
    )
    olmo, kimi = OlmoHybridConfig(), KimiLinearConfig()
    width = olmo.hidden_size // olmo.num_attention_heads
    shapes = [
        (c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        for c in (qwen, olmo)
    ]
    shapes.append((kimi.linear_num_heads, kimi.linear_head_dim, kimi.linear_head_dim))
    cached = (
        2 * qwen.num_key_value_heads * qwen.head_dim,
        2 * olmo.num_key_value_heads * width,
        kimi.kv_lora_rank + kimi.qk_rope_head_dim,
    )
    page = (ROOT / "docs" / "api" / "models.md").read_text("utf-8")
    for config, (heads, key, value), kept in zip(
        (qwen, olmo, kimi), shapes, cached, strict=True
    ):
        layers = len(config.layer_types)
        attention = config.layer_types.count("full_attention")
        options = {"expand_v": value / key, "conv_size": 4}
        with torch.device("meta"):
            layer = FastWeightAttention(
                heads * key, heads, rule="gated_delta", **options
            )
        weights = heads * key * value  # in float32; all else in bfloat16
        state = (layers - attention) * (2 * weights + 2 * layer.state_size())
        token = attention * 2 * kept
        sizes = f"{state / 2**20:.1f} MiB | {token / 2**5:,.0f} MiB"
        row = f"| {attention} of {layers} layers | {sizes} | {state / token:,.0f} tokens |"
        assert row in page


# Puzzles

PUZZLES = tomllib.loads((FIGURES / "puzzles.toml").read_text("utf-8"))


def judged(answers: list, folder) -> list[dict]:
    """Judge answers as the page does: each the name of a puzzle, and its rows."""
    ask = "given.map(([name, answer]) => figure.judge(name, answer))"
    return computed("puzzles", ask, answers, folder)


def test_answers_to_puzzles_are_right(tmp_path):
    """By the page, of the best size; and by the rules of fwlab."""
    verdicts = judged([(name, p["answer"]) for name, p in PUZZLES.items()], tmp_path)
    for (name, puzzle), verdict in zip(PUZZLES.items(), verdicts, strict=True):
        assert verdict["right"] and verdict["size"] == puzzle["best"], name
        assert verdict["says"].endswith(f"Nothing smaller exists: {puzzle['why']}.")
        by_fwlab(puzzle)


def by_fwlab(puzzle: dict) -> None:
    rows, given, height = puzzle["answer"], puzzle.get("given", {}), puzzle["numbers"]
    none = [0] * puzzle["best"][1]
    empty = {"key": none, "value": 0, "beta": 1, "query": none}
    steps = {
        kind: [
            empty | a | b
            for a, b in zip_longest(
                given.get(kind, []), rows.get(kind, []), fillvalue={}
            )
        ]
        for kind in given | rows
    }
    for case in puzzle["cases"]:
        inputs, expected = [], {}
        for token in case.split():
            written, _, wanted = token.partition(":")
            kind, mark, x = written.partition("=")
            x = [*map(float, x.split(","))] if x else [0.0] * height
            for step in steps[kind + mark]:
                v = step["value"]
                v = [v] * height if isinstance(v, int | float) else v
                v = x if v == "x" else [-n for n in x] if v == "-x" else v
                inputs.append((step["query"], step["key"], v, step["beta"]))
            if wanted:
                expected[len(inputs) - 1] = [*map(float, wanted.split(","))]
        q, k, v, beta = sequence(*map(double, zip(*inputs, strict=True)))
        if puzzle["rule"] == "sum":
            y = ops.sum_rule(q, k, v, normalize=False)
        else:
            y = ops.delta_rule(q, k, v, beta)
        assert torch.allclose(y[0, [*expected], 0], double([*expected.values()]))


#: Changes of a right answer: of which puzzle, which cells, and what is said of it.
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
    """And which idea fails."""
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
