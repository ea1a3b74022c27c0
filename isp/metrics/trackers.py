"""`Trackers`: sends the metrics of steps to experiment trackers, none of which can end a run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from isp.metrics.tracker import TrackedRun, Tracker, tracker_of
from isp.utils.files import read_limited, write_whole
from isp.utils.text import first_line

__all__ = ["Trackers"]

logger = logging.getLogger(__name__)

FINISH_SECONDS = 60.0
"""Time that trackers have, together, to send what is pending at the end of a run."""
MOST_PENDING = 10_000
"""Calls that wait for a tracker; with more, nothing is sent to it any longer."""


class Trackers(AbstractContextManager["Trackers"]):
    """The trackers `names` (see `metrics.report_to`) of `run`, each in a thread of its own.

    Leaving the context waits until all have finished, for `FINISH_SECONDS` at most. One that fails
    or hangs is reported in one warning; the run continues. Their ids are kept in `ids` (default:
    `run.folder`), so that the same run resumed there continues in its trackers.
    """

    def __init__(self, names: Iterable[str], run: TrackedRun, *, ids: Path | None = None) -> None:
        folder = run.folder if ids is None else ids
        self._threads = [_TrackerThread(name, run, folder) for name in names]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log `values` of `step`; returns at once."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.log(step, values))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for thread in self._threads:
            thread.put(lambda tracker: tracker.finish(failed=kind is not None))
            thread.put(None)
        end = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            if not thread.failed:
                thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                thread.give_up(f"not finished within {FINISH_SECONDS:g} s")


class _TrackerThread(threading.Thread):
    """Makes a tracker's calls in their order; after one that fails, none."""

    def __init__(self, name: str, run: TrackedRun, ids: Path) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.failed = False
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_PENDING)
        self._tracker_name = name
        self._tracked = run
        self._id_file = ids / f".tracker.{name}"
        self.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Make `call` after those before it; None is the end."""
        if self.failed:  # nobody takes it
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.give_up(f"{MOST_PENDING:,} calls wait for it: it hangs, or is too slow")

    def run(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = self._open()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except Exception as error:  # of a library that we do not know: reported, whatever it is
            self.give_up(first_line(error))

    def give_up(self, why: str) -> None:
        if not self.failed:
            logger.warning(
                "nothing more is sent to %s (%s): training continues, and metrics.jsonl has all"
                " metrics",
                self._tracker_name,
                why,
            )
        self.failed = True

    def _open(self) -> Tracker:
        known = read_limited(self._id_file).decode() if self._id_file.exists() else None
        self._tracked.folder.mkdir(parents=True, exist_ok=True)
        tracker = tracker_of(self._tracker_name)
        given = tracker.init(self._tracked._replace(id=known))
        if given is not None and given != known:
            write_whole(self._id_file, given)
        return tracker
