"""Causal depthwise convolution over sequences that are split over ranks, document by document.

T tokens of this rank, C channels, K taps, n slices of documents on this rank

Each slice needs the `reach` = (K - 1) * dilation tokens before it in its document, its halo. What
other ranks have of it is fetched by the same route as keys for a window of reach + 1 tokens. All
slices are convolved in one call, each after its halo, or after zeros at the begin of a document.

    own [T, C] --halo, all-to-all--> [L, C] --zeros--> [L + .., C] --convolution--> own [T, C]

backward   the gradient of the halo returns by the transposed all-to-all and is added to that of
           the rank that has the tokens
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from isp.core.attention.all_to_all import exchanged
from isp.core.attention.context_parallel.route import KeyExchange
from isp.core.autograd import joined
from isp.core.comm import pinned_memory
from isp.core.comm.tag import Purpose, Tag
from isp.core.mixers import kernels
from isp.core.mixers.placement import Placement

__all__ = ["convolve", "convolve_alone"]


def convolve_alone(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int = 1) -> Tensor:
    """Convolve x [B, S, C] with weight [C, K] and bias [C] -> [B, S, C]; each row is a document."""
    reach = (weight.shape[1] - 1) * dilation
    return _convolved(F.pad(x, (0, 0, reach, 0)), weight, bias, dilation)


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, placement: Placement, dilation: int = 1
) -> Tensor:
    """Convolve this rank's tokens x [T, C] with weight [C, K] and bias [C] -> [T, C]."""
    reach = (weight.shape[1] - 1) * dilation
    if not reach:
        return _convolved(x[None], weight, bias, dilation)[0]
    route = placement.halo(reach)
    if not route.is_local:
        tag = Tag(Purpose.HALO, tensor="convolution.halo")
        exchange = KeyExchange(placement.channel, route.on(x.device), tag)
        (x,) = exchanged(exchange, x.contiguous())
    # Without tokens nothing is convolved. But the exchange in backward is a collective, so return
    # the exchanged x: backward then reaches the exchange, and weight and bias get zero gradients.
    if not len(x):
        return joined(x, weight, bias)
    rows, kept = _layout(placement, reach, x.device)
    # Index 0 of this tensor has zeros, which `rows` selects for tokens before a document's begin.
    padded = torch.cat((x.new_zeros(1, x.shape[1]), x)).index_select(0, rows)
    return _convolved(padded[None], weight, bias, dilation)[0].index_select(0, kept)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, dilation: int) -> Tensor:
    """Convolve x [B, reach + S, C] -> [B, S, C] by a kernel, or in the weight's dtype by torch."""
    found = kernels.causal_convolution(x, weight, bias, dilation)
    if found is not None:
        return found
    out = F.conv1d(
        x.transpose(1, 2).to(weight.dtype),
        weight.unsqueeze(1),
        bias,
        dilation=dilation,
        groups=weight.shape[0],
    )
    return out.transpose(1, 2).to(x.dtype)


def _layout(placement: Placement, reach: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two index tensors: of the convolution's inputs, and of the results to keep.

    The first selects inputs from a tensor [1 + L, C] of zeros at index 0 and the tokens that
    arrived. The second selects this rank's tokens from the result, which is `reach` shorter than
    the input.
    """
    found: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = placement.layouts
    if (reach, device) not in found:
        mask = placement.halo(reach).mask
        tokens = np.array(mask.lengths, np.int64)
        seen = np.array(mask.key_lengths, np.int64)
        size = tokens + reach  # number of inputs for each slice
        start = np.cumsum(size) - size
        place = np.arange(size.sum())
        of = np.repeat(np.arange(len(size)), size)  # index of the slice of each input
        # Index among the tokens that the slice sees; negative before the begin of its document.
        inside = place - start[of] - (size - seen)[of]
        first = np.cumsum(seen) - seen
        rows = np.where(inside < 0, 0, 1 + first[of] + inside)
        kept = np.flatnonzero(place - start[of] >= reach) - reach
        found[reach, device] = (
            pinned_memory.send(torch.from_numpy(rows.astype(np.int32)), device),
            pinned_memory.send(torch.from_numpy(kept.astype(np.int32)), device),
        )
    return found[reach, device]
