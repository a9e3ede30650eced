"""List published configurations by name, for `fwlab train --preset NAME`."""

from typing import Any, NamedTuple

from fwlab.data import CorpusError
from fwlab.training.batches import run_text
from fwlab.training.config import Config


class Preset(NamedTuple):
    """Hold a configuration and its source.

    - `config`: the run.
    - `source`: who published it, and what is different here.
    """

    config: Config
    source: str

    @property
    def vocabulary(self) -> int:
        """Return the vocabulary size of Tiny Shakespeare or WikiText-103."""
        return 65 if self.config.corpus == "shakespeare" else 267_735


def _labml(**options: Any) -> Config:
    r"""Return a config with labml.ai's shared options: Noam's schedule, 128 epochs.

    The highest learning rate is $1/\sqrt{d_\text{model} \cdot \text{warmup}}$. An epoch
    reads as many tokens as the text has.
    """
    warmup, window = 2000, options["block"] * options["batch"]
    return Config(
        corpus="shakespeare",
        schedule="noam",
        lr=(options["d_model"] * warmup) ** -0.5,
        warmup=warmup,
        steps=128 * (1_003_854 // window),
        beta2=0.999,
        weight_decay=0.0,
        **options,
    )


def _wikitext(**options: Any) -> Config:
    """Return a config with the common options of Schlag et al. 2021, Appendix F."""
    shared: dict[str, Any] = {"layers": 16, "heads": 8, "d_ff": 2048, "dropout": 0.1}
    shared |= {"lr": 2.5e-4, "min_lr": 0.0, "warmup": 2000, "beta2": 0.999}
    shared |= {"weight_decay": 0.0, "clip": 0.25, "eval_every": 4000}
    return Config(corpus="wikitext-103", tokens="words", **shared, **options)


PRESETS: dict[str, Preset] = {
    "labml-fast-weights": Preset(
        _labml(mixer="delta", layers=6, heads=8, d_model=512, block=128, batch=16),
        "labml.ai's annotated fast weights: DPFP with nu = 1, delta rule",
    ),
    "labml-aft": Preset(
        _labml(
            mixer="aft-local",
            layers=6,
            heads=4,
            d_model=128,
            d_ff=256,
            dropout=0.1,
            block=256,
            batch=32,
        ),
        "labml.ai's annotated AFT: AFT-local, window 32; without its table of "
        "sinusoidal positions",
    ),
    "labml-feedback": Preset(
        _labml(
            mixer="feedback-shared",
            layers=6,
            heads=8,
            d_model=512,
            block=128,
            batch=64,
        ),
        "labml.ai's annotated Feedback Transformer, keys and values shared by all "
        "layers",
    ),
    "nanogpt-cpu": Preset(
        Config(mixer="softmax", corpus="shakespeare"),
        "nanoGPT's configuration for a CPU: a validation loss of 1.88",
    ),
    "nanogpt-gpu": Preset(
        Config(
            mixer="softmax",
            corpus="shakespeare",
            layers=6,
            heads=6,
            d_model=384,
            block=256,
            batch=64,
            dropout=0.2,
            attention_dropout=0.2,
            steps=5000,
            eval_windows=12_800,
        ),
        "nanoGPT's configuration for a GPU: a validation loss of 1.47",
    ),
    "wt103-small": Preset(
        _wikitext(mixer="delta", d_model=128, block=256, batch=96, steps=500_000),
        "Schlag et al. 2021, Appendix F and Table 5: DPFP with nu = 1, delta rule",
    ),
    "wt103-medium": Preset(
        _wikitext(mixer="delta", d_model=256, block=384, batch=56, steps=400_000),
        "Schlag et al. 2021, Appendix F; Table 2 has other feature maps",
    ),
    "transformer-xl": Preset(
        _wikitext(
            mixer="transformer-xl",
            d_model=256,
            block=768,
            batch=28,
            steps=400_000,
            carry=True,
        ),
        "Schlag et al. 2021, Table 4, with a memory of 384 words; two segments of "
        "384 words per window, so half the windows",
    ),
}
"""The presets, by name."""


def vocabulary_size(config: Config, preset: str | None = None) -> int:
    """Return the vocabulary size of a run.

    - `preset`: if its corpus is missing, its published vocabulary size is returned.
    - Raises `CorpusError` if the corpus is not there.
    """
    try:
        return len(run_text(config, None)[0])
    except CorpusError:
        if preset is None or config.corpus != PRESETS[preset].config.corpus:
            raise
        return PRESETS[preset].vocabulary
