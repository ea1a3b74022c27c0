"""Starts ranks on this machine with torchrun, and reports how they ended.

torchrun runs inside this process. It forwards stop signals to the ranks, which finish their step
and save; if a rank fails, it ends the others. A second stop signal ends torchrun at once. If it
ends or is killed, its ranks end, too. No port is opened that others can reach: [Note: One machine]
in docs/design/notes/planner.md.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isp.cli.failures import ENDED_FILE, LAUNCHER_REPORTS
from isp.cli.output import say
from isp.train.signals import StopRequest, heeded_signals
from isp.utils.environment import launched, rank_and_size

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

__all__ = [
    "follow_launcher",
    "launch",
    "speaks",
    "start_ranks",
    "without_nproc",
    "world_size",
]

_SAVE_SECONDS = 1800
"""Time for ranks to finish a step and save after a stop signal, before they are killed."""
_KNOCK_ON_SECONDS = 10
"""A rank that ends without an error within this time after another's error counts as its cause."""
_ONE_MACHINE = "isp-one-machine"
"""Name under which `launch` registers its rendezvous backend with torchrun."""
_PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl` that has a process killed when its parent ends (<linux/prctl.h>)."""


def world_size(nproc: int | None, *, least: int = 1) -> int:
    """Return the number of ranks: as set by torchrun, or `nproc` to start here, or one.

    Raises ValueError if both are given, and if a single process cannot run `least` ranks.
    """
    if launched():
        _, ranks = rank_and_size()
        if nproc is not None:
            from isp.utils.text import counted

            raise ValueError(
                f"--nproc {nproc} inside torchrun: torchrun has set {counted(ranks, 'rank')}:"
                f" leave out --nproc"
            )
        return ranks
    if nproc is None and least > 1:
        raise ValueError(
            f"this configuration needs {least} ranks, or a multiple of {least}, but this is one"
            f" process: start them with --nproc {least} or torchrun"
        )
    return nproc or 1


def speaks() -> bool:
    """Return True if this process shows notes to the user: the launcher, or torchrun's rank 0."""
    rank, _ = rank_and_size()
    return rank == 0 and LAUNCHER_REPORTS not in os.environ


def follow_launcher() -> None:
    """Make this process, if it is a rank, end as soon as its launcher is gone.

    A killed launcher cannot end its ranks, which are in sessions of their own. On Linux the kernel
    kills them instead.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = int(os.environ.get(LAUNCHER_REPORTS, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel does nothing if the launcher ended before the call above.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)


def start_ranks(nproc: int, words: Sequence[str], *more: str) -> int:
    """Run `isp` on `nproc` ranks with the command line `words`, without --nproc, and then `more`.

    Returns the exit code of the run.
    """
    return launch(nproc, ["-m", "isp", *without_nproc(words), *more])


def without_nproc(words: Sequence[str], *also: str) -> list[str]:
    """Return `words` without the option --nproc and the options `also`, and without their values.

    `words` is the command line of the launcher; its ranks get what is returned.
    """
    kept, left, options = [], iter(words), ("--nproc", *also)
    for word in left:
        if word in options:
            next(left, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            kept.append(word)
    return kept


def launch(nproc: int, command: Sequence[str]) -> int:
    """Run `command` (a script, or `-m` and a module) on `nproc` ranks; returns the run's exit code.

    If several ranks fail, the error of the first is shown. After a stop signal to this process or
    to a rank, the ranks save and end, and the code is 128 + signal. A second signal ends them at
    once.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SAVE_SECONDS))
    os.environ[LAUNCHER_REPORTS] = str(os.getpid())
    logging.disable(logging.ERROR)  # torchrun would log the failures that are reported below

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from isp.core.comm import RENDEZVOUS_FILE, use_loopback

    rendezvous_handler_registry.register(_ONE_MACHINE, _one_machine)
    with StopRequest(keep_handlers=True), _private_folder() as error_files:
        folder = Path(error_files)  # only this user can open it (mode 0700)
        os.environ[RENDEZVOUS_FILE] = str(folder / "rendezvous")
        use_loopback()
        options = [f"--rdzv-backend={_ONE_MACHINE}", f"--rdzv-id={uuid.uuid4()}"]
        options += [f"--nproc-per-node={nproc}", f"--log-dir={folder}"]
        handled = [number.name for number in (*heeded_signals(), signal.SIGQUIT)]
        options.append(f"--signals-to-handle={','.join(handled)}")
        try:
            torchrun.run(torchrun.parse_args([*options, *command]))
        except ChildFailedError as error:
            return _report_first_failure(error.failures)
        except SignalException as stop:
            signals = _signals(folder)
            if not signals:
                say(f"error: stopped by {stop.sigval.name}", error=True)
            elif not any(signals):
                # All ranks had finished their work before the signal came, so the run is complete.
                return 0
            return 128 + int(stop.sigval)
        stopped_by = max(_signals(folder), default=0)
    return 128 + stopped_by if stopped_by else 0


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for this user only, with files that can be locked, for the rendezvous.

    Raises ValueError if there is none: some network file systems have no locks.
    """
    for parent in (None, "/dev/shm", "/tmp"):
        with suppress(OSError):
            made = tempfile.TemporaryDirectory(
                prefix="isp-ranks-", dir=parent, ignore_cleanup_errors=True
            )
            with open(Path(made.name) / "lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return made
    raise ValueError(
        f"TMPDIR={tempfile.gettempdir()}: files there cannot be locked, which ranks need to find"
        f" each other: set TMPDIR to a folder on a local disk"
    )


def _one_machine(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return a rendezvous for this single agent, which opens no port."""
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    from isp.core.torch_private import HashStore

    class OneMachine(RendezvousHandler):
        def get_backend(self) -> str:
            return _ONE_MACHINE

        def get_run_id(self) -> str:
            return parameters.run_id

        def next_rendezvous(self) -> RendezvousInfo:
            # There is no port to return: the ranks meet through RENDEZVOUS_FILE.
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

        def num_nodes_waiting(self) -> int:
            return 0

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None: ...

        def shutdown(self) -> bool:
            return True

    return OneMachine()


def _signals(folder: Path) -> list[int]:
    """Return the stop signal of each rank that ended properly, or 0 for a rank that finished.

    Each such rank has written the number to its `ENDED_FILE` below `folder`. Ranks that failed or
    were killed have written none.
    """
    return [int(path.read_text()) for path in folder.rglob(ENDED_FILE)]


def _report_first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """Report the first failure, and return its exit code."""
    rank, failure = _find_first_failure(failures)
    say(_describe(rank, failure), error=True)
    if _is_killed_while_ending(failure):
        return int(_recorded(failure)["exit_code"])
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _find_first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, with its failure; others fail because of it."""
    recorded = [rank for rank in failures if os.path.isfile(failures[rank].error_file)]
    # A rank that fails because another is gone has a record of its error. A rank without a record,
    # unless torchrun ended it by SIGTERM, failed before: it ran out of memory, crashed, was killed
    # by hand, or exited in the code of a library.
    gone = [
        rank
        for rank, failure in failures.items()
        if failure.exitcode != -signal.SIGTERM and (failure.exitcode < 0 or rank not in recorded)
    ]
    gone.sort(key=lambda rank: failures[rank].timestamp)
    if recorded:
        # A rank that ended long after the first record did not cause it.
        rank = min(recorded, key=lambda r: os.stat(failures[r].error_file).st_mtime_ns)
        latest = failures[rank].timestamp + _KNOCK_ON_SECONDS
        gone = [rank for rank in gone if failures[rank].timestamp <= latest]
    else:
        rank = min(failures, key=lambda r: failures[r].timestamp)
    rank = gone[0] if gone else rank
    return rank, failures[rank]


def _describe(rank: int, failure: ProcessFailure) -> str:
    """Return the message about a failed rank."""
    if failure.exitcode < 0 and not _is_killed_while_ending(failure):
        hint = ": the system may be out of memory" if failure.exitcode == -signal.SIGKILL else ""
        return f"error: rank {rank} was killed by {failure.signal_name()}{hint}"
    if not _recorded(failure):
        return f"error: rank {rank} ended with exit code {failure.exitcode} and gave no reason"
    # torchrun prints the field `py_callstack`, so `isp.cli.failures` writes a rank's message to it.
    text: str = _recorded(failure)["py_callstack"]
    return text if text.startswith("error: ") else f"rank {rank} failed:\n{text}"


def _is_killed_while_ending(failure: ProcessFailure) -> bool:
    """Return True if torchrun ended this rank by SIGTERM after the rank had recorded an error.

    torchrun ends all ranks when one fails; this rank was then still on its way to its own exit.
    """
    return failure.exitcode == -signal.SIGTERM and bool(_recorded(failure))


def _recorded(failure: ProcessFailure) -> dict[str, str]:
    """Return the rank's own record of its failure (`isp.cli.failures`), or an empty dict."""
    # torchrun fills in a string if the rank wrote no error file.
    message: Any = failure.error_file_data["message"]
    return {} if isinstance(message, str) else message["extraInfo"]
