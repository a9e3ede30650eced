"""Keeps out of search what would drown it: code that its page lists in full."""

import re

CODE = re.compile(
    r'<details class="mkdocstrings-source"|<div class="highlight no-copy"'
)


def on_page_content(html, page, config, files):
    return CODE.sub(lambda match: f"{match[0]} data-search-exclude", html)
