"""The rows of a local shard each rank of a zero1 group has, and how they spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isp.comm import Channel, Pending, streams
from isp.comm.tag import Purpose, Tag
from isp.parallel.layout import Interval
from isp.weights.parameter import ShardedParameter

__all__ = ["DEFAULT_BUCKET_BYTES", "Publisher", "owned_rows", "pads_little"]

DEFAULT_BUCKET_BYTES = 25 * 2**20


def owned_rows(num_rows: int, parts: int, index: int) -> Interval:
    """(start, stop) of the rows of part `index`, cut as `torch.chunk` cuts.

    ceil(num_rows / parts) rows each; the last parts have fewer or none.
    """
    chunk = math.ceil(num_rows / parts)
    return min(num_rows, index * chunk), min(num_rows, (index + 1) * chunk)


def pads_little(num_rows: int, parts: int) -> bool:
    """Whether parts as long as the first of `owned_rows` have at most an eighth more rows."""
    return 8 * parts * math.ceil(num_rows / parts) <= 9 * num_rows


class _Slot(NamedTuple):
    """A parameter's place in a publishing bucket: `width` elements of every rank."""

    flat: Tensor  # the whole local shard, [n * row]
    start: int
    width: int

    def packing(self, sent: Tensor, rank: int) -> Iterator[_Copy]:
        """The elements of `rank` into its bucket [L]; what pads the slot is never read."""
        own = self.flat[rank * self.width : (rank + 1) * self.width]  # fewer at the end
        yield sent[self.start : self.start + own.numel()], own

    def unpacking(self, gathered: Tensor) -> Iterator[_Copy]:
        """The elements of all ranks out of gathered [p, L]."""
        if not self.width:
            return
        part = gathered[:, self.start : self.start + self.width]  # [p, width]
        num_full, rest = divmod(self.flat.numel(), self.width)
        whole = self.flat[: num_full * self.width]
        yield whole.view(num_full, self.width), part[:num_full]
        if rest:
            yield self.flat[num_full * self.width :], part[num_full, :rest]


_Copy = tuple[Tensor, Tensor]
"""Where to, and what."""


def _copy(copies: Iterable[_Copy]) -> None:
    if pairs := list(copies):
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


@dataclass(eq=False)
class _WeightBucket:
    """Parameters that are published together, at most once at a time.

    [Note: Arrival on streams] On CUDA the first stream to wait unpacks the bucket, perhaps that
    of the weight gathers. Whoever waits later, on whatever stream, waits for the end of that.
    """

    slots: list[_Slot]
    length: int
    tag: Tag
    pending: Pending | None = None
    arrived: streams.Event | None = None

    def launch(self, channel: Channel) -> Pending:
        sent = self.slots[0].flat.new_empty(self.length)  # [L]
        _copy(copy for slot in self.slots for copy in slot.packing(sent, channel.rank))
        gathered = sent.new_empty(channel.size, self.length)  # [p, L]
        self.pending = channel.all_gather_into(gathered, sent, tag=self.tag).then(self._unpack)
        return self.pending

    def wait(self) -> None:
        """Make the parameters of the bucket usable, for this stream too; free if they are."""
        if self.pending is not None:
            gathered, self.pending = self.pending.wait(), None
            self.arrived = streams.mark(gathered.device)
        if self.arrived is not None:
            self.arrived.wait()

    def _unpack(self, gathered: Tensor) -> Tensor:
        _copy(copy for slot in self.slots for copy in slot.unpacking(gathered))
        return gathered


class Publisher:
    """Brings the rows that each rank owns into the parameters of all ranks of `channel`.

    Buckets of about `bucket_bytes` of parameters, in order of declaration: what the next forward
    pass needs first travels first. Rows are padded to equal slots within a bucket.
    """

    def __init__(
        self,
        parameters: Iterable[ShardedParameter],
        channel: Channel,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._channel = channel
        self._buckets: list[_WeightBucket] = []
        self._bucket_of: dict[nn.Parameter, _WeightBucket] = {}
        self.members = _grouped(parameters, bucket_bytes) if channel.size > 1 else []
        """The parameters of each bucket, in the order in which they travel."""
        for members in self.members:
            self._open(members)

    def launch(self) -> list[Pending]:
        """Start all transfers; a parameter must not be used before its own has been waited for."""
        assert all(b.pending is None or b.pending.waited for b in self._buckets)
        return [bucket.launch(self._channel) for bucket in self._buckets]

    def wait_for(self, parameter: nn.Parameter) -> None:
        """Wait until `parameter` is up to date; free if it is."""
        bucket = self._bucket_of.get(parameter)  # none in a channel of one rank
        if bucket is not None:
            bucket.wait()

    def waits_for(self, parameters: Iterable[nn.Parameter]) -> list[Callable[[], None]]:
        """As `wait_for`, once for each bucket that these are in."""
        found = (self._bucket_of.get(parameter) for parameter in parameters)
        buckets = {id(bucket): bucket for bucket in found if bucket is not None}
        return [bucket.wait for bucket in buckets.values()]

    def wait(self) -> None:
        for bucket in self._buckets:
            bucket.wait()

    def _open(self, members: list[ShardedParameter]) -> None:
        slots, length = [], 0
        for item in members:
            parameter = item.parameter
            if not parameter.is_contiguous():
                raise ValueError(f"{item.name} must be contiguous to be published by rows")
            chunk = math.ceil(parameter.shape[0] / self._channel.size)
            width = chunk * math.prod(parameter.shape[1:])
            slots.append(_Slot(parameter.detach().view(-1), length, width))
            length += width
        what = f"weights {members[0].name} .. {members[-1].name}"
        bucket = _WeightBucket(slots, length, Tag(Purpose.PUBLISHED_WEIGHT, tensor=what))
        self._buckets.append(bucket)
        self._bucket_of.update({member.parameter: bucket for member in members})


def _grouped(
    parameters: Iterable[ShardedParameter], bucket_bytes: int
) -> list[list[ShardedParameter]]:
    """Runs of parameters of one dtype and device, closed when they reach `bucket_bytes`."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[ShardedParameter]] = {}
    buckets = []
    for item in parameters:
        key = (item.parameter.dtype, item.parameter.device)
        members = open_buckets.setdefault(key, [])
        if not members:
            buckets.append(members)
        members.append(item)
        if sum(m.parameter.nbytes for m in members) >= bucket_bytes:
            del open_buckets[key]
    return buckets
