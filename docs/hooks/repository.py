"""Derive URLs from `repo_url` in mkdocs.yml, if it is set.

The variable REPO_URL sets it. Without it, nothing on the site links to a
repository: these functions return None, and lines with {{ repo_url }} or
{{ colab }} are dropped from the pages. {{ wheel }} is the file of downloads.py.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "main"
MARK = re.compile(r"\{\{ (repo_url|colab|wheel) \}\}")


def source(repo_url: str | None, path: str) -> str | None:
    """Return the URL of a file or folder of the repository on its host, or None."""
    if not repo_url:
        return None
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repo_url.rstrip('/')}/{kind}/{BRANCH}/{path}"


def colab(repo_url: str | None, path: str) -> str | None:
    """Return the Colab URL of a notebook or folder, or None if not on GitHub."""
    url = urlsplit(repo_url or "")
    if url.netloc != "github.com":
        return None
    return (
        "https://colab.research.google.com/github/"
        f"{url.path.strip('/')}/blob/{BRANCH}/{path}"
    )


def on_config(config):
    config.edit_uri = f"edit/{BRANCH}/docs/" if config.repo_url else None
    return config


def on_page_markdown(markdown, page, config, files):
    known = {
        "repo_url": (config.repo_url or "").rstrip("/"),
        "colab": colab(config.repo_url, "notebooks"),
        "wheel": config.extra["wheel"],
    }
    lines = [
        MARK.sub(lambda match: known[match[1]], line)
        for line in markdown.splitlines(keepends=True)
        if all(known[name] for name in MARK.findall(line))
    ]
    return "".join(lines)


def on_post_template(output, template_name, config):
    # A sitemap needs absolute URLs.
    # The theme's 404 page fits only a site at the root of a host: omit this page.
    wanted = {"sitemap.xml": bool(config.site_url), "404.html": False}
    return output if wanted.get(template_name, True) else ""
