"""Whose pages a text leads to.

A name in an address that looks like a placeholder belongs to somebody, too:
so whoever is linked to is listed here.
"""

import re

from address import current

#: GitHub gives nobody a name with two hyphens in a row.
NOBODY = "no--body"
#: Other people's pages that fwlab means to link to.
KNOWN = {
    "BlinkDL",
    "dequelabs",
    "facebookresearch",
    "fla-org",
    "idiap",
    "IDSIA",
    "ischlag",
    "karpathy",
    "pytorch",
    "sponsors",  # of KaTeX, in the lock file of npm
    "squidfunk",
    "srush",
}
OWNER = re.compile(
    r"\b(?:github|gitlab|githubusercontent)\.com/(?:repos/)?([\w.-]+)"
    r"|\b([\w-]+)\.(?:github|gitlab)\.io\b"
    r"|colab\.research\.google\.com/github/([\w.-]+)"
)


def strangers(text: str) -> set[str]:
    """Owners of pages on GitHub and GitLab whom nobody meant to link to."""
    ours = {
        "".join(found) for found in OWNER.findall(" ".join(vars(current()).values()))
    }
    found = {"".join(names) for names in OWNER.findall(text)}
    return found - KNOWN - {name.lower() for name in ours} - ours
