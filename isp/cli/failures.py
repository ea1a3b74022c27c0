"""Reports of failures to the user: one message for what they can put right, else a traceback.

Under torchrun a rank also leaves its failure in torchrun's error file, so that whoever started the
ranks can show the one that failed first.
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
"""The launcher's process id, in the environment of ranks whose failures it shows."""
ENDED_FILE = "ended"
"""Beside a rank's error file: the number of the signal that stopped its run in order, or 0."""


def report(error: Exception) -> int:
    """Report `error` to the user; the exit code: 2 where they can put it right, else 1."""
    expected = _is_for_the_user(error)
    code = 2 if expected else 1
    text = f"error: {error}" if expected else "".join(traceback.format_exception(error)).rstrip()
    if expected and isinstance(error, ModuleNotFoundError):
        text = (
            f"error: ISP needs the package {error.name}, which {sys.executable} does not have:"
            " `bash tools/setup_env.sh` makes an environment with all of them in .venv,"
            " `pip install -e .` adds them to this one"
        )
    text = shown(text)  # torchrun and the launcher print it, too
    if not _write_error_file(error, text, code) or not _is_reported_by_another(expected):
        say(text, error=True)
    return code


def report_broken_pipe(error: BrokenPipeError) -> int:
    """Leave whoever reads stdout in peace; of ranks, say who was the first to end: the exit code.

    It is a shell's: 128 + SIGPIPE.
    """
    _write_error_file(error, "error: stdout was closed by its reader", 141)
    return 141


def report_interrupt(error: KeyboardInterrupt) -> int:
    """Report that SIGINT ended the command at once; the exit code, a shell's."""
    text, code = "error: stopped by SIGINT", 128 + signal.SIGINT
    if not _write_error_file(error, text, code) or LAUNCHER_REPORTS not in os.environ:
        say(text, error=True)
    return code


def report_end(stopped_by: int | None) -> int:
    """The exit code of a run that has saved: finished, or stopped by the signal of that number.

    0 or, as a shell has it, 128 + the signal; but 0 for a rank, as torchrun takes all else for a
    failure and starts the ranks again. Our own launcher reads the signal from a file.
    """
    number = stopped_by or 0
    if not launched():
        return 128 + number if number else 0
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None and LAUNCHER_REPORTS in os.environ:
        _write_whole(Path(error_file).with_name(ENDED_FILE), str(number))
    return 0


def _is_reported_by_another(expected: bool) -> bool:
    """Return True if this rank does not report: most user errors are the same on all ranks."""
    rank, _ = rank_and_size()
    return LAUNCHER_REPORTS in os.environ or (expected and rank != 0)


def _is_for_the_user(error: Exception) -> bool:
    """Whether `error` says what to do about it.

    By convention a ValueError or OSError that our own code raises does; a library's ValueError is
    a fault of ours. So does what the operating system says about a file, or about a full disk, and
    a package of others that our own code does not find.
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
    return name.split(".")[0] in ("isp", "model")


def _write_error_file(error: BaseException, text: str, code: int) -> bool:
    """Write what torchelastic's ErrorHandler writes and `code`, without importing torch.

    Whether the file is there: not where torchrun asks for none, or it cannot be written. It is
    never there in part, which would end torchrun's agent: a rank may be killed while it writes.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if name is None:
        return False
    extra = {"py_callstack": text, "timestamp": str(int(time.time())), "exit_code": str(code)}
    message = {"message": shown(f"{type(error).__name__}: {error}"), "extraInfo": extra}
    return _write_whole(Path(name), json.dumps({"message": message}))


def _write_whole(path: Path, text: str) -> bool:
    """Whether the file could be written: it is there whole, or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True
