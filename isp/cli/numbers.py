"""Numbers of a command line."""

from __future__ import annotations

import argparse

__all__ = ["not_negative", "positive"]

LARGEST = 2**20
"""More ranks, layouts or steps than anybody asks for; to list them would take minutes."""


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    return _from(1, text)


def not_negative(text: str) -> int:
    """A whole number of 0 or more."""
    return _from(0, text)


def _from(least: int, text: str) -> int:
    if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number from {least} to {LARGEST}")
    return int(text)
