"""Show how a trained model uses its fast weights while it reads a text.

For each layer and head: write strength, decay, half-life and norm of the memory, and
how long it keeps what it wrote at a name that comes again.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import ops, plots
from fwlab.layers import FastWeightAttention
from fwlab.layers.fast_weight_attention import RULES
from fwlab.models import LanguageModel, checkpoints


class Layer(NamedTuple):
    r"""Hold a layer's gates and norms over a text, and the remaining share of a write.

    - `number`: number of the layer in the model, from 1.
    - `rule`: name of its rule, as in `FastWeightAttention`.
    - `beta`: `[time, heads]`, the gate $\beta$; in a rule that has `write` in its
      place, the mean of that over channels; in one that has neither, 1. For a token
      with several steps, the mean.
    - `decay`: `[time, heads, key]`, by what each token multiplies the memory before it
      writes; one channel where all have the same decay, and 1 without a decay.
    - `norm`: `[time, heads]`, the Frobenius norm of the fast weights after each token.
    - `kept`: `[time - first, heads]`, the share of the write of `first` that its key
      still reads after each token since; None if no write was followed.
    """

    number: int
    rule: str
    beta: Tensor
    decay: Tensor
    norm: Tensor
    kept: Tensor | None

    def half_life(self) -> tuple[Tensor, Tensor]:
        r"""Return the number of tokens after which the decay halves the fast weights.

        This is $\ln 2$ over the mean of $-\ln d_t$; infinite without a decay.

        - Returns the half-life at the mean rate of all channels, `[heads]`, and of each
          channel, `[heads, key]`.
        """
        pace = -self.decay.log().mean(0)
        return math.log(2) / pace.mean(-1), math.log(2) / pace


def mixers(model: LanguageModel) -> tuple[dict[int, Any], dict[int, str]]:
    """Return fast weight layers, and the kinds of all other layers, by layer number."""
    watched, others = {}, {}
    for number, block in enumerate(model.blocks, 1):
        mixer = getattr(block, "mixer", block)
        scaled = getattr(mixer, "has_running_scale", False)
        if isinstance(mixer, FastWeightAttention) and not scaled:
            watched[number] = mixer
        else:
            others[number] = type(mixer).__name__ + " with a running scale" * scaled
    return watched, others


@torch.no_grad()
def look(
    model: LanguageModel, tokens: Tensor, first: int | None = None
) -> tuple[list[Layer], dict[int, str]]:
    r"""Run a model on a text, and record the fast weights of every layer.

    - `model`: in evaluation mode, because dropout acts in training mode.
    - `tokens`: `int64 [time]`, at least 2.
    - `first`: index of the token whose write is followed; None = no token.
    - Returns all layers that are `FastWeightAttention`, and the kinds of the others, by
      number.
    - Raises `ValueError` for fewer tokens, a `first` that is none of them, or a model
      without such a layer.

    The write of token $s$ is what it adds to the memory that has faded,
    $D_s = W_s - W_{s-1}\,\mathrm{diag}(d_s) = u_s \otimes k_s$. All rules are linear in
    $W$, so a part $D_t$ of each later $W_t$ comes from this write: decays shrink it,
    and writes with similar keys remove some of it. The share that the key $k_s$ still
    reads is

    $$\frac{u_s \cdot D_t\, k_s}{u_s \cdot D_s\, k_s}
      = \frac{\langle D_t, D_s \rangle}{\langle D_s, D_s \rangle}$$

    with sums over all entries on the right: 1 at $t = s$, and 0 once the value is
    replaced or has faded. What other tokens add to this reading does not count. With
    `normalize`, this is the reading before the division by $z$.

        >>> model = LanguageModel(65, "gated-delta", layers=1, heads=2, d_model=8)
        >>> (layer,), _ = look(model, torch.arange(5), first=1)
        >>> layer.beta.shape, layer.kept.shape, layer.kept[0].tolist()
        (torch.Size([5, 2]), torch.Size([4, 2]), [1.0, 1.0])
    """
    time = len(tokens) if tokens.dim() == 1 else 0
    if time < 2:
        raise ValueError(
            f"look: expected tokens of shape [time], at least 2, got {[*tokens.shape]}"
        )
    if first is not None and not 0 <= first < time:
        raise ValueError(f"look: expected first from 0 to {time - 1}, got {first}")
    watched, skipped = mixers(model)
    if not watched:
        found = ", ".join(sorted({*skipped.values()}))
        raise ValueError(f"expected a model with fast weights, got layers of {found}")
    inputs: dict[int, Tensor] = {}
    hooks = [
        mixer.register_forward_pre_hook(lambda _, x, i=i: inputs.update({i: x[0]}))
        for i, mixer in watched.items()
    ]
    try:
        model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    return [_watched(i, watched[i], x, first) for i, x in inputs.items()], skipped


def _watched(number: int, layer: Any, x: Tensor, first: int | None) -> Layer:
    """Record one layer token by token, with the computations of its `step`.

    Beside its memory runs a second one, which begins with the write of `first` and gets
    the same keys and gates, but only zeros as values.
    """
    made = layer.to_q(x), layer.to_k(x), layer.to_v(x)
    qk, v, _ = layer._heads(*made, None)
    q, k = layer._split(layer._features(qk))
    gates = {name: gate(x, k) for name, gate in layer.gates.items()}
    # A state has at least single precision.
    exact = torch.promote_types(x.dtype, torch.float32)
    q, k, v = (part.to(exact) for part in (q, k, v))
    gates = {name: gate.to(exact) for name, gate in gates.items()}

    time, one = x.shape[1], k.new_ones(1, x.shape[1], layer.value_heads)
    beta = gates.get("beta", gates.get("write", one))
    if beta.dim() == 4:  # Average over steps or channels.
        beta = beta.mean(2 if k.dim() == 5 else 3)
    decay = gates["log_decay"][0].exp() if "log_decay" in gates else one[0]
    if layer.rule == "gated":  # This rule decays by its write strength.
        decay = 1 - beta[0]
    decay = decay if decay.dim() == 3 else decay[..., None]

    rule = RULES[layer.rule]
    options: dict[str, Any] = {"return_state": True, "implementation": "naive"}
    if rule.normalize is not None:
        options["normalize"] = layer.normalize
    inputs = {"q": q, "k": k, **gates}
    inputs = {name: part.expand(2, *part.shape[1:]) for name, part in inputs.items()}
    inputs["v"] = torch.cat([v, torch.zeros_like(v)])
    W: Any = v.new_zeros(2, *layer.state_shape)
    z, wrote = W[:, :, 0].clone(), W[0]
    norms, kept = [], []
    for t in range(time):
        before = W
        state = ops.NormalizedState(W, z) if layer.normalize else W
        now = {name: part[:, t : t + 1] for name, part in inputs.items()}
        _, W = rule.operation(**now, state=state, **options)
        if layer.normalize:
            W, z = W
        if t == first:
            wrote = W[0] - before[0] * decay[t, :, None]
            W = torch.stack([W[0], wrote])
        norms.append(W[0].norm(dim=(-2, -1)))
        kept.append((W[1] * wrote).sum((-2, -1)) / wrote.square().sum((-2, -1)))
    after = None if first is None else torch.stack(kept[first:])
    return Layer(
        number, layer.rule, beta[0].to(exact), decay, torch.stack(norms), after
    )


class Reading(NamedTuple):
    """Hold a model and the text that it reads: `tokens`, `int64 [time]`, and `text`.

    `spans`: where each token begins and ends in `text`; `total`: token count of the
    whole text.
    """

    model: LanguageModel
    tokens: Tensor
    spans: Sequence[tuple[int, int]]
    text: str
    total: int

    def at(self, character: int) -> int | None:
        """Return the index of the token that contains a character, or None."""
        spans = enumerate(self.spans)
        return next((i for i, (a, b) in spans if a <= character < b), None)


def read(source: Path, text: str, limit: int) -> Reading:
    """Load a model as `fwlab generate` does, and the first tokens of a text.

    The number of tokens is limited by `limit` and by a table of positions.

    Raises what loading raises, and `ValueError` for fewer than 2 tokens.
    """
    if checkpoints.is_published(source) or checkpoints.is_name(source):
        folder = checkpoints.find(source)
        model = checkpoints.load(folder)
        coded = checkpoints.tokenizer(folder, model.vocab_size).encode(text)
        ids, spans = coded.ids, coded.offsets
    else:
        from fwlab import training
        from fwlab.data import Words

        loaded = training.load(source)
        model, words = loaded.model.eval(), isinstance(loaded.vocabulary, Words)
        ids = loaded.vocabulary.encode(text).tolist()
        spans = [m.span() for m in re.finditer(r"\n|\S+" if words else r"(?s).", text)]
    total, limit = len(ids), min(limit, model.max_len or limit)
    if min(total, limit) < 2:
        raise ValueError(f"expected at least 2 tokens to read, got {min(total, limit)}")
    spans = spans[:limit]
    text = text[: max(end for _, end in spans)]
    return Reading(model, torch.tensor(ids[:limit]), spans, text, total)


def occurrences(reading: Reading, name: str | None) -> tuple[str | None, list[int]]:
    """Return a name and its occurrences as a word, each by the index of its last token.

    Without a name: the most frequent capitalised word of at least two letters that
    occurs twice, and nowhere in lower case. None if there is no such word;
    `ValueError` if a given name occurs less than twice.
    """
    least = 2
    if name is None:
        words = Counter(re.findall(r"[^\W\d_]{2,}", reading.text))
        frequent = (word for word, count in words.most_common() if count > 1)
        names = (w for w in frequent if w[0].isupper() and w.lower() not in words)
        name, least = next(names, None), 0
        if name is None:
            return None, []
    if not name.strip():
        raise ValueError(f"expected name to be a word, got {name!r}")
    found = [*re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", reading.text)]
    if len(found) < least:
        raise ValueError(
            f"expected {name!r} at least twice in the text that is read, "
            f"got {len(found)}"
        )
    places = [reading.at(match.end() - 1) for match in found]
    return name, [place for place in places if place is not None]


def report(layer: Layer, places: Sequence[int]) -> dict[str, Any]:
    """Return the values of a layer as numbers with four digits; None = not finite.

    The names are those of `Layer`. "changes": how many tokens after the first of
    `places` the name comes again, and what is kept just before and after that.
    """
    heads = []
    for head, (whole, each) in enumerate(zip(*layer.half_life(), strict=True)):
        decay = layer.decay[:, head]
        numbers = {
            "beta": layer.beta[:, head],
            "decay": decay.mean(-1),
            "half_life": whole,
            "norm": layer.norm[:, head],
        }
        if decay.shape[-1] > 1:
            numbers["decay_range"] = torch.stack(decay.aminmax(dim=-1), -1)
            numbers["half_life_range"] = torch.stack(each.aminmax())
        if layer.kept is not None:
            numbers["kept"] = layer.kept[:, head]
        found = {key: _plain(x.tolist()) for key, x in numbers.items()}
        if kept := found.get("kept"):
            later = [place - places[0] for place in places[1:]]
            found["changes"] = [
                {"distance": t, "before": kept[t - 1], "after": kept[t]} for t in later
            ]
        heads.append(found)
    return {"layer": layer.number, "rule": layer.rule, "heads": heads}


def _plain(x: Any) -> Any:
    if isinstance(x, list):
        return [*map(_plain, x)]
    return float(f"{x:.4g}") if math.isfinite(x) else None


def picture(
    reading: Reading, layers: Sequence[Layer], name: str | None, places: Sequence[int]
) -> Figure:
    """Draw heat maps of all heads along the text, and the half-lives of the heads."""
    beta = torch.cat([layer.beta for layer in layers], 1)
    norm = torch.cat([layer.norm for layer in layers], 1)
    decay = torch.cat([layer.decay.mean(-1) for layer in layers], 1)
    fades = bool((decay < 1).any())
    maps = {"write strength β": beta}
    if (beta > 1).any():
        maps = {"half the write strength β": beta / 2}
    if fades:
        maps["decay"] = decay
    maps["norm of W, 1 = the head's maximum"] = norm / norm.amax(0)
    kept = [layer.kept for layer in layers if layer.kept is not None]
    if kept:
        before = beta.new_full((places[0], beta.shape[1]), math.nan)
        title = f"share kept of the write at the first “{name}”"
        maps[title] = torch.cat([before, torch.cat(kept, 1)])
    (time, rows), count = norm.shape, len(maps) + fades
    borders = np.cumsum([0, *(layer.beta.shape[1] for layer in layers)])
    every = -(-len(layers) // 8)
    numbers = [str(layer.number) for layer in layers[::every]]
    sharp: Any = {"aspect": "auto", "interpolation": "nearest"}
    with mpl.rc_context():
        plots.style()
        mpl.rcParams["font.size"] = 11.5  # This size gives 11 pixels on a phone.
        tall = min(max(0.06 * rows, 1.0), 3.0)
        figure, axes = plots.panels((tall + 0.4) * count + 1.9, count)
        for ax in axes:
            ax.set(ylabel="layer")
            ax.set_yticks([*borders[:-1:every] + 0.5], numbers)
            ink = plots.INK if ax in axes[len(maps) :] else plots.DIGITS
            for border in borders[1:-1]:
                ax.axhline(border, color=ink, linewidth=0.8)
        for ax, (title, values) in zip(axes, maps.items(), strict=False):
            plots.cells(ax, values.T, title, extent=(0, time, rows, 0), **sharp)
            ax.set_xticks([])
            for place in places:
                ax.axvline(place + 0.5, color=plots.DIGITS, linewidth=1, linestyle=":")
        words, below = _labels(reading), dict[str, Any](rotation=90, parse_math=False)
        middles = [place + 0.5 for place in words]
        axes[len(maps) - 1].set_xticks(middles, [*words.values()], **below)
        bar = figure.colorbar(axes[0].images[0], ax=axes[0], location="top", aspect=40)
        bar.set_ticks([-1, 0, 1])
        bar.ax.set_facecolor(plots.PAPER)
        if fades:
            _half_lives(axes[-1], layers)
    return figure


def _labels(reading: Reading) -> dict[int, str]:
    """Return words that fit below the picture, by the indices of their first tokens."""
    labels: dict[int, str] = {}
    free = 0.0
    for word in re.finditer(r"\S+", reading.text):
        place = reading.at(word.start())
        if place is not None and place >= free:
            labels[place] = word[0][:12]
            free = place + len(reading.spans) / 22
    return labels


def _half_lives(ax: Any, layers: Sequence[Layer]) -> None:
    """Draw each head's half-life as a mark, and its channels' range as a line."""
    row = 0.5
    for layer in layers:
        for whole, each in zip(*layer.half_life(), strict=True):
            # A logarithmic axis cannot show half-lives of 0 or infinity.
            x = torch.stack([whole, *each.aminmax()])
            at, *ends = x.where((x > 0) & x.isfinite(), math.nan).tolist()
            ax.plot(ends, [row, row], "-", color=plots.FAST, linewidth=1)
            plots.marks(ax, [at], [row], "o", markersize=4, color=plots.FAST)
            row += 1
    channels = any(layer.decay.shape[-1] > 1 for layer in layers)
    title = "half-life by decay, tokens" + " (lines: channels)" * channels
    ax.set(title=title, xscale="log", ylim=(row - 0.5, 0))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
