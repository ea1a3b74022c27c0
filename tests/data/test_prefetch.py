"""The prefetch thread: what it reads, its errors, and that it ends."""

import threading
from contextlib import closing

import pytest

from isp.data.batch import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("isp-data")]


def test_the_next_step_is_fetched_before_it_is_requested() -> None:
    """Catches a prefetcher that only reads on request, which would stall each step."""
    started = [threading.Event() for _ in range(4)]
    threads = []

    def fetch(step: int) -> int:
        started[step].set()
        threads.append(threading.current_thread())
        return step * 10

    with closing(Prefetcher(fetch, num_steps=4)) as prefetcher:
        for step in range(4):
            assert prefetcher.get(step) == step * 10
            if step < 3:
                assert started[step + 1].wait(timeout=10)
    assert len(threads) == 4  # each step once, and none after the last
    assert len(set(threads)) == 1
    assert prefetch_threads() == []


def test_any_order_gives_the_right_step() -> None:
    """Catches the result of the prefetched step in place of the requested one."""
    with closing(Prefetcher(lambda step: step)) as prefetcher:
        for step in (0, 1, 7, 7, 3, 4, 0):
            assert prefetcher.get(step) == step


def test_an_error_is_raised_when_its_step_is_requested() -> None:
    """Catches an error lost in the thread or raised a step too early, and a thread that stays
    alive.
    """

    def fetch(step: int) -> int:
        if step == 2:
            raise OSError("disk gone")
        return step

    prefetcher = Prefetcher(fetch)
    assert [prefetcher.get(0), prefetcher.get(1)] == [0, 1]
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            prefetcher.get(2)
    prefetcher.close()
    prefetcher.close()
    assert prefetch_threads() == []


def test_closing_waits_for_a_read_in_flight() -> None:
    """Catches a thread that still reads while the process exits."""
    started, release, finished = threading.Event(), threading.Event(), threading.Event()

    def fetch(step: int) -> int:
        if step == 1:
            started.set()
            assert release.wait(timeout=10)
            finished.set()
        return step

    prefetcher = Prefetcher(fetch)
    prefetcher.get(0)
    assert started.wait(timeout=10)
    release.set()
    prefetcher.close()
    assert finished.is_set()
    assert prefetch_threads() == []
