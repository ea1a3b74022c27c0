"""Gradients on their way: reduce-scatters in flight, and where they end."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from isp.comm import Channel, Pending
from isp.comm.cargo import Cargo
from isp.parallel.layout import ParameterLayout
from isp.weights.gathers import piece_shape, pieces, trimmed
from isp.weights.pool import Lease, MemoryPool

__all__ = ["GradientReducer", "GradientSink", "ParameterGradients"]


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
        """The shard; waits for it."""
        return trimmed(self.pending.wait(), self.layout)

    def release(self) -> None:
        """Give the buffers back, that of the shard too."""
        for lease in self.leases:
            lease.release()


class _InFlight(NamedTuple):
    parameter: nn.Parameter
    sum: _Sum
    num_bytes: int
    """Of the full gradient, which is kept until the transfer is over."""


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
        self.dtype = dtype
        self.max_bytes_in_flight = max_bytes_in_flight
        self.sink: GradientSink = ParameterGradients()
        self._in_flight: deque[_InFlight] = deque()
        self._bytes_in_flight = 0

    def launch(
        self, parameter: nn.Parameter, grad: Tensor, layout: ParameterLayout, *, cargo: Cargo
    ) -> None:
        """Set the sum of the full `grad` over the group on its way to the sink, as promised."""
        if self.channel.size == 1:
            self.sink.add(parameter, grad)
            return
        while self._in_flight and self._bytes_in_flight + grad.nbytes > self.max_bytes_in_flight:
            self._deliver_oldest()
        self._in_flight.append(_InFlight(parameter, self._send(grad, layout, cargo), grad.nbytes))
        self._bytes_in_flight += grad.nbytes

    def reduce(self, grad: Tensor, layout: ParameterLayout, *, cargo: Cargo) -> Tensor:
        """This rank's shard of the sum of the full `grad` over the group; waits for it."""
        if self.channel.size == 1:
            return grad
        sent = self._send(grad, layout, cargo)
        shard = sent.shard().clone()
        sent.release()
        return shard

    @property
    def bytes_in_flight(self) -> int:
        """Of the full gradients that are kept until their sums have arrived."""
        return self._bytes_in_flight

    def finish(self) -> None:
        """Wait for all that is in flight and deliver it."""
        while self._in_flight:
            self._deliver_oldest()

    def _send(self, grad: Tensor, layout: ParameterLayout, cargo: Cargo) -> _Sum:
        dtype = grad.dtype if self.dtype is None else torch.promote_types(grad.dtype, self.dtype)
        sent = pieces(grad, layout)
        leases = [self.pool.lease(piece_shape(layout), dtype, grad.device)]
        received = None
        if self.channel.sums_locally:
            leases.append(self.pool.lease(tuple(sent.shape), sent.dtype, sent.device))
            received = leases[1].tensor
        pending = self.channel.reduce_scatter_into(
            leases[0].tensor, sent, received=received, cargo=cargo
        )
        return _Sum(layout, pending, leases)

    def _deliver_oldest(self) -> None:
        item = self._in_flight.popleft()
        self._bytes_in_flight -= item.num_bytes
        self.sink.add(item.parameter, item.sum.shard())
        item.sum.release()
