"""The folder of a run's checkpoints: names, publishing by one rename, deleting old ones.

    step_20              a checkpoint, published
    step_30.tmp          one that is being written, or was when the run died
    step_20.old          one that is being replaced; its name is given back if the run dies there
    step_10.deleted      one that is being deleted
    .lock                held by the run that saves here: see `folder_lock`

Only rank 0 calls what changes anything, once it holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isp.checkpoint.manifest import MANIFEST, fault_of, sync_folder
from isp.utils.files import open_regular, open_to_write

__all__ = [
    "CheckpointFolder",
    "check_unlocked",
    "checkpoints_at",
    "describe_contents",
    "folder_lock",
]

logger = logging.getLogger(__name__)

_LOCK = ".lock"
"""File by which a run locks the folder that it saves to."""

_PUBLISHED = re.compile(r"step_(\d+)")
_LEFT_OVER = re.compile(r"step_(\d+)\.(tmp|old|deleted)")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Answers of a file system without locks to a request for one."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints under `path`, which need not exist."""

    path: Path

    @staticmethod
    def names(path: Path) -> bool:
        """Whether `path` is an existing folder that has the name of a checkpoint."""
        return path.is_dir() and _PUBLISHED.fullmatch(path.name) is not None

    def published(self, step: int) -> Path:
        """The folder of the checkpoint of `step`, once complete."""
        return self.path / f"step_{step}"

    def temporary(self, step: int) -> Path:
        """The folder of the checkpoint of `step` during writing."""
        return self.path / f"step_{step}.tmp"

    def steps(self) -> list[int]:
        """The steps that have been published, newest (highest) first; also what `restore` finds."""
        names = [path.name.removesuffix(".old") for path in self._subfolders()]
        matches = [_PUBLISHED.fullmatch(name) for name in names]
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def leftovers(self) -> list[Path]:
        """The remains of saves that did not come to an end."""
        return [path for path in self._subfolders() if _LEFT_OVER.fullmatch(path.name)]

    def restore(self) -> None:
        """Give a checkpoint that was about to be replaced its name back [Note: Replacing]."""
        for path in self.leftovers():
            published = path.with_suffix("")
            if path.suffix == ".old" and not published.exists():
                with suppress(FileNotFoundError):  # another rank has done it
                    path.rename(published)

    def begin(self, step: int) -> None:
        """Make an empty temporary folder for `step`, and remove leftovers."""
        self.restore()
        for path in self.leftovers():
            logger.info("removing %s, left over from an unfinished save", path)
            shutil.rmtree(path)
        self.temporary(step).mkdir(parents=True)

    def publish(self, step: int) -> None:
        """Give the temporary folder of `step` its name.

        [Note: Replacing] A folder cannot be renamed onto another one. A checkpoint of the same step
        (a damaged one, or one of a run that went back) is moved aside first, and `restore` moves it
        back if the process dies before the new one has taken its place.
        """
        published, old = self.published(step), self.published(step).with_suffix(".old")
        sync_folder(self.temporary(step))
        replaces = published.exists()
        if replaces:
            published.rename(old)
        self.temporary(step).rename(published)
        sync_folder(self.path)
        if replaces:
            shutil.rmtree(old, ignore_errors=True)  # else `begin` of the next save removes it

    def abandon(self, step: int) -> None:
        """Remove the temporary folder of `step`, as far as that goes."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        with suppress(OSError):
            self.restore()

    def prune(self, keep: int, *, newest: int, used: Sequence[Path] = ()) -> None:
        """Delete all but `keep` checkpoints, and those in use; 0 keeps all.

        What counts is what looks sound (manifest and file sizes). `newest`, the one just published,
        is kept whatever its number is; nothing is deleted that is newer than all that are kept.
        """
        if not keep:
            return
        others = [step for step in self.steps() if step != newest]
        sound = [step for step in others if not fault_of(self.published(step))]
        kept = {newest, *sound[: keep - 1]}
        for step in self.steps():
            if step not in kept and step < max(kept) and self.published(step) not in used:
                self._delete(step)

    def _delete(self, step: int) -> None:
        # Renamed first: what is half deleted must not look like a checkpoint.
        doomed = self.published(step).with_suffix(".deleted")
        self.published(step).rename(doomed)
        shutil.rmtree(doomed)

    def _subfolders(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return sorted(path for path in self.path.iterdir() if path.is_dir())


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint at `path`, or all in it, newest first, if it is a folder of them or a run's.

    Raises ValueError if there is none, with what there is.
    """
    if (path / MANIFEST).exists():
        return [path]
    for folder in (CheckpointFolder(path), CheckpointFolder(path / "checkpoint")):
        if found := [folder.published(step) for step in folder.steps()]:
            return found
    if CheckpointFolder.names(path):  # one that has lost its manifest
        return [path]
    raise ValueError(
        f"{path} is not a checkpoint and contains none: it {describe_contents(path)}; name a run"
        f" folder, or a step folder inside its checkpoint folder"
    )


def describe_contents(path: Path) -> str:
    """Describe the contents of `path`, as part of a sentence."""
    if not path.is_dir():
        return "is not a folder" if path.exists() else "does not exist"
    # Without hidden files, and what a disk of its own has.
    names = sorted(p.name for p in path.iterdir() if p.name[0] != "." and p.name != "lost+found")
    if not names:
        return "is empty"
    if MANIFEST in names:
        return "is a checkpoint itself"
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".index.json"))]
    if "config.json" in names and weights:
        return f"holds a Hugging Face model (config.json, {weights[0]}): model.hf reads it"
    if "config.yaml" in names and "checkpoint" in names:
        return "is the folder of a run"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"holds {', '.join(names[:3])}{more}"


@contextmanager
def folder_lock(folder: Path, name: str = _LOCK, *, waits_for: str = "") -> Iterator[None]:
    """Keep other runs out of `folder`, which exists, until this is left or the process ends.

    The lock is the file `name`.

    Raises ValueError with its process if another run holds it; with `waits_for`, a description of
    the holder, logs that and waits. On a file system without locks no run is kept out.
    """
    try:
        descriptor = open_to_write(folder / name, os.O_RDWR | os.O_CREAT)
    except PermissionError:  # another user's, which can be locked all the same
        descriptor = open_to_write(folder / name, os.O_RDONLY)
    try:
        try:
            _lock(descriptor, folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ValueError:
            if not waits_for:
                raise
            holder = _named_in(descriptor)
            logger.warning(
                "waiting for %s: it holds the lock %s, which %s", waits_for, folder / name, holder
            )
            _lock(descriptor, folder, fcntl.LOCK_EX)
        with suppress(OSError):  # a full disk is reported by what needs the room
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def check_unlocked(folder: Path) -> None:
    """Raise ValueError if a run holds the lock of `folder`; makes nothing."""
    try:
        file = open_regular(folder / _LOCK, follow=False)
    except FileNotFoundError:
        return
    with file:  # a shared lock: two starts may look at once
        _lock(file.fileno(), folder, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _named_in(descriptor: int) -> str:
    """Return which process a lock names, in words.

    It may be an earlier holder: a process writes itself into the file after it has locked it, if
    it may write and the disk has room.
    """
    return f"names {os.pread(descriptor, 200, 0).decode(errors='replace') or 'no process'}"


def _lock(descriptor: int, folder: Path, operation: int) -> None:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        raise ValueError(
            f"another run is saving to {folder}, whose lock {_named_in(descriptor)}: wait until it"
            f" has ended, or use another job.name or checkpoint.folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
