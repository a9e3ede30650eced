"""`fwlab reproduce translation`: number words, the models, and the scores."""

import sys

import pytest
import torch

from fwlab.data import number_words
from fwlab.experiments import translation
from fwlab.experiments.translation import GERMAN, Pairs
from fwlab.feature_maps import DPFP, ELU1, FAVOR, FeatureMap
from fwlab.models import EncoderDecoder

WORDS = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    2: ("two", "zwei"),
    7: ("seven", "sieben"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    13: ("thirteen", "dreizehn"),
    15: ("fifteen", "fünfzehn"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    18: ("eighteen", "achtzehn"),
    19: ("nineteen", "neunzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    37: ("thirty-seven", "siebenunddreißig"),
    42: ("forty-two", "zweiundvierzig"),
    55: ("fifty-five", "fünfundfünfzig"),
    60: ("sixty", "sechzig"),
    66: ("sixty-six", "sechsundsechzig"),
    70: ("seventy", "siebzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    81: ("eighty-one", "einundachtzig"),
    99: ("ninety-nine", "neunundneunzig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred one", "einhunderteins"),
    111: ("one hundred eleven", "einhundertelf"),
    200: ("two hundred", "zweihundert"),
    316: ("three hundred sixteen", "dreihundertsechzehn"),
    421: ("four hundred twenty-one", "vierhunderteinundzwanzig"),
    600: ("six hundred", "sechshundert"),
    701: ("seven hundred one", "siebenhunderteins"),
    1000: ("one thousand", "eintausend"),
    1001: ("one thousand one", "eintausendeins"),
    1100: ("one thousand one hundred", "eintausendeinhundert"),
    2030: ("two thousand thirty", "zweitausenddreißig"),
    21_000: ("twenty-one thousand", "einundzwanzigtausend"),
    101_000: ("one hundred one thousand", "einhunderteintausend"),
    612_017: (
        "six hundred twelve thousand seventeen",
        "sechshundertzwölftausendsiebzehn",
    ),
    999_999: (
        "nine hundred ninety-nine thousand nine hundred ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
}


def test_numbers_in_words():
    for number, words in WORDS.items():
        assert (number_words(number), number_words(number, "german")) == words


def test_german_is_read_back():
    """By the words of the table above alone."""
    small = {
        words[1].removesuffix("s") if n == 1 else words[1]: n
        for n, words in WORDS.items()
        if n < 10 or n in (11, 12, 16, 17)
    }
    small |= {"drei": 3, "vier": 4, "fünf": 5, "sechs": 6, "acht": 8, "neun": 9}
    teens = {f"{word}zehn": n + 10 for word, n in small.items() if n in (3, 4, 5, 8, 9)}
    ties = {"zwanzig": 20, "dreißig": 30, "sechzig": 60, "siebzig": 70}
    ties |= {f"{word}zig": 10 * n for word, n in small.items() if n in (4, 5, 8, 9)}
    below = small | {"eins": 1, "zehn": 10} | teens | ties

    def value(word: str) -> int:
        for unit, size in (("tausend", 1000), ("hundert", 100)):
            count, matched, rest = word.partition(unit)
            if matched:
                return value(count) * size + (value(rest) if rest else 0)
        ones, und, tens = word.partition("und")
        return small[ones] + ties[tens] if und else below[word]

    numbers = [*range(2000), *range(10_000, 1_000_000, 997)]
    assert [value(number_words(n, "german")) for n in numbers] == numbers


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ((-1,), "number to be from 0 to 999,999, got -1"),
        ((1_000_000,), "from 0 to 999,999, got 1000000"),
        ((1, "french"), "language to be 'english' or 'german', got 'french'"),
    ],
)
def test_what_has_no_words(call, said):
    with pytest.raises(ValueError, match=said):
        number_words(*call)


def test_pairs_are_characters_and_padding():
    pairs = Pairs.of([421, 7])
    assert pairs.source.shape == pairs.mask.shape == (2, len("four hundred twenty-one"))
    assert pairs.mask.sum(1).tolist() == [23, 5]
    spelled = [GERMAN.decode(row) for row in pairs.target]
    assert spelled[0] == "<vierhunderteinundzwanzig>"
    assert spelled[1] == "<sieben" + ">" * 19


def test_every_attention_of_a_model_has_the_map_of_its_point(monkeypatch):
    seen = []
    monkeypatch.setattr(translation, "train", lambda model, *_: seen.append(model))
    pytest.importorskip("sacrebleu")
    monkeypatch.setattr(translation, "TEST", 2)
    kinds = {"linear": ELU1, "dpfp": DPFP, "favor": FAVOR, "favor-fixed": FAVOR}
    for point in translation.points(True):
        if point["seed"] > 1:
            continue
        result = translation.run({**point, "train": 10})
        maps = [m for m in seen[-1].modules() if isinstance(m, FeatureMap)]
        if point["map"] == "softmax":
            assert not maps and result["d_dot"] is None
            continue
        assert len(maps) == 3 * point["layers"]
        assert all(isinstance(phi, kinds[point["map"]]) for phi in maps)
        assert result["d_dot"] == point["ratio"] * point["d_key"]
        assert {phi.width(point["d_key"]) for phi in maps} == {result["d_dot"]}


def test_table_6_is_computed():
    claim, *others = translation.claims([])
    assert claim.holds and claim.found == "256 and 256, 384 and 384, 512 and 512"
    assert all(other.holds is None for other in others)


@pytest.mark.parametrize("quick", [True, False])
def test_every_ordering_of_table_1_is_a_claim(quick):
    """Of seven models 21 pairs, of which one is equal."""
    points = translation.points(quick)
    for sign, said in ((1, "reproduced"), (-1, "not")):
        for p in points:
            known = translation.PUBLISHED.get((p["map"], p["ratio"])) or 25
            p["bleu"] = sign * known + 0.01 * p["seed"]
        _, *orders, narrow, wide = translation.claims(points)
        assert len(orders) == 20 and {c.verdict for c in orders} == {said}
        assert all("Table 1" in c.published and c.protocol for c in orders)
        assert "Performer-1x, fixed above Performer-1x" in narrow.text
        assert "Performer-8x, fixed above Performer-8x" in wide.text
        assert not narrow.published and not wide.published


@pytest.mark.parametrize("kind", ["favor", "favor-fixed"])
def test_features_of_the_performer_change_while_it_learns_only(kind):
    torch.manual_seed(0)
    pairs = Pairs.of(range(20))
    model = EncoderDecoder(
        len(translation.ENGLISH), len(GERMAN), 1, 2, 8, attention=FAVOR(4, 8)
    )
    phi = model.encoder[0].mixer.feature_map
    drawn = phi.omega.clone()
    translation.train(model, pairs, {"map": kind, "budget": 2, "batch": 4, "lr": 1e-2})
    learned = phi.omega.clone()
    assert torch.equal(drawn, learned) == (kind == "favor-fixed")
    translation.translate(model, pairs)
    assert torch.equal(phi.omega, learned)


@pytest.mark.parametrize("attention", ["softmax", ELU1()], ids=["softmax", "elu"])
def test_a_model_learns_the_words_it_has_seen(attention):
    """Twelve words by heart: loss, masks and decoding agree."""
    torch.manual_seed(0)
    pairs, sizes = (
        Pairs.of(range(12)),
        (len(translation.ENGLISH), len(GERMAN), 1, 2, 16),
    )
    model = EncoderDecoder(*sizes, attention=attention)
    point = {"map": "softmax", "budget": 100, "batch": 12, "lr": 2e-2}
    curve = translation.train(model, pairs, point)
    assert [step for step, _ in curve] == [*range(5, 101, 5)]
    assert curve[0][1] > 1 > curve[-1][1] > 0
    wanted = [number_words(n, "german") for n in range(12)]
    assert translation.translate(model, pairs) == wanted


def test_bleu_counts_characters():
    pytest.importorskip("sacrebleu")
    metric = translation.character_bleu()

    def bleu(*sentences):
        return metric.corpus_score(sentences, [["einundzwanzig", "dreizehn"]]).score

    assert bleu("einundzwanzig", "dreizehn") == pytest.approx(100)
    assert 50 < bleu("einundzwanzig", "vierzehn") < 95
    assert bleu("", "x") < 1


def test_bleu_needs_a_package_and_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ValueError, match="run pip install"):
        translation.run(translation.points(True)[0])
