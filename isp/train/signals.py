"""Stop signals: the first ends a run after its current step and a save, the second at once."""

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
"""Stop signals of which a second one ends the process at once. SIGINT comes from Ctrl-C; SIGTERM
from torchrun, `kill`, and Slurm at its time limit; SIGHUP from a closed terminal."""
_EARLY = (signal.SIGUSR1,)
"""Stop signals that a cluster sends ahead of its time limit, as Slurm's `--signal=USR1@300`."""


def heeded_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: all, except SIGHUP if it is ignored (under `nohup`)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [n for n in (*_URGENT, *_EARLY) if n != signal.SIGHUP or hangs_up]


class StopRequest:
    """Context in which the first stop signal sets `received`, and a second one ends the process.

    Signals are SIGINT, SIGTERM, SIGHUP and SIGUSR1. A SIGUSR1 announces that time is running out,
    so it never counts as the second, and neither does the signal after it. Signals within
    `repeat_seconds` are one request: launcher, Slurm and terminal may each pass it on.

    Each rank has its own `received`: combine it over the ranks, so that all stop after the same
    step. Enter the context in the main thread. Processes forked inside it inherit it. With
    `keep_handlers`, handlers that other code has set, such as torchrun's, get the signals too.

    A thread of its own receives the signals, because the main thread may be inside a collective
    that never ends. See [Note: Watcher] in docs/design/notes/train.md.
    """

    def __init__(self, *, repeat_seconds: float = 1.0, keep_handlers: bool = False) -> None:
        self._repeat_seconds = repeat_seconds
        self._keep_handlers = keep_handlers
        self.received: signal.Signals | None = None
        """The first signal that asked this rank to stop."""
        self._urgent_since: float | None = None
        """Time of the first urgent signal, from `time.monotonic`."""
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._old_wakeup_fd = -1
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        assert self._watcher is None, "entered twice"
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)  # set_wakeup_fd requires it
        self._watcher = threading.Thread(target=self._watch, name="isp-signals", daemon=True)
        self._watcher.start()
        # The C part of a signal handler writes the signal's number here at once [Note: Watcher].
        self._old_wakeup_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in () if self._keep_handlers else heeded_signals():
            self._old_handlers[number] = signal.signal(number, _leave_to_watcher)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._sender.close()  # ends the loop of `_watch`
        assert self._watcher is not None
        self._watcher.join()
        self._watcher = None
        self._receiver.close()

    def _watch(self) -> None:
        """Receive signal numbers in the watcher's thread, until the socket is closed."""
        while data := self._receiver.recv(64):
            for number in data:
                if number in (*_URGENT, *_EARLY):
                    self._receive(signal.Signals(number))

    def _receive(self, number: signal.Signals) -> None:
        """Set `received` at the first signal; end the process at the second urgent one."""
        now = time.monotonic()
        if number in _URGENT:
            if self._urgent_since is None:
                self._urgent_since = now
            elif now - self._urgent_since >= self._repeat_seconds:
                os._exit(128 + number)  # the main thread may be stuck in a collective
        if self.received is None:
            self.received = number
            logger.warning(
                "received %s: finishing the step, then saving; a second SIGINT, SIGTERM or SIGHUP"
                " ends the run at once, without saving",
                number.name,
            )


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """Do nothing: a Python handler has to exist, or the signal would end the process."""
