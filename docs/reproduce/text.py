"""Train language models on text, as several experiments do."""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import inf
from statistics import median
from typing import Any

import torch
from frame import Numbers, Point, order
from torch import Tensor

from fwlab import ops
from fwlab.bench.operations import equal_d_ff
from fwlab.data import corpus
from fwlab.feature_maps import DPFP, ELU1, FAVOR, FeatureMap, Identity
from fwlab.fit import learning_curve
from fwlab.layers import FastWeightAttention, SoftmaxAttention
from fwlab.layers.causal import Causal, with_state
from fwlab.layers.heads import per_head
from fwlab.layers.short_convolution import ShortConvolution
from fwlab.models import LanguageModel, Mixer
from fwlab.training import Config, Trainer

#: Sizes of models and runs. Small heads are as wide as in the paper's small models.
#: A number after a name, as in "nanogpt-1000", replaces the number of optimiser steps.
SIZES: dict[str, dict[str, Any]] = {
    "nanogpt": {"layers": 4, "d_model": 128, "batch": 12, "steps": 2000},
    "small": {"layers": 2, "d_model": 64, "batch": 6, "steps": 400, "warmup": 25},
}
#: The size in full versions: nanoGPT's, trained for half as many optimiser steps.
FULL = "nanogpt-1000"
#: Learning rates at which the losses are compared, by size.
LR = {"nanogpt": 1e-3, FULL: 1e-3, "small": 4e-3}
#: Feature maps without trained parameters, for keys of width `d`, by name.
#: DPFP and FAVOR+ have equally many features: twice those of ELU + 1 and "favor-half".
#: "favor-half" is the FAVOR+ of the paper's Table 2.
MAPS: dict[str, Callable[[int], FeatureMap]] = {
    "linear": lambda d: ELU1(),
    "favor": lambda d: FAVOR(d, directions=d),
    "favor-half": lambda d: FAVOR(d, directions=d // 2),
    "dpfp": lambda d: DPFP(nu=1),
    "identity": lambda d: Identity(),
}
#: Number of digits of a text's SHA-256 in results.
DIGITS = 12
#: Names of texts by the first digits of their SHA-256. `load` adds further texts.
TEXTS = {
    "86c4e6aa9db7": "Tiny Shakespeare",
    "8a73136f699d": "Tiny Shakespeare, the first 300,000 characters",
}
#: Loss in nats above which a model has learned little more than bigrams.
#: A bigram model of Tiny Shakespeare has a loss of 2.48 on the last tenth of the text.
TRIVIAL = 0.95 * 2.48
#: Function that claims an order of losses, all below `TRIVIAL`.
below = partial(order, trivial=TRIVIAL)
#: Difference from Schlag et al., who normalise after each sum and scale outputs.
#: Schlag et al. evaluate with a sliding window.
PROTOCOL = "characters, pre-norm, outputs without d_head^(-1/2)"
WINDOWS = "disjoint windows"
#: Axis label of most figures.
LOSS = "validation loss, nats per character"

#: Width of the short convolution in tokens.
CONVOLUTION_SIZE = 4

# --- Models ---------------------------------------------------------------

#: Softmax attention with rotary positions instead of position embeddings.
ROTARY_SOFTMAX = Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads, rope=1.0))


def fast_weights(
    rule: str,
    name: str,
    normalize: bool | None = None,
    positions: bool = False,
    *,
    layer: type[FastWeightAttention] = FastWeightAttention,
    conv_size: int = 0,
) -> Mixer:
    """Return a mixer that combines a rule with a feature map.

    - `rule`: as in `FastWeightAttention`, "gated-delta" for "gated_delta".
    - `name`: name of the feature map. For rules with normalised keys, features
      are divided by their sum, but the keys themselves ("identity"), whose sum
      may be 0, are divided by their length.
    - `normalize`, `positions`: as in `FastWeightAttention` and `Mixer`.
    - `layer`: class of the layer; `conv_size`: as in `FastWeightAttention`.
    """
    rule = rule.replace("-", "_")
    key_norm = None
    if "delta" in rule:
        key_norm = "l2" if name == "identity" else "sum"

    def new(s: Any) -> FastWeightAttention:
        phi = MAPS[name](s.d_model // s.heads)
        options = (phi, rule, key_norm, normalize)
        return layer(s.d_model, s.heads, *options, conv_size=conv_size)

    return Mixer(new, positions=positions)


class ConvolutionAlone(FastWeightAttention):
    r"""Apply the sum rule's layer with a short convolution, but without fast weights.

    It returns $W_o$ times the convolved values: the write of a step, not the read of a
    memory. Queries and keys are computed as usual, and have no effect, so
    that everything else stays equal: initial weights, and numbers of parameters.
    """

    packs = skips = False
    step = Causal.step  # Use the general step, which calls `_mix`.

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        qkv = torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], -1)
        qkv, state = self.conv(qkv, state)
        return self.to_out(qkv[..., -self.channels[-1] :]), state

    def state_size(self, time: int = 0) -> int:
        return (self.conv.size - 1) * self.conv.channels


#: The control, which sees `CONVOLUTION_SIZE` tokens and has no memory.
CONVOLUTION = fast_weights(
    "sum", "linear", layer=ConvolutionAlone, conv_size=CONVOLUTION_SIZE
)


class ConvolvedAttention(SoftmaxAttention):
    """Apply softmax attention with rotary positions after a short convolution."""

    step = Causal.step  # Use the general step, which calls `_mix`.

    def __init__(self, d_model: int, heads: int):
        super().__init__(d_model, heads, rope=1.0)
        self.conv = ShortConvolution(3 * d_model, CONVOLUTION_SIZE)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        past, before = (None, None) if state is None else state
        qkv, before = self.conv(
            torch.cat([self.to_q(x), self.to_k(x), self.to_v(x)], -1), before
        )
        q, k, v = per_head(*qkv.chunk(3, -1), width=self.head_width)
        q, k = self._with_positions(q, k, options["key_mask"], past)
        y, past = with_state(ops.softmax_attention(q, k, v, state=past, **options))
        return self.to_out(y.flatten(-2)), (past, before)

    def state_size(self, time: int) -> int:
        return super().state_size(time) + (self.conv.size - 1) * self.conv.channels


#: Mixer of the strong baseline, which attends to the whole window.
CONVOLVED_SOFTMAX = Mixer(lambda s: ConvolvedAttention(s.d_model, s.heads))


#: Names of the two controls in tables and charts.
ALONE, CONVOLVED = "convolution alone", "convolution + attention"
CONTROLS = {ALONE: CONVOLUTION, CONVOLVED: CONVOLVED_SOFTMAX}


# --- Settings and runs ------------------------------------------------


def points(quick: bool, settings: Iterable[Point]) -> list[Point]:
    """Return each of `settings` with three seeds.

    - `settings`: settings of the points. A missing size, text or learning rate gets
      the default of the version.
    """
    size, corpus = ("small", "any") if quick else (FULL, "shakespeare")
    usual = {"size": size, "corpus": corpus, "lr": LR[size]}
    return [
        each | usual | each | {"seed": seed} for each in settings for seed in (1, 2, 3)
    ]


def config(point: Point, mixer: Mixer) -> Config:
    """Return the config of a run whose model is as large as one with softmax attention.

    - `point`: may have `block`, the characters per window (default 64; characters per
      optimiser step do not change), and `carry`, as in `Config`.
    """
    name, _, steps = point["size"].partition("-")
    block, options = point.get("block", 64), dict(SIZES[name])
    options["batch"] = options["batch"] * 64 // block
    options["steps"] = int(steps or options["steps"])
    c = Config(
        **options,
        block=block,
        carry=bool(point.get("carry")),
        lr=point["lr"],
        min_lr=point["lr"] / 10,
        seed=point["seed"],
        eval_every=10**6,  # Evaluate only at the end.
        device="cpu",
    )
    return replace(c, d_ff=equal_d_ff(mixer, (c.layers, c.heads, c.d_model, block)))


def setup(point: Point, mixer: Mixer) -> Point:
    """Return the hyper-parameters of a run that `point` does not contain."""
    c = config(point, mixer)
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


@cache
def load(name: str) -> str:
    """Read the text of a corpus.

    - `name`: as in `fwlab.data.corpus`; "any", for quick versions, is the
      beginning of Shakespeare, or of Python if Shakespeare is not available.
      The results name the text: see `recorded`.
    """
    text = corpus(None)[:300_000] if name == "any" else corpus(name)
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
    other = "Python's standard library, the first 300,000 characters"
    TEXTS.setdefault(digest, other if name == "any" else name)
    return text


def recorded(sha256: str) -> Point:
    """Return the name of a text, and the beginning of its hash, for the results."""
    digest = sha256[:DIGITS]
    name = TEXTS.get(digest, "another text")
    return {"corpus_name": name, "corpus_sha256": digest}


class Run(Trainer):
    """Train a language model with any mixer, as `fwlab train` does.

    - `config`: the run; `config.mixer` has no effect. With `carry`, the validation
      text is one long sequence, or as many as `eval_rows` says.
    - `mixer`: the mixer of the model.
    - `text`: all text; the last tenth is for validation.
    """

    def __init__(self, config: Config, mixer: Mixer, text: str):
        self.mixer = mixer
        super().__init__(config, text)

    def _new_model(self, vocab_size: int) -> LanguageModel:
        c = self.config
        sizes = c.layers, c.heads, c.d_model, c.block, c.d_ff
        return LanguageModel(vocab_size, self.mixer, *sizes)

    def saved_mib(self) -> float:
        """Return the MiB of tensors that a training step saves for its backward pass.

        Parameters do not count. Unlike the memory of the process, the result is the
        same in every run.
        """
        sizes = {p.untyped_storage().data_ptr(): 0 for p in self.model.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor

        c = self.config
        inputs = self.train_tokens[: c.batch * c.block].view(c.batch, c.block)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.model(inputs.to(self.device)).logsumexp(-1).sum()
        del loss  # `loss` kept saved tensors alive, so no address was used twice.
        return round(sum(sizes.values()) / 2**20, 2)


def new_run(point: Point, mixer: Mixer) -> Run:
    """Create the run for the settings `point`, with its model and its text."""
    return Run(config(point, mixer), mixer, load(point["corpus"]))


def train(run: Run) -> Point:
    """Train a model to the end, and return the results; diverged runs have no loss.

    - Returns the text's name and the beginning of its hash; sizes; the loss
      on the validation text; and the learning curve.
    """
    c, seconds, loss, bits, speed = run.config, 0.0, None, None, None
    losses: list[float] = []
    about: Point = {
        **recorded(run.corpus_sha256),
        "parameters": run.model.num_parameters(),
        "state_size": run.model.state_size(c.block),
        "saved_mib": run.saved_mib(),
    }
    with suppress(FloatingPointError):
        for progress in run.run():
            seconds = progress.seconds
            losses.append(progress.loss)
        loss = finite(run.curve[-1][-1])
        bits = round(loss / math.log(2), 4)
    if seconds:
        speed = round(run.step * c.batch * c.block / seconds)
    return {
        **{"loss": loss, "bits": bits, **about, "tokens_per_second": speed},
        "curve": learning_curve(losses, c.steps),
    }


def experiment(
    mixer: Callable[[Point], Mixer], measure: Callable[[Run], Point] = lambda run: {}
) -> tuple[Callable[[Point], Point], Callable[[Point], Point]]:
    """Return `run` and `setup` of an experiment on language models.

    - `mixer`: returns the mixer of a point.
    - `measure`: returns additional results of a trained model.
    """

    def run(point: Point) -> Point:
        new = new_run(point, mixer(point))
        return train(new) | measure(new)

    return run, lambda point: setup(point, mixer(point))


def finite(loss: float, digits: int = 4) -> float | None:
    """Round a loss, or return None if it is not finite."""
    return round(loss, digits) if math.isfinite(loss) else None


def middle(losses: Numbers) -> float:
    """Return the median of losses over seeds, or infinity if there are none."""
    return median(losses or [inf])


def percent_above(losses: Numbers, base: float) -> Numbers:
    """Return by how many per cent each loss is above `base`."""
    return [100 * (x / base - 1) for x in losses]


def above(loss: float, other: float) -> float:
    """Return `loss` minus `other`, or infinity if `loss` is infinite."""
    return inf if loss == inf else loss - other
