"""Weights and gradients on their way.

[Note: Pieces] A dim of N on p ranks is cut as `torch.chunk` cuts: ceil(N / p) each, the last ranks
less or none. Collectives move equal pieces, so short pieces travel padded, and the padding, which
lies behind the last one, is cut off as a view. Rows (dim 0) lie one piece behind the other in the
full tensor: they are gathered where they are read and sent from where they are. Any other dim costs
a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isp.core.comm import Channels, Pending, streams
from isp.core.mesh.topology import Axis
from isp.core.torch_private import version_of
from isp.core.weights.pool import Lease, MemoryPool
from isp.core.weights.prefetch_plan import WeightOp, WeightOpKind
from isp.core.weights.sharded_parameter import ShardedParameter

__all__ = [
    "DeclaredWeight",
    "ErrorLatch",
    "GatheredLayer",
    "GradientReducer",
    "GradientSink",
    "ParameterGradients",
    "WeightGatherer",
    "WriteGradient",
    "gather",
]

_GATHER = WeightOpKind.GATHER  # Python 3.11 looks members up by hand


class ErrorLatch:
    """Keeps the last error within it: a collective that failed leaves ranks at other places."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.error = error

    def check(self) -> None:
        """Raises RuntimeError if there was one."""
        if self.error is not None:
            raise RuntimeError(
                f"a collective of this communicator failed ({self.error}): its ranks are no"
                f" longer at the same place; end the run and resume from the last checkpoint"
            ) from self.error


# -- weights ---------------------------------------------------------------------------------


class GatheredLayer:
    """The full weight of a layer, and its bias where one is read; there until all let go of it.

    [Note: Versions] torch counts the in-place changes of a tensor, but not those of fused
    optimizers. A full tensor is stale if since the launch of its gather its shard has changed or
    any optimizer has stepped: it is not used, but gathered anew. What is written through `.data`
    nobody sees: that is for `begin` and `drain`.
    """

    __slots__ = ("_holders", "_leases", "_shards", "_version", "full")

    def __init__(self, shards: Sequence[ShardedParameter]) -> None:
        self._shards = shards
        self._version = self._now()
        self.full: list[Pending] = []
        """The full weight, and the bias behind it."""
        self._leases: list[Lease] = []
        self._holders = 1

    def is_stale(self) -> bool:
        """Whether a shard may have changed since its gather was launched."""
        return self._now() != self._version

    def hold(self) -> GatheredLayer:
        """Itself, with one more that has to let go of it."""
        self._holders += 1
        return self

    def let_go(self) -> None:
        """The last one waits for what is still under way, and gives the buffers back."""
        self._holders -= 1
        if self._holders == 0:
            for full in self.full:
                full.wait()
            for lease in self._leases:
                lease.release()

    def _now(self) -> int:
        """A number that grows with each visible write [Note: Versions]."""
        number: int = _optimizer_steps()[0]
        for shard in self._shards:
            number += version_of(shard.parameter)
        return number


@dataclass(eq=False, slots=True)
class DeclaredWeight:
    """A weight of the model, and what is gathered of it until the plan frees that."""

    name: str
    block: nn.Module
    """Given to the prerequisites of its gather."""
    shards: tuple[ShardedParameter, ...]
    """It, and the first bias of the layers that read it."""
    has_other_biases: bool = False
    """Whether layers that share it have biases of their own, which are gathered with it anew."""
    gathered: GatheredLayer | None = None


class WeightGatherer:
    """Gathers weights over the ranks that they are cut over, ahead of their use or for it.

    [Note: Gather stream] A gather waits for what is on its own stream: the last use of its buffer,
    and what published the weight. It does not wait for compute queued before it.
    """

    def __init__(
        self, channels: Channels, pool: MemoryPool, device: torch.device, latch: ErrorLatch
    ) -> None:
        self.weights: dict[str, DeclaredWeight] = {}
        self.prerequisites: list[Callable[[nn.Module], None]] = []
        """Called with the block of a weight before its gather."""
        self._stream = streams.new(device)
        self._gather = partial(gather, channels=channels, pool=pool)
        self._latch = latch

    def follow(self) -> None:
        """Let gathers wait for what is queued now, such as an update of the weights."""
        streams.follow(self._stream)

    def launch(self, acts: Sequence[WeightOp]) -> None:
        """Gather what the plan says, if it is not there; a wait is the layer's own."""
        ready = None
        try:
            with streams.on(self._stream):
                for kind, name, bias in acts:
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

    def free(self, acts: Sequence[WeightOp], held: GatheredLayer | None = None) -> None:
        """Let go of what was `held`, and drop what the plan frees, if it is there."""
        try:
            if held is not None:
                held.let_go()
            for _, name, _ in acts:
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
        """Gather for a use that waits for it, what has written the weight being queued before."""
        self.follow()
        with streams.on(self._stream):
            if block is not None:
                for fn in self.prerequisites:
                    fn(block)
            return self._gather(shards)

    def drain(self) -> None:
        """Wait for the gathers on their way and drop what is there."""
        with self._latch:
            for weight in self.weights.values():
                gathered, weight.gathered = weight.gathered, None
                if gathered is not None:
                    gathered.let_go()


def gather(
    shards: Sequence[ShardedParameter], channels: Channels, pool: MemoryPool
) -> GatheredLayer:
    """Set the full tensors of a layer's `shards` on their way into buffers of `pool`.

    Where the rows divide, the shard itself is sent and the buffer itself is what the matmul reads:
    no copy. Elsewhere see [Note: Pieces].
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
    """The number of steps of all torch optimizers of this process since the first call.

    Fused ones change weights without torch counting it. A clock that no run owns, like torch's
    hooks on all optimizers themselves.
    """
    steps = [0]

    def stepped(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(stepped)
    return steps


# -- gradients -------------------------------------------------------------------------------


class WriteGradient(Protocol):
    """Computes a gradient straight `into` a tensor, or adds it there."""

    def __call__(self, *, into: Tensor, add: bool) -> object: ...


class GradientSink(Protocol):
    """Sink of reduced gradients (`isp.core.optim.MainGradients` is one)."""

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        """Announce one `add`.  Raises RuntimeError if there is none to come any more.

        Of a gradient that will be of `dtype` it may give the tensor in which to receive it, and
        which then is given to `add`.
        """

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient, as promised; the tensor may not be kept."""

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Take a promise back."""


class ParameterGradients:
    """The sink of those who have no other: adds into `parameter.grad`, as autograd would."""

    def promise(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor | None:
        return None

    def withdraw(self, parameter: nn.Parameter) -> None:
        pass

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        gradient = gradient.to(parameter.dtype)
        if parameter.grad is None:  # contiguous as shards are: fused optimizers rely on it
            parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
        else:
            parameter.grad += gradient


class _Sum(NamedTuple):
    """This rank's shard of a gradient's sum, on its way."""

    of: ShardedParameter
    pending: Pending
    leases: list[Lease]
    num_bytes: int
    """Of the full gradient as it travels, kept until its sum is there."""

    def shard(self) -> Tensor:
        """The shard, without padding; waits for it."""
        layout, piece = self.of.layout, self.pending.wait()
        if layout.travels_as_it_lies:
            return piece
        return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])

    def release(self) -> None:
        """Give the buffers back, that of the shard too."""
        for lease in self.leases:
            lease.release()


class GradientReducer:
    """Sums full gradients over the ranks that they are cut over, each keeping its shard, in order.

    A gradient is sent from where it was computed if it is cut by rows and they divide, and the sum
    is then received where the sink adds it up, if that has a tensor for it.
    At most `max_bytes_in_flight` of full gradients are kept: beyond that the oldest is waited for.
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
        """The dtype of the sum of gradients of a dtype; any is wider than bool."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight = 0
        """Of the full gradients that are kept until their sums have arrived."""
        self.sink: GradientSink = ParameterGradients()
        self._in_flight: deque[_Sum] = deque()

    def promise(self, parameter: ShardedParameter, dtype: torch.dtype) -> Tensor | None:
        """Announce a full gradient of `dtype` to the sink, and ask where it is to be received."""
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
        """Set the sum of the full `grad` over the group on its way to the sink, as promised."""
        if self._channels[parameter.layout.cut_over].size == 1:
            self.sink.add(parameter.parameter, grad)
            return
        num_bytes = grad.numel() * self.travels_in(grad.dtype).itemsize
        while self._in_flight and self.bytes_in_flight + num_bytes > self.max_bytes_in_flight:
            self._deliver_oldest()
        self._in_flight.append(self._send(parameter, grad, num_bytes, place))
        self.bytes_in_flight += num_bytes

    def reduce(self, parameter: ShardedParameter, grad: Tensor) -> Tensor:
        """This rank's shard of the sum of the full `grad` over the group; waits for it."""
        if self._channels[parameter.layout.cut_over].size == 1:
            return grad
        sent = self._send(parameter, grad, 0, None)
        shard = sent.shard().clone()
        sent.release()
        return shard

    def travels_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of `dtype` travels: that of the sum where others add up."""
        return dtype if self._channels[Axis.WEIGHT].sums_locally else self._summed_in(dtype)

    def finish(self) -> None:
        """Wait for all that is in flight and deliver it."""
        while self._in_flight:
            self._deliver_oldest()

    def _send(
        self, parameter: ShardedParameter, grad: Tensor, num_bytes: int, place: Tensor | None
    ) -> _Sum:
        """Set the sum on its way to `place`, or into a buffer."""
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
"""The dtype that holds the values of both."""
