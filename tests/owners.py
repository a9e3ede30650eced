"""The owners of the pages to which a text links.

Even a name that looks like a placeholder may belong to somebody, so this
file lists every owner that a text may link to.
"""

import os
import re

#: Other people's pages to which fwlab links on purpose.
KNOWN = {
    "BlinkDL",
    "EleutherAI",
    "HazyResearch",
    "dequelabs",
    "facebookresearch",
    "fla-org",
    "huggingface",
    "QwenLM",
    "idiap",
    "IDSIA",
    "ischlag",
    "karpathy",
    "pytorch",
    "sponsors",  # of KaTeX, in the lock file of npm
    "squidfunk",
    "srush",
    "sustcsonglin",
}
OWNER = re.compile(
    r"\b(?:github|gitlab|githubusercontent)\.com/(?:repos/)?([\w.-]+)"
    r"|\b([\w-]+)\.(?:github|gitlab)\.io\b"
    r"|colab\.research\.google\.com/github/([\w.-]+)"
)


def strangers(text: str) -> set[str]:
    """Owners of pages on GitHub and GitLab that are not in the list."""
    own = f"{os.getenv('REPO_URL')} {os.getenv('SITE_URL')}"
    ours = {"".join(names) for names in OWNER.findall(own)}
    found = {"".join(names) for names in OWNER.findall(text)}
    return found - KNOWN - {name.lower() for name in ours} - ours
