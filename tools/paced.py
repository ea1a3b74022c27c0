"""Modelled links and modelled compute for benchmarks: both sleep, so ranks need few cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isp.core.comm import Channel
from isp.core.mesh.phase import Phase
from isp.core.weights.gradients import ProductSink
from isp.core.weights.wp_communicator import FullWeights, WeightGradientRoute, WPCommunicator
from isp.models.build import BuiltModel
from isp.models.runtime.fused_linears import FusedLinears
from isp.models.runtime.sharded_modules import ShardedLinear

__all__ = ["Link", "Paced", "linears_of"]


@dataclass
class Link:
    """A modelled link of one rank: transfers of the channels that it slows run one after another.

    A transfer of n bytes launched at time t ends at max(t, end of the transfer before it) + latency
    + n / bandwidth, or when the real transfer ends, whichever is later. A wait sleeps until then,
    so the cores are free for compute, as with a network card.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    _busy_until: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency_seconds < 0:
            raise ValueError(
                f"a link needs bytes_per_second > 0 and latency_seconds >= 0, got"
                f" {self.bytes_per_second} and {self.latency_seconds}"
            )

    def book(self, num_bytes: int) -> float:
        """Return the end of a transfer of `num_bytes` launched now, in `time.perf_counter`."""
        start = max(time.perf_counter(), self._busy_until)
        self._busy_until = start + self.latency_seconds + num_bytes / self.bytes_per_second
        return self._busy_until

    def slow(self, channels: Iterable[Channel]) -> None:
        """Let the transfers of `channels` queue on this link."""
        for channel in channels:
            channel.arrival = self.book


class Paced(WPCommunicator):
    """Wraps a communicator: sleeps for `seconds(layer)` for each product of a layer and its weight.

    A product with the weight sleeps when the layer has used its gathered weight. A weight gradient
    sleeps in `grad_hook`, before it is reduced. A weight gradient that is added straight into the
    main gradient (weights of one rank: no `grad_hook`) does not sleep.
    """

    def __init__(self, communicator: WPCommunicator, seconds: Callable[[Any], float]) -> None:
        self.communicator = communicator
        self.gathers_weights = communicator.gathers_weights
        self.seconds = seconds

    @contextmanager
    def unshard(
        self, module: Any, phase: Phase, weight: Tensor, bias: Tensor | None = None
    ) -> Iterator[FullWeights]:
        with self.communicator.unshard(module, phase, weight, bias) as full:
            yield full
            time.sleep(self.seconds(module))

    @property
    def route(self) -> WeightGradientRoute | None:  # type: ignore[override]
        """`route` of the wrapped communicator: it takes the factors of weight gradients."""
        return self.communicator.route

    @property
    def product_sink(self) -> ProductSink | None:  # type: ignore[override]
        """`product_sink` of the wrapped communicator: it multiplies weight gradients."""
        return self.communicator.product_sink

    def pass_by(self, key: Hashable) -> None:
        self.communicator.pass_by(key)

    def grad_hook(self, grad: Tensor, *, module: Any, **place: Any) -> Tensor | None:
        time.sleep(self.seconds(module))
        return self.communicator.grad_hook(grad, module=module, **place)


def linears_of(built: BuiltModel) -> Iterator[ShardedLinear | FusedLinears]:
    """Yield the linears of this rank's stage modules, in forward order."""
    for use in (u for chunk in built.chunks for block in chunk.weight_blocks() for u in block.uses):
        if isinstance(use.layer, ShardedLinear | FusedLinears):
            yield use.layer
