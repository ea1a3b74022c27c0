"""Destinations of log lines: rank 0's to the terminal, each rank's to its own file."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from isp.utils.files import open_to_write
from isp.utils.text import shown

__all__ = ["run_logging"]

_OURS = ("isp", "model")
"""Loggers whose information is shown; of others only warnings and errors are."""


@contextmanager
def run_logging(log_file: Path, *, rank: int, terminal: TextIO | None = None) -> Iterator[None]:
    """Within it, lines go to `log_file` with their time and, from rank 0, to `terminal` (stdout).

    Warnings of Python are log lines too. An exception that leaves the context, or ends a thread,
    is added to the file with its traceback: the terminal gets it from whoever catches it.
    """
    file = _RankFile(log_file, encoding="utf-8")
    file.setFormatter(_Shown(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        shown = _Terminal(sys.stdout if terminal is None else terminal)
        shown.setFormatter(_Plain())
        handlers.append(shown)
    with _attached(handlers), _thread_failures_to(file):
        try:
            yield
        except SystemExit:
            raise
        except BaseException as error:
            file.handle(_failure("the run ended by an exception", error))
            raise


class _Shown(logging.Formatter):
    """Records with tracebacks, without what a terminal obeys and without credentials."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


class _Plain(_Shown):
    """The message, with its level where that is not information."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"


class _Lenient(logging.StreamHandler[TextIO]):
    """A handler whose disk or pipe may fail: a warning says so once, and the run continues."""

    warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if isinstance(error, OSError):
            self.warn(error)
        else:
            super().handleError(record)

    def warn(self, error: OSError) -> None:
        if not self.warned:
            self.warned = True
            with suppress(OSError):
                sys.stderr.write(f"warning: lines of the log are lost: {error}: {self}\n")


class _Terminal(_Lenient):
    """Writes above a progress bar, if one is shown where the lines go."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _RankFile(_Lenient, logging.FileHandler):
    def _open(self) -> TextIOWrapper:
        descriptor = open_to_write(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            self.warn(error)


def _failure(message: str, error: BaseException) -> logging.LogRecord:
    exc_info = (type(error), error, error.__traceback__)
    return logging.LogRecord(__name__, logging.CRITICAL, __file__, 0, message, (), exc_info)


@contextmanager
def _attached(handlers: list[logging.Handler]) -> Iterator[None]:
    """Give every logger `handlers`, and ours the level of information; takes both back."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in _OURS]
    levels = [logger.level for logger in ours]
    for handler in handlers:
        root.addHandler(handler)
    for logger in ours:
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level in zip(ours, levels, strict=True):
            logger.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def _thread_failures_to(file: logging.Handler) -> Iterator[None]:
    before = threading.excepthook

    def log(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and failed.exc_type is not SystemExit:
            name = "?" if failed.thread is None else failed.thread.name
            file.handle(_failure(f"thread {name} ended by an exception", failed.exc_value))
        before(failed)

    threading.excepthook = log
    try:
        yield
    finally:
        threading.excepthook = before
