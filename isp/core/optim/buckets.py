"""`BucketManager`: main gradients in flat buckets, which are summed over replicas."""

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
    "MainGradient",
    "copy_all",
    "grouped",
    "master_dtype",
    "pads_little",
]

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Size of a bucket, as in torch's DistributedDataParallel."""

T = TypeVar("T")


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter's main gradient and master weights: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def pads_little(num_rows: int, parts: int) -> bool:
    """Return True if padding `num_rows` to `parts` equal parts adds at most an eighth."""
    return 8 * parts * math.ceil(num_rows / parts) <= 9 * num_rows


class Bucket:
    """Parameters that are communicated together, each divided into `parts` of equal width.

    The last parts are padded. Rank i of the channel gets part i of each parameter.
    """

    def __init__(
        self, purpose: Purpose, members: list[ShardedParameter], channel: Channel, parts: int
    ) -> None:
        self.members, self.channel, self.parts = members, channel, parts
        shapes = [member.parameter.shape for member in members]
        self.widths = [math.ceil(shape[0] / parts) * math.prod(shape[1:]) for shape in shapes]
        """Number of elements of a part, for each member."""
        what = "gradients" if purpose is Purpose.REPLICA_GRADIENT else "weights"
        self.tag = Tag(purpose, tensor=f"{what} {members[0].name} .. {members[-1].name}")
        self.pending: Pending | None = None
        """The transfer in flight, from its launch until the first wait."""
        self._arrived: streams.Event | None = None
        """Event after which the transfer's result is unpacked."""

    def wait(self) -> None:
        """Wait for the launched transfer, and make the current stream wait; cheap if it is done."""
        # The first stream that waits also unpacks the result. This may be the stream of weight
        # gathers, so each stream that waits later must wait until the result is unpacked.
        if self.pending is not None:
            found, self.pending = self.pending.wait(), None
            self._arrived = streams.mark(found.device)
        if self._arrived is not None:
            self._arrived.wait()


class GradientBucket(Bucket):
    """Main gradients in one flat tensor, which are summed over the ranks in one transfer.

    If every rank gets all sums, by an all-reduce, a gradient is one part. If a rank gets only the
    sums of its own rows, by a reduce-scatter, a gradient is divided into one part for each rank.
    See [Note: Packed in place] in docs/design/notes/optimizer.md.
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
        """`num_gradients`: number of gradients in the bucket (fused parameters have one).
        `awaited`: number of gradients that are not final yet."""

    def padded(self) -> tuple[Tensor, ...]:
        """Return a view [p w] of each member's gradient: all parts, with padding."""
        found: tuple[Tensor, ...] = self.flat.split([self.parts * width for width in self.widths])
        return found

    def launch(self, index: int) -> None:
        """Launch the sum over the ranks.

        If the gradients are divided into parts, this rank gets the sums of part `index`.
        """
        if self.parts == 1:
            self.pending = self.channel.all_reduce_(self.flat, tag=self.tag)
            return
        pieces = self.flat.view(self.parts, -1)  # [p, L]
        # A reduce-scatter sends contiguous pieces, so first copy the part of each gradient for a
        # rank next to the other parts for this rank [Note: Packed in place].
        if len(self.widths) > 1:
            pieces.copy_(torch.cat([x.view(self.parts, -1) for x in self.padded()], dim=1))
        # Into this rank's own piece, without a second buffer; the other pieces stay unsummed.
        self.pending = self.channel.reduce_scatter_into(pieces[index], pieces, tag=self.tag)


@dataclass(slots=True, eq=False)
class MainGradient:
    """The main gradient of a parameter, or of a fused parameter (several that have one gradient).

    A fused parameter, such as q, k and v, is reduced as one; its parts have views of its gradient.
    """

    name: str
    """Name of the parameter."""
    view: Tensor
    """The buffer, a view of the bucket in the parameter's shape."""
    part: Tensor
    """This rank's part of the gradient, [w] with padding; empty for a fused parameter."""
    bucket: GradientBucket
    """The bucket that contains the buffer."""
    ready: bool = False
    """True if the gradient is final. Do not touch it: a reduction may be in flight."""
    untouched: bool = True
    """True if the buffer has the last step's values: the first gradient overwrites them."""
    has_gradient: bool = False
    """True if this rank has had a gradient in this step, even if of zeros."""
    open_promises: int = 0
    """Number of gradients that were promised and not delivered yet."""
    passed: bool = False
    """True if the step's last backward pass has accumulated its gradient."""
    receives: bool = False
    """True if a promised gradient is being received in the buffer."""
    waiting: Tensor | None = None
    """Sum of the gradients that were added while the buffer receives another; None: none were."""

    def open(self) -> Tensor:
        """Return the buffer, and mark it as holding a gradient of this step."""
        self.untouched, self.has_gradient = False, True
        return self.view

    def sum_in(self) -> tuple[Tensor, bool]:
        """Return the tensor to add the next gradient to, and True if it must be overwritten."""
        if not self.receives:
            fresh = self.untouched
            return self.open(), fresh
        # A reduction writes into the buffer: other gradients are summed in another tensor.
        if fresh := self.waiting is None:
            self.waiting = torch.empty_like(self.view)
        return self.waiting, fresh

    def value(self) -> Tensor:
        """Return the gradient so far: zeros if there was none in this step."""
        if self.untouched:
            self.view.zero_()
            self.untouched = False
        return self.view


class BucketManager:
    """Main gradients as views into flat buckets, which are summed over replicas.

    A bucket has about `bucket_bytes` of parameters that are reduced over the same axis, in reverse
    order of declaration: the order in which a backward pass produces their gradients. Its sum is
    launched when `mark_ready` was called for all of them, at the latest in `finish`, and always in
    the same order of buckets [Note: Launch order]. The parameters of a fused parameter are
    consecutive, and the fused parameter has a gradient, too.

    With the channel `rows_of`, each of its ranks needs only the sums of its own rows, its
    `chunk_range`. Gradients that are reduced over exactly these ranks are then reduce-scattered,
    which sends half the bytes, except parameters with so few rows that padding them to equal parts
    would take much more memory. See [Note: Some of the replicas] in
    docs/design/notes/optimizer.md.
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
        self._of: dict[int, MainGradient] = {}
        """The gradient of each parameter and fused parameter, by its `id`."""
        self._whole_of: dict[int, MainGradient] = {}
        """The gradient that is reduced for each parameter, by its `id`: its own, or that of the
        fused parameter that contains it."""
        self._launched = 0
        """Number of buckets launched in this step."""
        # If `rows_of` has only some of the ranks that gradients are summed over, all ranks get all
        # sums, by an all-reduce [Note: Some of the replicas].
        self._rows_of = Channel.solo()
        if rows_of is not None and rows_of.size == channels[Axis.WEIGHT_DATA].size:
            self._rows_of = rows_of
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

        # Reversed, because backward produces gradients in about this order: full buckets early.
        for found in grouped(reversed(units), kind, num_bytes, bucket_bytes):
            self._open(found, channels)
        self.gradients = [self._of[id(whole.parameter)] for whole, *_ in units]
        """The gradients that are reduced, in order of declaration; a fused parameter has one."""

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.flat.nbytes for bucket in self._buckets)

    @property
    def memory(self) -> list[Tensor]:
        """The flat tensors of all buckets."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def received_bytes(self) -> int:
        """Bytes of buffers that receive gradients of other ranks now.

        Only a channel that `sums_locally` needs them: it receives the gradients of all ranks, and
        sums them on this rank.
        """
        return sum(
            bucket.flat.nbytes
            for bucket in self._buckets
            if bucket.pending is not None and bucket.parts > 1 and bucket.channel.sums_locally
        )

    @property
    def scatters(self) -> bool:
        """True if gradients are reduce-scattered, so that a rank gets the sums of its own rows.

        It is the same on all ranks. Parameters with few rows are all-reduced in either case.
        """
        return self._rows_of.size > 1

    def of(self, parameter: nn.Parameter) -> MainGradient:
        """Return the gradient of a parameter or fused parameter."""
        return self._of[id(parameter)]

    def rows(self, gradient: MainGradient) -> Tensor:
        """Return a view [n, ..] of the sums of this rank's rows; valid after the reduction."""
        count, *rest = gradient.view.shape
        rows = chunk_range(count, self._rows_of.size, self._rows_of.rank)
        if gradient.bucket.parts == 1:
            return gradient.view[rows.start : rows.stop]
        own = (len(rows), *rest)
        return gradient.part[: math.prod(own)].view(own)

    def all_rows(self, gradient: MainGradient) -> Tensor:
        """Return the sums of all rows of a gradient, also of those that other ranks have.

        This is a collective if the bucket was reduce-scattered.
        """
        bucket, view = gradient.bucket, gradient.view
        if bucket.parts == 1:
            return view
        gathered = bucket.channel.all_gather(gradient.part, tag=bucket.tag).wait()
        # The parts are in the order of rows, so all padding is at the end.
        return gathered[: view.numel()].view(view.shape)

    def mark_ready(self, gradient: MainGradient) -> None:
        """Mark a gradient as final, and launch the buckets that are complete and next in order.

        See [Note: Launch order] in docs/design/notes/optimizer.md.
        """
        if not gradient.ready:
            gradient.ready = True
            gradient.bucket.awaited -= 1
        while self._launched < len(self._buckets) and not self._buckets[self._launched].awaited:
            self._launch_next()

    def finish(self) -> None:
        """Launch the remaining buckets, complete or not, and wait for all sums."""
        while self._launched < len(self):
            self._launch_next()
        self.wait()

    def wait(self) -> None:
        """Wait for the reductions in flight."""
        for bucket in self._buckets:
            bucket.wait()

    def reset(self) -> None:
        """Begin a step: no gradient is final; first gradients will overwrite old values."""
        self.wait()
        self._launched = 0
        for bucket in self._buckets:
            bucket.awaited = bucket.num_gradients
        for gradient in self.gradients:
            gradient.ready, gradient.untouched, gradient.passed = False, True, False
            gradient.has_gradient = False

    def _launch_next(self) -> None:
        """Launch the next bucket in the fixed order."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.launch(self._rows_of.rank)

    def _parts_of(self, members: list[ShardedParameter], channels: Channels) -> int:
        """Return the number of parts of a (fused) parameter; 1: every rank gets all sums.

        The parameters of a fused parameter must be contiguous, so none of them may be padded.
        """
        size = channels[members[0].layout.reduce_over].size
        rows = [item.parameter.shape[0] for item in members]
        few = pads_little(rows[0], size) if len(rows) == 1 else not any(n % size for n in rows)
        return size if size == self._rows_of.size and few else 1

    def _open(self, units: list[_Unit], channels: Channels) -> None:
        """Make a bucket of these units, with a gradient for each parameter and fused parameter."""
        members = [item for _, of_one, _ in units for item in of_one]
        parts, channel = units[0][2], channels[members[0].layout.reduce_over]
        bucket = GradientBucket(members, channel, parts, len(units))
        # After a reduce-scatter, this rank's piece consists of its part of each member.
        piece = bucket.flat.view(parts, -1)[self._rows_of.rank if parts > 1 else 0]
        cut = zip(members, bucket.padded(), piece.split(bucket.widths), strict=True)
        for item, padded, part in cut:
            self._place(item, padded, part, bucket)
        for whole, of_one, _ in units:
            if whole not in of_one:
                # The gradient of a fused parameter: the buffers of its parameters are consecutive
                # and not padded, so one view of `flat` covers them.
                begin = self.of(of_one[0].parameter).view.storage_offset()
                self._place(whole, bucket.flat[begin:], bucket.flat[:0], bucket)
            for item in (whole, *of_one):
                self._whole_of[id(item.parameter)] = self.of(whole.parameter)
        self._buckets.append(bucket)

    def _place(
        self, item: ShardedParameter, flat: Tensor, part: Tensor, bucket: GradientBucket
    ) -> None:
        """Make the gradient of a parameter, with a buffer at the beginning of `flat`."""
        view = flat[: item.parameter.numel()].view(item.parameter.shape)
        self._of[id(item.parameter)] = MainGradient(item.name, view, part, bucket)


_Unit = tuple[ShardedParameter, list[ShardedParameter], int]
"""A parameter or fused parameter, the parameters that it consists of (itself, if it is not fused),
and the number of parts that its gradient is reduced in."""


def grouped(
    items: Iterable[T],
    kind: Callable[[T], Hashable],
    size: Callable[[T], float],
    bucket_size: float,
) -> list[list[T]]:
    """Divide `items`, such as parameters, into buckets of items of the same `kind`, in order.

    A bucket is full when the sizes of its items add up to `bucket_size` or more.

    Full buckets come first, in the order in which they became full, then the others, in the order
    of their last items.
    """
    opened: dict[Hashable, list[T]] = {}
    closed: list[list[T]] = []
    for item in items:
        key = kind(item)
        members = opened[key] = [*opened.pop(key, ()), item]
        if sum(map(size, members)) >= bucket_size:
            closed.append(opened.pop(key))
    return closed + list(opened.values())


def copy_all(copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy all (target, source) pairs of tensors, source into target, in one call of torch."""
    if pairs := list(copies):
        foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
