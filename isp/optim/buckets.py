"""`BucketManager`: main gradients side by side, in pieces that are summed over the replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from isp.comm import Channel, Pending
from isp.comm.tag import Purpose, Tag
from isp.optim.rows import DEFAULT_BUCKET_BYTES, owned_rows, pads_little
from isp.parallel import Axis
from isp.weights.parameter import ShardedParameter, by_whole

__all__ = ["BucketManager", "Channels", "Place", "master_dtype"]


class Channels(Protocol):
    """Lookup of a channel for every axis asked for: a `Mesh`, or a dict."""

    def __getitem__(self, axis: Axis, /) -> Channel: ...


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of main gradients and master weights of a parameter: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True, eq=False)
class Place:
    """The place of a parameter's gradient."""

    view: Tensor
    """In its bucket, of the parameter's shape."""
    part: Tensor
    """This rank's part of it, with its padding, [w]; of a whole that has members, none."""
    bucket: _GradientBucket
    ready: bool = False
    """Whether the gradient is final: it may be travelling, hands off."""


@dataclass(eq=False)
class _GradientBucket:
    """Gradients that travel together: parameters one behind the other, each in p equal parts.

    p is the number of ranks that have the sums of some rows each, and 1 where all have all.

    [Note: Packed in place] A reduce-scatter gives a rank one piece, which has to hold its part of
    every parameter. A bucket of several is brought into that order in its own memory before it
    travels: one copy out and one back, of a bucket at a time; a large weight is a bucket of its own
    and is sent as it lies. The sum of a rank's piece takes the place of the piece.
    """

    flat: Tensor
    channel: Channel
    tag: Tag
    widths: list[int]
    """Elements of a part of each parameter, in order."""
    parts: int
    num_gradients: int
    """As many as have to be final: of parameters that travel as one, one."""
    awaited: int = 0
    """Gradients that are not final yet."""
    pending: Pending | None = None
    """The reduction, from its launch until the next `reset`."""

    @property
    def sizes(self) -> list[int]:
        """Elements of all parts of each parameter, with their padding."""
        return [self.parts * width for width in self.widths]

    def launch(self, index: int) -> None:
        """Set the sum on its way, of part `index` where it is cut."""
        if self.parts == 1:
            self.pending = self.channel.all_reduce_(self.flat, tag=self.tag)
            return
        pieces = self.flat.view(self.parts, -1)  # [p, L]
        if len(self.widths) > 1:
            members = [x.view(self.parts, -1) for x in self.flat.split(self.sizes)]
            pieces.copy_(torch.cat(members, dim=1))
        self.pending = self.channel.reduce_scatter_into(pieces[index], pieces, tag=self.tag)


class BucketManager:
    """Main gradients as views into flat buckets, which are summed over the replicas.

    A bucket holds parameters that are reduced over the same axis, about `bucket_bytes` of them, in
    reverse order of declaration: the order in which a backward pass produces their gradients. It
    may travel once all of them are `mark_ready`, and the rest goes in `finish`. Parameters that
    travel as one lie one behind the other, and their whole has a place, too.

    With `rows_of`, a channel, each of its ranks needs the sums of its `owned_rows` alone. What is
    reduced over these very ranks is reduce-scattered then, which moves half the bytes; but for
    parameters of so few rows that equal parts of them would take much more memory.

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
        self._buckets: list[_GradientBucket] = []
        self._places: dict[int, Place] = {}
        """By the id of the parameter."""
        self._launched = 0
        self._rows_of = Channel.solo()
        if rows_of is not None and rows_of.size == channels[Axis.WEIGHT_DATA].size:
            self._rows_of = rows_of  # [Note: Some of the replicas]
        of_kinds = [
            (self._parts_of(members, channels), whole, members)
            for whole, members in by_whole(parameters).items()
        ]
        for parts, units in _grouped(of_kinds, bucket_bytes):
            self._open(units, parts, channels)

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.flat.nbytes for bucket in self._buckets)

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

    def place(self, parameter: nn.Parameter) -> Place:
        """The place of the gradient of `parameter`, or of what several travel in."""
        return self._places[id(parameter)]

    def rows(self, place: Place) -> Tensor:
        """The sums of the rows that this rank owns, once they are there: [n, ..]."""
        count, *rest = place.view.shape
        start, stop = owned_rows(count, self._rows_of.size, self._rows_of.rank)
        if place.bucket.parts == 1:
            return place.view[start:stop]
        own = (stop - start, *rest)
        return place.part[: math.prod(own)].view(own)

    def whole(self, place: Place) -> Tensor:
        """All sums, those of other ranks' rows from them: a collective."""
        bucket, view = place.bucket, place.view
        if bucket.parts == 1:
            return view
        gathered = bucket.channel.all_gather(place.part, tag=bucket.tag).wait()
        return gathered[: view.numel()].view(view.shape)

    def mark_ready(self, place: Place) -> None:
        """The gradient is final; launches every bucket whose turn it is [Note: Launch order]."""
        if not place.ready:
            place.ready = True
            place.bucket.awaited -= 1
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
            if bucket.pending is not None:
                bucket.pending.wait()

    def reset(self) -> None:
        """Await every gradient anew; the values stay."""
        self.wait()
        self._launched = 0
        for bucket in self._buckets:
            bucket.pending, bucket.awaited = None, bucket.num_gradients
        for place in self._places.values():
            place.ready = False

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

    def _open(self, units: list[_Unit], parts: int, channels: Channels) -> None:
        members = [item for _, of_one in units for item in of_one]
        first = members[0]
        channel = channels[first.layout.reduce_over]
        shapes = [item.parameter.shape for item in members]
        widths = [math.ceil(shape[0] / parts) * math.prod(shape[1:]) for shape in shapes]
        bucket = _GradientBucket(
            flat=torch.zeros(
                parts * sum(widths),
                dtype=master_dtype(first.parameter.dtype),
                device=first.parameter.device,
            ),
            channel=channel,
            tag=Tag(
                Purpose.REPLICA_GRADIENT, tensor=f"gradients {first.name} .. {members[-1].name}"
            ),
            widths=widths,
            parts=parts,
            num_gradients=len(units),
            awaited=len(units),
        )
        piece = bucket.flat.view(parts, -1)[self._rows_of.rank if parts > 1 else 0]
        cut = zip(members, bucket.flat.split(bucket.sizes), piece.split(widths), strict=True)
        for item, padded, part in cut:
            self._places[id(item.parameter)] = Place(_shaped(padded, item), part, bucket)
        for whole, of_one in units:
            if whole not in of_one:
                begin = self._places[id(of_one[0].parameter)].view.storage_offset()
                view = _shaped(bucket.flat[begin:], whole)
                self._places[id(whole.parameter)] = Place(view, view[:0], bucket)
        self._buckets.append(bucket)


def _shaped(numbers: Tensor, item: ShardedParameter) -> Tensor:
    """The first of them, in the shape of a parameter."""
    return numbers[: item.parameter.numel()].view(item.parameter.shape)


_Unit = tuple[ShardedParameter, list[ShardedParameter]]
"""What has one gradient, and the parameters that it consists of."""
_Bucket = tuple[int, list[_Unit]]
"""Ranks that have sums of some rows each, and what has gradients."""


def _grouped(
    parameters: list[tuple[int, ShardedParameter, list[ShardedParameter]]], bucket_bytes: int
) -> list[_Bucket]:
    """The gradients of each bucket; buckets in the order in which their last gradients come."""
    _Kind = tuple[int, Axis, torch.dtype, torch.device]
    open_buckets: dict[_Kind, list[_Unit]] = {}
    num_bytes: dict[_Kind, int] = {}
    closed: list[_Bucket] = []
    for parts, item, members in reversed(parameters):
        dtype = master_dtype(item.parameter.dtype)
        key = (parts, item.layout.reduce_over, dtype, item.parameter.device)
        open_buckets.setdefault(key, []).append((item, members))
        num_bytes[key] = num_bytes.get(key, 0) + item.parameter.numel() * dtype.itemsize
        if num_bytes[key] >= bucket_bytes:
            closed.append((parts, open_buckets.pop(key)))
            del num_bytes[key]
    place = {item.parameter: i for i, (_, item, _) in enumerate(reversed(parameters))}
    rest = [(key[0], units) for key, units in open_buckets.items()]
    return closed + sorted(rest, key=lambda bucket: place[bucket[1][-1][0].parameter])
