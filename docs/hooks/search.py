"""Keeps noise out of search, and the index small.

Every page fetches the index, so it adds to the size of each.
"""

import json
import re
from pathlib import Path

from mkdocs.plugins import event_priority

#: Code, which buries names of functions that the API and headings have, too.
#: The tools that write these tags have no option for another attribute.
CODE = re.compile(
    r'<details class="mkdocstrings-source"|<div class="(language-\w+ )?highlight"'
)
#: Notes that also appear on another page.
AGAIN = re.compile(
    r"kernels/\w+\.html#(naive|chunked|efficient)"
    r"|annotated/kimi\.html#(chunked|efficient)"
    r"|annotated/[\w-]+\.html#(kernels|tiles|chunks|windows|scan)"
)
#: Tags, and TeX, which search would show as it is written.
MARKUP = re.compile(
    r"<[^>]*>|\\\(.*?\\\)|\\\[.*?\\\]|\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL
)


def on_page_content(html, page, config, files):
    return CODE.sub(lambda match: f"{match[0]} data-search-exclude", html)


@event_priority(-200)  # the plugins write the index before
def on_post_build(config):
    folder = Path(config.site_dir, "search")
    index = json.loads((folder / "search_index.json").read_text("utf-8"))
    index["docs"] = [
        entry | {"text": " ".join(MARKUP.sub(" ", entry["text"]).split())}
        for entry in index["docs"]
        if not AGAIN.match(entry["location"])
    ]
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (folder / "search_index.json").write_text(text, "utf-8")
    # For pages opened from disk.
    (folder / "search_index.js").write_text(f"var __index = {text}", "utf-8")
