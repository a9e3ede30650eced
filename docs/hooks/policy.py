"""A Content-Security-Policy in every page, which a browser enforces.

A page runs scripts only from files of the site and, inside a page, only those
that were there when the site was built: each is listed by its hash. It asks no
other host for anything. This is the last hook: it reads the pages as written.
"""

import base64
import hashlib
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

#: The site itself. Pages opened from disk have no origin of their own: some
#: browsers take files next to them for the same origin, others need the scheme.
OWN = "'self' file:"
POLICY = {
    "default-src": "'none'",
    "script-src": OWN,
    # Formulas, plots and figures have their styles in attributes.
    "style-src": f"{OWN} 'unsafe-inline'",
    "img-src": f"{OWN} data:",
    "font-src": f"{OWN} data:",
    "connect-src": "'self'",
    "worker-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
}
#: What runs inside a page. Data, as of the search, have a type.
INLINE = re.compile(r"<script(?![^>]* (?:src|type)=)[^>]*>(.*?)</script>", re.DOTALL)
#: What the policy follows, and the policy of an earlier build, if there is one.
HEAD = re.compile(
    r'(<head>\s*<meta charset="utf-8">)(\n<meta http-equiv="Content-Security-.*)?'
)

serving = False


def on_startup(command, dirty):
    global serving
    serving = command == "serve"


@event_priority(-200)
def on_post_build(config):
    for path in Path(config.site_dir).rglob("*.html"):
        html = path.read_text("utf-8")
        head = HEAD.search(html)
        if not head:
            raise PluginError(f"expected the charset first in the head of {path}")
        whole = html[: head.end(1)] + _meta(html) + html[head.end() :]
        path.write_text(whole, "utf-8")


def _meta(html: str) -> str:
    # `mkdocs serve` adds a script that differs each time.
    inline = ["'unsafe-inline'"] if serving else map(_hash, INLINE.findall(html))
    scripts = " ".join([POLICY["script-src"], *dict.fromkeys(inline)])
    policy = POLICY | {"script-src": scripts}
    content = "; ".join(f"{name} {sources}" for name, sources in policy.items())
    return f'\n<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
