"""Optimizer states at rest and at work: where they lie between updates, and how they get there.

[Note: At rest and at work] At work, states are on the device, in the dtype of the master weights.
At rest a moment may be narrower, and all of them, the masters too, may lie in the memory of the
host. What is at rest as it is at work is updated in place, all of it at once. The rest goes to work
in buckets, through two buffers: while one bucket is updated the next travels in, and the one before
travels out, each direction on a stream of its own. The arithmetic is on the device in any case, so
where states rest changes no bit of them.

[Note: Streamed, not updated there] An element of adamw in float32 travels as 12 bytes in and, at
the same time, 12 out: 0.22 ns on a link of 55 GB/s each way (PCIe 5 x16), 0.48 ns at 25 GB/s; that
is arithmetic. torch's fused AdamW takes 1.44 ns of a core of the host (measured: a Xeon, 2^25
elements), and there the gradient and the weight would travel still. A rank would need 3 to 7 cores
of its own to be as fast; of the host's memory the one reads and writes 24 bytes, the other 28.

[Note: Where rows are cut] torch's CPU kernels compute the last few elements of a tensor apart from
the others, perhaps with other roundings. Rows are cut at multiples of 64 elements, so that these
are the same ones however many buckets there are.

[Note: Written weights] A weight is its master, rounded. One that is not was written by somebody
else since the last update, and the master takes its value; the others keep what rounding cuts off.
Versions of tensors would cost nothing, but do not count what is written through `.data`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from isp.core.comm import pinned_memory, streams
from isp.core.optim.buckets import master_dtype
from isp.core.optim.update_rules import GroupValues, Rows, UpdateRule
from isp.core.torch_private import foreach_copy_

__all__ = [
    "MASTER",
    "STREAM_BYTES",
    "Resting",
    "StateMemory",
    "StateStream",
    "by_values",
    "kept",
    "take_up",
]

T = TypeVar("T")

MASTER = "master"
STREAM_BYTES = 128 * 2**20
"""States of a bucket at work: long enough that copies reach the link's bandwidth."""
_UNIT = 64
"""Elements, [Note: Where rows are cut]; and bytes: views of a buffer begin at multiples of it."""


def kept(rule: UpdateRule, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Name and dtype at rest of all that is kept of weights of `dtype`; masters only if apart."""
    wide = master_dtype(dtype)
    masters = {} if wide == dtype else {MASTER: wide}
    return masters | rule.states(wide)


class StateMemory:
    """Memory for states at rest, all of it given out by `take`: of the device, or of its host.

    On the host it is one piece for each dtype, of as many numbers as `sizes` add up to. Raises
    ValueError if there is too little.
    """

    def __init__(
        self, sizes: Iterable[tuple[torch.dtype, int]], device: torch.device, *, on_host: bool
    ) -> None:
        self._device = device
        self._left: dict[torch.dtype, Tensor] | None = None
        self.host_bytes = 0
        """Bytes on the host."""
        if not on_host:
            return
        totals: dict[torch.dtype, int] = {}
        for dtype, size in sizes:
            totals[dtype] = totals.get(dtype, 0) + size
        self.host_bytes = sum(dtype.itemsize * size for dtype, size in totals.items())
        try:
            self._left = {d: pinned_memory.zeros(size, d, device) for d, size in totals.items()}
        except MemoryError as error:
            raise ValueError(
                f"optimizer.offload_states=true needs {self.host_bytes / 2**30:.2f} GiB of host"
                f" memory for a rank: {error}: use false, optimizer.moment_dtype=bfloat16, or more"
                f" ranks to share them (parallel.weight.size, parallel.zero1.size)"
            ) from None

    def resting(
        self,
        name: str,
        rows: range,
        weights: Tensor,
        grad: Tensor,
        kinds: Mapping[str, torch.dtype],
    ) -> Resting:
        """Return rows of a parameter with states of these dtypes, which are zero, and masters."""
        found = {kind: self.take(weights.shape, dtype) for kind, dtype in kinds.items()}
        if MASTER in found:
            found[MASTER].copy_(weights)
        return Resting(name, rows, weights, grad, found)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Zeros."""
        if self._left is None:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        own, self._left[dtype] = self._left[dtype].tensor_split([math.prod(shape)])
        return own.view(shape)


@dataclass(frozen=True, eq=False)
class Resting:
    """Rows of one parameter's shard, with their states at rest."""

    name: str
    """The parameter's, in the whole model."""
    rows: range
    weights: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    """Those of the update rule, by name, and master weights if `weights` are not these."""

    @property
    def master(self) -> Tensor:
        return self.states.get(MASTER, self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states, at work."""
        number = len({MASTER, *self.states})
        return self.weights.numel() * self.grad.element_size() * number

    def only(self, *, master: bool) -> Resting:
        """Itself with its master weights alone, or with all other states."""
        states = {name: x for name, x in self.states.items() if (name == MASTER) is master}
        return replace(self, states=states)

    def pieces(self, limit_bytes: int) -> Iterator[Resting]:
        """Itself, or rows of it of up to `limit_bytes` at work, as far as they can be cut."""
        num_rows, row_elements = self.weights.shape[0], math.prod(self.weights.shape[1:])
        unit = _UNIT // math.gcd(_UNIT, row_elements)  # rows
        fitting = max(unit, limit_bytes * num_rows // self.num_bytes // unit * unit)
        if fitting >= num_rows:
            yield self
            return
        for start in range(0, num_rows, fitting):
            yield self._rows(slice(start, start + fitting))

    def _rows(self, rows: slice) -> Resting:
        states = {name: state[rows] for name, state in self.states.items()}
        return Resting(self.name, self.rows[rows], self.weights[rows], self.grad[rows], states)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that are at work together; of one dtype."""

    values: GroupValues
    """What holds for all of them."""
    rows: list[Resting]

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """At rest, by name."""
        return {name: [row.states[name] for row in self.rows] for name in self.rows[0].states}

    @property
    def wide_bytes(self) -> int:
        """Bytes of the wide copies of states that are narrower at rest."""
        dtype = self.rows[0].grad.dtype
        every = (x for found in self.states.values() for x in found if x.dtype != dtype)
        return sum(x.numel() * dtype.itemsize for x in every)


def _buckets_of(groups: Mapping[GroupValues, list[Resting]], limit_bytes: int) -> list[Bucket]:
    """The rows of `groups` in buckets of up to `limit_bytes` at work, each of one group."""
    found: list[Bucket] = []
    for values, rows in groups.items():
        by_kind: dict[tuple[torch.dtype, bool], list[Resting]] = {}
        for row in rows:
            key = row.grad.dtype, MASTER in row.states
            by_kind.setdefault(key, []).append(row)
        for alike in by_kind.values():
            found += (Bucket(values, members) for members in _cut(alike, limit_bytes))
    return found


def _cut(rows: list[Resting], limit_bytes: int) -> list[list[Resting]]:
    """The rows in their order; what is larger than a bucket alone, in pieces."""
    buckets: list[list[Resting]] = []
    room = 0
    for piece in (piece for row in rows for piece in row.pieces(limit_bytes)):
        if piece.num_bytes > room:
            buckets.append([])
            room = limit_bytes
        buckets[-1].append(piece)
        room -= piece.num_bytes
    return buckets


class _Buffer:
    """Memory of the device that buckets use in turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.free: streams.Event | None = None
        """When its last bucket has left."""

    def views(self, bucket: Bucket) -> dict[str, list[Tensor]]:
        """A place for each state of a bucket."""
        start = 0

        def place(x: Tensor) -> Tensor:
            nonlocal start
            own = self._memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
            start += _aligned(x.nbytes)
            return own

        return {name: [place(x) for x in found] for name, found in bucket.states.items()}


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _UNIT) * _UNIT


def _buffer_bytes(bucket: Bucket) -> int:
    return sum(_aligned(x.nbytes) for found in bucket.states.values() for x in found)


class StateStream:
    """Lets rows of `groups` be updated, wherever their states rest; with `on_host`, on the host.

    See [Note: At rest and at work].
    """

    def __init__(
        self,
        groups: Mapping[GroupValues, list[Resting]],
        device: torch.device,
        *,
        on_host: bool,
        bucket_bytes: int = STREAM_BYTES,
        weights_may_change: bool = False,
    ) -> None:
        self._device = device
        self._on_host = on_host
        self._bucket_bytes = bucket_bytes
        self._every: list[Bucket] = []
        self._weights_may_change = weights_may_change
        self._inward = streams.new(device) if on_host else None
        self._outward = streams.new(device) if on_host else None
        self._home: streams.Event | None = None
        """When all states are back on the host."""
        self._buckets = self.add(groups)

    @property
    def work_bytes(self) -> int:
        """Bytes of the device that `pass_through` takes for states."""
        wide = max((bucket.wide_bytes for bucket in self._every), default=0)
        return wide + (2 * self._largest(self._every) if self._on_host else 0)

    def add(self, groups: Mapping[GroupValues, list[Resting]]) -> list[Bucket]:
        """Buckets of more rows, which `pass_through` is given when it is their turn."""
        rows = [row for of_group in groups.values() for row in of_group]
        narrow = any(x.dtype != row.grad.dtype for row in rows for x in row.states.values())
        limit = self._bucket_bytes if self._on_host or narrow else sys.maxsize
        self._every += (found := _buckets_of(groups, limit))
        return found

    def settle(self) -> None:
        """Wait, on the host, until what lies there may be read and written there."""
        if self._home is not None:
            self._home.synchronize()

    def pass_through(
        self,
        update: Callable[[GroupValues, Rows], None],
        buckets: Sequence[Bucket] | None = None,
    ) -> None:
        """Let `update` change rows of every bucket in turn; weights follow their masters.

        `buckets`: those of an `add`; None: of the groups that it was made with.
        """
        buckets = self._buckets if buckets is None else buckets
        if not self._on_host:
            for bucket in buckets:
                self._work(bucket, bucket.states, update)
        elif buckets:
            self._stream(update, buckets)

    def _stream(
        self, update: Callable[[GroupValues, Rows], None], buckets: Sequence[Bucket]
    ) -> None:
        device, size = self._device, self._largest(buckets)
        buffers = [_Buffer(size, device) for _ in range(2)]
        streams.follow(self._inward)
        coming = self._bring(buckets[0], buffers[0])
        for number, bucket in enumerate(buckets):
            here, arrived = coming
            if number + 1 < len(buckets):
                coming = self._bring(buckets[number + 1], buffers[(number + 1) % 2])
            if arrived is not None:
                arrived.wait()
            self._work(bucket, here, update)
            self._take_back(bucket, here, buffers[number % 2])
        for buffer in buffers:
            if buffer.free is not None:
                buffer.free.wait()
        self._home = streams.mark(device)

    @staticmethod
    def _largest(buckets: Sequence[Bucket]) -> int:
        return max(map(_buffer_bytes, buckets), default=0)

    def _bring(
        self, bucket: Bucket, buffer: _Buffer
    ) -> tuple[dict[str, list[Tensor]], streams.Event | None]:
        """Send the states of a bucket to the device: their places, and when they are there."""
        places = buffer.views(bucket)
        with streams.on(self._inward):
            if buffer.free is not None:
                buffer.free.wait()
            for name, found in bucket.states.items():
                for place, rest in zip(places[name], found, strict=True):
                    place.copy_(rest, non_blocking=True)
            return places, streams.mark(self._device)

    def _take_back(
        self, bucket: Bucket, places: Mapping[str, list[Tensor]], buffer: _Buffer
    ) -> None:
        streams.follow(self._outward)
        with streams.on(self._outward):
            for name, found in bucket.states.items():
                for place, rest in zip(places[name], found, strict=True):
                    rest.copy_(place, non_blocking=True)
            buffer.free = streams.mark(self._device)

    def _work(
        self,
        bucket: Bucket,
        states: Mapping[str, list[Tensor]],
        update: Callable[[GroupValues, Rows], None],
    ) -> None:
        """Update a bucket whose `states` are on the device; what is narrow is rounded once."""
        dtype, weights = bucket.rows[0].grad.dtype, [row.weights for row in bucket.rows]
        wide = {name: [x.to(dtype) for x in found] for name, found in states.items()}
        masters = wide.get(MASTER, weights)
        if self._weights_may_change and masters is not weights:
            for master, weight in zip(masters, weights, strict=True):
                take_up(master, weight)
        moments = {name: found for name, found in wide.items() if name != MASTER}
        names = [row.name for row in bucket.rows]
        update(bucket.values, Rows(masters, [row.grad for row in bucket.rows], moments, names))
        for name, found in states.items():
            if found[0].dtype != dtype:
                foreach_copy_(found, wide[name])
        if masters is not weights:
            foreach_copy_(weights, masters)


def by_values(
    shards: Mapping[T, Resting], values: Mapping[T, GroupValues]
) -> dict[GroupValues, list[Resting]]:
    """The rows of this rank by what holds for their parameters."""
    groups: dict[GroupValues, list[Resting]] = {}
    for item, shard in shards.items():
        if shard.weights.numel():
            groups.setdefault(values[item], []).append(shard)
    return groups


def take_up(master: Tensor, weight: Tensor) -> None:
    """Let masters follow the weights that somebody has written [Note: Written weights]."""
    rounded = master.to(weight.dtype)
    torch.where(rounded == weight, master, weight, out=master)
