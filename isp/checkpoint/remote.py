"""Copies of checkpoints in an object store, by fsspec.

    URL/step_20/...      a checkpoint; its manifest is written last and deleted first

A folder without a manifest is no checkpoint: its upload, or its deletion, did not end.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from threading import Thread

from isp.checkpoint.folder import CheckpointFolder
from isp.checkpoint.manifest import MANIFEST, Damaged, fault_of
from isp.utils.safe_text import first_line

__all__ = ["RemoteCheckpoints", "Uploads"]

logger = logging.getLogger(__name__)


class RemoteCheckpoints:
    """The checkpoints under `url` (`s3://bucket/run`); raises what fsspec does."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._system, self._root = url_to_fs(url.rstrip("/"))

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, newest first."""
        self._system.invalidate_cache()
        found = self._system.glob(f"{self._root}/step_*/{MANIFEST}")
        names = [path.split("/")[-2].removeprefix("step_") for path in found]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def upload(self, folder: Path, *, keep: int) -> None:
        """Copy the published checkpoint `folder`, and keep `keep` up to it; 0 keeps all."""
        step = int(folder.name.removeprefix("step_"))
        if step in self.steps():
            self._delete(step)
        self._system.makedirs(self._at(step), exist_ok=True)
        for name in sorted(os.listdir(folder), key=lambda name: name == MANIFEST):
            self._system.put_file(str(folder / name), f"{self._at(step)}/{name}")
        older = [other for other in self.steps() if other < step]
        for other in older[keep - 1 :] if keep else []:
            self._delete(other)

    def has(self, folder: Path) -> bool:
        """Return True if there is a copy of the published checkpoint `folder`.

        Its manifest and the sizes of its files are compared, not their contents.
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

        One that turns out to be damaged, or lacks a file, is passed over for the one before it.
        Returns the copied step, None if there is none to copy, and the faults of those passed over.
        Raises Damaged if none is good.
        """
        faults = list[str]()
        for step in [step for step in self.steps() if load_step in (None, step)]:
            folder.begin(step)
            for path in self._system.ls(self._at(step), detail=False):
                copy = folder.temporary(step) / path.rsplit("/", 1)[-1]
                # Left out of the copy, which counts as damaged. A failing network, or refused
                # credentials, would be no fault of the checkpoint: they end the start.
                with suppress(FileNotFoundError, IsADirectoryError):
                    self._system.get_file(path, str(copy))
            # Before it is published: with a damaged one in `folder`, no later start would copy.
            if not (fault := fault_of(folder.temporary(step), contents=True)):
                folder.publish(step)
                return step, faults
            faults.append(f"step {step} is {fault}")
            folder.abandon(step)
        if faults:
            raise Damaged(f"no copy is good: {faults[0]}")
        return None, []

    def _at(self, step: int) -> str:
        return f"{self._root}/step_{step}"

    def _delete(self, step: int) -> None:
        self._system.rm(f"{self._at(step)}/{MANIFEST}", recursive=True)  # may be a folder by fault
        self._system.rm(self._at(step), recursive=True)


class Uploads:
    """Copies published checkpoints to `url`, as many as `keep`, in a thread: no rank waits for it.

    Of those that are published during a copy, the newest is next. A failure is logged.
    """

    def __init__(self, url: str, keep: int) -> None:
        self.fault: str | None = None
        """The failure of the last copy, in words; None if it succeeded or is still in flight."""
        self._url, self._keep = url, keep
        self._thread: Thread | None = None
        self._current: Path | None = None
        self._next: Path | None = None

    def put(self, folder: Path, *, only_missing: bool = False) -> None:
        """Copy the checkpoint `folder`, after the one that is being copied.

        `only_missing`: skip it if the store already has it (`RemoteCheckpoints.has`).
        """
        self._next = folder
        arguments = (folder, self._thread, only_missing)
        self._thread = Thread(target=self._copy, args=arguments, daemon=True)
        self._thread.start()

    def unfinished(self) -> list[Path]:
        """The checkpoints that are still needed."""
        if self._thread is None or not self._thread.is_alive():
            return []
        return [folder for folder in (self._current, self._next) if folder is not None]

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until all are copied."""
        if self._thread is not None:
            if self._thread.is_alive():
                logger.info("waiting until %s is copied to %s", self._next, self._url)
            self._thread.join(timeout_seconds)

    def _copy(self, folder: Path, before: Thread | None, only_missing: bool) -> None:
        if before is not None:
            before.join()
        if folder != self._next:
            logger.warning(
                "%s is not copied to %s: the one before took too long", folder, self._url
            )
            return
        self._current, self.fault = folder, None
        try:
            remote = RemoteCheckpoints(self._url)
            if not (only_missing and remote.has(folder)):
                remote.upload(folder, keep=self._keep)
        except Exception as error:  # of any file system and its network
            why = first_line(error)
            where = f"checkpoint.upload_to={self._url}"
            self.fault = f"{folder} could not be copied to {where} ({why})"
            logger.error("%s", self.fault)
