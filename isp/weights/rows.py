"""Weights split by rows over a group: joined to the full weight, and full gradients split again.

A weight of N rows on p ranks is cut as `torch.chunk` cuts: ceil(N / p) rows each, the last ranks
fewer or none. Collectives move equal pieces, so short shards travel padded; all padding lies behind
the last row and is cut off as a view.
"""

from __future__ import annotations

import math

from torch import Tensor

from isp.comm import Channel, Pending

__all__ = ["gather_rows", "reduce_rows"]


def gather_rows(channel: Channel, shard: Tensor, num_rows: int, *, label: str = "") -> Pending:
    """The full tensor from its shards: [n, ..] -> [N, ..] with N = `num_rows`."""
    if channel.size == 1:
        return Pending.ready(shard)
    chunk = math.ceil(num_rows / channel.size)
    out = shard.new_empty(channel.size * chunk, *shard.shape[1:])
    pending = channel.all_gather_into(out, _pad_rows(shard, chunk), label=label)
    return pending.then(lambda full: full[:num_rows])


def reduce_rows(channel: Channel, grad: Tensor, *, label: str = "") -> Pending:
    """This rank's rows of the sum of the ranks' gradients: [N, ..] -> [n, ..]."""
    if channel.size == 1:
        return Pending.ready(grad)
    num_rows, chunk = grad.shape[0], math.ceil(grad.shape[0] / channel.size)
    out = grad.new_empty(chunk, *grad.shape[1:])
    padded = _pad_rows(grad.contiguous(), channel.size * chunk)
    pending = channel.reduce_scatter_into(out, padded, label=label)
    begin = min(num_rows, channel.rank * chunk)
    return pending.then(lambda mine: mine[: min(chunk, num_rows - begin)])


def _pad_rows(x: Tensor, num_rows: int) -> Tensor:
    if x.shape[0] == num_rows:
        return x
    padded = x.new_zeros(num_rows, *x.shape[1:])
    padded[: x.shape[0]] = x
    return padded
