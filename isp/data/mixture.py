"""A mixture of several sources, each with its share of the tokens: `data.source` with weights.

[Note: Mixtures] The range [0, 2^32) is divided into one interval for each source, as long as its
share of the samples. Sample i comes from the source in whose interval
(i * step + offset) mod 2^32 lies. With a step near the golden section, any run of consecutive
samples has these shares to within a few samples. The number of samples before i that came from a
source is a sum of floors, computed in O(log i) steps of Euclid's algorithm. So the source of a
sample, and its index there, are a function of (seed, i): resuming needs no state, and the number of
ranks changes nothing. When a source has come `epochs` times, a new stage begins without it, and the
other sources take over its share.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from isp.data.dataset import Dataset, Sample
from isp.data.stores import hashed
from isp.data.stream import StreamDataset

__all__ = ["MixedDataset", "MixedPart"]

_RANGE = 1 << 32
_STEP = 0x9E3779B1
"""The golden section of `_RANGE`; odd, so that its multiples reach every number of the range."""


class MixedPart(NamedTuple):
    """A source of a mixture; its share of the tokens is proportional to `weight`."""

    name: str
    dataset: Dataset
    weight: float
    epochs: float | None = None
    """Passes over the source after which it is left out; None: no limit."""

    @property
    def limit(self) -> int | None:
        """Largest number of samples to draw from it; None: no limit."""
        if self.epochs is None:
            return None
        return max(1, round(self.epochs * self.dataset.samples_per_epoch))


class _Stage(NamedTuple):
    """A stretch of samples drawn with the same intervals."""

    start: int
    """Index of its first sample."""
    before: tuple[int, ...]
    """Number of samples that earlier stages drew from each source."""
    ends: tuple[int, ...]
    """End of each source's interval, which begins at the one before; empty if it has its limit."""


class MixedDataset:
    """Samples of the mixture of `parts`; sample i is a function of these, `seed` and i.

    At least one part has no limit. Raises ValueError for a weight so small that no sample would
    come from its source.
    """

    def __init__(self, parts: Sequence[MixedPart], *, seed: int) -> None:
        assert any(part.limit is None for part in parts)
        self.parts = parts
        self._offset = hashed(seed) % _RANGE
        self.pack = parts[0].dataset.pack
        self.samples_per_epoch = sum(part.dataset.samples_per_epoch for part in parts)
        self.tokens_per_sample = 0.0  # used only for parts, and a mixture is not part of another
        self._stages = [_Stage(0, (0,) * len(parts), self._intervals([0] * len(parts)))]
        # One more stage for each source with a limit, so this ends.
        while (after := self._next(self._stages[-1])) is not None:
            self._stages.append(after)

    @property
    def summary(self) -> str:
        """One line for each source, indented for the log."""
        total = sum(part.weight for part in self.parts)
        return f"\n{'':12}".join(
            f"wanted {p.weight / total:.1%}, {p.dataset.summary}" for p in self.parts
        )

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0."""
        source, number = self.place(index)
        return self.parts[source].dataset.sample(number)

    def place(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and the index of the sample in that source."""
        stage = self._stage(index)
        source = bisect_right(stage.ends, (index * _STEP + self._offset) % _RANGE)
        return source, stage.before[source] + self._drawn(stage, source, index - stage.start)

    def shares(self, num_samples: int) -> str:
        """Describe the share of each source in the tokens of the first `num_samples`."""
        pairs = list(zip(self.parts, self._counts(num_samples), strict=True))
        total = sum(count * part.dataset.tokens_per_sample for part, count in pairs)
        return ", ".join(
            f"{part.name} {count * part.dataset.tokens_per_sample / total:.2%} of tokens"
            + (f" ({count / size:.2f} epochs)" if (size := part.dataset.samples_per_epoch) else "")
            for part, count in pairs
        )

    def tell(self, index: int) -> list[list[int]]:
        """Return the position of each streamed source at which sample `index` begins."""
        pairs = zip(self._streams, self._counts(index), strict=True)
        return [stream.tell(count) for stream, count in pairs]

    def seek(self, index: int, places: Sequence[Sequence[int]]) -> None:
        """Move the streamed sources to `places`, which `tell(index)` returned."""
        triples = zip(self._streams, self._counts(index), places, strict=True)
        for stream, count, place in triples:
            stream.seek(count, place)

    @property
    def _streams(self) -> list[StreamDataset]:
        return [part.dataset for part in self.parts if isinstance(part.dataset, StreamDataset)]

    def _counts(self, index: int) -> list[int]:
        """Return how many of the samples before `index` came from each source."""
        stage = self._stage(index)
        return [
            before + self._drawn(stage, source, index - stage.start)
            for source, before in enumerate(stage.before)
        ]

    def _stage(self, index: int) -> _Stage:
        return self._stages[bisect_right([s.start for s in self._stages], index) - 1]

    def _intervals(self, before: Sequence[int]) -> tuple[int, ...]:
        """Return the end of each source's interval, given the samples drawn from each `before`.

        Sources at their limit get an empty interval.
        """
        # Intervals are in samples: a source with less padding needs fewer samples for its tokens.
        rates = [
            0.0 if part.limit is not None and drawn >= part.limit else part.weight / size
            for part, drawn in zip(self.parts, before, strict=True)
            for size in [part.dataset.tokens_per_sample]
        ]
        ends = [round(_RANGE * (sum(rates[: i + 1]) / sum(rates))) for i in range(len(rates))]
        for part, rate, end, begin in zip(self.parts, rates, ends, [0, *ends], strict=False):
            if rate and end == begin:
                raise ValueError(
                    f"data.source: {part.name} has the weight {part.weight:g}, which is too small"
                    f" for any sample: leave it out, or increase it"
                )
        return tuple(ends)

    def _next(self, stage: _Stage) -> _Stage | None:
        """Return the stage after `stage`, where the next source reaches its limit, or None."""
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
        """Return the least number of samples of a stage of which `count` come from `source`."""
        draws = range(2**62)  # searched by bisection, never stored
        return bisect_left(draws, count, key=lambda num: self._drawn(stage, source, num))

    def _drawn(self, stage: _Stage, source: int, count: int) -> int:
        """Return how many of the first `count` samples of a stage come from `source`."""
        first = (stage.start * _STEP + self._offset) % _RANGE
        begin = stage.ends[source - 1] if source else 0
        # floor((x - begin) / range) - floor((x - end) / range) is 1 where x mod range lies in
        # [begin, end), and 0 elsewhere. Adding `_RANGE` to both offsets keeps them positive.
        return _floor_sum(count, first - begin + _RANGE) - _floor_sum(
            count, first - stage.ends[source] + _RANGE
        )


def _floor_sum(n: int, offset: int) -> int:
    """Return the sum of floor((i * _STEP + offset) / _RANGE) over i in range(n), for offset >= 0.

    Source: `floor_sum` of the AtCoder library, by Euclid's algorithm.
    """
    total, a, b, m = 0, _STEP, offset, _RANGE
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)  # whole multiples of m
        a, b = a % m, b % m
        if (top := a * n + b) < m:  # all remaining terms are 0
            return total
        # Count the lattice points below the line by columns instead of rows: swap a and m.
        n, b = divmod(top, m)
        m, a = a, m
