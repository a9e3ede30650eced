"""Convert formulas to plain text, for places that cannot typeset them, and back."""

import re
import unicodedata
from html import escape

from matplotlib._mathtext_data import tex2uni

#: Unicode characters of TeX commands, where they differ from matplotlib's table.
SYMBOLS = {"cdot": "·", "cdots": "…", "dots": "…", "ge": "≥", "le": "≤", "sim": "~"}
SYMBOLS |= {"lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "mid": "|"}
SYMBOLS |= {"phi": "φ", "prod": "Π", "sum": "Σ", "top": "ᵀ"}
#: Combining characters, which follow a letter, by TeX command.
ACCENTS = {"bar": "\u0304", "hat": "\u0302", "tilde": "\u0303", "dot": "\u0307"}
ACCENTS |= {"overline": "\u0304", "widehat": "\u0302", "widetilde": "\u0303"}
GROUP = r"\s*(?:\{([^{}]*)\}|(\\[a-zA-Z]+|\w))"
#: TeX commands that change only the look of their argument or of the text after them.
LOOK = (
    r"\\(?:text|texttt|textstyle|mathbb|phantom|mathrm|mathbf|mathit|mathsf|mathcal|operatorname|boldsymbol|left|right"
    r"|bigg?|Bigg?|bigl|bigr|Bigl|Bigr|displaystyle|limits|underbrace|color\{\w+\})(?![a-zA-Z])"
)

#: Symbols that plain-text messages spell as words.
WORDS = {"beta": "β", "phi": "φ", "nu": "ν", "v_bar": "v̄", "sqrt(": "√("}


def typeset(text: str) -> str:
    """Convert plain-text notation such as "beta |k_1|^2" to HTML with symbols."""
    text = escape(text, quote=False)
    text = re.sub(
        r"\b(?:(?:beta|phi|nu|v_bar)\b|sqrt\()", lambda word: WORDS[word[0]], text
    )
    text = re.sub(r"\b([kqvW])(?:(\d)|_(i|j|k|v|out))\b", r"\1<sub>\2\3</sub>", text)
    return re.sub(r"\^(T\b|n\b|-?\d+(?:\.\d+)?)", r"<sup>\1</sup>", text)


def plain(tex: str) -> str:
    r"""Convert a TeX formula to Unicode: `\bar v_t \otimes k` becomes "v̄_t ⊗ k"."""
    text = re.sub(
        r"\\tag\{[^}]*\}|\\(?:begin|end)\{\w+\*?\}(\{\w+\})?|\\label\{.*?\}", "", tex
    )
    text = re.sub(LOOK, "", text)
    text = re.sub(r"\\\\(\[.*?\])?", "; ", text)
    text = re.sub(r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])|&", " ", text)
    text = re.sub(r"\\([%#_$|])", r"\1", text)
    text = re.sub(r"\}\s+\{", "}{", text)
    before = ""
    while before != text:  # Replace nested braces from the inside out.
        before = text
        text = re.sub(rf"\\[td]?frac{GROUP}{GROUP}", _fraction, text)
        text = re.sub(rf"\\sqrt{GROUP}", _root, text)
        text = re.sub(rf"\\({'|'.join(ACCENTS)})(?![a-z]){GROUP}", _accent, text)
        text = re.sub(r"([_^])\s*\{([^{}]*)\}", _index, text)
        text = re.sub(r"(?<![_^a-zA-Z}])\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\([a-zA-Z]+)( *)(?=([\w\\]?))", _name, text)
    text = re.sub(r"[{}\\]", "", text)
    text = re.sub(r"\s*\^\s*ᵀ", "ᵀ", text)
    text = re.sub(r"\^2(?!\w)", "²", text)
    text = re.sub(r"\s+", " ", text.replace("-", "−"))
    text = re.sub(r"\s*([_^])\s*", r"\1", text)
    text = re.sub(r"(?<=[(\[|‖√])\s+|\s+(?=[)\],.;|‖]|$)", "", text)
    return text.strip()


def _fraction(match: re.Match) -> str:
    above, below = (a or b for a, b in (match.groups()[:2], match.groups()[2:]))
    return "/".join(
        p if re.fullmatch(r"\\?\w+", p) else f"({p})" for p in (above, below)
    )


def _root(match: re.Match) -> str:
    inside = match[1] or match[2]
    return f"√{inside}" if re.fullmatch(r"\\?\w+", inside) else f"√({inside})"


def _accent(match: re.Match) -> str:
    inside = (match[2] or match[3]).strip()
    inside = _letter(inside[1:]) if inside.startswith("\\") else inside
    return inside + ACCENTS[match[1]]


def _index(match: re.Match) -> str:
    inside = match[2].strip()
    if re.fullmatch(r"\\?[^\W_]+|'+", inside):
        return f"{match[1]}{inside}"
    return f"{match[1]}({inside})"


def _name(match: re.Match) -> str:
    """Replace a TeX command by its character, with spaces around an operator."""
    found = _letter(match[1])
    if found == match[1]:  # Words such as `log` have no symbol.
        return f" {found} " if match[3] else f" {found}"
    if found == "·" or (unicodedata.category(found[0]) == "Sm" and found not in "√|"):
        return f" {found} "
    return found + match[2]


def _letter(name: str) -> str:
    return SYMBOLS.get(name) or (chr(tex2uni[name]) if name in tex2uni else name)
