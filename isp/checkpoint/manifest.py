"""`manifest.json`: the files of a checkpoint with their checksums, and plain values.

A manifest may come from an unknown source, so every value in it is checked. See
[Note: What a manifest may say] in docs/design/notes/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from isp.checkpoint.agreement import CheckpointError
from isp.checkpoint.plain import from_json, to_json
from isp.core.mesh import Topology
from isp.utils import files

__all__ = [
    "MANIFEST",
    "Damaged",
    "FileRecord",
    "Manifest",
    "SavedTopology",
    "fault_of",
    "open_regular",
    "sync_folder",
]

MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**28
"""Size limit of a manifest: 200 bytes for a file of each of a million ranks."""
_FORMAT = 1
"""Version of the manifest's format."""
_NAMED = re.compile(r"step_(\d+)(?:\.tmp)?")
"""Name of a checkpoint's folder, after or before it is published."""
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


class Damaged(CheckpointError):
    """A checkpoint differs from its manifest, or has none; the text says how."""


def _in_folder(name: str) -> str:
    """Return `name`; raise ValueError if it could lead out of the checkpoint's folder."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} does not name a file in the checkpoint's folder")
    return name


FileName = Annotated[str, AfterValidator(_in_folder)]
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
Count = Annotated[int, Field(ge=0, le=_INT64)]
Size = Annotated[int, Field(ge=1, le=_INT64)]


class FileRecord(NamedTuple):
    """Size and checksum of a file as it was written."""

    num_bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SavedTopology(BaseModel):
    """Mode and group sizes of the run that saved a checkpoint: how its weights were sharded.

    Fields are as in `isp.core.mesh.Topology`. Plain values of a rank are loaded only by a run with
    an equal `SavedTopology`.
    """

    model_config = _STRICT

    world_size: Size
    mode: str
    tensor: Size
    weight: Size
    pipeline: Size
    zero1: Size

    @classmethod
    def of(cls, topology: Topology) -> Self:
        """Return the fields of `topology` that a checkpoint keeps."""
        return cls(**{field: getattr(topology, field) for field in cls.model_fields})


class Manifest(BaseModel):
    """The contents of a checkpoint; a folder without a sound manifest is not a checkpoint."""

    model_config = _STRICT

    step: Annotated[int, Field(ge=0, le=_INT32)]  # training.steps has the same limit
    """Number of steps done when the checkpoint was saved."""
    tokens: Count
    """Number of tokens that these steps trained on, over all ranks."""
    num_updates: Annotated[int, Field(ge=-1, le=_INT32)]
    """Number of optimizer updates: steps that were not skipped; -1: no optimizer was saved."""
    topology: SavedTopology
    """Mode and group sizes of the run that saved the checkpoint."""
    shared: Mapping[str, Any]
    """The values other than tensors that all ranks save equally."""
    saved_at: Annotated[float, Field(ge=0, le=1e11)]
    """Time of the save in seconds since 1970."""
    files: Mapping[FileName, FileRecord]
    """All other files of the checkpoint, by name."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all files together, without the manifest."""
        return sum(record.num_bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write `folder`/manifest.json, and wait until the disk has it (fsync)."""
        content = {**dict(self), "topology": self.topology.model_dump()}
        content["files"] = {name: list(record) for name, record in self.files.items()}
        text = to_json({"format": _FORMAT, **content})
        # The content is a string inside the JSON: the checksum is over exactly these characters.
        whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
        with (folder / MANIFEST).open("w") as file:
            json.dump(whole, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and return the manifest in the folder of a checkpoint.

        Raises Damaged if there is none, its checksum or content is wrong, or its step is not that
        of the folder's name.
        """
        with open_regular(folder / MANIFEST) as file:
            if (num_bytes := os.fstat(file.fileno()).st_size) > _MAX_MANIFEST_BYTES:
                raise Damaged(f"{MANIFEST} has {num_bytes} bytes, which is too many for a manifest")
            data = file.read()
        try:
            whole = json.loads(data)
            text, digest = whole["content"], whole["sha256"]
            has_digest = hashlib.sha256(text.encode()).hexdigest() == digest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Damaged(f"{MANIFEST} is not readable: cut off or overwritten") from None
        if not has_digest:
            raise Damaged(f"{MANIFEST} has a wrong checksum")
        manifest, named = cls._of_content(text), _NAMED.fullmatch(folder.name)
        # With a step other than the manifest's, a run would choose the wrong checkpoint, and repeat
        # or skip steps.
        if named and int(named[1]) != manifest.step:
            raise Damaged(
                f"it is of step {manifest.step}, so the folder was renamed or copied: name it"
                f" step_{manifest.step}"
            )
        return manifest

    @classmethod
    def sound(cls, folder: Path, *, contents: bool = False) -> Manifest:
        """Return the manifest in `folder` after a check of its files (`check`).

        Raises Damaged if the manifest or a file is not as it was written.
        """
        manifest = cls.read(folder)
        manifest.check(folder, contents=contents)
        return manifest

    @classmethod
    def _of_content(cls, text: str) -> Self:
        """Return the manifest whose content is the JSON `text`; raise Damaged if it is invalid."""
        try:
            content = from_json(text)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} has invalid content: {error}") from None
        version = content.pop("format", None) if isinstance(content, dict) else None
        if version != _FORMAT:
            raise Damaged(
                f"{MANIFEST} has format {version}, and this version of ISP reads only {_FORMAT}:"
                " read it with the version that saved it"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(str(part) for part in fault["loc"])
            raise Damaged(f"{MANIFEST}: {place}: {fault['msg']}") from None

    def check(
        self, folder: Path, names: Iterable[str] | None = None, *, contents: bool = True
    ) -> None:
        """Raise Damaged unless the files in `folder` are as they were written.

        `names`: files to check; None: all. Compares sizes, and with `contents` also checksums, for
        which it reads every byte.
        """
        for name in self.files if names is None else names:
            record = self.files[name]
            with open_regular(folder / name) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes != record.num_bytes:
                    raise Damaged(f"{name} has {num_bytes} bytes instead of {record.num_bytes}")
                if contents and file_digest(file, "sha256").hexdigest() != record.sha256:
                    raise Damaged(f"{name} has a wrong checksum")


def fault_of(folder: Path, *, contents: bool = False) -> str:
    """Return what is wrong with the checkpoint in `folder`, as text; "" if nothing is.

    Checks as `Manifest.sound` does.
    """
    try:
        Manifest.sound(folder, contents=contents)
    except Damaged as fault:
        return f"damaged: {fault}"
    return ""


def open_regular(path: Path) -> BufferedReader:
    """Open the file at `path` for reading; raise Damaged if it is not a regular file."""
    try:
        return files.open_regular(path, follow=False)  # a link could point out of the folder
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing") from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None


def sync_folder(folder: Path) -> None:
    """Write the directory `folder` to the disk (fsync), so that renames survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
