"""Test `fwlab look`, which shows the fast weights of a model over a text.

Numbers are compared with the states of the layers themselves, with and without the
write that is followed.
"""

import json

import pytest
import torch
from alike import error, refuses
from terminal import fwlab

from fwlab import ops
from fwlab.layers.fast_weight_attention import RULES
from fwlab.look import Reading, look, occurrences, picture
from fwlab.models import LanguageModel, load

TOKENS = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5, 3, 5])
FIRST = 2


def model(mixer, layers=1, **options):
    torch.manual_seed(0)
    sizes = {"heads": 2, "d_model": 12, "max_len": 16}
    made = LanguageModel(7, mixer, layers, **sizes, **options).double().eval()
    with torch.no_grad():  # Initial models write equal values at each step.
        for weight in made.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return made


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("more", [False, True])
def test_every_rule(rule, more):
    """`look` agrees with a layer's final states, computed with and without a write."""
    options, heads = {}, 4 if more else 2
    if more:
        normalize = RULES[rule].normalize is not None
        options = {"conv_size": 3, "value_heads": heads, "normalize": normalize}
    made = model(rule.replace("_", "-"), fast_weights=options)
    (found,), _ = look(made, TOKENS, FIRST)
    layer = made.blocks[0].mixer
    x = made.blocks[0].norm_mixer(made.embedding(TOKENS))[None]

    def change(state, by):
        if isinstance(state, ops.ConvState):
            return state._replace(memory=change(state.memory, by))
        return state._replace(W=state.W + by) if layer.normalize else state + by

    def fast(state):
        state = state.memory if isinstance(state, ops.ConvState) else state
        return state.W if layer.normalize else state

    before = layer.prefill(x[:, :FIRST])[1]
    after = layer.prefill(x[:, : FIRST + 1])[1]
    wrote = fast(after) - fast(before) * found.decay[FIRST][:, None]
    rest = x[:, FIRST + 1 :]
    last = fast(layer.prefill(rest, after)[1])
    left = last - fast(layer.prefill(rest, change(after, -wrote))[1])
    kept = (left * wrote).sum((2, 3)) / wrote.square().sum((2, 3))
    assert error(found.norm[-1], last[0].norm(dim=(1, 2))) < 1e-10
    assert error(found.kept[-1], kept[0]) < 1e-10
    assert error(found.kept[0], torch.ones(heads)) < 1e-10
    if "log_decay" in layer.gates:
        decay = layer.gates.log_decay(x, x)[0].exp()
        assert error(found.decay, decay.view_as(found.decay)) < 1e-10
    if "beta" in layer.gates:
        beta = layer.gates.beta(x, x)[0].unflatten(-1, (-1, heads))  # per step
        assert error(found.beta, beta.mean(1)) < 1e-10
    assert found.beta.shape == (10, heads)
    assert 0 < found.beta.min() <= found.beta.max() <= 1


def test_hybrid_stacks_name_what_they_skip():
    layers, skipped = look(model("gated-delta,softmax,delta", 3), TOKENS)
    assert [(x.number, x.rule) for x in layers] == [(1, "gated_delta"), (3, "delta")]
    assert skipped == {2: "SoftmaxAttention"} and layers[0].kept is None
    text = "expected a model with fast weights, got layers of SoftmaxAttention"
    refuses(lambda: look(model("softmax"), TOKENS), text)
    refuses(lambda: look(model("delta"), TOKENS[:1]), "at least 2, got")
    refuses(lambda: look(model("delta"), TOKENS, 10), "first from 0 to 9, got 10")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Save a tiny transformers Qwen3.5 and a tokenizer of words in a folder."""
    from published import tiny, write_tokenizer

    folder = tmp_path_factory.mktemp("published")
    tiny("qwen3_5", noise=0.15, vocab_size=9).save_pretrained(folder)
    write_tokenizer(folder, ["in", "is", "now", "Ada", "Ben", "Rome", "Oslo", ".", "?"])
    (folder / "text").write_text(
        "Ada is in Rome . Ben is in Rome . Ada is now in Oslo ."
    )
    return folder


@torch.no_grad()
def test_a_published_model(published, tmp_path):
    """`fwlab look` writes a picture and the numbers of `look` for a published model."""
    tokens = torch.tensor([3, 1, 0, 5, 7, 4, 1, 0, 5, 7, 3, 1, 2, 0, 6, 7])
    layers, skipped = look(load(published), tokens, 0)
    assert [x.number for x in layers] == [1, 2, 3]
    assert skipped == {4: "SoftmaxAttention"}
    out = tmp_path / "seen.svg"
    text = ("--text", str(published / "text"))
    code, said, err = fwlab("look", str(published), *text, "--out", str(out))
    assert (code, err) == (0, "")
    assert said == (
        "layer 4 has no fast weights to show: SoftmaxAttention\n"
        f"{out}\n{tmp_path / 'seen.json'}\n"
    )
    assert "<svg" in out.read_text()
    data = json.loads((tmp_path / "seen.json").read_text())
    assert data["tokens"][:5] == ["Ada", "is", "in", "Rome", "."]
    assert (data["name"], data["places"]) == ("Ada", [0, 10])
    assert data["skipped"] == {"4": "SoftmaxAttention"}
    assert data["command"].startswith("fwlab look ") and data["torch"]
    for at, found in zip(data["layers"], layers, strict=True):
        assert at["layer"] == found.number and len(at["heads"]) == 4
        for h, head in enumerate(at["heads"]):
            for name in ("beta", "norm", "kept"):
                ours = getattr(found, name)[:, h]
                assert error(torch.tensor(head[name]), ours) < 1e-3
            assert head["half_life"] == pytest.approx(
                float(found.half_life()[0][h]), rel=1e-3
            )
            (change,) = head["changes"]
            assert change == {
                "distance": 10,
                "before": head["kept"][9],
                "after": head["kept"][10],
            }


def test_what_does_not_fit(published, tmp_path):
    text, other = ("--text", str(published / "text")), tmp_path / "other"
    (tmp_path / "short").write_text("Ada")
    other.mkdir()
    for name in ("config.json", "model.safetensors"):
        (other / name).write_bytes((published / name).read_bytes())
    for arguments, said in (
        (("none", *text), "there is no checkpoint none"),
        ((published, *text, "--name", "Ben"), "'Ben' at least twice"),
        ((published, *text, "--tokens", "1"), "at least 2 tokens to read, got 1"),
        ((published, *text, "--out", "x.json"), "expected a picture"),
        ((published, "--text", tmp_path / "no-text"), "no-text"),
        ((published, "--text", tmp_path / "short"), "at least 2 tokens to read, got 1"),
        ((other, *text), "expected the tokenizer"),
    ):
        code, _, err = fwlab("look", *map(str, arguments))
        assert code == 2 and err.count("\n") == 1 and said in err, err


@pytest.mark.parametrize("tokens", ["characters", "words"])
def test_a_run(tmp_path, monkeypatch, tokens):
    """With a hybrid model of 16 positions, `fwlab look` reads the first 16 tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(
        "Eve saw it.\nNo, Eve hid it. So Eve won!\n" * 20
    )
    code, _, err = fwlab(
        *("train", "--corpus", "text.txt", "--tokens", tokens, "--out", "run"),
        *("--mixer", "kimi-delta,softmax", "--layers", "2", "--d-model", "16"),
        *("--heads", "2", "--block", "16", "--batch", "2", "--steps", "2"),
        *("--eval-every", "2", "--eval-windows", "2", "--threads", "1"),
    )
    assert code == 0, err
    code, said, err = fwlab("look", "run", "--text", "text.txt", "--out", "p.png")
    assert (code, err) == (0, "") and said.startswith("the first 16 of ")
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["name"] == "Eve" or tokens == "characters"
    if tokens == "characters":  # 16 characters contain one Eve.
        assert "choose a word with --name WORD" in said and "kept" not in str(
            data["layers"]
        )
        assert "".join(data["tokens"]) == "Eve saw it.\nNo, "
    else:
        assert data["tokens"][:6] == ["Eve", "saw", "it.", "\n", "No,", "Eve"]
        assert data["places"] == [0, 5, 9, 12]
    for head in data["layers"][0]["heads"]:
        for x, (low, high) in zip(head["decay"], head["decay_range"], strict=True):
            assert low <= x <= high
        low, high = head["half_life_range"]
        assert low < head["half_life"] < high


def reading(text, *cuts):
    """Return a `Reading` of a text that is tokenized at the positions `cuts`."""
    spans = [*zip((0, *cuts), (*cuts, len(text)), strict=True)]
    return Reading(model("delta"), torch.zeros(len(spans)).long(), spans, text, 0)


def test_names():
    """`occurrences` finds names at the last token, but no common or partial words."""
    text = "The Adas and Ada and the other Ada: Ada."
    found = occurrences(reading(text, 3, 10, 14, 15, 32, 34, 37, 38), None)
    assert found == ("Ada", [4, 5, 8])
    assert occurrences(reading(text, 10), "and") == ("and", [1, 1])
    assert occurrences(reading("The Ada, the The", 4), None) == (None, [])
    refuses(lambda: occurrences(reading(text, 3), " "), "name to be a word, got ' '")


def test_the_picture():
    """The picture has a row for each head, and decay panels only if a rule decays."""

    def drawn(mixer, **options):
        layers, _ = look(model(mixer, 2, **options), torch.zeros(15).long(), 4)
        figure = picture(reading("The Adas and Ad", *range(1, 15)), layers, "Ad", [4])
        return {ax.get_title(): ax for ax in figure.axes if ax.get_title()}, layers

    axes, layers = drawn("gated-delta")
    assert len(axes) == 5 and [*axes][:2] == ["write strength β", "decay"]
    shown = torch.tensor(axes["write strength β"].images[0].get_array().filled())
    assert torch.equal(shown, torch.cat([x.beta for x in layers], 1).T)
    last = [*axes.values()][-1]
    places = [line.get_xdata()[0] for line in last.lines if line.get_marker() == "o"]
    assert places == torch.cat([x.half_life()[0] for x in layers]).tolist()
    axes, layers = drawn("delta", fast_weights={"beta_max": 2})
    assert next(iter(axes)) == "half the write strength β" and len(axes) == 3
    shown = axes["half the write strength β"].images[0].get_array().filled()
    wanted = torch.cat([x.beta for x in layers], 1).T
    assert torch.equal(2 * torch.tensor(shown), wanted)
