"""A folder of checkpoints: names, publishing by a rename, deleting, choosing, and the lock.

    step_20              a published checkpoint
    step_30.tmp          a checkpoint that is being written, or was when the process died
    step_20.old          a checkpoint that is being replaced; `restore` renames it back if the
                         process died before the new one had its name
    step_10.deleted      a checkpoint that is being deleted
    .lock                locked by the run that saves here: see `folder_lock`

Only rank 0 calls methods that change files, after it has taken the lock.

A checkpoint is chosen from `Candidates`, in their order, by `choose` (verifies every byte) or by
`preview` (compares manifests and file sizes only). `isp.train.state.resume` decides which folder a
run looks into.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from isp.checkpoint.agreement import CheckpointError, attempt, attempt_first
from isp.checkpoint.manifest import MANIFEST, Damaged, Manifest, fault_of, sync_folder
from isp.config.sections import CHECKPOINT_FOLDER
from isp.core.comm import Channel
from isp.utils.files import open_regular, open_to_write

__all__ = [
    "LAUNCH",
    "Candidates",
    "CheckpointFolder",
    "CheckpointInfo",
    "candidates_at",
    "candidates_in",
    "check_unlocked",
    "checkpoints_at",
    "choose",
    "describe_contents",
    "folder_lock",
    "newest_at",
    "preview",
]

logger = logging.getLogger(__name__)

LAUNCH = "launch"
"""Key of the launch's time among the shared values of a manifest."""
_LOCK = ".lock"
"""Name of the file that a run locks in the folder that it saves to."""

_PUBLISHED = re.compile(r"step_(\d+)")
_LEFT_OVER = re.compile(r"step_(\d+)\.(tmp|old|deleted)")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of flock on file systems without locks."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints in the folder `path`, which need not exist."""

    path: Path

    @staticmethod
    def names(path: Path) -> bool:
        """Return True if `path` is an existing folder with the name of a checkpoint."""
        return path.is_dir() and _PUBLISHED.fullmatch(path.name) is not None

    def published(self, step: int) -> Path:
        """Return the path of the published checkpoint of `step`."""
        return self.path / f"step_{step}"

    def temporary(self, step: int) -> Path:
        """Return the path of the checkpoint of `step` while it is written."""
        return self.path / f"step_{step}.tmp"

    def steps(self) -> list[int]:
        """Return the published steps, highest first.

        Steps of which only `step_<n>.old` exists are included, since `restore` renames it back.
        """
        names = [path.name.removesuffix(".old") for path in self._subfolders()]
        matches = [_PUBLISHED.fullmatch(name) for name in names]
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def leftovers(self) -> list[Path]:
        """Return the folders of saves, replacements and deletions that did not end."""
        return [path for path in self._subfolders() if _LEFT_OVER.fullmatch(path.name)]

    def restore(self) -> None:
        """Rename `step_<n>.old` back where the replacement did not end [Note: Replacing]."""
        for path in self.leftovers():
            published = path.with_suffix("")
            if path.suffix == ".old" and not published.exists():
                with suppress(FileNotFoundError):  # another process has renamed it meanwhile
                    path.rename(published)

    def begin(self, step: int) -> None:
        """Create an empty temporary folder for `step`; remove leftovers of earlier saves."""
        self.restore()
        for path in self.leftovers():
            logger.info("removing %s, left over from an unfinished save", path)
            shutil.rmtree(path)
        self.temporary(step).mkdir(parents=True)

    def publish(self, step: int) -> None:
        """Rename the temporary folder of `step` to its final name.

        An existing checkpoint of `step` is replaced, by two renames. See [Note: Replacing] in
        docs/design/notes/checkpoints.md.
        """
        published, old = self.published(step), self.published(step).with_suffix(".old")
        # First the folder's entries, then its name: after a power failure, a folder with the final
        # name must not lack files.
        sync_folder(self.temporary(step))
        replaces = published.exists()
        if replaces:
            published.rename(old)
        self.temporary(step).rename(published)
        sync_folder(self.path)
        if replaces:
            shutil.rmtree(old, ignore_errors=True)  # if it fails, the next `begin` tries again

    def abandon(self, step: int) -> None:
        """Remove the temporary folder of `step` after a failed save, ignoring errors."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)
        with suppress(OSError):
            self.restore()

    def prune(self, keep: int, *, newest: int, used: Sequence[Path] = ()) -> None:
        """Delete all but the `keep` newest checkpoints and those in `used`; 0 keeps all.

        Only checkpoints that are sound (by manifest and file sizes) count toward `keep`. `newest`,
        the one just published, is always kept, even if others have higher steps: the run has then
        gone back. Checkpoints with a step above all kept ones are not deleted.
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
        """Delete the checkpoint of `step`."""
        # Rename it first: a process that dies here must not leave half a checkpoint with this name.
        doomed = self.published(step).with_suffix(".deleted")
        self.published(step).rename(doomed)
        shutil.rmtree(doomed)

    def _subfolders(self) -> list[Path]:
        """Return all folders in this folder, sorted; an empty list if it does not exist."""
        if not self.path.is_dir():
            return []
        return sorted(path for path in self.path.iterdir() if path.is_dir())


# -- choosing ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint that was chosen, and why; its file sizes or all its bytes were checked."""

    path: Path
    manifest: Manifest
    reason: str
    """Reason for the choice, as the end of a log line: `the newest good one`."""
    passed_over: tuple[str, ...]
    """Lines about newer checkpoints that are damaged, and about saves that did not end."""

    @property
    def step(self) -> int:
        """Number of steps done when the checkpoint was saved."""
        return self.manifest.step

    def describe(self) -> str:
        """Return the path and the reason, then a line for each checkpoint that was passed over."""
        skipped = "".join(f"\n  passed over {line}" for line in self.passed_over)
        return f"{self.path}, {self.reason}{skipped}"


class Candidates(NamedTuple):
    """Checkpoints to choose from, the preferred one first."""

    place: str
    """Path that was searched."""
    paths: list[str]
    reason: str
    """Reason for choosing among these, as the end of a log line: `the newest good one`."""
    leftovers: list[str]
    """Lines about saves that did not end."""


def candidates_in(
    folder: CheckpointFolder, load_step: int | None = None, *, launch: float | None = None
) -> Candidates:
    """Return the checkpoint of `load_step` as the candidate, or all of `folder`, newest first.

    Call it on one rank. `launch` is given if torchrun has restarted the ranks: the time of their
    launch. The launch has then already gone back to `load_step`, so the checkpoints that it has
    saved since come first, and that of `load_step` after them. Raises ValueError if there is no
    checkpoint of `load_step`.
    """
    folder.restore()
    steps, reason = folder.steps(), "the newest good one"
    leftovers = [
        f"{path.name}: left over from a save that did not end" for path in folder.leftovers()
    ]
    if load_step is not None:
        # Go by the launch in their manifests, not by their time: after a clock was set back, new
        # checkpoints look old.
        newer = [
            step for step in steps if launch is not None and _launch_of(folder, step) == launch
        ]
        if load_step not in steps and not newer:
            there = ", ".join(str(s) for s in steps) or "none at all"
            raise ValueError(
                f"checkpoint.load_step={load_step}: {folder.path} has no such checkpoint;"
                f" there are: {there}"
            )
        reason = f"as load_step={load_step} says"
        if newer:
            reason = f"the newest good one since the run went back to load_step={load_step}"
        steps = [*newer, *({load_step} & set(steps) - set(newer))]
    paths = [str(folder.published(step)) for step in steps]
    return Candidates(str(folder.path), paths, reason, leftovers)


def _launch_of(folder: CheckpointFolder, step: int) -> float | None:
    """Return the time of the launch that saved the checkpoint of `step`; None if not known."""
    try:
        return Manifest.read(folder.published(step)).shared.get(LAUNCH)
    except Damaged:
        return None


def candidates_at(path: Path) -> Candidates:
    """Return the checkpoint at `path`, or all checkpoints in that folder, as candidates.

    Raises ValueError if there is none.
    """
    return Candidates(str(path), [str(p) for p in checkpoints_at(path)], "as given", [])


def newest_at(path: Path) -> CheckpointInfo:
    """Return the newest checkpoint at `path` that is sound by its manifest and file sizes.

    `path` is a checkpoint or a folder of them. Raises ValueError if there is none, CheckpointError
    if all are damaged.
    """
    found = preview(lambda: candidates_at(path))
    assert found is not None
    return found


def choose(find: Callable[[], Candidates], channel: Channel) -> CheckpointInfo | None:
    """Return the first undamaged candidate of those that `find` returns on rank 0.

    Returns None if `find` returns no candidates. A collective, which verifies every byte; each rank
    reads a part of the files. Raises CheckpointError if `find` raises, or all candidates are
    damaged.
    """

    def verified(path: Path) -> Manifest:
        """Verify every byte of a checkpoint and return its manifest.

        Raises CheckpointError on all ranks if any rank finds a fault.
        """
        manifests: list[Manifest] = []

        def check_share() -> None:
            manifest = Manifest.read(path)
            # Deal the files out in order of size, so that shares have about equally many bytes.
            by_size = sorted(manifest.files, key=lambda name: manifest.files[name].num_bytes)
            manifest.check(path, by_size[channel.rank :: channel.size])
            manifests.append(manifest)

        attempt(channel, "verifying", check_share)
        return manifests[0]

    found = Candidates(*attempt_first(channel, "looking for checkpoints", find))
    return _first_good(found, verified)


def preview(find: Callable[[], Candidates]) -> CheckpointInfo | None:
    """Return what `choose` would return, judged by manifests and file sizes, on one rank."""
    return _first_good(find(), Manifest.sound)


def _first_good(found: Candidates, verify: Callable[[Path], Manifest]) -> CheckpointInfo | None:
    """Return the first candidate that `verify` accepts; None if there are no candidates.

    Raises CheckpointError, with the fault of each, if `verify` refuses all.
    """
    passed_over = list(found.leftovers)
    for path in map(Path, found.paths):
        try:
            manifest = verify(path)
        except CheckpointError as fault:
            passed_over.append(f"{path.name}: {fault}")
            continue
        return CheckpointInfo(
            path=path, manifest=manifest, reason=found.reason, passed_over=tuple(passed_over)
        )
    if found.paths:
        reasons = "".join(f"\n  {line}" for line in passed_over)
        raise CheckpointError(
            f"no usable checkpoint in {found.place}:{reasons}\nchoose another one (in training by"
            f" checkpoint.load_step), or start a new run: another job.name, or"
            f" checkpoint.auto_resume=false"
        )
    return None


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint at `path`, or all checkpoints in that folder, newest first.

    `path` is a checkpoint, a folder of checkpoints, or a run's folder. Raises ValueError if there
    is no checkpoint, with a description of what is there.
    """
    if (path / MANIFEST).exists():
        return [path]
    for folder in (CheckpointFolder(path), CheckpointFolder(path / CHECKPOINT_FOLDER)):
        if found := [folder.published(step) for step in folder.steps()]:
            return found
    if CheckpointFolder.names(path):  # it has no manifest: the caller reports it as damaged
        return [path]
    raise ValueError(
        f"{path} is not a checkpoint and contains none: it {describe_contents(path)}; name a run"
        f" folder, or a step folder inside its checkpoint folder"
    )


def describe_contents(path: Path) -> str:
    """Return what is at `path`, as the end of a sentence: `is empty`, `holds a.txt, ..`."""
    if not path.is_dir():
        return "is not a folder" if path.exists() else "does not exist"
    # Leave out hidden files, and `lost+found`, which every ext4 file system has.
    names = sorted(p.name for p in path.iterdir() if p.name[0] != "." and p.name != "lost+found")
    if not names:
        return "is empty"
    if MANIFEST in names:
        return "is a checkpoint itself"
    weights = [name for name in names if name.endswith((".safetensors", ".bin", ".index.json"))]
    if "config.json" in names and weights:
        return f"holds a Hugging Face model (config.json, {weights[0]}): model.hf reads it"
    if "config.yaml" in names and CHECKPOINT_FOLDER in names:
        return "is the folder of a run"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"holds {', '.join(names[:3])}{more}"


# -- the lock ---------------------------------------------------------------------------------


@contextmanager
def folder_lock(folder: Path, name: str = _LOCK, *, waits_for: str = "") -> Iterator[None]:
    """Context that locks the file `name` in `folder`, so that no other run uses the folder.

    The lock ends with the context or with the process. If another run holds it, raises ValueError
    with the name of its process. If `waits_for` is given (what the other run is doing, in words),
    it logs these words and waits for the lock instead of raising. On a file system without locks,
    nothing is locked.
    """
    try:
        descriptor = open_to_write(folder / name, os.O_RDWR | os.O_CREAT)
    except PermissionError:  # a file of another user: locking it needs no right to write
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
        # Name this process in the file, for errors. On a full disk that fails, but the lock holds.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def check_unlocked(folder: Path) -> None:
    """Raise ValueError if a run holds the lock of `folder`; makes no file."""
    try:
        file = open_regular(folder / _LOCK, follow=False)
    except FileNotFoundError:
        return
    with file:  # Take a shared lock: two starts that check at once must not refuse each other.
        _lock(file.fileno(), folder, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _named_in(descriptor: int) -> str:
    """Return the process that an open lock file names, as the end of a sentence.

    It may be an earlier holder: a process writes its name after it has the lock, and only if it may
    write to the file and the disk has space.
    """
    return f"names {os.pread(descriptor, 200, 0).decode(errors='replace') or 'no process'}"


def _lock(descriptor: int, folder: Path, operation: int) -> None:
    """Lock an open file in `folder` by flock with `operation`.

    Raises ValueError if another run holds the lock. Does nothing on a file system without locks.
    """
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
