"""The one place where a command prints."""

from __future__ import annotations

import sys

from isp.foreign.shown import printable, shown

__all__ = ["say"]


def say(
    text: object = "", *, error: bool = False, end: str = "\n", generated: bool = False
) -> None:
    """Print `text` to stdout, or to stderr if it is no result; at once.

    Without what a terminal obeys, and without credentials unless a model has `generated` it.
    """
    print(
        printable(str(text)) if generated else shown(text),
        end=end,
        file=sys.stderr if error else sys.stdout,
        flush=True,
    )
