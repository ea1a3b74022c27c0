"""Symmetric memory: rows in GPU memory that all ranks of a machine read and write directly.

N rows, n of them in use, D columns; p ranks. torch's kernels for it run on the current stream,
allocate nothing and synchronize the ranks on the device, so a CUDA graph can capture them. The
channel's log does not record these transfers. Nothing in this file has run on a GPU yet.
See [Note: Which kernels] in docs/design/notes/communication.md.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from isp.core.comm.channel import Channel
from isp.core.comm.tag import Tag
from isp.core.torch_private import allocate_symmetric, has_multicast, share_symmetric

__all__ = ["SymmetricRows", "why_no_symmetric_rows"]

_ALIGNMENT = 16
"""Bytes that a thread of torch's kernels moves at a time."""


def why_no_symmetric_rows(
    channel: Channel, columns: int, *, device: torch.device, dtype: torch.dtype
) -> str:
    """Return the reason why the channel's ranks cannot use `SymmetricRows`; empty if they can."""
    if device.type != "cuda":
        return f"it is memory of CUDA devices, and this one is {device}"
    if channel.size not in (2, 4, 8):
        return f"torch has kernels for 2, 4 and 8 ranks, and there are {channel.size}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"torch has kernels for bfloat16 and float32, not {dtype}"
    if columns * dtype.itemsize % _ALIGNMENT:
        return f"rows have to be multiples of {_ALIGNMENT} bytes, and {columns} x {dtype} is not"
    if not _on_one_machine(channel):
        return "the ranks are on several machines"
    index = torch.cuda.current_device() if device.index is None else device.index
    if not has_multicast(index):
        return "the devices have no multicast (Hopper or newer, behind NVSwitch)"
    return ""


def _on_one_machine(channel: Channel) -> bool:
    """Return whether all ranks of the channel are on one machine, as torchrun placed them."""
    assert channel.group is not None
    ranks = dist.get_process_group_ranks(channel.group)
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return len({rank // per_machine for rank in ranks}) == 1


class SymmetricRows:
    """A tensor `rows` [N, D] on each rank, which all ranks of the channel can read and write.

    The constructor is a collective over the channel.
    """

    def __init__(
        self, channel: Channel, rows: int, columns: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert channel.group is not None
        self.rows = allocate_symmetric(rows, columns, dtype=dtype, device=device)
        self._handle = share_symmetric(self.rows, channel.group)
        self._group_name = channel.group.group_name  # torch's kernels find the buffers by it
        self._ops = torch.ops.symm_mem

    def reduce_scatter(self, x: Tensor, out: Tensor, _: Tag) -> None:
        """Sum x [n, D] over the ranks and write this rank's slice into out [n/p, D].

        On each rank, x must be the view of the first n rows of `self.rows`.
        """
        self._ops.reduce_scatter_out(x.view(-1), self._group_name, False, out.view(-1))

    def all_gather(self, x: Tensor, out: Tensor, _: Tag) -> None:
        """Gather the ranks' x [n/p, D] into out [n, D].

        On each rank, `out` must be the view of the first n rows of `self.rows`, and x this rank's
        slice of `out`.
        """
        self._ops.multimem_all_gather_out(x, self._group_name, out)

    def all_reduce(self, x: Tensor, _: Tag) -> None:
        """Sum x [n, D], the view of the first n rows of `self.rows`, over the ranks, in place."""
        self._ops.multimem_all_reduce_(x, "sum", self._group_name)
