"""Write the description of a page, which link previews show below the title.

A page gives it as `description` in its front matter; otherwise it is the
first paragraph. docs/templates/theme/main.html writes it into the page.
"""

import re
from html import escape, unescape

LONGEST = 200


def on_page_content(html, page, config, files):
    text = page.meta.get("description") or _first_paragraph(html)
    # Templates of the theme do not escape text in attributes.
    page.meta["description"] = escape(_plain(text or config.site_description))
    return html


def _first_paragraph(html: str) -> str:
    # Skip formulas and lists of links, which mean nothing on their own.
    for text in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        plain = _plain(text)
        if len(plain) > 40 and "\\(" not in plain and "$" not in plain:
            cut = plain[:LONGEST].rpartition(" ")[0] + " …"
            return plain if len(plain) <= LONGEST else cut
    return ""


def _plain(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", "", html)).split())
