"""A mesh in one process whose other ranks are mirror images, over real process groups.

Each channel has a process group of one rank, and sends to itself what all of its p ranks would
send: p equal shards, or a sum of p equal gradients. So on one GPU NCCL runs the transfers on its
own streams, and all code above them runs as on several ranks. The training of such a world has no
meaning, but it is equal on every device, so it can be compared in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm import Channel, CommLog, Mesh, Pending, streams
from isp.core.comm.tag import UNNAMED, Tag
from isp.core.mesh import Axis

__all__ = ["MirrorMesh", "one_rank"]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Enter a world of this process alone, over NCCL for a GPU."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


class MirrorChannel(Channel):
    """Rank `rank` of `size` ranks with equal data."""

    def __init__(
        self, group: dist.ProcessGroup, size: int, rank: int, name: str, log: CommLog
    ) -> None:
        super().__init__(group, name=name, log=log, sum_locally=False)
        self.size, self.rank = size, rank

    def all_gather_into(self, out: Tensor, x: Tensor, *, tag: Tag = UNNAMED) -> Pending:
        sent = x.reshape(1, -1).repeat(self.size, 1)
        return self._to_itself(_all_gather, "all_gather", out, sent, tag)

    def reduce_scatter_into(
        self, out: Tensor, x: Tensor, *, received: Tensor | None = None, tag: Tag = UNNAMED
    ) -> Pending:
        # the sum of this rank's part of `size` equal gradients
        sent = x.reshape(self.size, -1)[self.rank].to(out.dtype) * self.size
        return self._to_itself(_reduce_scatter, "reduce_scatter", out, sent, tag)

    def all_to_all_into(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_rows: Sequence[int] | None = None,
        in_rows: Sequence[int] | None = None,
        tag: Tag = UNNAMED,
    ) -> Pending:
        assert in_rows is None, "ranks that do the same send each other equal pieces"
        # each of the equal ranks sends the piece that is for this rank
        sent = x.reshape(self.size, -1)[self.rank].repeat(self.size)
        return self._to_itself(dist.all_to_all_single, "all_to_all", out, sent, tag)

    def all_reduce_(self, x: Tensor, *, op: str = "sum", tag: Tag = UNNAMED) -> Pending:
        if op == "sum":
            x.mul_(self.size)  # the sum of `size` equal tensors
        group = self.group
        return self._launch(
            "all_reduce",
            tag,
            x.nbytes,
            lambda: dist.all_reduce(x, group=group, async_op=True),
            x,
            keep=(x,),
        )

    def _to_itself(
        self, send: Callable[..., dist.Work], kind: str, out: Tensor, sent: Tensor, tag: Tag
    ) -> Pending:
        return self._launch(
            kind,
            tag,
            sent.nbytes,
            lambda: send(out.view(-1), sent.view(-1), group=self.group, async_op=True),
            out,
            keep=(sent, out),
        )


class MirrorMesh(Mesh):
    """The channels of a rank of any topology, in a world of `one_rank`."""

    def _make_group(self, axis: Axis, name: str) -> dist.ProcessGroup | None:
        if len(self.topology.group_of(axis, self.rank)) == 1:
            return None
        options = streams.nccl_options() if dist.get_backend() == "nccl" else None
        made: dist.ProcessGroup = dist.new_group([0], pg_options=options, group_desc=name)
        return made

    def _add(
        self,
        axis: Axis,
        name: str,
        group: dist.ProcessGroup | None,
        *,
        sum_locally: bool | None = None,
    ) -> Channel:
        channel = Channel(None, name=name, log=self.log)
        if group is not None:
            ranks = self.topology.group_of(axis, self.rank)
            channel = MirrorChannel(group, len(ranks), ranks.index(self.rank), name, self.log)
            self.members[name] = tuple(ranks)
        self.opened.append(channel)
        return channel
