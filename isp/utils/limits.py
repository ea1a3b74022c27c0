"""Limits of time and memory for computations that files of unknown origin decide.

`limited` is for what Python executes, `check_in_child` for libraries in other languages. See
[Note: Foreign code] in docs/design/notes/train.md.
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
"""Interval at which time and memory are checked."""
_CLEANUP_SECONDS = 1.0
"""Time that interrupted code has to leave its contexts before it is interrupted again."""
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class _Exceeded(BaseException):
    """A limit was exceeded. It is not an Exception, so `except Exception` does not catch it."""


@contextmanager
def limited(
    what: str, *, seconds: float, most_bytes: int, address_bytes: int | None = None
) -> Iterator[None]:
    """Context that limits the time and the memory of the code in it; contexts may be nested.

    Raises ValueError, with `what` (the file or the key) and the limit, if the code takes more than
    `seconds`, or more than `most_bytes` of additional memory.

    Two checks limit memory. A timer looks at the resident memory, to find many small objects. A
    limit of the address space makes the allocation of one large object fail: `address_bytes`, or
    `most_bytes` if None; give a larger one for code that allocates more than it uses.

    In threads other than the main one nothing is limited: Python handles timers only in the main
    thread, and a limit of the address space would also be one for the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    begin, resident = time.monotonic(), _memory()[1]
    quiet_until, ended = 0.0, False

    def look(frame: FrameType | None) -> None:
        """Raise `_Exceeded` into the interrupted code if a limit is exceeded; a timer calls it."""
        nonlocal quiet_until
        now = time.monotonic()
        # Do not raise while a context of this file or of contextlib is entered or left: its cleanup
        # would be cut short, and the timer would stay on.
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
                ended = True  # a timer signal may still arrive after this, and must not raise
    except _Exceeded as fault:
        raise ValueError(str(fault)) from None
    except MemoryError:
        raise ValueError(_memory_fault(what, most_bytes)) from None


def check_in_child(
    what: str, check: Callable[[], object], *, seconds: float, most_bytes: int
) -> None:
    """Run `check` in a child process; raise ValueError if it raises or exceeds a limit.

    The error has `what` (the file) and the limit, or the first line of the error of `check`. The
    child is a fork: it has the modules and the memory of this process, but what it changes does not
    change here.
    """
    read, write = os.pipe()
    with _quiet_collector(), warnings.catch_warnings():
        # Python warns about a fork in a process with several threads: the child only has this one.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_as_child(check, write, seconds, most_bytes)
    os.close(write)
    fault = None
    try:
        fault = _read_until_end(read, seconds)
    finally:
        if fault is None:  # The time is over, or an exception interrupts this process.
            os.kill(child, signal.SIGKILL)
        os.close(read)
        _, status = os.waitpid(child, 0)
    if fault:
        raise ValueError(f"{what}: {fault}")
    # The kernel sends SIGXCPU or SIGKILL at the limit of CPU time; `os.kill` above sends SIGKILL.
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        raise ValueError(_time_fault(what, seconds))
    if status != 0:  # MemoryError, or a library that aborts when an allocation fails
        raise ValueError(_memory_fault(what, most_bytes))


def _time_fault(what: str, seconds: float) -> str:
    """Return the error text for code that takes too long."""
    return f"{what} takes more than {seconds:g} s, its limit: it may never end"


def _memory_fault(what: str, most_bytes: int) -> str:
    """Return the error text for code that takes too much memory."""
    return f"{what} takes more than {most_bytes / 2**30:g} GiB of memory, its limit"


def _memory() -> tuple[int, int]:
    """Return the bytes of this process's address space and resident memory; 0 if unknown."""
    try:
        size, resident, *_ = _STATM.read_bytes().split()
    except OSError:  # Only Linux has /proc.
        return 0, 0
    return int(size) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


@contextmanager
def _address_space(most_bytes: int) -> Iterator[None]:
    """Context in which allocations fail if the address space grows by more than `most_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = _memory()[0]
    if size:
        # Never raise a limit that is already there, as of an enclosing context.
        bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([size + most_bytes, *bounds]), hard))
    try:
        yield
    finally:
        if size:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _ticks(look: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Context in which a timer calls `look`, with the current frame, every `_TICK_SECONDS`.

    A process has only one such timer. If other code, such as an enclosing context, has set it, the
    handler of that code is still called when it is due, and the timer is set again at the end.
    """
    due, begin = signal.getitimer(signal.ITIMER_REAL)[0], time.monotonic()
    before = signal.getsignal(signal.SIGALRM)

    def tick(number: int, frame: FrameType | None) -> None:
        """Handle the timer's signal: call the earlier timer's handler if it is due, then `look`."""
        if due and time.monotonic() - begin >= due and callable(before):
            before(number, frame)
        look(frame)

    signal.signal(signal.SIGALRM, tick)
    _, interval = signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # `before` is None if C code had set the handler, which Python cannot set again.
        if before is not None:
            signal.signal(signal.SIGALRM, before)
        if due:
            left = max(1e-3, due - (time.monotonic() - begin))
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Context without garbage collection, in which to fork.

    A collection in the child would run destructors of the parent's objects.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run_as_child(check: Callable[[], object], write: int, seconds: float, most_bytes: int) -> None:
    """Run `check` in this process, the child, and end the process.

    Writes the error of `check` to the pipe `write`. The exit code is 0 unless memory ran out; at
    the limit of CPU time the kernel ends the process with SIGXCPU.
    """
    code = 1
    try:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the message of a library that aborts
        # A call raises if the process already has a lower limit: that limit then stays.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1,) * 2)
            most = _memory()[0] + most_bytes
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        check()
        code = 0
    except MemoryError:
        code = 2
    except BaseException as error:  # a panic in a Rust library is no Exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        os.write(write, lines[0][:2000].encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)  # skips exit handlers, which belong to the parent


def _read_until_end(pipe: int, seconds: float) -> str | None:
    """Return the text that the child wrote until it ended; None if it takes more than `seconds`."""
    found, end = b"", time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        piece = os.read(pipe, 4096)
        if not piece:
            return found.decode(errors="replace")
        found += piece
