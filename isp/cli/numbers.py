"""Numbers of a command line."""

from __future__ import annotations

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """A whole number from 1 to 2^20: of ranks, layouts or steps."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    if value > 2**20:
        raise argparse.ArgumentTypeError(f"{value} must be at most {2**20}")
    return value
