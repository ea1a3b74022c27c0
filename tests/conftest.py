"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs unless run with `-m "gpu ..."`, and restore the default handlers of stop signals.

    Each process computes with one thread: tests run in parallel, and would wait for cores at each
    of many small operations.

    Other tests run on the CPU and fork ranks after a backward. Where torch finds a GPU, a backward
    starts threads, and torch then refuses to run backward in a forked process.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
    torch.set_num_threads(1)
    if not config.getoption("markexpr").startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Collecting garbage of the parent may wait for threads that a forked process lacks.
    os.register_at_fork(after_in_child=gc.freeze)
    # Ignored by nohup and in a shell's background jobs, and inherited by every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files with slow tests to the front: one that starts last makes the other workers wait.

    Skip tests of a GPU where there is none. The driver's library counts devices without CUDA, since
    a process that has initialized CUDA cannot fork.
    """
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude objects made by imports from later garbage collections, which would take a second
    each.
    """
    gc.collect()
    gc.freeze()
