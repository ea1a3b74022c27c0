"""All-gathers of weights and reduce-scatters of gradients.

[Note: Pieces] A dim of N on p ranks is cut as `torch.chunk` cuts: ceil(N / p) each, the last ranks
less or none. Collectives move equal pieces, so short pieces are sent padded, and the padding at the
end is cut off as a view. Pieces of rows (dim 0) are contiguous in the full tensor, so they are
gathered to where they are read and sent from where they are. Any other dim costs a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isp.core.comm import Channels, Pending, streams
from isp.core.mesh.topology import Axis
from isp.core.torch_private import version_of
from isp.core.weights.gradients import GradientSink, ParameterGradients
from isp.core.weights.pool import Lease, MemoryPool
from isp.core.weights.prefetch_plan import WeightOp, WeightOpKind
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "DeclaredWeight",
    "ErrorLatch",
    "GatheredLayer",
    "GradientReducer",
    "WeightGatherer",
    "gather",
]

_GATHER = WeightOpKind.GATHER  # Python 3.11 looks members up by hand


class ErrorLatch:
    """A context that keeps the last error: after a failed collective, ranks are out of step."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.error = error

    def check(self) -> None:
        """Raise RuntimeError if there was an error."""
        if self.error is not None:
            raise RuntimeError(
                f"a collective of this communicator failed ({self.error}): its ranks are no"
                f" longer at the same place; end the run and resume from the last checkpoint"
            ) from self.error


# -- weights ---------------------------------------------------------------------------------


class GatheredLayer:
    """The full weight of a layer, and its bias where one is read; kept until all users let go.

    [Note: Versions] torch counts the in-place changes of a tensor, but not those of fused
    optimizers. A full tensor is stale if, since the launch of its gather, its shard has changed or
    any optimizer has stepped; then it is gathered again. Writes through `.data` cannot be seen:
    call `begin` or `drain` after them.
    """

    __slots__ = ("_holders", "_leases", "_shards", "_version", "full")

    def __init__(self, shards: Sequence[ShardedParameter]) -> None:
        self._shards = shards
        self._version = self._now()
        self.full: list[Pending] = []
        """The full weight, and after it the bias."""
        self._leases: list[Lease] = []
        self._holders = 1

    def is_stale(self) -> bool:
        """Return True if a shard may have changed since its gather was launched."""
        return self._now() != self._version

    def hold(self) -> GatheredLayer:
        """Add a user, who has to call `let_go`; return itself."""
        self._holders += 1
        return self

    def let_go(self) -> None:
        """Remove a user; the last one waits for the gathers and gives the buffers back."""
        self._holders -= 1
        if self._holders == 0:
            for full in self.full:
                full.wait()
            for lease in self._leases:
                lease.release()

    def _now(self) -> int:
        """Return a number that grows with each visible write [Note: Versions]."""
        number: int = _optimizer_steps()[0]
        for shard in self._shards:
            number += version_of(shard.parameter)
        return number


@dataclass(eq=False, slots=True)
class DeclaredWeight:
    """A weight of the model, and its gathered tensors until the plan frees them."""

    name: str
    block: nn.Module
    """The block that prerequisites of the gather are called with."""
    shards: tuple[ShardedParameter, ...]
    """The weight, and the first bias of the layers that read it."""
    has_other_biases: bool = False
    """Whether layers that share the weight have other biases, which are gathered at each use."""
    gathered: GatheredLayer | None = None


class WeightGatherer:
    """Gathers weights over the ranks that shard them, before a use or at it.

    [Note: Gather stream] Gathers run on a stream of their own. They wait for the last use of their
    buffer and for what published the weight, not for compute queued before them.
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
        """Make gathers wait for work queued so far, such as an update of the weights."""
        streams.follow(self._stream)

    def launch(self, ops: Sequence[WeightOp]) -> None:
        """Launch the gathers among `ops` of weights that are not gathered yet.

        Waits are left to the layers: a weight is waited for where it is read.
        """
        ready = None
        try:
            with streams.on(self._stream):
                for kind, name, bias in ops:
                    weight = self.weights[name]
                    if kind is _GATHER and weight.gathered is None:
                        if weight.block is not ready:
                            ready = weight.block
                            for fn in self.prerequisites:
                                fn(ready)
                        shards = weight.shards[:1] if bias is None else weight.shards
                        weight.gathered = self._gather(shards)
        except Exception as failed:
            self._latch.error = failed
            raise

    def free(self, ops: Sequence[WeightOp], held: GatheredLayer | None = None) -> None:
        """Let go of `held`, and drop the weights of `ops`, which are frees, if gathered."""
        try:
            if held is not None:
                held.let_go()
            for _, name, _ in ops:
                weight = self.weights[name]
                gathered, weight.gathered = weight.gathered, None
                if gathered is not None:
                    gathered.let_go()
        except Exception as failed:
            self._latch.error = failed
            raise

    def gather_now(
        self, shards: Sequence[ShardedParameter], block: nn.Module | None = None
    ) -> GatheredLayer:
        """Launch a gather for a use that waits for it, after all work queued so far."""
        self.follow()
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

    If the rows divide evenly, the shard is sent and the buffer read by the matmul without a copy;
    otherwise see [Note: Pieces].
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
        piece = shard.as_it_travels(piece, layout.piece_shape[0])
        full = channel.all_gather_into(lease.tensor, piece, tag=shard.tag)
        gathered.full.append(full if layout.travels_as_it_lies else full.then(layout.joined))
    return gathered


@cache
def _optimizer_steps() -> list[int]:
    """Return the counter of steps of all torch optimizers in this process since the first call.

    Fused optimizers change weights without increasing their versions. The counter belongs to the
    process, as torch's hooks on all optimizers do.
    """
    steps = [0]

    def stepped(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(stepped)
    return steps


# -- gradients -------------------------------------------------------------------------------


class _Sum(NamedTuple):
    """A reduce-scatter in flight: this rank's shard of the sum of a gradient."""

    of: ShardedParameter
    pending: Pending
    leases: list[Lease]
    num_bytes: int
    """Size of the full gradient as sent, which is kept until the sum has arrived."""

    def shard(self) -> Tensor:
        """Wait for the shard and return it without padding."""
        layout, piece = self.of.layout, self.pending.wait()
        if layout.travels_as_it_lies:
            return piece
        return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])

    def release(self) -> None:
        """Give all buffers back, also that of the shard."""
        for lease in self.leases:
            lease.release()


class GradientReducer:
    """Reduce-scatters full gradients over the ranks that shard them, and delivers them in order.

    If rows divide evenly, a gradient is sent from where it was computed, and the sum is received
    in the sink's tensor, if it provides one. At most `max_bytes_in_flight` bytes of full gradients
    are kept; beyond that the oldest reduction is waited for.
    """

    def __init__(
        self,
        channels: Channels,
        pool: MemoryPool,
        *,
        dtype: torch.dtype | None,
        max_bytes_in_flight: int,
    ) -> None:
        self._channels = channels
        self.pool = pool
        self._summed_in = partial(_wider, torch.bool if dtype is None else dtype)
        """Maps a gradient's dtype to that of its sum; every dtype is wider than bool."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight = 0
        """Size of the full gradients whose sums have not arrived."""
        self.sink: GradientSink = ParameterGradients()
        self._in_flight: deque[_Sum] = deque()

    def promise(self, parameter: ShardedParameter, dtype: torch.dtype) -> Tensor | None:
        """Announce a full gradient of `dtype` to the sink; return where to receive its sum."""
        into = None
        if (
            self._channels[parameter.layout.cut_over].size > 1
            and parameter.layout.travels_as_it_lies
        ):
            into = self._summed_in(dtype)
        return self.sink.promise(parameter.parameter, into)

    def launch(
        self, parameter: ShardedParameter, grad: Tensor, place: Tensor | None = None
    ) -> None:
        """Launch the reduction of the full `grad`, promised to the sink, into `place`."""
        if self._channels[parameter.layout.cut_over].size == 1:
            self.sink.add(parameter.parameter, grad)
            return
        num_bytes = grad.numel() * self.travels_in(grad.dtype).itemsize
        while self._in_flight and self.bytes_in_flight + num_bytes > self.max_bytes_in_flight:
            self._deliver_oldest()
        self._in_flight.append(self._send(parameter, grad, num_bytes, place))
        self.bytes_in_flight += num_bytes

    def reduce(self, parameter: ShardedParameter, grad: Tensor) -> Tensor:
        """Reduce the full `grad` over the group, wait, and return this rank's shard."""
        if self._channels[parameter.layout.cut_over].size == 1:
            return grad
        sent = self._send(parameter, grad, 0, None)
        shard = sent.shard().clone()
        sent.release()
        return shard

    def travels_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a gradient is sent: the sum's, unless receivers sum."""
        return dtype if self._channels[Axis.WEIGHT].sums_locally else self._summed_in(dtype)

    def finish(self) -> None:
        """Wait for all reductions in flight and deliver them."""
        while self._in_flight:
            self._deliver_oldest()

    def _send(
        self, parameter: ShardedParameter, grad: Tensor, num_bytes: int, place: Tensor | None
    ) -> _Sum:
        """Launch the reduce-scatter into `place`, or into a buffer of the pool."""
        pieces = parameter.as_it_travels(grad, parameter.buffer_shape[0])
        leases = []
        if place is None:
            shape, dtype = parameter.layout.piece_shape, self._summed_in(grad.dtype)
            leases.append(self.pool.lease(shape, dtype, grad.device))
            place = leases[0].tensor
        received = None
        channel = self._channels[parameter.layout.cut_over]
        if channel.sums_locally:
            leases.append(self.pool.lease(parameter.buffer_shape, pieces.dtype, grad.device))
            received = leases[-1].tensor
        pending = channel.reduce_scatter_into(
            place, pieces, received=received, tag=parameter.gradient_tag
        )
        return _Sum(parameter, pending, leases, num_bytes)

    def _deliver_oldest(self) -> None:
        arriving = self._in_flight.popleft()
        self.bytes_in_flight -= arriving.num_bytes
        self.sink.add(arriving.of.parameter, arriving.shard())
        arriving.release()


_wider = cache(torch.promote_types)  # to torch, an operator
"""Returns the dtype that holds the values of two."""
