"""Reading and writing of files in folders that others have made, and of JSON files.

Such a folder may have a pipe or an endless file in place of a small file, or a link where ISP
writes. See [Note: Foreign files] in docs/design/notes/train.md.
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
from io import BufferedReader
from pathlib import Path
from typing import Any

__all__ = [
    "LARGE_FILE_BYTES",
    "SMALL_FILE_BYTES",
    "check_regular",
    "check_regular_files",
    "check_written_on",
    "copy_regular",
    "download_hint",
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
"""Size limit of files of settings; the largest config.json on the hub has about 1 MB."""
LARGE_FILE_BYTES = 2**28
"""Size limit of large JSON files; indexes of weights have up to 30 MB, tokenizers up to 40 MB."""

_NOT_REGULAR = "it is a pipe or a device, not a regular file"
_IS_LINK = "it is a symbolic link, and nothing is written through one: remove it"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/([A-Za-z0-9][\w.-]*)")
"""Pattern of the name of a model on the Hugging Face hub, `owner/name`."""
_NO_MODEL = re.compile(r".*\.(json|yaml|yml|txt)|.*/step_\d+")
"""Pattern of paths that could be such a name, but are files or checkpoints of the user."""


def open_regular(path: str | Path, *, follow: bool = True) -> BufferedReader:
    """Open the regular file at `path` for reading.

    `follow`: also through a symbolic link; the files in a cache of the hub are such links. Raises
    OSError, with the file's name, if it cannot be opened or is not a regular file.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait until a process writes to it.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _check_descriptor(descriptor, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(path: str | Path, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
    """Return the bytes of the regular file at `path`.

    Raises ValueError, with the limit, if it has more than `most_bytes`, and OSError as
    `open_regular` does.
    """
    with open_regular(path) as file:
        # Try to read one byte more than allowed. Do not ask for the file's size: in /proc it is 0.
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes, the limit of such a file")
    return data


def read_lines(path: str | Path, most_bytes: int = SMALL_FILE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file, with line breaks; only one is in memory at a time.

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
    """Raise OSError unless `path` is a regular file; call it before a library opens the file."""
    open_regular(path).close()


def check_regular_files(folder: str | Path) -> None:
    """Check the files in a model's folder; call it before a library reads from the folder.

    Raises OSError for an entry that is neither a regular file nor a folder, and ValueError for a
    .json, .jinja or .txt file larger than `LARGE_FILE_BYTES`.
    """
    for path in sorted(Path(folder).iterdir()):
        try:
            found = path.stat()
        except OSError:  # a broken link: the library raises an error if it needs the file
            continue
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
        if path.suffix in (".json", ".jinja", ".txt") and found.st_size > LARGE_FILE_BYTES:
            raise ValueError(
                f"{path} has {found.st_size:,} bytes, more than {LARGE_FILE_BYTES:,}, the limit of"
                f" such a file"
            )


def copy_regular(source: Path, target: Path) -> None:
    """Copy a regular file of up to `LARGE_FILE_BYTES`, completely or not at all.

    Raises the errors of `read_limited` and `write_whole`.
    """
    write_whole(target, read_limited(source, LARGE_FILE_BYTES))


def open_to_write(path: str | Path, flags: int) -> int:
    """Open a file in a run's folder to append to it or lock it, and return its descriptor.

    `flags` are those of `os.open`; O_NOFOLLOW is added. Raises OSError for a symbolic link, since a
    file elsewhere would change, and for all else that is not a regular file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP or Path(path).is_symlink():
            raise OSError(errno.ELOOP, _IS_LINK, str(path)) from None
        if error.errno == errno.ENXIO:  # it is a pipe that nobody reads
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path)) from None
        raise
    try:
        _check_descriptor(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_written_on(path: Path) -> None:
    """Raise the OSError of `open_to_write` if `path` exists and cannot be opened for writing."""
    if os.path.lexists(path):
        os.close(open_to_write(path, os.O_WRONLY))


def write_whole(path: str | Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a new file and rename it to `path`, so that `path` always has complete contents.

    A symbolic link at `path` is replaced, not followed. A failure leaves the old file. `durable`:
    wait until the disk has the contents (fsync). Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    write = write_durably if durable else Path.write_bytes
    written_whole(path, lambda new: write(new, data))


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to the file `path`, and wait until the disk has it (fsync)."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # some file systems report only here that the disk is full


def written_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a new file, then rename it to `path`; see `write_whole`."""
    target = Path(path)
    with new_file(target.parent, target.name) as new:
        write(new)
        os.replace(new, target)


@contextmanager
def new_file(folder: Path, name: str) -> Iterator[Path]:
    """Context that yields a new empty file in `folder`, and removes it unless it was renamed."""
    # Keep the end of `name`: libraries choose a format by the suffix.
    new = folder / f".new.{secrets.token_hex(8)}.{name[-100:]}"
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield new
    finally:
        with suppress(FileNotFoundError):
            new.unlink()


def _check_descriptor(descriptor: int, path: str | Path) -> None:
    """Raise OSError, with `path`, unless the open file `descriptor` is a regular file."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))


def read_json(path: Path, *, large: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of up to 16 MiB, or up to 256 MiB if `large`.

    Raises ValueError, with the file's name, if it is missing, larger, or not a JSON object.
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
    """Return the JSON object in `data`, the contents of the file at `path`.

    Raises ValueError, with the file's name, if it is not one, or is nested too deeply.
    """
    try:
        found = json.loads(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # it is not JSON, or a number has too many digits
        raise ValueError(f"{path} is damaged: {error}") from None
    except RecursionError:
        raise ValueError(
            f"{path} is damaged: its lists and objects are nested too deeply"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")
    return found


def download_hint(path: str | Path) -> str:
    """Return a hint how to download a model from the hub, or "" if `path` cannot name one.

    `path` is as the user typed it. `owner/name` may name a model unless the folder `owner` exists.
    """
    name = str(path)
    found = _HUB_NAME.fullmatch(name)
    if found is None or _NO_MODEL.fullmatch(name) or Path(name).parent.exists():
        return ""
    return (
        f"; if it is a model of the Hugging Face hub, download it first:"
        f" `hf download {name} --local-dir {found[1]}`"
    )
