"""A Content-Security-Policy in every page, which a browser enforces.

A page asks no other host for anything. It runs scripts only from files of the site,
and inside itself those that the build has put there, each by its hash. Pages opened
from disk have no origin: some browsers take files for the same origin, others need
the scheme.
"""

import re
from base64 import b64encode
from hashlib import sha256

from mkdocs.plugins import event_priority

CHARSET = '<meta charset="utf-8">'
POLICY = (
    "default-src 'none'; script-src 'self' file: {}; style-src 'self' file: "
    "'unsafe-inline'; img-src 'self' file: data:; font-src 'self' file: data:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
#: What runs inside a page. Data have a type.
INLINE = re.compile(r"<script(?![^>]* (?:src|type)=)[^>]*>(.*?)</script>", re.DOTALL)
serving = False


def on_startup(command, dirty):
    global serving
    serving = command == "serve"


@event_priority(-200)  # the page as it is written
def on_post_page(output, page, config):
    found = dict.fromkeys(INLINE.findall(output))
    hashes = (b64encode(sha256(script.encode()).digest()).decode() for script in found)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    # The server adds a script that differs each time.
    policy = POLICY.format("'unsafe-inline'" if serving else allowed)
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return output.replace(CHARSET, f"{CHARSET}\n{meta}", 1)
