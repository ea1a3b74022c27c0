"""Reports of failures to the user: one message for what they can put right, else a traceback.

Under torchrun a rank also leaves its failure in torchrun's error file, so that whoever started the
ranks can show the one that failed first.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import traceback

__all__ = ["LAUNCHER_REPORTS", "report", "report_broken_pipe"]

LAUNCHER_REPORTS = "ISP_LAUNCHER_REPORTS"
"""The launcher's process id, in the environment of ranks whose failures it shows."""


def report(error: Exception) -> int:
    """Tell the user about `error`; the exit code: 2 where they can put it right, else 1."""
    expected = _is_for_the_user(error)
    code = 2 if expected else 1
    text = f"error: {error}" if expected else "".join(traceback.format_exception(error)).rstrip()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None:
        _write_error_file(error_file, error, text, code)
    if error_file is None or not _is_told_by_another(expected):
        print(text, file=sys.stderr, flush=True)
    return code


def report_broken_pipe(error: BrokenPipeError) -> int:
    """Leave whoever reads stdout in peace; of ranks, say who was the first to end: the exit code.

    It is a shell's: 128 + SIGPIPE.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None:
        _write_error_file(error_file, error, "error: stdout was closed by its reader", 141)
    return 141


def _is_told_by_another(expected: bool) -> bool:
    """Whether this rank stays silent: what the user can put right is mostly the same on all."""
    return LAUNCHER_REPORTS in os.environ or (expected and os.environ["RANK"] != "0")


def _is_for_the_user(error: Exception) -> bool:
    """Whether `error` says what to do about it.

    By convention a ValueError or OSError that our own code raises does; a library's ValueError is
    a fault of ours. So does what the operating system says about a file, or about a full disk.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if isinstance(error, OSError) and error.filename is not None:
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = frame.f_globals["__name__"].split(".")[0] in ("isp", "model")
    return is_ours and isinstance(error, ValueError | OSError)


def _write_error_file(path: str, error: Exception, text: str, code: int) -> None:
    """Write what torchelastic's ErrorHandler writes and `code`, without importing torch."""
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "exit_code": str(code)}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)
