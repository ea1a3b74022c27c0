"""Signals that ask a run to stop: it ends its step and saves, or ends at once if asked again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any, Self

__all__ = ["StopRequest", "heeded_signals"]

logger = logging.getLogger(__name__)

_URGENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; torchrun, `kill` and Slurm at the time limit; a terminal that is closed."""
_EARLY = (signal.SIGUSR1,)
"""Slurm some time before the limit (`--signal=USR1@300`)."""


def heeded_signals() -> list[signal.Signals]:
    """The stop signals, without SIGHUP where it is ignored, as `nohup` has it."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [n for n in (*_URGENT, *_EARLY) if n != signal.SIGHUP or hangs_up]


class StopRequest:
    """While entered, the first stop signal sets `received`; a second one ends the process at once.

    Signals are SIGINT, SIGTERM, SIGHUP and SIGUSR1. A SIGUSR1 announces that time is running out,
    so it never counts as the second, and neither does the next signal. What arrives within
    `repeat_seconds` is the same request: launcher, Slurm and terminal may each pass it on.
    Every rank has its own: combine `received` over the ranks, so that all stop after the same
    step. To be entered in the main thread. Processes forked while it is entered inherit it. With
    `keep_handlers` who sets handlers of his own, such as torchrun, sees the first signal as well.

    [Note: Watcher] Python runs signal handlers between two instructions of the main thread, which
    may be inside a collective that never ends because another rank is gone. So the signal's number
    goes through a socket, which the C part of the handler fills at once, to a thread of its own.
    """

    def __init__(self, *, repeat_seconds: float = 1.0, keep_handlers: bool = False) -> None:
        self._repeat_seconds = repeat_seconds
        self._keep_handlers = keep_handlers
        self.received: signal.Signals | None = None
        """The first signal that asked this rank to stop."""
        self._urgent_since: float | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._old_wakeup_fd = -1
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        assert self._watcher is None, "entered twice"
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._watcher = threading.Thread(target=self._watch, name="isp-signals", daemon=True)
        self._watcher.start()
        self._old_wakeup_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in () if self._keep_handlers else heeded_signals():
            self._old_handlers[number] = signal.signal(number, _leave_to_watcher)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._sender.close()
        assert self._watcher is not None
        self._watcher.join()
        self._watcher = None
        self._receiver.close()

    def _watch(self) -> None:
        while data := self._receiver.recv(64):
            for number in data:
                if number in (*_URGENT, *_EARLY):
                    self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number in _URGENT:
            if self._urgent_since is None:
                self._urgent_since = now
            elif now - self._urgent_since >= self._repeat_seconds:
                os._exit(128 + number)  # the main thread may never come back to be asked
        if self.received is None:
            self.received = number
            logger.warning(
                "received %s: finishing the step, then saving; a second signal ends the run at"
                " once, without saving",
                number.name,
            )


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    pass
