"""`MatrixUpdates`: the updates of muon, which need whole matrices of momentum.

Each matrix has a home rank, which receives its rows, makes it orthogonal and sends the rows back.
See [Note: Homes] in docs/design/notes/optimizer.md.
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
from isp.core.mesh.layout import Box, Matrices, ParameterLayout, boxes_of
from isp.core.mesh.partition import chunk_range
from isp.core.optim.buckets import copy_all, grouped
from isp.core.optim.config import MuonConfig, OptimizerConfig
from isp.core.optim.states import Resting, StateBucket, StateStream, by_values
from isp.core.optim.update_rules import GroupValues, Rows, group_of
from isp.core.torch_private import foreach_copy_, foreach_mul_
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "Matrix",
    "MatrixUpdates",
    "in_turn",
    "make_orthogonal",
    "matrices_of",
    "newton_schulz",
]

_BATCH_ELEMENTS, _LARGEST_BATCH = 2**21, 16
"""Limits of a batch of matrices that a device multiplies at once: elements, and matrices."""


class Matrix(NamedTuple):
    """The place of a matrix in a weight: a block of the weight's global tensor.

    A weight may consist of several matrices, such as fused q, k and v. In a weight [E, .., ..] of
    E experts, each matrix is in one expert.
    """

    offsets: tuple[int, ...]
    """First index of the block in each dim."""
    sizes: tuple[int, ...]
    """Size of the block in each dim; the last two are those of the matrix."""

    @property
    def cost(self) -> int:
        """Number of multiplications of one Newton-Schulz iteration."""
        short, long = sorted(self.sizes[-2:])
        return short * short * (2 * long + short)

    def flops(self, keys: MuonConfig) -> int:
        """Return the number of floating-point operations of all Newton-Schulz iterations."""
        return 2 * self.cost * keys.ns_steps

    def ratio(self, keys: MuonConfig) -> float:
        """Return the factor on the learning rate; see `MuonConfig.adjust_lr_fn`."""
        rows, columns = self.sizes[-2:]
        if keys.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


def matrices_of(name: str, layout: ParameterLayout, config: OptimizerConfig) -> list[Matrix]:
    """Return the matrices that a weight consists of, in order.

    Raises ValueError if the `split` of its parameter group does not divide its output features.
    """
    shape, known = layout.global_shape, layout.matrices or Matrices()
    length, group = shape[known.dim], group_of(name, config)
    sizes = known.sizes or (length,)
    if group is not None and group.split:
        if length % sum(group.split):
            raise ValueError(
                f"optimizer.param_groups: split={[*group.split]} must add up to a divisor of the"
                f" {length} output features of {name}"
            )
        sizes = tuple(part * length // sum(group.split) for part in group.split)
    elif config.muon.per_head and known.heads:
        sizes = (length // known.heads,) * known.heads
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    # Make one matrix for each expert (index of the leading dims) and each part along `known.dim`.
    # `cut` has, for each dim of the weight, the (offset, size) of the matrices in it.
    cut: list[list[tuple[int, int]]] = [[(i, 1) for i in range(n)] for n in shape[:-2]]
    cut += [[(0, n)] for n in shape[-2:]]
    cut[known.dim] = list(zip(starts, sizes, strict=True))
    return [Matrix(*zip(*place, strict=True)) for place in product(*cut)]


def newton_schulz(x: Tensor, keys: MuonConfig) -> Tensor:
    """Return x [A, B], or a batch [n, A, B], made orthogonal: with singular values of about 1.

    Computes in the dtype of x, by the operations of `torch.optim.Muon` (which uses bfloat16).
    """
    a, b, c = keys.ns_coefficients
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    # A tall matrix is transposed before and after, because x x^T is then the smaller product.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=keys.eps)
    for _ in range(keys.ns_steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def make_orthogonal(xs: Sequence[Tensor], keys: MuonConfig) -> None:
    """Replace each of several matrices of one shape by its `newton_schulz`.

    The bits do not depend on the other matrices. On CPU, matrices are multiplied one by one; on
    other devices, in batches whose size depends only on the shape, padded with zeros.
    """
    count = min(_LARGEST_BATCH, _BATCH_ELEMENTS // xs[0].numel())
    if xs[0].device.type == "cpu" or count < 2:
        for x in xs:
            x.copy_(newton_schulz(x, keys))
        return
    for first in range(0, len(xs), count):
        some = xs[first : first + count]
        # Always `count` matrices: with another batch size, a kernel might round differently.
        batch = some[0].new_zeros(count, *some[0].shape)
        foreach_copy_([*batch[: len(some)].unbind()], [*some])
        foreach_copy_([*some], [*newton_schulz(batch, keys)[: len(some)].unbind()])


Update = Callable[[GroupValues, Rows], None]
"""A function that updates rows with the values of their group."""

_DEPTH = 3
"""Number of buckets in flight to their homes, and of buckets in flight back, while one bucket is
multiplied. With fewer, a rank with little to multiply in a bucket would wait for other ranks."""


class _Block(NamedTuple):
    """A block of a matrix that is sent between the matrix's home and one rank."""

    rank: int
    """The rank that the block is sent to or received from."""
    at: int
    """On the rank that has rows of the weight: the index of the weight in the bucket. On the home:
    the index of the matrix among the matrices whose home this rank is."""
    box: Box
    """The block, and its place in the tensor that `at` means: this rank's rows of the weight, or
    the whole matrix."""


class _StageRanks(NamedTuple):
    """The ranks of a pipeline stage, and which rows of a weight each rank has.

    A *place* is a pair: the index of a shard in the weight group, and the index in the zero1 group
    of the rows of this shard that a rank updates. Several ranks may have the same place.
    """

    channel: Channel
    """All ranks of the stage."""
    weight: int
    """Number of ranks in a weight group."""
    zero1: int
    """Number of ranks in a zero1 group."""

    def place(self, layout: ParameterLayout, rank: int) -> tuple[int, int]:
        """Return the place of the rows that `rank` updates; see the class."""
        # Ranks of a stage are numbered with the weight group varying fastest.
        replica, index = divmod(rank, self.weight)
        return index if layout.sharded else 0, replica % self.zero1

    def ranks(self, layout: ParameterLayout, place: tuple[int, int]) -> list[int]:
        """Return all ranks that have the rows of `place`."""
        replicas = range(place[1], self.channel.size // self.weight, self.zero1)
        indices = [place[0]] if layout.sharded else range(self.weight)
        return [replica * self.weight + index for replica in replicas for index in indices]

    def boxes(self, layout: ParameterLayout, place: tuple[int, int]) -> tuple[Box, ...]:
        """Return the boxes of the weight that the rows of `place` consist of."""
        shard = replace(layout, index=place[0])
        rows = chunk_range(shard.local_shape[0], self.zero1, place[1])
        return boxes_of(shard, (rows.start, rows.stop))

    def sender(self, ranks: Sequence[int], home: int) -> int:
        """Return the rank of `ranks` that sends rows to `home`; all `ranks` have the same rows.

        It is `home` itself if it has the rows. Otherwise it depends on `home`, so that the sends to
        different homes are spread over `ranks`.
        """
        return home if home in ranks else ranks[home % len(ranks)]


class MatrixBucket:
    """Weights whose matrices are sent to their homes and made orthogonal together."""

    def __init__(
        self,
        members: Sequence[ShardedParameter],
        shards: Mapping[ShardedParameter, Resting],
        stage: _StageRanks,
        matrices: Sequence[tuple[int, Matrix, int]],
        config: OptimizerConfig,
        dtype: torch.dtype | None,
    ) -> None:
        """Make a bucket of `members`.

        `matrices`: for each matrix, the index in `members` of the weight that contains it, the
        matrix, and its home. `dtype`: see `MatrixUpdates`.
        """
        self.members, self._stage, self._keys = members, stage, config.muon
        self._grads = [shards[item].grad for item in members]
        self._tag = Tag(
            Purpose.MATRIX, tensor=f"matrices of {members[0].name} .. {members[-1].name}"
        )
        grad = self._grads[0]
        if dtype is None:
            dtype = torch.bfloat16 if grad.is_cuda else grad.dtype
        self._dtype = grad.dtype if grad.dtype == torch.float64 else dtype
        self._sent: list[_Block] = []
        """Blocks of this rank's rows to send to homes, without blocks that another rank sends."""
        self._returned: list[_Block] = []
        """Blocks of this rank's rows that homes send back."""
        self._gathered: list[_Block] = []
        """Blocks to receive of the matrices whose home is this rank."""
        self._spread: list[_Block] = []
        """Blocks of the matrices whose home is this rank, to send to all ranks with their rows."""
        self._matrices: list[Matrix] = []
        """Matrices whose home is this rank."""
        self._scaled: dict[float, list[Tensor]] = {}
        """This rank's rows, by the factor on the learning rate of their matrix."""
        self.all_flops = sum(matrix.flops(self._keys) for _, matrix, _ in matrices)
        """Floating-point operations of Newton-Schulz for all matrices, on all homes."""
        # Cached, because all experts of a weight ask for the same boxes.
        self._boxes = cache(stage.boxes)
        for number, matrix, home in matrices:
            self._add(number, members[number].layout, matrix, home)
        # An all-to-all sends by rank. The sort is stable, and all ranks add blocks in the same
        # order of matrices, so sender and receiver agree on the order of blocks.
        for parts in (self._sent, self._returned, self._gathered, self._spread):
            parts.sort(key=lambda part: part.rank)
        self._whole: list[Tensor] = []
        self._pending: Pending | None = None

    @property
    def work_bytes(self) -> tuple[int, int]:
        """Bytes of the bucket's transfers, and bytes of its matrices and their products."""
        there, back = self._sent + self._gathered, self._spread + self._returned
        moved = max(sum(math.prod(part.box.sizes) for part in way) for way in (there, back))
        sizes = [math.prod(matrix.sizes) for matrix in self._matrices]
        size = self._dtype.itemsize
        return moved * size, (sum(sizes) + 4 * max(sizes, default=0)) * size

    def launch(self) -> None:
        """Launch the transfer of momentum rows to the homes."""
        self._pending = self._exchange(
            [part.box.view(self._grads[part.at]) for part in self._sent],
            self._sent,
            self._gathered,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations of Newton-Schulz for the matrices whose home is this rank."""
        return sum(matrix.flops(self._keys) for matrix in self._matrices)

    def gather(self) -> None:
        """Wait for the rows of the matrices whose home is this rank, and join them."""
        self._whole = [self._new(matrix.sizes) for matrix in self._matrices]
        self._arrive([part.box.view(self._whole[part.at]) for part in self._gathered])

    def multiply(self) -> None:
        """Make the matrices whose home is this rank orthogonal."""
        # Matrices are grouped by shape, because only equal shapes can be multiplied in a batch.
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for x in self._whole:
            by_shape.setdefault(x.shape[-2:], []).append(x.view(x.shape[-2:]))
        for xs in by_shape.values():
            make_orthogonal(xs, self._keys)

    def spread(self) -> None:
        """Launch the transfer of the results to all ranks that have their rows."""
        blocks = [part.box.view(self._whole[part.at]) for part in self._spread]
        self._pending = self._exchange(blocks, self._spread, self._returned)
        self._whole = []

    def finish(self) -> None:
        """Wait for the results of this rank's rows, which overwrite its gradients."""
        self._arrive([part.box.view(self._grads[part.at]) for part in self._returned])
        for ratio, rows in self._scaled.items():
            if ratio != 1 and rows:
                foreach_mul_(rows, ratio)

    def _add(self, number: int, layout: ParameterLayout, matrix: Matrix, home: int) -> None:
        """Add the blocks that this rank sends and receives of a matrix of member `number`."""
        stage, rank = self._stage, self._stage.channel.rank
        here = stage.place(layout, rank)
        own = [
            block
            for box in self._boxes(layout, here)
            if (block := box.inside(matrix.offsets, matrix.sizes)) is not None
        ]
        rows = self._scaled.setdefault(matrix.ratio(self._keys), [])
        rows += (block.view(self._grads[number]) for block in own)
        parts = [_Block(home, number, block) for block in own]
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
                self._gathered.append(_Block(stage.sender(ranks, home), at, inner))
                self._spread += (_Block(other, at, inner) for other in ranks)

    def _exchange(
        self, views: Sequence[Tensor], there: Sequence[_Block], here: Sequence[_Block]
    ) -> Pending:
        """Launch an all-to-all that sends the blocks `there`, as `views`, and receives `here`."""
        # One flat tensor each way: an all-to-all takes counts of elements by rank.
        out, into = (_by_rank(parts, self._stage.channel.size) for parts in (there, here))
        sent, received = self._new((sum(out),)), self._new((sum(into),))
        pieces = sent.split([view.numel() for view in views]) if views else ()
        copy_all((piece.view(x.shape), x) for piece, x in zip(pieces, views, strict=True))
        return self._stage.channel.all_to_all_into(
            received, sent, out_rows=into, in_rows=out, tag=self._tag
        )

    def _arrive(self, views: Sequence[Tensor]) -> None:
        """Wait for the received blocks, and copy them to `views`."""
        assert self._pending is not None
        received, self._pending = self._pending.wait(), None
        pieces = received.split([view.numel() for view in views]) if views else ()
        copy_all((x, piece.view(x.shape)) for piece, x in zip(pieces, views, strict=True))

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        """Return a new tensor in the dtype of transfers and products."""
        return self._grads[0].new_empty(shape, dtype=self._dtype)


class MatrixUpdates:
    """Updates of weights by whole matrices, bucket by bucket [Note: Homes].

    While the matrices of one bucket are multiplied, the rows of later buckets and the results of
    earlier buckets are in flight.
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
        """Divide the weights of `shards` into buckets, and their matrices over home ranks.

        `bucket_bytes`: bytes of gradients in a bucket for each rank of the stage; buckets are
        larger if each rank would multiply less than half of the most expensive matrix. `dtype`:
        dtype in which matrices are sent and multiplied; None: bfloat16 on CUDA, on other devices
        that of gradients. Matrices of float64 gradients are always float64.
        """
        channel = channels[Axis.STAGE]
        stage = _StageRanks(channel, channels[Axis.WEIGHT].size, channels[Axis.ZERO1].size)
        self._stream = stream
        self._parts: list[tuple[MatrixBucket, list[StateBucket], list[StateBucket]]] = []
        cut = {item: matrices_of(item.name, item.layout, config) for item in shards}
        costs = {item: [matrix.cost for matrix in of] for item, of in cut.items()}
        most = max((cost for of in costs.values() for cost in of), default=0)

        def share(item: ShardedParameter) -> float:
            """Return how much of one rank's part of a bucket this weight fills; 1: all of it."""
            num_bytes = math.prod(item.layout.global_shape) * shards[item].grad.itemsize
            # The minimum, so that a bucket is full only when it has enough bytes and enough work.
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
        """The buckets, in the order of updates."""
        return [bucket for bucket, *_ in self._parts]

    @property
    def members(self) -> list[ShardedParameter]:
        """The weights of all buckets, in order."""
        return [item for bucket, *_ in self._parts for item in bucket.members]

    @property
    def work_bytes(self) -> int:
        """Bytes of device memory that an update takes: transfers, and one bucket's matrices."""
        sizes, window = [bucket.work_bytes for bucket in self.buckets], 2 * _DEPTH + 1
        travel = (sum(moved for moved, _ in sizes[i : i + window]) for i in range(len(sizes)))
        return max(travel, default=0) + max((own for _, own in sizes), default=0)

    def run(
        self, average: Update, step: Update, meanwhile: Callable[[], None]
    ) -> Iterator[Sequence[ShardedParameter]]:
        """Update all weights bucket by bucket, and yield the weights of each updated bucket.

        `average` and `step` are those of the update rules. `meanwhile` is called once, while the
        first rows are in flight.
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
    """Call `launch` and `multiply` for each of `count` buckets; yield the buckets to finish.

    A bucket is launched `_DEPTH` buckets before it is multiplied, and finished `_DEPTH` after. All
    ranks do so in the same order, so that their collectives meet.
    """
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
    """Yield the home rank of each matrix, in the order of `buckets`.

    `buckets` has, for each bucket and each of its weights, the costs of the weight's matrices.
    `size`: number of ranks of the stage. See [Note: Homes] in docs/design/notes/optimizer.md.
    """
    # First, over all buckets, decide how many matrices of each cost a rank gets.
    every = [[cost for costs in members for cost in costs] for members in buckets]
    loads, left = [0] * size, [Counter[int]() for _ in range(size)]
    for cost in sorted((cost for costs in every for cost in costs), reverse=True):
        rank = loads.index(min(loads))
        loads[rank] += cost
        left[rank][cost] += 1
    # Then, bucket by bucket, give each matrix to a rank that may still get one of this cost.
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


def _by_rank(parts: Iterable[_Block], size: int) -> list[int]:
    """Return the number of elements of the blocks that each rank sends or receives."""
    found = [0] * size
    for part in parts:
        found[part.rank] += math.prod(part.box.sizes)
    return found
