"""All-gathers of weights and reduce-scatters of gradients.

Only shards of rows of equal number are sent and received without a copy; others are padded or
moved first. See [Note: Pieces] in docs/design/notes/weights.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isp.core.comm import Channel, Channels, Pending, streams
from isp.core.mesh.topology import Axis
from isp.core.torch_private import version_of
from isp.core.weights.gradients import GradientSink, ParameterGradients
from isp.core.weights.pool import Lease, MemoryPool
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "DeclaredWeight",
    "ErrorLatch",
    "GatheredLayer",
    "GradientReducer",
    "PlannedGather",
    "WeightGatherer",
    "gather",
]


class ErrorLatch:
    """A context manager that records an exception raised in it, for `check` to refuse later calls.

    After a failed collective, ranks no longer launch the same collectives in the same order.
    """

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.error = error

    def check(self) -> None:
        """Raise RuntimeError if an error was recorded."""
        if self.error is not None:
            raise RuntimeError(
                f"a collective of this communicator failed ({self.error}): its ranks are no"
                f" longer at the same place; end the run and resume from the last checkpoint"
            ) from self.error


# -- weights ---------------------------------------------------------------------------------


class GatheredLayer:
    """The full weight of a layer, and its bias if one is read; kept until its last user lets go.

    It is stale, and gathered again, if its shard has changed or any optimizer has stepped since
    the gather. See [Note: Versions] in docs/design/notes/weights.md.
    """

    __slots__ = ("_leases", "_shards", "_users", "_version", "full")

    def __init__(self, shards: Sequence[ShardedParameter]) -> None:
        self._shards = shards
        self._version = _version(shards)
        self.full: list[Pending] = []
        """The full weight, and after it the bias."""
        self._leases: list[Lease] = []
        self._users = 1  # the code that launched the gather, until it calls `let_go`

    def is_stale(self) -> bool:
        """Return True if a shard may have changed since its gather was launched."""
        return _version(self._shards) != self._version

    def hold(self) -> GatheredLayer:
        """Add a user, which must call `let_go`; return `self`."""
        self._users += 1
        return self

    def let_go(self) -> None:
        """Remove a user; after the last one, wait for the gathers and release the buffers."""
        self._users -= 1
        if self._users == 0:
            # If no use has read the weight, nothing has waited for the gather: it may be in flight.
            for full in self.full:
                full.wait()
            for lease in self._leases:
                lease.release()


def _version(shards: Sequence[ShardedParameter]) -> int:
    """Return a number that grows with writes into `shards` and with steps of any torch optimizer.

    Of the writes it sees those that torch counts in a tensor's version, not those through `.data`.
    See [Note: Versions] in docs/design/notes/weights.md.
    """
    number: int = _optimizer_steps()[0]
    for shard in shards:
        number += version_of(shard.parameter)
    return number


@dataclass(eq=False, slots=True)
class DeclaredWeight:
    """A weight of the model as declared, and its gathered tensors until the plan frees them."""

    name: str
    block: nn.Module
    """The block of the weight, passed to `WeightGatherer.prerequisites` before a gather."""
    shards: tuple[ShardedParameter, ...]
    """The shard of the weight, and of the first bias of the layers that read the weight."""
    has_other_biases: bool = False
    """True if layers that share the weight have different biases. A use that reads a bias then
    gathers weight and bias for itself."""
    gathered: GatheredLayer | None = None
    """The full tensors, in flight or arrived; None: not gathered."""


PlannedGather: TypeAlias = tuple[DeclaredWeight, bool]
"""A gather of a plan: the weight, and True if its bias is gathered with it."""


class WeightGatherer:
    """Gathers weights over the ranks that shard them, ahead of a use or when a layer reads.

    Gathers run on their own stream and do not wait for compute. See [Note: Gather stream] in
    docs/design/notes/weights.md.
    """

    def __init__(
        self, channels: Channels, pool: MemoryPool, device: torch.device, latch: ErrorLatch
    ) -> None:
        self.weights: dict[str, DeclaredWeight] = {}
        self.prerequisites: list[Callable[[nn.Module], None]] = []
        """Functions called with the block of a weight before its gather."""
        self._stream = streams.new(device)
        self._gather = partial(gather, channels=channels, pool=pool)
        self._latch = latch

    def follow(self) -> None:
        """Make later gathers wait for the work queued so far, such as an update of the weights."""
        streams.follow(self._stream)

    def launch(self, gathers: Iterable[PlannedGather]) -> None:
        """Launch the gathers of weights that are not gathered yet."""
        try:
            with streams.on(self._stream):
                # The block for which the prerequisites were called last: once for all its weights.
                ready = None
                for weight, with_bias in gathers:
                    if weight.gathered is not None:
                        continue
                    if weight.block is not ready:
                        ready = weight.block
                        for fn in self.prerequisites:
                            fn(ready)
                    shards = weight.shards if with_bias else weight.shards[:1]
                    weight.gathered = self._gather(shards)
        except Exception as failed:
            self._latch.error = failed
            raise

    def free(self, weights: Iterable[DeclaredWeight], held: GatheredLayer | None = None) -> None:
        """Let go of `held`, and drop the gathered tensors of `weights`."""
        try:
            if held is not None:
                held.let_go()
            for weight in weights:
                gathered, weight.gathered = weight.gathered, None
                if gathered is not None:
                    gathered.let_go()
        except Exception as failed:
            self._latch.error = failed
            raise

    def gather_now(
        self, shards: Sequence[ShardedParameter], block: nn.Module | None = None
    ) -> GatheredLayer:
        """Launch a gather of a weight that is read next, after all work queued so far."""
        self.follow()  # outside of the plan, any queued work may have written the weight
        with streams.on(self._stream):
            if block is not None:
                for fn in self.prerequisites:
                    fn(block)
            return self._gather(shards)

    def drain(self) -> None:
        """Wait for gathers in flight and drop all gathered weights."""
        with self._latch:
            for weight in self.weights.values():
                gathered, weight.gathered = weight.gathered, None
                if gathered is not None:
                    gathered.let_go()


def gather(
    shards: Sequence[ShardedParameter], channels: Channels, pool: MemoryPool
) -> GatheredLayer:
    """Launch all-gathers of a layer's `shards` into buffers of `pool`.

    If rows divide evenly over ranks, nothing is copied: the shard itself is sent, and the matmul
    reads the buffer that received the shards. For all other shards see [Note: Pieces] in
    docs/design/notes/weights.md.
    """
    gathered = GatheredLayer(shards)
    for shard in shards:
        piece, layout = shard.parameter.detach(), shard.layout
        channel = channels[layout.cut_over]
        if channel.size == 1:
            gathered.full.append(Pending.ready(piece))
            continue
        lease = pool.lease(shard.buffer_shape, piece.dtype, piece.device)
        gathered._leases.append(lease)
        piece = shard.to_send(piece, layout.piece_shape[0])
        full = channel.all_gather_into(lease.tensor, piece, tag=shard.tag)
        gathered.full.append(full if layout.is_cut_in_place else full.then(layout.joined))
    return gathered


@cache
def _optimizer_steps() -> list[int]:
    """Return a list with one number: the steps of all torch optimizers since the first call.

    Fused optimizers change weights without increasing their versions. The counter is global to
    the process, since torch's hook on the steps of all optimizers is.
    """
    steps = [0]

    def stepped(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(stepped)
    return steps


# -- gradients -------------------------------------------------------------------------------


class _InFlight(NamedTuple):
    """A reduce-scatter of a gradient in flight."""

    parameter: ShardedParameter
    piece: Pending
    """This rank's part of the summed gradient, once it has arrived."""
    leases: list[Lease]
    """Buffers of the reduce-scatter, to release after `piece` has arrived."""
    num_bytes: int
    """Bytes of the full gradient that is sent; it is kept until `piece` has arrived."""


class GradientReducer:
    """Reduce-scatters full gradients over the ranks that shard them, and delivers them in order.

    If rows divide evenly, a gradient is sent without a copy, and the sum is received in a tensor
    of the sink, if the sink provides one. At most `max_bytes_in_flight` bytes of full gradients
    are kept; beyond that, the oldest reduction is waited for. The order of launches and deliveries
    depends on the order of calls and on sizes only, so it is the same on all ranks.
    """

    def __init__(
        self,
        channels: Channels,
        pool: MemoryPool,
        latch: ErrorLatch,
        *,
        dtype: torch.dtype | None,
        max_bytes_in_flight: int,
    ) -> None:
        self._channels = channels
        self.pool = pool
        self._latch = latch
        self._summed_in = partial(_wider, torch.bool if dtype is None else dtype)
        """Maps a gradient's dtype to its sum's; without `dtype` they are equal, as any is wider
        than bool."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight = 0
        """Size of the full gradients whose sums have not arrived."""
        self.sink: GradientSink = ParameterGradients()
        self._in_flight: deque[_InFlight] = deque()

    def add(self, parameter: ShardedParameter, grad: Tensor) -> None:
        """Launch the reduction of the full gradient `grad`; the sink gets the shard later.

        May wait for older reductions, to stay below `max_bytes_in_flight`.
        """
        layout, sink = parameter.layout, self.sink
        channel = self._channels[layout.cut_over]
        received_in = None
        if channel.size > 1 and layout.is_cut_in_place:
            received_in = self._summed_in(grad.dtype)
        # Outside of the `try`, which makes all later collectives raise: if the sink raises here, no
        # collective has failed, and ranks still launch the same collectives.
        place = sink.promise(parameter.parameter, received_in)
        try:
            if channel.size == 1:
                sink.add(parameter.parameter, grad)
                return
            num_bytes = grad.numel() * self.sent_dtype(grad.dtype).itemsize
            while self._in_flight and self.bytes_in_flight + num_bytes > self.max_bytes_in_flight:
                self._deliver_oldest()
            pending, leases = self._send(parameter, channel, grad, place)
            self._in_flight.append(_InFlight(parameter, pending, leases, num_bytes))
            self.bytes_in_flight += num_bytes
        except Exception as failed:
            self._latch.error = failed
            raise

    def reduce(self, parameter: ShardedParameter, grad: Tensor) -> Tensor:
        """Reduce the full `grad` over the group, wait, and return this rank's shard."""
        channel = self._channels[parameter.layout.cut_over]
        if channel.size == 1:
            return grad
        with self._latch:
            pending, leases = self._send(parameter, channel, grad, None)
            shard = parameter.without_padding(pending.wait()).clone()
            for lease in leases:
                lease.release()
        return shard

    def sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a gradient of `dtype` is sent.

        It is the dtype of the sum, except in a channel that `sums_locally`: there the gradient is
        sent in `dtype`, and each receiver widens it.
        """
        return dtype if self._channels[Axis.WEIGHT].sums_locally else self._summed_in(dtype)

    def finish(self) -> None:
        """Wait for all reductions in flight and deliver them."""
        with self._latch:
            while self._in_flight:
                self._deliver_oldest()

    def _send(
        self, parameter: ShardedParameter, channel: Channel, grad: Tensor, place: Tensor | None
    ) -> tuple[Pending, list[Lease]]:
        """Launch the reduce-scatter into `place`, or into a buffer of the pool.

        Returns this rank's part of the sum, which is in flight, and the buffers to release after it
        has arrived.
        """
        pieces = parameter.to_send(grad, parameter.buffer_shape[0])
        leases = []
        if place is None:
            shape, dtype = parameter.layout.piece_shape, self._summed_in(grad.dtype)
            leases.append(self.pool.lease(shape, dtype, grad.device))
            place = leases[0].tensor
        received = None
        if channel.sums_locally:  # it receives all ranks' pieces and sums them on this rank
            leases.append(self.pool.lease(parameter.buffer_shape, pieces.dtype, grad.device))
            received = leases[-1].tensor
        pending = channel.reduce_scatter_into(
            place, pieces, received=received, tag=parameter.gradient_tag
        )
        return pending, leases

    def _deliver_oldest(self) -> None:
        """Wait for the reduction launched first and add its sum to the sink."""
        parameter, pending, leases, num_bytes = self._in_flight.popleft()
        self.bytes_in_flight -= num_bytes
        self.sink.add(parameter.parameter, parameter.without_padding(pending.wait()))
        for lease in leases:
            lease.release()


# Cached to save time, because torch dispatches `promote_types` like an operator.
_wider = cache(torch.promote_types)
"""Returns the narrowest dtype that holds the values of two dtypes."""
