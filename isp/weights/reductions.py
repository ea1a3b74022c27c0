"""Gradients on their way: reduce-scatters in flight, and where they end."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from isp.comm import Channel, Pending
from isp.weights.pool import Lease, MemoryPool
from isp.weights.rows import pad_rows, rows_per_rank

__all__ = ["GradientReducer", "GradientSink", "ParameterGradients"]


class GradientSink(Protocol):
    """Where reduced gradients end (`isp.optim.MainGradients` is one)."""

    def promise(self, parameter: nn.Parameter) -> None:
        """Announce one `add`."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient; the tensor may not be kept."""


class ParameterGradients:
    """The sink of those who have no other: adds into `parameter.grad`, as autograd would."""

    def promise(self, parameter: nn.Parameter) -> None:
        pass

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        gradient = gradient.to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad += gradient


class _InFlight(NamedTuple):
    parameter: nn.Parameter
    num_rows: int
    """Rows of this rank's shard; what lies behind is padding."""
    pending: Pending
    lease: Lease
    num_bytes: int
    """Of the full gradient, which is kept until the transfer is over."""


class GradientReducer:
    """Sums full gradients over the weight group, each rank keeping its rows, in order of launch.

    A gradient is sent from where it was computed if its rows divide, else from a padded copy.
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

    def launch(self, parameter: nn.Parameter, grad: Tensor, *, label: str) -> None:
        """Set the sum of `grad` [N, ..] over the group on its way to the sink."""
        self.sink.promise(parameter)
        if self.channel.size == 1:
            self.sink.add(parameter, grad)
            return
        while self._in_flight and self._bytes_in_flight + grad.nbytes > self.max_bytes_in_flight:
            self._deliver_oldest()
        chunk = rows_per_rank(grad.shape[0], self.channel.size)
        dtype = grad.dtype if self.dtype is None else torch.promote_types(grad.dtype, self.dtype)
        lease = self.pool.lease((chunk, *grad.shape[1:]), dtype, grad.device)
        source = pad_rows(grad.contiguous(), self.channel.size * chunk)
        pending = self.channel.reduce_scatter_into(lease.tensor, source, label=label)
        self._in_flight.append(
            _InFlight(parameter, parameter.shape[0], pending, lease, grad.nbytes)
        )
        self._bytes_in_flight += grad.nbytes

    def finish(self) -> None:
        """Wait for all that is in flight and deliver it."""
        while self._in_flight:
            self._deliver_oldest()

    def abandon(self) -> None:
        """Drop what is in flight, after a failure; buffers that a transfer may use are not reused."""
        self._in_flight.clear()
        self._bytes_in_flight = 0

    def _deliver_oldest(self) -> None:
        item = self._in_flight.popleft()
        self._bytes_in_flight -= item.num_bytes
        self.sink.add(item.parameter, item.pending.wait()[: item.num_rows])
        item.lease.release()
