"""Optimizer states at rest (between updates) and at work (during an update), and copies of them.

States that rest in host memory, or in a narrower dtype, are copied to the device bucket by bucket
and updated there. See [Note: At rest and at work] and [Note: Streamed, not updated there] in
docs/design/notes/optimizer.md.
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
"""Key of the master weights in dicts of states."""
STREAM_BYTES = 128 * 2**20
"""Bytes of a bucket's states during an update: enough for copies to reach the link's bandwidth."""
_UNIT = 64
"""Alignment: rows are cut at multiples of 64 elements, so that a CPU kernel treats each element the
same for any number of buckets, and views of a buffer begin at multiples of 64 bytes. See
[Note: Where rows are cut] in docs/design/notes/optimizer.md."""


def kept(rule: UpdateRule, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the states that `rule` keeps for weights of `dtype`, as {name: dtype}.

    The dtype is the one in which a state is kept between updates. Master weights are included
    unless the weights are their own masters (float32 or wider).
    """
    wide = master_dtype(dtype)
    masters = {} if wide == dtype else {MASTER: wide}
    return masters | rule.states(wide)


class StateMemory:
    """Memory for optimizer states between updates, on the device or on the host.

    `take` returns parts of it. On the host it is one pinned allocation for each dtype, with as many
    elements as `sizes` add up to. Raises ValueError if the host has too little memory.
    """

    def __init__(
        self, sizes: Iterable[tuple[torch.dtype, int]], device: torch.device, *, on_host: bool
    ) -> None:
        self._device = device
        self._left: dict[torch.dtype, Tensor] | None = None
        """Host memory that is not taken yet; None: states rest on the device."""
        self.host_bytes = 0
        """Bytes of host memory allocated."""
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
                f" memory for a rank: {error}: use optimizer.offload_states=false,"
                f" optimizer.moment_dtype=bfloat16, or more ranks to split the states"
                f" (parallel.weight.size, parallel.zero1.size)"
            ) from None

    def resting(
        self,
        name: str,
        rows: range,
        weights: Tensor,
        grad: Tensor,
        kinds: Mapping[str, torch.dtype],
    ) -> Resting:
        """Return rows of a parameter with new optimizer states.

        `kinds`: the dtype of each state, by name. States are zeros, but the master weights are a
        copy of `weights`.
        """
        found = {kind: self.take(weights.shape, dtype) for kind, dtype in kinds.items()}
        if MASTER in found:
            found[MASTER].copy_(weights)
        return Resting(name, rows, weights, grad, found)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a part of the memory as a tensor of zeros with this shape and dtype."""
        if self._left is None:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        own, self._left[dtype] = self._left[dtype].tensor_split([math.prod(shape)])
        return own.view(shape)


@dataclass(frozen=True, eq=False)
class Resting:
    """Rows of one parameter's shard, with their optimizer states as kept between updates."""

    name: str
    """The parameter's name in the whole model."""
    rows: range
    """The indices of these rows along dim 0 of the shard."""
    weights: Tensor
    """The parameter's values in these rows, as a view."""
    grad: Tensor
    """Summed main gradient, in the dtype of the master weights."""
    states: dict[str, Tensor]
    """States of the update rule, by name. Also the master weights, except if `weights` themselves
    are the master weights."""

    @property
    def master(self) -> Tensor:
        """The master weights: a state, or the weights themselves."""
        return self.states.get(MASTER, self.weights)

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and master weights during an update, in the gradients' dtype."""
        number = len({MASTER, *self.states})
        return self.weights.numel() * self.grad.element_size() * number

    def only(self, *, master: bool) -> Resting:
        """Return these rows with only the master weights, or with all other states."""
        states = {name: x for name, x in self.states.items() if (name == MASTER) is master}
        return replace(self, states=states)

    def pieces(self, limit_bytes: int) -> Iterator[Resting]:
        """Divide these rows into runs of consecutive rows of at most `limit_bytes` each.

        See [Note: Where rows are cut] in docs/design/notes/optimizer.md.
        """
        num_rows, row_elements = self.weights.shape[0], math.prod(self.weights.shape[1:])
        # A run has a multiple of `unit` rows, so that its elements are a multiple of `_UNIT`.
        unit = _UNIT // math.gcd(_UNIT, row_elements)
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
class StateBucket:
    """Rows that are updated together; they have one dtype and one parameter group."""

    values: GroupValues
    """Learning rate, weight decay and rule of all rows."""
    rows: list[Resting]

    @property
    def states(self) -> dict[str, list[Tensor]]:
        """The states of all rows, by name, as they are kept between updates."""
        return {name: [row.states[name] for row in self.rows] for name in self.rows[0].states}

    @property
    def wide_bytes(self) -> int:
        """Bytes of the copies that an update makes of states that are kept in a narrower dtype.

        The copies have the dtype of the gradients, in which an update computes.
        """
        dtype = self.rows[0].grad.dtype
        every = (x for found in self.states.values() for x in found if x.dtype != dtype)
        return sum(x.numel() * dtype.itemsize for x in every)


def _buckets_of(groups: Mapping[GroupValues, list[Resting]], limit_bytes: int) -> list[StateBucket]:
    """Return the rows of `groups` in buckets of up to `limit_bytes`, counted by `num_bytes`.

    The rows of a bucket have one group, one dtype, and all or none have separate master weights.
    """
    found: list[StateBucket] = []
    for values, rows in groups.items():
        by_kind: dict[tuple[torch.dtype, bool], list[Resting]] = {}
        for row in rows:
            key = row.grad.dtype, MASTER in row.states
            by_kind.setdefault(key, []).append(row)
        for of_kind in by_kind.values():
            found += (StateBucket(values, members) for members in _cut(of_kind, limit_bytes))
    return found


def _cut(rows: list[Resting], limit_bytes: int) -> list[list[Resting]]:
    """Divide rows into buckets of up to `limit_bytes`, in order; cut rows that are larger."""
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
    """Device memory for the states of a bucket; buckets use two of these alternately."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.free: streams.Event | None = None
        """Event after which the buffer's last bucket has been copied out; None: no bucket yet."""

    def views(self, bucket: StateBucket) -> dict[str, list[Tensor]]:
        """Return a view of the buffer for each state of a bucket, by name."""
        start = 0

        def place(x: Tensor) -> Tensor:
            nonlocal start
            own = self._memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
            start += _aligned(x.nbytes)
            return own

        return {name: [place(x) for x in found] for name, found in bucket.states.items()}


def _aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of `_UNIT`."""
    return -(-num_bytes // _UNIT) * _UNIT


def _buffer_bytes(bucket: StateBucket) -> int:
    """Return the bytes of a buffer for the states of a bucket."""
    return sum(_aligned(x.nbytes) for found in bucket.states.values() for x in found)


class StateStream:
    """Updates the rows of `groups` with their optimizer states.

    Between updates, the states are kept on the device or, with `on_host`, on the host. An update
    computes on the device in both cases, with the same bits. See [Note: At rest and at work] in
    docs/design/notes/optimizer.md.
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
        self._every: list[StateBucket] = []
        self._weights_may_change = weights_may_change
        self._inward = streams.new(device) if on_host else None
        self._outward = streams.new(device) if on_host else None
        self._home: streams.Event | None = None
        """Event after which all states have been copied back to the host."""
        self._buckets = self.add(groups)

    @property
    def work_bytes(self) -> int:
        """Bytes of device memory that `pass_through` allocates for states."""
        wide = max((bucket.wide_bytes for bucket in self._every), default=0)
        return wide + (2 * self._largest(self._every) if self._on_host else 0)

    def add(self, groups: Mapping[GroupValues, list[Resting]]) -> list[StateBucket]:
        """Divide further rows into buckets and return these, for later calls of `pass_through`."""
        rows = [row for of_group in groups.values() for row in of_group]
        narrow = any(x.dtype != row.grad.dtype for row in rows for x in row.states.values())
        # Only copies need a limit of bytes: rows that are updated in place are one bucket.
        limit = self._bucket_bytes if self._on_host or narrow else sys.maxsize
        self._every += (found := _buckets_of(groups, limit))
        return found

    def settle(self) -> None:
        """Block the host until it may read and write the states in its memory."""
        if self._home is not None:
            self._home.synchronize()

    def pass_through(
        self,
        update: Callable[[GroupValues, Rows], None],
        buckets: Sequence[StateBucket] | None = None,
    ) -> None:
        """Call `update` for the rows of each bucket, then copy its master weights to the weights.

        `buckets`: the result of a call of `add`; None: the buckets of the `groups` given first.
        """
        buckets = self._buckets if buckets is None else buckets
        if not self._on_host:
            for bucket in buckets:
                self._work(bucket, bucket.states, update)
        elif buckets:
            self._stream(update, buckets)

    def _stream(
        self, update: Callable[[GroupValues, Rows], None], buckets: Sequence[StateBucket]
    ) -> None:
        """Update buckets whose states rest on the host, through two buffers on the device."""
        device, size = self._device, self._largest(buckets)
        buffers = [_Buffer(size, device) for _ in range(2)]
        # Copies to the device must not begin before earlier work on these states is done.
        streams.follow(self._inward)
        # `coming` is the copy in flight: the states of the next bucket to update.
        coming = self._bring(buckets[0], buffers[0])
        for number, bucket in enumerate(buckets):
            here, arrived = coming
            # The next bucket is copied into the other buffer while this one is updated.
            if number + 1 < len(buckets):
                coming = self._bring(buckets[number + 1], buffers[(number + 1) % 2])
            if arrived is not None:
                arrived.wait()
            self._work(bucket, here, update)
            self._take_back(bucket, here, buffers[number % 2])
        # After the return, the allocator may give the memory of the buffers to other tensors of
        # this stream. So make the stream wait until the copies from the buffers are done.
        for buffer in buffers:
            if buffer.free is not None:
                buffer.free.wait()
        self._home = streams.mark(device)

    @staticmethod
    def _largest(buckets: Sequence[StateBucket]) -> int:
        return max(map(_buffer_bytes, buckets), default=0)

    def _bring(
        self, bucket: StateBucket, buffer: _Buffer
    ) -> tuple[dict[str, list[Tensor]], streams.Event | None]:
        """Launch the copy of a bucket's states into `buffer`; return the copies and an event."""
        places = buffer.views(bucket)
        with streams.on(self._inward):
            if buffer.free is not None:
                # Wait until the bucket that was in this buffer before is copied to the host.
                buffer.free.wait()
            for name, found in bucket.states.items():
                for place, rest in zip(places[name], found, strict=True):
                    place.copy_(rest, non_blocking=True)
            return places, streams.mark(self._device)

    def _take_back(
        self, bucket: StateBucket, places: Mapping[str, list[Tensor]], buffer: _Buffer
    ) -> None:
        """Launch the copy of a bucket's states back to the host."""
        # Copies to the host wait for the update, which is queued on the current stream.
        streams.follow(self._outward)
        with streams.on(self._outward):
            for name, found in bucket.states.items():
                for place, rest in zip(places[name], found, strict=True):
                    rest.copy_(place, non_blocking=True)
            buffer.free = streams.mark(self._device)

    def _work(
        self,
        bucket: StateBucket,
        states: Mapping[str, list[Tensor]],
        update: Callable[[GroupValues, Rows], None],
    ) -> None:
        """Update a bucket, whose `states` are on the device, and write narrow states back.

        An update computes in the dtype of gradients, so a narrow state is rounded once.
        """
        dtype, weights = bucket.rows[0].grad.dtype, [row.weights for row in bucket.rows]
        # `to` returns a state that has this dtype itself, so that it is updated in place.
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
    """Group this rank's rows by the group values of their parameters; leave out empty rows."""
    groups: dict[GroupValues, list[Resting]] = {}
    for item, shard in shards.items():
        if shard.weights.numel():
            groups.setdefault(values[item], []).append(shard)
    return groups


def take_up(master: Tensor, weight: Tensor) -> None:
    """Copy the weights that other code has written into their master weights.

    They are found by comparison: a weight that nobody has written is its master, rounded. See
    [Note: Written weights] in docs/design/notes/optimizer.md.
    """
    rounded = master.to(weight.dtype)
    torch.where(rounded == weight, master, weight, out=master)
