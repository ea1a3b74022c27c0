"""The temporary folder in which torchrun keeps the ranks' error files, and those left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["rank_folder"]

_PREFIX = "isp-ranks-"


@contextmanager
def rank_folder() -> Iterator[Path]:
    """A new folder, removed at the end, and by a later launcher if this one is killed.

    A launcher holds a lock on its folder, which ends with the launcher, however it ends.
    """
    _remove_abandoned()
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make() -> tuple[Path, int]:
    """A new folder, and the lock on it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks: nobody else can take it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder, lock
        os.close(lock)  # another launcher took it for an abandoned one before it was locked


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # in use, another user's, or just removed by its launcher
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
