"""Run the command `fwlab` in this process, which has already imported PyTorch."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from fwlab import cli


def fwlab(*arguments: str) -> tuple[int, str, str]:
    """Run `fwlab` with `arguments`, and return the exit code, stdout and stderr."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["fwlab", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    return code, out.getvalue(), err.getvalue()
