"""One training at a time in a folder."""

import contextlib
import errno
import os
import platform
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fwlab.files import OTHERS

#: Holds the number of the process and the name of its computer.
LOCK = ".lock"
#: The errors of a lock that another process holds; others mean no locks here.
HELD = {errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK, errno.EDEADLK}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes.

    The system releases the lock of a process that dies. File systems
    without locks keep nobody out.

    - `folder`: an existing folder.
    - Raises `ValueError` if another process holds it, and `OSError` if the
      lock cannot be a file.
    """
    path = folder / LOCK
    while True:
        with contextlib.suppress(FileNotFoundError):
            # A link is not followed: what it points to would be overwritten.
            if (kind := stat.filemode(path.lstat().st_mode)[0]) != "-":
                raise OSError(f"expected {path} to be a file, got a {OTHERS[kind]}")
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        if not _lock(file):
            with file:
                file.seek(0)
                holder = file.read() or "another process"
            raise ValueError(
                f"expected {folder} to be free, but {holder} trains there: wait for "
                "it, or choose another folder with --out"
            )
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
        file.close()  # its holder has removed it in this moment
    with file:
        with contextlib.suppress(OSError):  # a full disk: it holds without a name
            file.truncate(0)
            os.write(
                file.fileno(), f"process {os.getpid()} on {platform.node()}".encode()
            )
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows keeps what is open
                path.unlink()


def _lock(file: TextIO) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(1 << 30)  # others may not read what is locked
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD
    return True
