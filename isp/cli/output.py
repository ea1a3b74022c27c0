"""The one place where a command prints."""

from __future__ import annotations

import sys
from contextlib import nullcontext, suppress

from isp.utils.text import printable, shown

__all__ = ["say"]


def say(
    text: object = "", *, error: bool = False, end: str = "\n", generated: bool = False
) -> None:
    """Print `text` to stdout, or to stderr if it is no result; at once.

    Without what a terminal obeys, and without credentials unless a model has `generated` it.
    Raises BrokenPipeError if the reader of stdout has gone; that of stderr may go.
    """
    with suppress(BrokenPipeError) if error else nullcontext():
        print(
            printable(str(text)) if generated else shown(text),
            end=end,
            file=sys.stderr if error else sys.stdout,
            flush=True,
        )
