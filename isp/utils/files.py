"""Files in folders that others wrote: read up to a limit, and written through no link.

[Note: Foreign files] A downloaded folder, or a run's, may have a pipe, a device or a file without
end where a small file belongs, and a link where this program writes. So what is read of such a
folder goes through `open_regular` and `read_limited`, and what is written to it goes through
`write_whole` (results: a new file takes the name, also of a link) or `open_to_write` (files that
are written on: a link is refused).
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

__all__ = [
    "LARGE_FILE_BYTES",
    "SMALL_FILE_BYTES",
    "check_regular",
    "check_regular_files",
    "check_written_on",
    "copy_regular",
    "new_file",
    "open_regular",
    "open_to_write",
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
