"""`Pace`: how fast a run goes, how long the rest of it takes, and whether a limit is near."""

from __future__ import annotations

from collections import deque

from isp.comm.phase import Phase
from isp.config import JobConfig
from isp.metrics.phases import PhaseTimes, training_seconds

__all__ = ["Pace"]

_STEPS = 100
"""The last steps, whose mean stands for those to come."""


class Pace:
    """Learns from the phases of each step how long steps, evaluations and saves take.

    The first step counts only until there is another: it also loads kernels and fills pools.
    """

    def __init__(self, config: JobConfig) -> None:
        self._total = config.training.steps
        self._eval_freq = config.validation.freq
        self._save_interval = config.checkpoint.interval
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._first = True
        self._evaluation = 0.0
        self._save = 0.0
        self._last_save = 0.0

    def count(self, times: PhaseTimes, *, write_seconds: float = 0.0) -> None:
        """A step has been done; `times` since the last one was.

        `write_seconds` is what it takes to write a checkpoint: the last one is waited for.
        """
        if len(self._steps) == 1 and self._first:
            self._steps.clear()
            self._first = False
        self._steps.append(training_seconds(times))
        # Those of the step before; the longest, because a limit of time must not be passed.
        self._evaluation = max(self._evaluation, times[Phase.EVALUATION])
        self._save = max(self._save, times[Phase.CHECKPOINT])
        self._last_save = max(self._last_save, self._save, write_seconds)

    def seconds_left(self, step: int) -> float | None:
        """How long the run takes from the end of `step` on; None before that is known, and after.

        Evaluations and saves count once one has been measured.
        """
        if self._first or step >= self._total:
            return None
        mean = sum(self._steps) / len(self._steps)
        evaluations = self._times_left(step, self._eval_freq) if self._eval_freq else 0
        saves = self._times_left(step, self._save_interval) if self._save_interval else 1
        before_last = (saves - 1) * self._save + evaluations * self._evaluation
        return (self._total - step) * mean + before_last + self._last_save

    def seconds_to_stop(self) -> float:
        """How long one more step, and then the end of the run, would take."""
        longest = max(self._steps, default=0.0)
        return longest + self._evaluation + self._last_save

    def _times_left(self, step: int, every: int) -> int:
        """How often something is done after `step` that is done every so often, and at the end."""
        return -(-self._total // every) - step // every
