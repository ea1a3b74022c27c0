"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all but `-m "gpu ..."`, and let stop signals do what they do in a terminal.

    One thread a process computes: tests run beside each other, and wait for cores at each of many
    small operations otherwise.

    Other tests are of a CPU, and fork ranks behind a backward: where torch finds a GPU, a backward
    starts threads, and it refuses to go backward in a fork.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)
    if not config.getoption("markexpr").startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Garbage of this process may wait, when collected, for threads that a fork does not have.
    os.register_at_fork(after_in_child=gc.freeze)
    # Ignored by nohup and in a shell's background jobs, and inherited by every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: one that begins last keeps the other worker waiting.

    Tests of a GPU are skipped without one. Devices are counted by the driver's library, without
    CUDA: a process that has begun with it cannot fork.
    """
    if torch.cuda.device_count() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what imports made out of every later garbage collection, which takes a second else."""
    gc.collect()
    gc.freeze()
