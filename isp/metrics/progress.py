"""`ProgressBar`: shows how far a run is, at the bottom of a terminal."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TextIO

from tqdm import tqdm

from isp.utils.text import format_duration

__all__ = ["ProgressBar", "watched_stream"]


def watched_stream() -> TextIO | None:
    """Return stderr if it is a terminal, else stdout if that is one, else None."""
    return next((stream for stream in (sys.stderr, sys.stdout) if stream.isatty()), None)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """Progress bar at the bottom of the terminal `stream`, which starts at `done` of `total` steps.

    Log lines appear above it: `isp.train.folder.log_files` clears the bar while it writes one. If
    the terminal is closed, the bar ends and the run continues.
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
        """Advance the bar by a step and show its loss and the time left."""
        eta = "" if eta_seconds is None else f"  eta: {format_duration(eta_seconds)}"
        self._bar.set_postfix_str(f"loss: {loss:.4f}{eta}", refresh=False)
        self._bar.update()

    def __exit__(self, *_: object) -> None:
        self._bar.close()
