"""Files of a checkpoint in torch's format: checksums while writing, and safe reading.

Reading runs no code from the files, although one of them is a pickle. See [Note: What is pickled]
in docs/design/notes/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from isp.checkpoint.manifest import Damaged, FileRecord, open_regular

__all__ = ["CheckedWriter", "SafeReader", "quietly", "read_metadata"]

METADATA = ".metadata"
"""Name of the file with torch's table of contents of a checkpoint."""

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
}
"""Classes and functions, by module, that a table of contents may contain, in addition to dtypes."""


class CheckedWriter(FileSystemWriter):
    """torch's writer of files; waits for the disk, and keeps sizes and checksums in `records`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self.fs: FileSystem = _CheckedFileSystem()

    @property
    def records(self) -> dict[str, FileRecord]:
        """The files that this rank has written, by name."""
        assert isinstance(self.fs, _CheckedFileSystem)
        return self.fs.records

    def storage_meta(self) -> StorageMeta:
        # torch would store the name of the folder, but that is `step_<n>.tmp` while writing.
        return StorageMeta()


class SafeReader(FileSystemReader):
    """torch's reader of files, given the metadata that `read_metadata` has checked.

    torch's own `read_metadata` would unpickle the file without checks [Note: What is pickled].
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def read_metadata(folder: Path, files: Mapping[str, FileRecord]) -> Metadata:
    """Return the table of contents of the checkpoint in `folder`, whose manifest has `files`.

    Raises Damaged if it cannot be read, contains other classes than `_ALLOWED`, names other files,
    or does not have each element of each tensor once.
    """
    if METADATA not in files:
        raise Damaged(f"{METADATA} is not among the files of the manifest")
    with open_regular(folder / METADATA) as file:
        try:
            found = _MetadataUnpickler(file).load()
            fault = _fault(found, files)
        except Exception as error:  # unpickling damaged data may raise any exception
            fault = f"is not readable: {error}"
    if fault:
        raise Damaged(f"{METADATA} {fault}")
    table: Metadata = found
    return table


def _fault(table: Metadata, files: Mapping[str, FileRecord]) -> str:
    """Return what is wrong with a table of contents, as text; "" if nothing is.

    May raise any exception: a damaged pickle can have values of other types than torch writes.
    """
    for info in table.storage_data.values():
        if info.relative_path not in files:
            return f"names {info.relative_path!r}, which is not in the manifest"
        if min(info.offset, info.length) < 0 or info.transform_descriptors is not None:
            return "is not a table of tensors"
        if info.offset + info.length > files[info.relative_path].num_bytes:
            return f"reads beyond {info.relative_path}"
    num_bytes = sum(record.num_bytes for record in files.values())
    # Remove the place in a file of each chunk of each tensor from `places`. If the place is not
    # there, the chunk is stored nowhere, or the metadata lists it twice. Places that remain at the
    # end belong to no tensor.
    places = dict.fromkeys(table.storage_data, 0)
    for key, tensor in table.state_dict_metadata.items():
        if not (isinstance(key, str) and isinstance(tensor, TensorStorageMetadata)):
            return "is not a table of tensors"
        if math.prod(tensor.size) * tensor.properties.dtype.itemsize > num_bytes:
            return f"says that {key} is larger than all files"
        if not _has_all(tensor) or any(
            places.pop(MetadataIndex(key, chunk.offsets), None) is None for chunk in tensor.chunks
        ):
            return f"does not hold {key} whole"
    return f"has places of no tensor: {', '.join(map(str, places))}" if places else ""


def _has_all(tensor: TensorStorageMetadata) -> bool:
    """Return True if the chunks are inside the tensor and together have all its elements.

    No two chunks may begin at the same element. Chunks that overlap in another way are not found.
    """
    whole = tuple(tensor.size)
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(whole)
        and min((*chunk.offsets, *chunk.sizes, 0)) == 0
        and all(a + n <= size for a, n, size in zip(chunk.offsets, chunk.sizes, whole, strict=True))
        for chunk in tensor.chunks
    )
    corners = {chunk.offsets for chunk in tensor.chunks}
    elements = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    return inside and len(corners) == len(tensor.chunks) and elements == math.prod(whole)


@contextmanager
def quietly() -> Iterator[None]:
    """Context that hides torch's warning that it saves or loads in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that refuses all classes and functions except `_ALLOWED` and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _ALLOWED.get(module, ())
        if not allowed and not (module == "torch" and _is_dtype(name)):
            raise pickle.UnpicklingError(f"it must not contain {module}.{name}")
        return super().find_class(module, name)


def _is_dtype(name: str) -> bool:
    """Return True if `torch.NAME` is a dtype."""
    return isinstance(vars(torch).get(name), torch.dtype)


class _CheckedFileSystem(FileSystem):
    """torch's access to files, which also records size and checksum of each file it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        if mode != "wb":  # When reading, `Manifest.check` does it.
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _CheckedFile(Path(path)) as file:
            yield file
        self.records[Path(path).name] = FileRecord(file.num_bytes, file.digest.hexdigest())

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        # torch writes `.metadata` under a temporary name and renames it: rename its record, too.
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _CheckedFile(io.IOBase):
    """A file open for writing that computes the size and the SHA-256 of what is written.

    If a write fails, torch.save raises an error of its own, "unexpected pos". The first error of
    the file is kept and raised instead, since it has the cause ("No space left on device").
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._fault: OSError | None = None
        self.num_bytes = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self._fault = self._fault or error
            raise
        self.num_bytes += written
        self.digest.update(data)
        return written

    def tell(self) -> int:
        return self.num_bytes

    def fileno(self) -> int:
        # torch calls fsync with this descriptor, which does not write what is in Python's buffer.
        self._file.flush()
        return self._file.fileno()

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
        super().close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except OSError as failed:
            self._fault = self._fault or failed
        if self._fault is not None and error is not self._fault:
            raise self._fault from None
