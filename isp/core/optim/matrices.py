"""`MatrixUpdates`: rows of momentum become whole matrices on their home ranks, and rows again.

[Note: Homes] A rank of a stage has some rows of each weight, by its place in the weight group and
in the zero1 group, and perhaps as others have them. Of each matrix one rank of the stage is the
home: it receives the rows from a rank that has them, runs Newton-Schulz once, and sends each rank
back what it has. So a rank sends and receives about its own rows, and no product is computed twice.
The most expensive first, each to the rank with the least work, decides how many matrices of a cost
a rank has; which ones, is chosen in the same way bucket by bucket, so that ranks are alike far at
all times. Every rank computes this for itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from isp.core.comm import Channel, Channels, Pending
from isp.core.comm.tag import Purpose, Tag
from isp.core.mesh import Axis
from isp.core.mesh.boxes import Box, boxes_of
from isp.core.mesh.layout import ParameterLayout
from isp.core.mesh.partition import chunk_range
from isp.core.optim.buckets import copy_all, grouped
from isp.core.optim.config import OptimizerConfig
from isp.core.optim.newton_schulz import Matrix, make_orthogonal, matrices_of
from isp.core.optim.states import Bucket, Resting, StateStream, by_values
from isp.core.optim.update_rules import GroupValues, Rows
from isp.core.torch_private import foreach_mul_
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = ["MatrixUpdates", "in_turn"]

Update = Callable[[GroupValues, Rows], None]

_DEPTH = 3
"""Buckets on their way to homes while one is multiplied, and buckets on their way back. With fewer,
a rank that has little of a bucket to multiply would wait for those that have much of it."""


class _Part(NamedTuple):
    """What of a matrix travels between the home and one rank."""

    rank: int
    """The other one."""
    at: int
    """The number of the member whose rows, or of the matrix whose block it is."""
    box: Box
    """With its place in these."""


class _Stage(NamedTuple):
    """The ranks of a stage, and which rows they have: those of a place in two groups."""

    channel: Channel
    weight: int
    """Ranks of a weight group."""
    zero1: int

    def place(self, layout: ParameterLayout, rank: int) -> tuple[int, int]:
        """The shard, and the part of its rows, that a rank has."""
        replica, index = divmod(rank, self.weight)
        return index if layout.sharded else 0, replica % self.zero1

    def ranks(self, layout: ParameterLayout, place: tuple[int, int]) -> list[int]:
        """Those that have the rows of a place."""
        replicas = range(place[1], self.channel.size // self.weight, self.zero1)
        indices = [place[0]] if layout.sharded else range(self.weight)
        return [replica * self.weight + index for replica in replicas for index in indices]

    def boxes(self, layout: ParameterLayout, place: tuple[int, int]) -> tuple[Box, ...]:
        """The rows of a place."""
        shard = replace(layout, index=place[0])
        rows = chunk_range(shard.local_shape[0], self.zero1, place[1])
        return boxes_of(shard, (rows.start, rows.stop))

    def sender(self, ranks: Sequence[int], home: int) -> int:
        """Which of those that have the same rows sends them to a home."""
        return home if home in ranks else ranks[home % len(ranks)]


class MatrixBucket:
    """Weights whose matrices travel and are made orthogonal together."""

    def __init__(
        self,
        members: Sequence[ShardedParameter],
        shards: Mapping[ShardedParameter, Resting],
        stage: _Stage,
        matrices: Sequence[tuple[int, Matrix, int]],
        config: OptimizerConfig,
        dtype: torch.dtype | None,
    ) -> None:
        """`matrices`: by number of the member, each with its home. `dtype`: see `MatrixUpdates`."""
        self.members, self._stage, self._keys = members, stage, config.muon
        self._grads = [shards[item].grad for item in members]
        self._tag = Tag(
            Purpose.MATRIX, tensor=f"matrices of {members[0].name} .. {members[-1].name}"
        )
        grad = self._grads[0]
        if dtype is None:
            dtype = torch.bfloat16 if grad.is_cuda else grad.dtype
        self._dtype = grad.dtype if grad.dtype == torch.float64 else dtype
        self._sent: list[_Part] = []
        """Rows that go to a home, perhaps this rank: those that others send, too, are left out."""
        self._returned: list[_Part] = []
        """Rows that come back."""
        self._gathered: list[_Part] = []
        """Blocks of matrices at home here that come."""
        self._spread: list[_Part] = []
        """Blocks of them that go to all who have their rows."""
        self._matrices: list[Matrix] = []
        """Those at home here."""
        self._scaled: dict[float, list[Tensor]] = {}
        """Rows here, by what the learning rate of their matrices is multiplied by."""
        self.all_flops = sum(matrix.flops(self._keys) for _, matrix, _ in matrices)
        """Those of Newton-Schulz for all matrices, wherever they are at home."""
        self._boxes = cache(stage.boxes)  # alike for all experts of a weight
        for number, matrix, home in matrices:
            self._add(number, members[number].layout, matrix, home)
        for parts in (self._sent, self._returned, self._gathered, self._spread):
            parts.sort(key=lambda part: part.rank)
        self._whole: list[Tensor] = []
        self._pending: Pending | None = None

    @property
    def work_bytes(self) -> tuple[int, int]:
        """Bytes that the bucket takes on its way, and those of matrices and their products."""
        there, back = self._sent + self._gathered, self._spread + self._returned
        moved = max(sum(math.prod(part.box.sizes) for part in way) for way in (there, back))
        sizes = [math.prod(matrix.sizes) for matrix in self._matrices]
        size = self._dtype.itemsize
        return moved * size, (sum(sizes) + 4 * max(sizes, default=0)) * size

    def launch(self) -> None:
        """Set rows of what the matrices are made of on their way to the homes."""
        self._pending = self._exchange(
            [part.box.view(self._grads[part.at]) for part in self._sent],
            self._sent,
            self._gathered,
        )

    @property
    def flops(self) -> int:
        """Those of the matrices at home here."""
        return sum(matrix.flops(self._keys) for matrix in self._matrices)

    def gather(self) -> None:
        """Wait for the rows of the matrices at home here."""
        self._whole = [self._new(matrix.sizes) for matrix in self._matrices]
        self._arrive([part.box.view(self._whole[part.at]) for part in self._gathered])

    def multiply(self) -> None:
        """Make the matrices at home here orthogonal."""
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for x in self._whole:
            alike.setdefault(x.shape[-2:], []).append(x.view(x.shape[-2:]))
        for xs in alike.values():
            make_orthogonal(xs, self._keys)

    def spread(self) -> None:
        """Set what came of them on its way to those who have their rows."""
        blocks = [part.box.view(self._whole[part.at]) for part in self._spread]
        self._pending = self._exchange(blocks, self._spread, self._returned)
        self._whole = []

    def finish(self) -> None:
        """Wait for the updates, which take the place of the gradients."""
        self._arrive([part.box.view(self._grads[part.at]) for part in self._returned])
        for ratio, rows in self._scaled.items():
            if ratio != 1 and rows:
                foreach_mul_(rows, ratio)

    def _add(self, number: int, layout: ParameterLayout, matrix: Matrix, home: int) -> None:
        """Note what this rank has to do with a matrix of a member."""
        stage, rank = self._stage, self._stage.channel.rank
        here = stage.place(layout, rank)
        own = [
            block
            for box in self._boxes(layout, here)
            if (block := box.inside(matrix.offsets, matrix.sizes)) is not None
        ]
        rows = self._scaled.setdefault(matrix.ratio(self._keys), [])
        rows += (block.view(self._grads[number]) for block in own)
        parts = [_Part(home, number, block) for block in own]
        self._returned += parts
        if stage.sender(stage.ranks(layout, here), home) == rank:
            self._sent += parts
        if home != rank:
            return
        at = len(self._matrices)
        self._matrices.append(matrix)
        for place in product(range(layout.parts), range(stage.zero1)):
            ranks = stage.ranks(layout, place)
            for box in self._boxes(layout, place):
                block = box.inside(matrix.offsets, matrix.sizes)
                if block is None:
                    continue
                offsets = (a - b for a, b in zip(block.offsets, matrix.offsets, strict=True))
                inner = block._replace(local_offsets=tuple(offsets))
                self._gathered.append(_Part(stage.sender(ranks, home), at, inner))
                self._spread += (_Part(other, at, inner) for other in ranks)

    def _exchange(
        self, views: Sequence[Tensor], there: Sequence[_Part], here: Sequence[_Part]
    ) -> Pending:
        """Send `views`, the parts that go to `there`; what comes is that of `here`."""
        out, into = (_by_rank(parts, self._stage.channel.size) for parts in (there, here))
        sent, received = self._new((sum(out),)), self._new((sum(into),))
        pieces = sent.split([view.numel() for view in views]) if views else ()
        copy_all((piece.view(x.shape), x) for piece, x in zip(pieces, views, strict=True))
        return self._stage.channel.all_to_all_into(
            received, sent, out_rows=into, in_rows=out, tag=self._tag
        )

    def _arrive(self, views: Sequence[Tensor]) -> None:
        """Bring what has come to its place."""
        assert self._pending is not None
        received, self._pending = self._pending.wait(), None
        pieces = received.split([view.numel() for view in views]) if views else ()
        copy_all((x, piece.view(x.shape)) for piece, x in zip(pieces, views, strict=True))

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        return self._grads[0].new_empty(shape, dtype=self._dtype)


class MatrixUpdates:
    """The update of weights by whole matrices, in buckets in their order [Note: Homes].

    While the matrices of one bucket are multiplied, the rows of the next ones and what came of
    those before travel.
    """

    def __init__(
        self,
        shards: Mapping[ShardedParameter, Resting],
        values: Mapping[ShardedParameter, GroupValues],
        channels: Channels,
        config: OptimizerConfig,
        stream: StateStream,
        *,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`bucket_bytes`: of gradients, for each rank of the stage; more where ranks would multiply
        less than half of the most expensive matrix each. `dtype`: what matrices travel and are
        multiplied in; None: on CUDA bfloat16, elsewhere that of gradients, and float64 in any case.
        """
        channel = channels[Axis.STAGE]
        stage = _Stage(channel, channels[Axis.WEIGHT].size, channels[Axis.ZERO1].size)
        self._stream = stream
        self._parts: list[tuple[MatrixBucket, list[Bucket], list[Bucket]]] = []
        cut = {item: matrices_of(item.name, item.layout, config) for item in shards}
        costs = {item: [matrix.cost for matrix in of] for item, of in cut.items()}
        most = max((cost for of in costs.values() for cost in of), default=0)

        def share(item: ShardedParameter) -> float:
            """Of a bucket."""
            num_bytes = math.prod(item.layout.global_shape) * shards[item].grad.itemsize
            return min(num_bytes / max(1, bucket_bytes), sum(costs[item]) / most * 2)

        found = grouped(shards, lambda item: shards[item].grad.dtype, share, channel.size)
        homes = iter(_homes([[costs[item] for item in of] for of in found], channel.size))
        for members in found:
            placed = [(i, m, next(homes)) for i, item in enumerate(members) for m in cut[item]]
            bucket = MatrixBucket(members, shards, stage, placed, config, dtype)
            moments, masters = (
                stream.add(by_values({x: shards[x].only(master=master) for x in members}, values))
                for master in (False, True)
            )
            self._parts.append((bucket, moments, masters))

    @property
    def buckets(self) -> list[MatrixBucket]:
        """In their order."""
        return [bucket for bucket, *_ in self._parts]

    @property
    def members(self) -> list[ShardedParameter]:
        """The weights, in their order."""
        return [item for bucket, *_ in self._parts for item in bucket.members]

    @property
    def work_bytes(self) -> int:
        """Bytes of the device that an update takes."""
        sizes, window = [bucket.work_bytes for bucket in self.buckets], 2 * _DEPTH + 1
        travel = (sum(moved for moved, _ in sizes[i : i + window]) for i in range(len(sizes)))
        return max(travel, default=0) + max((own for _, own in sizes), default=0)

    def run(
        self, average: Update, step: Update, meanwhile: Callable[[], None]
    ) -> Iterator[Sequence[ShardedParameter]]:
        """Update all weights, a bucket at a time: gives those that are done.

        `meanwhile` is called as the first rows travel.
        """

        def launch(number: int) -> None:
            bucket, moments, _ = self._parts[number]
            self._stream.pass_through(average, moments)
            bucket.launch()

        def multiply(number: int) -> None:
            bucket = self._parts[number][0]
            bucket.gather()
            bucket.multiply()
            bucket.spread()

        for number in in_turn(len(self._parts), launch, meanwhile, multiply):
            bucket, _, masters = self._parts[number]
            bucket.finish()
            self._stream.pass_through(step, masters)
            yield bucket.members


def in_turn(
    count: int,
    launch: Callable[[int], None],
    meanwhile: Callable[[], None],
    multiply: Callable[[int], None],
) -> Iterator[int]:
    """Call these for each of so many buckets when it is its turn; gives those to be finished."""
    for number in range(-_DEPTH, count + _DEPTH):
        if number + _DEPTH < count:
            launch(number + _DEPTH)
        if number == -1:
            meanwhile()
        if 0 <= number < count:
            multiply(number)
        if number >= _DEPTH:
            yield number - _DEPTH


def _homes(buckets: Sequence[Sequence[Sequence[int]]], size: int) -> Iterator[int]:
    """The home of each matrix of each weight of each bucket, by costs [Note: Homes]."""
    every = [[cost for costs in members for cost in costs] for members in buckets]
    loads, left = [0] * size, [Counter[int]() for _ in range(size)]
    for cost in sorted((cost for costs in every for cost in costs), reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += cost
        left[rank][cost] += 1
    loads = [0] * size
    for costs in every:
        homes = [0] * len(costs)
        for place in sorted(range(len(costs)), key=lambda i: -costs[i]):
            cost = costs[place]
            homes[place] = rank = min(
                (rank for rank in range(size) if left[rank][cost]), key=loads.__getitem__
            )
            loads[rank] += cost
            left[rank][cost] -= 1
        yield from homes


def _by_rank(parts: Iterable[_Part], size: int) -> list[int]:
    """Elements to or from each rank."""
    found = [0] * size
    for part in parts:
        found[part.rank] += math.prod(part.box.sizes)
    return found
