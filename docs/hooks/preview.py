"""What is shown where a page is linked to: its title, and what it is about.

A page says that as `description` in its front matter; else its first
paragraph is taken.
"""

import re
from html import escape, unescape

LONGEST = 200


def on_page_content(html, page, config, files):
    if "description" not in page.meta and (text := _first_paragraph(html)):
        page.meta["description"] = text
    return html


def on_post_page(output, page, config):
    title = page.title if page.is_homepage else f"{page.title} - {config.site_name}"
    tags = {
        "og:type": "website",
        "og:site_name": config.site_name,
        "og:title": config.site_name if page.is_homepage else title,
        "og:description": page.meta.get("description", config.site_description),
    }
    if page.canonical_url:
        tags["og:url"] = page.canonical_url
    metas = "".join(
        f'<meta property="{name}" content="{escape(_plain(content))}">'
        for name, content in tags.items()
    )
    card = '<meta name="twitter:card" content="summary">'
    return output.replace("</head>", f"{metas}{card}</head>", 1)


def _first_paragraph(html: str) -> str:
    # Formulas and lists of links tell nothing out of their place.
    for text in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        plain = _plain(text)
        if len(plain) > 40 and "\\(" not in plain and "$" not in plain:
            cut = plain[:LONGEST].rpartition(" ")[0] + " …"
            return plain if len(plain) <= LONGEST else cut
    return ""


def _plain(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", "", html)).split())
