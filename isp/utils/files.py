"""Files in folders that others wrote: read up to a limit, and written through no link.

[Note: Foreign files] A downloaded folder, or a run's, may have a pipe, a device or a file without
end where a small file belongs, and a link where this program writes. So what is read of such a
folder goes through `open_regular` and `read_limited`, and what is written to it goes through
`write_whole` (results: a new file takes the name, also of a link) or `open_to_write` (files that
are written on: a link is refused).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from isp.utils.text import redacted

__all__ = [
    "LARGE_FILE_BYTES",
    "SMALL_FILE_BYTES",
    "Result",
    "check_regular",
    "check_regular_files",
    "check_written_on",
    "copy_regular",
    "download_hint",
    "first_fault",
    "new_file",
    "open_regular",
    "open_to_write",
    "parse_json",
    "read_json",
    "read_limited",
    "read_lines",
    "write_durably",
    "write_whole",
    "written_whole",
]

SMALL_FILE_BYTES = 2**24
"""Limit of a file of settings: the largest config.json on the hub has about 1 MB."""
LARGE_FILE_BYTES = 2**28
"""Limit of a table: indexes of weights have up to 30 MB, tokenizers up to 40 MB."""

_NOT_REGULAR = "it is a pipe or a device, not a regular file"
_IS_LINK = "it is a symbolic link, and nothing is written through one: remove it"


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """Open the file at `path` to read it, without waiting for the writer of a pipe.

    `follow`: also through a symbolic link, as the hub's cache has them. Raises OSError with a
    filename, also for what is no regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _check_descriptor(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: str | Path, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises ValueError, with the limit, for a file of more than `most_bytes`, and OSError as
    `open_regular` does.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)  # its size is not asked: files in /proc have none
    if len(data) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes, the limit of such a file")
    return data


def read_lines(path: str | Path, most_bytes: int = SMALL_FILE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file, one in memory at a time; the last may have no line break.

    Raises ValueError for a line of more than `most_bytes`, and OSError as `open_regular` does.
    """
    with open_regular(path) as file:
        number = 0
        while line := file.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise ValueError(
                    f"{path}, line {number} has more than {most_bytes:,} bytes, the limit of a line"
                )
            yield line


def check_regular(path: str | Path) -> None:
    """Raise OSError unless `path` is a regular file, before a library opens it by name."""
    open_regular(path).close()


def check_regular_files(folder: str | Path) -> None:
    """Check a model's folder before a library reads files of it by their names.

    Raises OSError for an entry that is neither a regular file nor a folder, and ValueError for a
    JSON file or a template beyond `LARGE_FILE_BYTES`.
    """
    for path in sorted(Path(folder).iterdir()):
        try:
            found = path.stat()
        except OSError:  # a link to nothing, which a library reports, too
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
        if path.suffix in (".json", ".jinja", ".txt") and found.st_size > LARGE_FILE_BYTES:
            raise ValueError(
                f"{path} has {found.st_size:,} bytes, more than {LARGE_FILE_BYTES:,}, the limit of"
                f" such a file"
            )


def copy_regular(source: Path, target: Path) -> None:
    """Copy a file of up to `LARGE_FILE_BYTES`, whole or not at all; raises as `read_limited`."""
    write_whole(target, read_limited(source, LARGE_FILE_BYTES))


def open_to_write(path: str | Path, flags: int) -> int:
    """Open a file of a run's folder that is written on, such as a log or a lock; its descriptor.

    `flags`: those of `os.open`, without O_NOFOLLOW. Raises OSError for a symbolic link, by which a
    file elsewhere would be changed, and for what is no regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP or Path(path).is_symlink():
            raise OSError(errno.ELOOP, _IS_LINK, str(path)) from None
        if error.errno == errno.ENXIO:  # a pipe without a reader
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path)) from None
        raise
    try:
        _check_descriptor(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_written_on(path: Path) -> None:
    """Raise OSError, as `open_to_write` does, if `path` is there and cannot be written on."""
    if os.path.lexists(path):
        os.close(open_to_write(path, os.O_WRONLY))


def write_whole(path: str | Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file in one piece: a new file takes the name, and what had it stays as it was.

    Thus a symbolic link of that name is replaced, and a failure leaves the old file. `durable`:
    through to the disk. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    write = write_durably if durable else Path.write_bytes
    written_whole(path, lambda new: write(new, data))


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file through to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # some file systems report only here that they are full


def written_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a new file, which then takes the name `path`; see `write_whole`."""
    target = Path(path)
    with new_file(target.parent, target.name) as new:
        write(new)
        os.replace(new, target)


@contextmanager
def new_file(folder: Path, name: str) -> Iterator[Path]:
    """Make an empty file in `folder` that was not there, which is removed if it stays."""
    # The end of the name is kept, by which libraries know the format.
    new = folder / f".new.{secrets.token_hex(8)}.{name[-100:]}"
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield new
    finally:
        with suppress(FileNotFoundError):
            new.unlink()


def _check_descriptor(descriptor: int, path: str | Path) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def read_json(path: Path, *, large: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file, of up to 16 MiB, or 256 MiB for a `large` one.

    Raises ValueError, naming the file, for anything else.
    """
    try:
        data = read_limited(path, LARGE_FILE_BYTES if large else SMALL_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        if folder.is_dir():
            lack = f"has no {path.name}: is it a model's folder?"
        else:
            lack = f"is no folder{download_hint(folder)}"
        raise ValueError(f"{folder} {lack}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """Return the object that `data`, the contents of the file at `path`, is.

    Raises ValueError, naming the file, for anything else, also for one that is nested too deeply.
    """
    try:
        found = json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # no JSON, or a number of too many digits
        raise ValueError(f"{path} is damaged: {error}") from None
    except RecursionError:
        raise ValueError(
            f"{path} is damaged: its lists and objects are nested too deeply"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


_ID = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
_NO_MODEL = re.compile(r".*\.(json|yaml|yml|txt)|.*/step_\d+")
"""Files, and checkpoints, of the user's own."""


def download_hint(path: str | Path) -> str:
    """Return a hint how to download `path`, or "" if it cannot be a name of the hub.

    `path`: as the user typed it. A name is `owner/name`, unless there is a folder `owner` here.
    """
    name = str(path)
    found = _ID.fullmatch(name)
    if found is None or _NO_MODEL.fullmatch(name) or Path(name).parent.exists():
        return ""
    return (
        f"; if it is a model of the Hugging Face hub, download it first:"
        f" `hf download {name} --local-dir {found[1]}`"
    )


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The part of a result that can be read of any version."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Result(_Head):
    """A result; of each kind a dataclass, with a `version` of its own."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    newest: ClassVar[int]
    """The version that is written and read."""
    name: ClassVar[str]
    """Such as `a profile`."""
    again: ClassVar[str]
    """How one of another version is made anew."""

    def to_json(self, *, indent: int | None = None) -> str:
        """The text of the file, without credentials."""
        return redacted(TypeAdapter(type(self)).dump_json(self, indent=indent).decode()) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The result that `to_json` wrote.  Raises ValueError if `text` is anything else."""
        try:
            version = TypeAdapter(_Head).validate_json(text).version
            if version == cls.newest:
                return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            raise ValueError(f"not {cls.name}: {first_fault(error)}") from error
        raise ValueError(
            f"{cls.name} of version {version}, this program reads version {cls.newest}: {cls.again}"
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        """The result in the file at `path`.  Raises ValueError if it holds none, or OSError."""
        try:
            return cls.from_json(read_limited(path, LARGE_FILE_BYTES))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def first_fault(error: ValidationError) -> str:
    """Where a text of JSON is wrong first, and how."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
