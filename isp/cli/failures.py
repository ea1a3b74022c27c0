"""Reports of failures: one message for errors that the user can correct, else a traceback.

Under torchrun a rank also writes its failure to torchrun's error file, so that the launcher can
show the failure that came first.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from isp.cli.output import say
from isp.utils.environment import launched, rank_and_size
from isp.utils.text import shown

__all__ = [
    "ENDED_FILE",
    "LAUNCHER_REPORTS",
    "report",
    "report_broken_pipe",
    "report_end",
    "report_interrupt",
]

LAUNCHER_REPORTS = "ISP_LAUNCHER_REPORTS"
"""Environment variable of ranks whose failures the launcher shows: the launcher's process id."""
ENDED_FILE = "ended"
"""Name of a file next to a rank's error file: the signal after which its run was saved, or 0."""


def report(error: Exception) -> int:
    """Report `error` and return the exit code: 2 if the user can correct it, else 1."""
    expected = _is_for_the_user(error)
    code = 2 if expected else 1
    text = f"error: {error}" if expected else "".join(traceback.format_exception(error)).rstrip()
    if expected and isinstance(error, ModuleNotFoundError):
        text = (
            f"error: ISP needs the package {error.name}, which {sys.executable} does not have:"
            " `bash tools/setup_env.sh` makes an environment with all of them in .venv,"
            " `pip install -e .` adds them to this one"
        )
    # torchrun and the launcher print the error file, so its text must be fit for a terminal.
    text = shown(text)
    if not _write_error_file(error, text, code) or not _is_reported_by_another(expected):
        say(text, error=True)
    return code


def report_broken_pipe(error: BrokenPipeError) -> int:
    """Return the exit code for a closed stdout, 128 + SIGPIPE; nothing is printed.

    A rank writes its error file, so that the launcher knows which rank ended first.
    """
    _write_error_file(error, "error: stdout was closed by its reader", 141)
    return 141


def report_interrupt(error: KeyboardInterrupt) -> int:
    """Report that SIGINT ended the command at once, and return 128 + SIGINT, as shells do."""
    text, code = "error: stopped by SIGINT", 128 + signal.SIGINT
    if not _write_error_file(error, text, code) or LAUNCHER_REPORTS not in os.environ:
        say(text, error=True)
    return code


def report_end(stopped_by: int | None) -> int:
    """Return the exit code of a run that finished, or was stopped by signal `stopped_by` and saved.

    Outside of torchrun it is 0, or 128 + the signal as in a shell. A rank returns 0 in both cases,
    since torchrun takes any other code as a failure and restarts; `isp train --nproc` reads the
    signal from a file instead.
    """
    number = stopped_by or 0
    if not launched():
        return 128 + number if number else 0
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None and LAUNCHER_REPORTS in os.environ:
        _write_whole(Path(error_file).with_name(ENDED_FILE), str(number))
    return 0


def _is_reported_by_another(expected: bool) -> bool:
    """Return True if another process reports this rank's error, so that it is shown only once.

    The launcher reports all errors of its ranks. Under torchrun, rank 0 reports an error that is
    `expected`, one of the user, since such errors are mostly raised on all ranks.
    """
    rank, _ = rank_and_size()
    return LAUNCHER_REPORTS in os.environ or (expected and rank != 0)


def _is_for_the_user(error: Exception) -> bool:
    """Return True if the message of `error` tells the user what to do.

    By convention each ValueError or OSError that our own code raises has such a message, whereas a
    ValueError that a library raises is a bug of ours. Three more errors are for the user: an
    OSError about a file, a full disk, and a package that our own code fails to import.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if isinstance(error, OSError) and error.filename is not None:
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = _is_our_module(frame.f_globals["__name__"])
    if isinstance(error, ModuleNotFoundError):
        return is_ours and not _is_our_module(str(error.name))
    return is_ours and isinstance(error, ValueError | OSError)


def _is_our_module(name: str) -> bool:
    """Return True for a module of this project."""
    return name.split(".")[0] in ("isp", "model")


def _write_error_file(error: BaseException, text: str, code: int) -> bool:
    """Write torchrun's error file with an exit code, without importing torch.

    Returns True if it was written: False if torchrun asks for none, or if writing fails. It is
    written whole or not at all, even if the rank is killed: a partial file would end torchrun.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if name is None:
        return False
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "exit_code": str(code)}
    message = {"message": shown(f"{type(error).__name__}: {error}"), "extraInfo": extra}
    return _write_whole(Path(name), json.dumps({"message": message}))


def _write_whole(path: Path, text: str) -> bool:
    """Write a file whole or not at all; returns True if it was written."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True
