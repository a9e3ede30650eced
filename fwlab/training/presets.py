"""Published configurations, by name: `fwlab train --preset NAME`."""

from typing import NamedTuple

from fwlab.training.config import Config


class Preset(NamedTuple):
    """A configuration, and where it comes from.

    - `config`: the run.
    - `source`: who published it, and what is different here.
    - `vocabulary`: number of tokens, for `--dry-run` without the corpus.
    """

    config: Config
    source: str
    vocabulary: int


#: Distinct characters of Tiny Shakespeare, distinct words of WikiText-103.
SHAKESPEARE, WIKITEXT_103 = 65, 267_735


def noam(d_model: int, warmup: int) -> float:
    r"""The highest rate of Noam's schedule, $1/\sqrt{d_\text{model} \cdot \text{warmup}}$."""
    return (d_model * warmup) ** -0.5


def _labml(epochs: int, **options: int | float | str) -> Config:
    """The common part of labml.ai; an epoch reads as many tokens as the text has."""
    d_model, warmup = int(options["d_model"]), 2000
    window = int(options["block"]) * int(options["batch"])
    return Config(
        corpus="shakespeare",
        schedule="noam",
        lr=noam(d_model, warmup),
        warmup=warmup,
        steps=epochs * (1_003_854 // window),
        beta2=0.999,
        weight_decay=0.0,
        **options,  # type: ignore[arg-type]
    )


def _wikitext(**options: int | float | str) -> Config:
    """The common part of Schlag et al., Appendix F."""
    return Config(
        corpus="wikitext-103",
        tokens="words",
        layers=16,
        heads=8,
        d_ff=2048,
        dropout=0.1,
        lr=2.5e-4,
        min_lr=0.0,
        warmup=2000,
        beta2=0.999,
        weight_decay=0.0,
        clip=0.25,
        eval_every=4000,
        **options,  # type: ignore[arg-type]
    )


PRESETS: dict[str, Preset] = {
    "labml-fast-weights": Preset(
        _labml(128, mixer="delta", layers=6, heads=8, d_model=512, block=128, batch=16),
        "labml.ai's annotated fast weights: DPFP with nu = 1, delta rule",
        SHAKESPEARE,
    ),
    "labml-aft": Preset(
        _labml(
            128,
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
        SHAKESPEARE,
    ),
    "labml-feedback": Preset(
        _labml(
            128,
            mixer="feedback-shared",
            layers=6,
            heads=8,
            d_model=512,
            block=128,
            batch=64,
        ),
        "labml.ai's annotated Feedback Transformer, keys and values shared by all "
        "layers",
        SHAKESPEARE,
    ),
    "nanogpt-cpu": Preset(
        Config(mixer="softmax", corpus="shakespeare"),
        "nanoGPT's configuration for a CPU: a validation loss of 1.88",
        SHAKESPEARE,
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
        SHAKESPEARE,
    ),
    "wt103-small": Preset(
        _wikitext(mixer="delta", d_model=128, block=256, batch=96, steps=500_000),
        "Schlag et al. 2021, Appendix F and Table 5: DPFP with nu = 1, delta rule",
        WIKITEXT_103,
    ),
    "wt103-medium": Preset(
        _wikitext(mixer="delta", d_model=256, block=384, batch=56, steps=400_000),
        "Schlag et al. 2021, Appendix F; Table 2 has other feature maps",
        WIKITEXT_103,
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
        WIKITEXT_103,
    ),
}
"""The presets, by name."""
