"""`MixedDataset`: samples from several sources, each with its share of the tokens.

Which source a sample comes from, and its index there, are computed from its index: no state is
needed. See [Note: Mixtures] in docs/design/notes/data.md.
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
"""About `_RANGE` divided by the golden ratio, which spreads its multiples evenly; odd, so that they
reach every number below `_RANGE`."""


class MixedPart(NamedTuple):
    """A source in a mixture; its share of the tokens is proportional to `weight`."""

    name: str
    dataset: Dataset
    weight: float
    epochs: float | None = None
    """Number of epochs over the source after which it is left out; None: no limit."""

    @property
    def limit(self) -> int | None:
        """Largest number of samples to draw from the source; None: no limit."""
        if self.epochs is None:
            return None
        return max(1, round(self.epochs * self.dataset.samples_per_epoch))


class _Stage(NamedTuple):
    """Consecutive samples of a mixture that are drawn with the same shares."""

    start: int
    """Index of the first sample of the stage."""
    before: tuple[int, ...]
    """Number of samples that earlier stages drew from each source."""
    ends: tuple[int, ...]
    """For each source, the end of its interval in [0, `_RANGE`); it begins where that of the source
    before ends. A sample is drawn from the source in whose interval its number is. A source that
    has reached its limit has an empty interval."""


class MixedDataset:
    """Samples drawn from `parts` by their weights; sample i is a function of these, `seed` and i.

    At least one part must have no limit. Raises ValueError for a weight so small that no sample
    would come from its source.
    """

    def __init__(self, parts: Sequence[MixedPart], *, seed: int) -> None:
        assert any(part.limit is None for part in parts)
        self.parts = parts
        self._offset = hashed(seed) % _RANGE
        self.pack = parts[0].dataset.pack
        self.samples_per_epoch = sum(part.dataset.samples_per_epoch for part in parts)
        # Nothing reads this attribute of a mixture: a mixture reads that of its parts, and no part
        # is itself a mixture.
        self.tokens_per_sample = 0.0
        self._stages = [_Stage(0, (0,) * len(parts), self._intervals([0] * len(parts)))]
        # There is at most one more stage for each source with a limit.
        while (after := self._next(self._stages[-1])) is not None:
            self._stages.append(after)

    @property
    def summary(self) -> str:
        """A log line for each source: its wanted share of the samples, and its name and size."""
        total = sum(part.weight for part in self.parts)
        return f"\n{'':12}".join(
            f"wanted {p.weight / total:.1%}, {p.dataset.summary}" for p in self.parts
        )

    def sample(self, index: int) -> Sample:
        """Return sample `index` >= 0 of the mixture."""
        source, number = self.place(index)
        return self.parts[source].dataset.sample(number)

    def place(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and the index of the sample in that source."""
        stage = self._stage(index)
        source = bisect_right(stage.ends, (index * _STEP + self._offset) % _RANGE)
        return source, stage.before[source] + self._drawn(stage, source, index - stage.start)

    def shares(self, num_samples: int) -> str:
        """Return each source's share of the tokens in the first `num_samples`, as text."""
        pairs = list(zip(self.parts, self._counts(num_samples), strict=True))
        total = sum(count * part.dataset.tokens_per_sample for part, count in pairs)
        return ", ".join(
            f"{part.name} {count * part.dataset.tokens_per_sample / total:.2%} of tokens"
            + (f" ({count / size:.2f} epochs)" if (size := part.dataset.samples_per_epoch) else "")
            for part, count in pairs
        )

    def tell(self, index: int) -> list[list[int]]:
        """Return the place in each streamed source at which sample `index` begins."""
        pairs = zip(self._streams, self._counts(index), strict=True)
        return [stream.tell(count) for stream, count in pairs]

    def seek(self, index: int, places: Sequence[Sequence[int]]) -> None:
        """Go to `places` in the streamed sources, the result of `tell(index)`."""
        triples = zip(self._streams, self._counts(index), places, strict=True)
        for stream, count, place in triples:
            stream.seek(count, place)

    @property
    def _streams(self) -> list[StreamDataset]:
        """The sources that are streamed, which have places to save in checkpoints."""
        return [part.dataset for part in self.parts if isinstance(part.dataset, StreamDataset)]

    def _counts(self, index: int) -> list[int]:
        """Return how many of the samples before `index` come from each source."""
        stage = self._stage(index)
        return [
            before + self._drawn(stage, source, index - stage.start)
            for source, before in enumerate(stage.before)
        ]

    def _stage(self, index: int) -> _Stage:
        """Return the stage that sample `index` is in."""
        return self._stages[bisect_right([s.start for s in self._stages], index) - 1]

    def _intervals(self, before: Sequence[int]) -> tuple[int, ...]:
        """Return the end of each source's interval in a stage.

        `before`: number of samples drawn from each source before the stage. Sources that have
        reached their limit get an empty interval.
        """
        # Weights are shares of tokens, intervals are shares of samples: a source with less padding
        # needs fewer samples for its tokens.
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
        """Return the stage that begins where a source reaches its limit in `stage`; else None."""
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
        """Return after how many samples of a stage `count` samples have come from `source`."""
        draws = range(2**62)  # a range is not stored, and bisection looks at 62 of its numbers
        return bisect_left(draws, count, key=lambda num: self._drawn(stage, source, num))

    def _drawn(self, stage: _Stage, source: int, count: int) -> int:
        """Return how many of the first `count` samples of a stage come from `source`."""
        first = (stage.start * _STEP + self._offset) % _RANGE
        begin = stage.ends[source - 1] if source else 0
        # floor((x - begin) / range) - floor((x - end) / range) is 1 if x mod range is in
        # [begin, end), else 0: its sum over the samples' x counts those from this source. Adding
        # `_RANGE` to both offsets keeps them positive and does not change the difference.
        return _floor_sum(count, first - begin + _RANGE) - _floor_sum(
            count, first - stage.ends[source] + _RANGE
        )


def _floor_sum(n: int, offset: int) -> int:
    """Return the sum of floor((i * _STEP + offset) / _RANGE) over i in range(n), for offset >= 0.

    Source: `floor_sum` of the AtCoder library, by Euclid's algorithm.
    """
    total, a, b, m = 0, _STEP, offset, _RANGE
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)  # take out whole multiples of m
        a, b = a % m, b % m
        if (top := a * n + b) < m:  # all remaining terms are 0
            return total
        # Count the lattice points below the line by columns instead of rows: swap a and m.
        n, b = divmod(top, m)
        m, a = a, m
