"""Serve a folder as a website, and find a browser for it."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Options of Chromium in a container without sandbox, shared memory and GPU.
#: They also disable background tasks and all hosts but 127.0.0.1.
OPTIONS = [
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"),
]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP on this machine, and yield its URL."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def chromium() -> str | None:
    """Return the path of Chromium: $CHROMIUM, or an installed program, or None.

    The headless shell, which has no windows, comes first: it takes half the time.
    """
    shells = ("chromium-headless-shell", "chrome-headless-shell")
    names = (*shells, "chromium", "chromium-browser", "google-chrome", "chrome")
    found = filter(None, map(shutil.which, names))
    return os.environ.get("CHROMIUM") or next(found, None)
