"""Language models on text: what several experiments share."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fwlab.bench.operations import equal_d_ff
from fwlab.data import corpus
from fwlab.experiments.experiment import Point
from fwlab.experiments.fit import learning_curve
from fwlab.experiments.runs import TEXTS
from fwlab.feature_maps import DPFP, ELU1, FAVOR, FeatureMap, Identity
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel, Mixer
from fwlab.training import Config, Trainer

#: Sizes of models and runs: nanoGPT's for a CPU, and that of quick versions,
#: whose heads are as wide as those of the paper's small models. After a name,
#: a number says how many optimiser steps are run instead.
SIZES: dict[str, dict[str, Any]] = {
    "nanogpt": {"layers": 4, "d_model": 128, "batch": 12, "steps": 2000},
    "small": {"layers": 2, "d_model": 64, "batch": 6, "steps": 400, "warmup": 25},
}
#: The size of full versions: half of nanoGPT's training.
FULL = "nanogpt-1000"
#: Learning rates at which the losses are compared.
LR = {"nanogpt": 1e-3, FULL: 1e-3, "small": 4e-3}
#: Feature maps by name: of keys of width `d`, without trained parameters.
#: DPFP and FAVOR+ have the same number of features, twice that of ELU + 1 and
#: of "favor-half", the FAVOR+ of the paper's Table 2.
MAPS: dict[str, Callable[[int], FeatureMap]] = {
    "linear": lambda d: ELU1(),
    "favor": lambda d: FAVOR(d, directions=d),
    "favor-half": lambda d: FAVOR(d, directions=d // 2),
    "dpfp": lambda d: DPFP(nu=1),
    "identity": lambda d: Identity(),
}
#: Digits of a text's SHA-256 in results.
DIGITS = 12


def fast_weights(
    rule: str,
    name: str,
    normalize: bool | None = None,
    positions: bool = False,
    *,
    layer: type[FastWeightAttention] = FastWeightAttention,
    conv_size: int = 0,
) -> Mixer:
    """A rule with a feature map of choice.

    - `rule`: as in `FastWeightAttention`, "gated-delta" for "gated_delta".
    - `name`: of the feature map. For rules with normalised keys, features
      are divided by their sum, except the keys themselves ("identity"),
      whose sum may be 0: they are divided by their length.
    - `normalize`, `positions`: as in `FastWeightAttention` and `Mixer`.
    - `layer`: its class; `conv_size`: as in `FastWeightAttention`.
    """
    rule = rule.replace("-", "_")
    key_norm = None
    if "delta" in rule:
        key_norm = "l2" if name == "identity" else "sum"
    return Mixer(
        lambda s: layer(
            s.d_model,
            s.heads,
            MAPS[name](s.d_model // s.heads),
            rule,
            key_norm,
            normalize,
            conv_size=conv_size,
        ),
        positions=positions,
    )


def points(quick: bool, settings: Iterable[Point]) -> list[Point]:
    """Three seeds of each setting.

    - `settings`: with the size, the text and the learning rate of the version,
      unless they say other ones.
    """
    size = "small" if quick else FULL
    corpus = "any" if quick else "shakespeare"
    usual = {"size": size, "corpus": corpus, "lr": LR[size]}
    return [
        {**each, **(usual | each), "seed": seed}
        for each in settings
        for seed in (1, 2, 3)
    ]


def config(point: Point, mixer: Mixer, block: int = 64) -> Config:
    """The run of a point, with as many parameters as softmax attention has.

    - `block`: characters per window; every optimiser step has as many
      characters as with windows of 64.
    """
    name, _, steps = point["size"].partition("-")
    size = SIZES[name]
    usual = Config(
        **{**size, "batch": size["batch"] * 64 // block},
        block=block,
        lr=point["lr"],
        min_lr=point["lr"] / 10,
        seed=point["seed"],
        eval_every=10**6,  # only at the end
        device="cpu",
    )
    steps = int(steps or usual.steps)
    sizes = usual.layers, usual.heads, usual.d_model, usual.block
    return replace(usual, d_ff=equal_d_ff(mixer, sizes), steps=steps)


@cache
def load(name: str) -> str:
    """The text of a corpus.

    - `name`: as in `fwlab.data.corpus`; "any", for quick versions, is the
      beginning of Shakespeare, or of Python if Shakespeare is not available.
      What was read is in the results: see `train`.
    """
    text = corpus(None)[:300_000] if name == "any" else corpus(name)
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
    other = "Python's standard library, the first 300,000 characters"
    TEXTS.setdefault(digest, other if name == "any" else name)
    return text


def recorded(sha256: str) -> Point:
    """The name of a text, and the beginning of its hash, for the results."""
    digest = sha256[:DIGITS]
    name = TEXTS.get(digest, "another text")
    return {"corpus_name": name, "corpus_sha256": digest}


class Run(Trainer):
    """The training of `fwlab train`, of any mixer, and with carried state.

    - `config`: the run; `config.mixer` has no effect.
    - `mixer`: how the model mixes.
    - `text`: all text; the last tenth is for validation.
    - `carry`: as in `Config`. The validation text is then one long sequence.
    - `rows`: number of such sequences that it is cut into.
    """

    def __init__(
        self,
        config: Config,
        mixer: Mixer,
        text: str,
        carry: bool = False,
        rows: int = 1,
    ):
        self.mixer, self.eval_rows = mixer, rows
        super().__init__(replace(config, carry=carry), text)

    def _new_model(self, vocab_size: int) -> LanguageModel:
        c = self.config
        sizes = c.layers, c.heads, c.d_model, c.block, c.d_ff
        return LanguageModel(vocab_size, self.mixer, *sizes)

    def saved_mib(self) -> float:
        """MiB of all that a training step saves for its backward pass.

        Trained weights, which are there anyway, do not count. Unlike the
        memory of the process, this is the same number in every run.
        """
        sizes: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        c = self.config
        inputs = self.train_tokens[: c.batch * c.block].view(c.batch, c.block)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = self.model(inputs.to(self.device)).logsumexp(-1).sum()
        for p in self.model.parameters():
            sizes.pop(p.untyped_storage().data_ptr(), None)
        del loss  # until here, what is saved was alive: no address came twice
        return round(sum(sizes.values()) / 2**20, 2)


def train(run: Run) -> Point:
    """Train to the end, and say what came out; no loss if it diverged.

    - Returns the text's name and the beginning of its hash; sizes; the loss
      of validation; and the learning curve.
    """
    c, seconds, loss = run.config, 0.0, None
    losses: list[float] = []
    about: Point = {
        **recorded(run.corpus_sha256),
        "parameters": run.model.num_parameters(),
        "state_size": run.model.state_size(c.block),
        "saved_mib": run.saved_mib(),
    }
    try:
        for progress in run.run():
            seconds = progress.seconds
            losses.append(progress.loss)
        loss = finite(run.curve[-1][-1])
    except FloatingPointError:
        pass
    speed = round(run.step * c.batch * c.block / seconds) if seconds else None
    bits = None if loss is None else round(loss / math.log(2), 4)
    return {
        **{"loss": loss, "bits": bits, **about, "tokens_per_second": speed},
        "curve": learning_curve(losses, c.steps),
    }


def setup(config: Config) -> dict[str, Any]:
    """The hyper-parameters of a run that no setting of its point says."""
    c = config
    return {
        "optimiser": f"AdamW, betas 0.9 and {c.beta2:g}, weight decay "
        f"{c.weight_decay:g}, gradients clipped to {c.clip:g}",
        "schedule": f"rises for {c.warmup} steps, falls along a cosine to a tenth",
        "batch": c.batch,
        "steps": c.steps,
        "layers": c.layers,
        "heads": c.heads,
        "width": c.d_model,
        "MLP width": c.d_ff,
    }


def finite(loss: float) -> float | None:
    """The loss to four decimals; None if it is not finite."""
    return round(loss, 4) if math.isfinite(loss) else None


def median_loss(points: list[Point]) -> float | None:
    """The median over seeds, without a loss = infinite; None = no points."""
    losses = [inf if p["loss"] is None else p["loss"] for p in points]
    return median(losses) if losses else None
