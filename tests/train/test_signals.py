"""Stop signals, really sent: to this process for requests, to child processes for ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from isp.train.signals import StopRequest

STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


def within_seconds(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda s: s.name)
def test_the_first_signal_is_a_request_to_stop(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a signal that interrupts the step, or is ignored."""
    with StopRequest() as stop:
        assert not stop.received
        os.kill(os.getpid(), number)
        assert within_seconds(5, lambda: stop.received is not None)
    assert stop.received
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [f"received {number.name}"]


def test_other_signals_are_not_a_request() -> None:
    """Catches any handled signal taken for a request to stop."""
    old = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert not within_seconds(0.05, lambda: stop.received is not None)
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_nohup_is_respected() -> None:
    """Catches a run under `nohup` that stops when its terminal is closed."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not within_seconds(0.05, lambda: stop.received is not None)
            os.kill(os.getpid(), signal.SIGTERM)
            assert within_seconds(5, lambda: stop.received is signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


def test_signal_handlers_are_restored() -> None:
    """Catches a process that can no longer be interrupted after training."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    for _ in range(2):  # and can be entered again
        with StopRequest():
            assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_repeated_signals_of_one_request_do_not_end_the_run() -> None:
    """Catches one request, forwarded by terminal, launcher and Slurm, counted twice."""
    with StopRequest(repeat_seconds=60.0) as stop:
        for number in (*STOP_SIGNALS, *STOP_SIGNALS):
            os.kill(os.getpid(), number)
        assert within_seconds(5, lambda: stop.received is not None)
    with StopRequest(repeat_seconds=0.0) as stop:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            assert within_seconds(5, lambda: stop.received is not None)
    assert stop.received


STUCK = """
from isp.train.signals import StopRequest
with StopRequest(repeat_seconds=0.0) as stop:
    print("ready", flush=True)
    while not stop.received:
        pass
    print("requested", flush=True)
    {wait}
"""
IN_PYTHON = "while True: pass"
IN_C = (
    "import ctypes; c, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64);"
    " c.pthread_mutex_lock(lock), c.pthread_mutex_lock(lock)"  # the second never returns
)


@pytest.mark.parametrize("wait", [IN_PYTHON, IN_C], ids=["in Python", "in C"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_a_second_signal_ends_the_run_at_once(number: signal.Signals, wait: str) -> None:
    """Catches a run that cannot be ended while a collective waits for a dead rank."""
    command = [sys.executable, "-c", STUCK.format(wait=wait)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == "requested\n"
        time.sleep(0.05)  # to be inside the wait
        process.send_signal(number)
        try:
            assert process.wait(timeout=10) == 128 + number
        finally:
            process.kill()
