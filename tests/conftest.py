"""What holds for all tests."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all but `-m gpu`: others are of a CPU, and fork ranks behind a backward.

    Where torch finds a GPU, a backward starts threads, and it refuses to go backward in a fork.
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
