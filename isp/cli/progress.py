"""The progress of a command that takes long: a bar in a terminal, else a line; on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from isp.cli.output import say
from isp.utils.text import printable

__all__ = ["show_progress"]

T = TypeVar("T")


def show_progress(items: Sequence[T], what: str) -> Iterable[T]:
    """`items`, with a bar while they are worked on, or one line where stderr is no terminal.

    Nothing is shown where stderr goes to the same file or pipe as what the command prints.
    """
    from tqdm import tqdm

    if not sys.stderr.isatty() and not os.path.sameopenfile(1, 2):
        say(f"{what}: {len(items)}, one after the other", error=True)
    shown: Iterable[T] = tqdm(
        items, desc=printable(what), file=sys.stderr, disable=None, leave=False
    )
    return shown
