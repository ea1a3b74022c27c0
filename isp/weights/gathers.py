"""Weights on their way and weights that are there: what a communicator holds between acts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from isp.comm import Channel, Pending, streams
from isp.weights.declare import WeightHolder
from isp.weights.optimizer_steps import optimizer_steps
from isp.weights.pool import Lease, MemoryPool
from isp.weights.rows import joined, pad_rows, piece_shape

__all__ = ["GatheredLayer", "WeightGatherer"]


@dataclass(slots=True, eq=False)
class _Full:
    """A full tensor, flying or there.

    [Note: Versions] torch counts the in-place changes of a tensor, but not those of fused
    optimizers. A full tensor is stale if since the launch of its gather its shard has changed or
    any optimizer has stepped: it is not used, but gathered anew. What is written through `.data`
    nobody sees: that is for `begin` and `drain`.
    """

    shard: nn.Parameter
    version: tuple[int, int]
    pending: Pending
    lease: Lease | None

    def drop(self) -> None:
        """Wait for the transfer, if it is still under way, and give the buffer back."""
        self.pending.wait()
        if self.lease is not None:
            self.lease.release()


@dataclass(slots=True, eq=False)
class GatheredLayer:
    """The full weight of a layer, and its bias where one is read; there until all let go of it."""

    _weight: _Full
    _bias: _Full | None
    _holders: int = 1

    @property
    def stale(self) -> bool:
        """Whether a shard may have changed since its gather was launched."""
        return any(_version(full.shard) != full.version for full in self._parts)

    @property
    def _parts(self) -> tuple[_Full, ...]:
        return (self._weight,) if self._bias is None else (self._weight, self._bias)

    @property
    def has_bias(self) -> bool:
        """Whether the bias is here, too."""
        return self._bias is not None

    def hold(self) -> GatheredLayer:
        """Itself, with one more that has to let go of it."""
        self._holders += 1
        return self

    def let_go(self) -> None:
        """The last one waits for what is under way, and gives the buffers back."""
        self._holders -= 1
        if self._holders == 0:
            for full in self._parts:
                full.drop()

    def weight(self) -> Tensor:
        """The full weight; waits for it."""
        return self._weight.pending.wait()

    def bias(self) -> Tensor:
        """The full bias; waits for it."""
        assert self._bias is not None
        return self._bias.pending.wait()


class WeightGatherer:
    """Launches gathers of shards into buffers of a pool.

    Where the rows divide, the shard itself is sent and the buffer itself is what the matmul reads:
    no copy. Elsewhere see `isp.weights.rows`.
    """

    def __init__(
        self, channel: Channel, pool: MemoryPool, stream: streams.Stream | None = None
    ) -> None:
        self.channel = channel
        self.pool = pool
        self.stream = stream

    def launch(self, layer: WeightHolder, *, with_bias: bool) -> GatheredLayer:
        """Set the full weight of `layer` on its way, and its bias if asked for."""
        bias = None
        weight = self._launch(layer.weight, layer, "weight")
        if with_bias:
            assert layer.bias is not None
            bias = self._launch(layer.bias, layer, "bias")
        return GatheredLayer(weight, bias)

    def _launch(self, shard: nn.Parameter, layer: WeightHolder, local: str) -> _Full:
        version, source = _version(shard), shard.detach()
        if self.channel.size == 1:
            return _Full(shard, version, Pending.ready(source), None)
        layout = layer.layouts[local]
        rows, *rest = piece_shape(layout)
        # [Note: Gather stream] A gather waits for what is on its own stream: the last use of its
        # buffer, and what published the weight. It does not wait for compute queued before it.
        with streams.on(self.stream):
            shape = (self.channel.size * rows, *rest)
            lease = self.pool.lease(shape, shard.dtype, shard.device)
            piece = pad_rows(source.movedim(layout.dim, 0), rows)
            pending = self.channel.all_gather_into(
                lease.tensor, piece, label=f"{layer.name}.{local}"
            )
        return _Full(shard, version, pending.then(lambda full: joined(full, layout)), lease)


def _version(shard: nn.Parameter) -> tuple[int, int]:
    """What changes with each write that can be seen [Note: Versions]."""
    return shard._version, optimizer_steps().count
