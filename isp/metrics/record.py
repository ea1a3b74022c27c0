"""`StepRecord`: the metrics of a step, as a log line and as a line of `metrics.jsonl`."""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import math
import os
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from isp.utils.files import open_to_write, read_lines
from isp.utils.result_file import first_fault
from isp.utils.text import format_duration

__all__ = ["MetricsFile", "StepRecord", "is_recorded", "read_metrics"]

_NULL_IS_NAN = BeforeValidator(lambda value: math.nan if value is None else value)
_Number = Annotated[float, _NULL_IS_NAN]
"""Type of a field with a number; it is read as NaN where the JSON file has null."""
_Sometimes = Annotated[float | None, _NULL_IS_NAN]
"""Type of a number that some records lack: None if the key is absent; null in JSON is NaN."""
_LINE_WIDTH = 120
"""Columns of the log line of a step."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Metrics of a step. Fields are the keys of `metrics.jsonl`: docs/reference/metrics.md."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True)

    step: int
    loss: _Number
    grad_norm: _Number
    lr: _Number
    tokens: int
    tgs: _Number
    tflops: _Number
    mfu: float | None
    step_ms: _Number
    comm_ms: _Number
    exposed_ms: _Number
    mem_gib: _Number
    padding: _Sometimes = None
    data_ms: _Sometimes = None
    forward_backward_ms: _Sometimes = None
    reduce_ms: _Sometimes = None
    optimizer_ms: _Sometimes = None
    checkpoint_ms: _Sometimes = None
    evaluation_ms: _Sometimes = None
    val_loss: _Sometimes = None
    val_losses: dict[str, _Number] | None = None
    lrs: dict[str, _Number] | None = None
    loss_scale: _Sometimes = None
    expert_load: _Sometimes = None
    unused_experts: int | None = None
    eta_seconds: _Sometimes = None
    skipped: bool = False

    def line(self, num_steps: int) -> str:
        """Return the metrics to watch in a run of `num_steps`, as a log line.

        It fits into 120 columns, the word `skipped` excepted. The other metrics are in
        `metrics.jsonl` and in trackers.
        """
        speed = f"tflops={self.tflops:.2f}" if self.mfu is None else f"mfu={self.mfu:.1%}"
        fields = [
            f"loss={self.loss:.4f}",
            f"grad_norm={self.grad_norm:.3g}",
            f"lr={self.lr:.1e}",
            f"tgs={self.tgs:.0f}",
            speed,
            f"mem={self.mem_gib:.{1 if self.mem_gib >= 10 else 2}f}GiB",
            f"step_ms={self.step_ms:.{0 if self.step_ms >= 10 else 1}f}",
            f"exposed={self.exposed_ms / self.step_ms:.0%}",
            *([] if self.eta_seconds is None else [f"eta={format_duration(self.eta_seconds)}"]),
        ]
        rest = " ".join(fields)
        # The number of steps is left out where it does not fit; the time left is there, too.
        own, of_all = f"step={self.step}", f"step={self.step}/{num_steps}"
        begin = of_all if len(of_all) + 1 + len(rest) <= _LINE_WIDTH else own
        return f"{begin} {rest}{' skipped' if self.skipped else ''}"

    def evaluation_line(self) -> str | None:
        """Return the loss on held-out text as a log line, with those of its sources, if known."""
        if self.val_loss is None:
            return None
        sources = [f"{name}={loss:.4f}" for name, loss in (self.val_losses or {}).items()]
        of_sources = f" ({', '.join(sources)})" if sources else ""
        return f"step={self.step} val_loss={self.val_loss:.4f}{of_sources}"

    def values(self) -> dict[str, float]:
        """Return the metrics that are not None, by key, for trackers; without the step.

        Metrics with several values have a key for each, such as `lr/muon`.
        """
        values = dataclasses.asdict(self)
        for prefix, key in (("validation/loss", "val_losses"), ("lr", "lrs")):
            values |= {f"{prefix}/{name}": x for name, x in (values.pop(key) or {}).items()}
        return {key: float(x) for key, x in values.items() if x is not None and key != "step"}

    def to_json(self) -> str:
        """Return the record as a line of JSON, without the line break.

        Numbers that are not finite are written as null, since JSON has none. `mfu` is null if not
        known; other fields that are None are left out.
        """
        absent = {f.name for f in dataclasses.fields(self) if f.default is None}
        absent = {name for name in absent if getattr(self, name) is None}
        return _adapter().dump_json(self, exclude=absent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> StepRecord:
        """Return the record that `to_json` wrote; null becomes NaN.

        Raises ValueError if `text` is anything else.
        """
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            raise ValueError(first_fault(error)) from error


@functools.cache
def _adapter() -> TypeAdapter[StepRecord]:
    """Return pydantic's adapter of records; cached, since making one takes a while."""
    return TypeAdapter(StepRecord)


# -- metrics.jsonl ---------------------------------------------------------------------------
#
# A line counts only if it ends in a line break. Without one, it was cut off by a crash: reading
# skips it, and opening the file for appending removes it.


logger = logging.getLogger(__name__)


def read_metrics(path: str | Path) -> list[StepRecord]:
    """Return the records in the file `path`, to which a run may be writing.

    Raises ValueError, with the line number, if a whole line is not a record.
    """
    return [record for _, record in _lines(Path(path))]


def is_recorded(path: Path, step: int, *, evaluated: bool) -> bool:
    """Return True if the metrics file `path` has a record of `step`.

    If `evaluated`, the record also has to have an evaluation. Raises ValueError if a line of the
    file is not a record.
    """
    found = next((record for _, record in _lines(path) if record.step >= step), None)
    if found is None or found.step != step:
        return False
    return not evaluated or found.evaluation_ms is not None


class MetricsFile(AbstractContextManager["MetricsFile"]):
    """Appends records to the metrics file at `path`.

    Records of steps after `last_step`, from which a run resumes, are removed first (0: a new run).
    While the disk is full, records are kept in memory, and written with the next one that can be.
    Only one run may write at a time; the lock on its checkpoints ensures that. The constructor
    raises ValueError if a line of the file is not a record.
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
        """Append `record`, and return once the system has it.

        A disk that cannot be written to is logged once and does not end the run.
        """
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
        """Write the records kept in memory, and close the file; log those that cannot be written.

        Raises FileNotFoundError if the file was removed or moved away since it was opened.
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
        """Write the records kept in memory, in order."""
        self._check_there()
        while self._waiting:
            line, written = self._waiting[0], 0
            while written < len(line):
                # Write at the offset of the line instead of appending: if only a part is written,
                # the next attempt overwrites the part.
                written += os.pwrite(self._fd, line[written:], self._size + written)
            self._size += len(line)
            self._waiting.popleft()

    def _check_there(self) -> None:
        """Raise FileNotFoundError if another file, or none, is at the path of the open file."""
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
    """Return the size in bytes of the records up to `last_step`: what to keep of the file."""
    return sum(size for size, _ in takewhile(lambda line: line[1].step <= last_step, _lines(path)))


def _lines(path: Path) -> Iterator[tuple[int, StepRecord]]:
    """Yield the size in bytes and the record of each whole line of the file `path`.

    Raises ValueError, with the line number, for a line that is not a record.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.endswith(b"\n"):  # A crash cut it off, or it is being written.
            return
        try:
            record = StepRecord.from_json(line[:-1])
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is not a record of a step ({error}): repair it, or move the"
                f" file away"
            ) from error
        yield len(line), record
