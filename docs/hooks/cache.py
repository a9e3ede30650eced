"""Draws what published hybrid models keep of a text in place of `<!-- cache -->`.

Sizes are from the configurations of transformers. Fast weights keep a matrix per
head, in float32, and the last inputs of a convolution; attention keeps keys and
values of each token, in bfloat16.
"""

from plots import drawn, panels, styled

from fwlab.plots import FAST, OTHER, SERIES, legend

#: Layers and layers of attention; numbers of one layer's fast weights and of its
#: convolution; numbers that one layer of attention keeps of a token.
MODELS = {
    "Qwen3.5 0.8B": (24, 6, 16 * 128 * 128, 3 * 3 * 16 * 128, 2 * 4 * 256),
    "Olmo Hybrid 7B": (32, 8, 30 * 96 * 192, 3 * 30 * (96 + 96 + 192), 2 * 30 * 128),
    "Kimi Linear 48B": (27, 6, 32 * 128 * 128, 3 * 3 * 32 * 128, 512 + 64),
}
MARK = "<!-- cache -->"
TOKENS = [2**n for n in range(8, 21, 2)]
MIB = 2**20


def sizes(name: str, tokens: int) -> tuple[int, int]:
    """Bytes of a model's state, and of its cache."""
    layers, attention, weights, inputs, cached = MODELS[name]
    state = (layers - attention) * (4 * weights + 2 * inputs)
    return state, attention * 2 * cached * tokens


def on_page_content(html, page, config, files):
    return html.replace(MARK, _plot() + _table()) if MARK in html else html


def _plot() -> str:
    with styled():
        figure, (ax,) = panels(3.4)
        looks = zip(MODELS, (FAST, OTHER, SERIES[1]), ("-", "--", "-."), strict=True)
        for name, color, line in looks:
            state, cache = zip(*(sizes(name, t) for t in TOKENS), strict=True)
            ax.plot(TOKENS, [x / MIB for x in cache], line, color=color, label=name)
            ax.plot(TOKENS, [x / MIB for x in state], line, color=color, alpha=0.55)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(TOKENS[1::2], ["1 k", "16 k", "256 k"])
        ax.set_yticks([1, 2**5, 2**10, 2**15], ["1 MiB", "32 MiB", "1 GiB", "32 GiB"])
        ax.set(xlabel="tokens; the state is flat, the cache grows")
        legend(figure, ax, 2)
        label = "State and cache of three hybrid models, against the number of tokens"
        return drawn(figure, "cache", label)


def _table() -> str:
    rows = []
    for name, (layers, attention, *_) in MODELS.items():
        state, cache = (x / MIB for x in sizes(name, 2**15))
        even = state * 2**15 / cache
        cells = (
            name,
            f"{attention} of {layers} layers",
            f"{state:.1f} MiB",
            f"{cache:,.0f} MiB",
            f"{even:,.0f} tokens",
        )
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    heads = ("Model", "attention", "state", "cache, 32 k", "equal after")
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
