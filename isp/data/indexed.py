"""Token ids on disk: reads and writes the `.bin`/`.idx` pair of Megatron-LM.

Next to a pair, `PREFIX.tokenizer.json` records which tokenizer made it. Megatron-LM's format has no
place for that; pairs without this file are read without a check. For the format, see
[Note: Indexed format] in docs/design/notes/data.md.
"""

import json
import os
import struct
from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from isp.config.data import BYTE_TOKENIZER
from isp.data.tokenizer import HFTokenizer, TokenArray, Tokenizer
from isp.utils.files import read_json
from isp.utils.text import counted

__all__ = [
    "IndexedDataset",
    "IndexedDatasetWriter",
    "check_pair",
    "check_pair_tokenizer",
    "existing_file",
    "indexed_prefix",
    "record_path",
    "remove_pair",
    "token_dtype",
    "tokenizer_name",
    "write_record",
]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
# Megatron-LM also has codes of floating-point types, which token ids never have.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Dtypes of token ids by their code in .idx."""
_WAY_OUT = "write the pair again (`isp data prepare`), or copy both files again from where they are"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron-LM stores ids below `vocab_size`."""
    return _DTYPES[8] if vocab_size < 65500 else _DTYPES[4]


def indexed_prefix(item: str) -> Path | None:
    """Return the path without suffix of the .bin/.idx files that `item` names; None: it names none.

    `item` may be the .bin, the .idx, or the path without suffix. If there also is a file or folder
    with that path, `item` means this one; the .bin/.idx files are then named with .bin.
    """
    path = Path(item).expanduser()
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    if not path.exists() and (_with(path, ".bin").exists() or _with(path, ".idx").exists()):
        return path
    return None


def check_pair(prefix: Path) -> None:
    """Check that the .bin and the .idx file of `prefix` exist and can be memory-mapped.

    Raises FileNotFoundError if one is missing, and ValueError if it is not a regular file.
    """
    pair = _with(prefix, ".idx"), _with(prefix, ".bin")
    for path, other in (pair, pair[::-1]):
        if not path.exists():
            begin = f"{other} is there, but" if other.exists() else f"{other} and"
            raise FileNotFoundError(f"{begin} {path} is missing: {_WAY_OUT}")
        if not path.is_file():
            raise ValueError(f"{path} must be a regular file: {_WAY_OUT}")


def existing_file(prefix: Path) -> Path | None:
    """Return the .bin or the .idx file of `prefix`, whichever exists; None if neither does."""
    return next((p for end in (".bin", ".idx") if (p := _with(prefix, end)).exists()), None)


def remove_pair(prefix: Path) -> None:
    """Delete the .idx and the .bin file of `prefix`, if they exist."""
    for suffix in (".idx", ".bin"):
        _with(prefix, suffix).unlink(missing_ok=True)


class IndexedDataset:
    """The documents of a `.bin`/`.idx` pair, as a `TokenStore`. Opening it reads no tokens.

    `prefix` is the path without the suffixes. Raises FileNotFoundError for a missing file, and
    ValueError, with the file and the damage, for one that cannot be read.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.bin_path = _with(Path(prefix), ".bin")
        self.idx_path = _with(Path(prefix), ".idx")
        check_pair(Path(prefix))
        self.dtype, self.offsets = _read_index(self.idx_path)
        self.lengths = np.diff(self.offsets)  # [documents], in tokens
        self._check_bin_size()
        # Make it a plain array: slicing a memmap object takes several times as long.
        self._tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)

    @property
    def name(self) -> str:
        """Name of the store in log lines and errors: the path without the suffixes."""
        return str(self.bin_path.with_suffix(""))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.offsets[-1])

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Return tokens [start, stop) of a document, as a read-only view of the file."""
        offset = int(self.offsets[document])
        assert 0 <= start <= stop <= int(self.lengths[document])
        return self._tokens[offset + start : offset + stop]

    def where(self, document: int) -> str:
        """Return the file of a document and its index there, for errors."""
        return f"{self.bin_path}, document {document}"

    def __iter__(self) -> Iterator[TokenArray]:
        """Yield the tokens of each document, in the order of the file."""
        for document, length in enumerate(self.lengths):
            yield self.read(document, 0, int(length))

    def _check_bin_size(self) -> None:
        """Raise ValueError if .bin has another size than the index says, or no tokens."""
        expected = self.num_tokens * self.dtype.itemsize
        actual = self.bin_path.stat().st_size
        if expected == 0:
            raise ValueError(f"{self.idx_path} holds no tokens, only empty documents: {_WAY_OUT}")
        if actual != expected:
            state = "cut short" if actual < expected else "not the one this index was written for"
            raise ValueError(
                f"{self.bin_path} has {actual:,} bytes where {self.idx_path.name} says "
                f"{expected:,} ({self.num_tokens:,} tokens of {self.dtype.itemsize}): it is "
                f"{state}; {_WAY_OUT}"
            )


class IndexedDatasetWriter:
    """Context that writes a pair, document by document, and leaves both files or neither.

    Files get their final names at the end, so a process that is killed leaves at most `.partial`
    files, which the next writer replaces. It keeps 4 bytes for each sequence and 8 for each
    document in memory. Entering it raises ValueError if the files cannot be created.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype[Any]) -> None:
        assert dtype in set(_DTYPES.values())
        self.dtype = dtype
        self.num_tokens = 0
        self._prefix = Path(prefix)
        self._sequence_lengths = array("i")
        self._document_indices = array("q", [0])

    def __enter__(self) -> Self:
        try:
            self._prefix.parent.mkdir(parents=True, exist_ok=True)
            self._bin: IO[bytes] = self._partial(".bin").open("wb")
        except OSError as error:
            raise ValueError(
                f"output={self._prefix}: cannot write to {error.filename} ({error.strerror}): name"
                f" a path whose folder is there or can be made"
            ) from error
        return self

    def add_document(self, *sequences: TokenArray) -> None:
        """Append a document, given as one sequence of tokens or several.

        Raises ValueError for ids that the dtype of the file cannot represent.
        """
        limits = np.iinfo(self.dtype)
        for tokens in sequences:
            if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
                raise ValueError(
                    f"token ids {tokens.min()}..{tokens.max()} do not fit {self.dtype.name}, the "
                    f"type of {_with(self._prefix, '.bin')}: is the tokenizer's vocab_size right?"
                )
            self._bin.write(tokens.astype(self.dtype).tobytes())
            self._sequence_lengths.append(len(tokens))
            self.num_tokens += len(tokens)
        self._document_indices.append(len(self._sequence_lengths))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._bin:  # closing writes what is buffered, which fails on a full disk
                if kind is None:
                    self._publish()
        finally:
            for suffix in (".bin", ".idx"):
                self._partial(suffix).unlink(missing_ok=True)

    def _publish(self) -> None:
        """Complete both files, then rename them to their final names."""
        if self.num_tokens == 0:
            raise ValueError(
                f"no tokens to write to {_with(self._prefix, '.bin')}: all inputs are empty"
            )
        _flush(self._bin)
        with self._partial(".idx").open("wb") as index:
            self._write_index(index)
            _flush(index)
        # Remove an old index first: if the process is killed between the two renames, the new .bin
        # would be read by the old index, as other documents.
        _with(self._prefix, ".idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            self._partial(suffix).replace(_with(self._prefix, suffix))

    def _write_index(self, index: IO[bytes]) -> None:
        """Write the header and the tables of an .idx file [Note: Indexed format]."""
        code = next(code for code, dtype in _DTYPES.items() if dtype == self.dtype)
        lengths = np.frombuffer(self._sequence_lengths, dtype=np.int32)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        counts = (len(lengths), len(self._document_indices))
        index.write(_HEADER.pack(_MAGIC, _VERSION, code, *counts))
        index.write(lengths.astype("<i4").tobytes())
        index.write(pointers.astype("<i8").tobytes())
        index.write(np.frombuffer(self._document_indices, dtype=np.int64).astype("<i8").tobytes())

    def _partial(self, suffix: str) -> Path:
        """Return the path of .bin or .idx while it is written."""
        return _with(self._prefix, suffix + ".partial")


def _read_index(path: Path) -> tuple[np.dtype[Any], npt.NDArray[np.int64]]:
    """Read an .idx file: return the dtype of the ids, and the bounds of documents in tokens.

    Document d has the tokens [bounds[d], bounds[d + 1]). Raises ValueError for a file that is not
    an index, or is damaged.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    padded = header.ljust(_HEADER.size, b"\0")  # a shorter file fails the checks below
    magic, version, code, num_sequences, num_indices = _HEADER.unpack(padded)
    if magic != _MAGIC:
        raise ValueError(
            f"{path} is not a Megatron index, it begins with {header[: len(_MAGIC)]!r} instead of"
            f" {_MAGIC!r}: {_WAY_OUT}"
        )
    if version != _VERSION or code not in _DTYPES:
        known = ", ".join(f"{code} {dtype.name}" for code, dtype in _DTYPES.items())
        raise ValueError(
            f"{path} has version {version} and type code {code}, known are version {_VERSION} and"
            f" the codes of token ids ({known}): {_WAY_OUT}"
        )
    sizes = (4 * num_sequences, 8 * num_sequences, 8 * num_indices)
    expected, actual = _HEADER.size + sum(sizes), path.stat().st_size
    # Multimodal data sets have one more byte for each sequence, which is not read.
    if actual not in (expected, expected + num_sequences):
        state = "cut short" if actual < expected else "too long"
        raise ValueError(
            f"{path} is {state}: it has {actual:,} bytes where its header, "
            f"{counted(num_sequences, 'sequence')} and {counted(num_indices - 1, 'document')},"
            f" takes {expected:,}; {_WAY_OUT}"
        )
    if num_indices < 2 or num_sequences == 0:
        raise ValueError(f"{path} holds no documents: {_WAY_OUT}")
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=_HEADER.size).view(np.ndarray)
    parts = np.split(data, np.cumsum(sizes))
    lengths, pointers, documents = (
        part.view(dtype) for part, dtype in zip(parts, ("<i4", "<i8", "<i8"), strict=False)
    )
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))  # [sequences + 1]
    # `read` needs only bounds, because sequences and documents follow each other without gaps.
    if (
        (lengths < 0).any()
        or (pointers != starts[:-1] * _DTYPES[code].itemsize).any()
        or documents[[0, -1]].tolist() != [0, num_sequences]
        or (np.diff(documents) < 0).any()
    ):
        raise ValueError(
            f"{path} is damaged: its sequences or documents do not follow one another: {_WAY_OUT}"
        )
    return _DTYPES[code], starts[documents]


def _with(prefix: Path, suffix: str) -> Path:
    """Return the path `prefix` with `suffix` appended.

    `Path.with_suffix` would replace the part of a name after its last dot.
    """
    return prefix.with_name(prefix.name + suffix)


def _flush(file: IO[bytes]) -> None:
    """Write buffered contents to the disk, and wait until it has them (fsync).

    Otherwise a power failure could leave a file that has its final name but not its contents.
    """
    file.flush()
    os.fsync(file.fileno())


def record_path(prefix: Path) -> Path:
    """Return the path of the file that records which tokenizer made the pair `prefix`."""
    return prefix.with_name(prefix.name + ".tokenizer.json")


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return the value of `data.tokenizer` with which `tokenizer` was loaded."""
    return str(tokenizer.file) if isinstance(tokenizer, HFTokenizer) else BYTE_TOKENIZER


def write_record(prefix: Path, tokenizer: Tokenizer) -> None:
    """Record next to the pair `prefix` that `tokenizer` made it."""
    size = tokenizer.vocab_size
    found = {
        "tokenizer": tokenizer_name(tokenizer),
        "vocab_size": size,
        "sha256": _digest(tokenizer, size),
    }
    path = record_path(prefix)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def check_pair_tokenizer(prefix: Path, tokenizer: Tokenizer, key: str) -> None:
    """Raise ValueError if a pair was made by a tokenizer with other ids, according to its record.

    Ids are compared, not files: a tokenizer that was saved again, or that got more tokens after its
    last id, still has the same ids. `key` names the source in the error.
    """
    path = record_path(prefix)
    if not path.exists():
        return
    found = read_json(path)
    size = found.get("vocab_size")
    if type(size) is int and found.get("sha256") == _digest(tokenizer, size):
        return
    raise ValueError(
        f"{key}={prefix} was prepared with the tokenizer {found.get('tokenizer')} ({size} entries),"
        f" and data.tokenizer={tokenizer_name(tokenizer)} has other ids: use that tokenizer, or"
        f" prepare the text again with this one (if the ids are the same after all, delete {path})"
    )


def _digest(tokenizer: Tokenizer, size: int) -> str:
    """Return a digest of the tokens of `tokenizer` with ids below `size`."""
    return _ids_digest(tokenizer, size) if isinstance(tokenizer, HFTokenizer) else BYTE_TOKENIZER


@lru_cache(maxsize=8)  # sorting a large vocabulary takes a fraction of a second for each pair
def _ids_digest(tokenizer: HFTokenizer, size: int) -> str:
    """Return the SHA-256 of the ids below `size` and their tokens."""
    entries = sorted((i, token) for token, i in tokenizer.vocabulary().items() if i < size)
    return sha256(json.dumps(entries).encode()).hexdigest()
