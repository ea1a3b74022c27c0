"""Samples of several sources, each with its share of the tokens.

[Note: Mixtures] Draw i belongs to the source in whose interval (i * step + offset) mod 2^32 lies:
intervals are as long as the shares, and with a step near the golden section every stretch of draws
has them, to within a few samples. How many of the draws before i went to a source is a sum of
floors, found in O(log i) steps of Euclid's algorithm. So the source of a sample and its number
there are a function of (seed, i): resuming needs no state, and ranks change nothing. Where a source
has come `epochs` times, a new stage begins, in which the others share its place.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from isp.data.dataset import Dataset, Sample
from isp.data.stores import mixed
from isp.data.stream import StreamDataset

__all__ = ["MixedDataset", "MixedPart"]

_TURN = 1 << 32
_STEP = 0x9E3779B1
"""The golden section of a turn; odd, so that every number of a turn comes once."""


class MixedPart(NamedTuple):
    """A source of a mixture; `weight` is in proportion to its share of the tokens."""

    name: str
    dataset: Dataset
    weight: float
    epochs: float | None = None

    @property
    def limit(self) -> int | None:
        """The samples that are drawn at most."""
        if self.epochs is None:
            return None
        return max(1, round(self.epochs * self.dataset.samples_per_epoch))


class _Stage(NamedTuple):
    """Draws from `start` on, among the sources whose intervals, up to `ends`, are not empty."""

    start: int
    before: tuple[int, ...]
    """Samples of each source drawn by earlier stages."""
    ends: tuple[int, ...]


class MixedDataset:
    """Sample i of the mixture of `parts`, as a pure function of them, `seed` and i.

    At least one part has no limit. Raises ValueError for a weight that is too small to be met.
    """

    def __init__(self, parts: Sequence[MixedPart], *, seed: int) -> None:
        assert any(part.limit is None for part in parts)
        self.parts = parts
        self._offset = mixed(seed) % _TURN
        self.pack = parts[0].dataset.pack
        self.samples_per_epoch = sum(part.dataset.samples_per_epoch for part in parts)
        self.tokens_per_sample = 0.0  # of no use: mixtures are not mixed
        self._stages = [_Stage(0, (0,) * len(parts), self._intervals([0] * len(parts)))]
        while (after := self._next(self._stages[-1])) is not None:
            self._stages.append(after)

    @property
    def summary(self) -> str:
        """A line for each source, below one another in the log."""
        total = sum(part.weight for part in self.parts)
        return f"\n{'':12}".join(
            f"wanted {p.weight / total:.1%}, {p.dataset.summary}" for p in self.parts
        )

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0."""
        source, number = self.place(index)
        return self.parts[source].dataset.sample(number)

    def place(self, index: int) -> tuple[int, int]:
        """The source of sample `index`, and which of its samples it is."""
        stage = self._stage(index)
        source = bisect_right(stage.ends, (index * _STEP + self._offset) % _TURN)
        return source, stage.before[source] + self._drawn(stage, source, index - stage.start)

    def shares(self, num_samples: int) -> str:
        """What the first `num_samples` have of each source, in words."""
        pairs = list(zip(self.parts, self._counts(num_samples), strict=True))
        total = sum(count * part.dataset.tokens_per_sample for part, count in pairs)
        return ", ".join(
            f"{part.name} {count * part.dataset.tokens_per_sample / total:.2%} of tokens"
            + (f" ({count / size:.2f} epochs)" if (size := part.dataset.samples_per_epoch) else "")
            for part, count in pairs
        )

    def tell(self, index: int) -> list[list[int]]:
        """The places in the streams that it consists of at which sample `index` begins."""
        pairs = zip(self._streams, self._counts(index), strict=True)
        return [stream.tell(count) for stream, count in pairs]

    def seek(self, index: int, places: Sequence[Sequence[int]]) -> None:
        """Let sample `index` begin at `places`, which `tell` gave."""
        triples = zip(self._streams, self._counts(index), places, strict=True)
        for stream, count, place in triples:
            stream.seek(count, place)

    @property
    def _streams(self) -> list[StreamDataset]:
        return [part.dataset for part in self.parts if isinstance(part.dataset, StreamDataset)]

    def _counts(self, index: int) -> list[int]:
        """Of the samples before `index`, those of each source."""
        stage = self._stage(index)
        return [
            before + self._drawn(stage, source, index - stage.start)
            for source, before in enumerate(stage.before)
        ]

    def _stage(self, index: int) -> _Stage:
        return self._stages[bisect_right([s.start for s in self._stages], index) - 1]

    def _intervals(self, before: Sequence[int]) -> tuple[int, ...]:
        """The ends of the intervals of the sources that are not at their limit."""
        rates = [
            0.0 if part.limit is not None and drawn >= part.limit else part.weight / size
            for part, drawn in zip(self.parts, before, strict=True)
            for size in [part.dataset.tokens_per_sample]
        ]
        ends = [round(_TURN * (sum(rates[: i + 1]) / sum(rates))) for i in range(len(rates))]
        for part, rate, end, begin in zip(self.parts, rates, ends, [0, *ends], strict=False):
            if rate and end == begin:
                raise ValueError(
                    f"data.source: {part.name} has the weight {part.weight:g}, which is too small"
                    f" for any sample: leave it out, or increase it"
                )
        return tuple(ends)

    def _next(self, stage: _Stage) -> _Stage | None:
        """The stage that begins where a source reaches its limit; None: none will."""
        ends = [
            self._reached(stage, source, part.limit - stage.before[source])
            for source, part in enumerate(self.parts)
            if part.limit is not None and part.limit > stage.before[source]
        ]
        if not ends:
            return None
        length = min(ends)
        before = tuple(x + self._drawn(stage, i, length) for i, x in enumerate(stage.before))
        return _Stage(stage.start + length, before, self._intervals(before))

    def _reached(self, stage: _Stage, source: int, count: int) -> int:
        """The least number of draws of a stage of which `count` go to `source`."""
        draws = range(2**62)
        return bisect_left(draws, count, key=lambda num: self._drawn(stage, source, num))

    def _drawn(self, stage: _Stage, source: int, count: int) -> int:
        """Of the first `count` draws of a stage, those that go to `source`."""
        first = (stage.start * _STEP + self._offset) % _TURN
        begin = stage.ends[source - 1] if source else 0
        # x lies below `end` where floor(x / turn) and floor((x - end) / turn) differ.
        return _floor_sum(count, first - begin + _TURN) - _floor_sum(
            count, first - stage.ends[source] + _TURN
        )


def _floor_sum(n: int, offset: int) -> int:
    """The sum of floor((i * step + offset) / turn) over i in range(n), for offset >= 0.

    Source: the floor sum of the AtCoder library, by Euclid's algorithm.
    """
    total, a, b, m = 0, _STEP, offset, _TURN
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        if (top := a * n + b) < m:
            return total
        n, b = divmod(top, m)
        m, a = a, m
