"""`ProgressBar`: where a run is, for who watches it in a terminal."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TextIO

from tqdm import tqdm

from isp.utils.text import format_duration

__all__ = ["ProgressBar", "watched_stream"]


def watched_stream() -> TextIO | None:
    """Stderr or stdout, whichever is a terminal; None if nobody watches."""
    return next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), None)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar of `total` steps, of which `done` are, at the bottom of the terminal behind `stream`.

    Log lines appear above it: `isp.train.folder.log_files` writes them so. A terminal that goes
    away takes the bar with it, and nothing else.
    """

    def __init__(self, *, total: int, done: int, stream: TextIO) -> None:
        self._bar = tqdm(
            total=total,
            initial=done,
            file=stream,
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
        )

    def show(self, *, loss: float, eta_seconds: float | None) -> None:
        """One step more has been done."""
        eta = "" if eta_seconds is None else f"  eta: {format_duration(eta_seconds)}"
        self._bar.set_postfix_str(f"loss: {loss:.4f}{eta}", refresh=False)
        self._bar.update()

    def __exit__(self, *_: object) -> None:
        self._bar.close()
