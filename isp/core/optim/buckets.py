"""`BucketManager`: main gradients side by side, in pieces that are summed over the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from isp.core.comm import Channel, Channels, Pending, streams
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis
from isp.core.mesh.partition import chunk_range
from isp.core.torch_private import foreach_copy_
from isp.core.weights.sharded_parameter import ShardedParameter, by_whole

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Bucket",
    "BucketManager",
    "Gradient",
    "copy_all",
    "grouped",
    "master_dtype",
    "pads_little",
]

DEFAULT_BUCKET_BYTES = 25 * 2**20

T = TypeVar("T")


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of main gradients and master weights of a parameter: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def pads_little(num_rows: int, parts: int) -> bool:
    """Whether `parts` as long as the first have at most an eighth more rows."""
    return 8 * parts * math.ceil(num_rows / parts) <= 9 * num_rows


class Bucket:
    """Parameters that travel together, each in `parts` of equal width, the last ones padded.

    What a rank has of all of them is a piece: its part of each, one behind the other.

    [Note: Arrival on streams] On CUDA the first stream to wait brings what has arrived to its
    place, perhaps that of the weight gathers. Whoever waits later, on whatever stream, waits for
    the end of that.
    """

    def __init__(
        self, purpose: Purpose, members: list[ShardedParameter], channel: Channel, parts: int
    ) -> None:
        self.members, self.channel, self.parts = members, channel, parts
        shapes = [member.parameter.shape for member in members]
        self.widths = [math.ceil(shape[0] / parts) * math.prod(shape[1:]) for shape in shapes]
        """Elements of a part of each member."""
        what = "gradients" if purpose is Purpose.REPLICA_GRADIENT else "weights"
        self.tag = Tag(purpose, tensor=f"{what} {members[0].name} .. {members[-1].name}")
        self.pending: Pending | None = None
        """The transfer, from its launch until it is first waited for."""
        self._arrived: streams.Event | None = None

    def wait(self) -> None:
        """Wait until what was launched is there, for this stream too; free if it is."""
        if self.pending is not None:
            found, self.pending = self.pending.wait(), None
            self._arrived = streams.mark(found.device)
        if self._arrived is not None:
            self._arrived.wait()


class GradientBucket(Bucket):
    """Main gradients in one piece of memory, one behind the other, each in its parts.

    There is one part of each where all ranks have all sums, else one for each rank.

    [Note: Packed in place] A reduce-scatter gives a rank one piece, which has to hold its part of
    every parameter. A bucket of several is brought into that order in its own memory before it
    travels: one copy out and one back, of a bucket at a time; a large weight is a bucket of its own
    and is sent as it lies. The sum of a rank's piece takes the place of the piece.
    """

    def __init__(
        self, members: list[ShardedParameter], channel: Channel, parts: int, num_gradients: int
    ) -> None:
        super().__init__(Purpose.REPLICA_GRADIENT, members, channel, parts)
        first = members[0].parameter
        self.flat = torch.zeros(
            parts * sum(self.widths), dtype=master_dtype(first.dtype), device=first.device
        )
        self.num_gradients = self.awaited = num_gradients
        """As many as have to be final: of parameters that travel as one, one; and those not yet."""

    def padded(self) -> tuple[Tensor, ...]:
        """All parts of each member, [p w]."""
        found: tuple[Tensor, ...] = self.flat.split([self.parts * width for width in self.widths])
        return found

    def launch(self, index: int) -> None:
        """Set the sum on its way, of part `index` where it is cut."""
        if self.parts == 1:
            self.pending = self.channel.all_reduce_(self.flat, tag=self.tag)
            return
        pieces = self.flat.view(self.parts, -1)  # [p, L]
        if len(self.widths) > 1:
            pieces.copy_(torch.cat([x.view(self.parts, -1) for x in self.padded()], dim=1))
        self.pending = self.channel.reduce_scatter_into(pieces[index], pieces, tag=self.tag)


@dataclass(slots=True, eq=False)
class Gradient:
    """The main gradient of a parameter, or of several that travel as one."""

    name: str
    view: Tensor
    """In its bucket, of the parameter's shape."""
    part: Tensor
    """This rank's part of it, with its padding, [w]; of a whole that has members, none."""
    bucket: GradientBucket
    ready: bool = False
    """Whether the gradient is final: it may be travelling, hands off."""
    untouched: bool = True
    """Whether the buffer holds the last step's values: the first gradient overwrites."""
    came: bool = False
    """Whether this rank has had a gradient in this step, zeros or not."""
    owed: int = 0
    """Gradients that were promised and have not come."""
    passed: bool = False
    """Whether the last backward pass is through with it."""
    receives: bool = False
    """Whether a promised gradient is being received in the buffer."""
    waiting: Tensor | None = None
    """The sum of what has come meanwhile."""

    def open(self) -> Tensor:
        """Return the buffer, from here on with a gradient of this step."""
        self.untouched, self.came = False, True
        return self.view

    def sum_in(self) -> tuple[Tensor, bool]:
        """The tensor to add the next gradient to, and whether it is the first one there."""
        if not self.receives:
            fresh = self.untouched
            return self.open(), fresh
        if fresh := self.waiting is None:
            self.waiting = torch.empty_like(self.view)
        return self.waiting, fresh

    def value(self) -> Tensor:
        """Return the gradient so far, zeros if none has come."""
        if self.untouched:
            self.view.zero_()
            self.untouched = False
        return self.view


class BucketManager:
    """Main gradients as views into flat buckets, which are summed over the replicas.

    A bucket holds parameters that are reduced over the same axis, about `bucket_bytes` of them, in
    reverse order of declaration: the order in which a backward pass produces their gradients. It
    may travel once all of them are `mark_ready`, and the rest goes in `finish`. Parameters that
    travel as one lie one behind the other, and their whole has a place, too.

    With `rows_of`, a channel, each of its ranks needs the sums of its own rows alone, its
    `chunk_range`. What is reduced over these very ranks is reduce-scattered then, which moves half
    the bytes; but for parameters of so few rows that equal parts of them would take much more
    memory.

    [Note: Some of the replicas] Where `rows_of` are not all the ranks that are summed over, all get
    all sums. A reduce-scatter among some and an all-reduce across them would move less, too, but
    costs a communicator more, and a second transfer for every bucket.

    [Note: Launch order] Buckets are launched strictly in their order, whatever order they become
    ready in: the ranks' readiness may differ (a parameter that one of them did not use), and
    collectives that meet in different orders deadlock or add up different things.
    """

    def __init__(
        self,
        parameters: Iterable[ShardedParameter],
        channels: Channels,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        rows_of: Channel | None = None,
    ) -> None:
        if bucket_bytes < 0:
            raise ValueError(
                f"bucket_bytes={bucket_bytes} must be at least 0 (0: one parameter a bucket)"
            )
        self._buckets: list[GradientBucket] = []
        self._of: dict[int, Gradient] = {}
        """By the id of the parameter."""
        self._whole_of: dict[int, Gradient] = {}
        """That in which it travels: its own, if it does so by itself."""
        self._launched = 0
        self._rows_of = Channel.solo()
        if rows_of is not None and rows_of.size == channels[Axis.WEIGHT_DATA].size:
            self._rows_of = rows_of  # [Note: Some of the replicas]
        units = [
            (whole, members, self._parts_of(members, channels))
            for whole, members in by_whole(parameters).items()
        ]

        def kind(unit: _Unit) -> Hashable:
            whole, _, parts = unit
            dtype, device = master_dtype(whole.parameter.dtype), whole.parameter.device
            return parts, whole.layout.reduce_over, dtype, device

        def num_bytes(unit: _Unit) -> int:
            parameter = unit[0].parameter
            return parameter.numel() * master_dtype(parameter.dtype).itemsize

        for found in grouped(reversed(units), kind, num_bytes, bucket_bytes):
            self._open(found, channels)
        self.gradients = [self._of[id(whole.parameter)] for whole, *_ in units]
        """As many as come: one of those that travel as one."""

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.flat.nbytes for bucket in self._buckets)

    @property
    def memory(self) -> list[Tensor]:
        """All memory of main gradients."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def received_bytes(self) -> int:
        """Bytes of the other ranks' parts that are on their way, where they are added up here."""
        return sum(
            bucket.flat.nbytes
            for bucket in self._buckets
            if bucket.pending is not None and bucket.parts > 1 and bucket.channel.sums_locally
        )

    @property
    def scatters(self) -> bool:
        """Whether ranks may have the sums of their own rows alone; the same on all ranks."""
        return self._rows_of.size > 1

    def of(self, parameter: nn.Parameter) -> Gradient:
        """The gradient of `parameter`, or of what several travel in."""
        return self._of[id(parameter)]

    def rows(self, gradient: Gradient) -> Tensor:
        """The sums of the rows that this rank owns, once they are there: [n, ..]."""
        count, *rest = gradient.view.shape
        rows = chunk_range(count, self._rows_of.size, self._rows_of.rank)
        if gradient.bucket.parts == 1:
            return gradient.view[rows.start : rows.stop]
        own = (len(rows), *rest)
        return gradient.part[: math.prod(own)].view(own)

    def all_rows(self, gradient: Gradient) -> Tensor:
        """All sums, those of other ranks' rows from them: a collective."""
        bucket, view = gradient.bucket, gradient.view
        if bucket.parts == 1:
            return view
        gathered = bucket.channel.all_gather(gradient.part, tag=bucket.tag).wait()
        return gathered[: view.numel()].view(view.shape)

    def mark_ready(self, gradient: Gradient) -> None:
        """The gradient is final; launches every bucket whose turn it is [Note: Launch order]."""
        if not gradient.ready:
            gradient.ready = True
            gradient.bucket.awaited -= 1
        while self._launched < len(self._buckets) and not self._buckets[self._launched].awaited:
            self._launch_next()

    def finish(self) -> None:
        """Launch what has not been launched, ready or not, and wait until all sums are there."""
        while self._launched < len(self):
            self._launch_next()
        self.wait()

    def wait(self) -> None:
        """Wait for the reductions in flight."""
        for bucket in self._buckets:
            bucket.wait()

    def reset(self) -> None:
        """Await every gradient anew; the values stay until the first comes."""
        self.wait()
        self._launched = 0
        for bucket in self._buckets:
            bucket.awaited = bucket.num_gradients
        for gradient in self.gradients:
            gradient.ready, gradient.untouched, gradient.passed = False, True, False
            gradient.came = False

    def _launch_next(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.launch(self._rows_of.rank)

    def _parts_of(self, members: list[ShardedParameter], channels: Channels) -> int:
        """The ranks that have sums of some rows each, of all that are added up; 1: all have all.

        Between several that travel as one there may be no padding.
        """
        size = channels[members[0].layout.reduce_over].size
        rows = [item.parameter.shape[0] for item in members]
        few = pads_little(rows[0], size) if len(rows) == 1 else not any(n % size for n in rows)
        return size if size == self._rows_of.size and few else 1

    def _open(self, units: list[_Unit], channels: Channels) -> None:
        members = [item for _, of_one, _ in units for item in of_one]
        parts, channel = units[0][2], channels[members[0].layout.reduce_over]
        bucket = GradientBucket(members, channel, parts, len(units))
        piece = bucket.flat.view(parts, -1)[self._rows_of.rank if parts > 1 else 0]
        cut = zip(members, bucket.padded(), piece.split(bucket.widths), strict=True)
        for item, padded, part in cut:
            self._place(item, padded, part, bucket)
        for whole, of_one, _ in units:
            if whole not in of_one:
                begin = self.of(of_one[0].parameter).view.storage_offset()
                self._place(whole, bucket.flat[begin:], bucket.flat[:0], bucket)
            for item in (whole, *of_one):
                self._whole_of[id(item.parameter)] = self.of(whole.parameter)
        self._buckets.append(bucket)

    def _place(
        self, item: ShardedParameter, flat: Tensor, part: Tensor, bucket: GradientBucket
    ) -> None:
        """Let the gradient of a parameter begin where `flat` does."""
        view = flat[: item.parameter.numel()].view(item.parameter.shape)
        self._of[id(item.parameter)] = Gradient(item.name, view, part, bucket)


_Unit = tuple[ShardedParameter, list[ShardedParameter], int]
"""What has one gradient, the parameters that it consists of, and the ranks that have sums of some
rows each."""


def grouped(
    items: Iterable[T],
    kind: Callable[[T], Hashable],
    size: Callable[[T], float],
    bucket_size: float,
) -> list[list[T]]:
    """Items of one kind together, until they are `bucket_size`: first what is that much, and both
    this and the rest in the order of the last item of each."""
    opened: dict[Hashable, list[T]] = {}
    closed: list[list[T]] = []
    for item in items:
        key = kind(item)
        members = opened[key] = [*opened.pop(key, ()), item]
        if sum(map(size, members)) >= bucket_size:
            closed.append(opened.pop(key))
    return closed + list(opened.values())


def copy_all(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first of each pair the second."""
    if pairs := list(copies):
        foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
