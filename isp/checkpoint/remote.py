"""Copies of checkpoints in an object store (`checkpoint.upload_to`), by fsspec.

    URL/step_20/...      a copy of a checkpoint; its manifest is written last and deleted first

So a folder without a manifest is not a checkpoint: its upload or its deletion did not end. An
object store cannot rename a folder, as the local disk does to publish a checkpoint.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from threading import Thread

from isp.checkpoint.folder import CheckpointFolder
from isp.checkpoint.manifest import MANIFEST, Damaged, fault_of
from isp.utils.text import first_line

__all__ = ["RemoteCheckpoints", "Uploads"]

logger = logging.getLogger(__name__)


class RemoteCheckpoints:
    """The checkpoints under `url`, such as `s3://bucket/run`.

    Methods raise the exceptions of fsspec and of its file systems, which may be of any type.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._system, self._root = url_to_fs(url.rstrip("/"))

    def steps(self) -> list[int]:
        """Return the steps of the copies that have a manifest, newest first."""
        self._system.invalidate_cache()  # fsspec caches listings, and other programs may write
        found = self._system.glob(f"{self._root}/step_*/{MANIFEST}")
        names = [path.split("/")[-2].removeprefix("step_") for path in found]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def upload(self, folder: Path, *, keep: int) -> None:
        """Copy the published checkpoint `folder` to the store, and delete older copies.

        The `keep` newest up to this one stay; 0: all. Copies of later steps are not deleted.
        """
        step = int(folder.name.removeprefix("step_"))
        if step in self.steps():
            self._delete(step)
        self._system.makedirs(self._at(step), exist_ok=True)
        # Copy the manifest last: until then the folder does not count as a checkpoint.
        for name in sorted(os.listdir(folder), key=lambda name: name == MANIFEST):
            self._system.put_file(str(folder / name), f"{self._at(step)}/{name}")
        older = [other for other in self.steps() if other < step]
        for other in older[keep - 1 :] if keep else []:
            self._delete(other)

    def has(self, folder: Path) -> bool:
        """Return True if the store has a copy of the published checkpoint `folder`.

        Compares the contents of the manifest, and only the sizes of the other files.
        """
        step = int(folder.name.removeprefix("step_"))
        if step not in self.steps():
            return False
        listed = self._system.ls(self._at(step), detail=True)
        sizes = {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listed}
        if sizes != {path.name: path.stat().st_size for path in folder.iterdir()}:
            return False
        copied: bytes = self._system.cat_file(f"{self._at(step)}/{MANIFEST}")
        return copied == (folder / MANIFEST).read_bytes()

    def fill(
        self, folder: CheckpointFolder, load_step: int | None = None
    ) -> tuple[int | None, list[str]]:
        """Copy the checkpoint of `load_step`, or the newest, into `folder`, and publish it there.

        If a copy in the store is damaged or lacks a file, the next older one is tried. Returns the
        step that was copied (None if the store has none), and the faults of those that were tried
        before it. Raises Damaged if all are damaged.
        """
        faults = list[str]()
        for step in [step for step in self.steps() if load_step in (None, step)]:
            folder.begin(step)
            for path in self._system.ls(self._at(step), detail=False):
                copy = folder.temporary(step) / path.rsplit("/", 1)[-1]
                # Skip a file that is missing: the check below then finds the checkpoint damaged.
                # Do not catch errors of the network or of credentials, which do not mean that the
                # checkpoint is damaged.
                with suppress(FileNotFoundError, IsADirectoryError):
                    self._system.get_file(path, str(copy))
            # Verify before publishing: once `folder` has a checkpoint, even a damaged one, no later
            # start copies from the store.
            if not (fault := fault_of(folder.temporary(step), contents=True)):
                folder.publish(step)
                return step, faults
            faults.append(f"step {step} is {fault}")
            folder.abandon(step)
        if faults:
            raise Damaged(f"no copy is good: {faults[0]}")
        return None, []

    def _at(self, step: int) -> str:
        """Return the path of the copy of `step` in the store."""
        return f"{self._root}/step_{step}"

    def _delete(self, step: int) -> None:
        """Delete the copy of `step` from the store."""
        # Delete the manifest first: a folder that is half deleted is then no checkpoint. With
        # `recursive`, also if a folder has that name by mistake.
        self._system.rm(f"{self._at(step)}/{MANIFEST}", recursive=True)
        self._system.rm(self._at(step), recursive=True)


class Uploads:
    """Copies published checkpoints to `url` in threads, so that training does not wait.

    The store keeps the `keep` newest (0: all). If several checkpoints are published during a copy,
    only the newest of them is copied next. Failures are logged.
    """

    def __init__(self, url: str, keep: int) -> None:
        self.fault: str | None = None
        """Failure of the last copy; None if it succeeded or is in flight."""
        self._url, self._keep = url, keep
        self._thread: Thread | None = None
        self._current: Path | None = None
        self._next: Path | None = None

    def put(self, folder: Path, *, only_missing: bool = False) -> None:
        """Copy the checkpoint `folder`, after the copy that is in flight.

        `only_missing`: do nothing if the store already has it (`RemoteCheckpoints.has`).
        """
        # Each copy has a thread of its own, which first waits for the thread before it.
        self._next = folder
        arguments = (folder, self._thread, only_missing)
        self._thread = Thread(target=self._copy, args=arguments, daemon=True)
        self._thread.start()

    def unfinished(self) -> list[Path]:
        """Return the checkpoints that are being copied or will be: they must not be deleted."""
        if self._thread is None or not self._thread.is_alive():
            return []
        return [folder for folder in (self._current, self._next) if folder is not None]

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until all copies have ended, or for `timeout_seconds`."""
        if self._thread is not None:
            if self._thread.is_alive():
                logger.info("waiting until %s is copied to %s", self._next, self._url)
            self._thread.join(timeout_seconds)

    def _copy(self, folder: Path, before: Thread | None, only_missing: bool) -> None:
        """Copy `folder` once the thread `before` has ended, unless a newer checkpoint waits."""
        if before is not None:
            before.join()
        if folder != self._next:
            logger.warning(
                "%s is not copied to %s: a newer checkpoint was saved while an earlier one was"
                " copied, and only the newest is copied next",
                folder,
                self._url,
            )
            return
        self._current, self.fault = folder, None
        try:
            remote = RemoteCheckpoints(self._url)
            if not (only_missing and remote.has(folder)):
                remote.upload(folder, keep=self._keep)
        except Exception as error:  # each library of a file system defines its own exceptions
            why = first_line(error)
            where = f"checkpoint.upload_to={self._url}"
            self.fault = f"{folder} could not be copied to {where} ({why})"
            logger.error("%s", self.fault)
