"""`run_logging`: writes log lines of rank 0 to the terminal, and of each rank to its own file."""

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
"""Names of the loggers whose lines are written from level INFO on; others only from WARNING on."""


@contextmanager
def run_logging(log_file: Path, *, rank: int, terminal: TextIO | None = None) -> Iterator[None]:
    """Write log lines to `log_file`, with the time, and on rank 0 to `terminal` (default: stdout).

    Python's warnings are logged too. An exception that leaves this context, or ends a thread, is
    written to the file with its traceback. It is not written to the terminal: the code that catches
    it prints it there.
    """
    file = _RankFile(log_file, encoding="utf-8")
    file.setFormatter(_Shown(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        console = _Terminal(sys.stdout if terminal is None else terminal)
        console.setFormatter(_Plain())
        handlers.append(console)
    with _attached(handlers), _thread_failures_to(file):
        try:
            yield
        except SystemExit:  # It is an exit on purpose: log no failure.
            raise
        except BaseException as error:
            file.handle(_failure("the run ended by an exception", error))
            raise


class _Shown(logging.Formatter):
    """A formatter that removes control characters and credentials, also from tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return shown(super().format(record))


class _Plain(_Shown):
    """A formatter that leaves out the time, and the level if it is INFO."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"


class _Lenient(logging.StreamHandler[TextIO]):
    """A handler that warns once if its disk or pipe fails, so that the run continues."""

    warned = False
    """True after the warning."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn if writing a record raised an OSError; report other errors as logging does."""
        error = sys.exception()
        if isinstance(error, OSError):
            self.warn(error)
        else:
            super().handleError(record)

    def warn(self, error: OSError) -> None:
        """Write a warning to stderr, once."""
        if not self.warned:
            self.warned = True
            with suppress(OSError):
                sys.stderr.write(f"warning: lines of the log are lost: {error}: {self}\n")


class _Terminal(_Lenient):
    """A handler that writes lines above the progress bar, if the terminal shows one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; tqdm clears the bar before and draws it again after."""
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _RankFile(_Lenient, logging.FileHandler):
    """A handler that appends to a rank's log file."""

    def _open(self) -> TextIOWrapper:
        """Open the file; see `open_to_write` for what it refuses."""
        descriptor = open_to_write(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def close(self) -> None:
        """Close the file, and warn if its last lines cannot be written to a full disk."""
        try:
            super().close()
        except OSError as error:
            self.warn(error)


def _failure(message: str, error: BaseException) -> logging.LogRecord:
    """Return a log record of an exception, with its traceback."""
    exc_info = (type(error), error, error.__traceback__)
    return logging.LogRecord(__name__, logging.CRITICAL, __file__, 0, message, (), exc_info)


@contextmanager
def _attached(handlers: list[logging.Handler]) -> Iterator[None]:
    """Attach `handlers` to the root logger, and set the loggers in `_OURS` to INFO, in a context.

    The handlers are closed at the end.
    """
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in _OURS]
    levels = [logger.level for logger in ours]
    for handler in handlers:
        root.addHandler(handler)
    for logger in ours:
        logger.setLevel(logging.INFO)
    logging.captureWarnings(True)  # Python's warnings then go to the handlers, too
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
    """Context in which exceptions that end threads are written to `file`."""
    before = threading.excepthook

    def log(failed: threading.ExceptHookArgs) -> None:
        """Write the exception, then call the hook that was set before."""
        if failed.exc_value is not None and failed.exc_type is not SystemExit:
            name = "?" if failed.thread is None else failed.thread.name
            file.handle(_failure(f"thread {name} ended by an exception", failed.exc_value))
        before(failed)

    threading.excepthook = log
    try:
        yield
    finally:
        threading.excepthook = before
