"""Output of commands: `say` is the only function that prints; progress of slow commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

from isp.utils.text import printable, shown

__all__ = ["compute_on_one_thread", "say", "say_progress", "show_progress"]


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
_SECONDS_BETWEEN = 5.0
"""Time between two lines of progress in a log."""


def say_progress(text: str, *, mixes: bool = True) -> None:
    """Print what a slow command does now to stderr.

    `mixes=False`: the results are JSON, so nothing is printed if stderr goes to their file or pipe.
    """
    if mixes or sys.stderr.isatty() or not os.path.sameopenfile(1, 2):
        say(text, error=True)


def show_progress(items: Sequence[T], what: str, *, mixes: bool = True) -> Iterable[T]:
    """Return `items` with a progress bar on stderr, or with a line every 5 s in a log.

    `mixes` as in `say_progress`.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm

        shown: Iterable[T] = tqdm(items, desc=printable(what), file=sys.stderr, leave=False)
        return shown
    return _logged(items, what, mixes)


def _logged(items: Sequence[T], what: str, mixes: bool) -> Iterator[T]:
    """Yield `items`, with a line of progress at first and then every 5 s."""
    say_progress(f"{what}: 0 of {len(items)}", mixes=mixes)
    latest = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - latest >= _SECONDS_BETWEEN:
            say_progress(f"{what}: {number} of {len(items)}", mixes=mixes)
            latest = time.monotonic()
        yield item


def compute_on_one_thread() -> None:
    """Let torch use one thread in this process, which runs many small operations.

    Several threads would wait for each other longer than they compute, above all on busy cores.
    """
    import torch

    torch.set_num_threads(1)
