"""Weights on their way and weights that are there: what a communicator holds between acts.

[Note: Pieces] A dim of N on p ranks is cut as `torch.chunk` cuts: ceil(N / p) each, the last ranks
less or none. Collectives move equal pieces, so short pieces travel padded, and the padding, which
lies behind the last one, is cut off as a view. Rows (dim 0) lie one piece behind the other in the
full tensor: they are gathered where they are read and sent from where they are. Any other dim costs
a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from isp.comm import Channel, Pending, streams
from isp.comm.cargo import Cargo, Purpose
from isp.parallel.layout import ParameterLayout
from isp.weights.declare import WeightHolder
from isp.weights.pool import Lease, MemoryPool

__all__ = ["GatheredLayer", "WeightGatherer", "piece_shape", "pieces", "trimmed"]


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
    no copy. Elsewhere see [Note: Pieces].
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
                lease.tensor, piece, cargo=Cargo(Purpose.WEIGHT, layer.name, local)
            )
        return _Full(shard, version, pending.then(lambda full: joined(full, layout)), lease)


def _version(shard: nn.Parameter) -> tuple[int, int]:
    """A value that changes with each visible write [Note: Versions]."""
    return shard._version, _optimizer_steps().count


@dataclass
class _OptimizerSteps:
    """The count of optimizers' steps: fused ones change weights without torch counting it.

    A clock that no run owns, like torch's hooks on all optimizers themselves.
    """

    count: int = 0


@cache
def _optimizer_steps() -> _OptimizerSteps:
    """The steps of all torch optimizers of this process since the first call."""
    steps = _OptimizerSteps()

    def stepped(*_: Any) -> None:
        steps.count += 1

    register_optimizer_step_post_hook(stepped)
    return steps


def piece_shape(layout: ParameterLayout) -> tuple[int, ...]:
    """Shape of each rank's piece as it travels, padding included, with the cut dim in front."""
    length = math.ceil(layout.global_shape[layout.dim] / layout.parts)
    rest = layout.global_shape[: layout.dim] + layout.global_shape[layout.dim + 1 :]
    return (length, *rest)


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """x [n, ..] with zeros behind it, [num_rows, ..]; x itself if it has as many."""
    if x.shape[0] == num_rows:
        return x.contiguous()
    padded = x.new_zeros(num_rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded


def pieces(full: Tensor, layout: ParameterLayout) -> Tensor:
    """A full tensor as its p padded pieces, one behind the other; itself if it is cut by rows."""
    return pad_rows(full.movedim(layout.dim, 0), layout.parts * piece_shape(layout)[0])


def joined(gathered: Tensor, layout: ParameterLayout) -> Tensor:
    """The full tensor from its padded pieces, the dual of `pieces`."""
    return gathered[: layout.global_shape[layout.dim]].movedim(0, layout.dim)


def trimmed(piece: Tensor, layout: ParameterLayout) -> Tensor:
    """This rank's shard from its padded piece."""
    return piece.movedim(0, layout.dim).narrow(layout.dim, 0, layout.local_shape[layout.dim])
