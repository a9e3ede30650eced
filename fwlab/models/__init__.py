"""Define a language model and an encoder-decoder, and load published models."""

from fwlab.models.checkpoints import load
from fwlab.models.encoder_decoder import EncoderDecoder
from fwlab.models.language_model import MIXERS, LanguageModel, Mixer

__all__ = ["MIXERS", "Mixer", "LanguageModel", "EncoderDecoder", "load"]
