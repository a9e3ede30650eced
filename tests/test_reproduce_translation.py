"""Test the data, the training and the decoding of the experiment `translation`."""

import pytest
import torch
import translation
from translation import ENGLISH, GERMAN

from fwlab.data import number_words
from fwlab.feature_maps import ELU1, FAVOR
from fwlab.models import EncoderDecoder


def test_pairs_are_characters_and_padding():
    source, mask, target = translation.write([421, 7])
    assert ENGLISH.decode(source[0]) == "four hundred twenty-one"
    assert mask.sum(1).tolist() == [23, 5] and source.shape == mask.shape
    spelled = [GERMAN.decode(row) for row in target]
    assert spelled == ["<vierhunderteinundzwanzig>", "<sieben" + ">" * 19]


@pytest.mark.parametrize("kind", ["favor", "favor-fixed"])
def test_features_of_the_performer_change_while_it_learns_only(kind):
    sizes = len(ENGLISH), len(GERMAN), 1, 2, 8
    model = EncoderDecoder(*sizes, attention=FAVOR(4, 8))
    phi = model.encoder[0].mixer.feature_map
    drawn = phi.omega.clone()
    point = {"map": kind, "budget": 2, "batch": 4, "lr": 1e-2}
    translation.train(model, range(20), point)
    learned = phi.omega.clone()
    assert torch.equal(drawn, learned) == (kind == "favor-fixed")
    translation.translate(model, range(20))
    assert torch.equal(phi.omega, learned)


@pytest.mark.parametrize("attention", ["softmax", ELU1()], ids=["softmax", "elu"])
def test_a_model_learns_the_words_it_has_seen(attention):
    """A model memorises twelve number words, and decodes them correctly."""
    model = EncoderDecoder(len(ENGLISH), len(GERMAN), 1, 2, 16, attention=attention)
    point = {"map": "softmax", "budget": 100, "batch": 12, "lr": 2e-2}
    curve = translation.train(model, range(12), point)
    assert [step for step, _ in curve] == [*range(5, 101, 5)]
    wanted = [number_words(n, "german") for n in range(12)]
    assert translation.translate(model, range(12)) == wanted
