"""Output of commands: the only function that prints, and the progress of slow commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

from isp.utils.text import printable, shown

__all__ = ["say", "show_progress"]


def say(
    text: object = "", *, error: bool = False, end: str = "\n", generated: bool = False
) -> None:
    """Print `text` at once: results to stdout, anything else to stderr (`error`).

    Terminal control characters are removed, and credentials too, except from text that a model has
    `generated`. Raises BrokenPipeError if the reader of stdout is gone; stderr may be closed.
    """
    with suppress(BrokenPipeError) if error else nullcontext():
        print(
            printable(str(text)) if generated else shown(text),
            end=end,
            file=sys.stderr if error else sys.stdout,
            flush=True,
        )


# -- Progress of slow commands.

T = TypeVar("T")


def show_progress(items: Sequence[T], what: str) -> Iterable[T]:
    """Return `items` with a progress bar on stderr, or one line if stderr is not a terminal.

    Nothing is shown if stderr goes to the same file or pipe as stdout.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty() and not os.path.sameopenfile(1, 2):
        say(f"{what}: {len(items)}, one after the other", error=True)
    shown: Iterable[T] = tqdm(
        items, desc=printable(what), file=sys.stderr, disable=None, leave=False
    )
    return shown
