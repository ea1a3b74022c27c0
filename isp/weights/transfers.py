"""Weights and gradients on their way, and the buffers they travel in.

[Note: Pieces] A dim of N on p ranks is cut as `torch.chunk` cuts: ceil(N / p) each, the last ranks
less or none. Collectives move equal pieces, so short pieces travel padded, and the padding, which
lies behind the last one, is cut off as a view. Rows (dim 0) lie one piece behind the other in the
full tensor: they are gathered where they are read and sent from where they are. Any other dim costs
a copy.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isp.comm import Channel, Pending, streams
from isp.comm.cargo import Cargo, Purpose
from isp.comm.cuda import Allocate
from isp.comm.mappings import pad_rows
from isp.parallel.layout import ParameterLayout
from isp.weights.declare import WeightHolder

__all__ = [
    "GatheredLayer",
    "GradientReducer",
    "GradientSink",
    "MemoryPool",
    "ParameterGradients",
    "gather",
]

# -- weights ---------------------------------------------------------------------------------


class GatheredLayer:
    """The full weight of a layer, and its bias where one is read; there until all let go of it.

    [Note: Versions] torch counts the in-place changes of a tensor, but not those of fused
    optimizers. A full tensor is stale if since the launch of its gather its shard has changed or
    any optimizer has stepped: it is not used, but gathered anew. What is written through `.data`
    nobody sees: that is for `begin` and `drain`.
    """

    __slots__ = ("_full", "_holders", "_leases", "_shards", "_version")

    def __init__(self, shards: tuple[nn.Parameter, ...]) -> None:
        self._shards = shards
        self._version = _version(shards)
        self._full: list[Pending] = []
        self._leases: list[Lease] = []
        self._holders = 1

    @property
    def stale(self) -> bool:
        """Whether a shard may have changed since its gather was launched."""
        return _version(self._shards) != self._version

    @property
    def has_bias(self) -> bool:
        """Whether the bias is here, too."""
        return len(self._full) > 1

    def weight(self) -> Tensor:
        """The full weight; waits for it."""
        return self._full[0].wait()

    def bias(self) -> Tensor:
        """The full bias; waits for it."""
        return self._full[1].wait()

    def hold(self) -> GatheredLayer:
        """Itself, with one more that has to let go of it."""
        self._holders += 1
        return self

    def let_go(self) -> None:
        """The last one waits for what is still under way, and gives the buffers back."""
        self._holders -= 1
        if self._holders == 0:
            for full in self._full:
                full.wait()
            for lease in self._leases:
                lease.release()


def gather(
    layer: WeightHolder, channel: Channel, pool: MemoryPool, *, with_bias: bool
) -> GatheredLayer:
    """Set the full weight of `layer` on its way into a buffer of `pool`; its bias, if asked for.

    Where the rows divide, the shard itself is sent and the buffer itself is what the matmul reads:
    no copy. Elsewhere see [Note: Pieces].
    """
    weight, bias = layer.weight, layer.bias if with_bias else None
    gathered = GatheredLayer((weight,) if bias is None else (weight, bias))
    for local, shard in zip(("weight", "bias"), gathered._shards, strict=False):
        if channel.size == 1:
            gathered._full.append(Pending.ready(shard.detach()))
            continue
        layout = layer.layouts[local]
        rows, *rest = layout.piece_shape
        lease = pool.lease((channel.size * rows, *rest), shard.dtype, shard.device)
        gathered._leases.append(lease)
        cargo = Cargo(Purpose.WEIGHT, layer.name, local)
        piece = shard.detach()
        if layout.travels_as_it_lies:
            full = channel.all_gather_into(lease.tensor, piece.contiguous(), cargo=cargo)
        else:
            piece = pad_rows(piece.movedim(layout.dim, 0), rows)
            full = channel.all_gather_into(lease.tensor, piece, cargo=cargo).then(layout.joined)
        gathered._full.append(full)
    return gathered


_writes = attrgetter("_version")


def _version(shards: tuple[nn.Parameter, ...]) -> int:
    """A number that grows with each visible write [Note: Versions]."""
    writes: int = sum(map(_writes, shards))
    return writes + _optimizer_steps()[0]


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


class GradientSink(Protocol):
    """Sink of reduced gradients (`isp.optim.MainGradients` is one)."""

    def promise(self, parameter: nn.Parameter) -> None:
        """Announce one `add`.  Raises RuntimeError if there is none to come any more."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient, as promised; the tensor may not be kept."""

    def withdraw(self, parameter: nn.Parameter) -> None:
        """Take a promise back."""


class ParameterGradients:
    """The sink of those who have no other: adds into `parameter.grad`, as autograd would."""

    def promise(self, parameter: nn.Parameter) -> None:
        pass

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

    layout: ParameterLayout
    pending: Pending
    leases: list[Lease]

    def shard(self) -> Tensor:
        """The shard, without padding; waits for it."""
        layout, piece = self.layout, self.pending.wait()
        if layout.travels_as_it_lies:
            return piece
        return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])

    def release(self) -> None:
        """Give the buffers back, that of the shard too."""
        for lease in self.leases:
            lease.release()


class GradientReducer:
    """Sums full gradients over the weight group, each rank keeping its shard, in order of launch.

    A gradient is sent from where it was computed if it is cut by rows and they divide.
    At most `max_bytes_in_flight` of full gradients are kept: beyond that the oldest is waited for.
    """

    def __init__(
        self,
        channel: Channel,
        pool: MemoryPool,
        *,
        dtype: torch.dtype | None,
        max_bytes_in_flight: int,
    ) -> None:
        self.channel = channel
        self.pool = pool
        self._summed_in = partial(_wider, torch.bool if dtype is None else dtype)
        """The dtype of the sum of gradients of a dtype; any is wider than bool."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight = 0
        """Of the full gradients that are kept until their sums have arrived."""
        self.sink: GradientSink = ParameterGradients()
        self._in_flight: deque[tuple[nn.Parameter, int, _Sum]] = deque()
        """Of each the bytes of the full gradient as it travels, kept until its sum is there."""

    def launch(
        self, parameter: nn.Parameter, grad: Tensor, layout: ParameterLayout, *, cargo: Cargo
    ) -> None:
        """Set the sum of the full `grad` over the group on its way to the sink, as promised."""
        if self.channel.size == 1:
            self.sink.add(parameter, grad)
            return
        num_bytes = grad.numel() * self.travels_in(grad.dtype).itemsize
        while self._in_flight and self.bytes_in_flight + num_bytes > self.max_bytes_in_flight:
            self._deliver_oldest()
        self._in_flight.append((parameter, num_bytes, self._send(grad, layout, cargo)))
        self.bytes_in_flight += num_bytes

    def reduce(self, grad: Tensor, layout: ParameterLayout, *, cargo: Cargo) -> Tensor:
        """This rank's shard of the sum of the full `grad` over the group; waits for it."""
        if self.channel.size == 1:
            return grad
        sent = self._send(grad, layout, cargo)
        shard = sent.shard().clone()
        sent.release()
        return shard

    def travels_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of `dtype` travels: that of the sum where others add up."""
        return dtype if self.channel.sums_locally else self._summed_in(dtype)

    def finish(self) -> None:
        """Wait for all that is in flight and deliver it."""
        while self._in_flight:
            self._deliver_oldest()

    def _send(self, grad: Tensor, layout: ParameterLayout, cargo: Cargo) -> _Sum:
        shape = layout.piece_shape
        if layout.travels_as_it_lies:
            pieces = grad.contiguous()
        else:
            pieces = pad_rows(grad.movedim(layout.dim, 0), layout.parts * shape[0])
        leases = [self.pool.lease(shape, self._summed_in(grad.dtype), grad.device)]
        received = None
        if self.channel.sums_locally:
            leases.append(self.pool.lease(tuple(pieces.shape), pieces.dtype, pieces.device))
            received = leases[1].tensor
        pending = self.channel.reduce_scatter_into(
            leases[0].tensor, pieces, received=received, cargo=cargo
        )
        return _Sum(layout, pending, leases)

    def _deliver_oldest(self) -> None:
        parameter, num_bytes, arriving = self._in_flight.popleft()
        self.bytes_in_flight -= num_bytes
        self.sink.add(parameter, arriving.shard())
        arriving.release()


_wider = cache(torch.promote_types)  # to torch, an operator
"""The dtype that holds the values of both."""


# -- buffers ---------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Lease:
    """The right to use a buffer until `release`; reading `tensor` afterwards raises."""

    _tensor: Tensor
    _pool: MemoryPool
    _released: bool = False

    @property
    def tensor(self) -> Tensor:
        """The buffer.  Raises RuntimeError once the lease has ended."""
        if self._released:
            raise RuntimeError("this buffer was released: another transfer may be writing to it")
        return self._tensor

    def release(self) -> None:
        """Give the buffer back.  Raises RuntimeError if that was done already."""
        if self._released:
            raise RuntimeError("this buffer was released already: it may be leased to another now")
        self._released = True
        self._pool._take_back(self._tensor)


_Key = tuple[torch.dtype, torch.device, int]


@dataclass(eq=False)
class MemoryPool:
    """Lends buffers by dtype, device and number of elements, and takes them back for reuse.

    Blocks are alike, so the buffers of a block serve all blocks after the next. With `reuse` off
    every lease is a new buffer, dropped at its end: the same program with the allocator instead.
    `poison` fills what is given back with NaN, so that reading it late shows in the loss.
    `allocate` makes buffers that are not torch's usual ones.

    [Note: Reuse across streams] On CUDA a buffer that is given back may still be read by kernels
    queued on the stream of whoever used it. An event marks that point, and a lease makes the stream
    that is current at that moment wait for it: the gather waits for just this, not for all compute.
    """

    reuse: bool = True
    poison: bool = False
    allocate: Allocate | None = None
    reserved_bytes: int = 0
    """Held by the pool, leased or free."""
    leased_bytes: int = 0
    """Leased now."""
    peak_leased_bytes: int = 0
    """The most that was leased at once."""
    allocations: int = 0
    """Leases for which a new buffer had to be made."""
    reuses: int = 0
    """Leases served by a buffer that was there."""
    _free: dict[_Key, list[tuple[Tensor, streams.Event | None]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Lease:
        """A buffer of this shape, its contents undefined."""
        key = dtype, device, math.prod(shape)
        if waiting := self._free[key]:
            buffer, last_use = waiting.pop()
            if buffer.shape != shape:
                buffer = buffer.view(shape)
            if last_use is not None:
                last_use.wait()
            self.reuses += 1
        else:
            with torch.inference_mode(False):  # such a tensor could not be written in training
                if self.allocate is not None:
                    buffer = self.allocate(math.prod(shape), dtype).view(shape)
                else:
                    buffer = torch.empty(shape, dtype=dtype, device=device)
            self.reserved_bytes += buffer.nbytes
            self.allocations += 1
        self.leased_bytes += buffer.nbytes
        self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
        return Lease(buffer, self)

    def reset_lazy_pools(self) -> None:
        """Drop the buffers that are not leased, e.g. before a phase with other shapes."""
        for buffer, last_use in (item for items in self._free.values() for item in items):
            if last_use is not None:
                last_use.synchronize()
            self.reserved_bytes -= buffer.nbytes
        self._free.clear()

    def _take_back(self, tensor: Tensor) -> None:
        self.leased_bytes -= tensor.nbytes
        if self.poison and tensor.is_floating_point():
            tensor.fill_(math.nan)
        if not self.reuse:
            self.reserved_bytes -= tensor.nbytes
            streams.in_use(tensor)
            return
        key = tensor.dtype, tensor.device, tensor.numel()
        self._free[key].append((tensor, streams.mark(tensor.device)))
