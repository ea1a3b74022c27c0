"""Agreement of ranks after each step, the pace of a run, and warnings about losses and ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import NamedTuple

import torch
from pydantic import TypeAdapter

from isp.checkpoint import Checkpointer, CheckpointError
from isp.checkpoint.agreement import exchange
from isp.config import JobConfig
from isp.core.comm import Channel, Mesh, TimedTransfer
from isp.core.comm.tag import Tag
from isp.core.layers.vocab_loss import IGNORED
from isp.core.mesh import Axis, Topology
from isp.core.mesh.phase import Phase
from isp.core.optim.zero1 import Zero1Optimizer
from isp.profile.collectives import align
from isp.profile.recorder import RankRecord
from isp.step.phases import PhaseTimes, training_seconds
from isp.step.train_step import StepOutcome

__all__ = [
    "LossWatch",
    "Pace",
    "SlowRankWatch",
    "StepFacts",
    "agree",
    "any_asked",
    "check_skips",
    "describe_skip",
    "describe_waits",
]

_METRICS = Tag(tensor="metrics")
_PACE_STEPS = 100
"""Number of recent steps whose mean time predicts that of later steps."""
_WINDOW = 100
"""Number of recent losses that a new loss is compared with."""
_ENOUGH = 20
"""Number of losses below which a new one is not compared with them."""
_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution."""
_LEAST_SPREAD = 0.01
"""Least deviation, as a fraction of the median loss. Without it, losses that are almost equal would
make any change a spike."""


class StepFacts(NamedTuple):
    """Values at the end of a step, combined over all ranks and so equal on each."""

    asked: bool
    """True if any rank got a stop signal."""
    late: bool
    """True if any rank expects that one more step would pass `training.max_time`."""
    flops: float
    """FLOPs of the model for the global batch."""
    tokens: int
    """Number of tokens in the global batch, without padding."""
    own_seconds: list[float]
    """Each rank's time for the step without waits for other ranks, by rank."""


def agree(
    host: Channel, *, asked: bool, late: bool, flops: float, tokens: int, own_seconds: float
) -> StepFacts:
    """Combine the values of all ranks by one all-reduce over `host`.

    `flops` and `tokens` are summed; `asked` and `late` are true if they are on any rank.
    """
    # Each rank fills only its own slot for the seconds, so the sum over ranks gathers them.
    facts = torch.zeros(4 + host.size, dtype=torch.float64)
    facts[:4] = torch.tensor([asked, late, flops, tokens], dtype=torch.float64)
    facts[4 + host.rank] = own_seconds
    host.all_reduce_(facts, tag=_METRICS).wait()
    num_asked, num_late, all_flops, all_tokens, *by_rank = facts.tolist()
    return StepFacts(num_asked > 0, num_late > 0, all_flops, int(all_tokens), by_rank)


def any_asked(host: Channel, asked: bool) -> bool:
    """Return True if any rank of `host` got a stop signal; a collective."""
    return bool(host.all_reduce_(torch.tensor([asked]).int(), op="max", tag=_METRICS).wait())


class Pace:
    """Estimates how long the steps, evaluations and saves to come will take.

    The first step is forgotten after the second: it also loads kernels and fills pools of memory.
    """

    def __init__(self, config: JobConfig) -> None:
        self._total = config.training.steps
        self._eval_freq = config.validation.freq
        self._save_interval = config.checkpoint.interval
        self._steps: deque[float] = deque(maxlen=_PACE_STEPS)
        """Seconds that each of the last steps took, without evaluations and saves."""
        self._first = True
        """True until the second step."""
        self._evaluation = 0.0
        """Seconds of the longest evaluation."""
        self._save = 0.0
        """Seconds that the longest save has delayed a step."""
        self._last_save = 0.0
        """Expected seconds of the run's last save, for which the run waits until it is written."""

    def count(self, times: PhaseTimes, *, write_seconds: float = 0.0) -> None:
        """Count a step: `times` has the seconds of each phase since the previous step.

        `write_seconds` is how long writing the latest checkpoint took, in the background or not.
        """
        if len(self._steps) == 1 and self._first:
            self._steps.clear()
            self._first = False
        self._steps.append(training_seconds(times))
        # Evaluation and save followed the previous step. Keep the longest time of each: with a
        # mean, the run could pass its time limit.
        self._evaluation = max(self._evaluation, times[Phase.EVALUATION])
        self._save = max(self._save, times[Phase.CHECKPOINT])
        self._last_save = max(self._last_save, self._save, write_seconds)

    def seconds_left(self, step: int) -> float | None:
        """Return the expected seconds from the end of `step` to the end of the run.

        None before the second step and after the last one. Evaluations and saves count as nothing
        until the first of each has been measured.
        """
        if self._first or step >= self._total:
            return None
        mean = sum(self._steps) / len(self._steps)
        evaluations = self._times_left(step, self._eval_freq) if self._eval_freq else 0
        saves = self._times_left(step, self._save_interval) if self._save_interval else 1
        # In async mode, all saves but the last delay the run only until the state is copied.
        before_last = (saves - 1) * self._save + evaluations * self._evaluation
        return (self._total - step) * mean + before_last + self._last_save

    def seconds_to_stop(self) -> float:
        """Return the expected seconds of one more step, its evaluation, and the last save."""
        longest = max(self._steps, default=0.0)
        return longest + self._evaluation + self._last_save

    def _times_left(self, step: int, every: int) -> int:
        """Return how often something happens after `step` that is due each `every` steps.

        The last step of the run counts too, whether or not it is a multiple.
        """
        # Rounding up counts the last step.
        return -(-self._total // every) - step // every


def describe_skip(optimizer: Zero1Optimizer, outcome: StepOutcome, *, step: int) -> str:
    """Return a log line about `step`, which the optimizer has just skipped, with the reason."""
    count = optimizer.num_skipped
    why = f"the gradient norm is {outcome.grad_norm}"
    if not outcome.valid_tokens:
        why = f"no token of its batch has a label other than {IGNORED} (ignore_index)"
    text = (
        f"step {step}: {why}, so the weights were left as they are"
        f" ({count} {'step was' if count == 1 else 'steps were'} skipped so far)"
    )
    scaler = optimizer.scaler
    return text if scaler is None else f"{text}; the next loss scale is {scaler.scale:.8g}"


def check_skips(
    optimizer: Zero1Optimizer, limit: int, *, step: int, checkpointer: Checkpointer
) -> None:
    """Raise ValueError if the last `limit` steps, `step` included, were all skipped; 0: never.

    Skips that only lower the loss scale do not count (`Zero1Optimizer.skipped_in_a_row`). The error
    names the checkpoint to resume from. It may still be in flight, so this waits for it first, on
    all ranks.
    """
    skipped = optimizer.skipped_in_a_row
    if not limit or skipped < limit:
        return
    with suppress(CheckpointError):  # The save has logged it; name an older one.
        checkpointer.wait()
    folder = checkpointer.folder
    before = [saved for saved in folder.steps() if saved <= step - skipped]
    way_out = "there is no checkpoint from before them: begin anew with"
    if before:
        way_out = (
            f"the last checkpoint from before them is {folder.published(before[0])}: resume from"
            f" there (checkpoint.load_step={before[0]}) with"
        )
    raise ValueError(
        f"step {step}: the gradients of {skipped} consecutive steps were not finite, which is the"
        f" limit optimizer.max_skipped_steps={limit}; {way_out} a smaller optimizer.lr, a longer"
        f" warm-up or other data"
    )


class LossWatch:
    """Warns if a loss is more than `deviations` above the median of recent losses; 0: never.

    A deviation is the median absolute deviation, scaled to a standard deviation. Spikes hardly
    change it or the median, unlike standard deviation and mean. A spike that lasts for several
    steps is reported once.
    """

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._high = False
        """True if the last loss was part of a spike."""

    def look(self, step: int, loss: float) -> str | None:
        """Return a warning if the loss of `step` begins a spike, else None."""
        if not self._deviations or not math.isfinite(loss):
            return None
        line, high = None, False
        if len(self._losses) >= _ENOUGH:
            middle = median(self._losses)
            spread = _SIGMA * median(abs(other - middle) for other in self._losses)
            spread = max(spread, _LEAST_SPREAD * abs(middle))
            away = (loss - middle) / spread if spread else 0.0
            high = away > self._deviations
            if high and not self._high:
                line = (
                    f"step {step}: the loss {loss:.4f} is {loss - middle:.4f} above {middle:.4f},"
                    f" the median of the {len(self._losses)} steps before: {away:.1f} deviations"
                    f" (reported from metrics.loss_spike_deviations={self._deviations:g} on)"
                )
        self._high = high
        self._losses.append(loss)
        return line


class SlowRankWatch:
    """Warns if a rank takes more than `factor` times as long as others; 0: never.

    It compares a rank's time for a step, without waits for other ranks, with the median of the
    other ranks of its pipeline stage. A rank is reported once it has been slow for `steps` steps in
    a row, and again only after it has recovered. Stages are not compared with each other, since
    they have different layers to compute; so a stage of a single, slow rank is not found.
    """

    def __init__(
        self, topology: Topology, hostnames: Sequence[str], *, factor: float, steps: int
    ) -> None:
        self._stages = [ranks for ranks in topology.groups(Axis.STAGE) if len(ranks) > 1]
        self._hostnames = hostnames
        self._factor = factor
        self._slow: list[deque[tuple[float, float]]] = [deque(maxlen=steps) for _ in hostnames]
        """By rank: its own seconds and the others' median, for its consecutive slow steps."""
        self._reported: set[int] = set()
        """Ranks that have been reported as slow and have not recovered since."""

    def look(self, step: int, own_seconds: Sequence[float]) -> list[str]:
        """Return a warning for each rank that becomes slow at `step`; `own_seconds` is by rank."""
        if not self._factor:
            return []
        lines = []
        for ranks in self._stages:
            ordered = sorted((own_seconds[rank], rank) for rank in ranks)
            for place, (own, rank) in enumerate(ordered):
                others = _median_without(ordered, place)
                if own <= self._factor * others:
                    self._slow[rank].clear()
                    self._reported.discard(rank)
                    continue
                self._slow[rank].append((own, others))
                if len(self._slow[rank]) == self._slow[rank].maxlen and rank not in self._reported:
                    self._reported.add(rank)
                    lines.append(self._describe(step, rank))
        return lines

    def _describe(self, step: int, rank: int) -> str:
        """Return the warning about a slow rank."""
        slow = self._slow[rank]
        own, others = (fmean(column) for column in zip(*slow, strict=True))
        return (
            f"step {step}: rank {rank} on {self._hostnames[rank]} is slow: for {len(slow)} steps it"
            f" was at work {own * 1e3:.0f} ms a step, the others of its stage {others * 1e3:.0f} ms"
            f" (reported from metrics.slow_rank_factor={self._factor:g} on)"
        )


def _median_without(ordered: Sequence[tuple[float, int]], place: int) -> float:
    """Return the median of the `ordered` values without the one at `place`."""
    # `low` and `high` index the middle values of the list without `place`. In `ordered`, values
    # after `place` are one further. So all medians need a single sort.
    last = len(ordered) - 2
    low, high = last // 2, (last + 1) // 2
    return (ordered[low + (low >= place)][0] + ordered[high + (high >= place)][0]) / 2


def describe_waits(mesh: Mesh, transfers: Sequence[TimedTransfer]) -> str | None:
    """Return a sentence: how much of the exposed time of a step was ranks waiting for each other.

    `transfers` are this rank's in that step. Returns None if no time was exposed. A collective. All
    ranks have to be on one machine, since times are compared by one clock.
    """
    json = TypeAdapter(RankRecord)
    own = RankRecord(begins=(0.0,), transfers=tuple(transfers), channels=mesh.members)
    texts = exchange(mesh.host, json.dump_json(own).decode())
    ranks = align([json.validate_json(text) for text in texts])
    collectives = [collective for rank in ranks for collective in rank.collectives]
    exposed = sum(collective.exposed_ms for collective in collectives)
    if not exposed:
        return None
    others = sum(collective.others_ms for collective in collectives)
    return (
        f"{others / exposed:.0%} of the exposed time of the last step was ranks waiting for each"
        f" other"
    )
