"""A language model, an encoder-decoder, and published models in the first's form."""

from fwlab.models.checkpoints import load
from fwlab.models.encoder_decoder import EncoderDecoder
from fwlab.models.language_model import MIXERS, LanguageModel, Mixer

__all__ = ["MIXERS", "Mixer", "LanguageModel", "EncoderDecoder", "load"]
