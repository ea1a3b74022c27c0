"""`metrics.jsonl`: one JSON object a line, in a file that a crash or a full disk leaves whole.

A line counts once its line break is written: what follows the last break was torn off by a crash,
and is passed over in reading and removed when the file is opened to write on.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path

from isp.metrics.record import StepRecord
from isp.utils.files import open_to_write, read_lines

__all__ = ["MetricsFile", "is_recorded", "read_metrics"]

logger = logging.getLogger(__name__)


def read_metrics(path: str | Path) -> list[StepRecord]:
    """The records in `path`, also while a run is writing to it.

    Raises ValueError, with the number of the line, where a whole line is not a record.
    """
    return [record for _, record in _lines(Path(path))]


def is_recorded(path: Path, step: int, *, evaluated: bool) -> bool:
    """Whether the file at `path` has the line of `step`, with an evaluation if `evaluated`.

    Raises ValueError if it is no file of metrics.
    """
    found = next((record for _, record in _lines(path) if record.step >= step), None)
    if found is None or found.step != step:
        return False
    return not evaluated or found.evaluation_ms is not None


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """Appends records to the file at `path`, each in the system's hands when `write` returns.

    Lines of steps after `last_step` are removed first: the run resumes there, from 0 if
    it is new. While the disk is full, lines wait here and are tried again with each new one.
    One run at a time: see `isp.checkpoint.folder`. Raises ValueError if it is no file of metrics.
    """

    def __init__(self, path: str | Path, *, last_step: int = 0) -> None:
        self._path = Path(path)
        self._waiting: deque[bytes] = deque()
        self._failing = False
        self._fd = open_to_write(path, os.O_RDWR | os.O_CREAT)
        try:
            self._size = _size_up_to(self._path, last_step)
            os.ftruncate(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, record: StepRecord) -> None:
        """Append `record`; a full disk is logged once, and does not stop the run."""
        self._waiting.append(record.to_json().encode() + b"\n")
        try:
            self._write_waiting()
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "cannot write to %s (%s): training continues, and the numbers of its steps are"
                    " kept in memory until they can be written",
                    self._path,
                    error.strerror,
                )
            self._failing = True
        else:
            if self._failing:
                logger.warning("%s can be written again; no step is missing", self._path)
            self._failing = False

    def close(self) -> None:
        """Write what waits, and close the file; logs what could not be written.

        Raises FileNotFoundError if the file was removed since it was opened, or moved away.
        """
        try:
            self._write_waiting()
            os.fsync(self._fd)
        except OSError as error:
            lines = b"".join(self._waiting).decode()
            logger.error("could not write to %s (%s):\n%s", self._path, error.strerror, lines)
            if isinstance(error, FileNotFoundError):
                raise
        finally:
            os.close(self._fd)

    def _write_waiting(self) -> None:
        self._check_there()
        while self._waiting:
            line, written = self._waiting[0], 0
            while written < len(line):
                # At its own place, not at the end: after a write that failed half-way, the next
                # attempt covers the half line.
                written += os.pwrite(self._fd, line[written:], self._size + written)
            self._size += len(line)
            self._waiting.popleft()

    def _check_there(self) -> None:
        """Raise FileNotFoundError if what is written would be in no file under this name."""
        try:
            is_there = os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise FileNotFoundError(
                errno.ENOENT, "it was removed or moved away during the run", str(self._path)
            )

    def __exit__(self, *_: object) -> None:
        self.close()


def _size_up_to(path: Path, last_step: int) -> int:
    """Bytes of the whole lines before the first one of a step after `last_step`."""
    return sum(size for size, _ in takewhile(lambda line: line[1].step <= last_step, _lines(path)))


def _lines(path: Path) -> Iterator[tuple[int, StepRecord]]:
    """The size in bytes, and the record, of each whole line.

    Raises ValueError for a line that is not a record.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.endswith(b"\n"):  # torn off
            return
        try:
            record = StepRecord.from_json(line[:-1])
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not a record of a step ({error}): repair it, or move the"
                f" file away"
            ) from error
        yield len(line), record
