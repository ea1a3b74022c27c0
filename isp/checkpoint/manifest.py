"""`manifest.json`: the files of a checkpoint with their checksums, and plain values."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from isp.checkpoint.plain import from_json, to_json

__all__ = ["MANIFEST", "Damaged", "FileRecord", "Manifest", "file_sha256", "sync_folder"]

MANIFEST = "manifest.json"
_FORMAT = 1
_READ_BYTES = 2**20


class Damaged(Exception):
    """A checkpoint is not what its manifest says; the text says how."""


class FileRecord(NamedTuple):
    """A file as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of. Without a sound manifest a folder is no checkpoint."""

    step: int
    """Steps done when it was saved."""
    tokens: int
    """Tokens consumed until then."""
    num_updates: int
    """Updates made by the optimizer: the steps without the skipped ones."""
    topology: Mapping[str, Any]
    """Sizes and mode of the run that saved it."""
    shared: Mapping[str, Any]
    """Plain values that are the same on all ranks."""
    saved_at: float
    """Seconds since 1970."""
    files: Mapping[str, FileRecord]
    """By file name."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(record.num_bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write `folder`/manifest.json, through to the disk."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        content["files"] = {name: list(record) for name, record in self.files.items()}
        text = to_json({"format": _FORMAT, **content})
        whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
        with (folder / MANIFEST).open("w") as file:
            json.dump(whole, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in `folder`. Raises Damaged if there is none or it is not as written."""
        try:
            whole = json.loads((folder / MANIFEST).read_bytes())
            text, digest = whole["content"], whole["sha256"]
        except FileNotFoundError:
            raise Damaged(f"{MANIFEST} is missing") from None
        except (ValueError, KeyError, TypeError):
            raise Damaged(f"{MANIFEST} is not readable: cut off or overwritten") from None
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            raise Damaged(f"{MANIFEST} has a wrong checksum")
        content = from_json(text)
        if (version := content.pop("format")) != _FORMAT:
            raise Damaged(f"{MANIFEST} has format {version}, this version reads {_FORMAT}")
        files = {name: FileRecord(*record) for name, record in content.pop("files").items()}
        return cls(files=files, **content)

    def check(
        self, folder: Path, names: Iterable[str] | None = None, *, contents: bool = True
    ) -> None:
        """Raise Damaged unless the files (only `names` of them) are there as they were written.

        Compares sizes, and checksums if `contents`, which reads every byte.
        """
        for name in self.files if names is None else names:
            record, path = self.files[name], folder / name
            try:
                num_bytes = path.stat().st_size
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            if num_bytes != record.num_bytes:
                raise Damaged(f"{name} has {num_bytes} bytes instead of {record.num_bytes}")
            if contents and file_sha256(path) != record.sha256:
                raise Damaged(f"{name} has a wrong checksum")


def file_sha256(path: Path) -> str:
    """The checksum of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or deleted in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
