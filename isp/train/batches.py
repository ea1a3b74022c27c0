"""Micro-batches on every rank of a sequence group, read by the first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isp.comm import Channel
from isp.comm.cargo import Cargo, Purpose
from isp.data.batch import MicroBatch

__all__ = ["share_micro_batches", "slice_sequence"]


def share_micro_batches(
    read: Sequence[MicroBatch] | None,
    *,
    shape: tuple[int, int],
    micro_num: int,
    packed: bool,
    tensor: Channel,
    device: torch.device,
) -> list[MicroBatch]:
    """The micro-batches of a step on all ranks of the tensor group, in one broadcast.

    `read` on the group's first rank, None on the others; each is of `shape` (rows, tokens).
    """
    payload = torch.empty(micro_num, 3, *shape, dtype=torch.int64, device=device)
    if read is not None:
        fields = [torch.stack((b.tokens, b.labels, b.positions)) for b in read]
        payload.copy_(torch.stack(fields))
    tensor.broadcast_(payload, cargo=Cargo(Purpose.DATA, tensor="data")).wait()
    return [_micro_batch(*fields, packed=packed) for fields in payload]


def _micro_batch(tokens: Tensor, labels: Tensor, positions: Tensor, *, packed: bool) -> MicroBatch:
    """Documents begin where positions restart, so their bounds need not travel."""
    cu_seqlens = None
    if packed:
        starts = (positions[0] == 0).nonzero().squeeze(-1)
        cu_seqlens = torch.cat((starts, starts.new_tensor([positions.shape[1]]))).to(torch.int32)
    return MicroBatch(tokens, labels, positions, cu_seqlens)


def slice_sequence(batch: MicroBatch, channel: Channel) -> MicroBatch:
    """This rank's S/p tokens of each row; `cu_seqlens` stays that of the full row."""

    def own(x: Tensor) -> Tensor:
        return x.chunk(channel.size, dim=1)[channel.rank].contiguous()  # [B, S/p]

    return MicroBatch(own(batch.tokens), own(batch.labels), own(batch.positions), batch.cu_seqlens)
