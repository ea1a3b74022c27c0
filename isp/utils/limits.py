"""Limits of time and memory for what foreign files make this program compute.

[Note: Foreign code] A chat template, a pattern of names, a normalizer and the sizes in config.json
are programs of a kind: a short one may never end, or take all memory. Python code among them runs
within `limited`; libraries in other languages, which Python cannot interrupt and which end the
process when memory runs out, are tried in a child process by `check_in_child` first.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

__all__ = ["check_in_child", "limited"]

_TICK_SECONDS = 0.05
"""Time between looks at the clock and at memory."""
_CLEANUP_SECONDS = 1.0
"""Time that code has to leave its own contexts before it is interrupted once more."""
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class _Exceeded(BaseException):
    """A limit was exceeded; no `except Exception` of a library takes it for a fault of its own."""


@contextmanager
def limited(
    what: str, *, seconds: float, most_bytes: int, address_bytes: int | None = None
) -> Iterator[None]:
    """Limit the time and the memory of the code in this context, which may be nested.

    Raises ValueError, with `what` (the file or the key) and the limit, when the code takes more
    than `seconds`, or than `most_bytes` more memory. The time and the memory of many small objects
    are looked at by a timer. For one large object the address space is limited, by which the
    allocation itself fails: by `address_bytes` (None: `most_bytes`), for code that allocates more
    than it uses. In a thread other than the main one nothing is limited: Python serves timers in
    the main thread alone, and the limit of memory would hit what the main thread computes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin, resident = time.monotonic(), _memory()[1]
    quiet_until, ended = 0.0, False

    def look(frame: FrameType | None) -> None:
        nonlocal quiet_until
        now = time.monotonic()
        # Not in the midst of leaving this context, which would leave the timer running.
        leaves = frame is None or frame.f_globals.get("__name__") in (__name__, "contextlib")
        if ended or leaves or now < quiet_until:
            return
        if now - begin > seconds:
            fault = _time_fault(what, seconds)
        elif _memory()[1] - resident > most_bytes:
            fault = _memory_fault(what, most_bytes)
        else:
            return
        quiet_until = now + _CLEANUP_SECONDS
        raise _Exceeded(fault)

    try:
        with _address_space(address_bytes or most_bytes), _ticks(look):
            try:
                yield
            finally:
                ended = True  # a signal that is still on its way is no fault
    except _Exceeded as fault:
        raise ValueError(str(fault)) from None
    except MemoryError:
        raise ValueError(_memory_fault(what, most_bytes)) from None


def check_in_child(
    what: str, check: Callable[[], object], *, seconds: float, most_bytes: int
) -> None:
    """Run `check` in a child process, and raise ValueError unless it ends within the limits.

    The error has `what` (the file), and the limit, or the first line of what `check` raised. The
    child has this process's modules and memory, and nothing that it changes is seen here.
    """
    read, write = os.pipe()
    with _quiet_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child has one
        child = os.fork()
    if child == 0:
        _run_as_child(check, write, seconds, most_bytes)
    os.close(write)
    fault = None
    try:
        fault = _read_until_end(read, seconds)
    finally:
        if fault is None:  # out of time, or interrupted
            os.kill(child, signal.SIGKILL)
        os.close(read)
        _, status = os.waitpid(child, 0)
    if fault:
        raise ValueError(f"{what}: {fault}")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        raise ValueError(_time_fault(what, seconds))
    if status != 0:  # MemoryError, or a library that aborts when an allocation fails
        raise ValueError(_memory_fault(what, most_bytes))


def _time_fault(what: str, seconds: float) -> str:
    return f"{what} takes more than {seconds:g} s, the limit of it: it may never end"


def _memory_fault(what: str, most_bytes: int) -> str:
    return f"{what} takes more than {most_bytes / 2**30:g} GiB of memory, the limit of it"


def _memory() -> tuple[int, int]:
    """The bytes of this process's address space, and of those in memory; 0 where not known."""
    try:
        size, resident, *_ = _STATM.read_bytes().split()
    except OSError:  # no Linux
        return 0, 0
    return int(size) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


@contextmanager
def _address_space(most_bytes: int) -> Iterator[None]:
    """Let allocations fail that go beyond `most_bytes` more than now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = _memory()[0]
    if size:
        bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([size + most_bytes, *bounds]), hard))
    try:
        yield
    finally:
        if size:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _ticks(look: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Call `look` again and again, and the handler of a timer that was set before at its time."""
    due, begin = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    before = signal.getsignal(signal.SIGALRM)

    def tick(number: int, frame: FrameType | None) -> None:
        if due and time.monotonic() - begin >= due and callable(before):
            before(number, frame)
        look(frame)

    signal.signal(signal.SIGALRM, tick)
    _, interval = signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if before is not None:  # None: a handler that is not Python's
            signal.signal(signal.SIGALRM, before)
        if due:
            left = max(1e-3, due - (time.monotonic() - begin))
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Without garbage collection: a child must not run destructors of this process's objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run_as_child(check: Callable[[], object], write: int, seconds: float, most_bytes: int) -> None:
    """Run `check` and end this process; a fault goes to the pipe `write`."""
    code = 1
    try:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says as it aborts
        # Each may raise in a process that has lower limits already, which then hold.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
            most = _memory()[0] + most_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        check()
        code = 0
    except MemoryError:
        code = 2
    except BaseException as error:  # also what libraries of other languages raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        os.write(write, lines[0][:2000].encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)  # without this process's own handlers, which are the parent's


def _read_until_end(pipe: int, seconds: float) -> str | None:
    """Return the output of the child; None if it takes more than `seconds`."""
    found, end = b"", time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        piece = os.read(pipe, 4096)
        if not piece:
            return found.decode(errors="replace")
        found += piece
