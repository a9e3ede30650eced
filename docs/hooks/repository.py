"""Addresses that follow from `repo_url` and `edit_uri` of mkdocs.yml."""

import re
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
COLAB = "https://colab.research.google.com/github"


def source(config, path: str) -> str:
    """A file or folder of the repository, as a page of its host."""
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{config.repo_url.rstrip('/')}/{kind}/{_branch(config)}/{path}"


def colab(config, path: str) -> str:
    """A notebook of the repository, opened in Colab."""
    name = urlsplit(config.repo_url).path.strip("/")
    return f"{COLAB}/{name}/blob/{_branch(config)}/{path}"


def _branch(config) -> str:
    return config.edit_uri.split("/")[1]


def on_page_markdown(markdown, page, config, files):
    return re.sub(r"\{\{ *repo_url *\}\}", config.repo_url.rstrip("/"), markdown)
