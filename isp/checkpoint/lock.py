"""One run at a time in a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["folder_lock"]

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of a file system without locks to a request for one."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder`, which exists, until this is left or the process ends.

    Raises ValueError, with who holds it, if another run does. Where the file system has no locks,
    nothing is kept out.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, folder)
        with suppress(OSError):  # a full disk need not know who we are
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "which says no more"
        raise ValueError(
            f"another run saves to {folder} ({holder}): wait until it has ended, or start a run of"
            " its own with another job.name or checkpoint.folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
